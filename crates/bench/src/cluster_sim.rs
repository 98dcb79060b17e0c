//! Clusters in virtual time: the real scheduler core, routing and batching policies over simulated
//! GPUs.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::iter::Sum;

use base::{Nanos, Random};
use cluster::balance::batch_progress::BatchPlan;
use cluster::balance::{BackendCandidate, choose, depth, spare};
use runtime::batching::{
    BatchPolicy, BatchProfile, Decision, EarlyDrop, LazyDrop, ModelView, Staggered, WaitingRequest,
    Worker,
};

use crate::outcome::{OutcomeCounts, RequestOutcome};

pub mod judgement;
pub mod report;
pub mod scenario;
pub mod study;

/// Requests for one model under one SLO.
#[derive(Clone, Debug)]
pub struct ClusterSession {
    /// Time of batches on a GPU.
    pub profile: BatchProfile,
    /// Time from arrival at the GPU to the deadline.
    pub budget: Nanos,
    /// Sessions that each reply feeds, with the mean number of requests.
    pub feeds: Vec<(usize, f64)>,
}

/// A request for one session; a query may have several.
#[derive(Clone, Copy, Debug)]
struct SessionRequest {
    query: u32,
    /// The frontend that sends it.
    frontend: usize,
}

/// A query of a client.
#[derive(Clone, Copy, Debug)]
struct ClientQuery {
    at: Nanos,
    open: u32,
    /// The outcome of the first of its requests that was not good.
    bad: Option<RequestOutcome>,
}

/// A session on a GPU.
struct SessionQueue {
    session: usize,
    batch: usize,
    /// Min requests of a batch before the first one is due.
    least: usize,
    /// It is removed when its waiting requests are done.
    draining: bool,
    waiting: VecDeque<WaitingRequest>,
    requests: VecDeque<SessionRequest>,
}

/// A GPU: its sessions run in turn, one batch each.
#[derive(Default)]
struct SimulatedGpu {
    queues: Vec<SessionQueue>,
    next: usize,
    running: Option<(usize, Vec<(WaitingRequest, SessionRequest)>)>,
    /// Number of the run, to ignore the end of one that a fault cut short.
    run: u64,
    /// Its machine is lost: it takes no requests.
    lost: bool,
}

impl SimulatedGpu {
    /// Requests that wait or run here.
    fn requests(&self) -> usize {
        let waiting: usize = self.queues.iter().map(|queue| queue.waiting.len()).sum();
        waiting + self.running.as_ref().map_or(0, |(_, batch)| batch.len())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive { source: usize },
    Done { gpu: usize, run: u64 },
    Wake { gpu: usize },
}

/// The GPUs of a session's requests.
#[derive(Default)]
struct SessionRoute {
    gpus: Vec<usize>,
    /// The candidates as each frontend sees them.
    candidates: Vec<Vec<BackendCandidate>>,
    place: HashMap<usize, usize>,
}

/// One of the GPUs of a session's requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteTarget {
    /// The GPU.
    pub gpu: usize,
    /// Its share; 0 for one that only takes overflow.
    pub weight: f64,
    /// Min requests of its batches if it belongs to a backend pool, or else 0.
    pub least: usize,
}

/// A source of queries.
#[derive(Clone, Debug)]
pub struct QuerySource {
    /// Queries per second.
    pub rate: f64,
    /// Sessions of a query, with the number of requests for each.
    pub sessions_per_query: Vec<(usize, u32)>,
    /// Whether gaps are exponential; otherwise they are equal.
    pub poisson: bool,
}

/// Rate below which a source is silent, in queries per second.
const RATE_MIN: f64 = 1e-6;

/// Counts of a short time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeriodCounts {
    /// Queries sent.
    pub sent_queries: u64,
    /// Queries without reply in time.
    pub bad: u64,
}

impl Sum for PeriodCounts {
    fn sum<I: Iterator<Item = PeriodCounts>>(all: I) -> PeriodCounts {
        all.fold(PeriodCounts::default(), |sum, counts| PeriodCounts {
            sent_queries: sum.sent_queries + counts.sent_queries,
            bad: sum.bad + counts.bad,
        })
    }
}

