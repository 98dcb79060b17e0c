//! The way of a request into a node: on its own, or into a batch.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use base::Nanos;
use device::{DeviceError, Program, Task};
use model::config::Class;

use super::announcement::Announcement;
use super::batch_jobs::{Admission, Incoming};
use super::{
    Job, ModelEntry, ModelKey, Node, Rejection, Reply, ReplyFn, ReplyTarget, Request,
    RequestHandle, RequestLocation, Timing,
};
use crate::core::{Event, ModelId};

impl Node {
    /// Takes a request in. `reply` is called exactly once, from any thread, also when the request is
    /// refused at once.
    pub fn submit(&self, request: Request, reply: ReplyFn) -> RequestHandle {
        let shared = &self.shared;
        let arrived = shared.clock.now();
        let found = {
            let state = shared.lock();
            let found = state.model(request.model).filter(|entry| !entry.removed);
            let batch_intake = |entry: &ModelEntry| entry.batching.as_ref().map(|(_, i)| i.clone());
            found.map(|e| (e.program.clone(), e.defaults, batch_intake(e), state.draining))
        };
        let Some((program, defaults, batch_intake, draining)) = found else {
            return refuse_at_once(arrived, reply, Rejection::NoSuchModel);
        };
        let class = request.class.unwrap_or(defaults.class);
        if class == Class::BestEffort && !shared.best_effort {
            return refuse_at_once(arrived, reply, Rejection::RealTimeOnly);
        }
        if draining {
            return refuse_at_once(arrived, reply, Rejection::ShuttingDown);
        }
        let timeout = request.timeout.or(defaults.timeout);
        let asked = Asked {
            model: request.model,
            class,
            priority: request.priority.unwrap_or(defaults.priority),
            arrived,
            deadline: timeout.map_or(Nanos::MAX, |timeout| arrived + timeout),
        };
        let announced = class == Class::RealTime && shared.announces_arrivals;
        let mut announcement = Announcement { shared, made: false };
        let mut soon = || {
            if announced {
                announcement.make(request.model);
            }
        };
        // The copy into the device's own memory happens on the caller's thread and outside the lock.
        match batch_intake.filter(|batch_intake| batch_intake.takes(&request.inputs)) {
            Some(batch_intake) => {
                let staged =
                    Incoming::stage(&*program, &batch_intake, request.inputs, asked, &mut soon);
                // What was announced is taken back when its job is in the core.
                let handle = self.submit_member(&program, asked, staged, reply);
                drop(announcement);
                handle
            }
            None => {
                let task = match announced {
                    true => program.prepare_with_notice(request.inputs, &mut soon),
                    false => program.prepare(request.inputs),
                };
                self.submit_alone(asked, task, announcement.take(), reply)
            }
        }
    }

    /// Takes a request in that may share a batch.
    fn submit_member(
        &self,
        program: &Arc<dyn Program>,
        asked: Asked,
        staged: Result<Incoming, DeviceError>,
        reply: ReplyFn,
    ) -> RequestHandle {
        let incoming = match staged {
            Ok(incoming) => incoming,
            Err(err) => return self.submit_alone(asked, Err(err), None, reply),
        };
        let mut state = self.shared.lock();
        if let Some(event) = state.grown(asked.model) {
            self.shared.step(state, event);
            state = self.shared.lock();
        }
        match self.shared.admit(&mut state, incoming, reply) {
            Admission::Member(member) => {
                self.shared.run(state, VecDeque::new());
                let place = RequestLocation::Batcher(asked.model, member);
                RequestHandle { shared: Arc::downgrade(&self.shared), place }
            }
            Admission::Refused(reply, why) => {
                drop(state);
                refuse_at_once(asked.arrived, reply, why)
            }
            Admission::Alone(reply, staged) => {
                drop(state);
                self.submit_alone(asked, program.gather(vec![staged]), None, reply)
            }
        }
    }

    /// Takes a request in that runs on its own. `withdrawn` takes back what was announced of it.
    pub(super) fn submit_alone(
        &self,
        asked: Asked,
        task: Result<Box<dyn Task>, DeviceError>,
        withdrawn: Option<Event>,
        reply: ReplyFn,
    ) -> RequestHandle {
        let shared = &self.shared;
        let Asked { model: key, class, priority, arrived, deadline } = asked;
        let prepared = shared.clock.now();
        // Told also when the request is refused.
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
                return refuse_at_once(arrived, reply, Rejection::Device(err));
            }
        };
        let mut state = shared.lock();
        if let Some(event) = state.grown(key) {
            shared.step(state, event);
            state = shared.lock();
        }
        if state.model(key).is_none() {
            drop(state);
            withdraw(withdrawn);
            return refuse_at_once(arrived, reply, Rejection::NoSuchModel);
        }
        let full = state.core.pending() + state.batches.members >= shared.max_requests;
        let id = if full { None } else { state.core.next_request_id() };
        let Some(id) = id else {
            if let Some(entry) = state.model_mut(key) {
                entry.stats.rejected += 1;
            }
            drop(state);
            withdraw(withdrawn);
            return refuse_at_once(
                arrived,
                reply,
                Rejection::QueueFull { capacity: shared.max_requests },
            );
        };
        let model = ModelId(key.slot);
        let timing = Timing { arrived, prepared, first: true, ..Timing::default() };
        state.keep(id, Job::new(model, class, Some(task), ReplyTarget::Request(reply), timing));
        let arrival = Event::Arrival { request: id, model, class, priority, deadline };
        shared.run(state, [Some(arrival), withdrawn].into_iter().flatten().collect());
        RequestHandle { shared: Arc::downgrade(shared), place: RequestLocation::Core(id) }
    }
}

/// What the core is told of a request.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub(super) model: ModelKey,
    pub(super) class: Class,
    pub(super) priority: u32,
    pub(super) arrived: Nanos,
    pub(super) deadline: Nanos,
}

/// Answers a request that is not taken in.
pub(crate) fn refuse_at_once(arrived: Nanos, reply: ReplyFn, why: Rejection) -> RequestHandle {
    let timing = Timing { arrived, finished: arrived, ..Timing::default() };
    reply(Reply { result: Err(why), timing });
    RequestHandle { shared: Weak::new(), place: RequestLocation::Ended }
}
