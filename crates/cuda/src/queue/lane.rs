//! One best-effort queue as its thread sees it: work in flight, looked at without ever waiting.
//!
//! What is known of a step that ran: when the mark behind it is passed and its seat still has the number it was launched
//! with, it cannot have left, so it is done. Otherwise the words are read back in which blocks that left said so. What is
//! queued behind a step that left finds the order before it writes anything, so memory is as the step left it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::Nanos;
use device::{Completion, CompletionSink, DeviceError, Outcome, Segment, Task};

use super::{LOOKS_PER_QUERY, failed, is_reached, own_task};
use crate::driver::{Event, PinnedBuffer, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::hub::{Hub, Place};
use crate::instance::BestEffortLaunch;
use crate::lowered::Lowered;
use crate::seats::{Orders, Seat, Seating};
use crate::task::CudaTask;

/// Launches, each with a mark behind it, that are in flight on a queue: one that runs and one to go on with.
const LAUNCHES_IN_FLIGHT: usize = 2;

/// Queues that run best effort from which on each has one launch in flight: the others keep the device busy while it hears of
/// it, and real time has less to wait for.
const MANY_QUEUES: usize = 3;

/// Outputs up to this size are copied right behind the last step, wherever it got; larger ones only once it is known to be
/// done, since the copy of a step that left would keep its queue busy.
const EAGER_OUTPUT_BYTES: u64 = 128 << 10;

/// What waits for a lane.
pub(crate) struct Inbox {
    waiting: Mutex<VecDeque<(Segment, u64)>>,
    /// How many, for a look without the lock.
    count: AtomicUsize,
    capacity: usize,
    closed: AtomicBool,
    pub(crate) orders: Orders,
}

impl Inbox {
    pub(crate) fn new(capacity: usize) -> Inbox {
        Inbox {
            waiting: Mutex::default(),
            count: AtomicUsize::new(0),
            capacity,
            closed: AtomicBool::new(false),
            orders: Orders::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Segment, u64)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn put(&self, segment: Segment) -> Result<(), Segment> {
        let mut waiting = self.lock();
        if waiting.len() >= self.capacity {
            return Err(segment);
        }
        waiting.push_back((segment, self.orders.enter()));
        self.count.store(waiting.len(), Ordering::SeqCst);
        Ok(())
    }

    fn take(&self) -> Option<(Segment, u64)> {
        if self.is_empty() {
            return None;
        }
        let mut waiting = self.lock();
        let first = waiting.pop_front();
        self.count.store(waiting.len(), Ordering::SeqCst);
        first
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}

/// A queue's streams, and what runs on one of them.
pub(crate) struct Lane {
    id: u32,
    hub: Arc<Hub>,
    streams: Streams,
    /// The last mark that was passed.
    word: PinnedWord,
    /// The last mark that was queued.
    marks: u32,
    /// Where words of launches are read to.
    readback: PinnedBuffer,
    stamps: (Event, Event),
    inbox: Arc<Inbox>,
    sink: Arc<dyn CompletionSink>,
    run: Option<Run>,
    /// Looks at a mark that was not passed yet.
    looks: u32,
}

/// Where a lane's work is queued: on one of two streams at a time.
struct Streams {
    priority: Priority,
    anywhere: Stream,
    partition: Option<Stream>,
    /// The work is in the partition.
    in_partition: bool,
}

impl Streams {
    fn new(hub: &Hub, priority: Priority) -> Result<Streams, CudaError> {
        let context = hub.context();
        let partition = hub.partition.as_ref().filter(|_| priority == Priority::Low);
        let partition =
            partition.map(|partition| Stream::in_partition(context, partition)).transpose()?;
        let anywhere = Stream::new(context, priority)?;
        Ok(Streams { priority, anywhere, partition, in_partition: false })
    }

    fn current(&self) -> &Stream {
        match &self.partition {
            Some(partition) if self.in_partition => partition,
            _ => &self.anywhere,
        }
    }

    fn place(&self) -> Place {
        if self.in_partition { Place::Partition } else { self.priority.into() }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        // The words and buffers of their lane must outlive what is queued.
        let _ = self.anywhere.synchronize();
        let _ = self.partition.as_ref().map(Stream::synchronize);
    }
}

/// A segment under way.
struct Run {
    segment: Segment,
    ticket: u64,
    started: Instant,
    seat: Option<Arc<Seat>>,
    /// What its launches carry.
    number: u32,
    /// The step behind its last.
    end: usize,
    /// It is a whole run whose weights are there, so the time it takes, unless it leaves, says how long such runs take.
    paced: bool,
    flight: Flight,
    /// What was queued before its first launch is known to be done.
    settled: bool,
    stage: Stage,
}

/// What a run waits for.
#[derive(Clone, Copy)]
enum Stage {
    /// Its oldest launch.
    Flying,
    /// Everything queued, and then the words that say how far it got.
    Reading { mark: u32 },
    /// Its outputs.
    Copying { mark: u32 },
}

/// Launches in flight.
#[derive(Default)]
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
enum Next {
    /// One step by its index.
    Step(usize),
    /// Several, none of them begun.
    Stretch(Range<usize>),
}

impl Flight {
    fn at(step: usize) -> Flight {
        Flight { known: step, launched: step, ..Flight::default() }
    }

    /// Whether a mark is due: behind every chain, however many launches it took.
    fn is_due(&self, lowered: &Lowered) -> bool {
        let last = self.launched.checked_sub(1);
        last.is_some_and(|last| lowered.chain_of(last).end == self.launched)
    }
}

impl Run {
    fn is_told(&self) -> bool {
        self.seat.as_ref().is_some_and(|seat| seat.number() != self.number)
    }
}

impl Lane {
    pub(crate) fn new(
        hub: Arc<Hub>,
        id: u32,
        priority: Priority,
        inbox: Arc<Inbox>,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Lane, CudaError> {
        let context = hub.context();
        Ok(Lane {
            id,
            streams: Streams::new(&hub, priority)?,
            word: PinnedWord::new(context)?,
            marks: 0,
            readback: PinnedBuffer::zeroed(context, 4096)?,
            stamps: (Event::new(context)?, Event::new(context)?),
            hub,
            inbox,
            sink,
            run: None,
            looks: 0,
        })
    }

    /// Counts what it takes up, or is done with.
    fn count(&self, begun: bool) {
        let Hub { traffic, best_effort, .. } = &*self.hub;
        match (self.streams.priority, begun) {
            (Priority::High, true) => traffic.enter(),
            (Priority::High, false) => traffic.leave(),
            (Priority::Low, true) => drop(best_effort.fetch_add(1, Ordering::Relaxed)),
            (Priority::Low, false) => drop(best_effort.fetch_sub(1, Ordering::Relaxed)),
        }
    }

    /// Whether it runs something.
    pub(crate) fn is_busy(&self) -> bool {
        self.run.is_some()
    }

    /// Whether something waits for its thread.
    pub(crate) fn is_called(&self) -> bool {
        self.is_busy() || !self.inbox.is_empty() || self.inbox.closed.load(Ordering::SeqCst)
    }

    /// Whether nothing is to come and nothing is left.
    pub(crate) fn is_over(&self) -> bool {
        self.inbox.closed.load(Ordering::SeqCst) && !self.is_busy() && self.inbox.is_empty()
    }

    /// Does what can be done without waiting; false when that is nothing.
    pub(crate) fn poll(&mut self) -> bool {
        // A panic here is a defect, but it must cost its request and not the device's queues.
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.advance()));
        let ended = match polled {
            Ok(Ok(Progress::None)) => return false,
            Ok(Ok(Progress::Some)) => return true,
            Ok(Ok(Progress::Ended(outcome))) => outcome,
            Ok(Err(err)) => Outcome::Failed(err),
            Err(_) => Outcome::Failed(DeviceError::BadPlan("the queue panicked".to_string())),
        };
        self.finish(ended);
        true
    }

    /// The next thing there is to do.
    fn advance(&mut self) -> Result<Progress, DeviceError> {
        let Some(run) = &self.run else {
            return match self.inbox.take() {
                Some((segment, ticket)) => self.begin(segment, ticket),
                None => Ok(Progress::None),
            };
        };
        let (stage, oldest) = (run.stage, run.flight.marks.front().copied());
        let mark = match (stage, oldest) {
            // Nothing is gained by waiting for the launch that leaves: the words can be asked for right behind it.
            (Stage::Flying, _) if run.is_told() => return self.read_back(),
            (Stage::Flying, Some((mark, _))) => mark,
            (Stage::Flying, None) => {
                return Err(DeviceError::BadPlan("nothing is in flight".to_string()));
            }
            (Stage::Reading { mark } | Stage::Copying { mark }, _) => mark,
        };
        if !self.is_passed(mark)? {
            return Ok(Progress::None);
        }
        match (stage, oldest) {
            (Stage::Flying, Some((_, step))) => self.land(step),
            (Stage::Reading { .. }, _) => self.settle(),
            _ => self.conclude(),
        }
    }

    /// Whether the device has written `mark`; now and then asks the driver whether it ever will.
    fn is_passed(&mut self, mark: u32) -> Result<bool, DeviceError> {
        if is_reached(self.word.load(), mark) {
            self.looks = 0;
            return Ok(true);
        }
        self.looks = self.looks.wrapping_add(1);
        let pausing = !self.hub.options().polling.pause.is_zero();
        if pausing || self.looks.is_multiple_of(LOOKS_PER_QUERY) {
            self.streams.current().is_idle().map_err(|err| self.hub.error(err))?;
        }
        Ok(false)
    }

    /// Tells the sink what became of the segment.
    fn finish(&mut self, outcome: Outcome) {
        self.inbox.orders.stand();
        let Some(Run { mut segment, started, .. }) = self.run.take() else { return };
        self.count(false);
        if matches!(outcome, Outcome::Failed(_)) {
            // What it had queued may still run.
            if let Err(err) = self.streams.current().synchronize() {
                tracing::debug!("after a failure: {err}");
            }
            if let Some(task) = segment.task.as_any_mut().downcast_mut::<CudaTask>() {
                task.abandon();
            }
        }
        let Segment { token, task, .. } = segment;
        let busy = started.elapsed().into();
        self.sink.complete(Completion { queue: self.id, token, task, outcome, busy });
    }

    /// Takes a segment up and queues its first launches.
    fn begin(&mut self, segment: Segment, ticket: u64) -> Result<Progress, DeviceError> {
        self.count(true);
        let run = self.run.insert(Run {
            segment,
            ticket,
            started: Instant::now(),
            seat: None,
            number: 0,
            end: 0,
            paced: false,
            flight: Flight::default(),
            settled: false,
            stage: Stage::Flying,
        });
        self.hub.alive()?;
        let (task, steps) = own_task(&self.hub, &mut run.segment)?;
        if steps.is_empty() {
            return Ok(Progress::Ended(Outcome::Done));
        }
        if self.inbox.orders.told(ticket) {
            return Ok(Progress::Ended(Outcome::Preempted));
        }
        task.hold_memory(Priority::Low)?;
        let seat = task.seat().map_err(|err| self.hub.error(err))?;
        let first = steps.start;
        let there = task.lowered.arrival().map_err(|err| failed(task, first, err))?.is_none();
        run.paced = there && steps == (0..task.step_count());
        (run.seat, run.end) = (Some(seat.clone()), steps.end);
        match self.inbox.orders.sit(ticket, &seat) {
            Some(seating) => self.start(seating, first),
            None => Ok(Progress::Ended(Outcome::Preempted)),
        }
    }

    /// Queues the first launches from step `first` on, which is the task's next, where the run is seated.
    fn start(&mut self, seating: Seating, first: usize) -> Result<Progress, DeviceError> {
        self.streams.in_partition = seating.in_partition;
        let Some(mut run) = self.run.take() else { return Ok(Progress::None) };
        (run.number, run.stage, run.settled) = (seating.number, Stage::Flying, false);
        // How long a run takes in the partition says nothing about others.
        run.paced &= !seating.in_partition;
        run.flight = Flight::at(first);
        let stream = self.streams.current();
        let ready = cuda_task(&mut run.segment).and_then(|task| {
            task.seat()?.arm(seating.number, stream)?;
            prepare_batches(stream, task, &task.lowered.clone(), first)
        });
        let run = self.run.insert(run);
        if let Err(err) = ready {
            let (task, _) = own_task(&self.hub, &mut run.segment)?;
            return Err(failed(task, first, err));
        }
        self.fill()
    }

    /// Queues what may be in flight.
    fn fill(&mut self) -> Result<Progress, DeviceError> {
        let Some(mut run) = self.run.take() else { return Ok(Progress::None) };
        let fill = std::panic::AssertUnwindSafe(|| self.fill_run(&mut run));
        let filled = std::panic::catch_unwind(fill);
        let (known, launched) = (run.flight.known, run.flight.launched);
        // Back in its place first: whoever catches a panic answers for what it finds there.
        let at = self.run.insert(run);
        let filled = filled.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if let Err(err) = filled {
            let (task, _) = own_task(&self.hub, &mut at.segment)?;
            return Err(failed(task, launched, err));
        }
        if launched > known {
            return Ok(Progress::Some);
        }
        // Done; or told before anything was launched, when what made it ready may still be on its way.
        if known == at.end { self.conclude() } else { self.read_back() }
    }

    fn fill_run(&mut self, run: &mut Run) -> Result<(), CudaError> {
        let end = run.end;
        if !self.move_over(run) {
            return Ok(());
        }
        while let Some(next) = self.next_launch(run)? {
            let task = cuda_task(&mut run.segment)?;
            self.launch(task, &mut run.flight, next)?;
            let (timed, flight) = (task.is_timed(), &mut run.flight);
            if timed || flight.launched == end || flight.is_due(&task.lowered) {
                self.mark(flight)?;
            }
        }
        let flight = &mut run.flight;
        if flight.marks.is_empty() && flight.launched > flight.known {
            self.mark(flight)?;
        }
        Ok(())
    }

    /// Goes to where the queue is held to as soon as nothing is in flight, and false until then: launches on two streams
    /// would not wait for each other.
    fn move_over(&mut self, run: &Run) -> bool {
        if self.inbox.orders.is_confined() == self.streams.in_partition {
            return true;
        }
        if !run.flight.marks.is_empty() {
            return false;
        }
        if run.settled {
            self.streams.in_partition = self.inbox.orders.move_over();
        }
        true
    }

    /// What may be queued now: the next step, or as much of its chain as is launched with it.
    fn next_launch(&self, run: &mut Run) -> Result<Option<Next>, CudaError> {
        let (told, end) = (run.is_told(), run.end);
        let task = cuda_task(&mut run.segment)?;
        let flight = &run.flight;
        let many = self.hub.best_effort.load(Ordering::Relaxed) >= MANY_QUEUES;
        let most = if many || task.is_timed() { 1 } else { LAUNCHES_IN_FLIGHT };
        let (first, lowered) = (flight.launched, &task.lowered);
        if first >= end || flight.marks.len() >= most || told {
            return Ok(None);
        }
        // A step that runs to its end whatever happens must not start behind one that may have left, nor be waited for by
        // others.
        let stays = |step: usize| lowered.kernels[step].finishes;
        if (stays(first) || (first > 0 && stays(first - 1))) && flight.known < first {
            return Ok(None);
        }
        // What is recorded starts afresh and is done as a whole: a step of which tiles are done, or that is timed, or has others
        // beyond this segment, is launched alone.
        let alone = task.words.partly_done || task.is_timed();
        let steps = lowered.stretch(first).filter(|steps| !alone && steps.end <= end);
        let Some(steps) = steps else { return Ok(Some(Next::Step(first))) };
        let (lowered, place) = (lowered.clone(), self.streams.place());
        let ready = task.memory()?.0.ready_chain(&self.hub, &lowered, &steps, place)?;
        Ok(Some(if ready { Next::Stretch(steps) } else { Next::Step(first) }))
    }

    /// Queues `next`, and the copy of outputs behind the last step.
    fn launch(
        &self,
        task: &mut CudaTask,
        flight: &mut Flight,
        next: Next,
    ) -> Result<(), CudaError> {
        let lowered = task.lowered.clone();
        let restored = task.words.partly_done;
        let end = match &next {
            Next::Step(index) => index + 1,
            Next::Stretch(steps) => steps.end,
        };
        task.words.partly_done = false;
        task.words.used_to = end;
        let timed = task.is_timed();
        let eager = end == task.step_count() && has_small_outputs(&lowered);
        let (hub, stream) = (&self.hub, self.streams.current());
        let held = lowered.hold(stream, end)?;
        let (instance, staging) = task.memory()?;
        if timed {
            self.stamps.0.record(stream)?;
        }
        // SAFETY: the task holds instance, staging and plan until the stream is drained, and its words are as
        // `prepare_batches` left them.
        unsafe {
            match next {
                Next::Step(index) => {
                    let dependent = flight.behind_kernel && !timed && !held;
                    let how = BestEffortLaunch { restored, dependent };
                    instance.launch_best_effort(hub, &lowered, index, how, stream)?;
                }
                Next::Stretch(steps) => {
                    instance.launch_chain(&steps, self.streams.place(), stream)?;
                }
            }
            if timed {
                self.stamps.1.record(stream)?;
            }
            if eager {
                instance.copy_outputs(&lowered, staging, stream)?;
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
        // SAFETY: the word lives as long as this lane, which waits for its stream before it goes.
        unsafe { self.streams.current().write_word(self.word.device_address(), self.marks) }?;
        Ok(self.marks)
    }

    /// The oldest launch in flight has ended, and nobody had told it to leave: steps before `step` are done.
    fn land(&mut self, step: usize) -> Result<Progress, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(Progress::None) };
        // The order may have come between the mark and this look.
        if run.is_told() {
            return self.read_back();
        }
        run.flight.marks.pop_front();
        (run.flight.known, run.settled) = (step, true);
        let (task, _) = own_task(&self.hub, &mut run.segment)?;
        if task.is_timed() {
            let micros = self.stamps.1.micros_since(&self.stamps.0);
            task.push_time(micros.map_err(|err| self.hub.error(err))?);
        }
        self.fill()
    }

    /// Asks, behind everything in flight, for the words that say how far it got.
    fn read_back(&mut self) -> Result<Progress, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(Progress::None) };
        let (known, launched) = (run.flight.known, run.flight.launched);
        let (task, _) = own_task(&self.hub, &mut run.segment)?;
        let lowered = task.lowered.clone();
        let (at, count) = lowered.layout.control_words(known..launched);
        let mut ask = || {
            if self.readback.len() < count * 4 {
                self.readback = PinnedBuffer::zeroed(self.hub.context(), count * 4)?;
            }
            let (instance, _) = task.memory()?;
            let (stream, target) = (self.streams.current(), self.readback.as_ptr());
            // SAFETY: the words are of the run's own memory; the buffer has room and is read only behind the mark.
            unsafe { stream.copy_out(target, instance.address() + at, count * 4) }
        };
        let mark = ask().and_then(|()| self.queue_mark()).map_err(|err| self.hub.error(err))?;
        if let Some(run) = &mut self.run {
            run.stage = Stage::Reading { mark };
        }
        Ok(Progress::Some)
    }

    /// The words are there: finds the first step that a block has left.
    fn settle(&mut self) -> Result<Progress, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(Progress::None) };
        let (known, launched) = (run.flight.known, run.flight.launched);
        let (task, _) = own_task(&self.hub, &mut run.segment)?;
        let lowered = task.lowered.clone();
        let (at, _) = lowered.layout.control_words(known..launched);
        let words = self.readback.as_slice();
        let is_left = |step: &usize| {
            let place = (lowered.layout.controls[*step].left - at) as usize;
            words[place..place + 4].iter().any(|byte| *byte != 0)
        };
        let done = (known..launched).find(is_left).unwrap_or(launched);
        if task.is_timed() {
            let micros = self.stamps.1.micros_since(&self.stamps.0);
            let micros = micros.map_err(|err| self.hub.error(err))?;
            match done > known {
                true => task.push_time(micros),
                false => task.unfinished += Nanos((micros * 1e3) as u64),
            }
        }
        if launched > known {
            task.words.partly_done = done < launched && lowered.kernels[done].resumes;
        }
        run.flight = Flight::at(done);
        if done < run.end { self.move_on(done) } else { self.conclude() }
    }

    /// The run has left before step `next`: it goes on from there, unless it was told to go.
    fn move_on(&mut self, next: usize) -> Result<Progress, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(Progress::None) };
        let seat = run.seat.clone().filter(|_| !self.inbox.orders.told(run.ticket));
        let seating = seat.and_then(|seat| self.inbox.orders.sit(run.ticket, &seat));
        let Some(seating) = seating else { return self.conclude() };
        let (task, _) = own_task(&self.hub, &mut run.segment)?;
        task.advance_to(next);
        (run.segment.steps.start, run.paced) = (next, false);
        self.start(seating, next)
    }

    /// Nothing is in flight: the segment ends where it got, once its outputs are on the host.
    fn conclude(&mut self) -> Result<Progress, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(Progress::None) };
        let (reached, end, paced) = (run.flight.known, run.end, run.paced);
        let started = run.started;
        let copied = matches!(run.stage, Stage::Copying { .. });
        let (task, _) = own_task(&self.hub, &mut run.segment)?;
        let lowered = task.lowered.clone();
        if reached == task.step_count() && !has_small_outputs(&lowered) && !copied {
            let copy = |task: &mut CudaTask, stream: &Stream| {
                let (instance, staging) = task.memory()?;
                // SAFETY: the task holds both sides until the mark behind the copy is passed.
                unsafe { instance.copy_outputs(&lowered, staging, stream) }
            };
            let copied = copy(task, self.streams.current());
            let mark =
                copied.and_then(|()| self.queue_mark()).map_err(|err| self.hub.error(err))?;
            if let Some(run) = &mut self.run {
                run.stage = Stage::Copying { mark };
            }
            return Ok(Progress::Some);
        }
        if paced && reached == end {
            lowered.program.note_run(&lowered.parts, started.elapsed());
        }
        task.advance_to(reached);
        let outcome = match task.fault() {
            _ if reached < end => Outcome::Preempted,
            Some(err) => Outcome::Failed(err),
            None => Outcome::Done,
        };
        Ok(Progress::Ended(outcome))
    }
}

