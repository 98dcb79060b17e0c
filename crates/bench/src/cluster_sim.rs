//! Clusters in virtual time: the real scheduler's core, the real routing and the real batching policies over GPUs that
//! are profiles.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use base::{Nanos, Random};
use cluster::balance::batch_progress::BatchPlan;
use cluster::balance::{BackendCandidate, choose, depth, spare};
use runtime::batching::{
    BatchPolicy, BatchProfile, Decision, EarlyDrop, LazyDrop, ModelView, Staggered, WaitingRequest,
    Worker,
};

pub mod scenario;
pub mod study;

/// Requests for one model under one objective.
#[derive(Clone, Debug)]
pub struct ClusterSession {
    /// Time of batches on a GPU.
    pub profile: BatchProfile,
    /// Time from arrival at the GPU until an answer is of no more use.
    pub budget: Nanos,
    /// Sessions that each answer feeds, and how many requests of it on average.
    pub feeds: Vec<(usize, f64)>,
}

/// A request for one session; several belong to one question of a client.
#[derive(Clone, Copy, Debug)]
struct Task {
    question: u32,
    /// Who sends it.
    frontend: usize,
}

/// What a client asked.
#[derive(Clone, Copy, Debug)]
struct Question {
    at: Nanos,
    open: u32,
    failed: bool,
}

/// A session on a GPU.
struct Slot {
    session: usize,
    batch: usize,
    /// Requests that a turn begins with before the first one has to go.
    least: usize,
    /// It is to go once all that wait are answered.
    leaving: bool,
    waiting: VecDeque<WaitingRequest>,
    tasks: VecDeque<Task>,
}

/// A GPU: its sessions take turns, a batch at a time.
#[derive(Default)]
struct Gpu {
    slots: Vec<Slot>,
    next: usize,
    running: Option<(usize, Vec<(WaitingRequest, Task)>)>,
    /// Counts runs, so that the end of one that a fault cut short means nothing.
    run: u64,
}

impl Gpu {
    /// Requests that wait or run here.
    fn requests(&self) -> usize {
        let waiting: usize = self.slots.iter().map(|slot| slot.waiting.len()).sum();
        waiting + self.running.as_ref().map_or(0, |(_, batch)| batch.len())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive { source: usize },
    Done { gpu: usize, run: u64 },
    Wake { gpu: usize },
}

/// Where a session's requests go.
#[derive(Default)]
struct Route {
    gpus: Vec<usize>,
    /// As each frontend sees them.
    candidates: Vec<Vec<BackendCandidate>>,
    place: HashMap<usize, usize>,
}

/// One of those a session's requests go to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// The GPU.
    pub gpu: usize,
    /// Its part; 0 for one that only helps out.
    pub weight: f64,
    /// Requests that its turns begin with, where it is one of a pool; else 0.
    pub least: usize,
}

/// Who asks: at a rate, for some sessions at once.
#[derive(Clone, Debug)]
pub struct Source {
    /// Questions a second.
    pub rate: f64,
    /// Sessions asked, with the number of requests for each.
    pub asks: Vec<(usize, u32)>,
    /// Whether gaps are exponential; else they are equal.
    pub poisson: bool,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Questions asked.
    pub asked: u64,
    /// Questions not answered in time, or not at all.
    pub bad: u64,
}

/// A cluster in virtual time.
pub struct ClusterSim {
    sessions: Vec<ClusterSession>,
    gpus: Vec<Gpu>,
    routes: Vec<Route>,
    sources: Vec<Source>,
    questions: Vec<Question>,
    free: Vec<u32>,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    sequence: u64,
    random: Random,
    now: Nanos,
    lazy: bool,
    /// Frontends that questions come to by turns; each sees only what it sent itself.
    frontends: usize,
    asked: usize,
    /// By second.
    tallies: Vec<Tally>,
    /// Requests that came, by session.
    arrived: Vec<u64>,
}

