//! `atoll demo`: a real server, a real model and real clients over loopback, in one process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use api::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use api::proto::infer_parameter::ParameterChoice;
use api::proto::model_infer_request::InferInputTensor;
use api::proto::{InferParameter, ModelInferRequest, ModelInferResponse};
use api::{InferenceService, RegisterRequest};
use assembly::{
    Failure, backend::address_text, demo_model::DIGITS_ONNX, device_group::device_group_on,
    tokio_runtime,
};
use base::{Histogram, Nanos};
use device::{Device, DeviceError};
use model::ModelConfig;
use model::config::{ChannelOrder, Class, Preprocessing};
use runtime::{DeviceGroup, NodeOptions};
use serde::{Deserialize, Serialize};
use server::{KeptSettings, LoadError, LoadedModel, LocalNode, ModelLoader, RepositoryEntry};
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::args::DemoArgs;
use crate::listen::listen;
use crate::shutdown_signal::ShutdownSignal;

const MODEL: &str = "digits";
const SAMPLES_JSON: &str = include_str!("../../../assets/digits_samples.json");
const IMAGE_ELEMENTS: usize = 64;

/// Real time is alone for this long, at most.
const MAX_ALONE: Duration = Duration::from_secs(5);

/// Default seconds of load.
const DEFAULT_SECONDS: u64 = 5;
/// Period of real-time requests, independent of replies.
const REAL_TIME_PERIOD: Duration = Duration::from_millis(5);
/// Images of one best-effort request: enough work to be preempted.
const BEST_EFFORT_BATCH: usize = 2048;
const BEST_EFFORT_CLIENTS: usize = 2;

/// Held-out images of scikit-learn's digits set.
#[derive(Debug, Deserialize)]
struct DigitSamples {
    scale: f32,
    samples: Vec<DigitSample>,
}

#[derive(Debug, Deserialize)]
struct DigitSample {
    label: usize,
    pixels: Vec<f32>,
}

/// The report of the demo.
#[derive(Debug, Serialize)]
struct DemoReport {
    device: String,
    seconds: f64,
    rt_alone: ClassReport,
    rt_beside_be: ClassReport,
    be: ClassReport,
    preemptions: u64,
    correct: u64,
    #[serde(rename = "answered")]
    replies: u64,
}

#[derive(Debug, Default, Serialize)]
struct ClassReport {
    requests: u64,
    images_per_second: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    errors: u64,
}

/// Runs the command.
pub(crate) fn run(args: &DemoArgs) -> Result<(), Failure> {
    let device = assembly::open_device(&args.device)?;
    tokio_runtime()?.block_on(demo(args, device))
}

async fn demo(args: &DemoArgs, device: Arc<dyn Device>) -> Result<(), Failure> {
    let mut stop = ShutdownSignal::new()?;
    let description = device.info().description.clone();
    let device_group = device_group_on(device, NodeOptions::default())?;
    let loader = Arc::new(BuiltInLoader { device_group: device_group.clone() });
    let service = LocalNode::new(device_group, loader);
    let server = listen(&args.listen, None, 64 << 20, Arc::new(service.clone())).await?;
    service.load_model(MODEL).await.map_err(Failure::failed)?;
    service.set_started();
    let grpc = server.grpc_addr.ok_or_else(|| Failure::failed("gRPC does not listen"))?;
    let seconds = args.seconds.unwrap_or(DEFAULT_SECONDS);
    if !args.json {
        println!("serving '{MODEL}' on {description}");
        println!("  console http://{}/", address_text(server.http_addr));
        println!("  REST    http://{}/v2/models/{MODEL}", address_text(server.http_addr));
        println!("  gRPC    {grpc}");
        println!("  metrics http://{}/metrics", address_text(server.metrics_addr));
        println!("load for {seconds} s: real time alone, then beside best effort ...");
    }
    let load = DemoClients::new(&format!("http://{grpc}"))?;
    let outcome = tokio::select! {
        outcome = load.run(Duration::from_secs(seconds)) => outcome?,
        () = stop.wait() => return finish(server).await,
    };
    let preemptions = preemptions(&service);
    let report = DemoReport { device: description, preemptions, ..outcome };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        print(&report);
    }
    if args.seconds.is_none() {
        let console = address_text(server.http_addr);
        eprintln!("some load goes on until Ctrl-C; watch it at http://{console}/");
        tokio::select! {
            ended = load.go_on() => ended?,
            () = stop.wait() => {}
        }
    }
    finish(server).await
}

async fn finish(server: server::RunningServer) -> Result<(), Failure> {
    server.shutdown(Duration::from_secs(5)).await;
    Ok(())
}

fn preemptions(service: &LocalNode) -> u64 {
    let mut text = String::new();
    service.write_metrics(&mut text);
    let samples = text.lines().filter(|line| line.starts_with("atoll_preemptions_total"));
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
}

