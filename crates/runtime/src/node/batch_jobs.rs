//! Batches in a node: from requests to jobs of the core and back.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use base::Nanos;
use device::batch::{other_sizes, rows_of, split};
use device::{DeviceError, PreemptionLevel, Program, StagedInputs};
use model::config::{BatchingPolicy, CopyTime, ModelConfig};
use model::rows::{batch_symbol, mixing_step};
use model::{LaunchPlan, Tensor};

use super::batcher::{BatchEnd, Batcher, GroupKey, Member, MemberId, Refusal, Rules, SlotRequest};
use super::completion::rejected;
use super::submission::Submission;
use super::{
    DueReply, Job, ModelKey, Rejection, Reply, ReplyResult, ReplyTarget, Shared, State, Timing,
};
use crate::core::{End, Event, ModelId, RequestId};

/// Preparations of a device that wait to be done.
const MAX_PREPARATIONS: usize = 256;

/// A request that waits for a batch or rides on one.
pub(super) struct BatchMember {
    staged: Option<Box<dyn StagedInputs>>,
    submission: Submission,
}

pub(super) type ModelBatcher = Batcher<BatchMember>;

/// What a caller's thread needs to know of a batched model.
#[derive(Clone)]
pub(super) struct BatchIntake {
    symbol: Arc<str>,
    pub(super) copy: CopyTime,
    max_rows: usize,
    /// What the device is to be prepared for.
    batches: Arc<[usize]>,
}

/// Batches of all models.
#[derive(Default)]
pub(super) struct Batches {
    /// Models whose batcher is to be asked.
    pub(super) due: Vec<ModelId>,
    /// When batchers want to be asked.
    timers: BTreeSet<(Nanos, ModelId)>,
    /// Requests of batchers that are not answered.
    pub(super) members: usize,
}

/// Batches the device is to be prepared for.
struct Preparation {
    model: ModelKey,
    /// Not kept by waiting here: a model that is removed meanwhile gives its memory back.
    program: Weak<dyn Program>,
    sizes: Vec<(String, usize)>,
    batches: Vec<usize>,
}

/// Prepares devices beside the request's way.
pub(super) struct Preparer {
    sender: SyncSender<Preparation>,
}

impl Preparer {
    pub(super) fn start(shared: Weak<Shared>) -> std::io::Result<Preparer> {
        let (sender, receiver) = sync_channel::<Preparation>(MAX_PREPARATIONS);
        std::thread::Builder::new().name("node-batches".to_string()).spawn(move || {
            while let Ok(wanted) = receiver.recv() {
                let Some(program) = wanted.program.upgrade() else { continue };
                if let Err(err) = program.prepare_batches(&wanted.sizes, &wanted.batches) {
                    tracing::warn!(batches = ?wanted.batches, "batches stay smaller: {err}");
                }
                let Some(shared) = shared.upgrade() else { return };
                shared.prepared(&wanted, &*program);
            }
        })?;
        Ok(Preparer { sender })
    }

    fn ask(&self, preparation: Preparation) {
        if self.sender.try_send(preparation).is_err() {
            tracing::warn!("too many models are being prepared: batches of one stay small");
        }
    }
}

/// A model's batcher, when its requests can be put together and its settings do not forbid it.
pub(super) fn batcher_of(
    plan: &LaunchPlan,
    config: &ModelConfig,
    level: PreemptionLevel,
) -> Option<(ModelBatcher, BatchIntake)> {
    let rules = Rules::of(config, level)?;
    let asked = config.batching.policy != BatchingPolicy::Auto;
    let Some(symbol) = batch_symbol(plan) else {
        if asked {
            tracing::warn!(
                "not batched: inputs and outputs do not all begin with the same open dimension"
            );
        }
        return None;
    };
    // Whoever sets a policy says that rows are independent, as with every server that batches. Otherwise it must be seen.
    if !asked && let Some(step) = mixing_step(plan, symbol) {
        tracing::info!(
            step = step.name,
            op = step.op.name(),
            "not batched: rows may depend on each other here; if they do not, set batching.policy"
        );
        return None;
    }
    let (symbol, copy) = (symbol.into(), rules.copy);
    let (max_rows, batches) = (rules.batch_max(), rules.batches().into());
    let batch_intake = BatchIntake { symbol, copy, max_rows, batches };
    Some((Batcher::new(rules, config.queue_capacity), batch_intake))
}

impl BatchIntake {
    /// Whether inputs can be part of a batch.
    pub(super) fn takes(&self, inputs: &[Tensor]) -> bool {
        (1..=self.max_rows).contains(&rows_of(inputs))
    }

