//! A scenario in virtual time: the real core under a policy, a simulated GPU, clients and a
//! checker.

mod setup;

use std::fmt::Write as _;

use base::{Histogram, Nanos, Random};
use device::DeviceCapabilities;
use device::sim::{Gpu, GpuEvent, GpuSegment, ModelProfile, TaskId, reference_output};
use model::config::Class;
use runtime::core::{Action, Core, End, Event, ModelId, RequestId, SimAction, SimEvent};
use runtime::policy::{CoRun, Policy, PreemptionPoint, ResumePoint, Rules};
use runtime::spans::core_recorder::{self, CoreRecorder};
use std::sync::Arc;

use crate::arrival::ArrivalTimes;
use crate::checker::Checker;
use crate::outcome::{OutcomeCounts, RequestOutcome};
use crate::recorded_run::RecordedRun;
use crate::scenario::{Scenario, ScenarioError};

/// How long requests in flight may take after the clients have stopped.
const DRAIN: Nanos = Nanos::from_millis(20_000);

/// What a simulation records besides its figures.
#[derive(Clone, Copy, Debug, Default)]
pub struct SimulationOptions {
    /// Whether the checker runs.
    pub check: bool,
    /// Whether every event and action is recorded.
    pub trace: bool,
    /// Whether spans of work are recorded, for the timeline.
    pub spans: bool,
    /// Maximum number of requests and runs that are recorded, the first ones; 0 for none.
    pub recorded_spans: usize,
    /// A bug that tests expect the checker to find.
    pub planted_bug: Option<PlantedBug>,
}

/// A bug that the checker must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedBug {
    /// A resumed task skips a tile.
    Restore,
    /// Padding assumes more SMs than there are.
    Budget,
    /// The core ends a cancelled request twice: at once and when it is preempted.
    ExactlyOnce,
    /// Real time runs in order of arrival instead of by deadline.
    EarliestDeadline,
}

/// A request in flight.
#[derive(Clone, Debug)]
struct LiveRequest {
    id: RequestId,
    client: usize,
    model: usize,
    class: Class,
    arrived: Nanos,
    deadline: Nanos,
    task: Option<TaskId>,
    launched: bool,
}

#[derive(Clone, Debug)]
struct ClientState {
    arrivals: ArrivalTimes,
    next: Option<Nanos>,
    outstanding: usize,
    skipped: u64,
    /// Its period began while it waited for a reply; it sends its next request with that reply.
    late: bool,
    cancels: Random,
}

/// The figures of a simulation.
#[derive(Clone, Debug, Default)]
pub struct SimulationOutcome {
    /// Seconds during which clients sent requests.
    pub seconds: f64,
    /// Latency of real-time replies.
    pub rt_latency: Histogram,
    /// Sum of the same, exact, in nanoseconds.
    pub rt_latency_sum: u128,
    /// Real-time replies.
    pub rt_done: u64,
    /// Real-time replies inside the measured time.
    pub rt_in_time: u64,
    /// The same for best effort.
    pub be_in_time: u64,
    /// Requests that ended without outputs, and arrivals that were skipped.
    pub dropped: u64,
    /// Arrivals that a client skipped because one of its requests was outstanding; they were never
    /// sent.
    pub skipped: u64,
    /// What became of real-time requests.
    pub rt: OutcomeCounts,
    /// What became of best-effort requests.
    pub be: OutcomeCounts,
    /// Preemptions of best effort for real time.
    pub preemptions: u64,
    /// From the preemption to the first real-time block, less the time of a launch.
    pub preempt_latency: Histogram,
    /// SM time that best effort used, and the part of it that was repeated, in nanoseconds.
    pub be_work: (f64, f64),
    /// SM time of real time.
    pub rt_work: f64,
    /// Violations that the checker found.
    pub violations: Vec<String>,
    /// All events and actions, if they are recorded.
    pub trace: String,
    /// Requests and runs, if they are recorded.
    pub recorded: Option<RecordedRun>,
    /// Number of events that the core consumed.
    pub steps: u64,
}

