//! Hashes of sub-graphs that do not depend on names.

use std::collections::HashMap;

use model::{Tensor, TensorData, ValueId};
use sha2::{Digest, Sha256};

use crate::dim::shape_text;
use crate::ir::Graph;

/// For every node the hash of all it computes its first output from: operators, attributes, constants
/// and the types of the model's inputs. Equal hashes mean equal computations, whatever the names.
pub fn subgraph_hashes(graph: &Graph) -> Vec<[u8; 32]> {
    let mut known: HashMap<ValueId, [u8; 32]> = HashMap::new();
    for (position, id) in graph.inputs.iter().enumerate() {
        let value = graph.value(*id);
        let text = format!("input {position} {} {}", value.dtype, rank_text(graph, *id));
        known.insert(*id, Sha256::digest(text).into());
    }
    let mut hashes = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let mut hasher = Sha256::new();
        hasher.update(format!("{:?}", node.op));
        hasher.update((node.inputs.len() as u64).to_le_bytes());
        for input in &node.inputs {
            let Some(id) = input else {
                hasher.update([0]);
                continue;
            };
            hasher.update([1]);
            let hash = *known.entry(*id).or_insert_with(|| match graph.constant(*id) {
                Some(tensor) => tensor_hash(tensor),
                None => [0; 32],
            });
            hasher.update(hash);
        }
        let hash: [u8; 32] = hasher.finalize().into();
        for (position, output) in node.outputs.iter().enumerate() {
            if let Some(id) = output {
                let own = Sha256::new().chain_update(hash).chain_update([position as u8]);
                known.insert(*id, own.finalize().into());
            }
        }
        hashes.push(hash);
    }
    hashes
}

/// The shape with symbols numbered in order of appearance, since their names do not matter either.
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

fn tensor_hash(tensor: &Tensor) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(format!("{} {:?}", tensor.dtype(), tensor.shape()));
    match tensor.data() {
        TensorData::Raw(raw) => hasher.update(raw),
        TensorData::Strings(strings) => {
            for text in strings {
                hasher.update((text.len() as u64).to_le_bytes());
                hasher.update(text);
            }
        }
    }
    hasher.finalize().into()
}
