//! State of a stream of the simulated GPU.

use std::collections::VecDeque;

use base::Nanos;

use super::GpuSegment;
use super::profile::GpuProfile;
use crate::PreemptMode;
use crate::profile::KernelProfile;

/// Units of one SM; every occupancy from 1 to 10 divides it.
pub(super) const UNITS_PER_SM: u64 = 2_520;

/// Blocks placed within this fraction of a block's time end together, at their mean. Bounds the
/// number of groups; no end moves by more.
const TOGETHER: f64 = 1.0 / 8.0;

/// Blocks that were placed together and end together.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) blocks: u32,
    /// Tiles these blocks have to do.
    pub(super) tiles: u32,
    pub(super) units: u64,
    /// The kernel's progress when the group was placed, and when it ends.
    pub(super) from: f64,
    pub(super) until: f64,
    /// `until` of the first block in it.
    first_until: f64,
    /// When it was placed; mean over its blocks.
    pub(super) placed: Nanos,
}

impl Group {
    /// Splits off `blocks` of its blocks.
    fn split(&mut self, blocks: u32) -> Group {
        let tiles = self.tiles / self.blocks * blocks;
        let units = self.units / u64::from(self.blocks) * u64::from(blocks);
        (self.blocks, self.tiles, self.units) =
            (self.blocks - blocks, self.tiles - tiles, self.units - units);
        Group { blocks, tiles, units, ..self.clone() }
    }

    fn join(&mut self, other: &Group) {
        let (a, b) = (f64::from(self.blocks), f64::from(other.blocks));
        let mean = |x: f64, y: f64| (x * a + y * b) / (a + b);
        self.from = mean(self.from, other.from);
        self.until = mean(self.until, other.until);
        let later = (other.placed - self.placed).0 as f64 * b / (a + b);
        self.placed += Nanos(later as u64);
        self.blocks += other.blocks;
        self.tiles += other.tiles;
        self.units += other.units;
    }
}

/// A kernel that has been dispatched.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    pub(super) step: usize,
    pub(super) first_tile: u32,
    /// Tiles placed so far, those before `first_tile` included.
    pub(super) placed: u32,
    /// Tiles done so far, those before `first_tile` included.
    pub(super) done: u32,
    pub(super) tiles: u32,
    pub(super) tiles_per_block: u32,
    pub(super) block_ns: f64,
    pub(super) units: u64,
    pub(super) memory_share: f32,
    /// Blocks that run at once when the kernel is alone.
    pub(super) at_once: u32,
    pub(super) idempotent: bool,
    /// Order in which kernels became ready.
    pub(super) ready: u64,
    /// Sorted by their ends.
    pub(super) groups: VecDeque<Group>,
    /// Units its groups hold.
    pub(super) held: u64,
    /// Blocks in its groups.
    pub(super) running: u32,
    /// Work, in nanoseconds, that a block running since the dispatch has done at `since`.
    progress: f64,
    since: Nanos,
    /// Current slowdown of its blocks.
    slow: f64,
    pub(super) began: Option<Nanos>,
}

impl Kernel {
    /// Dispatched at `now`, starting at tile `tile`.
    pub(super) fn new(now: Nanos, profile: &KernelProfile, gpu: &GpuProfile, tile: u32) -> Kernel {
        let occupancy = profile.occupancy.clamp(1, 10);
        Kernel {
            step: 0,
            first_tile: tile,
            placed: tile,
            done: tile,
            tiles: gpu.tiles(profile),
            tiles_per_block: gpu.tiles_per_block(profile),
            block_ns: profile.block_ns as f64,
            units: UNITS_PER_SM / u64::from(occupancy),
            memory_share: profile.memory_share,
            at_once: profile.blocks.min(gpu.sms * profile.occupancy),
            idempotent: profile.idempotent,
            ready: 0,
            groups: VecDeque::new(),
            held: 0,
            running: 0,
            progress: 0.0,
            since: now,
            slow: 1.0,
            began: None,
        }
    }

    /// Work that a block running since the dispatch has done at `now`.
    fn progress_at(&self, now: Nanos) -> f64 {
        self.progress + (now - self.since).0 as f64 / self.slow
    }

    /// Sets the slowdown from `now` on. Returns whether it changed.
    pub(super) fn set_slow(&mut self, now: Nanos, slow: f64) -> bool {
        let changes = slow != self.slow;
        if changes {
            self.progress = self.progress_at(now);
            (self.since, self.slow) = (now, slow);
        }
        changes
    }

    /// When the first group ends.
    pub(super) fn next_end(&self) -> Option<Nanos> {
        let group = self.groups.front()?;
        Some(self.since + Nanos(((group.until - self.progress) * self.slow).ceil() as u64))
    }

    /// Removes the first group if it is complete.
    pub(super) fn pop_complete(&mut self, now: Nanos) -> Option<Group> {
        self.next_end().filter(|end| *end <= now)?;
        let group = self.groups.pop_front()?;
        self.done += group.tiles;
        self.forget(&group);
        Some(group)
    }

    /// Removes blocks that hold `over` units from the group that ends last. Returns how many of
    /// their tiles are done, and which share of their work that is. Another block takes any
    /// remaining tile, so only the number counts.
    pub(super) fn pop_unfinished(&mut self, now: Nanos, over: u64) -> Option<(Group, u32, f64)> {
        let last = self.groups.back_mut()?;
        let group = match over.div_ceil(self.units) {
            some if some < u64::from(last.blocks) => last.split(some as u32),
            _ => self.groups.pop_back()?,
        };
        self.forget(&group);
        let share = (self.progress_at(now) - group.from) / (group.until - group.from);
        let share = share.clamp(0.0, 1.0);
        let tiles_each = group.tiles.div_ceil(group.blocks);
        let finished = (share * f64::from(tiles_each)).floor() as u32 * group.blocks;
        let finished = finished.min(group.tiles);
        let did = share * f64::from(group.tiles);
        let kept = if did > 0.0 { (f64::from(finished) / did).min(1.0) } else { 0.0 };
        Some((group, finished, kept))
    }