/// A scenario being simulated.
pub struct Simulation {
    core: Core,
    gpu: Gpu,
    rules: Rules,
    models: Vec<Arc<ModelProfile>>,
    scenario: Scenario,
    options: SimulationOptions,
    clients: Vec<ClientState>,
    live: Vec<Option<LiveRequest>>,
    cancels: Vec<(Nanos, RequestId)>,
    checker: Option<Checker>,
    now: Nanos,
    end: Nanos,
    rt_streams: std::ops::Range<usize>,
    streams: usize,
    rt_waiting: usize,
    preempt_started: Option<Nanos>,
    actions: Vec<Action>,
    recorder: Option<CoreRecorder>,
    outcome: SimulationOutcome,
}

/// Runs a scenario under its own policy.
pub fn run(
    scenario: &Scenario,
    options: SimulationOptions,
) -> Result<SimulationOutcome, ScenarioError> {
    Ok(Simulation::new(scenario, options)?.finish())
}

impl Simulation {
    /// Runs to the end.
    pub fn finish(mut self) -> SimulationOutcome {
        self.run_all();
        self.into_outcome()
    }

    /// Runs to the end and keeps the device, for its timeline.
    pub fn finish_with_gpu(mut self) -> (SimulationOutcome, Gpu, std::ops::Range<usize>) {
        self.run_all();
        let (gpu, streams) = (self.gpu.clone(), self.rt_streams.clone());
        (self.into_outcome(), gpu, streams)
    }

    /// The recorded requests and runs.
    fn recorded(&mut self) -> Option<RecordedRun> {
        let (spans, lost) = self.recorder.take()?.into_spans();
        let models = (0..).map(ModelId).zip(&self.models);
        Some(RecordedRun {
            name: format!("simulation of {}", self.gpu.profile().name),
            models: models
                .map(|(id, profile)| (core_recorder::key(id), profile.name.clone()))
                .collect(),
            spans,
            lost,
        })
    }

    fn run_all(&mut self) {
        let mut events = Vec::new();
        while let Some(next) = self.next_time() {
            let next = self.now.max(next);
            self.now = match self.checker {
                // The checker needs every change on the device.
                Some(_) => {
                    self.gpu.advance(next, &mut events);
                    next
                }
                None => self.gpu.advance_to_event(next, &mut events),
            };
            for (_, event) in events.drain(..) {
                self.device_event(event);
            }
            if self.core.next_timer().is_some_and(|timer| timer <= self.now) {
                self.feed(Event::Timer);
            }
            self.cancel_due();
            self.send_due();
            if let Some(checker) = &mut self.checker {
                checker.check_device(self.now, &self.gpu);
            }
        }
        self.outcome.recorded = self.recorded();
    }

    fn next_time(&self) -> Option<Nanos> {
        let sending = self.now < self.end;
        if !sending && (self.core.pending() == 0 || self.now >= self.end + DRAIN) {
            return None;
        }
        let clients = self.clients.iter().filter_map(|client| client.next);
        let clients = clients.filter(|at| *at < self.end);
        let cancels = self.cancels.iter().map(|(at, _)| *at);
        let next = clients.chain(cancels).chain(self.core.next_timer()).min();
        let Some(device) = self.gpu.next_event() else {
            return next.or(sending.then_some(self.end));
        };
        match &self.checker {
            Some(_) => Some(next.map_or(device, |next| next.min(device))),
            // Without checker the device advances to its next event by itself.
            None => next.or(Some(if sending { self.end } else { self.end + DRAIN })),
        }
    }

    fn note(&mut self, what: std::fmt::Arguments<'_>) {
        if self.options.trace {
            let _ = writeln!(self.outcome.trace, "{} {what}", self.now.0);
        }
    }

