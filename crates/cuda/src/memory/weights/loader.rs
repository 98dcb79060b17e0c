//! The thread that loads and evicts weights, one command after another.
//!
//! A load may reuse the physical memory of evicted weights while it is still mapped at their
//! addresses; those mappings are removed while copies run. Nothing reads through them, since an
//! evicted program does not run before it is loaded again.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel,
};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use base::Bytes;
use device::residency::{LoadCallback, LoadProgress, MemoryUse};
use device::thread_placement::{self, LoneThread};

use super::arrival::{group_ends, group_of};
use super::physical_pool::{PhysicalMemoryPool, WeightMemoryCounts};
use super::{MappedMemory, ProgramWeights, ResidencyState, Slab};
use crate::driver::{
    Context, Event, PhysicalMemory, PinnedWord, Priority, Stream, granularity, is_reached,
};
use crate::error::CudaError;
use crate::memory::SpareOwner;
use crate::options::CudaOptions;
use crate::preempt::driver_backoff::DriverBackoff;
use crate::preempt::rt_activity::RtActivity;

/// Assumed copy speed until one was measured, in bytes per second.
const SPEED_GUESS: f64 = 20e9;

/// How long the thread polls for commands before it sleeps: the load that wakes it pays for the
/// wake-up.
const IDLE: Duration = Duration::from_millis(10);

/// How long memory for an urgent load waits for running RT segments before it is mapped.
const MAP_WAIT: Duration = Duration::from_micros(300);

/// How long other mapping and unmapping waits for a gap in RT activity.
const GAP_WAIT: Duration = Duration::from_millis(1);

/// How long a copy waits for driver backoff.
const BACKOFF_WAIT: Duration = Duration::from_micros(100);

/// After this long without an arrival the driver is asked whether copies still run.
const STALL_CHECK: Duration = Duration::from_millis(100);

/// Bytes per copy while real time is active: its inputs use the same bus, and small copies let them
/// through.
const CHUNK_NEXT_TO_RT: u64 = 256 << 10;

/// How long memory of removed programs is kept for the next ones.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// Smaller loads are not used to measure the speed.
const MIN_MEASURED_BYTES: u64 = 8 << 20;

/// The handle of the loader thread of one device. The thread ends when the device and the last
/// program are gone.
pub(crate) struct WeightLoader {
    commands: Sender<WeightCommand>,
    counts: Arc<WeightMemoryCounts>,
    /// Allocation granularity.
    pub(crate) granularity: u64,
    loads: Arc<AtomicUsize>,
    thread: ThreadId,
}

pub(super) enum WeightCommand {
    Load {
        weights: Arc<ProgramWeights>,
        urgent: bool,
        report: LoadCallback,
    },
    Evict(Arc<ProgramWeights>),
    /// Memory of a program that was dropped.
    Discard(MappedMemory),
    /// Memory that is kept goes back to the driver; replies whether there was any.
    ReleaseKept(SyncSender<bool>),
}

