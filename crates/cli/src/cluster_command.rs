//! `atoll cluster`: runs the roles, each in a process of its own or all in one.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use assembly::backend::{
    BackendParts, REQUEST_TIMEOUT, RunningBackend, address_text, clock, retry_until_reached,
    server_metadata,
};
use assembly::device_group::OnFault;
use assembly::{Failure, device_group, tokio_runtime};
use base::Nanos;
use cluster::frontend::cold_start::ColdStartSettings;
use cluster::frontend::{Frontend, FrontendSettings};
use cluster::model_store::bucket::BucketStore;
use cluster::model_store::{FileStore, ModelRecords, ModelStore};
use cluster::query::spec::QuerySpec;
use cluster::record::{FrontendRecord, Keys};
use cluster::scaling::driver::{ScaledPool, Scaling};
use cluster::scaling::kubernetes::KubernetesTarget;
use cluster::scaling::pool_spec::{PoolSpec, check_pools};
use cluster::scaling::replica_pools::PoolSettings;
use cluster::scaling::scaler::ScalingSettings;
use cluster::scheduler::SchedulerSettings;
use cluster::scheduler::agent::SchedulerAgent;
use cluster::scheduler::maintenance::MaintenanceSettings;
use cluster::scheduler::placement::PlacementSettings;
use cluster::scheduler::service::{SchedulerService, SchedulerState};
use cluster::snapshot::{ClusterSnapshot, damaged_records};
use cluster::state_file::StateFile;
use cluster::status::{Status, render};
use cluster::store::etcd::EtcdAccess;
use cluster::store::{self, Store};
use model::HostMemory;
use model::store::RegistryLimits;
use runtime::{DeviceGroup, NodeOptions};
use server::{InheritedSockets, RunningServer, Server, ServerOptions};
use tokio::sync::watch;

use crate::args::ServeArgs;
use crate::canary_command;
use crate::cluster_args::{
    BackendArgs, FrontendArgs, ModelStoreArgs, PlanningArgs, Role, RollbackArgs, ScalingArgs,
    SchedulerArgs, StatusArgs, StoreArgs, TopArgs,
};
use crate::data_folder::user_data_folder;
use crate::listen::{bind, listen};
use crate::process_replacement::{self, Handover, NO_DEVICE, REPLY_LIMIT};
use crate::security_args::Ports;
use crate::serve_command::node_options;
use crate::shutdown_signal::ShutdownSignal;

/// How long a process that stops waits for the store to take note.
const LEAVE_TIME: Duration = Duration::from_secs(2);

/// Runs the role until a signal stops it.
pub(crate) fn run(role: &Role) -> Result<(), Failure> {
    let runtime = tokio_runtime()?;
    let result = match role {
        Role::Scheduler(args) => runtime.block_on(scheduler(args)),
        Role::Frontend(args) => runtime.block_on(frontend(args)),
        Role::Backend(args) => runtime.block_on(backend(args)),
        Role::Status(args) => runtime.block_on(status(args)),
        Role::Top(args) => runtime.block_on(top(args)),
        Role::Rollback(args) => runtime.block_on(rollback(args)),
        Role::Canary(args) => runtime.block_on(canary_command::run(args)),
    };
    // A model that is still being loaded does not keep the process.
    runtime.shutdown_background();
    result
}

fn open_store(args: &StoreArgs) -> Result<Arc<dyn Store>, Failure> {
    if args.store == "memory" {
        return Err(Failure::usage(
            "the memory store is for one process: use atoll serve --cluster, or --store etcd://...",
        ));
    }
    store::open(&args.store, args.access()?, clock()).map_err(Failure::usage)
}

/// The name of this process in the cluster.
fn name_of(args: &StoreArgs, role: &str) -> Result<String, Failure> {
    let name = args.name.clone().unwrap_or_else(|| {
        let host = std::fs::read_to_string("/etc/hostname").unwrap_or_default();
        let host = host.trim().replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "-");
        format!("{role}-{host}-{}", std::process::id())
    });
    match model::repository::is_valid_name(&name) && model::repository::is_valid_name(&args.cluster)
    {
        true => Ok(name),
        false => Err(Failure::usage("--name and --cluster are made of letters, digits, _ . and -")),
    }
}

