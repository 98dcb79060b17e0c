//! `atoll bench server`: what of the engine's rate is left when the same requests come over a socket.
//!
//! The engine runs in this process and is asked by threads with tensors in memory. The server is a process of its own, started with
//! the same settings, and asked over loopback by threads of this one, with messages that were encoded once. Both are asked in
//! turns, with equally many requests outstanding.

mod child;
mod engine_load;
mod report;
mod subject;
mod wire_load;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Parser, ValueEnum};

use self::child::Child;
use self::engine_load::Engine;
use self::report::{Round, ServerReport, Stretch, Summary, table};
use self::subject::Subject;
use self::wire_load::Wires;
use crate::args::{Cli, Command, DeviceArgs, ServeArgs};
use crate::failure::Failure;
use crate::sim_command::write;
use crate::testbed;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench server --model resnet50.onnx --device cuda:0 --json server.json
  atoll bench server --models models --network resnet50 --clients 256 --connections 16 --seconds 5 --rounds 5
  atoll bench server --model tiny.onnx --protocols grpc -- --real-time-lanes 4

What follows -- goes to atoll serve, and holds for the engine alone as well.")]
pub(crate) struct ServerBenchArgs {
    /// The ONNX file; settings beside it hold, as for atoll serve
    #[arg(long, value_name = "FILE.onnx", required_unless_present = "models")]
    pub(crate) model: Option<PathBuf>,

    /// Folder of models, with --network
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub(crate) models: Option<PathBuf>,

    /// Network of the folder, by file name without .onnx
    #[arg(long, default_value = "resnet50")]
    pub(crate) network: String,

    /// Size of a symbolic dimension of the inputs; 1 unless given
    #[arg(long, value_name = "SYMBOL=SIZE")]
    pub(crate) bind: Vec<String>,

    /// Requests outstanding, over all connections
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) clients: u16,

    /// Connections of gRPC, each with a thread of its own; REST has one connection for each request outstanding, on as many threads
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) connections: u16,

    /// Threads that ask the engine alone
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) engine_threads: u16,

    /// Seconds of one turn
    #[arg(long, default_value_t = 3.0)]
    pub(crate) seconds: f64,

    /// Turns of each kind
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) rounds: u16,

    /// The most seconds of warming up of each kind, which ends when the rate stands
    #[arg(long, default_value_t = 30)]
    pub(crate) warm_secs: u64,

    /// Wires to ask the server over, separated by commas
    #[arg(long, value_enum, default_value = "grpc,rest", value_delimiter = ',')]
    pub(crate) protocols: Vec<Protocol>,

    /// Seconds the server may take until it is ready
    #[arg(long, default_value_t = 300)]
    pub(crate) start_timeout_secs: u64,

    /// Another atoll binary to serve in turns with this one, for comparison
    #[arg(long, value_name = "FILE")]
    pub(crate) against: Option<PathBuf>,

    /// Seed of the inputs
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// More settings of atoll serve
    #[arg(last = true)]
    pub(crate) serve: Vec<String>,
}

/// How the server is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// Raw tensors in protobuf
    Grpc,
    /// Binary tensors behind JSON
    Rest,
}

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Protocol::Grpc => "gRPC",
            Protocol::Rest => "REST",
        }
    }
}

/// Two turns that differ by less than this in a row end it.
const WARM_CHANGE: f64 = 0.05;

/// When answers of a turn begin to count, and for how long they do.
#[derive(Clone, Copy, Debug)]
struct Window {
    ramp: Duration,
    counted: Duration,
}

impl Window {
    fn of(seconds: f64) -> Window {
        let counted = Duration::from_secs_f64(seconds);
        Window { ramp: (counted / 4).min(Duration::from_millis(300)), counted }
    }
}

/// The settings that the server gets, as words.
fn serve_words(args: &ServerBenchArgs, model: &Path) -> Vec<String> {
    let settings = &args.device.settings;
    let mut words = vec!["serve".to_string()];
    let mut add = |flag: &str, value: String| words.extend([flag.to_string(), value]);
    add("--model-repository", model.display().to_string());
    add("--host", "127.0.0.1".to_string());
    for flag in ["--http-port", "--grpc-port", "--metrics-port"] {
        add(flag, "0".to_string());
    }
    add("--device", args.device.device.clone());
    add("--precision", settings.precision.name().to_string());
    add("--best-effort-chain", settings.best_effort_chain.to_string());
    add("--threads", settings.threads.to_string());
    add("--cpu-queues", settings.cpu_queues.to_string());
    if let Some(folder) = &settings.kernel_cache {
        add("--kernel-cache", folder.display().to_string());
    }
    if let Some(folder) = &settings.cuda_toolkit {
        add("--cuda-toolkit", folder.display().to_string());
    }
    words.extend(args.serve.iter().cloned());
    words
}

/// What those words mean to `atoll serve`.
fn serve_args(words: &[String]) -> Result<ServeArgs, Failure> {
    let command = std::iter::once("atoll".to_string()).chain(words.iter().cloned());
    match Cli::try_parse_from(command).map_err(Failure::usage)?.command {
        Command::Serve(args) if !args.cluster => Ok(args),
        _ => Err(Failure::usage("what follows -- are settings of one server, without --cluster")),
    }
}

