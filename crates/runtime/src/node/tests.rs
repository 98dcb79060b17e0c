use std::any::Any;
use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};

use base::{MonotonicClock, Random};
use model::LaunchPlan;

use super::*;
use crate::core::End;
use crate::spans::explanation::explain;
use crate::spans::{RequestSpan, RunEnd, Span};
use device::{Completion, DeviceInfo, Outcome, PreemptionLevel, QueueOptions};

/// Steps of a task; the plan has none, as if the device had its own steps.
const STEPS: usize = 10;

/// A call to a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Launch { queue: u32, class: Class, steps: Range<usize> },
    Preempt { queue: u32 },
    Confine { queue: u32, confined: bool },
}

/// A device that records calls and completes a segment when the test says so.
struct Recorder {
    info: DeviceInfo,
    partition: Option<u32>,
    book: Arc<Mutex<Book>>,
}

#[derive(Default)]
struct Book {
    queues: Vec<QueueOptions>,
    calls: Vec<Call>,
    running: Vec<(u32, Segment)>,
    sink: Option<Arc<dyn CompletionSink>>,
}

struct RecordedQueue(u32, Arc<Mutex<Book>>);

struct RecordedProgram {
    plan: Arc<LaunchPlan>,
    class: Class,
}

struct RecordedTask {
    class: Class,
    next_step: usize,
}

impl Device for Recorder {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn unsupported_steps(&self, _: &LaunchPlan) -> Vec<DeviceError> {
        Vec::new()
    }

    fn load(&self, _: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        Err(DeviceError::BadPlan("programs are made by hand".to_string()))
    }

    fn best_effort_sms(&self) -> Option<u32> {
        self.partition
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        let mut book = self.book.lock().unwrap();
        book.queues.push(options);
        book.sink = Some(sink);
        Ok(Box::new(RecordedQueue(options.id, self.book.clone())))
    }
}

impl Queue for RecordedQueue {
    fn launch(&self, mut segment: Segment) -> Result<(), Segment> {
        let mut book = self.1.lock().unwrap();
        if book.running.iter().any(|(queue, _)| *queue == self.0) {
            return Err(segment);
        }
        let class = segment.task.as_any_mut().downcast_mut::<RecordedTask>().unwrap().class;
        let steps = segment.steps.clone();
        book.calls.push(Call::Launch { queue: self.0, class, steps });
        book.running.push((self.0, segment));
        Ok(())
    }

    fn preempt(&self) {
        self.1.lock().unwrap().calls.push(Call::Preempt { queue: self.0 });
    }

    fn confine(&self, confined: bool) {
        self.1.lock().unwrap().calls.push(Call::Confine { queue: self.0, confined });
    }
}

impl Program for RecordedProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.plan
    }

    fn resident(&self) -> Bytes {
        Bytes(0)
    }

    fn prepare(&self, _: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        Ok(Box::new(RecordedTask { class: self.class, next_step: 0 }))
    }
}

impl Task for RecordedTask {
    fn step_count(&self) -> usize {
        STEPS
    }

    fn next_step(&self) -> usize {
        self.next_step
    }

    fn record_step_times(&mut self) {}

