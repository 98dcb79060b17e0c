//! `atoll cluster`: puts the roles together, each in a process of its own or all in one.

use std::collections::HashMap;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{InferenceService, RegisterRequest, ServerMetadata};
use base::{MonotonicClock, Nanos};
use cluster::backend::{BackendAgent, Host, HostFuture, ModelCatalog, PoolBatch};
use cluster::frontend::{Frontend, FrontendSettings};
use cluster::model_store::bucket::BucketStore;
use cluster::model_store::{FileStore, ModelRecords, ModelStore, ModelStoreError, digest};
use cluster::query::spec::QuerySpec;
use cluster::record::{BackendRecord, FrontendRecord, Keys, ModelRecord};
use cluster::scaling::driver::Scaling;
use cluster::scaling::kubernetes::KubernetesTarget;
use cluster::scaling::scaler::ScalingSettings;
use cluster::scheduler::SchedulerSettings;
use cluster::scheduler::agent::SchedulerAgent;
use cluster::scheduler::placement::PlacementSettings;
use cluster::snapshot::ClusterSnapshot;
use cluster::status::{Status, render};
use cluster::store::{self, Store, StoreError};
use model::repository::Repository;
use runtime::{DeviceGroup, NodeOptions};
use server::node::EXTENSIONS;
use server::{
    LoadError, LoadedModel, LocalNode, ModelLoader, RepositoryEntry, RunningServer, Server,
    ServerOptions,
};
use tokio::sync::watch;

use crate::args::ServeArgs;
use crate::cluster_args::{
    BackendArgs, FrontendArgs, ModelStoreArgs, PlanningArgs, Role, ScalingArgs, SchedulerArgs,
    StatusArgs, StoreArgs, TopArgs,
};
use crate::devices;
use crate::failure::Failure;
use crate::loader::load_file;
use crate::serve_command::{
    Stop, address_text, bind, listen, node_options, tokio_runtime, user_data_folder,
};

/// Pause before an unreachable store is tried again at the start.
const RETRY: Duration = Duration::from_millis(500);
/// Time after which a request without a deadline is given up.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Runs the role until a signal stops it.
pub(crate) fn run(role: &Role) -> Result<(), Failure> {
    let runtime = tokio_runtime()?;
    match role {
        Role::Scheduler(args) => runtime.block_on(scheduler(args)),
        Role::Frontend(args) => runtime.block_on(frontend(args)),
        Role::Backend(args) => runtime.block_on(backend(args)),
        Role::Status(args) => runtime.block_on(status(args)),
        Role::Top(args) => runtime.block_on(top(args)),
    }
}

pub(crate) fn clock() -> Arc<MonotonicClock> {
    Arc::new(MonotonicClock::new())
}

fn open_store(args: &StoreArgs) -> Result<Arc<dyn Store>, Failure> {
    if args.store == "memory" {
        return Err(Failure::usage(
            "the memory store lives in one process; use atoll serve --cluster, or --store etcd://HOST:PORT",
        ));
    }
    store::open(&args.store, clock()).map_err(Failure::usage)
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

/// Tries until the store can be reached; what it refuses is an error.
async fn reach<T, F>(what: impl Fn() -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<T, StoreError>>,
{
    loop {
        match what().await {
            Ok(value) => return Ok(value),
            Err(StoreError::Unreachable(why)) => {
                tracing::warn!(why, "waiting for the store");
                tokio::time::sleep(RETRY).await;
            }
            Err(error) => return Err(Failure::failed(error)),
        }
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
            pooled: !args.apart,
        },
    })
}

fn scaling(args: &ScalingArgs) -> Result<Option<Scaling>, Failure> {
    let Some(workload) = args.kubernetes_scale.clone() else { return Ok(None) };
    if args.replicas_min > args.replicas_max {
        return Err(Failure::usage("--replicas-min is more than --replicas-max"));
    }
    let settings = ScalingSettings {
        replicas_min: args.replicas_min,
        replicas_max: args.replicas_max,
        step_up: args.scale_up_step,
        step_down: args.scale_down_step,
        window: Duration::from_secs(args.scale_down_after_secs).into(),
        cooldown: Duration::from_secs(args.scale_cooldown_secs).into(),
        ..ScalingSettings::default()
    };
    let namespace = args.kubernetes_namespace.clone();
    let target = KubernetesTarget::connect(workload, namespace).map_err(Failure::usage)?;
    Ok(Some(Scaling::new(Arc::new(target), settings)))
}

