//! Weights of a program: packed once per key, whichever specializations use them, and resident or
//! evicted as a whole.
//!
//! Their device addresses stay the same for the life of the program, so that kernel arguments and
//! graphs stay valid. Loading and eviction (`loader`) change the physical memory behind them, which
//! is filled from a pinned host copy in the order in which steps need it.

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
use device::residency::{LoadCallback, LoadProgress, Residency};
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

/// Threads that pack at the same time, at most.
const MAX_PACKERS: usize = 8;

/// Factor by which the fastest known run time grows with each run: a slower run says more about
/// what else ran, yet the fastest must not be kept for ever.
const FASTEST_DECAY: f64 = 1.02;

/// Why weights are not available.
pub(crate) enum WeightError {
    /// A call failed.
    Cuda(CudaError),
    /// A packer produced another number of bytes than it declared.
    WrongSize(String),
    /// They could not be loaded.
    Load(DeviceError),
}

impl From<CudaError> for WeightError {
    fn from(err: CudaError) -> WeightError {
        WeightError::Cuda(err)
    }
}

/// Where the weights of a plan are.
pub(crate) struct PlacedWeights {
    /// Address and size of each.
    pub(crate) addresses: Vec<(u64, u64)>,
    /// Position of each in the order of arrival.
    pub(crate) spans: Spans,
    /// Slabs that must be resident for the plan to run.
    pub(crate) slabs: usize,
}

/// Whether runs may start.
enum ResidencyState {
    Evicted,
    Loading(Arc<WeightArrival>),
    /// This many slabs are resident.
    Resident(usize),
}

/// Memory mapped for a program's weights.
#[derive(Default)]
struct MappedMemory {
    pieces: Vec<PhysicalMemory>,
    ranges: Vec<Arc<Slab>>,
    /// Slabs that are resident or loading.
    slabs: usize,
}

impl MappedMemory {
    /// Number of ranges and physical allocations.
    fn extent(&self) -> (usize, usize) {
        (self.ranges.len(), self.pieces.len())
    }

    /// Removes what was added since the extent was `before`.
    fn split_off(&mut self, before: (usize, usize)) -> (Vec<Arc<Slab>>, Vec<PhysicalMemory>) {
        (self.ranges.split_off(before.0), self.pieces.split_off(before.1))
    }
}

#[derive(Default)]
struct PackedWeights {
    /// Address, position in the order of arrival, and size.
    locations: HashMap<WeightKey, (u64, u64, u64)>,
    slabs: Vec<Arc<Slab>>,
}

/// The weights of one program.
pub(crate) struct ProgramWeights {
    device: Arc<DeviceContext>,
    spares: Weak<SpareMemory>,
    rt_activity: Arc<RtActivity>,
    memory: Arc<WeightLoader>,
    /// Weights are loaded and evicted on request; otherwise they are loaded when packed and stay
    /// resident.
    on_demand: bool,
    /// Locked while weights are packed, which takes long.
    store: Mutex<PackedWeights>,
    /// The slabs of `store`, for the loader thread.
    slabs: Mutex<Vec<Arc<Slab>>>,
    /// Bytes of all slabs, rounded up to the allocation granularity.
    bytes: AtomicU64,
    state: Mutex<ResidencyState>,
    mapped: Mutex<MappedMemory>,
    timing: Mutex<Option<RunTiming>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProgramWeights {
    /// A program without weights.
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

    /// Whether they are loaded and evicted on request.
    pub(crate) fn on_demand(&self) -> bool {
        self.on_demand
    }

    /// Bytes they take when resident.
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

    /// What a run that needs `slabs` slabs must wait for on its stream; an error when its weights
    /// are evicted.
    pub(crate) fn arrival(&self, slabs: usize) -> Result<Option<Arc<WeightArrival>>, CudaError> {
        match &*locked(&self.state) {
            ResidencyState::Resident(there) if *there >= slabs => Ok(None),
            ResidencyState::Loading(arrival) if arrival.slabs >= slabs => Ok(Some(arrival.clone())),
            _ if slabs == 0 => Ok(None),
            _ => Err(CudaError::Misuse("a run was launched while its weights are evicted")),
        }
    }

    fn timing(&self) -> Option<RunTiming> {
        locked(&self.timing).clone()
    }

    /// Records the time of a run of all `parts` whose weights were resident.
    pub(crate) fn record_run(&self, parts: &[PlanPart], took: Duration) {
        // If another thread records now, the next run is as good.
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

    /// Packs the weights of `gpu` that are not packed yet, in the order in which its steps need
    /// them, and returns where all of them are.
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

    /// Packs `fresh` into one slab; loads it if weights are always resident.
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

    /// Loads and waits.
    fn load_and_wait(self: &Arc<Self>) -> Result<(), WeightError> {
        let (sender, receiver) = mpsc::channel();
        let report = move |progress| {
            // The receiver is gone after the last report.
            let _ = sender.send(progress);
        };
        let (weights, report) = (self.clone(), Box::new(report));
        self.memory.command(WeightCommand::Load { weights, urgent: false, report });
        loop {
            match receiver.recv() {
                Ok(LoadProgress::Runnable) => {}
                Ok(LoadProgress::Loaded) => return Ok(()),
                Ok(LoadProgress::Failed(err)) => return Err(WeightError::Load(err)),
                Err(_) => return Err(CudaError::Misuse("the loader thread has ended").into()),
            }
        }
    }
}

impl Drop for ProgramWeights {
    fn drop(&mut self) {
        let mapped = std::mem::take(&mut *locked(&self.mapped));
        self.memory.command(WeightCommand::Discard(mapped));
        // The loader holds this value until its copies are done, so nothing reads the host copy any
        // more. Freed here because unpinning takes long and would block the loader.
        locked(&self.slabs).iter().for_each(|slab| slab.release_host_copy());
    }
}

/// The residency interface of a program's weights.
pub(crate) struct ProgramResidency(pub(crate) Arc<ProgramWeights>);

impl Residency for ProgramResidency {
    fn bytes(&self) -> Bytes {
        Bytes(self.0.bytes())
    }

    fn load(&self, urgent: bool, report: LoadCallback) {
        self.0.memory.command(WeightCommand::Load { weights: self.0.clone(), urgent, report });
    }

    fn evict(&self) {
        self.0.memory.command(WeightCommand::Evict(self.0.clone()));
    }
}

/// Packs on several threads.
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