    fn forget(&mut self, group: &Group) {
        self.held -= group.units;
        self.running -= group.blocks;
    }

    /// Places as many whole blocks as fit, or the remainder of a preempted block. Returns their
    /// units.
    pub(super) fn place(&mut self, now: Nanos, fits: u64, tiles_max: u32) -> u64 {
        let remaining = (self.tiles - self.placed).min(tiles_max);
        let whole = u64::from(remaining / self.tiles_per_block).min(fits) as u32;
        let (blocks, tiles) =
            if whole > 0 { (whole, whole * self.tiles_per_block) } else { (1, remaining) };
        let part = f64::from(tiles) / f64::from(blocks * self.tiles_per_block);
        let from = self.progress_at(now);
        let until = from + self.block_ns * part;
        let units = self.units * u64::from(blocks);
        self.placed += tiles;
        self.held += units;
        self.running += blocks;
        self.began.get_or_insert(now);
        let group = Group { blocks, tiles, units, from, until, first_until: until, placed: now };
        match self.groups.back_mut() {
            Some(last)
                if whole > 0
                    && last.tiles == last.blocks * self.tiles_per_block
                    && until >= last.until
                    && until - last.first_until <= self.block_ns * TOGETHER =>
            {
                last.join(&group);
            }
            _ => {
                let at = self.groups.partition_point(|other| other.until <= until);
                self.groups.insert(at, group);
            }
        }
        units
    }

    pub(super) fn started(&self) -> bool {
        !self.groups.is_empty() || self.done > self.first_tile
    }
}

/// An enqueued segment.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) segment: GpuSegment,
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
    /// The dispatcher is switching to it.
    pub(super) switching: bool,
    pub(super) preempting: Option<PreemptMode>,
    pub(super) abort_at: Option<Nanos>,
    pub(super) preempted_at: Option<Nanos>,
    /// Units it may hold; blocks above are preempted as finely as the device can.
    pub(super) hold: u64,
    /// Units up to which it may place new blocks.
    pub(super) take: u64,
    /// When its budget shrinks, and to how many units.
    pub(super) expiry: Option<(Nanos, u64)>,
    /// Tiles it may still place beside a kernel of another stream, which waits for them.
    pub(super) granted: Option<u32>,
    /// Its kernel is complete and waits for blocks granted beside it.
    pub(super) fused: bool,
    /// A completion was lost: it reports nothing until a reset.
    pub(super) stuck: bool,
    pub(super) work: StreamWork,
}

/// SM time that a stream has used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StreamWork {
    /// In total, in SM-nanoseconds.
    pub used: f64,
    /// Of these, discarded or repeated.
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
            preempting: None,
            abort_at: None,
            preempted_at: None,
            hold: u64::MAX,
            take: u64::MAX,
            expiry: None,
            granted: None,
            switching: false,
            fused: false,
            stuck: false,
            work: StreamWork::default(),
        }
    }

    pub(super) fn held(&self) -> u64 {
        self.kernel.as_ref().map_or(0, |kernel| kernel.held)
    }

    /// The next internal event.
    pub(super) fn next_event(&self) -> Option<Nanos> {
        let end = self.kernel.as_ref().and_then(Kernel::next_end);
        let expiry = self.expiry.map(|(at, _)| at);
        let timers = [end, self.dispatch_at, self.abort_at, self.preempted_at, expiry];
        let first =
            timers.into_iter().fold(Nanos::MAX, |first, at| first.min(at.unwrap_or(Nanos::MAX)));
        (first < Nanos::MAX).then_some(first)
    }

    /// Share of the memory bandwidth that its kernel requests.
    pub(super) fn bandwidth(&self) -> f32 {
        let requested = |kernel: &Kernel| {
            kernel.memory_share * kernel.running as f32 / kernel.at_once.max(1) as f32
        };
        self.kernel.as_ref().map_or(0.0, requested)
    }

    /// Whether new blocks of its kernel may be placed.
    pub(super) fn may_place(&self) -> bool {
        let Some(kernel) = &self.kernel else { return false };
        let continues = match self.preempting {
            None => true,
            // The flag is checked only when a kernel begins.
            Some(PreemptMode::BetweenLaunches) => kernel.started(),
            Some(_) => false,
        };
        let allowed = self.granted.is_none_or(|tiles| tiles > 0);
        continues && allowed && self.take > 0 && kernel.placed < kernel.tiles
    }

    /// Whether it runs as part of a kernel of another stream.
    pub(super) fn pads(&self) -> bool {
        self.granted.is_some() && self.held() > 0
    }

    /// Revokes its grant.
    pub(super) fn revoke(&mut self) {
        if self.granted.take().is_some() {
            (self.hold, self.take) = (0, 0);
        }
    }

    /// Whether its kernels go through the hardware dispatcher one by one. A stream with a budget is
    /// fed by a persistent worker or is part of another stream's kernel.
    pub(super) fn dispatches(&self) -> bool {
        self.hold == u64::MAX
    }

    pub(super) fn clear(&mut self) {
        self.segments.clear();
        self.kernel = None;
        (self.dispatch_at, self.abort_at, self.preempted_at) = (None, None, None);
        (self.preempting, self.granted, self.expiry) = (None, None, None);
        (self.switching, self.fused, self.stuck) = (false, false, false);
    }
}
