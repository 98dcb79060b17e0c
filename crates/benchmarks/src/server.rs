//! `atoll bench server`: the share of the engine's throughput that remains when the same requests
//! come over a socket.
//!
//! The engine runs in this process; threads send it tensors in memory. The server is a process of
//! its own with the same settings; threads of this process send it messages over loopback, which
//! were encoded once. Both are measured alternately, with equally many requests outstanding. What
//! TLS and tokens cost is measured in the same way: a server for each kind of protection. So is
//! what viewers of the console cost: the same server with so many of them.

mod args;
pub(crate) mod child;
mod engine_load;
mod report;
mod test_model;
pub(crate) mod transport;
mod viewers;
mod window;
mod wire_load;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use assembly::Failure;
use assembly::progress::{self, Progress};

pub(crate) use self::args::ServerBenchArgs;
use self::child::{ServerProcess, common_arguments};
use self::engine_load::EngineUnderTest;
pub use self::engine_load::{ParseServeArguments, ServeSettings};
use self::report::{Measurement, MeasurementRound, MeasurementSummary, ServerReport, table};
use self::test_model::TestModel;
use self::transport::Transport;
use self::viewers::Viewers;
use self::window::MeasuredWindow;
use self::wire_load::ProtocolClients;
use crate::environment;
use crate::output::print_report;

/// Warm-up ends when two consecutive rates differ by less than this.
const WARM_CHANGE: f64 = 0.05;

