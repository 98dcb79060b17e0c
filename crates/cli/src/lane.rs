//! A queue of a device with its completions, for commands that use a device directly.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use device::{Completion, CompletionSink, Device, Queue, QueueOptions, Segment, Task};

use crate::failure::Failure;

/// A queue that runs one task at a time. Any thread may tell it to leave, one runs tasks.
pub(crate) struct Lane {
    pub(crate) queue: Box<dyn Queue>,
    completions: Mutex<Receiver<Completion>>,
}

struct ToChannel(SyncSender<Completion>);

impl CompletionSink for ToChannel {
    fn complete(&self, completion: Completion) {
        // The receiver is gone only when the command gave up.
        let _ = self.0.send(completion);
    }
}

impl Lane {
    /// A lane of real time, or of best effort, which can be told to leave.
    pub(crate) fn open(device: &dyn Device, best_effort: bool) -> Result<Lane, Failure> {
        let (sender, completions) = sync_channel(1);
        let options = QueueOptions {
            id: u32::from(best_effort),
            capacity: 1,
            high_priority: !best_effort,
            preemptible: best_effort,
        };
        let sink = Arc::new(ToChannel(sender));
        let queue = device.open_queue(options, sink).map_err(Failure::failed)?;
        Ok(Lane { queue, completions: Mutex::new(completions) })
    }

    /// Runs what is left of `task` until it is done, left or failed.
    pub(crate) fn run(&self, task: Box<dyn Task>) -> Result<Completion, Failure> {
        let steps = task.next_step()..task.step_count();
        self.queue
            .launch(Segment { token: 0, task, steps })
            .map_err(|_| Failure::failed("the device takes no work"))?;
        let completions = self.completions.lock().unwrap_or_else(PoisonError::into_inner);
        completions.recv().map_err(Failure::failed)
    }
}
