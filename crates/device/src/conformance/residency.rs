//! Conformance of devices that load and evict weights.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use base::{Bytes, Random};
use model::op::{MatMul, Op};
use model::{DataType, LaunchPlan, Tensor};

use super::plans::{Builder, noise};
use super::reference::{Grid, matmul};
use super::{ConformanceReport, PATIENCE, Stop, TestQueue, ensure, load};
use crate::residency::{LoadProgress, Residency};
use crate::{Device, Outcome, Program, Task};

/// Rows, and columns of the square weights: large enough for several arrival groups.
const ROWS: usize = 3;
const SIDE: usize = 1536;

/// Consecutive matrix products.
const LAYERS: usize = 3;

pub(super) fn run(device: &dyn Device, report: &mut ConformanceReport) {
    report.add("weights are loaded, evicted and loaded again", again(device));
    report.add("a run without its weights is refused", refused(device));
    report.add("a run may start when its load is runnable", early(device));
    report.add("loads and evictions run in order", in_order(device));
    report.add("bytes are counted and freed", counted(device));
}

/// A program with its own weights and its expected outputs.
struct Subject {
    program: Arc<dyn Program>,
    weights: Arc<dyn Residency>,
    input: Tensor,
    want: Grid,
}

impl Subject {
    fn new(device: &dyn Device, seed: u64) -> Result<Subject, Stop> {
        let mut random = Random::new(seed);
        let (plan, input, want) = layers(&mut random);
        let program = load(device, plan)?;
        let weights = program
            .residency()
            .ok_or_else(|| Stop::Unsupported("weights are always resident".to_string()))?;
        Ok(Subject { program, weights, input, want })
    }

    fn task(&self) -> Result<Box<dyn Task>, Stop> {
        let inputs = vec![self.input.clone()];
        self.program.prepare(inputs).map_err(|err| Stop::Wrong(format!("not prepared: {err}")))
    }

    /// Starts a load.
    fn start_load(&self) -> Receiver<LoadProgress> {
        let (sender, receiver) = channel();
        self.weights.load(
            false,
            Box::new(move |progress| {
                // The receiver is gone when a case ends early.
                let _ = sender.send(progress);
            }),
        );
        receiver
    }

    fn load(&self) -> Result<(), Stop> {
        wait_loaded(&self.start_load())
    }

    fn check(&self, device: &dyn Device, lane: &TestQueue) -> Result<(), Stop> {
        self.compare(device, &lane.outputs(self.task()?)?)
    }

    fn compare(&self, device: &dyn Device, outputs: &[Tensor]) -> Result<(), Stop> {
        let [output] = outputs else { return Err("a single output is expected".into()) };
        // Sums of many products, each rounded a few times.
        let tolerance = 2e-3_f64.max(32.0 * device.info().rounding);
        let got = Grid::new(output);
        for (position, (got, want)) in got.data.iter().zip(&self.want.data).enumerate() {
            let close = (got - want).abs() <= tolerance * want.abs().max(1.0);
            ensure(close, format!("element {position} is {got} instead of {want}"))?;
        }
        Ok(())
    }
}

/// Products with matrices that keep the magnitude of their input.
fn layers(random: &mut Random) -> (LaunchPlan, Tensor, Grid) {
    let mut builder = Builder::default();
    let input = noise(random, &[ROWS, SIDE]);
    let mut value = builder.input(DataType::F32, &[ROWS, SIDE]);
    let mut want = Grid::new(&input);
    let scale = (3.0 / SIDE as f32).sqrt();
    for _ in 0..LAYERS {
        let data: Vec<f32> = (0..SIDE * SIDE).map(|_| random.symmetric_f32() * scale).collect();
        let matrix = super::plans::reals(&[SIDE, SIDE], data);
        let weight = builder.constant(matrix.clone());
        value = builder.real(Op::MatMul(MatMul::default()), &[value, weight]);
        want = matmul(&want, &Grid::new(&matrix));
    }
    (builder.finish(&[value]), input, want)
}

