//! `atoll bench preempt` on a GPU: how soon real time runs, how soon best effort is preempted, and
//! what a preemption costs.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use assembly::progress::{self, Progress};
use assembly::{DeviceArgs, Failure, TaskRunner, write_file};
use base::Random;
use bench::live::LiveModel;
use cuda::{CudaDevice, StartProbe};
use device::{Device, Outcome};
use model::op::{MatMul, Op};
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId, ValueInfo};
use serde::Serialize;

use super::args::PreemptArgs;
use crate::{environment, models};

/// Preemptions per second.
const RATE: f64 = 200.0;

/// How long best effort runs undisturbed, as the baseline.
const UNDISTURBED: Duration = Duration::from_millis(600);

/// How long before a real-time request best effort is preempted, so that the device is idle.
const HEAD_START: Duration = Duration::from_millis(1);

/// Rows of products that take about 10 us, 100 us, 1 ms and 10 ms on a large GPU.
const PRODUCT_ROWS: [usize; 4] = [128, 1_024, 10_240, 81_920];

/// Number of consecutive products, and their width.
const PRODUCTS: usize = 8;
const WIDTH: usize = 4_096;

#[derive(Debug, Serialize)]
struct PreemptReport {
    device: String,
    driver: Option<String>,
    date: String,
    command: String,
    rounds: usize,
    /// Microseconds until a probe runs on an idle device.
    idle: ProbeLatency,
    /// Latency of the real-time model alone.
    real_time_alone: LatencySpread,
    cases: Vec<BestEffortCase>,
}