/// The time that counts are kept for.
const TENTH: Nanos = Nanos::from_millis(100);

/// A cluster in virtual time.
pub struct ClusterSim {
    sessions: Vec<ClusterSession>,
    gpus: Vec<SimulatedGpu>,
    routes: Vec<SessionRoute>,
    sources: Vec<QuerySource>,
    queries: Vec<ClientQuery>,
    free: Vec<u32>,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    sequence: u64,
    random: Random,
    now: Nanos,
    lazy: bool,
    /// Frontends that get the queries in turn; each knows only its own requests.
    frontends: usize,
    sent_queries: usize,
    /// By tenth of a second.
    tenths: Vec<PeriodCounts>,
    outcomes: OutcomeCounts,
    /// Requests that ended more often than they were sent.
    ended_twice: u64,
    /// Sources without an arrival in the queue of events.
    silent: Vec<bool>,
    /// Requests by session.
    arrived: Vec<u64>,
}

impl ClusterSim {
    /// A cluster of `gpus` idle GPUs. With `lazy`, requests are dropped only once they are late.
    pub fn new(
        sessions: Vec<ClusterSession>,
        gpus: usize,
        sources: Vec<QuerySource>,
        seed: u64,
        lazy: bool,
    ) -> ClusterSim {
        let mut cluster = ClusterSim {
            gpus: (0..gpus).map(|_| SimulatedGpu::default()).collect(),
            routes: sessions.iter().map(|_| SessionRoute::default()).collect(),
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
            sent_queries: 0,
            tenths: Vec::new(),
            outcomes: OutcomeCounts::default(),
            ended_twice: 0,
            silent: vec![true; sources.len()],
            sources,
        };
        for source in 0..cluster.sources.len() {
            cluster.start_source(source);
        }
        cluster
    }

    /// Schedules the first arrival of a silent source. Equal gaps start at a random time, so that
    /// sources do not coincide.
    fn start_source(&mut self, source: usize) {
        let rate = self.sources[source].rate;
        if rate < RATE_MIN || !self.silent[source] {
            return;
        }
        self.silent[source] = false;
        let first = self.now + Nanos((self.random.unit_f64() * 1e9 / rate) as u64);
        self.schedule(first, Event::Arrive { source });
    }

    /// Ends all sources: nothing arrives any more.
    pub fn stop_sources(&mut self) {
        self.sources.iter_mut().for_each(|source| source.rate = 0.0);
        self.events.retain(|Reverse((_, _, event))| !matches!(event, Event::Arrive { .. }));
        self.silent.fill(true);
    }

    /// What became of all queries. Those that are still open are pending.
    pub fn outcomes(&self) -> OutcomeCounts {
        let mut counts = self.outcomes;
        for query in self.queries.iter().filter(|query| query.open > 0) {
            counts.count(query.bad.unwrap_or(RequestOutcome::Pending));
        }
        counts
    }

    /// Why the counts cannot be right; `None` if every query is counted once.
    pub fn violation(&self) -> Option<String> {
        let open = self.queries.iter().filter(|query| query.open > 0 && query.bad.is_none());
        if self.ended_twice > 0 {
            return Some(format!("{} requests ended twice", self.ended_twice));
        }
        let held: u64 = self.gpus.iter().map(|gpu| gpu.requests() as u64).sum();
        let wanted: u64 = self.queries.iter().map(|query| u64::from(query.open)).sum();
        if held != wanted {
            return Some(format!("{wanted} requests are open and GPUs hold {held}"));
        }
        self.outcomes().violation(open.count() as u64)
    }

    /// Sets the number of frontends, before routes are set.
    pub fn set_frontends(&mut self, frontends: usize) {
        self.frontends = frontends.max(1);
    }

    /// Number of requests for each session.
    pub fn arrived(&self) -> &[u64] {
        &self.arrived
    }

