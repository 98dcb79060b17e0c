//! Batches in a node: from requests to jobs of the core, and back to replies.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use base::Nanos;
use device::batch::{other_sizes, rows_of, split};
use device::thread_placement::{self, ThreadRole};
use device::{DeviceError, PreemptionLevel, Program, StagedInputs};
use model::config::{BatchingPolicy, CopyTime, ModelConfig};
use model::row_independence::{batch_symbol, mixing_step};
use model::{LaunchPlan, Tensor};

use super::batcher::{BatchEnd, Batcher, GroupKey, Member, MemberId, Refusal, Rules, SlotRequest};
use super::completion::rejected;
use super::submission::Submission;
use super::{
    DueReply, Job, ModelKey, Rejection, Reply, ReplyResult, ReplyTarget, Shared, State, Timing,
};
use crate::core::{End, Event, ModelId, RequestId};
use crate::spans::CopyKind;

/// Maximum number of queued preparations.
const MAX_PREPARATIONS: usize = 256;

/// A batch member: its staged inputs until the batch is formed, and its request.
pub(super) struct BatchMember {
    staged: Option<Box<dyn StagedInputs>>,
    submission: Submission,
    /// Its number in the spans.
    number: u64,
}

pub(super) type ModelBatcher = Batcher<BatchMember>;

/// What a caller needs to know to stage a request of a batched model.
#[derive(Clone)]
pub(super) struct BatchStaging {
    symbol: Arc<str>,
    pub(super) copy: CopyTime,
    max_rows: usize,
    /// Batch sizes that the device prepares.
    batches: Arc<[usize]>,
}

/// State of all batchers.
#[derive(Default)]
pub(super) struct Batches {
    /// Models whose batcher must be updated.
    pub(super) due: Vec<ModelId>,
    /// Timers of batchers.
    timers: BTreeSet<(Nanos, ModelId)>,
    /// Pending requests of all batchers.
    pub(super) members: usize,
}

/// Batch sizes to prepare for a model.
struct Preparation {
    model: ModelKey,
    /// Weak: a model that is removed meanwhile frees its memory.
    program: Weak<dyn Program>,
    sizes: Vec<(String, usize)>,
    batches: Vec<usize>,
}

/// Prepares batch sizes on a thread of its own.
pub(super) struct Preparer {
    sender: SyncSender<Preparation>,
}

impl Preparer {
    pub(super) fn start(shared: Weak<Shared>) -> std::io::Result<Preparer> {
        let (sender, receiver) = sync_channel::<Preparation>(MAX_PREPARATIONS);
        std::thread::Builder::new().name("node-batches".to_string()).spawn(move || {
            thread_placement::enter(ThreadRole::Background);
            while let Ok(preparation) = receiver.recv() {
                let Some(program) = preparation.program.upgrade() else { continue };
                if let Err(err) = program.prepare_batches(&preparation.sizes, &preparation.batches)
                {
                    let batches = &preparation.batches;
                    tracing::warn!(?batches, error = %err, "cannot prepare batches");
                }
                let Some(shared) = shared.upgrade() else { return };
                shared.prepared(&preparation, &*program);
            }
        })?;
        Ok(Preparer { sender })
    }

    fn request(&self, preparation: Preparation) {
        if self.sender.try_send(preparation).is_err() {
            tracing::warn!(limit = MAX_PREPARATIONS, "batch preparation skipped: queue full");
        }
    }
}