    fn step_times(&self) -> Option<&[Nanos]> {
        None
    }

    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError> {
        match self.next_step {
            STEPS => Ok(Vec::new()),
            step => Err(DeviceError::BadPlan(format!("outputs at step {step}"))),
        }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// A node on a recorder, with a model of each class.
struct Bench {
    node: Node,
    book: Arc<Mutex<Book>>,
    models: [(Class, ModelKey); 2],
}

impl Bench {
    fn new(preemption: PreemptionLevel, queues: usize) -> Bench {
        Bench::with(preemption, queues, NodeOptions::default())
    }

    fn under(policy: &str) -> Bench {
        let policy = policy.to_string();
        let options = NodeOptions {
            policy,
            real_time_queues: 2,
            best_effort_queues: 3,
            ..NodeOptions::default()
        };
        Bench::with(PreemptionLevel::InsideTile, 3, options)
    }

    fn with(preemption: PreemptionLevel, queues: usize, options: NodeOptions) -> Bench {
        Bench::over(preemption, queues, None, options)
    }

    fn over(
        preemption: PreemptionLevel,
        queues: usize,
        partition: Option<u32>,
        options: NodeOptions,
    ) -> Bench {
        let info = DeviceInfo {
            name: "recorder".to_string(),
            description: String::new(),
            preemption,
            memory: Bytes(0),
            queues,
            rounding: 0.0,
        };
        let book = Arc::new(Mutex::new(Book::default()));
        let device = Arc::new(Recorder { info, partition, book: book.clone() });
        let clock = Arc::new(MonotonicClock::new());
        let node = Node::start(device, options, clock).unwrap();
        let models = [Class::RealTime, Class::BestEffort].map(|class| {
            let program = RecordedProgram { plan: Arc::default(), class };
            let config = ModelConfig { class, ..ModelConfig::default() };
            (class, node.add_model(Arc::new(program), &config))
        });
        Bench { node, book, models }
    }

    fn submit(&self, class: Class) -> Receiver<Reply> {
        let (sender, receiver) = channel();
        let model = self.models.iter().find(|(of, _)| *of == class).unwrap().1;
        let request =
            Request { model, inputs: Vec::new(), class: None, priority: None, timeout: None };
        self.node.submit(request, Box::new(move |reply| sender.send(reply).unwrap()));
        receiver
    }

    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.book.lock().unwrap().calls)
    }

    /// Completes the segment on `queue` at step `at`: preempted, or done if that is the last.
    fn complete(&self, queue: u32, at: usize) {
        let (segment, sink) = {
            let mut book = self.book.lock().unwrap();
            let index = book.running.iter().position(|(of, _)| *of == queue).unwrap();
            (book.running.remove(index).1, book.sink.clone().unwrap())
        };
        let Segment { token, mut task, .. } = segment;
        task.as_any_mut().downcast_mut::<RecordedTask>().unwrap().next_step = at;
        let outcome = if at == STEPS { Outcome::Done } else { Outcome::Preempted };
        sink.complete(Completion { queue, token, task, outcome, busy: Nanos::from_micros(10) });
    }
}

fn launch(queue: u32, class: Class, from: usize) -> Call {
    Call::Launch { queue, class, steps: from..STEPS }
}

#[test]
fn reserves_a_high_priority_queue_where_preemption_is_fast() {
    let priorities = |level, queues| {
        let bench = Bench::new(level, queues);
        let book = bench.book.lock().unwrap();
        assert!(book.queues.iter().enumerate().all(|(at, queue)| queue.id as usize == at));
        book.queues.iter().map(|queue| queue.high_priority).collect::<Vec<_>>()
    };
    assert_eq!(priorities(PreemptionLevel::InsideTile, 3), [true, false, false]);
    assert_eq!(priorities(PreemptionLevel::TileBoundaries, 1), [true, false]);
    assert_eq!(priorities(PreemptionLevel::BetweenLaunches, 3), [false; 3]);
    assert_eq!(priorities(PreemptionLevel::None, 1), [false]);
}

