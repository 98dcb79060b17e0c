//! The pending requests, by number.

use base::Nanos;
use model::config::Class;

use super::{End, ModelId, ResumePoint};

/// The number of a request. Numbers are reused, with a new generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId {
    slot: u32,
    generation: u64,
}

impl RequestId {
    /// Index among the pending requests; below the limit of the core.
    pub fn slot(self) -> usize {
        self.slot as usize
    }

    /// Grows with every request: the order of arrival.
    pub fn order(self) -> u64 {
        self.generation
    }
}

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It waits for its inputs, its weights or the device.
    Preparing,
    /// In the queue of its class.
    Waiting,
    /// On a queue of the device.
    Running { queue: usize },
    /// On a queue of the device; ends so when it is preempted.
    Abandoned(End),
}

#[derive(Clone, Debug)]
pub(super) struct RequestState {
    pub(super) model: ModelId,
    pub(super) class: Class,
    pub(super) priority: u32,
    pub(super) deadline: Nanos,
    /// Rows it computes.
    pub(super) rows: usize,
    pub(super) progress: ResumePoint,
    /// Times the device was lost while it ran.
    pub(super) losses: u32,
    /// Whether its inputs are being copied.
    pub(super) copying: bool,
    pub(super) phase: Phase,
}

#[derive(Debug)]
struct RequestSlot {
    generation: u64,
    state: Option<RequestState>,
}

/// A bounded slab.
#[derive(Debug)]
pub(super) struct Requests {
    slots: Vec<RequestSlot>,
    free: Vec<u32>,
    limit: usize,
    next_generation: u64,
    live: usize,
}

impl Requests {
    pub(super) fn new(limit: usize) -> Requests {
        Requests { slots: Vec::new(), free: Vec::new(), limit, next_generation: 0, live: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.live
    }

    /// All pending requests in order of arrival.
    pub(super) fn ids(&self) -> Vec<RequestId> {
        let live = |(slot, entry): (usize, &RequestSlot)| {
            let id = RequestId { slot: slot as u32, generation: entry.generation };
            entry.state.is_some().then_some(id)
        };
        let mut ids: Vec<RequestId> = self.slots.iter().enumerate().filter_map(live).collect();
        ids.sort_by_key(|id| id.order());
        ids
    }

    /// Reserves a number for a request that is about to arrive.
    pub(super) fn reserve(&mut self) -> Option<RequestId> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < self.limit => {
                self.slots.push(RequestSlot { generation: 0, state: None });
                (self.slots.len() - 1) as u32
            }
            None => return None,
        };
        self.next_generation += 1;
        self.slots[slot as usize].generation = self.next_generation;
        Some(RequestId { slot, generation: self.next_generation })
    }

    /// Frees a number whose request was never inserted.
    pub(super) fn release(&mut self, id: RequestId) {
        if let Some(slot) = self.slot_mut(id)
            && slot.state.is_none()
        {
            slot.generation = 0;
            self.free.push(id.slot);
        }
    }

    pub(super) fn insert(&mut self, id: RequestId, state: RequestState) {
        if let Some(slot) = self.slot_mut(id) {
            slot.state = Some(state);
            self.live += 1;
        }
    }

    pub(super) fn remove(&mut self, id: RequestId) -> Option<RequestState> {
        let slot = self.slot_mut(id)?;
        let state = slot.state.take()?;
        slot.generation = 0;
        self.free.push(id.slot);
        self.live -= 1;
        Some(state)
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&RequestState> {
        let slot = self.slots.get(id.slot())?;
        if slot.generation == id.generation { slot.state.as_ref() } else { None }
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut RequestState> {
        self.slot_mut(id)?.state.as_mut()
    }

    fn slot_mut(&mut self, id: RequestId) -> Option<&mut RequestSlot> {
        self.slots.get_mut(id.slot()).filter(|slot| slot.generation == id.generation)
    }
}
