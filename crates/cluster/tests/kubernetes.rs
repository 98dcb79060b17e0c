//! The Kubernetes client against a server that replays recorded replies and checks every request.
#![allow(missing_docs)]

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::MonotonicClock;
use bytes::Bytes;
use cluster::record::{
    BackendRecord, Keys, LoadReport, ModelLoad, ModelRecord, ProfileRecord, RecordKind,
    ScalingRecord, encode, profile_name,
};
use cluster::scaling::driver::Scaling;
use cluster::scaling::kubernetes::{ClientConfig, KubernetesTarget};
use cluster::scaling::scaler::ScalingSettings;
use cluster::scaling::target::{ScaleError, ScaleTarget};
use cluster::scheduler::SchedulerSettings;
use cluster::scheduler::agent::SchedulerAgent;
use cluster::scheduler::maintenance::MaintenanceSettings;
use cluster::store::etcd::EtcdAccess;
use cluster::store::{self, Store};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use serde_json::{Value, json};
use tokio::sync::watch;

const SCALE: &str = "/apis/apps/v1/namespaces/atoll/deployments/atoll-backend/scale";
const PODS: &str = "/api/v1/namespaces/atoll/pods?labelSelector=\
    app.kubernetes.io%2Fcomponent%3Dbackend%2Capp.kubernetes.io%2Fname%3Datoll&limit=500";
const POD: &str = "/api/v1/namespaces/atoll/pods/atoll-backend-6d4cf56db6-2xkqz?fieldManager=atoll";

macro_rules! fixture {
    ($name:literal) => {
        include_str!(concat!("kubernetes/", $name, ".json"))
    };
}

/// A request as received.
#[derive(Clone, Debug, PartialEq)]
struct ReceivedRequest {
    method: String,
    path: String,
    kind: String,
    bearer: String,
    accepts: String,
    body: Value,
}

