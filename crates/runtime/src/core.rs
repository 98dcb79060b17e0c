//! The decision what runs next, as a pure state machine: events in, actions out.
//!
//! The core knows no device, no thread and no clock. Production, tests and simulation hand it the
//! time and what happened, and carry out what it says. Its rules:
//!
//! - Real-time work goes before best effort: by priority, then earliest deadline, then arrival.
//! - A real-time arrival that finds every queue busy makes a queue that runs best effort leave.
//! - Best effort is shared between models by deficit round robin over the time they use; inside a model
//!   it goes by priority, then arrival.
//! - While real time saturates the device, best effort earns a share of the time and is not made to
//!   leave before it has used up what it earned.
//! - Every request ends exactly once: done, failed, refused, late or cancelled.

mod fair;
mod ready;
mod requests;

use std::ops::Range;

use base::Nanos;
use model::config::Class;

use self::fair::FairQueue;
use self::ready::ReadyHeap;
pub use self::requests::RequestId;
use self::requests::{Phase, RequestState, Requests};

/// A model as the core knows it: a small dense number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u32);

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A model can take requests, at most `queue_capacity` of them waiting.
    ModelAdded {
        /// Its number; not in use.
        model: ModelId,
        /// Launches one request needs.
        steps: usize,
        /// The most requests that may wait.
        queue_capacity: usize,
    },
    /// A model takes no more requests. [`Action::FreeModel`] follows its last one.
    ModelRemoved {
        /// Its number.
        model: ModelId,
    },
    /// A request came. Its number was given out by [`Core::next_request_id`].
    Arrival {
        /// Its number.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// Its class.
        class: Class,
        /// 1 is the highest.
        priority: u32,
        /// When the answer is of no more use.
        deadline: Nanos,
    },
    /// A segment did all its steps.
    SegmentDone {
        /// The queue it ran on.
        queue: usize,
        /// Time it took.
        busy: Nanos,
    },
    /// A segment left early.
    SegmentLeft {
        /// The queue it ran on.
        queue: usize,
        /// The first step that is not done.
        next_step: usize,
        /// Time it took.
        busy: Nanos,
    },
    /// A segment failed; its task is of no further use.
    SegmentFailed {
        /// The queue it ran on.
        queue: usize,
        /// Time it took.
        busy: Nanos,
    },
    /// Nobody waits for the request any more.
    Cancel {
        /// Its number; one that has ended already is ignored.
        request: RequestId,
    },
    /// The time that [`Core::next_timer`] named has come.
    Timer,
    /// No more requests are taken; those under way finish.
    Drain,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Run `steps` of the request's task on an idle queue.
    Launch {
        /// The queue.
        queue: usize,
        /// The request.
        request: RequestId,
        /// The steps.
        steps: Range<usize>,
    },
    /// Make the segment on this queue leave at the next boundary.
    Preempt {
        /// The queue.
        queue: usize,
    },
    /// Answer the request. Its number is free again.
    End {
        /// The request.
        request: RequestId,
        /// How it ended.
        end: End,
    },
    /// Nothing uses the model any more.
    FreeModel {
        /// Its number, free again.
        model: ModelId,
    },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// All steps are done.
    Done,
    /// The device failed.
    Failed,
    /// The deadline passed.
    DeadlineExceeded,
    /// Nobody waited any more.
    Cancelled,
    /// As many requests waited as may.
    QueueFull,
    /// The model is not there.
    NoSuchModel,
    /// The node drains.
    ShuttingDown,
}

/// Settings of the core.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// Queues of the device; each runs one segment at a time.
    pub queues: usize,
    /// Requests that may be under way at once.
    pub max_requests: usize,
    /// Share of time, in percent, that best effort earns while real time runs; at most 90.
    pub best_effort_share_percent: u32,
    /// Longest stretch that best effort may hold a queue against real time.
    pub best_effort_slice: Nanos,
}

impl Default for CoreOptions {
    fn default() -> Self {
        CoreOptions {
            queues: 1,
            max_requests: 65_536,
            best_effort_share_percent: 0,
            best_effort_slice: Nanos::from_millis(10),
        }
    }
}

