//! `atoll bench strangers`: real-time latency beside clients that do what they like.

mod args;
mod load;
mod report;
mod stalls;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use assembly::progress::{self, Progress};
use assembly::{Failure, compile_file};
use device::thread_placement;

pub(crate) use self::args::StrangersArgs;
use self::load::{ClientRecord, Network, RealTimeLoad, Stranger, real_time};
use self::report::{Latency, SlowCalls, StrangersReport, table};
use self::stalls::SlowRequest;
use crate::environment;
use crate::output::print_report;
use crate::rest_client::{Connection, plain};
use crate::server::child::{ServerProcess, common_arguments};
use crate::server::transport::Transport;

/// A real-time request that takes this much longer than the median alone is looked into.
const SLOW_MS: f64 = 2.0;

/// Calls of the driver that take this long are reported.
const SLOW_CALL_US: u64 = 1_000;

/// With fewer processors clients and server share them.
const MIN_PROCESSORS: usize = 8;

/// How long the server may take to start.
const START_LIMIT: Duration = Duration::from_secs(600);

/// Runs the benchmark.
pub(crate) fn run(args: &StrangersArgs) -> Result<(), Failure> {
    for (flag, value) in [("--seconds", args.seconds), ("--alone-seconds", args.alone_seconds)] {
        if !(0.5..=86_400.0).contains(&value) {
            return Err(Failure::usage(format!("{flag} {value} is not from 0.5 to 86400")));
        }
    }
    if !(0.1..=100_000.0).contains(&args.rate) {
        return Err(Failure::usage(format!("--rate {} is not from 0.1 to 100000", args.rate)));
    }
    let (real_time, best_effort) = networks(args)?;
    let folder = tempfile::tempdir().map_err(Failure::failed)?;
    let repository = folder.path().join("repository");
    for network in &real_time {
        let version = repository.join(&network.name).join("1");
        std::fs::create_dir_all(&version).map_err(Failure::failed)?;
        std::os::unix::fs::symlink(&network.file, version.join("model.onnx"))
            .map_err(Failure::failed)?;
    }
    let processors = ClientProcessors::take(real_time.len());
    let server = start(args, &repository, &real_time, folder.path())?;
    processors.enter();
    let report = measure(args, &server, &repository, (&real_time, &best_effort), &processors)?;
    print_report(args.json.as_ref(), &report, &table(&report))?;
    match report.real_time_failed + report.strangers_failed {
        0 => Ok(()),
        failed => Err(Failure::failed(format!(
            "{failed} requests were not answered as they must be:\n  {}",
            report.failures.join("\n  ")
        ))),
    }
}

/// Processors of the clients, which stand for those of other machines. None where there are few.
#[derive(Default)]
struct ClientProcessors {
    real_time: Vec<usize>,
    strangers: Vec<usize>,
}

impl ClientProcessors {
    /// A processor for each of up to `real_time` clients, and two for strangers. The server is to
    /// start on the others.
    fn take(real_time: usize) -> ClientProcessors {
        let mut all = thread_placement::processors();
        if all.len() < MIN_PROCESSORS {
            return ClientProcessors::default();
        }
        let strangers = all.split_off(all.len() - 2);
        let real_time = all.split_off(all.len() - real_time.clamp(1, all.len() / 4));
        thread_placement::confine(&all);
        ClientProcessors { real_time, strangers }
    }

    /// Moves the calling thread, and those it starts, to the processors of strangers.
    fn enter(&self) {
        if !self.strangers.is_empty() {
            thread_placement::confine(&self.strangers);
        }
    }

    /// Moves the calling thread, a real-time client, to its processor.
    fn enter_real_time(&self, client: usize) {
        if let Some(count) = std::num::NonZeroUsize::new(self.real_time.len()) {
            thread_placement::confine(&[self.real_time[client % count]]);
        }
    }
}

/// Real-time and best-effort networks of the folder.
fn networks(args: &StrangersArgs) -> Result<(Vec<Network>, Vec<Network>), Failure> {
    let load = |name: &String| {
        let file = args.models.join(format!("{name}.onnx"));
        let file = file
            .canonicalize()
            .map_err(|err| Failure::usage(format!("{}: {err}", file.display())))?;
        let plan = compile_file(&file).map_err(|err| Failure::failed(format!("{name}: {err}")))?;
        Ok(Network { name: name.clone(), file, plan })
    };
    let mut others = args.be.clone();
    if others.is_empty() {
        let unreadable = |err| Failure::usage(format!("{}: {err}", args.models.display()));
        for entry in std::fs::read_dir(&args.models).map_err(unreadable)?.flatten() {
            let path = entry.path();
            let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
            if let Some(name) = name
                && path.extension().is_some_and(|extension| extension == "onnx")
                && !args.rt.contains(&name)
            {
                others.push(name);
            }
        }
        others.sort();
    }
    if others.is_empty() {
        let why = "there is no best-effort network: name one with --be, or add a file to --models";
        return Err(Failure::usage(why));
    }
    let all = |names: &[String]| names.iter().map(load).collect::<Result<Vec<_>, Failure>>();
    Ok((all(&args.rt)?, all(&others)?))
}