    /// Sizes of the symbolic dimensions of `inputs` other than the batch.
    pub(super) fn sizes(&self, plan: &LaunchPlan, inputs: &[Tensor]) -> Vec<(String, usize)> {
        other_sizes(plan, &self.symbol, inputs)
    }
}

/// What became of a request that wanted to be part of a batch.
pub(super) enum Admission {
    Member(MemberId),
    Refused(Submission, Rejection),
    /// It can be in no batch, but on its own.
    Alone(Submission, Box<dyn StagedInputs>),
}

impl Shared {
    /// Puts a request into its model's batcher.
    pub(super) fn admit(
        &self,
        state: &mut State,
        submission: Submission,
        sizes: Vec<(String, usize)>,
        staged: Box<dyn StagedInputs>,
    ) -> Admission {
        let Submission { model, class, priority, arrived, deadline, .. } = submission;
        let busy = state.core.pending() + state.batches.members >= self.max_requests;
        let Some(entry) = state.model_mut(model) else {
            return Admission::Refused(submission, Rejection::NoSuchModel);
        };
        let capacity = if busy { self.max_requests } else { entry.queue_capacity };
        let Some((batcher, batch_intake)) = entry.batching.as_mut().filter(|_| !busy) else {
            entry.stats.rejected += 1;
            return Admission::Refused(submission, Rejection::QueueFull { capacity });
        };
        let (program, preparer) = (&entry.program, self.preparer.get());
        let key = GroupKey { class, priority, sizes: sizes.clone() };
        let wanted = &batch_intake.batches;
        let ready = || {
            let ready = program.prepared_batches(&sizes)?;
            if let Some(preparer) = preparer.filter(|_| wanted.iter().any(|b| !ready.contains(b))) {
                let (program, sizes, batches) =
                    (Arc::downgrade(program), sizes.clone(), wanted.to_vec());
                preparer.ask(Preparation { model, program, sizes, batches });
            }
            Some(ready)
        };
        let payload = BatchMember { staged: Some(staged), submission };
        let rows = payload.staged.as_ref().map_or(1, |staged| staged.rows());
        match batcher.arrive(arrived, key, (rows, deadline), payload, ready) {
            Ok(id) => {
                state.batches.members += 1;
                state.batches.due.push(ModelId(model.slot));
                Admission::Member(id)
            }
            Err((Refusal::Alone, BatchMember { staged: Some(staged), submission })) => {
                Admission::Alone(submission, staged)
            }
            Err((_, BatchMember { submission, .. })) => {
                entry.stats.rejected += 1;
                Admission::Refused(submission, Rejection::QueueFull { capacity })
            }
        }
    }

    /// Prepares a new model for its batches, as far as its sizes are known.
    pub(super) fn prepare_batches(
        &self,
        model: ModelKey,
        program: &Arc<dyn Program>,
        batches: Vec<usize>,
    ) {
        if let (Some(_), Some(preparer)) = (program.prepared_batches(&[]), self.preparer.get()) {
            preparer.ask(Preparation {
                model,
                program: Arc::downgrade(program),
                sizes: Vec::new(),
                batches,
            });
        }
    }

    fn prepared(&self, done: &Preparation, program: &dyn Program) {
        let ready = program.prepared_batches(&done.sizes);
        let mut state = self.lock();
        let Some(entry) = state.model_mut(done.model) else { return };
        if let Some((batcher, _)) = &mut entry.batching {
            batcher.set_ready(&done.sizes, ready.as_deref());
            state.batches.due.push(ModelId(done.model.slot));
            self.run(state, VecDeque::new());
        }
    }

    /// Gives up a request of a batch.
    pub(super) fn cancel_member(&self, model: ModelKey, member: MemberId) {
        let now = self.clock.now();
        let mut state = self.lock();
        let mut idle = Vec::new();
        let batcher = state.model_mut(model).and_then(|entry| entry.batching.as_mut());
        let Some(gone) = batcher.and_then(|(batcher, _)| batcher.take(member, &mut idle)) else {
            return;
        };
        let id = ModelId(model.slot);
        state.batches.due.push(id);
        let due = state.answer(now, id, gone, Timing::default(), Err(Rejection::Cancelled));
        self.unsent.fetch_add(1, Ordering::SeqCst);
        let events = idle.into_iter().map(|request| Event::Cancel { request }).collect();
        self.run(state, events);
        self.send(due.0, due.1);
    }

    /// Asks the batchers that something happened to, and puts what they want into `events`.
    pub(super) fn update_batchers(
        &self,
        state: &mut State,
        events: &mut VecDeque<Event>,
        due: &mut Vec<DueReply>,
    ) {
        let now = self.clock.now();
        while let Some((at, model)) = state.batches.timers.first().copied() {
            if at > now {
                break;
            }
            state.batches.timers.pop_first();
            if let Some(entry) = &mut state.models[model.0 as usize] {
                entry.batch_timer = None;
            }
            state.batches.due.push(model);
        }
        while let Some(model) = state.batches.due.pop() {
            self.update_batcher(state, now, model, events, due);
        }
    }

