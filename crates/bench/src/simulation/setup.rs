//! Makes a simulation at time zero from a scenario.

use std::sync::Arc;

use base::{Nanos, Random};
use device::sim::{Gpu, ModelProfile, ProfileSet, StreamOptions};
use model::config::Class;
use runtime::core::{Core, CoreOptions, Event, ModelId, Mutation, QueueLayout, SimEvent};
use runtime::order::{ExecutionOrder, Fifo};
use runtime::policy::padding::PaddingDevice;
use runtime::policy::{NAMES, Policy, Streams, by_name};

use runtime::spans::core_recorder::CoreRecorder;

use super::{
    BrokenRestore, ClientState, PlantedBug, Simulation, SimulationOptions, SimulationOutcome,
};
use crate::arrival::ArrivalTimes;
use crate::checker::{Checker, CheckerLimits};
use crate::scenario::{Scenario, ScenarioError};

/// A segment without completion for so long means a device reset.
const WATCHDOG: Nanos = Nanos::from_millis(5_000);

impl Simulation {
    /// A simulation at time zero.
    pub fn new(
        scenario: &Scenario,
        options: SimulationOptions,
    ) -> Result<Simulation, ScenarioError> {
        Simulation::with_profiles(scenario, &scenario.profiles()?, options)
    }

    /// A simulation at time zero, with profiles given by the caller.
    pub fn with_profiles(
        scenario: &Scenario,
        set: &ProfileSet,
        options: SimulationOptions,
    ) -> Result<Simulation, ScenarioError> {
        scenario.check().map_err(ScenarioError::Value)?;
        let models: Vec<Arc<ModelProfile>> = set.models.iter().cloned().map(Arc::new).collect();
        for client in &scenario.clients {
            if set.model(&client.model).is_none() {
                let known = models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>();
                return Err(ScenarioError::Unknown {
                    kind: "model",
                    name: client.model.clone(),
                    known: known.join(", "),
                });
            }
        }
        let policy = policy_of(scenario, set.gpu.queue_capacity, options)?;
        let rules = policy.rules(set.gpu.capabilities());
        let layout = layout(scenario, rules.streams);
        let streams = layout.shared + layout.real_time + layout.best_effort;
        let rt_streams = layout.shared..layout.shared + layout.real_time;
        let stream = |index: usize| StreamOptions {
            high_priority: rules.high_priority && rt_streams.contains(&index),
            capacity: 1,
        };
        let opened: Vec<StreamOptions> = (0..streams).map(stream).collect();
        let mut gpu = Gpu::new(set.gpu.clone(), models.clone(), &opened, scenario.device_faults());
        if options.spans {
            gpu.record_spans();
        }
        // If all models fit, they are resident from the start; otherwise they are loaded and
        // evicted.
        let weights: u64 = set.models.iter().map(|model| model.weight_bytes).sum();
        let managed = weights > set.gpu.memory_bytes;
        let order = scenario.order()?;
        let core = core_of(scenario, &set.gpu, layout, (policy, order), options, managed);
        let checked = (&rules, order);
        let limits =
            CheckerLimits::new(scenario, set, checked, rt_streams.clone(), streams, WATCHDOG);
        let mut simulation = Simulation {
            core,
            gpu,
            rules,
            clients: clients_of(scenario),
            checker: options.check.then(|| Checker::new(limits, models.len(), managed)),
            scenario: scenario.clone(),
            options,
            models,
            live: Vec::new(),
            cancels: Vec::new(),
            now: Nanos::ZERO,
            end: Nanos((scenario.seconds * 1e9) as u64),
            rt_streams,
            streams,
            rt_waiting: 0,
            preempt_started: None,
            actions: Vec::new(),
            recorder: (options.recorded_spans > 0)
                .then(|| CoreRecorder::new(options.recorded_spans)),
            outcome: SimulationOutcome::default(),
        };
        simulation.add_models();
        Ok(simulation)
    }