/// The batcher of a model, if its requests can be batched and its settings allow it.
pub(super) fn batcher_of(
    plan: &LaunchPlan,
    config: &ModelConfig,
    level: PreemptionLevel,
) -> Option<(ModelBatcher, BatchStaging)> {
    let rules = Rules::of(config, level)?;
    let configured = config.batching.policy != BatchingPolicy::Auto;
    let Some(symbol) = batch_symbol(plan) else {
        if configured {
            tracing::warn!(
                reason = "inputs and outputs do not all begin with one symbolic dimension",
                "batching disabled"
            );
        }
        return None;
    };
    // A policy in the settings asserts that rows are independent. Otherwise it must be proven.
    if !configured && let Some(step) = mixing_step(plan, symbol) {
        tracing::info!(
            step = step.name,
            op = step.op.name(),
            reason = "rows may depend on each other; if they do not, set batching.policy",
            "batching disabled"
        );
        return None;
    }
    let (symbol, copy) = (symbol.into(), rules.copy);
    let (max_rows, batches) = (rules.batch_max(), rules.batches().into());
    let staging = BatchStaging { symbol, copy, max_rows, batches };
    Some((Batcher::new(rules, config.queue_capacity), staging))
}

impl BatchStaging {
    /// Whether requests may share batches.
    pub(super) fn is_open(&self) -> bool {
        self.max_rows > 0
    }

    /// No further request shares a batch.
    pub(super) fn close(&mut self) {
        self.max_rows = 0;
    }

    /// Whether inputs fit into a batch.
    pub(super) fn fits(&self, inputs: &[Tensor]) -> bool {
        (1..=self.max_rows).contains(&rows_of(inputs))
    }

    /// The symbol of the batch.
    pub(super) fn symbol(&self) -> &str {
        &self.symbol
    }

    /// Sizes of the symbolic dimensions of `inputs` other than the batch.
    pub(super) fn sizes(&self, plan: &LaunchPlan, inputs: &[Tensor]) -> Vec<(String, usize)> {
        other_sizes(plan, &self.symbol, inputs)
    }
}

/// Result of the admission to a batcher.
pub(super) enum Admission {
    Member(MemberId),
    Refused(Submission, Rejection),
    /// It cannot be batched and runs alone.
    Alone(Submission, Box<dyn StagedInputs>),
}

impl Shared {
    /// Adds a request to the batcher of its model.
    pub(super) fn admit(
        &self,
        state: &mut State,
        submission: Submission,
        sizes: Vec<(String, usize)>,
        staged: Box<dyn StagedInputs>,
    ) -> Admission {
        let Submission { model, class, priority, arrived, staged: ready_at, .. } = submission;
        let Submission { deadline, copy, .. } = submission;
        if let Some(fault) = &state.fault {
            return Admission::Refused(submission, Rejection::Device(fault.clone()));
        }
        let busy = state.core.pending() + state.batches.members >= self.max_requests;
        let number = state.spans.next_number();
        if let Some(copy) = copy {
            state.record_copy(CopyKind::Stage, (number, model, class), copy, ready_at);
        }
        let Some(entry) = state.model_mut(model) else {
            return Admission::Refused(submission, Rejection::NoSuchModel);
        };
        let capacity = if busy { self.max_requests } else { entry.queue_capacity };
        let Some((batcher, staging)) = entry.batching.as_mut().filter(|_| !busy) else {
            entry.stats.rejected += 1;
            return Admission::Refused(submission, Rejection::QueueFull { capacity });
        };
        let (program, preparer) = (&entry.program, self.preparer.get());
        let key = GroupKey { class, priority, sizes: sizes.clone() };
        let ready = || program.prepared_batches(&sizes);
        let payload = BatchMember { staged: Some(staged), submission, number };
        let rows = payload.staged.as_ref().map_or(1, |staged| staged.rows());
        match batcher.arrive(arrived, key, (rows, deadline), payload, ready) {
            Ok(id) => {
                // Batches are prepared for sizes of which several requests wait: most lengths of
                // sentences come once.
                if let Some(preparer) = preparer
                    && batcher.lacks_batches(id, &staging.batches)
                {
                    let (program, batches) = (Arc::downgrade(program), staging.batches.to_vec());
                    preparer.request(Preparation { model, program, sizes, batches });
                }
                state.batches.members += 1;
                state.batches.due.push(ModelId(model.slot));
                Admission::Member(id)
            }
            Err((Refusal::Alone, BatchMember { staged: Some(staged), submission, .. })) => {
                Admission::Alone(submission, staged)
            }
            Err((_, BatchMember { submission, .. })) => {
                entry.stats.rejected += 1;
                Admission::Refused(submission, Rejection::QueueFull { capacity })
            }
        }
    }

