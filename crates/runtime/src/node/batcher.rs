//! Forms the batches of one model: a state machine without clock, thread or device.
//!
//! Requests wait in groups that may share a batch: same class, same priority, same sizes of
//! everything but the batch. When the batching policy of a group decides on a batch, the core gets
//! a job for it: a batch slot. Its members are bound when the core starts the job, so that requests
//! which arrive while the device is busy still join. The end of a job ends all its members; each
//! request is returned exactly once.

mod learned_profile;
mod rules;

use std::collections::{BTreeSet, VecDeque};

use base::Nanos;
use model::config::Class;

use crate::batching::{BatchPolicy, Decision, ModelView, StaggeredBatch, WaitingRequest, Worker};
use crate::core::RequestId;

use self::learned_profile::LearnedProfile;
pub(super) use self::rules::Rules;

/// Maximum number of groups of a model.
const MAX_GROUPS: usize = 64;

/// Requests with the same key may share a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GroupKey {
    pub(super) class: Class,
    pub(super) priority: u32,
    /// Sizes of the symbolic dimensions other than the batch.
    pub(super) sizes: Vec<(String, usize)>,
}

/// The number of a request; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct MemberId(u64);

/// A request in the batcher.
#[derive(Debug)]
pub(super) struct Member<M> {
    id: MemberId,
    pub(super) rows: usize,
    pub(super) arrived: Nanos,
    pub(super) deadline: Nanos,
    pub(super) payload: M,
}

/// A batch slot that the core should open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRequest {
    pub(super) group: usize,
    pub(super) class: Class,
    pub(super) priority: u32,
    /// The earliest deadline of the waiting requests.
    pub(super) deadline: Nanos,
}

/// A batch that was formed.
#[derive(Debug)]
pub(super) struct FormedBatch {
    /// Number of rows; 0 when no request waits any more.
    pub(super) rows: usize,
    /// The latest deadline of its members.
    pub(super) deadline: Nanos,
}

/// Why a request is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Too many requests wait.
    Full,
    /// It belongs to a new group, and there are too many groups.
    Alone,
}

/// Members of a job that ended.
#[derive(Debug)]
pub(super) enum BatchEnd<M> {
    /// It never started: its requests wait on.
    Unstarted,
    /// It started with `all` (and their rows); `members` still need a reply.
    Started { members: Vec<Member<M>>, all: Vec<(MemberId, usize)> },
}

struct Group<M> {
    key: GroupKey,
    policy: Box<dyn BatchPolicy>,
    learned: LearnedProfile,
    members: VecDeque<Member<M>>,
    /// The same row by row, for the policy.
    rows: VecDeque<WaitingRequest>,
    slot: Option<BatchSlot>,
    /// Batches that are decided and have no slot yet: worker and rows.
    planned: VecDeque<(usize, usize)>,
    wake: Option<Nanos>,
    /// Batch sizes that the device has prepared; all when absent.
    ready: Option<Vec<usize>>,
    /// Missing batch sizes have been requested.
    batches_asked: bool,
    running: usize,
    used: u64,
}

/// A job in the core whose members are not bound.
#[derive(Clone, Copy, Debug)]
struct BatchSlot {
    job: Option<RequestId>,
    worker: usize,
    count: usize,
    opened: Nanos,
}

struct StartedBatch<M> {
    id: RequestId,
    group: usize,
    /// Its worker; `None` when the workers were replaced since.
    worker: Option<usize>,
    /// `device_time` when it started.
    began: Nanos,
    /// All members, in the order of the batch.
    all: Vec<(MemberId, usize)>,
    /// Members that still need a reply.
    members: Vec<Member<M>>,
}

/// A worker. Several groups may have a slot for it, and then run on it at once.
#[derive(Clone, Copy, Debug)]
struct WorkerState {
    batch: usize,
    running: usize,
}

