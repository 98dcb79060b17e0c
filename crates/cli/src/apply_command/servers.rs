//! Servers of a plan: processes of this binary, each with the environment of its GPU or slice.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use assembly::Failure;
use planner::apply::ServerSpec;

use crate::args::ApplyArgs;

const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Max time of a server to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);
/// How much of a log is shown if a server does not start.
const TAIL_BYTES: usize = 600;

/// What a server is started with.
pub(crate) struct ServerLaunch<'a> {
    pub(crate) args: &'a ApplyArgs,
    pub(crate) state: &'a Path,
    /// Pipes of its MPS daemon.
    pub(crate) folder: &'a Path,
    /// The device that it sees.
    pub(crate) uuid: &'a str,
    pub(crate) port: u16,
}

/// The environment of a server.
pub(crate) fn environment(
    folder: &Path,
    uuid: &str,
    percentage: u32,
) -> [(&'static str, String); 4] {
    let folder = folder.display().to_string();
    [
        ("CUDA_VISIBLE_DEVICES", uuid.to_string()),
        ("CUDA_MPS_PIPE_DIRECTORY", folder.clone()),
        ("CUDA_MPS_LOG_DIRECTORY", folder),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage.to_string()),
    ]
}

/// The command line after the binary's name.
pub(crate) fn arguments(
    args: &ApplyArgs,
    state: &Path,
    spec: &ServerSpec,
    port: u16,
) -> Vec<String> {
    let mut list: Vec<String> = vec!["serve".to_string()];
    let mut add = |name: &str, value: String| list.extend([format!("--{name}"), value]);
    for path in &args.model_repository {
        add("model-repository", path.display().to_string());
    }
    add("data-dir", registry(state, spec).display().to_string());
    add("model-control-mode", "explicit".to_string());
    for model in &spec.models {
        add("load-model", model.clone());
    }
    add("device", args.device.clone());
    add("host", args.host.to_string());
    add("http-port", port.to_string());
    add("grpc-port", port.saturating_add(1).to_string());
    add("metrics-port", port.saturating_add(2).to_string());
    if args.insecure {
        list.push("--insecure".to_string());
    }
    list
}

fn label(spec: &ServerSpec) -> String {
    format!("{}-{}-{}", spec.place, spec.slice, spec.process)
}

/// Two servers never share a registry.
fn registry(state: &Path, spec: &ServerSpec) -> PathBuf {
    state.join(format!("registry-{}", label(spec)))
}

/// Starts a server and waits until it is ready; returns its process id.
pub(crate) fn start_server(launch: &ServerLaunch<'_>, spec: &ServerSpec) -> Result<u32, Failure> {
    let ServerLaunch { args, state, folder, uuid, port } = *launch;
    let log = state.join(format!("server-{}.log", label(spec)));
    let named = |error: std::io::Error| Failure::failed(format!("{}: {error}", log.display()));
    let file = File::create(&log).map_err(named)?;
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let mut child = Command::new(program)
        .args(arguments(args, state, spec, port))
        .envs(environment(folder, uuid, spec.percentage))
        .stdin(Stdio::null())
        .stdout(file.try_clone().map_err(named)?)
        .stderr(file)
        // Ctrl-C ends this command, not its servers.
        .process_group(0)
        .spawn()
        .map_err(Failure::failed)?;
    let pid = child.id();
    let ready = wait_until_ready(&mut child, args, port).map_err(|why| {
        let tail = tail(&log);
        Failure::failed(format!("the server of {} {why}: {tail}", spec.services.join(", ")))
    });
    if ready.is_err() {
        // The child was not reaped yet, so its process id cannot belong to another process.
        let _ = child.kill();
        let _ = child.wait();
    }
    ready.map(|()| pid)
}

fn wait_until_ready(child: &mut Child, args: &ApplyArgs, port: u16) -> Result<(), String> {
    let until = Instant::now() + Duration::from_secs(args.start_timeout_secs);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Err(format!("ended ({status})")),
            Err(error) => return Err(error.to_string()),
            Ok(None) if is_ready(args.host, port) => return Ok(()),
            Ok(None) if Instant::now() > until => {
                return Err(format!("is not ready after {} s", args.start_timeout_secs));
            }
            Ok(None) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

fn is_ready(host: IpAddr, port: u16) -> bool {
    let wait = Duration::from_secs(2);
    let check = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::new(host, port), wait)?;
        stream.set_read_timeout(Some(wait))?;
        stream.write_all(
            b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        )?;
        let mut reply = [0; 12];
        stream.read_exact(&mut reply)?;
        Ok(reply.ends_with(b" 200"))
    };
    check().unwrap_or(false)
}

fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let from = text.len().saturating_sub(TAIL_BYTES);
    String::from_utf8_lossy(&text[from..]).trim().to_string()
}

/// Ends a server that an earlier call started. Does nothing if the process is no longer that
/// server.
pub(crate) fn stop_server(state: &Path, pid: Option<u32>) -> Result<(), String> {
    let Some(pid) = pid else { return Ok(()) };
    if !is_ours(state, pid) {
        return Ok(());
    }
    let sent = Command::new("kill").args(["-TERM", &pid.to_string()]).status();
    sent.map_err(|error| format!("kill: {error}"))?;
    let until = Instant::now() + STOP_TIMEOUT;
    while is_ours(state, pid) {
        if Instant::now() > until {
            return Err(format!("server process {pid} does not end"));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Whether the process runs and is a server with a registry in this state folder.
fn is_ours(state: &Path, pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let registry = state.join("registry-").display().to_string();
    String::from_utf8_lossy(&line).contains(&registry)
}
