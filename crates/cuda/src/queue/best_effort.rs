//! Best effort: steps one by one, few in flight, out of the way within microseconds.
//!
//! What is known of a step that ran: when the mark behind it is passed and the epoch is still the one it was launched in,
//! it cannot have left, so it is done. Otherwise the words are read back in which blocks that left said so. What is queued
//! behind a step that left finds the epoch passed before it writes anything, so memory is as the step left it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::Instant;

use base::Nanos;
use device::{
    Completion, CompletionSink, DeviceError, Outcome, Queue, QueueOptions, Segment, Task,
};

use super::{failed, own_task, wait_for};
use crate::control::Orders;
use crate::driver::{Event, PinnedBuffer, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::hub::Hub;
use crate::instance::BestEffortLaunch;
use crate::lowered::Lowered;
use crate::task::CudaTask;

/// Launches, each with a mark behind it, that are in flight on a queue: one that runs and one to go on with.
const LAUNCHES_IN_FLIGHT: usize = 2;

/// Queues that run best effort from which on each has one launch in flight: the others keep the device busy while it hears of
/// it, and real time has less to wait for.
const MANY_QUEUES: usize = 3;

/// Steps between two marks where a chain cannot be launched as a whole because a part of it is done.
const STEPS_PER_MARK: usize = 4;

/// Outputs up to this size are copied right behind the last step, wherever it got; larger ones only once it is known to be
/// done, since the copy of a step that left would keep its queue busy.
const EAGER_OUTPUT_BYTES: u64 = 128 << 10;

/// A queue of low priority.
pub(crate) struct BestEffortQueue {
    sender: SyncSender<(Segment, u32)>,
    hub: Arc<Hub>,
    orders: Arc<Orders>,
}

impl BestEffortQueue {
    pub(crate) fn open(
        hub: Arc<Hub>,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<BestEffortQueue, DeviceError> {
        let (sender, receiver) = sync_channel(options.capacity.max(1));
        let orders = Arc::new(Orders::default());
        let make = || {
            let context = hub.context();
            Ok(Worker {
                id: options.id,
                stream: Stream::new(context, Priority::Low)?,
                word: PinnedWord::new(context)?,
                marks: 0,
                readback: PinnedBuffer::zeroed(context, 4096)?,
                stamps: (Event::new(context)?, Event::new(context)?),
                hub: hub.clone(),
                orders: orders.clone(),
                sink,
            })
        };
        let worker = make().map_err(|err| hub.error(err))?;
        std::thread::Builder::new()
            .name(format!("cuda-be{}", options.id))
            .spawn(move || worker.run(&receiver))
            .map_err(|err| DeviceError::Faulted {
                device: hub.info.name.clone(),
                reason: format!("cannot start a queue's thread: {err}"),
            })?;
        Ok(BestEffortQueue { sender, hub, orders })
    }
}

impl Queue for BestEffortQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        let epoch = self.hub.epoch().enter(&self.orders);
        self.sender.try_send((segment, epoch)).map_err(|err| match err {
            TrySendError::Full((segment, _)) | TrySendError::Disconnected((segment, _)) => segment,
        })
    }

    fn preempt(&self) {
        if let Err(err) = self.hub.epoch().raise(&self.orders) {
            tracing::error!("an order to leave did not reach the device: {err}");
        }
    }
}

struct Worker {
    id: u32,
    hub: Arc<Hub>,
    stream: Stream,
    /// The last mark that was passed.
    word: PinnedWord,
    /// The last mark that was queued.
    marks: u32,
    /// Where done bits are read to.
    readback: PinnedBuffer,
    stamps: (Event, Event),
    orders: Arc<Orders>,
    sink: Arc<dyn CompletionSink>,
}

/// Launches in flight.
struct Flight {
    /// Steps before this one are known to be done.
    known: usize,
    /// Steps before this one are queued.
    launched: usize,
    /// Marks, oldest first, with the step each stands before.
    marks: VecDeque<(u32, usize)>,
    /// What was queued last is a kernel.
    behind_kernel: bool,
}

/// What is queued at once.
#[derive(Clone, Copy)]
enum Next {
    /// One step by its index.
    Step(usize),
    /// A chain by its number.
    Chain(usize),
}

impl Flight {
    fn marked(&self) -> usize {
        self.marks.back().map_or(self.known, |(_, step)| *step)
    }
}