    fn add_models(&mut self) {
        for (index, profile) in self.models.clone().iter().enumerate() {
            let model = ModelId(index as u32);
            let steps = profile.kernels.len();
            let queue_capacity = self.scenario.queue_capacity;
            self.feed(Event::ModelAdded { model, steps, queue_capacity });
            let kernels = Arc::from(profile.kernels.as_slice());
            let weight_bytes = profile.weight_bytes;
            self.feed(Event::Sim(SimEvent::ModelProfiled { model, kernels, weight_bytes }));
        }
    }
}

fn policy_of(
    scenario: &Scenario,
    queue_capacity: usize,
    options: SimulationOptions,
) -> Result<Box<dyn Policy>, ScenarioError> {
    let policy =
        by_name(&scenario.policy, queue_capacity).ok_or_else(|| ScenarioError::Unknown {
            kind: "policy",
            name: scenario.policy.clone(),
            known: NAMES.join(", "),
        })?;
    Ok(match options.planted_bug {
        Some(PlantedBug::Restore) => Box::new(BrokenRestore(policy)),
        _ => policy,
    })
}

fn layout(scenario: &Scenario, streams: Streams) -> QueueLayout {
    let of = |class| scenario.clients.iter().filter(|client| client.class == class).count();
    let best_effort = match scenario.best_effort_streams {
        0 => of(Class::BestEffort).clamp(1, 16),
        count => count,
    };
    let real_time = of(Class::RealTime).clamp(1, 16);
    match streams {
        Streams::One => QueueLayout { shared: 1, real_time: 0, best_effort: 0, yielding: 0 },
        Streams::Split => QueueLayout { shared: 0, real_time: 1, best_effort, yielding: 0 },
        Streams::Many => QueueLayout { shared: 0, real_time, best_effort, yielding: 0 },
    }
}

fn core_of(
    scenario: &Scenario,
    gpu: &device::sim::GpuProfile,
    queues: QueueLayout,
    (policy, order): (Box<dyn Policy>, &'static dyn ExecutionOrder),
    options: SimulationOptions,
    managed: bool,
) -> Core {
    let planted_bug = |bug| options.planted_bug == Some(bug);
    let sms = if planted_bug(PlantedBug::Budget) { gpu.sms * 2 } else { gpu.sms };
    let fifo: &'static dyn ExecutionOrder = &Fifo;
    let real_time_order = if planted_bug(PlantedBug::EarliestDeadline) { fifo } else { order };
    let core = CoreOptions {
        queues,
        max_requests: 65_536,
        best_effort_share_percent: scenario.best_effort_share_percent,
        best_effort_slice: Nanos::from_millis(10),
        real_time_order,
        memory_bytes: managed.then_some(gpu.memory_bytes),
        watchdog: Some(WATCHDOG),
        capabilities: gpu.capabilities(),
        padding_device: PaddingDevice {
            sms,
            launch: Nanos(gpu.launch_ns),
            gap: Nanos(gpu.gap_ns),
            inside_tile: gpu.preemption() == device::PreemptionLevel::InsideTile,
        },
        mutation: planted_bug(PlantedBug::ExactlyOnce).then_some(Mutation::EndsTwice),
        ..CoreOptions::default()
    };
    Core::with_policy(core, policy)
}

fn clients_of(scenario: &Scenario) -> Vec<ClientState> {
    let mut seeds = Random::new(scenario.seed);
    let mut client = |spec: &crate::scenario::ClientSpec| {
        let mut arrivals = ArrivalTimes::new(spec.arrival.clone(), seeds.next_u64());
        ClientState {
            next: arrivals.next(Nanos::ZERO),
            arrivals,
            outstanding: 0,
            skipped: 0,
            late: false,
            cancels: Random::new(seeds.next_u64()),
        }
    };
    scenario.clients.iter().map(&mut client).collect()
}
