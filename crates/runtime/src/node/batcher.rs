//! Which requests of one model go to the device together: a state machine without clock, thread or device.
//!
//! Requests wait here, in groups that may share a batch: of one class, one priority and the same sizes of everything but the
//! batch. When a group's policy wants a batch, the core gets one job for it, a slot. Who rides on it is settled when the
//! core starts it, so that whoever comes while the device is busy still gets a seat. A job that ends ends all who ride on it;
//! each request is handed back exactly once.

mod learned_profile;
mod rules;

use std::collections::{BTreeSet, VecDeque};

use base::Nanos;
use model::config::Class;

use crate::batching::{BatchPolicy, Decision, ModelView, StaggeredBatch, WaitingRequest, Worker};
use crate::core::RequestId;

use self::learned_profile::LearnedProfile;
pub(super) use self::rules::Rules;

/// Groups of a model that are kept apart at once.
const MAX_GROUPS: usize = 64;

/// Who may share a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GroupKey {
    pub(super) class: Class,
    pub(super) priority: u32,
    /// Sizes of the model's symbols other than the batch.
    pub(super) sizes: Vec<(String, usize)>,
}

/// A request's number; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct MemberId(u64);

/// A request, as it came and as it goes.
#[derive(Debug)]
pub(super) struct Member<M> {
    id: MemberId,
    pub(super) rows: usize,
    pub(super) arrived: Nanos,
    pub(super) deadline: Nanos,
    pub(super) payload: M,
}

/// A batch that the core is to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRequest {
    pub(super) group: usize,
    pub(super) class: Class,
    pub(super) priority: u32,
    /// When the first of those who wait is of no more use.
    pub(super) deadline: Nanos,
}

/// A batch that starts.
#[derive(Debug)]
pub(super) struct FormedBatch {
    /// Rows in all; none when nobody waits any more.
    pub(super) rows: usize,
    /// When it is of no more use to any of them.
    pub(super) deadline: Nanos,
}

/// Why a request is not taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// As many wait as may.
    Full,
    /// It could share a batch with nobody who is here, and there are as many such groups as there may be.
    Alone,
}

/// What a job that ended leaves behind.
#[derive(Debug)]
pub(super) enum BatchEnd<M> {
    /// It was never started: whoever waits goes on waiting.
    Unstarted,
    /// It had been started with these, whose answers are still due. `rows` of all that rode on it.
    Started { members: Vec<Member<M>>, all: Vec<(MemberId, usize)> },
}

struct Group<M> {
    key: GroupKey,
    policy: Box<dyn BatchPolicy>,
    learned: LearnedProfile,
    members: VecDeque<Member<M>>,
    /// The same row by row, as policies see it.
    rows: VecDeque<WaitingRequest>,
    slot: Option<BatchSlot>,
    /// Batches that were decided and not asked for yet.
    planned: VecDeque<(usize, usize)>,
    wake: Option<Nanos>,
    /// Rows the device is prepared for; any when absent.
    ready: Option<Vec<usize>>,
    running: usize,
    used: u64,
}

/// A batch that the core has been asked for.
#[derive(Clone, Copy, Debug)]
struct BatchSlot {
    job: Option<RequestId>,
    worker: usize,
    count: usize,
    asked: Nanos,
}

struct StartedBatch<M> {
    id: RequestId,
    group: usize,
    worker: usize,
    /// The device's time of this model when it began.
    began: Nanos,
    /// Everybody who rides, in the batch's order.
    all: Vec<(MemberId, usize)>,
    /// Those who still wait for an answer.
    members: Vec<Member<M>>,
}

/// A worker. Batches of several groups may have been asked for it at once, and then run on it at once.
#[derive(Clone, Copy, Debug)]
struct WorkerState {
    batch: usize,
    running: usize,
}

/// The requests of one model.
pub(super) struct Batcher<M> {
    rules: Rules,
    /// The most requests that may wait.
    capacity: usize,
    workers: Vec<WorkerState>,
    groups: Vec<Group<M>>,
    jobs: Vec<StartedBatch<M>>,
    deadlines: BTreeSet<(Nanos, MemberId)>,
    waiting: usize,
    next_id: u64,
    clock: u64,
    /// Time that went by while batches ran, divided among those that ran at once: what a batch took of the device, whatever
    /// ran beside it.
    device_time: Nanos,
    counted_until: Nanos,
    /// What batches took when the model was measured.
    measured: Vec<(usize, Nanos)>,
    /// The largest batch that fits the objective by that.
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

    /// Goes by what batches took when the model was measured: as what is known before any was seen, and for the choice of
    /// workers where there is an objective.
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

    /// Makes batches of `staggered` from now on, or as its rules say.
    pub(super) fn set_staggered_batch(&mut self, staggered: Option<StaggeredBatch>) {
        // What a policy has learned stays where nothing changes.
        if !self.rules.set_staggered_batch(staggered) {
            return;
        }
        for group in &mut self.groups {
            group.policy = self.rules.policy(group.learned.profile());
        }
        let measured = std::mem::take(&mut self.measured);
        self.set_profile(&measured);
    }

    /// The largest batch that is made.
    pub(super) fn max_batch(&self) -> usize {
        let batches = self.workers.iter().map(|worker| worker.batch);
        batches.filter(|batch| *batch <= self.max_fitting).max().unwrap_or(1)
    }

    /// The settings it follows.
    pub(super) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Requests that are not answered yet.
    pub(super) fn pending(&self) -> usize {
        self.waiting + self.jobs.iter().map(|job| job.members.len()).sum::<usize>()
    }