#[derive(Clone, Debug)]
struct ModelState {
    steps: usize,
    waiting: usize,
    under_way: usize,
    queue_capacity: usize,
    removed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    request: RequestId,
    class: Class,
    leaving: bool,
    /// Until then real time does not make it leave; zero when it may.
    entitled_until: Nanos,
}

/// The state machine.
#[derive(Debug)]
pub struct Core {
    options: CoreOptions,
    models: Vec<Option<ModelState>>,
    requests: Requests,
    real_time: ReadyHeap,
    best_effort: FairQueue,
    deadlines: ReadyHeap,
    queues: Vec<Option<Running>>,
    /// Time best effort has earned and not yet used, in nanoseconds.
    best_effort_credit: u64,
    draining: bool,
}

impl Core {
    /// A core with nothing to do.
    pub fn new(options: CoreOptions) -> Core {
        Core {
            models: Vec::new(),
            requests: Requests::new(options.max_requests),
            real_time: ReadyHeap::default(),
            best_effort: FairQueue::default(),
            deadlines: ReadyHeap::default(),
            queues: vec![None; options.queues.max(1)],
            best_effort_credit: 0,
            draining: false,
            options,
        }
    }

    /// Numbers a new request, or `None` when as many are under way as may.
    pub fn next_request_id(&mut self) -> Option<RequestId> {
        self.requests.reserve()
    }

    /// When [`Event::Timer`] is due, if ever.
    pub fn next_timer(&self) -> Option<Nanos> {
        let deadline = self.deadlines.peek().map(|(key, _)| Nanos(key.1));
        let slice_end = self.slice_end();
        match (deadline, slice_end) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// How many requests are under way.
    pub fn under_way(&self) -> usize {
        self.requests.len()
    }

    /// Requests of `model` that wait, and all that are under way.
    pub fn load_of(&self, model: ModelId) -> (usize, usize) {
        self.model(model).map_or((0, 0), |state| (state.waiting, state.under_way))
    }

    /// Takes `event` in at time `now` and appends what is to be done.
    pub fn step(&mut self, now: Nanos, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::ModelAdded { model, steps, queue_capacity } => {
                self.add_model(model, steps, queue_capacity);
            }
            Event::ModelRemoved { model } => self.remove_model(model, actions),
            Event::Arrival { request, model, class, priority, deadline } => {
                let state = RequestState {
                    model,
                    class,
                    priority,
                    deadline,
                    next_step: 0,
                    phase: Phase::Waiting,
                };
                self.arrive(now, request, state, actions);
            }
            Event::SegmentDone { queue, busy } => self.segment_done(now, queue, busy, actions),
            Event::SegmentLeft { queue, next_step, busy } => {
                self.segment_left(now, queue, next_step, busy, actions);
            }
            Event::SegmentFailed { queue, busy } => {
                if let Some(running) = self.release_queue(queue, busy) {
                    self.end(running.request, End::Failed, actions);
                }
            }
            Event::Cancel { request } => self.give_up(request, End::Cancelled, actions),
            Event::Timer => self.expire(now, actions),
            Event::Drain => self.draining = true,
        }
        self.dispatch(now, actions);
    }

    fn model(&self, model: ModelId) -> Option<&ModelState> {
        self.models.get(model.0 as usize)?.as_ref()
    }

    fn model_mut(&mut self, model: ModelId) -> Option<&mut ModelState> {
        self.models.get_mut(model.0 as usize)?.as_mut()
    }

    fn add_model(&mut self, model: ModelId, steps: usize, queue_capacity: usize) {
        let index = model.0 as usize;
        if index >= self.models.len() {
            self.models.resize(index + 1, None);
        }
        let fresh = ModelState { steps, waiting: 0, under_way: 0, queue_capacity, removed: false };
        self.models[index] = Some(fresh);
        self.best_effort.ensure(model);
    }

    fn remove_model(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        if let Some(state) = self.model_mut(model) {
            state.removed = true;
            self.free_if_unused(model, actions);
        }
    }

    fn free_if_unused(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        if self.model(model).is_some_and(|state| state.removed && state.under_way == 0) {
            self.models[model.0 as usize] = None;
            actions.push(Action::FreeModel { model });
        }
    }