/// Results of one best-effort model; latencies are microseconds.
#[derive(Debug, Serialize)]
struct BestEffortCase {
    best_effort: String,
    steps: usize,
    /// An undisturbed run.
    run_us: f64,
    probe: ProbeLatency,
    /// Until the queue has its task back and knows its progress.
    #[serde(rename = "left")]
    preempted: LatencySpread,
    real_time: LatencySpread,
    /// Over the model alone, in percent.
    real_time_mean_increase_pct: f64,
    real_time_p99_increase_pct: f64,
    /// The same when best effort was preempted early enough to be gone: the cost of a device that
    /// has just run something else.
    real_time_after: LatencySpread,
    real_time_after_mean_increase_pct: f64,
    preemptions: u64,
    runs: u64,
    wrong_outputs: u64,
    /// Best-effort time that a preemption costs, including the probe's: repeated work, preempting,
    /// resuming.
    lost_us_per_preemption: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct ProbeLatency {
    first_block: LatencySpread,
    all_blocks: LatencySpread,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct LatencySpread {
    p50: f64,
    p99: f64,
    max: f64,
    mean: f64,
}

impl LatencySpread {
    fn of(mut micros: Vec<f64>) -> LatencySpread {
        if micros.is_empty() {
            return LatencySpread::default();
        }
        micros.sort_by(f64::total_cmp);
        let at = |share: f64| micros[((micros.len() - 1) as f64 * share).round() as usize];
        let mean = micros.iter().sum::<f64>() / micros.len() as f64;
        let round = |value: f64| (value * 10.0).round() / 10.0;
        LatencySpread {
            p50: round(at(0.5)),
            p99: round(at(0.99)),
            max: round(at(1.0)),
            mean: round(mean),
        }
    }
}

/// Runs the benchmark on the GPU that `args` name.
pub(crate) fn run(args: &PreemptArgs) -> Result<(), Failure> {
    let named = DeviceArgs { device: args.device.clone(), settings: args.settings.clone() };
    let device = assembly::open_gpu(&named)?;
    let folder = args.models.as_deref();
    let names: Vec<&str> = args.best_effort.iter().map(String::as_str).collect();
    let real_time = load_real_time(args, folder, &device)?;
    let mut bench = PreemptBenchmark {
        rounds: args.rounds,
        probe: device.start_probe().map_err(Failure::failed)?,
        runner: TaskRunner::open(&device, false)?,
        random: Random::new(args.seed),
        alone: LatencySpread::default(),
    };
    let idle = bench.probe_idle()?;
    bench.alone = bench.real_time(&real_time, None, Duration::ZERO)?;
    let mut report = PreemptReport {
        device: device.info().description.clone(),
        driver: environment::driver(&args.device),
        date: environment::today(),
        command: environment::command(),
        rounds: args.rounds,
        idle,
        real_time_alone: bench.alone,
        cases: Vec::new(),
    };
    let progress = Progress::new((names.len() + PRODUCT_ROWS.len()) as u64, "cases");
    for name in names {
        let models = models::load(folder, args.seed, &device, &[name])?;
        for model in models {
            report.add(bench.case(&device, &model, &real_time)?);
        }
        progress.advance();
    }
    for rows in PRODUCT_ROWS {
        let model = products(&device, rows, &mut bench.random)?;
        report.add(bench.case(&device, &model, &real_time)?);
        progress.advance();
    }
    drop(progress);
    let text = serde_json::to_string_pretty(&report).map_err(Failure::failed)? + "\n";
    match &args.json {
        Some(Some(path)) => write_file(path, &text)?,
        Some(None) => print!("{text}"),
        None => {}
    }
    match report.cases.iter().find(|case| case.wrong_outputs > 0) {
        None => Ok(()),
        Some(case) => Err(Failure::failed(format!(
            "{}: {} outputs differ from an undisturbed run's",
            case.best_effort, case.wrong_outputs
        ))),
    }
}

impl PreemptReport {
    fn add(&mut self, case: BestEffortCase) {
        progress::note(&format!(
            "{}: first block p50 {} p99 {} us, everywhere p50 {} p99 {}, preempted p50 {} p99 {}; \
             real time {:+.1} % mean, \
             {:+.1} % p99, {:+.1} % mean when it was gone before; {:.1} us lost a preemption",
            case.best_effort,
            case.probe.first_block.p50,
            case.probe.first_block.p99,
            case.probe.all_blocks.p50,
            case.probe.all_blocks.p99,
            case.preempted.p50,
            case.preempted.p99,
            case.real_time_mean_increase_pct,
            case.real_time_p99_increase_pct,
            case.real_time_after_mean_increase_pct,
            case.lost_us_per_preemption,
        ));
        self.cases.push(case);
    }
}

fn load_real_time(
    args: &PreemptArgs,
    folder: Option<&Path>,
    device: &CudaDevice,
) -> Result<LiveModel, Failure> {
    let mut models = models::load(folder, args.seed, device, &[args.real_time.as_str()])?;
    models.pop().ok_or_else(|| Failure::usage("there is no real-time model"))
}

struct PreemptBenchmark {
    rounds: usize,
    probe: StartProbe,
    runner: TaskRunner,
    random: Random,
    alone: LatencySpread,
}

impl PreemptBenchmark {
    /// Waits for about a period, so that preemptions are spread over a run.
    fn pause(&mut self) {
        let micros = (1e6 / RATE * (0.5 + self.random.unit_f64())) as u64;
        spin_until(Instant::now() + Duration::from_micros(micros));
    }

    fn probe_idle(&mut self) -> Result<ProbeLatency, Failure> {
        self.probe_queues(&[], &AtomicU64::new(0), Instant::now())
    }

    fn probe_queues(
        &mut self,
        queues: &[&dyn device::Queue],
        preempt_sent: &AtomicU64,
        epoch: Instant,
    ) -> Result<ProbeLatency, Failure> {
        let (mut first, mut all) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            self.pause();
            preempt_sent.store(epoch.elapsed().as_nanos() as u64, Ordering::Release);
            let start = self.probe.fire(queues).map_err(Failure::failed)?;
            first.push(start.first.as_secs_f64() * 1e6);
            all.push(start.all.as_secs_f64() * 1e6);
        }
        Ok(ProbeLatency {
            first_block: LatencySpread::of(first),
            all_blocks: LatencySpread::of(all),
        })
    }

    /// Requests of the real-time model; before each, `load` is preempted `ahead` early.
    fn real_time(
        &mut self,
        model: &LiveModel,
        load: Option<&BestEffortLoad>,
        ahead: Duration,
    ) -> Result<LatencySpread, Failure> {
        let mut taken = Vec::new();
        for round in 0..self.rounds + 20 {
            self.pause();
            let task = model.program.prepare(model.inputs.clone()).map_err(Failure::failed)?;
            let mut began = Instant::now();
            if let Some(load) = load {
                load.hold();
            }
            if !ahead.is_zero() {
                spin_until(began + ahead);
                began = Instant::now();
            }
            let completion = self.runner.run(task)?;
            if let Some(load) = load {
                load.held.store(false, Ordering::Release);
            }
            if completion.outcome != Outcome::Done {
                return Err(Failure::failed(format!("real time ended: {:?}", completion.outcome)));
            }
            // The first few warm the device up.
            if round >= 20 {
                taken.push(began.elapsed().as_secs_f64() * 1e6);
            }
        }
        Ok(LatencySpread::of(taken))
    }

    fn case(
        &mut self,
        device: &CudaDevice,
        model: &LiveModel,
        real_time: &LiveModel,
    ) -> Result<BestEffortCase, Failure> {
        let load = BestEffortLoad::new(device, model)?;
        std::thread::scope(|scope| {
            let running = scope.spawn(|| load.run());
            let measured = self.disturb(&load, real_time);
            load.stop.store(true, Ordering::Release);
            let ended = running.join().map_err(|_| Failure::failed("best effort panicked"))?;
            let measured = measured?;
            ended?;
            Ok(self.case_of(model, &load, measured))
        })
    }

    fn disturb(
        &mut self,
        load: &BestEffortLoad,
        real_time: &LiveModel,
    ) -> Result<CaseSamples, Failure> {
        let undisturbed_runs = load.runs_in(UNDISTURBED);
        let began = (Instant::now(), load.finished(), load.preemptions());
        let queue = load.runner.queue.as_ref();
        let probe = self.probe_queues(&[queue], &load.preempt_sent, load.epoch)?;
        let disturbed = PreemptedPeriod {
            seconds: began.0.elapsed().as_secs_f64(),
            runs: load.finished() - began.1,
            preemptions: load.preemptions() - began.2,
        };
        let spread = self.real_time(real_time, Some(load), Duration::ZERO)?;
        let after = self.real_time(real_time, Some(load), HEAD_START)?;
        Ok(CaseSamples { undisturbed_runs, disturbed, probe, real_time: spread, after })
    }

    fn case_of(
        &self,
        model: &LiveModel,
        load: &BestEffortLoad,
        measured: CaseSamples,
    ) -> BestEffortCase {
        let increase = |with: f64, without: f64| (with / without.max(1e-9) - 1.0) * 100.0;
        let undisturbed_rate = measured.undisturbed_runs / UNDISTURBED.as_secs_f64();
        let PreemptedPeriod { seconds, runs, preemptions } = measured.disturbed;
        let lost_seconds = seconds - runs / undisturbed_rate.max(1e-9);
        BestEffortCase {
            best_effort: model.name.clone(),
            steps: model.program.plan().steps.len(),
            run_us: 1e6 / undisturbed_rate.max(1e-9),
            probe: measured.probe,
            preempted: LatencySpread::of(
                load.preempted.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            ),
            real_time: measured.real_time,
            real_time_mean_increase_pct: increase(measured.real_time.mean, self.alone.mean),
            real_time_p99_increase_pct: increase(measured.real_time.p99, self.alone.p99),
            real_time_after: measured.after,
            real_time_after_mean_increase_pct: increase(measured.after.mean, self.alone.mean),
            preemptions: load.preemptions() as u64,
            runs: load.finished() as u64,
            wrong_outputs: load.wrong.load(Ordering::Acquire),
            lost_us_per_preemption: lost_seconds * 1e6 / preemptions.max(1.0),
        }
    }
}

/// Spins, because a dispatcher that preempts is awake, too.
fn spin_until(until: Instant) {
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Samples of one best-effort model.
struct CaseSamples {
    undisturbed_runs: f64,
    disturbed: PreemptedPeriod,
    probe: ProbeLatency,
    real_time: LatencySpread,
    after: LatencySpread,
}

/// A period with preemptions.
struct PreemptedPeriod {
    seconds: f64,
    runs: f64,
    preemptions: f64,
}

/// Best effort that runs without pause and resumes whenever it was preempted.
struct BestEffortLoad<'a> {
    model: &'a LiveModel,
    runner: TaskRunner,
    reference: Vec<Tensor>,
    epoch: Instant,
    /// When it was last preempted, in nanoseconds since `epoch`.
    preempt_sent: AtomicU64,
    stop: AtomicBool,
    /// Nothing is launched, because real time has the device.
    held: AtomicBool,
    steps_done: AtomicU64,
    steps: u64,
    preempted_count: AtomicU64,
    wrong: AtomicU64,
    preempted: Mutex<Vec<f64>>,
}

impl<'a> BestEffortLoad<'a> {
    fn new(device: &CudaDevice, model: &'a LiveModel) -> Result<BestEffortLoad<'a>, Failure> {
        let runner = TaskRunner::open(device, true)?;
        let task = model.program.prepare(model.inputs.clone()).map_err(Failure::failed)?;
        let steps = task.step_count() as u64;
        let completion = runner.run(task)?;
        if completion.outcome != Outcome::Done {
            let why = format!("{} ended: {:?}", model.name, completion.outcome);
            return Err(Failure::failed(why));
        }
        let reference = completion.task.into_outputs().map_err(Failure::failed)?;
        Ok(BestEffortLoad {
            model,
            runner,
            reference,
            epoch: Instant::now(),
            preempt_sent: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            held: AtomicBool::new(false),
            steps_done: AtomicU64::new(0),
            steps,
            preempted_count: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            preempted: Mutex::new(Vec::new()),
        })
    }

    fn run(&self) -> Result<(), Failure> {
        while !self.stop.load(Ordering::Acquire) {
            let inputs = self.model.inputs.clone();
            let mut task = self.model.program.prepare(inputs).map_err(Failure::failed)?;
            loop {
                while self.held.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                let before = task.next_step();
                let completion = self.runner.run(task)?;
                let done = completion.task.next_step() - before;
                self.steps_done.fetch_add(done as u64, Ordering::AcqRel);
                match completion.outcome {
                    Outcome::Preempted => {
                        self.record_preempted();
                        task = completion.task;
                    }
                    Outcome::Done => {
                        let outputs = completion.task.into_outputs().map_err(Failure::failed)?;
                        let wrong = u64::from(outputs != self.reference);
                        self.wrong.fetch_add(wrong, Ordering::AcqRel);
                        break;
                    }
                    Outcome::Failed(err) => return Err(Failure::failed(err)),
                }
            }
        }
        Ok(())
    }

    /// Preempts it and keeps it from resuming.
    fn hold(&self) {
        self.preempt_sent.store(self.epoch.elapsed().as_nanos() as u64, Ordering::Release);
        self.held.store(true, Ordering::Release);
        self.runner.queue.preempt();
    }

    fn record_preempted(&self) {
        let now = self.epoch.elapsed().as_nanos() as u64;
        let micros = now.saturating_sub(self.preempt_sent.load(Ordering::Acquire)) as f64 / 1e3;
        self.preempted_count.fetch_add(1, Ordering::AcqRel);
        self.preempted.lock().unwrap_or_else(PoisonError::into_inner).push(micros);
    }

    /// Runs so far; one in flight counts in part.
    fn finished(&self) -> f64 {
        self.steps_done.load(Ordering::Acquire) as f64 / self.steps.max(1) as f64
    }

    fn preemptions(&self) -> f64 {
        self.preempted_count.load(Ordering::Acquire) as f64
    }

    fn runs_in(&self, span: Duration) -> f64 {
        // Warm-up.
        std::thread::sleep(span / 4);
        let (began, before) = (Instant::now(), self.finished());
        std::thread::sleep(span);
        (self.finished() - before) / began.elapsed().as_secs_f64() * span.as_secs_f64()
    }
}

/// A chain of matrix products with `rows` rows: kernels of any length.
fn products(device: &CudaDevice, rows: usize, random: &mut Random) -> Result<LiveModel, Failure> {
    let info = |name: String, shape: Vec<usize>| ValueInfo {
        name,
        dtype: DataType::F32,
        shape: Some(shape.into_iter().map(Dim::Fixed).collect()),
    };
    const NARROW: usize = 8;
    let mut plan = LaunchPlan {
        values: vec![
            info("x".to_string(), vec![rows, NARROW]),
            info("widen".to_string(), vec![NARROW, WIDTH]),
            info("w".to_string(), vec![WIDTH, WIDTH]),
            info("narrow".to_string(), vec![WIDTH, NARROW]),
        ],
        inputs: vec![ValueId(0)],
        ..LaunchPlan::default()
    };
    let mut tensor = |shape: Vec<usize>, scale: f32| {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| random.symmetric_f32() * scale).collect();
        Tensor::from_vec(shape, values).map_err(Failure::failed)
    };
    for (id, shape) in [(1, [NARROW, WIDTH]), (2, [WIDTH, WIDTH]), (3, [WIDTH, NARROW])] {
        let weights = tensor(shape.to_vec(), 1.7 / (shape[0] as f32).sqrt())?;
        plan.constants.push((ValueId(id), weights));
    }
    let mut last = ValueId(0);
    for number in 0..PRODUCTS + 2 {
        let weight = match number {
            0 => 1,
            number if number <= PRODUCTS => 2,
            _ => 3,
        };
        let width = if weight == 3 { NARROW } else { WIDTH };
        let output = ValueId(plan.values.len() as u32);
        plan.values.push(info(format!("y{number}"), vec![rows, width]));
        plan.steps.push(Step {
            name: format!("product {number}"),
            op: Op::MatMul(MatMul::default()),
            inputs: vec![Some(last), Some(ValueId(weight))],
            outputs: vec![Some(output)],
            last_uses: vec![],
        });
        last = output;
    }
    plan.outputs = vec![last];
    plan.plan_lifetimes();
    let inputs = vec![tensor(vec![rows, NARROW], 1.0)?];
    let program = device.load(Arc::new(plan)).map_err(Failure::failed)?;
    Ok(LiveModel { name: format!("products of {rows} rows"), program, inputs })
}
