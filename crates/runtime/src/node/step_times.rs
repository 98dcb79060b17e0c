//! Measures the steps of a model, with best-effort runs of the lowest priority.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::{Nanos, Random};
use device::{DeviceError, Program, RecordedStep, Task, TuningProgress};
use model::Tensor;
use thiserror::Error;

use super::profiling::{SIZES, sample_inputs};
use super::{ModelKey, Node, Rejection, Reply};

/// Runs in which steps are timed; the median counts.
const RUNS: usize = 5;

/// The times of a model's steps.
#[derive(Clone, Debug)]
pub struct StepTimes {
    /// Shapes of the inputs, in the plan's order.
    pub shapes: Vec<Vec<usize>>,
    /// Runs in which they were measured.
    pub runs: usize,
    /// Every step with its median time, in the order they run.
    pub steps: Vec<(RecordedStep, Nanos)>,
}

/// Why steps cannot be measured.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StepTimesError {
    /// There is no such model.
    #[error("the model is not loaded")]
    NoSuchModel,
    /// Nothing may run behind requests.
    #[error("the policy runs no best effort, and steps are measured as best effort")]
    NoBestEffort,
    /// Other work went first all the time.
    #[error("requests left no time for a run within {} s", limit.as_secs())]
    Busy {
        /// The time limit.
        limit: Duration,
    },
    /// The model does not run with random inputs.
    #[error("the model does not run with random inputs: {0}")]
    NotRunnable(String),
    /// The device does not tell.
    #[error("the device records no times of steps")]
    NotRecorded,
}

/// A task that keeps the times of its steps when it is done.
struct RecordingTask {
    inner: Box<dyn Task>,
    times: Arc<Mutex<Vec<Nanos>>>,
}

impl Task for RecordingTask {
    fn step_count(&self) -> usize {
        self.inner.step_count()
    }

    fn next_step(&self) -> usize {
        self.inner.next_step()
    }

    fn record_step_times(&mut self) {
        self.inner.record_step_times();
    }

    fn step_times(&self) -> Option<&[Nanos]> {
        self.inner.step_times()
    }

    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError> {
        let recorded = self.inner.step_times().unwrap_or_default().to_vec();
        *self.times.lock().unwrap_or_else(PoisonError::into_inner) = recorded;
        self.inner.into_outputs()
    }

    /// The device looks for its own type.
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self.inner.as_any_mut()
    }
}

impl Node {
    /// Measures every step of `model` for one row of random values, as best effort of the lowest
    /// priority. Blocks for at most about `limit`, beside what the device needs to prepare the
    /// sizes.
    ///
    /// # Errors
    /// Why they cannot be measured.
    pub fn measure_steps(
        &self,
        model: ModelKey,
        limit: Duration,
    ) -> Result<StepTimes, StepTimesError> {
        let program = self.shared.lock().model(model).map(|entry| entry.program.clone());
        let program = program.ok_or(StepTimesError::NoSuchModel)?;
        if !self.shared.best_effort {
            return Err(StepTimesError::NoBestEffort);
        }
        let end = self.clock().now() + Nanos::from(limit);
        let (mut random, mut why) = (Random::new(1), "no sizes fit".to_string());
        for size in 0..SIZES {
            let inputs = match sample_inputs(program.plan(), 1, size, &mut random) {
                Ok(inputs) => inputs,
                Err(error) => {
                    why = error.to_string();
                    continue;
                }
            };
            match self.run_recorded(model, &*program, &inputs, (limit, end)) {
                // The first run also prepares; it does not count.
                Ok(_) => return self.median_times(model, &*program, &inputs, (limit, end)),
                Err(StepTimesError::NotRunnable(error)) => why = error,
                Err(other) => return Err(other),
            }
        }
        Err(StepTimesError::NotRunnable(why))
    }

    /// How far the steps of `model` are tuned; `None` where there is nothing to tune.
    pub fn tuning(&self, model: ModelKey) -> Option<TuningProgress> {
        let program = self.shared.lock().model(model).map(|entry| entry.program.clone())?;
        program.tuning()
    }

    fn median_times(
        &self,
        model: ModelKey,
        program: &dyn Program,
        inputs: &[Tensor],
        (limit, end): (Duration, Nanos),
    ) -> Result<StepTimes, StepTimesError> {
        let mut runs: Vec<Vec<Nanos>> = Vec::new();
        while runs.len() < RUNS && (runs.is_empty() || self.clock().now() < end) {
            match self.run_recorded(model, program, inputs, (limit, end)) {
                Ok(times) => runs.push(times),
                // What was measured counts.
                Err(StepTimesError::Busy { .. }) if !runs.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        let count = runs.first().map_or(0, Vec::len);
        if count == 0 {
            return Err(StepTimesError::NotRecorded);
        }
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|input| input.shape().to_vec()).collect();
        let mut names = program.recorded_steps(&shapes).into_iter();
        let median = |step: usize| {
            let mut times: Vec<Nanos> =
                runs.iter().filter_map(|run| run.get(step).copied()).collect();
            times.sort_unstable();
            times.get(times.len() / 2).copied().unwrap_or_default()
        };
        let one = |step: usize| {
            let unknown = || RecordedStep::named(&format!("step {step}"), String::new());
            (names.next().unwrap_or_else(unknown), median(step))
        };
        let steps = (0..count).map(one).collect();
        Ok(StepTimes { shapes, runs: runs.len(), steps })
    }

    /// The times of the steps of one run.
    fn run_recorded(
        &self,
        model: ModelKey,
        program: &dyn Program,
        inputs: &[Tensor],
        (limit, end): (Duration, Nanos),
    ) -> Result<Vec<Nanos>, StepTimesError> {
        let not_runnable = |error: DeviceError| StepTimesError::NotRunnable(error.to_string());
        let inner = program.prepare(inputs.to_vec()).map_err(not_runnable)?;
        let times = Arc::<Mutex<Vec<Nanos>>>::default();
        let mut task = RecordingTask { inner, times: times.clone() };
        task.record_step_times();
        let (handle, receiver) = self.submit_behind(model, Box::new(task));
        let remaining: Duration = (end - self.clock().now()).into();
        let Ok(Reply { result, .. }) = receiver.recv_timeout(remaining) else {
            handle.cancel();
            return Err(StepTimesError::Busy { limit });
        };
        match result {
            Ok(_) => Ok(std::mem::take(&mut *times.lock().unwrap_or_else(PoisonError::into_inner))),
            Err(Rejection::Device(error)) => Err(not_runnable(error)),
            Err(Rejection::NoSuchModel) => Err(StepTimesError::NoSuchModel),
            Err(_) => Err(StepTimesError::Busy { limit }),
        }
    }
}