#[test]
fn real_time_preempts_best_effort_which_resumes() {
    let bench = Bench::new(PreemptionLevel::InsideTile, 3);
    let (one, other) = (bench.submit(Class::BestEffort), bench.submit(Class::BestEffort));
    let best_effort = |queue, from| launch(queue, Class::BestEffort, from);
    assert_eq!(bench.calls(), [best_effort(1, 0), best_effort(2, 0)]);

    let first = bench.submit(Class::RealTime);
    // The preemption precedes the launch.
    let started =
        [Call::Preempt { queue: 1 }, Call::Preempt { queue: 2 }, launch(0, Class::RealTime, 0)];
    assert_eq!(bench.calls(), started);
    bench.complete(2, 4);
    bench.complete(1, 7);
    let late = bench.submit(Class::BestEffort);
    assert_eq!(bench.calls(), [], "nothing runs beside real time");

    bench.complete(0, STEPS);
    assert_eq!(first.try_recv().unwrap().result, Ok(Vec::new()));
    // Tasks resume in order of arrival.
    assert_eq!(bench.calls(), [best_effort(1, 7), best_effort(2, 4)]);
    bench.complete(1, STEPS);
    bench.complete(2, STEPS);
    assert_eq!(bench.calls(), [best_effort(1, 0)]);
    bench.complete(1, STEPS);
    for (reply, preemptions) in [(one, 1), (other, 1), (late, 0)] {
        let reply = reply.try_recv().unwrap();
        assert_eq!(reply.result, Ok(Vec::new()));
        assert_eq!(reply.timing.preemptions, preemptions);
    }
}

#[test]
fn real_time_reply_is_sent_before_best_effort_resumes() {
    for broken in [false, true] {
        let bench = Bench::new(PreemptionLevel::InsideTile, 3);
        let _best_effort = bench.submit(Class::BestEffort);
        let (sender, before) = channel();
        let (model, book) = (bench.models[0].1, bench.book.clone());
        let request =
            Request { model, inputs: Vec::new(), class: None, priority: None, timeout: None };
        let reply = move |_| {
            sender.send(std::mem::take(&mut book.lock().unwrap().calls)).unwrap();
            assert!(!broken, "a reply callback may panic");
        };
        bench.node.submit(request, Box::new(reply));
        bench.complete(1, 4);
        bench.calls();
        let complete = std::panic::AssertUnwindSafe(|| bench.complete(0, STEPS));
        assert_eq!(std::panic::catch_unwind(complete).is_err(), broken);
        assert_eq!(before.try_recv().unwrap(), [], "nothing was started before");
        assert_eq!(bench.calls(), [launch(1, Class::BestEffort, 4)], "and then it was");
    }
}

/// One real-time request beside endless best effort; the calls meanwhile.
fn beside_best_effort(bench: &Bench) -> Vec<Call> {
    let reply = bench.submit(Class::RealTime);
    let mut calls = bench.calls();
    if calls.contains(&Call::Preempt { queue: 1 }) {
        bench.complete(1, 0);
    }
    bench.complete(0, STEPS);
    assert_eq!(reply.try_recv().unwrap().result, Ok(Vec::new()));
    calls.extend(bench.calls());
    calls
}

#[test]
fn confines_an_admitted_co_runner_and_releases_it() {
    let real_time = launch(0, Class::RealTime, 0);
    for partition in [Some(16), None] {
        let bench = Bench::over(PreemptionLevel::InsideTile, 2, partition, NodeOptions::default());
        let _best_effort = bench.submit(Class::BestEffort);
        bench.calls();
        // The co-runner does not slow real time down, so the pair is admitted.
        let rounds: Vec<_> = (0..10_000).map(|_| beside_best_effort(&bench)).collect();
        let confine = |confined| Call::Confine { queue: 1, confined };
        let stays = match partition {
            Some(_) => vec![confine(true), real_time.clone(), confine(false)],
            None => vec![real_time.clone()],
        };
        let preemptible =
            [Call::Preempt { queue: 1 }, real_time.clone(), launch(1, Class::BestEffort, 0)];
        assert!(rounds.iter().all(|calls| *calls == stays || *calls == preemptible));
        assert!(
            rounds[..32].iter().all(|calls| *calls == preemptible),
            "nothing is known of it yet"
        );
        let admitted = rounds[8_000..].iter().filter(|calls| **calls == stays).count();
        assert!(admitted > 1_800, "{admitted} of the last 2000 with {partition:?}");
    }
}

