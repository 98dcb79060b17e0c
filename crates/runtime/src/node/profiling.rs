//! Measures batch times of a model, with best-effort runs of the lowest priority.

use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use base::{Nanos, Random};
use device::{Program, Task};
use model::config::Class;
use model::row_independence::batch_symbol;
use model::sample::random_tensor;
use model::tensor::{TensorError, element_count};
use model::{Dim, LaunchPlan, Tensor, ValueInfo};

use super::submission::Submission;
use super::{ModelKey, Node, Rejection, Reply, RequestHandle};
use crate::batching::StaggeredBatch;
use crate::core::ModelId;

/// Runs per batch size; the shortest counts, since other work may run beside it.
const RUNS: usize = 3;

/// Sizes to try for other symbolic dimensions until the model runs: of images, and of other inputs.
/// A model is measured at one size; requests may have others.
const OPEN_PICTURE: [usize; 5] = [320, 224, 64, 32, 1];
const OPEN: [usize; 5] = [128, 64, 32, 8, 1];
pub(super) const SIZES: usize = OPEN.len();

/// Max bytes of the inputs of a measurement. A model that declares larger ones is not measured:
/// making them would take the memory and time that requests need.
const INPUT_BYTES_MAX: usize = 256 << 20;

/// Bytes of one element of text in these inputs.
const TEXT_BYTES: usize = 32;

/// Rows of a batch and its time.
pub type BatchTime = (usize, Nanos);

impl Node {
    /// Measures batch times of `model` as best effort, up to the first size that exceeds its SLO or
    /// `limit` in total, and sets them in its batcher. Blocks until done. Measures nothing where
    /// the policy runs no best effort or the model is removed.
    pub fn profile(&self, model: ModelKey, limit: Duration) -> Vec<BatchTime> {
        let found = {
            let state = self.shared.lock();
            state.model(model).map(|entry| {
                let batching = entry.batching.as_ref().filter(|_| entry.is_batched());
                let batcher = batching.map(|(batcher, _)| batcher.rules());
                let batches = batcher.map_or_else(|| vec![1], |rules| rules.batches());
                (entry.program.clone(), batches, batcher.and_then(|rules| rules.objective()))
            })
        };
        let Some((program, mut batches, objective)) = found else { return Vec::new() };
        if !self.shared.best_effort {
            return Vec::new();
        }
        batches.sort_unstable();
        batches.dedup();
        let end = self.clock().now() + Nanos::from(limit);
        let longest = objective.unwrap_or(Nanos::MAX);
        let times = self.measure(model, &*program, &batches, (longest, end));
        self.set_profile(model, &times);
        times
    }

    /// Sets batch times that were measured here or on an equal device.
    pub fn set_profile(&self, model: ModelKey, times: &[BatchTime]) {
        if let Some(entry) = self.shared.lock().model_mut(model)
            && let Some((batcher, _)) = &mut entry.batching
        {
            batcher.set_profile(times);
        }
    }

    /// Sets the batches of a backend pool for `model`, or returns to its settings. No effect where
    /// these set a batching policy.
    pub fn set_staggered_batch(&self, model: ModelKey, staggered: Option<StaggeredBatch>) {
        let mut state = self.shared.lock();
        if let Some(entry) = state.model_mut(model)
            && let Some((batcher, _)) = &mut entry.batching
        {
            batcher.set_staggered_batch(staggered);
            // Waiting requests may be due now.
            state.batches.due.push(ModelId(model.slot));
        }
    }

    /// The largest batch of `model`; `None` without batching.
    pub fn max_batch(&self, model: ModelKey) -> Option<usize> {
        let state = self.shared.lock();
        let entry = state.model(model).filter(|entry| entry.is_batched())?;
        entry.batching.as_ref().map(|(batcher, _)| batcher.max_batch())
    }

    fn measure(
        &self,
        model: ModelKey,
        program: &dyn Program,
        batches: &[usize],
        (longest, end): (Nanos, Nanos),
    ) -> Vec<BatchTime> {
        let plan = program.plan();
        let mut random = Random::new(1);
        let fits = |size: &usize| {
            let inputs = sample_inputs(plan, 1, *size, &mut random).ok()?;
            self.run_behind(model, program, inputs).map(|_| *size)
        };
        let Some(size) = (0..SIZES).collect::<Vec<_>>().iter().find_map(fits) else {
            return Vec::new();
        };
        let mut times: Vec<BatchTime> = Vec::new();
        for rows in batches {
            let mut best = None;
            for _ in 0..RUNS {
                let Ok(inputs) = sample_inputs(plan, *rows, size, &mut random) else {
                    return times;
                };
                // Larger batches may not fit; what was measured counts.
                let Some((_, time)) = self.run_behind(model, program, inputs) else {
                    return times;
                };
                best = Some(best.map_or(time, |best: Nanos| best.min(time)));
                if self.clock().now() >= end {
                    break;
                }
            }
            let Some(best) = best else { return times };
            times.push((*rows, best));
            if best > longest || self.clock().now() >= end {
                return times;
            }
        }
        times
    }

