//! REST over a real socket: routes, codes, binary tensors, compression, limits, drain.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use server::{RunningServer, Server, ServerOptions};

use crate::http::Client;
use crate::support::{Echo, SlowTraces};

const IDENTITY: &str = "/v2/models/identity/infer";
const FLOATS: &str =
    r#"{"id":"7","inputs":[{"name":"INPUT0","shape":[2],"datatype":"FP32","data":[1,2.5]}]}"#;

struct Fixture {
    server: RunningServer,
    client: Client,
    echo: Arc<Echo>,
}

async fn start() -> Fixture {
    start_with(Echo::default()).await
}

async fn start_with(echo: Echo) -> Fixture {
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let options = ServerOptions {
        http: any,
        grpc: None,
        metrics: any,
        max_body_bytes: 100_000,
        max_model_bytes: 200_000,
        ..ServerOptions::default()
    };
    let echo = Arc::new(echo);
    let server = Server::start(options, echo.clone()).await.unwrap();
    let client = Client::connect(server.http_addr.unwrap()).await;
    Fixture { server, client, echo }
}

#[tokio::test]
async fn the_description_and_its_page_are_served() {
    let Fixture { server, mut client, .. } = start().await;
    let description = client.get("/openapi.json").await.json();
    assert_eq!(description["openapi"], "3.1.0");
    assert!(description["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"].is_object());
    let page = client.get("/docs").await;
    assert_eq!(page.status, 200);
    assert!(page.header("content-security-policy").is_some());
    let mut admin = Client::connect(server.metrics_addr.unwrap()).await;
    assert_eq!(admin.get("/openapi.json").await.json(), description);
    assert_eq!(admin.get("/docs").await.status, 404);
}

#[tokio::test]
async fn routes_follow_the_protocol() {
    let Fixture { server: _server, mut client, .. } = start().await;
    for path in ["/v2/health/live", "/v2/health/ready", "/v2/models/identity/ready"] {
        let reply = client.get(path).await;
        assert_eq!((reply.status, reply.body.len()), (200, 0), "{path}");
    }
    assert_eq!(client.get("/v2/models/full/ready").await.status, 503);
    assert_eq!(client.get("/v2").await.json()["name"], "echo");
    let metadata = client.get("/v2/models/identity/versions/1").await.json();
    assert_eq!(metadata["inputs"][0]["shape"], serde_json::json!([-1, 1]));
    let config = client.get("/v2/models/identity/config").await.json();
    assert_eq!(config["input"][0]["data_type"], "TYPE_FP32");
    assert_eq!(config["model_transaction_policy"]["decoupled"], false);
    for path in ["/v2/models/stats", "/v2/models/identity/stats"] {
        let stats = client.get(path).await.json();
        assert_eq!(stats["model_stats"][0]["version"], "1");
        assert_eq!(stats["model_stats"][0]["inference_stats"]["cache_hit"]["count"], 0);
    }
    let index = client.post("/v2/repository/index", r#"{"ready":true}"#).await.json();
    assert_eq!(index[0]["state"], "READY");
    assert_eq!(client.post("/v2/repository/index", "").await.status, 200);
    assert_eq!(client.post("/v2/repository/models/identity/load", "").await.status, 200);
    assert_eq!(client.post("/v2/repository/models/identity/unload", "{}").await.status, 200);
    assert_eq!(client.get("/v2/atoll/status").await.json()["ready"], true);
}

#[tokio::test]
async fn errors_are_json_with_the_right_code() {
    let Fixture { server: _server, mut client, .. } = start().await;
    client.get("/nowhere").await.error(404);
    client.get("/v2/models/nope").await.error(404);
    client.get("/v2/models/identity/versions/2").await.error(404);
    client.get("/v2/models/identity/versions/x").await.error(400);
    client.get("/v2/systemsharedmemory/status").await.error(501);
    client.get("/v2/logging").await.error(501);
    client.get(IDENTITY).await.error(405);
    client.post("/v2/health/live", "").await.error(405);
    client.post(IDENTITY, "{").await.error(400);
    client.get("/v2/models/%ff").await.error(400);
    client.post("/v2/repository/models/nope/load", "").await.error(404);
    let override_config = r#"{"parameters":{"config":"{}"}}"#;
    client.post("/v2/repository/models/identity/load", override_config).await.error(501);
    client.post("/v2/models/late/infer", FLOATS).await.error(504);
    let full = client.post("/v2/models/full/infer", FLOATS).await;
    assert_eq!(full.header("retry-after"), Some("1"));
    full.error(503);
    client.post("/v2/models/boom/infer", FLOATS).await.error(500);
    let length = [("inference-header-content-length", "x")];
    client.call("POST", IDENTITY, &length, FLOATS.as_bytes()).await.error(400);
    assert_eq!(client.post(IDENTITY, FLOATS).await.status, 200, "the connection is still good");
}

#[tokio::test]
async fn json_and_binary_tensors_come_back() {
    let Fixture { server: _server, mut client, echo } = start_with(Echo::with_host_pool()).await;
    let reply = client.post(IDENTITY, FLOATS).await;
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(reply.json()["id"], "7");
    assert_eq!(reply.json()["outputs"][0]["data"], serde_json::json!([1.0, 2.5]));
    let json = r#"{"inputs":[{"name":"INPUT0","shape":[20000],"datatype":"FP32",
        "parameters":{"binary_data_size":80000}}],"parameters":{"binary_data_output":true}}"#;
    let tensor: Vec<u8> = (0..20_000).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let length = json.len().to_string();
    let headers = [("inference-header-content-length", length.as_str())];
    let body = [json.as_bytes(), &tensor].concat();
    let reply = client.call("POST", IDENTITY, &headers, &body).await;
    let split: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    assert_eq!(reply.header("content-type"), Some("application/octet-stream"));
    assert_eq!(reply.body[split..], tensor);
    let host_pool = echo.host_pool.as_ref().unwrap();
    assert_eq!(host_pool.found.load(Ordering::SeqCst), 1, "read into the host pool");
    assert_eq!(host_pool.buffers_in_use(), 0, "all buffers are returned");
}