#[test]
fn classes_never_share_a_queue() {
    for seed in 0..50 {
        let mut random = Random::new(seed);
        let bench = Bench::new(PreemptionLevel::InsideTile, 1 + random.below(4) as usize);
        let mut replies = Vec::new();
        for _ in 0..200 {
            if random.below(2) == 0 {
                let class = if random.below(3) == 0 { Class::RealTime } else { Class::BestEffort };
                replies.push(bench.submit(class));
            } else {
                complete_one(&bench, &mut random);
            }
            check_calls(&bench);
        }
        while !bench.book.lock().unwrap().running.is_empty() {
            complete_one(&bench, &mut random);
            check_calls(&bench);
        }
        for reply in replies {
            assert_eq!(reply.try_recv().unwrap().result, Ok(Vec::new()), "seed {seed}");
        }
    }
}

/// Completes a running segment, or preempts best effort.
fn complete_one(bench: &Bench, random: &mut Random) {
    let (queue, next, real_time) = {
        let mut book = bench.book.lock().unwrap();
        let count = book.running.len() as u64;
        if count == 0 {
            return;
        }
        let (queue, segment) = &mut book.running[random.below(count) as usize];
        let task = segment.task.as_any_mut().downcast_mut::<RecordedTask>().unwrap();
        (*queue, task.next_step, task.class == Class::RealTime)
    };
    let remaining = (STEPS - next) as u64;
    let at = if real_time { STEPS } else { next + random.below(remaining + 1) as usize };
    bench.complete(queue, at);
}

fn check_calls(bench: &Bench) {
    for call in bench.calls() {
        match call {
            Call::Launch { queue, class, .. } => {
                assert_eq!(queue == 0, class == Class::RealTime, "{class:?} on queue {queue}");
            }
            Call::Preempt { queue } => assert_ne!(queue, 0, "real time is not preempted"),
            Call::Confine { .. } => panic!("the device has no partition"),
        }
    }
    let book = bench.book.lock().unwrap();
    assert!(book.queues.iter().all(|queue| queue.high_priority == (queue.id == 0)));
}

/// `high_priority` and `preemptible` of every queue.
fn queues(bench: &Bench) -> Vec<(bool, bool)> {
    let book = bench.book.lock().unwrap();
    book.queues.iter().map(|queue| (queue.high_priority, queue.preemptible)).collect()
}

#[test]
fn queue_options_follow_from_policy_and_device() {
    let (plain, first, preemptible) = ((false, false), (true, false), (false, true));
    assert_eq!(queues(&Bench::under("atoll")), [first, preemptible, preemptible]);
    assert_eq!(queues(&Bench::under("reef_n")), [first, preemptible, preemptible]);
    assert_eq!(queues(&Bench::under("sequential")), [plain]);
    assert_eq!(queues(&Bench::under("free_streams")), [plain; 5]);
    assert_eq!(queues(&Bench::under("priority_streams")), [first, first, plain, plain, plain]);
    assert_eq!(queues(&Bench::under("rt_only")), [first, plain, plain]);
    let slow = |policy: &str| {
        let options = NodeOptions { policy: policy.to_string(), ..NodeOptions::default() };
        queues(&Bench::with(PreemptionLevel::BetweenLaunches, 2, options))
    };
    assert_eq!(slow("atoll"), [preemptible, preemptible]);
    assert_eq!(slow("rt_only"), [plain, plain]);
    assert_eq!(slow("reef_n"), [first, preemptible]);
    assert_eq!(slow("sequential"), [plain]);
    let yields = |level| {
        let options = NodeOptions { preempt_real_time: true, ..NodeOptions::default() };
        queues(&Bench::with(level, 2, options))
    };
    assert_eq!(yields(PreemptionLevel::InsideTile), [first, preemptible, (true, true)]);
    assert_eq!(yields(PreemptionLevel::BetweenLaunches), [preemptible, preemptible]);
}

