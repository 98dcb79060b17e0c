//! Dispatch: which request starts on which queue, what is preempted for it and what pads it.

use base::Nanos;
use device::PreemptMode;
use model::config::Class;

use super::{Action, Core, Phase, QueueKind, QueueState, RequestId, Running, SimAction};
use crate::policy::padding::{self, PaddedTask, PaddingCandidate, PaddingGrant, PairSlowdowns};
use crate::policy::{CoRun, PaddingRules, RealTimeStart, ResumePoint, Streams};

impl QueueState {
    pub(super) fn new(kind: QueueKind, yields: bool) -> QueueState {
        QueueState {
            kind,
            yields,
            running: None,
            padded: false,
            confined: false,
            hold: u32::MAX,
            take: u32::MAX,
            expiry: None,
            step: None,
            step_since: Nanos::ZERO,
            co_runner: None,
        }
    }

    pub(super) fn forget_budget(&mut self) {
        (self.padded, self.confined) = (false, false);
        (self.hold, self.take, self.expiry) = (u32::MAX, u32::MAX, None);
    }
}

impl Core {
    /// Starts requests on idle queues, then preempts best effort for real time that still waits.
    pub(super) fn dispatch(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        if self.lost {
            return;
        }
        self.start_loads(now, actions);
        if self.options.queues.shared > 0 {
            self.dispatch_shared(now, actions);
        } else {
            self.dispatch_split(now, actions);
        }
        // Requests whose weights were evicted have requested loads.
        self.start_loads(now, actions);
    }

    /// Whether best-effort work waits or runs.
    pub(super) fn has_best_effort_work(&self) -> bool {
        let running =
            |slot: &QueueState| slot.running.is_some_and(|r| r.class == Class::BestEffort);
        self.rules.best_effort && (!self.best_effort.is_empty() || self.queues.iter().any(running))
    }

    fn pop_real_time(&mut self, now: Nanos) -> Option<RequestId> {
        loop {
            let request = self.real_time.pop()?;
            if self.still_resident(now, request) {
                return Some(request);
            }
        }
    }

    fn pop_best_effort(&mut self, now: Nanos) -> Option<RequestId> {
        if !self.rules.best_effort {
            return None;
        }
        loop {
            let request = self.best_effort.pop()?;
            if self.still_resident(now, request) {
                return Some(request);
            }
        }
    }

    /// Whether the weights of a request are resident; if not, the request waits for them.
    fn still_resident(&mut self, now: Nanos, request: RequestId) -> bool {
        let model = self.requests.get(request).map(|state| state.model);
        let resident =
            model.and_then(|model| self.model(model)).is_some_and(|model| model.weights.usable());
        if !resident {
            self.wait_for_weights(now, request);
        }
        resident
    }

    fn dispatch_shared(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        for queue in 0..self.queues.len() {
            if self.queues[queue].running.is_none()
                && let Some((request, entitled_until)) = self.pick(now)
            {
                self.launch(now, queue, request, entitled_until, actions);
            }
        }
        for running in self.queues.iter_mut().filter_map(|slot| slot.running.as_mut()) {
            if running.entitled_until <= now {
                running.entitled_until = Nanos::ZERO;
            }
        }
        let Some(how) = self.rules.preempt else { return };
        let running = self.queues.iter().filter_map(|slot| slot.running);
        let preempting = running.filter(|running| running.preempting).count();
        let mut unserved = self.real_time.len().saturating_sub(preempting);
        for queue in 0..self.queues.len() {
            if unserved == 0 {
                break;
            }
            let may_preempt = self.queues[queue].running.is_some_and(|running| {
                running.class == Class::BestEffort
                    && !running.preempting
                    && running.entitled_until == Nanos::ZERO
            });
            if may_preempt {
                self.preempt(queue, how, actions);
                unserved -= 1;
            }
        }
    }