fn model_file(args: &ServerBenchArgs) -> Result<PathBuf, Failure> {
    let path = match (&args.model, &args.models) {
        (Some(path), _) => path.clone(),
        (None, Some(folder)) => folder.join(format!("{}.onnx", args.network)),
        (None, None) => return Err(Failure::usage("name a --model, or --models and --network")),
    };
    match path.is_file() {
        true => Ok(path),
        false => Err(Failure::usage(format!("there is no file {}", path.display()))),
    }
}

/// Asks until the rate stands.
fn warm(
    limit: Duration,
    mut turn: impl FnMut() -> Result<Stretch, Failure>,
) -> Result<(), Failure> {
    let began = std::time::Instant::now();
    let mut before = 0.0;
    loop {
        let now = turn()?.rps;
        if (now - before).abs() <= WARM_CHANGE * now {
            return Ok(());
        }
        if began.elapsed() >= limit {
            tracing::warn!("the rate still changes after {} s of warming up", limit.as_secs());
            return Ok(());
        }
        before = now;
    }
}

/// A server and how it is asked.
struct Contestant {
    name: String,
    server: Arc<Child>,
    wires: Wires,
}

impl Contestant {
    fn turn(&self, window: Window) -> Result<Stretch, Failure> {
        self.wires.run(window, &self.server)
    }
}

/// Runs the command.
pub(crate) fn run(args: &ServerBenchArgs) -> Result<(), Failure> {
    if !(0.05..=3600.0).contains(&args.seconds) {
        return Err(Failure::usage(format!("--seconds {} is not from 0.05 to 3600", args.seconds)));
    }
    let path = model_file(args)?;
    let folder = tempfile::tempdir().map_err(Failure::failed)?;
    let words = serve_words(args, &path);
    let engine = Engine::start(&serve_args(&words)?, &path)?;
    let subject = Arc::new(Subject::new(&engine, &args.bind, args.seed)?);
    let contestants = contestants(args, &words, folder.path(), &subject)?;
    let window = Window::of(args.seconds);
    let ask_engine = |window| {
        engine.run(&subject, window, usize::from(args.clients), usize::from(args.engine_threads))
    };
    let short = Window::of(args.seconds.min(1.0));
    let limit = Duration::from_secs(args.warm_secs);
    warm(limit, || ask_engine(short))?;
    contestants.iter().try_for_each(|one| warm(limit, || one.turn(short)))?;
    let mut rounds = Vec::new();
    for number in 1..=args.rounds {
        let engine = ask_engine(window)?;
        eprintln!("round {number}: engine {:.0}/s", engine.rps);
        let mut servers = Vec::new();
        for one in &contestants {
            let stretch = one.turn(window)?;
            eprintln!(
                "round {number}: {} {:.0}/s, server {:.2} cores, clients {:.2}",
                one.name, stretch.rps, stretch.server_cores, stretch.client_cores
            );
            servers.push(stretch);
        }
        rounds.push(Round { engine, servers });
    }
    let report = ServerReport {
        device: engine.description(),
        driver: testbed::driver(&args.device.device),
        date: testbed::today(),
        command: testbed::command(),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        model: subject.name.clone(),
        inputs: subject.shapes(),
        clients: args.clients,
        connections: args.connections,
        seconds: args.seconds,
        summaries: Summary::all(contestants.iter().map(|one| one.name.as_str()), &rounds),
        rounds,
    };
    drop(contestants);
    finish(args, &report)
}

fn contestants(
    args: &ServerBenchArgs,
    words: &[String],
    folder: &Path,
    subject: &Arc<Subject>,
) -> Result<Vec<Contestant>, Failure> {
    let own = std::env::current_exe().map_err(Failure::failed)?;
    let limit = Duration::from_secs(args.start_timeout_secs);
    // Each has a registry of its own: two servers cannot share one.
    let start = |binary: &Path, data: &str| {
        Child::start(binary, words, &folder.join(data), limit).map(Arc::new)
    };
    let mut servers = vec![("", start(&own, "data")?)];
    if let Some(other) = &args.against {
        servers.push((", other", start(other, "data-other")?));
    }
    let mut all = Vec::new();
    for protocol in &args.protocols {
        for (suffix, server) in &servers {
            let wires = Wires::new(*protocol, args, subject, server);
            let name = format!("{}{suffix}", protocol.name());
            all.push(Contestant { name, server: server.clone(), wires });
        }
    }
    Ok(all)
}

fn finish(args: &ServerBenchArgs, report: &ServerReport) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(report).map_err(Failure::failed)? + "\n";
    match &args.json {
        Some(None) => print!("{text}"),
        Some(Some(file)) => {
            write(file, &text)?;
            print!("{}", table(report));
        }
        None => print!("{}", table(report)),
    }
    match report.wrong() {
        0 => Ok(()),
        wrong => Err(Failure::failed(format!("{wrong} answers are not the engine's, or missing"))),
    }
}
