//! Counters of a model, updated with every reply of the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use api::metadata::{BatchStats, DurationStat, InferenceStats};
use base::{Clock, Nanos};
use device::DeviceError;
use model::Tensor;
use runtime::{Rejection, Reply, Timing};

/// Upper bounds of the histograms, in microseconds.
pub const BOUNDS_US: [u64; 17] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 5_000_000,
];

/// Largest batch size with counters of its own.
const BATCH_SIZES: usize = 64;

/// Number of events and their total duration.
#[derive(Debug, Default)]
pub struct DurationCounter {
    count: AtomicU64,
    ns: AtomicU64,
}

impl DurationCounter {
    fn add(&self, span: Nanos) {
        self.count.fetch_add(1, Relaxed);
        self.ns.fetch_add(span.0, Relaxed);
    }

    /// Current values.
    pub fn read(&self) -> DurationStat {
        DurationStat { count: self.count.load(Relaxed), ns: self.ns.load(Relaxed) }
    }
}

/// Durations of events by size, and their sum.
#[derive(Debug, Default)]
pub struct DurationHistogram {
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    ns: AtomicU64,
}

impl DurationHistogram {
    fn add(&self, span: Nanos) {
        // A bound is the largest duration of its bucket.
        let bucket = BOUNDS_US.partition_point(|&bound| bound * 1_000 < span.0);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.ns.fetch_add(span.0, Relaxed);
    }

    /// Cumulative counts by bound; the last one counts all events.
    pub fn cumulative(&self) -> [u64; BOUNDS_US.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|index| {
            sum += self.buckets[index].load(Relaxed);
            sum
        })
    }

    /// Number of events and their total duration.
    pub fn read(&self) -> DurationStat {
        let count = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum();
        DurationStat { count, ns: self.ns.load(Relaxed) }
    }
}

/// The time of a request by phase. The phases are disjoint and add up to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// From arrival until the outputs are ready to be sent.
    pub total: Nanos,
    /// Inputs are checked and staged.
    pub input: Nanos,
    /// Off the device between the other phases.
    pub queue: Nanos,
    /// On the device.
    pub infer: Nanos,
    /// From the end of the last step until the outputs are ready to be sent.
    pub output: Nanos,
}

impl Phases {
    /// The phases of a request whose outputs took `output`.
    pub fn of(timing: &Timing, output: Nanos) -> Phases {
        let on_node = timing.finished.since(timing.arrived);
        let infer = timing.busy.min(on_node);
        let input = timing.prepared.since(timing.arrived).min(on_node - infer);
        let queue = on_node - infer - input;
        Phases { total: on_node + output, input, queue, infer, output }
    }
}

/// Durations of the executions of one batch size.
#[derive(Debug, Default)]
struct BatchCounter {
    input: DurationCounter,
    infer: DurationCounter,
    output: DurationCounter,
}