impl Worker {
    fn run(mut self, receiver: &Receiver<(Segment, u32)>) {
        while let Some((mut segment, epoch)) = self.next(receiver) {
            let started = Instant::now();
            // A panic here is a defect, but it must cost its request and not the queue.
            let run = std::panic::AssertUnwindSafe(|| self.run_segment(&mut segment, epoch));
            let outcome = std::panic::catch_unwind(run).unwrap_or_else(|_| {
                Outcome::Failed(DeviceError::BadPlan("the queue panicked".to_string()))
            });
            if matches!(outcome, Outcome::Failed(_)) {
                self.clean_up(&mut segment);
            }
            let Segment { token, task, .. } = segment;
            let busy = started.elapsed().into();
            self.sink.complete(Completion { queue: self.id, token, task, outcome, busy });
        }
    }

    /// The next segment; `None` when the queue is closed. Looks for it for a while before it sleeps: waking a thread costs
    /// whoever launches, and that is often the way of a real-time answer.
    fn next(&self, receiver: &Receiver<(Segment, u32)>) -> Option<(Segment, u32)> {
        let since = Instant::now();
        loop {
            match receiver.try_recv() {
                Ok(next) => return Some(next),
                Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => {}
            }
            if since.elapsed() > self.hub.options().polling.idle {
                return receiver.recv().ok();
            }
            for _ in 0..64 {
                std::hint::spin_loop();
            }
        }
    }

    /// Waits for what a failed segment had queued, and lets go of its memory.
    fn clean_up(&self, segment: &mut Segment) {
        if let Err(err) = self.stream.synchronize() {
            tracing::debug!("after a failure: {err}");
        }
        if let Some(task) = segment.task.as_any_mut().downcast_mut::<CudaTask>() {
            task.abandon();
        }
    }

    fn run_segment(&mut self, segment: &mut Segment, launched: u32) -> Outcome {
        let hub = self.hub.clone();
        let Some(epoch) = hub.epoch().renew(&self.orders, launched) else { return Outcome::Left };
        hub.best_effort.fetch_add(1, Ordering::Relaxed);
        let run = hub
            .alive()
            .and_then(|()| own_task(&hub, segment))
            .and_then(|(task, steps)| self.run_steps(task, steps, epoch));
        hub.best_effort.fetch_sub(1, Ordering::Relaxed);
        match run {
            Ok(true) => Outcome::Done,
            Ok(false) => Outcome::Left,
            Err(err) => Outcome::Failed(err),
        }
    }

    /// Runs `steps`; false when it was told to leave before the last was done.
    fn run_steps(
        &mut self,
        task: &mut CudaTask,
        steps: Range<usize>,
        mut epoch: u32,
    ) -> Result<bool, DeviceError> {
        if steps.is_empty() {
            return Ok(true);
        }
        task.hold_memory()?;
        let (started, first) = (Instant::now(), steps.start);
        let there = task.lowered.arrival().map_err(|err| failed(task, first, err))?.is_none();
        let mut paced = there && steps == (0..task.step_count());
        loop {
            let next = task.next_step();
            let reached =
                self.fly(task, next..steps.end, epoch).map_err(|err| failed(task, next, err))?;
            task.advance_to(reached);
            if reached == steps.end {
                if paced {
                    let lowered = &task.lowered;
                    lowered.program.note_run(&lowered.parts, started.elapsed());
                }
                return task.fault().map_or(Ok(true), Err);
            }
            paced = false;
            // The epoch is one for all queues: without an order of our own we go on.
            match self.hub.epoch().renew(&self.orders, epoch) {
                Some(renewed) => epoch = renewed,
                None => return Ok(false),
            }
        }
    }

    /// Queues and waits until `steps` are done or the epoch has moved on; the first step that is not done.
    fn fly(
        &mut self,
        task: &mut CudaTask,
        steps: Range<usize>,
        epoch: u32,
    ) -> Result<usize, CudaError> {
        let lowered = task.lowered.clone();
        let mut flight = Flight {
            known: steps.start,
            launched: steps.start,
            marks: VecDeque::new(),
            behind_kernel: false,
        };
        self.make_ready(task, &lowered, steps.start, epoch)?;
        while flight.known < steps.end {
            while let Some(next) = self.next_launch(task, &flight, steps.end, epoch) {
                self.launch(task, &lowered, &mut flight, next)?;
                let whole = matches!(next, Next::Chain(_));
                let due = whole || flight.launched - flight.marked() >= STEPS_PER_MARK;
                if due || task.is_timed() || flight.launched == steps.end {
                    self.mark(&mut flight)?;
                }
            }
            if flight.launched == flight.known || !self.land(task, &mut flight, epoch)? {
                break;
            }
        }
        let reached = self.settle(task, &lowered, flight)?;
        if reached == task.step_count() && !has_small_outputs(&lowered) {
            let (instance, staging) = task.memory()?;
            // SAFETY: the task holds both sides, and the copy is waited for.
            unsafe { instance.copy_outputs(&lowered, staging, &self.stream) }?;
            self.drain()?;
        }
        Ok(reached)
    }