/// The settings of the built-in model.
fn settings() -> ModelConfig {
    let preprocessing =
        Preprocessing { channels: ChannelOrder::Gray, crop: 1.0, ..Preprocessing::default() };
    ModelConfig {
        labels: (0..10).map(|digit| digit.to_string()).collect(),
        preprocessing: Some(preprocessing),
        ..ModelConfig::default()
    }
}

/// Serves the built-in model.
struct BuiltInLoader {
    device_group: Arc<DeviceGroup>,
}

impl ModelLoader for BuiltInLoader {
    fn load(&self, name: &str, _: Option<u64>, _: &AtomicBool) -> Result<LoadedModel, LoadError> {
        if name != MODEL {
            return Err(LoadError::NotFound(format!("the demo has one model, '{MODEL}'")));
        }
        let plan = assembly::compile_bytes(DIGITS_ONNX)
            .map_err(|err| LoadError::Internal(err.to_string()))?;
        let placed = self
            .device_group
            .load(Arc::new(plan))
            .map_err(|err: DeviceError| LoadError::Internal(err.to_string()))?;
        Ok(LoadedModel { placed, config: settings(), version: 1 })
    }

    fn settings(&self, _: &str, _: u64) -> Result<ModelConfig, LoadError> {
        Ok(settings())
    }

    fn keep_settings(&self, _: &str, _: u64, _: &ModelConfig) -> Result<KeptSettings, LoadError> {
        Ok(KeptSettings::UntilLoad("the demo keeps nothing".to_string()))
    }

    fn index(&self) -> Result<Vec<RepositoryEntry>, LoadError> {
        Ok(vec![RepositoryEntry { name: MODEL.to_string(), version: 1 }])
    }

    fn register(&self, _: RegisterRequest) -> Result<u64, LoadError> {
        Err(LoadError::Unavailable("the demo keeps no models; use atoll serve".to_string()))
    }
}

type Client = GrpcInferenceServiceClient<Channel>;

/// Clients of both classes; each has a connection of its own, as on other machines.
struct DemoClients {
    address: String,
    samples: Arc<DigitSamples>,
}

/// Sets its flag when it goes out of scope.
struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Results of one kind of client.
#[derive(Default)]
struct ClientStats {
    latency: Histogram,
    images: u64,
    correct: u64,
    errors: u64,
}

impl DemoClients {
    fn new(address: &str) -> Result<DemoClients, Failure> {
        let samples: DigitSamples = serde_json::from_str(SAMPLES_JSON).map_err(Failure::failed)?;
        Ok(DemoClients { address: address.to_string(), samples: Arc::new(samples) })
    }

    async fn client(&self) -> Result<Client, Failure> {
        let client = Client::connect(self.address.clone()).await.map_err(Failure::failed)?;
        Ok(client.max_decoding_message_size(64 << 20))
    }

    /// Clients of best effort, until `stop` is set.
    async fn best_effort(
        &self,
        stop: &Arc<AtomicBool>,
        pace: Pace,
    ) -> Result<Vec<JoinHandle<ClientStats>>, Failure> {
        let mut clients = Vec::with_capacity(BEST_EFFORT_CLIENTS);
        for _ in 0..BEST_EFFORT_CLIENTS {
            let (client, samples) = (self.client().await?, self.samples.clone());
            clients.push(tokio::spawn(send_batches(client, samples, stop.clone(), pace)));
        }
        Ok(clients)
    }

    /// Both classes, without end, for those who watch: part of the machine stays free.
    async fn go_on(&self) -> Result<(), Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        let _stop_at_end = SetOnDrop(stop.clone());
        let _clients = self.best_effort(&stop, Pace::HalfOfTheTime).await?;
        loop {
            self.real_time(MAX_ALONE).await?;
        }
    }

    /// Real time alone, half of the time and not for long, then beside best effort.
    async fn run(&self, span: Duration) -> Result<DemoReport, Failure> {
        let alone_span = (span / 2).min(MAX_ALONE);
        let beside_span = span - alone_span;
        let started = Instant::now();
        let alone = self.real_time(alone_span).await?;
        let stop = Arc::new(AtomicBool::new(false));
        // Set also when a signal drops this future: a client that goes on after its server has
        // gone would keep the process from ending.
        let stop_at_end = SetOnDrop(stop.clone());
        let best_effort = self.best_effort(&stop, Pace::ClosedLoop).await?;
        let beside = self.real_time(beside_span).await?;
        drop(stop_at_end);
        let mut best_effort_stats = ClientStats::default();
        for client in best_effort {
            best_effort_stats.add(client.await.map_err(Failure::failed)?);
        }
        let replies = alone.images + beside.images + best_effort_stats.images;
        Ok(DemoReport {
            device: String::new(),
            seconds: started.elapsed().as_secs_f64(),
            preemptions: 0,
            correct: alone.correct + beside.correct + best_effort_stats.correct,
            replies,
            rt_alone: alone.report(alone_span),
            rt_beside_be: beside.report(beside_span),
            be: best_effort_stats.report(beside_span),
        })
    }

    /// One image per period.
    async fn real_time(&self, span: Duration) -> Result<ClientStats, Failure> {
        let mut client = self.client().await?;
        let mut stats = ClientStats::default();
        let mut ticks = tokio::time::interval(REAL_TIME_PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let end = Instant::now() + span;
        let mut next = 0;
        while Instant::now() < end {
            ticks.tick().await;
            let message = request(&self.samples, next, 1, Class::RealTime);
            stats.send(&mut client, message, &self.samples, next, 1).await;
            next += 1;
        }
        Ok(stats)
    }
}