/// Counters of one model version.
#[derive(Debug)]
pub struct Counters {
    /// Requests with outputs.
    pub success: DurationHistogram,
    /// Requests that failed.
    pub fail: DurationCounter,
    /// Time that successful requests waited, off the device.
    pub queue: DurationHistogram,
    /// Time in which inputs of successful requests were checked and staged.
    pub input: DurationHistogram,
    /// Time of successful requests on the device.
    pub infer: DurationHistogram,
    /// Time in which outputs of successful requests were made ready to be sent.
    pub output: DurationHistogram,
    /// Inferences; a batch of n counts n.
    pub inferences: AtomicU64,
    /// Executions on the device; a batch counts once.
    pub executions: AtomicU64,
    /// Requests waiting or running.
    pub pending: AtomicU64,
    /// Unix time of the last reply in milliseconds.
    pub last_ms: AtomicU64,
    /// Requests refused because the queue was full.
    pub queue_full: AtomicU64,
    /// Requests dropped because their deadline passed.
    pub deadline: AtomicU64,
    /// Requests whose client disconnected.
    pub cancelled: AtomicU64,
    /// Requests refused because the model is unloaded or the server drains.
    pub draining: AtomicU64,
    /// Best-effort requests refused because the policy runs only real time.
    pub not_run: AtomicU64,
    /// Requests beyond the limits in the model's settings.
    pub limited: AtomicU64,
    /// Requests with invalid inputs.
    pub bad_input: AtomicU64,
    /// Requests that failed on the device.
    pub backend: AtomicU64,
    /// Requests that missed their deadline, including dropped ones.
    pub deadline_misses: AtomicU64,
    /// Requests with a deadline or an SLO that were answered in time.
    pub slo_kept: AtomicU64,
    /// Requests with a deadline or an SLO that were answered late, or not at all.
    pub slo_missed: AtomicU64,
    /// Times work was preempted.
    pub preemptions: AtomicU64,
    batches: [BatchCounter; BATCH_SIZES],
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            success: DurationHistogram::default(),
            fail: DurationCounter::default(),
            queue: DurationHistogram::default(),
            input: DurationHistogram::default(),
            infer: DurationHistogram::default(),
            output: DurationHistogram::default(),
            inferences: AtomicU64::default(),
            executions: AtomicU64::default(),
            pending: AtomicU64::default(),
            last_ms: AtomicU64::default(),
            queue_full: AtomicU64::default(),
            deadline: AtomicU64::default(),
            cancelled: AtomicU64::default(),
            draining: AtomicU64::default(),
            not_run: AtomicU64::default(),
            limited: AtomicU64::default(),
            bad_input: AtomicU64::default(),
            backend: AtomicU64::default(),
            deadline_misses: AtomicU64::default(),
            slo_kept: AtomicU64::default(),
            slo_missed: AtomicU64::default(),
            preemptions: AtomicU64::default(),
            batches: std::array::from_fn(|_| BatchCounter::default()),
        }
    }
}

/// How long a request may take.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestLimits {
    /// From its arrival to its deadline.
    pub timeout: Option<Nanos>,
    /// The SLO of its model.
    pub slo: Option<Nanos>,
}

impl RequestLimits {
    /// What its time must not exceed to be in time; `None` where any time is.
    fn least(self) -> Option<Nanos> {
        [self.timeout, self.slo].into_iter().flatten().min()
    }
}

/// A request in flight. It is counted once, when its outputs are ready, or when it is dropped.
pub(super) struct PendingRequest {
    counters: Arc<Counters>,
    clock: Arc<dyn Clock>,
    arrived: Nanos,
    batch: usize,
    limits: RequestLimits,
    /// Timing of the prefix, if it ran separately.
    prefix_timing: Option<Timing>,
    /// Whether the suffix runs after the next reply.
    suffix_follows: bool,
    /// Its timing, once the device has computed its outputs.
    timing: Option<Timing>,
    open: bool,
}

impl PendingRequest {
    /// Starts a request of `batch` inferences with `limits`.
    pub(super) fn begin(
        counters: Arc<Counters>,
        clock: Arc<dyn Clock>,
        batch: usize,
        limits: RequestLimits,
    ) -> PendingRequest {
        counters.begin();
        PendingRequest {
            counters,
            arrived: clock.now(),
            clock,
            batch,
            limits,
            prefix_timing: None,
            suffix_follows: false,
            timing: None,
            open: true,
        }
    }

    /// Marks the next reply as that of the prefix; the suffix follows.
    pub(super) fn with_suffix(mut self) -> PendingRequest {
        self.suffix_follows = true;
        self
    }

    /// Handles a reply of the node. A request that failed is counted.
    pub(super) fn reply(
        mut self,
        reply: Reply,
    ) -> Result<(Vec<Tensor>, PendingRequest), Rejection> {
        let mut timing = reply.timing;
        match reply.result {
            Ok(outputs) if self.suffix_follows => {
                self.prefix_timing = Some(timing);
                self.suffix_follows = false;
                Ok((outputs, self))
            }
            Ok(outputs) => {
                self.add_prefix(&mut timing);
                self.timing = Some(timing);
                Ok((outputs, self))
            }
            Err(rejection) => {
                self.add_prefix(&mut timing);
                self.counters.fail(&timing, &rejection, self.limits);
                self.open = false;
                Err(rejection)
            }
        }
    }

    fn add_prefix(&self, timing: &mut Timing) {
        if let Some(prefix) = self.prefix_timing {
            timing.arrived = prefix.arrived;
            timing.prepared = prefix.prepared;
            timing.busy += prefix.busy;
            timing.preemptions += prefix.preemptions;
        }
    }

