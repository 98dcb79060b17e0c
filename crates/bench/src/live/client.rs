//! Clients as threads: each sends its requests on time and has at most one outstanding.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::thread::Thread;
use std::time::Duration;

use base::{Clock, Nanos};
use model::Tensor;
use model::config::Class;
use runtime::{ModelKey, Node, Rejection, Reply, Request, Timing};

use crate::arrival::ArrivalTimes;

/// How long before a request is due a client stops sleeping and spins; longer than a sleep
/// overshoots.
const SPIN_BEFORE: Duration = Duration::from_micros(200);

/// Replies that a client records one by one; it only counts later ones.
const REPLIES_MAX: usize = 4_000_000;

/// How a client waits for its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitMode {
    /// Polls without pause.
    Spin,
    /// Sleeps until woken.
    Park,
}

/// The node's key of a model, shared by its clients; churn replaces the model by another copy.
#[derive(Clone)]
pub(super) struct CurrentKey(Arc<RwLock<ModelKey>>);

impl CurrentKey {
    pub(super) fn new(key: ModelKey) -> CurrentKey {
        CurrentKey(Arc::new(RwLock::new(key)))
    }

    /// The key. The model is not replaced while the guard is held, so a request can be submitted.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, ModelKey> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the key and returns the former one, which no client uses from now on.
    pub(super) fn replace(&self, key: ModelKey) -> ModelKey {
        std::mem::replace(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner), key)
    }
}

/// The request that a client sends.
#[derive(Clone)]
pub(super) struct RequestSpec {
    pub(super) key: CurrentKey,
    pub(super) class: Class,
    pub(super) inputs: Vec<Tensor>,
    /// What an undisturbed run of this class computes.
    pub(super) expected: Arc<Vec<Tensor>>,
}

/// A reply, with its times.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimedReply {
    /// When the request was sent, by the node's clock.
    pub(super) sent: Nanos,
    /// From request to reply.
    pub(super) latency: Nanos,
    /// Times of its stages inside the node.
    pub(super) timing: Timing,
}

impl TimedReply {
    /// The latency, divided into the stages of [`super::LatencyParts`].
    pub(super) fn parts(&self) -> [Nanos; 5] {
        let Timing { arrived, prepared, started, launched, busy, .. } = self.timing;
        let replied_at = self.sent + self.latency;
        let returned = started + busy;
        [
            prepared.since(arrived),
            started.since(prepared),
            launched.since(started),
            returned.since(launched),
            replied_at.since(returned),
        ]
    }
}

/// Records what became of a client's requests.
pub(super) trait ClientLog: Default {
    /// Starts recording after the warm-up, whose errors still count.
    fn begin(warm: Self, start: Nanos, length: Nanos) -> Self;
    /// A reply came; `right` if it equals that of an undisturbed run.
    fn replied(&mut self, reply: TimedReply, right: bool);
    /// The request was refused or failed.
    fn refused(&mut self, why: &Rejection);
    /// A request was sent late.
    fn late(&mut self);
    /// A period was dropped.
    fn dropped(&mut self);
}

/// Records every reply.
#[derive(Debug, Default)]
pub(super) struct FullLog {
    /// Replies to requests sent inside the window.
    pub(super) replies: Vec<TimedReply>,
    /// Requests sent late, because their period began while the client waited.
    pub(super) late: u64,
    /// Periods dropped, because several began while the client waited.
    pub(super) dropped: u64,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
    /// Replies that differ from those of an undisturbed run.
    pub(super) wrong: u64,
}

impl ClientLog for FullLog {
    fn begin(warm: FullLog, _: Nanos, _: Nanos) -> FullLog {
        FullLog { errors: warm.errors, first_error: warm.first_error, ..FullLog::default() }
    }

    fn replied(&mut self, reply: TimedReply, right: bool) {
        self.wrong += u64::from(!right);
        if self.replies.len() < REPLIES_MAX {
            self.replies.push(reply);
        }
    }

    fn refused(&mut self, why: &Rejection) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| why.to_string());
    }

    fn late(&mut self) {
        self.late += 1;
    }

    fn dropped(&mut self) {
        self.dropped += 1;
    }
}

/// Start and end of a cell, shared by all of its threads.
pub(super) struct CellWindow {
    /// All clients are warm.
    pub(super) warm: Barrier,
    /// The start is set.
    pub(super) set: Barrier,
    pub(super) start: AtomicU64,
    pub(super) warm_until: Nanos,
    pub(super) length: Nanos,
}

