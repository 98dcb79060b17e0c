//! A cluster's backend: a server whose models follow the plan.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use api::{ApiError, InferenceService, RegisterRequest, ServerMetadata};
use base::MonotonicClock;
use cluster::backend::version_offer::FolderVersion;
use cluster::backend::{BackendAgent, Host, HostFuture, ModelCatalog, PoolBatch};
use cluster::candidate::CandidateRecord;
use cluster::model_store::{ModelRecords, ModelStore, ModelStoreError, digest};
use cluster::record::canary::split_served;
use cluster::record::{BackendRecord, Keys, VersionRecord, validation};
use cluster::state_file::StateFile;
use cluster::store::{Store, StoreError, health};
use model::repository::Repository;
use model::store::{LoadMarkers, LoadStage, MarkedModel};
use runtime::DeviceGroup;
use server::node::EXTENSIONS;
use server::{
    BoundServer, LoadError, LoadedModel, LocalNode, ModelLoader, RepositoryEntry, RunningServer,
    Server, ServerError, ServerOptions,
};
use tokio::sync::watch;

use crate::device_group;
use crate::disk_loader::load_file;
use crate::failure::Failure;
use crate::load_checks::LoadChecks;
use crate::model_check::ModelChecker;

/// Pause before an unreachable store is tried again at the start.
const RETRY: Duration = Duration::from_millis(500);

/// Time after which a frontend cancels a request without a deadline.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// A clock for the parts of one process.
pub fn clock() -> Arc<MonotonicClock> {
    Arc::new(MonotonicClock::new())
}

