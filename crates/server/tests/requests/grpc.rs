//! gRPC with a real client: the protocol's calls, streams, errors, health.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use api::proto::{self, ModelInferRequest, model_infer_request::InferInputTensor};
use futures_util::StreamExt;
use server::{RunningServer, Server, ServerOptions};
use tonic::Code;
use tonic::transport::Channel;

use crate::support::Echo;

async fn start() -> (RunningServer, GrpcInferenceServiceClient<Channel>) {
    start_with(Arc::default()).await
}

async fn start_with(echo: Arc<Echo>) -> (RunningServer, GrpcInferenceServiceClient<Channel>) {
    let options = ServerOptions {
        http: None,
        grpc: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        metrics: None,
        ..ServerOptions::default()
    };
    let server = Server::start(options, echo).await.unwrap();
    let url = format!("http://{}", server.grpc_addr.unwrap());
    let client = GrpcInferenceServiceClient::connect(url).await.unwrap();
    (server, client)
}

fn request(model: &str, id: &str) -> ModelInferRequest {
    let input = InferInputTensor {
        name: "INPUT0".into(),
        datatype: "FP32".into(),
        shape: vec![1],
        ..Default::default()
    };
    ModelInferRequest {
        model_name: model.into(),
        id: id.into(),
        inputs: vec![input],
        raw_input_contents: vec![1.5f32.to_le_bytes().to_vec().into()],
        ..Default::default()
    }
}

#[tokio::test]
async fn tensors_of_several_frames_are_read_into_the_host_pool() {
    let echo = Arc::new(Echo::with_host_pool());
    let (_server, mut client) = start_with(echo.clone()).await;
    let host_pool = echo.host_pool.clone().unwrap();
    // Longer than the maximum frame.
    for count in [400_000, 700_000] {
        let mut large = request("identity", "");
        large.inputs[0].shape = vec![count];
        let bytes: Vec<u8> = (0..count * 4).map(|at| (at % 251) as u8).collect();
        large.raw_input_contents = vec![bytes.clone().into()];
        let reply = client.model_infer(large).await.unwrap().into_inner();
        assert_eq!(reply.raw_output_contents[0], bytes);
    }
    assert_eq!(host_pool.found.load(Ordering::SeqCst), 2);
    client.model_infer(request("identity", "")).await.unwrap();
    assert_eq!(host_pool.found.load(Ordering::SeqCst), 2, "a single frame is not copied");
    assert_eq!(host_pool.buffers_in_use(), 0, "all buffers are returned");
}

#[tokio::test]
async fn tensors_come_back_raw() {
    let (_server, mut client) = start().await;
    let reply = client.model_infer(request("identity", "7")).await.unwrap().into_inner();
    assert_eq!((reply.id.as_str(), reply.outputs[0].name.as_str()), ("7", "OUTPUT0"));
    assert_eq!(reply.raw_output_contents[0], 1.5f32.to_le_bytes().to_vec());
    let mut typed = request("identity", "");
    typed.raw_input_contents.clear();
    typed.inputs[0].contents =
        Some(proto::InferTensorContents { fp32_contents: vec![2.5], ..Default::default() });
    let reply = client.model_infer(typed).await.unwrap().into_inner();
    assert_eq!(reply.raw_output_contents[0], 2.5f32.to_le_bytes().to_vec());
}

#[tokio::test]
async fn tensors_of_many_frames_come_back_whole() {
    let (_server, mut client) = start().await;
    client = client.max_decoding_message_size(usize::MAX);
    let raw: Vec<u8> = (0..5_000_000u32).map(|index| (index * 31) as u8).collect();
    for length in [40_000, 602_112, 5_000_000] {
        let mut large = request("identity", "");
        large.inputs[0].shape = vec![length / 4];
        large.raw_input_contents = vec![raw[..length as usize].to_vec().into()];
        // Several concurrent requests, so that buffers are taken while others are in use.
        let ask = |message: ModelInferRequest| {
            let mut client = client.clone();
            async move { client.model_infer(message).await }
        };
        let replies = futures_util::future::join_all((0..8).map(|_| ask(large.clone()))).await;
        for reply in replies {
            let reply = reply.unwrap().into_inner();
            assert!(reply.raw_output_contents[0] == raw[..length as usize], "{length}");
        }
    }
}

