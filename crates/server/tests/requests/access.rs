//! Who may do what, over real sockets: every refusal with its code, its audit line and its count.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use api::proto::{self, InferParameter, ModelInferRequest, infer_parameter::ParameterChoice};
use model::config::Class;
use server::auth::{GrantRecord, NewToken, Scope, TokenFile};
use server::{AccessOptions, RunningServer, Server, ServerError, ServerOptions};
use tonic::{Code, Request};

use crate::http::{Client, Reply};
use crate::support::Echo;

const IDENTITY: &str = "/v2/models/identity/infer";
const FLOATS: &str =
    r#"{"inputs":[{"name":"INPUT0","shape":[2],"datatype":"FP32","data":[1,2.5]}]}"#;

fn with_parameters(parameters: &str) -> String {
    format!(r#"{{"parameters":{parameters},{}"#, &FLOATS[1..])
}

fn options(access: AccessOptions) -> ServerOptions {
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    ServerOptions { http: any, grpc: any, metrics: any, access, ..ServerOptions::default() }
}

async fn start(access: AccessOptions) -> (RunningServer, Arc<Echo>) {
    let echo = Arc::new(Echo::default());
    (Server::start(options(access), echo.clone()).await.unwrap(), echo)
}

fn grant(scopes: &[Scope]) -> GrantRecord {
    GrantRecord { scopes: scopes.to_vec(), ..GrantRecord::default() }
}

fn create(path: &Path, grant: GrantRecord) -> String {
    TokenFile::new(path).create(NewToken { grant, ..NewToken::default() }).unwrap()
}

async fn call(
    address: SocketAddr,
    token: Option<&str>,
    method: &str,
    path: &str,
    body: &str,
) -> Reply {
    let header = token.map(|token| format!("Bearer {token}"));
    let headers: Vec<(&str, &str)> =
        header.iter().map(|value| ("authorization", value.as_str())).collect();
    Client::connect(address).await.call(method, path, &headers, body.as_bytes()).await
}

async fn count(server: &RunningServer, reason: &str, token: Option<&str>) -> u64 {
    let page = call(server.metrics_addr.unwrap(), token, "GET", "/metrics", "").await.text();
    let line = format!("atoll_requests_refused_total{{reason=\"{reason}\"}} ");
    page.lines().find_map(|text| text.strip_prefix(&line)).unwrap().parse().unwrap()
}

#[tokio::test]
async fn foreign_hosts_and_origins_are_refused() {
    let (server, _) = start(AccessOptions::default()).await;
    for address in [server.http_addr.unwrap(), server.metrics_addr.unwrap()] {
        let mut client = Client::connect(address).await;
        let foreign = [("origin", "https://evil.example")];
        client.call("GET", "/v2", &foreign, b"").await.error(403);
        client.call("POST", "/register", &foreign, b"").await.error(403);
        let same = format!("http://{address}");
        let mut own = Client::connect(address).await;
        assert_eq!(own.call("GET", "/v2", &[("origin", same.as_str())], b"").await.status, 403);
        let local = [("origin", "http://localhost")];
        assert_eq!(own.call("GET", "/v2", &local, b"").await.status, 200);
    }
    let raw = |host: &str| format!("GET /v2 HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    for (host, status) in [("evil.example", 403), ("127.0.0.1", 200), ("localhost:1", 200)] {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(server.http_addr.unwrap()).await.unwrap();
        stream.write_all(raw(host).as_bytes()).await.unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.unwrap();
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{host}: {reply}");
    }
    assert_eq!(count(&server, "host", None).await, 1);
    assert!(count(&server, "origin", None).await >= 4);
}

#[tokio::test]
async fn pages_of_an_allowed_origin_may_read_responses() {
    let origin = "https://app.example";
    let access = AccessOptions { allow_origins: vec![origin.to_string()], ..Default::default() };
    let (server, _) = start(access).await;
    let mut client = Client::connect(server.http_addr.unwrap()).await;
    let headers = [("origin", origin), ("access-control-request-method", "POST")];
    let asked = client.call("OPTIONS", IDENTITY, &headers, b"").await;
    assert_eq!((asked.status, asked.header("access-control-allow-origin")), (204, Some(origin)));
    let reply = client.call("POST", IDENTITY, &headers[..1], FLOATS.as_bytes()).await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, Some(origin)));
}

