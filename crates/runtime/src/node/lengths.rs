//! Requests of different lengths in one batch.
//!
//! A model with a mask computes the same for a row that was padded. That is checked with runs of
//! the lowest priority before it is relied on, and so is that it pays. A request is padded when
//! others of its model are pending, or when the device is not prepared for its own length.

use std::sync::Arc;

use base::{Nanos, Random};
use device::{DeviceError, Program};
use model::length_padding::{LENGTH_MAX, LengthPadding, padded_length};
use model::row_independence::batch_symbol;
use model::sample::{ones, random_tensor};
use model::{Dim, LaunchPlan, Tensor};

use super::{ModelKey, Node, Rejection, Reply, ReplyFn};

/// Larger inputs are not copied to be padded.
const PADDED_BYTES_MAX: usize = 1 << 20;
/// How much a padded row may differ, relative to the norm of the output.
const TOLERANCE: f64 = 1e-3;
/// Rows and length of the runs that show whether padded batches pay.
const PAYING: (usize, usize) = (8, 32);
/// They pay if a row of them takes at most this share of a request alone.
const PAYING_SHARE: f64 = 0.8;
const RUNS: usize = 3;

/// A way to pad the requests of a model that was checked.
#[derive(Debug)]
pub struct CheckedPadding {
    padding: LengthPadding,
    /// The longest length for which it was checked.
    max_length: usize,
}

impl CheckedPadding {
    /// The longest length that requests are padded to.
    pub fn max_length(&self) -> usize {
        self.max_length
    }

    /// The length that a request is padded to, if it is.
    pub(super) fn target(&self, inputs: &[Tensor]) -> Option<usize> {
        let length = self.padding.length(inputs).filter(|length| *length > 0)?;
        let target = padded_length(length);
        let bytes: usize = inputs.iter().map(Tensor::size_bytes).sum();
        (target > length && target <= self.max_length && bytes <= PADDED_BYTES_MAX)
            .then_some(target)
    }

    /// The padded request, and a reply that cuts its outputs back. Both as they are when memory
    /// does not suffice.
    pub(super) fn apply(
        self: &Arc<CheckedPadding>,
        inputs: Vec<Tensor>,
        target: usize,
        reply: ReplyFn,
    ) -> (Vec<Tensor>, ReplyFn) {
        let length = self.padding.length(&inputs);
        let (Some(length), Ok(padded)) = (length, self.padding.pad(inputs.clone(), target)) else {
            return (inputs, reply);
        };
        let own = self.clone();
        let cut = move |Reply { result, timing }: Reply| {
            let cut = |outputs| {
                own.padding.cut(outputs, length).map_err(|err| {
                    Rejection::Device(DeviceError::Defect(format!("outputs are not cut: {err}")))
                })
            };
            reply(Reply { result: result.and_then(cut), timing });
        };
        (padded, Box::new(cut))
    }
}

impl Node {
    /// Whether requests of `model` might be padded; [`Node::check_padding`] tells.
    pub fn may_pad(&self, model: ModelKey) -> bool {
        self.shared.lock().model(model).is_some_and(|entry| entry.padding_rule.is_some())
    }

    /// Checks with best-effort runs that padded requests of `model` get the same outputs and pay.
    /// Takes about `limit`, plus the time of work that goes first.
    ///
    /// # Errors
    /// Why its requests are not padded.
    pub fn check_padding(
        &self,
        model: ModelKey,
        limit: std::time::Duration,
    ) -> Result<Arc<CheckedPadding>, String> {
        let found = {
            let state = self.shared.lock();
            let entry = state.model(model).ok_or("the model is gone")?;
            (entry.program.clone(), entry.padding_rule.clone())
        };
        let (program, Some(padding)) = found else {
            return Err("the model has no mask".to_string());
        };
        if !self.shared.best_effort {
            return Err("the policy runs no best effort".to_string());
        }
        let end = self.clock().now() + Nanos::from(limit);
        let check = PaddingCheck { node: self, model, program: &*program, padding: &padding };
        let max_length = check.run(end)?;
        Ok(Arc::new(CheckedPadding { padding, max_length }))
    }

    /// Pads requests of `model` from now on, or no more.
    pub fn set_padding(&self, model: ModelKey, padding: Option<Arc<CheckedPadding>>) {
        if let Some(entry) = self.shared.lock().model_mut(model) {
            entry.padding = padding;
        }
    }
}

struct PaddingCheck<'a> {
    node: &'a Node,
    model: ModelKey,
    program: &'a dyn Program,
    padding: &'a LengthPadding,
}