impl ClusterSim {
    /// `gpus` GPUs without work. With `lazy`, requests are dropped only once they are late.
    pub fn new(
        sessions: Vec<ClusterSession>,
        gpus: usize,
        sources: Vec<Source>,
        seed: u64,
        lazy: bool,
    ) -> ClusterSim {
        let mut fleet = ClusterSim {
            gpus: (0..gpus).map(|_| Gpu::default()).collect(),
            routes: sessions.iter().map(|_| Route::default()).collect(),
            arrived: vec![0; sessions.len()],
            sessions,
            questions: Vec::new(),
            free: Vec::new(),
            events: BinaryHeap::new(),
            sequence: 0,
            random: Random::new(seed),
            now: Nanos::ZERO,
            lazy,
            frontends: 1,
            asked: 0,
            tallies: Vec::new(),
            sources,
        };
        for source in 0..fleet.sources.len() {
            // Equal gaps begin anywhere, or all sources would ask at once.
            let gap = 1e9 / fleet.sources[source].rate.max(1e-9);
            let first = Nanos((fleet.random.unit_f64() * gap) as u64);
            fleet.schedule(first, Event::Arrive { source });
        }
        fleet
    }

    /// Several frontends instead of one; before routes are given.
    pub fn set_frontends(&mut self, frontends: usize) {
        self.frontends = frontends.max(1);
    }

    /// Requests that came for each session.
    pub fn arrived(&self) -> &[u64] {
        &self.arrived
    }

    /// What came of questions, by the second they were asked in.
    pub fn tallies(&self) -> &[Tally] {
        &self.tallies
    }

    /// Changes how often a source asks.
    pub fn set_rate(&mut self, source: usize, rate: f64) {
        self.sources[source].rate = rate;
    }