fn planning(args: &PlanningArgs, lease: Duration) -> Result<SchedulerSettings, Failure> {
    if !(0.0..=10.0).contains(&args.headroom) {
        return Err(Failure::usage(format!("--headroom {} is not from 0 to 10", args.headroom)));
    }
    if !(0.001..=1e9).contains(&args.slo_ms) {
        return Err(Failure::usage(format!("--slo-ms {} is no objective", args.slo_ms)));
    }
    Ok(SchedulerSettings {
        epoch: Nanos::from_millis(args.epoch_ms),
        spacing: Nanos::from_millis(args.spacing_ms),
        grace: Nanos::from(lease * 2),
        slo_ms: args.slo_ms,
        rate_min: 1.0,
        placement: PlacementSettings {
            headroom: args.headroom,
            copies: usize::from(args.copies),
            spread: !args.compact,
            packer: args.packer,
            pooled: !args.no_backend_pools,
        },
    })
}

/// The replica pools, each with its own numbers, or else with those of all.
fn scaling(args: &ScalingArgs) -> Result<Option<Scaling>, Failure> {
    if args.kubernetes_scale.is_empty() {
        return Ok(None);
    }
    let usage = |why: String| Failure::usage(format!("--kubernetes-scale {why}"));
    check_pools(&args.kubernetes_scale).map_err(usage)?;
    let pools = args.kubernetes_scale.iter().map(|spec| scaled_pool(args, spec));
    Ok(Some(Scaling::of_pools(pools.collect::<Result<_, _>>()?)))
}

fn scaled_pool(args: &ScalingArgs, spec: &PoolSpec) -> Result<ScaledPool, Failure> {
    let seconds = |seconds: u64| Nanos::from(Duration::from_secs(seconds));
    let scaling = ScalingSettings {
        replicas_min: spec.min.unwrap_or(args.replicas_min),
        replicas_max: spec.max.unwrap_or(args.replicas_max),
        step_up: args.scale_up_step,
        step_down: args.scale_down_step,
        window: seconds(args.scale_down_after_secs),
        cooldown: spec.cooldown.unwrap_or(seconds(args.scale_cooldown_secs)),
        ..ScalingSettings::default()
    };
    if scaling.replicas_min > scaling.replicas_max {
        let (name, min, max) = (&spec.workload.name, scaling.replicas_min, scaling.replicas_max);
        return Err(Failure::usage(format!("{name}: min {min} is more than max {max}")));
    }
    let settings = PoolSettings {
        scaling,
        kind: spec.kind.clone(),
        price: spec.price.unwrap_or(1.0),
        zero_after: spec.zero_after.unwrap_or(seconds(args.scale_to_zero_after_secs)),
        pending_limit: seconds(args.scale_pending_secs),
    };
    let namespace = args.kubernetes_namespace.clone();
    let target = KubernetesTarget::connect(spec.workload.clone(), namespace);
    Ok(ScaledPool { target: Arc::new(target.map_err(Failure::usage)?), settings })
}

async fn scheduler(args: &SchedulerArgs) -> Result<(), Failure> {
    let mut stop = ShutdownSignal::new()?;
    let lease = Duration::from_millis(args.store.lease_ms);
    let store = open_store(&args.store)?;
    let state = Arc::new(SchedulerState::default());
    let quota_bytes = args.store_quota_mib << 20;
    let service = SchedulerService {
        state: state.clone(),
        store: store.clone(),
        quota_bytes,
        metadata: server_metadata(),
        clock: clock(),
    };
    let server = serve_admin(args, Arc::new(service)).await?;
    let agent = SchedulerAgent {
        store,
        keys: Keys::new(&args.store.cluster),
        name: name_of(&args.store, "scheduler")?,
        lease,
        settings: planning(&args.planning, lease)?,
        scaling: scaling(&args.scaling)?,
        maintenance: MaintenanceSettings {
            history: Duration::from_secs(args.store_history_secs),
            quota_bytes,
        },
        state,
        clock: clock(),
    };
    let metrics = address_text(server.metrics_addr);
    tracing::info!(name = agent.name, store = args.store.store, metrics, "ready");
    let (stopping, stopped) = watch::channel(false);
    let work = tokio::spawn(agent.run(stopped));
    let until = async {
        stop.wait().await;
        let _ = stopping.send(true);
        tokio::time::sleep(LEAVE_TIME).await;
    };
    tokio::select! {
        () = until => Ok(()),
        ended = work => ended.map_err(Failure::failed)?.map_err(Failure::failed),
    }
}