/// Retries `request` until the store can be reached.
///
/// # Errors
/// When the store refuses it.
pub async fn retry_until_reached<T, F>(request: impl Fn() -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<T, StoreError>>,
{
    loop {
        match request().await {
            Ok(value) => return Ok(value),
            Err(error) if error.is_transient() => {
                tracing::debug!(%error, "store not ready, retrying");
                tokio::time::sleep(RETRY).await;
            }
            Err(error) => return Err(Failure::failed(error)),
        }
    }
}

/// Name, version and extensions that a frontend reports.
pub fn server_metadata() -> ServerMetadata {
    ServerMetadata {
        name: "atoll".to_string(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        extensions: EXTENSIONS.map(str::to_string).to_vec(),
    }
}

/// Loads models by digest, from this machine's repositories and from the cluster's model store.
struct ClusterLoader {
    device_group: Arc<DeviceGroup>,
    catalog: ModelCatalog,
    store: Arc<dyn Store>,
    files: Option<ModelStore>,
    /// Files of the repositories, by digest.
    repositories: HashMap<String, PathBuf>,
    /// Threads on which a model store's network is used.
    threads: tokio::runtime::Handle,
    /// Checks candidates in a process of their own, and quarantines models that ended this one.
    checks: LoadChecks,
}

/// A version of a model as marks name it, whether it is a canary or in force; version 0 is a
/// candidate.
fn marked(served: &str, version: u64, digest: &str) -> MarkedModel {
    let name = split_served(served).0.to_string();
    MarkedModel { name, version, content: digest.to_string() }
}

impl ClusterLoader {
    /// The file with a model's content. Loads run on threads of their own, so this may block.
    fn file(&self, digest: &str, bytes: u64) -> Result<PathBuf, LoadError> {
        if let Some(path) = self.repositories.get(digest) {
            return Ok(path.clone());
        }
        let files = self.files.as_ref().ok_or_else(|| {
            LoadError::NotFound(format!(
                "no --model-repository of this backend has {digest}, and it has no --model-store"
            ))
        })?;
        let fetched = self.threads.block_on(files.fetch(digest, bytes));
        fetched.map_err(|error| match error {
            ModelStoreError::Missing(why) => LoadError::NotFound(format!(
                "no --model-repository of this backend has it, and {why}"
            )),
            ModelStoreError::Damaged(why) => LoadError::Invalid(why),
            ModelStoreError::Unavailable(why) => LoadError::Unavailable(why),
        })
    }

    /// The file with the content of this digest, and the content, verified.
    fn read(&self, expected: &str, bytes: u64) -> Result<(PathBuf, Vec<u8>), LoadError> {
        let path = self.file(expected, bytes)?;
        let content = std::fs::read(&path).map_err(|err| LoadError::Internal(err.to_string()))?;
        if digest(&content) == expected {
            return Ok((path, content));
        }
        if let Some(files) = &self.files {
            files.discard(expected);
        }
        Err(LoadError::Invalid(format!("{} is no longer what was registered", path.display())))
    }

    /// Compiles and loads a candidate, first where it can do no harm.
    fn check_candidate(&self, candidate: &CandidateRecord) -> Result<(), LoadError> {
        let (path, content) = self.read(&candidate.digest, candidate.bytes)?;
        if let Some(checker) = &self.checks.checker {
            checker.check(&content, &candidate.config, &AtomicBool::new(false))?;
        }
        let model = marked(&candidate.model, 0, &candidate.digest);
        let running = AtomicBool::new(false);
        let read = || Ok(content.clone());
        let _mark = self.checks.admit(&model, &candidate.config, false, read, &running)?;
        drop(content);
        let placed = load_file(&self.device_group, &path, &running)?;
        match self.device_group.cannot_fit(&placed) {
            Some(why) => Err(LoadError::Unavailable(format!("its weights do not fit: {why}"))),
            None => Ok(()),
        }
    }
}

impl ModelLoader for ClusterLoader {
    fn load(
        &self,
        name: &str,
        _: Option<u64>,
        cancelled: &AtomicBool,
    ) -> Result<LoadedModel, LoadError> {
        let unknown = || LoadError::NotFound(format!("the cluster has no model '{name}'"));
        let record = self.catalog.find(name).ok_or_else(unknown)?;
        let (path, content) = self.read(&record.digest, record.bytes)?;
        let model = marked(name, record.version, &record.digest);
        // It was checked when it was a candidate, or its repository is trusted.
        let read = || Ok(content.clone());
        let _mark = self.checks.admit(&model, &record.config, false, read, cancelled)?;
        drop(content);
        let placed = load_file(&self.device_group, &path, cancelled)?;
        Ok(LoadedModel { placed, config: record.config, version: record.version })
    }

    fn write_metrics(&self, text: &mut String) {
        health::write_metrics(text, &*self.store);
        validation::write_metrics(text);
    }

    fn index(&self) -> Result<Vec<RepositoryEntry>, LoadError> {
        let models = self.catalog.all().into_iter();
        Ok(models.map(|(name, m)| RepositoryEntry { name, version: m.version }).collect())
    }

    fn register(&self, _: RegisterRequest) -> Result<u64, LoadError> {
        Err(LoadError::Unavailable("register models at a frontend of the cluster".to_string()))
    }

    fn begin_measuring(&self, name: &str, version: u64) -> Option<Box<dyn Send>> {
        let record = self.catalog.find(name).filter(|record| record.version == version)?;
        let model = marked(name, version, &record.digest);
        Some(Box::new(self.checks.begin(&model, LoadStage::Measure)?))
    }
}

/// Lets the backend's agent control the node.
struct NodeHost {
    node: LocalNode,
    loader: Arc<ClusterLoader>,
}

impl Host for NodeHost {
    fn load<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()> {
        Box::pin(async move { self.node.load_model(model).await.map(|_| ()) })
    }

    fn unload<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()> {
        Box::pin(self.node.unload_model(model))
    }

    fn set_pool_batch(&self, model: &str, batch: Option<PoolBatch>) {
        let turn = batch
            .map(|batch| runtime::batching::StaggeredBatch { batch: batch.max, least: batch.min });
        self.node.set_staggered_batch(model, turn);
    }

    fn marks<'a>(&'a self, model: &'a str) -> HostFuture<'a, Vec<(String, f64)>> {
        Box::pin(self.node.marks(model))
    }

    fn check<'a>(&'a self, candidate: &'a CandidateRecord) -> HostFuture<'a, ()> {
        Box::pin(async move {
            let (loader, candidate) = (self.loader.clone(), candidate.clone());
            let checked = tokio::task::spawn_blocking(move || loader.check_candidate(&candidate));
            match checked.await {
                Ok(result) => result.map_err(ApiError::from),
                Err(_) => Err(ApiError::invalid("the model makes the compiler fail")),
            }
        })
    }

    fn begin_measuring(&self, model: &str, version: u64) -> Option<Box<dyn Send>> {
        self.loader.begin_measuring(model, version)
    }

    fn service(&self) -> Arc<dyn InferenceService> {
        Arc::new(self.node.clone())
    }
}

/// The models of a backend's folders.
#[derive(Default)]
struct FolderModels {
    /// The newest version of each.
    newest: BTreeMap<String, VersionRecord>,
    /// Files of all versions, by digest.
    files: HashMap<String, PathBuf>,
}

/// Every version of every model in `repositories`. Logs and skips those that cannot be read.
fn find_models(repositories: &[PathBuf]) -> Result<FolderModels, Failure> {
    let mut found = FolderModels::default();
    for path in repositories {
        let repository = Repository::open(path).map_err(Failure::usage)?;
        for entry in repository.list().map_err(Failure::usage)? {
            let read = std::fs::read(&entry.path).map_err(|err| err.to_string());
            let config = entry.config().map_err(|err| err.to_string());
            match (read, config) {
                (Ok(bytes), Ok(config)) => {
                    let digest = digest(&bytes);
                    found.files.insert(digest.clone(), entry.path);
                    let (version, bytes) = (entry.version, bytes.len() as u64);
                    let before = found.newest.get(&entry.name).map_or(0, |found| found.version);
                    if version > before {
                        let record = VersionRecord { version, digest, bytes, config };
                        found.newest.insert(entry.name, record);
                    }
                }
                (Err(why), _) | (_, Err(why)) => {
                    tracing::warn!(model = entry.name, why, "model skipped");
                }
            }
        }
    }
    Ok(found)
}

/// Publishes the models of this backend's folders that the cluster does not have. Returns those of
/// which it has an older version: they are offered once the backend has joined. Their files go to
/// the model store, where there is one, so that other backends can load them.
async fn publish_models(
    records: &ModelRecords,
    models: &FolderModels,
    files: Option<&ModelStore>,
) -> Result<Vec<FolderVersion>, Failure> {
    let mut offered = Vec::new();
    for (model, version) in &models.newest {
        if !retry_until_reached(|| records.publish(model, version, false)).await? {
            continue;
        }
        if let (Some(files), Some(path)) = (files, models.files.get(&version.digest)) {
            let stored = match std::fs::read(path) {
                Ok(bytes) => files.put(bytes.into()).await.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(why) = stored {
                tracing::warn!(model, why, "cannot store the newer version for other backends");
            }
        }
        offered.push(FolderVersion { model: model.clone(), version: version.clone() });
    }
    Ok(offered)
}

/// What a backend is made of.
pub struct BackendParts<'a> {
    /// The cluster's state.
    pub store: Arc<dyn Store>,
    /// Keys of this cluster in the store.
    pub keys: Keys,
    /// Name of the backend.
    pub name: String,
    /// Time after which a lost backend's entries expire.
    pub lease: Duration,
    /// Folders whose models the backend publishes.
    pub repositories: &'a [PathBuf],
    /// The cluster's model store.
    pub files: Option<ModelStore>,
    /// Devices that the models run on.
    pub device_group: Arc<DeviceGroup>,
    /// Addresses to listen on.
    pub listen: ServerOptions,
    /// Host under which frontends reach it, unless it is the address it listens on.
    pub advertise: Option<String>,
    /// Kind of device, unless it is the device's own name.
    pub kind: Option<String>,
    /// Memory for models that the planner counts on, unless it is the GPUs' budget.
    pub memory_mib: Option<u64>,
    /// Checks registered models in a process of their own; `None` where they are trusted.
    pub checker: Option<Arc<ModelChecker>>,
    /// Folder in which it notes what it is busy with, so that a model that ends the process is
    /// quarantined at the next start; `None` where nothing outlives the process.
    pub data_dir: Option<PathBuf>,
}

/// A backend that has joined its cluster.
pub struct RunningBackend {
    /// Its server.
    pub server: RunningServer,
    loader: Arc<ClusterLoader>,
    stop: watch::Sender<bool>,
    work: tokio::task::JoinHandle<Result<(), StoreError>>,
    publish: Option<tokio::task::JoinHandle<Result<(), Failure>>>,
}

/// Publishes the models of the folders, as soon as the store can be reached, and passes on what is
/// to be offered.
async fn publish(
    records: ModelRecords,
    models: FolderModels,
    files: Option<ModelStore>,
    offer: watch::Sender<Option<Vec<FolderVersion>>>,
) -> Result<(), Failure> {
    let offered = publish_models(&records, &models, files.as_ref()).await;
    let offered = offered.inspect_err(|error| {
        tracing::error!(why = error.message(), "cannot publish the models of the folders");
    })?;
    offer.send_replace(Some(offered));
    Ok(())
}

/// Names of the ports in the saved addresses.
const PORTS: [&str; 3] = ["http", "grpc", "metrics"];

/// Binds the addresses of `options`. Where any free port will do, it is the one of the last run if
/// that is still free: frontends know it.
async fn bind_again(
    options: ServerOptions,
    saved: Option<&StateFile>,
) -> Result<BoundServer, Failure> {
    let saved = saved.map(StateFile::read).unwrap_or_default();
    let mut again = options.clone();
    let ports = [&mut again.http, &mut again.grpc, &mut again.metrics];
    for (address, name) in ports.into_iter().zip(PORTS) {
        let port = saved.get(name).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        if let (Some(address), Some(port)) = (address, port)
            && address.port() == 0
        {
            address.set_port(port);
        }
    }
    match Server::bind(again).await {
        Err(ServerError::Bind { .. }) => Server::bind(options).await.map_err(Failure::failed),
        bound => bound.map_err(Failure::failed),
    }
}

fn save_ports(server: &RunningServer, file: Option<StateFile>) {
    let Some(file) = file else { return };
    let addresses = [server.http_addr, server.grpc_addr, server.metrics_addr];
    let port = |(name, address): (&str, Option<SocketAddr>)| {
        Some((name.to_string(), address?.port().to_string().into()))
    };
    let ports = PORTS.into_iter().zip(addresses).filter_map(port).collect();
    if let Err(error) = file.write(&ports) {
        tracing::warn!(%error, "cannot save the addresses");
    }
}

impl RunningBackend {
    /// Starts the server, publishes the repositories' models and joins the cluster.
    ///
    /// # Errors
    /// When a repository cannot be read, an address is taken or the store refuses.
    pub async fn start(parts: BackendParts<'_>) -> Result<RunningBackend, Failure> {
        let models = find_models(parts.repositories)?;
        let catalog = ModelCatalog::default();
        let loader = Arc::new(ClusterLoader {
            device_group: parts.device_group.clone(),
            catalog: catalog.clone(),
            store: parts.store.clone(),
            files: parts.files.clone(),
            repositories: models.files.clone(),
            threads: tokio::runtime::Handle::current(),
            checks: LoadChecks::new(
                parts.data_dir.as_deref().map(LoadMarkers::in_data_dir),
                parts.checker,
                false,
            ),
        });
        let device_group = parts.device_group;
        let info = device_group.node(0).device().info().clone();
        let node = LocalNode::new(device_group.clone(), loader.clone());
        node.forbid_control();
        let saved = |name| {
            let folder = parts.data_dir.as_deref()?;
            Some(StateFile::new(folder, name, parts.keys.all()))
        };
        let bound = bind_again(parts.listen, saved("addresses").as_ref()).await?;
        let server = bound.serve(Arc::new(node.clone())).await.map_err(Failure::failed)?;
        save_ports(&server, saved("addresses"));
        let saved = saved("assignment");
        let records = ModelRecords::new(parts.store.clone(), parts.keys.clone());
        let (offer, offered) = watch::channel(None);
        let publish = publish(records, models, parts.files.clone(), offer);
        let publish = match saved.as_ref().is_some_and(|file| !file.read().is_empty()) {
            // Requests may come before the store can be reached: it serves what it last had.
            true => Some(tokio::spawn(publish)),
            false => {
                publish.await?;
                None
            }
        };
        // Ready once it has joined, or is about to.
        node.set_started();
        let reachable = |address: Option<SocketAddr>| match (&parts.advertise, address) {
            (Some(host), Some(address)) => format!("{host}:{}", address.port()),
            (_, address) => address_text(address),
        };
        let gpu = info.name.starts_with("cuda");
        let kind = parts.kind.unwrap_or_else(|| match gpu {
            true => info.description.replace(|c: char| !c.is_ascii_alphanumeric(), "-"),
            false => info.name.clone(),
        });
        // Each device evicts weights to stay within its budget, so the planner may use all of it.
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
            device = device_group::describe(&device_group),
            "ready"
        );
        let agent = BackendAgent {
            store: parts.store,
            keys: parts.keys,
            name: parts.name,
            lease: parts.lease,
            record,
            host: Arc::new(NodeHost { node, loader: loader.clone() }),
            catalog,
            offered,
            clock: clock(),
            saved,
        };
        let (stop, stopped) = watch::channel(false);
        let work = tokio::spawn(run_agent(agent, stopped));
        Ok(RunningBackend { server, loader, stop, work, publish })
    }

    /// Leaves the cluster, then finishes the requests in flight; whether all of them were.
    pub async fn shutdown(self, limit: Duration) -> bool {
        let _ = self.stop.send(true);
        if let Some(publish) = &self.publish {
            publish.abort();
        }
        // What is cut off now is no model's fault.
        self.loader.checks.stop();
        let _ = tokio::time::timeout(Duration::from_secs(2), self.work).await;
        self.server.shutdown(limit).await
    }
}

async fn run_agent(agent: BackendAgent, stopped: watch::Receiver<bool>) -> Result<(), StoreError> {
    let result = agent.run(stopped).await;
    if let Err(error) = &result {
        tracing::error!(%error, "backend stopped following the plan");
    }
    result
}

/// An address for records and logs.
pub fn address_text(address: Option<SocketAddr>) -> String {
    address.map_or("off".to_string(), |address| address.to_string())
}
