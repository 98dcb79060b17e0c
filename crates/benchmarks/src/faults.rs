//! `atoll bench faults`: faults of a GPU while it serves, and how long they keep it from serving.

mod client;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use assembly::device_group::open_device_group;
use assembly::sample_inputs::{Bindings, random_inputs};
use assembly::{DeviceArgs, Failure, compile_file};
use base::Random;
use clap::Args;
use device::InjectedFault;
use model::LaunchPlan;
use model::config::{Class, ModelConfig};
use runtime::{DeviceGroup, NodeOptions};

use self::client::{Client, ClientRecord, ServedNetwork};
use self::report::{FaultReport, FaultRow, Millis, table};
use crate::environment;
use crate::output::print_report;

/// A device that does not serve again within this time after a fault will not.
const RECOVERY_LIMIT: Duration = Duration::from_secs(120);

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench faults --device cuda:0 --models models --networks resnet50,bert --watchdog-ms 1000
  atoll bench faults --device cuda:0 --models models --networks resnet50 --kinds trap --repeat 3

Clients send all the time, and every reply is compared with the first one bit by bit. The time
without service is the longest time in which a network gave no reply. The command fails when a reply
is wrong or missing, or when the device does not come back. Timings never make it fail.")]
pub(crate) struct FaultsArgs {
    #[command(flatten)]
    device: DeviceArgs,

    /// Folder of the networks
    #[arg(long, value_name = "FOLDER")]
    models: PathBuf,

    /// Networks, by file name without .onnx; the first is real time, the others are best effort
    #[arg(long, value_name = "NAME", value_delimiter = ',', required = true)]
    networks: Vec<String>,

    /// Faults: illegal_address, misaligned_address, trap, hang, lost, out_of_memory
    #[arg(
        long,
        value_name = "KIND",
        value_delimiter = ',',
        default_value = "illegal_address,misaligned_address,trap,hang,lost,out_of_memory"
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
    let kinds = args.kinds.iter().map(|kind| known(kind, args.hang_ms));
    let kinds: Vec<Kind> = kinds.collect::<Result<_, Failure>>()?;
    let watchdog_ms = args.device.settings.watchdog_ms;
    let hangs = kinds.iter().any(|kind| matches!(kind.fault, InjectedFault::Hang { .. }));
    if hangs && !(1..args.hang_ms).contains(&watchdog_ms) {
        return Err(Failure::usage(format!(
            "a hang of {} ms is not noticed with --watchdog-ms {watchdog_ms}; give a smaller one",
            args.hang_ms
        )));
    }
    let group = open_device_group(&args.device, None, &NodeOptions::default())?;
    let mut random = Random::new(args.seed);
    let networks: Vec<ServedNetwork> = args
        .networks
        .iter()
        .enumerate()
        .map(|(number, name)| serve(args, &group, (number, name), &mut random))
        .collect::<Result<_, Failure>>()?;
    let end = AtomicBool::new(false);
    let bench = FaultBench { group: &group, networks: &networks };
    let (rows, records) = std::thread::scope(|scope| {
        let clients: Vec<_> = networks
            .iter()
            .map(|network| {
                let client = Client { group: &group, network, end: &end };
                scope.spawn(move || client.run())
            })
            .collect();
        let rows = bench.inject_all(&kinds, args.repeat, &mut random);
        end.store(true, Ordering::SeqCst);
        let join = |client: std::thread::ScopedJoinHandle<'_, ClientRecord>| {
            client.join().map_err(|_| Failure::failed("a client panicked"))
        };
        let records = clients.into_iter().map(join).collect::<Result<Vec<_>, Failure>>();
        Ok::<_, Failure>((rows, records?))
    })?;
    let (rows, lost) = match rows {
        (rows, Ok(())) => (rows, None),
        (rows, Err(why)) => (rows, Some(why)),
    };
    let mut clients = ClientRecord::default();
    records.iter().for_each(|record| clients.add(record));
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
    };
    print_report(args.json.as_ref(), &report, &table(&report))?;
    match (lost, clients.wrong + clients.unanswered) {
        (Some(why), _) => Err(Failure::failed(why)),
        (None, 0) => Ok(()),
        (None, bad) => Err(Failure::failed(format!("{bad} replies are wrong or missing"))),
    }
}

/// A fault by its name.
#[derive(Clone, Debug)]
struct Kind {
    name: String,
    fault: InjectedFault,
    /// Whether the device is given up because of it.
    is_fatal: bool,
}

