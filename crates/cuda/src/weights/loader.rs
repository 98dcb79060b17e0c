//! The thread that brings weights and takes them away, one order after another.
//!
//! Memory under new weights may be that of evicted ones, still mapped at their addresses too: those mappings are taken away while
//! copies run. Nobody reads through them, since an evicted program is not run before it is loaded again.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use base::Bytes;
use device::residency::{LoadCallback, LoadProgress, MemoryUse};

use super::arrival::{group_ends, group_of};
use super::pieces::{Counts, Pieces};
use super::{Gate, Mapped, ProgramWeights, Slab};
use crate::device::CudaOptions;
use crate::driver::{Context, Event, Piece, PinnedWord, Priority, Stream, granularity};
use crate::error::CudaError;
use crate::hub::Hub;
use crate::queue::is_reached;
use crate::quiet::Quiet;
use crate::traffic::Traffic;

/// Speed that is assumed until one was measured, in bytes per second.
const SPEED_GUESS: f64 = 20e9;

/// How long the thread looks for orders before it sleeps: waking it costs the load that comes next.
const IDLE: Duration = Duration::from_millis(10);

/// How long real time on the device is let pass before memory is mapped that other real time waits for.
const MAP_WAIT: Duration = Duration::from_micros(300);

/// How long a gap in real time is waited for before memory is mapped or unmapped otherwise.
const GAP_WAIT: Duration = Duration::from_millis(1);

/// How long a copy waits for real time to be out of the driver.
const QUIET_WAIT: Duration = Duration::from_micros(100);

/// How long nothing may arrive before the driver is asked whether anything still will.
const SILENCE: Duration = Duration::from_millis(100);

/// Bytes that are copied at once beside real time: its inputs come over the same wires, and small copies leave room between them.
const BESIDE: u64 = 256 << 10;

/// Loads smaller than this say nothing about speed.
const MEASURED: u64 = 8 << 20;

/// Where weights are put on one device. The thread ends when the last program and the device are gone.
pub(crate) struct WeightMemory {
    orders: Sender<Order>,
    counts: Arc<Counts>,
    /// What sizes are multiples of.
    pub(crate) granularity: u64,
    loads: Arc<AtomicUsize>,
}

pub(super) enum Order {
    Load {
        weights: Arc<ProgramWeights>,
        urgent: bool,
        report: LoadCallback,
    },
    Evict(Arc<ProgramWeights>),
    /// Memory of a program that is no more.
    Discard(Mapped),
}

impl WeightMemory {
    /// Starts the thread, which makes its calls when they do not hold up real time.
    pub(crate) fn start(
        memory_stream: &Arc<Stream>,
        traffic: &Arc<Traffic>,
        quiet: &Arc<Quiet>,
        options: &CudaOptions,
    ) -> Result<WeightMemory, CudaError> {
        let context = memory_stream.context();
        let granularity = granularity(context)?;
        let counts = Arc::new(Counts::default());
        let loads = Arc::new(AtomicUsize::new(0));
        // One order to load and one to evict of each program at most, but for one that is removed on its way.
        let (orders, receiver) = channel();
        let loader = Loader {
            stream: Stream::new(context, Priority::Low)?,
            word: Arc::new(PinnedWord::new(context)?),
            marks: 0,
            pieces: Pieces::new(context.clone(), counts.clone()),
            memory_stream: memory_stream.clone(),
            traffic: traffic.clone(),
            quiet: quiet.clone(),
            retired: VecDeque::new(),
            arriving: VecDeque::new(),
            loads: loads.clone(),
            speed: SPEED_GUESS,
            free_since: Instant::now(),
            asked: Instant::now(),
            chunk: options.weights_chunk_bytes.max(granularity).next_multiple_of(granularity),
            urgent: false,
            context: context.clone(),
        };
        std::thread::Builder::new()
            .name("cuda-weights".to_string())
            .spawn(move || loader.run(&receiver))
            .map_err(|_| CudaError::Misuse("the thread that loads weights does not start"))?;
        Ok(WeightMemory { orders, counts, granularity, loads })
    }