async fn scheduler(args: &SchedulerArgs) -> Result<(), Failure> {
    let stop = Stop::new()?;
    let lease = Duration::from_millis(args.store.lease_ms);
    let agent = SchedulerAgent {
        store: open_store(&args.store)?,
        keys: Keys::new(&args.store.cluster),
        name: name_of(&args.store, "scheduler")?,
        lease,
        settings: planning(&args.planning, lease)?,
        scaling: scaling(&args.scaling)?,
        clock: clock(),
    };
    tracing::info!(name = agent.name, store = args.store.store, "ready");
    let (stopping, stopped) = watch::channel(false);
    let work = tokio::spawn(agent.run(stopped));
    let until = async {
        stop.wait().await;
        let _ = stopping.send(true);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = until => Ok(()),
        ended = work => ended.map_err(Failure::failed)?.map_err(Failure::failed),
    }
}

pub(crate) fn server_metadata() -> ServerMetadata {
    ServerMetadata {
        name: "atoll".to_string(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        extensions: EXTENSIONS.map(str::to_string).to_vec(),
    }
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
    let stop = Stop::new()?;
    let (store, keys) = (open_store(&args.store)?, Keys::new(&args.store.cluster));
    let settings = FrontendSettings {
        name: name_of(&args.store, "frontend")?,
        lease: Duration::from_millis(args.store.lease_ms),
        metadata: server_metadata(),
        requests_max: args.max_requests as usize,
        timeout: REQUEST_TIMEOUT,
        files: open_files(&args.models)?,
    };
    let name = settings.name.clone();
    keep_queries(&ModelRecords::new(store.clone(), keys.clone()), &args.query).await?;
    let service =
        reach(|| Frontend::start(store.clone(), keys.clone(), clock(), settings.clone())).await?;
    let body = usize::try_from(args.max_body_mib << 20).unwrap_or(usize::MAX);
    let server = listen(&args.listen, body, Arc::new(service.clone())).await?;
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
    let done = server.shutdown(Duration::from_secs(args.exit_timeout_secs)).await;
    if let Some(membership) = Arc::into_inner(membership) {
        membership.leave().await;
    }
    given_up(done)
}

/// Keeps the queries of files under the files' names.
async fn keep_queries(records: &ModelRecords, files: &[PathBuf]) -> Result<(), Failure> {
    for path in files {
        let fail = |why: String| Failure::usage(format!("--query {}: {why}", path.display()));
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        if !model::repository::is_valid_name(name) {
            return Err(fail("its name is made of letters, digits, _ . and -".to_string()));
        }
        let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        let query = QuerySpec::read(&text).and_then(QuerySpec::check);
        let query = query.map_err(|error| fail(error.to_string()))?.spec;
        reach(|| records.put_query(name, &query)).await?;
        tracing::info!(query = name, "query kept");
    }
    Ok(())
}

fn given_up(done: bool) -> Result<(), Failure> {
    match done {
        true => Ok(()),
        false => Err(Failure::failed("some requests did not finish in time and were given up")),
    }
}

/// Models by their content, from repositories and from the store of all machines.
struct ClusterLoader {
    device_group: Arc<DeviceGroup>,
    catalog: ModelCatalog,
    files: Option<ModelStore>,
    repositories: HashMap<String, PathBuf>,
    /// Where a store's network is waited for.
    threads: tokio::runtime::Handle,
}

impl ClusterLoader {
    /// The file with a model's content. Loads run on threads of their own, so this may wait.
    fn file(&self, record: &ModelRecord) -> Result<PathBuf, LoadError> {
        if let Some(path) = self.repositories.get(&record.digest) {
            return Ok(path.clone());
        }
        let files = self.files.as_ref().ok_or_else(|| {
            LoadError::NotFound(format!(
                "no --model-repository of this backend has {}, and it has no --model-store",
                record.digest
            ))
        })?;
        let fetched = self.threads.block_on(files.fetch(&record.digest, record.bytes));
        fetched.map_err(|error| match error {
            ModelStoreError::Missing(why) => LoadError::NotFound(format!(
                "no --model-repository of this backend has it, and {why}"
            )),
            ModelStoreError::Damaged(why) => LoadError::Invalid(why),
            ModelStoreError::Unavailable(why) => LoadError::Unavailable(why),
        })
    }
}

impl ModelLoader for ClusterLoader {
    fn load(&self, name: &str, _: Option<u64>) -> Result<LoadedModel, LoadError> {
        let unknown = || LoadError::NotFound(format!("the cluster has no model '{name}'"));
        let record = self.catalog.find(name).ok_or_else(unknown)?;
        let path = self.file(&record)?;
        let bytes = std::fs::read(&path).map_err(|err| LoadError::Internal(err.to_string()))?;
        if digest(&bytes) != record.digest {
            if let Some(files) = &self.files {
                files.discard(&record.digest);
            }
            let message = format!("{} is not what was registered any more", path.display());
            return Err(LoadError::Invalid(message));
        }
        drop(bytes);
        let placed = load_file(&self.device_group, &path)?;
        Ok(LoadedModel { placed, config: record.config, version: record.version })
    }

    fn index(&self) -> Result<Vec<RepositoryEntry>, LoadError> {
        let models = self.catalog.all().into_iter();
        Ok(models.map(|(name, m)| RepositoryEntry { name, version: m.version }).collect())
    }

    fn register(&self, _: RegisterRequest) -> Result<u64, LoadError> {
        Err(LoadError::Unavailable("register models at a frontend of the cluster".to_string()))
    }
}

/// A node as the backend's agent sees it.
struct NodeHost(LocalNode);

impl Host for NodeHost {
    fn load<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()> {
        Box::pin(async move { self.0.load_model(model).await.map(|_| ()) })
    }

    fn unload<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()> {
        Box::pin(self.0.unload_model(model))
    }

    fn set_pool_batch(&self, model: &str, batch: Option<PoolBatch>) {
        let turn = batch
            .map(|batch| runtime::batching::StaggeredBatch { batch: batch.max, least: batch.min });
        self.0.set_turn(model, turn);
    }

    fn marks<'a>(&'a self, model: &'a str) -> HostFuture<'a, Vec<(String, f64)>> {
        Box::pin(self.0.marks(model))
    }

    fn service(&self) -> Arc<dyn InferenceService> {
        Arc::new(self.0.clone())
    }
}

/// A repository's model that is to be one of the cluster's.
struct Found {
    name: String,
    version: u64,
    digest: String,
    bytes: u64,
    path: PathBuf,
    config: model::ModelConfig,
}

/// The newest version of every model in `repositories`; one that cannot be read is reported and left out.
fn find_models(repositories: &[PathBuf]) -> Result<Vec<Found>, Failure> {
    let mut newest: HashMap<String, Found> = HashMap::new();
    for path in repositories {
        let repository = Repository::open(path).map_err(Failure::usage)?;
        for entry in repository.list().map_err(Failure::usage)? {
            if newest.get(&entry.name).is_some_and(|found| found.version >= entry.version) {
                continue;
            }
            let read = std::fs::read(&entry.path).map_err(|err| err.to_string());
            let config = entry.config().map_err(|err| err.to_string());
            match (read, config) {
                (Ok(bytes), Ok(config)) => {
                    let found = Found {
                        name: entry.name.clone(),
                        version: entry.version,
                        digest: digest(&bytes),
                        bytes: bytes.len() as u64,
                        path: entry.path,
                        config,
                    };
                    newest.insert(entry.name, found);
                }
                (Err(why), _) | (_, Err(why)) => {
                    tracing::warn!(model = entry.name, why, "model left out");
                }
            }
        }
    }
    Ok(newest.into_values().collect())
}

/// What a backend needs beyond its flags.
pub(crate) struct BackendParts<'a> {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) keys: Keys,
    pub(crate) name: String,
    pub(crate) lease: Duration,
    pub(crate) repositories: &'a [PathBuf],
    pub(crate) files: Option<ModelStore>,
    pub(crate) device_group: Arc<DeviceGroup>,
    pub(crate) listen: ServerOptions,
    pub(crate) advertise: Option<String>,
    pub(crate) kind: Option<String>,
    pub(crate) memory_mib: Option<u64>,
}