/// How much a client of best effort sends.
#[derive(Clone, Copy, PartialEq)]
enum Pace {
    /// The next request follows the reply.
    ClosedLoop,
    /// After a reply it pauses for as long as the request took.
    HalfOfTheTime,
}

/// Large batches, one after another.
async fn send_batches(
    mut client: Client,
    samples: Arc<DigitSamples>,
    stop: Arc<AtomicBool>,
    pace: Pace,
) -> ClientStats {
    let mut stats = ClientStats::default();
    // Encoded once, because encoding is no work of the server.
    let message = request(&samples, 0, BEST_EFFORT_BATCH, Class::BestEffort);
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        stats.send(&mut client, message.clone(), &samples, 0, BEST_EFFORT_BATCH).await;
        if pace == Pace::HalfOfTheTime {
            tokio::time::sleep(began.elapsed()).await;
        }
    }
    stats
}

impl ClientStats {
    async fn send(
        &mut self,
        client: &mut Client,
        request: ModelInferRequest,
        samples: &DigitSamples,
        first: usize,
        count: usize,
    ) {
        let started = Instant::now();
        match client.model_infer(request).await {
            Ok(reply) => {
                self.latency.record(started.elapsed().into());
                self.images += count as u64;
                self.correct += correct(samples, first, count, reply.get_ref());
            }
            Err(_) => self.errors += 1,
        }
    }

    fn add(&mut self, other: ClientStats) {
        self.latency.merge(&other.latency);
        self.images += other.images;
        self.correct += other.correct;
        self.errors += other.errors;
    }

    fn report(&self, span: Duration) -> ClassReport {
        let us = |nanos: Nanos| nanos.0 as f64 / 1e3;
        ClassReport {
            requests: self.latency.count(),
            images_per_second: self.images as f64 / span.as_secs_f64(),
            p50_us: us(self.latency.quantile(0.5)),
            p99_us: us(self.latency.quantile(0.99)),
            max_us: us(self.latency.max()),
            errors: self.errors,
        }
    }
}

fn request(samples: &DigitSamples, first: usize, count: usize, class: Class) -> ModelInferRequest {
    let chosen = samples.samples.iter().cycle().skip(first % samples.samples.len()).take(count);
    let pixels = chosen.flat_map(|sample| sample.pixels.iter().map(|pixel| pixel / samples.scale));
    let bytes: Vec<u8> = pixels.flat_map(f32::to_le_bytes).collect();
    debug_assert_eq!(bytes.len(), count * IMAGE_ELEMENTS * 4);
    let class = ParameterChoice::StringParam(class.as_str().to_string());
    ModelInferRequest {
        model_name: MODEL.to_string(),
        inputs: vec![InferInputTensor {
            name: "image".to_string(),
            datatype: "FP32".to_string(),
            shape: vec![count as i64, 1, 8, 8],
            ..InferInputTensor::default()
        }],
        raw_input_contents: vec![bytes.into()],
        parameters: [("atoll_class".to_string(), InferParameter { parameter_choice: Some(class) })]
            .into(),
        ..ModelInferRequest::default()
    }
}

/// How many replies name the right digit.
fn correct(samples: &DigitSamples, first: usize, count: usize, reply: &ModelInferResponse) -> u64 {
    let Some(raw) = reply.raw_output_contents.first() else { return 0 };
    let scores: Vec<f32> = raw
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    let chosen = samples.samples.iter().cycle().skip(first % samples.samples.len()).take(count);
    let is_right = |(row, sample): &(&[f32], &DigitSample)| {
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
        best == Some(sample.label)
    };
    scores.chunks_exact(10).zip(chosen).filter(is_right).count() as u64
}

fn print(report: &DemoReport) {
    println!();
    println!(
        "{:<28} {:>9} {:>11} {:>10} {:>10} {:>10}",
        "", "requests", "images/s", "p50 us", "p99 us", "max us"
    );
    for (name, class) in [
        ("real time, alone", &report.rt_alone),
        ("real time, beside BE", &report.rt_beside_be),
        ("best effort, 2048 images", &report.be),
    ] {
        println!(
            "{name:<28} {:>9} {:>11.0} {:>10.0} {:>10.0} {:>10.0}",
            class.requests, class.images_per_second, class.p50_us, class.p99_us, class.max_us
        );
    }
    let errors = report.rt_alone.errors + report.rt_beside_be.errors + report.be.errors;
    println!();
    println!(
        "{} preemptions; {:.2} % of {} images recognised; {errors} errors",
        report.preemptions,
        100.0 * report.correct as f64 / report.replies.max(1) as f64,
        report.replies,
    );
}
