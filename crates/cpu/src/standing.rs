//! What the queues of one CPU share: whether real time is there, and how many tasks stand.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use device::{Completion, CompletionSink};

/// Tasks that may stand in the middle of a step at once. Each holds threads and the memory they use; whoever comes after
/// them leaves between steps.
pub(crate) const STANDING_MOST: usize = 4;

/// Completions that may wait for their thread.
const COMPLETIONS_MOST: usize = 1024;

/// How much nicer threads are that give way. Enough that whoever wakes gets their core at once, and little enough that they
/// keep a share of a machine that has other things to do.
const NICER: i32 = 5;

type Told = (Completion, Arc<dyn CompletionSink>);

/// Shared by a device's queues.
#[derive(Default)]
pub(crate) struct Shared {
    /// Whether a queue of high priority was ever used.
    pub(crate) real_time: AtomicBool,
    /// Tasks that stand now.
    pub(crate) standing: AtomicUsize,
    /// Times a task left inside a step, and between two.
    pub(crate) left_inside: AtomicU64,
    pub(crate) left_between: AtomicU64,
    later: OnceLock<Option<SyncSender<Told>>>,
}

impl Shared {
    /// Hands `completion` to `sink` on another thread, for callers who may hold locks.
    pub(crate) fn tell_later(&self, completion: Completion, sink: &Arc<dyn CompletionSink>) {
        let told = (completion, sink.clone());
        let refused = match self.later.get_or_init(start_teller) {
            Some(later) => later.try_send(told).err().map(|err| match err {
                std::sync::mpsc::TrySendError::Full(told)
                | std::sync::mpsc::TrySendError::Disconnected(told) => told,
            }),
            None => Some(told),
        };
        // Without a thread to be had, saying it here is the only way to say it.
        if let Some((completion, sink)) = refused {
            sink.complete(completion);
        }
    }
}

fn start_teller() -> Option<SyncSender<Told>> {
    let (sender, receiver) = sync_channel::<Told>(COMPLETIONS_MOST);
    let tell = move || {
        while let Ok((completion, sink)) = receiver.recv() {
            sink.complete(completion);
        }
    };
    std::thread::Builder::new().name("cpu-teller".to_string()).spawn(tell).ok().map(|_| sender)
}

/// Makes the calling thread give way to others. Where the system does not have that for single threads, work leaves by looking
/// alone.
pub(crate) fn give_way() {
    // Refused only where a sandbox forbids it; the thread then stays as it is.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(NICER);
}