#[test]
fn refuses_policies_that_the_device_does_not_support() {
    let start = |policy: &str| {
        let bench = Bench::under("atoll");
        let options = NodeOptions { policy: policy.to_string(), ..NodeOptions::default() };
        let clock = Arc::new(MonotonicClock::new());
        Node::start(bench.node.device().clone(), options, clock).err().unwrap().to_string()
    };
    assert!(start("reef").contains("--device sim"), "{}", start("reef"));
    assert!(start("unknown").contains("free_streams"), "{}", start("unknown"));
    for name in crate::policy::NAMES.into_iter().filter(|name| *name != "reef") {
        assert_eq!(Bench::under(name).node.policy(), name);
    }
}

#[test]
fn real_time_waits_for_preemption_where_the_policy_says_so() {
    let bench = Bench::under("reef_n");
    let be = bench.submit(Class::BestEffort);
    assert_eq!(bench.calls(), [launch(1, Class::BestEffort, 0)]);
    let rt = bench.submit(Class::RealTime);
    assert_eq!(bench.calls(), [Call::Preempt { queue: 1 }]);
    bench.complete(1, 5);
    assert_eq!(bench.calls(), [launch(0, Class::RealTime, 0)]);
    bench.complete(0, STEPS);
    assert_eq!(bench.calls(), [launch(1, Class::BestEffort, 5)]);
    bench.complete(1, STEPS);
    assert!(rt.try_recv().unwrap().result.is_ok() && be.try_recv().unwrap().result.is_ok());
    let record = bench.node.preemptions().recent;
    assert_eq!(record[0].caused_by, Some(bench.models[0].1), "known while it still waits");
}

#[test]
fn policies_without_preemption_preempt_nothing() {
    let bench = Bench::under("sequential");
    let replies = [Class::BestEffort, Class::BestEffort, Class::RealTime].map(|c| bench.submit(c));
    assert_eq!(bench.calls(), [launch(0, Class::BestEffort, 0)]);
    bench.complete(0, STEPS);
    assert_eq!(bench.calls(), [launch(0, Class::RealTime, 0)], "real time goes first");
    bench.complete(0, STEPS);
    bench.complete(0, STEPS);
    for policy in ["free_streams", "priority_streams"] {
        let bench = Bench::under(policy);
        let _replies = [Class::BestEffort, Class::RealTime].map(|class| bench.submit(class));
        let side_by_side = [launch(2, Class::BestEffort, 0), launch(0, Class::RealTime, 0)];
        assert_eq!(bench.calls(), side_by_side, "{policy}");
    }
    assert!(replies.iter().all(|reply| reply.try_recv().unwrap().result.is_ok()));
    assert_eq!(bench.node.preemptions().total, 0);
}

#[test]
fn real_time_only_refuses_best_effort() {
    let bench = Bench::under("rt_only");
    let refused = bench.submit(Class::BestEffort).try_recv().unwrap();
    assert_eq!(refused.result, Err(Rejection::RealTimeOnly));
    let rt = bench.submit(Class::RealTime);
    bench.complete(0, STEPS);
    assert!(rt.try_recv().unwrap().result.is_ok());
}

#[test]
fn preemptions_are_recorded() {
    let options = NodeOptions { preemptions_kept: 2, ..NodeOptions::default() };
    let bench = Bench::with(PreemptionLevel::InsideTile, 3, options);
    let [rt, be] = bench.models.map(|(_, key)| key);
    let _replies =
        [Class::BestEffort, Class::BestEffort, Class::RealTime].map(|class| bench.submit(class));
    bench.complete(1, 4);
    bench.complete(2, STEPS);
    let record = bench.node.preemptions();
    assert_eq!((record.total, record.recent.len()), (2, 2));
    let [preempted, done] = &record.recent[..] else { unreachable!() };
    assert_eq!((preempted.caused_by, preempted.model, preempted.queue), (Some(rt), be, 1));
    assert_eq!(
        (preempted.steps.clone(), preempted.step_count, preempted.finished),
        (0..4, STEPS, false)
    );
    assert!(
        preempted.requested_at <= preempted.preempted_at
            && preempted.preempted_at <= done.preempted_at
    );
    assert!(done.finished && done.steps == (0..STEPS));
    assert_eq!(bench.node.preemption_stats(be).unwrap().counts.iter().sum::<u64>(), 2);
    assert_eq!(bench.node.preemption_stats(rt).unwrap().caused, 2);
    assert_eq!(
        bench.node.stats(be).unwrap().preemptions,
        1,
        "one was preempted, the other was done"
    );

    // A cancellation is no preemption by real time, and the ring drops the oldest entry.
    bench.complete(0, STEPS);
    bench.calls();
    let handle = bench.node.submit(
        Request { model: be, inputs: Vec::new(), class: None, priority: None, timeout: None },
        Box::new(|_| {}),
    );
    handle.cancel();
    assert_eq!(bench.calls(), [launch(2, Class::BestEffort, 0), Call::Preempt { queue: 2 }]);
    bench.complete(2, 3);
    let record = bench.node.preemptions();
    assert_eq!((record.total, record.recent.len()), (3, 2));
    assert_eq!(record.recent[1].caused_by, None);
    assert_eq!(bench.node.preemption_stats(be).unwrap().counts.iter().sum::<u64>(), 2);
}

