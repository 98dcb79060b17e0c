//! Settings that change while a model is served: they take effect, and no request is lost.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use api::*;
use base::MonotonicClock;
use model::Tensor;
use model::config::{Class, ModelConfig, SettingsChange};
use runtime::{DeviceGroup, Node, NodeOptions};
use serde_json::{Value, json};
use server::auth::{GrantRecord, NewToken, Scope, TokenFile};
use server::{AccessOptions, LocalNode, RunningServer, Server, ServerOptions};

use crate::fake::{FakeDevice, FakeLoader};
use crate::http::{Client, Reply};

const PATH: &str = "/v2/atoll/models/m";

struct Fixture {
    node: LocalNode,
    device: Arc<FakeDevice>,
    loader: Arc<FakeLoader>,
}

async fn start(device: Arc<FakeDevice>, config: ModelConfig) -> Fixture {
    let clock = Arc::new(MonotonicClock::new());
    let node = Node::start(device.clone(), NodeOptions::default(), clock).unwrap();
    let loader = Arc::new(FakeLoader::new(device.clone()));
    loader.add("m", 1, config);
    let node = LocalNode::new(Arc::new(DeviceGroup::of(Arc::new(node)).unwrap()), loader.clone());
    assert!(node.load_all(&[], |_, _, _| {}).await.unwrap().is_empty());
    node.set_started();
    Fixture { node, device, loader }
}

async fn serve(node: &LocalNode, access: AccessOptions) -> RunningServer {
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let options = ServerOptions { http: any, metrics: any, access, ..ServerOptions::default() };
    Server::start(options, Arc::new(node.clone())).await.unwrap()
}

const M: ModelRef<'_> = ModelRef { name: "m", version: None };

async fn change(node: &LocalNode, change: Value) -> api::error::ApiResult<Value> {
    let change = SettingsChange::parse(change.to_string().as_bytes()).unwrap();
    node.change_settings(M, change).await
}

async fn infer(node: &LocalNode, value: f32) -> api::error::ApiResult<InferResponse> {
    let tensor = Tensor::from_vec(vec![1, 1], vec![value]).unwrap();
    let inputs = Inputs::Named(vec![NamedTensor { name: "x".into(), tensor }]);
    let (id, options, outputs) = (String::new(), InferOptions::default(), vec![]);
    let request = InferRequest { id, options, inputs, outputs };
    let reply = node.infer(M, request, RequestContext::default()).await?;
    assert_eq!(reply.outputs[0].tensor.to_vec::<f32>(), Some(vec![value]));
    Ok(reply)
}