    /// Counts the request, whose outputs are ready to be sent at `now`. Returns its timing.
    pub(super) fn finish(mut self, now: Nanos) -> Timing {
        let timing = self.timing.unwrap_or_default();
        self.succeed(&timing, now.since(timing.finished));
        timing
    }

    fn succeed(&mut self, timing: &Timing, output: Nanos) {
        self.counters.succeed(timing, output, self.batch, self.limits);
        self.open = false;
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        match self.timing {
            // The client is gone, and the work was done.
            Some(timing) => self.succeed(&timing, Nanos::ZERO),
            None => {
                let (arrived, finished) = (self.arrived, self.clock.now());
                let prefix = self.prefix_timing.unwrap_or_default();
                let timing = Timing { arrived, finished, ..prefix };
                self.counters.fail(&timing, &Rejection::Cancelled, self.limits);
            }
        }
    }
}

fn is_bad_input(error: &DeviceError) -> bool {
    matches!(error, DeviceError::BadInput(_) | DeviceError::StepFailed { .. })
}

/// Whether a request has no outputs because of its client: it gave up, or its inputs are wrong.
fn is_the_clients(rejection: &Rejection) -> bool {
    match rejection {
        Rejection::Cancelled => true,
        Rejection::Device(error) => is_bad_input(error),
        _ => false,
    }
}

impl Counters {
    /// Counts a request sent to the node.
    pub fn begin(&self) {
        self.pending.fetch_add(1, Relaxed);
    }

    /// What every reply counts.
    fn end(&self, timing: &Timing, late: bool) {
        self.pending.fetch_sub(1, Relaxed);
        if timing.preemptions > 0 {
            self.preemptions.fetch_add(u64::from(timing.preemptions), Relaxed);
        }
        if late {
            self.deadline_misses.fetch_add(1, Relaxed);
        }
    }

    /// Counts a request of `batch` inferences that has outputs, which took `output` to make ready.
    pub fn succeed(&self, timing: &Timing, output: Nanos, batch: usize, limits: RequestLimits) {
        let phases = Phases::of(timing, output);
        self.end(timing, limits.timeout.is_some_and(|timeout| phases.total > timeout));
        if let Some(least) = limits.least() {
            let in_time = phases.total <= least;
            (if in_time { &self.slo_kept } else { &self.slo_missed }).fetch_add(1, Relaxed);
        }
        self.success.add(phases.total);
        self.queue.add(phases.queue);
        self.input.add(phases.input);
        self.infer.add(phases.infer);
        self.output.add(phases.output);
        self.inferences.fetch_add(batch as u64, Relaxed);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_ms.store(now.as_millis() as u64, Relaxed);
        if timing.first {
            self.execute(&phases, timing.busy, timing.rows.max(batch));
        }
    }

    fn execute(&self, phases: &Phases, busy: Nanos, rows: usize) {
        self.executions.fetch_add(1, Relaxed);
        if let Some(batch) = rows.checked_sub(1).and_then(|index| self.batches.get(index)) {
            batch.input.add(phases.input);
            batch.infer.add(busy);
            batch.output.add(phases.output);
        }
    }

