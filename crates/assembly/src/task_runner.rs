//! Runs tasks on a device directly, without a node, for commands that measure one.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use device::{Completion, CompletionSink, Device, Queue, QueueOptions, Segment, Task};

use crate::failure::Failure;

/// A queue that runs one task at a time and waits for its completion. One thread runs tasks; any
/// thread may preempt them.
pub struct TaskRunner {
    /// The queue, for preempting it.
    pub queue: Box<dyn Queue>,
    completions: Mutex<Receiver<Completion>>,
}

/// Sends completions to the thread that waits for them.
struct ChannelSink(SyncSender<Completion>);

impl CompletionSink for ChannelSink {
    fn complete(&self, completion: Completion) {
        // The receiver is gone only when the command has failed.
        let _ = self.0.send(completion);
    }
}

impl TaskRunner {
    /// Opens a queue with priority, or a preemptible one for best effort.
    ///
    /// # Errors
    /// When the device opens no queue.
    pub fn open(device: &dyn Device, best_effort: bool) -> Result<TaskRunner, Failure> {
        let (sender, completions) = sync_channel(1);
        let options = QueueOptions {
            id: u32::from(best_effort),
            capacity: 1,
            high_priority: !best_effort,
            preemptible: best_effort,
        };
        let sink = Arc::new(ChannelSink(sender));
        let queue = device.open_queue(options, sink).map_err(Failure::failed)?;
        Ok(TaskRunner { queue, completions: Mutex::new(completions) })
    }

    /// Runs the remaining steps of `task` until it is done, preempted or failed.
    ///
    /// # Errors
    /// When the device takes no work.
    pub fn run(&self, task: Box<dyn Task>) -> Result<Completion, Failure> {
        let steps = task.next_step()..task.step_count();
        self.queue
            .launch(Segment { token: 0, task, steps })
            .map_err(|_| Failure::failed("the device takes no work"))?;
        let completions = self.completions.lock().unwrap_or_else(PoisonError::into_inner);
        completions.recv().map_err(Failure::failed)
    }
}