    fn arrive(
        &mut self,
        now: Nanos,
        request: RequestId,
        state: RequestState,
        actions: &mut Vec<Action>,
    ) {
        let refusal = if self.draining {
            Some(End::ShuttingDown)
        } else {
            match self.model(state.model) {
                None => Some(End::NoSuchModel),
                Some(model) if model.removed => Some(End::NoSuchModel),
                Some(model) if model.waiting >= model.queue_capacity => Some(End::QueueFull),
                Some(_) if state.deadline <= now => Some(End::DeadlineExceeded),
                Some(_) => None,
            }
        };
        if let Some(end) = refusal {
            self.requests.release(request);
            actions.push(Action::End { request, end });
            return;
        }
        if state.deadline < Nanos::MAX {
            self.deadlines.push((0, state.deadline.0, request.order()), request);
        }
        if let Some(model) = self.model_mut(state.model) {
            model.under_way += 1;
        }
        self.requests.insert(request, state);
        self.enqueue(request);
    }

    /// Puts a waiting request into the queue of its class.
    fn enqueue(&mut self, request: RequestId) {
        let Some(state) = self.requests.get_mut(request) else { return };
        state.phase = Phase::Waiting;
        let (model, class) = (state.model, state.class);
        let (priority, deadline) = (state.priority, state.deadline.0);
        match class {
            Class::RealTime => self.real_time.push((priority, deadline, request.order()), request),
            Class::BestEffort => {
                self.best_effort.push(model, (priority, 0, request.order()), request);
            }
        }
        if let Some(model) = self.model_mut(model) {
            model.waiting += 1;
        }
    }

    /// Takes a waiting request out of the queue of its class.
    fn dequeue(&mut self, request: RequestId) {
        let Some(state) = self.requests.get(request) else { return };
        let (model, class) = (state.model, state.class);
        match class {
            Class::RealTime => self.real_time.remove(request),
            Class::BestEffort => self.best_effort.remove(model, request),
        }
        if let Some(model) = self.model_mut(model) {
            model.waiting -= 1;
        }
    }

    /// Frees a queue and books the time its segment took.
    fn release_queue(&mut self, queue: usize, busy: Nanos) -> Option<Running> {
        let running = self.queues.get_mut(queue)?.take()?;
        match running.class {
            Class::RealTime => {
                let share = u64::from(self.options.best_effort_share_percent.min(90));
                // Of every `100 - share` parts of real time, best effort earns `share`; what it
                // could have used long ago is no claim on the future.
                let limit = self.options.best_effort_slice.0.saturating_mul(2);
                let earned = busy.0.saturating_mul(share) / (100 - share);
                if !self.best_effort.is_empty() {
                    self.best_effort_credit = (self.best_effort_credit + earned).min(limit);
                }
            }
            Class::BestEffort => {
                self.best_effort_credit = self.best_effort_credit.saturating_sub(busy.0);
                if let Some(state) = self.requests.get(running.request) {
                    self.best_effort.charge(state.model, busy);
                }
            }
        }
        Some(running)
    }

    fn segment_done(&mut self, now: Nanos, queue: usize, busy: Nanos, actions: &mut Vec<Action>) {
        let Some(running) = self.release_queue(queue, busy) else { return };
        let end = match self.requests.get(running.request) {
            None => return,
            Some(state) => match state.phase {
                Phase::GivenUp(end) => end,
                _ if state.deadline <= now => End::DeadlineExceeded,
                _ => End::Done,
            },
        };
        self.end(running.request, end, actions);
    }

    fn segment_left(
        &mut self,
        now: Nanos,
        queue: usize,
        next_step: usize,
        busy: Nanos,
        actions: &mut Vec<Action>,
    ) {
        let Some(running) = self.release_queue(queue, busy) else { return };
        let Some(state) = self.requests.get_mut(running.request) else { return };
        state.next_step = next_step;
        match state.phase {
            Phase::GivenUp(end) => self.end(running.request, end, actions),
            _ if state.deadline <= now => {
                self.end(running.request, End::DeadlineExceeded, actions);
            }
            _ => self.enqueue(running.request),
        }
    }