/// Health and metrics of a scheduler.
async fn serve_admin(
    args: &SchedulerArgs,
    service: Arc<SchedulerService>,
) -> Result<RunningServer, Failure> {
    let ports = Ports { host: args.host, http: 0, grpc: 0, metrics: args.metrics_port };
    let options = args.security.options(&ports, None, 1 << 20)?;
    let options = ServerOptions { http: None, grpc: None, ..options };
    Server::start(options, service).await.map_err(Failure::failed)
}

fn open_files(args: &ModelStoreArgs) -> Result<Option<ModelStore>, Failure> {
    let Some(place) = args.model_store.as_deref() else { return Ok(None) };
    if !place.contains("://") {
        return open_folder(Path::new(place)).map(Some);
    }
    let cache = args.model_cache.clone();
    let cache = cache.or_else(|| Some(user_data_folder()?.join("model-cache")));
    let cache =
        cache.ok_or_else(|| Failure::usage("there is no data folder: name a --model-cache"))?;
    let bucket = BucketStore::open(place, &cache)
        .map_err(|why| Failure::usage(format!("--model-store {why}")))?;
    Ok(Some(ModelStore::Bucket(bucket)))
}

fn open_folder(folder: &Path) -> Result<ModelStore, Failure> {
    let files = FileStore::open(folder)
        .map_err(|err| Failure::usage(format!("--model-store {}: {err}", folder.display())))?;
    Ok(ModelStore::Folder(files))
}

async fn frontend(args: &FrontendArgs) -> Result<(), Failure> {
    let mut stop = ShutdownSignal::new()?;
    let (store, keys) = (open_store(&args.store)?, Keys::new(&args.store.cluster));
    let settings = FrontendSettings {
        name: name_of(&args.store, "frontend")?,
        lease: Duration::from_millis(args.store.lease_ms),
        metadata: server_metadata(),
        requests_max: args.max_requests as usize,
        timeout: REQUEST_TIMEOUT,
        files: open_files(&args.models)?,
        backend_tls: args.backend_tls.tls()?,
        saved: saved_routes(args, &keys)?,
        cold_start: ColdStartSettings {
            wait: Duration::from_millis(args.cold_start_wait_ms),
            model_max: args.cold_start_queue as usize,
            total_max: args.cold_start_queue_total as usize,
        },
        limits: args.quotas.limits(),
        memory: HostMemory::process(),
    };
    let name = settings.name.clone();
    let exit_timeout = Duration::from_secs(args.exit_timeout_secs);
    let service = Frontend::new(store.clone(), keys.clone(), clock(), settings);
    // Before the store is reached: the process is alive, and not ready.
    let body = usize::try_from(args.max_body_mib << 20).unwrap_or(usize::MAX);
    let server = listen(&args.listen, None, body, Arc::new(service.clone())).await?;
    let connect = async {
        store_queries(&ModelRecords::new(store.clone(), keys.clone()), &args.query).await?;
        retry_until_reached(|| service.connect(store.clone(), &keys)).await
    };
    let Some(connected) = stop.unless_stopped(connect).await else {
        return check_finished(server.shutdown(exit_timeout).await);
    };
    connected?;
    let record = FrontendRecord {
        grpc: address_text(server.grpc_addr),
        http: address_text(server.http_addr),
    };
    let membership = service.join(store, &keys, &record);
    tracing::info!(
        name,
        http = record.http,
        grpc = record.grpc,
        metrics = address_text(server.metrics_addr),
        "ready"
    );
    stop.wait().await;
    tracing::info!(in_flight = server.in_flight(), "stopping");
    let done = server.shutdown(exit_timeout).await;
    if let Some(membership) = Arc::into_inner(membership) {
        let _ = tokio::time::timeout(LEAVE_TIME, membership.leave()).await;
    }
    check_finished(done)
}

