//! `atoll serve`: serves models on devices over REST and gRPC, with metrics.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use assembly::device_group::OnFault;
use assembly::progress::Progress;
use assembly::{DiskLoader, Failure, backend::address_text, device_group, tokio_runtime};
use device::{DeviceError, InjectedFault};
use model::repository::Repository;
use model::store::Store;
use runtime::{DeviceGroup, NodeOptions};
use server::{InheritedSockets, LocalNode, RunningServer};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{ModelControlMode, ServeArgs};
use crate::data_folder::user_data_folder;
use crate::listen::listen;
use crate::popularity::Popularity;
use crate::process_replacement::{self, Handover, NO_DEVICE, REPLY_LIMIT};
use crate::shutdown_signal::ShutdownSignal;

/// Runs the command until a signal stops it.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let repositories = args
        .model_repository
        .iter()
        .map(|path| Repository::open(path).map_err(Failure::usage))
        .collect::<Result<Vec<_>, _>>()?;
    let registry = open_registry(args)?;
    if repositories.is_empty() && registry.is_err() {
        return Err(Failure::usage("name a --model-repository or a --data-dir"));
    }
    let (memory, options) = (args.gpu_memory, node_options(args));
    let device_group =
        device_group::open_device_group(&args.device, memory, &options, OnFault::ReplaceProcess)?;
    let loader = Arc::new(DiskLoader::with_checks(
        device_group.clone(),
        repositories,
        registry,
        args.model_check.checker(&args.device.device),
        args.model_check.of_repositories(),
    ));
    let runtime = tokio_runtime()?;
    let result = runtime.block_on(serve(args, device_group.clone(), loader.clone()));
    loader.stop();
    if let Ok(Some(replacement)) = &result {
        // The devices are not closed: calls for a faulted GPU may not return.
        std::thread::sleep(replacement.pause);
        let Replacement { sockets, handover, upgrade, .. } = replacement;
        return Err(process_replacement::replace(sockets, handover, *upgrade));
    }
    // A model that is still being loaded does not keep the process.
    runtime.shutdown_background();
    result.map(drop)
}

/// The process that takes over from this one.
struct Replacement {
    sockets: InheritedSockets,
    handover: Handover,
    /// By the program that has the name of this one now.
    upgrade: bool,
    /// How long to wait before.
    pause: Duration,
}

/// Why the server ends.
enum Ending {
    /// A signal stops it.
    Stopped,
    /// No device is left that this process can use.
    Lost,
    /// A signal asks for a new process.
    Upgrade,
}

/// Returns when the server must end.
async fn ending(mut stop: ShutdownSignal, device_group: &DeviceGroup) -> Ending {
    let Ok(mut upgrade) = signal(SignalKind::user_defined2()) else {
        stop.wait().await;
        return Ending::Stopped;
    };
    tokio::select! {
        () = stop.wait() => Ending::Stopped,
        () = process_replacement::lost(device_group) => Ending::Lost,
        _ = upgrade.recv() => Ending::Upgrade,
    }
}

/// Injects the fault that a line of standard input names, as `inject trap` or `inject hang 2000`.
fn inject(line: &str, device_group: &DeviceGroup) {
    let mut words = line.split_whitespace();
    let (Some("inject"), Some(name)) = (words.next(), words.next()) else { return };
    let number = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    let injected = match InjectedFault::named(name, number) {
        Some(InjectedFault::Lost) => {
            let (device, reason) = (device_group.names()[0].clone(), "injected".to_string());
            device_group.lose(0, &DeviceError::Faulted { device, reason })
        }
        Some(fault) => device_group.node(0).device().inject(fault),
        None => Err(DeviceError::BadInput(format!("there is no fault '{name}'"))),
    };
    match injected {
        Ok(()) => tracing::warn!(fault = name, number, "fault injected"),
        Err(error) => tracing::error!(fault = name, %error, "fault not injected"),
    }
}

/// Options of each device's node.
pub(crate) fn node_options(args: &ServeArgs) -> NodeOptions {
    NodeOptions {
        policy: args.policy.clone(),
        max_requests: args.max_requests as usize,
        best_effort_share_percent: args.best_effort_share,
        max_rt_slowdown_percent: args.max_rt_slowdown,
        preempt_real_time: args.preempt_real_time,
        concurrent_rt_batches: args.concurrent_rt_batches as usize,
        spans_kept: args.spans.spans_kept as usize,
        ..NodeOptions::default()
    }
}