fn wait_loaded(progress: &Receiver<LoadProgress>) -> Result<(), Stop> {
    loop {
        match progress.recv_timeout(PATIENCE) {
            Ok(LoadProgress::Runnable) => {}
            Ok(LoadProgress::Loaded) => return Ok(()),
            Ok(LoadProgress::Failed(err)) => return Err(format!("not loaded: {err}").into()),
            Err(err) => return Err(format!("a load does not end: {err}").into()),
        }
    }
}

/// Waits until the device counts `bytes` of weights.
fn wait_for_bytes(device: &dyn Device, bytes: Bytes) -> Result<(), Stop> {
    let since = Instant::now();
    loop {
        let used = device.memory_use().ok_or("memory is not counted")?;
        if used.weights == bytes {
            return Ok(());
        }
        let late = format!("{} of weights are counted instead of {bytes}", used.weights);
        ensure(since.elapsed() < PATIENCE / 6, late)?;
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn again(device: &dyn Device) -> Result<(), Stop> {
    let (first, second) = (Subject::new(device, 1)?, Subject::new(device, 2)?);
    let lane = TestQueue::open(device, 0, 1)?;
    for subject in [&first, &second, &first, &first, &second] {
        subject.load()?;
        subject.check(device, &lane)?;
        subject.check(device, &lane)?;
        subject.weights.evict();
    }
    Ok(())
}

fn refused(device: &dyn Device) -> Result<(), Stop> {
    let subject = Subject::new(device, 3)?;
    let lane = TestQueue::open(device, 0, 1)?;
    let steps = |task: &dyn Task| 0..task.step_count();
    for _ in 0..2 {
        let task = subject.task()?;
        let range = steps(&*task);
        let completion = lane.run(task, range)?;
        let failed = matches!(completion.outcome, Outcome::Failed(_));
        ensure(failed, format!("it ended with {:?}", completion.outcome))?;
        subject.load()?;
        subject.check(device, &lane)?;
        subject.weights.evict();
        wait_for_bytes(device, Bytes(0))?;
    }
    Ok(())
}

fn early(device: &dyn Device) -> Result<(), Stop> {
    let subject = Subject::new(device, 4)?;
    let lane = TestQueue::open(device, 0, 1)?;
    for _ in 0..8 {
        let progress = subject.start_load();
        match progress.recv_timeout(PATIENCE) {
            Ok(LoadProgress::Runnable) => {
                subject.check(device, &lane)?;
                wait_loaded(&progress)?;
            }
            Ok(LoadProgress::Loaded) => subject.check(device, &lane)?,
            other => return Err(format!("not loaded: {other:?}").into()),
        }
        subject.check(device, &lane)?;
        subject.weights.evict();
    }
    Ok(())
}

fn in_order(device: &dyn Device) -> Result<(), Stop> {
    let (first, second) = (Subject::new(device, 5)?, Subject::new(device, 6)?);
    let lane = TestQueue::open(device, 0, 1)?;
    let loads = [first.start_load(), second.start_load()];
    first.weights.evict();
    second.weights.evict();
    let last = [second.start_load(), first.start_load()];
    loads.iter().chain(&last).try_for_each(wait_loaded)?;
    first.check(device, &lane)?;
    second.check(device, &lane)?;
    first.weights.evict();
    second.weights.evict();
    wait_for_bytes(device, Bytes(0))
}

fn counted(device: &dyn Device) -> Result<(), Stop> {
    let (first, second) = (Subject::new(device, 7)?, Subject::new(device, 8)?);
    wait_for_bytes(device, Bytes(0))?;
    let (one, both) =
        (first.weights.bytes(), Bytes(first.weights.bytes().0 + second.weights.bytes().0));
    first.load()?;
    wait_for_bytes(device, one)?;
    second.load()?;
    wait_for_bytes(device, both)?;
    ensure(first.program.resident() >= one, "a program says it holds less than its weights")?;
    second.weights.evict();
    wait_for_bytes(device, one)?;
    // Dropping a program frees its resident weights.
    drop(first);
    wait_for_bytes(device, Bytes(0))
}
