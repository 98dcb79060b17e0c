//! A GPU in virtual time: a deterministic state machine without threads.
//!
//! Streams run kernels in order. The blocks of a kernel are placed on SMs in waves, high priority
//! first. Concurrent kernels that together exceed the memory bandwidth slow each other down. Work
//! is preempted as finely as the profile allows, killed, or limited to a number of SMs. Every task
//! carries data, so that a wrong restore shows in its output.
//!
//! ```
//! use std::sync::Arc;
//!
//! use base::Nanos;
//! use device::PreemptMode;
//! use device::sim::{Gpu, GpuEvent, GpuSegment, StreamOptions, builtin};
//!
//! let set = builtin::mi50();
//! let models = set.models.iter().cloned().map(Arc::new).collect();
//! let stream = StreamOptions { high_priority: false, capacity: 1 };
//! let mut gpu = Gpu::new(set.gpu, models, &[stream], Vec::new());
//!
//! // Runs the first model for a millisecond, then preempts it.
//! let (steps, task) = (0..set.models[0].kernels.len(), gpu.create_task(0, 42));
//! let segment = GpuSegment { token: 1, task, model: 0, steps, tile: 0 };
//! gpu.enqueue(Nanos::ZERO, 0, segment).expect("the stream is empty");
//! let (mut events, now) = (Vec::new(), Nanos::from_millis(1));
//! gpu.advance(now, &mut events);
//! gpu.preempt(now, 0, PreemptMode::InsideTile);
//! gpu.advance(now + Nanos::from_micros(100), &mut events);
//!
//! let (at, event) = events.pop().expect("an event");
//! assert!(matches!(event, GpuEvent::Preempted { stream: 0, token: 1, .. }), "{event:?}");
//! assert!(at - now < Nanos::from_micros(50), "blocks exit inside their tiles");
//! ```

pub mod builtin;
mod execution;
mod fault;
mod profile;
mod stream;
mod task;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use base::Nanos;

use self::execution::bit;
pub use self::fault::{Fault, FaultKind};
pub use self::profile::{GpuProfile, ModelProfile, ProfileSet};
pub use self::stream::StreamWork;
use self::stream::{Head, Kernel, Stream, UNITS_PER_SM};
use self::task::TaskMemory;
pub use self::task::reference_output;
pub use crate::profile::KernelProfile;
use crate::{PreemptMode, PreemptionLevel};

/// A task's buffers on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TaskId(usize);

/// Consecutive kernels of one task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSegment {
    /// Returned with its completion.
    pub token: u64,
    /// The task.
    pub task: TaskId,
    /// Its model's index.
    pub model: usize,
    /// Kernels to run.
    pub steps: Range<usize>,
    /// Tile of the first kernel to begin at.
    pub tile: u32,
}

/// Settings of a stream.
#[derive(Clone, Copy, Debug)]
pub struct StreamOptions {
    /// Its blocks are placed before those of streams without it.
    pub high_priority: bool,
    /// Segments that may be enqueued at once.
    pub capacity: usize,
}

/// What happened on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuEvent {
    /// A kernel can be placed.
    StepReady {
        /// The stream.
        stream: usize,
        /// The kernel.
        step: usize,
    },
    /// The first block of a segment runs.
    Started {
        /// The stream.
        stream: usize,
        /// The segment.
        token: u64,
    },
    /// A segment ran to its end.
    Done {
        /// The stream.
        stream: usize,
        /// The segment.
        token: u64,
        /// Time its kernels took.
        busy: Nanos,
    },
    /// A segment was preempted.
    Preempted {
        /// The stream.
        stream: usize,
        /// The segment.
        token: u64,
        /// The first kernel that is not complete.
        step: usize,
        /// Completed tiles of it; 0 where the device cannot tell.
        tile: u32,
        /// The last kernel that was sent to the hardware.
        transmitted: usize,
        /// Time its kernels took.
        busy: Nanos,
    },
    /// A copy to the device is complete.
    Copied {
        /// The token of the copy.
        token: u64,
    },
    /// The weights of a model are loaded.
    Loaded {
        /// The model.
        model: usize,
    },
    /// The device is lost, and everything on it.
    Lost,
    /// The device is usable again, and empty.
    Ready,
}

/// A span of work, for timelines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkSpan {
    /// The stream.
    pub stream: usize,
    /// The kernel.
    pub step: usize,
    /// SMs held.
    pub sms: f32,
    /// Beginning.
    pub from: Nanos,
    /// End.
    pub to: Nanos,
    /// Whether its work was discarded.
    pub aborted: bool,
}

#[derive(Clone, Copy, Debug)]
enum CopyJob {
    Input(u64),
    Weights(usize),
}

