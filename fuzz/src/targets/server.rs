//! A server on sockets of this process: routes, headers, forms and framing as clients send them.
//!
//! Client and server share one thread, so that an exchange costs no change of threads.

mod client;
mod echo;
mod http2;

use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use base::Random;
use flate2::Compression;
use flate2::write::GzEncoder;
use model::HostMemory;
use server::auth::{NewToken, TokenFile};
use server::{AccessOptions, JwtOptions, RunningServer, Server, ServerOptions};

use crate::generate;
use client::HttpClient;
use echo::Echo;
use http2::GrpcClient;

/// Words of forms.
pub(super) const FORM_WORDS: &[&str] = &[
    "--X\r\n",
    "--X--\r\n",
    "\r\n\r\n",
    "\r\n",
    "Content-Disposition: form-data; name=\"model\"",
    "Content-Disposition: form-data; name=\"name\"",
    "; filename=\"a\"",
    "Content-Type: text/plain",
    "labels",
    "preprocessing",
    "class",
    "slo_ms",
    "image",
    "rt",
    "be",
    "width",
    "height",
    "mean",
    "std",
    "resize",
];

/// Words of headers.
pub(super) const HEADER_WORDS: &[&str] = &[
    "Bearer ",
    "Basic ",
    "atoll_",
    "eyJhbGciOiJFZERTQSJ9",
    ".",
    "localhost",
    "127.0.0.1",
    "[::1]",
    ":80",
    "https:",
    "null",
    "gzip",
    "deflate",
    "identity",
    "00-",
    "-01",
    "1H",
    "1n",
    "application/json",
    "multipart/form-data; boundary=",
    "chunked",
];

/// Bytes of a gRPC call before its message: the method and how the message is framed.
pub(super) const CALL_HEAD: usize = 2;

const MAX_BODY: usize = 8 << 20;

/// The budget of one server's bodies.
const BUDGET: usize = 64 << 20;

/// A server and its clients, on a runtime of one thread.
pub struct RestHarness {
    runtime: tokio::runtime::Runtime,
    http: HttpClient,
    grpc: GrpcClient,
    _server: RunningServer,
    _folder: tempfile::TempDir,
}

impl RestHarness {
    /// A server over a service that echoes its inputs.
    fn echo(with_tokens: bool) -> RestHarness {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let access = if with_tokens { access(folder.path()) } else { AccessOptions::default() };
        RestHarness::start(Arc::new(Echo), HostMemory::leaked(BUDGET), access, folder)
    }

    /// A server over `service` on free ports.
    pub fn start(
        service: Arc<dyn api::InferenceService>,
        memory: &'static HostMemory,
        access: AccessOptions,
        folder: tempfile::TempDir,
    ) -> RestHarness {
        let runtime = runtime();
        let local = Some(([127, 0, 0, 1], 0).into());
        let options = ServerOptions {
            http: local,
            grpc: local,
            metrics: None,
            max_body_bytes: MAX_BODY,
            max_model_bytes: MAX_BODY,
            memory,
            access,
            ..ServerOptions::default()
        };
        let server = runtime.block_on(Server::start(options, service)).expect("a server");
        let http = HttpClient::new(server.http_addr.expect("REST is served"));
        let grpc = GrpcClient::new(server.grpc_addr.expect("gRPC is served"));
        RestHarness { runtime, http, grpc, _server: server, _folder: folder }
    }

    /// Sends an HTTP/1 request and returns the status of its response; `None` when the server
    /// closes the connection instead.
    pub fn send(&mut self, request: &[u8]) -> Option<u16> {
        let RestHarness { runtime, http, .. } = self;
        runtime.block_on(http.exchange(request))
    }

    /// Calls a gRPC method with these bytes. Whether the call was served; `None` when the server
    /// closes the connection instead.
    pub fn call(&mut self, path: &str, encoding: &str, body: &[u8]) -> Option<bool> {
        let RestHarness { runtime, grpc, .. } = self;
        runtime.block_on(grpc.call(path, encoding, body))
    }
}

/// A runtime that runs everything on the thread that waits for it.
pub(super) fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().max_blocking_threads(4).build().expect("a runtime")
}

/// A file of one token, and a key set of one key.
fn access(folder: &std::path::Path) -> AccessOptions {
    let tokens = folder.join("tokens.json");
    TokenFile::new(&tokens).create(NewToken::default()).ok();
    let keys = folder.join("keys.json");
    let key = "{\"keys\":[{\"kty\":\"OKP\",\"crv\":\"Ed25519\",\
               \"x\":\"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo\"}]}";
    std::fs::write(&keys, key).expect("a key set");
    let jwt = JwtOptions { keys, issuer: "i".to_string(), audience: "a".to_string() };
    let tokens = tokens.exists().then_some(tokens);
    AccessOptions { tokens, jwt: Some(jwt), ..AccessOptions::default() }
}

type Shared = LazyLock<Mutex<RestHarness>>;

static OPEN: Shared = LazyLock::new(|| Mutex::new(RestHarness::echo(false)));
static GUARDED: Shared = LazyLock::new(|| Mutex::new(RestHarness::echo(true)));

fn with(harness: &Shared, work: impl FnOnce(&mut RestHarness)) {
    work(&mut harness.lock().unwrap_or_else(PoisonError::into_inner));
}

/// A request with a body in HTTP/1. `headers` are whole lines.
pub fn http_request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn percent_encoded(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("%{byte:02x}")).collect()
}

