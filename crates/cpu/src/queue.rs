//! A queue of the CPU: a thread pool whose first worker runs segments one after another.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Instant;

use device::{Completion, CompletionSink, DeviceError, Outcome, Queue, QueueOptions, Segment};
use rten::BufferPool;

use crate::program::CpuTask;

/// Segments in, completions out.
pub(crate) struct CpuQueue {
    sender: SyncSender<Launched>,
    epoch: Arc<AtomicU64>,
}

/// A segment and the epoch it was launched in.
struct Launched {
    segment: Segment,
    epoch: u64,
}

impl CpuQueue {
    pub(crate) fn open(
        options: QueueOptions,
        threads: usize,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<CpuQueue, String> {
        let (sender, receiver) = sync_channel(options.capacity.max(1));
        let epoch = Arc::new(AtomicU64::new(0));
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(move |worker| format!("cpu-q{}-{worker}", options.id))
            .build()
            .map_err(|err| format!("cannot start {threads} threads: {err}"))?;
        let worker =
            Worker { id: options.id, epoch: epoch.clone(), sink, buffers: BufferPool::new() };
        // The loop occupies one worker of the pool, so that a step's own parallelism starts there
        // and finds the other workers idle; no segment crosses a thread to begin.
        pool.spawn(move || worker.run(&receiver));
        Ok(CpuQueue { sender, epoch })
    }
}

impl Queue for CpuQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        let epoch = self.epoch.load(Ordering::Acquire);
        self.sender.try_send(Launched { segment, epoch }).map_err(|err| match err {
            TrySendError::Full(launched) | TrySendError::Disconnected(launched) => launched.segment,
        })
    }

    fn preempt(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }
}

struct Worker {
    id: u32,
    epoch: Arc<AtomicU64>,
    sink: Arc<dyn CompletionSink>,
    buffers: BufferPool,
}

impl Worker {
    fn run(&self, receiver: &Receiver<Launched>) {
        while let Ok(Launched { mut segment, epoch }) = receiver.recv() {
            let started = Instant::now();
            // A kernel that panics is a defect, but it must cost its request and not the queue.
            let run = std::panic::AssertUnwindSafe(|| self.run_segment(&mut segment, epoch));
            let outcome = std::panic::catch_unwind(run).unwrap_or_else(|_| {
                Outcome::Failed(DeviceError::StepFailed {
                    step: format!("#{}", segment.task.next_step()),
                    op: "?".to_string(),
                    reason: "the kernel panicked".to_string(),
                })
            });
            self.sink.complete(Completion {
                queue: self.id,
                token: segment.token,
                task: segment.task,
                outcome,
                busy: started.elapsed().into(),
            });
        }
    }

    fn run_segment(&self, segment: &mut Segment, epoch: u64) -> Outcome {
        let Some(task) = segment.task.as_any_mut().downcast_mut::<CpuTask>() else {
            let reason = "the task belongs to another device".to_string();
            return Outcome::Failed(DeviceError::BadPlan(reason));
        };
        for _ in segment.steps.clone() {
            if self.epoch.load(Ordering::Acquire) > epoch {
                return Outcome::Left;
            }
            if let Err(err) = task.run_step(&self.buffers) {
                return Outcome::Failed(err);
            }
        }
        Outcome::Done
    }
}