/// Requests and batches of one model.
pub(super) struct Batcher<M> {
    rules: Rules,
    /// Maximum number of waiting requests.
    capacity: usize,
    workers: Vec<WorkerState>,
    groups: Vec<Group<M>>,
    jobs: Vec<StartedBatch<M>>,
    deadlines: BTreeSet<(Nanos, MemberId)>,
    waiting: usize,
    next_id: u64,
    clock: u64,
    /// Time during which batches ran, divided by how many ran at once: the device time of a batch,
    /// whatever ran beside it.
    device_time: Nanos,
    counted_until: Nanos,
    /// Measured batch times.
    measured: Vec<(usize, Nanos)>,
    /// The largest batch that fits the SLO by these times.
    max_fitting: usize,
}

impl<M> Batcher<M> {
    pub(super) fn new(rules: Rules, capacity: usize) -> Batcher<M> {
        let worker = |batch: &usize| WorkerState { batch: *batch, running: 0 };
        Batcher {
            workers: rules.workers.iter().map(worker).collect(),
            rules,
            capacity,
            groups: Vec::new(),
            jobs: Vec::new(),
            deadlines: BTreeSet::new(),
            waiting: 0,
            next_id: 0,
            clock: 0,
            device_time: Nanos::ZERO,
            counted_until: Nanos::ZERO,
            measured: Vec::new(),
            max_fitting: usize::MAX,
        }
    }

    /// Sets measured batch times: the initial profile of groups, and the choice of workers if there
    /// is an SLO.
    pub(super) fn set_profile(&mut self, times: &[(usize, Nanos)]) {
        self.measured = times.to_vec();
        for group in &mut self.groups {
            group.learned.seed(times);
            self.rules.refresh(&mut group.policy, group.learned.profile());
        }
        let mut measured = LearnedProfile::new(self.rules.batch_max());
        measured.seed(times);
        self.max_fitting = match times.is_empty() {
            true => usize::MAX,
            false => self.rules.max_fitting(measured.profile()),
        };
    }

    /// Sets the batches of a backend pool, or returns to the configured policy.
    pub(super) fn set_staggered_batch(&mut self, staggered: Option<StaggeredBatch>) {
        // Without a change, policies keep what they learned.
        if !self.rules.set_staggered_batch(staggered) {
            return;
        }
        for group in &mut self.groups {
            group.policy = self.rules.policy(group.learned.profile());
        }
        let measured = std::mem::take(&mut self.measured);
        self.set_profile(&measured);
    }