    /// The next request of a shared queue, and until when it must not be preempted.
    fn pick(&mut self, now: Nanos) -> Option<(RequestId, Nanos)> {
        let slice = self.options.best_effort_slice.0;
        let earned = slice > 0 && self.best_effort_credit >= slice;
        let owed = earned && !self.best_effort.is_empty();
        if !owed && let Some(request) = self.pop_real_time(now) {
            return Some((request, Nanos::ZERO));
        }
        // Without preemption, best effort does not start when a real-time request is being copied.
        if !owed && self.rules.preempt.is_none() && self.real_time_copies > 0 {
            return None;
        }
        let request = self.pop_best_effort(now)?;
        Some((request, if owed { now + Nanos(slice) } else { Nanos::ZERO }))
    }

    fn dispatch_split(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.update_slice(now);
        let held = self.slice_until.is_some();
        let alone = self.rules.co_run != CoRun::All;
        let waits = !self.real_time.is_empty();
        let coming = !held && (waits || self.expected > 0);
        if coming {
            if self.rules.co_run == CoRun::AdmittedPair {
                self.choose_co_runner(now);
            }
            // The preemption precedes the launch, in the same call.
            if alone {
                self.preempt_best_effort(actions);
            }
            if waits
                && (self.rules.start == RealTimeStart::AtOnce || self.best_effort_is_preempted())
            {
                self.preempt_lower_priority(now, actions);
                self.co_runner_for = None;
                self.fill(now, QueueKind::RealTime, actions);
                self.pad_first_kernel(now, actions);
            }
        }
        let running = self.real_time_slot().is_some();
        let active = alone && (running || coming);
        self.awaiting_replies &= !active && !self.best_effort.is_empty();
        if self.awaiting_replies {
            return;
        }
        if !active {
            (self.co_runner, self.co_runner_for) = (None, None);
            self.lift_restrictions(now, actions);
            self.fill(now, QueueKind::BestEffort, actions);
        } else if running && self.co_runner.is_some() {
            self.start_co_runner(now, actions);
        } else if running && self.pads() && self.best_effort_is_preempted() {
            self.fill_padded(now, actions);
        }
    }

    /// Begins an earned best-effort slice while no real-time task runs, and ends one that is over.
    fn update_slice(&mut self, now: Nanos) {
        if self.slice_until.is_some_and(|until| until <= now || self.real_time.is_empty()) {
            self.slice_until = None;
        }
        let slice = self.options.best_effort_slice.0;
        let earned = slice > 0 && self.best_effort_credit >= slice;
        let due = earned && !self.real_time.is_empty() && self.has_best_effort_work();
        if self.slice_until.is_none() && due && self.real_time_slot().is_none() {
            self.best_effort_credit -= slice;
            self.slice_until = Some(now + Nanos(slice));
        }
    }

    pub(super) fn real_time_slot(&self) -> Option<usize> {
        let runs = |slot: &QueueState| slot.kind == QueueKind::RealTime && slot.running.is_some();
        self.queues.iter().position(runs)
    }

    fn pads(&self) -> bool {
        matches!(self.rules.co_run, CoRun::Padding(_))
    }

    /// Whether no best effort runs without a budget.
    fn best_effort_is_preempted(&self) -> bool {
        let free = |slot: &QueueState| {
            slot.kind == QueueKind::BestEffort && slot.running.is_some() && !slot.padded
        };
        !self.queues.iter().any(free)
    }

    fn preempt_best_effort(&mut self, actions: &mut Vec<Action>) {
        let Some(how) = self.rules.preempt else { return };
        let stays = self.co_runner_queue();
        for queue in 0..self.queues.len() {
            let slot = &self.queues[queue];
            let free = slot.kind == QueueKind::BestEffort && slot.running.is_some() && !slot.padded;
            if free && Some(queue) == stays {
                self.confine(queue, true, actions);
            } else if free {
                self.preempt(queue, how, actions);
            }
        }
    }