    /// Counts of queries, by the second they were sent in.
    pub fn seconds(&self) -> Vec<PeriodCounts> {
        self.tenths.chunks(10).map(|tenths| tenths.iter().copied().sum()).collect()
    }

    /// The same by tenth of a second.
    pub fn tenths(&self) -> &[PeriodCounts] {
        &self.tenths
    }

    /// Changes the rate of a source.
    pub fn set_rate(&mut self, source: usize, rate: f64) {
        self.sources[source].rate = rate;
        self.start_source(source);
    }

    fn schedule(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, event)));
    }

    /// Sets the sessions of a GPU with their batch sizes. Requests that wait there for others are
    /// still served.
    pub fn hold(&mut self, gpu: usize, wanted: &[(usize, usize)]) {
        let mut old = std::mem::take(&mut self.gpus[gpu].queues);
        let mut queues = Vec::with_capacity(wanted.len());
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
            match old.iter().position(|queue| queue.session == session) {
                Some(index) => {
                    queues.push(SessionQueue { batch, draining: false, ..old.swap_remove(index) });
                }
                None => queues.push(SessionQueue {
                    session,
                    batch,
                    least: 0,
                    draining: false,
                    waiting: VecDeque::new(),
                    requests: VecDeque::new(),
                }),
            }
        }
        // A backend finishes its requests before it unloads a model; new requests go elsewhere.
        old.retain(|queue| !queue.waiting.is_empty());
        queues.extend(old.into_iter().map(|queue| SessionQueue {
            draining: true,
            least: 0,
            ..queue
        }));
        let gpu = &mut self.gpus[gpu];
        gpu.queues = queues;
        gpu.next = 0;
    }

    /// The machine of a lost GPU is back, with nothing on it.
    pub fn restore(&mut self, gpu: usize) {
        self.gpus[gpu].lost = false;
        for route in &mut self.routes {
            if let Some(&place) = route.place.get(&gpu) {
                route.candidates.iter_mut().for_each(|candidates| candidates[place].down = false);
            }
        }
    }

    /// A GPU is lost with everything on it.
    pub fn lose(&mut self, gpu: usize) {
        let lost = std::mem::take(&mut self.gpus[gpu]);
        self.gpus[gpu].run = lost.run + 1;
        self.gpus[gpu].lost = true;
        let running = lost.running.into_iter();
        let running = running.flat_map(|(session, batch)| {
            batch.into_iter().map(move |(waiting, request)| (session, waiting, request))
        });
        let waiting = lost.queues.into_iter().flat_map(|queue| {
            let session = queue.session;
            queue.waiting.into_iter().zip(queue.requests).map(move |(w, t)| (session, w, t))
        });
        let all: Vec<(usize, WaitingRequest, SessionRequest)> = running.chain(waiting).collect();
        for route in &mut self.routes {
            if let Some(&place) = route.place.get(&gpu) {
                route.candidates.iter_mut().for_each(|candidates| candidates[place].down = true);
            }
        }
        // The frontend notices the broken connection and tries one more backend.
        for (session, waiting, request) in all {
            self.record_exit(session, gpu, request, false);
            self.send(session, request, waiting.deadline, RequestOutcome::Failed);
        }
    }

    /// Sets the GPUs of a session's requests.
    pub fn route(&mut self, session: usize, targets: &[RouteTarget]) {
        let old = std::mem::take(&mut self.routes[session]);
        let mut route = SessionRoute {
            gpus: targets.iter().map(|target| target.gpu).collect(),
            place: targets.iter().enumerate().map(|(place, target)| (target.gpu, place)).collect(),
            candidates: Vec::with_capacity(self.frontends),
        };
        for frontend in 0..self.frontends {
            let candidate = |target: &RouteTarget| {
                let place = old.place.get(&target.gpu);
                let before = place.map(|&place| old.candidates[frontend][place]);
                let queues = &self.gpus[target.gpu].queues;
                let queue = queues.iter().find(|queue| queue.session == session);
                let batch = queue.map_or(0, |queue| queue.batch);
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
            let queues = &mut self.gpus[target.gpu].queues;
            if let Some(queue) = queues.iter_mut().find(|queue| queue.session == session) {
                queue.least = target.least;
            }
        }
    }

    /// The batch sizes of a pool, as one frontend sees them.
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
        let QuerySource { rate, poisson, .. } = self.sources[source];
        if rate < RATE_MIN {
            self.silent[source] = true;
            return;
        }
        let gap = 1e9 / rate;
        let gap = if poisson { self.random.exponential(gap) } else { gap };
        let next = self.now + Nanos((gap as u64).max(1));
        self.schedule(next, Event::Arrive { source });
        let sessions_per_query = self.sources[source].sessions_per_query.clone();
        let open: u32 = sessions_per_query.iter().map(|(_, count)| *count).sum();
        let query = self.open_query(open);
        self.sent_queries += 1;
        let request = SessionRequest { query, frontend: self.sent_queries % self.frontends };
        for (session, count) in sessions_per_query {
            for _ in 0..count {
                self.arrived[session] += 1;
                let deadline = self.now + self.sessions[session].budget;
                self.send(session, request, deadline, RequestOutcome::Refused);
            }
        }
    }

    fn open_query(&mut self, open: u32) -> u32 {
        let tenth = (self.now.0 / TENTH.0) as usize;
        if self.tenths.len() <= tenth {
            self.tenths.resize(tenth + 1, PeriodCounts::default());
        }
        self.tenths[tenth].sent_queries += 1;
        self.outcomes.arrivals += 1;
        let query = ClientQuery { at: self.now, open, bad: None };
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

    /// One request of a query has ended.
    fn close(&mut self, request: SessionRequest, outcome: RequestOutcome) {
        let query = &mut self.queries[request.query as usize];
        let Some(open) = query.open.checked_sub(1) else {
            self.ended_twice += 1;
            return;
        };
        query.open = open;
        if outcome != RequestOutcome::Good && query.bad.is_none() {
            query.bad = Some(outcome);
            self.tenths[(query.at.0 / TENTH.0) as usize].bad += 1;
        }
        if query.open == 0 {
            self.outcomes.count(query.bad.unwrap_or(RequestOutcome::Good));
            self.free.push(request.query);
        }
    }

    /// Sends a request to a backend; one that nobody takes ends with the outcome `otherwise`.
    fn send(
        &mut self,
        session: usize,
        request: SessionRequest,
        deadline: Nanos,
        otherwise: RequestOutcome,
    ) {
        let route = &mut self.routes[session];
        let candidates =
            route.candidates.get_mut(request.frontend).map_or(&mut [][..], |list| list);
        // A frontend learns that a machine is lost when it cannot connect, and tries another.
        let chosen = loop {
            let busy = |index: usize| self.gpus[route.gpus[index]].requests();
            let Some(chosen) = choose(candidates, self.now, busy, &mut self.random) else {
                break None;
            };
            if !self.gpus[route.gpus[chosen]].lost {
                break Some(chosen);
            }
            if std::mem::replace(&mut candidates[chosen].down, true) {
                break None;
            }
        };
        let Some(chosen) = chosen else { return self.close(request, otherwise) };
        let gpu = route.gpus[chosen];
        let queue = self.gpus[gpu].queues.iter_mut().find(|queue| queue.session == session);
        let Some(queue) = queue else { return self.close(request, otherwise) };
        queue.waiting.push_back(WaitingRequest { arrived: self.now, deadline });
        queue.requests.push_back(request);
        sent(&mut candidates[chosen], self.now);
        if self.gpus[gpu].running.is_none() {
            self.start(gpu);
        }
    }

    /// A request is done on a GPU, or was dropped.
    fn record_exit(&mut self, session: usize, gpu: usize, request: SessionRequest, given_up: bool) {
        let route = &mut self.routes[session];
        let Some(&place) = route.place.get(&gpu) else { return };
        let candidate = &mut route.candidates[request.frontend][place];
        candidate.outstanding = candidate.outstanding.saturating_sub(1);
        match &mut candidate.progress {
            Some((progress, plan)) if given_up => progress.dropped(self.now, *plan),
            Some((progress, plan)) => progress.completed(self.now, *plan),
            None => {}
        }
    }

    /// Starts the batch of the next session that has requests.
    fn start(&mut self, gpu: usize) {
        let count = self.gpus[gpu].queues.len();
        let mut decisions = Vec::new();
        let mut wake: Option<Nanos> = None;
        for turn in 0..count {
            let index = (self.gpus[gpu].next + turn) % count;
            let queue = &self.gpus[gpu].queues[index];
            if queue.waiting.is_empty() {
                continue;
            }
            let session = queue.session;
            let workers = [Worker { batch: queue.batch, busy: false }];
            let profile = &self.sessions[session].profile;
            let view =
                ModelView { waiting: &queue.waiting, workers: &workers, profile, running: 0 };
            decisions.clear();
            let (now, batch, least) = (self.now, queue.batch, queue.least);
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
        let queue = &mut self.gpus[gpu].queues[index];
        let session = queue.session;
        let waiting: Vec<WaitingRequest> = queue.waiting.drain(..count).collect();
        let dropped: Vec<SessionRequest> = queue.requests.drain(..count).collect();
        for (waiting, request) in waiting.into_iter().zip(dropped) {
            self.record_exit(session, gpu, request, true);
            if !self.retry_elsewhere(session, gpu, request, waiting) {
                self.close(request, RequestOutcome::Late);
            }
        }
    }

    /// Sends a request that a GPU dropped in time to an idle one, as a frontend does; whether there
    /// is one.
    fn retry_elsewhere(
        &mut self,
        session: usize,
        from: usize,
        request: SessionRequest,
        waiting: WaitingRequest,
    ) -> bool {
        let least = self.sessions[session].profile.latency(1);
        if self.lazy || self.now + least > waiting.deadline {
            return false;
        }
        let route = &mut self.routes[session];
        let others: Vec<usize> =
            (0..route.gpus.len()).filter(|&place| route.gpus[place] != from).collect();
        let others: Vec<usize> =
            others.into_iter().filter(|&place| !self.gpus[route.gpus[place]].lost).collect();
        let mine = &mut route.candidates[request.frontend];
        let candidates: Vec<BackendCandidate> = others.iter().map(|&place| mine[place]).collect();
        let busy = |index: usize| self.gpus[route.gpus[others[index]]].requests();
        let Some(chosen) = spare(&candidates, busy) else { return false };
        let gpu = route.gpus[others[chosen]];
        let queues = &mut self.gpus[gpu].queues;
        let Some(queue) = queues.iter_mut().find(|queue| queue.session == session) else {
            return false;
        };
        queue.waiting.push_back(waiting);
        queue.requests.push_back(request);
        sent(&mut mine[others[chosen]], self.now);
        self.start(gpu);
        true
    }

    fn launch(&mut self, gpu: usize, index: usize, count: usize) {
        let queue = &mut self.gpus[gpu].queues[index];
        let session = queue.session;
        let batch = queue.waiting.drain(..count).zip(queue.requests.drain(..count)).collect();
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
        for (waiting, request) in batch {
            self.record_exit(session, gpu, request, false);
            let good = self.now <= waiting.deadline;
            if good {
                self.feed(session, request, waiting.deadline);
            }
            self.close(request, if good { RequestOutcome::Good } else { RequestOutcome::Late });
        }
        self.gpus[gpu].queues.retain(|queue| !queue.draining || !queue.waiting.is_empty());
        self.start(gpu);
    }

    /// Sends the requests that a reply feeds. Their budgets begin at this one's deadline, so they
    /// gain the time that it saved.
    fn feed(&mut self, session: usize, request: SessionRequest, deadline: Nanos) {
        for index in 0..self.sessions[session].feeds.len() {
            let (next, mean) = self.sessions[session].feeds[index];
            let whole = mean.floor();
            let extra = u32::from(self.random.unit_f64() < mean - whole);
            for _ in 0..whole as u32 + extra {
                self.queries[request.query as usize].open += 1;
                self.arrived[next] += 1;
                let budget = self.sessions[next].budget;
                self.send(next, request, deadline + budget, RequestOutcome::Refused);
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

    fn cluster(rate: f64, lazy: bool) -> ClusterSim {
        let session = ClusterSession {
            profile: BatchProfile::linear(Nanos::from_millis(1), Nanos::from_millis(10), 32),
            budget: Nanos::from_millis(100),
            feeds: Vec::new(),
        };
        let source = QuerySource { rate, sessions_per_query: vec![(0, 1)], poisson: true };
        let mut cluster = ClusterSim::new(vec![session], 2, vec![source], 1, lazy);
        cluster.hold(0, &[(0, 32)]);
        cluster.hold(1, &[(0, 32)]);
        let target = |gpu| RouteTarget { gpu, weight: 1.0, least: 0 };
        cluster.route(0, &[target(0), target(1)]);
        cluster
    }

    fn bad(cluster: &ClusterSim) -> f64 {
        let sum =
            cluster.seconds().iter().fold((0, 0), |(a, b), t| (a + t.sent_queries, b + t.bad));
        sum.1 as f64 / sum.0 as f64
    }

    #[test]
    fn only_a_light_load_meets_the_slo() {
        // Two GPUs serve at most 2 x 32 / 42 ms = 1523 requests per second.
        for (rate, good) in [(900.0, true), (3000.0, false)] {
            let mut cluster = cluster(rate, false);
            cluster.run_until(Nanos::from_millis(10_000));
            assert_eq!(bad(&cluster) < 0.001, good, "{rate}: {}", bad(&cluster));
        }
    }

    #[test]
    fn requests_of_a_lost_gpu_are_retried() {
        let mut cluster = cluster(300.0, false);
        cluster.run_until(Nanos::from_millis(2000));
        cluster.lose(0);
        cluster.run_until(Nanos::from_millis(6000));
        assert!(bad(&cluster) < 0.002, "{}", bad(&cluster));
    }

    #[test]
    fn without_gpus_every_query_is_refused() {
        let mut cluster = cluster(100.0, false);
        cluster.lose(0);
        cluster.lose(1);
        // A scheduler that does not know yet still assigns models to lost GPUs.
        cluster.hold(0, &[(0, 32)]);
        cluster.run_until(Nanos::from_millis(2000));
        let outcomes = cluster.outcomes();
        assert_eq!((outcomes.good, outcomes.refused), (0, outcomes.arrivals));
        cluster.restore(0);
        cluster.hold(0, &[(0, 32)]);
        cluster.run_until(Nanos::from_millis(4000));
        assert!(cluster.outcomes().good > 100, "{:?}", cluster.outcomes());
        assert_eq!(cluster.violation(), None);
    }

    #[test]
    fn a_source_resumes_after_a_silence() {
        let mut cluster = cluster(100.0, false);
        cluster.set_rate(0, 0.0);
        cluster.run_until(Nanos::from_millis(5000));
        let before = cluster.outcomes().arrivals;
        assert!(before <= 1, "{before}");
        // It stayed silent: its next arrival was a million seconds away.
        cluster.set_rate(0, 100.0);
        cluster.run_until(Nanos::from_millis(10_000));
        assert!(cluster.outcomes().arrivals > before + 400, "{:?}", cluster.outcomes());
    }

    #[test]
    fn every_query_ends_once() {
        let mut cluster = cluster(2000.0, true);
        cluster.run_until(Nanos::from_millis(3000));
        assert!(cluster.outcomes().pending > 0);
        assert_eq!(cluster.violation(), None);
        cluster.stop_sources();
        cluster.run_until(Nanos::from_millis(10_000));
        assert_eq!(cluster.free.len(), cluster.queries.len());
        let outcomes = cluster.outcomes();
        assert_eq!((outcomes.pending, cluster.violation()), (0, None));
        assert!(outcomes.good > 0 && outcomes.late > 0, "{outcomes:?}");
        assert!(cluster.seconds().iter().all(|counts| counts.bad <= counts.sent_queries));
    }
}
