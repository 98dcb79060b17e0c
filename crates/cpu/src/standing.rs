//! What the queues of one CPU share: who goes before whom, and how many tasks stand.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use device::{Completion, CompletionSink};

/// Tasks that may stand in the middle of a step at once. Each holds threads and the memory they use; whoever comes after
/// them leaves between steps.
pub(crate) const STANDING_MOST: usize = 4;

/// Completions on their way to whoever wants them. More than there are queues and segments in them.
const COMPLETIONS_MOST: usize = 4096;

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
    clerk: OnceLock<Option<SyncSender<Told>>>,
}

impl Shared {
    /// Hands `completion` to `sink`. Threads that stand behind all others must not do so themselves: while they hold a lock of
    /// the node, everybody would wait for them. `behind` says that the caller is one.
    pub(crate) fn complete(
        &self,
        completion: Completion,
        sink: &Arc<dyn CompletionSink>,
        behind: bool,
    ) {
        let clerk = if behind { self.clerk.get_or_init(start_clerk).as_ref() } else { None };
        match clerk {
            None => sink.complete(completion),
            Some(clerk) => {
                if let Err(refused) = clerk.send((completion, sink.clone())) {
                    let (completion, sink) = refused.0;
                    sink.complete(completion);
                }
            }
        }
    }
}

/// A thread of ordinary standing that hands completions over; `None` when there is none to be had.
fn start_clerk() -> Option<SyncSender<Told>> {
    let (sender, receiver) = sync_channel::<Told>(COMPLETIONS_MOST);
    let deliver = move || {
        while let Ok((completion, sink)) = receiver.recv() {
            sink.complete(completion);
        }
    };
    std::thread::Builder::new().name("cpu-clerk".to_string()).spawn(deliver).ok().map(|_| sender)
}

/// Puts the calling thread behind all others of the machine, so that whoever wakes takes its core at once. Where the system
/// does not have that, work leaves by looking alone.
pub(crate) fn step_behind() {
    #[cfg(target_os = "linux")]
    {
        use thread_priority::unix::{
            NormalThreadSchedulePolicy, ThreadSchedulePolicy, set_thread_priority_and_policy,
            thread_native_id,
        };
        let policy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
        let least = thread_priority::ThreadPriority::Min;
        // Refused only where a sandbox forbids it; the thread then stays as it is.
        let _ = set_thread_priority_and_policy(thread_native_id(), least, policy);
    }
}
