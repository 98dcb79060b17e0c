//! Clients as threads: they ask at the very instant they are to, and never have more than one request outstanding.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::thread::Thread;
use std::time::Duration;

use base::{Clock, Nanos};
use model::Tensor;
use model::config::Class;
use runtime::{ModelKey, Node, Rejection, Reply, Request, Timing};

use crate::arrival::Clockwork;

/// How long before its time a client stops sleeping and looks at the clock instead; longer than a sleep overshoots.
const LOOK_BEFORE: Duration = Duration::from_micros(200);

/// Answers a client keeps one by one; later ones are only counted.
const ANSWERS_MOST: usize = 4_000_000;

/// How a client waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    /// Looks without pause.
    Spin,
    /// Sleeps until woken.
    Park,
}

/// Under which key a node knows a model, for all who ask for it: another copy may take its place.
#[derive(Clone)]
pub(super) struct CurrentKey(Arc<RwLock<ModelKey>>);

impl CurrentKey {
    pub(super) fn new(key: ModelKey) -> CurrentKey {
        CurrentKey(Arc::new(RwLock::new(key)))
    }

    /// The key, which stays the model's for as long as this is held: a request is submitted meanwhile.
    pub(super) fn hold(&self) -> RwLockReadGuard<'_, ModelKey> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `key` in its place; nobody submits with the former one, which is returned, from here on.
    pub(super) fn replace(&self, key: ModelKey) -> ModelKey {
        std::mem::replace(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner), key)
    }
}

/// A model as a client asks for it.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) key: CurrentKey,
    pub(super) class: Class,
    pub(super) inputs: Vec<Tensor>,
    /// What an undisturbed run of this class computes.
    pub(super) expected: Arc<Vec<Tensor>>,
}

/// One answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// When it was asked for, by the node's clock.
    pub(super) asked: Nanos,
    /// From the question to the answer.
    pub(super) latency: Nanos,
    /// When things happened to it in between.
    pub(super) timing: Timing,
}

impl Answer {
    /// Where its time went.
    pub(super) fn parts(&self) -> [Nanos; 5] {
        let Timing { arrived, prepared, started, launched, busy, .. } = self.timing;
        let answered = self.asked + self.latency;
        let given_back = started + busy;
        [
            prepared.since(arrived),
            started.since(prepared),
            launched.since(started),
            given_back.since(launched),
            answered.since(given_back),
        ]
    }
}

/// Who books what became of a client's requests.
pub(super) trait Ledger: Default {
    /// Goes on behind the warm-up, whose errors count, with a window that begins at `start`.
    fn begin(warm: Self, start: Nanos, length: Nanos) -> Self;
    /// An answer came, which is that of an undisturbed run or is not.
    fn answered(&mut self, answer: Answer, right: bool);
    /// There was no answer.
    fn refused(&mut self, why: &Rejection);
    /// A question was asked late.
    fn late(&mut self);
    /// A time was dropped.
    fn dropped(&mut self);
}

/// What became of a client's requests, each of them.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Answers to what was asked inside the window.
    pub(super) answers: Vec<Answer>,
    /// Asked because a time had passed while the client waited.
    pub(super) late: u64,
    /// Times that were dropped: more than one had passed.
    pub(super) dropped: u64,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
    /// Answers that differ from those of an undisturbed run.
    pub(super) wrong: u64,
}

impl Ledger for Tally {
    fn begin(warm: Tally, _: Nanos, _: Nanos) -> Tally {
        Tally { errors: warm.errors, first_error: warm.first_error, ..Tally::default() }
    }