impl PaddingCheck<'_> {
    /// The longest length for which padded requests get the same outputs.
    fn run(&self, end: Nanos) -> Result<usize, String> {
        let mut random = Random::new(3);
        let mut max_length = 0;
        let mut length = 8;
        while length <= LENGTH_MAX && (max_length == 0 || self.node.clock().now() < end) {
            // Long runs are worth their time only where short ones show a gain.
            if length > PAYING.1 && max_length == PAYING.1 {
                self.check_paying(max_length, &mut random)?;
            }
            match self.check_length(length, &mut random) {
                Ok(true) => max_length = length,
                Ok(false) => return Err("outputs depend on what is behind the mask".to_string()),
                // Longer ones exceed the model's positions, or the device's memory.
                Err(_) => break,
            }
            length *= 2;
        }
        match max_length {
            0 => return Err("the model does not run with random inputs".to_string()),
            short if short < PAYING.1 => self.check_paying(short, &mut random)?,
            _ => {}
        }
        self.prepare(max_length, end);
        Ok(max_length)
    }

    /// Prepares the lengths that requests will be padded to, the short ones first.
    fn prepare(&self, max_length: usize, end: Nanos) {
        let plan = self.program.plan();
        let batch = batch_symbol(plan).unwrap_or_default();
        let mut length = padded_length(1);
        while length <= max_length && self.node.clock().now() < end {
            let symbol = (self.padding.symbol(), length);
            let shapes = plan.inputs.iter().map(|id| shape(plan, *id, (batch, 1), symbol));
            if let Err(error) = self.program.specialize(&shapes.collect::<Vec<_>>()) {
                tracing::debug!(%error, length, "length not prepared");
                return;
            }
            length = padded_length(length + 1);
        }
    }

    /// Whether a request of a length below `length` gets the same outputs alone and as a row of a
    /// batch, whatever it is padded with; an error where it does not run.
    fn check_length(&self, length: usize, random: &mut Random) -> Result<bool, String> {
        let own = length - 3;
        let alone = self.inputs(1, own, random)?;
        let (expected, _) = self.outputs(alone.clone())?;
        let zeros = self.padding.pad(alone, length).map_err(|err| err.to_string())?;
        let other = self.inputs(1, length, random)?;
        let noise = self.with_noise(&zeros, own, random)?;
        for row in [zeros, noise] {
            let batch = device::batch::join_rows(&[row, other.clone()]);
            let (outputs, _) = self.outputs(batch.map_err(|err| err.to_string())?)?;
            let first: Option<Vec<Tensor>> =
                outputs.iter().map(|output| output.rows(0..1)).collect();
            let first = first.ok_or("an output has too few rows")?;
            let cut = self.padding.cut(first, own).map_err(|err| err.to_string())?;
            if !expected.iter().zip(&cut).all(|(expected, cut)| is_close(expected, cut)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// `padded` with random values instead of zeros behind the first `own`, except in the mask.
    fn with_noise(
        &self,
        padded: &[Tensor],
        own: usize,
        random: &mut Random,
    ) -> Result<Vec<Tensor>, String> {
        let length = self.padding.length(padded).ok_or("the padded inputs have no length")?;
        let noise = self.inputs(1, length, random)?;
        let plain = self.padding.cut_inputs(padded, own).map_err(|err| err.to_string())?;
        let join = |(index, noise): (usize, Tensor)| match index == self.padding.mask() {
            true => Ok(padded[index].clone()),
            false => self.padding.overwrite(index, &noise, &plain[index]),
        };
        let all: Result<Vec<_>, _> = noise.into_iter().enumerate().map(join).collect();
        all.map_err(|err| err.to_string())
    }

    /// Fails where a padded batch takes nearly as long as its rows one by one.
    fn check_paying(&self, max_length: usize, random: &mut Random) -> Result<(), String> {
        let (rows, length) = (PAYING.0, PAYING.1.min(max_length));
        let (mut alone, mut together) = (Nanos::MAX, Nanos::MAX);
        for _ in 0..RUNS {
            alone = alone.min(self.outputs(self.inputs(1, length - 3, random)?)?.1);
            together = together.min(self.outputs(self.inputs(rows, length, random)?)?.1);
        }
        let share = together.0 as f64 / (alone.0.max(1) as f64 * rows as f64);
        match share <= PAYING_SHARE {
            true => Ok(()),
            false => Err(format!("a row of a padded batch takes {share:.2} of a request alone")),
        }
    }

    fn outputs(&self, inputs: Vec<Tensor>) -> Result<(Vec<Tensor>, Nanos), String> {
        let ran = self.node.run_behind(self.model, self.program, inputs);
        ran.ok_or_else(|| "it does not run".to_string())
    }

    fn inputs(
        &self,
        rows: usize,
        length: usize,
        random: &mut Random,
    ) -> Result<Vec<Tensor>, String> {
        let plan = self.program.plan();
        let batch = batch_symbol(plan).unwrap_or_default();
        let one = |(index, id): (usize, &model::ValueId)| {
            let info = plan.value(*id);
            let shape = shape(plan, *id, (batch, rows), (self.padding.symbol(), length));
            match index == self.padding.mask() {
                true => ones(info.dtype, shape).map_err(|err| err.to_string()),
                false => random_tensor(info.dtype, shape, random).map_err(|err| err.to_string()),
            }
        };
        plan.inputs.iter().enumerate().map(one).collect()
    }
}

fn shape(
    plan: &LaunchPlan,
    id: model::ValueId,
    (batch, rows): (&str, usize),
    (symbol, length): (&str, usize),
) -> Vec<usize> {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => *size,
        Dim::Symbol(name) if name == batch => rows,
        Dim::Symbol(name) if name == symbol => length,
        _ => 1,
    };
    plan.value(id).shape.as_deref().unwrap_or_default().iter().map(size).collect()
}

/// Whether two outputs are equal within the tolerance, or equal where they are no real numbers.
fn is_close(expected: &Tensor, found: &Tensor) -> bool {
    let (Some(a), Some(b)) = (expected.to_reals(), found.to_reals()) else {
        return expected == found;
    };
    if expected.shape() != found.shape() || !b.iter().all(|x| x.is_finite()) {
        return false;
    }
    let norm = a.iter().map(|x| x * x).sum::<f64>().sqrt();
    let distance = a.iter().zip(&b).map(|(x, y)| (x - y) * (x - y)).sum::<f64>().sqrt();
    distance <= TOLERANCE * norm.max(1e-6)
}

#[cfg(test)]
mod tests;
