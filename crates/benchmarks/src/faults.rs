//! `atoll bench faults`: faults of a GPU while it serves, and how long they keep it from serving.

mod client;
mod report;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use assembly::progress::{self, Progress};
use assembly::sample_inputs::{Bindings, random_inputs};
use assembly::{DeviceArgs, Failure, compile_file};
use base::Random;
use clap::Args;
use device::InjectedFault;

use self::client::{ClientRecord, ServedNetwork};
use self::report::{FaultReport, FaultRow, Millis, table};
use crate::environment;
use crate::output::print_report;
use crate::rest_client::{Connection, inference, plain};
use crate::server::child::{ServerProcess, common_arguments};
use crate::server::transport::Transport;

/// How long the server may take to start.
const START_LIMIT: Duration = Duration::from_secs(600);
/// A server that does not serve again within this time after a fault will not.
const RECOVERY_LIMIT: Duration = Duration::from_secs(120);

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench faults --device cuda:0 --models models --networks resnet50,bert --watchdog-ms 1000
  atoll bench faults --device cuda:0 --models models --networks resnet50 --kinds trap --repeat 3

Starts a server. A client per network sends all the time over HTTP, and every reply is compared with
the first one bit by bit; only 503 with Retry-After may come instead. The time without service is
the longest time in which a network gave no reply. The command fails when a reply is wrong or
missing, or when the server does not serve again. Timings never make it fail.")]
pub(crate) struct FaultsArgs {
    #[command(flatten)]
    device: DeviceArgs,

    /// Folder of the networks
    #[arg(long, value_name = "FOLDER")]
    models: PathBuf,

    /// Networks, by file name without .onnx; the first is real time, the others are best effort
    #[arg(long, value_name = "NAME", value_delimiter = ',', required = true)]
    networks: Vec<String>,

    /// Faults: illegal_address, misaligned_address, trap, assert, hang, lost, out_of_memory
    #[arg(
        long,
        value_name = "KIND",
        value_delimiter = ',',
        default_value = "illegal_address,misaligned_address,trap,assert,hang,lost,out_of_memory"
    )]
    kinds: Vec<String>,

    /// How often each fault happens
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: u32,

    /// How long a hang lasts, in milliseconds
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(u64).range(1..=20_000))]
    hang_ms: u64,

    /// Seed of inputs and pauses
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    json: Option<Option<PathBuf>>,
}

/// Runs the benchmark.
pub(crate) fn run(args: &FaultsArgs) -> Result<(), Failure> {
    let kinds: Vec<Kind> = args.kinds.iter().map(|kind| known(kind)).collect::<Result<_, _>>()?;
    let watchdog_ms = args.device.settings.watchdog_ms;
    let hangs = kinds.iter().any(|kind| kind.name == HANG);
    if hangs && !(1..args.hang_ms).contains(&watchdog_ms) {
        return Err(Failure::usage(format!(
            "a hang of {} ms is not noticed with --watchdog-ms {watchdog_ms}; give a smaller one",
            args.hang_ms
        )));
    }
    let mut random = Random::new(args.seed);
    let folder = tempfile::tempdir().map_err(Failure::failed)?;
    let server = start(args, folder.path())?;
    let networks: Vec<ServedNetwork> = args
        .networks
        .iter()
        .enumerate()
        .map(|(number, name)| served(args, &server, (number, name), &mut random))
        .collect::<Result<_, Failure>>()?;
    let is_ended = AtomicBool::new(false);
    let mut bench = FaultBench { args, server, networks: &networks };
    let address = bench.server.http;
    let (rows, clients) = std::thread::scope(|scope| {
        let is_ended = &is_ended;
        let clients: Vec<_> = networks
            .iter()
            .map(|network| scope.spawn(move || client::run(address, network, is_ended)))
            .collect();
        let rows = bench.inject_all(&kinds, &mut random);
        is_ended.store(true, Ordering::SeqCst);
        let mut all = ClientRecord::default();
        for client in clients {
            all.add(client.join().map_err(|_| Failure::failed("a client panicked"))?);
        }
        Ok::<_, Failure>((rows, all))
    })?;
    let (rows, lost) = match rows {
        (rows, Ok(())) => (rows, None),
        (rows, Err(why)) => (rows, Some(why)),
    };
    let report = FaultReport {
        device: args.device.device.clone(),
        driver: environment::driver(&args.device.device),
        date: environment::today(),
        command: environment::command(),
        seed: args.seed,
        networks: args.networks.clone(),
        rows,
        right: clients.right,
        refused: clients.refused,
        wrong: clients.wrong,
        unanswered: clients.unanswered,
        failures: clients.failures,
    };
    print_report(args.json.as_ref(), &report, &table(&report))?;
    match (lost, clients.wrong + clients.unanswered) {
        (Some(why), _) => Err(Failure::failed(why)),
        (None, 0) => Ok(()),
        (None, bad) => Err(Failure::failed(format!(
            "{bad} replies are wrong or missing:\n  {}",
            report.failures.join("\n  ")
        ))),
    }
}