    fn answered(&mut self, answer: Answer, right: bool) {
        self.wrong += u64::from(!right);
        if self.answers.len() < ANSWERS_MOST {
            self.answers.push(answer);
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

/// When a cell begins and ends, agreed on by all of its threads.
pub(super) struct Window {
    /// Everybody is warm.
    pub(super) warm: Barrier,
    /// The start is set.
    pub(super) set: Barrier,
    pub(super) start: AtomicU64,
    pub(super) warm_until: Nanos,
    pub(super) length: Nanos,
}

/// Where an answer arrives.
#[derive(Default)]
struct Mailbox {
    there: AtomicBool,
    reply: Mutex<Option<(Nanos, Reply)>>,
}

/// One client.
pub(super) struct LiveClient<'a> {
    pub(super) node: &'a Node,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) target: Target,
    pub(super) clockwork: Clockwork,
    pub(super) waiting: Waiting,
}

impl LiveClient<'_> {
    /// Warms up in a closed loop, then asks as its arrivals say until the window ends.
    pub(super) fn run<L: Ledger>(mut self, window: &Window) -> L {
        let mailbox = Arc::new(Mailbox::default());
        let mut warm = L::default();
        while self.clock.now() < window.warm_until {
            self.ask(&mailbox, &mut warm);
        }
        window.warm.wait();
        window.set.wait();
        let start = Nanos(window.start.load(Ordering::Acquire));
        let end = start + window.length;
        let mut tally = L::begin(warm, start, window.length);
        if self.clockwork.is_closed() {
            wait_until(&*self.clock, start);
            while self.clock.now() < end {
                self.ask(&mailbox, &mut tally);
            }
        } else {
            self.run_open(start, end, &mailbox, &mut tally);
        }
        tally
    }

    fn run_open<L: Ledger>(
        &mut self,
        start: Nanos,
        end: Nanos,
        mailbox: &Arc<Mailbox>,
        tally: &mut L,
    ) {
        let mut next = self.clockwork.next(Nanos::ZERO);
        while let Some(at) = next.map(|at| start + at)
            && at < end
        {
            let now = self.clock.now();
            next = self.clockwork.next(Nanos::ZERO);
            if at < now {
                // Of several times that have passed only the newest counts.
                while let Some(later) = next.filter(|later| start + *later <= now) {
                    if start + later < end {
                        tally.dropped();
                    }
                    next = self.clockwork.next(Nanos::ZERO);
                }
                if now >= end {
                    return;
                }
                tally.late();
            } else {
                wait_until(&*self.clock, at);
            }
            self.ask(mailbox, tally);
        }
    }

    /// Asks once and waits for the answer.
    fn ask<L: Ledger>(&self, mailbox: &Arc<Mailbox>, tally: &mut L) {
        let asked = self.clock.now();
        let (slot, clock, asker) = (
            mailbox.clone(),
            self.clock.clone(),
            (self.waiting == Waiting::Park).then(std::thread::current),
        );
        let key = self.target.key.hold();
        let request = Request {
            model: *key,
            inputs: self.target.inputs.clone(),
            class: Some(self.target.class),
            priority: None,
            timeout: None,
        };
        self.node.submit(request, Box::new(move |reply| slot.put(clock.now(), reply, asker)));
        drop(key);
        let Some((answered, reply)) = mailbox.take(self.waiting) else { return };
        match reply.result {
            Ok(outputs) => {
                let answer = Answer { asked, latency: answered - asked, timing: reply.timing };
                tally.answered(answer, same(&outputs, &self.target.expected));
            }
            Err(why) => {
                tally.refused(&why);
                // A device that refuses at once would be asked in a tight loop.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

impl Mailbox {
    fn put(&self, now: Nanos, reply: Reply, asker: Option<Thread>) {
        *self.reply.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, reply));
        self.there.store(true, Ordering::Release);
        if let Some(asker) = asker {
            asker.unpark();
        }
    }

    fn take(&self, waiting: Waiting) -> Option<(Nanos, Reply)> {
        while !self.there.swap(false, Ordering::Acquire) {
            match waiting {
                Waiting::Spin => std::hint::spin_loop(),
                Waiting::Park => std::thread::park(),
            }
        }
        self.reply.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Bit by bit: two values that are not a number are the same when they have the same bits.
pub(super) fn same(one: &[Tensor], other: &[Tensor]) -> bool {
    let equal = |(a, b): (&Tensor, &Tensor)| match (a.raw(), b.raw()) {
        (Some(x), Some(y)) => a.shape() == b.shape() && x == y,
        _ => a == b,
    };
    one.len() == other.len() && one.iter().zip(other).all(equal)
}

/// Returns at `at`: sleeps for most of the time and looks at the clock for the rest.
fn wait_until(clock: &dyn Clock, at: Nanos) {
    loop {
        let left = Duration::from(at - clock.now());
        if left.is_zero() {
            return;
        }
        match left.checked_sub(LOOK_BEFORE) {
            Some(sleep) if !sleep.is_zero() => std::thread::sleep(sleep),
            _ => std::hint::spin_loop(),
        }
    }
}
