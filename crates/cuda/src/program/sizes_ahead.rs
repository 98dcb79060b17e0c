//! Kernels for sizes that requests have not brought yet.
//!
//! Kernels take sizes as arguments, and few are chosen by them. A thread lowers the model for sizes
//! that are spread over what requests may bring, and compiles what those choose: a request of a
//! size that was never seen then finds its kernels loaded.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use device::{LaunchChoices, thread_priority};
use model::{Dim, LaunchPlan};

use crate::compile::kernel_cache::KernelRequest;
use crate::program::ProgramState;
use crate::program::batches::leading_symbol;
use crate::program::lowering::Sizes;
use crate::program::specialization::requests_of;

/// Sizes of the batch.
const BATCHES: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 12, 16, 32];

/// Sizes of other dimensions, and how much less than each of them is taken, too: kernels differ in
/// how many neighbours they read at once, which depends on what divides a size.
const OTHERS: [usize; 10] = [8, 16, 32, 64, 96, 128, 192, 256, 384, 512];
const LESS: [usize; 4] = [0, 1, 2, 4];

/// Other dimensions that are smaller.
const SMALL: [usize; 5] = [1, 2, 3, 5, 9];

/// Kernels compiled at once. Between two such groups the thread may end.
const GROUP: usize = 8;

/// Time between two looks whether it is a model's turn.
const TURN_INTERVAL: Duration = Duration::from_millis(20);

/// One model at a time: compilers take memory and processors.
static COMPILING: Mutex<()> = Mutex::new(());

