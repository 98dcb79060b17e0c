//! `atoll bench frontend`: the latency that a frontend adds to a request.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::proto;
use api::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use assembly::backend::{
    BackendParts, REQUEST_TIMEOUT, RunningBackend, address_text, clock, server_metadata,
};
use assembly::demo_model::DIGITS_ONNX;
use assembly::device_group::device_group_on;
use assembly::{DeviceArgs, Failure, tokio_runtime};
use clap::Args;
use cluster::frontend::{Frontend, FrontendSettings};
use cluster::record::{FrontendRecord, Keys};
use cluster::scheduler::SchedulerSettings;
use cluster::scheduler::agent::SchedulerAgent;
use cluster::scheduler::maintenance::MaintenanceSettings;
use cluster::store;
use cluster::store::etcd::EtcdAccess;
use runtime::NodeOptions;
use serde::Serialize;
use server::{RunningServer, Server, ServerOptions};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tonic::transport::Channel;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench frontend
  atoll bench frontend --requests 2000 --rounds 20 --json
  atoll bench frontend --device cuda:0

A scheduler, a backend and a frontend start in this process, each with threads of its own. One
client sends requests for the demo model over loopback, alternately to the backend and through the
frontend.")]
pub(crate) struct FrontendBenchArgs {
    /// Requests of one measurement
    #[arg(
        long,
        default_value_t = 500,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    pub(crate) requests: u32,

