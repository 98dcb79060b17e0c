//! A GPU in virtual time: a plain, deterministic state machine without threads.
//!
//! Streams run kernels in order; a kernel's blocks are placed on multiprocessors in waves, high priority
//! first; kernels that run side by side and together ask for more memory bandwidth than there is slow each other down.
//! Work can be made to leave as finely as the profile says, killed, or held to a number of multiprocessors.
//! Every task carries data, so that a wrong restore shows in its output.

pub mod builtin;
mod fault;
mod profile;
mod stream;
mod task;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use base::Nanos;

pub use self::fault::{Fault, FaultKind};
pub use self::profile::{GpuProfile, KernelProfile, ModelProfile, ProfileSet};
pub use self::stream::StreamWork;
use self::stream::{Group, Head, Kernel, Stream, UNITS_PER_SM};
use self::task::TaskMemory;
pub use self::task::reference_output;
use crate::{PreemptMode, PreemptionLevel};

/// A task's buffers on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TaskId(usize);

/// A run of kernels of one task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Returned with its end.
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

/// What a stream is opened with.
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
    /// A segment left before its end.
    Preempted {
        /// The stream.
        stream: usize,
        /// The segment.
        token: u64,
        /// The first kernel that is not complete.
        step: usize,
        /// Tiles of it that are done, where the device can tell; 0 elsewhere.
        tile: u32,
        /// The last kernel that had been handed to the hardware.
        transmitted: usize,
        /// Time its kernels took.
        busy: Nanos,
    },
    /// A copy to the device is complete.
    Copied {
        /// The number it was asked for under.
        token: u64,
    },
    /// A model's weights are there.
    Loaded {
        /// The model.
        model: usize,
    },
    /// The device fell over; everything on it is gone.
    Lost,
    /// It can be used again, empty.
    Ready,
}