    fn update_batcher(
        &self,
        state: &mut State,
        now: Nanos,
        model: ModelId,
        events: &mut VecDeque<Event>,
        due: &mut Vec<DueReply>,
    ) {
        let Some(Some(entry)) = state.models.get_mut(model.0 as usize) else { return };
        let Some((batcher, _)) = &mut entry.batching else { return };
        let (mut late, mut idle) = (Vec::new(), Vec::new());
        batcher.expire(now, &mut late, &mut idle);
        events.extend(idle.into_iter().map(|request| Event::Cancel { request }));
        // Each group asks for one batch at a time: the next one when that has started.
        let wanted: Vec<SlotRequest> =
            std::iter::from_fn(|| batcher.decide(now, &mut late)).collect();
        let timer = batcher.next_timer();
        if timer != entry.batch_timer {
            if let Some(old) = entry.batch_timer {
                state.batches.timers.remove(&(old, model));
            }
            entry.batch_timer = timer;
            state.batches.timers.extend(timer.map(|at| (at, model)));
        }
        for member in late {
            due.push(state.answer(
                now,
                model,
                member,
                Timing::default(),
                Err(Rejection::DeadlineExceeded),
            ));
        }
        for wanted in wanted {
            self.open_slot(state, model, wanted, events);
        }
        state.retire(model, events);
    }

    fn open_slot(
        &self,
        state: &mut State,
        model: ModelId,
        wanted: SlotRequest,
        events: &mut VecDeque<Event>,
    ) {
        let SlotRequest { group, class, priority, deadline } = wanted;
        let job = state.core.next_request_id();
        if let Some(entry) = &mut state.models[model.0 as usize]
            && let Some((batcher, _)) = &mut entry.batching
        {
            batcher.asked(group, job);
        }
        let Some(request) = job else { return };
        let timing = Timing { arrived: self.clock.now(), ..Timing::default() };
        state.keep(request, Job::new(model, class, None, ReplyTarget::Members, timing));
        events.push_back(Event::Arrival { request, model, class, priority, deadline });
    }

    /// Makes the task of a batch that starts.
    pub(super) fn form_batch(
        &self,
        state: &mut State,
        now: Nanos,
        request: RequestId,
        events: &mut VecDeque<Event>,
    ) -> Result<(), DeviceError> {
        let Some(job) = state.job(request) else { return Ok(()) };
        let model = job.model;
        if job.task.is_some() || !matches!(job.reply_to, ReplyTarget::Members) || job.launched {
            return Ok(());
        }
        state.batches.due.push(model);
        let Some(entry) = &mut state.models[model.0 as usize] else { return Ok(()) };
        let Some((batcher, _)) = &mut entry.batching else { return Ok(()) };
        let formed = batcher.start(now, request);
        if formed.rows == 0 {
            return Err(DeviceError::BadPlan("a batch of nobody".to_string()));
        }
        let (rows, deadline) = (formed.rows, formed.deadline);
        events.push_back(Event::BatchFormed { request, rows, deadline });
        let staged = batcher.members_of(request).filter_map(|member| member.payload.staged.take());
        let task = entry.program.gather(staged.collect())?;
        if let Some(job) = state.job.get_mut(request.slot()).and_then(Option::as_mut) {
            (job.task, job.rows) = (Some(task), rows);
        }
        Ok(())
    }

    /// Ends everybody who rides on a job of the core.
    pub(super) fn end_batch(
        &self,
        state: &mut State,
        now: Nanos,
        (request, end): (RequestId, End),
        job: Job,
        due: &mut Vec<DueReply>,
    ) {
        let model = job.model;
        state.batches.due.push(model);
        let Some(entry) = &mut state.models[model.0 as usize] else { return };
        let Some((batcher, _)) = &mut entry.batching else { return };
        let refused = !matches!(end, End::Done | End::DeadlineExceeded | End::Cancelled);
        if refused && !job.launched {
            // The core does not take such a job: whoever waits for it would wait for ever.
            let capacity = entry.queue_capacity;
            let refused = batcher.refuse(request);
            let failure = self.failure(state, model, end, None);
            for member in refused {
                let why = rejected(end, failure.clone(), capacity);
                due.push(state.answer(now, model, member, Timing::default(), Err(why)));
            }
            return;
        }
        let plain = end == End::Done && job.timing.preemptions == 0;
        let BatchEnd::Started { members, all } = batcher.finish(now, request, plain) else {
            return;
        };
        if end == End::Done {
            entry.stats.executions += 1;
        }
        let rows: Vec<usize> = all.iter().map(|(_, rows)| *rows).collect();
        let outcome = match (end, job.outputs) {
            (End::Done, Some(outputs)) => split(&outputs, &rows).map_err(Rejection::Device),
            (end, _) => Err(rejected(end, job.failure, entry.queue_capacity)),
        };
        let mut outputs = match outcome {
            Ok(outputs) => Ok(outputs.into_iter().map(Some).collect::<Vec<_>>()),
            Err(why) => Err(why),
        };
        let mut first = true;
        for member in members {
            let place = all.iter().position(|(id, _)| *id == member.id());
            let result = match &mut outputs {
                Ok(outputs) => place.and_then(|place| outputs[place].take()).ok_or_else(|| {
                    Rejection::Device(DeviceError::BadPlan("a request's rows are lost".to_string()))
                }),
                Err(why) => Err(why.clone()),
            };
            let result =
                if member.deadline <= now { Err(Rejection::DeadlineExceeded) } else { result };
            let leads = result.is_ok() && std::mem::take(&mut first);
            let timing = Timing { first: leads, rows: job.rows, ..job.timing };
            due.push(state.answer(now, model, member, timing, result));
        }
    }
}