    /// Counts a request without outputs.
    pub fn fail(&self, timing: &Timing, rejection: &Rejection, limits: RequestLimits) {
        let total = timing.finished.since(timing.arrived);
        let late = limits.timeout.is_some_and(|timeout| total > timeout);
        self.end(timing, late || matches!(rejection, Rejection::DeadlineExceeded));
        if let Some(least) = limits.least()
            && (total > least || !is_the_clients(rejection))
        {
            self.slo_missed.fetch_add(1, Relaxed);
        }
        self.fail.add(total);
        let counter = match rejection {
            Rejection::QueueFull { .. } => &self.queue_full,
            Rejection::DeadlineExceeded => &self.deadline,
            Rejection::Cancelled => &self.cancelled,
            Rejection::ShuttingDown | Rejection::NoSuchModel => &self.draining,
            Rejection::RealTimeOnly => &self.not_run,
            Rejection::Device(error) if is_bad_input(error) => &self.bad_input,
            Rejection::Device(_) => &self.backend,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// The counters as the statistics extension reports them.
    pub fn inference_stats(&self) -> InferenceStats {
        InferenceStats {
            success: self.success.read(),
            fail: self.fail.read(),
            queue: self.queue.read(),
            compute_input: self.input.read(),
            compute_infer: self.infer.read(),
            compute_output: self.output.read(),
            ..InferenceStats::default()
        }
    }

    /// Statistics per batch size, for sizes that occurred.
    pub fn batch_stats(&self) -> Vec<BatchStats> {
        let stats = self.batches.iter().zip(1..).map(|(batch, batch_size)| BatchStats {
            batch_size,
            compute_input: batch.input.read(),
            compute_infer: batch.infer.read(),
            compute_output: batch.output.read(),
        });
        stats.filter(|stats| stats.compute_infer.count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use base::ManualClock;

    use super::*;

    fn timing(finished: u64, busy: u64) -> Timing {
        Timing {
            arrived: Nanos(0),
            finished: Nanos(finished),
            busy: Nanos(busy),
            first: true,
            ..Timing::default()
        }
    }

    fn timeout(ns: u64) -> RequestLimits {
        RequestLimits { timeout: Some(Nanos(ns)), slo: None }
    }

    fn begin(
        counters: &Arc<Counters>,
        clock: Arc<ManualClock>,
        limits: RequestLimits,
    ) -> PendingRequest {
        PendingRequest::begin(counters.clone(), clock, 1, limits)
    }

    fn pending(counters: &Arc<Counters>) -> PendingRequest {
        begin(counters, Arc::default(), RequestLimits::default())
    }

    fn reply(timing: Timing) -> Reply {
        Reply { result: Ok(vec![]), timing }
    }

    #[test]
    fn phases_add_up_to_the_whole_time() {
        let counters = Counters::default();
        counters.begin();
        let staged = Timing { prepared: Nanos(20_000), ..timing(200_000, 150_000) };
        counters.succeed(&staged, Nanos(7_000), 4, timeout(100_000));
        let stats = counters.inference_stats();
        assert_eq!(stats.success, DurationStat { count: 1, ns: 207_000 });
        assert_eq!((stats.compute_input.ns, stats.queue.ns), (20_000, 30_000));
        assert_eq!((stats.compute_infer.ns, stats.compute_output.ns), (150_000, 7_000));
        assert_eq!(counters.inferences.load(Relaxed), 4);
        assert_eq!(counters.deadline_misses.load(Relaxed), 1);
        assert_eq!(counters.pending.load(Relaxed), 0);
        let batch = counters.batch_stats()[0];
        assert_eq!((batch.batch_size, batch.compute_output.ns), (4, 7_000));
        // A request that was never staged has no time of inputs.
        counters.begin();
        counters.succeed(&timing(200_000, 150_000), Nanos::ZERO, 1, RequestLimits::default());
        assert_eq!(counters.inference_stats().compute_input, DurationStat { count: 2, ns: 20_000 });
    }

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let histogram = DurationHistogram::default();
        for ns in [0, 10_000, 10_001, 25_000, 6_000_000_000] {
            histogram.add(Nanos(ns));
        }
        let counts = histogram.cumulative();
        assert_eq!((counts[0], counts[1]), (2, 4));
        assert_eq!((counts[BOUNDS_US.len() - 1], counts[BOUNDS_US.len()]), (4, 5));
        assert_eq!(histogram.read(), DurationStat { count: 5, ns: 6_000_045_001 });
    }

    #[test]
    fn a_request_is_counted_when_its_outputs_are_ready() {
        let counters = Arc::new(Counters::default());
        let (_, open) = pending(&counters).reply(reply(timing(5_000, 1_000))).expect("outputs");
        assert_eq!(counters.success.read().count, 0);
        assert_eq!(open.finish(Nanos(6_500)).finished, Nanos(5_000));
        assert_eq!(counters.success.read(), DurationStat { count: 1, ns: 6_500 });
        assert_eq!(counters.output.read().ns, 1_500);
        // The client disconnected after the work was done.
        drop(pending(&counters).reply(reply(timing(5_000, 1_000))));
        assert_eq!(counters.success.read(), DurationStat { count: 2, ns: 11_500 });
        // And before.
        drop(pending(&counters));
        assert_eq!(counters.cancelled.load(Relaxed), 1);
        assert_eq!(counters.pending.load(Relaxed), 0);
    }

    #[test]
    fn what_a_client_gives_up_after_the_slo_has_missed_it() {
        let (counters, clock) = (Arc::new(Counters::default()), Arc::new(ManualClock::default()));
        let slo = RequestLimits { slo: Some(Nanos(5_000)), ..RequestLimits::default() };
        let dropped_after = |ns| {
            let open = begin(&counters, clock.clone(), slo);
            clock.advance(Nanos(ns));
            drop(open);
            (counters.cancelled.load(Relaxed), counters.slo_missed.load(Relaxed))
        };
        assert_eq!(dropped_after(5_000), (1, 0));
        assert_eq!(dropped_after(5_001), (2, 1));
        assert_eq!(counters.fail.read(), DurationStat { count: 2, ns: 10_001 });
    }

    #[test]
    fn prefix_and_suffix_are_one_request() {
        let counters = Arc::new(Counters::default());
        let open = pending(&counters).with_suffix();
        let (_, open) = open.reply(reply(timing(5_000, 1_000))).expect("outputs");
        assert_eq!(counters.success.read().count, 0);
        let suffix = Timing { arrived: Nanos(6_000), ..timing(9_000, 2_000) };
        let (_, open) = open.reply(reply(suffix)).expect("outputs");
        open.finish(Nanos(9_000));
        assert_eq!(counters.success.read(), DurationStat { count: 1, ns: 9_000 });
        assert_eq!(counters.infer.read().ns, 3_000);
    }

    #[test]
    fn a_batch_is_one_execution_of_all_its_rows() {
        let counters = Counters::default();
        for first in [true, false, false] {
            counters.begin();
            let timing = Timing { busy: Nanos(100), rows: 3, first, ..Timing::default() };
            counters.succeed(&timing, Nanos::ZERO, 1, RequestLimits::default());
        }
        assert_eq!(counters.executions.load(Relaxed), 1);
        assert_eq!(counters.inferences.load(Relaxed), 3);
        let stats = counters.batch_stats();
        assert_eq!((stats.len(), stats[0].batch_size), (1, 3));
        assert_eq!(stats[0].compute_infer, DurationStat { count: 1, ns: 100 });
    }

    #[test]
    fn failures_are_counted_by_reason() {
        let counters = Counters::default();
        counters.begin();
        let none = RequestLimits::default();
        counters.fail(&timing(0, 0), &Rejection::QueueFull { capacity: 1 }, none);
        counters.begin();
        counters.fail(&timing(5, 0), &Rejection::DeadlineExceeded, none);
        assert_eq!(counters.queue_full.load(Relaxed), 1);
        assert_eq!(counters.deadline_misses.load(Relaxed), 1);
        assert_eq!(counters.fail.read().count, 2);
    }

    #[test]
    fn only_what_was_answered_in_time_keeps_the_slo() {
        let counters = Counters::default();
        let slo = RequestLimits { slo: Some(Nanos(50_000)), ..RequestLimits::default() };
        let read = || (counters.slo_kept.load(Relaxed), counters.slo_missed.load(Relaxed));
        counters.succeed(&timing(40_000, 1_000), Nanos(10_000), 1, slo);
        assert_eq!(read(), (1, 0));
        counters.succeed(&timing(40_000, 1_000), Nanos(10_001), 1, slo);
        counters.fail(&timing(0, 0), &Rejection::QueueFull { capacity: 1 }, slo);
        counters.fail(&timing(0, 0), &Rejection::ShuttingDown, slo);
        let failed = Rejection::Device(DeviceError::BadPlan("lost".to_string()));
        counters.fail(&timing(0, 0), &failed, slo);
        assert_eq!(read(), (1, 4));
        // A client that gives up in time, or sends what the model cannot take, decides itself.
        counters.fail(&timing(9_000, 0), &Rejection::Cancelled, slo);
        let bad = Rejection::Device(DeviceError::BadInput("a shape".to_string()));
        counters.fail(&timing(0, 0), &bad, slo);
        assert_eq!(read(), (1, 4));
        counters.fail(&timing(60_000, 0), &Rejection::Cancelled, slo);
        counters.succeed(&timing(40_000, 1_000), Nanos::ZERO, 1, timeout(30_000));
        assert_eq!(read(), (1, 6));
        // Without an SLO there is nothing to keep.
        counters.fail(&timing(0, 0), &Rejection::ShuttingDown, RequestLimits::default());
        assert_eq!(read(), (1, 6));
    }
}
