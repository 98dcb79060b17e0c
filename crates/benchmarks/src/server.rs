//! `atoll bench server`: what of the engine's rate is left when the same requests come over a socket.
//!
//! The engine runs in this process and is asked by threads with tensors in memory. The server is a process of its own, started with
//! the same settings, and asked over loopback by threads of this one, with messages that were encoded once. Both are asked in
//! turns, with equally many requests outstanding.

mod args;
mod child;
mod engine_load;
mod report;
mod test_model;
mod window;
mod wire_load;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use assembly::{Failure, write_file};

pub(crate) use self::args::ServerBenchArgs;
use self::child::Child;
use self::engine_load::Engine;
pub use self::engine_load::{ParseServeArguments, ServeSettings};
use self::report::{Round, ServerReport, Stretch, Summary, table};
use self::test_model::Subject;
use self::window::Window;
use self::wire_load::Wires;
use crate::environment;

/// Two turns that differ by less than this in a row end it.
const WARM_CHANGE: f64 = 0.05;

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
pub(crate) fn run(args: &ServerBenchArgs, parse_serve: ParseServeArguments) -> Result<(), Failure> {
    if !(0.05..=3600.0).contains(&args.seconds) {
        return Err(Failure::usage(format!("--seconds {} is not from 0.05 to 3600", args.seconds)));
    }
    let path = model_file(args)?;
    let folder = tempfile::tempdir().map_err(Failure::failed)?;
    let words = serve_words(args, &path);
    let engine = Engine::start(&parse_serve(&words)?, &path)?;
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
        driver: environment::driver(&args.device.device),
        date: environment::today(),
        command: environment::command(),
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
            write_file(file, &text)?;
            print!("{}", table(report));
        }
        None => print!("{}", table(report)),
    }
    match report.wrong() {
        0 => Ok(()),
        wrong => Err(Failure::failed(format!("{wrong} answers are not the engine's, or missing"))),
    }
}
