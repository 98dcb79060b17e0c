//! The service of one node on a fake device: validation, deadlines, cancelling, loading.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use api::error::ApiResult;
use api::monitor::{LiveCursor, LiveUpdate, SPAN_NUMBERS};
use api::*;
use base::{MonotonicClock, Nanos};
use bytes::Bytes;
use device::DeviceReadings;
use model::Tensor;
use model::config::{Batching, BatchingPolicy, Class, ModelConfig, RequestLimits};
use runtime::batching::StaggeredBatch;
use runtime::{DeviceGroup, DeviceGroupOptions, Node, NodeOptions};
use serde_json::json;
use server::LocalNode;

use crate::fake::{FakeDevice, FakeLoader};

struct Fixture {
    node: LocalNode,
    loader: Arc<FakeLoader>,
    device: Arc<FakeDevice>,
}

/// A node on which each inference takes `delay`, with the models `names`.
async fn start(delay: Duration, names: &[&str]) -> Fixture {
    start_on(FakeDevice::new(delay), names).await
}

/// A node over `device`, with the models `names`.
async fn start_on(device: Arc<FakeDevice>, names: &[&str]) -> Fixture {
    let clock = Arc::new(MonotonicClock::new());
    let node = Node::start(device.clone(), NodeOptions::default(), clock).unwrap();
    let loader = Arc::new(FakeLoader::new(device.clone()));
    names.iter().for_each(|name| loader.add(name, 1, ModelConfig::default()));
    let node = LocalNode::new(Arc::new(DeviceGroup::of(Arc::new(node)).unwrap()), loader.clone());
    assert!(node.load_all(&[], |_, _, _| {}).await.unwrap().is_empty());
    node.set_started();
    Fixture { node, loader, device }
}

/// Time limit after which a test fails.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Waits until the metrics contain `line`.
async fn wait_for_metric(node: &LocalNode, line: &str) {
    let since = Instant::now();
    while !metrics(node).contains(line) {
        assert!(since.elapsed() < TIME_LIMIT, "{line} does not come in:\n{}", metrics(node));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Waits until a request for version 1 of `name` is pending.
async fn is_pending(node: &LocalNode, name: &str) {
    wait_for_metric(node, &format!("pending_request_count{{model=\"{name}\",version=\"1\"}} 1\n"))
        .await;
}

const INSTANT: Duration = Duration::ZERO;

fn named(name: &str, tensor: Tensor) -> Inputs {
    Inputs::Named(vec![NamedTensor { name: name.into(), tensor }])
}

fn floats(values: &[f32]) -> Inputs {
    named("x", Tensor::from_vec(vec![values.len(), 1], values.to_vec()).unwrap())
}

fn request(inputs: Inputs) -> InferRequest {
    let options = InferOptions::default();
    InferRequest { id: "7".into(), options, inputs, outputs: vec![] }
}

fn model(name: &str) -> ModelRef<'_> {
    ModelRef { name, version: None }
}

async fn infer(node: &LocalNode, name: &str, request: InferRequest) -> ApiResult<InferResponse> {
    node.infer(model(name), request, RequestContext::default()).await
}

async fn state(node: &LocalNode, name: &str) -> (Option<ModelState>, String) {
    let index = node.index(false).await.unwrap();
    let entry = index.into_iter().rfind(|entry| entry.name == name).unwrap();
    (entry.state, entry.reason)
}

#[tokio::test]
async fn a_node_with_a_faulted_device_is_not_ready() {
    let fixture = start(Duration::ZERO, &["m"]).await;
    assert!(fixture.node.ready());
    fixture.device.faulted.store(true, std::sync::atomic::Ordering::SeqCst);
    assert!(!fixture.node.ready());
}

#[tokio::test]
async fn requests_are_matched_with_the_model() {
    let Fixture { node, .. } = start(INSTANT, &["m"]).await;
    let reply = infer(&node, "m", request(floats(&[1.0, 2.0]))).await.unwrap();
    assert_eq!((&*reply.model_name, &*reply.model_version), ("m", "1"));
    assert_eq!(reply.outputs[0].tensor.to_vec::<f32>(), Some(vec![1.0, 2.0]));
    let raw = Bytes::from(3.0f32.to_le_bytes().to_vec());
    let reply = infer(&node, "m", request(Inputs::Raw(raw))).await.unwrap();
    assert_eq!(reply.outputs[0].tensor.shape(), [1, 1]);
    let wrong = |tensor| request(named("x", tensor));
    let mut superfluous = request(floats(&[1.0]));
    if let Inputs::Named(inputs) = &mut superfluous.inputs {
        let mut extra = inputs[0].clone();
        extra.name = "z".into();
        inputs.push(extra);
    }
    let mut unknown_output = request(floats(&[1.0]));
    unknown_output.outputs = vec![RequestedOutput { name: "q".into(), classes: 0 }];
    for (bad, says) in [
        (request(named("z", Tensor::from_vec(vec![1, 1], vec![1f32]).unwrap())), "'x' (FP32[N,1])"),
        (request(Inputs::Named(vec![])), "'x' (FP32[N,1])"),
        (wrong(Tensor::from_vec(vec![1, 1], vec![1i32]).unwrap()), "INT32"),
        (wrong(Tensor::from_vec(vec![1, 2], vec![1f32; 2]).unwrap()), "must be 1"),
        (wrong(Tensor::from_vec(vec![1], vec![1f32]).unwrap()), "1 dimensions"),
        (superfluous, "unexpected input 'z'"),
        (unknown_output, "no output 'q'"),
        (request(Inputs::Raw(Bytes::from_static(b"123"))), "multiple"),
    ] {
        let error = infer(&node, "m", bad).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidArgument, "{error}");
        assert!(error.message.contains(says), "{error}");
    }
    assert_eq!(
        infer(&node, "n", request(floats(&[1.0]))).await.unwrap_err().kind,
        ErrorKind::NotFound
    );
}