/// The replies: one per request in order, or by method and path.
enum Replies {
    InOrder(VecDeque<(u16, &'static str)>),
    ByPath(fn(&str, &str) -> (u16, &'static str)),
    Never,
}

/// A server, and the requests it received.
struct Replay {
    address: String,
    received: Arc<Mutex<Vec<ReceivedRequest>>>,
    _task: tokio::task::JoinSet<()>,
}

impl Replay {
    async fn start(replies: Replies) -> Replay {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let received = Arc::new(Mutex::new(Vec::new()));
        let replies = Arc::new(Mutex::new(replies));
        let mut task = tokio::task::JoinSet::new();
        let log = received.clone();
        task.spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (log, replies) = (log.clone(), replies.clone());
                let service = hyper::service::service_fn(move |request| {
                    reply(request, log.clone(), replies.clone())
                });
                connections.spawn(async move {
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Replay { address, received, _task: task }
    }

    fn target(&self, workload: &str) -> KubernetesTarget {
        target("http", &self.address, workload)
    }

    fn received(&self) -> Vec<ReceivedRequest> {
        let received = self.received.lock().unwrap().clone();
        for request in &received {
            assert_eq!(request.bearer, "Bearer secret-token", "{request:?}");
        }
        received
    }

    fn methods(&self) -> Vec<(String, String)> {
        self.received().into_iter().map(|received| (received.method, received.path)).collect()
    }

    fn patches(&self) -> Vec<Value> {
        let received = self.received().into_iter();
        received
            .filter(|a| a.method == "PATCH" && a.path.contains("/scale"))
            .map(|a| a.body)
            .collect()
    }
}

/// A client of a kubeconfig with a token.
fn target(scheme: &str, address: &str, workload: &str) -> KubernetesTarget {
    let document = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": format!("{scheme}://{address}")}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "atoll"}}],
    });
    let config = ClientConfig::from_kubeconfig(&document.to_string()).unwrap();
    KubernetesTarget::open(config, workload.parse().unwrap(), None).unwrap()
}

async fn reply(
    request: Request<Incoming>,
    log: Arc<Mutex<Vec<ReceivedRequest>>>,
    replies: Arc<Mutex<Replies>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let header = |name: &str| {
        let value = request.headers().get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_string()
    };
    let mut received = ReceivedRequest {
        method: request.method().to_string(),
        path: request.uri().to_string(),
        kind: header("content-type"),
        bearer: header("authorization"),
        accepts: header("accept"),
        body: Value::Null,
    };
    let body = request.into_body().collect().await.unwrap().to_bytes();
    if !body.is_empty() {
        received.body = serde_json::from_slice(&body).unwrap();
    }
    let (method, path) = (received.method.clone(), received.path.clone());
    log.lock().unwrap().push(received);
    let reply = match &mut *replies.lock().unwrap() {
        Replies::InOrder(queue) => Some(queue.pop_front().unwrap_or((500, "{}"))),
        Replies::ByPath(find) => Some(find(&method, &path)),
        Replies::Never => None,
    };
    let Some((status, text)) = reply else { return std::future::pending().await };
    let reply = Response::builder().status(status).header("content-type", "application/json");
    Ok(reply.body(Full::new(Bytes::from_static(text.as_bytes()))).unwrap())
}

async fn replay(replies: &[(u16, &'static str)]) -> Replay {
    Replay::start(Replies::InOrder(replies.iter().copied().collect())).await
}

fn get(path: &str) -> (String, String) {
    ("GET".to_string(), path.to_string())
}

#[tokio::test]
async fn reads_scale_and_pods_of_a_deployment() {
    let server = replay(&[(200, fixture!("scale")), (200, fixture!("pods_mixed"))]).await;
    let scale = server.target("deployment/atoll-backend").read().await.unwrap();
    assert_eq!((scale.replicas, scale.version.as_str()), (3, "481290"));
    let seen: Vec<(&str, bool, bool, bool)> = scale
        .members
        .iter()
        .map(|pod| (&pod.name[pod.name.len() - 5..], pod.ready, pod.ending, pod.marked))
        .collect();
    // A pod that failed is no replica.
    let wanted = [
        ("2xkqz", true, false, true),
        ("9t7vw", false, false, false),
        ("lm4c8", true, true, false),
    ];
    assert_eq!(seen, wanted);
    assert_eq!(server.methods(), [get(SCALE), get(PODS)]);
}

#[tokio::test]
async fn lists_pods_in_pages() {
    let replies = [
        (200, fixture!("scale")),
        (200, fixture!("pods_first_page")),
        (200, fixture!("pods_last_page")),
    ];
    let server = replay(&replies).await;
    let scale = server.target("deployment/atoll-backend").read().await.unwrap();
    assert_eq!(scale.members.len(), 3);
    let next = format!("{PODS}&continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6NDgxMzAxfQ");
    assert_eq!(server.methods(), [get(SCALE), get(PODS), get(&next)]);
}

#[tokio::test]
async fn writes_replicas_conditionally() {
    let server = replay(&[(200, fixture!("scale_patched")), (409, fixture!("conflict"))]).await;
    let target = server.target("deployment/atoll-backend");
    target.write("481290", 5).await.unwrap();
    let again = target.write("481290", 6).await.unwrap_err();
    assert!(matches!(again, ScaleError::Conflict(_)), "{again}");
    let received = server.received();
    assert_eq!(received.len(), 2, "a conflict is not retried");
    let path = format!("{SCALE}?fieldManager=atoll");
    assert_eq!((received[0].method.as_str(), received[0].path.as_str()), ("PATCH", path.as_str()));
    assert_eq!(received[0].kind, "application/merge-patch+json");
    let body = json!({"metadata": {"resourceVersion": "481290"}, "spec": {"replicas": 5}});
    assert_eq!(received[0].body, body);
}

#[tokio::test]
async fn statefulset_has_its_own_path_and_no_marks() {
    let replies = [
        (200, fixture!("scale_of_statefulset")),
        (200, fixture!("pods_of_statefulset")),
        (200, fixture!("scale_patched")),
    ];
    let server = replay(&replies).await;
    let target = server.target("statefulset/atoll-backend");
    let scale = target.read().await.unwrap();
    let ordinals: Vec<u64> = scale.members.iter().map(|pod| pod.ordinal).collect();
    assert_eq!(ordinals, [0, 1, 10]);
    target.mark("atoll-backend-10", true).await.unwrap();
    target.write(&scale.version, 2).await.unwrap();
    let methods = server.methods();
    let path = "/apis/apps/v1/namespaces/atoll/statefulsets/atoll-backend/scale";
    assert_eq!(methods[0], get(path));
    assert_eq!(methods[2].0, "PATCH");
    assert_eq!(methods.len(), 3);
}

#[tokio::test]
async fn marks_pods_by_deletion_cost() {
    let replies = [
        (200, fixture!("pod_metadata")),
        (200, fixture!("pod_metadata")),
        (404, fixture!("not_found")),
    ];
    let server = replay(&replies).await;
    let target = server.target("deployment/atoll-backend");
    let pod = "atoll-backend-6d4cf56db6-2xkqz";
    target.mark(pod, true).await.unwrap();
    target.mark(pod, false).await.unwrap();
    // A pod that is gone needs no mark.
    target.mark(pod, true).await.unwrap();
    let received = server.received();
    let annotation = |cost: Value| json!({"controller.kubernetes.io/pod-deletion-cost": cost});
    assert_eq!((received[0].method.as_str(), received[0].path.as_str()), ("PATCH", POD));
    assert_eq!(received[0].kind, "application/merge-patch+json");
    assert!(received[0].accepts.contains("PartialObjectMetadata"), "{}", received[0].accepts);
    let sent = |received: &ReceivedRequest| received.body["metadata"]["annotations"].clone();
    assert_eq!(sent(&received[0]), annotation(json!("-1000")));
    assert_eq!(sent(&received[1]), annotation(Value::Null));
}

/// A TLS server that requires a client certificate.
async fn start_tls() -> (String, tokio::task::JoinSet<()>) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let pem = |text: &str| CertificateDer::from_pem_slice(text.as_bytes()).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(pem(include_str!("kubernetes/tls/ca.pem"))).unwrap();
    let clients = WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
    let key = include_str!("kubernetes/tls/server.key").as_bytes();
    let config = rustls::ServerConfig::builder()
        .with_client_cert_verifier(clients)
        .with_single_cert(
            vec![pem(include_str!("kubernetes/tls/server.pem"))],
            PrivateKeyDer::from_pem_slice(key).unwrap(),
        )
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut task = tokio::task::JoinSet::new();
    task.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(stream) = acceptor.accept(stream).await else { continue };
            let service = hyper::service::service_fn(async |request: Request<Incoming>| {
                let body = match request.uri().path().ends_with("/scale") {
                    true => fixture!("scale"),
                    false => fixture!("pods"),
                };
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(body.as_bytes()))))
            });
            let http = hyper::server::conn::http1::Builder::new();
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
        }
    });
    (address, task)
}

