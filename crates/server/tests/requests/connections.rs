//! Connections of clients that hold them, send nothing, or take nothing.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use server::{ConnectionLimits, RunningServer, Server, ServerOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http::Client;
use crate::support::Echo;

const FLOATS: &str =
    r#"{"inputs":[{"name":"INPUT0","shape":[2],"datatype":"FP32","data":[1,2.5]}]}"#;
const SLOW: &str = "/v2/models/slow/infer";

fn limits() -> ConnectionLimits {
    ConnectionLimits {
        head_timeout: Duration::from_millis(300),
        body_timeout: Duration::from_millis(300),
        write_timeout: Duration::from_millis(300),
        ..ConnectionLimits::default()
    }
}

async fn start(connections: ConnectionLimits) -> (RunningServer, Arc<Echo>) {
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let options = ServerOptions {
        http: any,
        grpc: any,
        metrics: any,
        connections,
        ..ServerOptions::default()
    };
    let echo = Arc::new(Echo::default());
    (Server::start(options, echo.clone()).await.unwrap(), echo)
}

/// Whether the server closes the connection within five seconds.
async fn is_closed(stream: &mut TcpStream) -> bool {
    let mut buffer = vec![0; 1 << 16];
    let closed = async { while stream.read(&mut buffer).await.is_ok_and(|length| length > 0) {} };
    tokio::time::timeout(Duration::from_secs(5), closed).await.is_ok()
}

async fn metric(server: &RunningServer, line: &str) -> u64 {
    let mut client = Client::connect(server.metrics_addr.unwrap()).await;
    let page = client.get("/metrics").await.text();
    let found = page.lines().find_map(|text| text.strip_prefix(line));
    found.unwrap_or_else(|| panic!("no {line} in {page}")).trim().parse().unwrap()
}

fn closed(listener: &str, reason: &str) -> String {
    format!("atoll_connections_closed_total{{listener=\"{listener}\",reason=\"{reason}\"}}")
}

#[tokio::test]
async fn idle_connections_make_room_for_new_ones() {
    let limits = ConnectionLimits { max_connections: 20, ..ConnectionLimits::default() };
    let (server, _echo) = start(limits).await;
    let address = server.http_addr.unwrap();
    let mut held = Vec::new();
    for _ in 0..60 {
        held.push(TcpStream::connect(address).await.unwrap());
    }
    let mut client = Client::connect(address).await;
    let reply = tokio::time::timeout(Duration::from_secs(5), client.get("/v2/health/live"));
    assert_eq!(reply.await.expect("liveness is blocked").status, 200);
    assert!(metric(&server, &closed("rest", "displaced")).await >= 41);
    assert!(is_closed(&mut held[0]).await);
}

#[tokio::test]
async fn busy_connections_stay_and_the_admin_port_answers() {
    let limits = ConnectionLimits { max_connections: 4, ..ConnectionLimits::default() };
    let (server, echo) = start(limits).await;
    let address = server.http_addr.unwrap();
    let mut busy = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect(address).await;
        client.send("POST", SLOW, &[], FLOATS.as_bytes()).await;
        busy.push(client);
    }
    while server.in_flight() < 4 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut refused = TcpStream::connect(address).await.unwrap();
    let mut text = String::new();
    refused.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
    let mut admin = Client::connect(server.metrics_addr.unwrap()).await;
    assert_eq!(admin.get("/v2/health/live").await.status, 200);
    assert_eq!(admin.get("/v2/health/ready").await.status, 200);
    assert_eq!(admin.get("/v2/models/identity").await.status, 200);
    // It manages models and does not run them.
    admin.post("/v2/models/identity/infer", FLOATS).await.error(404);
    for mut client in busy {
        echo.slow.open();
        assert_eq!(client.receive().await.status, 200);
    }
}