    /// Prepares the batches of a new model, as far as its sizes are known.
    pub(super) fn prepare_batches(
        &self,
        model: ModelKey,
        program: &Arc<dyn Program>,
        batches: Vec<usize>,
    ) {
        if let (Some(_), Some(preparer)) = (program.prepared_batches(&[]), self.preparer.get()) {
            preparer.request(Preparation {
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

    /// Cancels a batch member.
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
        let result = Err(Rejection::Cancelled);
        let due = state.reply_to_member(now, id, gone, (0, Timing::default()), result);
        self.unsent.fetch_add(1, Ordering::SeqCst);
        let events = idle.into_iter().map(|request| Event::Cancel { request }).collect();
        self.run(state, events);
        self.send(due.0, due.1);
    }

    /// Updates the batchers that changed and appends their jobs to `events`.
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
        // Each group has one batch slot at a time: the next one follows when that has started.
        let slots: Vec<SlotRequest> =
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
            due.push(state.reply_to_member(
                now,
                model,
                member,
                (0, Timing::default()),
                Err(Rejection::DeadlineExceeded),
            ));
        }
        for slot in slots {
            self.open_slot(state, model, slot, events);
        }
        state.retire(model, events);
    }

    fn open_slot(
        &self,
        state: &mut State,
        model: ModelId,
        slot: SlotRequest,
        events: &mut VecDeque<Event>,
    ) {
        let SlotRequest { group, class, priority, deadline } = slot;
        let job = state.core.next_request_id();
        if let Some(entry) = &mut state.models[model.0 as usize]
            && let Some((batcher, _)) = &mut entry.batching
        {
            batcher.slot_opened(group, job);
        }
        let Some(request) = job else { return };
        let timing = Timing { arrived: self.clock.now(), ..Timing::default() };
        let (number, class_of_job) = (state.spans.next_number(), (class, priority, deadline));
        let job = Job::new(number, model, class_of_job, None, ReplyTarget::Members, timing);
        state.keep(request, job);
        events.push_back(Event::Arrival { request, model, class, priority, deadline });
    }

    /// Forms the batch of a job that starts: binds its members and creates its task.
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
            return Err(DeviceError::BadPlan("an empty batch".to_string()));
        }
        let (rows, deadline) = (formed.rows, formed.deadline);
        events.push_back(Event::BatchFormed { request, rows, deadline });
        let mut bytes = 0;
        let take = |member: &mut Member<BatchMember>| {
            bytes += member.payload.submission.bytes;
            member.payload.staged.take()
        };
        let staged: Vec<_> = batcher.members_of(request).filter_map(take).collect();
        let copy = self.time_copy(bytes);
        let task = entry.program.gather(staged)?;
        let gathered = copy.map(|copy| (copy, self.clock.now()));
        let key = ModelKey { slot: model.0, generation: entry.generation };
        let Some(job) = state.jobs.get_mut(request.slot()).and_then(Option::as_mut) else {
            return Ok(());
        };
        (job.task, job.rows) = (Some(task), rows);
        if let Some((copy, ended)) = gathered {
            let of = (job.number, key, job.class);
            state.record_copy(CopyKind::Gather, of, copy, ended);
        }
        Ok(())
    }

    /// Ends all members of a batch.
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
            // The core refuses such a job: members that wait for it would wait forever.
            let capacity = entry.queue_capacity;
            let refused = batcher.refuse(request);
            let failure = self.failure(state, model, end, None);
            for member in refused {
                let why = rejected(end, failure.clone(), capacity);
                let job = (0, Timing::default());
                due.push(state.reply_to_member(now, model, member, job, Err(why)));
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
            let position = all.iter().position(|(id, _)| *id == member.id());
            let result = match &mut outputs {
                Ok(outputs) => {
                    position.and_then(|position| outputs[position].take()).ok_or_else(|| {
                        Rejection::Device(DeviceError::BadPlan(
                            "the rows of a batch member are missing".to_string(),
                        ))
                    })
                }
                Err(why) => Err(why.clone()),
            };
            let result =
                if member.deadline <= now { Err(Rejection::DeadlineExceeded) } else { result };
            let leads = result.is_ok() && std::mem::take(&mut first);
            let timing = Timing { first: leads, rows: job.rows, ..job.timing };
            due.push(state.reply_to_member(now, model, member, (job.number, timing), result));
        }
    }
}