/// Starts `count` requests that wait until the device is open.
async fn waiting(node: &LocalNode, count: usize) -> Vec<tokio::task::JoinHandle<()>> {
    let pending = |node: &LocalNode| {
        let mut text = String::new();
        node.write_metrics(&mut text);
        let line = "nv_inference_pending_request_count{model=\"m\",version=\"1\"} ";
        let found = text.lines().find_map(|text| text.strip_prefix(line));
        found.expect("a gauge").parse::<usize>().unwrap()
    };
    let before = pending(node);
    let one = |index: usize| {
        let node = node.clone();
        tokio::spawn(async move { drop(infer(&node, index as f32).await.unwrap()) })
    };
    let requests = (0..count).map(one).collect();
    for _ in 0..20_000 {
        if pending(node) == before + count {
            return requests;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("{} of {} requests wait", pending(node), before + count);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_wait_are_answered_whatever_changes() {
    let Fixture { node, device, .. } = start(FakeDevice::closed(), ModelConfig::default()).await;
    let mut requests = waiting(&node, 5).await;
    for settings in [
        json!({"batching": {"policy": "window", "max_wait_us": 500}}),
        json!({"class": "rt", "priority": 2}),
        json!({"batching": {"policy": "none"}}),
        json!({"batching": {"policy": "elastic", "workers": [1, 4]}, "queue_capacity": 40}),
        json!({"batching": null, "slo_ms": 100}),
        json!({"max_batch_size": 2, "class": "be"}),
        json!({"batching": {"policy": "none"}, "queue_capacity": 50}),
    ] {
        change(&node, settings).await.unwrap();
        requests.extend(waiting(&node, 5).await);
    }
    assert_eq!(requests.len(), 40);
    device.open();
    for request in requests {
        tokio::time::timeout(Duration::from_secs(60), request).await.unwrap().unwrap();
    }
    infer(&node, 7.0).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_fails_while_settings_change() {
    let device = FakeDevice::new(Duration::from_micros(300));
    let Fixture { node, .. } = start(device, ModelConfig::default()).await;
    let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let client = || {
        let (node, stop, sent) = (node.clone(), stop.clone(), sent.clone());
        tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                infer(&node, sent.fetch_add(1, Ordering::SeqCst) as f32).await.unwrap();
            }
        })
    };
    let clients: Vec<_> = (0..4).map(|_| client()).collect();
    for round in 0..60 {
        let policy = ["none", "auto", "window", "elastic", "lazy_drop"][round % 5];
        let class = ["rt", "be"][round % 2];
        let settings = json!({
            "class": class, "priority": 1 + round, "batching": {"policy": policy},
            "queue_capacity": 100 + round,
        });
        change(&node, settings).await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    assert!(sent.load(Ordering::SeqCst) > 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_take_effect_at_once_and_after_a_reload() {
    let Fixture { node, device, loader } =
        start(FakeDevice::closed(), ModelConfig { priority: 9, ..ModelConfig::default() }).await;
    let reply = change(&node, json!({"queue_capacity": 3, "timeout_ms": 60_000})).await.unwrap();
    assert_eq!(
        (&reply["kept"], &reply["settings"]["queue_capacity"]),
        (&json!("registry"), &json!(3))
    );
    assert_eq!(reply["settings"]["priority"], 9);
    let first: Vec<_> = (0..10u8)
        .map(|index| {
            let node = node.clone();
            tokio::spawn(async move { infer(&node, f32::from(index)).await })
        })
        .collect();
    // Some run, three wait.
    while first.iter().all(|request| !request.is_finished()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    change(&node, json!({"queue_capacity": 100})).await.unwrap();
    let requests = waiting(&node, 4).await;
    device.open();
    for request in requests {
        request.await.unwrap();
    }
    let mut refused = 0;
    for request in first {
        if let Err(error) = request.await.unwrap() {
            assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
            refused += 1;
        }
    }
    assert!((1..=7).contains(&refused), "{refused} of 10 were refused");
    change(&node, json!({"timeout_ms": null, "class": "rt"})).await.unwrap();
    node.load_model("m").await.unwrap();
    let details = node.model_details(M).await.unwrap();
    let settings = &details["settings"];
    assert_eq!((&settings["class"], &settings["queue_capacity"]), (&json!("rt"), &json!(100)));
    assert_eq!(settings["priority"], 9);
    // Null returns to the file, which the fake has as the default.
    let reply = change(&node, json!({"priority": null})).await.unwrap();
    assert_eq!(reply["settings"]["priority"], 100);
    drop(loader);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_and_limits_change_for_the_next_request() {
    let Fixture { node, device, .. } = start(FakeDevice::closed(), ModelConfig::default()).await;
    change(&node, json!({"timeout_ms": 30})).await.unwrap();
    assert_eq!(infer(&node, 1.0).await.unwrap_err().kind, ErrorKind::DeadlineExceeded);
    change(&node, json!({"timeout_ms": null, "limits": {"rate": "1/h"}})).await.unwrap();
    device.open();
    infer(&node, 1.0).await.unwrap();
    assert_eq!(infer(&node, 1.0).await.unwrap_err().kind, ErrorKind::TooManyRequests);
    change(&node, json!({"limits": null})).await.unwrap();
    infer(&node, 1.0).await.unwrap();
}

#[tokio::test]
async fn an_unload_waits_for_requests_of_all_instances() {
    let Fixture { node, device, loader } =
        start(FakeDevice::closed(), ModelConfig::default()).await;
    let requests = waiting(&node, 1).await;
    change(&node, json!({"priority": 5})).await.unwrap();
    let unload = {
        let node = node.clone();
        tokio::spawn(async move { node.unload_model("m").await })
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!unload.is_finished(), "a request is in flight");
    device.open();
    for request in requests {
        request.await.unwrap();
    }
    unload.await.unwrap().unwrap();
    assert_eq!(loader.programs_alive.load(Ordering::SeqCst), 0);
    let gone = change(&node, json!({"priority": 6})).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::Unavailable, "{gone}");
}

async fn patch(server: &RunningServer, token: Option<&str>, path: &str, body: &str) -> Reply {
    let header = token.map(|token| format!("Bearer {token}"));
    let headers: Vec<(&str, &str)> =
        header.iter().map(|value| ("authorization", value.as_str())).collect();
    let mut client = Client::connect(server.http_addr.unwrap()).await;
    client.call("PATCH", path, &headers, body.as_bytes()).await
}

fn token(path: &Path, grant: GrantRecord) -> String {
    TokenFile::new(path).create(NewToken { grant, ..NewToken::default() }).unwrap()
}

#[tokio::test]
async fn a_change_needs_the_scope_of_a_registration_and_its_class() {
    let Fixture { node, .. } = start(FakeDevice::new(Duration::ZERO), Default::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let (tokens, audit) = (folder.path().join("tokens"), folder.path().join("audit"));
    let of = |scope| GrantRecord { scopes: vec![scope], ..GrantRecord::default() };
    let infer = token(&tokens, of(Scope::Infer));
    let register = token(&tokens, GrantRecord { max_priority: Some(10), ..of(Scope::Register) });
    let other = token(&tokens, GrantRecord { models: vec!["n".into()], ..of(Scope::Register) });
    let access = AccessOptions {
        tokens: Some(tokens),
        audit_log: Some(audit.clone()),
        ..AccessOptions::default()
    };
    let server = serve(&node, access).await;
    patch(&server, None, PATH, r#"{"priority":50}"#).await.error(401);
    for refused in [&infer, &other] {
        patch(&server, Some(refused), PATH, r#"{"priority":50}"#).await.error(403);
    }
    patch(&server, Some(&register), PATH, r#"{"priority":9}"#).await.error(403);
    patch(&server, Some(&register), PATH, r#"{"class":"rt"}"#).await.error(403);
    let changed = patch(&server, Some(&register), PATH, r#"{"priority":50}"#).await;
    assert_eq!(changed.status, 200, "{}", changed.text());
    let done = |line: &&str| {
        let words = ["\"change\":\"settings\"", "\"status\":200", PATH];
        words.iter().all(|word| line.contains(word))
    };
    let read = || std::fs::read_to_string(&audit).unwrap();
    // A thread writes the log; only a line that never comes is waited for in vain.
    for _ in 0..4_000 {
        if read().lines().any(|line| done(&line)) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(read().lines().filter(done).count(), 1, "{}", read());
    server.shutdown(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn impossible_changes_are_refused_and_change_nothing() {
    let Fixture { node, .. } = start(FakeDevice::new(Duration::ZERO), Default::default()).await;
    let server = serve(&node, AccessOptions::default()).await;
    let before = node.model_details(M).await.unwrap()["settings"].clone();
    for (body, named) in [
        (r#"{"priority":7,"slo_ms":0}"#, "slo_ms"),
        (r#"{"priority":7,"x":1}"#, "'x'"),
        (r#"{"priority":7,"batching":{"policy":"best"}}"#, "batching.policy"),
        (r#"{"class":"fast"}"#, "'class'"),
        (r#"{"priority":"high"}"#, "'priority'"),
        ("priority=7", "JSON"),
    ] {
        let reply = patch(&server, None, PATH, body).await;
        assert!(reply.text().contains(named), "{body}: {}", reply.text());
        reply.error(400);
    }
    let large = format!(r#"{{"x":"{}"}}"#, "x".repeat(1 << 17));
    patch(&server, None, PATH, &large).await.error(413);
    patch(&server, None, "/v2/atoll/models/none", "{}").await.error(404);
    assert_eq!(node.model_details(M).await.unwrap()["settings"], before);
    node.forbid_control();
    let refused = patch(&server, None, PATH, r#"{"priority":7}"#).await;
    assert!(refused.text().contains("--model-control-mode"), "{}", refused.text());
    refused.error(503);
    server.shutdown(Duration::from_secs(1)).await;
    let read_only = AccessOptions { read_only: true, ..AccessOptions::default() };
    let server = serve(&node, read_only).await;
    patch(&server, None, PATH, r#"{"priority":7}"#).await.error(403);
    server.shutdown(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn real_time_beside_keeps_running_while_another_model_changes() {
    let device = FakeDevice::new(Duration::from_millis(1));
    let Fixture { node, loader, .. } = start(device, ModelConfig::default()).await;
    let class = Class::RealTime;
    loader.add("n", 1, ModelConfig { class, ..ModelConfig::default() });
    node.load_model("n").await.unwrap();
    let model = ModelRef { name: "n", version: None };
    for round in 0..20 {
        let policy = if round % 2 == 0 { "none" } else { "window" };
        let inputs = Tensor::from_vec(vec![1, 1], vec![1.0f32]).unwrap();
        let inputs = Inputs::Named(vec![NamedTensor { name: "x".into(), tensor: inputs }]);
        let (id, options, outputs) = (String::new(), InferOptions::default(), vec![]);
        let request = InferRequest { id, options, inputs, outputs };
        let (changed, replied) = tokio::join!(
            change(&node, json!({"batching": {"policy": policy}})),
            node.infer(model, request, RequestContext::default())
        );
        changed.unwrap();
        replied.unwrap();
    }
}