/// Stores the queries of `files` under the files' names.
async fn store_queries(library: &ModelRecords, files: &[PathBuf]) -> Result<(), Failure> {
    for path in files {
        let fail = |why: String| Failure::usage(format!("--query {}: {why}", path.display()));
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        if !model::repository::is_valid_name(name) {
            return Err(fail("its name is made of letters, digits, _ . and -".to_string()));
        }
        let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        let query = QuerySpec::read(&text).and_then(QuerySpec::check);
        let query = query.map_err(|error| fail(error.to_string()))?.spec;
        retry_until_reached(|| library.put_query(name, &query)).await?;
        tracing::info!(query = name, "query stored");
    }
    Ok(())
}

fn check_finished(done: bool) -> Result<(), Failure> {
    match done {
        true => Ok(()),
        false => Err(Failure::failed("some requests did not finish in time and were cancelled")),
    }
}

/// Where the process of this name keeps its notes; those of one machine share `folder`.
fn process_folder(folder: &Path, role: &str, name: &str) -> PathBuf {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let name = name.replace(|c: char| !plain(c), "_");
    folder.join(role).join(name)
}

/// Where a frontend keeps its routes. A name with the number of the process is another one after a
/// restart.
fn saved_routes(args: &FrontendArgs, keys: &Keys) -> Result<Option<StateFile>, Failure> {
    let folder = args.data_dir.clone().or_else(user_data_folder);
    let Some(folder) = folder.filter(|_| args.store.name.is_some()) else { return Ok(None) };
    let folder = process_folder(&folder, "frontends", &name_of(&args.store, "frontend")?);
    Ok(Some(StateFile::new(&folder, "routes", keys.all())))
}

/// Replaces a process whose devices are lost; returns only when that fails.
async fn replaced(
    device_group: &DeviceGroup,
    sockets: &InheritedSockets,
    started: Instant,
) -> Failure {
    let reason = NO_DEVICE.to_string();
    let handover = Handover::new(reason, device_group, Vec::new(), started.elapsed());
    tokio::time::sleep(handover.pause()).await;
    process_replacement::replace(sockets, &handover, false)
}

async fn backend(args: &BackendArgs) -> Result<(), Failure> {
    let (mut stop, started) = (ShutdownSignal::new()?, Instant::now());
    if args.model_repository.is_empty() && args.models.model_store.is_none() {
        return Err(Failure::usage("name a --model-repository or a --model-store"));
    }
    let body = usize::try_from(args.max_body_mib << 20).unwrap_or(usize::MAX);
    let options = NodeOptions {
        max_requests: args.max_requests as usize,
        best_effort_share_percent: args.best_effort_share,
        max_rt_slowdown_percent: args.max_rt_slowdown,
        spans_kept: args.spans.spans_kept as usize,
        ..NodeOptions::default()
    };
    let name = name_of(&args.store, "backend")?;
    // A name with the number of the process is another one after a restart.
    let data_dir = args.data_dir.clone().or_else(user_data_folder);
    let data_dir = data_dir.filter(|_| args.store.name.is_some());
    let (memory, on_fault) = (args.gpu_memory, OnFault::ReplaceProcess);
    let device_group = device_group::open_device_group(&args.device, memory, &options, on_fault)?;
    let start = RunningBackend::start(BackendParts {
        store: open_store(&args.store)?,
        keys: Keys::new(&args.store.cluster),
        data_dir: data_dir.map(|folder| process_folder(&folder, "backends", &name)),
        name,
        lease: Duration::from_millis(args.store.lease_ms),
        repositories: &args.model_repository,
        files: open_files(&args.models)?,
        device_group: device_group.clone(),
        listen: args.security.backend_options(&args.ports(), body)?,
        advertise: args.advertise.clone(),
        kind: args.device_kind.clone(),
        memory_mib: args.memory_mib,
        checker: args.model_check.checker(&args.device.device),
    });
    let Some(running) = stop.unless_stopped(start).await else { return Ok(()) };
    let running = running?;
    tokio::select! {
        () = stop.wait() => {}
        () = process_replacement::lost(&device_group) => {
            running.shutdown(REPLY_LIMIT).await;
            return Err(replaced(&device_group, &InheritedSockets::default(), started).await);
        }
    }
    tracing::info!(in_flight = running.server.in_flight(), "stopping");
    check_finished(running.shutdown(Duration::from_secs(args.exit_timeout_secs)).await)
}

