//! The checker: accepts or rejects a plan. It shares no code with the solvers.
//!
//! It uses only the plan, the services, the measured points and the legal starts.

use std::fmt;

use crate::plan::{Plan, PlannedSlice};
use crate::problem::{Problem, Sharing};

/// Slack for sums of floating-point numbers.
const TOLERANCE: f64 = 1e-7;

/// A rule that a plan violates.
#[derive(Clone, Debug, PartialEq)]
pub struct Violation {
    /// Number of the GPU, if it concerns one.
    pub gpu: Option<usize>,
    /// Description.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.gpu {
            Some(gpu) => write!(f, "gpu {gpu}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

/// All violations of `plan`; empty if it is accepted.
pub fn check(problem: &Problem, plan: &Plan) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut served = vec![0.0; problem.services.len()];
    for (number, gpu) in plan.gpus.iter().enumerate() {
        let mut wrong = |what: String| violations.push(Violation { gpu: Some(number), what });
        check_geometry(problem, &gpu.slices, &mut wrong);
        for slice in &gpu.slices {
            check_slice(problem, slice, &mut served, &mut wrong);
        }
    }
    for (service, served) in problem.services.iter().zip(served) {
        let needed = service.rate * (1.0 + problem.rules.headroom_of(&service.name));
        if served < needed * (1.0 - TOLERANCE) {
            let what = format!("service '{}' gets {served} of {needed} requests/s", service.name);
            violations.push(Violation { gpu: None, what });
        }
    }
    violations
}

fn check_geometry(problem: &Problem, slices: &[PlannedSlice], wrong: &mut dyn FnMut(String)) {
    let mut taken = vec![false; usize::from(problem.gpu.memory_slices)];
    let mut gpcs = 0;
    for slice in slices {
        let Some(kind) = problem.gpu.slices.get(slice.kind) else {
            wrong(format!("there is no slice kind {}", slice.kind));
            continue;
        };
        gpcs += u32::from(kind.gpcs);
        if !kind.starts.contains(&slice.start) {
            wrong(format!("{} may not start at {}", kind.name, slice.start));
        }
        for at in slice.start..slice.start + kind.memory_slices {
            match taken.get_mut(usize::from(at)) {
                Some(taken) if !*taken => *taken = true,
                Some(_) => wrong(format!("{} at {} overlaps at {at}", kind.name, slice.start)),
                None => wrong(format!("{} at {} does not fit", kind.name, slice.start)),
            }
        }
    }
    if gpcs > u32::from(problem.gpu.gpcs) {
        wrong(format!("{gpcs} compute slices of {}", problem.gpu.gpcs));
    }
}

fn check_slice(
    problem: &Problem,
    slice: &PlannedSlice,
    served: &mut [f64],
    wrong: &mut dyn FnMut(String),
) {
    let Some(kind) = problem.gpu.slices.get(slice.kind) else { return };
    if slice.shares.len() > 1
        && (slice.cycle_ms.is_none() || problem.rules.sharing == Sharing::None)
    {
        wrong(format!("slice at {} is shared without a duty cycle", slice.start));
    }
    let (mut busy_ms, mut memory_mib) = (0.0, 0u64);
    for share in &slice.shares {
        let Some(service) = problem.services.get(share.service) else {
            wrong(format!("there is no service {}", share.service));
            continue;
        };
        let points = problem.profiles.points(&service.model).unwrap_or_default();
        let Some(point) = points.iter().find(|point| {
            (point.gpcs, point.batch, point.processes) == (kind.gpcs, share.batch, share.processes)
        }) else {
            let (batch, processes) = (share.batch, share.processes);
            wrong(format!(
                "'{}' was not measured on {} with batch {batch} and {processes} processes",
                service.name, kind.name
            ));
            continue;
        };
        if share.processes > problem.rules.processes_max {
            wrong(format!("'{}' has {} processes", service.name, share.processes));
        }
        let limit_ms = service.slo_ms * problem.rules.slo_share;
        let batches = f64::from(share.batch) * f64::from(share.processes);
        // The latency may have been rounded down: the throughput tells.
        let turn_ms = point.latency_ms.max(batches / point.throughput * 1000.0);
        let capacity = match slice.cycle_ms {
            None => {
                if turn_ms * 2.0 >= limit_ms {
                    wrong(format!("'{}' misses its slo", service.name));
                }
                point.throughput
            }
            Some(cycle_ms) => {
                busy_ms += turn_ms;
                if cycle_ms + turn_ms > limit_ms * (1.0 + TOLERANCE) {
                    wrong(format!("'{}' misses its slo", service.name));
                }
                batches / cycle_ms * 1000.0
            }
        };
        memory_mib += problem.profiles.memory_limit_mib(problem.gpu, &service.model, point);
        if !(share.rate >= 0.0 && share.rate <= capacity * (1.0 + TOLERANCE)) {
            wrong(format!("'{}' is sent {} of {capacity} requests/s", service.name, share.rate));
        }
        served[share.service] += share.rate;
    }
    if slice.cycle_ms.is_some_and(|cycle| busy_ms > cycle * (1.0 + TOLERANCE)) {
        wrong(format!("the turns at {} take {busy_ms} ms, more than the cycle", slice.start));
    }
    if memory_mib > kind.memory_mib() {
        wrong(format!("{memory_mib} MiB in {} at {}", kind.name, slice.start));
    }
}