#[tokio::test]
async fn errors_have_their_codes() {
    let (_server, mut client) = start().await;
    for (model, code) in [
        ("nope", Code::NotFound),
        ("full", Code::Unavailable),
        ("late", Code::DeadlineExceeded),
        ("boom", Code::Internal),
    ] {
        assert_eq!(client.model_infer(request(model, "")).await.unwrap_err().code(), code);
    }
    let mut lying = request("identity", "");
    lying.inputs[0].shape = vec![i64::MAX];
    let mut missing = request("identity", "");
    missing.raw_input_contents.clear();
    let mut many = request("identity", "");
    many.raw_input_contents.push(Default::default());
    let mut version = request("identity", "");
    version.model_version = "one".into();
    for bad in [lying, missing, many, version] {
        assert_eq!(client.model_infer(bad).await.unwrap_err().code(), Code::InvalidArgument);
    }
    let status =
        client.system_shared_memory_status(proto::SystemSharedMemoryStatusRequest::default());
    assert_eq!(status.await.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test]
async fn other_calls_succeed() {
    let (_server, mut client) = start().await;
    assert!(client.server_live(proto::ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(client.server_ready(proto::ServerReadyRequest {}).await.unwrap().into_inner().ready);
    for (name, ready) in [("identity", true), ("full", false), ("nope", false)] {
        let request = proto::ModelReadyRequest { name: name.into(), version: String::new() };
        assert_eq!(client.model_ready(request).await.unwrap().into_inner().ready, ready);
    }
    let request = proto::ModelConfigRequest { name: "identity".into(), version: "1".into() };
    let config = client.model_config(request).await.unwrap().into_inner().config.unwrap();
    assert_eq!(config.max_batch_size, 8);
    let request = proto::ModelStatisticsRequest::default();
    let stats = client.model_statistics(request).await.unwrap().into_inner();
    assert_eq!(stats.model_stats[0].name, "identity");
    let request = proto::RepositoryIndexRequest::default();
    let index = client.repository_index(request).await.unwrap().into_inner();
    assert_eq!(index.models[0].state, "READY");
}

#[tokio::test]
async fn streams_reply_in_order_and_survive_errors() {
    let (_server, mut client) = start().await;
    let requests = vec![request("identity", "1"), request("nope", "2"), request("identity", "3")];
    let stream = client.model_stream_infer(futures_util::stream::iter(requests)).await.unwrap();
    let replies: Vec<_> = stream.into_inner().map(Result::unwrap).collect().await;
    let ids: Vec<_> =
        replies.iter().map(|a| a.infer_response.as_ref().unwrap().id.as_str()).collect();
    assert_eq!(ids, ["1", "2", "3"]);
    assert_eq!(replies[1].error_message, "there is no model 'nope'");
    assert!(replies[0].error_message.is_empty());
}

#[tokio::test]
async fn drain_changes_health_and_refuses_requests() {
    use tonic_health::pb::health_client::HealthClient;
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
    let echo = Arc::new(Echo::default());
    let (server, mut client) = start_with(echo.clone()).await;
    let url = format!("http://{}", server.grpc_addr.unwrap());
    let channel = Channel::from_shared(url).unwrap().connect().await.unwrap();
    let mut health = HealthClient::new(channel);
    let service = "inference.GRPCInferenceService".to_string();
    let check = HealthCheckRequest { service };
    let status = health.check(check.clone()).await.unwrap().into_inner().status();
    assert_eq!(status, ServingStatus::Serving);
    let mut running = client.clone();
    let slow = tokio::spawn(async move { running.model_infer(request("slow", "")).await });
    while server.in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let shutdown = tokio::spawn(server.shutdown(Duration::from_secs(60)));
    let mut status = ServingStatus::Serving;
    while status == ServingStatus::Serving {
        status = health.check(check.clone()).await.unwrap().into_inner().status();
    }
    assert_eq!(status, ServingStatus::NotServing);
    let refused = client.model_infer(request("identity", "")).await.unwrap_err();
    assert_eq!(refused.message(), "the server is shutting down");
    assert!(!slow.is_finished() && !shutdown.is_finished(), "running requests are waited for");
    echo.slow.open();
    assert!(slow.await.unwrap().is_ok());
    assert!(shutdown.await.unwrap());
}

async fn start_with_lame_duck(
    echo: Arc<Echo>,
    lame_duck: Duration,
) -> (RunningServer, GrpcInferenceServiceClient<Channel>) {
    let address = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let (grpc, http) = (address, address);
    let options = ServerOptions { http, grpc, metrics: None, lame_duck, ..Default::default() };
    let server = Server::start(options, echo).await.unwrap();
    let url = format!("http://{}", server.grpc_addr.unwrap());
    (server, GrpcInferenceServiceClient::connect(url).await.unwrap())
}

/// A stream of inferences that its client keeps open, and the watch of a balancer.
#[tokio::test]
async fn open_streams_end_when_the_server_stops() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    let (server, mut client) =
        start_with_lame_duck(Arc::default(), Duration::from_millis(20)).await;
    let url = format!("http://{}", server.grpc_addr.unwrap());
    let channel = Channel::from_shared(url).unwrap().connect().await.unwrap();
    let watch = HealthClient::new(channel).watch(HealthCheckRequest::default()).await.unwrap();
    let mut watch = watch.into_inner();
    watch.next().await.unwrap().unwrap();
    let messages = futures_util::stream::iter([request("identity", "1")]);
    let messages = messages.chain(futures_util::stream::pending());
    let mut replies = client.model_stream_infer(messages).await.unwrap().into_inner();
    assert!(replies.next().await.unwrap().is_ok());
    // Far longer than the test waits: neither stream would end by itself.
    let shutdown = tokio::spawn(server.shutdown(Duration::from_secs(3600)));
    let ended = replies.next().await.unwrap().unwrap_err();
    assert_eq!((ended.code(), ended.message()), (Code::Unavailable, "the server is shutting down"));
    let stopped = tokio::time::timeout(Duration::from_secs(60), shutdown).await;
    assert!(stopped.expect("the server waits for streams without an end").unwrap());
}

#[tokio::test]
async fn a_lame_duck_is_not_ready_tells_clients_to_go_away_and_serves_them() {
    let (server, mut client) =
        start_with_lame_duck(Arc::default(), Duration::from_secs(3600)).await;
    let (grpc, http) = (server.grpc_addr.unwrap(), server.http_addr.unwrap());
    let stream = tokio::net::TcpStream::connect(grpc).await.unwrap();
    let (_sender, connection) = h2::client::handshake(stream).await.unwrap();
    let mut rest = crate::http::Client::connect(http).await;
    assert_eq!(rest.get("/v2/health/ready").await.status, 200);
    let shutdown = tokio::spawn(server.shutdown(Duration::from_secs(7200)));
    // GOAWAY ends a connection without requests; nothing else would.
    connection.await.unwrap();
    // A connection that is idle is not closed under a request that may be on its way.
    for (path, status) in [("/v2/health/ready", 503), ("/v2/health/live", 200)] {
        let reply = rest.get(path).await;
        assert_eq!((reply.status, reply.header("connection")), (status, Some("close")));
        rest = crate::http::Client::connect(http).await;
    }
    assert!(client.model_infer(request("identity", "")).await.is_ok());
    assert!(!shutdown.is_finished());
    shutdown.abort();
}
