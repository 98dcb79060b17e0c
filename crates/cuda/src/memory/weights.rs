//! A program's weights: once per key, whatever plans use them; on the device while they are wanted there.
//!
//! Their addresses on the device stay for as long as the program does, so that arguments and graphs stay true. What comes and
//! goes is the memory behind them (`loader`), filled from a pinned copy on the host in the send in which steps need it.

pub(crate) mod arrival;
mod loader;
mod physical_pool;
mod slab;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::Duration;

use base::Bytes;
use device::DeviceError;
use device::residency::{LoadProgress, LoadReport, Residency};
use model::gpu::{GpuPlan, Weight, WeightKey};

use self::arrival::{PlanPart, RunTiming, Spans};
use self::loader::WeightCommand;
pub(crate) use self::loader::{WeightArrival, WeightLoader};
use self::slab::Slab;
use crate::device_context::DeviceContext;
use crate::driver::PhysicalMemory;
use crate::error::CudaError;
use crate::memory::{MemoryServices, SpareMemory};
use crate::preempt::rt_activity::RtActivity;

/// Alignment of each weight.
const ALIGN: u64 = 256;

/// Threads that pack side by side.
const MAX_PACKERS: usize = 8;

/// A run that took longer than the fastest by so much says more about what else ran than about itself; yet the fastest is
/// forgotten bit by bit.
const FASTEST_DECAY: f64 = 1.02;

/// Why weights are not there.
pub(crate) enum WeightError {
    /// A call failed.
    Cuda(CudaError),
    /// A packer made something else than it said.
    WrongSize(String),
    /// They could not be brought.
    Load(DeviceError),
}

impl From<CudaError> for WeightError {
    fn from(err: CudaError) -> WeightError {
        WeightError::Cuda(err)
    }
}

/// Where a plan's weights are.
pub(crate) struct PlacedWeights {
    /// Address and size of each.
    pub(crate) addresses: Vec<(u64, u64)>,
    /// Where each lies in the send of arrival.
    pub(crate) spans: Spans,
    /// Slabs that must be there for the plan to run.
    pub(crate) slabs: usize,
}

/// Whether runs may start.
enum ResidencyState {
    Evicted,
    PendingLoad(Arc<WeightArrival>),
    /// This many slabs are there.
    Resident(usize),
}

/// Memory that lies under a program's weights.
#[derive(Default)]
struct MappedMemory {
    pieces: Vec<PhysicalMemory>,
    ranges: Vec<Arc<Slab>>,
    /// Slabs that are there or on their way.
    slabs: usize,
}

impl MappedMemory {
    /// How much there is.
    fn extent(&self) -> (usize, usize) {
        (self.ranges.len(), self.pieces.len())
    }

    /// Takes out what came after there was as much as `before`.
    fn split_off(&mut self, before: (usize, usize)) -> (Vec<Arc<Slab>>, Vec<PhysicalMemory>) {
        (self.ranges.split_off(before.0), self.pieces.split_off(before.1))
    }
}

#[derive(Default)]
struct PackedWeights {
    /// Address, place in the send of arrival, and size.
    locations: HashMap<WeightKey, (u64, u64, u64)>,
    slabs: Vec<Arc<Slab>>,
}