/// The arguments of the server.
fn serve_arguments(args: &ServerBenchArgs, model: &Path) -> Vec<String> {
    let repository = ["serve", "--model-repository"].map(str::to_string);
    let mut arguments = repository.to_vec();
    arguments.push(model.display().to_string());
    arguments.extend(common_arguments(&args.device));
    arguments.extend(args.serve.iter().cloned());
    arguments
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

/// Sends requests until the rate is stable.
fn warm(
    limit: Duration,
    mut turn: impl FnMut() -> Result<Measurement, Failure>,
) -> Result<(), Failure> {
    let began = std::time::Instant::now();
    let mut before = 0.0;
    loop {
        let now = turn()?.rps;
        if (now - before).abs() <= WARM_CHANGE * now {
            return Ok(());
        }
        if began.elapsed() >= limit {
            tracing::warn!("rate is not stable after {} s of warm-up", limit.as_secs());
            return Ok(());
        }
        before = now;
    }
}

/// A server with the clients of one protocol.
struct ServerUnderTest {
    name: String,
    server: Arc<ServerProcess>,
    clients: Arc<ProtocolClients>,
    viewers: u16,
    /// The server with which its rate is compared, by index.
    reference: Option<usize>,
}

impl ServerUnderTest {
    fn measure(&self, window: MeasuredWindow) -> Result<Measurement, Failure> {
        let viewers = Viewers::open(&self.server, self.viewers)?;
        let before = viewers.least_bytes();
        let measurement = self.clients.run(window, &self.server)?;
        let viewer_bytes = (self.viewers > 0).then(|| viewers.least_bytes() - before);
        viewers.close()?;
        Ok(Measurement { viewer_bytes, ..measurement })
    }
}

/// Runs the benchmark.
pub(crate) fn run(args: &ServerBenchArgs, parse_serve: ParseServeArguments) -> Result<(), Failure> {
    if !(0.05..=3600.0).contains(&args.seconds) {
        return Err(Failure::usage(format!("--seconds {} is not from 0.05 to 3600", args.seconds)));
    }
    let path = model_file(args)?;
    let folder = tempfile::tempdir().map_err(Failure::failed)?;
    let arguments = serve_arguments(args, &path);
    let engine = EngineUnderTest::start(&parse_serve(&arguments)?, &path)?;
    let test_model = Arc::new(TestModel::new(&engine, &args.bind, args.seed)?);
    let servers = start_servers(args, &arguments, folder.path(), &test_model)?;
    let window = MeasuredWindow::of(args.seconds);
    let measure_engine = |window| {
        engine.run(&test_model, window, usize::from(args.clients), usize::from(args.engine_threads))
    };
    let short = MeasuredWindow::of(args.seconds.min(1.0));
    let limit = Duration::from_secs(args.warm_secs);
    warm(limit, || measure_engine(short))?;
    servers.iter().try_for_each(|one| warm(limit, || one.measure(short)))?;
    let mut rounds = Vec::new();
    let progress =
        Progress::new(u64::from(args.rounds) * (1 + servers.len() as u64), "measurements");
    for number in 1..=args.rounds {
        let engine = measure_engine(window)?;
        progress.advance();
        progress::note(&format!("round {number}: engine {:.0}/s", engine.rps));
        let mut measurements = vec![Measurement::default(); servers.len()];
        // Each is the first of a round in turn: what a round heats or fills meets all of them.
        for index in (0..servers.len()).map(|at| (at + usize::from(number)) % servers.len()) {
            let one = &servers[index];
            let measurement = one.measure(window)?;
            progress::note(&format!(
                "round {number}: {} {:.0}/s, server {:.2} cores, clients {:.2}",
                one.name, measurement.rps, measurement.server_cores, measurement.client_cores
            ));
            measurements[index] = measurement;
            progress.advance();
        }
        rounds.push(MeasurementRound { engine, servers: measurements });
    }
    drop(progress);
    let report = ServerReport {
        device: engine.description(),
        driver: environment::driver(&args.device.device),
        date: environment::today(),
        command: environment::command(),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        model: test_model.name.clone(),
        inputs: test_model.shapes(),
        clients: args.clients,
        connections: args.connections,
        seconds: args.seconds,
        summaries: MeasurementSummary::all(
            servers.iter().map(|one| (one.name.as_str(), one.reference)),
            &rounds,
        ),
        rounds,
    };
    drop(servers);
    finish(args, &report)
}

fn start_servers(
    args: &ServerBenchArgs,
    arguments: &[String],
    folder: &Path,
    test_model: &Arc<TestModel>,
) -> Result<Vec<ServerUnderTest>, Failure> {
    let own = std::env::current_exe().map_err(Failure::failed)?;
    let limit = Duration::from_secs(args.start_timeout_secs);
    let mut binaries = vec![("", own)];
    binaries.extend(args.against.clone().map(|other| (", other", other)));
    let mut servers = Vec::new();
    for (number, security) in args.security.iter().enumerate() {
        let (transport, more) = Transport::make(*security, &folder.join(format!("tls-{number}")))?;
        let arguments: Vec<String> = arguments.iter().chain(&more).cloned().collect();
        for (suffix, binary) in &binaries {
            // Each has a registry of its own, because two servers cannot share one.
            let data = folder.join(format!("data-{}", servers.len()));
            let started =
                ServerProcess::start(binary, &arguments, &data, transport.clone(), limit)?;
            let suffix = match args.security.len() {
                1 => suffix.to_string(),
                _ => format!(", {}{suffix}", security.name()),
            };
            servers.push((suffix, Arc::new(started)));
        }
    }
    let mut all = Vec::new();
    for protocol in &args.protocols {
        let first = all.len();
        for (index, (suffix, server)) in servers.iter().enumerate() {
            let clients = Arc::new(ProtocolClients::new(*protocol, args, test_model, server));
            let name = format!("{}{suffix}", protocol.name());
            let compared = args.security.len() > 1 && index >= binaries.len();
            // Kinds of protection are compared without viewers, or with the first number of them.
            let kind = first + index % binaries.len() * args.viewers.len();
            let own = all.len();
            for (at, viewers) in args.viewers.iter().copied().enumerate() {
                let name = match (args.viewers.len(), viewers) {
                    (1, 0) => name.clone(),
                    (_, 1) => format!("{name}, 1 viewer"),
                    (_, many) => format!("{name}, {many} viewers"),
                };
                let reference = match at {
                    0 => compared.then_some(kind),
                    _ => Some(own),
                };
                let (server, clients) = (server.clone(), clients.clone());
                all.push(ServerUnderTest { name, server, clients, viewers, reference });
            }
        }
    }
    Ok(all)
}

fn finish(args: &ServerBenchArgs, report: &ServerReport) -> Result<(), Failure> {
    print_report(args.json.as_ref(), report, &table(report))?;
    match report.wrong() {
        0 => Ok(()),
        wrong => {
            Err(Failure::failed(format!("{wrong} replies differ from the engine's or are missing")))
        }
    }
}
