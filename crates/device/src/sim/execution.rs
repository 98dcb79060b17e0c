//! How kernels run on the simulated GPU: dispatch, placement of blocks, preemption and rates.

use base::Nanos;

use super::stream::{Group, Kernel, Stream, UNITS_PER_SM};
use super::{Gpu, GpuEvent, WorkSpan};
use crate::PreemptMode;

impl Gpu {
    /// Kernels behind the running one that the hardware has queued.
    pub(super) fn queued_kernels(&self, stream: usize) -> u64 {
        let state = &self.streams[stream];
        let Some(head) = state.segments.front() else { return 0 };
        let next = head.step + usize::from(state.kernel.is_some());
        let behind = head.segment.steps.end.saturating_sub(next);
        behind.min(self.profile.queue_capacity) as u64
    }

    pub(super) fn step_stream(&mut self, stream: usize) {
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

    /// Remaining time of the dispatcher to switch to a stream from another busy one.
    pub(super) fn switch_delay(&mut self, stream: usize) -> Option<Nanos> {
        let [min, max] = self.profile.switch_ns;
        let switched = std::mem::take(&mut self.streams[stream].switching);
        let other = self.served.filter(|other| *other != stream).map(|other| &self.streams[other]);
        let busy = |other: &Stream| other.dispatches() && !other.segments.is_empty();
        if switched || max == 0 || !other.is_some_and(busy) || !self.streams[stream].dispatches() {
            return None;
        }
        self.streams[stream].switching = true;
        let drawn = self.ready_order.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        Some(Nanos(min + drawn % (max - min + 1)))
    }

    /// The next kernel of the head segment becomes ready.
    pub(super) fn dispatch(&mut self, stream: usize) {
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

    /// Removes complete groups.
    pub(super) fn end_groups(&mut self, stream: usize) {
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

    /// A budget expires: tiles that would not have ended by now were not begun.
    pub(super) fn expire(&mut self, stream: usize) {
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

    pub(super) fn eviction(&self, stream: usize) -> Nanos {
        Nanos(self.profile.evict_ns * self.queued_kernels(stream))
    }

    /// Stores the progress of a kernel in its task.
    pub(super) fn keep_progress(&mut self, stream: usize) {
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

    pub(super) fn kernel_done(&mut self, stream: usize) {
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

    pub(super) fn padding_runs(&self) -> bool {
        self.streams.iter().any(Stream::pads)
    }

    /// Grants beside a complete kernel end, where they have not begun.
    pub(super) fn revoke_grants(&mut self) {
        self.changed = u64::MAX;
        self.streams.iter_mut().for_each(Stream::revoke);
    }

    pub(super) fn release_fused(&mut self) {
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

    /// After a complete kernel: starts the next one, ends the segment or reports its preemption.
    pub(super) fn next_kernel(&mut self, stream: usize) {
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

    /// Preempts blocks inside their tiles: all when the stream is preempted, otherwise those above
    /// its budget.
    pub(super) fn abort(&mut self, stream: usize) {
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

    /// Everything on the stream is preempted.
    pub(super) fn report_preempted(&mut self, stream: usize) {
        if self.completion_is_lost(stream) {
            return;
        }
        let capacity = self.profile.queue_capacity;
        let state = &mut self.streams[stream];
        let killed = state.preempting.take() == Some(PreemptMode::Kill);
        state.kernel = None;
        state.abort_at = None;
        while let Some(head) = state.segments.pop_front() {
            // The queue is filled in bursts: the host cannot know how full it was.
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

    /// Places waiting blocks: high priority first, then in the order in which kernels became ready.
    pub(super) fn place(&mut self) {
        while self.free_units > 0 {
            let mut first: Option<(usize, u64, (bool, u64))> = None;
            for (index, stream) in self.streams.iter().enumerate() {
                let Some(kernel) = stream.kernel.as_ref().filter(|_| stream.may_place()) else {
                    continue;
                };
                let units = stream.take.saturating_sub(kernel.held).min(self.free_units);
                let order = (!stream.high_priority, kernel.ready);
                if units >= kernel.units && first.is_none_or(|(_, _, before)| order < before) {
                    first = Some((index, units / kernel.units, order));
                }
            }
            let Some((stream, fits, _)) = first else { break };
            self.place_blocks(stream, fits);
        }
        self.update_rates();
    }

    pub(super) fn place_blocks(&mut self, stream: usize, fits: u64) {
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

    /// Shares the memory bandwidth: above its capacity, kernels slow down in proportion to their
    /// use.
    pub(super) fn update_rates(&mut self) {
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

pub(super) fn bit(stream: usize) -> u64 {
    1 << stream.min(63)
}

fn note_span(
    spans: &mut Option<Vec<WorkSpan>>,
    stream: usize,
    step: usize,
    group: &Group,
    to: Nanos,
    aborted: bool,
) {
    if let Some(spans) = spans {
        let sms = group.units as f32 / UNITS_PER_SM as f32;
        spans.push(WorkSpan { stream, step, sms, from: group.placed, to, aborted });
    }
}