impl WeightLoader {
    /// Starts the thread. It delays calls that would delay real time.
    pub(crate) fn start(
        memory_stream: &Arc<Stream>,
        rt_activity: &Arc<RtActivity>,
        driver_backoff: &Arc<DriverBackoff>,
        options: &CudaOptions,
    ) -> Result<WeightLoader, CudaError> {
        let context = memory_stream.context();
        let granularity = granularity(context)?;
        let counts = Arc::new(WeightMemoryCounts::default());
        let loads = Arc::new(AtomicUsize::new(0));
        // At most one load and one eviction per program are in the channel, except for a program
        // that is being dropped.
        let (commands, receiver) = channel();
        let loader = LoaderThread {
            stream: Stream::new(context, Priority::Low)?,
            word: Arc::new(PinnedWord::new(context)?),
            fences: 0,
            pieces: PhysicalMemoryPool::new(
                context.clone(),
                counts.clone(),
                granularity,
                options.spare_bytes,
            ),
            release_at: None,
            memory_stream: memory_stream.clone(),
            rt_activity: rt_activity.clone(),
            driver_backoff: driver_backoff.clone(),
            unmap_later: VecDeque::new(),
            arriving: VecDeque::new(),
            loads: loads.clone(),
            counts: counts.clone(),
            speed: SPEED_GUESS,
            free_since: Instant::now(),
            driver_checked: Instant::now(),
            chunk: options.weights_chunk_bytes.max(granularity).next_multiple_of(granularity),
            urgent: false,
            context: context.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("cuda-weights".to_string())
            .spawn(move || {
                let _processor = thread_placement::enter_alone(LoneThread::Driver);
                loader.run(&receiver);
            })
            .map_err(|_| CudaError::Misuse("cannot start the loader thread"))?;
        let thread = thread.thread().id();
        Ok(WeightLoader { commands, counts, granularity, loads, thread })
    }

    /// Number of loads in flight.
    pub(crate) fn loads(&self) -> Arc<AtomicUsize> {
        self.loads.clone()
    }

    pub(super) fn command(&self, command: WeightCommand) {
        // The thread ends only when this sender is gone.
        let _ = self.commands.send(command);
    }

    /// Memory used by weights and memory kept for the next ones.
    pub(crate) fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            weights: Bytes(self.counts.used.load(Ordering::Relaxed)),
            max_weights: Bytes(self.counts.peak_used.load(Ordering::Relaxed)),
            spare: Bytes(self.counts.kept.load(Ordering::Relaxed)),
            system: None,
        }
    }
}

impl SpareOwner for WeightLoader {
    fn drop_spares(&self) -> bool {
        // The thread itself releases what it keeps before it asks others.
        if std::thread::current().id() == self.thread {
            return false;
        }
        let (done, released) = sync_channel(1);
        self.command(WeightCommand::ReleaseKept(done));
        released.recv().unwrap_or(false)
    }
}

/// Weights in flight, for runs that start before all have arrived.
pub(crate) struct WeightArrival {
    /// Slabs that are resident once the last group has arrived.
    pub(super) slabs: usize,
    /// Ends of the groups, in the order of arrival, and the events behind their copies.
    ends: Vec<u64>,
    events: Vec<Event>,
    fences: Vec<u32>,
    word: Arc<PinnedWord>,
}

impl WeightArrival {
    /// How many groups have arrived.
    fn groups_arrived(&self) -> usize {
        let passed = self.word.load();
        self.fences.partition_point(|fence| is_reached(passed, *fence))
    }

    /// Work enqueued on `stream` from now on waits for the first `bytes`; false when they have
    /// arrived.
    pub(crate) fn block_stream(&self, stream: &Stream, bytes: u64) -> Result<bool, CudaError> {
        let group = group_of(&self.ends, bytes);
        if group < self.groups_arrived() {
            return Ok(false);
        }
        match self.events.get(group) {
            Some(event) => event.block_stream(stream).map(|()| true),
            None => Ok(false),
        }
    }
}

struct PendingLoad {
    weights: Arc<ProgramWeights>,
    report: LoadCallback,
    arrival: Arc<WeightArrival>,
    /// Bytes before those of this load.
    from: u64,
    issued: Instant,
    /// How many groups had arrived at the last poll, and since when.
    seen: (usize, Instant),
    reported_runnable: bool,
}

