//! Replaces the process by a new one of the same program, with the same number and arguments.
//!
//! Once a kernel of a process has faulted on a GPU, the driver refuses the GPU to that process. The
//! new process inherits the listening sockets, so that connections wait instead of being refused,
//! and a handover: the models that were served, and the counters of faults.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use assembly::Failure;
use base::Nanos;
use command_fds::{CommandFdExt, FdMapping};
use listenfd::ListenFd;
use runtime::DeviceGroup;
use runtime::device_group::recovery::RecoveryCounts;
use serde::{Deserialize, Serialize};
use server::InheritedSockets;

/// The variable that holds the handover.
const HANDOVER: &str = "ATOLL_HANDOVER";
/// Descriptors between those in use and the first that is handed on. Threads of this process run
/// until it is replaced, so no descriptor of theirs may change its meaning.
const UNUSED_DESCRIPTORS: i32 = 16;
/// Names of the sockets.
const SOCKET_NAMES: [&str; 3] = ["http", "grpc", "metrics"];
/// A handover up to this size fits into a variable of the environment.
const MAX_HANDOVER_BYTES: usize = 100_000;
/// A process that was replaced sooner than this after its start counts as replaced quickly.
const QUICK: Duration = Duration::from_secs(30);
/// Quick replacements without a pause.
const UNPAUSED: u32 = 3;
/// The longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// What a process leaves to the one that replaces it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Handover {
    /// Why it was replaced.
    pub(crate) reason: String,
    /// Nothing was served since then; milliseconds since 1970.
    since_unix_ms: u64,
    /// The models that were served, those first that are needed most.
    pub(crate) models: Vec<String>,
    /// By device.
    faults: Vec<DeviceFaults>,
    /// Replacements before this one that came soon after a start.
    quick: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct DeviceFaults {
    faults: u64,
    recovered: u64,
    out_of_service_ns: u64,
    /// The fault for which the process is replaced is among them.
    lost: bool,
}

/// How often the devices are looked at.
const LOST_INTERVAL: Duration = Duration::from_millis(20);

/// Why a process is replaced without whose devices it cannot serve.
pub(crate) const NO_DEVICE: &str = "no device is left that this process can use";

/// How long the replies of a server may take that has no device any more: everything that was on
/// the devices is answered, and only has to be written.
pub(crate) const REPLY_LIMIT: Duration = Duration::from_millis(500);

/// Returns when no device is left that this process can use.
pub(crate) async fn lost(devices: &DeviceGroup) {
    while !devices.is_lost() {
        tokio::time::sleep(LOST_INTERVAL).await;
    }
}

/// What this process was given at its start.
#[derive(Default)]
struct Inheritance {
    sockets: Mutex<InheritedSockets>,
    handover: Option<Handover>,
}

static INHERITANCE: OnceLock<Inheritance> = OnceLock::new();

/// Takes what an earlier process, or a supervisor such as systemd, hands to this one. Before any
/// thread starts: it changes the environment.
pub(crate) fn inherit() {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let own = std::env::var("LISTEN_PID").ok() == Some(std::process::id().to_string());
    let mut sockets = InheritedSockets::default();
    if own {
        let mut descriptors = ListenFd::from_env();
        for (index, name) in socket_names(&names, descriptors.len()).iter().enumerate() {
            // What is no TCP socket is not for us.
            let socket = descriptors.take_tcp_listener(index).ok().flatten().map(Arc::new);
            match *name {
                "http" => sockets.http = socket,
                "grpc" => sockets.grpc = socket,
                "metrics" => sockets.metrics = socket,
                _ => {}
            }
        }
    }
    let handover = std::env::var(HANDOVER).ok().filter(|_| own);
    let handover = handover.and_then(|text| serde_json::from_str(&text).ok());
    let _ = INHERITANCE.set(Inheritance { sockets: Mutex::new(sockets), handover });
}

/// The names of `count` descriptors: as given, or in the order of [`SOCKET_NAMES`] where none of
/// the given names is one of ours.
fn socket_names(given: &str, count: usize) -> Vec<&str> {
    let given: Vec<&str> = given.split(':').take(count).collect();
    match given.iter().any(|name| SOCKET_NAMES.contains(name)) {
        true => given,
        false => SOCKET_NAMES.into_iter().take(count).collect(),
    }
}

/// What the process before this one has left, if there was one.
pub(crate) fn handover() -> Option<&'static Handover> {
    INHERITANCE.get()?.handover.as_ref()
}

