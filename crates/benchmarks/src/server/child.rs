//! The server under test: a process that ends with its parent.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use assembly::{DeviceArgs, Failure};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::report::process_seconds;
use super::transport::Transport;
use crate::environment;

/// Environment variables that would change the server.
const NOT_INHERITED: [&str; 7] = [
    "ATOLL_MODEL_REPOSITORY",
    "ATOLL_LOAD_MODEL",
    "ATOLL_MODEL_CONTROL_MODE",
    "ATOLL_SERVE_CLUSTER",
    "ATOLL_QUERY",
    "ATOLL_LOG",
    "ATOLL_DATA_DIR",
];

/// The message with which a server logs a slow call of the driver.
const SLOW_CALL: &str = "slow driver call";

/// Slow calls that are kept, at most.
const MAX_SLOW_CALLS: usize = 100_000;

/// Max time until its metrics are read.
const METRICS_TIMEOUT: Duration = Duration::from_secs(5);

/// Arguments of `atoll serve` that a benchmark's server has in any case: free ports of this
/// machine, and the device as the benchmark was told.
pub(crate) fn common_arguments(device: &DeviceArgs) -> Vec<String> {
    let settings = &device.settings;
    let mut arguments = Vec::new();
    let mut add = |flag: &str, value: String| arguments.extend([flag.to_string(), value]);
    add("--host", "127.0.0.1".to_string());
    for flag in ["--http-port", "--grpc-port", "--metrics-port"] {
        add(flag, "0".to_string());
    }
    add("--device", device.device.clone());
    add("--precision", settings.precision.name().to_string());
    add("--best-effort-chain", settings.best_effort_chain.to_string());
    add("--threads", settings.threads.to_string());
    add("--cpu-queues", settings.cpu_queues.to_string());
    if let Some(folder) = &settings.kernel_cache {
        add("--kernel-cache", folder.display().to_string());
    }
    if let Some(folder) = &settings.cuda_toolkit {
        add("--cuda-toolkit", folder.display().to_string());
    }
    arguments
}

/// A running `atoll serve`.
pub(crate) struct ServerProcess {
    process: std::process::Child,
    pub(crate) http: SocketAddr,
    pub(super) grpc: SocketAddr,
    metrics: SocketAddr,
    pub(super) transport: Transport,
    slow_calls: Arc<Mutex<Vec<SlowDriverCall>>>,
}

/// A call of the GPU's driver that took long, as the server logs it.
#[derive(Clone, Debug)]
pub(crate) struct SlowDriverCall {
    pub(crate) call: String,
    pub(crate) thread: String,
    pub(crate) ms: f64,
}

impl SlowDriverCall {
    /// The call of a line of the log, if it is about one.
    fn from_line(line: &str) -> Option<SlowDriverCall> {
        if !line.contains(SLOW_CALL) {
            return None;
        }
        let event: Value = serde_json::from_str(line).ok()?;
        let fields = &event["fields"];
        let text = |name: &str| fields[name].as_str().unwrap_or("?").to_string();
        let ms = fields["micros"].as_f64()? / 1e3;
        Some(SlowDriverCall { call: text("call"), thread: text("thread"), ms })
    }
}

/// Inferences and batches so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ServerCounts {
    pub(super) inferences: f64,
    pub(super) executions: f64,
}

/// Ends a process unless it was taken out.
struct KillOnDrop(Option<std::process::Child>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            end(process);
        }
    }
}

fn end(process: &mut std::process::Child) {
    // It may have ended already.
    let _ = process.kill();
    let _ = process.wait();
}

impl ServerProcess {
    /// Starts `binary` with these arguments, which protect it as `transport` says, and waits until
    /// it is ready.
    pub(crate) fn start(
        binary: &Path,
        arguments: &[String],
        data: &Path,
        transport: Transport,
        limit: Duration,
    ) -> Result<ServerProcess, Failure> {
        let mut command = Command::new(binary);
        command.args(["--log", "info", "--log-json"]).args(arguments).arg("--data-dir").arg(data);
        for name in NOT_INHERITED {
            command.env_remove(name);
        }
        // Its standard input ends when this process does, even if it is killed.
        command.arg("--until-input-ends").stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let failed = |err| Failure::failed(format!("cannot start {}: {err}", binary.display()));
        let mut process = command.spawn().map_err(failed)?;
        let log = process.stderr.take();
        let mut guard = KillOnDrop(Some(process));
        let log = log.ok_or_else(|| Failure::failed("the server has no log"))?;
        let slow_calls = Arc::new(Mutex::new(Vec::new()));
        let ready = wait_until_ready(&read_lines(log, slow_calls.clone()), limit)?;
        let address = |wire: &str| {
            let text = ready["fields"][wire].as_str().unwrap_or_default();
            text.parse().map_err(|err| Failure::failed(format!("{wire} at '{text}': {err}")))
        };
        let (http, grpc, metrics) = (address("http")?, address("grpc")?, address("metrics")?);
        let process = guard.0.take().ok_or_else(|| Failure::failed("the server is gone"))?;
        Ok(ServerProcess { process, http, grpc, metrics, transport, slow_calls })
    }