    /// Chooses the co-runner of the next real-time task, if one can start.
    fn choose_co_runner(&mut self, now: Nanos) {
        let idle = |slot: &QueueState| slot.kind == QueueKind::RealTime && slot.running.is_none();
        if !self.queues.iter().any(idle) || !self.may_run_beside(now) {
            return;
        }
        let Some(real_time) = self.next_real_time() else { return };
        // Already chosen when the task was announced.
        if self.co_runner_for.replace(real_time) == Some(real_time) {
            return;
        }
        let runs = |slot: &QueueState| {
            let running = slot.running.filter(|running| !running.preempting)?;
            (slot.kind == QueueKind::BestEffort).then_some(running.model)
        };
        let running = self.queues.iter().filter_map(runs);
        let candidates = running.chain(self.best_effort.waiting_models());
        self.co_runner = self.co_run.choose(real_time, self.co_runner, candidates);
    }

    /// The queue that runs the co-runner.
    fn co_runner_queue(&self) -> Option<usize> {
        let co_runner = self.co_runner?;
        self.queues.iter().position(|slot| {
            let runs = |running: Running| !running.preempting && running.model == co_runner;
            slot.kind == QueueKind::BestEffort && slot.running.is_some_and(runs)
        })
    }

    /// Starts the next task of the co-runner unless one runs, and records it as co-runner of the
    /// running real-time tasks.
    fn start_co_runner(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        let Some(co_runner) = self.co_runner else { return };
        if self.co_runner_queue().is_none() {
            let idle =
                |slot: &QueueState| slot.kind == QueueKind::BestEffort && slot.running.is_none();
            let Some(queue) = self.queues.iter().position(idle) else { return };
            let Some(request) = self.best_effort.pop_of(co_runner) else { return };
            if !self.still_resident(now, request) {
                return;
            }
            self.confine(queue, true, actions);
            self.launch(now, queue, request, Nanos::ZERO, actions);
        }
        for slot in &mut self.queues {
            if slot.kind == QueueKind::RealTime && slot.running.is_some() {
                slot.co_runner = Some(co_runner);
            }
        }
    }

    /// Whether the next real-time request may start beside the running ones: only with others of
    /// its own model, and up to the concurrency of that model. Under policies with many streams it
    /// always may.
    fn may_run_beside(&mut self, now: Nanos) -> bool {
        if self.rules.streams == Streams::Many || self.real_time_running().next().is_none() {
            return true;
        }
        // Requests that wait for weights are skipped.
        while let Some((_, head)) = self.real_time.peek() {
            let model = self.requests.get(head).map(|state| state.model);
            let known = model.and_then(|model| self.model(model));
            let Some((max_running, usable)) = known.map(|m| (m.max_running, m.weights.usable()))
            else {
                return false;
            };
            if !usable {
                self.real_time.pop();
                self.wait_for_weights(now, head);
                continue;
            }
            let mut running = self.real_time_running();
            return running.clone().count() < max_running
                && running.all(|r| Some(r.model) == model);
        }
        false
    }

    fn fill(&mut self, now: Nanos, kind: QueueKind, actions: &mut Vec<Action>) {
        for queue in 0..self.queues.len() {
            let slot = &self.queues[queue];
            let fits_queue = kind != QueueKind::RealTime || self.fits_queue(queue);
            if slot.kind != kind || slot.running.is_some() || !fits_queue {
                continue;
            }
            let next = match kind {
                QueueKind::RealTime if self.may_run_beside(now) => self.pop_real_time(now),
                QueueKind::RealTime => None,
                _ => self.pop_best_effort(now),
            };
            let Some(request) = next else { return };
            self.launch(now, queue, request, Nanos::ZERO, actions);
        }
    }

    /// Announces the first kernel of the next real-time task to best effort that still pads.
    fn pad_first_kernel(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        if let CoRun::Padding(rules) = self.rules.co_run
            && !rules.fused
        {
            self.pad(now, rules, actions);
        }
    }

