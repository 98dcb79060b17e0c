//! A program's weights: once per key, whatever plans use them; on the device while they are wanted there.
//!
//! Their addresses on the device stay for as long as the program does, so that arguments and graphs stay true. What comes and
//! goes is the memory behind them (`loader`), filled from a pinned copy on the host in the order in which steps need it.

pub(crate) mod arrival;
mod loader;
mod pieces;
mod slab;
mod speed;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::Duration;

use base::Bytes;
use device::DeviceError;
use device::residency::{LoadCallback, LoadProgress, Residency};
use model::gpu::{GpuPlan, Weight, WeightKey};

use self::arrival::{Pace, Part, Spans};
pub(crate) use self::loader::{Arrival, WeightMemory};
use self::loader::{Order, drop_spares};
use self::slab::Slab;
use crate::driver::Piece;
use crate::error::CudaError;
use crate::hub::Hub;

/// Alignment of each weight.
const ALIGN: u64 = 256;

/// Threads that pack side by side.
const PACKERS_MOST: usize = 8;

/// A run that took longer than the fastest by so much says more about what else ran than about itself; yet the fastest is
/// forgotten bit by bit.
const FORGET: f64 = 1.02;

/// Why weights are not there.
pub(crate) enum WeightError {
    /// A call failed.
    Cuda(CudaError),
    /// A packer made something else than it said.
    Packed(String),
    /// They could not be brought.
    Load(DeviceError),
}

impl From<CudaError> for WeightError {
    fn from(err: CudaError) -> WeightError {
        WeightError::Cuda(err)
    }
}

/// Where a plan's weights are.
pub(crate) struct Placed {
    /// Address and size of each.
    pub(crate) addresses: Vec<(u64, u64)>,
    /// Where each lies in the order of arrival.
    pub(crate) spans: Spans,
    /// Slabs that must be there for the plan to run.
    pub(crate) slabs: usize,
}

/// Whether runs may start.
enum Gate {
    Absent,
    Arriving(Arc<Arrival>),
    /// This many slabs are there.
    There(usize),
}

/// Memory that lies under a program's weights.
#[derive(Default)]
struct Mapped {
    pieces: Vec<Piece>,
    ranges: Vec<Arc<Slab>>,
    /// Slabs that are there or on their way.
    slabs: usize,
}

impl Mapped {
    /// How much there is.
    fn extent(&self) -> (usize, usize) {
        (self.ranges.len(), self.pieces.len())
    }

    /// Takes out what came after there was as much as `before`.
    fn split_off(&mut self, before: (usize, usize)) -> (Vec<Arc<Slab>>, Vec<Piece>) {
        (self.ranges.split_off(before.0), self.pieces.split_off(before.1))
    }
}

#[derive(Default)]
struct Store {
    /// Address, place in the order of arrival, and size.
    places: HashMap<WeightKey, (u64, u64, u64)>,
    slabs: Vec<Arc<Slab>>,
}