    /// What may be queued now: the next step, or the chain that begins with it.
    fn next_launch(
        &self,
        task: &CudaTask,
        flight: &Flight,
        end: usize,
        epoch: u32,
    ) -> Option<Next> {
        let many = self.hub.best_effort.load(Ordering::Relaxed) >= MANY_QUEUES;
        let most = if many || task.is_timed() { 1 } else { LAUNCHES_IN_FLIGHT };
        let (first, lowered) = (flight.launched, &task.lowered);
        if first >= end || flight.marks.len() >= most || self.hub.epoch().now() != epoch {
            return None;
        }
        // A step that runs to its end whatever happens must not start behind one that may have left, nor be waited for by
        // others.
        let stays = |step: usize| lowered.kernels[step].finishes;
        if (stays(first) || (first > 0 && stays(first - 1))) && flight.known < first {
            return None;
        }
        // A chain starts afresh and is done as a whole: a step that was left, is timed, or has others of its chain beyond
        // this segment is launched alone.
        let number = lowered.chain_of[first];
        let chain = &lowered.chains[number];
        let whole =
            chain.start == first && chain.end <= end && !task.words.partly_done && !task.is_timed();
        Some(if whole { Next::Chain(number) } else { Next::Step(first) })
    }

    /// Queues what comes before the first launch: inputs, and the words of steps that start afresh.
    fn make_ready(
        &self,
        task: &mut CudaTask,
        lowered: &Lowered,
        from: usize,
        epoch: u32,
    ) -> Result<(), CudaError> {
        if !task.uploaded {
            return task.upload(epoch, &self.stream);
        }
        let words = task.words;
        let (instance, _) = task.memory()?;
        let block = instance.address();
        let layout = &lowered.layout;
        let clear = |steps: Range<usize>| {
            let (at, count) = layout.control_words(steps);
            // SAFETY: words of this run's own memory, which it holds until the stream is drained.
            unsafe { self.stream.clear(block + at, count) }
        };
        if words.used_to > from {
            // SAFETY: as above. A step that was left keeps its word along with the tiles it has done.
            unsafe {
                let first = from + usize::from(words.partly_done);
                instance.clear_faults(lowered, first, &self.stream)?;
            }
        }
        if !words.cleared {
            clear(0..layout.controls.len())?;
        } else {
            if words.partly_done {
                // Done bits and arrivals of the try that left stay; tiles are counted anew.
                // SAFETY: as above; the two words lie side by side.
                unsafe { self.stream.clear(block + layout.controls[from].left, 2) }?;
            }
            clear(from + usize::from(words.partly_done)..words.used_to)?;
        }
        // SAFETY: as above.
        unsafe { instance.set_epoch(lowered, epoch, &self.stream) }?;
        task.words.cleared = true;
        task.words.used_to = from;
        Ok(())
    }

    /// Queues `next`, and the copy of outputs behind the last step.
    fn launch(
        &mut self,
        task: &mut CudaTask,
        lowered: &Lowered,
        flight: &mut Flight,
        next: Next,
    ) -> Result<(), CudaError> {
        let restored = task.words.partly_done;
        let end = match next {
            Next::Step(index) => index + 1,
            Next::Chain(number) => lowered.chains[number].end,
        };
        task.words.partly_done = false;
        task.words.used_to = end;
        let timed = task.is_timed();
        let eager = end == task.step_count() && has_small_outputs(lowered);
        let (hub, stream) = (&self.hub, &self.stream);
        let held = lowered.hold(stream, end)?;
        let (instance, staging) = task.memory()?;
        if timed {
            self.stamps.0.record(stream)?;
        }
        // SAFETY: the task holds instance, staging and plan until the stream is drained, and its words are as
        // `make_ready` left them.
        unsafe {
            match next {
                Next::Step(index) => {
                    let dependent = flight.behind_kernel && !timed && !held;
                    let how = BestEffortLaunch { restored, dependent };
                    instance.launch_best_effort(hub, lowered, index, how, stream)?;
                }
                Next::Chain(number) => {
                    instance.launch_chain(hub, lowered, number, stream)?;
                }
            }
            if timed {
                self.stamps.1.record(stream)?;
            }
            if eager {
                instance.copy_outputs(lowered, staging, stream)?;
            }
        }
        flight.launched = end;
        flight.behind_kernel = !eager;
        Ok(())
    }

