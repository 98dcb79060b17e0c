//! A registration replaces nothing before a backend has compiled and loaded it.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::error::ApiResult;
use api::{ApiError, ErrorKind, InferenceService, ModelRef, RegisterRequest, ServerMetadata};
use base::MonotonicClock;
use cluster::backend::candidates::check_candidates;
use cluster::backend::{Host, HostFuture, PoolBatch};
use cluster::candidate::{CandidateError, CandidateRecord, propose};
use cluster::frontend::{Frontend, FrontendSettings};
use cluster::model_store::{FileStore, ModelRecords, ModelStore, digest};
use cluster::record::{
    Keys, ModelRecord, PlanRecord, RecordKind, RouteRecord, TargetRecord, encode,
};
use cluster::store::{self, Store, Write};
use model::ModelConfig;
use model::store::RegistryLimits;
use tokio::sync::watch;

/// A backend that judges candidates by their digest.
struct Judge {
    checked: Mutex<Vec<String>>,
    judge: fn(&str) -> ApiResult<()>,
    /// Never answers.
    hangs: bool,
}

impl Host for Judge {
    fn load<'a>(&'a self, _: &'a str) -> HostFuture<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn unload<'a>(&'a self, _: &'a str) -> HostFuture<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn set_pool_batch(&self, _: &str, _: Option<PoolBatch>) {}

    fn marks<'a>(&'a self, _: &'a str) -> HostFuture<'a, Vec<(String, f64)>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn check<'a>(&'a self, candidate: &'a CandidateRecord) -> HostFuture<'a, ()> {
        Box::pin(async move {
            self.checked.lock().unwrap().push(candidate.digest.clone());
            match self.hangs {
                true => std::future::pending().await,
                false => (self.judge)(&candidate.digest),
            }
        })
    }

    fn service(&self) -> Arc<dyn InferenceService> {
        unreachable!("candidates are not served")
    }
}

struct Cluster {
    store: Arc<dyn Store>,
    keys: Keys,
    _stop: watch::Sender<bool>,
    stopped: watch::Receiver<bool>,
}

impl Cluster {
    fn start() -> Cluster {
        let clock = Arc::new(MonotonicClock::new());
        let store = store::open("memory", store::etcd::EtcdAccess::default(), clock).unwrap();
        let (_stop, stopped) = watch::channel(false);
        Cluster { store, keys: Keys::new("test"), _stop, stopped }
    }

    async fn backend(
        &self,
        name: &str,
        judge: fn(&str) -> ApiResult<()>,
        hangs: bool,
    ) -> Arc<Judge> {
        self.put(&self.keys.one(RecordKind::Backend, name), b"{}".to_vec()).await;
        let host = Arc::new(Judge { checked: Mutex::default(), judge, hangs });
        let (store, keys, stopped) = (self.store.clone(), self.keys.clone(), self.stopped.clone());
        tokio::spawn(check_candidates(store, keys, name.to_string(), host.clone(), stopped));
        host
    }

    async fn put(&self, key: &str, value: impl Into<bytes::Bytes>) {
        self.store.transact(vec![], vec![Write::put(key, value)]).await.unwrap();
    }

    async fn propose(&self, digest: &str, seconds: u64) -> Result<(), CandidateError> {
        self.propose_to(1, digest, seconds).await.map(|_| ())
    }

    async fn propose_to(
        &self,
        wanted: usize,
        digest: &str,
        seconds: u64,
    ) -> Result<usize, CandidateError> {
        let limit = Duration::from_secs(seconds);
        let candidate = ("m", digest, 1);
        propose(&self.store, &self.keys, candidate, &ModelConfig::default(), limit, wanted).await
    }

    async fn candidates(&self) -> usize {
        self.store.list(&self.keys.of(RecordKind::Candidate)).await.unwrap().entries.len()
    }
}

fn judge(digest: &str) -> ApiResult<()> {
    match digest {
        "good" => Ok(()),
        "odd" => Err(ApiError::unsupported("operator Odd")),
        "later" => Err(ApiError::unavailable("no memory")),
        _ => Err(ApiError::invalid("no model")),
    }
}

#[tokio::test]
async fn one_backend_judges_a_candidate() {
    let cluster = Cluster::start();
    let hosts =
        [cluster.backend("a", judge, false).await, cluster.backend("b", judge, false).await];
    assert_eq!(cluster.propose("good", 30).await, Ok(()));
    let refused = cluster.propose("bad", 30).await.unwrap_err();
    assert_eq!(refused, CandidateError::Refused("no model".to_string()));
    let refused = cluster.propose("odd", 30).await.unwrap_err();
    assert_eq!(refused, CandidateError::Unsupported("operator Odd".to_string()));
    let checks: usize = hosts.iter().map(|host| host.checked.lock().unwrap().len()).sum();
    assert_eq!(checks, 3);
    // Both try what is not the model's fault.
    let unchecked = cluster.propose("later", 30).await.unwrap_err();
    assert_eq!(unchecked, CandidateError::Unchecked("no memory".to_string()));
    let checks: usize = hosts.iter().map(|host| host.checked.lock().unwrap().len()).sum();
    assert_eq!((checks, cluster.candidates().await), (5, 0));
}

