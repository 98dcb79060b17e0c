//! Real time: the queue's thread queues everything on the device at once and waits for it.
//!
//! It looks for work without pause while some can come, so its caches hold the driver; where it sleeps, waking it would take
//! longer than the caller needs to tell the device himself. A whole task is a copy in, one graph, a copy out and a word. Nothing here ever leaves early; an order to leave concerns
//! segments that wait on the host.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::Nanos;
use device::{
    Completion, CompletionSink, DeviceError, Outcome, Queue, QueueOptions, Segment, Task,
};

use super::{failed, own_task, wait_for};
use crate::driver::{Event, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::hub::Hub;
use crate::seats::Orders;
use crate::task::CudaTask;

/// Segments on the device at once: one that runs, and the next, so that the device does not wait for us.
const ON_DEVICE: usize = 2;

/// A queue whose work runs to its end.
pub(crate) struct RealTimeQueue {
    shared: Arc<Shared>,
}

struct Shared {
    options: QueueOptions,
    hub: Arc<Hub>,
    stream: Stream,
    priority: Priority,
    word: PinnedWord,
    sink: Arc<dyn CompletionSink>,
    orders: Orders,
    state: Mutex<State>,
    wake: Condvar,
    /// Segments on the device, for a thread that looks without the lock.
    on_device: AtomicUsize,
    /// Segments that wait for the thread, likewise.
    called: AtomicUsize,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(Segment, u64)>,
    running: VecDeque<Running>,
    marks: u32,
    closed: bool,
    /// The queue's thread sleeps and must be woken.
    asleep: bool,
}

/// A segment whose work is on the device, or that ended before.
struct Running {
    segment: Segment,
    started: Instant,
    progress: Progress,
}

/// What was queued.
struct Queued {
    /// Steps before this one are done once the mark behind them is there.
    end: usize,
    events: Vec<Event>,
    /// It is a whole run whose weights were there, so the time it takes says how long such runs take.
    paced: bool,
    /// Where the whole run begins and ends, for a timeline.
    span: Option<(Event, Event)>,
}

enum Progress {
    /// Done once the mark is there.
    Marked {
        mark: u32,
        queued: Queued,
    },
    Left,
    Failed(DeviceError),
}

impl RealTimeQueue {
    pub(crate) fn open(
        hub: Arc<Hub>,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<RealTimeQueue, DeviceError> {
        let priority = if options.high_priority { Priority::High } else { Priority::Low };
        let stream = Stream::new(hub.context(), priority).map_err(|err| hub.error(err))?;
        let word = PinnedWord::new(hub.context()).map_err(|err| hub.error(err))?;
        let shared = Arc::new(Shared {
            options,
            stream,
            priority,
            word,
            sink,
            orders: Orders::default(),
            state: Mutex::default(),
            wake: Condvar::new(),
            on_device: AtomicUsize::new(0),
            called: AtomicUsize::new(0),
            hub,
        });
        let worker = shared.clone();
        std::thread::Builder::new()
            .name(format!("cuda-rt{}", options.id))
            .spawn(move || worker.run())
            .map_err(|err| DeviceError::Faulted {
                device: shared.hub.info.name.clone(),
                reason: format!("cannot start a queue's thread: {err}"),
            })?;
        Ok(RealTimeQueue { shared })
    }
}

impl Queue for RealTimeQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        let shared = &self.shared;
        let ticket = shared.orders.enter();
        let mut state = shared.lock();
        if state.asleep && state.running.len() < ON_DEVICE && state.waiting.is_empty() {
            shared.start(&mut state, segment);
            drop(state);
            shared.wake.notify_one();
            return Ok(());
        }
        let room = ON_DEVICE.saturating_sub(state.running.len());
        if state.waiting.len() >= shared.options.capacity.max(1) + room {
            return Err(segment);
        }
        state.waiting.push_back((segment, ticket));
        shared.called.store(state.waiting.len(), Ordering::Release);
        if shared.priority == Priority::High {
            shared.hub.quiet.expect_launch();
        }
        Ok(())
    }

    fn preempt(&self) {
        self.shared.orders.order();
    }
}

