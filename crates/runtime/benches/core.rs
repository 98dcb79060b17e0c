//! Cost of a step of the core, of a padding decision, and of what is recorded of a request.

use std::hint::black_box;
use std::sync::Arc;

use base::{Nanos, Random};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use device::sim::{KernelProfile, builtin};
use model::config::Class;
use runtime::ModelKey;
use runtime::core::{Action, Core, CoreOptions, End, Event, ModelId, QueueLayout, SimEvent};
use runtime::policy::padding::{self, PaddedTask, PaddingCandidate, PaddingDevice, PairSlowdowns};
use runtime::policy::{PaddingRules, PreemptionPoint};
use runtime::spans::ring::SpanRing;
use runtime::spans::{RequestSpan, RunEnd, RunSpan, Span};

const MODELS: u32 = 64;

/// A core with a constant number of waiting requests.
struct Loaded {
    core: Core,
    random: Random,
    now: Nanos,
    actions: Vec<Action>,
}

impl Loaded {
    fn new(waiting: usize) -> Loaded {
        let queues = QueueLayout { shared: 0, real_time: 1, best_effort: 4, yielding: 0 };
        let mut core = Core::new(CoreOptions {
            queues,
            capabilities: builtin::mi50().gpu.capabilities(),
            ..CoreOptions::default()
        });
        let mut actions = Vec::new();
        let kernels: Arc<[KernelProfile]> = builtin::mi50().models[2].kernels.as_slice().into();
        for model in (0..MODELS).map(ModelId) {
            let added = Event::ModelAdded { model, steps: kernels.len(), queue_capacity: 65_536 };
            core.step(Nanos::ZERO, added, &mut actions);
            let (kernels, weight_bytes) = (kernels.clone(), 0);
            let profiled = Event::Sim(SimEvent::ModelProfiled { model, kernels, weight_bytes });
            core.step(Nanos::ZERO, profiled, &mut actions);
        }
        let mut loaded = Loaded { core, random: Random::new(1), now: Nanos::ZERO, actions };
        for index in 0..waiting {
            loaded.arrive([Class::RealTime, Class::BestEffort][index % 2]);
        }
        loaded
    }

    fn arrive(&mut self, class: Class) {
        self.now += Nanos(1_000);
        let request = self.core.next_request_id().expect("below the bound");
        let model = ModelId(self.random.below(u64::from(MODELS)) as u32);
        let deadline = self.now + Nanos(1_000_000_000_000 + self.random.below(1_000_000_000));
        let arrival = Event::Arrival { request, model, class, priority: 1, deadline };
        self.feed(arrival);
    }

    /// Feeds an event, completes preemptions, and returns whether a request ended.
    fn feed(&mut self, event: Event) -> bool {
        self.core.step(self.now, event, &mut self.actions);
        let mut ended = false;
        while let Some(action) = self.actions.pop() {
            ended |= matches!(action, Action::End { .. });
            if let Action::Preempt { queue, .. } = action {
                let point = PreemptionPoint::before(1);
                self.core.step(
                    self.now,
                    Event::SegmentPreempted { queue, point, busy: Nanos(500) },
                    &mut self.actions,
                );
            }
        }
        ended
    }

    /// One request ends and one of its class arrives: two steps.
    fn turn(&mut self) {
        let queue = self.random.below(5) as usize;
        let busy = Nanos(1_000);
        // Real time is never idle; a best-effort queue may be.
        let class = if queue > 0 && self.feed(Event::SegmentDone { queue, busy }) {
            Class::BestEffort
        } else {
            self.feed(Event::SegmentDone { queue: 0, busy });
            Class::RealTime
        };
        self.arrive(class);
    }
}

fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("core_steps");
    group.throughput(Throughput::Elements(2));
    for waiting in [100, 1_000, 10_000] {
        let mut loaded = Loaded::new(waiting);
        group.bench_function(BenchmarkId::from_parameter(waiting), |b| b.iter(|| loaded.turn()));
    }
    group.finish();
}

fn selection(c: &mut Criterion) {
    let set = builtin::mi50();
    let mut slowdowns = PairSlowdowns::default();
    slowdowns.ensure(0, set.models[2].kernels.len());
    let candidates: Vec<PaddingCandidate> = (0..10)
        .map(|queue| PaddingCandidate {
            queue,
            model: queue,
            kernel: set.models[queue % 5].kernels[queue * 3],
            taken: 4,
        })
        .collect();
    let device =
        PaddingDevice { sms: 60, launch: Nanos(20_000), gap: Nanos(1_000), inside_tile: true };
    let mut grants = Vec::with_capacity(10);
    for (name, rules) in [("atoll", PaddingRules::ATOLL), ("reef", PaddingRules::REEF)] {
        let mut step = 0;
        c.bench_function(&format!("padding_10_candidates/{name}"), |b| {
            b.iter(|| {
                grants.clear();
                step = (step + 1) % 50;
                let kernels = &set.models[2].kernels;
                let host =
                    PaddedTask { model: 0, kernels, step, ready: true, elapsed: Nanos::ZERO };
                padding::select(rules, device, host, &candidates, &slowdowns, &mut grants);
                black_box(&grants);
            });
        });
    }
}

/// What a request that runs alone costs while nobody looks: a number, its run and itself, in a ring
/// that is full.
fn recording(criterion: &mut Criterion) {
    let mut ring = SpanRing::new(65_536);
    let (mut at, model) = (0u64, ModelKey::new(0, 1));
    let mut record = || {
        at += 1_000;
        let number = ring.next_number();
        let (class, now) = (Class::RealTime, Nanos(black_box(at)));
        ring.record(Span::Run(RunSpan {
            job: number,
            model,
            class,
            queue: 0,
            rows: 1,
            first_step: 0,
            next_step: 9,
            step_count: 9,
            began: now,
            ended: now,
            preempt_requested: Nanos::ZERO,
            preempted_for: None,
            end: RunEnd::Done,
        }));
        ring.record(Span::Request(RequestSpan {
            number,
            job: number,
            model,
            class,
            priority: 1,
            rows: 0,
            arrived: now,
            staged: now,
            started: now,
            answered: now,
            deadline: Nanos::MAX,
            end: End::Done,
        }));
    };
    (0..65_536).for_each(|_| record());
    let mut group = criterion.benchmark_group("spans");
    group.throughput(Throughput::Elements(1));
    group.bench_function("record a request", |bencher| bencher.iter(&mut record));
}

criterion_group!(benches, steps, selection, recording);
criterion_main!(benches);