#[tokio::test]
async fn bodies_are_compressed_both_ways() {
    let Fixture { server: _server, mut client, .. } = start().await;
    let values = vec!["1"; 3000].join(",");
    let json = format!(
        r#"{{"inputs":[{{"name":"INPUT0","shape":[3000],"datatype":"INT32","data":[{values}]}}]}}"#
    );
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), Default::default());
    gzip.write_all(json.as_bytes()).unwrap();
    let body = gzip.finish().unwrap();
    let headers = [("content-encoding", "gzip"), ("accept-encoding", "deflate")];
    let reply = client.call("POST", IDENTITY, &headers, &body).await;
    assert_eq!(reply.header("content-encoding"), Some("deflate"));
    let mut text = String::new();
    flate2::read::ZlibDecoder::new(&reply.body[..]).read_to_string(&mut text).unwrap();
    assert!(text.contains("\"shape\":[3000]"));
    let unknown = [("content-encoding", "br")];
    client.call("POST", IDENTITY, &unknown, b"x").await.error(400);
    let broken = [("content-encoding", "gzip")];
    client.call("POST", IDENTITY, &broken, b"x").await.error(400);
}

#[tokio::test]
async fn bodies_have_a_limit() {
    let Fixture { server, mut client, .. } = start().await;
    let claimed = [("content-length", "100001")];
    client.call("POST", IDENTITY, &claimed, b"").await.error(413);
    let mut bomb = flate2::write::ZlibEncoder::new(Vec::new(), Default::default());
    bomb.write_all(&vec![b' '; 1_000_000]).unwrap();
    let bomb = bomb.finish().unwrap();
    let mut client = Client::connect(server.http_addr.unwrap()).await;
    let headers = [("content-encoding", "deflate")];
    client.call("POST", IDENTITY, &headers, &bomb).await.error(413);
    let multipart = [("content-type", "multipart/form-data; boundary=b")];
    let mut form = b"--b\r\ncontent-disposition: form-data; name=\"image\"\r\n\r\n".to_vec();
    form.resize(150_000, b'x');
    client.call("POST", "/classify", &multipart, &form).await.error(413);
}

#[tokio::test]
async fn traces_are_echoed() {
    let Fixture { server: _server, mut client, .. } = start().await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let headers = [("traceparent", trace)];
    let reply = client.call("POST", IDENTITY, &headers, FLOATS.as_bytes()).await;
    assert_eq!(reply.header("traceparent"), Some(trace));
    let headers = [("traceparent", "nonsense")];
    let reply = client.call("POST", IDENTITY, &headers, FLOATS.as_bytes()).await;
    assert_eq!((reply.status, reply.header("traceparent")), (200, None));
}

fn form(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut body = String::new();
    for (name, value) in fields {
        body +=
            &format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
    }
    (body + "--b--\r\n").into_bytes()
}

