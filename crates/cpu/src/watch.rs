//! Where work looks whether it is to leave, and stands still when it is.
//!
//! A step that is told to leave stops where it is: each of its threads waits at its next look, in the middle of its
//! loops, and goes on from there when the step is resumed. Nothing is done twice and nothing is kept but the
//! threads themselves. A kernel takes part by saying how much it did ([`did`]) and, on other threads of its pool, that it is at
//! work ([`at_work`]); one that says nothing is left when it ends.

use std::cell::{Cell, OnceCell};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// Work between two looks, in nanoseconds of one core as kernels estimate them. An estimate may be off by several times before
/// real time would notice.
const LOOK_EVERY: usize = 20_000;

/// Multiplications of a matrix product that take about a nanosecond.
const PRODUCTS_PER_NANOSECOND: usize = 16;

/// Elements that are filled between two looks.
const FILLED: usize = 16 * 1024;

/// States of a thread.
const IDLE: u8 = 0;
const AT_WORK: u8 = 1;
const STANDING: u8 = 2;

thread_local! {
    static DONE: Cell<usize> = const { Cell::new(0) };
    static POST: OnceCell<Post> = const { OnceCell::new() };
}

/// A thread's place in a watched crew.
struct Post {
    watch: Arc<Watch>,
    worker: usize,
}

/// What a thread ends with whose task nobody wants any more.
pub(crate) struct Abandoned;

/// A thread's state, on a cache line of its own.
#[repr(align(128))]
struct Slot(AtomicU8);

/// The order to a crew's threads, and where they are.
pub(crate) struct Watch {
    leave: AtomicBool,
    slots: Box<[Slot]>,
    orders: Mutex<Orders>,
    changed: Condvar,
    /// Called once per order, by one of the threads, when the last of them stands.
    still: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct Orders {
    told: bool,
    abandoned: bool,
}

impl Watch {
    pub(crate) fn new(threads: usize) -> Watch {
        Watch {
            leave: AtomicBool::new(false),
            slots: (0..threads).map(|_| Slot(AtomicU8::new(IDLE))).collect(),
            orders: Mutex::default(),
            changed: Condvar::new(),
            still: OnceLock::new(),
        }
    }

    /// What is to be done when all stand still. Set once, before any work.
    pub(crate) fn when_still(&self, still: impl Fn() + Send + Sync + 'static) {
        // A second call would be a defect that changes nothing.
        let _ = self.still.set(Box::new(still));
    }

    /// Makes the calling thread one of those that look; it is number `worker` of them.
    pub(crate) fn post(self: &Arc<Watch>, worker: usize) {
        POST.with(|post| {
            let _ = post.set(Post { watch: self.clone(), worker });
        });
    }

    /// Orders all threads to stand still at their next look.
    pub(crate) fn stop(&self) {
        let mut orders = self.lock();
        orders.told = false;
        self.leave.store(true, Ordering::SeqCst);
    }

    /// Lets them go on.
    pub(crate) fn go(&self) {
        let mut orders = self.lock();
        *orders = Orders::default();
        self.leave.store(false, Ordering::SeqCst);
        drop(orders);
        self.changed.notify_all();
    }

