//! The steps of a model, measured on demand.

use std::time::Duration;

use api::error::ApiResult;
use api::{ApiError, ModelRef};
use base::Nanos;
use device::{MachineLimits, RecordedStep};
use runtime::device_group::MeasuredSteps;
use runtime::{DeviceGroup, StepTimesError};
use serde_json::{Value, json};

use super::{Inner, blocking_api};

/// Time limit of a measurement.
const LIMIT: Duration = Duration::from_secs(5);
/// Steps of a report; the slowest.
const MAX_STEPS: usize = 100;

impl Inner {
    /// Measures the steps of a model as best effort, and reports the slowest.
    pub(super) async fn model_steps(&self, model: ModelRef<'_>) -> ApiResult<Value> {
        let served = self.find(model)?;
        // Nothing else is measured meanwhile.
        let permit = self.profiling.clone().try_acquire_owned().map_err(|_| {
            ApiError::unavailable("a model is being measured: try again in a moment").retry_after(1)
        })?;
        let (group, loader) = (self.device_group.clone(), self.loader.clone());
        let (name, version) = (served.name.clone(), served.version);
        // The prefix that it shares, if it does, and its own steps.
        let prefix = served.split.as_ref().map(|split| split.prefix.key);
        let keys: Vec<_> = prefix.into_iter().chain([served.key]).collect();
        // An unload does not wait for the measurement.
        drop(served);
        blocking_api(move || {
            let _permit = permit;
            let _mark = loader.begin_measuring(&name, version);
            let parts = keys.into_iter().map(|key| group.measure_steps(key, LIMIT));
            let parts: Result<Vec<_>, _> = parts.collect();
            let parts = parts.map_err(|error| refusal(&name, &error))?;
            Ok(report((&name, version), &group, &parts))
        })
        .await
    }
}

fn refusal(name: &str, error: &StepTimesError) -> ApiError {
    let message = format!("the steps of model '{name}' are not measured: {error}");
    match error {
        StepTimesError::NoSuchModel => ApiError::unavailable(message),
        StepTimesError::Busy { .. } => ApiError::unavailable(message).retry_after(1),
        StepTimesError::NoBestEffort
        | StepTimesError::NotRunnable(_)
        | StepTimesError::NotRecorded => ApiError::unsupported(message),
    }
}

fn micros(time: Nanos) -> f64 {
    time.0 as f64 / 1e3
}

fn report((name, version): (&str, u64), group: &DeviceGroup, parts: &[MeasuredSteps]) -> Value {
    let mut steps: Vec<(&RecordedStep, Nanos, Option<MachineLimits>)> = parts
        .iter()
        .flat_map(|part| part.times.steps.iter().map(|(step, time)| (step, *time, part.limits)))
        .collect();
    let total: Nanos = Nanos(steps.iter().map(|(_, time, _)| time.0).sum());
    let count = steps.len();
    steps.sort_by_key(|(_, time, _)| std::cmp::Reverse(*time));
    let one = |(step, time, limits): &(&RecordedStep, Nanos, Option<MachineLimits>)| {
        let us = micros(*time);
        let limit = step.work.zip(*limits).filter(|_| us > 0.0);
        json!({
            "name": step.name,
            "op": step.op,
            "us": us,
            "share": if total > Nanos::ZERO { us / micros(total) } else { 0.0 },
            "share_of_limit": limit.map(|(work, limits)| limits.shortest_us(work) / us),
            "bound": limit.map(|(work, limits)| match limits.is_compute_bound(work) {
                true => "compute",
                false => "memory",
            }),
        })
    };
    let slowest: Vec<Value> = steps.iter().take(MAX_STEPS).map(one).collect();
    let first = parts.first();
    json!({
        "name": name,
        "version": version.to_string(),
        "device": first.map(|part| &group.names()[part.device]),
        "runs": parts.iter().map(|part| part.times.runs).min(),
        "inputs": first.map(|part| &part.times.shapes),
        "total_us": micros(total),
        "step_count": count,
        "steps": slowest,
    })
}