/// A backend at work.
pub(crate) struct RunningBackend {
    pub(crate) server: RunningServer,
    stop: watch::Sender<bool>,
    work: tokio::task::JoinHandle<Result<(), StoreError>>,
}

impl RunningBackend {
    pub(crate) async fn start(parts: BackendParts<'_>) -> Result<RunningBackend, Failure> {
        let models = find_models(parts.repositories)?;
        let catalog = ModelCatalog::default();
        let loader = Arc::new(ClusterLoader {
            device_group: parts.device_group.clone(),
            catalog: catalog.clone(),
            files: parts.files,
            repositories: models.iter().map(|m| (m.digest.clone(), m.path.clone())).collect(),
            threads: tokio::runtime::Handle::current(),
        });
        let device_group = parts.device_group;
        let info = device_group.nodes()[0].device().info().clone();
        let node = LocalNode::new(device_group.clone(), loader);
        node.forbid_control();
        node.set_started();
        let server = Server::start(parts.listen, Arc::new(node.clone())).await;
        let server = server.map_err(Failure::failed)?;
        let records = ModelRecords::new(parts.store.clone(), parts.keys.clone());
        for m in &models {
            reach(|| records.publish(&m.name, m.version, &m.digest, m.bytes, &m.config)).await?;
        }
        let reachable = |address: Option<SocketAddr>| match (&parts.advertise, address) {
            (Some(host), Some(address)) => format!("{host}:{}", address.port()),
            (_, address) => address_text(address),
        };
        let gpu = info.name.starts_with("cuda");
        let kind = parts.kind.unwrap_or_else(|| match gpu {
            true => info.description.replace(|c: char| !c.is_ascii_alphanumeric(), "-"),
            false => info.name.clone(),
        });
        // Weights come and go within each device's budget, so a plan may count on all of them.
        let budgets: u64 = device_group.nodes().iter().map(|node| node.budget().0).sum();
        let default_mib = if gpu { budgets >> 20 } else { 0 };
        let record = BackendRecord {
            grpc: reachable(server.grpc_addr),
            http: reachable(server.http_addr),
            device: kind.replace('/', "-"),
            memory_bytes: parts.memory_mib.unwrap_or(default_mib) << 20,
        };
        tracing::info!(
            name = parts.name,
            http = record.http,
            grpc = record.grpc,
            metrics = address_text(server.metrics_addr),
            device = devices::describe(&device_group),
            "ready"
        );
        let agent = BackendAgent {
            store: parts.store,
            keys: parts.keys,
            name: parts.name,
            lease: parts.lease,
            record,
            host: Arc::new(NodeHost(node)),
            catalog,
            clock: clock(),
        };
        let (stop, stopped) = watch::channel(false);
        let work = tokio::spawn(join(agent, stopped));
        Ok(RunningBackend { server, stop, work })
    }

