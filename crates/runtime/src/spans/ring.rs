//! The latest spans of a node: a ring that drops the oldest.

use std::collections::VecDeque;

use super::Span;

/// The latest spans, and how many there were.
#[derive(Debug)]
pub struct SpanRing {
    spans: VecDeque<Span>,
    capacity: usize,
    /// Spans recorded so far; the last one has this position less one.
    recorded: u64,
    numbers: u64,
}

/// Spans read from a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanRead {
    /// Position from which to read on.
    pub next: u64,
    /// Spans after the given position that were dropped before they were read.
    pub lost: u64,
}

impl SpanRing {
    /// A ring of at most `capacity` spans. Memory is allocated as spans are recorded.
    pub fn new(capacity: usize) -> SpanRing {
        SpanRing { spans: VecDeque::new(), capacity, recorded: 0, numbers: 0 }
    }

    /// A new number for a request or a job.
    pub fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Records a span that ended.
    pub fn record(&mut self, span: Span) {
        self.recorded += 1;
        if self.spans.len() >= self.capacity {
            self.spans.pop_front();
        }
        if self.capacity > 0 {
            self.spans.push_back(span);
        }
    }

    /// Position of the next span.
    pub fn end(&self) -> u64 {
        self.recorded
    }

    /// Appends at most `limit` spans from position `from` on.
    pub fn read(&self, from: u64, limit: usize, spans: &mut Vec<Span>) -> SpanRead {
        let oldest = self.recorded - self.spans.len() as u64;
        let first = from.clamp(oldest, self.recorded);
        let index = (first - oldest) as usize;
        let count = limit.min(self.spans.len() - index);
        spans.extend(self.spans.range(index..index + count));
        SpanRead { next: first + count as u64, lost: first.saturating_sub(from) }
    }
}

#[cfg(test)]
mod tests {
    use base::Nanos;

    use super::*;
    use crate::node::ModelKey;
    use crate::spans::EvictionSpan;

    fn eviction(at: u64) -> Span {
        Span::Eviction(EvictionSpan { model: ModelKey::new(0, 1), at: Nanos(at) })
    }

    fn times(spans: &[Span]) -> Vec<u64> {
        spans.iter().map(|span| span.began().0).collect()
    }

    #[test]
    fn a_slow_reader_loses_the_oldest_and_learns_how_many() {
        let mut ring = SpanRing::new(4);
        let mut spans = Vec::new();
        (0..3).for_each(|at| ring.record(eviction(at)));
        assert_eq!(ring.read(0, 2, &mut spans), SpanRead { next: 2, lost: 0 });
        (3..10).for_each(|at| ring.record(eviction(at)));
        assert_eq!(ring.read(2, 100, &mut spans), SpanRead { next: 10, lost: 4 });
        assert_eq!(times(&spans), [0, 1, 6, 7, 8, 9]);
        assert_eq!(ring.read(10, 100, &mut spans), SpanRead { next: 10, lost: 0 });
        // A position from another ring is no reason to fail.
        assert_eq!(ring.read(u64::MAX, 100, &mut spans).next, 10);
    }

    #[test]
    fn a_span_is_as_small_as_the_command_line_says() {
        assert!(size_of::<Span>() <= 120, "{} bytes", size_of::<Span>());
    }

    #[test]
    fn a_ring_without_room_keeps_nothing() {
        let mut ring = SpanRing::new(0);
        ring.record(eviction(1));
        let mut spans = Vec::new();
        assert_eq!(ring.read(0, 10, &mut spans), SpanRead { next: 1, lost: 1 });
        assert!(spans.is_empty());
    }
}
