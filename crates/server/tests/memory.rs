//! Bodies that become much more memory than they are: refused before they are decoded, with the
//! server alive and its memory given back.
#![allow(missing_docs, dead_code)]

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use api::proto::{self, ModelInferRequest, model_infer_request::InferInputTensor};
use futures_util::StreamExt;
use model::HostMemory;
use server::{RunningServer, Server, ServerOptions};
use tonic::Code;
use tonic::codec::CompressionEncoding;
use tonic::transport::Channel;

mod http;
mod support;

use http::{Client, Reply};
use support::Echo;

const IDENTITY: &str = "/v2/models/identity/infer";
const FLOATS: &str =
    r#"{"id":"7","inputs":[{"name":"INPUT0","shape":[2],"datatype":"FP32","data":[1,2.5]}]}"#;

struct Fixture {
    server: RunningServer,
    memory: &'static HostMemory,
}

impl Fixture {
    async fn start(memory: &'static HostMemory) -> Fixture {
        let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let options = ServerOptions {
            http: any,
            grpc: any,
            metrics: any,
            max_body_bytes: 16 << 20,
            memory,
            ..ServerOptions::default()
        };
        let server = Server::start(options, Arc::new(Echo::default())).await.unwrap();
        Fixture { server, memory }
    }

    async fn rest(&self) -> Client {
        Client::connect(self.server.http_addr.unwrap()).await
    }

    async fn grpc(&self) -> GrpcInferenceServiceClient<Channel> {
        let url = format!("http://{}", self.server.grpc_addr.unwrap());
        GrpcInferenceServiceClient::connect(url).await.unwrap()
    }

