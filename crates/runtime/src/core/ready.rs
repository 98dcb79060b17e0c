//! A binary heap of requests with removal from its middle.

use super::RequestId;

/// Priority, key of the execution order, arrival: the smallest goes first.
pub(super) type Key = (u32, u64, u64);

const ABSENT: u32 = u32::MAX;

/// Requests by [`Key`]. Every operation is logarithmic.
#[derive(Debug, Default)]
pub(super) struct ReadyHeap {
    entries: Vec<(Key, RequestId)>,
    /// Position in `entries` by request slot.
    positions: Vec<u32>,
}

impl ReadyHeap {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn peek(&self) -> Option<(Key, RequestId)> {
        self.entries.first().copied()
    }

    pub(super) fn push(&mut self, key: Key, request: RequestId) {
        if request.slot() >= self.positions.len() {
            self.positions.resize(request.slot() + 1, ABSENT);
        }
        self.entries.push((key, request));
        self.sift_up(self.entries.len() - 1);
    }

    pub(super) fn pop(&mut self) -> Option<RequestId> {
        let (_, request) = self.peek()?;
        self.remove(request);
        Some(request)
    }

    /// Removes `request`, if it is there.
    pub(super) fn remove(&mut self, request: RequestId) {
        let Some(&position) = self.positions.get(request.slot()) else { return };
        if position == ABSENT || self.entries[position as usize].1 != request {
            return;
        }
        let position = position as usize;
        self.entries.swap_remove(position);
        self.positions[request.slot()] = ABSENT;
        if position < self.entries.len() {
            let settled = self.sift_up(position);
            self.sift_down(settled);
        }
    }

    fn sift_up(&mut self, mut position: usize) -> usize {
        while position > 0 {
            let parent = (position - 1) / 2;
            if self.entries[parent].0 <= self.entries[position].0 {
                break;
            }
            self.entries.swap(parent, position);
            self.note(position);
            position = parent;
        }
        self.note(position);
        position
    }

    fn sift_down(&mut self, mut position: usize) {
        loop {
            let left = 2 * position + 1;
            let Some(smaller) = (left..(left + 2).min(self.entries.len()))
                .min_by_key(|&child| self.entries[child].0)
            else {
                break;
            };
            if self.entries[position].0 <= self.entries[smaller].0 {
                break;
            }
            self.entries.swap(position, smaller);
            self.note(position);
            position = smaller;
        }
        self.note(position);
    }

    fn note(&mut self, position: usize) {
        let slot = self.entries[position].1.slot();
        self.positions[slot] = position as u32;
    }
}