/// What a look at a lane came to.
enum Progress {
    None,
    Some,
    Ended(Outcome),
}

/// The task of a segment that was found to be this device's when it began.
fn cuda_task(segment: &mut Segment) -> Result<&mut CudaTask, CudaError> {
    let task = segment.task.as_any_mut().downcast_mut::<CudaTask>();
    task.ok_or(CudaError::Misuse("the task belongs to another device"))
}

/// Queues what comes before the first launch: inputs, and the words of steps that start afresh.
fn prepare_batches(
    stream: &Stream,
    task: &mut CudaTask,
    lowered: &Lowered,
    from: usize,
) -> Result<(), CudaError> {
    if !task.uploaded {
        return task.upload(stream);
    }
    let words = task.words;
    let (instance, _) = task.memory()?;
    let block = instance.address();
    let layout = &lowered.layout;
    // A step that was left keeps its words along with the tiles it has done.
    let first = from + usize::from(words.partly_done);
    if words.used_to > from {
        // SAFETY: words of this run's own memory, which it holds until the stream is drained.
        unsafe { instance.clear_faults(lowered, first, stream) }?;
    }
    if words.cleared && words.partly_done {
        let (at, count) = layout.control_words(first..words.used_to);
        // SAFETY: as above. Done bits and arrivals of the try that left stay; tiles are counted anew by the two words side
        // by side.
        unsafe {
            stream.clear(block + layout.controls[from].left, 2)?;
            stream.clear(block + at, count)?;
        }
    } else {
        task.upload_words(stream)?;
    }
    task.words.cleared = true;
    task.words.used_to = from;
    Ok(())
}

fn has_small_outputs(lowered: &Lowered) -> bool {
    lowered.layout.staged_bytes - lowered.layout.faults_at <= EAGER_OUTPUT_BYTES
}