struct LoaderThread {
    context: Arc<Context>,
    stream: Stream,
    word: Arc<PinnedWord>,
    fences: u32,
    pieces: PhysicalMemoryPool,
    /// When memory of removed programs goes back to the driver.
    release_at: Option<Instant>,
    /// The stream on which memory of runs is freed.
    memory_stream: Arc<Stream>,
    /// For the gaps in which memory is mapped and unmapped.
    rt_activity: Arc<RtActivity>,
    /// Active while real time is inside the driver.
    driver_backoff: Arc<DriverBackoff>,
    /// Slabs of evicted weights whose memory is still mapped.
    unmap_later: VecDeque<(Weak<ProgramWeights>, Arc<Slab>)>,
    /// Loads in flight, oldest first, in the order of their copies.
    arriving: VecDeque<PendingLoad>,
    /// Length of `arriving`, for other threads.
    loads: Arc<AtomicUsize>,
    counts: Arc<WeightMemoryCounts>,
    /// Bytes per second.
    speed: f64,
    /// When the last load was complete.
    free_since: Instant,
    /// When the driver was last asked whether copies still run.
    driver_checked: Instant,
    /// Bytes per copy while nothing is delayed by it.
    chunk: u64,
    /// An RT request waits for the load that is being issued.
    urgent: bool,
}

impl LoaderThread {
    fn run(mut self, receiver: &Receiver<WeightCommand>) {
        let mut idle_since = Instant::now();
        loop {
            let busy = !self.arriving.is_empty() || !self.unmap_later.is_empty();
            let command = match receiver.try_recv() {
                Ok(command) => Some(command),
                Err(TryRecvError::Disconnected) => return self.close(),
                Err(TryRecvError::Empty) if busy => None,
                Err(TryRecvError::Empty) if idle_since.elapsed() < IDLE => {
                    // Others that hold the driver's lock may share its processor.
                    std::thread::yield_now();
                    continue;
                }
                Err(TryRecvError::Empty) => match self.wait_for_command(receiver) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => {
                        self.release_kept();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => return self.close(),
                },
            };
            match command {
                Some(WeightCommand::Load { weights, urgent, report }) => {
                    self.load(weights, urgent, report)
                }
                Some(WeightCommand::Evict(weights)) => self.evict(&weights),
                Some(WeightCommand::Discard(mapped)) => self.discard(mapped),
                Some(WeightCommand::ReleaseKept(done)) => {
                    // The thread that asked may be gone.
                    let _ = done.try_send(self.release_kept());
                }
                None => self.poll_loads(),
            }
            self.loads.store(self.arriving.len(), Ordering::Relaxed);
            idle_since = Instant::now();
        }
    }

