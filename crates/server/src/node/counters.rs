//! Counters of a model, updated with every reply of the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use api::metadata::{BatchStats, DurationStat, InferenceStats};
use base::Nanos;
use device::DeviceError;
use runtime::{Rejection, Reply, ReplyResult, Timing};

/// Upper bounds of the latency histogram, in microseconds.
pub const LATENCY_BOUNDS_US: [u64; 14] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 5_000_000,
];

/// Largest batch size with a counter of its own.
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

/// Counters of one model version.
#[derive(Debug)]
pub struct Counters {
    /// Requests with outputs.
    pub success: DurationCounter,
    /// Requests that failed.
    pub fail: DurationCounter,
    /// Time that successful requests waited, off the device.
    pub queue: DurationCounter,
    /// Time in which inputs of successful requests were checked and staged.
    pub staging: DurationCounter,
    /// Time of successful requests on the device.
    pub compute: DurationCounter,
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
    /// Times work was preempted.
    pub preemptions: AtomicU64,
    latency: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
    batches: [DurationCounter; BATCH_SIZES],
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            success: DurationCounter::default(),
            fail: DurationCounter::default(),
            queue: DurationCounter::default(),
            staging: DurationCounter::default(),
            compute: DurationCounter::default(),
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
            preemptions: AtomicU64::default(),
            latency: Default::default(),
            batches: [const { DurationCounter { count: AtomicU64::new(0), ns: AtomicU64::new(0) } };
                BATCH_SIZES],
        }
    }
}

/// A request in flight. It is counted once, when it is replied to or dropped.
pub(super) struct PendingRequest {
    counters: Arc<Counters>,
    batch: usize,
    timeout: Option<Nanos>,
    /// Timing of the prefix, if it ran separately.
    prefix_timing: Option<Timing>,
    /// Whether the suffix runs after the next reply.
    suffix_follows: bool,
    open: bool,
}

impl PendingRequest {
    /// Starts a request of `batch` inferences with `timeout`.
    pub(super) fn begin(
        counters: Arc<Counters>,
        batch: usize,
        timeout: Option<Nanos>,
    ) -> PendingRequest {
        counters.begin();
        PendingRequest {
            counters,
            batch,
            timeout,
            prefix_timing: None,
            suffix_follows: false,
            open: true,
        }
    }

    /// Marks the next reply as that of the prefix; the suffix follows.
    pub(super) fn with_suffix(mut self) -> PendingRequest {
        self.suffix_follows = true;
        self
    }

    /// Handles a reply of the node. Returns the request if its suffix follows.
    pub(super) fn reply(mut self, mut reply: Reply) -> (ReplyResult, Option<PendingRequest>) {
        if self.suffix_follows && reply.result.is_ok() {
            self.prefix_timing = Some(reply.timing);
            self.suffix_follows = false;
            return (reply.result, Some(self));
        }
        self.end(&mut reply);
        (reply.result, None)
    }

    fn end(&mut self, reply: &mut Reply) {
        if let Some(prefix_timing) = self.prefix_timing {
            reply.timing.arrived = prefix_timing.arrived;
            reply.timing.prepared = prefix_timing.prepared;
            reply.timing.busy += prefix_timing.busy;
            reply.timing.preemptions += prefix_timing.preemptions;
        }
        self.counters.end(reply, self.batch, self.timeout);
        self.open = false;
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        if self.open {
            let timing = self.prefix_timing.unwrap_or_default();
            self.end(&mut Reply { result: Err(Rejection::Cancelled), timing });
        }
    }
}

impl Counters {
    /// Counts a request sent to the node.
    pub fn begin(&self) {
        self.pending.fetch_add(1, Relaxed);
    }

    /// Counts the reply to a request of `batch` inferences with `timeout`.
    pub fn end(&self, reply: &Reply, batch: usize, timeout: Option<Nanos>) {
        self.pending.fetch_sub(1, Relaxed);
        let timing = &reply.timing;
        let total = timing.finished.since(timing.arrived);
        if timing.preemptions > 0 {
            self.preemptions.fetch_add(u64::from(timing.preemptions), Relaxed);
        }
        if timeout.is_some_and(|timeout| total > timeout)
            || matches!(reply.result, Err(Rejection::DeadlineExceeded))
        {
            self.deadline_misses.fetch_add(1, Relaxed);
        }
        match &reply.result {
            Ok(_) => {
                let busy = timing.busy.min(total);
                let staging = timing.prepared.since(timing.arrived).min(total - busy);
                self.succeed(total, busy, staging, batch);
                if timing.first {
                    self.execute(timing.busy, timing.rows.max(batch));
                }
            }
            Err(rejection) => self.fail(total, rejection),
        }
    }