/// The sockets that this process has inherited, for the first who asks.
pub(crate) fn take_sockets() -> InheritedSockets {
    let sockets = INHERITANCE.get().map(|inheritance| &inheritance.sockets);
    let take = |sockets: &Mutex<InheritedSockets>| {
        std::mem::take(&mut *sockets.lock().unwrap_or_else(PoisonError::into_inner))
    };
    sockets.map(take).unwrap_or_default()
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Handover {
    /// What a process leaves that has run for `lived`.
    pub(crate) fn new(
        reason: String,
        devices: &DeviceGroup,
        models: Vec<String>,
        lived: Duration,
    ) -> Handover {
        let count = |device: usize| {
            let counts = devices.recoveries(device);
            DeviceFaults {
                faults: counts.faults,
                recovered: counts.recovered,
                out_of_service_ns: counts.out_of_service.0,
                lost: counts.lost,
            }
        };
        let earlier = handover().map_or(0, |earlier| earlier.quick);
        Handover {
            reason,
            since_unix_ms: unix_ms(),
            models,
            faults: (0..devices.device_count()).map(count).collect(),
            quick: if lived < QUICK { earlier.saturating_add(1) } else { 0 },
        }
    }

    /// How long to wait before the process is replaced: a model that faults the device with its
    /// first request must not keep a machine busy with restarts.
    pub(crate) fn pause(&self) -> Duration {
        match self.quick.checked_sub(UNPAUSED + 1) {
            None => Duration::ZERO,
            Some(more) => Duration::from_secs(1 << more.min(8)).min(MAX_PAUSE),
        }
    }

    /// Goes on counting; called when everything is served again.
    pub(crate) fn restore(&self, devices: &DeviceGroup) {
        let outage = Duration::from_millis(unix_ms().saturating_sub(self.since_unix_ms));
        tracing::info!(
            reason = self.reason,
            millis = u64::try_from(outage.as_millis()).unwrap_or(u64::MAX),
            "serving again in a new process"
        );
        for (device, earlier) in self.faults.iter().enumerate() {
            let outage = if earlier.lost { Nanos::from(outage) } else { Nanos::ZERO };
            devices.restore_recoveries(
                device,
                RecoveryCounts {
                    faults: earlier.faults,
                    recovered: earlier.recovered + u64::from(earlier.lost),
                    out_of_service: Nanos(earlier.out_of_service_ns) + outage,
                    ..RecoveryCounts::default()
                },
            );
        }
    }
}

/// The program: the same file, also when another has its name now. `upgrade` takes the file that
/// has its name.
fn program(upgrade: bool) -> PathBuf {
    let own = PathBuf::from("/proc/self/exe");
    if !upgrade {
        return own;
    }
    let Ok(path) = std::env::current_exe() else { return own };
    let text = path.to_string_lossy();
    let path = PathBuf::from(text.strip_suffix(" (deleted)").unwrap_or(&text));
    if path.is_file() { path } else { own }
}

/// A descriptor above all that are in use.
fn first_descriptor() -> i32 {
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let last = open.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).max();
    last.unwrap_or(UNUSED_DESCRIPTORS) + UNUSED_DESCRIPTORS
}

/// Replaces this process; returns only when that fails. With `upgrade` by the program that has its
/// name now.
pub(crate) fn replace(sockets: &InheritedSockets, handover: &Handover, upgrade: bool) -> Failure {
    let mut arguments = std::env::args_os();
    let mut command = Command::new(program(upgrade));
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    command.args(arguments);
    let all = [&sockets.http, &sockets.grpc, &sockets.metrics];
    let (mut names, mut mappings) = (Vec::new(), Vec::new());
    let first = first_descriptor();
    for (name, socket) in SOCKET_NAMES.into_iter().zip(all) {
        let Some(socket) = socket else { continue };
        match socket.as_fd().try_clone_to_owned() {
            Ok(parent_fd) => {
                let child_fd = first + mappings.len() as i32;
                mappings.push(FdMapping { parent_fd, child_fd });
                names.push(name);
            }
            Err(err) => tracing::warn!(name, %err, "this socket cannot be handed on"),
        }
    }
    command.env("LISTEN_FDS", mappings.len().to_string());
    // By systemd's convention it is 3 where nothing else is said.
    command.env("LISTEN_FDS_FIRST_FD", first.to_string());
    command.env("LISTEN_FDNAMES", names.join(":"));
    command.env("LISTEN_PID", std::process::id().to_string());
    command.env(HANDOVER, text(handover));
    if let Err(err) = command.fd_mappings(mappings) {
        return Failure::failed(format!("the process cannot be replaced: {err}"));
    }
    tracing::info!(reason = handover.reason, "replacing the process");
    cuda::close_descriptors_on_exec();
    device::thread_placement::leave();
    Failure::failed(format!("the process cannot be replaced: {}", command.exec()))
}

/// The handover as text; without its models where it would be too long.
fn text(handover: &Handover) -> String {
    let text = serde_json::to_string(handover).unwrap_or_default();
    if text.len() <= MAX_HANDOVER_BYTES {
        return text;
    }
    tracing::warn!("too many models for a handover: those loaded on request are not loaded again");
    let shorter = Handover { models: Vec::new(), ..handover.clone() };
    serde_json::to_string(&shorter).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_have_the_given_names_or_ours_in_order() {
        assert_eq!(socket_names("grpc:http", 2), ["grpc", "http"]);
        assert_eq!(socket_names("atoll.socket:atoll.socket", 2), ["http", "grpc"]);
        assert_eq!(socket_names("", 1), ["http"]);
        assert_eq!(socket_names("http:grpc:metrics", 0), [""; 0]);
    }

    #[test]
    fn quick_replacements_pause_longer_and_longer() {
        let pause = |quick: u32| Handover { quick, ..Handover::default() }.pause().as_secs();
        assert_eq!([0, 3, 4, 5, 6, 40].map(pause), [0, 0, 1, 2, 4, 30]);
    }

    #[test]
    fn a_handover_without_room_for_models_is_still_one() {
        let name = "m".repeat(1000);
        let models = vec![name; 200];
        let handover = Handover { reason: "why".to_string(), models, ..Handover::default() };
        let read: Handover = serde_json::from_str(&text(&handover)).expect("a handover");
        assert_eq!((read.reason.as_str(), read.models.len()), ("why", 0));
        let few = Handover { models: vec!["a".to_string()], ..handover };
        assert_eq!(serde_json::from_str::<Handover>(&text(&few)).expect("a handover"), few);
    }
}