/// The device.
#[derive(Clone, Debug)]
pub struct Gpu {
    profile: GpuProfile,
    models: Vec<Arc<ModelProfile>>,
    streams: Vec<Stream>,
    tasks: Vec<Option<TaskMemory>>,
    free_tasks: Vec<usize>,
    now: Nanos,
    free_units: u64,
    ready_order: u64,
    /// The stream that the dispatcher served last.
    served: Option<usize>,
    host_free: Nanos,
    copies: VecDeque<(Nanos, CopyJob)>,
    copy_free: Nanos,
    resident: Vec<bool>,
    faults: VecDeque<Fault>,
    armed: Vec<FaultKind>,
    ready_again_at: Option<Nanos>,
    contended: bool,
    spans: Option<Vec<WorkSpan>>,
    events: Vec<GpuEvent>,
    /// Next event of each stream that is not in `changed`.
    due: Vec<Nanos>,
    /// Streams that changed since `due` was computed, as bits; the last bit stands for all further
    /// streams.
    changed: u64,
    /// Next event of the device; `None` when something changed since.
    next: Option<Nanos>,
}

impl Gpu {
    /// An idle device. `faults` need not be in order.
    pub fn new(
        profile: GpuProfile,
        models: Vec<Arc<ModelProfile>>,
        streams: &[StreamOptions],
        mut faults: Vec<Fault>,
    ) -> Gpu {
        faults.sort_by_key(|fault| fault.at);
        let open = |options: &StreamOptions| Stream::new(options.high_priority, options.capacity);
        Gpu {
            free_units: u64::from(profile.sms) * UNITS_PER_SM,
            resident: vec![false; models.len()],
            streams: streams.iter().map(open).collect(),
            tasks: Vec::new(),
            free_tasks: Vec::new(),
            now: Nanos::ZERO,
            ready_order: 0,
            served: None,
            host_free: Nanos::ZERO,
            copies: VecDeque::new(),
            copy_free: Nanos::ZERO,
            faults: faults.into(),
            armed: Vec::new(),
            ready_again_at: None,
            contended: false,
            spans: None,
            events: Vec::new(),
            due: vec![Nanos::ZERO; streams.len()],
            changed: u64::MAX,
            next: None,
            models,
            profile,
        }
    }

    /// Records every span of work from now on.
    pub fn record_spans(&mut self) {
        self.spans = Some(Vec::new());
    }

    /// The recorded spans.
    pub fn spans(&self) -> &[WorkSpan] {
        self.spans.as_deref().unwrap_or_default()
    }

    /// Its profile.
    pub fn profile(&self) -> &GpuProfile {
        &self.profile
    }

    /// SMs that a stream holds now.
    pub fn held_sms(&self, stream: usize) -> f64 {
        self.streams[stream].held() as f64 / UNITS_PER_SM as f64
    }

    /// Segments enqueued on a stream, the running one included.
    pub fn queued(&self, stream: usize) -> usize {
        self.streams[stream].segments.len()
    }

    /// The dispatched kernel of a stream.
    pub fn current_step(&self, stream: usize) -> Option<usize> {
        self.streams[stream].kernel.as_ref().map(|kernel| kernel.step)
    }

    /// SM time that a stream has used.
    pub fn work(&self, stream: usize) -> StreamWork {
        self.streams[stream].work
    }

    /// Bytes of weights on the device, loading ones included.
    pub fn resident_bytes(&self) -> u64 {
        let sizes = self.models.iter().map(|model| model.weight_bytes);
        sizes.zip(&self.resident).filter(|(_, there)| **there).map(|(bytes, _)| bytes).sum()
    }

    /// Allocates the buffers of a task of `model` on this input.
    pub fn create_task(&mut self, model: usize, input: u64) -> TaskId {
        let memory = Some(TaskMemory::new(input, self.models[model].kernels.len()));
        let slot = self.free_tasks.pop().unwrap_or_else(|| {
            self.tasks.push(None);
            self.tasks.len() - 1
        });
        self.tasks[slot] = memory;
        TaskId(slot)
    }

    /// Frees a task's buffers.
    pub fn drop_task(&mut self, task: TaskId) {
        if self.tasks[task.0].take().is_some() {
            self.free_tasks.push(task.0);
        }
    }

    /// The output of a task; arbitrary before its last kernel ends.
    pub fn output(&self, task: TaskId) -> Option<u64> {
        self.tasks.get(task.0)?.as_ref().map(TaskMemory::output)
    }

    /// Appends a segment to a stream; returns it when the stream is full.
    pub fn enqueue(
        &mut self,
        now: Nanos,
        stream: usize,
        segment: GpuSegment,
    ) -> Result<(), GpuSegment> {
        self.touch(stream);
        self.now = self.now.max(now);
        let lost = self.ready_again_at.is_some();
        let state = &mut self.streams[stream];
        if lost || state.segments.len() >= state.segment_capacity || segment.steps.is_empty() {
            return Err(segment);
        }
        let (step, tile) = (segment.steps.start, segment.tile);
        let head = Head { segment, step, tile, busy: Nanos::ZERO, announced: false };
        state.segments.push_back(head);
        if state.segments.len() == 1 {
            state.dispatch_at = Some(now + Nanos(self.profile.launch_ns));
        }
        Ok(())
    }