    /// Ends a request that waits, or marks one that runs so that it ends when it leaves.
    fn give_up(&mut self, request: RequestId, end: End, actions: &mut Vec<Action>) {
        match self.requests.get(request).map(|state| state.phase) {
            None | Some(Phase::GivenUp(_)) => {}
            Some(Phase::Waiting) => {
                self.dequeue(request);
                self.end(request, end, actions);
            }
            Some(Phase::Running { queue }) => {
                if let Some(state) = self.requests.get_mut(request) {
                    state.phase = Phase::GivenUp(end);
                }
                self.preempt(queue, actions);
            }
        }
    }

    fn end(&mut self, request: RequestId, end: End, actions: &mut Vec<Action>) {
        let Some(state) = self.requests.remove(request) else { return };
        self.deadlines.remove(request);
        actions.push(Action::End { request, end });
        if let Some(model) = self.model_mut(state.model) {
            model.under_way -= 1;
        }
        self.free_if_unused(state.model, actions);
    }

    fn preempt(&mut self, queue: usize, actions: &mut Vec<Action>) {
        if let Some(running) = &mut self.queues[queue]
            && !running.leaving
        {
            running.leaving = true;
            actions.push(Action::Preempt { queue });
        }
    }

    /// Ends what is late.
    fn expire(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        while let Some(((_, deadline, _), request)) = self.deadlines.peek() {
            if deadline > now.0 {
                break;
            }
            self.deadlines.remove(request);
            self.give_up(request, End::DeadlineExceeded, actions);
        }
    }

    /// Fills idle queues, then makes best effort leave for real time that still waits.
    fn dispatch(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        for queue in 0..self.queues.len() {
            if self.queues[queue].is_none()
                && let Some((request, entitled_until)) = self.pick(now)
            {
                self.launch(queue, request, entitled_until, actions);
            }
        }
        for running in self.queues.iter_mut().flatten() {
            if running.entitled_until <= now {
                running.entitled_until = Nanos::ZERO;
            }
        }
        let leaving = self.queues.iter().flatten().filter(|running| running.leaving).count();
        let mut unserved = self.real_time.len().saturating_sub(leaving);
        for queue in 0..self.queues.len() {
            if unserved == 0 {
                break;
            }
            let may_leave = self.queues[queue].is_some_and(|running| {
                running.class == Class::BestEffort
                    && !running.leaving
                    && running.entitled_until == Nanos::ZERO
            });
            if may_leave {
                self.preempt(queue, actions);
                unserved -= 1;
            }
        }
    }

    /// The next request to run, and until when real time may not make it leave.
    fn pick(&mut self, now: Nanos) -> Option<(RequestId, Nanos)> {
        let slice = self.options.best_effort_slice.0;
        let earned = slice > 0 && self.best_effort_credit >= slice;
        let owed = earned && !self.best_effort.is_empty();
        if !owed && let Some(request) = self.real_time.pop() {
            return Some((request, Nanos::ZERO));
        }
        let request = self.best_effort.pop()?;
        Some((request, if owed { now + Nanos(slice) } else { Nanos::ZERO }))
    }

    fn launch(
        &mut self,
        queue: usize,
        request: RequestId,
        entitled_until: Nanos,
        actions: &mut Vec<Action>,
    ) {
        let Some(state) = self.requests.get_mut(request) else { return };
        state.phase = Phase::Running { queue };
        let (model, class, next_step) = (state.model, state.class, state.next_step);
        let running = Running { request, class, leaving: false, entitled_until };
        self.queues[queue] = Some(running);
        if let Some(model) = self.model_mut(model) {
            model.waiting -= 1;
            let steps = next_step..model.steps;
            actions.push(Action::Launch { queue, request, steps });
        }
    }

    /// When the first entitled best-effort stretch ends that real time waits for.
    fn slice_end(&self) -> Option<Nanos> {
        if self.real_time.is_empty() {
            return None;
        }
        let running = self.queues.iter().flatten();
        running
            .filter(|running| !running.leaving && running.entitled_until > Nanos::ZERO)
            .map(|running| running.entitled_until)
            .min()
    }
}

#[cfg(test)]
mod tests;
