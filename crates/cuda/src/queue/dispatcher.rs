//! The thread that looks after every best-effort queue of a device.
//!
//! One thread is enough: it queues launches ahead and looks at words, and what several threads would gain they would lose to
//! each other, and take from real time, inside the driver.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Instant;

use super::Polling;
use super::lane::Lane;
use crate::quiet::Quiet;
use crate::seats::Seats;

/// Rounds over all lanes between two looks at the clock.
const ROUNDS_PER_LOOK: u32 = 32;

/// The thread, which is there as long as there are lanes.
#[derive(Default)]
pub(crate) struct Dispatcher {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// The thread sleeps and must be woken.
    asleep: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Lanes the thread has not taken over yet.
    arriving: Vec<Lane>,
    thread: Option<Thread>,
}

/// What the thread minds besides its lanes.
pub(crate) struct Duties {
    pub(crate) polling: Polling,
    /// Wanted by real time.
    pub(crate) quiet: Arc<Quiet>,
    /// Whose orders it sends.
    pub(crate) seats: Arc<Seats>,
}

/// Wakes the thread.
#[derive(Clone)]
pub(crate) struct Waker {
    shared: Arc<Shared>,
}

impl Waker {
    /// Something was put into a lane.
    pub(crate) fn wake(&self) {
        if self.shared.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.shared.lock().thread
        {
            thread.unpark();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dispatcher {
    pub(crate) fn waker(&self) -> Waker {
        Waker { shared: self.shared.clone() }
    }

    /// Hands a lane to the thread, which is started for the first.
    pub(crate) fn add(&self, lane: Lane, duties: Duties) -> std::io::Result<()> {
        let mut state = self.shared.lock();
        if state.thread.is_none() {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new()
                .name("cuda-be".to_string())
                .spawn(move || run(&shared, &duties))?;
            state.thread = Some(thread.thread().clone());
        }
        state.arriving.push(lane);
        drop(state);
        self.waker().wake();
        Ok(())
    }
}

/// Goes over the lanes until the last one is closed.
fn run(shared: &Shared, duties: &Duties) {
    let polling = duties.polling;
    let mut lanes: Vec<Lane> = Vec::new();
    let (mut rounds, mut idle_since): (u32, Option<Instant>) = (0, None);
    loop {
        let mut moved = false;
        for lane in &mut lanes {
            duties.seats.send();
            while duties.quiet.is_wanted() {
                std::hint::spin_loop();
                duties.seats.send();
            }
            moved |= lane.poll();
        }
        if moved {
            idle_since = None;
            continue;
        }
        rounds = rounds.wrapping_add(1);
        if !rounds.is_multiple_of(ROUNDS_PER_LOOK) {
            std::hint::spin_loop();
            continue;
        }
        if !take_over(shared, &mut lanes) {
            return;
        }
        let waited = idle_since.get_or_insert_with(Instant::now).elapsed();
        if lanes.iter().any(Lane::is_busy) {
            rest(polling, waited);
        } else if waited > polling.idle {
            sleep(shared, &lanes);
            idle_since = None;
        }
    }
}

/// Takes new lanes over and lets go of closed ones; false when none is left.
fn take_over(shared: &Shared, lanes: &mut Vec<Lane>) -> bool {
    let mut state = shared.lock();
    lanes.append(&mut state.arriving);
    lanes.retain(|lane| !lane.is_over());
    if lanes.is_empty() {
        // Whoever adds a lane from here on starts another thread.
        state.thread = None;
    }
    !lanes.is_empty()
}

/// Lets others run while the device works.
fn rest(polling: Polling, waited: std::time::Duration) {
    match (waited > polling.spin, polling.pause.is_zero()) {
        (false, _) => {}
        (true, true) => std::thread::yield_now(),
        (true, false) => std::thread::sleep(polling.pause),
    }
}

/// Sleeps until something is put into a lane.
fn sleep(shared: &Shared, lanes: &[Lane]) {
    shared.asleep.store(true, Ordering::SeqCst);
    // What came before the word was written did not see it.
    let called = || !shared.lock().arriving.is_empty() || lanes.iter().any(Lane::is_called);
    while shared.asleep.load(Ordering::SeqCst) && !called() {
        std::thread::park();
    }
    shared.asleep.store(false, Ordering::SeqCst);
}