    /// How many loads are under way.
    pub(crate) fn loads(&self) -> Arc<AtomicUsize> {
        self.loads.clone()
    }

    pub(super) fn order(&self, order: Order) {
        // The thread ends only when this sender is gone.
        let _ = self.orders.send(order);
    }

    /// What weights take, and what is kept for the next ones.
    pub(crate) fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            weights: Bytes(self.counts.used.load(Ordering::Relaxed)),
            max_weights: Bytes(self.counts.most_used.load(Ordering::Relaxed)),
            spare: Bytes(self.counts.kept.load(Ordering::Relaxed)),
            system: None,
        }
    }
}

/// Weights on their way, for those who start before all are there.
pub(crate) struct Arrival {
    /// Slabs that are there with the last group.
    pub(super) slabs: usize,
    /// Where groups end, in the order of arrival, and the points behind their copies.
    ends: Vec<u64>,
    events: Vec<Event>,
    marks: Vec<u32>,
    word: Arc<PinnedWord>,
}

impl Arrival {
    /// How many groups are there.
    fn groups_there(&self) -> usize {
        let passed = self.word.load();
        self.marks.partition_point(|mark| is_reached(passed, *mark))
    }

    /// What is queued on `stream` from now on begins once the first `bytes` are there; whether it has to wait.
    pub(crate) fn hold(&self, stream: &Stream, bytes: u64) -> Result<bool, CudaError> {
        let group = group_of(&self.ends, bytes);
        if group < self.groups_there() {
            return Ok(false);
        }
        match self.events.get(group) {
            Some(event) => event.hold(stream).map(|()| true),
            None => Ok(false),
        }
    }
}

struct Arriving {
    weights: Arc<ProgramWeights>,
    report: LoadCallback,
    arrival: Arc<Arrival>,
    /// Bytes before what this load brings.
    from: u64,
    issued: Instant,
    /// When the last group that is there was seen to be.
    seen: (usize, Instant),
    told_runnable: bool,
}

struct Loader {
    context: Arc<Context>,
    stream: Stream,
    word: Arc<PinnedWord>,
    marks: u32,
    pieces: Pieces,
    /// Where memory of runs is freed.
    memory_stream: Arc<Stream>,
    /// Real time, which calls that map and unmap memory hold up.
    traffic: Arc<Traffic>,
    /// Wanted while real time is inside the driver.
    quiet: Arc<Quiet>,
    /// Addresses of evicted weights under which memory still lies.
    retired: VecDeque<(Weak<ProgramWeights>, Arc<Slab>)>,
    /// Oldest first, which is the order of their copies.
    arriving: VecDeque<Arriving>,
    /// How many those are, for others to see.
    loads: Arc<AtomicUsize>,
    /// Bytes per second.
    speed: f64,
    /// When the last load was over.
    free_since: Instant,
    /// When the driver was asked last whether copies go on.
    asked: Instant,
    /// Bytes that are copied at once where nothing is held up by it.
    chunk: u64,
    /// Real time waits for the load that is begun.
    urgent: bool,
}

impl Loader {
    fn run(mut self, receiver: &Receiver<Order>) {
        let mut idle_since = Instant::now();
        loop {
            let busy = !self.arriving.is_empty() || !self.retired.is_empty();
            let order = match receiver.try_recv() {
                Ok(order) => Some(order),
                Err(TryRecvError::Disconnected) => return self.close(),
                Err(TryRecvError::Empty) if busy => None,
                Err(TryRecvError::Empty) if idle_since.elapsed() < IDLE => {
                    std::hint::spin_loop();
                    continue;
                }
                Err(TryRecvError::Empty) => match receiver.recv() {
                    Ok(order) => Some(order),
                    Err(_) => return self.close(),
                },
            };
            match order {
                Some(Order::Load { weights, urgent, report }) => self.load(weights, urgent, report),
                Some(Order::Evict(weights)) => self.evict(&weights),
                Some(Order::Discard(mapped)) => self.discard(mapped),
                None => self.look_after(),
            }
            self.loads.store(self.arriving.len(), Ordering::Relaxed);
            idle_since = Instant::now();
        }
    }