impl State {
    /// The reply of a batch member, counted.
    fn reply_to_member(
        &mut self,
        now: Nanos,
        model: ModelId,
        member: Member<BatchMember>,
        (job, timing): (u64, Timing),
        result: ReplyResult,
    ) -> DueReply {
        self.batches.members -= 1;
        let BatchMember { submission, number, .. } = &member.payload;
        let timing = Timing {
            arrived: member.arrived,
            prepared: submission.staged,
            finished: now,
            ..timing
        };
        self.record_member(submission, (*number, job), &timing, &result);
        if let Some(entry) = &mut self.models[model.0 as usize] {
            entry.stats.count(&result, &timing);
        }
        (member.payload.submission.reply, Reply { result, timing })
    }

    /// The replies of all requests in the batcher of `model`, waiting or running.
    pub(super) fn refuse_members(
        &mut self,
        now: Nanos,
        model: ModelId,
        fault: &DeviceError,
    ) -> Vec<DueReply> {
        let entry = self.models.get_mut(model.0 as usize).and_then(Option::as_mut);
        let batcher = entry.and_then(|entry| entry.batching.as_mut());
        let members = batcher.map(|(batcher, _)| batcher.take_all()).unwrap_or_default();
        let reply = |member| {
            let why = Err(Rejection::Device(fault.clone()));
            self.reply_to_member(now, model, member, (0, Timing::default()), why)
        };
        members.into_iter().map(reply).collect()
    }

    /// Sends the core what had to wait for an empty batcher: the removal of the model, the drain of
    /// the node.
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

    /// The earliest timer of a batcher.
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

    /// A program whose preparation the test controls.
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
            Err(DeviceError::BadPlan("it is only prepared".to_string()))
        }

        fn prepare_batches(&self, _: &[(String, usize)], _: &[usize]) -> Result<(), DeviceError> {
            self.begun.send(()).expect("the test listens");
            let _ = self.go_on.lock().expect("one thread").recv();
            Ok(())
        }
    }

    #[test]
    fn a_queued_preparation_does_not_keep_its_program() {
        let preparer = Preparer::start(Weak::new()).expect("a thread");
        let (begun, begins) = channel();
        let slow = || {
            let (go, go_on) = channel();
            let plan = Arc::new(LaunchPlan::default());
            let (begun, go_on) = (begun.clone(), std::sync::Mutex::new(go_on));
            (Arc::new(Slow { plan, begun, go_on }) as Arc<dyn Program>, go)
        };
        let request = |program: &Arc<dyn Program>| {
            let (model, sizes) = (ModelKey { slot: 0, generation: 0 }, Vec::new());
            let (program, batches) = (Arc::downgrade(program), vec![1]);
            preparer.request(Preparation { model, program, sizes, batches });
        };
        let ((first, go), (second, _)) = (slow(), slow());
        request(&first);
        begins.recv().expect("the first is being prepared");
        request(&second);
        let waiting = Arc::downgrade(&second);
        drop(second);
        assert_eq!(waiting.strong_count(), 0, "the queued one is freed");
        drop(first);
        go.send(()).expect("the first is still being prepared");
    }
}