    /// Writes a line to its standard input.
    pub(crate) fn send_line(&mut self, line: &str) -> Result<(), String> {
        let input = self.process.stdin.as_mut().ok_or("the server has no input")?;
        input.write_all(format!("{line}\n").as_bytes()).map_err(|err| err.to_string())
    }

    /// The sum of a metric over its labels, if the server has it.
    pub(crate) fn metric(&self, name: &str) -> Option<f64> {
        let text = fetch(self.metrics, &self.transport).ok()?;
        let of = |line: &&str| line.starts_with(name) && line[name.len()..].starts_with(['{', ' ']);
        let values: Vec<f64> = text
            .lines()
            .filter(of)
            .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
            .collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }

    /// The slow calls of the driver since the last time; with `--slow-call-us` only.
    pub(crate) fn take_slow_calls(&self) -> Vec<SlowDriverCall> {
        std::mem::take(&mut self.slow_calls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The number of the process.
    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Resident memory of the process, if the system reports it.
    pub(crate) fn resident_bytes(&self) -> Option<u64> {
        environment::resident_bytes(Some(self.process.id()))
    }

    /// Processor time it has used, in seconds.
    pub(super) fn cpu_seconds(&self) -> f64 {
        process_seconds(Some(self.process.id()))
    }

    /// Counts from its metrics.
    pub(super) fn counts(&self) -> Result<ServerCounts, Failure> {
        let failed = |why: String| Failure::failed(format!("metrics: {why}"));
        let text = fetch(self.metrics, &self.transport).map_err(failed)?;
        let sum = |name: &str| {
            let samples = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
            samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
        };
        Ok(ServerCounts {
            inferences: sum("nv_inference_count"),
            executions: sum("nv_inference_exec_count"),
        })
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        end(&mut self.process);
    }
}

/// Reads the lines of a log on a thread, so that its writer never blocks.
fn read_lines(
    log: impl Read + Send + 'static,
    slow_calls: Arc<Mutex<Vec<SlowDriverCall>>>,
) -> Receiver<String> {
    let (sender, lines) = sync_channel(1024);
    std::thread::spawn(move || {
        for line in BufReader::new(log).lines().map_while(Result::ok) {
            if let Some(call) = SlowDriverCall::from_line(&line) {
                let mut calls = slow_calls.lock().unwrap_or_else(PoisonError::into_inner);
                if calls.len() < MAX_SLOW_CALLS {
                    calls.push(call);
                }
            }
            // No line is read once the server is ready.
            let _ = sender.try_send(line);
        }
    });
    lines
}

/// The log event with which the server reports that it is ready.
fn wait_until_ready(lines: &Receiver<String>, limit: Duration) -> Result<Value, Failure> {
    let (until, mut log) = (Instant::now() + limit, Vec::new());
    loop {
        let why = match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                let event: Value = serde_json::from_str(&line).unwrap_or_default();
                if event["fields"]["message"] == "ready" {
                    return Ok(event);
                }
                log.push(line);
                continue;
            }
            Err(RecvTimeoutError::Timeout) => "was not ready in time",
            Err(RecvTimeoutError::Disconnected) => "ended before it was ready",
        };
        let last = log[log.len().saturating_sub(5)..].join("\n  ");
        return Err(Failure::failed(format!("the server {why}; the end of its log:\n  {last}")));
    }
}

fn fetch(address: SocketAddr, transport: &Transport) -> Result<String, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let authorization = transport.header();
    let request = format!(
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\n{authorization}Connection: close\r\n\r\n"
    );
    let exchange = async {
        let mut stream = transport.connect(address, b"http/1.1").await?;
        let mut text = String::new();
        stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
        stream.read_to_string(&mut text).await.map_err(|error| error.to_string())?;
        match text.starts_with("HTTP/1.1 200") {
            true => Ok(text),
            false => Err(text.lines().next().unwrap_or("no reply").to_string()),
        }
    };
    runtime.map_err(|error| error.to_string())?.block_on(async {
        let slow = |_| "no reply in time".to_string();
        tokio::time::timeout(METRICS_TIMEOUT, exchange).await.map_err(slow)?
    })
}