#[tokio::test]
async fn one_address_has_a_limit_of_its_own() {
    let limits = ConnectionLimits { max_per_address: 1, ..ConnectionLimits::default() };
    let (server, echo) = start(limits).await;
    let mut client = Client::connect(server.http_addr.unwrap()).await;
    client.send("POST", SLOW, &[], FLOATS.as_bytes()).await;
    while server.in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(is_closed(&mut TcpStream::connect(server.http_addr.unwrap()).await.unwrap()).await);
    assert_eq!(metric(&server, &closed("rest", "address_full")).await, 1);
    echo.slow.open();
    assert_eq!(client.receive().await.status, 200);
}

#[tokio::test]
async fn silent_and_partial_heads_are_closed() {
    let (server, _echo) = start(limits()).await;
    let grpc_preface = b"PRI * HTTP/2.0\r\n\r\nSM";
    let cases: [(SocketAddr, &[u8]); 6] = [
        (server.http_addr.unwrap(), b""),
        (server.http_addr.unwrap(), b"P"),
        (server.http_addr.unwrap(), b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n"),
        (server.grpc_addr.unwrap(), b""),
        (server.metrics_addr.unwrap(), b""),
        (server.metrics_addr.unwrap(), b"GET /metrics"),
    ];
    for (address, text) in cases {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(text).await.unwrap();
        assert!(is_closed(&mut stream).await, "{address} {text:?}");
    }
    // A head that never ends does not live longer because bytes keep coming.
    let mut slow = TcpStream::connect(server.http_addr.unwrap()).await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let begun = Instant::now();
    while slow.write_all(b"a: b\r\n").await.is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(5), "the head has no limit");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Part of HTTP/2's preface is no request either; pings end it.
    let mut partial = TcpStream::connect(server.grpc_addr.unwrap()).await.unwrap();
    partial.write_all(&grpc_preface[..2]).await.unwrap();
    assert!(is_closed(&mut partial).await);
}

#[tokio::test]
async fn idle_keep_alive_connections_are_closed() {
    let limits = ConnectionLimits { idle_timeout: Duration::from_millis(300), ..limits() };
    let (server, _echo) = start(limits).await;
    let mut stream = TcpStream::connect(server.http_addr.unwrap()).await.unwrap();
    let request = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let begun = Instant::now();
    assert!(is_closed(&mut stream).await);
    assert!(begun.elapsed() > Duration::from_millis(250));
    assert_eq!(metric(&server, &closed("rest", "idle_timeout")).await, 1);
}

#[tokio::test]
async fn stalled_bodies_end_with_an_error() {
    let (server, _echo) = start(limits()).await;
    for path in ["/v2/models/identity/infer", "/v2/models/id%65ntity/infer", "/register"] {
        let mut client = Client::connect(server.http_addr.unwrap()).await;
        let headers =
            [("content-length", "1000"), ("content-type", "multipart/form-data; boundary=x")];
        client.send("POST", path, &headers, b"{").await;
        let reply = tokio::time::timeout(Duration::from_secs(5), client.receive()).await;
        let message = reply.expect("the body has no limit").error(408);
        assert!(message.contains("in time"), "{message}");
    }
    assert_eq!(server.in_flight(), 0);
}