/// The fault that takes time.
const HANG: &str = "hang";

/// A fault by its name.
#[derive(Clone, Debug)]
struct Kind {
    name: String,
    /// Whether the device is given up because of it.
    is_fatal: bool,
}

fn known(name: &str) -> Result<Kind, Failure> {
    let Some(fault) = InjectedFault::named(name, 0) else {
        return Err(Failure::usage(format!(
            "there is no fault '{name}'; there are: illegal_address, misaligned_address, trap, \
             assert, hang, lost, out_of_memory"
        )));
    };
    let is_fatal = !matches!(fault, InjectedFault::OutOfMemory { .. });
    Ok(Kind { name: name.to_string(), is_fatal })
}

/// The name under which a network is loaded once more.
fn copy_name(name: &str) -> String {
    format!("{name}_copy")
}

/// Starts a server with the networks, and a copy of each that is loaded on request.
fn start(args: &FaultsArgs, folder: &Path) -> Result<ServerProcess, Failure> {
    let repository = folder.join("repository");
    let mut arguments = vec!["serve".to_string()];
    let mut add = |flag: &str, value: String| arguments.extend([flag.to_string(), value]);
    add("--model-repository", repository.display().to_string());
    add("--model-control-mode", "explicit".to_string());
    for name in &args.networks {
        let file = args.models.join(format!("{name}.onnx"));
        let unreadable = |err| Failure::usage(format!("{}: {err}", file.display()));
        let file = file.canonicalize().map_err(unreadable)?;
        for model in [name.clone(), copy_name(name)] {
            let version = repository.join(model).join("1");
            std::fs::create_dir_all(&version).map_err(Failure::failed)?;
            std::os::unix::fs::symlink(&file, version.join("model.onnx"))
                .map_err(Failure::failed)?;
        }
        add("--load-model", name.clone());
    }
    add("--watchdog-ms", args.device.settings.watchdog_ms.to_string());
    arguments.extend(common_arguments(&args.device));
    arguments.push("--inject-faults".to_string());
    let binary = std::env::current_exe().map_err(Failure::failed)?;
    let data = folder.join("data");
    ServerProcess::start(&binary, &arguments, &data, Transport::default(), START_LIMIT)
}

/// Asks a network once, for the reply that all others must equal.
fn served(
    args: &FaultsArgs,
    server: &ServerProcess,
    (number, name): (usize, &String),
    random: &mut Random,
) -> Result<ServedNetwork, Failure> {
    let file = args.models.join(format!("{name}.onnx"));
    let plan = compile_file(&file).map_err(|err| Failure::failed(format!("{name}: {err}")))?;
    let inputs = random_inputs(&plan, &Bindings::new(), random).map_err(Failure::failed)?;
    let class = if number == 0 { "rt" } else { "be" };
    let message = inference(name, &plan, &inputs, class).map_err(Failure::failed)?;
    ServedNetwork::new(name.clone(), message, server.http)
}

