//! `atoll serve`: serves models on devices over REST and gRPC, with metrics.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use assembly::{DiskLoader, Failure, backend::address_text, device_group, tokio_runtime};
use model::repository::Repository;
use model::store::Store;
use runtime::{DeviceGroup, NodeOptions};
use server::LocalNode;

use crate::args::{ModelControlMode, ServeArgs};
use crate::data_folder::user_data_folder;
use crate::listen::listen;
use crate::popularity::Popularity;
use crate::shutdown_signal::ShutdownSignal;

/// Runs the command until a signal stops it.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let repositories = args
        .model_repository
        .iter()
        .map(|path| Repository::open(path).map_err(Failure::usage))
        .collect::<Result<Vec<_>, _>>()?;
    let registry = open_registry(args.data_dir.as_deref())?;
    if repositories.is_empty() && registry.is_err() {
        return Err(Failure::usage("name a --model-repository or a --data-dir"));
    }
    let device_group =
        device_group::open_device_group(&args.device, args.gpu_memory, &node_options(args))?;
    let loader = Arc::new(DiskLoader::new(device_group.clone(), repositories, registry));
    tokio_runtime()?.block_on(serve(args, device_group, loader))
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
        ..NodeOptions::default()
    }
}

/// Opens the registry in the given folder or, without one, in the user's data folder. A given
/// folder must work; otherwise the server runs without registry and reports why when a model is
/// registered.
fn open_registry(named: Option<&Path>) -> Result<Result<Store, String>, Failure> {
    if let Some(folder) = named {
        return Store::open(folder)
            .map(Ok)
            .map_err(|err| Failure::failed(format!("--data-dir {}: {err}", folder.display())));
    }
    let Some(folder) = user_data_folder() else {
        return Ok(
            Err("there is no registry: start the server with --data-dir FOLDER".to_string()),
        );
    };
    let opened = Store::open(&folder).map_err(|err| {
        format!("the registry in {} cannot be used ({err}); use --data-dir", folder.display())
    });
    if let Err(why) = &opened {
        tracing::warn!("{why}");
    }
    Ok(opened)
}

async fn serve(
    args: &ServeArgs,
    device_group: Arc<DeviceGroup>,
    loader: Arc<DiskLoader>,
) -> Result<(), Failure> {
    let started = Instant::now();
    // Before anything is visible from outside, so that no signal is missed.
    let stop =
        if args.until_input_ends { ShutdownSignal::with_input()? } else { ShutdownSignal::new()? };
    let service = LocalNode::new(device_group.clone(), loader.clone());
    let max_body_bytes = usize::try_from(args.max_body_mib << 20).unwrap_or(usize::MAX);
    let folder = args.data_dir.clone().or_else(user_data_folder);
    let server =
        listen(&args.listen, folder.as_deref(), max_body_bytes, Arc::new(service.clone())).await?;
    load_models(args, &service).await?;
    let popularity = preload(args, &service);
    if matches!(args.model_control_mode, Some(ModelControlMode::None | ModelControlMode::Poll)) {
        service.forbid_control();
    }
    service.set_started();
    tracing::info!(
        http = address_text(server.http_addr),
        grpc = address_text(server.grpc_addr),
        metrics = address_text(server.metrics_addr),
        device = device_group::describe(&device_group),
        policy = args.policy,
        started_ms = started.elapsed().as_millis() as u64,
        "ready"
    );
    if args.model_control_mode == Some(ModelControlMode::Poll) {
        let period = Duration::from_secs(args.repository_poll_secs);
        tokio::spawn(follow_changes(service.clone(), loader, period));
    }
    wait_and_save(stop, &service, popularity).await;
    tracing::info!(in_flight = server.in_flight(), "stopping");
    if server.shutdown(Duration::from_secs(args.exit_timeout_secs)).await {
        return Ok(());
    }
    Err(Failure::failed("some requests did not finish in time and were cancelled"))
}

/// The file of request counts, and its content when the server started.
type PopularityFile = Option<(PathBuf, Popularity)>;

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

/// Waits for the shutdown signal, and saves request counts periodically.
async fn wait_and_save(stop: ShutdownSignal, service: &LocalNode, saved: PopularityFile) {
    let save = || {
        if let Some((path, known)) = &saved
            && let Err(err) = known.after(service.inference_counts()).write(path)
        {
            tracing::warn!("{}: {err}", path.display());
        }
    };
    let mut stopped = std::pin::pin!(stop.wait());
    while tokio::time::timeout(SAVE_INTERVAL, &mut stopped).await.is_err() {
        save();
    }
    save();
}

/// Loads the models of the start. One that fails is logged and skipped, so that the others are
/// served; one named on the command line must load.
async fn load_models(args: &ServeArgs, service: &LocalNode) -> Result<(), Failure> {
    let explicit = args.model_control_mode == Some(ModelControlMode::Explicit);
    let all = if args.load_model.is_empty() {
        !explicit
    } else {
        args.load_model.iter().any(|name| name == "*")
    };
    if all {
        let failed = service.load_all().await.map_err(Failure::failed)?;
        if !failed.is_empty() {
            tracing::warn!(count = failed.len(), "models not loaded");
        }
        return Ok(());
    }
    for name in &args.load_model {
        service.load_model(name).await.map_err(Failure::failed)?;
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
