//! Servers of a plan: processes of this binary, each with the environment of its GPU or slice.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use assembly::Failure;
use model::ModelConfig;
use model::config::BatchingPolicy;
use model::repository::{Repository, RepositoryEntry};
use planner::apply::ServerSpec;

use super::interrupt::Interrupt;
use super::probe::Probe;
use crate::apply_args::ApplyArgs;

const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Max time of a server to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);
/// How much of a log is shown if a server does not start.
const TAIL_BYTES: usize = 600;

/// What a server is started with.
pub(crate) struct ServerLaunch<'a> {
    pub(crate) args: &'a ApplyArgs,
    pub(crate) state: &'a Path,
    /// Pipes of its MPS daemon.
    pub(crate) folder: &'a Path,
    /// The device that it sees.
    pub(crate) uuid: &'a str,
    pub(crate) port: u16,
    pub(super) probe: &'a Probe,
    pub(super) interrupt: &'a Interrupt,
}

/// The environment of a server.
pub(crate) fn environment(
    folder: &Path,
    uuid: &str,
    percentage: u32,
) -> [(&'static str, String); 4] {
    let folder = folder.display().to_string();
    [
        ("CUDA_VISIBLE_DEVICES", uuid.to_string()),
        ("CUDA_MPS_PIPE_DIRECTORY", folder.clone()),
        ("CUDA_MPS_LOG_DIRECTORY", folder),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage.to_string()),
    ]
}

/// The command line after the binary's name.
pub(crate) fn arguments(
    args: &ApplyArgs,
    state: &Path,
    spec: &ServerSpec,
    port: u16,
) -> Vec<String> {
    let mut list: Vec<String> = vec!["serve".to_string()];
    let mut add = |name: &str, value: String| list.extend([format!("--{name}"), value]);
    add("model-repository", models_folder(state, spec, port).display().to_string());
    add("data-dir", registry(state, spec, port).display().to_string());
    add("model-control-mode", "explicit".to_string());
    for model in spec.models.iter().collect::<BTreeSet<_>>() {
        add("load-model", model.clone());
    }
    // The limit of the flag; more batches of a model wait for a queue of the device anyway.
    let concurrent = spec.concurrent.iter().copied().max().unwrap_or(1).clamp(1, 16);
    add("concurrent-rt-batches", concurrent.to_string());
    add("device", args.device.clone());
    add("host", args.host.to_string());
    add("http-port", port.to_string());
    add("grpc-port", port.saturating_add(1).to_string());
    add("metrics-port", port.saturating_add(2).to_string());
    let files = [
        ("tls-cert", &args.tls_cert),
        ("tls-key", &args.tls_key),
        ("tls-client-ca", &args.tls_client_ca),
        ("tokens", &args.tokens),
    ];
    for (name, path) in files {
        if let Some(path) = path {
            // Servers outlive this call, and read some of these files again.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            add(name, path.display().to_string());
        }
    }
    if args.insecure {
        list.push("--insecure".to_string());
    }
    list
}

/// The port is part of it, because a server and the one that replaces it run at the same time.
fn label(spec: &ServerSpec, port: u16) -> String {
    format!("{}-{}-{}-{port}", spec.place, spec.slice, spec.process)
}

/// Two servers never share a registry.
fn registry(state: &Path, spec: &ServerSpec, port: u16) -> PathBuf {
    state.join(format!("registry-{}", label(spec, port)))
}

/// The repository of a server: the models of its slice with the plan's batches.
fn models_folder(state: &Path, spec: &ServerSpec, port: u16) -> PathBuf {
    state.join(format!("models-{}", label(spec, port)))
}

/// How the plan runs a model in a server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PlannedBatches {
    pub(crate) batch: u32,
    pub(crate) concurrent: u32,
    pub(crate) cycle_ms: Option<f64>,
}

/// The models of a server; services with one model share its largest batch.
pub(crate) fn planned_batches(spec: &ServerSpec) -> BTreeMap<String, PlannedBatches> {
    let mut planned: BTreeMap<String, PlannedBatches> = BTreeMap::new();
    for (index, model) in spec.models.iter().enumerate() {
        let one = planned.entry(model.clone()).or_default();
        one.batch = one.batch.max(spec.batches.get(index).copied().unwrap_or(1));
        one.concurrent = one.concurrent.max(spec.concurrent.get(index).copied().unwrap_or(1));
        one.cycle_ms = spec.cycle_ms;
    }
    planned
}