#[tokio::test]
async fn other_addresses_need_tls_or_consent() {
    let everywhere = Some(SocketAddr::from(([0, 0, 0, 0], 0)));
    let options = ServerOptions {
        http: everywhere,
        grpc: None,
        metrics: None,
        ..options(Default::default())
    };
    let refused = Server::bind(options.clone()).await.err().unwrap();
    assert!(matches!(refused, ServerError::Insecure { .. }), "{refused}");
    assert!(Server::bind(ServerOptions { insecure: true, ..options }).await.is_ok());
}

#[tokio::test]
async fn tokens_are_required_once_they_exist() {
    let folder = tempfile::tempdir().unwrap();
    let (tokens, audit) = (folder.path().join("tokens"), folder.path().join("audit"));
    let good = create(&tokens, grant(&[Scope::Infer]));
    let admin = create(&tokens, grant(&[Scope::Admin]));
    let expired = TokenFile::new(&tokens)
        .create(NewToken { grant: grant(&[Scope::Admin]), lifetime: Some(0), ..Default::default() })
        .unwrap();
    let access = AccessOptions {
        tokens: Some(tokens.clone()),
        audit_log: Some(audit.clone()),
        ..AccessOptions::default()
    };
    let (server, echo) = start(access).await;
    let rest = server.http_addr.unwrap();
    let absent = call(rest, None, "POST", IDENTITY, FLOATS).await;
    assert_eq!(absent.header("www-authenticate"), Some("Bearer"));
    let id = absent.header("x-request-id").unwrap().to_string();
    absent.error(401);
    let wrong = format!("{}x", &good[..good.len() - 1]);
    for token in [&wrong, &expired, "", "nonsense", "a.b.c"] {
        call(rest, Some(token), "POST", IDENTITY, FLOATS).await.error(401);
    }
    assert_eq!(echo.answered.load(std::sync::atomic::Ordering::SeqCst), 0);
    assert_eq!(call(rest, Some(&good), "POST", IDENTITY, FLOATS).await.status, 200);
    // Scopes.
    for (method, path) in [
        ("POST", "/v2/repository/models/identity/load"),
        ("POST", "/v2/repository/models/identity/unload"),
        ("POST", "/v2/repository/index"),
        ("POST", "/register"),
        ("GET", "/v2/models/stats"),
    ] {
        call(rest, Some(&good), method, path, "").await.error(403);
    }
    call(server.metrics_addr.unwrap(), Some(&good), "GET", "/metrics", "").await.error(403);
    call(server.metrics_addr.unwrap(), None, "GET", "/metrics", "").await.error(401);
    let load = "/v2/repository/models/identity/load";
    assert_eq!(call(rest, Some(&admin), "POST", load, "").await.status, 200);
    // Health needs nothing, on every port.
    for address in [rest, server.metrics_addr.unwrap()] {
        assert_eq!(call(address, None, "GET", "/v2/health/live", "").await.status, 200);
    }
    assert!(count(&server, "no_token", Some(&admin)).await >= 2);
    assert_eq!(count(&server, "wrong_token", Some(&admin)).await, 4);
    assert_eq!(count(&server, "expired_token", Some(&admin)).await, 1);
    assert_eq!(count(&server, "scope", Some(&admin)).await, 6);
    let audit = read_until(&audit, "\"change\":\"load\"");
    assert!(audit.contains(&format!("\"request_id\":\"{id}\"")), "{audit}");
    assert!(audit.contains("\"peer\":\"127.0.0.1:"));
    assert!(audit.contains(&format!("\"subject\":\"token:{}\"", admin.split('_').nth(1).unwrap())));
    for token in [&good, &admin, &expired, &wrong] {
        assert!(!audit.contains(token.splitn(3, '_').nth(2).unwrap()), "a secret is in the log");
    }
}