#[tokio::test]
async fn forms_register_and_classify() {
    let Fixture { server: _server, mut client, .. } = start().await;
    let multipart = [("content-type", "multipart/form-data; boundary=b")];
    let good = [
        ("name", "cats"),
        ("model", "onnx"),
        ("labels", "cat\r\ndog\n"),
        ("preprocessing", r#"{"mean":[1,2,3],"std":[4,5,6]}"#),
        ("class", "rt"),
    ];
    let reply = client.call("POST", "/register", &multipart, &form(&good)).await;
    let expected = serde_json::json!({"name":"cats","version":"2","state":"READY"});
    assert_eq!(reply.json(), expected);
    for bad in [
        &[("name", "../x"), ("model", "onnx")][..],
        &[("name", "x")],
        &[("model", "onnx")],
        &[("name", "x"), ("model", "")],
        &[("name", "x"), ("model", "o"), ("class", "fast")],
        &[("name", "x"), ("model", "o"), ("preprocessing", r#"{"crop":9}"#)],
        &[("name", "x"), ("model", "o"), ("colour", "red")],
        &[("name", "x"), ("model", "o"), ("settings", r#"{"priority":0}"#)],
        &[("name", "x"), ("model", "o"), ("settings", r#"{"colour":1}"#)],
    ] {
        client.call("POST", "/register", &multipart, &form(bad)).await.error(400);
    }
    let image = form(&[("name", "cats"), ("image", "png"), ("k", "3")]);
    let reply = client.call("POST", "/classify", &multipart, &image).await.json();
    assert_eq!(reply["predictions"][0]["index"], 3);
    let image = form(&[("name", "cats"), ("image", "png"), ("k", "0")]);
    client.call("POST", "/classify", &multipart, &image).await.error(400);
    client.post("/classify", "no form").await.error(400);
}

#[tokio::test]
async fn the_console_is_served_with_a_strict_policy() {
    let Fixture { mut client, server: _server, .. } = start().await;
    let page = client.get("/").await;
    assert!(page.text().contains("/console/app.js"));
    let policy = page.header("content-security-policy").unwrap_or_default();
    assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self'"));
    assert!(client.get("/console/app.js").await.text().contains("import"));
    client.get("/console/nothing.js").await.error(404);
    client.post("/", "").await.error(405);
    // The service of this test has no devices, no planner and no cluster.
    client.get("/v2/atoll/live").await.error(501);
    client.get("/v2/atoll/trace").await.error(501);
    client.post("/v2/atoll/plan", "{}").await.error(501);
    client.get("/v2/atoll/models/identity").await.error(501);
    assert!(client.get("/v2/atoll/cluster").await.json().is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_that_is_written_does_not_keep_requests_from_being_explained() {
    let monitor = Arc::new(SlowTraces::default());
    let echo = Echo { monitor: Some(monitor.clone()), ..Echo::default() };
    let Fixture { mut client, server, .. } = start_with(echo).await;
    let mut writer = Client::connect(server.http_addr.unwrap()).await;
    let trace = tokio::spawn(async move { writer.get("/v2/atoll/trace").await.json() });
    while monitor.begun.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let why = client.get("/v2/atoll/trace/devices/0/requests/7").await.json();
    assert_eq!(why["request"], 7);
    // A second trace has to wait.
    client.get("/v2/atoll/trace").await.error(429);
    monitor.open.store(true, Ordering::SeqCst);
    assert!(trace.await.unwrap().is_object());
    let position = "7".repeat(5_000);
    client.get(&format!("/v2/atoll/live?position={position}")).await.error(400);
}

#[tokio::test]
async fn metrics_have_their_own_port() {
    let Fixture { server, .. } = start().await;
    let mut client = Client::connect(server.metrics_addr.unwrap()).await;
    let text = client.get("/metrics").await.text();
    assert!(text.contains("atoll_requests_in_flight 0\n") && text.contains("echo 1\n"), "{text}");
    client.get("/").await.error(404);
}

#[tokio::test]
async fn disconnecting_cancels_the_request() {
    let Fixture { server, mut client, echo } = start().await;
    client.send("POST", "/v2/models/slow/infer", &[], FLOATS.as_bytes()).await;
    while server.in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(client);
    while server.in_flight() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(echo.given_up.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn drain_finishes_running_requests_and_refuses_new_ones() {
    let Fixture { server, mut client, echo } = start().await;
    let address = server.http_addr.unwrap();
    client.send("POST", "/v2/models/slow/infer", &[], FLOATS.as_bytes()).await;
    while server.in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let shutdown = tokio::spawn(server.shutdown(Duration::from_secs(60)));
    // Replies close their connections from now on, and new ones are accepted.
    let get = async |path| Client::connect(address).await.get(path).await;
    while get("/v2/health/ready").await.status == 200 {
        tokio::task::yield_now().await;
    }
    let unready = get("/v2/health/ready").await;
    assert_eq!((unready.status, unready.header("connection")), (503, Some("close")));
    assert_eq!(get("/v2/health/live").await.status, 200);
    let refused = Client::connect(address).await.post(IDENTITY, FLOATS).await.error(503);
    assert_eq!(refused, "the server is shutting down");
    assert!(!shutdown.is_finished(), "it waits for running requests");
    echo.slow.open();
    assert_eq!(client.receive().await.status, 200);
    assert!(shutdown.await.unwrap());
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn drain_ends_at_its_limit() {
    let Fixture { server, mut client, .. } = start().await;
    client.send("POST", "/v2/models/slow/infer", &[], FLOATS.as_bytes()).await;
    while server.in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!server.shutdown(Duration::from_millis(20)).await);
}