/// A model's own settings with the plan's batches: as many at the same time as the plan has
/// processes in a turn, none larger than planned, and none that waits for more requests longer than
/// a duty cycle. A scheduler that starts what waits, up to these sizes, then never takes longer for
/// a round than the cycle.
pub(super) fn with_plan(mut config: ModelConfig, planned: PlannedBatches) -> ModelConfig {
    let batching = &mut config.batching;
    if batching.policy == BatchingPolicy::None && planned.batch > 1 {
        batching.policy = BatchingPolicy::Auto;
    }
    batching.max_batch = planned.batch as usize;
    batching.workers = vec![planned.batch as usize; planned.concurrent as usize];
    if let Some(cycle_ms) = planned.cycle_ms {
        batching.max_wait_us = batching.max_wait_us.min((cycle_ms * 1e3) as u64);
    }
    config
}

/// Writes the repository of a server: links to the models' files, and their settings with the
/// plan's batches.
fn write_models(launch: &ServerLaunch<'_>, spec: &ServerSpec) -> Result<(), Failure> {
    let ServerLaunch { args, state, port, .. } = *launch;
    let folder = models_folder(state, spec, port);
    let named = |error: std::io::Error| Failure::failed(format!("{}: {error}", folder.display()));
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(named(error)),
        _ => {}
    }
    for (model, planned) in planned_batches(spec) {
        let entry = find_model(&args.model_repository, &model)?;
        let config = with_plan(entry.config().map_err(Failure::failed)?, planned);
        let text = toml::to_string(&config).map_err(Failure::failed)?;
        let settings = link_model(&folder, &entry).map_err(named)?;
        std::fs::write(settings, text).map_err(named)?;
    }
    Ok(())
}

/// The newest version of a model in the first repository that has it.
pub(super) fn find_model(
    repositories: &[PathBuf],
    model: &str,
) -> Result<RepositoryEntry, Failure> {
    let mut last = None;
    for path in repositories {
        match Repository::open(path).and_then(|repository| repository.find(model, None)) {
            Ok(entry) => return Ok(entry),
            Err(error) => last = Some(format!("{}: {error}", path.display())),
        }
    }
    Err(Failure::failed(last.unwrap_or_else(|| "there is no model repository".to_string())))
}

/// Puts a model's files into `folder`; returns where its settings go. External weights must lie
/// beside a model after links are followed, so a version's folder is linked as a whole, and a bare
/// file and those named after it by hard links or copies.
fn link_model(folder: &Path, entry: &RepositoryEntry) -> std::io::Result<PathBuf> {
    let source = std::fs::canonicalize(&entry.path)?;
    let Some(parent) = source.parent() else { return Err(std::io::ErrorKind::NotFound.into()) };
    if source.file_name().is_some_and(|file| file == "model.onnx") {
        let place = folder.join(&entry.name);
        std::fs::create_dir_all(&place)?;
        std::os::unix::fs::symlink(parent, place.join(entry.version.to_string()))?;
        return Ok(place.join("atoll.toml"));
    }
    std::fs::create_dir_all(folder)?;
    let prefix = format!("{}.", entry.name);
    for file in std::fs::read_dir(parent)? {
        let path = file?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if name.starts_with(&prefix) && !name.ends_with(".toml") && path.is_file() {
            let place = folder.join(name);
            std::fs::hard_link(&path, &place)
                .or_else(|_| std::fs::copy(&path, &place).map(drop))?;
        }
    }
    Ok(folder.join(format!("{}.toml", entry.name)))
}

/// Starts a server and waits until it is ready; returns its process id.
pub(crate) fn start_server(launch: &ServerLaunch<'_>, spec: &ServerSpec) -> Result<u32, Failure> {
    let ServerLaunch { args, state, folder, uuid, port, .. } = *launch;
    write_models(launch, spec)?;
    let log = state.join(format!("server-{}.log", label(spec, port)));
    let named = |error: std::io::Error| Failure::failed(format!("{}: {error}", log.display()));
    let file = File::create(&log).map_err(named)?;
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let mut child = Command::new(program)
        .args(arguments(args, state, spec, port))
        .envs(environment(folder, uuid, spec.percentage))
        .stdin(Stdio::null())
        .stdout(file.try_clone().map_err(named)?)
        .stderr(file)
        // Ctrl-C ends this command, not its servers.
        .process_group(0)
        .spawn()
        .map_err(Failure::failed)?;
    let pid = child.id();
    let ready = wait_until_ready(&mut child, launch, spec).map_err(|why| {
        let tail = tail(&log);
        Failure::failed(format!("the server of {} {why}: {tail}", spec.services.join(", ")))
    });
    if ready.is_err() {
        // The child was not reaped yet, so its process id cannot belong to another process.
        let _ = child.kill();
        let _ = child.wait();
    }
    ready.map(|()| pid)
}