    /// Jobs that the core holds for it.
    pub(super) fn jobs(&self) -> usize {
        let asked = |group: &&Group<M>| group.slot.is_some_and(|slot| slot.job.is_some());
        self.jobs.len() + self.groups.iter().filter(asked).count()
    }

    /// When [`Batcher::expire`] and [`Batcher::decide`] are due, if ever.
    pub(super) fn next_timer(&self) -> Option<Nanos> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let wakes = self.groups.iter().filter_map(|group| group.wake);
        deadline.into_iter().chain(wakes).min()
    }

    /// Takes a request in; or gives it back. `ready` tells what the device is prepared for when the group is new.
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
        // Real time goes by deadline, as in the core; best effort by arrival.
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

    /// The group of that key, made when it is not there; `None` when all there may be are in use.
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

    /// The device is prepared for these batches of `sizes` from now on.
    pub(super) fn set_ready(&mut self, sizes: &[(String, usize)], ready: Option<&[usize]>) {
        for group in self.groups.iter_mut().filter(|group| group.key.sizes == sizes) {
            group.ready = ready.map(<[usize]>::to_vec);
        }
    }

    /// Hands back who has waited too long, and who was going to be answered too late.
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

    /// Takes a request out, wherever it is. A job on which nobody rides any more is named in `idle`: it is to be cancelled.
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

    /// The next batch to ask the core for, if one is due; [`Batcher::asked`] must follow. `given_up` are those whose policy
    /// does not see them answered in time.
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
            group.slot = Some(BatchSlot { job: None, worker, count, asked: now });
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

    /// Asks the policy of a group.
    fn plan(&mut self, now: Nanos, index: usize, given_up: &mut Vec<Member<M>>) {
        let workers = self.offered(index);
        let decisions = self.ask(now, index, &workers);
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
                    // A wake-up that is due already would be one for ever.
                    let at = at.max(now + Nanos(1));
                    let wake = &mut self.groups[index].wake;
                    *wake = Some(wake.map_or(at, |other| other.min(at)));
                }
            }
        }
    }

    /// Workers as the policy of a group sees them: with no larger batches than the device is prepared for, or than fit the
    /// objective.
    fn offered(&self, index: usize) -> Vec<Worker> {
        let ready = self.groups[index].ready.as_ref().and_then(|ready| ready.iter().max());
        let most = ready.copied().unwrap_or(usize::MAX).min(self.max_fitting);
        let offered = |worker: &WorkerState| Worker {
            batch: worker.batch.min(most),
            busy: worker.running > 0 || (self.rules.exact && worker.batch > most),
        };
        self.workers.iter().map(offered).collect()
    }

    fn ask(&mut self, now: Nanos, index: usize, workers: &[Worker]) -> Vec<Decision> {
        let group = &mut self.groups[index];
        let (profile, running) = (group.learned.profile(), group.running);
        let view = ModelView { waiting: &group.rows, workers, profile, running };
        let mut decisions = Vec::new();
        group.policy.decide(now, &view, &mut decisions);
        decisions
    }

    fn give_up(&mut self, index: usize, rows: usize, given_up: &mut Vec<Member<M>>) {
        let group = &mut self.groups[index];
        let mut left = rows;
        while let Some(front) = group.members.front().filter(|front| front.rows <= left) {
            left -= front.rows;
            let Some(member) = group.members.pop_front() else { break };
            self.deadlines.remove(&(member.deadline, member.id));
            self.waiting -= 1;
            given_up.push(member);
        }
        group.recount(&self.rules);
    }

    /// The core took the batch in as `job`; or did not.
    pub(super) fn asked(&mut self, group: usize, job: Option<RequestId>) {
        let group = &mut self.groups[group];
        match (job, &mut group.slot) {
            (Some(job), Some(slot)) => slot.job = Some(job),
            _ => group.slot = None,
        }
    }

    /// The core starts `job`: who waits gets on as far as there are seats.
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
        // A request is never split: one that is larger than the batch that was decided is a batch of its own.
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
        self.jobs.push(StartedBatch { id: job, group: index, worker, began, all, members });
        FormedBatch { rows, deadline }
    }

    /// The worker and the rows of a batch that starts now. For one that had to wait the policy is asked again: more may have
    /// come meanwhile.
    fn worker_and_rows(&mut self, now: Nanos, index: usize, slot: BatchSlot) -> (usize, usize) {
        if now <= slot.asked {
            return (slot.worker, slot.count);
        }
        let workers = self.offered(index);
        if self.rules.takes_all_waiting() {
            let all = self.groups[index].rows.len().min(workers[slot.worker].batch);
            return (slot.worker, all.max(slot.count));
        }
        match self.ask(now, index, &workers).first() {
            Some(Decision::Launch { worker, count }) if *worker < workers.len() => {
                (*worker, (*count).min(workers[*worker].batch))
            }
            _ => (slot.worker, slot.count),
        }
    }

    /// Those who ride on `job`, in the batch's order.
    pub(super) fn members_of(&mut self, job: RequestId) -> impl Iterator<Item = &mut Member<M>> {
        self.jobs.iter_mut().filter(move |other| other.id == job).flat_map(|job| &mut job.members)
    }

    /// The device's time until `now`.
    fn count_time(&mut self, now: Nanos) -> Nanos {
        let passed = now.since(self.counted_until).0;
        let share = passed.checked_div(self.jobs.len() as u64);
        self.device_time += Nanos(share.unwrap_or(0));
        self.counted_until = now;
        self.device_time
    }

    /// `job` is over; `plain` says that its time tells what such a batch takes.
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
        self.workers[worker].running -= 1;
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

    /// Everybody of the group that waits for `job`, for whom it cannot be had.
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
