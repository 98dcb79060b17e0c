//! The requests under way, by number.

use base::Nanos;
use model::config::Class;

use super::{End, ModelId, Progress};

/// A request's number. Numbers are used again, but never one that somebody may still hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId {
    slot: u32,
    generation: u64,
}

impl RequestId {
    /// Position among the requests under way; below the limit given to the core.
    pub fn slot(self) -> usize {
        self.slot as usize
    }

    /// Grows with every request: earlier arrivals have smaller ones.
    pub fn order(self) -> u64 {
        self.generation
    }
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its inputs are on their way, or its model's weights, or the device is.
    Preparing,
    /// In the queue of its class.
    Waiting,
    /// On a queue of the device.
    Running { queue: usize },
    /// On a queue of the device, to end this way when it leaves.
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
    pub(super) progress: Progress,
    /// Times the device fell over under it.
    pub(super) losses: u32,
    /// Whether its inputs are on their way.
    pub(super) copying: bool,
    pub(super) phase: Phase,
}

#[derive(Debug)]
struct RequestSlot {
    generation: u64,
    state: Option<RequestState>,
}

/// A slab with a bound.
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

    /// All requests under way, the earliest arrival first.
    pub(super) fn ids(&self) -> Vec<RequestId> {
        let live = |(slot, entry): (usize, &RequestSlot)| {
            let id = RequestId { slot: slot as u32, generation: entry.generation };
            entry.state.is_some().then_some(id)
        };
        let mut ids: Vec<RequestId> = self.slots.iter().enumerate().filter_map(live).collect();
        ids.sort_by_key(|id| id.order());
        ids
    }

    /// Sets a number aside for a request that is about to arrive.
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

    /// Gives back a number whose request was never inserted.
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
