//! What a stream of the simulated GPU holds.

use std::collections::VecDeque;

use base::Nanos;

use super::Segment;
use crate::Leave;

/// Units one multiprocessor is divided into; every occupancy from 1 to 10 divides it.
pub(super) const UNITS_PER_SM: u64 = 2_520;

/// Blocks that were placed together and end together.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) blocks: u32,
    pub(super) units: u64,
    /// Time still to go if nothing slows it.
    pub(super) work: f64,
    /// How many times slower than alone it goes now.
    pub(super) slow: f64,
    /// When `work` was last brought up to date.
    pub(super) since: Nanos,
    pub(super) placed: Nanos,
    pub(super) ends: Nanos,
}

/// A kernel that has been dispatched.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    pub(super) step: usize,
    pub(super) first_tile: u32,
    /// Blocks placed so far, those before `first_tile` included.
    pub(super) placed: u32,
    /// Blocks done so far, those before `first_tile` included.
    pub(super) done: u32,
    pub(super) blocks: u32,
    pub(super) block_ns: f64,
    pub(super) units: u64,
    pub(super) memory_share: f32,
    /// Blocks that run at once when it is alone.
    pub(super) at_once: u32,
    pub(super) idempotent: bool,
    /// Order in which kernels became ready.
    pub(super) ready: u64,
    pub(super) groups: Vec<Group>,
    pub(super) began: Option<Nanos>,
}

impl Kernel {
    pub(super) fn held(&self) -> u64 {
        self.groups.iter().map(|group| group.units).sum()
    }

    /// Blocks' worth of finished tiles in a group that leaves now. Whoever comes next takes any tile that is
    /// left, so what counts is how many there are.
    pub(super) fn kept(&self, group: &Group, tile_ns: u64, now: Nanos) -> u32 {
        let tiles = (self.block_ns / tile_ns.max(1) as f64).ceil().max(1.0);
        let work = group.work - (now - group.since).0 as f64 / group.slow;
        let share = (1.0 - work.max(0.0) / self.block_ns).clamp(0.0, 1.0);
        let finished = (share * tiles).floor() / tiles;
        (f64::from(group.blocks) * finished).floor() as u32
    }

    pub(super) fn started(&self) -> bool {
        !self.groups.is_empty() || self.done > self.first_tile
    }
}

/// A segment on its way.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) segment: Segment,
    pub(super) step: usize,
    pub(super) tile: u32,
    pub(super) busy: Nanos,
    pub(super) announced: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) high_priority: bool,
    pub(super) segment_capacity: usize,
    pub(super) segments: VecDeque<Head>,
    pub(super) kernel: Option<Kernel>,
    pub(super) dispatch_at: Option<Nanos>,
    pub(super) leaving: Option<Leave>,
    pub(super) abort_at: Option<Nanos>,
    pub(super) left_at: Option<Nanos>,
    /// Units it may hold; what is above leaves as finely as the device allows.
    pub(super) hold: u64,
    /// Units up to which it may place new blocks.
    pub(super) take: u64,
    /// May run one kernel beside a kernel of another stream, which waits for it.
    pub(super) granted: bool,
    /// Its kernel is complete but waits for one that was granted beside it.
    pub(super) fused: bool,
    /// A completion got lost: nothing more is heard of it until a reset.
    pub(super) stuck: bool,
    pub(super) work: StreamWork,
}

/// Unit-nanoseconds a stream has used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StreamWork {
    /// In all, in multiprocessor-nanoseconds.
    pub used: f64,
    /// Of these, thrown away or done a second time.
    pub redone: f64,
}

impl Stream {
    pub(super) fn new(high_priority: bool, segment_capacity: usize) -> Stream {
        Stream {
            high_priority,
            segment_capacity,
            segments: VecDeque::with_capacity(segment_capacity),
            kernel: None,
            dispatch_at: None,
            leaving: None,
            abort_at: None,
            left_at: None,
            hold: u64::MAX,
            take: u64::MAX,
            granted: false,
            fused: false,
            stuck: false,
            work: StreamWork::default(),
        }
    }

    pub(super) fn held(&self) -> u64 {
        self.kernel.as_ref().map_or(0, Kernel::held)
    }

    /// The next moment something happens on it by itself.
    pub(super) fn next_event(&self) -> Option<Nanos> {
        let groups = self.kernel.iter().flat_map(|kernel| &kernel.groups);
        let timers = [self.dispatch_at, self.abort_at, self.left_at];
        groups.map(|group| group.ends).chain(timers.into_iter().flatten()).min()
    }

    /// Whether new blocks of its kernel may be placed.
    pub(super) fn may_place(&self) -> bool {
        let Some(kernel) = &self.kernel else { return false };
        let goes_on = match self.leaving {
            None => true,
            // The flag is looked at when a kernel begins, not afterwards.
            Some(Leave::BetweenLaunches) => kernel.started(),
            Some(_) => false,
        };
        goes_on && self.take > 0 && kernel.placed < kernel.blocks
    }

    pub(super) fn clear(&mut self) {
        self.segments.clear();
        self.kernel = None;
        (self.dispatch_at, self.abort_at, self.left_at) = (None, None, None);
        self.leaving = None;
        (self.granted, self.fused, self.stuck) = (false, false, false);
    }
}