impl Drop for RealTimeQueue {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.wake.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Completes segments in the order they came, until the queue is closed and empty.
    fn run(&self) {
        let mut free_since = Instant::now();
        while let Some(mark) = self.next_mark() {
            let waited = match mark {
                Some(mark) => self.wait_for(mark),
                // Whatever a failed segment had queued may still run.
                None => self.stream.synchronize(),
            };
            let running = {
                let mut state = self.lock();
                let running = state.running.pop_front();
                self.on_device.store(state.running.len(), Ordering::Release);
                self.refill(&mut state);
                running
            };
            let Some(running) = running else { continue };
            if !matches!(running.progress, Progress::Left) {
                self.hub.traffic.leave();
            }
            let busy = running.started.max(free_since).elapsed().into();
            free_since = Instant::now();
            self.complete(running, waited, busy);
        }
    }

    /// Waits for `mark`, and queues meanwhile what there is room for.
    fn wait_for(&self, mark: u32) -> Result<(), CudaError> {
        wait_for(&self.word, mark, &self.stream, self.hub.options().polling, || {
            let room = self.on_device.load(Ordering::Acquire) < ON_DEVICE;
            if room && self.called.load(Ordering::Acquire) > 0 {
                self.refill(&mut self.lock());
            }
        })
    }

    /// The mark of the oldest segment on the device; `Some(None)` when it has none, `None` when there is nothing to do any
    /// more.
    fn next_mark(&self) -> Option<Option<u32>> {
        self.look_for_work();
        let mut state = self.lock();
        loop {
            self.refill(&mut state);
            match state.running.front().map(|running| &running.progress) {
                Some(Progress::Marked { mark, .. }) => return Some(Some(*mark)),
                Some(_) => return Some(None),
                None if state.closed => return None,
                None => {}
            }
            state.asleep = true;
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep = false;
        }
    }

    /// Returns when there is work, or after a while.
    fn look_for_work(&self) {
        let since = Instant::now();
        let called = || self.called.load(Ordering::Acquire) > 0;
        while self.on_device.load(Ordering::Acquire) == 0 && !called() {
            if since.elapsed() > self.hub.options().polling.idle {
                return;
            }
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        }
    }

    fn refill(&self, state: &mut State) {
        while state.running.len() < ON_DEVICE {
            let Some((segment, ticket)) = state.waiting.pop_front() else { return };
            self.called.store(state.waiting.len(), Ordering::Release);
            if self.orders.told(ticket) {
                let started = Instant::now();
                state.running.push_back(Running { segment, started, progress: Progress::Left });
                self.on_device.store(state.running.len(), Ordering::Release);
            } else {
                self.start(state, segment);
            }
        }
    }

    fn start(&self, state: &mut State, mut segment: Segment) {
        let started = Instant::now();
        self.hub.traffic.enter();
        let _call = (self.priority == Priority::High).then(|| self.hub.quiet.call());
        // A panic here is a defect, but it must cost its request and not the queue.
        let enqueue = || self.enqueue(&mut segment, &mut state.marks);
        let enqueued = std::panic::catch_unwind(std::panic::AssertUnwindSafe(enqueue));
        let progress = match enqueued {
            Ok(Ok(progress)) => progress,
            Ok(Err(err)) => Progress::Failed(err),
            Err(_) => Progress::Failed(DeviceError::BadPlan("the queue panicked".to_string())),
        };
        state.running.push_back(Running { segment, started, progress });
        self.on_device.store(state.running.len(), Ordering::Release);
    }

    /// Queues all of `segment` on the device.
    fn enqueue(&self, segment: &mut Segment, marks: &mut u32) -> Result<Progress, DeviceError> {
        self.hub.alive()?;
        let (task, steps) = own_task(&self.hub, segment)?;
        task.hold_memory(self.priority)?;
        let begin = steps.start;
        let queued = self.queue_steps(task, steps).map_err(|err| failed(task, begin, err))?;
        *marks = marks.wrapping_add(1);
        // SAFETY: the word lives as long as this queue's thread, which waits for it.
        unsafe { self.stream.write_word(self.word.device_address(), *marks) }
            .map_err(|err| self.hub.error(err))?;
        Ok(Progress::Marked { mark: *marks, queued })
    }

