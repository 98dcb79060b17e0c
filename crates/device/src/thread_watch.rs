//! How long threads that real time needs are away.
//!
//! Such a thread serves many: a worker that polls connections, the timer of a node, a queue's
//! thread. While it works for one, in a *turn*, the others wait. Each turn is timed while a limit
//! is set, and reported when it takes longer; the longest of each thread is kept.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

/// Threads whose longest turns are kept, at most.
const MAX_THREADS: usize = 1024;

/// Turns that take so many nanoseconds are reported; 0 while none is timed.
static LIMIT_NS: AtomicU64 = AtomicU64::new(0);

/// All threads that had a turn while a limit was set.
static THREADS: Mutex<Vec<Arc<WatchedThread>>> = Mutex::new(Vec::new());

struct WatchedThread {
    name: String,
    longest_ns: AtomicU64,
    over_limit: AtomicU64,
}

thread_local! {
    /// Turns that the thread is in, one inside another.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// What the thread began to do last.
    static LAST_CALL: Cell<&'static str> = const { Cell::new("") };
    static OWN: RefCell<Option<Arc<WatchedThread>>> = const { RefCell::new(None) };
}

/// The longest turn of the threads of one name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LongestTurn {
    /// The name of the threads.
    pub thread: String,
    /// The longest turn.
    pub longest: Duration,
    /// Turns that took longer than the limit.
    pub over_limit: u64,
}

/// Times turns from now on and reports those that take `limit` or longer; zero for none.
pub fn report_from(limit: Duration) {
    LIMIT_NS.store(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Whether turns are timed.
pub fn is_on() -> bool {
    LIMIT_NS.load(Ordering::Relaxed) > 0
}

/// Whether the calling thread is in a turn: others wait for it.
pub fn is_in_turn() -> bool {
    DEPTH.get() > 0
}

/// Begins a turn of the calling thread, which ends when the result is dropped. One inside another
/// belongs to it.
#[must_use]
pub fn turn() -> ThreadTurn {
    let depth = DEPTH.get();
    DEPTH.set(depth + 1);
    let began = (depth == 0 && is_on()).then(Instant::now);
    if began.is_some() {
        LAST_CALL.set("");
    }
    ThreadTurn { began, _on_this_thread: std::marker::PhantomData }
}

/// Says what the calling thread does now, for the report of its turn.
pub fn call(name: &'static str) {
    LAST_CALL.set(name);
}

/// A turn of a thread.
pub struct ThreadTurn {
    began: Option<Instant>,
    /// Turns end on the thread on which they begin.
    _on_this_thread: std::marker::PhantomData<*const ()>,
}

impl Drop for ThreadTurn {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get().saturating_sub(1));
        if let Some(began) = self.began {
            ended(began.elapsed(), Duration::from_nanos(LIMIT_NS.load(Ordering::Relaxed)));
        }
    }
}

/// The longest turns by the names of threads, sorted.
pub fn longest_turns() -> Vec<LongestTurn> {
    let mut all: Vec<LongestTurn> = Vec::new();
    for thread in threads().iter() {
        let longest = Duration::from_nanos(thread.longest_ns.load(Ordering::Relaxed));
        let over_limit = thread.over_limit.load(Ordering::Relaxed);
        match all.iter_mut().find(|known| known.thread == thread.name) {
            Some(known) => {
                known.longest = known.longest.max(longest);
                known.over_limit += over_limit;
            }
            None => all.push(LongestTurn { thread: thread.name.clone(), longest, over_limit }),
        }
    }
    all.sort_by(|a, b| a.thread.cmp(&b.thread));
    all
}

fn threads() -> MutexGuard<'static, Vec<Arc<WatchedThread>>> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended(took: Duration, limit: Duration) {
    let Some(thread) = own() else { return };
    let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    thread.longest_ns.fetch_max(nanos, Ordering::Relaxed);
    if !limit.is_zero() && took >= limit {
        thread.over_limit.fetch_add(1, Ordering::Relaxed);
        let (thread, last_call, us) = (&thread.name, LAST_CALL.get(), took.as_micros());
        tracing::warn!(thread, last_call, us, "a thread that real time needs was away");
    }
}

/// The record of the calling thread; `None` when there are too many, or the thread ends.
fn own() -> Option<Arc<WatchedThread>> {
    let known = OWN.try_with(|own| own.borrow().clone()).ok()?;
    if known.is_some() {
        return known;
    }
    let name = std::thread::current().name().unwrap_or("unnamed").to_string();
    let mut threads = threads();
    // Those of threads that are gone are kept: their longest turns still count.
    let same = threads.iter().find(|known| known.name == name && Arc::strong_count(known) == 1);
    let same = same.cloned();
    let made = match same {
        Some(gone) => gone,
        None if threads.len() >= MAX_THREADS => return None,
        None => {
            let (longest_ns, over_limit) = (AtomicU64::new(0), AtomicU64::new(0));
            let made = Arc::new(WatchedThread { name, longest_ns, over_limit });
            threads.push(made.clone());
            made
        }
    };
    drop(threads);
    OWN.try_with(|own| *own.borrow_mut() = Some(made.clone())).ok()?;
    Some(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str) -> Option<LongestTurn> {
        longest_turns().into_iter().find(|turn| turn.thread == name)
    }

    /// One test, because the limit is that of the process.
    #[test]
    fn turns_are_timed_while_there_is_a_limit() {
        let named = |name: &str, work: fn()| {
            let named = std::thread::Builder::new().name(name.to_string());
            named.spawn(work).expect("a thread").join().expect("no panic");
        };
        named("watch-off", || drop(turn()));
        assert_eq!(of("watch-off"), None, "nothing is kept without a limit");
        report_from(Duration::from_nanos(1));
        assert!(is_on());
        let work = || {
            assert!(!is_in_turn());
            let outer = turn();
            let inner = turn();
            call("a slow call");
            std::thread::sleep(Duration::from_millis(2));
            drop(inner);
            assert!(is_in_turn(), "the outer turn goes on");
            drop(outer);
            assert!(!is_in_turn());
        };
        named("watch-on", work);
        named("watch-on", work);
        report_from(Duration::ZERO);
        let found = of("watch-on").expect("it had turns");
        assert!(found.longest >= Duration::from_millis(2), "{found:?}");
        assert_eq!(found.over_limit, 2, "one for each outer turn");
    }
}
