//! Clusters in virtual time: the real scheduler's core, the real routing and the real batching policies over GPUs that
//! are profiles.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use base::{Nanos, Random};
use cluster::balance::pace::Turn;
use cluster::balance::{Candidate, choose, depth, spare};
use runtime::batching::{
    BatchPolicy, BatchProfile, Decision, EarlyDrop, Gathered, LazyDrop, ModelView, Waiting, Worker,
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

/// A request for one session; several belong to one query of a client.
#[derive(Clone, Copy, Debug)]
struct SessionRequest {
    query: u32,
    /// Who sends it.
    frontend: usize,
}

/// What a client asked.
#[derive(Clone, Copy, Debug)]
struct ClientQuery {
    at: Nanos,
    open: u32,
    failed: bool,
}

/// A session on a GPU.
struct SessionQueue {
    session: usize,
    batch: usize,
    /// Requests that a turn begins with before the first one has to go.
    least: usize,
    /// It is to go once all that wait are answered.
    draining: bool,
    waiting: VecDeque<Waiting>,
    tasks: VecDeque<SessionRequest>,
}

/// A GPU: its sessions take turns, a batch at a time.
#[derive(Default)]
struct Gpu {
    slots: Vec<SessionQueue>,
    next: usize,
    running: Option<(usize, Vec<(Waiting, SessionRequest)>)>,
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
    candidates: Vec<Vec<Candidate>>,
    place: HashMap<usize, usize>,
}

/// One of those a session's requests go to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteTarget {
    /// The GPU.
    pub gpu: usize,
    /// Its part; 0 for one that only helps out.
    pub weight: f64,
    /// Requests that its turns begin with, where it is one of a pool; else 0.
    pub least: usize,
}

/// Who asks: at a rate, for some sessions at once.
#[derive(Clone, Debug)]
pub struct QuerySource {
    /// Questions a second.
    pub rate: f64,
    /// Sessions asked, with the number of requests for each.
    pub asks: Vec<(usize, u32)>,
    /// Whether gaps are exponential; else they are equal.
    pub poisson: bool,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecondCounts {
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
    sources: Vec<QuerySource>,
    queries: Vec<ClientQuery>,
    free: Vec<u32>,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    sequence: u64,
    random: Random,
    now: Nanos,
    lazy: bool,
    /// Frontends that queries come to by turns; each sees only what it sent itself.
    frontends: usize,
    asked: usize,
    /// By second.
    seconds: Vec<SecondCounts>,
    /// Requests that came, by session.
    arrived: Vec<u64>,
}

impl ClusterSim {
    /// `gpus` GPUs without work. With `lazy`, requests are dropped only once they are late.
    pub fn new(
        sessions: Vec<ClusterSession>,
        gpus: usize,
        sources: Vec<QuerySource>,
        seed: u64,
        lazy: bool,
    ) -> ClusterSim {
        let mut cluster = ClusterSim {
            gpus: (0..gpus).map(|_| Gpu::default()).collect(),
            routes: sessions.iter().map(|_| Route::default()).collect(),
            arrived: vec![0; sessions.len()],
            sessions,
            queries: Vec::new(),
            free: Vec::new(),
            events: BinaryHeap::new(),
            sequence: 0,
            random: Random::new(seed),
            now: Nanos::ZERO,
            lazy,
            frontends: 1,
            asked: 0,
            seconds: Vec::new(),
            sources,
        };
        for source in 0..cluster.sources.len() {
            // Equal gaps begin anywhere, or all sources would ask at once.
            let gap = 1e9 / cluster.sources[source].rate.max(1e-9);
            let first = Nanos((cluster.random.unit_f64() * gap) as u64);
            cluster.schedule(first, Event::Arrive { source });
        }
        cluster
    }

    /// Several frontends instead of one; before routes are given.
    pub fn set_frontends(&mut self, frontends: usize) {
        self.frontends = frontends.max(1);
    }

    /// Requests that came for each session.
    pub fn arrived(&self) -> &[u64] {
        &self.arrived
    }

    /// What came of queries, by the second they were asked in.
    pub fn seconds(&self) -> &[SecondCounts] {
        &self.seconds
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
            let full = self.sessions[session].profile.latency(batch);
            let share = batch.div_ceil(self.frontends);
            let depth = depth(batch).div_ceil(self.frontends);
            let route = &mut self.routes[session];
            if let Some(&place) = route.place.get(&gpu) {
                for candidates in &mut route.candidates {
                    let candidate = &mut candidates[place];
                    candidate.depth = depth;
                    candidate.pace = candidate.pace.map(|(pace, turn)| {
                        let least = turn.least.min(share);
                        (pace, Turn { batch: share, least, full })
                    });
                }
            }
            match old.iter().position(|slot| slot.session == session) {
                Some(index) => {
                    slots.push(SessionQueue { batch, draining: false, ..old.swap_remove(index) });
                }
                None => slots.push(SessionQueue {
                    session,
                    batch,
                    least: 0,
                    draining: false,
                    waiting: VecDeque::new(),
                    tasks: VecDeque::new(),
                }),
            }
        }
        // A backend answers what it has before it lets a model go; new requests go elsewhere.
        old.retain(|slot| !slot.waiting.is_empty());
        slots.extend(old.into_iter().map(|slot| SessionQueue { draining: true, least: 0, ..slot }));
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
        let all: Vec<(usize, Waiting, SessionRequest)> = running.chain(waiting).collect();
        for route in &mut self.routes {
            if let Some(&place) = route.place.get(&gpu) {
                route.candidates.iter_mut().for_each(|candidates| candidates[place].down = true);
            }
        }
        // The frontend sees the connection break and tries one more backend.
        for (session, waiting, task) in all {
            self.record_exit(session, gpu, task, false);
            self.send(session, task, waiting.deadline);
        }
    }

