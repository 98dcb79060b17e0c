//! The constants of a graph, by value.

use std::sync::Arc;

use model::{Tensor, ValueId};

/// Tensors by [`ValueId`]. Copies share them: a graph is copied for every set of sizes.
#[derive(Clone, Debug, Default)]
pub struct Constants(Vec<Option<Arc<Tensor>>>);

impl Constants {
    /// The constant `id`.
    pub fn get(&self, id: ValueId) -> Option<&Tensor> {
        self.0.get(id.index())?.as_deref()
    }

    /// The constant `id`, shared.
    pub fn shared(&self, id: ValueId) -> Option<Arc<Tensor>> {
        self.0.get(id.index())?.clone()
    }

    /// Makes `id` the constant `tensor`.
    pub fn insert(&mut self, id: ValueId, tensor: impl Into<Arc<Tensor>>) {
        if self.0.len() <= id.index() {
            self.0.resize(id.index() + 1, None);
        }
        self.0[id.index()] = Some(tensor.into());
    }

    /// Keeps those for which `keep` holds.
    pub fn retain(&mut self, keep: impl Fn(ValueId) -> bool) {
        for (index, tensor) in self.0.iter_mut().enumerate() {
            if tensor.is_some() && !keep(ValueId(index as u32)) {
                *tensor = None;
            }
        }
    }

    /// All of them in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = (ValueId, &Tensor)> {
        let present = |(index, tensor)| {
            let tensor: &Option<Arc<Tensor>> = tensor;
            Some((ValueId(index as u32), tensor.as_deref()?))
        };
        self.0.iter().enumerate().filter_map(present)
    }
}