    /// Everything is given back once the last response is gone.
    async fn assert_idle(&self) {
        let until = Instant::now() + Duration::from_secs(10);
        while self.memory.used() > 0 {
            assert!(Instant::now() < until, "{} bytes stay reserved", self.memory.used());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn gzipped(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

async fn post_gzipped(client: &mut Client, body: &[u8]) -> Reply {
    client.call("POST", IDENTITY, &[("content-encoding", "gzip")], &gzipped(body)).await
}

/// An inference of `count` times the JSON value `element`.
fn json_of(element: &str, datatype: &str, count: usize) -> String {
    let data = format!("{element},").repeat(count);
    let data = data.trim_end_matches(',');
    let head = format!(r#""name":"INPUT0","shape":[{count}],"datatype":"{datatype}""#);
    format!(r#"{{"inputs":[{{{head},"data":[{data}]}}]}}"#)
}

#[tokio::test]
async fn json_bombs_are_refused_before_they_are_decoded() {
    let fixture = Fixture::start(HostMemory::leaked(64 << 20)).await;
    let mut client = fixture.rest().await;
    let empty = r#"{"name":"a","shape":[],"datatype":"FP32","data":[]},"#;
    for bomb in [
        json_of("\"\"", "BYTES", 3 << 20),
        json_of("0", "INT64", 6 << 20),
        json_of("[[[]]]", "INT64", 1 << 20),
        format!("{{\"inputs\":[{}]}}", empty.repeat(100_000)),
    ] {
        let reply = post_gzipped(&mut client, bomb.as_bytes()).await;
        assert_eq!(reply.status, 413, "{}", reply.text());
        fixture.assert_idle().await;
    }
    assert_eq!(client.post(IDENTITY, FLOATS).await.status, 200);
    fixture.assert_idle().await;
}

#[tokio::test]
async fn memory_in_use_by_others_gives_503() {
    let fixture = Fixture::start(HostMemory::leaked(8 << 20)).await;
    let mut client = fixture.rest().await;
    let body = json_of("1.5", "FP32", 60_000);
    assert_eq!(client.post(IDENTITY, &body).await.status, 200);
    fixture.assert_idle().await;
    let held = fixture.memory.reserve(7 << 20).unwrap();
    let reply = client.post(IDENTITY, &body).await;
    assert!(reply.error(503).contains("try again later"));
    assert_eq!(reply.header("retry-after"), Some("1"));
    drop(held);
    let mut client = fixture.rest().await;
    assert_eq!(client.post(IDENTITY, &body).await.status, 200);
    fixture.assert_idle().await;
}

#[tokio::test]
async fn every_refused_reservation_of_a_request_is_an_error() {
    let memory = HostMemory::leaked_with_faults(usize::MAX);
    let fixture = Fixture::start(memory).await;
    let body = json_of("1.5", "FP32", 60_000);
    type Headers = &'static [(&'static str, &'static str)];
    let requests: [(Headers, Vec<u8>); 2] = [
        (&[], body.clone().into_bytes()),
        (&[("content-encoding", "gzip")], gzipped(body.as_bytes())),
    ];
    for (headers, body) in &requests {
        let mut refused = 0;
        loop {
            memory.fail_at(refused);
            let mut client = fixture.rest().await;
            let reply = client.call("POST", IDENTITY, headers, body).await;
            let failed = memory.has_failed();
            memory.fail_at(u64::MAX);
            // The next request succeeds.
            let mut next = fixture.rest().await;
            assert_eq!(next.post(IDENTITY, FLOATS).await.status, 200);
            if !failed {
                assert_eq!(reply.status, 200, "{}", reply.text());
                break;
            }
            assert_eq!(reply.status, 503, "reservation {refused}: {}", reply.text());
            refused += 1;
        }
        assert!(refused >= 3, "a body, what it becomes, and the reply: {refused}");
        fixture.assert_idle().await;
    }
}

fn message(inputs: usize) -> ModelInferRequest {
    let input = InferInputTensor {
        name: "INPUT0".into(),
        datatype: "FP32".into(),
        shape: vec![1],
        ..Default::default()
    };
    ModelInferRequest {
        model_name: "identity".into(),
        inputs: vec![input; inputs],
        raw_input_contents: vec![1.5f32.to_le_bytes().to_vec().into()],
        ..Default::default()
    }
}

/// Messages of a few kilobytes when compressed, and of gigabytes when decoded.
fn grpc_bombs() -> Vec<ModelInferRequest> {
    let empty = || InferInputTensor::default();
    let strings = proto::InferTensorContents {
        bytes_contents: vec![bytes::Bytes::new(); 1 << 21],
        ..Default::default()
    };
    vec![
        ModelInferRequest { inputs: vec![empty(); 500_000], ..message(1) },
        ModelInferRequest {
            inputs: vec![InferInputTensor { contents: Some(strings), ..empty() }],
            ..message(1)
        },
        ModelInferRequest { raw_input_contents: vec![bytes::Bytes::new(); 2 << 20], ..message(1) },
    ]
}

#[tokio::test]
async fn grpc_bombs_are_refused_before_they_are_decoded() {
    let fixture = Fixture::start(HostMemory::leaked(64 << 20)).await;
    let plain = fixture.grpc().await;
    let packed = fixture.grpc().await.send_compressed(CompressionEncoding::Gzip);
    for mut client in [plain, packed] {
        for bomb in grpc_bombs() {
            let error = client.model_infer(bomb.clone()).await.unwrap_err();
            let refused = [Code::InvalidArgument, Code::OutOfRange].contains(&error.code());
            assert!(refused, "{error}");
            // The same in a stream.
            let stream = futures_util::stream::iter([bomb]);
            let replies = client.model_stream_infer(stream).await;
            let error = match replies {
                Err(error) => error,
                Ok(replies) => replies.into_inner().next().await.unwrap().unwrap_err(),
            };
            let refused = [Code::InvalidArgument, Code::OutOfRange].contains(&error.code());
            assert!(refused, "{error}");
            fixture.assert_idle().await;
        }
        client.model_infer(message(1)).await.unwrap();
        let stream = futures_util::stream::iter([message(1), message(1)]);
        let replies = client.model_stream_infer(stream).await.unwrap().into_inner();
        let replies: Vec<_> = replies.collect().await;
        assert!(replies.len() == 2 && replies.iter().all(Result::is_ok), "{replies:?}");
        fixture.assert_idle().await;
    }
}

#[tokio::test]
async fn control_calls_take_small_messages_only() {
    let fixture = Fixture::start(HostMemory::leaked(64 << 20)).await;
    let mut client = fixture.grpc().await;
    let request = proto::ModelMetadataRequest { name: "x".repeat(2 << 20), ..Default::default() };
    let error = client.model_metadata(request).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
}

#[tokio::test]
async fn memory_is_a_metric() {
    let fixture = Fixture::start(HostMemory::leaked(64 << 20)).await;
    let _held = fixture.memory.reserve(1000).unwrap();
    assert!(fixture.memory.reserve(1 << 30).is_err());
    let mut client = Client::connect(fixture.server.metrics_addr.unwrap()).await;
    let page = client.get("/metrics").await.text();
    for line in [
        "atoll_host_memory_bytes 1000\n",
        "atoll_host_memory_limit_bytes 67108864\n",
        "atoll_host_memory_refused_total 1\n",
    ] {
        assert!(page.contains(line), "{page}");
    }
}
