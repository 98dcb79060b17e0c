//! A program's weights on the device: once per key, whatever plans use them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use model::gpu::{Weight, WeightKey};

use crate::driver::{DeviceBuffer, Stream};
use crate::error::CudaError;

/// Alignment of each weight.
const ALIGN: u64 = 256;

/// Threads that pack side by side.
const PACKERS_MOST: usize = 8;

/// Why weights are not there.
pub(crate) enum WeightError {
    /// A call failed.
    Cuda(CudaError),
    /// A packer made something else than it said.
    Packed(String),
}

impl From<CudaError> for WeightError {
    fn from(err: CudaError) -> WeightError {
        WeightError::Cuda(err)
    }
}

/// Weights that are on the device.
#[derive(Default)]
pub(crate) struct WeightStore {
    places: HashMap<WeightKey, (u64, u64)>,
    slabs: Vec<Arc<DeviceBuffer>>,
}

impl WeightStore {
    /// Bytes held on the device.
    pub(crate) fn bytes(&self) -> u64 {
        self.slabs.iter().map(|slab| slab.bytes()).sum()
    }

    /// The memory they are in; whoever uses an address holds it.
    pub(crate) fn slabs(&self) -> Vec<Arc<DeviceBuffer>> {
        self.slabs.clone()
    }

    /// Address and size of each of `weights`; those that are not there yet are packed and copied, all into one piece
    /// of memory.
    pub(crate) fn place(
        &mut self,
        stream: &Arc<Stream>,
        weights: &[Weight],
    ) -> Result<Vec<(u64, u64)>, WeightError> {
        let mut fresh: Vec<(&Weight, u64)> = Vec::new();
        let mut room = 0u64;
        for weight in weights {
            let known = self.places.contains_key(&weight.key)
                || fresh.iter().any(|(other, _)| other.key == weight.key);
            if !known {
                fresh.push((weight, room));
                room = (room + weight.bytes).next_multiple_of(ALIGN);
            }
        }
        if !fresh.is_empty() {
            let slab = DeviceBuffer::zeroed(stream, room)?;
            fill(&slab, &fresh)?;
            for (weight, at) in fresh {
                self.places.insert(weight.key.clone(), (slab.address() + at, weight.bytes));
            }
            self.slabs.push(Arc::new(slab));
        }
        Ok(weights.iter().map(|weight| self.places[&weight.key]).collect())
    }
}

/// Packs and copies, several at once.
fn fill(slab: &DeviceBuffer, fresh: &[(&Weight, u64)]) -> Result<(), WeightError> {
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<WeightError>> = Mutex::new(None);
    let work = || {
        while let Some((weight, at)) = fresh.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = (weight.pack.0)();
            let copied = match bytes.len() as u64 == weight.bytes {
                true => slab.write(*at, &bytes).map_err(WeightError::Cuda),
                false => Err(WeightError::Packed(format!(
                    "weight '{}' has {} bytes instead of {}",
                    weight.key.0,
                    bytes.len(),
                    weight.bytes
                ))),
            };
            if let Err(err) = copied {
                next.store(fresh.len(), Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(err);
            }
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