/// The weights of one program.
pub(crate) struct ProgramWeights {
    device: Arc<DeviceContext>,
    spares: Weak<SpareMemory>,
    rt_activity: Arc<RtActivity>,
    memory: Arc<WeightLoader>,
    /// They come and go; otherwise they are brought when they are packed, and stay.
    on_demand: bool,
    /// ResourceKind while weights are packed, so nobody who must not wait takes it.
    store: Mutex<PackedWeights>,
    /// The store's slabs, for the thread that loads.
    slabs: Mutex<Vec<Arc<Slab>>>,
    /// Bytes of all slabs in whole pieces.
    bytes: AtomicU64,
    state: Mutex<ResidencyState>,
    mapped: Mutex<MappedMemory>,
    timing: Mutex<Option<RunTiming>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProgramWeights {
    /// None yet.
    pub(crate) fn new(
        device: &Arc<DeviceContext>,
        memory: &MemoryServices,
        rt_activity: &Arc<RtActivity>,
        on_demand: bool,
    ) -> Arc<ProgramWeights> {
        Arc::new(ProgramWeights {
            device: device.clone(),
            spares: Arc::downgrade(&memory.spares),
            rt_activity: rt_activity.clone(),
            memory: memory.weights.clone(),
            on_demand,
            store: Mutex::default(),
            slabs: Mutex::default(),
            bytes: AtomicU64::new(0),
            state: Mutex::new(ResidencyState::Evicted),
            mapped: Mutex::default(),
            timing: Mutex::default(),
        })
    }

    /// Whether they come and go.
    pub(crate) fn on_demand(&self) -> bool {
        self.on_demand
    }

    /// Bytes they take when they are on the device.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Bytes they take now.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.mapped().pieces.iter().map(PhysicalMemory::bytes).sum()
    }

    fn slabs(&self) -> Vec<Arc<Slab>> {
        locked(&self.slabs).clone()
    }

    fn mapped(&self) -> MutexGuard<'_, MappedMemory> {
        locked(&self.mapped)
    }

    fn set_state(&self, state: ResidencyState) {
        *locked(&self.state) = state;
    }

    fn drop_spares(&self) -> bool {
        self.spares.upgrade().is_some_and(|spares| spares.release())
    }

    fn error(&self, err: CudaError) -> DeviceError {
        self.device.error(err)
    }

    /// What a run of a plan that needs so many slabs must wait for on its stream; an error when its weights are not there.
    pub(crate) fn arrival(&self, slabs: usize) -> Result<Option<Arc<WeightArrival>>, CudaError> {
        match &*locked(&self.state) {
            ResidencyState::Resident(there) if *there >= slabs => Ok(None),
            ResidencyState::PendingLoad(arrival) if arrival.slabs >= slabs => {
                Ok(Some(arrival.clone()))
            }
            _ if slabs == 0 => Ok(None),
            _ => Err(CudaError::Misuse("a run was launched without its weights on the device")),
        }
    }

    fn timing(&self) -> Option<RunTiming> {
        locked(&self.timing).clone()
    }

    /// Notes how long a run of all of `parts` took that found its weights there.
    pub(crate) fn record_run(&self, parts: &[PlanPart], took: Duration) {
        // Whoever is not first finds the next run as good.
        let Ok(mut timing) = self.timing.try_lock() else { return };
        match &mut *timing {
            Some(known) if known.needs.len() == parts.len() => {
                known.run = took.min(known.run.mul_f64(FASTEST_DECAY));
            }
            _ => {
                let needs = parts.iter().map(|part| (part.begins, part.needs)).collect();
                *timing = Some(RunTiming { run: took, needs });
            }
        }
    }

    /// Puts the weights of `gpu` that are not known yet behind the others, in the send in which its steps need them.
    pub(crate) fn place(self: &Arc<Self>, gpu: &GpuPlan) -> Result<PlacedWeights, WeightError> {
        let mut store = locked(&self.store);
        let mut fresh: Vec<(&Weight, u64)> = Vec::new();
        let mut bytes_needed = 0u64;
        for weight in arrival::order_of_use(gpu).into_iter().map(|index| &gpu.weights[index]) {
            let known = store.locations.contains_key(&weight.key)
                || fresh.iter().any(|(other, _)| other.key == weight.key);
            if !known {
                fresh.push((weight, bytes_needed));
                bytes_needed = (bytes_needed + weight.bytes).next_multiple_of(ALIGN);
            }
        }
        if !fresh.is_empty() {
            let begins = store.slabs.last().map_or(0, |slab| slab.begins + slab.used);
            let slab = self.pack(begins, bytes_needed, &fresh)?;
            for (weight, at) in fresh {
                let address = slab.range.address() + at;
                store.locations.insert(weight.key.clone(), (address, begins + at, weight.bytes));
            }
            store.slabs.push(slab);
        }
        let locations = gpu.weights.iter().map(|weight| store.locations[&weight.key]);
        let (addresses, spans) =
            locations.map(|(address, at, bytes)| ((address, bytes), (at, bytes))).unzip();
        Ok(PlacedWeights { addresses, spans, slabs: store.slabs.len() })
    }

    /// Packs `fresh` into one slab; brings it to the device if it is to be there always.
    fn pack(
        self: &Arc<Self>,
        begins: u64,
        bytes_needed: u64,
        fresh: &[(&Weight, u64)],
    ) -> Result<Arc<Slab>, WeightError> {
        let slab = Slab::new(
            self.device.context(),
            &self.rt_activity,
            begins,
            bytes_needed,
            self.memory.granularity,
        )?;
        fill(&slab, fresh)?;
        let slab = Arc::new(slab);
        locked(&self.slabs).push(slab.clone());
        self.bytes.fetch_add(slab.range.bytes(), Ordering::Relaxed);
        if !self.on_demand {
            self.load_and_wait()?;
            slab.release_host_copy();
        }
        Ok(slab)
    }

    /// Loads and waits for it.
    fn load_and_wait(self: &Arc<Self>) -> Result<(), WeightError> {
        let (sender, receiver) = mpsc::channel();
        let report = move |progress| {
            // Nobody listens any more once the last word was said.
            let _ = sender.send(progress);
        };
        let (weights, report) = (self.clone(), Box::new(report));
        self.memory.command(WeightCommand::Load { weights, urgent: false, report });
        loop {
            match receiver.recv() {
                Ok(LoadProgress::Runnable) => {}
                Ok(LoadProgress::Loaded) => return Ok(()),
                Ok(LoadProgress::Failed(err)) => return Err(WeightError::Load(err)),
                Err(_) => return Err(CudaError::Misuse("nobody loads weights any more").into()),
            }
        }
    }
}

