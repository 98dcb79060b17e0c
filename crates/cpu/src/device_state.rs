//! State that the queues of one CPU device share.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};

use device::{Completion, CompletionSink};
use model::HostMemory;

/// Tasks that may be suspended inside a step at once. Each holds threads and the memory they use;
/// further tasks are preempted between steps.
pub(crate) const MAX_SUSPENDED_TASKS: usize = 4;

/// Completions that may wait for the completion thread.
const MAX_WAITING_COMPLETIONS: usize = 1024;

/// By how much the nice value of best-effort threads is raised once real time is active. Enough
/// that a real-time thread that wakes gets their core at once, and little enough that they keep a
/// share of a machine that is busy with other processes.
#[cfg(target_os = "linux")]
const NICE_INCREMENT: i32 = 5;

type Delivery = (Completion, Arc<dyn CompletionSink>);

/// State that the queues of a device share.
pub(crate) struct DeviceState {
    memory: &'static HostMemory,
    /// Whether a queue of high priority was ever used.
    real_time_seen: AtomicBool,
    suspended_tasks: AtomicUsize,
    preempted_inside_step: AtomicU64,
    preempted_between_steps: AtomicU64,
    completion_thread: OnceLock<Option<SyncSender<Delivery>>>,
}

impl DeviceState {
    /// The state of a device that uses `memory`.
    pub(crate) fn new(memory: &'static HostMemory) -> DeviceState {
        DeviceState {
            memory,
            real_time_seen: AtomicBool::new(false),
            suspended_tasks: AtomicUsize::new(0),
            preempted_inside_step: AtomicU64::new(0),
            preempted_between_steps: AtomicU64::new(0),
            completion_thread: OnceLock::new(),
        }
    }

    /// The budget of its tasks.
    pub(crate) fn memory(&self) -> &'static HostMemory {
        self.memory
    }

    pub(crate) fn note_real_time(&self) {
        self.real_time_seen.store(true, Ordering::Relaxed);
    }

    pub(crate) fn real_time_seen(&self) -> bool {
        self.real_time_seen.load(Ordering::Relaxed)
    }

    /// Counts a task that was preempted inside a step and is suspended from now on.
    pub(crate) fn add_suspended_task(&self) {
        self.suspended_tasks.fetch_add(1, Ordering::AcqRel);
        self.preempted_inside_step.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove_suspended_task(&self) {
        self.suspended_tasks.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether one more task may be suspended.
    pub(crate) fn may_suspend(&self) -> bool {
        self.suspended_tasks.load(Ordering::Acquire) < MAX_SUSPENDED_TASKS
    }

    /// Counts a task that was preempted between two steps.
    pub(crate) fn count_preempted_between_steps(&self) {
        self.preempted_between_steps.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn preempted_inside_step(&self) -> u64 {
        self.preempted_inside_step.load(Ordering::Relaxed)
    }

    pub(crate) fn preempted_between_steps(&self) -> u64 {
        self.preempted_between_steps.load(Ordering::Relaxed)
    }

    /// Passes `completion` to `sink` on another thread, for callers that may hold locks.
    pub(crate) fn complete_elsewhere(
        &self,
        completion: Completion,
        sink: &Arc<dyn CompletionSink>,
    ) {
        let delivery = (completion, sink.clone());
        let refused = match self.completion_thread.get_or_init(start_completion_thread) {
            Some(thread) => thread.try_send(delivery).err().map(|err| match err {
                TrySendError::Full(delivery) | TrySendError::Disconnected(delivery) => delivery,
            }),
            None => Some(delivery),
        };
        // Without that thread, the calling one is the only one that can report it.
        if let Some((completion, sink)) = refused {
            sink.complete(completion);
        }
    }
}

fn start_completion_thread() -> Option<SyncSender<Delivery>> {
    let (sender, receiver) = sync_channel::<Delivery>(MAX_WAITING_COMPLETIONS);
    let deliver = move || {
        while let Ok((completion, sink)) = receiver.recv() {
            sink.complete(completion);
        }
    };
    let thread = std::thread::Builder::new().name("cpu-completions".to_string());
    thread.spawn(deliver).ok().map(|_| sender)
}

/// Lowers the calling thread's priority below that of other threads. Does nothing on systems
/// without priorities of single threads: there, work yields at yield points only.
pub(crate) fn lower_thread_priority() {
    device::thread_priority::lower(NICE_INCREMENT);
}