    /// Sleeps until there is a command, or until memory is to be released.
    fn wait_for_command(
        &self,
        receiver: &Receiver<WeightCommand>,
    ) -> Result<WeightCommand, RecvTimeoutError> {
        match self.release_at {
            Some(at) => receiver.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }

    /// Polls the loads in flight and unmaps one slab of evicted weights.
    fn poll_loads(&mut self) {
        let due = self.poll();
        let stalled =
            |load: &PendingLoad| load.seen.1.max(self.driver_checked).elapsed() > STALL_CHECK;
        if self.arriving.front().is_some_and(stalled) {
            self.driver_checked = Instant::now();
            if let Err(err) = self.stream.is_idle() {
                self.fail_all(&err);
            }
        }
        match self.unmap_later.pop_front() {
            Some((_, slab)) => {
                self.rt_activity.wait_for_gap(GAP_WAIT.min(due / 2));
                self.unmap(&slab);
            }
            // A wake-up costs some tens of microseconds, which a load that is about to be reported
            // does not have.
            None if due > Duration::from_millis(1) => {
                std::thread::sleep(Duration::from_micros(100))
            }
            None => std::thread::yield_now(),
        }
    }

    fn unmap(&self, slab: &Slab) {
        let since = Instant::now();
        let unmapped = slab.range.unmap(0, slab.range.bytes());
        let (bytes, micros) = (slab.range.bytes(), since.elapsed().as_micros() as u64);
        tracing::debug!(bytes, micros, "weights unmapped");
        if let Err(err) = unmapped {
            tracing::error!(%err, "evicted weights not unmapped");
        }
    }

    fn unmap_evicted(&mut self) {
        while let Some((_, slab)) = self.unmap_later.pop_front() {
            self.rt_activity.wait_for_gap(GAP_WAIT);
            self.unmap(&slab);
        }
    }

    fn close(&mut self) {
        // What is enqueued reads host copies of programs that still exist.
        let _ = self.stream.synchronize();
        self.unmap_evicted();
    }

    fn load(&mut self, weights: Arc<ProgramWeights>, urgent: bool, report: LoadCallback) {
        let issued = Instant::now();
        self.urgent = urgent;
        self.loads.store(self.arriving.len() + 1, Ordering::Relaxed);
        let before = weights.mapped().extent();
        let loaded = match self.issue(&weights) {
            // Memory kept for later runs is worth less than weights that a request waits for.
            Err(CudaError::OutOfMemory { .. }) if weights.drop_spares() => {
                self.roll_back(&weights, before);
                self.issue(&weights)
            }
            loaded => loaded,
        };
        match loaded {
            Ok((arrival, from)) => {
                let micros = issued.elapsed().as_micros() as u64;
                let bytes = arrival.ends.last().map_or(0, |end| end - from);
                tracing::debug!(bytes, micros, "weight copies enqueued");
                let arrival = Arc::new(arrival);
                weights.set_state(ResidencyState::Loading(arrival.clone()));
                let (seen, reported_runnable) = ((0, issued), false);
                self.arriving.push_back(PendingLoad {
                    weights,
                    report,
                    arrival,
                    from,
                    issued,
                    seen,
                    reported_runnable,
                });
            }
            Err(err) => {
                self.roll_back(&weights, before);
                tracing::warn!(%err, "weights not loaded");
                let err = weights.error(err);
                report(LoadProgress::Failed(err));
            }
        }
    }

    /// Rolls back a load that failed halfway to the extent `before`.
    fn roll_back(&mut self, weights: &Arc<ProgramWeights>, before: (usize, usize)) {
        if let Err(err) = self.stream.synchronize() {
            tracing::error!(%err, "stream not drained after a failed load");
        }
        let (ranges, pieces) = weights.mapped().split_off(before);
        ranges.iter().for_each(|slab| self.unmap(slab));
        self.pieces.put_back(pieces);
    }

    /// Maps memory for all slabs that have none and enqueues the copies.
    fn issue(&mut self, weights: &Arc<ProgramWeights>) -> Result<(WeightArrival, u64), CudaError> {
        let same_program = |(owner, _): &(Weak<ProgramWeights>, Arc<Slab>)| {
            std::ptr::eq(owner.as_ptr(), Arc::as_ptr(weights))
        };
        while let Some(at) = self.unmap_later.iter().position(same_program) {
            if let Some((_, slab)) = self.unmap_later.remove(at) {
                self.unmap(&slab);
            }
        }
        let slabs = weights.slabs();
        let first = weights.mapped().slabs;
        let from = slabs.get(first).map_or(0, |slab| slab.begins);
        let end = slabs.last().map_or(0, |slab| slab.begins + slab.used);
        let ends: Vec<u64> =
            group_ends(end - from, self.chunk).into_iter().map(|end| from + end).collect();
        let (events, fences) = (Vec::new(), Vec::new());
        let word = self.word.clone();
        let mut arrival = WeightArrival { slabs: slabs.len(), ends, events, fences, word };
        for slab in &slabs[first..] {
            self.issue_slab(weights, slab, &mut arrival)?;
        }
        self.fence_groups(u64::MAX, &mut arrival)?;
        weights.mapped().slabs = slabs.len();
        Ok((arrival, from))
    }

    fn issue_slab(
        &mut self,
        weights: &Arc<ProgramWeights>,
        slab: &Arc<Slab>,
        arrival: &mut WeightArrival,
    ) -> Result<(), CudaError> {
        weights.mapped().ranges.push(slab.clone());
        let unmap_later = &mut self.unmap_later;
        let mut unmap = || {
            for (_, slab) in unmap_later.drain(..) {
                slab.range.unmap(0, slab.range.bytes())?;
            }
            Ok(())
        };
        let pieces = self.pieces.take(slab.range.bytes(), &mut unmap)?;
        let sizes: Vec<u64> = pieces.iter().map(PhysicalMemory::bytes).collect();
        let first = weights.mapped().pieces.len();
        weights.mapped().pieces.extend(pieces);
        let mut at = 0;
        for (number, size) in sizes.iter().enumerate() {
            if self.urgent {
                self.rt_activity.wait_until_idle(MAP_WAIT);
            } else {
                self.rt_activity.wait_for_gap(GAP_WAIT);
            }
            slab.range.map(at, &weights.mapped().pieces[first + number])?;
            slab.range.open(at, *size)?;
            // This piece is filled while the next one is mapped.
            self.copy(slab, at, (at + size).min(slab.used), arrival)?;
            at += size;
        }
        Ok(())
    }

    /// Enqueues copies of a range of `slab`, in chunks.
    fn copy(
        &mut self,
        slab: &Slab,
        from: u64,
        to: u64,
        arrival: &mut WeightArrival,
    ) -> Result<(), CudaError> {
        let mut at = from;
        while at < to {
            let next_to_rt = !self.urgent && self.rt_activity.is_recent();
            let at_once = if next_to_rt { CHUNK_NEXT_TO_RT } else { self.chunk };
            let count = (to - at).min(at_once - at % at_once);
            for (source, bytes, target) in slab.sources(at, count) {
                self.driver_backoff.wait(BACKOFF_WAIT);
                // SAFETY: the target is mapped and accessible; the host copy is not written again
                // and is freed only after the program, which waits for this stream.
                unsafe { self.stream.copy_in(target, source, bytes as usize) }?;
            }
            at += count;
            self.fence_groups(slab.begins + at, arrival)?;
        }
        Ok(())
    }

    /// Enqueues an event and a fence behind every group that ends at or before `enqueued`.
    fn fence_groups(&mut self, queued: u64, arrival: &mut WeightArrival) -> Result<(), CudaError> {
        while arrival.ends.get(arrival.events.len()).is_some_and(|end| *end <= queued) {
            let event = Event::untimed(&self.context)?;
            event.record(&self.stream)?;
            self.fences = self.fences.wrapping_add(1);
            // SAFETY: the word lives as long as this thread and all arrivals.
            unsafe { self.stream.write_word(self.word.device_address(), self.fences) }?;
            arrival.events.push(event);
            arrival.fences.push(self.fences);
        }
        Ok(())
    }

    /// Reports loads that are runnable or complete; returns the time until there can be more to
    /// report.
    fn poll(&mut self) -> Duration {
        while let Some(first) = self.arriving.front() {
            if first.arrival.groups_arrived() < first.arrival.ends.len() {
                break;
            }
            if let Some(done) = self.arriving.pop_front() {
                self.finish(done);
            }
        }
        let now = Instant::now();
        let mut ahead = 0.0;
        let (mut due, speed) = (Duration::MAX, self.speed);
        for load in &mut self.arriving {
            let arrived = load.arrival.groups_arrived();
            if load.seen.0 != arrived {
                load.seen = (arrived, now);
            }
            let end = load.arrival.ends.last().copied().unwrap_or(load.from);
            let known = match arrived {
                0 => load.from,
                groups => load.arrival.ends[groups - 1],
            };
            // Between two groups the copies are assumed to proceed at the usual speed.
            let next = load.arrival.ends.get(arrived).copied().unwrap_or(end);
            let moving = ahead == 0.0;
            let since = if moving { now.duration_since(load.seen.1).as_secs_f64() } else { 0.0 };
            let reached = known as f64 + (since * speed).min((next - known) as f64);
            let before = ahead;
            let arrives_in = |bytes: u64| match bytes <= known {
                true => Duration::ZERO,
                false => {
                    Duration::from_secs_f64((before + (bytes as f64 - reached).max(0.0)) / speed)
                }
            };
            due = due.min(arrives_in(end));
            if !load.reported_runnable
                && let Some(timing) = load.weights.timing()
            {
                due = due.min(arrives_in(end).saturating_sub(timing.run));
                if timing.may_start(arrives_in) {
                    load.reported_runnable = true;
                    (load.report)(LoadProgress::Runnable);
                }
            }
            ahead += end as f64 - reached;
        }
        due
    }

    fn finish(&mut self, load: PendingLoad) {
        let now = Instant::now();
        let bytes = load.arrival.ends.last().map_or(0, |end| end - load.from);
        let took = now.duration_since(load.issued.max(self.free_since)).as_secs_f64();
        if bytes >= MIN_MEASURED_BYTES && took > 0.0 {
            self.speed = 0.7 * self.speed + 0.3 * (bytes as f64 / took).min(1e12);
        }
        let micros = now.duration_since(load.issued).as_micros() as u64;
        tracing::debug!(bytes, micros, speed = self.speed, "weights loaded");
        self.free_since = now;
        load.weights.set_state(ResidencyState::Resident(load.arrival.slabs));
        (load.report)(LoadProgress::Loaded);
    }

    /// Waits for a load of `weights` that is in flight.
    fn wait_for_load(&mut self, weights: &Arc<ProgramWeights>) {
        while self.arriving.iter().any(|load| Arc::ptr_eq(&load.weights, weights)) {
            if let Err(err) = self.stream.synchronize() {
                self.fail_all(&err);
            }
            self.poll();
        }
    }

    /// The device is faulted: nothing arrives any more.
    fn fail_all(&mut self, err: &CudaError) {
        for load in std::mem::take(&mut self.arriving) {
            load.weights.set_state(ResidencyState::Evicted);
            (load.report)(LoadProgress::Failed(load.weights.error(err.clone())));
        }
    }

    fn evict(&mut self, weights: &Arc<ProgramWeights>) {
        self.wait_for_load(weights);
        weights.set_state(ResidencyState::Evicted);
        self.release(weights);
    }

    /// Keeps the memory of `weights` for other weights; it is unmapped later.
    fn release(&mut self, weights: &Arc<ProgramWeights>) {
        let MappedMemory { pieces, ranges, .. } = std::mem::take(&mut *weights.mapped());
        self.unmap_later.extend(ranges.into_iter().map(|slab| (Arc::downgrade(weights), slab)));
        self.pieces.put_back(pieces);
    }

    /// Keeps the memory of a dropped program for the next one, for a while.
    fn discard(&mut self, mapped: MappedMemory) {
        let MappedMemory { pieces, ranges, .. } = mapped;
        for slab in &ranges {
            self.rt_activity.wait_for_gap(GAP_WAIT);
            self.unmap(slab);
        }
        self.pieces.put_back(pieces);
        self.release_beyond(self.pieces.max_kept());
        self.release_at = Some(Instant::now() + KEPT_FOR);
    }

    /// Returns memory that is kept to the driver; false when there was none.
    fn release_kept(&mut self) -> bool {
        self.release_at = None;
        let kept = self.counts.kept.load(Ordering::Relaxed) > 0;
        self.release_beyond(0);
        // The memory of their runs was freed before, into the driver's memory pool.
        let trimmed = self.memory_stream.synchronize().and_then(|()| self.context.trim());
        if let Err(err) = trimmed {
            tracing::error!(%err, "memory not released");
        }
        kept
    }

    fn release_beyond(&mut self, limit: u64) {
        if self.counts.kept.load(Ordering::Relaxed) <= limit {
            return;
        }
        // They may still be mapped where they were before an eviction.
        self.unmap_evicted();
        self.rt_activity.wait_for_gap(GAP_WAIT);
        if let Err(err) = self.pieces.release_beyond(limit, &mut || Ok(())) {
            tracing::error!(%err, "memory not released");
        }
    }
}