    /// At most so many requests wait from now on; those that wait already stay.
    pub(super) fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity;
    }

    /// Changes its settings. Requests that wait stay and are batched by the new ones; batches that
    /// run end by the old ones.
    pub(super) fn set_rules(&mut self, rules: Rules, capacity: usize) {
        self.capacity = capacity;
        let staggered = self.rules.staggered();
        let same_workers = self.rules.workers == rules.workers;
        let batch_max = rules.batch_max();
        self.rules = rules;
        self.rules.set_staggered_batch(staggered);
        if !same_workers {
            self.jobs.iter_mut().for_each(|job| job.worker = None);
            let worker = |batch: &usize| WorkerState { batch: *batch, running: 0 };
            self.workers = self.rules.workers.iter().map(worker).collect();
        }
        for group in &mut self.groups {
            if !same_workers {
                group.learned = LearnedProfile::new(batch_max);
                // The device may not be prepared for the new sizes.
                group.batches_asked = false;
                if let Some(slot) = &mut group.slot {
                    // Decided again when it starts.
                    (slot.worker, slot.count) = (0, slot.count.min(batch_max));
                }
            }
            group.policy = self.rules.policy(group.learned.profile());
            group.planned.clear();
            group.wake = None;
            group.recount(&self.rules);
        }
        let measured = std::mem::take(&mut self.measured);
        self.set_profile(&measured);
    }

    /// The largest batch it forms.
    pub(super) fn max_batch(&self) -> usize {
        let batches = self.workers.iter().map(|worker| worker.batch);
        batches.filter(|batch| *batch <= self.max_fitting).max().unwrap_or(1)
    }

    /// Its settings.
    pub(super) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Pending requests.
    pub(super) fn pending(&self) -> usize {
        self.waiting + self.jobs.iter().map(|job| job.members.len()).sum::<usize>()
    }

    /// Its jobs in the core.
    pub(super) fn jobs(&self) -> usize {
        let open = |group: &&Group<M>| group.slot.is_some_and(|slot| slot.job.is_some());
        self.jobs.len() + self.groups.iter().filter(open).count()
    }

    /// When [`Batcher::expire`] and [`Batcher::decide`] are due, if ever.
    pub(super) fn next_timer(&self) -> Option<Nanos> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let wakes = self.groups.iter().filter_map(|group| group.wake);
        deadline.into_iter().chain(wakes).min()
    }

    /// Adds a request, or returns it. `ready` gives the prepared batch sizes of a new group.
    pub(super) fn arrive(
        &mut self,
        now: Nanos,
        key: GroupKey,
        (rows, deadline): (usize, Nanos),
        payload: M,
        ready: impl FnOnce() -> Option<Vec<usize>>,
    ) -> Result<MemberId, (Refusal, M)> {
        if self.waiting >= self.capacity {
            return Err((Refusal::Full, payload));
        }
        let Some(index) = self.group_of(key, ready) else { return Err((Refusal::Alone, payload)) };
        self.next_id += 1;
        self.clock += 1;
        let id = MemberId(self.next_id);
        if deadline < Nanos::MAX {
            self.deadlines.insert((deadline, id));
        }
        self.waiting += 1;
        let group = &mut self.groups[index];
        group.used = self.clock;
        let member = Member { id, rows, arrived: now, deadline, payload };
        // Real time is sorted by deadline, as in the core; best effort by arrival.
        let behind =
            |other: &Member<M>| group.key.class == Class::BestEffort || other.deadline <= deadline;
        let at = group.members.iter().rposition(behind).map_or(0, |at| at + 1);
        if at == group.members.len() {
            let waiting = self.rules.seen(&member);
            group.rows.extend(std::iter::repeat_n(waiting, rows));
            group.members.push_back(member);
        } else {
            group.members.insert(at, member);
            group.recount(&self.rules);
        }
        Ok(id)
    }

    /// The group of that key, created if needed; `None` when all groups are in use.
    fn group_of(
        &mut self,
        key: GroupKey,
        ready: impl FnOnce() -> Option<Vec<usize>>,
    ) -> Option<usize> {
        if let Some(index) = self.groups.iter().position(|group| group.key == key) {
            return Some(index);
        }
        let mut learned = LearnedProfile::new(self.rules.batch_max());
        learned.seed(&self.measured);
        let group = Group {
            policy: self.rules.policy(learned.profile()),
            ready: ready(),
            batches_asked: false,
            key,
            learned,
            members: VecDeque::new(),
            rows: VecDeque::new(),
            slot: None,
            planned: VecDeque::new(),
            wake: None,
            running: 0,
            used: self.clock,
        };
        if self.groups.len() < MAX_GROUPS {
            self.groups.push(group);
            return Some(self.groups.len() - 1);
        }
        let idle = self.groups.iter().enumerate().filter(|(_, group)| group.is_idle());
        let index = idle.min_by_key(|(_, group)| group.used)?.0;
        self.groups[index] = group;
        Some(index)
    }

    /// Whether `batches` should be prepared: the last request `id` is not alone in its group, and
    /// one of them is missing. True once for each group.
    pub(super) fn lacks_batches(&mut self, id: MemberId, batches: &[usize]) -> bool {
        let holds = |group: &&mut Group<M>| group.members.iter().any(|member| member.id == id);
        let Some(group) = self.groups.iter_mut().find(holds) else { return false };
        let missing = group
            .ready
            .as_ref()
            .is_some_and(|ready| batches.iter().any(|batch| !ready.contains(batch)));
        let lacks = missing && !group.batches_asked && group.members.len() > 1;
        group.batches_asked |= lacks;
        lacks
    }

    /// Sets the prepared batch sizes of groups with `sizes`.
    pub(super) fn set_ready(&mut self, sizes: &[(String, usize)], ready: Option<&[usize]>) {
        for group in self.groups.iter_mut().filter(|group| group.key.sizes == sizes) {
            group.ready = ready.map(<[usize]>::to_vec);
        }
    }

    /// Removes requests whose deadline passed.
    pub(super) fn expire(
        &mut self,
        now: Nanos,
        late: &mut Vec<Member<M>>,
        idle: &mut Vec<RequestId>,
    ) {
        while let Some((at, id)) = self.deadlines.first().copied() {
            if at > now {
                break;
            }
            match self.take(id, idle) {
                Some(member) => late.push(member),
                None => drop(self.deadlines.pop_first()),
            }
        }
    }

    /// Removes a request, waiting or running. A job without members is added to `idle`: it should
    /// be cancelled.
    pub(super) fn take(&mut self, id: MemberId, idle: &mut Vec<RequestId>) -> Option<Member<M>> {
        let is = |member: &Member<M>| member.id == id;
        for group in &mut self.groups {
            if let Some(at) = group.members.iter().position(is) {
                let member = group.members.remove(at)?;
                group.recount(&self.rules);
                self.waiting -= 1;
                self.deadlines.remove(&(member.deadline, id));
                if group.members.is_empty() {
                    group.planned.clear();
                    idle.extend(group.slot.and_then(|slot| slot.job));
                }
                return Some(member);
            }
        }
        for job in &mut self.jobs {
            if let Some(at) = job.members.iter().position(is) {
                let member = job.members.remove(at);
                self.deadlines.remove(&(member.deadline, id));
                if job.members.is_empty() {
                    idle.push(job.id);
                }
                return Some(member);
            }
        }
        None
    }

    /// The next batch slot to open, if one is due; [`Batcher::slot_opened`] must follow. Requests
    /// that the policy drops are added to `given_up`.
    pub(super) fn decide(
        &mut self,
        now: Nanos,
        given_up: &mut Vec<Member<M>>,
    ) -> Option<SlotRequest> {
        (0..self.groups.len()).find_map(|index| self.decide_group(now, index, given_up))
    }

    fn decide_group(
        &mut self,
        now: Nanos,
        index: usize,
        given_up: &mut Vec<Member<M>>,
    ) -> Option<SlotRequest> {
        let group = &mut self.groups[index];
        if group.slot.is_some() {
            return None;
        }
        if group.members.is_empty() {
            (group.wake, _) = (None, group.planned.clear());
            return None;
        }
        if group.planned.is_empty() {
            self.plan(now, index, given_up);
        }
        let group = &mut self.groups[index];
        while let Some((worker, count)) = group.planned.pop_front() {
            if self.workers[worker].running > 0 || group.members.is_empty() {
                continue;
            }
            group.slot = Some(BatchSlot { job: None, worker, count, opened: now });
            let deadline = group.members.iter().map(|member| member.deadline).min();
            let GroupKey { class, priority, .. } = group.key;
            return Some(SlotRequest {
                group: index,
                class,
                priority,
                deadline: deadline.unwrap_or(Nanos::MAX),
            });
        }
        None
    }

    /// Runs the policy of a group.
    fn plan(&mut self, now: Nanos, index: usize, given_up: &mut Vec<Member<M>>) {
        let workers = self.offered(index);
        let decisions = self.run_policy(now, index, &workers);
        self.groups[index].wake = None;
        for decision in decisions {
            match decision {
                Decision::Drop { count } => self.give_up(index, count, given_up),
                Decision::Launch { worker, count } if worker < workers.len() => {
                    self.groups[index]
                        .planned
                        .push_back((worker, count.min(workers[worker].batch)));
                }
                Decision::Launch { .. } => {}
                Decision::WakeAt(at) => {
                    // A wake-up that is due already would repeat forever.
                    let at = at.max(now + Nanos(1));
                    let wake = &mut self.groups[index].wake;
                    *wake = Some(wake.map_or(at, |other| other.min(at)));
                }
            }
        }
    }

    /// The workers that a group may use: batches no larger than prepared, and than the SLO allows.
    fn offered(&self, index: usize) -> Vec<Worker> {
        let ready = self.groups[index].ready.as_ref().and_then(|ready| ready.iter().max());
        let max_batch_rows = ready.copied().unwrap_or(usize::MAX).min(self.max_fitting);
        let offered = |worker: &WorkerState| Worker {
            batch: worker.batch.min(max_batch_rows),
            busy: worker.running > 0 || (self.rules.exact && worker.batch > max_batch_rows),
        };
        self.workers.iter().map(offered).collect()
    }

    fn run_policy(&mut self, now: Nanos, index: usize, workers: &[Worker]) -> Vec<Decision> {
        let group = &mut self.groups[index];
        let (profile, running) = (group.learned.profile(), group.running);
        let view = ModelView { waiting: &group.rows, workers, profile, running };
        let mut decisions = Vec::new();
        group.policy.decide(now, &view, &mut decisions);
        decisions
    }

    fn give_up(&mut self, index: usize, rows: usize, given_up: &mut Vec<Member<M>>) {
        let group = &mut self.groups[index];
        let mut remaining = rows;
        while let Some(front) = group.members.front().filter(|front| front.rows <= remaining) {
            remaining -= front.rows;
            let Some(member) = group.members.pop_front() else { break };
            self.deadlines.remove(&(member.deadline, member.id));
            self.waiting -= 1;
            given_up.push(member);
        }
        group.recount(&self.rules);
    }

    /// The core opened the slot as `job`, or refused.
    pub(super) fn slot_opened(&mut self, group: usize, job: Option<RequestId>) {
        let group = &mut self.groups[group];
        match (job, &mut group.slot) {
            (Some(job), Some(slot)) => slot.job = Some(job),
            _ => group.slot = None,
        }
    }

    /// The core starts `job`: binds waiting requests up to the rows of the batch.
    pub(super) fn start(&mut self, now: Nanos, job: RequestId) -> FormedBatch {
        let holds = |group: &Group<M>| group.slot.is_some_and(|slot| slot.job == Some(job));
        let Some(index) = self.groups.iter().position(holds) else {
            return FormedBatch { rows: 0, deadline: Nanos::MAX };
        };
        let Some(slot) = self.groups[index].slot.take() else {
            return FormedBatch { rows: 0, deadline: Nanos::MAX };
        };
        let (worker, count) = self.worker_and_rows(now, index, slot);
        let group = &mut self.groups[index];
        let mut members = Vec::new();
        let mut rows = 0;
        // A request is never split: one that is larger than the batch runs alone.
        while let Some(front) = group.members.front() {
            if rows > 0 && rows + front.rows > count {
                break;
            }
            rows += front.rows;
            members.extend(group.members.pop_front());
        }
        group.rows.drain(..rows.min(group.rows.len()));
        group.running += rows;
        self.waiting -= members.len();
        self.workers[worker].running += 1;
        let deadline = members.iter().map(|member| member.deadline).max().unwrap_or(Nanos::MAX);
        let all = members.iter().map(|member| (member.id, member.rows)).collect();
        let began = self.count_time(now);
        let worker = Some(worker);
        self.jobs.push(StartedBatch { id: job, group: index, worker, began, all, members });
        FormedBatch { rows, deadline }
    }

    /// Worker and rows of a batch that starts now. If the slot had to wait, the policy decides
    /// again: more requests may have arrived.
    fn worker_and_rows(&mut self, now: Nanos, index: usize, slot: BatchSlot) -> (usize, usize) {
        if now <= slot.opened {
            return (slot.worker, slot.count);
        }
        let workers = self.offered(index);
        if self.rules.takes_all_waiting() {
            let all = self.groups[index].rows.len().min(workers[slot.worker].batch);
            return (slot.worker, all.max(slot.count));
        }
        match self.run_policy(now, index, &workers).first() {
            Some(Decision::Launch { worker, count }) if *worker < workers.len() => {
                (*worker, (*count).min(workers[*worker].batch))
            }
            _ => (slot.worker, slot.count),
        }
    }

    /// The members of `job`, in the order of the batch.
    pub(super) fn members_of(&mut self, job: RequestId) -> impl Iterator<Item = &mut Member<M>> {
        self.jobs.iter_mut().filter(move |other| other.id == job).flat_map(|job| &mut job.members)
    }

    /// Advances `device_time` to `now`.
    fn count_time(&mut self, now: Nanos) -> Nanos {
        let passed = now.since(self.counted_until).0;
        let share = passed.checked_div(self.jobs.len() as u64);
        self.device_time += Nanos(share.unwrap_or(0));
        self.counted_until = now;
        self.device_time
    }

    /// `job` ended; `plain` means that its time is representative for such a batch.
    pub(super) fn finish(&mut self, now: Nanos, job: RequestId, plain: bool) -> BatchEnd<M> {
        let over = self.count_time(now);
        let Some(at) = self.jobs.iter().position(|other| other.id == job) else {
            let holds =
                |group: &&mut Group<M>| group.slot.is_some_and(|slot| slot.job == Some(job));
            if let Some(group) = self.groups.iter_mut().find(holds) {
                group.slot = None;
            }
            return BatchEnd::Unstarted;
        };
        let StartedBatch { group, worker, began, all, members, .. } = self.jobs.swap_remove(at);
        if let Some(worker) = worker {
            self.workers[worker].running -= 1;
        }
        let rows: usize = all.iter().map(|(_, rows)| rows).sum();
        let group = &mut self.groups[group];
        group.running -= rows;
        if plain {
            group.learned.record(rows, over - began);
            self.rules.refresh(&mut group.policy, group.learned.profile());
        }
        for member in &members {
            self.deadlines.remove(&(member.deadline, member.id));
        }
        BatchEnd::Started { members, all }
    }

    /// Removes all requests, waiting or running.
    pub(super) fn take_all(&mut self) -> Vec<Member<M>> {
        let waiting = self.groups.iter_mut().flat_map(|group| {
            group.rows.clear();
            group.planned.clear();
            std::mem::take(&mut group.members)
        });
        let running = self.jobs.iter_mut().flat_map(|job| std::mem::take(&mut job.members));
        let members = waiting.chain(running).collect();
        self.waiting = 0;
        self.deadlines.clear();
        members
    }

    /// Removes all requests of the group whose slot was refused.
    pub(super) fn refuse(&mut self, job: RequestId) -> Vec<Member<M>> {
        let holds = |group: &Group<M>| group.slot.is_some_and(|slot| slot.job == Some(job));
        let Some(index) = self.groups.iter().position(holds) else { return Vec::new() };
        self.groups[index].slot = None;
        let mut members = Vec::new();
        self.give_up(index, usize::MAX, &mut members);
        members
    }
}

impl<M> Group<M> {
    fn is_idle(&self) -> bool {
        self.members.is_empty() && self.slot.is_none() && self.running == 0
    }

    fn recount(&mut self, rules: &Rules) {
        let members = self.members.iter();
        let rows = members.flat_map(|member| std::iter::repeat_n(rules.seen(member), member.rows));
        self.rows = rows.collect();
    }
}

impl<M> Member<M> {
    pub(super) fn id(&self) -> MemberId {
        self.id
    }
}

#[cfg(test)]
mod tests;