#[tokio::test]
async fn a_stalled_body_does_not_make_the_drain_fail() {
    let (server, _echo) = start(ConnectionLimits::default()).await;
    let address = server.http_addr.unwrap();
    let mut stalled = Client::connect(address).await;
    stalled.send("POST", "/v2/models/identity/infer", &[("content-length", "9")], b"{").await;
    let mut slow = TcpStream::connect(address).await.unwrap();
    let head = "POST /v2/models/identity/infer HTTP/1.1\r\nhost: localhost\r\n\
                content-length: 1000000\r\n\r\n";
    slow.write_all(head.as_bytes()).await.unwrap();
    // Its client sends a byte now and then, for ever.
    let trickle = tokio::spawn(async move {
        while slow.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    while server.in_flight() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let _partial = TcpStream::connect(address).await.unwrap();
    let begun = Instant::now();
    assert!(server.shutdown(Duration::from_secs(4)).await, "the drain failed");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    trickle.await.unwrap();
}

const LIVE: &[u8] = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n";

fn infer() -> Vec<u8> {
    let head = "POST /v2/models/identity/infer HTTP/1.1\r\nhost: localhost";
    format!("{head}\r\ncontent-length: {}\r\n\r\n{FLOATS}", FLOATS.len()).into_bytes()
}

/// Connections that the server has accepted: one has been used, the other one has not.
async fn used_and_fresh(server: &RunningServer) -> [std::net::TcpStream; 2] {
    let address = server.http_addr.unwrap();
    let (mut used, mut fresh) =
        (Client::connect(address).await, TcpStream::connect(address).await.unwrap());
    used.send("GET", "/v2/health/live", &[], b"").await;
    assert_eq!(used.receive().await.status, 200);
    // The listener accepts in order.
    Client::connect(address).await.get("/v2/health/live").await;
    fresh.flush().await.unwrap();
    [used.into_std(), fresh.into_std().unwrap()]
}

/// The status line and headers of a reply, up to the end of the connection.
async fn last_reply(stream: std::net::TcpStream) -> String {
    let mut stream = TcpStream::from_std(stream).unwrap();
    let mut text = String::new();
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_string(&mut text));
    read.await.expect("the connection is not closed").expect("the connection is reset");
    text
}

/// Nothing runs between the write and the stop: the server has not seen the requests, which are in
/// its sockets.
#[tokio::test]
async fn requests_that_have_arrived_when_the_server_stops_are_answered() {
    use std::io::Write;
    for _ in 0..5 {
        let (server, _echo) = start(ConnectionLimits::default()).await;
        let [mut used, mut fresh] = used_and_fresh(&server).await;
        used.write_all(LIVE).unwrap();
        fresh.write_all(&infer()).unwrap();
        assert!(server.shutdown(Duration::from_secs(4)).await);
        for (stream, status) in [(used, "200"), (fresh, "503")] {
            let reply = last_reply(stream).await;
            assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "'{reply}'");
            assert!(reply.contains("connection: close\r\n"), "{reply}");
        }
    }
}

#[tokio::test]
async fn a_server_that_is_handed_over_serves_all_it_has_accepted_and_leaves_the_rest() {
    use std::io::Write;
    let (mut server, echo) = start(ConnectionLimits::default()).await;
    let [mut used, mut fresh] = used_and_fresh(&server).await;
    let [idle, silent] = used_and_fresh(&server).await;
    let address = server.http_addr.unwrap();
    let inherited = server.take_sockets();
    let mut slow = Client::connect(address).await;
    slow.send("POST", SLOW, &[], FLOATS.as_bytes()).await;
    while server.in_flight() < 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    used.write_all(&infer()).unwrap();
    fresh.write_all(&infer()).unwrap();
    let handing_over = tokio::spawn(server.hand_over(Duration::from_secs(20)));
    tokio::time::sleep(Duration::from_millis(20)).await;
    let mut waiting = Client::connect(address).await;
    waiting.send("POST", "/v2/models/identity/infer", &[], FLOATS.as_bytes()).await;
    for stream in [used, fresh] {
        let reply = last_reply(stream).await;
        assert!(reply.starts_with("HTTP/1.1 200 "), "'{reply}'");
        assert!(reply.contains("connection: close\r\n"), "{reply}");
    }
    echo.slow.open();
    assert_eq!(slow.receive().await.status, 200);
    assert!(handing_over.await.unwrap());
    for stream in [idle, silent] {
        assert_eq!(last_reply(stream).await, "");
    }
    let any = Some(address);
    let options =
        ServerOptions { http: any, grpc: None, metrics: None, inherited, ..Default::default() };
    let next = Server::start(options, Arc::new(Echo::default())).await.unwrap();
    assert_eq!(waiting.receive().await.status, 200);
    assert!(next.shutdown(Duration::from_secs(4)).await);
}