    /// Launches best effort without any SM, to wait for the next real-time kernel.
    fn fill_padded(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        for queue in 0..self.queues.len() {
            let slot = &self.queues[queue];
            if slot.kind != QueueKind::BestEffort || slot.running.is_some() {
                continue;
            }
            let Some(request) = self.pop_best_effort(now) else { return };
            self.queues[queue].padded = true;
            self.set_budget(queue, (0, 0), None, actions);
            self.launch(now, queue, request, Nanos::ZERO, actions);
        }
    }

    /// Confines a queue to the SM partition, or ends that.
    fn confine(&mut self, queue: usize, confined: bool, actions: &mut Vec<Action>) {
        if self.options.capabilities.sm_partition && self.queues[queue].confined != confined {
            self.queues[queue].confined = confined;
            actions.push(Action::Confine { queue, confined });
        }
    }

    fn lift_restrictions(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        for queue in 0..self.queues.len() {
            self.confine(queue, false, actions);
            if self.queues[queue].padded {
                self.queues[queue].padded = false;
                self.set_budget(queue, (u32::MAX, u32::MAX), None, actions);
                let step = self.queues[queue].step;
                let Some(running) = &mut self.queues[queue].running else { continue };
                running.since = now;
                // Padding is launched kernel by kernel: its progress is known.
                if let (Some(step), Some(state)) = (step, self.requests.get_mut(running.request))
                    && step > state.progress.step
                {
                    state.progress = ResumePoint { step, tile: 0 };
                }
            }
        }
    }

    fn set_budget(
        &mut self,
        queue: usize,
        (hold, take): (u32, u32),
        expiry: Option<(Nanos, u32)>,
        actions: &mut Vec<Action>,
    ) {
        let slot = &mut self.queues[queue];
        if (slot.hold, slot.take, slot.expiry) != (hold, take, expiry) {
            (slot.hold, slot.take, slot.expiry) = (hold, take, expiry);
            actions.push(Action::Sim(SimAction::SetBudget { queue, hold, take, expiry }));
        }
    }

    pub(super) fn preempt(&mut self, queue: usize, how: PreemptMode, actions: &mut Vec<Action>) {
        if let Some(running) = &mut self.queues[queue].running
            && !running.preempting
        {
            running.preempting = true;
            actions.push(Action::Preempt { queue, how });
        }
    }

    fn launch(
        &mut self,
        now: Nanos,
        queue: usize,
        request: RequestId,
        entitled_until: Nanos,
        actions: &mut Vec<Action>,
    ) {
        let Some(state) = self.requests.get_mut(request) else { return };
        state.phase = Phase::Running { queue };
        let (model, class, progress) = (state.model, state.class, state.progress);
        let running =
            Running { request, model, class, preempting: false, entitled_until, since: now };
        self.queues[queue].running = Some(running);
        self.queues[queue].step = None;
        if let Some(model) = self.model_mut(model) {
            model.waiting -= 1;
            model.weights.touch(now);
            let steps = progress.step..model.steps;
            actions.push(Action::Launch { queue, request, steps, tile: progress.tile });
        }
    }

    /// When the first entitled best-effort run that real time waits for may be preempted.
    pub(super) fn entitlement_end(&self) -> Option<Nanos> {
        if self.real_time.is_empty() {
            return None;
        }
        let running = self.queues.iter().filter_map(|slot| slot.running);
        running
            .filter(|running| !running.preempting && running.entitled_until > Nanos::ZERO)
            .map(|running| running.entitled_until)
            .min()
    }

