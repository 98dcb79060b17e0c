//! The IR: typed values, and nodes in an order that respects every dependency.

use std::collections::BTreeMap;

use model::op::Op;
use model::{DataType, NarrowType, Tensor, ValueId};

use crate::constants::Constants;
use crate::content;
use crate::infer::{self, Fact, InferError, ValueKind};
use model::dim::SymDim;

/// A value and its inferred properties.
#[derive(Clone, Debug)]
pub struct Value {
    /// The name in the source model, or one derived from it.
    pub name: String,
    /// Element type.
    pub dtype: DataType,
    /// Dimensions; `None` when not even the rank is known.
    pub shape: Option<Vec<SymDim>>,
    /// The elements in row-major order, when they are few and integers.
    pub content: Option<Vec<SymDim>>,
    /// What the bytes are, when they are not themselves. Only operators of the file ask for it.
    pub narrow: Option<NarrowType>,
    /// A tensor, or tensors.
    pub kind: ValueKind,
}

/// One operator with its operands.
#[derive(Clone, Debug)]
pub struct GraphNode {
    /// The name in the source model, or one derived from it.
    pub name: String,
    /// What is computed.
    pub op: Op,
    /// Operands in the operator's order; absent optional ones are `None`.
    pub inputs: Vec<Option<ValueId>>,
    /// Results in the operator's order; unused ones are `None`.
    pub outputs: Vec<Option<ValueId>>,
}

/// A model. Every node comes after those it depends on, and every value is an input, a constant or
/// the output of exactly one node.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// The name in the source model.
    pub name: String,
    /// Every value by [`ValueId`]; some may be unused.
    pub values: Vec<Value>,
    /// The operators.
    pub nodes: Vec<GraphNode>,
    /// The model's inputs, in its order.
    pub inputs: Vec<ValueId>,
    /// The model's outputs, in its order. Their values carry the names the model gave them.
    pub outputs: Vec<ValueId>,
    /// Weights and other constants.
    pub constants: Constants,
    /// What control flow runs, by the number in its operator. A body's inputs are its arguments,
    /// then what it captures: the last operands of its node.
    pub bodies: BTreeMap<u32, Vec<Graph>>,
    /// What a person should know of the file: how inputs and outputs are carried that are no
    /// tensors, and which names of dimensions are not taken at their word.
    pub warnings: Vec<String>,
}

impl Graph {
    /// The properties of `id`.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// The elements of `id`, when it is a constant.
    pub fn constant(&self, id: ValueId) -> Option<&Tensor> {
        self.constants.get(id)
    }

    /// The dimensions of `id`, when the rank is known.
    pub fn shape(&self, id: ValueId) -> Option<&[SymDim]> {
        self.value(id).shape.as_deref()
    }

    /// Adds a value that some node will write.
    pub fn add_value(&mut self, name: impl Into<String>, fact: Fact) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        let Fact { dtype, shape, content, narrow, kind } = fact;
        self.values.push(Value { name: name.into(), dtype, shape, content, narrow, kind });
        id
    }

    /// Adds a constant.
    pub fn add_constant(&mut self, name: impl Into<String>, tensor: Tensor) -> ValueId {
        let id = self.add_value(name, Fact::of_tensor(&tensor));
        self.constants.insert(id, tensor);
        id
    }

    /// Makes the existing value `id` a constant. The caller removes the node that wrote it.
    pub fn set_constant(&mut self, id: ValueId, tensor: Tensor) {
        let Fact { dtype, shape, content, .. } = Fact::of_tensor(&tensor);
        let value = &mut self.values[id.index()];
        (value.dtype, value.shape, value.content) = (dtype, shape, content);
        self.constants.insert(id, tensor);
    }

    /// The inferred properties of the outputs of `op` on `inputs`.
    pub fn infer(
        &self,
        op: &Op,
        inputs: &[Option<ValueId>],
        outputs: usize,
    ) -> Result<Vec<Fact>, InferError> {
        infer::infer(self, op, inputs, outputs)
    }

    /// Infers every value again, from the inputs on.
    pub fn infer_all(&mut self) -> Result<(), (String, InferError)> {
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            let facts = self
                .infer(&node.op, &node.inputs, node.outputs.len())
                .map_err(|error| (node.name.clone(), error))?;
            let outputs = node.outputs.clone();
            for (id, fact) in outputs.into_iter().zip(facts) {
                if let Some(id) = id {
                    let value = &mut self.values[id.index()];
                    value.dtype = fact.dtype;
                    value.shape = fact.shape;
                    value.content = fact.content;
                }
            }
        }
        Ok(())
    }

    /// For every value the index of the node that writes it.
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut producers = vec![None; self.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for id in node.outputs.iter().flatten() {
                producers[id.index()] = Some(index);
            }
        }
        producers
    }

    /// For every value how often it is read; being an output of the model counts once.
    pub fn reads(&self) -> Vec<usize> {
        let mut reads = vec![0; self.values.len()];
        let operands = self.nodes.iter().flat_map(|node| node.inputs.iter().flatten());
        for id in operands.chain(&self.outputs) {
            reads[id.index()] += 1;
        }
        reads
    }

    /// Makes every reader of `from` read `to` instead. The model's outputs are unchanged.
    pub fn redirect(&mut self, from: ValueId, to: ValueId) {
        for node in &mut self.nodes {
            for input in node.inputs.iter_mut().flatten() {
                if *input == from {
                    *input = to;
                }
            }
        }
    }

    /// The elements of the constant `id` as integers.
    pub fn constant_ints(&self, id: ValueId) -> Option<Vec<i64>> {
        self.constant(id).and_then(content::ints)
    }

    /// The element of the floating-point constant `id`, when it has exactly one.
    pub fn constant_float(&self, id: ValueId) -> Option<f32> {
        let tensor = self.constant(id).filter(|tensor| tensor.len() == 1)?;
        content::floats(tensor)?.first().copied()
    }

    /// The symbols of the inputs' shapes, in order of appearance.
    pub fn symbols(&self) -> Vec<String> {
        let mut symbols: Vec<String> = Vec::new();
        let dims = self.inputs.iter().filter_map(|id| self.shape(*id)).flatten();
        for symbol in dims.flat_map(SymDim::symbols) {
            if !symbols.contains(&symbol) {
                symbols.push(symbol);
            }
        }
        symbols
    }
}