/// `atoll serve --cluster`: scheduler, frontend and backend in this process, state in memory.
pub(crate) fn serve_all(args: &ServeArgs) -> Result<(), Failure> {
    if args.model_control_mode.is_some() || !args.load_model.is_empty() {
        return Err(Failure::usage(
            "--cluster loads what the plan assigns; use the API instead of --load-model",
        ));
    }
    if args.model_repository.is_empty() && args.data_dir.is_none() {
        return Err(Failure::usage("name a --model-repository or a --data-dir"));
    }
    let (memory, options) = (args.gpu_memory, node_options(args));
    let on_fault = OnFault::ReplaceProcess;
    let device_group = device_group::open_device_group(&args.device, memory, &options, on_fault)?;
    let runtime = tokio_runtime()?;
    let result = runtime.block_on(all_roles(args, device_group));
    runtime.shutdown_background();
    result
}

async fn all_roles(args: &ServeArgs, device_group: Arc<DeviceGroup>) -> Result<(), Failure> {
    let (mut stop, started) = (ShutdownSignal::new()?, Instant::now());
    let body = usize::try_from(args.max_body_mib << 20).unwrap_or(usize::MAX);
    // First, because the backend takes any free port, which must not be one of these.
    let bound = bind(&args.listen, args.data_dir.as_deref(), body).await?;
    let store = store::open("memory", EtcdAccess::default(), clock()).map_err(Failure::failed)?;
    let (keys, lease) = (Keys::new("default"), Duration::from_secs(5));
    let files = args.data_dir.as_deref().map(open_folder).transpose()?;
    let settings = SchedulerSettings::default();
    let (_stopping, stopped) = watch::channel(false);
    let agent = SchedulerAgent {
        store: store.clone(),
        keys: keys.clone(),
        name: "scheduler".to_string(),
        lease,
        settings,
        scaling: None,
        maintenance: MaintenanceSettings::default(),
        state: Arc::default(),
        clock: clock(),
    };
    let _scheduler = tokio::spawn(agent.run(stopped));
    let loopback = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let backend = RunningBackend::start(BackendParts {
        store: store.clone(),
        keys: keys.clone(),
        name: "backend".to_string(),
        lease,
        repositories: &args.model_repository,
        files: files.clone(),
        device_group: device_group.clone(),
        listen: ServerOptions {
            http: loopback,
            grpc: loopback,
            metrics: loopback,
            max_body_bytes: body,
            ..ServerOptions::default()
        },
        advertise: None,
        kind: None,
        memory_mib: None,
        checker: args.model_check.checker(&args.device.device),
        data_dir: args
            .data_dir
            .as_deref()
            .map(|folder| process_folder(folder, "backends", "backend")),
    })
    .await?;
    store_queries(&ModelRecords::new(store.clone(), keys.clone()), &args.query).await?;
    let settings = FrontendSettings {
        name: "frontend".to_string(),
        lease,
        metadata: server_metadata(),
        requests_max: args.max_requests as usize,
        timeout: REQUEST_TIMEOUT,
        files,
        backend_tls: None,
        saved: None,
        cold_start: ColdStartSettings::default(),
        limits: RegistryLimits::default(),
        memory: HostMemory::process(),
    };
    let service = Frontend::start(store.clone(), keys.clone(), clock(), settings).await;
    let service = service.map_err(Failure::failed)?;
    let mut server = bound.serve(Arc::new(service.clone())).await.map_err(Failure::failed)?;
    let record = FrontendRecord {
        grpc: address_text(server.grpc_addr),
        http: address_text(server.http_addr),
    };
    let _membership = service.join(store, &keys, &record);
    tracing::info!(http = record.http, grpc = record.grpc, "ready");
    tokio::select! {
        () = stop.wait() => {}
        () = process_replacement::lost(&device_group) => {
            let sockets = server.take_sockets();
            server.hand_over(REPLY_LIMIT).await;
            return Err(replaced(&device_group, &sockets, started).await);
        }
    }
    let limit = Duration::from_secs(args.exit_timeout_secs);
    let done = server.shutdown(limit).await;
    check_finished(backend.server.shutdown(limit).await && done)
}