fn start(
    args: &StrangersArgs,
    repository: &Path,
    real_time: &[Network],
    folder: &Path,
) -> Result<ServerProcess, Failure> {
    let mut arguments = vec!["serve".to_string()];
    let mut add = |flag: &str, value: String| arguments.extend([flag.to_string(), value]);
    add("--model-repository", repository.display().to_string());
    add("--model-control-mode", "explicit".to_string());
    for network in real_time {
        add("--load-model", network.name.clone());
    }
    arguments.extend(common_arguments(&args.device));
    if !args.serve.iter().any(|argument| argument.starts_with("--slow-call-us")) {
        arguments.extend(["--slow-call-us".to_string(), SLOW_CALL_US.to_string()]);
    }
    arguments.extend(args.serve.iter().cloned());
    let binary = std::env::current_exe().map_err(Failure::failed)?;
    let data = folder.join("data");
    ServerProcess::start(&binary, &arguments, &data, Transport::default(), START_LIMIT)
}

fn measure(
    args: &StrangersArgs,
    server: &ServerProcess,
    repository: &Path,
    (rt, be): (&[Network], &[Network]),
    processors: &ClientProcessors,
) -> Result<StrangersReport, Failure> {
    let clients = |seconds: f64, slow: Option<(f64, Sender<SlowRequest>)>| {
        let span = Duration::from_secs_f64(seconds);
        let mut all = ClientRecord::default();
        std::thread::scope(|scope| {
            let client = |(number, network)| {
                let slow = slow.clone();
                let load = RealTimeLoad { rate: args.rate, span, seed: args.seed, slow };
                scope.spawn(move || {
                    processors.enter_real_time(number);
                    real_time(server.http, network, &load)
                })
            };
            let running: Vec<_> = rt.iter().enumerate().map(client).collect();
            for client in running {
                let ended = client.join().map_err(|_| Failure::failed("a client panicked"))?;
                all.add(ended.map_err(Failure::failed)?);
            }
            Ok::<_, Failure>(all)
        })
    };
    progress::note(&format!("real time alone, {} s", args.alone_seconds));
    let lasting = |what: &str, seconds: f64| {
        Progress::lasting(what, Duration::try_from_secs_f64(seconds).unwrap_or_default())
    };
    let progress = lasting("real time alone", args.alone_seconds);
    let before = clients(args.alone_seconds, None)?;
    drop(progress);
    let bytes_before = server.resident_bytes();
    // Those of the start do not matter.
    drop(server.take_slow_calls());
    progress::note(&format!("with {} strangers, {} s", args.strangers, args.seconds));
    let end = AtomicBool::new(false);
    let slow_from_ms = Latency::of(&before.latencies_ms).p50_ms + SLOW_MS;
    let progress = lasting("with strangers", args.seconds);
    let (beside, strangers, stalls) = std::thread::scope(|scope| {
        let (slow, seen) = channel();
        let began = Instant::now();
        let watch =
            scope.spawn(move || stalls::watch(server.http, server.process_id(), began, &seen));
        let running: Vec<_> = (0..usize::from(args.strangers))
            .map(|number| {
                let network = &be[number % be.len()];
                let own = (number, args.seed);
                let stranger = Stranger::new(server.http, repository, network, own);
                let end = &end;
                scope.spawn(move || stranger.run(end))
            })
            .collect();
        let beside = clients(args.seconds, Some((slow_from_ms, slow)));
        end.store(true, Ordering::Relaxed);
        let mut all = ClientRecord::default();
        for stranger in running {
            let ended = stranger.join();
            all.add(ended.map_err(|_| Failure::failed("a stranger panicked"))?);
        }
        let stalls = watch.join().map_err(|_| Failure::failed("the watch panicked"))?;
        Ok::<_, Failure>((beside?, all, stalls))
    })?;
    drop(progress);
    let bytes_after = server.resident_bytes();
    let slow_calls = server.take_slow_calls();
    unload(server, be, usize::from(args.strangers));
    progress::note(&format!("real time alone again, {} s", args.alone_seconds));
    let progress = lasting("real time alone again", args.alone_seconds);
    let after = clients(args.alone_seconds, None)?;
    drop(progress);
    let alone: Vec<f64> = [&before.latencies_ms[..], &after.latencies_ms].concat();
    let real_time_failed = before.failed + beside.failed + after.failed;
    let failures = [&before, &beside, &after, &strangers];
    Ok(StrangersReport {
        device: args.device.device.clone(),
        driver: environment::driver(&args.device.device),
        date: environment::today(),
        command: environment::command(),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        seed: args.seed,
        alone: Latency::of(&alone),
        alone_before: Latency::of(&before.latencies_ms),
        beside: Latency::of(&beside.latencies_ms),
        alone_after: Latency::of(&after.latencies_ms),
        real_time_failed,
        strangers_failed: strangers.failed,
        failures: failures.iter().flat_map(|record| record.failures.clone()).collect(),
        actions: strangers.actions,
        stalls,
        slow_calls: SlowCalls::of(&slow_calls),
        server_bytes: [bytes_before, bytes_after],
    })
}

/// Unloads the models of all strangers; what fails is not loaded.
fn unload(server: &ServerProcess, networks: &[Network], strangers: usize) {
    let mut connection = Connection::new(server.http);
    for number in 0..strangers {
        let name = &networks[number % networks.len()].name;
        let path = format!("/v2/repository/models/stranger{number}_{name}/unload");
        let _ = connection.exchange(&plain("POST", &path));
    }
}
