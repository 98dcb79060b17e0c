//! `atoll bench swap`: more models than memory on a real device.

use std::path::PathBuf;
use std::sync::Arc;

use base::Random;
use bench::swap::{Access, Case, Noise, Swap, SwapModel, SwapOptions, SwapReport, table, vary};
use clap::Args;
use cuda::CudaDevice;
use device::Device;
use device::paged::{PagedDevice, PagedDeviceOptions};
use model::LaunchPlan;
use model::config::Class;

use crate::args::{DeviceArgs, DeviceSettings};
use crate::big_model::{BigModel, BigRound};
use crate::failure::Failure;
use crate::sim_command::write;
use crate::{binding, engine, soak, testbed};

/// Tokens of a text where nothing else is said.
const SEQUENCE: usize = 128;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench swap --device cuda:0 --models models --count 5,50 --room 4,20 --concurrency 1,64
  atoll bench swap --device cuda:0 --models models --network resnet50 --count 50 --room 20 \\
                   --access zipf --beside --big models/bert_large.onnx --json swap.json
  atoll bench swap --device cpu --models models --network magika --count 5 --room 4 --seconds 2
  atoll bench swap --device cpu --models models --network magika --soak 2000
  atoll bench swap --device cuda:0 --models models --network resnet50 --big --seconds 20 --json big.json

Models are copies of the networks in the folder, each with weights of its own; every answer is compared with that of the same
model undisturbed. On the CPU, whose weights are always there, bringing them takes the time their bytes need at --link.

--big alone serves the first network as real time at half of what it can do, in stretches with nothing beside it and in
stretches in which a model of --big-mb megabytes of weights is loaded and unloaded over and over: first its weights alone, then
all of it, packed and prepared anew each time. Both take three times --seconds.

--soak: 85 of 100 operations ask a model that is in service, 9 one that is not, 2 each load, unload and register (24 at most are
there). In five rounds, the first of which is warm-up; behind each everything is unloaded and what the device holds is put
down by kind. It fails for an error that is not documented, a wrong answer, weights that stay, or 64 MiB more by the GPU's own
count after the last round than after the warm-up.")]
pub(crate) struct SwapArgs {
    /// Device: cuda:N, or cpu
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,

    /// Folder of the networks
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: PathBuf,

    /// Networks to make models of, in turn, by file name without .onnx
    #[arg(long, value_delimiter = ',', default_value = "resnet50")]
    pub(crate) network: Vec<String>,

    /// How many models are asked for; several separated by commas
    #[arg(long, value_delimiter = ',', default_value = "5", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) count: Vec<u16>,

    /// How many of them have room, as many numbers as for --count
    #[arg(long, value_delimiter = ',', default_value = "4", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) room: Vec<u16>,

    /// Order in which they are asked for: sequential, uniform, zipf
    #[arg(long, value_delimiter = ',', default_value = "sequential,uniform,zipf")]
    pub(crate) access: Vec<String>,

    /// Requests outstanding; several separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,64", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) concurrency: Vec<u16>,

    /// Seconds of each case
    #[arg(long, default_value_t = 5.0)]
    pub(crate) seconds: f64,

    /// Class of requests: rt or be
    #[arg(long, default_value = "rt")]
    pub(crate) class: String,

    /// Also ask one pinned model regularly, at half of what it can do, while others swap and load
    #[arg(long)]
    pub(crate) beside: bool,

    /// Load a large model beside it: one from a file, or else one made of random numbers
    #[arg(long, value_name = "FILE.onnx", num_args = 0..=1)]
    pub(crate) big: Option<Option<PathBuf>>,

    /// Megabytes of weights, on the device, of a large model that is made
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=64_000))]
    pub(crate) big_mb: u64,

    /// Instead: so many random operations on a whole server, from 64 clients
    #[arg(long, value_name = "OPERATIONS")]
    pub(crate) soak: Option<u64>,

    /// KiB of weights that are copied to a GPU at once
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(2048..=1048576))]
    pub(crate) chunk_kib: u64,

    /// How fast weights come to the CPU device, in MB/s
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) link: u64,

    /// Seed of orders and inputs
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    #[command(flatten)]
    pub(crate) settings: DeviceSettings,
}

/// A device whose weights come and go.
pub(crate) struct SwappingDevice {
    pub(crate) device: Arc<dyn Device>,
    gpu: Option<Arc<CudaDevice>>,
    link: f64,
}