/// Passes a reply to the client's thread.
#[derive(Default)]
struct ReplySlot {
    there: AtomicBool,
    reply: Mutex<Option<(Nanos, Reply)>>,
}

/// One client.
pub(super) struct LiveClient<'a> {
    pub(super) node: &'a Node,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) target: RequestSpec,
    pub(super) arrivals: ArrivalTimes,
    pub(super) waiting: WaitMode,
}

impl LiveClient<'_> {
    /// Warms up in a closed loop, then sends requests by its arrivals until the window ends.
    pub(super) fn run<L: ClientLog>(mut self, window: &CellWindow) -> L {
        let reply_slot = Arc::new(ReplySlot::default());
        let mut warm = L::default();
        while self.clock.now() < window.warm_until {
            self.send_request(&reply_slot, &mut warm);
        }
        window.warm.wait();
        window.set.wait();
        let start = Nanos(window.start.load(Ordering::Acquire));
        let end = start + window.length;
        let mut log = L::begin(warm, start, window.length);
        if self.arrivals.is_closed() {
            wait_until(&*self.clock, start);
            while self.clock.now() < end {
                self.send_request(&reply_slot, &mut log);
            }
        } else {
            self.run_open(start, end, &reply_slot, &mut log);
        }
        log
    }

    fn run_open<L: ClientLog>(
        &mut self,
        start: Nanos,
        end: Nanos,
        reply_slot: &Arc<ReplySlot>,
        log: &mut L,
    ) {
        let mut next = self.arrivals.next(Nanos::ZERO);
        while let Some(at) = next.map(|at| start + at)
            && at < end
        {
            let now = self.clock.now();
            next = self.arrivals.next(Nanos::ZERO);
            if at < now {
                // Of several periods that have passed only the newest counts.
                while let Some(later) = next.filter(|later| start + *later <= now) {
                    if start + later < end {
                        log.dropped();
                    }
                    next = self.arrivals.next(Nanos::ZERO);
                }
                if now >= end {
                    return;
                }
                log.late();
            } else {
                wait_until(&*self.clock, at);
            }
            self.send_request(reply_slot, log);
        }
    }

    /// Sends one request and waits for the reply.
    fn send_request<L: ClientLog>(&self, reply_slot: &Arc<ReplySlot>, log: &mut L) {
        let sent = self.clock.now();
        let (slot, clock, waiter) = (
            reply_slot.clone(),
            self.clock.clone(),
            (self.waiting == WaitMode::Park).then(std::thread::current),
        );
        let key = self.target.key.read();
        let request = Request {
            model: *key,
            inputs: self.target.inputs.clone(),
            class: Some(self.target.class),
            priority: None,
            timeout: None,
        };
        self.node.submit(request, Box::new(move |reply| slot.put(clock.now(), reply, waiter)));
        drop(key);
        let Some((replied_at, reply)) = reply_slot.take(self.waiting) else { return };
        match reply.result {
            Ok(outputs) => {
                let timed = TimedReply { sent, latency: replied_at - sent, timing: reply.timing };
                log.replied(timed, bits_equal(&outputs, &self.target.expected));
            }
            Err(why) => {
                log.refused(&why);
                // Avoids a busy loop when the device refuses immediately.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

impl ReplySlot {
    fn put(&self, now: Nanos, reply: Reply, waiter: Option<Thread>) {
        *self.reply.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, reply));
        self.there.store(true, Ordering::Release);
        if let Some(waiter) = waiter {
            waiter.unpark();
        }
    }

    fn take(&self, waiting: WaitMode) -> Option<(Nanos, Reply)> {
        while !self.there.swap(false, Ordering::Acquire) {
            match waiting {
                WaitMode::Spin => std::hint::spin_loop(),
                WaitMode::Park => std::thread::park(),
            }
        }
        self.reply.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Compares bits, so that equal NaNs are equal.
pub(super) fn bits_equal(one: &[Tensor], other: &[Tensor]) -> bool {
    let equal = |(a, b): (&Tensor, &Tensor)| match (a.raw(), b.raw()) {
        (Some(x), Some(y)) => a.shape() == b.shape() && x == y,
        _ => a == b,
    };
    one.len() == other.len() && one.iter().zip(other).all(equal)
}

/// Waits until `at`: sleeps, then spins for the last part.
fn wait_until(clock: &dyn Clock, at: Nanos) {
    loop {
        let left = Duration::from(at - clock.now());
        if left.is_zero() {
            return;
        }
        match left.checked_sub(SPIN_BEFORE) {
            Some(sleep) if !sleep.is_zero() => std::thread::sleep(sleep),
            _ => std::hint::spin_loop(),
        }
    }
}