    fn device_event(&mut self, event: GpuEvent) {
        self.note(format_args!("{event:?}"));
        match event {
            GpuEvent::StepReady { stream, step } => {
                if matches!(self.rules.co_run, CoRun::Padding(_)) {
                    self.feed(Event::Sim(SimEvent::StepReady { queue: stream, step }));
                }
            }
            GpuEvent::Started { token, .. } => self.started(token),
            GpuEvent::Done { stream, token, busy } => {
                self.verify(token);
                if let Some(client) = self.live_of(token).map(|live| live.client) {
                    self.send_if_late(client);
                }
                self.feed(Event::SegmentDone { queue: stream, busy });
            }
            GpuEvent::Preempted { stream, step, tile, transmitted, busy, .. } => {
                let point = PreemptionPoint { step, tile, transmitted };
                self.feed(Event::SegmentPreempted { queue: stream, point, busy });
            }
            GpuEvent::Copied { token } => {
                if let Some(request) = self.request_of(token) {
                    if let Some(checker) = &mut self.checker {
                        checker.input_ready(self.now, request);
                    }
                    self.feed(Event::Sim(SimEvent::InputReady { request }));
                }
            }
            GpuEvent::Loaded { model } => {
                if let Some(checker) = &mut self.checker {
                    checker.loaded(self.now, model);
                }
                self.feed(Event::LoadDone { model: ModelId(model as u32) });
            }
            GpuEvent::Lost => {
                self.live.iter_mut().flatten().for_each(|live| live.task = None);
                self.preempt_started = None;
                if let Some(checker) = &mut self.checker {
                    checker.device_lost(self.now);
                }
                self.feed(Event::DeviceLost);
            }
            GpuEvent::Ready => self.feed(Event::DeviceReady),
        }
    }

    fn token(id: RequestId) -> u64 {
        (id.order() << 20) | id.slot() as u64
    }

    fn request_of(&self, token: u64) -> Option<RequestId> {
        let live = self.live.get((token & 0xF_FFFF) as usize)?.as_ref()?;
        (Simulation::token(live.id) == token).then_some(live.id)
    }

    fn live_of(&self, token: u64) -> Option<&LiveRequest> {
        let id = self.request_of(token)?;
        self.live[id.slot()].as_ref()
    }

    /// The first block of a segment runs.
    fn started(&mut self, token: u64) {
        let Some(live) = self.live_of(token).cloned() else { return };
        if let Some(checker) = &mut self.checker {
            checker.started(self.now, live.id);
        }
        if live.class == Class::RealTime
            && let Some(decided) = self.preempt_started.take()
        {
            let launch = Nanos(self.gpu.profile().launch_ns);
            self.outcome.preempt_latency.record((self.now - decided) - launch);
        }
    }

    /// Compares the output of a task with that of an undisturbed one.
    fn verify(&mut self, token: u64) {
        let Some(live) = self.live_of(token) else { return };
        let gpu = self.gpu.profile();
        let tiles = self.models[live.model].kernels.iter().map(|kernel| gpu.tiles(kernel));
        let want = reference_output(live.id.order(), tiles);
        let got = live.task.and_then(|task| self.gpu.output(task));
        let id = live.id;
        if got != Some(want)
            && let Some(checker) = &mut self.checker
        {
            checker.wrong_output(self.now, id);
        }
    }

    fn feed(&mut self, event: Event) {
        self.outcome.steps += 1;
        if let Some(recorder) = &mut self.recorder {
            recorder.event(self.now, &event);
        }
        let mut actions = std::mem::take(&mut self.actions);
        self.core.step(self.now, event, &mut actions);
        // Actions may feed the core again, so all of them are done before the next event.
        for action in std::mem::take(&mut actions) {
            self.act(action);
        }
        actions.clear();
        self.actions = actions;
    }

    fn act(&mut self, action: Action) {
        self.note(format_args!("{action:?}"));
        let now = self.now;
        if let Some(recorder) = &mut self.recorder {
            recorder.action(now, &action);
        }
        match action {
            Action::Launch { queue, request, steps, tile } => {
                self.launch(queue, request, steps, tile)
            }
            Action::Preempt { queue, how } => {
                if self.rt_waiting > 0 {
                    self.outcome.preemptions += 1;
                    self.preempt_started.get_or_insert(now);
                }
                self.gpu.preempt(now, queue, how);
            }
            // The simulated device divides steps instead.
            Action::Confine { .. } => {}
            Action::Sim(SimAction::SetBudget { queue, hold, take, expiry }) => {
                self.gpu.set_budget(now, queue, hold, take, expiry);
            }
            Action::Sim(SimAction::Pad { queue, step, sms, blocks }) => {
                self.gpu.pad(now, queue, step, sms, blocks);
            }
            Action::Sim(SimAction::CopyInputs { request }) => {
                if let Some(live) = self.live[request.slot()].as_ref() {
                    let bytes = self.models[live.model].input_bytes;
                    self.gpu.copy(now, Simulation::token(request), bytes);
                }
            }
            Action::Load { model, .. } => {
                self.gpu.load(now, model.0 as usize);
                if let Some(checker) = &mut self.checker {
                    checker.memory(now, self.gpu.resident_bytes());
                }
            }
            Action::Evict { model } => {
                self.gpu.evict(model.0 as usize);
                if let Some(checker) = &mut self.checker {
                    checker.evicted(model.0 as usize);
                }
            }
            Action::ResetDevice => self.gpu.reset(now),
            Action::End { request, end } => self.ended(request, end),
            Action::FreeModel { .. } => {}
        }
    }