    /// Preempts everything on a stream in mode `how`, as far as the device can.
    pub fn preempt(&mut self, now: Nanos, stream: usize, how: PreemptMode) {
        self.touch(stream);
        self.now = self.now.max(now);
        let Some(how) = self.possible(stream, how) else { return };
        let queued = self.queued_kernels(stream);
        let (preempt_ns, kill_ns) = (self.profile.preempt_ns, self.profile.kill_ns);
        let evict = Nanos(self.profile.evict_ns * queued);
        let reset_done = self.host_free.max(now) + Nanos(self.profile.host_reset_ns);
        let state = &mut self.streams[stream];
        if state.segments.is_empty() || state.preempting.is_some() {
            return;
        }
        state.preempting = Some(how);
        (state.dispatch_at, state.expiry) = (None, None);
        let running = state.kernel.as_ref().is_some_and(|kernel| !kernel.groups.is_empty());
        let started = state.kernel.as_ref().is_some_and(Kernel::started);
        match how {
            PreemptMode::Kill => {
                self.host_free = reset_done;
                state.abort_at = Some(reset_done + evict + Nanos(kill_ns));
            }
            PreemptMode::InsideTile if running => state.abort_at = Some(now + Nanos(preempt_ns)),
            PreemptMode::TileBoundary if running => {}
            PreemptMode::BetweenLaunches if started => {}
            _ => state.preempted_at = Some(now + evict),
        }
    }

    /// Limits a stream to `hold` SMs; new blocks are placed only up to `take`. With an expiry, the
    /// limit shrinks at that time: no tile is begun that would not end by then, except on so many
    /// SMs.
    pub fn set_budget(
        &mut self,
        now: Nanos,
        stream: usize,
        hold: u32,
        take: u32,
        expiry: Option<(Nanos, u32)>,
    ) {
        self.touch(stream);
        self.now = self.now.max(now);
        let units = |sms: u32| match sms {
            u32::MAX => u64::MAX,
            sms => u64::from(sms) * UNITS_PER_SM,
        };
        let inside = self.profile.preemption() == PreemptionLevel::InsideTile;
        let state = &mut self.streams[stream];
        (state.hold, state.take) = (units(hold), units(take).min(units(hold)));
        state.granted = None;
        state.expiry = expiry.map(|(at, sms)| (at, units(sms)));
        let idempotent = state.kernel.as_ref().is_some_and(|kernel| kernel.idempotent);
        if state.preempting.is_none() {
            let over = inside && idempotent && state.held() > state.hold;
            state.abort_at = over.then_some(now + Nanos(self.profile.preempt_ns));
        }
        self.place();
    }

    /// Lets a stream run up to `blocks` blocks of kernel `step` on up to `sms` SMs as part of the
    /// kernel of another stream, which is complete only when both are.
    pub fn pad(&mut self, now: Nanos, stream: usize, step: usize, sms: u32, blocks: u32) {
        self.set_budget(now, stream, 0, 0, None);
        let state = &mut self.streams[stream];
        let Some(kernel) = state.kernel.as_ref().filter(|kernel| kernel.step == step) else {
            return;
        };
        let units = u64::from(sms) * UNITS_PER_SM;
        state.granted = Some(blocks.saturating_mul(kernel.tiles_per_block));
        (state.hold, state.take) = (units, units);
        self.place();
    }

    /// Copies the inputs of a request to the device.
    pub fn copy(&mut self, now: Nanos, token: u64, bytes: u64) {
        self.start_copy(now, bytes, CopyJob::Input(token));
    }

    /// Loads the weights of a model.
    pub fn load(&mut self, now: Nanos, model: usize) {
        self.resident[model] = true;
        let bytes = self.models[model].weight_bytes;
        self.start_copy(now, bytes, CopyJob::Weights(model));
    }

    /// Frees a model's weights.
    pub fn evict(&mut self, model: usize) {
        self.resident[model] = false;
    }

    fn start_copy(&mut self, now: Nanos, bytes: u64, job: CopyJob) {
        self.next = None;
        let ends = self.copy_free.max(now) + self.profile.copy_time(bytes);
        self.copy_free = ends;
        self.copies.push_back((ends, job));
    }