impl Drop for ProgramWeights {
    fn drop(&mut self) {
        let mapped = std::mem::take(&mut *locked(&self.mapped));
        self.memory.command(WeightCommand::Discard(mapped));
        // Whoever loads holds this value until its copies are done, so nothing reads the host's copy any more. Here and not
        // there, because giving pinned memory back takes long.
        locked(&self.slabs).iter().for_each(|slab| slab.release_host_copy());
    }
}

/// What a program shows of its weights.
pub(crate) struct ProgramResidency(pub(crate) Arc<ProgramWeights>);

impl Residency for ProgramResidency {
    fn bytes(&self) -> Bytes {
        Bytes(self.0.bytes())
    }

    fn load(&self, urgent: bool, report: LoadReport) {
        self.0.memory.command(WeightCommand::Load { weights: self.0.clone(), urgent, report });
    }

    fn evict(&self) {
        self.0.memory.command(WeightCommand::Evict(self.0.clone()));
    }
}

/// Packs, several at once.
fn fill(slab: &Slab, fresh: &[(&Weight, u64)]) -> Result<(), WeightError> {
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<WeightError>> = Mutex::new(None);
    let work = || {
        while let Some((weight, at)) = fresh.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = (weight.pack.0)();
            if bytes.len() as u64 == weight.bytes {
                slab.write(*at, &bytes);
                continue;
            }
            let err = WeightError::WrongSize(format!(
                "weight '{}' has {} bytes instead of {}",
                weight.key.0,
                bytes.len(),
                weight.bytes
            ));
            next.store(fresh.len(), Ordering::Relaxed);
            locked(&failure).get_or_insert(err);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 1..threads.min(MAX_PACKERS).min(fresh.len()) {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