    fn launch(
        &mut self,
        queue: usize,
        request: RequestId,
        steps: std::ops::Range<usize>,
        tile: u32,
    ) {
        let now = self.now;
        let Some(live) = self.live[request.slot()].as_mut() else { return };
        if let Some(checker) = &mut self.checker {
            checker.launched(now, request);
        }
        if !live.launched && live.class == Class::RealTime {
            self.rt_waiting -= 1;
        }
        live.launched = true;
        let model = live.model;
        let task = match live.task {
            Some(task) => task,
            None => self.gpu.create_task(model, request.order()),
        };
        live.task = Some(task);
        let segment = GpuSegment { token: Simulation::token(request), task, model, steps, tile };
        if self.gpu.enqueue(now, queue, segment).is_err() {
            self.feed(Event::SegmentFailed { queue, busy: Nanos::ZERO });
        }
    }

    fn ended(&mut self, request: RequestId, end: End) {
        let now = self.now;
        if let Some(checker) = &mut self.checker {
            checker.ended(now, request, end);
        }
        let Some(live) = self.live[request.slot()].take() else { return };
        if !live.launched && live.class == Class::RealTime {
            self.rt_waiting -= 1;
        }
        if let Some(task) = live.task {
            self.gpu.drop_task(task);
        }
        let outcome = &mut self.outcome;
        let counts = match live.class {
            Class::RealTime => &mut outcome.rt,
            Class::BestEffort => &mut outcome.be,
        };
        counts.count(outcome_of(end, now > live.deadline));
        let in_time = u64::from(now <= self.end);
        match (end, live.class) {
            (End::Done, Class::RealTime) => {
                outcome.rt_latency.record(now - live.arrived);
                outcome.rt_latency_sum += u128::from((now - live.arrived).0);
                outcome.rt_done += 1;
                outcome.rt_in_time += in_time;
            }
            (End::Done, Class::BestEffort) => outcome.be_in_time += in_time,
            _ => outcome.dropped += 1,
        }
        let client = &mut self.clients[live.client];
        client.outstanding -= 1;
        if client.arrivals.is_closed() {
            // A pause, so that a closed loop of refusals does not stop virtual time.
            let pause = if end == End::Done { Nanos::ZERO } else { Nanos::from_micros(100) };
            client.next = client.arrivals.next(now + pause);
        }
    }

    fn cancel_due(&mut self) {
        let now = self.now;
        let due: Vec<RequestId> =
            self.cancels.iter().filter(|(at, _)| *at <= now).map(|(_, request)| *request).collect();
        if due.is_empty() {
            return;
        }
        self.cancels.retain(|(at, _)| *at > now);
        for request in due {
            self.feed(Event::Cancel { request });
        }
    }

    fn send_due(&mut self) {
        for client in 0..self.clients.len() {
            while let Some(at) = self.clients[client].next
                && at <= self.now
                && at < self.end
            {
                let state = &mut self.clients[client];
                state.next =
                    if state.arrivals.is_closed() { None } else { state.arrivals.next(at) };
                if self.scenario.clients[client].one_outstanding && state.outstanding > 0 {
                    // Of several periods that have passed only the newest counts.
                    state.skipped += u64::from(state.late);
                    state.late = true;
                } else {
                    self.send(client);
                }
            }
            if self.clients[client].outstanding == 0 {
                self.send_if_late(client);
            }
        }
    }