    fn succeed(&self, total: Nanos, busy: Nanos, staging: Nanos, batch: usize) {
        self.success.add(total);
        self.queue.add(total - busy - staging);
        self.staging.add(staging);
        self.compute.add(busy);
        self.inferences.fetch_add(batch as u64, Relaxed);
        let micros = total.as_micros();
        let bucket = LATENCY_BOUNDS_US.partition_point(|&bound| bound < micros);
        self.latency[bucket].fetch_add(1, Relaxed);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_ms.store(now.as_millis() as u64, Relaxed);
    }

    fn execute(&self, busy: Nanos, rows: usize) {
        self.executions.fetch_add(1, Relaxed);
        if let Some(span) = rows.checked_sub(1).and_then(|index| self.batches.get(index)) {
            span.add(busy);
        }
    }

    fn fail(&self, total: Nanos, rejection: &Rejection) {
        self.fail.add(total);
        let counter = match rejection {
            Rejection::QueueFull { .. } => &self.queue_full,
            Rejection::DeadlineExceeded => &self.deadline,
            Rejection::Cancelled => &self.cancelled,
            Rejection::ShuttingDown | Rejection::NoSuchModel => &self.draining,
            Rejection::RealTimeOnly => &self.not_run,
            Rejection::Device(DeviceError::BadInput(_) | DeviceError::StepFailed { .. }) => {
                &self.bad_input
            }
            Rejection::Device(_) => &self.backend,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Cumulative counts of the latency histogram; the last one counts all requests.
    pub fn latency(&self) -> [u64; LATENCY_BOUNDS_US.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|index| {
            sum += self.latency[index].load(Relaxed);
            sum
        })
    }

    /// The counters as the statistics extension reports them.
    pub fn inference_stats(&self) -> InferenceStats {
        let success = self.success.read();
        let untimed = DurationStat { count: success.count, ns: 0 };
        InferenceStats {
            success,
            fail: self.fail.read(),
            queue: self.queue.read(),
            compute_input: self.staging.read(),
            compute_infer: self.compute.read(),
            compute_output: untimed,
            ..InferenceStats::default()
        }
    }

    /// Statistics per batch size, for sizes that occurred.
    pub fn batch_stats(&self) -> Vec<BatchStats> {
        let sizes = self.batches.iter().map(DurationCounter::read).zip(1..);
        sizes
            .filter(|(stat, _)| stat.count > 0)
            .map(|(stat, batch_size)| {
                let untimed = DurationStat { count: stat.count, ns: 0 };
                BatchStats {
                    batch_size,
                    compute_input: untimed,
                    compute_infer: stat,
                    compute_output: untimed,
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime::Timing;

    fn reply(result: runtime::ReplyResult, finished: u64, busy: u64) -> Reply {
        let timing = Timing {
            arrived: Nanos(0),
            finished: Nanos(finished),
            busy: Nanos(busy),
            first: true,
            ..Timing::default()
        };
        Reply { result, timing }
    }

    #[test]
    fn time_is_either_on_the_device_or_off_it() {
        let counters = Counters::default();
        counters.begin();
        counters.end(&reply(Ok(vec![]), 200_000, 150_000), 4, Some(Nanos(100_000)));
        let stats = counters.inference_stats();
        assert_eq!(stats.success, DurationStat { count: 1, ns: 200_000 });
        assert_eq!(stats.queue.ns + stats.compute_infer.ns, 200_000);
        assert_eq!(counters.inferences.load(Relaxed), 4);
        assert_eq!(counters.deadline_misses.load(Relaxed), 1);
        assert_eq!(counters.pending.load(Relaxed), 0);
        assert_eq!(counters.batch_stats()[0].batch_size, 4);
        assert_eq!(counters.latency()[0], 0);
        assert_eq!(counters.latency()[1], 1);
    }

    #[test]
    fn staging_is_apart_from_waiting() {
        let counters = Counters::default();
        counters.begin();
        let mut staged = reply(Ok(vec![]), 200_000, 150_000);
        staged.timing.prepared = Nanos(20_000);
        counters.end(&staged, 1, None);
        let stats = counters.inference_stats();
        assert_eq!((stats.compute_input.ns, stats.queue.ns), (20_000, 30_000));
        // A request that was never staged has no such time.
        counters.begin();
        counters.end(&reply(Ok(vec![]), 200_000, 150_000), 1, None);
        assert_eq!(counters.inference_stats().compute_input.ns, 20_000);
    }

    #[test]
    fn a_batch_is_one_execution_of_all_its_rows() {
        let counters = Counters::default();
        for first in [true, false, false] {
            counters.begin();
            let timing = Timing { busy: Nanos(100), rows: 3, first, ..Timing::default() };
            counters.end(&Reply { result: Ok(vec![]), timing }, 1, None);
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
        counters.end(&reply(Err(Rejection::QueueFull { capacity: 1 }), 0, 0), 1, None);
        counters.begin();
        counters.end(&reply(Err(Rejection::DeadlineExceeded), 5, 0), 1, None);
        assert_eq!(counters.queue_full.load(Relaxed), 1);
        assert_eq!(counters.deadline_misses.load(Relaxed), 1);
        assert_eq!(counters.fail.read().count, 2);
    }
}
