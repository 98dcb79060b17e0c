//! Admission of a request to a node: alone, or as a member of a batch.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use base::Nanos;
use device::{DeviceError, Program, StagedInputs, Task, thread_watch};
use model::Tensor;
use model::config::Class;

use super::announcement::Announcement;
use super::batch_jobs::{Admission, BatchStaging};
use super::preparation::UnpreparedRequest;
use super::span_record::{CopyTimer, bytes_of};
use super::{
    CheckedPadding, Job, ModelEntry, ModelKey, Node, Rejection, Reply, ReplyFn, ReplyTarget,
    Request, RequestHandle, RequestLocation, Shared, Timing,
};
use crate::core::{Event, ModelId};
use crate::spans::CopyKind;

/// A request whose options are resolved, and where its reply goes.
pub(super) struct Submission {
    pub(super) model: ModelKey,
    pub(super) class: Class,
    pub(super) priority: u32,
    pub(super) arrived: Nanos,
    /// When its inputs were staged.
    pub(super) staged: Nanos,
    pub(super) deadline: Nanos,
    /// Bytes of its inputs.
    pub(super) bytes: u64,
    /// Its inputs are being copied.
    pub(super) copy: Option<CopyTimer>,
    pub(super) reply: ReplyFn,
}

/// How requests of a model are padded, and whether some are pending.
struct Lengths {
    padding: Arc<CheckedPadding>,
    others_pending: bool,
}

impl Lengths {
    fn of(entry: &ModelEntry) -> Option<Lengths> {
        let padding = entry.padding.clone()?;
        let (batcher, _) = entry.batching.as_ref()?;
        Some(Lengths { padding, others_pending: batcher.pending() > 0 })
    }
}

impl Submission {
    /// Refuses it without a record: its inputs are wrong, or its node has gone.
    pub(super) fn refuse(self, why: Rejection) -> RequestHandle {
        refuse_at_once(self.arrived, self.reply, why)
    }
}

impl Shared {
    /// Refuses a request that was not admitted, and records it.
    pub(super) fn refuse(&self, submission: Submission, why: Rejection) -> RequestHandle {
        let now = self.clock.now();
        self.lock().record_refusal(now, &submission, &why);
        submission.refuse(why)
    }
}

impl Node {
    /// Admits a request. `reply` is called exactly once, from any thread, also when the request is
    /// refused at once.
    pub fn submit(&self, request: Request, reply: ReplyFn) -> RequestHandle {
        let shared = &self.shared;
        let arrived = shared.clock.now();
        let Request { model, inputs, class, priority, timeout } = request;
        let found = {
            let state = shared.lock();
            let found = state.model(model).filter(|entry| !entry.removed);
            let staging = |entry: &ModelEntry| entry.batching.as_ref().map(|(_, i)| i.clone());
            let fault = state.fault.clone();
            let (draining, lengths) = (state.draining, found.and_then(Lengths::of));
            found.map(|e| (e.program.clone(), e.defaults, staging(e), draining, fault, lengths))
        };
        let Some((program, defaults, staging, draining, fault, lengths)) = found else {
            return refuse_at_once(arrived, reply, Rejection::NoSuchModel);
        };
        let timeout = timeout.or(defaults.timeout);
        let mut submission = Submission {
            model,
            class: class.unwrap_or(defaults.class),
            priority: priority.unwrap_or(defaults.priority),
            arrived,
            staged: arrived,
            deadline: timeout.map_or(Nanos::MAX, |timeout| arrived + timeout),
            bytes: bytes_of(&inputs),
            copy: None,
            reply,
        };
        let class = submission.class;
        if class == Class::BestEffort && !shared.best_effort {
            return shared.refuse(submission, Rejection::RealTimeOnly);
        }
        if let Some(fault) = fault {
            return shared.refuse(submission, Rejection::Device(fault));
        }
        if draining {
            return shared.refuse(submission, Rejection::ShuttingDown);
        }
        let staging = staging.filter(|staging| staging.fits(&inputs));
        let mut is_prepared = program.is_prepared(&inputs);
        let mut inputs = inputs;
        if let Some(Lengths { padding, others_pending }) = lengths.filter(|_| staging.is_some())
            && (others_pending || !is_prepared)
            && let Some(target) = padding.target(&inputs)
        {
            (inputs, submission.reply) = padding.apply(inputs, target, submission.reply);
            is_prepared = program.is_prepared(&inputs);
        }
        let request = UnpreparedRequest { submission, inputs, program, staging, is_prepared };
        if !is_prepared {
            return shared.submit_unprepared(request);
        }
        if request.is_copied_apart() {
            return shared.submit_large(request);
        }
        let UnpreparedRequest { submission, inputs, program, staging, .. } = request;
        shared.submit_prepared(submission, inputs, &program, staging)
    }
}

