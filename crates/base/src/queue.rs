//! A bounded queue that returns items that do not fit.

use std::collections::VecDeque;

/// First in, first out, never longer than its capacity.
#[derive(Clone, Debug)]
pub struct BoundedQueue<T> {
    items: VecDeque<T>,
    capacity: usize,
}

impl<T> BoundedQueue<T> {
    /// An empty queue that holds at most `capacity` items and never allocates again.
    pub fn new(capacity: usize) -> BoundedQueue<T> {
        BoundedQueue { items: VecDeque::with_capacity(capacity), capacity }
    }

    /// Appends `item`, or returns it if the queue is full.
    pub fn push(&mut self, item: T) -> Result<(), T> {
        if self.items.len() >= self.capacity {
            return Err(item);
        }
        self.items.push_back(item);
        Ok(())
    }

    /// Takes the oldest item.
    pub fn pop(&mut self) -> Option<T> {
        self.items.pop_front()
    }

    /// The number of items.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The maximum number of items.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_queue_returns_the_item() {
        let mut queue = BoundedQueue::new(1);
        assert_eq!(queue.push('a'), Ok(()));
        assert_eq!(queue.push('b'), Err('b'));
        assert_eq!(queue.pop(), Some('a'));
        assert!(queue.is_empty());
    }
}