/// Opens the registry in the given folder or, without one, in the user's data folder. A given
/// folder must work; otherwise the server runs without registry and reports why when a model is
/// registered.
fn open_registry(args: &ServeArgs) -> Result<Result<Store, String>, Failure> {
    let limits = args.registry.limits();
    if let Some(folder) = args.data_dir.as_deref() {
        let fail = |why: String| Failure::failed(format!("--data-dir {}: {why}", folder.display()));
        check_overlap(folder, &args.model_repository).map_err(Failure::usage)?;
        let store = Store::open_with(folder, limits).map_err(|err| fail(err.to_string()))?;
        store.notes().iter().for_each(|note| tracing::warn!("{note}"));
        return Ok(Ok(store));
    }
    let Some(folder) = user_data_folder() else {
        return Ok(
            Err("there is no registry: start the server with --data-dir FOLDER".to_string()),
        );
    };
    let opened = check_overlap(&folder, &args.model_repository)
        .and_then(|()| Store::open_with(&folder, limits).map_err(|err| err.to_string()))
        .map_err(|why| {
            format!("the registry in {} cannot be used ({why}); use --data-dir", folder.display())
        });
    match &opened {
        Ok(store) => store.notes().iter().for_each(|note| tracing::warn!("{note}")),
        Err(why) => tracing::warn!("{why}"),
    }
    Ok(opened)
}

/// Refuses a data folder that is in a repository, or holds one: a repository belongs to its owner,
/// the data folder to the server.
fn check_overlap(data_dir: &Path, repositories: &[PathBuf]) -> Result<(), String> {
    let data = resolve(data_dir);
    for repository in repositories {
        let path = resolve(repository);
        if path.starts_with(&data) || data.starts_with(&path) {
            return Err(format!(
                "--data-dir {} and --model-repository {} overlap; use separate folders, so that \
                 the registry and the models you own stay apart",
                data_dir.display(),
                repository.display()
            ));
        }
    }
    Ok(())
}

/// The absolute path without links, also of a folder that does not exist yet.
fn resolve(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    for ancestor in absolute.ancestors() {
        if let Ok(real) = ancestor.canonicalize() {
            let rest = absolute.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return real.join(rest);
        }
    }
    absolute
}

async fn serve(
    args: &ServeArgs,
    device_group: Arc<DeviceGroup>,
    loader: Arc<DiskLoader>,
) -> Result<Option<Replacement>, Failure> {
    let started = Instant::now();
    // Before anything is visible from outside, so that no signal is missed.
    let stop = shutdown_signal(args, &device_group)?;
    let mut ended = std::pin::pin!(ending(stop, &device_group));
    let service = LocalNode::new(device_group.clone(), loader.clone());
    if matches!(args.model_control_mode, Some(ModelControlMode::None | ModelControlMode::Poll)) {
        service.forbid_control();
    }
    let handover = process_replacement::handover();
    handover.inspect(|handover| service.announce(&handover.models));
    let max_body_bytes = usize::try_from(args.max_body_mib << 20).unwrap_or(usize::MAX);
    let folder = args.data_dir.clone().or_else(user_data_folder);
    let mut server =
        listen(&args.listen, folder.as_deref(), max_body_bytes, Arc::new(service.clone())).await?;
    let exit_timeout = Duration::from_secs(args.exit_timeout_secs);
    let mut early = None;
    tokio::select! {
        loaded = load_models(args, &service, handover) => loaded?,
        ending = &mut ended => early = Some(ending),
    }
    let popularity = if early.is_none() { preload(args, &service) } else { None };
    if early.is_none() {
        service.set_started();
        handover.inspect(|handover| handover.restore(&device_group));
    }
    let ending = match early {
        Some(ending) => ending,
        None => {
            log_ready(args, &server, &device_group, started);
            if args.model_control_mode == Some(ModelControlMode::Poll) {
                let period = Duration::from_secs(args.repository_poll_secs);
                tokio::spawn(follow_changes(service.clone(), loader.clone(), period));
            }
            wait_and_save(ended, &service, popularity).await
        }
    };
    loader.stop();
    let (reason, upgrade, limit) = match ending {
        Ending::Stopped => {
            tracing::info!(in_flight = server.in_flight(), "stopping");
            return match server.shutdown(exit_timeout).await {
                true => Ok(None),
                false => Err(Failure::failed(UNFINISHED)),
            };
        }
        Ending::Lost => (NO_DEVICE, false, REPLY_LIMIT),
        Ending::Upgrade => ("a new process was requested", true, exit_timeout),
    };
    let (sockets, models) = (server.take_sockets(), service.served_models());
    let handover = Handover::new(reason.to_string(), &device_group, models, started.elapsed());
    // Clients open new connections, which wait, and no request is cut off.
    server.set_lame_duck(LAME_DUCK);
    if !server.hand_over(limit).await {
        tracing::warn!("{UNFINISHED}");
    }
    let pause = if args.inject_faults { Duration::ZERO } else { handover.pause() };
    Ok(Some(Replacement { sockets, handover, upgrade, pause }))
}

/// Signals, and standard input if it is to end the server or to inject faults.
fn shutdown_signal(
    args: &ServeArgs,
    device_group: &Arc<DeviceGroup>,
) -> Result<ShutdownSignal, Failure> {
    match (args.until_input_ends, args.inject_faults) {
        (true, true) => {
            let device_group = device_group.clone();
            ShutdownSignal::with_input(move |line| inject(line, &device_group))
        }
        (true, false) => ShutdownSignal::with_input(|_| {}),
        (false, _) => ShutdownSignal::new(),
    }
}