impl Shared {
    /// Admits a request of sizes that the device is prepared for.
    pub(super) fn submit_prepared(
        &self,
        submission: Submission,
        inputs: Vec<Tensor>,
        program: &Arc<dyn Program>,
        staging: Option<BatchStaging>,
    ) -> RequestHandle {
        let submission = Submission { copy: self.time_copy(submission.bytes), ..submission };
        let model = submission.model;
        let announced = submission.class == Class::RealTime && self.announces_arrivals;
        let mut announcement = Announcement { shared: self, made: false };
        let mut notify = || {
            if announced {
                announcement.make(model);
            }
        };
        // The copy into the device's memory happens on the caller's thread and without the lock.
        match staging {
            Some(staging) => {
                thread_watch::call("stage");
                let sizes = staging.sizes(program.plan(), &inputs);
                let handle = match program.stage(inputs, staging.copy, &mut notify) {
                    Ok(staged) => self.submit_member(program, submission, sizes, staged),
                    Err(err) => self.submit_alone(submission, Err(err), None),
                };
                // The announcement ends when the job of the batch is in the core.
                drop(announcement);
                handle
            }
            None => {
                thread_watch::call("prepare");
                let task = match announced {
                    true => program.prepare_with_notice(inputs, &mut notify),
                    false => program.prepare(inputs),
                };
                self.submit_alone(submission, task, announcement.take())
            }
        }
    }

    /// Admits a request that may share a batch.
    fn submit_member(
        &self,
        program: &Arc<dyn Program>,
        submission: Submission,
        sizes: Vec<(String, usize)>,
        staged: Box<dyn StagedInputs>,
    ) -> RequestHandle {
        let submission = Submission { staged: self.clock.now(), ..submission };
        let model = submission.model;
        let mut state = self.lock();
        if let Some(event) = state.grown(model) {
            self.step(state, event);
            state = self.lock();
        }
        match self.admit(&mut state, submission, sizes, staged) {
            Admission::Member(member) => {
                self.run(state, VecDeque::new());
                let location = RequestLocation::Batcher(model, member);
                RequestHandle { shared: self.own.clone(), location }
            }
            Admission::Refused(submission, why) => {
                drop(state);
                self.refuse(submission, why)
            }
            Admission::Alone(submission, staged) => {
                drop(state);
                self.submit_alone(submission, program.gather(vec![staged]), None)
            }
        }
    }

    /// Admits a request that runs alone. `withdrawn` ends its announcement.
    pub(super) fn submit_alone(
        &self,
        submission: Submission,
        task: Result<Box<dyn Task>, DeviceError>,
        withdrawn: Option<Event>,
    ) -> RequestHandle {
        let shared = self;
        let key = submission.model;
        let prepared = shared.clock.now();
        // The announcement ends also when the request is refused.
        let withdraw = |withdrawn: Option<Event>| {
            withdrawn.into_iter().for_each(|event| shared.handle(event));
        };
        let task = match task {
            Ok(task) => task,
            Err(err) => {
                if let Some(entry) = shared.lock().model_mut(key) {
                    entry.stats.failed += 1;
                }
                withdraw(withdrawn);
                return submission.refuse(Rejection::Device(err));
            }
        };
        let mut state = shared.lock();
        if let Some(event) = state.grown(key) {
            shared.step(state, event);
            state = shared.lock();
        }
        // The device may have faulted, and the model may be gone, since the request arrived.
        let refusal = match &state.fault {
            Some(fault) => Some(Rejection::Device(fault.clone())),
            None => state.model(key).is_none().then_some(Rejection::NoSuchModel),
        };
        if let Some(refusal) = refusal {
            drop(state);
            withdraw(withdrawn);
            return shared.refuse(submission, refusal);
        }
        let full = state.core.pending() + state.batches.members >= shared.max_requests;
        let id = if full { None } else { state.core.next_request_id() };
        let Some(id) = id else {
            if let Some(entry) = state.model_mut(key) {
                entry.stats.rejected += 1;
            }
            drop(state);
            withdraw(withdrawn);
            let why = Rejection::QueueFull { capacity: shared.max_requests };
            return shared.refuse(submission, why);
        };
        let model = ModelId(key.slot);
        let Submission { class, priority, arrived, deadline, copy, reply, .. } = submission;
        let timing = Timing { arrived, prepared, first: true, ..Timing::default() };
        let (number, reply_to) = (state.spans.next_number(), ReplyTarget::Request(reply));
        if let Some(copy) = copy {
            state.record_copy(CopyKind::Stage, (number, key, class), copy, prepared);
        }
        let class_of_job = (class, priority, deadline);
        state.keep(id, Job::new(number, model, class_of_job, Some(task), reply_to, timing));
        let arrival = Event::Arrival { request: id, model, class, priority, deadline };
        shared.run(state, [Some(arrival), withdrawn].into_iter().flatten().collect());
        RequestHandle { shared: self.own.clone(), location: RequestLocation::Core(id) }
    }
}

/// Replies to a request that is not admitted.
pub(crate) fn refuse_at_once(arrived: Nanos, reply: ReplyFn, why: Rejection) -> RequestHandle {
    let timing = Timing { arrived, finished: arrived, ..Timing::default() };
    reply(Reply { result: Err(why), timing });
    RequestHandle { shared: Weak::new(), location: RequestLocation::Ended }
}