/// The weights of one program.
pub(crate) struct ProgramWeights {
    hub: Weak<Hub>,
    device: String,
    memory: Arc<WeightMemory>,
    /// They come and go; otherwise they are brought when they are packed, and stay.
    on_demand: bool,
    /// Held while weights are packed, so nobody who must not wait takes it.
    store: Mutex<Store>,
    /// The store's slabs, for the thread that loads.
    slabs: Mutex<Vec<Arc<Slab>>>,
    /// Bytes of all slabs in whole pieces.
    bytes: AtomicU64,
    gate: Mutex<Gate>,
    mapped: Mutex<Mapped>,
    pace: Mutex<Option<Pace>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProgramWeights {
    /// None yet.
    pub(crate) fn new(hub: &Arc<Hub>, on_demand: bool) -> Arc<ProgramWeights> {
        Arc::new(ProgramWeights {
            hub: Arc::downgrade(hub),
            device: hub.info.name.clone(),
            memory: hub.weights.clone(),
            on_demand,
            store: Mutex::default(),
            slabs: Mutex::default(),
            bytes: AtomicU64::new(0),
            gate: Mutex::new(Gate::Absent),
            mapped: Mutex::default(),
            pace: Mutex::default(),
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
        self.mapped().pieces.iter().map(Piece::bytes).sum()
    }

    fn slabs(&self) -> Vec<Arc<Slab>> {
        locked(&self.slabs).clone()
    }

    fn mapped(&self) -> MutexGuard<'_, Mapped> {
        locked(&self.mapped)
    }

    fn set_gate(&self, gate: Gate) {
        *locked(&self.gate) = gate;
    }

    fn drop_spares(&self) -> bool {
        drop_spares(&self.hub)
    }

    fn error(&self, err: CudaError) -> DeviceError {
        match self.hub.upgrade() {
            Some(hub) => hub.error(err),
            None => err.into_device_error(&self.device, || 0),
        }
    }

    /// What a run of a plan that needs so many slabs must wait for on its stream; an error when its weights are not there.
    pub(crate) fn arrival(&self, slabs: usize) -> Result<Option<Arc<Arrival>>, CudaError> {
        match &*locked(&self.gate) {
            Gate::There(there) if *there >= slabs => Ok(None),
            Gate::Arriving(arrival) if arrival.slabs >= slabs => Ok(Some(arrival.clone())),
            _ if slabs == 0 => Ok(None),
            _ => Err(CudaError::Misuse("a run was launched without its weights on the device")),
        }
    }

    fn pace(&self) -> Option<Pace> {
        locked(&self.pace).clone()
    }

    /// Notes how long a run of all of `parts` took that found its weights there.
    pub(crate) fn note_run(&self, parts: &[Part], took: Duration) {
        // Whoever is not first finds the next run as good.
        let Ok(mut pace) = self.pace.try_lock() else { return };
        match &mut *pace {
            Some(known) if known.needs.len() == parts.len() => {
                known.run = took.min(known.run.mul_f64(FORGET));
            }
            _ => {
                let needs = parts.iter().map(|part| (part.begins, part.needs)).collect();
                *pace = Some(Pace { run: took, needs });
            }
        }
    }

    /// Puts the weights of `gpu` that are not known yet behind the others, in the order in which its steps need them.
    pub(crate) fn place(self: &Arc<Self>, gpu: &GpuPlan) -> Result<Placed, WeightError> {
        let mut store = locked(&self.store);
        let mut fresh: Vec<(&Weight, u64)> = Vec::new();
        let mut room = 0u64;
        for weight in arrival::order_of_use(gpu).into_iter().map(|index| &gpu.weights[index]) {
            let known = store.places.contains_key(&weight.key)
                || fresh.iter().any(|(other, _)| other.key == weight.key);
            if !known {
                fresh.push((weight, room));
                room = (room + weight.bytes).next_multiple_of(ALIGN);
            }
        }
        if !fresh.is_empty() {
            let begins = store.slabs.last().map_or(0, |slab| slab.begins + slab.used);
            let slab = self.pack(begins, room, &fresh)?;
            for (weight, at) in fresh {
                let address = slab.range.address() + at;
                store.places.insert(weight.key.clone(), (address, begins + at, weight.bytes));
            }
            store.slabs.push(slab);
        }
        let places = gpu.weights.iter().map(|weight| store.places[&weight.key]);
        let (addresses, spans) =
            places.map(|(address, at, bytes)| ((address, bytes), (at, bytes))).unzip();
        Ok(Placed { addresses, spans, slabs: store.slabs.len() })
    }

    /// Packs `fresh` into one slab; brings it to the device if it is to be there always.
    fn pack(
        self: &Arc<Self>,
        begins: u64,
        room: u64,
        fresh: &[(&Weight, u64)],
    ) -> Result<Arc<Slab>, WeightError> {
        let hub = self.hub.upgrade().ok_or(CudaError::Misuse("the device is gone"))?;
        let slab = Slab::new(hub.context(), &hub.traffic, begins, room, self.memory.granularity)?;
        fill(&slab, fresh)?;
        let slab = Arc::new(slab);
        locked(&self.slabs).push(slab.clone());
        self.bytes.fetch_add(slab.range.bytes(), Ordering::Relaxed);
        if !self.on_demand {
            self.bring()?;
            slab.forget_host();
        }
        Ok(slab)
    }

    /// Loads and waits for it.
    fn bring(self: &Arc<Self>) -> Result<(), WeightError> {
        let (sender, receiver) = mpsc::channel();
        let report = move |progress| {
            // Nobody listens any more once the last word was said.
            let _ = sender.send(progress);
        };
        let (weights, report) = (self.clone(), Box::new(report));
        self.memory.order(Order::Load { weights, urgent: false, report });
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
        self.memory.order(Order::Discard(mapped));
        // Whoever loads holds this value until its copies are done, so nothing reads the host's copy any more. Here and not
        // there, because giving pinned memory back takes long.
        locked(&self.slabs).iter().for_each(|slab| slab.forget_host());
    }
}

/// What a program shows of its weights.
pub(crate) struct Resident(pub(crate) Arc<ProgramWeights>);

impl Residency for Resident {
    fn bytes(&self) -> Bytes {
        Bytes(self.0.bytes())
    }

    fn load(&self, urgent: bool, report: LoadCallback) {
        self.0.memory.order(Order::Load { weights: self.0.clone(), urgent, report });
    }

    fn evict(&self) {
        self.0.memory.order(Order::Evict(self.0.clone()));
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
            let err = WeightError::Packed(format!(
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
        for _ in 1..threads.min(PACKERS_MOST).min(fresh.len()) {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