    /// Where requests of a session go.
    pub fn route(&mut self, session: usize, targets: &[RouteTarget]) {
        let old = std::mem::take(&mut self.routes[session]);
        let mut route = Route {
            gpus: targets.iter().map(|target| target.gpu).collect(),
            place: targets.iter().enumerate().map(|(place, target)| (target.gpu, place)).collect(),
            candidates: Vec::with_capacity(self.frontends),
        };
        for frontend in 0..self.frontends {
            let candidate = |target: &RouteTarget| {
                let place = old.place.get(&target.gpu);
                let before = place.map(|&place| old.candidates[frontend][place]);
                let slots = &self.gpus[target.gpu].slots;
                let slot = slots.iter().find(|slot| slot.session == session);
                let batch = slot.map_or(0, |slot| slot.batch);
                let pace = before.and_then(|before| before.pace).map(|(pace, _)| pace);
                Candidate {
                    weight: target.weight,
                    outstanding: before.map_or(0, |before| before.outstanding),
                    depth: depth(batch).div_ceil(self.frontends),
                    down: before.is_some_and(|before| before.down),
                    pace: (target.least > 0 && batch > 0).then(|| {
                        (pace.unwrap_or_default(), self.turn(session, batch, target.least))
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
    fn turn(&self, session: usize, batch: usize, least: usize) -> Turn {
        let full = self.sessions[session].profile.latency(batch);
        let share = |requests: usize| requests.div_ceil(self.frontends);
        Turn { batch: share(batch), least: share(least.min(batch)), full }
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
        let QuerySource { rate, poisson, .. } = self.sources[source];
        let gap = 1e9 / rate.max(1e-9);
        let gap = if poisson { self.random.exponential(gap) } else { gap };
        let next = self.now + Nanos((gap as u64).max(1));
        self.schedule(next, Event::Arrive { source });
        let asks = self.sources[source].asks.clone();
        let open: u32 = asks.iter().map(|(_, count)| *count).sum();
        let query = self.ask(open);
        self.asked += 1;
        let task = SessionRequest { query, frontend: self.asked % self.frontends };
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
        if self.seconds.len() <= second {
            self.seconds.resize(second + 1, SecondCounts::default());
        }
        self.seconds[second].asked += 1;
        let query = ClientQuery { at: self.now, open, failed: false };
        match self.free.pop() {
            Some(index) => {
                self.queries[index as usize] = query;
                index
            }
            None => {
                self.queries.push(query);
                (self.queries.len() - 1) as u32
            }
        }
    }

    /// One request of a query is over.
    fn close(&mut self, task: SessionRequest, good: bool) {
        let query = &mut self.queries[task.query as usize];
        query.open -= 1;
        if !good && !query.failed {
            query.failed = true;
            self.seconds[(query.at.0 / 1_000_000_000) as usize].bad += 1;
        }
        if query.open == 0 {
            self.free.push(task.query);
        }
    }

    fn send(&mut self, session: usize, task: SessionRequest, deadline: Nanos) {
        let route = &mut self.routes[session];
        let busy = |index: usize| self.gpus[route.gpus[index]].requests();
        let candidates = route.candidates.get_mut(task.frontend).map_or(&mut [][..], |list| list);
        let Some(chosen) = choose(candidates, self.now, busy, &mut self.random) else {
            return self.close(task, false);
        };
        let gpu = route.gpus[chosen];
        let slot = self.gpus[gpu].slots.iter_mut().find(|slot| slot.session == session);
        let Some(slot) = slot else { return self.close(task, false) };
        slot.waiting.push_back(Waiting { arrived: self.now, deadline });
        slot.tasks.push_back(task);
        sent(&mut candidates[chosen], self.now);
        if self.gpus[gpu].running.is_none() {
            self.start(gpu);
        }
    }

    /// A request has left a GPU: answered, or given up before its turn.
    fn record_exit(&mut self, session: usize, gpu: usize, task: SessionRequest, given_up: bool) {
        let route = &mut self.routes[session];
        let Some(&place) = route.place.get(&gpu) else { return };
        let candidate = &mut route.candidates[task.frontend][place];
        candidate.outstanding = candidate.outstanding.saturating_sub(1);
        match &mut candidate.pace {
            Some((pace, turn)) if given_up => pace.dropped(self.now, *turn),
            Some((pace, turn)) => pace.answered(self.now, *turn),
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
                    let turn = runtime::batching::Turn { batch, least };
                    Gathered { turn }.decide(now, &view, &mut decisions);
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
        let waiting: Vec<Waiting> = slot.waiting.drain(..count).collect();
        let dropped: Vec<SessionRequest> = slot.tasks.drain(..count).collect();
        for (waiting, task) in waiting.into_iter().zip(dropped) {
            self.record_exit(session, gpu, task, true);
            if !self.retry_elsewhere(session, gpu, task, waiting) {
                self.close(task, false);
            }
        }
    }

    /// Sends what a GPU gave up in time to one without anything to do, as a frontend does; whether there is one.
    fn retry_elsewhere(
        &mut self,
        session: usize,
        from: usize,
        task: SessionRequest,
        waiting: Waiting,
    ) -> bool {
        let least = self.sessions[session].profile.latency(1);
        if self.lazy || self.now + least > waiting.deadline {
            return false;
        }
        let route = &mut self.routes[session];
        let others: Vec<usize> =
            (0..route.gpus.len()).filter(|&place| route.gpus[place] != from).collect();
        let mine = &mut route.candidates[task.frontend];
        let candidates: Vec<Candidate> = others.iter().map(|&place| mine[place]).collect();
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
            self.record_exit(session, gpu, task, false);
            let good = self.now <= waiting.deadline;
            if good {
                self.feed(session, task, waiting.deadline);
            }
            self.close(task, good);
        }
        self.gpus[gpu].slots.retain(|slot| !slot.draining || !slot.waiting.is_empty());
        self.start(gpu);
    }

    /// Sends what an answer yields to the sessions it feeds; their budgets begin where this one's ends, so what was
    /// saved here is theirs.
    fn feed(&mut self, session: usize, task: SessionRequest, deadline: Nanos) {
        for index in 0..self.sessions[session].feeds.len() {
            let (next, mean) = self.sessions[session].feeds[index];
            let whole = mean.floor();
            let extra = u32::from(self.random.unit_f64() < mean - whole);
            for _ in 0..whole as u32 + extra {
                self.queries[task.query as usize].open += 1;
                self.arrived[next] += 1;
                let budget = self.sessions[next].budget;
                self.send(next, task, deadline + budget);
            }
        }
    }
}

fn sent(candidate: &mut Candidate, now: Nanos) {
    candidate.outstanding += 1;
    if let Some((pace, turn)) = &mut candidate.pace {
        pace.sent(now, *turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(rate: f64, lazy: bool) -> ClusterSim {
        let session = ClusterSession {
            profile: BatchProfile::linear(Nanos::from_millis(1), Nanos::from_millis(10), 32),
            budget: Nanos::from_millis(100),
            feeds: Vec::new(),
        };
        let source = QuerySource { rate, asks: vec![(0, 1)], poisson: true };
        let mut cluster = ClusterSim::new(vec![session], 2, vec![source], 1, lazy);
        cluster.hold(0, &[(0, 32)]);
        cluster.hold(1, &[(0, 32)]);
        let target = |gpu| RouteTarget { gpu, weight: 1.0, least: 0 };
        cluster.route(0, &[target(0), target(1)]);
        cluster
    }

    fn bad(cluster: &ClusterSim) -> f64 {
        let sum = cluster.seconds().iter().fold((0, 0), |(a, b), t| (a + t.asked, b + t.bad));
        sum.1 as f64 / sum.0 as f64
    }

    #[test]
    fn a_light_load_is_answered_and_a_heavy_one_is_not() {
        // Two GPUs do at most 2 x 32 / 42 ms = 1523 requests a second.
        for (rate, good) in [(900.0, true), (3000.0, false)] {
            let mut cluster = cluster(rate, false);
            cluster.run_until(Nanos::from_millis(10_000));
            assert_eq!(bad(&cluster) < 0.001, good, "{rate}: {}", bad(&cluster));
        }
    }

    #[test]
    fn a_lost_gpu_loses_no_request_that_another_has_time_for() {
        let mut cluster = cluster(300.0, false);
        cluster.run_until(Nanos::from_millis(2000));
        cluster.lose(0);
        cluster.run_until(Nanos::from_millis(6000));
        assert!(bad(&cluster) < 0.002, "{}", bad(&cluster));
    }

    #[test]
    fn every_question_ends_once() {
        let mut cluster = cluster(2000.0, true);
        cluster.run_until(Nanos::from_millis(3000));
        cluster.set_rate(0, 1e-6);
        cluster.run_until(Nanos::from_millis(10_000));
        assert_eq!(cluster.free.len(), cluster.queries.len());
        assert!(cluster.seconds().iter().all(|counts| counts.bad <= counts.asked));
    }
}
