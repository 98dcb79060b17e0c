//! Requests for which a device has no memory.

use std::sync::Arc;
use std::time::Duration;

use api::*;
use base::MonotonicClock;
use model::Tensor;
use model::config::ModelConfig;
use runtime::{DeviceGroup, Node, NodeOptions};
use server::LocalNode;

use crate::fake::{FakeDevice, FakeLoader};

async fn error_of(name: &str) -> ApiError {
    let device = FakeDevice::new(Duration::ZERO);
    let clock = Arc::new(MonotonicClock::new());
    let node = Node::start(device.clone(), NodeOptions::default(), clock).unwrap();
    let loader = Arc::new(FakeLoader::new(device));
    loader.add(name, 1, ModelConfig::default());
    let node = LocalNode::new(Arc::new(DeviceGroup::of(Arc::new(node)).unwrap()), loader);
    assert!(node.load_all(&[], |_, _, _| {}).await.unwrap().is_empty());
    node.set_started();
    let tensor = Tensor::from_vec(vec![1, 1], vec![1f32]).unwrap();
    let inputs = Inputs::Named(vec![NamedTensor { name: "x".into(), tensor }]);
    let (id, options, outputs) = (String::new(), InferOptions::default(), vec![]);
    let request = InferRequest { id, options, inputs, outputs };
    let model = ModelRef { name, version: None };
    node.infer(model, request, RequestContext::default()).await.unwrap_err()
}

#[tokio::test]
async fn what_never_fits_is_too_large_and_what_may_fit_later_is_not() {
    let error = error_of("too_large").await;
    assert_eq!((error.kind, error.retry_after), (ErrorKind::TooLarge, None), "{error}");
    assert!(error.message.contains("2.0 GiB needed, fake has at most 1.0 GiB"), "{error}");
    let error = error_of("no_room").await;
    assert_eq!((error.kind, error.retry_after), (ErrorKind::Unavailable, Some(1)), "{error}");
}