    fn mark(&mut self, flight: &mut Flight) -> Result<(), CudaError> {
        let mark = self.queue_mark()?;
        flight.marks.push_back((mark, flight.launched));
        flight.behind_kernel = false;
        Ok(())
    }

    fn queue_mark(&mut self) -> Result<u32, CudaError> {
        self.marks = self.marks.wrapping_add(1);
        // SAFETY: the word lives as long as this worker, which waits for it.
        unsafe { self.stream.write_word(self.word.device_address(), self.marks) }?;
        Ok(self.marks)
    }

    /// Waits for everything queued by looking at the word: a blocking call would hold up other threads' calls.
    fn drain(&mut self) -> Result<(), CudaError> {
        let mark = self.queue_mark()?;
        wait_for(&self.word, mark, &self.stream, self.hub.options().polling)
    }

    /// Waits for the oldest mark; false when the epoch has moved on, so that what it stands behind may have left.
    fn land(
        &mut self,
        task: &mut CudaTask,
        flight: &mut Flight,
        epoch: u32,
    ) -> Result<bool, CudaError> {
        if flight.marks.is_empty() {
            self.mark(flight)?;
        }
        let Some((mark, step)) = flight.marks.front().copied() else { return Ok(true) };
        wait_for(&self.word, mark, &self.stream, self.hub.options().polling)?;
        if self.hub.epoch().now() != epoch {
            return Ok(false);
        }
        flight.marks.pop_front();
        if task.is_timed() {
            task.push_time(self.stamps.1.micros_since(&self.stamps.0)?);
        }
        flight.known = step;
        Ok(true)
    }

    /// Waits for everything in flight and finds out how far it got.
    fn settle(
        &mut self,
        task: &mut CudaTask,
        lowered: &Lowered,
        mut flight: Flight,
    ) -> Result<usize, CudaError> {
        if flight.launched == flight.known {
            return Ok(flight.known);
        }
        if flight.marked() < flight.launched {
            self.mark(&mut flight)?;
        }
        if let Some((mark, _)) = flight.marks.back().copied() {
            wait_for(&self.word, mark, &self.stream, self.hub.options().polling)?;
        }
        let done = self.count_done(task, lowered, flight.known..flight.launched)?;
        if task.is_timed() {
            let micros = self.stamps.1.micros_since(&self.stamps.0)?;
            match done > flight.known {
                true => task.push_time(micros),
                false => task.unfinished += Nanos((micros * 1e3) as u64),
            }
        }
        task.words.partly_done = done < flight.launched && lowered.kernels[done].resumes;
        Ok(done)
    }

    /// The first of `steps` that a block has left; all of them have ended.
    fn count_done(
        &mut self,
        task: &mut CudaTask,
        lowered: &Lowered,
        steps: Range<usize>,
    ) -> Result<usize, CudaError> {
        let (at, count) = lowered.layout.control_words(steps.clone());
        if self.readback.len() < count * 4 {
            self.readback = PinnedBuffer::zeroed(self.hub.context(), count * 4)?;
        }
        let (instance, _) = task.memory()?;
        // SAFETY: the words are of the run's own memory; the buffer has room and is read only after the wait.
        unsafe {
            self.stream.copy_out(self.readback.as_ptr(), instance.address() + at, count * 4)?;
        }
        self.drain()?;
        let words: Vec<u32> = self.readback.as_slice()[..count * 4]
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let incomplete = steps
            .clone()
            .find(|&step| words[((lowered.layout.controls[step].left - at) / 4) as usize] != 0);
        Ok(incomplete.unwrap_or(steps.end))
    }
}

fn has_small_outputs(lowered: &Lowered) -> bool {
    lowered.layout.staged_bytes - lowered.layout.faults_at <= EAGER_OUTPUT_BYTES
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The words and buffers below must outlive what is queued.
        let _ = self.stream.synchronize();
    }
}