fn wait_until_ready(
    child: &mut Child,
    launch: &ServerLaunch<'_>,
    spec: &ServerSpec,
) -> Result<(), String> {
    let limit_secs = launch.args.start_timeout_secs;
    let until = Instant::now() + Duration::from_secs(limit_secs);
    loop {
        if launch.interrupt.is_set() {
            return Err("was interrupted".to_string());
        }
        match child.try_wait() {
            Ok(Some(status)) => return Err(format!("ended ({status})")),
            Err(error) => return Err(error.to_string()),
            Ok(None) => {}
        }
        let why = match launch.probe.status(launch.port, "/v2/health/ready") {
            Ok(200) => return check_models(launch, spec),
            Ok(status) => format!("HTTP {status}"),
            Err(error) => error.to_string(),
        };
        if Instant::now() > until {
            return Err(format!("is not ready after {limit_secs} s ({why})"));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Whether a ready server takes the token of this call for its models.
fn check_models(launch: &ServerLaunch<'_>, spec: &ServerSpec) -> Result<(), String> {
    if !launch.probe.has_token() {
        return Ok(());
    }
    for model in spec.models.iter().collect::<BTreeSet<_>>() {
        match launch.probe.status(launch.port, &format!("/v2/models/{model}/ready")) {
            Ok(200) => {}
            Ok(status @ (401 | 403)) => {
                return Err(format!("refuses the token of --token-file (HTTP {status})"));
            }
            Ok(status) => return Err(format!("does not serve '{model}' (HTTP {status})")),
            Err(error) => return Err(format!("does not answer for '{model}': {error}")),
        }
    }
    Ok(())
}

fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let from = text.len().saturating_sub(TAIL_BYTES);
    String::from_utf8_lossy(&text[from..]).trim().to_string()
}

/// Ends a server that an earlier call started. Does nothing if the process is no longer that
/// server.
pub(crate) fn stop_server(state: &Path, pid: Option<u32>) -> Result<(), String> {
    let Some(pid) = pid else { return Ok(()) };
    if !is_ours(state, pid) {
        return Ok(());
    }
    let sent = Command::new("kill").args(["-TERM", &pid.to_string()]).status();
    sent.map_err(|error| format!("kill: {error}"))?;
    let until = Instant::now() + STOP_TIMEOUT;
    while is_ours(state, pid) {
        if Instant::now() > until {
            return Err(format!("server process {pid} does not end"));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Whether a server that an earlier call started still runs.
pub(crate) fn is_running(state: &Path, pid: Option<u32>) -> bool {
    pid.is_some_and(|pid| is_ours(state, pid))
}

/// Whether the process runs and is a server with a registry in this state folder.
fn is_ours(state: &Path, pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let registry = state.join("registry-").display().to_string();
    String::from_utf8_lossy(&line).contains(&registry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_of_the_plan_become_settings() {
        let planned = PlannedBatches { batch: 16, concurrent: 3, cycle_ms: Some(1.5) };
        let mut own = ModelConfig::default();
        own.batching.policy = BatchingPolicy::None;
        own.slo_ms = Some(40);
        let config = with_plan(own, planned);
        assert_eq!((config.batching.max_batch, config.slo_ms), (16, Some(40)));
        assert_eq!(config.batching.workers, [16, 16, 16]);
        assert_eq!(config.batching.policy, BatchingPolicy::Auto);
        // The default of 2 ms is longer than the cycle.
        assert_eq!(config.batching.max_wait_us, 1500);
        assert_eq!(config.batching.check(), Ok(()));
    }

    #[test]
    fn the_repository_of_a_server_has_the_models_with_the_plan_s_settings() {
        let root = tempfile::tempdir().unwrap();
        let models = root.path().join("models");
        let write = |path: &str, text: &str| {
            let path = models.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("bare.onnx", "graph");
        write("bare.onnx.data", "weights");
        write("bare.toml", "slo_ms = 30\n[batching]\nmax_batch = 2\n");
        write("tree/3/model.onnx", "graph");
        write("tree/3/weights.bin", "weights");
        let folder = root.path().join("out");
        for name in ["bare", "tree"] {
            let entry = find_model(std::slice::from_ref(&models), name).unwrap();
            let planned = PlannedBatches { batch: 8, concurrent: 2, cycle_ms: None };
            let text = toml::to_string(&with_plan(entry.config().unwrap(), planned)).unwrap();
            std::fs::write(link_model(&folder, &entry).unwrap(), text).unwrap();
        }
        let found = Repository::open(&folder).unwrap();
        let bare = found.find("bare", None).unwrap();
        let config = bare.config().unwrap();
        assert_eq!((config.slo_ms, config.batching.workers), (Some(30), vec![8, 8]));
        assert!(folder.join("bare.onnx.data").is_file());
        let tree = found.find("tree", Some(3)).unwrap();
        assert_eq!(tree.config().unwrap().batching.max_batch, 8);
        assert!(tree.path.with_file_name("weights.bin").is_file());
        assert!(find_model(std::slice::from_ref(&models), "absent").is_err());
    }
}
