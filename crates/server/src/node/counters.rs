//! What a model has done, counted with atomics from the replies of the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use api::metadata::{BatchStats, DurationStat, InferenceStats};
use base::Nanos;
use runtime::{Rejection, Reply, ReplyResult, Timing};

/// Upper bounds of the latency histogram, in microseconds.
pub const LATENCY_BOUNDS_US: [u64; 14] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 5_000_000,
];

/// Batch sizes that are counted one by one.
const BATCH_SIZES: usize = 64;

/// How often, and for how long in all.
#[derive(Debug, Default)]
pub struct Span {
    count: AtomicU64,
    ns: AtomicU64,
}

impl Span {
    fn add(&self, span: Nanos) {
        self.count.fetch_add(1, Relaxed);
        self.ns.fetch_add(span.0, Relaxed);
    }

    /// What was counted so far.
    pub fn read(&self) -> DurationStat {
        DurationStat { count: self.count.load(Relaxed), ns: self.ns.load(Relaxed) }
    }
}

/// Counts of one model version.
#[derive(Debug)]
pub struct Counters {
    /// Requests answered with outputs.
    pub success: Span,
    /// Requests answered with an error.
    pub fail: Span,
    /// Time of successes off the device.
    pub queue: Span,
    /// Time of successes on the device.
    pub compute: Span,
    /// Inferences; a batch of n counts n.
    pub inferences: AtomicU64,
    /// Runs on the device; a batch is one.
    pub executions: AtomicU64,
    /// Requests taken in and not yet answered.
    pub pending: AtomicU64,
    /// Milliseconds since the epoch of the last answer.
    pub last_ms: AtomicU64,
    /// Requests refused because too many wait.
    pub queue_full: AtomicU64,
    /// Requests dropped because their deadline passed.
    pub deadline: AtomicU64,
    /// Requests whose client went away.
    pub cancelled: AtomicU64,
    /// Requests refused because the model or the server goes away.
    pub draining: AtomicU64,
    /// Best-effort requests refused because the policy runs none.
    pub not_run: AtomicU64,
    /// Requests whose inputs do not fit.
    pub bad_input: AtomicU64,
    /// Requests the device failed.
    pub backend: AtomicU64,
    /// Answers after the deadline, dropped ones included.
    pub deadline_misses: AtomicU64,
    /// Times work was made to leave for other work.
    pub preemptions: AtomicU64,
    latency: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
    batches: [Span; BATCH_SIZES],
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            success: Span::default(),
            fail: Span::default(),
            queue: Span::default(),
            compute: Span::default(),
            inferences: AtomicU64::default(),
            executions: AtomicU64::default(),
            pending: AtomicU64::default(),
            last_ms: AtomicU64::default(),
            queue_full: AtomicU64::default(),
            deadline: AtomicU64::default(),
            cancelled: AtomicU64::default(),
            draining: AtomicU64::default(),
            not_run: AtomicU64::default(),
            bad_input: AtomicU64::default(),
            backend: AtomicU64::default(),
            deadline_misses: AtomicU64::default(),
            preemptions: AtomicU64::default(),
            latency: Default::default(),
            batches: [const { Span { count: AtomicU64::new(0), ns: AtomicU64::new(0) } };
                BATCH_SIZES],
        }
    }
}

/// A request that is counted once, when it ends: with an answer, or given up on its way.
pub(super) struct Count {
    counters: Arc<Counters>,
    batch: usize,
    timeout: Option<Nanos>,
    /// What the first of two parts took.
    before: Option<Timing>,
    /// Whether another part comes.
    more: bool,
    open: bool,
}

impl Count {
    /// A request of `batch` inferences that has `timeout` begins.
    pub(super) fn begin(counters: Arc<Counters>, batch: usize, timeout: Option<Nanos>) -> Count {
        counters.begin();
        Count { counters, batch, timeout, before: None, more: false, open: true }
    }

    /// The next reply is that of the first of two parts.
    pub(super) fn of_two(mut self) -> Count {
        self.more = true;
        self
    }

    /// The node answered. Where another part comes, the count goes on with it.
    pub(super) fn reply(mut self, mut reply: Reply) -> (ReplyResult, Option<Count>) {
        if self.more && reply.result.is_ok() {
            self.before = Some(reply.timing);
            self.more = false;
            return (reply.result, Some(self));
        }
        self.end(&mut reply);
        (reply.result, None)
    }

    fn end(&mut self, reply: &mut Reply) {
        if let Some(before) = self.before {
            reply.timing.arrived = before.arrived;
            reply.timing.busy += before.busy;
            reply.timing.preemptions += before.preemptions;
        }
        self.counters.end(reply, self.batch, self.timeout);
        self.open = false;
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        if self.open {
            let timing = self.before.unwrap_or_default();
            self.end(&mut Reply { result: Err(Rejection::Cancelled), timing });
        }
    }
}

impl Counters {
    /// A request goes to the node.
    pub fn begin(&self) {
        self.pending.fetch_add(1, Relaxed);
    }

    /// The node answered a request of `batch` inferences that had `timeout`.
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
                self.succeed(total, timing.busy.min(total), batch);
                if timing.first {
                    self.execute(timing.busy, timing.rows.max(batch));
                }
            }
            Err(rejection) => self.fail(total, rejection),
        }
    }

    fn succeed(&self, total: Nanos, busy: Nanos, batch: usize) {
        self.success.add(total);
        self.queue.add(total - busy);
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
            Rejection::Device(device::DeviceError::BadInput(_)) => &self.bad_input,
            Rejection::Device(_) => &self.backend,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Cumulative counts of the latency histogram; the last one is of all.
    pub fn latency(&self) -> [u64; LATENCY_BOUNDS_US.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|index| {
            sum += self.latency[index].load(Relaxed);
            sum
        })
    }

    /// The statistics extension's view.
    pub fn inference_stats(&self) -> InferenceStats {
        let success = self.success.read();
        let untimed = DurationStat { count: success.count, ns: 0 };
        InferenceStats {
            success,
            fail: self.fail.read(),
            queue: self.queue.read(),
            compute_input: untimed,
            compute_infer: self.compute.read(),
            compute_output: untimed,
            ..InferenceStats::default()
        }
    }

    /// The same by batch size, for sizes that occurred.
    pub fn batch_stats(&self) -> Vec<BatchStats> {
        let sizes = self.batches.iter().map(Span::read).zip(1..);
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
    fn failures_are_told_apart() {
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