impl State {
    /// The reply of a request of a batch, counted.
    fn answer(
        &mut self,
        now: Nanos,
        model: ModelId,
        member: Member<BatchMember>,
        job: Timing,
        result: ReplyResult,
    ) -> DueReply {
        self.batches.members -= 1;
        let timing = Timing { arrived: member.arrived, finished: now, ..job };
        if let Some(entry) = &mut self.models[model.0 as usize] {
            entry.stats.count(&result, &timing);
        }
        (member.payload.submission.reply, Reply { result, timing })
    }

    /// Tells the core what had to wait for the batcher to be empty: that the model goes, that the node draining_thread_waits.
    fn retire(&mut self, model: ModelId, events: &mut VecDeque<Event>) {
        let Some(entry) = &mut self.models[model.0 as usize] else { return };
        let empty = entry.batching.as_ref().is_none_or(|(batcher, _)| batcher.pending() == 0);
        if entry.removed && empty && !std::mem::replace(&mut entry.removal_sent, true) {
            events.push_back(Event::ModelRemoved { model });
        }
        self.drain_if_empty(events);
    }

    pub(super) fn drain_if_empty(&mut self, events: &mut VecDeque<Event>) {
        if self.draining
            && self.batches.members == 0
            && !std::mem::replace(&mut self.drain_sent, true)
        {
            events.push_back(Event::Drain);
        }
    }

    /// The earliest time that a batcher wants to be asked.
    pub(super) fn batch_timer(&self) -> Option<Nanos> {
        self.batches.timers.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use base::Bytes;
    use device::{DeviceError, Task};
    use model::Tensor;

    use super::*;

    /// A program that takes as long to be made ready as it is told to.
    struct Slow {
        plan: Arc<LaunchPlan>,
        begun: std::sync::mpsc::Sender<()>,
        go_on: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    }

    impl Program for Slow {
        fn plan(&self) -> &Arc<LaunchPlan> {
            &self.plan
        }

        fn resident(&self) -> Bytes {
            Bytes(0)
        }

        fn prepare(&self, _: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
            Err(DeviceError::BadPlan("it is only made ready".to_string()))
        }

        fn prepare_batches(&self, _: &[(String, usize)], _: &[usize]) -> Result<(), DeviceError> {
            self.begun.send(()).expect("the test listens");
            let _ = self.go_on.lock().expect("one thread").recv();
            Ok(())
        }
    }

    #[test]
    fn a_model_that_waits_to_be_prepared_can_go() {
        let preparer = Preparer::start(Weak::new()).expect("a thread");
        let (begun, begins) = channel();
        let slow = || {
            let (go, go_on) = channel();
            let plan = Arc::new(LaunchPlan::default());
            let (begun, go_on) = (begun.clone(), std::sync::Mutex::new(go_on));
            (Arc::new(Slow { plan, begun, go_on }) as Arc<dyn Program>, go)
        };
        let ask = |program: &Arc<dyn Program>| {
            let (model, sizes) = (ModelKey { slot: 0, generation: 0 }, Vec::new());
            let (program, batches) = (Arc::downgrade(program), vec![1]);
            preparer.ask(Preparation { model, program, sizes, batches });
        };
        let ((first, go), (second, _)) = (slow(), slow());
        ask(&first);
        begins.recv().expect("the first is under way");
        ask(&second);
        let waiting = Arc::downgrade(&second);
        drop(second);
        assert_eq!(waiting.strong_count(), 0, "the one that waits is not kept");
        drop(first);
        go.send(()).expect("the first is still being made ready");
    }
}