#[tokio::test]
async fn enough_backends_must_be_able_to_load_a_candidate() {
    fn without_file(_: &str) -> ApiResult<()> {
        Err(ApiError::not_found("no such file"))
    }
    let cluster = Cluster::start();
    cluster.backend("a", judge, false).await;
    cluster.backend("b", without_file, false).await;
    // Two are there, one cannot: that is known, and nobody waits for more.
    assert_eq!(cluster.propose_to(2, "good", 30).await, Ok(1));
    cluster.backend("c", judge, false).await;
    assert_eq!(cluster.propose_to(2, "good", 30).await, Ok(2));
    let refused = cluster.propose_to(2, "bad", 30).await;
    assert_eq!(refused, Err(CandidateError::Refused("no model".to_string())));
}

#[tokio::test]
async fn a_lost_backend_is_replaced_and_two_are_enough() {
    let cluster = Cluster::start();
    let lost = cluster.backend("lost", judge, true).await;
    let lose = |name: &'static str, host: Arc<Judge>| {
        let (store, key) = (cluster.store.clone(), cluster.keys.one(RecordKind::Backend, name));
        async move {
            while host.checked.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            store.delete(&key).await.unwrap();
        }
    };
    let spare = async {
        lose("lost", lost.clone()).await;
        cluster.backend("spare", judge, false).await
    };
    let (result, _) = tokio::join!(cluster.propose("good", 30), spare);
    assert_eq!(result, Ok(()));

    let cluster = Cluster::start();
    let first = cluster.backend("first", judge, true).await;
    let lose = |name: &'static str, host: Arc<Judge>| {
        let (store, key) = (cluster.store.clone(), cluster.keys.one(RecordKind::Backend, name));
        async move {
            while host.checked.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            store.delete(&key).await.unwrap();
        }
    };
    let both = async {
        lose("first", first.clone()).await;
        let second = cluster.backend("second", judge, true).await;
        lose("second", second).await;
    };
    let (result, ()) = tokio::join!(cluster.propose("deadly", 30), both);
    assert!(matches!(result, Err(CandidateError::Refused(_))), "{result:?}");
}

#[tokio::test]
async fn without_backends_a_candidate_is_given_up_and_removed() {
    let cluster = Cluster::start();
    let result = cluster.propose("good", 1).await;
    assert!(matches!(result, Err(CandidateError::Unchecked(_))), "{result:?}");
    assert_eq!(cluster.candidates().await, 0);
}

async fn frontend(cluster: &Cluster, folder: &Path) -> Frontend {
    frontend_with(cluster, folder, RegistryLimits::default()).await
}

async fn frontend_with(cluster: &Cluster, folder: &Path, limits: RegistryLimits) -> Frontend {
    let settings = FrontendSettings {
        name: "frontend".to_string(),
        lease: Duration::from_secs(5),
        metadata: ServerMetadata {
            name: String::new(),
            version: String::new(),
            extensions: Vec::new(),
        },
        requests_max: 10,
        timeout: Duration::from_secs(5),
        files: Some(ModelStore::Folder(FileStore::open(folder).unwrap())),
        backend_tls: None,
        saved: None,
        cold_start: Default::default(),
        limits,
        memory: Default::default(),
    };
    let clock = Arc::new(MonotonicClock::new());
    Frontend::start(cluster.store.clone(), cluster.keys.clone(), clock, settings).await.unwrap()
}

fn registration(onnx: &'static [u8]) -> RegisterRequest {
    RegisterRequest {
        name: "m".to_string(),
        onnx: bytes::Bytes::from_static(onnx),
        labels: Vec::new(),
        preprocessing: None,
        class: None,
        slo_ms: None,
        settings: None,
        canary: None,
    }
}

impl Cluster {
    async fn record(&self) -> Option<ModelRecord> {
        let records = ModelRecords::new(self.store.clone(), self.keys.clone());
        records.find("m").await.unwrap()
    }

    /// What the scheduler publishes when a backend serves `version`.
    async fn route(&self, version: u64) {
        let target = TargetRecord {
            backend: "a".to_string(),
            grpc: "127.0.0.1:1".to_string(),
            http: "127.0.0.1:2".to_string(),
            weight: 1.0,
            batch: 1,
            batch_ms: 0.0,
            cycle_ms: 0.0,
            min_batch: 0,
            version,
        };
        let route = RouteRecord { epoch: 1, targets: vec![target], rate_max: None };
        self.put(&self.keys.one(RecordKind::Route, "m"), encode(&route)).await;
    }

    async fn plan_failed(&self, version: u64) {
        let plan = PlanRecord {
            failed: [("m".to_string(), "broken".to_string())].into(),
            failed_versions: [("m".to_string(), version)].into(),
            ..PlanRecord::default()
        };
        self.put(&self.keys.plan(), encode(&plan)).await;
    }
}

