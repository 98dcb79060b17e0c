//! Hashes of sub-graphs that do not depend on names.

use std::collections::HashMap;

use model::op::Op;
use model::{Dim, LaunchPlan, Tensor, TensorData, ValueId};
use sha2::{Digest, Sha256};

use crate::ir::Graph;
use model::dim::shape_text;

/// A hash of everything that a value is computed from.
pub type Hash = [u8; 32];

/// For every node the hash of everything its first output is computed from: operators, attributes,
/// constants and the types of the model's inputs. Equal hashes mean equal computations, independent
/// of names.
pub fn subgraph_hashes(graph: &Graph) -> Vec<Hash> {
    let inputs = graph.inputs.iter().map(|id| {
        let value = graph.value(*id);
        (*id, format!("{} {}", value.dtype, rank_text(graph, *id)))
    });
    let mut known = input_hashes(inputs);
    let nodes = graph.nodes.iter();
    nodes
        .map(|node| {
            let operation =
                Operation { op: &node.op, inputs: &node.inputs, outputs: &node.outputs };
            operation.hash(&mut known, |id| graph.constant(id))
        })
        .collect()
}

/// The same for the steps of a plan. Hashes of plans and of graphs are not comparable.
pub fn plan_hashes(plan: &LaunchPlan) -> Vec<Hash> {
    let mut symbols: Vec<&Dim> = Vec::new();
    let mut inputs = Vec::with_capacity(plan.inputs.len());
    for id in &plan.inputs {
        let info = plan.value(*id);
        let mut text = format!("{}", info.dtype);
        for dim in info.shape.iter().flatten() {
            match dim {
                Dim::Symbol(_) | Dim::Expr(_) => {
                    let number = symbols.iter().position(|known| *known == dim);
                    let number = number.unwrap_or_else(|| {
                        symbols.push(dim);
                        symbols.len() - 1
                    });
                    text.push_str(&format!(" ${number}"));
                }
                dim => text.push_str(&format!(" {dim}")),
            }
        }
        text.push_str(if info.shape.is_some() { "" } else { " any" });
        inputs.push((*id, text));
    }
    let mut known = input_hashes(inputs.into_iter());
    let constants: HashMap<ValueId, &Tensor> =
        plan.constants.iter().map(|(id, tensor)| (*id, tensor)).collect();
    let steps = plan.steps.iter();
    steps
        .map(|step| {
            let operation =
                Operation { op: &step.op, inputs: &step.inputs, outputs: &step.outputs };
            operation.hash(&mut known, |id| constants.get(&id).copied())
        })
        .collect()
}

fn input_hashes(inputs: impl Iterator<Item = (ValueId, String)>) -> HashMap<ValueId, Hash> {
    let hash = |(position, (id, text)): (usize, (ValueId, String))| {
        (id, Sha256::digest(format!("input {position} {text}")).into())
    };
    inputs.enumerate().map(hash).collect()
}

/// An operator with its operands, in a graph or in a plan.
struct Operation<'a> {
    op: &'a Op,
    inputs: &'a [Option<ValueId>],
    outputs: &'a [Option<ValueId>],
}

impl Operation<'_> {
    /// Its hash; also records the hashes of its outputs.
    fn hash<'c>(
        &self,
        known: &mut HashMap<ValueId, Hash>,
        constant: impl Fn(ValueId) -> Option<&'c Tensor>,
    ) -> Hash {
        let mut hasher = Sha256::new();
        hasher.update(format!("{:?}", self.op));
        hasher.update((self.inputs.len() as u64).to_le_bytes());
        for input in self.inputs {
            let Some(id) = input else {
                hasher.update([0]);
                continue;
            };
            hasher.update([1]);
            let hash = *known.entry(*id).or_insert_with(|| match constant(*id) {
                Some(tensor) => tensor_hash(tensor),
                None => [0; 32],
            });
            hasher.update(hash);
        }
        let hash: Hash = hasher.finalize().into();
        for (position, output) in self.outputs.iter().enumerate() {
            if let Some(id) = output {
                let own = Sha256::new().chain_update(hash).chain_update([position as u8]);
                known.insert(*id, own.finalize().into());
            }
        }
        hash
    }
}

/// The shape with symbols numbered in order of appearance: their names do not matter.
fn rank_text(graph: &Graph, id: ValueId) -> String {
    let symbols = graph.symbols();
    let mut text = shape_text(graph.shape(id));
    for (index, symbol) in symbols.iter().enumerate() {
        text = text
            .split_inclusive([',', ']'])
            .map(|part| {
                let (name, end) = part.split_at(part.len() - 1);
                let name = name.trim_start_matches('[');
                if name == symbol { format!("${index}{end}") } else { format!("{name}{end}") }
            })
            .collect();
    }
    text
}

fn tensor_hash(tensor: &Tensor) -> Hash {
    let mut hasher = Sha256::new();
    hasher.update(format!("{} {:?}", tensor.dtype(), tensor.shape()));
    match tensor.data() {
        TensorData::Raw(raw) => hasher.update(raw),
        TensorData::Strings(strings) => {
            for text in strings.iter() {
                hasher.update((text.len() as u64).to_le_bytes());
                hasher.update(text);
            }
        }
    }
    hasher.finalize().into()
}