    /// Leaves the cluster, then finishes what is under way.
    pub(crate) async fn shutdown(self, limit: Duration) -> bool {
        let _ = self.stop.send(true);
        let _ = tokio::time::timeout(Duration::from_secs(2), self.work).await;
        self.server.shutdown(limit).await
    }
}

async fn join(agent: BackendAgent, stopped: watch::Receiver<bool>) -> Result<(), StoreError> {
    let result = agent.run(stopped).await;
    if let Err(error) = &result {
        tracing::error!(%error, "the backend cannot follow the plan");
    }
    result
}

async fn backend(args: &BackendArgs) -> Result<(), Failure> {
    let stop = Stop::new()?;
    if args.model_repository.is_empty() && args.models.model_store.is_none() {
        return Err(Failure::usage("name a --model-repository or a --model-store"));
    }
    let address = |port| Some(SocketAddr::new(args.host, port));
    let options = NodeOptions {
        max_requests: args.max_requests as usize,
        best_effort_share_percent: args.best_effort_share,
        max_rt_slowdown_percent: args.max_rt_slowdown,
        ..NodeOptions::default()
    };
    let running = RunningBackend::start(BackendParts {
        store: open_store(&args.store)?,
        keys: Keys::new(&args.store.cluster),
        name: name_of(&args.store, "backend")?,
        lease: Duration::from_millis(args.store.lease_ms),
        repositories: &args.model_repository,
        files: open_files(&args.models)?,
        device_group: devices::open_device_group(&args.device, args.gpu_memory, &options)?,
        listen: ServerOptions {
            http: address(args.http_port),
            grpc: address(args.grpc_port),
            metrics: address(args.metrics_port),
            max_body_bytes: usize::try_from(args.max_body_mib << 20).unwrap_or(usize::MAX),
            ..ServerOptions::default()
        },
        advertise: args.advertise.clone(),
        kind: args.device_kind.clone(),
        memory_mib: args.memory_mib,
    })
    .await?;
    stop.wait().await;
    tracing::info!(in_flight = running.server.in_flight(), "stopping");
    given_up(running.shutdown(Duration::from_secs(args.exit_timeout_secs)).await)
}

