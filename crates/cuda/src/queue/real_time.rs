//! RT queues: the queue's thread enqueues a whole segment and waits for it.
//!
//! The thread polls for work while some may come, so that its caches stay warm; when it sleeps,
//! waking it takes longer than enqueuing from the calling thread. A whole task is a copy in, one
//! graph, a copy out and a fence. Nothing on the device is ever preempted; a preemption covers
//! segments that wait on the host.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::Nanos;
use device::thread_placement::{self, LoneThread};
use device::{
    Completion, CompletionSink, DeviceError, Outcome, Queue, QueueOptions, Segment, Task,
    thread_watch,
};

use super::{device_task, failed, wait_for};
use crate::device_context::DeviceContext;
use crate::driver::{Event, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::measure::timeline::Timeline;
use crate::preempt::PreemptionServices;
use crate::preempt::queue_preemption::QueuePreemption;
use crate::program::task::CudaTask;
use crate::services::DeviceServices;

/// Segments on the device: the one that runs, and the next, so that the device does not wait for
/// the host.
const ON_DEVICE: usize = 2;

/// A queue whose work runs to its end.
pub(crate) struct RealTimeQueue {
    shared: Arc<RealTimeShared>,
}

struct RealTimeShared {
    options: QueueOptions,
    device: Arc<DeviceContext>,
    preemption_services: Arc<PreemptionServices>,
    timeline: Arc<Timeline>,
    stream: Stream,
    priority: Priority,
    word: PinnedWord,
    sink: Arc<dyn CompletionSink>,
    preemption: QueuePreemption,
    state: Mutex<RealTimeState>,
    wake: Condvar,
    /// Length of `running`, readable without the lock.
    on_device: AtomicUsize,
    /// Length of `waiting`, readable without the lock.
    waiting_count: AtomicUsize,
}

#[derive(Default)]
struct RealTimeState {
    waiting: VecDeque<(Segment, u64)>,
    running: VecDeque<ActiveSegment>,
    last_fence: u32,
    closed: bool,
    /// The queue's thread sleeps and must be woken.
    asleep: bool,
}

/// A segment that is on the device, or ended before it got there.
struct ActiveSegment {
    segment: Segment,
    started: Instant,
    progress: SegmentState,
}

/// What was enqueued of a segment.
struct EnqueuedWork {
    /// Steps before this one are done once the fence is reached.
    end: usize,
    events: Vec<Event>,
    /// It runs a whole program whose weights were resident, so its time is that of a run.
    measures_program: bool,
    /// Events before and after the run, for a timeline.
    span: Option<(Event, Event)>,
}

enum SegmentState {
    /// Done once the fence is reached.
    InFlight {
        fence: u32,
        work: EnqueuedWork,
    },
    Preempted,
    Failed(DeviceError),
}

impl RealTimeQueue {
    pub(crate) fn open(
        services: &DeviceServices,
        timeline: Arc<Timeline>,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<RealTimeQueue, DeviceError> {
        let priority = if options.high_priority { Priority::High } else { Priority::Low };
        let device = services.device.clone();
        let stream = Stream::new(device.context(), priority).map_err(|err| device.error(err))?;
        let word = PinnedWord::new(device.context()).map_err(|err| device.error(err))?;
        let shared = Arc::new(RealTimeShared {
            options,
            stream,
            priority,
            word,
            sink,
            preemption: QueuePreemption::default(),
            state: Mutex::default(),
            wake: Condvar::new(),
            on_device: AtomicUsize::new(0),
            waiting_count: AtomicUsize::new(0),
            preemption_services: services.preemption.clone(),
            timeline,
            device,
        });
        let worker = shared.clone();
        std::thread::Builder::new()
            .name(format!("cuda-rt{}", options.id))
            .spawn(move || worker.run())
            .map_err(|err| DeviceError::Faulted {
                device: shared.device.info.name.clone(),
                reason: format!("cannot start a queue's thread: {err}"),
            })?;
        Ok(RealTimeQueue { shared })
    }
}

impl Queue for RealTimeQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        let shared = &self.shared;
        let sequence = shared.preemption.next_sequence();
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
        state.waiting.push_back((segment, sequence));
        shared.waiting_count.store(state.waiting.len(), Ordering::Release);
        if shared.priority == Priority::High {
            shared.preemption_services.driver_backoff.expect_launch();
        }
        Ok(())
    }

    fn preempt(&self) {
        self.shared.preemption.preempt();
    }
}