#[tokio::test]
async fn both_sides_check_certificates() {
    let (address, _task) = start_tls().await;
    let files = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kubernetes/tls");
    let read = async |cluster: &str, user: &str| {
        let text = format!(
            "current-context: c
clusters:
- name: c
  cluster:
    server: https://{address}
    {cluster}
contexts:
- name: c
  context: {{cluster: c, user: u}}
users:
- name: u
  user:
    {user}
"
        );
        let config = ClientConfig::from_kubeconfig(&text).unwrap();
        let target = KubernetesTarget::open(config, "deploy/d".parse().unwrap(), None).unwrap();
        target.read().await
    };
    let authority = format!("certificate-authority: {files}/ca.pem");
    let identity =
        format!("client-certificate: {files}/client.pem\n    client-key: {files}/client.key");
    assert_eq!(read(&authority, &identity).await.unwrap().replicas, 3);
    let no_identity = read(&authority, "token: t").await.unwrap_err();
    assert!(matches!(no_identity, ScaleError::Unreachable(_)), "{no_identity}");
    let no_authority = read("", &identity).await.unwrap_err();
    assert!(no_authority.to_string().contains("certificate"), "{no_authority}");
    let unchecked = read("insecure-skip-tls-verify: true", &identity).await.unwrap();
    assert_eq!(unchecked.replicas, 3);
}