#[tokio::test]
async fn a_client_that_takes_no_response_is_closed() {
    let (server, _echo) = start(limits()).await;
    let mut stream = TcpStream::connect(server.http_addr.unwrap()).await.unwrap();
    let count = 4 << 20;
    let header = serde_json::json!({
        "parameters": {"binary_data_output": true},
        "inputs": [{
            "name": "INPUT0",
            "shape": [count],
            "datatype": "FP32",
            "parameters": {"binary_data_size": count * 4},
        }],
    });
    let header = header.to_string();
    let head = format!(
        "POST /v2/models/identity/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\
         inference-header-content-length: {}\r\n\r\n{header}",
        header.len() + count * 4,
        header.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![0; count * 4]).await.unwrap();
    let begun = Instant::now();
    while metric(&server, &closed("rest", "write_timeout")).await == 0 {
        assert!(begun.elapsed() < Duration::from_secs(10), "the connection stays");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A gRPC message of a request for `identity`.
fn grpc_request() -> Bytes {
    use api::proto::{ModelInferRequest, model_infer_request::InferInputTensor};
    let input = InferInputTensor {
        name: "INPUT0".into(),
        datatype: "FP32".into(),
        shape: vec![1000],
        ..Default::default()
    };
    let message = ModelInferRequest {
        model_name: "identity".into(),
        inputs: vec![input],
        raw_input_contents: vec![vec![0; 4000].into()],
        ..Default::default()
    };
    let message = prost::Message::encode_to_vec(&message);
    let length = u32::try_from(message.len()).unwrap();
    [&[0][..], &length.to_be_bytes(), &message].concat().into()
}

fn grpc_call(address: SocketAddr) -> ::http::Request<()> {
    ::http::Request::post(format!("http://{address}/inference.GRPCInferenceService/ModelInfer"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap()
}

#[tokio::test]
async fn http2_without_window_is_closed_though_it_replies_to_pings() {
    let (server, _echo) = start(limits()).await;
    let address = server.grpc_addr.unwrap();
    let stream = TcpStream::connect(address).await.unwrap();
    let mut builder = h2::client::Builder::new();
    let (sender, mut connection) =
        builder.initial_window_size(0).handshake::<_, Bytes>(stream).await.unwrap();
    let mut pings = connection.ping_pong().unwrap();
    let connection = tokio::spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let (_response, mut body) = sender.send_request(grpc_call(address), false).unwrap();
    body.send_data(grpc_request(), true).unwrap();
    let begun = Instant::now();
    // Pings keep arriving: only the response shows that the client takes nothing.
    while pings.ping(h2::Ping::opaque()).await.is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(10), "the connection stays");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let _ = connection.await;
    assert_eq!(metric(&server, &closed("grpc", "write_timeout")).await, 1);
}

#[tokio::test]
async fn one_connection_has_a_limited_number_of_streams() {
    let (server, _echo) = start(ConnectionLimits { max_streams: 8, ..limits() }).await;
    for address in [server.grpc_addr.unwrap(), server.http_addr.unwrap()] {
        let stream = TcpStream::connect(address).await.unwrap();
        let (sender, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut sender = sender.ready().await.unwrap();
        let (response, mut body) = sender.send_request(grpc_call(address), false).unwrap();
        body.send_data(grpc_request(), true).unwrap();
        let _ = response.await.unwrap();
        // The server's settings have arrived with the response.
        assert_eq!(sender.current_max_send_streams(), 8);
    }
}

#[tokio::test]
async fn executions_have_a_limit_by_default_and_are_cancelled() {
    assert!(ServerOptions::default().max_execution.is_some());
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let options = ServerOptions {
        http: any,
        grpc: None,
        metrics: None,
        max_execution: Some(Duration::from_millis(100)),
        ..ServerOptions::default()
    };
    let echo = Arc::new(Echo::default());
    let server = Server::start(options, echo.clone()).await.unwrap();
    let mut client = Client::connect(server.http_addr.unwrap()).await;
    let message = client.post(SLOW, FLOATS).await.error(504);
    assert!(message.contains("limit"), "{message}");
    assert_eq!(echo.given_up.load(std::sync::atomic::Ordering::SeqCst), 1);
}