    /// Measurements of each kind
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

const MODEL: &str = "digits";
/// Requests before the measurement.
const WARMUP_REQUESTS: u32 = 200;
/// Max time until the cluster is ready.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Values of one input of the demo model.
const PIXELS: usize = 64;

/// Microseconds, directly and through the frontend.
#[derive(Clone, Debug, Serialize)]
struct ProtocolRow {
    protocol: &'static str,
    direct_p50_us: f64,
    direct_p99_us: f64,
    through_p50_us: f64,
    through_p99_us: f64,
    difference_p50_us: f64,
    difference_p99_us: f64,
    ratio_p50: f64,
}

/// A cluster in this process.
struct LocalCluster {
    backend: Option<RunningBackend>,
    frontend: Option<RunningServer>,
    direct: (SocketAddr, SocketAddr),
    through: (SocketAddr, SocketAddr),
    backend_threads: Runtime,
    frontend_threads: Runtime,
    folder: PathBuf,
    _stop: watch::Sender<bool>,
}

fn loopback() -> ServerOptions {
    let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    ServerOptions { http: any, grpc: any, metrics: None, ..ServerOptions::default() }
}

fn addresses(server: &RunningServer) -> Result<(SocketAddr, SocketAddr), Failure> {
    server
        .http_addr
        .zip(server.grpc_addr)
        .ok_or_else(|| Failure::failed("a server does not listen"))
}

impl LocalCluster {
    fn start(device: &DeviceArgs) -> Result<LocalCluster, Failure> {
        let device = assembly::open_device(device)?;
        let folder = std::env::temp_dir().join(format!("atoll-frontend-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(Failure::failed)?;
        let model = folder.join(format!("{MODEL}.onnx"));
        std::fs::write(&model, DIGITS_ONNX).map_err(Failure::failed)?;
        let (backend_threads, frontend_threads) = (tokio_runtime()?, tokio_runtime()?);
        // The store spawns tasks, which need a runtime.
        let store = {
            let _inside = backend_threads.enter();
            store::open("memory", EtcdAccess::default(), clock()).map_err(Failure::failed)?
        };
        let (keys, lease) = (Keys::new("bench"), Duration::from_secs(5));
        let (stop, stopped) = watch::channel(false);
        let scheduler = SchedulerAgent {
            store: store.clone(),
            keys: keys.clone(),
            name: "scheduler".to_string(),
            lease,
            settings: SchedulerSettings::default(),
            scaling: None,
            maintenance: MaintenanceSettings::default(),
            state: Arc::default(),
            clock: clock(),
        };
        backend_threads.spawn(scheduler.run(stopped));
        let backend = backend_threads.block_on(RunningBackend::start(BackendParts {
            store: store.clone(),
            keys: keys.clone(),
            name: "backend".to_string(),
            lease,
            repositories: &[model],
            files: None,
            device_group: device_group_on(device, NodeOptions::default())?,
            listen: loopback(),
            advertise: None,
            kind: None,
            memory_mib: None,
            checker: None,
            data_dir: None,
        }))?;
        let settings = FrontendSettings {
            backend_tls: None,
            name: "frontend".to_string(),
            lease,
            metadata: server_metadata(),
            requests_max: 16_384,
            timeout: REQUEST_TIMEOUT,
            files: None,
            saved: None,
            cold_start: Default::default(),
            limits: Default::default(),
            memory: Default::default(),
        };
        let frontend = frontend_threads.block_on(async {
            let service = Frontend::start(store.clone(), keys.clone(), clock(), settings).await;
            let service = service.map_err(Failure::failed)?;
            let server = Server::start(loopback(), Arc::new(service.clone())).await;
            let server = server.map_err(Failure::failed)?;
            let record = FrontendRecord {
                grpc: address_text(server.grpc_addr),
                http: address_text(server.http_addr),
            };
            // Reports continue until the process ends.
            std::mem::forget(service.join(store, &keys, &record));
            Ok::<RunningServer, Failure>(server)
        })?;
        let (direct, through) = (addresses(&backend.server)?, addresses(&frontend)?);
        Ok(LocalCluster {
            backend: Some(backend),
            frontend: Some(frontend),
            direct,
            through,
            backend_threads,
            frontend_threads,
            folder,
            _stop: stop,
        })
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        let limit = Duration::from_secs(5);
        if let Some(server) = self.frontend.take() {
            self.frontend_threads.block_on(server.shutdown(limit));
        }
        if let Some(backend) = self.backend.take() {
            self.backend_threads.block_on(backend.shutdown(limit));
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A REST client with one connection, directly on the socket.
struct RestClient {
    stream: TcpStream,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl RestClient {
    fn connect(address: SocketAddr, binary: bool) -> std::io::Result<RestClient> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let input = "\"name\":\"image\",\"shape\":[1,1,8,8],\"datatype\":\"FP32\"";
        let (json, raw) = match binary {
            false => {
                let data = vec!["0.5"; PIXELS].join(",");
                (format!("{{\"inputs\":[{{{input},\"data\":[{data}]}}]}}"), Vec::new())
            }
            true => {
                let size = PIXELS * 4;
                let json = format!(
                    "{{\"inputs\":[{{{input},\"parameters\":{{\"binary_data_size\":{size}}}}}\
                     ],\"parameters\":{{\"binary_data_output\":true}}}}"
                );
                (json, [0.5f32; PIXELS].iter().flat_map(|value| value.to_le_bytes()).collect())
            }
        };
        let header = match binary {
            true => format!("Inference-Header-Content-Length: {}\r\n", json.len()),
            false => String::new(),
        };
        let head = format!(
            "POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n{header}Content-Length: \
             {}\r\n\r\n",
            json.len() + raw.len()
        );
        let request = [head.into_bytes(), json.into_bytes(), raw].concat();
        Ok(RestClient { stream, request, reply: vec![0; 1 << 16] })
    }

    /// Sends one request; returns the status of the reply.
    fn send(&mut self) -> std::io::Result<u16> {
        self.stream.write_all(&self.request)?;
        let mut got = 0;
        loop {
            let count = self.stream.read(&mut self.reply[got..])?;
            if count == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            got += count;
            let Some(end) = self.reply[..got].windows(4).position(|part| part == b"\r\n\r\n")
            else {
                continue;
            };
            let head = String::from_utf8_lossy(&self.reply[..end]).to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
            let length: usize = length.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            if got >= end + 4 + length {
                let status = head.get(9..12).and_then(|text| text.parse().ok());
                return Ok(status.unwrap_or(0));
            }
        }
    }
}

/// A gRPC client with a runtime of its own.
struct GrpcClient {
    runtime: Runtime,
    client: GrpcInferenceServiceClient<Channel>,
    message: proto::ModelInferRequest,
}

impl GrpcClient {
    fn connect(address: SocketAddr) -> Result<GrpcClient, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(Failure::failed)?;
        let client = runtime
            .block_on(GrpcInferenceServiceClient::connect(format!("http://{address}")))
            .map_err(Failure::failed)?;
        let input = proto::model_infer_request::InferInputTensor {
            name: "image".to_string(),
            datatype: "FP32".to_string(),
            shape: vec![1, 1, 8, 8],
            ..Default::default()
        };
        let raw: Vec<u8> = [0.5f32; PIXELS].iter().flat_map(|value| value.to_le_bytes()).collect();
        let message = proto::ModelInferRequest {
            model_name: MODEL.to_string(),
            inputs: vec![input],
            raw_input_contents: vec![raw.into()],
            ..Default::default()
        };
        Ok(GrpcClient { runtime, client, message })
    }

    fn send(&mut self) -> Result<(), Failure> {
        let call = self.client.model_infer(self.message.clone());
        self.runtime.block_on(call).map(|_| ()).map_err(Failure::failed)
    }
}

type RequestFn = Box<dyn FnMut() -> Result<(), Failure>>;

fn rest(address: SocketAddr, binary: bool) -> Result<RequestFn, Failure> {
    let mut client = RestClient::connect(address, binary).map_err(Failure::failed)?;
    Ok(Box::new(move || match client.send().map_err(Failure::failed)? {
        200 => Ok(()),
        status => Err(Failure::failed(format!("a request got status {status}"))),
    }))
}

fn grpc(address: SocketAddr) -> Result<RequestFn, Failure> {
    let mut client = GrpcClient::connect(address)?;
    Ok(Box::new(move || client.send()))
}

/// Microseconds of each of `count` requests, appended to `times`.
fn measure(send: &mut RequestFn, count: u32, times: &mut Vec<f64>) -> Result<(), Failure> {
    for _ in 0..count {
        let started = Instant::now();
        send()?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    Ok(())
}

fn quantile(times: &mut [f64], share: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
    times.get(at).copied().unwrap_or(0.0)
}

fn compare(
    protocol: &'static str,
    args: &FrontendBenchArgs,
    mut direct: RequestFn,
    mut through: RequestFn,
) -> Result<ProtocolRow, Failure> {
    let mut warm = Vec::new();
    measure(&mut direct, WARMUP_REQUESTS, &mut warm)?;
    measure(&mut through, WARMUP_REQUESTS, &mut warm)?;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        measure(&mut direct, args.requests, &mut without)?;
        measure(&mut through, args.requests, &mut with)?;
    }
    let tenth = |value: f64| (value * 10.0).round() / 10.0;
    let of = |times: &mut [f64]| (tenth(quantile(times, 0.5)), tenth(quantile(times, 0.99)));
    let ((direct_p50, direct_p99), (through_p50, through_p99)) = (of(&mut without), of(&mut with));
    Ok(ProtocolRow {
        protocol,
        direct_p50_us: direct_p50,
        direct_p99_us: direct_p99,
        through_p50_us: through_p50,
        through_p99_us: through_p99,
        difference_p50_us: tenth(through_p50 - direct_p50),
        difference_p99_us: tenth(through_p99 - direct_p99),
        ratio_p50: (through_p50 / direct_p50.max(1e-9) * 100.0).round() / 100.0,
    })
}

fn wait_until_ready(address: SocketAddr) -> Result<(), Failure> {
    let started = Instant::now();
    while started.elapsed() < START_TIMEOUT {
        if let Ok(mut client) = RestClient::connect(address, false)
            && client.send().is_ok_and(|status| status == 200)
        {
            // Waits until the backend has profiled the new model.
            std::thread::sleep(Duration::from_secs(2));
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(Failure::failed("the cluster did not become ready"))
}

/// Runs the benchmark.
pub(crate) fn run(args: &FrontendBenchArgs) -> Result<(), Failure> {
    let cluster = LocalCluster::start(&args.device)?;
    wait_until_ready(cluster.through.0)?;
    let rows = [
        compare(
            "REST, JSON",
            args,
            rest(cluster.direct.0, false)?,
            rest(cluster.through.0, false)?,
        )?,
        compare(
            "REST, binary",
            args,
            rest(cluster.direct.0, true)?,
            rest(cluster.through.0, true)?,
        )?,
        compare("gRPC", args, grpc(cluster.direct.1)?, grpc(cluster.through.1)?)?,
    ];
    if args.json {
        println!(
            "{:#}",
            serde_json::json!({ "requests": args.requests * args.rounds, "rows": rows })
        );
        return Ok(());
    }
    println!(
        "{:<14}{:>12}{:>9}{:>12}{:>9}{:>12}{:>9}{:>8}",
        "us", "direct p50", "p99", "through p50", "p99", "more p50", "p99", "ratio"
    );
    for row in &rows {
        println!(
            "{:<14}{:>12}{:>9}{:>12}{:>9}{:>12}{:>9}{:>8}",
            row.protocol,
            row.direct_p50_us,
            row.direct_p99_us,
            row.through_p50_us,
            row.through_p99_us,
            row.difference_p50_us,
            row.difference_p99_us,
            row.ratio_p50
        );
    }
    Ok(())
}