    /// Resets the device: everything on it is lost, and it is usable again after a while.
    pub fn reset(&mut self, now: Nanos) {
        (self.next, self.changed) = (None, u64::MAX);
        self.now = self.now.max(now);
        self.streams.iter_mut().for_each(Stream::clear);
        for stream in &mut self.streams {
            (stream.hold, stream.take, stream.expiry) = (u64::MAX, u64::MAX, None);
        }
        self.tasks.clear();
        self.free_tasks.clear();
        self.copies.clear();
        self.resident.fill(false);
        self.free_units = u64::from(self.profile.sms) * UNITS_PER_SM;
        let again = self.now + Nanos(self.profile.reset_ns);
        (self.copy_free, self.ready_again_at) = (again, Some(again));
        self.events.push(GpuEvent::Lost);
    }

    /// Marks a stream as changed by a call.
    fn touch(&mut self, stream: usize) {
        self.next = None;
        self.changed |= bit(stream);
    }

    /// Time of the next internal event.
    pub fn next_event(&self) -> Option<Nanos> {
        if !self.events.is_empty() {
            return Some(self.now);
        }
        if let Some(next) = self.next {
            return (next < Nanos::MAX).then_some(next);
        }
        let streams = self.streams.iter().filter_map(Stream::next_event);
        let copy = self.copies.front().map(|(ends, _)| *ends);
        let fault = self.faults.front().map(|fault| fault.at);
        streams.chain(copy).chain(fault).chain(self.ready_again_at).min()
    }

    /// Advances to `to` and appends the events with their times. To react to an event in time,
    /// advance no further than [`Gpu::next_event`].
    pub fn advance(&mut self, to: Nanos, out: &mut Vec<(Nanos, GpuEvent)>) {
        while self.advance_to_event(to, out) < to {}
    }

    /// Advances to the next event, or to `to`, and returns the time.
    pub fn advance_to_event(&mut self, to: Nanos, out: &mut Vec<(Nanos, GpuEvent)>) -> Nanos {
        let before = out.len();
        loop {
            self.look_ahead();
            let Some(at) = self.next_event().filter(|at| *at <= to) else { break };
            self.next = None;
            self.now = self.now.max(at);
            self.apply_faults();
            self.finish_copies();
            if self.ready_again_at.is_some_and(|at| at <= self.now) {
                self.ready_again_at = None;
                self.events.push(GpuEvent::Ready);
            }
            // Real-time streams have the first numbers: the candidates that may pad their kernels
            // must be known before.
            for stream in (0..self.streams.len()).rev() {
                if self.due[stream] <= self.now {
                    self.changed |= bit(stream);
                    self.step_stream(stream);
                }
            }
            self.place();
            let now = self.now;
            out.extend(self.events.drain(..).map(|event| (now, event)));
            if out.len() > before && now < to {
                return now;
            }
        }
        self.now = self.now.max(to);
        self.now
    }

    /// Computes the time of the next event, unless it is known.
    fn look_ahead(&mut self) {
        if self.next.is_some() {
            return;
        }
        for (index, stream) in self.streams.iter().enumerate() {
            if self.changed & bit(index) != 0 {
                self.due[index] = stream.next_event().unwrap_or(Nanos::MAX);
            }
        }
        self.changed = 0;
        let copy = self.copies.front().map(|(ends, _)| *ends);
        let fault = self.faults.front().map(|fault| fault.at);
        let others = copy.into_iter().chain(fault).chain(self.ready_again_at);
        self.next = self.due.iter().copied().chain(others).min();
    }

    fn finish_copies(&mut self) {
        while let Some((ends, job)) = self.copies.front().copied() {
            if ends > self.now {
                return;
            }
            self.copies.pop_front();
            self.events.push(match job {
                CopyJob::Input(token) => GpuEvent::Copied { token },
                CopyJob::Weights(model) => GpuEvent::Loaded { model },
            });
        }
    }

    /// The preempt mode that the device and the running kernel allow instead of `how`.
    fn possible(&self, stream: usize, how: PreemptMode) -> Option<PreemptMode> {
        let level = self.profile.preemption();
        let finest = match level {
            PreemptionLevel::None => return None,
            PreemptionLevel::BetweenLaunches => PreemptMode::BetweenLaunches,
            PreemptionLevel::TileBoundaries => PreemptMode::TileBoundary,
            PreemptionLevel::InsideTile => PreemptMode::InsideTile,
        };
        let kernel = self.streams[stream].kernel.as_ref();
        // A kernel that must not run twice finishes first.
        if kernel.is_some_and(|kernel| !kernel.idempotent) {
            return Some(PreemptMode::BetweenLaunches);
        }
        Some(match how {
            PreemptMode::Kill if !self.profile.kills => PreemptMode::BetweenLaunches,
            PreemptMode::InsideTile => finest,
            PreemptMode::TileBoundary if level == PreemptionLevel::BetweenLaunches => finest,
            how => how,
        })
    }
}

#[cfg(test)]
mod tests;