impl Drop for RealTimeQueue {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.wake.notify_one();
    }
}

impl RealTimeShared {
    fn lock(&self) -> MutexGuard<'_, RealTimeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Completes segments in order, until the queue is closed and empty.
    fn run(&self) {
        let _processor = thread_placement::enter_alone(LoneThread::Polling);
        let mut free_since = Instant::now();
        while let Some(fence) = self.next_fence() {
            let waited = match fence {
                Some(fence) => self.wait_for(fence),
                // What a failed segment had enqueued may still run.
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
            if !matches!(running.progress, SegmentState::Preempted) {
                self.preemption_services.rt_activity.segment_ended();
            }
            let busy = running.started.max(free_since).elapsed().into();
            free_since = Instant::now();
            self.complete(running, waited, busy);
        }
    }

    /// Waits for `fence`, and enqueues further segments meanwhile.
    fn wait_for(&self, fence: u32) -> Result<(), CudaError> {
        wait_for(&self.word, fence, &self.stream, self.device.options().polling, || {
            let room = self.on_device.load(Ordering::Acquire) < ON_DEVICE;
            if room && self.waiting_count.load(Ordering::Acquire) > 0 {
                self.refill(&mut self.lock());
            }
        })
    }

    /// The fence of the oldest segment; `Some(None)` when it has none, `None` when the queue is
    /// closed and empty.
    fn next_fence(&self) -> Option<Option<u32>> {
        self.poll_for_work();
        let mut state = self.lock();
        loop {
            self.refill(&mut state);
            match state.running.front().map(|running| &running.progress) {
                Some(SegmentState::InFlight { fence, .. }) => return Some(Some(*fence)),
                Some(_) => return Some(None),
                None if state.closed => return None,
                None => {}
            }
            state.asleep = true;
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep = false;
        }
    }

    /// Returns when there is work, or after the idle time.
    fn poll_for_work(&self) {
        let since = Instant::now();
        let waiting_count = || self.waiting_count.load(Ordering::Acquire) > 0;
        while self.on_device.load(Ordering::Acquire) == 0 && !waiting_count() {
            if since.elapsed() > self.device.options().polling.idle {
                return;
            }
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        }
    }

    fn refill(&self, state: &mut RealTimeState) {
        while state.running.len() < ON_DEVICE {
            let Some((segment, sequence)) = state.waiting.pop_front() else { return };
            self.waiting_count.store(state.waiting.len(), Ordering::Release);
            if self.preemption.is_preempted(sequence) {
                let started = Instant::now();
                state.running.push_back(ActiveSegment {
                    segment,
                    started,
                    progress: SegmentState::Preempted,
                });
                self.on_device.store(state.running.len(), Ordering::Release);
            } else {
                self.start(state, segment);
            }
        }
    }

    fn start(&self, state: &mut RealTimeState, mut segment: Segment) {
        let started = Instant::now();
        let _turn = thread_watch::turn();
        thread_watch::call("launch");
        self.preemption_services.rt_activity.segment_started();
        let _call = (self.priority == Priority::High)
            .then(|| self.preemption_services.driver_backoff.enter_driver());
        // A panic here is a defect, but it must cost one request and not the queue.
        let enqueue = || self.enqueue(&mut segment, &mut state.last_fence);
        let enqueued = std::panic::catch_unwind(std::panic::AssertUnwindSafe(enqueue));
        let progress = match enqueued {
            Ok(Ok(progress)) => progress,
            Ok(Err(err)) => SegmentState::Failed(err),
            Err(_) => SegmentState::Failed(DeviceError::BadPlan("the queue panicked".to_string())),
        };
        state.running.push_back(ActiveSegment { segment, started, progress });
        self.on_device.store(state.running.len(), Ordering::Release);
    }

    /// Enqueues all of `segment`.
    fn enqueue(
        &self,
        segment: &mut Segment,
        last_fence: &mut u32,
    ) -> Result<SegmentState, DeviceError> {
        self.device.check_healthy()?;
        let (task, steps) = device_task(&self.device, segment)?;
        task.acquire_memory(self.priority)?;
        let begin = steps.start;
        let work = self.enqueue_steps(task, steps).map_err(|err| failed(task, begin, err))?;
        *last_fence = last_fence.wrapping_add(1);
        // SAFETY: the word lives as long as this queue's thread, which waits for the fence.
        unsafe { self.stream.write_word(self.word.device_address(), *last_fence) }
            .map_err(|err| self.device.error(err))?;
        Ok(SegmentState::InFlight { fence: *last_fence, work })
    }

    fn enqueue_steps(
        &self,
        task: &mut CudaTask,
        steps: Range<usize>,
    ) -> Result<EnqueuedWork, CudaError> {
        let specialization = task.specialization.clone();
        let (timed, uploaded) = (task.is_timed(), task.uploaded);
        let tried = task.control.used_to > steps.start;
        let whole = steps == (0..task.step_count()) && !timed;
        let last = steps.end == task.step_count();
        // Real time computes all tiles of a step that best effort was preempted in.
        task.control.partly_done = false;
        if !uploaded {
            task.copy_in(false, &self.stream)?;
        }
        task.uploaded = true;
        let (instance, staging) = task.memory()?;
        let arrival = specialization.arrival()?;
        let (mut events, mut span) = (Vec::new(), None);
        // SAFETY: instance, staging buffer and specialization belong to the task, which this queue
        // holds until the fence is reached or the stream is drained; nothing else uses the
        // instance.
        unsafe {
            if uploaded && tried {
                instance.clear_faults(&specialization, steps.start, &self.stream)?;
            }
            // Preemptions for this segment are on the device by now, or are written here while its
            // inputs are copied.
            self.preemption_services.epoch_counters.flush();
            if whole && !steps.is_empty() {
                let began = self.timeline.stamp(&self.stream)?;
                match &arrival {
                    None => instance.launch_whole(&specialization, self.priority, &self.stream)?,
                    Some(arrival) => {
                        let (priority, stream) = (self.priority, &self.stream);
                        instance.launch_arriving(&specialization, arrival, priority, stream)?;
                    }
                }
                span = began.zip(self.timeline.stamp(&self.stream)?);
            } else {
                for index in steps.clone() {
                    if timed {
                        events.push(stamp(&self.stream)?);
                    }
                    let held = specialization.wait_for_weights(&self.stream, index + 1)?;
                    let dependent = index > steps.start && !timed && !held;
                    instance.launch_real_time(&specialization, index, dependent, &self.stream)?;
                }
                if timed {
                    events.push(stamp(&self.stream)?);
                }
            }
            if last {
                instance.copy_outputs(&specialization, staging, &self.stream)?;
            }
        }
        Ok(EnqueuedWork {
            end: steps.end,
            events,
            measures_program: whole && arrival.is_none(),
            span,
        })
    }

    fn complete(&self, running: ActiveSegment, waited: Result<(), CudaError>, busy: Nanos) {
        let ActiveSegment { mut segment, progress, .. } = running;
        let outcome = match (progress, waited) {
            (SegmentState::Preempted, _) => Outcome::Preempted,
            (SegmentState::InFlight { work, .. }, Ok(())) => {
                if let Some((from, to)) = &work.span {
                    self.timeline.add(from, to);
                }
                self.advance(&mut segment, &work, busy)
            }
            (SegmentState::Failed(err), Ok(())) => Outcome::Failed(err),
            (_, Err(err)) => Outcome::Failed(self.device.error(err)),
        };
        if matches!(outcome, Outcome::Failed(_))
            && let Some(task) = segment.task.as_any_mut().downcast_mut::<CudaTask>()
        {
            task.abandon();
        }
        let Segment { token, task, .. } = segment;
        self.sink.complete(Completion { queue: self.options.id, token, task, outcome, busy });
    }

    fn advance(&self, segment: &mut Segment, work: &EnqueuedWork, busy: Nanos) -> Outcome {
        let task = match device_task(&self.device, segment) {
            Ok((task, _)) => task,
            Err(err) => return Outcome::Failed(err),
        };
        for pair in work.events.windows(2) {
            match pair[1].micros_since(&pair[0]) {
                Ok(micros) => task.push_time(micros),
                Err(err) => return Outcome::Failed(self.device.error(err)),
            }
        }
        if work.measures_program {
            task.specialization.program.record_run(&task.specialization.parts, busy.into());
        }
        task.advance_to(work.end);
        task.fault().map_or(Outcome::Done, Outcome::Failed)
    }
}

fn stamp(stream: &Stream) -> Result<Event, CudaError> {
    let event = Event::new(stream.context())?;
    event.record(stream)?;
    Ok(event)
}
