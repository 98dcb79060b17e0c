//! Frontends that are there before the backends, as after a restart of everything.
#![allow(missing_docs, dead_code)]

use std::sync::Arc;
use std::time::Duration;

use api::error::ApiResult;
use api::{
    ErrorKind, InferOptions, InferRequest, InferResponse, InferenceService, Inputs, ModelRef,
    NamedTensor, RequestContext, ServerMetadata,
};
use base::{MonotonicClock, Nanos};
use cluster::frontend::{Frontend, FrontendSettings};
use cluster::record::{Keys, ModelRecord, RecordKind, RouteRecord, TargetRecord, encode};
use cluster::store::{self, Store, Write};
use model::Tensor;

mod played;

use played::{Backend, version_of};

/// An address where nobody listens.
async fn free_address() -> String {
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    socket.local_addr().unwrap().to_string()
}

/// A frontend with the model `m` on backends at these addresses.
async fn frontend(addresses: &[&str]) -> Frontend {
    let clock = Arc::new(MonotonicClock::new());
    let access = store::etcd::EtcdAccess::default();
    let store: Arc<dyn Store> = store::open("memory", access, clock.clone()).unwrap();
    let keys = Keys::new("test");
    let record = ModelRecord { version: 1, enabled: true, ..ModelRecord::default() };
    let target = |address: &&str| TargetRecord {
        backend: format!("at-{}", address.replace(':', "-")),
        grpc: address.to_string(),
        http: String::new(),
        weight: 1.0,
        batch: 1,
        batch_ms: 0.0,
        cycle_ms: 0.0,
        min_batch: 0,
        version: 1,
    };
    let targets = addresses.iter().map(target).collect();
    let route = RouteRecord { epoch: 1, targets, rate_max: None };
    let writes = vec![
        Write::put(keys.one(RecordKind::Model, "m"), encode(&record)),
        Write::put(keys.one(RecordKind::Route, "m"), encode(&route)),
    ];
    store.transact(vec![], writes).await.unwrap();
    let settings = FrontendSettings {
        name: "frontend".to_string(),
        lease: Duration::from_secs(5),
        metadata: ServerMetadata {
            name: String::new(),
            version: String::new(),
            extensions: Vec::new(),
        },
        requests_max: 1000,
        timeout: Duration::from_secs(20),
        files: None,
        backend_tls: None,
        saved: None,
        cold_start: Default::default(),
        limits: Default::default(),
        memory: Default::default(),
    };
    Frontend::start(store, keys, clock, settings).await.unwrap()
}

async fn send(frontend: &Frontend, timeout_ms: Option<u64>) -> ApiResult<InferResponse> {
    let tensor = Tensor::from_vec(vec![1], vec![0.0f32]).unwrap();
    let timeout = timeout_ms.map(Nanos::from_millis);
    let request = InferRequest {
        id: "7".to_string(),
        options: InferOptions { binary_output: true, timeout, ..InferOptions::default() },
        inputs: Inputs::Named(vec![NamedTensor { name: "x".into(), tensor }]),
        outputs: Vec::new(),
    };
    let model = ModelRef { name: "m", version: None };
    frontend.infer(model, request, RequestContext::default()).await
}

#[tokio::test]
async fn requests_wait_for_the_first_backend_of_a_frontend_that_has_just_started() {
    let (late, never) = (free_address().await, free_address().await);
    let frontend = frontend(&[&late, &never]).await;
    let requests = (0..50).map(|_| send(&frontend, None));
    let start = async {
        tokio::time::sleep(Duration::from_millis(400)).await;
        Backend::start_at(&late).await
    };
    let (replies, _backend) = tokio::join!(futures_util::future::join_all(requests), start);
    for reply in replies {
        assert_eq!(version_of(&reply.unwrap()), 1);
    }
}

#[tokio::test]
async fn a_request_whose_time_is_over_does_not_wait_for_a_backend() {
    let never = free_address().await;
    let frontend = frontend(&[&never]).await;
    let began = std::time::Instant::now();
    let error = send(&frontend, Some(100)).await.unwrap_err();
    assert!(matches!(error.kind, ErrorKind::Unavailable | ErrorKind::DeadlineExceeded), "{error}");
    // Nor does one without a deadline wait for ever.
    let error = send(&frontend, None).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}