impl SwappingDevice {
    pub(crate) fn open(args: &SwapArgs) -> Result<SwappingDevice, Failure> {
        let named = DeviceArgs { device: args.device.clone(), settings: args.settings.clone() };
        let link = args.link as f64 * 1e6;
        if args.device.starts_with("cuda") {
            let gpu = engine::open_gpu_with(&named, |options| {
                options.weights_on_demand = true;
                options.weights_chunk_bytes = args.chunk_kib << 10;
            })?;
            let gpu = Arc::new(gpu);
            return Ok(SwappingDevice { device: gpu.clone(), gpu: Some(gpu), link });
        }
        let inner = engine::open_device(&named)?;
        let options = PagedDeviceOptions {
            memory: inner.info().memory,
            bytes_per_second: args.link * 1_000_000,
            runnable_percent: 100,
            added: base::Bytes(0),
        };
        let device = Arc::new(PagedDevice::new(inner, options).map_err(Failure::failed)?);
        Ok(SwappingDevice { device, gpu: None, link })
    }

    /// What a GPU's memory is used for.
    pub(crate) fn holdings(&self) -> Option<cuda::MemoryReport> {
        self.gpu.as_ref().map(|gpu| gpu.memory_report())
    }

    /// Gives back what is kept for later and is not in use.
    pub(crate) fn trim(&self) -> Result<(), Failure> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.trim().map_err(Failure::failed))
    }

    /// Bytes per second.
    fn speed(&self) -> Result<f64, Failure> {
        match &self.gpu {
            Some(gpu) => gpu.copy_speed().map_err(Failure::failed),
            None => Ok(self.link),
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &SwapArgs) -> Result<(), Failure> {
    let opened = SwappingDevice::open(args)?;
    if let Some(operations) = args.soak {
        return soak::run(args, &opened, operations);
    }
    // On its own it is all that is asked for.
    let only_big = args.big.is_some() && !args.beside;
    let cases = if only_big { Vec::new() } else { cases(args)? };
    let speed = opened.speed()?;
    let models = load(args, &*opened.device)?;
    let options = SwapOptions {
        seconds: args.seconds,
        class: class(&args.class)?,
        seed: args.seed,
        bytes_per_second: speed,
    };
    let swap = Swap::new(opened.device.clone(), models, options).map_err(Failure::failed)?;
    let mut report = SwapReport {
        device: opened.device.info().description.clone(),
        driver: testbed::driver(&args.device),
        date: testbed::today(),
        command: testbed::command(),
        network: args.network.join("+"),
        model_bytes: swap.bytes().0,
        distinct_answers: swap.distinct(),
        copy_bytes_per_second: [speed, speed],
        warm: swap.warm(),
        big_bytes: None,
        rows: Vec::new(),
        beside: Vec::new(),
    };
    for case in cases {
        let row = swap.run(case).map_err(Failure::failed)?;
        eprintln!(
            "{} of {} {} x{}: {}/s, cold p50 {} us of {} us, {} errors",
            row.room,
            row.models,
            row.access,
            row.concurrency,
            row.throughput_rps,
            row.cold.p50_us,
            row.bound_us,
            row.errors + row.wrong
        );
        report.rows.push(row);
        keep(args, &report)?;
    }
    if args.beside || only_big {
        run_beside(args, &opened, &swap, &mut report)?;
    }
    report.copy_bytes_per_second[1] = opened.speed()?;
    finish(args, &report)
}

fn class(name: &str) -> Result<Class, Failure> {
    Class::parse(name)
        .ok_or_else(|| Failure::usage(format!("there is no class '{name}'; there are: rt, be")))
}

fn cases(args: &SwapArgs) -> Result<Vec<Case>, Failure> {
    if args.count.len() != args.room.len() {
        return Err(Failure::usage("--count and --room need equally many numbers"));
    }
    let mut cases = Vec::new();
    for (count, room) in args.count.iter().zip(&args.room) {
        for access in &args.access {
            let access = Access::parse(access.trim()).ok_or_else(|| {
                Failure::usage(format!(
                    "there is no access '{access}'; there are: sequential, uniform, zipf"
                ))
            })?;
            for concurrency in &args.concurrency {
                let (count, room) = (usize::from(*count), usize::from(*room));
                cases.push(Case { count, room, access, concurrency: usize::from(*concurrency) });
            }
        }
    }
    Ok(cases)
}

/// As many models as the largest case needs.
fn load(args: &SwapArgs, device: &dyn Device) -> Result<Vec<SwapModel>, Failure> {
    let most = args.count.iter().copied().max().map_or(1, usize::from);
    let count = match (args.beside, args.big.is_some()) {
        (false, true) => 1,
        (beside, _) => most + usize::from(beside),
    };
    let mut random = Random::new(args.seed);
    let mut networks = Vec::new();
    for name in &args.network {
        let path = args.models.join(format!("{name}.onnx"));
        let plan = engine::compile_file(&path)
            .map_err(|err| Failure::failed(format!("{}: {err}", path.display())))?;
        let inputs = inputs(&plan, &mut random).map_err(Failure::failed)?;
        let inputs = binding::settled(device.host_pool(), inputs);
        networks.push((name.clone(), plan, inputs));
    }
    let mut models = Vec::new();
    for copy in 0..count {
        let (name, plan, inputs) = &networks[copy % networks.len()];
        let failed = |err| Failure::failed(format!("{name}: {err}"));
        let program = device.load(Arc::new(vary(plan, copy))).map_err(failed)?;
        models.push(SwapModel { name: format!("{name}#{copy}"), program, inputs: inputs.clone() });
    }
    eprintln!("{count} models are packed");
    Ok(models)
}

pub(crate) fn inputs(plan: &LaunchPlan, random: &mut Random) -> Result<Vec<model::Tensor>, String> {
    let mut bindings = binding::Bindings::new();
    bindings.insert("sequence".to_string(), SEQUENCE);
    binding::random_inputs(plan, &bindings, random)
}

fn run_beside(
    args: &SwapArgs,
    opened: &SwappingDevice,
    swap: &Swap,
    report: &mut SwapReport,
) -> Result<(), Failure> {
    let count = args.count.iter().copied().max().map_or(1, usize::from);
    let room = args.room.iter().copied().max().map_or(1, usize::from).min(count);
    let big = args.big.as_ref().map(|file| BigModel::open(args, opened, file.as_deref()));
    let big = big.transpose()?;
    report.big_bytes = big.as_ref().map(|big| big.bytes);
    let bring = |_: &runtime::Node| big.as_ref().map_or(Ok(0), BigModel::bring);
    let load = |node: &runtime::Node| big.as_ref().map_or(Ok(0), |big| big.load(node));
    let mut noises = Vec::new();
    if args.beside {
        noises.push(Noise::Serving { count: room, clients: 2 });
        noises.push(Noise::Swapping { count, room: room.min(count - 1).max(1), clients: 2 });
    }
    if let Some(BigModel { name, bytes, .. }) = &big {
        let (bring, load): (&BigRound<'_>, &BigRound<'_>) = (&bring, &load);
        for (what, round) in [("loaded and evicted", bring), ("prepared, loaded and removed", load)]
        {
            noises.push(Noise::Other { name: format!("{name} being {what}"), round, room: *bytes });
        }
    }
    for noise in noises {
        let beside = swap.beside(&noise, 50.0, args.seconds * 3.0).map_err(Failure::failed)?;
        eprintln!(
            "beside {}: p99 {} us, {:+.2} %, {} rounds, {} GB/s, {} errors {:?}",
            beside.noise,
            beside.noisy.p99_us,
            beside.p99_change_pct,
            beside.events,
            beside.gigabytes_per_second,
            beside.errors,
            beside.first_error
        );
        report.beside.push(beside);
        keep(args, report)?;
    }
    Ok(())
}

fn keep(args: &SwapArgs, report: &SwapReport) -> Result<(), Failure> {
    // After every case: a run that is cut short leaves what it has.
    match &args.json {
        Some(Some(path)) => write(path, &to_json(report)?),
        _ => Ok(()),
    }
}

fn to_json(report: &SwapReport) -> Result<String, Failure> {
    Ok(serde_json::to_string_pretty(report).map_err(Failure::failed)? + "\n")
}

fn finish(args: &SwapArgs, report: &SwapReport) -> Result<(), Failure> {
    keep(args, report)?;
    match &args.json {
        Some(None) => print!("{}", to_json(report)?),
        _ => print!("{}", table(report)),
    }
    let errors: u64 = report.rows.iter().map(|row| row.errors + row.wrong).sum::<u64>()
        + report.beside.iter().map(|beside| beside.errors).sum::<u64>();
    match errors {
        0 => Ok(()),
        count => Err(Failure::failed(format!("{count} requests failed or were answered wrong"))),
    }
}