    /// A late client sends its request as soon as its last task is done, before the device starts
    /// anything else.
    fn send_if_late(&mut self, client: usize) {
        if std::mem::take(&mut self.clients[client].late) && self.now < self.end {
            self.send(client);
        }
    }

    fn send(&mut self, client: usize) {
        let now = self.now;
        let spec = &self.scenario.clients[client];
        let (class, priority, cancel_percent) = (spec.class, spec.priority, spec.cancel_percent);
        let deadline = spec.deadline_ms.map_or(Nanos::MAX, |ms| now + Nanos((ms * 1e6) as u64));
        let model = self.models.iter().position(|model| model.name == spec.model).unwrap_or(0);
        let counts = match class {
            Class::RealTime => &mut self.outcome.rt,
            Class::BestEffort => &mut self.outcome.be,
        };
        counts.arrivals += 1;
        let Some(request) = self.core.next_request_id() else {
            counts.count(RequestOutcome::Refused);
            self.outcome.dropped += 1;
            return;
        };
        let state = &mut self.clients[client];
        state.outstanding += 1;
        if u64::from(cancel_percent) > state.cancels.below(100) {
            let after = Nanos(state.cancels.below(20_000_000));
            self.cancels.push((now + after, request));
        }
        if request.slot() >= self.live.len() {
            self.live.resize(request.slot() + 1, None);
        }
        self.rt_waiting += usize::from(class == Class::RealTime);
        let live = LiveRequest {
            id: request,
            client,
            model,
            class,
            arrived: now,
            deadline,
            task: None,
            launched: false,
        };
        self.live[request.slot()] = Some(live);
        if let Some(checker) = &mut self.checker {
            checker.arrived(now, request, model, class, priority, deadline);
        }
        self.note(format_args!("arrival {client} {}", request.order()));
        let model = ModelId(model as u32);
        self.feed(Event::Arrival { request, model, class, priority, deadline });
        if let Some(checker) = &mut self.checker {
            let waiting = self.core.request_counts(model).0;
            checker.queue_length(now, waiting, self.scenario.queue_capacity + self.streams);
        }
    }

    fn into_outcome(mut self) -> SimulationOutcome {
        let mut outcome = self.outcome;
        for stream in 0..self.streams {
            let work = self.gpu.work(stream);
            if self.rt_streams.contains(&stream) {
                outcome.rt_work += work.used;
            } else {
                outcome.be_work.0 += work.used;
                outcome.be_work.1 += work.redone;
            }
        }
        outcome.seconds = self.scenario.seconds;
        outcome.skipped = self.clients.iter().map(|client| client.skipped).sum();
        outcome.dropped += outcome.skipped;
        if let Some(checker) = &mut self.checker {
            outcome.violations = checker.finish(self.now);
        }
        for (class, counts) in
            [(Class::RealTime, &mut outcome.rt), (Class::BestEffort, &mut outcome.be)]
        {
            let open = self.live.iter().flatten().filter(|live| live.class == class).count() as u64;
            // What has no outcome is pending; that these are the requests still held is the proof
            // that each was counted once.
            counts.pending = counts.arrivals.saturating_sub(counts.good + counts.bad());
            outcome.violations.extend(
                counts
                    .violation(open)
                    .map(|what| format!("{}: {} requests: {what}", self.now, class.as_str())),
            );
        }
        outcome
    }
}

fn outcome_of(end: End, late: bool) -> RequestOutcome {
    match end {
        End::Done if late => RequestOutcome::Late,
        End::Done => RequestOutcome::Good,
        End::DeadlineExceeded => RequestOutcome::Late,
        End::Cancelled => RequestOutcome::Cancelled,
        End::Failed => RequestOutcome::Failed,
        End::QueueFull | End::NoSuchModel | End::ShuttingDown => RequestOutcome::Refused,
    }
}

/// Resumes tasks one tile too late.
#[derive(Debug)]
struct BrokenRestore(Box<dyn Policy>);

impl Policy for BrokenRestore {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn rules(&self, device: DeviceCapabilities) -> Rules {
        self.0.rules(device)
    }

    fn restore(&self, point: PreemptionPoint, known: ResumePoint) -> ResumePoint {
        let right = self.0.restore(point, known);
        ResumePoint { tile: right.tile + 1, ..right }
    }
}
