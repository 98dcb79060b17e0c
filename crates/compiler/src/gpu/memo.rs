//! Steps that compute what an earlier step of the same lowering computes, on other buffers and
//! with other weights: the layers of most networks are equal. The kernels, the choice of variants
//! and the arguments are written once for all of them.
//!
//! A key holds everything that a step's variants are made of; buffers and weights are numbered in
//! the order in which the key names them. The remembered step has these numbers, and every use of
//! it the buffers and weights themselves.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use model::gpu::MemoryLocation;

use super::args::Address;
use super::conv::Product;
use super::draft::StepDraft;
use super::elementwise::Expr;
use super::view::{BufferId, View};

/// What the variants of a step are made of.
#[derive(Debug, PartialEq)]
pub(super) enum StepKey {
    /// A product with a constant weight.
    Product(Box<Product>),
    /// Scale, causal offset, and the views of queries, keys, values, result and bias.
    Attention(f32, Option<usize>, Vec<View>),
    /// An expression, with its text, of the views before the last, which is the result. Numbers of
    /// equal texts are equal, zeros with a sign too.
    Chain(String, Expr, Vec<View>),
    /// A copy from the first to the second view.
    Copy([View; 2]),
}

impl StepKey {
    /// Equal keys have equal hashes.
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        std::mem::discriminant(self).hash(&mut hasher);
        let views: &[View] = match self {
            StepKey::Product(product) => {
                product.sizes().hash(&mut hasher);
                return hasher.finish();
            }
            StepKey::Attention(_, _, views) | StepKey::Chain(_, _, views) => views,
            StepKey::Copy(views) => views,
        };
        for view in views {
            (view.offset, &view.shape, &view.strides).hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// The buffers and weights that a key numbers.
#[derive(Debug, Default)]
pub(super) struct StepOperands {
    buffers: Vec<BufferId>,
    weights: Vec<u32>,
}

impl StepOperands {
    /// `view` with the number of its buffer.
    pub(super) fn view(&mut self, view: View) -> View {
        let known = self.buffers.iter().position(|buffer| *buffer == view.buffer);
        let number = known.unwrap_or_else(|| {
            self.buffers.push(view.buffer);
            self.buffers.len() - 1
        });
        View { buffer: BufferId(number as u32), ..view }
    }

    /// The number of a weight.
    pub(super) fn weight(&mut self, weight: u32) -> u32 {
        let known = self.weights.iter().position(|other| *other == weight);
        known.unwrap_or_else(|| {
            self.weights.push(weight);
            self.weights.len() - 1
        }) as u32
    }

    fn address(&self, address: Address) -> Address {
        match address {
            Address::Buffer(id, offset) => Address::Buffer(self.buffers[id.0 as usize], offset),
            Address::Fixed(MemoryLocation::Weight(number, offset)) => {
                Address::Fixed(MemoryLocation::Weight(self.weights[number as usize], offset))
            }
            other => other,
        }
    }

    /// `step` on these buffers and weights.
    fn applied(&self, step: &StepDraft) -> StepDraft {
        let mut step = step.clone();
        for view in step.reads.iter_mut().chain(&mut step.writes) {
            view.buffer = self.buffers[view.buffer.0 as usize];
        }
        for draft in &mut step.drafts {
            for (_, address) in &mut draft.args.1 {
                *address = self.address(*address);
            }
            for (address, _) in &mut draft.maps {
                *address = self.address(*address);
            }
        }
        step
    }
}

/// The steps of one lowering by what they compute.
#[derive(Default)]
pub(super) struct StepMemo {
    /// Nothing is remembered.
    forgets: bool,
    steps: HashMap<u64, Vec<(StepKey, StepDraft)>>,
}

impl StepMemo {
    /// One that makes every step again.
    pub(super) fn forgetful() -> StepMemo {
        StepMemo { forgets: true, ..StepMemo::default() }
    }

    /// The step of `key` on `operands`; `make` makes it if it is the first of its kind. What fails
    /// is not remembered.
    pub(super) fn step<E>(
        &mut self,
        key: StepKey,
        operands: &StepOperands,
        make: impl FnOnce(&StepKey) -> Result<StepDraft, E>,
    ) -> Result<StepDraft, E> {
        if self.forgets {
            return make(&key).map(|step| operands.applied(&step));
        }
        let alike = self.steps.entry(key.hash()).or_default();
        if let Some((_, step)) = alike.iter().find(|(known, _)| *known == key) {
            return Ok(operands.applied(step));
        }
        let step = make(&key)?;
        let applied = operands.applied(&step);
        alike.push((key, step));
        Ok(applied)
    }
}