fn known(name: &str, hang_ms: u64) -> Result<Kind, Failure> {
    let (fault, is_fatal) = match name {
        "illegal_address" => (InjectedFault::IllegalAddress, true),
        "misaligned_address" => (InjectedFault::MisalignedAddress, true),
        "trap" => (InjectedFault::Trap, true),
        "hang" => (InjectedFault::Hang { millis: hang_ms }, true),
        "lost" => (InjectedFault::Lost, true),
        "out_of_memory" => (InjectedFault::OutOfMemory { after: 0 }, false),
        other => {
            return Err(Failure::usage(format!(
                "there is no fault '{other}'; there are: illegal_address, misaligned_address, \
                 trap, hang, lost, out_of_memory"
            )));
        }
    };
    Ok(Kind { name: name.to_string(), fault, is_fatal })
}

/// Loads a network and asks it once, for the reply that all others must equal.
fn serve(
    args: &FaultsArgs,
    group: &DeviceGroup,
    (number, name): (usize, &String),
    random: &mut Random,
) -> Result<ServedNetwork, Failure> {
    let file = args.models.join(format!("{name}.onnx"));
    let plan = compile_file(&file).map_err(|err| Failure::failed(format!("{name}: {err}")))?;
    let plan: Arc<LaunchPlan> = Arc::new(plan);
    let inputs = random_inputs(&plan, &Bindings::new(), random).map_err(Failure::failed)?;
    let class = if number == 0 { Class::RealTime } else { Class::BestEffort };
    let placed = group.load(plan.clone()).map_err(Failure::failed)?;
    let model = group.add_model(placed, &ModelConfig { class, ..ModelConfig::default() });
    ServedNetwork::new(name.clone(), model, plan, inputs, group)
}

struct FaultBench<'a> {
    group: &'a Arc<DeviceGroup>,
    networks: &'a [ServedNetwork],
}

impl FaultBench<'_> {
    /// One row for each kind, until the device does not come back.
    fn inject_all(
        &self,
        kinds: &[Kind],
        repeat: u32,
        random: &mut Random,
    ) -> (Vec<FaultRow>, Result<(), String>) {
        let mut rows = Vec::new();
        for kind in kinds {
            let before = self.memory();
            let mut row = FaultRow { kind: kind.name.clone(), ..FaultRow::default() };
            let mut result = Ok(());
            for number in 0..repeat {
                std::thread::sleep(Duration::from_millis(100 + random.below(200)));
                result = self.inject(kind, number, &mut row);
                if result.is_err() {
                    break;
                }
            }
            row.host_mib = [before.0, self.memory().0];
            row.device_mib = [before.1, self.memory().1];
            eprintln!("{}: {} times", row.kind, row.count);
            rows.push(row);
            if result.is_err() {
                return (rows, result);
            }
        }
        (rows, Ok(()))
    }

    fn inject(&self, kind: &Kind, number: u32, row: &mut FaultRow) -> Result<(), String> {
        self.networks.iter().for_each(ServedNetwork::reset_gap);
        let faults = self.group.recoveries(0).faults;
        let fault = match kind.fault {
            InjectedFault::OutOfMemory { .. } => {
                InjectedFault::OutOfMemory { after: u64::from(number) }
            }
            other => other,
        };
        let began = Instant::now();
        let device = self.group.node(0).device().clone();
        device.inject(fault).map_err(|err| err.to_string())?;
        drop(device);
        row.count += 1;
        if !kind.is_fatal {
            self.allocate();
        } else {
            self.wait(|| self.group.recoveries(0).faults > faults, "the fault was not noticed")?;
            row.noticed.push(began.elapsed());
        }
        let counts: Vec<u64> = self.networks.iter().map(ServedNetwork::right).collect();
        let serves = || {
            let again = |(network, count): (&ServedNetwork, &u64)| network.right() > count + 1;
            self.group.recoveries(0).since.is_none() && self.networks.iter().zip(&counts).all(again)
        };
        self.wait(serves, "the device does not serve again")?;
        let gap = self.networks.iter().map(ServedNetwork::gap).max().unwrap_or_default();
        row.without_service.push(gap);
        Ok(())
    }

    /// Loads a network once more, which allocates memory of every kind; it may fail.
    fn allocate(&self) {
        for network in self.networks {
            if let Ok(placed) = self.group.load(network.plan.clone()) {
                let model = self.group.add_model(placed, &ModelConfig::default());
                let _ = network.ask(self.group, model);
                self.group.remove_model(model);
            }
        }
    }

    fn wait(&self, is_done: impl Fn() -> bool, why: &str) -> Result<(), String> {
        let began = Instant::now();
        while !is_done() {
            if began.elapsed() > RECOVERY_LIMIT {
                return Err(format!("{why} within {} s", RECOVERY_LIMIT.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Memory of this process and of the device, in MiB.
    fn memory(&self) -> (Option<u64>, Option<u64>) {
        let used = self.group.node(0).device().memory_use().and_then(|used| used.system);
        (environment::resident_bytes(None).map(|bytes| bytes >> 20), used.map(|used| used.0 >> 20))
    }
}

impl Millis {
    fn push(&mut self, time: Duration) {
        self.0.push((time.as_secs_f64() * 1e4).round() / 10.0);
    }
}