    fn schedule(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, event)));
    }

    /// What a GPU holds from now on, with batch sizes; what waits there for others is still answered.
    pub fn hold(&mut self, gpu: usize, wanted: &[(usize, usize)]) {
        let mut old = std::mem::take(&mut self.gpus[gpu].slots);
        let mut slots = Vec::with_capacity(wanted.len());
        for &(session, batch) in wanted {
            let full_time = self.sessions[session].profile.latency(batch);
            let share = batch.div_ceil(self.frontends);
            let depth = depth(batch).div_ceil(self.frontends);
            let route = &mut self.routes[session];
            if let Some(&place) = route.place.get(&gpu) {
                for candidates in &mut route.candidates {
                    let candidate = &mut candidates[place];
                    candidate.depth = depth;
                    candidate.progress = candidate.progress.map(|(progress, plan)| {
                        let min_batch = plan.min_batch.min(share);
                        (progress, BatchPlan { batch: share, min_batch, full_time })
                    });
                }
            }
            match old.iter().position(|slot| slot.session == session) {
                Some(index) => {
                    slots.push(Slot { batch, leaving: false, ..old.swap_remove(index) });
                }
                None => slots.push(Slot {
                    session,
                    batch,
                    least: 0,
                    leaving: false,
                    waiting: VecDeque::new(),
                    tasks: VecDeque::new(),
                }),
            }
        }
        // A backend answers what it has before it lets a model go; new requests go elsewhere.
        old.retain(|slot| !slot.waiting.is_empty());
        slots.extend(old.into_iter().map(|slot| Slot { leaving: true, least: 0, ..slot }));
        let gpu = &mut self.gpus[gpu];
        gpu.slots = slots;
        gpu.next = 0;
    }

    /// A GPU is lost with everything on it.
    pub fn lose(&mut self, gpu: usize) {
        let lost = std::mem::take(&mut self.gpus[gpu]);
        self.gpus[gpu].run = lost.run + 1;
        let running = lost.running.into_iter();
        let running = running.flat_map(|(session, batch)| {
            batch.into_iter().map(move |(waiting, task)| (session, waiting, task))
        });
        let waiting = lost.slots.into_iter().flat_map(|slot| {
            let session = slot.session;
            slot.waiting.into_iter().zip(slot.tasks).map(move |(w, t)| (session, w, t))
        });
        let all: Vec<(usize, WaitingRequest, Task)> = running.chain(waiting).collect();
        for route in &mut self.routes {
            if let Some(&place) = route.place.get(&gpu) {
                route.candidates.iter_mut().for_each(|candidates| candidates[place].down = true);
            }
        }
        // The frontend sees the connection break and tries one more backend.
        for (session, waiting, task) in all {
            self.settle_out(session, gpu, task, false);
            self.send(session, task, waiting.deadline);
        }
    }

    /// Where requests of a session go.
    pub fn route(&mut self, session: usize, targets: &[Target]) {
        let old = std::mem::take(&mut self.routes[session]);
        let mut route = Route {
            gpus: targets.iter().map(|target| target.gpu).collect(),
            place: targets.iter().enumerate().map(|(place, target)| (target.gpu, place)).collect(),
            candidates: Vec::with_capacity(self.frontends),
        };
        for frontend in 0..self.frontends {
            let candidate = |target: &Target| {
                let place = old.place.get(&target.gpu);
                let before = place.map(|&place| old.candidates[frontend][place]);
                let slots = &self.gpus[target.gpu].slots;
                let slot = slots.iter().find(|slot| slot.session == session);
                let batch = slot.map_or(0, |slot| slot.batch);
                let progress =
                    before.and_then(|before| before.progress).map(|(progress, _)| progress);
                BackendCandidate {
                    weight: target.weight,
                    outstanding: before.map_or(0, |before| before.outstanding),
                    depth: depth(batch).div_ceil(self.frontends),
                    down: before.is_some_and(|before| before.down),
                    progress: (target.least > 0 && batch > 0).then(|| {
                        (progress.unwrap_or_default(), self.turn(session, batch, target.least))
                    }),
                }
            };
            route.candidates.push(targets.iter().map(candidate).collect());
        }
        self.routes[session] = route;
        for target in targets {
            let slots = &mut self.gpus[target.gpu].slots;
            if let Some(slot) = slots.iter_mut().find(|slot| slot.session == session) {
                slot.least = target.least;
            }
        }
    }

    /// A turn as one frontend sees it.
    fn turn(&self, session: usize, batch: usize, least: usize) -> BatchPlan {
        let full_time = self.sessions[session].profile.latency(batch);
        let share = |requests: usize| requests.div_ceil(self.frontends);
        BatchPlan { batch: share(batch), min_batch: share(least.min(batch)), full_time }
    }

    /// Runs until `end`.
    pub fn run_until(&mut self, end: Nanos) {
        while let Some(Reverse((at, _, event))) = self.events.peek().copied() {
            if at > end {
                break;
            }
            self.events.pop();
            self.now = at;
            match event {
                Event::Arrive { source } => self.arrive(source),
                Event::Done { gpu, run } => self.finish(gpu, run),
                Event::Wake { gpu } if self.gpus[gpu].running.is_none() => self.start(gpu),
                Event::Wake { .. } => {}
            }
        }
        self.now = end;
    }

    fn arrive(&mut self, source: usize) {
        let Source { rate, poisson, .. } = self.sources[source];
        let gap = 1e9 / rate.max(1e-9);
        let gap = if poisson { self.random.exponential(gap) } else { gap };
        let next = self.now + Nanos((gap as u64).max(1));
        self.schedule(next, Event::Arrive { source });
        let asks = self.sources[source].asks.clone();
        let open: u32 = asks.iter().map(|(_, count)| *count).sum();
        let question = self.ask(open);
        self.asked += 1;
        let task = Task { question, frontend: self.asked % self.frontends };
        for (session, count) in asks {
            for _ in 0..count {
                self.arrived[session] += 1;
                let deadline = self.now + self.sessions[session].budget;
                self.send(session, task, deadline);
            }
        }
    }

    fn ask(&mut self, open: u32) -> u32 {
        let second = (self.now.0 / 1_000_000_000) as usize;
        if self.tallies.len() <= second {
            self.tallies.resize(second + 1, Tally::default());
        }
        self.tallies[second].asked += 1;
        let question = Question { at: self.now, open, failed: false };
        match self.free.pop() {
            Some(index) => {
                self.questions[index as usize] = question;
                index
            }
            None => {
                self.questions.push(question);
                (self.questions.len() - 1) as u32
            }
        }
    }

    /// One request of a question is over.
    fn close(&mut self, task: Task, good: bool) {
        let question = &mut self.questions[task.question as usize];
        question.open -= 1;
        if !good && !question.failed {
            question.failed = true;
            self.tallies[(question.at.0 / 1_000_000_000) as usize].bad += 1;
        }
        if question.open == 0 {
            self.free.push(task.question);
        }
    }

    fn send(&mut self, session: usize, task: Task, deadline: Nanos) {
        let route = &mut self.routes[session];
        let busy = |index: usize| self.gpus[route.gpus[index]].requests();
        let candidates = route.candidates.get_mut(task.frontend).map_or(&mut [][..], |list| list);
        let Some(chosen) = choose(candidates, self.now, busy, &mut self.random) else {
            return self.close(task, false);
        };
        let gpu = route.gpus[chosen];
        let slot = self.gpus[gpu].slots.iter_mut().find(|slot| slot.session == session);
        let Some(slot) = slot else { return self.close(task, false) };
        slot.waiting.push_back(WaitingRequest { arrived: self.now, deadline });
        slot.tasks.push_back(task);
        sent(&mut candidates[chosen], self.now);
        if self.gpus[gpu].running.is_none() {
            self.start(gpu);
        }
    }

    /// A request has left a GPU: answered, or given up before its turn.
    fn settle_out(&mut self, session: usize, gpu: usize, task: Task, given_up: bool) {
        let route = &mut self.routes[session];
        let Some(&place) = route.place.get(&gpu) else { return };
        let candidate = &mut route.candidates[task.frontend][place];
        candidate.outstanding = candidate.outstanding.saturating_sub(1);
        match &mut candidate.progress {
            Some((progress, plan)) if given_up => progress.dropped(self.now, *plan),
            Some((progress, plan)) => progress.completed(self.now, *plan),
            None => {}
        }
    }

    /// Lets the next session with something to do have its turn.
    fn start(&mut self, gpu: usize) {
        let count = self.gpus[gpu].slots.len();
        let mut decisions = Vec::new();
        let mut wake: Option<Nanos> = None;
        for turn in 0..count {
            let index = (self.gpus[gpu].next + turn) % count;
            let slot = &self.gpus[gpu].slots[index];
            if slot.waiting.is_empty() {
                continue;
            }
            let session = slot.session;
            let workers = [Worker { batch: slot.batch, busy: false }];
            let profile = &self.sessions[session].profile;
            let view = ModelView { waiting: &slot.waiting, workers: &workers, profile, running: 0 };
            decisions.clear();
            let (now, batch, least) = (self.now, slot.batch, slot.least);
            match (self.lazy, least > 1) {
                (true, _) => LazyDrop { batch_max: batch }.decide(now, &view, &mut decisions),
                (false, false) => EarlyDrop { batch }.decide(now, &view, &mut decisions),
                (false, true) => {
                    let batches = runtime::batching::StaggeredBatch { batch, least };
                    Staggered { batches }.decide(now, &view, &mut decisions);
                }
            }
            for decision in &decisions {
                match *decision {
                    Decision::Drop { count } => self.drop_first(gpu, index, count),
                    Decision::Launch { count, .. } => return self.launch(gpu, index, count),
                    Decision::WakeAt(at) => wake = Some(wake.map_or(at, |wake| wake.min(at))),
                }
            }
        }
        if let Some(at) = wake {
            self.schedule(at, Event::Wake { gpu });
        }
    }

    fn drop_first(&mut self, gpu: usize, index: usize, count: usize) {
        let slot = &mut self.gpus[gpu].slots[index];
        let session = slot.session;
        let waiting: Vec<WaitingRequest> = slot.waiting.drain(..count).collect();
        let dropped: Vec<Task> = slot.tasks.drain(..count).collect();
        for (waiting, task) in waiting.into_iter().zip(dropped) {
            self.settle_out(session, gpu, task, true);
            if !self.second_chance(session, gpu, task, waiting) {
                self.close(task, false);
            }
        }
    }

    /// Sends what a GPU gave up in time to one without anything to do, as a frontend does; whether there is one.
    fn second_chance(
        &mut self,
        session: usize,
        from: usize,
        task: Task,
        waiting: WaitingRequest,
    ) -> bool {
        let least = self.sessions[session].profile.latency(1);
        if self.lazy || self.now + least > waiting.deadline {
            return false;
        }
        let route = &mut self.routes[session];
        let others: Vec<usize> =
            (0..route.gpus.len()).filter(|&place| route.gpus[place] != from).collect();
        let mine = &mut route.candidates[task.frontend];
        let candidates: Vec<BackendCandidate> = others.iter().map(|&place| mine[place]).collect();
        let busy = |index: usize| self.gpus[route.gpus[others[index]]].requests();
        let Some(chosen) = spare(&candidates, busy) else { return false };
        let gpu = route.gpus[others[chosen]];
        let slots = &mut self.gpus[gpu].slots;
        let Some(slot) = slots.iter_mut().find(|slot| slot.session == session) else {
            return false;
        };
        slot.waiting.push_back(waiting);
        slot.tasks.push_back(task);
        sent(&mut mine[others[chosen]], self.now);
        self.start(gpu);
        true
    }

    fn launch(&mut self, gpu: usize, index: usize, count: usize) {
        let slot = &mut self.gpus[gpu].slots[index];
        let session = slot.session;
        let batch = slot.waiting.drain(..count).zip(slot.tasks.drain(..count)).collect();
        let ends = self.now + self.sessions[session].profile.latency(count);
        let gpu_state = &mut self.gpus[gpu];
        gpu_state.next = index + 1;
        gpu_state.run += 1;
        gpu_state.running = Some((session, batch));
        let run = gpu_state.run;
        self.schedule(ends, Event::Done { gpu, run });
    }

    fn finish(&mut self, gpu: usize, run: u64) {
        if self.gpus[gpu].run != run {
            return;
        }
        let Some((session, batch)) = self.gpus[gpu].running.take() else { return };
        for (waiting, task) in batch {
            self.settle_out(session, gpu, task, false);
            let good = self.now <= waiting.deadline;
            if good {
                self.feed(session, task, waiting.deadline);
            }
            self.close(task, good);
        }
        self.gpus[gpu].slots.retain(|slot| !slot.leaving || !slot.waiting.is_empty());
        self.start(gpu);
    }

    /// Sends what an answer yields to the sessions it feeds; their budgets begin where this one's ends, so what was
    /// saved here is theirs.
    fn feed(&mut self, session: usize, task: Task, deadline: Nanos) {
        for index in 0..self.sessions[session].feeds.len() {
            let (next, mean) = self.sessions[session].feeds[index];
            let whole = mean.floor();
            let extra = u32::from(self.random.unit_f64() < mean - whole);
            for _ in 0..whole as u32 + extra {
                self.questions[task.question as usize].open += 1;
                self.arrived[next] += 1;
                let budget = self.sessions[next].budget;
                self.send(next, task, deadline + budget);
            }
        }
    }
}