/// The thread of one program; ends with it.
pub(crate) struct SizesAhead {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl SizesAhead {
    /// Starts compiling for `program`; `None` when no size of it is open.
    pub(crate) fn start(program: &Arc<ProgramState>) -> Option<SizesAhead> {
        let sizes = spread_sizes(&program.plan);
        if sizes.is_empty() {
            return None;
        }
        let stopped = Arc::new(AtomicBool::new(false));
        let (stop, program) = (stopped.clone(), Arc::downgrade(program));
        let work = move || {
            thread_priority::lower(thread_priority::LOWEST);
            if let Some(_turn) = turn(&stop) {
                compile(&program, &sizes, &stop);
            }
        };
        match std::thread::Builder::new().name("cuda-sizes".to_string()).spawn(work) {
            Ok(thread) => Some(SizesAhead { stopped, thread: Some(thread) }),
            Err(err) => {
                tracing::warn!(%err, "no kernels are compiled ahead");
                None
            }
        }
    }
}

impl Drop for SizesAhead {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take()
            // The thread itself may drop the last reference to its program.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Waits until no other model is compiled ahead; `None` when the program is gone before. A thread
/// that slept in the lock would keep the unloading of its model waiting for the other model.
fn turn(stop: &AtomicBool) -> Option<MutexGuard<'static, ()>> {
    while !stop.load(Ordering::SeqCst) {
        match COMPILING.try_lock() {
            Ok(turn) => return Some(turn),
            Err(TryLockError::Poisoned(turn)) => return Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(TURN_INTERVAL),
        }
    }
    None
}

/// Sizes to lower for: all symbols of the inputs, the batch and the others.
pub(crate) fn spread_sizes(plan: &LaunchPlan) -> Vec<Sizes> {
    let batch = leading_symbol(plan);
    let mut symbols: Vec<&String> = Vec::new();
    for dim in plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten() {
        if let Dim::Symbol(symbol) = dim
            && !symbols.contains(&symbol)
        {
            symbols.push(symbol);
        }
    }
    let is_batch = |symbol: &&&String| batch == Some(symbol.as_str());
    let (rows, others) =
        (symbols.iter().any(|s| is_batch(&s)), symbols.iter().any(|s| !is_batch(&s)));
    let batches = if rows { &BATCHES[..] } else { &BATCHES[..1] };
    let spread = OTHERS.iter().flat_map(|size| LESS.iter().map(move |less| size - less));
    let spread: Vec<usize> = match others {
        true => SMALL.into_iter().chain(spread).collect(),
        false => vec![1],
    };
    let pairs = batches.iter().flat_map(|batch| spread.iter().map(move |other| (*batch, *other)));
    let pairs: Vec<(usize, usize)> = if symbols.is_empty() { vec![] } else { pairs.collect() };
    let sizes = |(batch, other): (usize, usize)| -> Sizes {
        let size = |symbol: &&String| if is_batch(&symbol) { batch } else { other };
        symbols.iter().map(|symbol| ((*symbol).clone(), size(symbol))).collect()
    };
    pairs.into_iter().map(sizes).collect()
}

fn compile(program: &Weak<ProgramState>, sizes: &[Sizes], stop: &AtomicBool) {
    let mut requests: Vec<KernelRequest> = Vec::new();
    let mut accepted = 0;
    for sizes in sizes {
        let Some(program) = program.upgrade().filter(|_| !stop.load(Ordering::SeqCst)) else {
            return;
        };
        // Sizes beyond what the model was made for are refused, and so are too small ones.
        let Ok(mut gpu) = program.lower(sizes, LaunchChoices::Fastest) else { continue };
        accepted += 1;
        program.services.compile.tuning().apply(&mut gpu);
        for request in requests_of(&gpu) {
            if !requests.contains(&request) {
                requests.push(request);
            }
        }
    }
    if let Some(program) = program.upgrade() {
        let kernels = &program.services.compile.kernels;
        requests.retain(|request| kernels.can_compile() || kernels.is_at_hand(request));
    }
    for group in requests.chunks(GROUP) {
        let Some(program) = program.upgrade().filter(|_| !stop.load(Ordering::SeqCst)) else {
            return;
        };
        match program.services.compile.kernels.get(group, &|_, _| {}) {
            Ok(kernels) => program.keep_kernels(kernels.into_values()),
            Err(err) => tracing::warn!(%err, "a kernel cannot be compiled ahead"),
        }
    }
    tracing::debug!(sizes = accepted, kernels = requests.len(), "kernels compiled ahead");
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{DataType, ValueId, ValueInfo};

    fn plan(shape: &[&str]) -> LaunchPlan {
        let dim = |word: &&str| match word.parse() {
            Ok(size) => Dim::Fixed(size),
            Err(_) => Dim::Symbol((*word).to_string()),
        };
        let shape = Some(shape.iter().map(dim).collect());
        let value = ValueInfo { name: "x".to_string(), dtype: DataType::F32, shape };
        LaunchPlan { values: vec![value], inputs: vec![ValueId(0)], ..LaunchPlan::default() }
    }

    #[test]
    fn a_model_that_is_unloaded_does_not_wait_for_its_turn() {
        let other = turn(&AtomicBool::new(false)).expect("nobody else compiles");
        let stop = Arc::new(AtomicBool::new(false));
        let waiting = std::thread::spawn({
            let stop = stop.clone();
            move || turn(&stop).is_some()
        });
        stop.store(true, Ordering::SeqCst);
        assert!(!waiting.join().expect("no panic"), "it ends while the other has the turn");
        drop(other);
    }

    #[test]
    fn sizes_spread_over_what_is_open() {
        assert!(spread_sizes(&plan(&["1", "3"])).is_empty());
        let images = spread_sizes(&plan(&["n", "3"]));
        assert_eq!(images.len(), BATCHES.len());
        assert!(images.iter().all(|sizes| sizes.len() == 1 && sizes[0].0 == "n"));
        let tokens = spread_sizes(&plan(&["1", "t"]));
        assert_eq!(tokens.len(), SMALL.len() + OTHERS.len() * LESS.len());
        let odd = tokens.iter().filter(|sizes| sizes[0].1 % 2 == 1).count();
        assert!(odd > OTHERS.len(), "{odd} odd sizes");
        let both = spread_sizes(&plan(&["n", "t"]));
        assert_eq!(both.len(), BATCHES.len() * tokens.len());
        assert!(both.iter().all(|sizes| sizes[0].0 == "n" && sizes[1].0 == "t"));
    }
}