    /// Makes those that stand end with [`Abandoned`], and those that come to their next look.
    pub(crate) fn abandon(&self) {
        self.lock().abandoned = true;
        self.leave.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_still(&self) -> bool {
        self.slots.iter().all(|slot| slot.0.load(Ordering::SeqCst) != AT_WORK)
    }

    #[cold]
    fn stand(&self, worker: usize) {
        let slot = &self.slots[worker].0;
        let before = slot.swap(STANDING, Ordering::SeqCst);
        let mut orders = self.lock();
        while self.leave.load(Ordering::SeqCst) {
            if orders.abandoned {
                slot.store(IDLE, Ordering::SeqCst);
                drop(orders);
                resume_unwind(Box::new(Abandoned));
            }
            if !orders.told && self.is_still() {
                orders.told = true;
                drop(orders);
                if let Some(still) = self.still.get() {
                    still();
                }
                orders = self.lock();
                continue;
            }
            orders = self.changed.wait(orders).unwrap_or_else(PoisonError::into_inner);
        }
        slot.store(before, Ordering::SeqCst);
    }
}

/// Stands still here if the calling thread's crew was told to.
pub(crate) fn look() {
    POST.with(|post| {
        if let Some(post) = post.get()
            && post.watch.leave.load(Ordering::SeqCst)
        {
            post.watch.stand(post.worker);
        }
    });
}

/// Says that about `nanoseconds` of work were done since the last call, and looks when they add up.
#[inline]
pub(crate) fn did(nanoseconds: usize) {
    DONE.with(|done| {
        let sum = done.get().saturating_add(nanoseconds);
        if sum < LOOK_EVERY {
            done.set(sum);
            return;
        }
        done.set(0);
        look();
    });
}

/// [`did`] for multiplications of a matrix product.
#[inline]
pub(crate) fn multiplied(count: usize) {
    did(count / PRODUCTS_PER_NANOSECOND);
}

/// `buffer.resize(count, value)`, with looks: much memory takes long to fill.
pub(crate) fn resize<T: Clone>(buffer: &mut Vec<T>, count: usize, value: T) {
    buffer.truncate(count);
    buffer.reserve(count - buffer.len());
    while count - buffer.len() > FILLED {
        buffer.resize(buffer.len() + FILLED, value.clone());
        look();
    }
    buffer.resize(count, value);
}

/// While it lives, its thread counts as one that has to stand before the crew is still. Parallel loops make one per run of
/// their items.
pub(crate) struct AtWork {
    before: u8,
}

/// Begins work on a thread of a pool, with a look.
pub(crate) fn at_work() -> AtWork {
    let before = POST.with(|post| {
        post.get()
            .map_or(IDLE, |post| post.watch.slots[post.worker].0.swap(AT_WORK, Ordering::SeqCst))
    });
    look();
    AtWork { before }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        POST.with(|post| {
            let Some(post) = post.get() else { return };
            post.watch.slots[post.worker].0.store(self.before, Ordering::SeqCst);
            if post.watch.leave.load(Ordering::SeqCst) {
                // Those that stand may have waited for this thread alone.
                let _orders = post.watch.lock();
                post.watch.changed.notify_all();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;
    use std::thread;

    /// Two threads that count, told to stop: both stand, once in a while, and neither counts meanwhile.
    #[test]
    fn all_stand_before_it_is_said_and_all_go_on() {
        let watch = Arc::new(Watch::new(2));
        let (sender, stopped) = channel();
        watch.when_still(move || sender.send(()).expect("the test listens"));
        let counts: Arc<[AtomicUsize; 2]> = Arc::default();
        let end = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..2)
            .map(|worker| {
                let (watch, counts, end) = (watch.clone(), counts.clone(), end.clone());
                thread::spawn(move || {
                    watch.post(worker);
                    while !end.load(Ordering::SeqCst) {
                        let _working = at_work();
                        for _ in 0..50 {
                            counts[worker].fetch_add(1, Ordering::SeqCst);
                            did(LOOK_EVERY / 3);
                        }
                    }
                })
            })
            .collect();
        let read = || [0, 1].map(|worker| counts[worker].load(Ordering::SeqCst));
        for _ in 0..200 {
            watch.stop();
            stopped.recv().expect("they stand");
            let before = read();
            thread::yield_now();
            assert_eq!(read(), before);
            watch.go();
        }
        end.store(true, Ordering::SeqCst);
        for thread in threads {
            thread.join().expect("it ends");
        }
        assert!(stopped.try_recv().is_err());
    }

    #[test]
    fn what_nobody_wants_ends_where_it_stands() {
        let watch = Arc::new(Watch::new(1));
        let (sender, stopped) = channel();
        watch.when_still(move || sender.send(()).expect("the test listens"));
        watch.stop();
        let theirs = watch.clone();
        let thread = thread::spawn(move || {
            theirs.post(0);
            let run = || loop {
                did(LOOK_EVERY);
            };
            let ended: Result<(), _> = std::panic::catch_unwind(run);
            ended.is_err_and(|payload| payload.is::<Abandoned>())
        });
        stopped.recv().expect("it stands");
        watch.abandon();
        assert!(thread.join().expect("it ends"));
    }
}