#[tokio::test]
async fn failures_carry_advice() {
    let cases: [(u16, &'static str, &str, &str); 5] = [
        (403, fixture!("forbidden"), "not allowed", "role"),
        (401, fixture!("unauthorized"), "not allowed", "service account"),
        (404, fixture!("not_found"), "not found", "--kubernetes-scale"),
        (409, fixture!("conflict"), "changed concurrently", "autoscaler"),
        (503, "upstream connect error", "not reachable", "API server"),
    ];
    for (status, reply, kind, advice) in cases {
        let server = replay(&[(status, reply)]).await;
        let error = server.target("deployment/atoll-backend").read().await.unwrap_err();
        assert!(error.to_string().starts_with(kind), "{status}: {error}");
        assert!(error.advice().contains(advice), "{status}: {}", error.advice());
    }
    let nobody = Replay::start(Replies::Never).await;
    let address = nobody.address.clone();
    drop(nobody);
    for scheme in ["http", "https"] {
        let target = target(scheme, &address, "deployment/atoll-backend");
        let error = target.read().await.unwrap_err();
        assert!(matches!(error, ScaleError::Unreachable(_)), "{scheme}: {error}");
    }
}

/// A cluster with the backends of the recorded pods, under `rate` requests per second.
async fn cluster(store: &Arc<dyn Store>, keys: &Keys, rate: f64) {
    let put =
        |key: String, value: Bytes| async move { store.put(&key, value, None).await.unwrap() };
    for name in ["2xkqz", "9t7vw", "lm4c8"] {
        let record = BackendRecord { device: "gpu".to_string(), ..BackendRecord::default() };
        let name = format!("atoll-backend-6d4cf56db6-{name}");
        put(keys.one(RecordKind::Backend, &name), encode(&record)).await;
    }
    let config = model::ModelConfig { timeout_ms: Some(100), ..Default::default() };
    let record = ModelRecord {
        version: 1,
        digest: "d".to_string(),
        bytes: 1,
        enabled: true,
        config,
        ..ModelRecord::default()
    };
    put(keys.one(RecordKind::Model, "m"), encode(&record)).await;
    let profile = ProfileRecord { curve: vec![(1, 5.0), (16, 20.0)], ..ProfileRecord::default() };
    put(keys.one(RecordKind::Profile, &profile_name("gpu", "d")), encode(&profile)).await;
    let load = ModelLoad { fast: rate, slow: rate, window: 2.0, ..ModelLoad::default() };
    let models = [("m".to_string(), load)].into();
    let report = LoadReport { models, ..LoadReport::default() };
    put(keys.one(RecordKind::Load, "f"), encode(&report)).await;
}

fn agent(store: &Arc<dyn Store>, keys: &Keys, name: &str, server: &Replay) -> SchedulerAgent {
    let target = server.target("deployment/atoll-backend");
    let settings = ScalingSettings { replicas_max: 9, ..ScalingSettings::default() };
    let poll = Duration::from_millis(50);
    SchedulerAgent {
        store: store.clone(),
        keys: keys.clone(),
        name: name.to_string(),
        lease: Duration::from_secs(60),
        settings: SchedulerSettings::default(),
        scaling: Some(Scaling { poll, ..Scaling::new(Arc::new(target), settings) }),
        maintenance: MaintenanceSettings::default(),
        state: Arc::default(),
        clock: Arc::new(MonotonicClock::new()),
    }
}

fn by_path(method: &str, path: &str) -> (u16, &'static str) {
    match (method, path.contains("/scale")) {
        ("GET", true) => (200, fixture!("scale")),
        ("PATCH", true) => (200, fixture!("scale_patched")),
        _ => (200, fixture!("pods")),
    }
}

/// Waits until `holds`, with a generous limit.
async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    for _ in 0..2400 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("{what}");
}

async fn record(store: &Arc<dyn Store>, keys: &Keys) -> Option<ScalingRecord> {
    let entry = store.get(&keys.scaling()).await.unwrap()?;
    serde_json::from_slice(&entry.value).ok()
}

