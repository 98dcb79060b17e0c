//! Preemption latency: REEF's figures 12 (b) and 13 on the simulated GPU.

use device::sim::{KernelProfile, ModelProfile, ProfileSet, builtin};
use model::config::Class;
use serde::Serialize;

use crate::arrival::Arrival;
use crate::scenario::{ClientSpec, Scenario, ScenarioError};
use crate::simulation::{Simulation, SimulationOptions};

/// Mean microseconds from the preemption to the first real-time block.
#[derive(Clone, Debug, Serialize)]
pub struct PreemptionLatency {
    /// What was preempted.
    pub preempted: String,
    /// Atoll: epochs checked inside tiles.
    pub atoll_us: f64,
    /// REEF: reset of the queues.
    pub reef_us: f64,
    /// A capped queue and a flag at kernel entry.
    pub reef_n_us: f64,
    /// The same without the cap: the paper's wait-based baseline.
    pub wait_us: f64,
}

/// One best-effort task of each model, preempted at random times (figure 12 b).
pub fn by_model() -> Result<Vec<PreemptionLatency>, ScenarioError> {
    let set = builtin::mi50();
    set.models.iter().map(|model| point(&set, &model.name.clone(), model.clone())).collect()
}

/// Best effort of equal kernels: their number at 100 us each, and their length at 100 kernels
/// (figure 13).
pub fn by_shape() -> Result<Vec<PreemptionLatency>, ScenarioError> {
    let set = builtin::mi50();
    let counts = [25, 50, 100, 200, 400].map(|count| (count, 100));
    let lengths = [25, 50, 200, 400].map(|length| (100, length));
    let shapes = counts.into_iter().chain(lengths);
    shapes
        .map(|(count, us)| {
            let kernel = KernelProfile {
                blocks: set.gpu.sms * 4,
                block_ns: us * 1_000,
                occupancy: 4,
                memory_share: 0.2,
                idempotent: true,
            };
            let model = ModelProfile {
                name: "equal".to_string(),
                kernels: vec![kernel; count],
                input_bytes: 1_000,
                weight_bytes: 1_000,
            };
            point(&set, &format!("{count} kernels of {us} us"), model)
        })
        .collect()
}

fn point(
    set: &ProfileSet,
    name: &str,
    best_effort: ModelProfile,
) -> Result<PreemptionLatency, ScenarioError> {
    let mut real_time = set.models[2].clone();
    real_time.name = "rt".to_string();
    let be_name = best_effort.name.clone();
    let set = ProfileSet { gpu: set.gpu.clone(), models: vec![real_time, best_effort] };
    let mut wait = set.clone();
    // Queues of any length; skipping a fetched kernel costs less when many follow each other.
    (wait.gpu.queue_capacity, wait.gpu.evict_ns) = (4_096, 2_800);
    let measure = |set: &ProfileSet, policy: &str| -> Result<f64, ScenarioError> {
        let client = |class: Class, model: &str, arrival| ClientSpec {
            name: model.to_string(),
            model: model.to_string(),
            class,
            priority: 1,
            deadline_ms: None,
            one_outstanding: true,
            cancel_percent: 0,
            arrival,
        };
        let scenario = Scenario {
            policy: policy.to_string(),
            seconds: 20.0,
            clients: vec![
                client(Class::RealTime, "rt", Arrival::Poisson { rate: 20.0 }),
                client(Class::BestEffort, &be_name, Arrival::ClosedLoop { think_us: 0 }),
            ],
            ..Scenario::default()
        };
        let outcome =
            Simulation::with_profiles(&scenario, set, SimulationOptions::default())?.finish();
        Ok((outcome.preempt_latency.mean().0 as f64 / 100.0).round() / 10.0)
    };
    Ok(PreemptionLatency {
        preempted: name.to_string(),
        atoll_us: measure(&set, "atoll")?,
        reef_us: measure(&set, "reef")?,
        reef_n_us: measure(&set, "reef_n")?,
        wait_us: measure(&wait, "reef_n")?,
    })
}