async fn read_status(store: &dyn Store, keys: &Keys) -> Result<Status, Failure> {
    let listing = store.list(keys.all()).await.map_err(Failure::failed)?;
    let short =
        |entry: store::Entry| Some((entry.key.strip_prefix(keys.all())?.to_string(), entry.value));
    let image = listing.entries.into_iter().filter_map(short).collect();
    let mut status = Status::of(&ClusterSnapshot::read(&image));
    status.add_damaged(&damaged_records(&image));
    Ok(status)
}

async fn status(args: &StatusArgs) -> Result<(), Failure> {
    let store = open_store(&args.store)?;
    let mut status = read_status(&*store, &Keys::new(&args.store.cluster)).await?;
    // A user of etcd may not be allowed to look.
    if let Ok(space) = store.space().await {
        status.add_space(space, args.store_quota_mib << 20);
    }
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&status).map_err(Failure::failed)?),
        false => print!("{}", render(&status, args.all)),
    }
    match status.problems.as_slice() {
        [] => Ok(()),
        _ if args.leader_only && status.leader.is_some() => Ok(()),
        [one] => Err(Failure::failed(format!("{}: {}", one.what, one.advice))),
        [first, rest @ ..] => {
            Err(Failure::failed(format!("{}, and {} more problems", first.what, rest.len())))
        }
    }
}

async fn top(args: &TopArgs) -> Result<(), Failure> {
    let mut stop = ShutdownSignal::new()?;
    let store = open_store(&args.store)?;
    let keys = Keys::new(&args.store.cluster);
    let show = async {
        loop {
            let text = match (read_status(&*store, &keys).await, args.json) {
                (Ok(status), true) => {
                    format!("{}\n", serde_json::to_string(&status).map_err(Failure::failed)?)
                }
                // Clears the screen.
                (Ok(status), false) => format!("\x1b[2J\x1b[H{}", render(&status, false)),
                (Err(_), _) => "the store cannot be reached\n".to_string(),
            };
            let mut out = std::io::stdout();
            // Ends when the reader is gone.
            if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(args.every_ms)).await;
        }
    };
    tokio::select! {
        shown = show => shown,
        () = stop.wait() => Ok(()),
    }
}

/// Time limit of a rollback: a backend compiles and loads the older version first.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(300);

async fn rollback(args: &RollbackArgs) -> Result<(), Failure> {
    if !model::repository::is_valid_name(&args.model) {
        return Err(Failure::usage(format!("'{}' is not the name of a model", args.model)));
    }
    let version = args.to.map(|version| format!("/versions/{version}")).unwrap_or_default();
    let path = format!("/v2/atoll/models/{}{version}/rollback", args.model);
    let reply = args.server.post(&path, ROLLBACK_TIMEOUT).await?;
    let text = reply.text().await.map_err(|error| args.server.failed(&error))?;
    let reply: serde_json::Value = serde_json::from_str(&text).map_err(Failure::failed)?;
    println!("{} version {} is in force", args.model, reply["version"].as_str().unwrap_or("?"));
    Ok(())
}