    /// Outputs and device time of one best-effort run, if it succeeds.
    pub(super) fn run_behind(
        &self,
        model: ModelKey,
        program: &dyn Program,
        inputs: Vec<Tensor>,
    ) -> Option<(Vec<Tensor>, Nanos)> {
        let task = program.prepare(inputs).ok()?;
        let (_, receiver) = self.submit_behind(model, task);
        match receiver.recv() {
            Ok(Reply { result: Ok(outputs), timing }) => Some((outputs, timing.busy)),
            Ok(Reply { result: Err(Rejection::Device(why)), .. }) => {
                tracing::debug!(error = %why, "batch time not measured");
                None
            }
            _ => None,
        }
    }

    /// Submits a task behind everything else.
    pub(super) fn submit_behind(
        &self,
        model: ModelKey,
        task: Box<dyn Task>,
    ) -> (RequestHandle, Receiver<Reply>) {
        let (sender, receiver) = sync_channel::<Reply>(1);
        let arrived = self.clock().now();
        let submission = Submission {
            model,
            class: Class::BestEffort,
            priority: u32::MAX,
            arrived,
            staged: arrived,
            deadline: Nanos::MAX,
            bytes: 0,
            copy: None,
            reply: Box::new(move |reply| {
                // The receiver may have given up.
                let _ = sender.send(reply);
            }),
        };
        (self.shared.submit_alone(submission, Ok(task), None), receiver)
    }
}

/// Random inputs with so many rows; other symbolic dimensions have the size of index `size`.
pub(super) fn sample_inputs(
    plan: &LaunchPlan,
    rows: usize,
    size: usize,
    random: &mut Random,
) -> Result<Vec<Tensor>, TensorError> {
    let batch = batch_symbol(plan);
    let mut bytes = 0usize;
    let mut inputs = Vec::with_capacity(plan.inputs.len());
    for id in &plan.inputs {
        let info = plan.value(*id);
        let shape = input_shape(info, batch, rows, size);
        let element = info.dtype.size_bytes().unwrap_or(TEXT_BYTES);
        bytes = bytes.saturating_add(element_count(&shape)?.saturating_mul(element));
        if bytes > INPUT_BYTES_MAX {
            return Err(TensorError::TooLarge { shape });
        }
        inputs.push(random_tensor(info.dtype, shape, random)?);
    }
    Ok(inputs)
}

fn input_shape(info: &ValueInfo, batch: Option<&str>, rows: usize, size: usize) -> Vec<usize> {
    let dims = info.shape.as_deref().unwrap_or_default();
    let sizes = if dims.len() == 4 { OPEN_PICTURE } else { OPEN };
    let extent = |dim: &Dim| match dim {
        Dim::Fixed(extent) => *extent,
        Dim::Symbol(symbol) if Some(symbol.as_str()) == batch => rows,
        Dim::Symbol(_) | Dim::Expr(_) | Dim::Unknown => sizes[size],
    };
    dims.iter().map(extent).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{DataType, ValueId};

    fn plan(shapes: &[&[Dim]]) -> LaunchPlan {
        let value = |shape: &&[Dim]| ValueInfo {
            name: "x".to_string(),
            dtype: DataType::F32,
            shape: Some(shape.to_vec()),
        };
        LaunchPlan {
            values: shapes.iter().map(value).collect(),
            constants: Vec::new(),
            inputs: (0..shapes.len() as u32).map(ValueId).collect(),
            outputs: Vec::new(),
            steps: Vec::new(),
            warnings: Vec::new(),
        }
    }

    #[test]
    fn inputs_that_a_model_declares_too_large_are_not_made() {
        let made = |shapes: &[&[Dim]]| sample_inputs(&plan(shapes), 2, 0, &mut Random::new(1));
        assert_eq!(made(&[&[Dim::Fixed(3), Dim::Unknown]]).unwrap()[0].shape(), [3, 128]);
        // 4 TiB: the process would be killed while it fills them.
        assert!(made(&[&[Dim::Fixed(1 << 40)]]).is_err());
        assert!(made(&[&[Dim::Fixed(1 << 62), Dim::Fixed(4)]]).is_err());
        // Each is small enough, all of them are not.
        let one: &[Dim] = &[Dim::Fixed(40 << 20)];
        assert!(made(&[one, one]).is_err());
    }
}