fn log_ready(
    args: &ServeArgs,
    server: &RunningServer,
    device_group: &DeviceGroup,
    started: Instant,
) {
    tracing::info!(
        http = address_text(server.http_addr),
        grpc = address_text(server.grpc_addr),
        metrics = address_text(server.metrics_addr),
        device = device_group::describe(device_group),
        policy = args.policy,
        started_ms = started.elapsed().as_millis() as u64,
        "ready"
    );
}

/// The file of request counts, and its content when the server started.
type PopularityFile = Option<(PathBuf, Popularity)>;

/// Why a server fails that stops too late.
const UNFINISHED: &str = "some requests did not finish in time and were cancelled";

/// How long clients of a process that is replaced may still send on connections that are idle.
const LAME_DUCK: Duration = Duration::from_millis(50);

/// Interval in which request counts are saved.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);

/// Loads the weights of the models with the most requests to the device.
fn preload(args: &ServeArgs, service: &LocalNode) -> PopularityFile {
    let folder = args.data_dir.clone().or_else(user_data_folder).filter(|path| path.is_dir());
    let saved = folder.map(|folder| {
        let path = Popularity::path(&folder);
        let known = Popularity::read(&path);
        (path, known)
    });
    service.preload(&saved.as_ref().map(|(_, known)| known.order()).unwrap_or_default());
    saved
}

/// Waits until the server must end, and saves request counts periodically.
async fn wait_and_save(
    mut ended: Pin<&mut impl Future<Output = Ending>>,
    service: &LocalNode,
    saved: PopularityFile,
) -> Ending {
    let save = || {
        if let Some((path, known)) = &saved
            && let Err(err) = known.after(service.inference_counts()).write(path)
        {
            tracing::warn!("{}: {err}", path.display());
        }
    };
    let ending = loop {
        match tokio::time::timeout(SAVE_INTERVAL, &mut ended).await {
            Ok(ending) => break ending,
            Err(_) => save(),
        }
    };
    save();
    ending
}

/// Loads the models of the start, those first that the process before this one served. One that
/// fails is logged and skipped, so that the others are served; one named on the command line must
/// load.
async fn load_models(
    args: &ServeArgs,
    service: &LocalNode,
    handover: Option<&Handover>,
) -> Result<(), Failure> {
    let mut loaded = Vec::new();
    for name in handover.iter().flat_map(|handover| &handover.models) {
        match service.load_model(name).await {
            Ok(_) => loaded.push(name.clone()),
            Err(error) => {
                tracing::warn!(model = name, %error, "model of the process before not loaded");
            }
        }
    }
    let explicit = args.model_control_mode == Some(ModelControlMode::Explicit);
    let all = if args.load_model.is_empty() {
        !explicit
    } else {
        args.load_model.iter().any(|name| name == "*")
    };
    if all {
        let progress = Progress::new(0, "models");
        let report = |done, all, name: &str| {
            progress.set(done, all);
            progress.describe(&format!("loading {name} "));
        };
        let failed = service.load_all(&loaded, report).await.map_err(Failure::failed)?;
        drop(progress);
        if !failed.is_empty() {
            tracing::warn!(count = failed.len(), "models not loaded");
        }
        return Ok(());
    }
    let names: Vec<&String> =
        args.load_model.iter().filter(|name| !loaded.contains(name)).collect();
    let progress = Progress::new(names.len() as u64, "models");
    for name in names {
        progress.describe(&format!("loading {name} "));
        service.load_model(name).await.map_err(Failure::failed)?;
        progress.advance();
    }
    Ok(())
}

/// Loads models that appeared or changed in the repositories, and unloads those that were removed.
async fn follow_changes(service: LocalNode, loader: Arc<DiskLoader>, period: Duration) {
    let mut known = loader.fingerprints();
    loop {
        tokio::time::sleep(period).await;
        let polled = loader.clone();
        let Ok(now) = tokio::task::spawn_blocking(move || polled.fingerprints()).await else {
            continue;
        };
        for (name, versions) in &now {
            if known.get(name) != Some(versions)
                && let Err(err) = service.load_model(name).await
            {
                tracing::warn!(model = name, error = %err, "changed model not loaded");
            }
        }
        for name in known.keys().filter(|name| !now.contains_key(*name)) {
            if let Err(err) = service.unload_model(name).await {
                tracing::warn!(model = name, error = %err, "removed model not unloaded");
            }
        }
        known = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_folders_that_overlap_a_repository_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        std::fs::create_dir_all(path("data/models")).unwrap();
        std::fs::create_dir_all(path("other")).unwrap();
        std::os::unix::fs::symlink(path("data/models"), path("link")).unwrap();
        let overlap = |data: &str, repository: &str| {
            check_overlap(&path(data), &[path("other"), path(repository)])
        };
        assert!(overlap("data", "data/models").unwrap_err().contains("--data-dir"));
        assert!(overlap("data", "data").is_err());
        assert!(overlap("data", "link").is_err());
        assert!(overlap("data", "data/models/one.onnx").is_err());
        assert!(overlap("data/models/new/registry", "data").is_err());
        assert!(overlap("other/../data", "data/models").is_err());
        assert!(overlap("data", "database").is_ok());
        assert!(overlap("new", "data").is_ok());
    }
}