#[tokio::test]
async fn metadata_and_config_agree_on_the_batch() {
    let Fixture { node, .. } = start(INSTANT, &["m"]).await;
    let metadata = node.model_metadata(model("m")).await.unwrap();
    assert_eq!(metadata.inputs[0].shape, [-1, 1]);
    let config = node.model_config(model("m")).await.unwrap();
    assert!(config.max_batch_size > 0);
    assert_eq!(config.input[0].dims, [1]);
    let old = ModelRef { name: "m", version: Some(2) };
    assert_eq!(node.model_metadata(old).await.unwrap_err().kind, ErrorKind::NotFound);
}

#[tokio::test]
async fn classification_output_is_supported() {
    let Fixture { node, loader, .. } = start(INSTANT, &[]).await;
    let config = ModelConfig { labels: vec!["only".into()], ..ModelConfig::default() };
    loader.add("c", 1, config);
    node.load("c").await.unwrap();
    let mut classes = request(floats(&[0.5, 0.25]));
    classes.outputs = vec![RequestedOutput { name: "y".into(), classes: 3 }];
    let reply = infer(&node, "c", classes).await.unwrap();
    let expected = ["0.500000:0:only", "0.250000:0:only"].map(Bytes::from).to_vec();
    assert_eq!(reply.outputs[0].tensor, Tensor::from_strings(vec![2, 1], expected).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn missed_deadlines_and_full_queues_have_different_errors() {
    let Fixture { node, loader, device } = start_on(FakeDevice::closed(), &[]).await;
    loader.add("m", 1, ModelConfig { queue_capacity: 1, ..ModelConfig::default() });
    node.load("m").await.unwrap();
    let mut late = request(floats(&[1.0]));
    late.options.timeout = Some(Nanos::from_millis(10));
    let reply = tokio::time::timeout(TIME_LIMIT, infer(&node, "m", late)).await;
    let error = reply.expect("the reply waits for the work").unwrap_err();
    assert_eq!(error.kind, ErrorKind::DeadlineExceeded);
    // Until the device finishes work, the only replies are refusals.
    let many = (0..8).map(|_| async {
        let reply = infer(&node, "m", request(floats(&[1.0]))).await;
        device.open();
        reply
    });
    let replies = futures_util::future::join_all(many).await;
    let refused: Vec<_> = replies.iter().filter_map(|reply| reply.as_ref().err()).collect();
    assert!(!refused.is_empty() && refused.len() < 8);
    assert!(refused.iter().all(|e| e.kind == ErrorKind::Unavailable && e.retry_after == Some(1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_request_is_cancelled() {
    let Fixture { node, device, .. } = start_on(FakeDevice::closed(), &["m"]).await;
    let abandoned = infer(&node, "m", request(floats(&[1.0])));
    assert!(tokio::time::timeout(Duration::from_millis(20), abandoned).await.is_err());
    wait_for_metric(&node, "reason=\"CANCELED\"} 1\n").await;
    device.open();
}

#[tokio::test(flavor = "multi_thread")]
async fn loading_does_not_delay_requests() {
    let Fixture { node, loader, device } = start_on(FakeDevice::closed(), &["m"]).await;
    let running = {
        let node = node.clone();
        tokio::spawn(async move { infer(&node, "m", request(floats(&[1.0]))).await })
    };
    is_pending(&node, "m").await;
    loader.add("m", 2, ModelConfig::default());
    loader.add("slow_to_load", 1, ModelConfig::default());
    let loading = {
        let node = node.clone();
        tokio::spawn(async move { node.load("slow_to_load").await })
    };
    let since = Instant::now();
    while state(&node, "slow_to_load").await.0 != Some(ModelState::Loading) {
        assert!(since.elapsed() < TIME_LIMIT, "nothing is loaded");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!node.model_ready(model("slow_to_load")).await.unwrap());
    let error = infer(&node, "slow_to_load", request(floats(&[1.0]))).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    node.load("m").await.unwrap();
    assert!(!running.is_finished());
    device.open();
    let reply = infer(&node, "m", request(floats(&[1.0]))).await.unwrap();
    assert_eq!(&*reply.model_version, "2");
    assert_eq!(&*running.await.unwrap().unwrap().model_version, "1");
    assert!(!loading.is_finished());
    loader.open.store(true, Ordering::SeqCst);
    loading.await.unwrap().unwrap();
    assert!(node.model_ready(model("slow_to_load")).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn unloading_waits_for_running_requests_and_frees_the_model() {
    let Fixture { node, loader, device } = start_on(FakeDevice::closed(), &["m"]).await;
    let running = {
        let node = node.clone();
        tokio::spawn(async move { infer(&node, "m", request(floats(&[1.0]))).await })
    };
    is_pending(&node, "m").await;
    let unloading = {
        let node = node.clone();
        tokio::spawn(async move { node.unload("m").await })
    };
    tokio::time::sleep(Duration::from_millis(40)).await;
    assert!(!unloading.is_finished(), "it waits for running requests");
    device.open();
    unloading.await.unwrap().unwrap();
    assert!(running.await.unwrap().is_ok());
    let (state, reason) = state(&node, "m").await;
    assert_eq!((state, reason.as_str()), (Some(ModelState::Unavailable), "unloaded"));
    let error = infer(&node, "m", request(floats(&[1.0]))).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert_eq!(loader.programs_alive.load(Ordering::SeqCst), 0);
    assert_eq!(node.unload("never").await.unwrap_err().kind, ErrorKind::NotFound);
    node.load("m").await.unwrap();
    assert!(infer(&node, "m", request(floats(&[1.0]))).await.is_ok());
}

#[tokio::test]
async fn failed_load_is_recorded_and_does_not_affect_others() {
    let Fixture { node, loader, .. } = start(INSTANT, &["m"]).await;
    loader.add("broken", 1, ModelConfig::default());
    let error = node.load("broken").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    let (now, reason) = state(&node, "broken").await;
    assert_eq!((now, reason.as_str()), (Some(ModelState::Unavailable), "it is broken"));
    assert_eq!(node.load("never").await.unwrap_err().kind, ErrorKind::NotFound);
    assert_eq!(node.load("../m").await.unwrap_err().kind, ErrorKind::NotFound);
    let error = node.model_ready(model("never")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert!(infer(&node, "m", request(floats(&[1.0]))).await.is_ok());
    assert_eq!(node.index(true).await.unwrap().len(), 1);
}

#[tokio::test]
async fn requests_are_counted() {
    let Fixture { node, .. } = start(Duration::from_millis(2), &["m"]).await;
    infer(&node, "m", request(floats(&[1.0, 2.0, 3.0]))).await.unwrap();
    infer(&node, "m", request(floats(&[1.0]))).await.unwrap();
    let stats = node.statistics(None).await.unwrap().remove(0);
    assert_eq!((stats.inference_count, stats.execution_count), (4, 2));
    let times = stats.inference_stats;
    assert_eq!(times.success.count, 2);
    assert!(times.compute_infer.ns >= 4_000_000);
    let on_device = [times.compute_input.ns, times.compute_infer.ns, times.compute_output.ns];
    assert_eq!(times.success.ns, times.queue.ns + on_device.iter().sum::<u64>());
    assert_eq!(stats.batch_stats.len(), 2);
    assert!(stats.last_inference > 1_700_000_000_000);
    let mut text = String::new();
    node.write_metrics(&mut text);
    assert!(text.contains("nv_inference_request_success{model=\"m\",version=\"1\"} 2\n"), "{text}");
    assert!(text.contains("nv_inference_count{model=\"m\",version=\"1\"} 4\n"), "{text}");
}

fn metrics(node: &LocalNode) -> String {
    let mut text = String::new();
    node.write_metrics(&mut text);
    text
}

#[tokio::test]
async fn the_dashboard_of_gpus_reads_metrics_that_exist() {
    const DASHBOARD: &str = include_str!("../../../../deploy/grafana/atoll-gpu.json");
    let Fixture { node, device, .. } = start(INSTANT, &["m"]).await;
    let readings = DeviceReadings {
        uuid: Some("GPU-1".to_string()),
        utilization_percent: Some(50),
        power_milliwatts: Some(300_000),
        power_limit_milliwatts: Some(700_000),
        energy_millijoules: Some(5_000),
        memory_total: Some(base::Bytes(1 << 30)),
        memory_used: Some(base::Bytes(1 << 29)),
        tuned_steps: Some(3),
    };
    device.readings.set(readings).unwrap();
    infer(&node, "m", request(floats(&[1.0]))).await.unwrap();
    let page = metrics(&node);
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for panel in panels {
        let mut found = 0;
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            let words = expression.split(|c| !is_part(c));
            for name in words.filter(|word| word.starts_with("nv_") || word.starts_with("atoll_")) {
                // A sample, not only the family.
                let sample = page.lines().any(|line| line.starts_with(&format!("{name}{{")));
                assert!(sample, "{name} is not on {page}");
                found += 1;
            }
        }
        assert!(found > 0, "{}", panel["title"]);
    }
    assert!(panels.len() >= 9);
}

#[tokio::test(flavor = "multi_thread")]
async fn preemptions_are_counted() {
    let Fixture { node, device, .. } = start_on(FakeDevice::closed(), &["fast", "slow"]).await;
    let with_class = |class| {
        let options = InferOptions { class: Some(class), ..InferOptions::default() };
        InferRequest { options, ..request(floats(&[1.0])) }
    };
    let background = infer(&node, "slow", with_class(Class::BestEffort));
    let urgent = async {
        is_pending(&node, "slow").await;
        infer(&node, "fast", with_class(Class::RealTime)).await
    };
    let order = async {
        wait_for_metric(
            &node,
            "atoll_preemptions_caused_total{model=\"fast\",version=\"1\",device=\"fake\"} 1\n",
        )
        .await;
        device.open();
    };
    let (background, urgent, ()) = futures_util::future::join3(background, urgent, order).await;
    assert!(background.is_ok() && urgent.is_ok());
    let text = metrics(&node);
    let has = |line: &str| assert!(text.contains(line), "{line} is not in:\n{text}");
    has("atoll_preemptions_total{model=\"slow\",version=\"1\"} 1\n");
    has("atoll_preemption_seconds_count{model=\"slow\",version=\"1\",device=\"fake\"} 1\n");
    has("atoll_preemption_seconds_bucket{model=\"slow\",version=\"1\",device=\"fake\",\
         le=\"+Inf\"} 1\n");
    has("atoll_preemption_seconds_count{model=\"fast\",version=\"1\",device=\"fake\"} 0\n");
    has("atoll_preemptions_caused_total{model=\"fast\",version=\"1\",device=\"fake\"} 1\n");
}

fn picture() -> Bytes {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, 9, 7);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&[255, 0, 0].repeat(63)).unwrap();
    file.into()
}

fn registration(name: &str) -> RegisterRequest {
    RegisterRequest {
        name: name.into(),
        onnx: Bytes::from_static(b"onnx"),
        labels: Vec::new(),
        preprocessing: None,
        class: None,
        slo_ms: None,
        settings: None,
        canary: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_large_batches_are_spans() {
    let Fixture { node, device, .. } = start_on(FakeDevice::closed(), &["wide"]).await;
    let ask = |value: f32| {
        let node = node.clone();
        let row = Tensor::from_vec(vec![1, 1 << 16], vec![value; 1 << 16]).unwrap();
        tokio::spawn(async move { infer(&node, "wide", request(named("x", row))).await })
    };
    let requests: Vec<_> = (0..8u8).map(|value| ask(f32::from(value))).collect();
    let line = "pending_request_count{model=\"wide\",version=\"1\"} 8\n";
    wait_for_metric(&node, line).await;
    device.open();
    for (index, request) in requests.into_iter().enumerate() {
        let outputs = request.await.unwrap().unwrap().outputs;
        assert_eq!(outputs[0].tensor.to_vec::<f32>().unwrap()[7], index as f32);
    }
    let monitor = node.monitor().unwrap();
    let trace = monitor.trace(Nanos::from_millis(600_000)).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let gathers: Vec<_> = events
        .filter(|event| event["ph"] == "b" && event["name"] == "gather batch")
        .map(|event| &event["args"])
        .collect();
    // The first ran before the others came; some of these shared a batch.
    let joined = gathers.iter().filter(|args| args["bytes"].as_u64() >= Some(2 << 18));
    assert!(joined.count() > 0, "{gathers:?}");
    assert!(gathers.iter().all(|args| args["model"] == "wide" && args["job"].as_u64() > Some(0)));
    // A viewer gets them as numbers: kind, device, model, class, bytes.
    let spans = monitor.update(&mut Default::default(), true).spans;
    let numbers: Vec<f64> =
        spans.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect();
    let copies = numbers.chunks_exact(14).filter(|span| span[0] == 4.0 && span[5] == 1.0);
    assert_eq!(copies.count(), gathers.len());
}

async fn infer_often(node: &LocalNode, times: usize) {
    for _ in 0..times {
        infer(node, "m", request(floats(&[1.0]))).await.unwrap();
    }
}

/// The numbers in an update's spans, 14 for each.
fn span_count(update: &LiveUpdate) -> usize {
    update.spans.len() / (SPAN_NUMBERS * 8)
}

#[tokio::test]
async fn figures_count_requests_whose_spans_a_viewer_loses() {
    let Fixture { node, .. } = start(INSTANT, &["m"]).await;
    let monitor = node.monitor().unwrap();
    let mut viewers = [LiveCursor::default(), LiveCursor::default()];
    infer_often(&node, 3).await;
    for viewer in &mut viewers {
        let figures = monitor.update(viewer, true).figures;
        // The first figures have no begin.
        assert_eq!((&figures["interval_ns"], &figures["flows"]), (&json!(0), &json!([])));
    }
    // A request and its run are a span each.
    infer_often(&node, 5_000).await;
    for (viewer, with_spans) in viewers.iter_mut().zip([true, false]) {
        let update = monitor.update(viewer, with_spans);
        let flow = &update.figures["flows"][0];
        assert_eq!((&flow["model"], &flow["done"]), (&json!("m"), &json!(5_000)));
        assert_eq!(flow["rows"], json!([[1, 5_000]]));
        let waits = flow["wait"].as_array().unwrap().iter();
        assert_eq!(waits.map(|pair| pair[1].as_u64().unwrap()).sum::<u64>(), 5_000);
        let lost = update.figures["lost"].as_u64().unwrap();
        assert_eq!(lost > 0, with_spans);
        assert_eq!(span_count(&update) as u64 + lost, if with_spans { 10_000 } else { 0 });
        // Nothing happened since.
        assert_eq!(monitor.update(viewer, with_spans).figures["flows"], json!([]));
    }
}

#[tokio::test]
async fn spans_from_before_a_viewer_came_are_not_lost() {
    let Fixture { node, .. } = start(INSTANT, &["m"]).await;
    let monitor = node.monitor().unwrap();
    infer_often(&node, 11_000).await;
    let mut viewer = LiveCursor::default();
    let first = monitor.update(&mut viewer, true);
    assert_eq!((span_count(&first), &first.figures["lost"]), (20_000, &json!(0)));
    assert_eq!(first.figures["resumed"], json!(false));
    // Another stream continues where this one was.
    infer_often(&node, 50).await;
    let position = first.figures["position"].as_str().unwrap();
    let mut again = monitor.cursor(position);
    let next = monitor.update(&mut again, true);
    assert_eq!((span_count(&next), &next.figures["resumed"]), (100, &json!(true)));
    // What cannot be a position of this process is as good as none.
    let other = format!("1{position}");
    for position in ["", "x", "1.2", other.as_str(), &position.replace('.', ".7.")] {
        let update = monitor.update(&mut monitor.cursor(position), true);
        assert_eq!(update.figures["resumed"], json!(false), "{position}");
    }
    let process = position.split('.').next().unwrap();
    let mut ahead = monitor.cursor(&format!("{process}.{}", u64::MAX));
    assert_eq!(span_count(&monitor.update(&mut ahead, true)), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_has_not_ended_counts_as_busy() {
    let Fixture { node, device, .. } = start_on(FakeDevice::closed(), &["m"]).await;
    let monitor = node.monitor().unwrap();
    let mut viewer = LiveCursor::default();
    let asking = node.clone();
    let reply = tokio::spawn(async move {
        infer(&asking, "m", request(floats(&[1.0]))).await.unwrap();
    });
    let busy = |viewer: &mut LiveCursor| {
        let figures = monitor.update(viewer, false).figures;
        let busy = &figures["devices"][0]["busy_ns"];
        busy["rt"].as_u64().unwrap() + busy["be"].as_u64().unwrap()
    };
    let since = Instant::now();
    while busy(&mut viewer) == 0 {
        assert!(since.elapsed() < TIME_LIMIT, "no run counts as busy");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    device.open();
    reply.await.unwrap();
}

#[tokio::test]
async fn a_registration_that_cannot_be_loaded_is_removed() {
    let Fixture { node, .. } = start(INSTANT, &[]).await;
    assert!(node.register(registration("broken")).await.is_err());
    let index = node.index(false).await.unwrap();
    assert!(index.iter().all(|entry| entry.name != "broken" || entry.version.is_empty()));
    node.register(registration("fine")).await.unwrap();
    assert_eq!(node.delete_model(ModelRef { name: "fine", version: None }).await.unwrap(), 1);
    let gone = node.model_ready(ModelRef { name: "fine", version: None }).await;
    assert_eq!(gone.unwrap_err().kind, ErrorKind::NotFound);
}

#[tokio::test]
async fn clients_register_and_delete_nothing_where_models_are_fixed() {
    let Fixture { node, .. } = start(INSTANT, &[]).await;
    node.forbid_control();
    let refused = node.register(registration("image")).await.unwrap_err();
    assert!(refused.message.contains("--model-control-mode"), "{refused}");
    let model = ModelRef { name: "image", version: None };
    assert!(node.delete_model(model).await.is_err());
    assert!(node.roll_back_model(model).await.is_err());
}

#[tokio::test]
async fn registered_models_classify_pictures() {
    let Fixture { node, .. } = start(INSTANT, &[]).await;
    let registered = node
        .register(RegisterRequest {
            name: "image".into(),
            onnx: Bytes::from_static(b"onnx"),
            labels: vec!["red".into()],
            preprocessing: Some(Default::default()),
            class: None,
            slo_ms: None,
            settings: None,
            canary: None,
        })
        .await
        .unwrap();
    assert_eq!((registered.version.as_str(), registered.state), ("1", ModelState::Ready));
    let classify = |image: Bytes, k| {
        let request = ClassifyRequest { model: "image".into(), image, k };
        node.classify(request, RequestContext::default())
    };
    let reply = classify(picture(), 5).await.unwrap();
    assert_eq!(reply.predictions.len(), 5);
    assert_eq!((reply.predictions[0].index, &*reply.predictions[0].label), (0, "red"));
    let bad = classify(Bytes::from_static(b"no picture"), 5).await.unwrap_err();
    assert_eq!(bad.kind, ErrorKind::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_node_refuses_requests() {
    let Fixture { node, .. } = start(INSTANT, &["m"]).await;
    assert!(node.ready());
    assert!(node.drain(Duration::from_secs(1)).await);
    assert!(!node.ready());
    let error = infer(&node, "m", request(floats(&[1.0]))).await.unwrap_err();
    assert_eq!(error.message, "the server is shutting down");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_devices_are_one_service() {
    let clock = Arc::new(MonotonicClock::new());
    let node = || {
        let device = FakeDevice::new(Duration::from_millis(3));
        Arc::new(Node::start(device, NodeOptions::default(), clock.clone()).unwrap())
    };
    let options = DeviceGroupOptions {
        interval: Nanos::from_millis(50),
        calm_intervals: 60,
        ..DeviceGroupOptions::default()
    };
    let device_group = Arc::new(DeviceGroup::start(vec![node(), node()], options).unwrap());
    let loader = Arc::new(FakeLoader::new(FakeDevice::new(INSTANT)));
    let alone = Batching { policy: BatchingPolicy::None, ..Batching::default() };
    loader.add("m", 1, ModelConfig { batching: alone, ..ModelConfig::default() });
    let node = LocalNode::new(device_group, loader);
    assert!(node.load_all(&[], |_, _, _| {}).await.unwrap().is_empty());
    node.set_started();
    let has = |line: &str| metrics(&node).contains(line);
    assert!(!has("device=\"fake#1\"} 1000"), "one device is enough until there is load");
    // More requests than one device serves, until a replica is added.
    let mut sent = 0;
    while !has("atoll_replica_ready{model=\"m\",version=\"1\",device=\"fake#1\"} 1") {
        let many = (0..64).map(|_| infer(&node, "m", request(floats(&[1.0]))));
        let replies = futures_util::future::join_all(many).await;
        assert!(replies.iter().all(Result::is_ok));
        sent += replies.len() as u64;
        assert!(sent < 1_000_000, "no replica is added");
    }
    let many = (0..64).map(|_| infer(&node, "m", request(floats(&[1.0]))));
    assert!(futures_util::future::join_all(many).await.iter().all(Result::is_ok));
    sent += 64;
    assert!(!has("atoll_replica_requests_total{model=\"m\",version=\"1\",device=\"fake#1\"} 0"));
    assert_eq!(node.statistics(None).await.unwrap()[0].inference_count, sent);
    assert!(!has("atoll_replica_changes_total{change=\"made\"} 0"));
    assert_eq!(node.model_config(model("m")).await.unwrap().instance_group[0].count, 2);
    // Without requests one replica is enough again.
    while has("atoll_replica_ready{model=\"m\",version=\"1\",device=\"fake#1\"}") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(infer(&node, "m", request(floats(&[1.0]))).await.is_ok());
    node.unload("m").await.unwrap();
    assert_eq!(
        infer(&node, "m", request(floats(&[1.0]))).await.unwrap_err().kind,
        ErrorKind::Unavailable
    );
    assert!(node.model_ready(model("m")).await.is_ok_and(|ready| !ready));
    node.load("m").await.unwrap();
    assert!(infer(&node, "m", request(floats(&[1.0]))).await.is_ok());
    assert!(node.drain(Duration::from_secs(5)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_waits_for_its_first_requests() {
    let Fixture { node, .. } = start(Duration::from_millis(50), &["m"]).await;
    let executions = async || {
        let stats = node.statistics(Some(model("m"))).await.unwrap();
        (stats[0].inference_count, stats[0].execution_count)
    };
    let ask = || async { infer(&node, "m", request(floats(&[1.0]))).await.unwrap() };
    // Batch times are known before a request waits for a batch.
    infer(&node, "m", request(floats(&[1.0; 8]))).await.unwrap();
    node.set_staggered_batch("m", Some(StaggeredBatch { batch: 8, least: 3 }));
    // They run as one batch, unless one of them arrives too late.
    let mut rounds = 0;
    let after = loop {
        let before = executions().await;
        tokio::join!(ask(), ask(), ask());
        let after = executions().await;
        assert_eq!(after.0 - before.0, 3);
        if after.1 - before.1 == 1 {
            break after;
        }
        rounds += 1;
        assert!(rounds < 20, "three never run together");
    };
    // A single request does not wait forever.
    let started = Instant::now();
    ask().await;
    assert!(started.elapsed() >= Duration::from_millis(95), "{:?}", started.elapsed());
    node.set_staggered_batch("m", None);
    node.set_staggered_batch("nobody", None);
    ask().await;
    assert_eq!(executions().await.0, after.0 + 2);
}

/// The configuration parameters of a model once it has been profiled.
async fn measured(node: &LocalNode, name: &str) -> impl Fn(&str) -> String + use<> {
    loop {
        let parameters = node.model_config(model(name)).await.unwrap().parameters;
        if parameters.contains_key("atoll_profile_us") {
            return move |key: &str| parameters[key].string_value.clone();
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_profiled_in_the_background() {
    let Fixture { node, loader, .. } = start(Duration::from_millis(6), &[]).await;
    let elastic = Batching { policy: BatchingPolicy::Elastic, ..Batching::default() };
    let promised = |slo_ms| ModelConfig {
        slo_ms: Some(slo_ms),
        batching: elastic.clone(),
        ..ModelConfig::default()
    };
    loader.add("hasty", 1, promised(10));
    loader.add("patient", 1, promised(600_000));
    node.load("hasty").await.unwrap();
    node.load("patient").await.unwrap();
    assert!(infer(&node, "patient", request(floats(&[1.0]))).await.is_ok(), "ready at once");
    // A batch of any size takes six milliseconds on this device.
    let hasty = measured(&node, "hasty").await;
    assert_eq!(
        hasty("atoll_batch_max"),
        "1",
        "two of six are more than ten: {}",
        hasty("atoll_profile_us")
    );
    let patient = measured(&node, "patient").await;
    assert_eq!(patient("atoll_batch_max"), "16");
    assert_eq!(patient("atoll_profile_us").split(',').count(), 5);
    let registered = RegisterRequest {
        name: "new".into(),
        onnx: Bytes::from_static(b"onnx"),
        labels: vec![],
        preprocessing: None,
        class: None,
        slo_ms: Some(600_000),
        settings: None,
        canary: None,
    };
    node.register(registered).await.unwrap();
    assert_eq!(measured(&node, "new").await("atoll_slo_ms"), "600000");
    let stats = node.statistics(None).await.unwrap();
    let done: u64 = stats.iter().map(|stats| stats.inference_count).sum();
    assert_eq!(done, 1, "profiling is not counted");
    // Unloading does not wait for profiling.
    loader.add("brief", 1, promised(600_000));
    node.load("brief").await.unwrap();
    node.unload("brief").await.unwrap();
}

/// Starts a load that does not end by itself.
async fn start_loading(node: &LocalNode, loader: &FakeLoader) -> tokio::task::JoinHandle<()> {
    loader.add("slow_to_load", 1, ModelConfig::default());
    let loading = {
        let node = node.clone();
        tokio::spawn(async move {
            let cancelled = node.load("slow_to_load").await.unwrap_err();
            assert_eq!(cancelled.kind, ErrorKind::Cancelled, "{cancelled}");
        })
    };
    let since = Instant::now();
    while state(node, "slow_to_load").await.0 != Some(ModelState::Loading) {
        assert!(since.elapsed() < TIME_LIMIT, "nothing is loaded");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    loading
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_ends_with_its_client() {
    let Fixture { node, loader, .. } = start(INSTANT, &[]).await;
    start_loading(&node, &loader).await.abort();
    let since = Instant::now();
    while state(&node, "slow_to_load").await.0 == Some(ModelState::Loading) {
        assert!(since.elapsed() < TIME_LIMIT, "it is still loaded");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(loader.programs_alive.load(Ordering::SeqCst), 0);
    // Another client loads it.
    loader.open.store(true, Ordering::SeqCst);
    node.load("slow_to_load").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_not_served_that_was_deleted_or_unloaded_while_it_was_loaded() {
    let Fixture { node, loader, .. } = start(INSTANT, &[]).await;
    let loading = start_loading(&node, &loader).await;
    node.unload("slow_to_load").await.unwrap();
    loading.await.unwrap();
    assert!(!node.model_ready(model("slow_to_load")).await.unwrap());
    let loading = start_loading(&node, &loader).await;
    assert_eq!(node.delete_model(model("slow_to_load")).await.unwrap(), 1);
    loading.await.unwrap();
    let gone = node.model_ready(model("slow_to_load")).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::NotFound);
    assert_eq!(loader.programs_alive.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_limit_the_requests_of_a_model() {
    let Fixture { node, loader, device } = start_on(FakeDevice::closed(), &[]).await;
    let limits = RequestLimits {
        rate: Some("3/h".parse().unwrap()),
        concurrency: Some(1),
        classes: vec![Class::BestEffort],
        max_priority: Some(5),
    };
    loader.add("m", 1, ModelConfig { limits, ..ModelConfig::default() });
    node.load("m").await.unwrap();
    let running = {
        let node = node.clone();
        tokio::spawn(async move { infer(&node, "m", request(floats(&[1.0]))).await })
    };
    is_pending(&node, "m").await;
    let refused = infer(&node, "m", request(floats(&[1.0]))).await.unwrap_err();
    assert_eq!((refused.kind, refused.retry_after), (ErrorKind::TooManyRequests, Some(1)));
    device.open();
    running.await.unwrap().unwrap();
    for (class, priority) in [(Some(Class::RealTime), None), (None, Some(4))] {
        let mut request = request(floats(&[1.0]));
        (request.options.class, request.options.priority) = (class, priority);
        let refused = infer(&node, "m", request).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Forbidden, "{refused}");
    }
    for _ in 0..2 {
        infer(&node, "m", request(floats(&[1.0]))).await.unwrap();
    }
    let refused = infer(&node, "m", request(floats(&[1.0]))).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::TooManyRequests);
    assert!(refused.message.contains("3/h") && refused.retry_after > Some(60), "{refused}");
    let drops = "atoll_drops_total{model=\"m\",version=\"1\",reason=\"limit\"} 4\n";
    assert!(metrics(&node).contains(drops), "{}", metrics(&node));
}