    /// One look at what is on its way, and one mapping less of what was evicted.
    fn look_after(&mut self) {
        let due = self.look();
        let silent = |load: &Arriving| load.seen.1.max(self.asked).elapsed() > SILENCE;
        if self.arriving.front().is_some_and(silent) {
            self.asked = Instant::now();
            if let Err(err) = self.stream.is_idle() {
                self.fail_all(&err);
            }
        }
        match self.retired.pop_front() {
            Some((_, slab)) => {
                self.traffic.wait_for_gap(GAP_WAIT.min(due / 2));
                self.unmap(&slab);
            }
            // Waking up costs some tens of microseconds, which a load that is about to be told has not.
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
        tracing::debug!(bytes, micros, "weights are unmapped");
        if let Err(err) = unmapped {
            tracing::error!("memory stays mapped under weights that were evicted: {err}");
        }
    }

    fn unmap_retired(&mut self) {
        while let Some((_, slab)) = self.retired.pop_front() {
            self.traffic.wait_for_gap(GAP_WAIT);
            self.unmap(&slab);
        }
    }

    fn close(&mut self) {
        // What is queued reads the copies of programs that are still here.
        let _ = self.stream.synchronize();
        self.unmap_retired();
    }

    fn load(&mut self, weights: Arc<ProgramWeights>, urgent: bool, report: LoadCallback) {
        let issued = Instant::now();
        self.urgent = urgent;
        self.loads.store(self.arriving.len() + 1, Ordering::Relaxed);
        let before = weights.mapped().extent();
        let loaded = match self.issue(&weights) {
            // What runs keep for later is worth less than weights that somebody waits for.
            Err(CudaError::OutOfMemory { .. }) if weights.drop_spares() => {
                self.take_back(&weights, before);
                self.issue(&weights)
            }
            loaded => loaded,
        };
        match loaded {
            Ok((arrival, from)) => {
                let micros = issued.elapsed().as_micros() as u64;
                let bytes = arrival.ends.last().map_or(0, |end| end - from);
                tracing::debug!(bytes, micros, "copies of weights are queued");
                let arrival = Arc::new(arrival);
                weights.set_gate(Gate::Arriving(arrival.clone()));
                let (seen, told_runnable) = ((0, issued), false);
                self.arriving.push_back(Arriving {
                    weights,
                    report,
                    arrival,
                    from,
                    issued,
                    seen,
                    told_runnable,
                });
            }
            Err(err) => {
                self.take_back(&weights, before);
                tracing::warn!("weights are not loaded: {err}");
                let err = weights.error(err);
                report(LoadProgress::Failed(err));
            }
        }
    }

    /// Undoes a load that failed halfway: what was there `before` stays.
    fn take_back(&mut self, weights: &Arc<ProgramWeights>, before: (usize, usize)) {
        if let Err(err) = self.stream.synchronize() {
            tracing::error!("a load that failed may still be under way: {err}");
        }
        let (ranges, pieces) = weights.mapped().split_off(before);
        ranges.iter().for_each(|slab| self.unmap(slab));
        self.pieces.give(pieces);
    }

    /// Puts memory under all that is not there and queues the copies.
    fn issue(&mut self, weights: &Arc<ProgramWeights>) -> Result<(Arrival, u64), CudaError> {
        let own = |(owner, _): &(Weak<ProgramWeights>, Arc<Slab>)| {
            std::ptr::eq(owner.as_ptr(), Arc::as_ptr(weights))
        };
        while let Some(at) = self.retired.iter().position(own) {
            if let Some((_, slab)) = self.retired.remove(at) {
                self.unmap(&slab);
            }
        }
        let slabs = weights.slabs();
        let first = weights.mapped().slabs;
        let from = slabs.get(first).map_or(0, |slab| slab.begins);
        let end = slabs.last().map_or(0, |slab| slab.begins + slab.used);
        let ends: Vec<u64> =
            group_ends(end - from, self.chunk).into_iter().map(|end| from + end).collect();
        let (events, marks) = (Vec::new(), Vec::new());
        let word = self.word.clone();
        let mut arrival = Arrival { slabs: slabs.len(), ends, events, marks, word };
        for slab in &slabs[first..] {
            self.issue_slab(weights, slab, &mut arrival)?;
        }
        self.mark_up_to(u64::MAX, &mut arrival)?;
        weights.mapped().slabs = slabs.len();
        Ok((arrival, from))
    }

    fn issue_slab(
        &mut self,
        weights: &Arc<ProgramWeights>,
        slab: &Arc<Slab>,
        arrival: &mut Arrival,
    ) -> Result<(), CudaError> {
        weights.mapped().ranges.push(slab.clone());
        let retired = &mut self.retired;
        let mut unmap = || {
            for (_, slab) in retired.drain(..) {
                slab.range.unmap(0, slab.range.bytes())?;
            }
            Ok(())
        };
        let pieces = self.pieces.take(slab.range.bytes(), &mut unmap)?;
        let sizes: Vec<u64> = pieces.iter().map(Piece::bytes).collect();
        let first = weights.mapped().pieces.len();
        weights.mapped().pieces.extend(pieces);
        let mut at = 0;
        for (number, size) in sizes.iter().enumerate() {
            if self.urgent {
                self.traffic.let_pass(MAP_WAIT);
            } else {
                self.traffic.wait_for_gap(GAP_WAIT);
            }
            slab.range.map(at, &weights.mapped().pieces[first + number])?;
            slab.range.open(at, *size)?;
            // What lies here is filled while the next piece is put in place.
            self.copy(slab, at, (at + size).min(slab.used), arrival)?;
            at += size;
        }
        Ok(())
    }

    /// Queues copies of the bytes between two places of `slab`, some at once.
    fn copy(
        &mut self,
        slab: &Slab,
        from: u64,
        to: u64,
        arrival: &mut Arrival,
    ) -> Result<(), CudaError> {
        let mut at = from;
        while at < to {
            let beside = !self.urgent && self.traffic.is_near();
            let at_once = if beside { BESIDE } else { self.chunk };
            let count = (to - at).min(at_once - at % at_once);
            for (source, bytes, target) in slab.sources(at, count) {
                self.quiet.keep(QUIET_WAIT);
                // SAFETY: the target is mapped and open; the host's copy is not written again and stays until the program is
                // gone, which waits for this stream.
                unsafe { self.stream.copy_in(target, source, bytes as usize) }?;
            }
            at += count;
            self.mark_up_to(slab.begins + at, arrival)?;
        }
        Ok(())
    }

    /// Puts a point behind every group that ends up to `queued`.
    fn mark_up_to(&mut self, queued: u64, arrival: &mut Arrival) -> Result<(), CudaError> {
        while arrival.ends.get(arrival.events.len()).is_some_and(|end| *end <= queued) {
            let event = Event::untimed(&self.context)?;
            event.record(&self.stream)?;
            self.marks = self.marks.wrapping_add(1);
            // SAFETY: the word lives as long as this thread and all arrivals.
            unsafe { self.stream.write_word(self.word.device_address(), self.marks) }?;
            arrival.events.push(event);
            arrival.marks.push(self.marks);
        }
        Ok(())
    }

    /// Tells of loads that got far enough or are over; how long it takes at least until there is more to tell.
    fn look(&mut self) -> Duration {
        while let Some(first) = self.arriving.front() {
            if first.arrival.groups_there() < first.arrival.ends.len() {
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
            let there = load.arrival.groups_there();
            if load.seen.0 != there {
                load.seen = (there, now);
            }
            let end = load.arrival.ends.last().copied().unwrap_or(load.from);
            let known = match there {
                0 => load.from,
                groups => load.arrival.ends[groups - 1],
            };
            // Between two groups the copies are taken to go on at the usual speed.
            let next = load.arrival.ends.get(there).copied().unwrap_or(end);
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
            if !load.told_runnable
                && let Some(pace) = load.weights.pace()
            {
                due = due.min(arrives_in(end).saturating_sub(pace.run));
                if pace.may_start(arrives_in) {
                    load.told_runnable = true;
                    (load.report)(LoadProgress::Runnable);
                }
            }
            ahead += end as f64 - reached;
        }
        due
    }

    fn finish(&mut self, load: Arriving) {
        let now = Instant::now();
        let bytes = load.arrival.ends.last().map_or(0, |end| end - load.from);
        let took = now.duration_since(load.issued.max(self.free_since)).as_secs_f64();
        if bytes >= MEASURED && took > 0.0 {
            self.speed = 0.7 * self.speed + 0.3 * (bytes as f64 / took).min(1e12);
        }
        let micros = now.duration_since(load.issued).as_micros() as u64;
        tracing::debug!(bytes, micros, speed = self.speed, "weights are there");
        self.free_since = now;
        load.weights.set_gate(Gate::There(load.arrival.slabs));
        (load.report)(LoadProgress::Loaded);
    }

    /// Waits for a load of `weights` that is under way.
    fn settle(&mut self, weights: &Arc<ProgramWeights>) {
        while self.arriving.iter().any(|load| Arc::ptr_eq(&load.weights, weights)) {
            if let Err(err) = self.stream.synchronize() {
                self.fail_all(&err);
            }
            self.look();
        }
    }

    /// The device is faulted: nothing arrives any more.
    fn fail_all(&mut self, err: &CudaError) {
        for load in std::mem::take(&mut self.arriving) {
            load.weights.set_gate(Gate::Absent);
            (load.report)(LoadProgress::Failed(load.weights.error(err.clone())));
        }
    }

    fn evict(&mut self, weights: &Arc<ProgramWeights>) {
        self.settle(weights);
        weights.set_gate(Gate::Absent);
        self.retire(weights);
    }

    /// Keeps the memory of `weights` for others; their addresses are cleared later.
    fn retire(&mut self, weights: &Arc<ProgramWeights>) {
        let Mapped { pieces, ranges, .. } = std::mem::take(&mut *weights.mapped());
        self.retired.extend(ranges.into_iter().map(|slab| (Arc::downgrade(weights), slab)));
        self.pieces.give(pieces);
    }

    /// Gives the memory of a program that is no more to the driver.
    fn discard(&mut self, mapped: Mapped) {
        let Mapped { pieces, ranges, .. } = mapped;
        for slab in &ranges {
            self.traffic.wait_for_gap(GAP_WAIT);
            self.unmap(slab);
        }
        self.traffic.wait_for_gap(GAP_WAIT);
        self.pieces.discard(pieces);
        // What it had until it was evicted, unless others took it over.
        self.unmap_retired();
        let released = self.pieces.release(u64::MAX, &mut || Ok(()));
        // Its runs' memory went before it, into the driver's pool.
        let trimmed = self.memory_stream.synchronize().and_then(|()| self.context.trim());
        if let Err(err) = released.and(trimmed) {
            tracing::error!("memory is not given back: {err}");
        }
    }
}

/// What a program needs of its device to make memory where there is none.
pub(super) fn drop_spares(hub: &Weak<Hub>) -> bool {
    hub.upgrade().is_some_and(|hub| hub.drop_spares())
}