#[test]
fn spans_show_who_was_preempted_for_whom() {
    let bench = Bench::new(PreemptionLevel::InsideTile, 3);
    let [rt, be] = bench.models.map(|(_, key)| key);
    let _replies = [Class::BestEffort, Class::RealTime].map(|class| bench.submit(class));
    bench.complete(1, 4);
    bench.complete(0, STEPS);
    bench.complete(1, STEPS);
    let mut spans = Vec::new();
    let read = bench.node.spans_since(0, 100, &mut spans);
    assert_eq!((read.next, read.lost), (5, 0));
    assert_eq!(bench.node.spans_end(), 5);
    let runs: Vec<_> = spans
        .iter()
        .filter_map(|span| match span {
            Span::Run(run) => Some((run.job, run.model, run.queue, run.end, run.preempted_for)),
            _ => None,
        })
        .collect();
    assert_eq!(
        runs,
        [
            (1, be, 1, RunEnd::Preempted, Some(rt)),
            (2, rt, 0, RunEnd::Done, None),
            (1, be, 1, RunEnd::Done, None)
        ]
    );
    let requests: Vec<RequestSpan> = spans
        .iter()
        .filter_map(|span| match span {
            Span::Request(request) => Some(*request),
            _ => None,
        })
        .collect();
    assert_eq!(requests.iter().map(|span| span.job).collect::<Vec<_>>(), [2, 1]);
    for span in &requests {
        assert!(span.arrived <= span.staged && span.staged <= span.started);
        assert!(span.started <= span.answered && span.end == End::Done);
    }
    let name = |key| if key == rt { "fast".to_string() } else { "slow".to_string() };
    let why = explain(&requests[1], &spans, &name);
    assert_eq!(why.runs.len(), 2);
    assert!(why.sentence.contains("It was preempted once for 'fast'"), "{}", why.sentence);
    // A reader that comes back gets what is new.
    spans.clear();
    assert_eq!(bench.node.spans_since(read.next, 100, &mut spans).next, 5);
    assert!(spans.is_empty());
}

#[test]
fn a_device_whose_run_makes_no_progress_refuses_requests() {
    let bench = Bench::new(PreemptionLevel::InsideTile, 3);
    let shared = &bench.node.shared;
    let _running = bench.submit(Class::RealTime);
    let look = || {
        let (mut events, mut due) = (VecDeque::new(), Vec::new());
        let reset = Action::ResetDevice;
        shared.act(&mut shared.lock(), Nanos::MAX, reset, &mut events, &mut due);
        events
    };
    assert!(matches!(look().pop_front(), Some(Event::DeviceAlive)), "it is seen the first time");
    assert!(bench.node.fault().is_none());
    assert!(look().is_empty());
    assert!(bench.node.fault().is_some());
    let reply = bench.submit(Class::RealTime).try_recv().unwrap();
    assert!(matches!(reply.result, Err(Rejection::Device(DeviceError::Faulted { .. }))));
}
