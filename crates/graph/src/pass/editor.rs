//! A graph that is being rewritten, with its producers and readers kept up to date.

use model::op::{Binary, Op};
use model::{Tensor, ValueId};

use crate::content;
use crate::infer::Fact;
use crate::ir::{Graph, GraphNode};

/// A graph and its indices. Nodes keep their indices until [`Editor::finish`].
pub struct Editor<'a> {
    /// The graph; nodes are changed through the editor only.
    pub graph: &'a mut Graph,
    producers: Vec<Option<usize>>,
    reads: Vec<usize>,
    is_output: Vec<bool>,
    removed: Vec<bool>,
    inserted: Vec<(usize, GraphNode)>,
    changes: usize,
}

impl<'a> Editor<'a> {
    /// Starts rewriting.
    pub fn new(graph: &'a mut Graph) -> Editor<'a> {
        let mut is_output = vec![false; graph.values.len()];
        graph.outputs.iter().for_each(|id| is_output[id.index()] = true);
        let (producers, reads) = (graph.producers(), graph.reads());
        let removed = vec![false; graph.nodes.len()];
        Editor { graph, producers, reads, is_output, removed, inserted: Vec::new(), changes: 0 }
    }

    /// The number of nodes at the start.
    pub fn len(&self) -> usize {
        self.graph.nodes.len()
    }

    /// Whether there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.graph.nodes.is_empty()
    }

    /// Node `index`, unless it was removed.
    pub fn node(&self, index: usize) -> Option<&GraphNode> {
        self.graph.nodes.get(index).filter(|_| !self.removed[index])
    }

    /// The node that writes `id`, with its index.
    pub fn producer(&self, id: ValueId) -> Option<(usize, &GraphNode)> {
        let index = self.producers.get(id.index()).copied().flatten()?;
        self.node(index).map(|node| (index, node))
    }

    /// The operator that writes `id`, with its operands.
    pub fn op(&self, id: ValueId) -> Option<(&Op, &[Option<ValueId>])> {
        self.producer(id).map(|(_, node)| (&node.op, node.inputs.as_slice()))
    }

    /// Whether `id` has one reader and is not an output of the model.
    pub fn is_private(&self, id: ValueId) -> bool {
        self.reads[id.index()] == 1 && !self.is_output[id.index()]
    }

    /// How often nodes read `id`; `None` for an output of the model.
    pub fn readers(&self, id: ValueId) -> Option<usize> {
        (!self.is_output[id.index()]).then_some(self.reads[id.index()])
    }

    /// The number that the scalar constant `id` holds.
    pub fn number(&self, id: ValueId) -> Option<f32> {
        self.graph.constant_float(id)
    }

    /// Whether `id` is a constant of the one element `value`.
    pub fn is_number(&self, id: ValueId, value: f32) -> bool {
        self.number(id) == Some(value)
    }

    /// Whether both have provably equal dimensions.
    pub fn same_shape(&self, a: ValueId, b: ValueId) -> bool {
        match (self.graph.shape(a), self.graph.shape(b)) {
            (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_same(b)),
            _ => false,
        }
    }

    /// Whether both have the same rank: enough where the other operands are single elements.
    pub fn same_rank(&self, a: ValueId, b: ValueId) -> bool {
        let rank = |id: ValueId| self.graph.shape(id).map(<[_]>::len);
        rank(a).is_some() && rank(a) == rank(b)
    }

    /// Gives node `index` another operator and operands. Its outputs stay.
    pub fn replace(&mut self, index: usize, op: Op, inputs: Vec<Option<ValueId>>) {
        self.unread(index);
        inputs.iter().flatten().for_each(|id| self.reads[id.index()] += 1);
        let node = &mut self.graph.nodes[index];
        (node.op, node.inputs) = (op, inputs);
        self.changes += 1;
    }

    /// Removes node `index`, whose outputs must have no reader.
    pub fn remove(&mut self, index: usize) {
        self.unread(index);
        self.removed[index] = true;
    }

    fn unread(&mut self, index: usize) {
        for id in self.graph.nodes[index].inputs.iter().flatten() {
            self.reads[id.index()] -= 1;
        }
    }

    /// Adds a constant.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let id = self.graph.add_constant(name, tensor);
        self.grow();
        id
    }

    /// Adds a vector of `I64`.
    pub fn ints(&mut self, name: &str, values: &[i64]) -> Option<ValueId> {
        content::int_vector(values).map(|tensor| self.constant(name, tensor))
    }

    /// Adds a node with one output right before node `before`.
    pub fn insert(
        &mut self,
        before: usize,
        name: &str,
        op: Op,
        inputs: Vec<Option<ValueId>>,
    ) -> Option<ValueId> {
        let fact: Fact = self.graph.infer(&op, &inputs, 1).ok()?.into_iter().next()?;
        let id = self.graph.add_value(name, fact);
        self.grow();
        inputs.iter().flatten().for_each(|id| self.reads[id.index()] += 1);
        let node = GraphNode { name: name.to_string(), op, inputs, outputs: vec![Some(id)] };
        self.inserted.push((before, node));
        Some(id)
    }

    fn grow(&mut self) {
        let count = self.graph.values.len();
        self.producers.resize(count, None);
        self.reads.resize(count, 0);
        self.is_output.resize(count, false);
    }

    /// Applies insertions and removals, and returns how many nodes were rewritten.
    pub fn finish(mut self) -> usize {
        if self.inserted.is_empty() && !self.removed.contains(&true) {
            return self.changes;
        }
        self.inserted.sort_by_key(|(before, _)| *before);
        let mut inserted = std::mem::take(&mut self.inserted).into_iter().peekable();
        let old = std::mem::take(&mut self.graph.nodes);
        let mut nodes = Vec::with_capacity(old.len() + inserted.len());
        for (index, node) in old.into_iter().enumerate() {
            while let Some((_, extra)) = inserted.next_if(|(before, _)| *before == index) {
                nodes.push(extra);
            }
            if !self.removed[index] {
                nodes.push(node);
            }
        }
        self.graph.nodes = nodes;
        self.changes
    }
}

/// A value that a constant is multiplied with or added to.
pub struct WithConstant {
    /// Multiplied; added otherwise.
    pub is_product: bool,
    /// The other operand.
    pub x: ValueId,
    /// The constant operand.
    pub constant: ValueId,
}

impl WithConstant {
    /// What `node` computes, if it is a product or a sum of exactly one constant.
    pub fn of(editor: &Editor, node: &GraphNode) -> Option<WithConstant> {
        let (a, b) = pair(&node.inputs)?;
        let is_product = match node.op {
            Op::Binary(Binary::Mul) => true,
            Op::Binary(Binary::Add) => false,
            _ => return None,
        };
        let is_constant = |id: ValueId| editor.graph.constant(id).is_some();
        let (x, constant) = match (is_constant(a), is_constant(b)) {
            (false, true) => (a, b),
            (true, false) => (b, a),
            _ => return None,
        };
        Some(WithConstant { is_product, x, constant })
    }
}

/// The first two operands, when both are present.
pub fn pair(inputs: &[Option<ValueId>]) -> Option<(ValueId, ValueId)> {
    match inputs {
        [Some(a), Some(b), ..] => Some((*a, *b)),
        _ => None,
    }
}

/// The first operand, when it is present.
pub fn first(inputs: &[Option<ValueId>]) -> Option<ValueId> {
    inputs.first().copied().flatten()
}