fn read_until(path: &Path, text: &str) -> String {
    let begun = Instant::now();
    loop {
        let content = std::fs::read_to_string(path).unwrap_or_default();
        if content.contains(text) || begun.elapsed() > Duration::from_secs(5) {
            return content;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test]
async fn revoked_and_new_tokens_count_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    let first = create(&tokens, grant(&[Scope::Infer]));
    let access = AccessOptions { tokens: Some(tokens.clone()), ..AccessOptions::default() };
    let (server, _) = start(access).await;
    let rest = server.http_addr.unwrap();
    assert_eq!(call(rest, Some(&first), "POST", IDENTITY, FLOATS).await.status, 200);
    let second = create(&tokens, grant(&[Scope::Infer]));
    TokenFile::new(&tokens).revoke(first.split('_').nth(1).unwrap()).unwrap();
    let begun = Instant::now();
    while call(rest, Some(&first), "POST", IDENTITY, FLOATS).await.status != 401 {
        assert!(begun.elapsed() < Duration::from_secs(10), "the file is not read again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(call(rest, Some(&second), "POST", IDENTITY, FLOATS).await.status, 200);
    // A broken or lost file opens nothing and closes nothing.
    std::fs::write(&tokens, "broken").unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    std::fs::remove_file(&tokens).unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(call(rest, Some(&second), "POST", IDENTITY, FLOATS).await.status, 200);
    assert_eq!(call(rest, None, "POST", IDENTITY, FLOATS).await.status, 401);
}

#[tokio::test]
async fn tokens_limit_models_class_priority_rate_and_concurrency() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    let limited = GrantRecord { models: vec!["id*".into()], ..grant(&[Scope::Infer]) };
    let best_effort = create(&tokens, limited.clone());
    let classes = vec!["rt".to_string(), "be".to_string()];
    let real_time = GrantRecord { classes, max_priority: Some(3), ..limited };
    let real_time = create(&tokens, real_time);
    let slow = GrantRecord { rate: Some("2/h".parse().unwrap()), ..grant(&[Scope::Infer]) };
    let slow = create(&tokens, slow);
    let single = create(&tokens, GrantRecord { concurrency: Some(1), ..grant(&[Scope::Infer]) });
    let access = AccessOptions { tokens: Some(tokens.clone()), ..AccessOptions::default() };
    let (server, echo) = start(access).await;
    let rest = server.http_addr.unwrap();
    let post = async |token: &str, path: &str, body: &str| {
        call(rest, Some(token), "POST", path, body).await
    };
    post(&best_effort, "/v2/models/full/infer", FLOATS).await.error(403);
    post(&best_effort, "/v2/models/fu%6cl/infer", FLOATS).await.error(403);
    for parameters in [r#"{"atoll_class":"rt"}"#, r#"{"priority":1}"#] {
        post(&best_effort, IDENTITY, &with_parameters(parameters)).await.error(403);
    }
    let body = with_parameters(r#"{"atoll_class":"rt","priority":3}"#);
    assert_eq!(post(&real_time, IDENTITY, &body).await.status, 200);
    post(&real_time, IDENTITY, &with_parameters(r#"{"priority":2}"#)).await.error(403);
    for _ in 0..2 {
        assert_eq!(post(&slow, IDENTITY, FLOATS).await.status, 200);
    }
    let late = post(&slow, IDENTITY, FLOATS).await;
    assert!(late.header("retry-after").is_some());
    late.error(429);
    let mut held = Client::connect(rest).await;
    let header = format!("Bearer {single}");
    let headers = [("authorization", header.as_str())];
    held.send("POST", "/v2/models/slow/infer", &headers, FLOATS.as_bytes()).await;
    while server.in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    post(&single, IDENTITY, FLOATS).await.error(429);
    echo.slow.open();
    assert_eq!(held.receive().await.status, 200);
    assert_eq!(post(&single, IDENTITY, FLOATS).await.status, 200);
}

fn infer_request(
    token: Option<&str>,
    model: &str,
    class: Option<&str>,
) -> Request<ModelInferRequest> {
    let input = proto::model_infer_request::InferInputTensor {
        name: "INPUT0".into(),
        datatype: "FP32".into(),
        shape: vec![1],
        ..Default::default()
    };
    let mut message = ModelInferRequest {
        model_name: model.into(),
        inputs: vec![input],
        raw_input_contents: vec![1.5f32.to_le_bytes().to_vec().into()],
        ..Default::default()
    };
    if let Some(class) = class {
        let parameter_choice = Some(ParameterChoice::StringParam(class.to_string()));
        message.parameters.insert("atoll_class".into(), InferParameter { parameter_choice });
    }
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    request
}

#[tokio::test]
async fn grpc_has_the_same_rules() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    let limited = GrantRecord { models: vec!["id*".into()], ..grant(&[Scope::Infer]) };
    let token = create(&tokens, limited);
    let access = AccessOptions { tokens: Some(tokens.clone()), ..AccessOptions::default() };
    let (server, _) = start(access).await;
    let url = format!("http://{}", server.grpc_addr.unwrap());
    let mut client = GrpcInferenceServiceClient::connect(url).await.unwrap();
    let mut code = async |token: Option<&str>, model: &str, class: Option<&str>| match client
        .model_infer(infer_request(token, model, class))
        .await
    {
        Ok(_) => Code::Ok,
        Err(status) => status.code(),
    };
    assert_eq!(code(None, "identity", None).await, Code::Unauthenticated);
    assert_eq!(code(Some("atoll_x_y"), "identity", None).await, Code::Unauthenticated);
    assert_eq!(code(Some(&token), "identity", None).await, Code::Ok);
    assert_eq!(code(Some(&token), "full", None).await, Code::PermissionDenied);
    assert_eq!(code(Some(&token), "identity", Some("rt")).await, Code::PermissionDenied);
    let url = format!("http://{}", server.grpc_addr.unwrap());
    let mut client = GrpcInferenceServiceClient::connect(url).await.unwrap();
    let mut load = Request::new(proto::RepositoryModelLoadRequest::default());
    load.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    let refused = client.repository_model_load(load).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let all = Request::new(proto::ModelStatisticsRequest::default());
    assert_eq!(client.model_statistics(all).await.unwrap_err().code(), Code::Unauthenticated);
    assert!(client.server_live(proto::ServerLiveRequest {}).await.unwrap().into_inner().live);
}

#[tokio::test]
async fn without_tokens_the_server_limits_what_clients_choose() {
    let access = AccessOptions {
        classes: vec![Class::BestEffort],
        max_priority: Some(5),
        ..AccessOptions::default()
    };
    let (server, _) = start(access).await;
    let mut client = Client::connect(server.http_addr.unwrap()).await;
    for parameters in [r#"{"atoll_class":"rt"}"#, r#"{"priority":1}"#, r#"{"priority":4}"#] {
        client.post(IDENTITY, &with_parameters(parameters)).await.error(403);
    }
    let allowed = with_parameters(r#"{"atoll_class":"be","priority":5}"#);
    assert_eq!(client.post(IDENTITY, &allowed).await.status, 200);
    assert_eq!(client.post(IDENTITY, FLOATS).await.status, 200);
    assert_eq!(count(&server, "class", None).await, 2);
    assert_eq!(count(&server, "priority", None).await, 1);
}

#[tokio::test]
async fn a_read_only_server_changes_nothing() {
    let (server, _) = start(AccessOptions { read_only: true, ..Default::default() }).await;
    for address in [server.http_addr.unwrap(), server.metrics_addr.unwrap()] {
        let mut client = Client::connect(address).await;
        for path in ["/register", "/v2/repository/models/identity/load"] {
            let message = client.post(path, "").await.error(403);
            assert!(message.contains("read-only"), "{message}");
        }
        client.call("PUT", "/v2/atoll/queries/q", &[], b"").await.error(403);
        client.call("DELETE", "/v2/atoll/models/m", &[], b"").await.error(403);
        assert_eq!(client.get("/v2/models/identity").await.status, 200);
    }
}