#[tokio::test]
async fn a_registration_replaces_nothing_before_it_is_ready() {
    fn judge(name: &str) -> ApiResult<()> {
        match name == digest(b"garbage") {
            true => Err(ApiError::invalid("no model")),
            false => Ok(()),
        }
    }
    let cluster = Cluster::start();
    let folder = tempfile::tempdir().unwrap();
    let frontend = frontend(&cluster, folder.path()).await;
    cluster.backend("a", judge, false).await;
    cluster.route(1).await;
    let first = frontend.register(registration(b"one")).await.unwrap();
    assert_eq!(first.version, "1");
    let before = cluster.record().await;

    // Garbage: the backend refuses it, and the record stays.
    let error = frontend.register(registration(b"garbage")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidArgument, "{error}");
    assert!(error.message.contains("no model"), "{error}");
    assert_eq!(cluster.record().await, before);

    // It compiles, but no backend can put it in service: the record is restored.
    cluster.plan_failed(2).await;
    let error = frontend.register(registration(b"two")).await.unwrap_err();
    assert!(error.message.contains("broken"), "{error}");
    assert_eq!(cluster.record().await, before);

    // That an older version is served is not enough, that an older one failed does not count.
    cluster.plan_failed(1).await;
    let register = frontend.register(registration(b"three"));
    let route = async {
        while cluster.record().await == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        let routed = std::time::Instant::now();
        cluster.route(2).await;
        routed
    };
    let (result, routed) =
        tokio::join!(async { (register.await, std::time::Instant::now()) }, route);
    assert_eq!(result.0.unwrap().version, "2");
    assert!(result.1 >= routed, "ready before a backend served it");

    // A deleted model is gone at once for this frontend.
    let delete = |version| frontend.delete_model(ModelRef { name: "m", version });
    assert_eq!(delete(Some(3)).await.unwrap_err().kind, ErrorKind::NotFound);
    assert_eq!(delete(Some(1)).await, Ok(1));
    assert_eq!(delete(Some(1)).await.unwrap_err().kind, ErrorKind::NotFound);
    assert_eq!(delete(Some(2)).await, Ok(1));
    assert_eq!(cluster.record().await, None);
    assert_eq!(delete(None).await.unwrap_err().kind, ErrorKind::NotFound);
}

fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("sha256")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test]
async fn files_go_with_the_last_record_that_needs_them() {
    fn judge(name: &str) -> ApiResult<()> {
        match name == digest(b"garbage") {
            true => Err(ApiError::invalid("no model")),
            false => Ok(()),
        }
    }
    let cluster = Cluster::start();
    let folder = tempfile::tempdir().unwrap();
    let frontend = frontend(&cluster, folder.path()).await;
    cluster.backend("a", judge, false).await;
    // What is refused leaves nothing.
    assert!(frontend.register(registration(b"garbage")).await.is_err());
    assert_eq!(files(folder.path()), [""; 0]);
    cluster.route(1).await;
    frontend.register(registration(b"one")).await.unwrap();
    assert_eq!(files(folder.path()), [digest(b"one")]);
    // Another model has the same content.
    let records = ModelRecords::new(cluster.store.clone(), cluster.keys.clone());
    records.register("n", &digest(b"one"), 3, &ModelConfig::default()).await.unwrap();
    let m = ModelRef { name: "m", version: None };
    assert_eq!(frontend.delete_model(m).await, Ok(1));
    assert_eq!(files(folder.path()), [digest(b"one")]);
    records.delete("n", None).await.unwrap();
    cluster.route(2).await;
    frontend.register(registration(b"one")).await.unwrap();
    assert_eq!(frontend.delete_model(m).await, Ok(1));
    assert_eq!(files(folder.path()), [""; 0]);
    // A file that an operator has put there stays.
    FileStore::open(folder.path()).unwrap().put(b"mine").unwrap();
    cluster.route(3).await;
    frontend.register(registration(b"mine")).await.unwrap();
    assert_eq!(frontend.delete_model(m).await, Ok(1));
    assert_eq!(files(folder.path()), [digest(b"mine")]);
}

#[tokio::test]
async fn quotas_hold_for_what_frontends_register() {
    let cluster = Cluster::start();
    let folder = tempfile::tempdir().unwrap();
    let limits =
        RegistryLimits { max_names: 1, max_bytes: 100, max_name_bytes: 10, ..Default::default() };
    let frontend = frontend_with(&cluster, folder.path(), limits).await;
    cluster.backend("a", |_| Ok(()), false).await;
    cluster.route(1).await;
    frontend.register(registration(b"12345678")).await.unwrap();
    let before = cluster.record().await;
    let other = RegisterRequest { name: "n".to_string(), ..registration(b"1") };
    for (request, flag) in [
        (other, "--registry-max-models"),
        (registration(b"123"), "--registry-max-model-size"),
        (registration(&[7; 101]), "--registry-max-model-size"),
    ] {
        let error = frontend.register(request).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::TooLarge, "{error}");
        assert!(error.message.contains(flag), "{error}");
    }
    assert_eq!(cluster.record().await, before);
    assert_eq!(files(folder.path()), [digest(b"12345678")]);
}