struct FaultBench<'a> {
    args: &'a FaultsArgs,
    server: ServerProcess,
    networks: &'a [ServedNetwork],
}

impl FaultBench<'_> {
    /// One row for each kind, until the server does not serve again.
    fn inject_all(
        &mut self,
        kinds: &[Kind],
        random: &mut Random,
    ) -> (Vec<FaultRow>, Result<(), String>) {
        let mut rows = Vec::new();
        let all = kinds.len() as u64 * u64::from(self.args.repeat);
        let progress = Progress::new(all, "faults");
        for kind in kinds {
            let before = self.memory();
            let mut row = FaultRow { kind: kind.name.clone(), ..FaultRow::default() };
            let mut result = Ok(());
            for number in 0..self.args.repeat {
                std::thread::sleep(Duration::from_millis(100 + random.below(200)));
                result = self.inject(kind, number, &mut row);
                progress.advance();
                if result.is_err() {
                    break;
                }
            }
            let after = self.memory();
            row.host_mib = [before.0, after.0];
            row.device_mib = [before.1, after.1];
            progress::note(&format!("{}: {} times", row.kind, row.count));
            rows.push(row);
            if result.is_err() {
                return (rows, result);
            }
        }
        (rows, Ok(()))
    }

    fn inject(&mut self, kind: &Kind, number: u32, row: &mut FaultRow) -> Result<(), String> {
        self.networks.iter().for_each(ServedNetwork::reset);
        let parameter = match kind.name.as_str() {
            HANG => self.args.hang_ms,
            // Each time another allocation fails.
            _ => u64::from(number),
        };
        let began = Instant::now();
        self.server.send_line(&format!("inject {} {parameter}", kind.name))?;
        row.count += 1;
        if kind.is_fatal {
            let refused = || self.networks.iter().filter_map(ServedNetwork::refused).min();
            wait(|| refused().is_some(), "the fault was not noticed")?;
            row.noticed.push(refused().map_or(Duration::ZERO, |at| at - began));
        } else {
            self.allocate();
        }
        let counts: Vec<u64> = self.networks.iter().map(ServedNetwork::right).collect();
        let again = |(network, count): (&ServedNetwork, &u64)| network.right() > count + 1;
        let serves = || self.networks.iter().zip(&counts).all(again);
        wait(serves, "the server does not serve again")?;
        let gap = self.networks.iter().map(ServedNetwork::gap).max().unwrap_or_default();
        row.without_service.push(gap);
        Ok(())
    }

    /// Loads every network once more, which allocates memory of every kind; it may fail.
    fn allocate(&self) {
        let mut connection = Connection::new(self.server.http);
        for network in self.networks {
            for action in ["load", "unload"] {
                let path = format!("/v2/repository/models/{}/{action}", copy_name(&network.name));
                let _ = connection.exchange(&plain("POST", &path));
            }
        }
    }

    /// Memory of the server and of the device, in MiB.
    fn memory(&self) -> (Option<u64>, Option<u64>) {
        let used = self.server.metric("nv_gpu_memory_used_bytes").map(|bytes| bytes as u64 >> 20);
        (self.server.resident_bytes().map(|bytes| bytes >> 20), used)
    }
}

fn wait(is_done: impl Fn() -> bool, why: &str) -> Result<(), String> {
    let began = Instant::now();
    while !is_done() {
        if began.elapsed() > RECOVERY_LIMIT {
            return Err(format!("{why} within {} s", RECOVERY_LIMIT.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

impl Millis {
    fn push(&mut self, time: Duration) {
        self.0.push((time.as_secs_f64() * 1e4).round() / 10.0);
    }
}