#[tokio::test]
async fn only_the_leader_scales() {
    let store =
        store::open("memory", EtcdAccess::default(), Arc::new(MonotonicClock::new())).unwrap();
    let keys = Keys::new("test");
    // A machine serves 720 requests per second within the SLO: 5 are needed with the headroom, and
    // 3 are requested.
    cluster(&store, &keys, 2800.0).await;
    let (first, second) = (
        Replay::start(Replies::ByPath(by_path)).await,
        Replay::start(Replies::ByPath(by_path)).await,
    );
    let (stop_first, stopped) = watch::channel(false);
    let leads = tokio::spawn(agent(&store, &keys, "s1", &first).run(stopped));
    eventually("the leader scales", async || !first.patches().is_empty()).await;
    let (_stop_second, stopped) = watch::channel(false);
    let waits = tokio::spawn(agent(&store, &keys, "s2", &second).run(stopped));
    eventually("the record is kept", async || {
        record(&store, &keys).await.is_some_and(|record| record.wanted > 3)
    })
    .await;
    let kept = record(&store, &keys).await.unwrap();
    assert_eq!(
        (kept.target.as_str(), kept.present, kept.errors),
        ("deployment/atoll-backend", 3, 0)
    );
    assert!(kept.wanted > 3 && kept.wanted <= 9, "{kept:?}");
    let patch = json!({
        "metadata": {"resourceVersion": "481290"},
        "spec": {"replicas": kept.wanted.min(3 + 4)},
    });
    assert_eq!(first.patches(), std::slice::from_ref(&patch), "one change, then a pause");
    assert!(
        second.received().is_empty(),
        "a scheduler that waits sends nothing: {:?}",
        second.methods()
    );
    stop_first.send(true).unwrap();
    leads.await.unwrap().unwrap();
    eventually("the next leader scales", async || !second.patches().is_empty()).await;
    assert_eq!(second.patches()[0], patch);
    waits.abort();
}

#[tokio::test]
async fn reports_denied_access_and_keeps_planning() {
    let store =
        store::open("memory", EtcdAccess::default(), Arc::new(MonotonicClock::new())).unwrap();
    let keys = Keys::new("test");
    cluster(&store, &keys, 2800.0).await;
    let server = Replay::start(Replies::ByPath(|method, path| match method {
        "PATCH" => (403, fixture!("forbidden")),
        _ => by_path(method, path),
    }))
    .await;
    let (_stop, stopped) = watch::channel(false);
    let work = tokio::spawn(agent(&store, &keys, "s1", &server).run(stopped));
    eventually("the failure is kept", async || {
        record(&store, &keys).await.is_some_and(|record| record.errors >= 2)
    })
    .await;
    let kept = record(&store, &keys).await.unwrap();
    let error = kept.error.unwrap();
    assert!(error.contains("deployments/scale") && error.contains("role"), "{error}");
    let plan = store.get(&keys.plan()).await.unwrap();
    assert!(plan.is_some(), "there is a plan all the same");
    work.abort();
}

#[tokio::test]
async fn planning_continues_while_the_api_server_hangs() {
    let store =
        store::open("memory", EtcdAccess::default(), Arc::new(MonotonicClock::new())).unwrap();
    let keys = Keys::new("test");
    cluster(&store, &keys, 10.0).await;
    let server = Replay::start(Replies::Never).await;
    let (_stop, stopped) = watch::channel(false);
    let work = tokio::spawn(agent(&store, &keys, "s1", &server).run(stopped));
    let epoch = async || -> u64 {
        let Some(entry) = store.get(&keys.plan()).await.unwrap() else { return 0 };
        let plan: Value = serde_json::from_slice(&entry.value).unwrap();
        plan["epoch"].as_u64().unwrap()
    };
    eventually("the server gets a request", async || !server.received().is_empty()).await;
    eventually("a first plan", async || epoch().await >= 1).await;
    // While the server does not reply, a backend is lost and the plan follows.
    let lost = keys.one(RecordKind::Backend, "atoll-backend-6d4cf56db6-2xkqz");
    let before = epoch().await;
    store.delete(&lost).await.unwrap();
    eventually("the next plan", async || epoch().await > before).await;
    work.abort();
}