/// A stretch of work, for pictures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The stream.
    pub stream: usize,
    /// The kernel.
    pub step: usize,
    /// Multiprocessors held.
    pub sms: f32,
    /// Beginning.
    pub from: Nanos,
    /// End.
    pub to: Nanos,
    /// Whether it was thrown away.
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
    /// The stream the dispatcher served last.
    served: Option<usize>,
    host_free: Nanos,
    copies: VecDeque<(Nanos, CopyJob)>,
    copy_free: Nanos,
    resident: Vec<bool>,
    faults: VecDeque<Fault>,
    armed: Vec<FaultKind>,
    ready_again_at: Option<Nanos>,
    contended: bool,
    spans: Option<Vec<Span>>,
    events: Vec<GpuEvent>,
    /// When something happens next on each stream, for those not in `changed`.
    due: Vec<Nanos>,
    /// Streams that have changed since they were last looked at, as bits; the last one stands for all further.
    changed: u64,
    /// When something happens next at all; `None` when something has changed since.
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

    /// Keeps every stretch of work from here on.
    pub fn record_spans(&mut self) {
        self.spans = Some(Vec::new());
    }

    /// The stretches kept so far.
    pub fn spans(&self) -> &[Span] {
        self.spans.as_deref().unwrap_or_default()
    }

    /// Its profile.
    pub fn profile(&self) -> &GpuProfile {
        &self.profile
    }

    /// Multiprocessors, in parts, that a stream holds now.
    pub fn held_sms(&self, stream: usize) -> f64 {
        self.streams[stream].held() as f64 / UNITS_PER_SM as f64
    }

    /// Segments enqueued on a stream, the running one included.
    pub fn queued(&self, stream: usize) -> usize {
        self.streams[stream].segments.len()
    }

    /// The kernel a stream is at, if it has been dispatched.
    pub fn current_step(&self, stream: usize) -> Option<usize> {
        self.streams[stream].kernel.as_ref().map(|kernel| kernel.step)
    }

    /// What a stream has used so far.
    pub fn work(&self, stream: usize) -> StreamWork {
        self.streams[stream].work
    }

    /// Bytes of weights on the device, those on their way included.
    pub fn resident_bytes(&self) -> u64 {
        let sizes = self.models.iter().map(|model| model.weight_bytes);
        sizes.zip(&self.resident).filter(|(_, there)| **there).map(|(bytes, _)| bytes).sum()
    }

    /// Buffers for a task of `model` on this input.
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

    /// What a task has computed; an arbitrary value before its last kernel.
    pub fn output(&self, task: TaskId) -> Option<u64> {
        self.tasks.get(task.0)?.as_ref().map(TaskMemory::output)
    }

    /// Appends a segment to a stream; a full stream gives it back.
    pub fn enqueue(&mut self, now: Nanos, stream: usize, segment: Segment) -> Result<(), Segment> {
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

    /// Makes everything on a stream leave, as finely as asked for and as the device can.
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

    /// Lets a stream hold at most `hold` multiprocessors and place new blocks only up to `take`. With an expiry, its
    /// workers begin no tile that would not end by that time, except on so many multiprocessors.
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

    /// Lets a stream run at most `blocks` blocks of kernel `step`, if it is there, on at most `sms` multiprocessors
    /// as part of the kernel that another stream runs: that one is complete only when both are.
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

    /// Copies `bytes` to the device.
    pub fn copy(&mut self, now: Nanos, token: u64, bytes: u64) {
        self.start_copy(now, bytes, CopyJob::Input(token));
    }

    /// Copies a model's weights to the device.
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

    /// Resets the device: everything on it is lost, and it is of use again after a while.
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

    /// A stream is about to change from outside.
    fn touch(&mut self, stream: usize) {
        self.next = None;
        self.changed |= bit(stream);
    }

    /// When something happens next by itself.
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

    /// Moves time to `to` and appends what happened, with its time. To react to an event in time, advance no
    /// further than [`Gpu::next_event`].
    pub fn advance(&mut self, to: Nanos, out: &mut Vec<(Nanos, GpuEvent)>) {
        while self.advance_to_event(to, out) < to {}
    }

    /// Moves time on until something happens that is worth an event, or to `to`, and returns it.
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
            // Streams of real time come first by number: what could pad their kernels is known before they are.
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

    /// Notes when something happens next, unless it is known.
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

    /// What of `how` the device and the running kernel allow.
    fn possible(&self, stream: usize, how: PreemptMode) -> Option<PreemptMode> {
        let level = self.profile.preemption();
        let finest = match level {
            PreemptionLevel::None => return None,
            PreemptionLevel::BetweenLaunches => PreemptMode::BetweenLaunches,
            PreemptionLevel::TileBoundaries => PreemptMode::TileBoundary,
            PreemptionLevel::InsideTile => PreemptMode::InsideTile,
        };
        let kernel = self.streams[stream].kernel.as_ref();
        // A kernel that must not run twice finishes.
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

    /// Kernels behind the running one that the hardware has already.
    fn queued_kernels(&self, stream: usize) -> u64 {
        let state = &self.streams[stream];
        let Some(head) = state.segments.front() else { return 0 };
        let next = head.step + usize::from(state.kernel.is_some());
        let behind = head.segment.steps.end.saturating_sub(next);
        behind.min(self.profile.queue_capacity) as u64
    }

    fn step_stream(&mut self, stream: usize) {
        let now = self.now;
        if self.streams[stream].dispatch_at.is_some_and(|at| at <= now) {
            self.streams[stream].dispatch_at = self.switch_delay(stream).map(|delay| now + delay);
            if self.streams[stream].dispatch_at.is_none() {
                self.dispatch(stream);
            }
        }
        self.end_groups(stream);
        if self.streams[stream].expiry.is_some_and(|(at, _)| at <= now) {
            self.expire(stream);
        }
        if self.streams[stream].abort_at.is_some_and(|at| at <= now) {
            self.streams[stream].abort_at = None;
            self.abort(stream);
        }
        if self.streams[stream].preempted_at.is_some_and(|at| at <= now) {
            self.streams[stream].preempted_at = None;
            self.report_preempted(stream);
        }
    }

    /// How long the dispatcher still needs to come to a stream from another one that is busy.
    fn switch_delay(&mut self, stream: usize) -> Option<Nanos> {
        let [least, most] = self.profile.switch_ns;
        let turned = std::mem::take(&mut self.streams[stream].switching);
        let other = self.served.filter(|other| *other != stream).map(|other| &self.streams[other]);
        let busy = |other: &Stream| other.dispatches() && !other.segments.is_empty();
        if turned || most == 0 || !other.is_some_and(busy) || !self.streams[stream].dispatches() {
            return None;
        }
        self.streams[stream].switching = true;
        let drawn = self.ready_order.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        Some(Nanos(least + drawn % (most - least + 1)))
    }

    /// The next kernel of the head segment becomes ready.
    fn dispatch(&mut self, stream: usize) {
        let slow = self.armed_slowdown();
        let state = &mut self.streams[stream];
        let Some(head) = state.segments.front() else { return };
        let profile = self.models[head.segment.model].kernels[head.step];
        if let Some(task) = &mut self.tasks[head.segment.task.0] {
            task.begin(head.step, head.tile);
        }
        self.ready_order += 1;
        if state.dispatches() {
            self.served = Some(stream);
        }
        let mut kernel = Kernel::new(self.now, &profile, &self.profile, head.tile);
        (kernel.step, kernel.ready) = (head.step, self.ready_order);
        kernel.block_ns *= slow;
        let complete = kernel.placed >= kernel.tiles;
        state.kernel = Some(kernel);
        self.events.push(GpuEvent::StepReady { stream, step: head.step });
        if complete {
            self.kernel_done(stream);
        }
    }

    /// Takes groups off that are complete.
    fn end_groups(&mut self, stream: usize) {
        let now = self.now;
        let Some(kernel) = &mut self.streams[stream].kernel else { return };
        let mut used = 0.0;
        let before = kernel.groups.len();
        while let Some(group) = kernel.pop_complete(now) {
            self.free_units += group.units;
            used += group.units as f64 * (now - group.placed).0 as f64;
            note_span(&mut self.spans, stream, kernel.step, &group, now, false);
        }
        if kernel.groups.len() == before {
            return;
        }
        let complete = kernel.done >= kernel.tiles;
        let drained = kernel.groups.is_empty();
        let state = &mut self.streams[stream];
        state.work.used += used / UNITS_PER_SM as f64;
        if complete {
            self.kernel_done(stream);
        } else if drained && state.preempting == Some(PreemptMode::TileBoundary) {
            let preempted_at = now + self.eviction(stream);
            self.keep_progress(stream);
            self.streams[stream].preempted_at = Some(preempted_at);
        } else if drained && state.granted == Some(0) {
            state.revoke();
            self.release_fused();
        }
    }

    /// A budget shrinks at a time that was known: what would not have ended by now was not begun.
    fn expire(&mut self, stream: usize) {
        let now = self.now;
        let state = &mut self.streams[stream];
        let Some((_, keep)) = state.expiry.take() else { return };
        (state.hold, state.take) = (keep, keep);
        let Some(kernel) = &mut state.kernel else { return };
        let mut used = 0.0;
        while kernel.held > keep
            && let Some((group, finished, kept)) = kernel.pop_unfinished(now, kernel.held - keep)
        {
            self.free_units += group.units;
            kernel.done += finished;
            kernel.placed -= group.tiles - finished;
            used += group.units as f64 * (now - group.placed).0 as f64 * kept;
            note_span(&mut self.spans, stream, kernel.step, &group, now, false);
        }
        state.work.used += used / UNITS_PER_SM as f64;
    }

    fn eviction(&self, stream: usize) -> Nanos {
        Nanos(self.profile.evict_ns * self.queued_kernels(stream))
    }

    /// Writes what a kernel has done so far into its task.
    fn keep_progress(&mut self, stream: usize) {
        let state = &mut self.streams[stream];
        let (Some(head), Some(kernel)) = (state.segments.front_mut(), state.kernel.take()) else {
            return;
        };
        head.tile = kernel.done;
        head.busy += kernel.began.map_or(Nanos::ZERO, |began| self.now - began);
        let tile_ns = kernel.block_ns / f64::from(kernel.tiles_per_block);
        let tile = kernel.units as f64 * tile_ns / UNITS_PER_SM as f64;
        if let Some(task) = &mut self.tasks[head.segment.task.0] {
            let again = task.run(kernel.step, kernel.first_tile, kernel.done, kernel.idempotent);
            state.work.redone += f64::from(again) * tile;
        }
    }

    fn kernel_done(&mut self, stream: usize) {
        self.streams[stream].abort_at = match self.streams[stream].preempting {
            Some(PreemptMode::Kill) => self.streams[stream].abort_at,
            _ => None,
        };
        self.keep_progress(stream);
        let state = &mut self.streams[stream];
        let Some(head) = state.segments.front_mut() else { return };
        if let Some(task) = &mut self.tasks[head.segment.task.0] {
            task.finish(head.step);
        }
        (head.step, head.tile) = (head.step + 1, 0);
        if state.granted.is_some() {
            state.revoke();
            self.next_kernel(stream);
            self.release_fused();
        } else if self.padding_runs() {
            self.streams[stream].fused = true;
        } else {
            self.revoke_grants();
            self.next_kernel(stream);
        }
    }

    fn padding_runs(&self) -> bool {
        self.streams.iter().any(Stream::pads)
    }

    /// What was granted beside a kernel that is complete and has not begun does not begin any more.
    fn revoke_grants(&mut self) {
        self.changed = u64::MAX;
        self.streams.iter_mut().for_each(Stream::revoke);
    }

    fn release_fused(&mut self) {
        self.changed = u64::MAX;
        if self.padding_runs() {
            return;
        }
        for stream in 0..self.streams.len() {
            if std::mem::take(&mut self.streams[stream].fused) {
                self.revoke_grants();
                self.next_kernel(stream);
            }
        }
    }

    /// After a complete kernel: the next one, the end of the segment, or the way out.
    fn next_kernel(&mut self, stream: usize) {
        let gap = Nanos(self.profile.gap_ns);
        let eviction = self.eviction(stream);
        let now = self.now;
        let state = &mut self.streams[stream];
        let Some(head) = state.segments.front() else { return };
        if head.step < head.segment.steps.end {
            match state.preempting {
                None => state.dispatch_at = Some(now + gap),
                Some(PreemptMode::Kill) => {}
                Some(_) => state.preempted_at = Some(now + eviction),
            }
            return;
        }
        let (token, busy) = (head.segment.token, head.busy);
        if self.completion_is_lost(stream) {
            return;
        }
        let state = &mut self.streams[stream];
        state.segments.pop_front();
        self.events.push(GpuEvent::Done { stream, token, busy });
        if state.segments.is_empty() {
            (state.preempting, state.abort_at) = (None, None);
        } else if state.preempting.is_some() {
            state.preempted_at = Some(now);
        } else {
            state.dispatch_at = Some(now + gap);
        }
    }

    /// Blocks leave in the middle: all when the stream leaves, otherwise those above its budget.
    fn abort(&mut self, stream: usize) {
        let now = self.now;
        let eviction = self.eviction(stream);
        let state = &mut self.streams[stream];
        let keep = if state.preempting.is_some() { 0 } else { state.hold };
        let killed = state.preempting == Some(PreemptMode::Kill);
        if let Some(kernel) = &mut state.kernel {
            let (mut used, mut thrown) = (0.0, 0.0);
            while kernel.held > keep
                && let Some((group, finished, kept)) =
                    kernel.pop_unfinished(now, kernel.held - keep)
            {
                let (finished, kept) = if killed { (0, 0.0) } else { (finished, kept) };
                self.free_units += group.units;
                kernel.done += finished;
                kernel.placed -= group.tiles - finished;
                let spent = group.units as f64 * (now - group.placed).0 as f64;
                used += spent;
                thrown += spent * (1.0 - kept);
                note_span(&mut self.spans, stream, kernel.step, &group, now, true);
            }
            state.work.used += used / UNITS_PER_SM as f64;
            state.work.redone += thrown / UNITS_PER_SM as f64;
        }
        match state.preempting {
            Some(PreemptMode::Kill) => {
                self.keep_progress(stream);
                let state = &mut self.streams[stream];
                if let Some(head) = state.segments.front_mut() {
                    head.tile = 0;
                    if let Some(task) = &mut self.tasks[head.segment.task.0] {
                        task.forget();
                    }
                }
                state.preempted_at = Some(now);
            }
            Some(_) => {
                self.keep_progress(stream);
                self.streams[stream].preempted_at = Some(now + eviction);
            }
            None => {}
        }
        self.release_fused();
    }

    /// Everything on the stream has left.
    fn report_preempted(&mut self, stream: usize) {
        if self.completion_is_lost(stream) {
            return;
        }
        let capacity = self.profile.queue_capacity;
        let state = &mut self.streams[stream];
        let killed = state.preempting.take() == Some(PreemptMode::Kill);
        state.kernel = None;
        state.abort_at = None;
        while let Some(head) = state.segments.pop_front() {
            // The queue is filled in bursts: how full it was follows from nothing the host knows.
            let fill = head.segment.token.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ self.now.0;
            let fill = (fill >> 7) as usize % (capacity + 1);
            let last = head.segment.steps.end - 1;
            self.events.push(GpuEvent::Preempted {
                stream,
                token: head.segment.token,
                step: head.step,
                tile: if killed { 0 } else { head.tile },
                transmitted: (head.step + fill).min(last),
                busy: head.busy,
            });
        }
    }

    /// Places blocks that wait, high priority first, then in the order the kernels became ready.
    fn place(&mut self) {
        while self.free_units > 0 {
            let mut first: Option<(usize, u64, (bool, u64))> = None;
            for (index, stream) in self.streams.iter().enumerate() {
                let Some(kernel) = stream.kernel.as_ref().filter(|_| stream.may_place()) else {
                    continue;
                };
                let room = stream.take.saturating_sub(kernel.held).min(self.free_units);
                let order = (!stream.high_priority, kernel.ready);
                if room >= kernel.units && first.is_none_or(|(_, _, before)| order < before) {
                    first = Some((index, room / kernel.units, order));
                }
            }
            let Some((stream, fits, _)) = first else { break };
            self.place_blocks(stream, fits);
        }
        self.update_rates();
    }

    fn place_blocks(&mut self, stream: usize, fits: u64) {
        self.changed |= bit(stream);
        let now = self.now;
        let state = &mut self.streams[stream];
        let (Some(kernel), Some(head)) = (&mut state.kernel, state.segments.front_mut()) else {
            return;
        };
        let before = kernel.placed;
        self.free_units -= kernel.place(now, fits, state.granted.unwrap_or(u32::MAX));
        if let Some(granted) = &mut state.granted {
            *granted -= kernel.placed - before;
        }
        if !head.announced {
            head.announced = true;
            self.events.push(GpuEvent::Started { stream, token: head.segment.token });
        }
    }

    /// Shares the memory bandwidth: when more is asked for than there is, what needs it goes slower.
    fn update_rates(&mut self) {
        let demand: f32 = self.streams.iter().map(Stream::bandwidth).sum();
        let contended = demand > 1.0;
        if !contended && !self.contended {
            return;
        }
        self.contended = contended;
        let excess = f64::from((demand - 1.0).max(0.0));
        for (index, stream) in self.streams.iter_mut().enumerate() {
            let Some(kernel) = &mut stream.kernel else { continue };
            if kernel.set_slow(self.now, 1.0 + f64::from(kernel.memory_share) * excess) {
                self.changed |= bit(index);
            }
        }
    }
}

fn bit(stream: usize) -> u64 {
    1 << stream.min(63)
}

fn note_span(
    spans: &mut Option<Vec<Span>>,
    stream: usize,
    step: usize,
    group: &Group,
    to: Nanos,
    aborted: bool,
) {
    if let Some(spans) = spans {
        let sms = group.units as f32 / UNITS_PER_SM as f32;
        spans.push(Span { stream, step, sms, from: group.placed, to, aborted });
    }
}

#[cfg(test)]
mod tests;