/// `atoll serve --cluster`: scheduler, frontend and backend in this process, state in memory.
pub(crate) fn serve_all(args: &ServeArgs) -> Result<(), Failure> {
    if args.model_control_mode.is_some() || !args.load_model.is_empty() {
        return Err(Failure::usage(
            "--cluster loads what the plan says; load and unload over the API instead of --load-model",
        ));
    }
    if args.model_repository.is_empty() && args.data_dir.is_none() {
        return Err(Failure::usage("name a --model-repository or a --data-dir"));
    }
    let device_group =
        devices::open_device_group(&args.device, args.gpu_memory, &node_options(args))?;
    tokio_runtime()?.block_on(all_roles(args, device_group))
}

async fn all_roles(args: &ServeArgs, device_group: Arc<DeviceGroup>) -> Result<(), Failure> {
    let stop = Stop::new()?;
    let body = usize::try_from(args.max_body_mib << 20).unwrap_or(usize::MAX);
    // First of all: the backend takes any free port, which must not be one of these.
    let bound = bind(&args.listen, body).await?;
    let store = store::open("memory", clock()).map_err(Failure::failed)?;
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
        device_group,
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
    })
    .await?;
    keep_queries(&ModelRecords::new(store.clone(), keys.clone()), &args.query).await?;
    let settings = FrontendSettings {
        name: "frontend".to_string(),
        lease,
        metadata: server_metadata(),
        requests_max: args.max_requests as usize,
        timeout: REQUEST_TIMEOUT,
        files,
    };
    let service = Frontend::start(store.clone(), keys.clone(), clock(), settings).await;
    let service = service.map_err(Failure::failed)?;
    let server = bound.serve(Arc::new(service.clone())).await.map_err(Failure::failed)?;
    let record = FrontendRecord {
        grpc: address_text(server.grpc_addr),
        http: address_text(server.http_addr),
    };
    let _membership = service.join(store, &keys, &record);
    tracing::info!(http = record.http, grpc = record.grpc, "ready");
    stop.wait().await;
    let limit = Duration::from_secs(args.exit_timeout_secs);
    let done = server.shutdown(limit).await;
    given_up(backend.server.shutdown(limit).await && done)
}

async fn look(store: &dyn Store, keys: &Keys) -> Result<Status, Failure> {
    let listing = store.list(keys.all()).await.map_err(Failure::failed)?;
    let short =
        |entry: store::Entry| Some((entry.key.strip_prefix(keys.all())?.to_string(), entry.value));
    let image = listing.entries.into_iter().filter_map(short).collect();
    Ok(Status::of(&ClusterSnapshot::read(&image)))
}

async fn status(args: &StatusArgs) -> Result<(), Failure> {
    let store = open_store(&args.store)?;
    let status = look(&*store, &Keys::new(&args.store.cluster)).await?;
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&status).map_err(Failure::failed)?),
        false => print!("{}", render(&status)),
    }
    match status.leader {
        Some(_) => Ok(()),
        None => Err(Failure::failed("nobody leads the cluster")),
    }
}

async fn top(args: &TopArgs) -> Result<(), Failure> {
    let stop = Stop::new()?;
    let store = open_store(&args.store)?;
    let keys = Keys::new(&args.store.cluster);
    let show = async {
        loop {
            let text = match (look(&*store, &keys).await, args.json) {
                (Ok(status), true) => {
                    format!("{}\n", serde_json::to_string(&status).map_err(Failure::failed)?)
                }
                // Clears the screen and goes to its top.
                (Ok(status), false) => format!("\x1b[2J\x1b[H{}", render(&status)),
                (Err(_), _) => "the store cannot be reached\n".to_string(),
            };
            let mut out = std::io::stdout();
            // A reader that went away ends it.
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