/// The status says whose fault it was: a request never is the server's own.
fn check_status(status: Option<u16>) {
    assert_ne!(status, Some(500), "the server failed on a request");
}

/// Where requests of [`rest`] go.
const ROUTES: [(&str, &str); 12] = [
    ("POST", "/v2/models/identity/infer"),
    ("POST", "/v2/models/identity/versions/1/infer"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/identity/load"),
    ("POST", "/v2/repository/models/identity/unload"),
    ("PUT", "/v2/atoll/queries/q"),
    ("POST", "/v2/atoll/queries/q/infer"),
    ("POST", "/v2/models/*/infer"),
    ("GET", "/v2/models/*/versions/*"),
    ("DELETE", "/v2/atoll/models/*"),
    ("GET", "/*"),
    ("POST", "/v2/models/*/versions/*/infer"),
];

/// A route, its headers, a length of JSON (4 bytes), and a body.
pub(super) fn rest(data: &[u8]) {
    let Some((&[route, flags, low, high], body)) = data.split_first_chunk::<4>() else { return };
    let (method, path) = ROUTES[usize::from(route) % ROUTES.len()];
    let name = percent_encoded(&body[..body.len().min(24)]);
    let path = path.replace('*', &name);
    let mut headers = String::new();
    let mut sent = body.to_vec();
    match flags & 3 {
        1 => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            let _ = encoder.write_all(body);
            sent = encoder.finish().unwrap_or_default();
            headers.push_str("content-encoding: gzip\r\n");
        }
        2 => headers.push_str("content-encoding: gzip\r\n"),
        3 => headers.push_str("content-encoding: deflate\r\n"),
        _ => {}
    }
    if flags & 4 != 0 {
        let length = u16::from_le_bytes([low, high]);
        headers.push_str(&format!("inference-header-content-length: {length}\r\n"));
    }
    if flags & 8 != 0 {
        headers.push_str("accept-encoding: gzip\r\n");
    }
    if flags & 16 != 0 {
        headers.push_str("content-type: application/json\r\n");
    }
    let request = http_request(method, &path, &headers, &sent);
    with(&OPEN, |harness| check_status(harness.send(&request)));
}

/// A form of boundary `X`, to register a model or to classify a picture.
pub(super) fn multipart(data: &[u8]) {
    let Some((&route, body)) = data.split_first() else { return };
    let path = if route % 2 == 0 { "/register" } else { "/classify" };
    let headers = "content-type: multipart/form-data; boundary=X\r\n";
    let request = http_request("POST", path, headers, body);
    with(&OPEN, |harness| check_status(harness.send(&request)));
}

/// Headers of [`headers`].
const HEADERS: [&str; 10] = [
    "authorization: ",
    "authorization: Bearer ",
    "host: ",
    "origin: ",
    "x-request-id: ",
    "traceparent: ",
    "inference-header-content-length: ",
    "content-encoding: ",
    "content-type: ",
    "accept-encoding: ",
];

/// The value of a header, sent to a server that wants credentials and to one that does not.
pub(super) fn headers(data: &[u8]) {
    let Some((&which, value)) = data.split_first() else { return };
    let name = HEADERS[usize::from(which) % HEADERS.len()];
    // Hyper refuses these itself, and closes the connection.
    let value: Vec<u8> = value.iter().copied().filter(|byte| *byte >= 32 && *byte != 127).collect();
    let host = if name == "host: " { "" } else { "host: localhost\r\n" };
    let mut request =
        format!("POST /v2/models/identity/infer HTTP/1.1\r\n{host}{name}").into_bytes();
    request.extend_from_slice(&value);
    request.extend_from_slice(b"\r\ncontent-length: 2\r\n\r\n{}");
    with(&GUARDED, |harness| check_status(harness.send(&request)));
    if !name.starts_with("authorization") {
        with(&OPEN, |harness| check_status(harness.send(&request)));
    }
}

const METHODS: [&str; 10] = [
    "ModelInfer",
    "ModelInfer",
    "ModelInfer",
    "ModelStreamInfer",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "Unknown",
];

/// A method, how its message is framed, and the message.
pub(super) fn grpc_call(data: &[u8]) {
    let Some((&[method, flags], message)) = data.split_first_chunk::<CALL_HEAD>() else { return };
    let method = METHODS[usize::from(method) % METHODS.len()];
    let path = format!("/inference.GRPCInferenceService/{method}");
    let mut body = Vec::new();
    let mut encoding = "identity";
    match flags % 8 {
        // As it is, with whatever prefix the bytes make.
        0 => body.extend_from_slice(message),
        1 | 2 => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            let _ = encoder.write_all(message);
            frame(1, &encoder.finish().unwrap_or_default(), &mut body);
            encoding = "gzip";
        }
        3 => {
            frame(1, message, &mut body);
            encoding = if flags & 8 == 0 { "gzip" } else { "deflate" };
        }
        4 => {
            frame(0, message, &mut body);
            frame(0, message, &mut body);
        }
        _ => frame(0, message, &mut body),
    }
    with(&OPEN, |harness| {
        harness.call(&path, encoding, &body);
    });
}

/// Appends a message with its prefix.
pub fn frame(flag: u8, message: &[u8], out: &mut Vec<u8>) {
    out.push(flag);
    out.extend_from_slice(&(message.len() as u32).to_be_bytes());
    out.extend_from_slice(message);
}

/// A call of `ModelInfer`.
pub(super) fn generate_call(random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0, random.next_u64() as u8];
    bytes.extend(generate::infer_message(random));
    bytes
}