fn sent(candidate: &mut BackendCandidate, now: Nanos) {
    candidate.outstanding += 1;
    if let Some((progress, plan)) = &mut candidate.progress {
        progress.sent(now, *plan);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(rate: f64, lazy: bool) -> ClusterSim {
        let session = ClusterSession {
            profile: BatchProfile::linear(Nanos::from_millis(1), Nanos::from_millis(10), 32),
            budget: Nanos::from_millis(100),
            feeds: Vec::new(),
        };
        let source = Source { rate, asks: vec![(0, 1)], poisson: true };
        let mut fleet = ClusterSim::new(vec![session], 2, vec![source], 1, lazy);
        fleet.hold(0, &[(0, 32)]);
        fleet.hold(1, &[(0, 32)]);
        let target = |gpu| Target { gpu, weight: 1.0, least: 0 };
        fleet.route(0, &[target(0), target(1)]);
        fleet
    }

    fn bad(fleet: &ClusterSim) -> f64 {
        let sum = fleet.tallies().iter().fold((0, 0), |(a, b), t| (a + t.asked, b + t.bad));
        sum.1 as f64 / sum.0 as f64
    }

    #[test]
    fn a_light_load_is_answered_and_a_heavy_one_is_not() {
        // Two GPUs do at most 2 x 32 / 42 ms = 1523 requests a second.
        for (rate, good) in [(900.0, true), (3000.0, false)] {
            let mut fleet = fleet(rate, false);
            fleet.run_until(Nanos::from_millis(10_000));
            assert_eq!(bad(&fleet) < 0.001, good, "{rate}: {}", bad(&fleet));
        }
    }

    #[test]
    fn a_lost_gpu_loses_no_request_that_another_has_time_for() {
        let mut fleet = fleet(300.0, false);
        fleet.run_until(Nanos::from_millis(2000));
        fleet.lose(0);
        fleet.run_until(Nanos::from_millis(6000));
        assert!(bad(&fleet) < 0.002, "{}", bad(&fleet));
    }

    #[test]
    fn every_question_ends_once() {
        let mut fleet = fleet(2000.0, true);
        fleet.run_until(Nanos::from_millis(3000));
        fleet.set_rate(0, 1e-6);
        fleet.run_until(Nanos::from_millis(10_000));
        assert_eq!(fleet.free.len(), fleet.questions.len());
        assert!(fleet.tallies().iter().all(|tally| tally.bad <= tally.asked));
    }
}