    fn queue_steps(&self, task: &mut CudaTask, steps: Range<usize>) -> Result<Queued, CudaError> {
        let (hub, lowered) = (task.hub.clone(), task.lowered.clone());
        let (timed, uploaded) = (task.is_timed(), task.uploaded);
        let tried = task.words.used_to > steps.start;
        let whole = steps == (0..task.step_count()) && !timed;
        let last = steps.end == task.step_count();
        // What a best-effort try left of the next step is done anew.
        task.words.partly_done = false;
        if !uploaded {
            task.copy_in(false, &self.stream)?;
        }
        task.uploaded = true;
        let (instance, staging) = task.memory()?;
        let arrival = lowered.arrival()?;
        let (mut events, mut span) = (Vec::new(), None);
        // SAFETY: instance, staging and plan belong to the task, which this queue holds until the mark behind them is
        // passed or the stream is drained; nobody else uses the instance.
        unsafe {
            if uploaded && tried {
                instance.clear_faults(&lowered, steps.start, &self.stream)?;
            }
            // Whoever is to leave for this has been told by now, or is told here while the inputs are on their way.
            hub.seats.send();
            if whole && !steps.is_empty() {
                let began = hub.timeline.stamp(&hub, &self.stream)?;
                match &arrival {
                    None => instance.graph(&hub, &lowered, self.priority)?.launch(&self.stream)?,
                    Some(arrival) => {
                        let (priority, stream) = (self.priority, &self.stream);
                        instance.launch_arriving(&hub, &lowered, arrival, priority, stream)?;
                    }
                }
                span = began.zip(hub.timeline.stamp(&hub, &self.stream)?);
            } else {
                for index in steps.clone() {
                    if timed {
                        events.push(stamp(&hub, &self.stream)?);
                    }
                    let held = lowered.hold(&self.stream, index + 1)?;
                    let dependent = index > steps.start && !timed && !held;
                    instance.launch_real_time(&hub, &lowered, index, dependent, &self.stream)?;
                }
                if timed {
                    events.push(stamp(&hub, &self.stream)?);
                }
            }
            if last {
                instance.copy_outputs(&lowered, staging, &self.stream)?;
            }
        }
        Ok(Queued { end: steps.end, events, paced: whole && arrival.is_none(), span })
    }

    fn complete(&self, running: Running, waited: Result<(), CudaError>, busy: Nanos) {
        let Running { mut segment, progress, .. } = running;
        let outcome = match (progress, waited) {
            (Progress::Left, _) => Outcome::Preempted,
            (Progress::Marked { queued, .. }, Ok(())) => {
                if let Some((from, to)) = &queued.span {
                    self.hub.timeline.add(from, to);
                }
                self.advance(&mut segment, &queued, busy)
            }
            (Progress::Failed(err), Ok(())) => Outcome::Failed(err),
            (_, Err(err)) => Outcome::Failed(self.hub.error(err)),
        };
        if matches!(outcome, Outcome::Failed(_))
            && let Some(task) = segment.task.as_any_mut().downcast_mut::<CudaTask>()
        {
            task.abandon();
        }
        let Segment { token, task, .. } = segment;
        self.sink.complete(Completion { queue: self.options.id, token, task, outcome, busy });
    }

    fn advance(&self, segment: &mut Segment, queued: &Queued, busy: Nanos) -> Outcome {
        let task = match own_task(&self.hub, segment) {
            Ok((task, _)) => task,
            Err(err) => return Outcome::Failed(err),
        };
        for pair in queued.events.windows(2) {
            match pair[1].micros_since(&pair[0]) {
                Ok(micros) => task.push_time(micros),
                Err(err) => return Outcome::Failed(self.hub.error(err)),
            }
        }
        if queued.paced {
            task.lowered.program.note_run(&task.lowered.parts, busy.into());
        }
        task.advance_to(queued.end);
        task.fault().map_or(Outcome::Done, Outcome::Failed)
    }
}

fn stamp(hub: &Hub, stream: &Stream) -> Result<Event, CudaError> {
    let event = Event::new(hub.context())?;
    event.record(stream)?;
    Ok(event)
}