    /// A kernel can be placed: chooses what pads real time.
    pub(super) fn step_ready(
        &mut self,
        now: Nanos,
        queue: usize,
        step: usize,
        actions: &mut Vec<Action>,
    ) {
        let CoRun::Padding(rules) = self.rules.co_run else { return };
        let Some(slot) = self.queues.get(queue).filter(|slot| slot.running.is_some()) else {
            return;
        };
        let (kind, padded) = (slot.kind, slot.padded);
        if kind == QueueKind::RealTime {
            self.record_slowdown(now, queue);
        }
        let slot = &mut self.queues[queue];
        (slot.step, slot.step_since) = (Some(step), now);
        match kind {
            QueueKind::RealTime => self.pad(now, rules, actions),
            // Fused blocks are chosen once; a budget is updated for every best-effort kernel.
            QueueKind::BestEffort if padded && !rules.fused => self.pad(now, rules, actions),
            _ => {}
        }
    }

    /// Records the time of the previous real-time kernel.
    fn record_slowdown(&mut self, now: Nanos, queue: usize) {
        let slot = &self.queues[queue];
        let padding_models = std::mem::take(&mut self.padding_models);
        let (Some(step), Some(running)) = (slot.step, slot.running) else { return };
        if padding_models == 0 {
            return;
        }
        let taken = now - slot.step_since;
        let Some(kernel) = self.model(running.model).and_then(|m| m.kernels.get(step)) else {
            return;
        };
        let alone =
            kernel.time_on(self.options.padding_device.sms) + self.options.padding_device.gap;
        let ratio = taken.0 as f32 / alone.0.max(1) as f32;
        self.slowdowns.record(running.model.0 as usize, step, padding_models, ratio);
    }

    fn pad(&mut self, now: Nanos, rules: PaddingRules, actions: &mut Vec<Action>) {
        let Some(slot) = self.real_time_slot().map(|queue| &self.queues[queue]) else { return };
        let (step, Some(running)) = (slot.step, slot.running) else { return };
        let Some(kernels) = self.model(running.model).map(|model| model.kernels.clone()) else {
            return;
        };
        let ready = step.is_some();
        let elapsed = now - if ready { slot.step_since } else { running.since };
        let (model, step) = (running.model.0 as usize, step.unwrap_or(0));
        let host = PaddedTask { model, kernels: &kernels, step, ready, elapsed };
        let mut candidates = std::mem::take(&mut self.candidates);
        let mut grants = std::mem::take(&mut self.grants);
        candidates.clear();
        grants.clear();
        candidates
            .extend((0..self.queues.len()).filter_map(|queue| self.candidate(now, queue, ready)));
        padding::select(
            rules,
            self.options.padding_device,
            host,
            &candidates,
            &self.slowdowns,
            &mut grants,
        );
        for (grant, candidate) in grants.iter().zip(&candidates) {
            if grant.hold > 0 && ready {
                self.padding_models |= PairSlowdowns::bit(candidate.model);
            }
            if !rules.fused {
                let expiry = grant.expiry.map(|(after, sms)| (now + after, sms));
                self.set_budget(grant.queue, (grant.hold, grant.take), expiry, actions);
            } else if let Some(step) = self.queues[grant.queue].step.filter(|_| grant.take > 0) {
                let PaddingGrant { queue, take: sms, blocks, .. } = *grant;
                actions.push(Action::Sim(SimAction::Pad { queue, step, sms, blocks }));
            }
        }
        (self.candidates, self.grants) = (candidates, grants);
    }

    fn candidate(&self, now: Nanos, queue: usize, ready: bool) -> Option<PaddingCandidate> {
        let slot = &self.queues[queue];
        let running = slot.running.filter(|running| slot.padded && !running.preempting)?;
        let kernel = *self.model(running.model)?.kernels.get(slot.step?)?;
        let model = running.model.0 as usize;
        // A kernel that just became ready holds nothing, and an expired budget is gone.
        let kept = slot.expiry.filter(|(at, _)| *at <= now).map_or(slot.take, |(_, keep)| keep);
        let taken = if ready && slot.step_since == now { 0 } else { kept };
        Some(PaddingCandidate { queue, model, kernel, taken })
    }
}
