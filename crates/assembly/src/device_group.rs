//! Opens the devices that `--device` names and starts a device group on them.

use std::sync::Arc;
use std::time::Duration;

use base::{Bytes, MonotonicClock, Nanos};
use cpu::{CpuDevice, CpuOptions};
use device::{Device, DeviceError, thread_placement, thread_watch};
use runtime::device_group::recovery::{FaultDomain, NodeOpener, ReopenError};
use runtime::{DeviceGroup, DeviceGroupOptions, Node, NodeError, NodeOptions};

use crate::device_args::{DeviceArgs, ThreadPlacementArg};
use crate::devices;
use crate::failure::Failure;
use crate::memory_available::kept_memory;

/// Max devices of one server.
const DEVICES_MAX: usize = 64;

/// Max parts of one GPU; each has at least eight SMs.
const PARTS_MAX: usize = 16;

/// One entry of a device list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceName {
    Cpu,
    /// A GPU, divided into `parts` devices.
    Gpu {
        ordinal: usize,
        parts: usize,
    },
}

/// Parses a list of devices like `cuda:0,cuda:1`, `cuda:0/2` or `cpu,cpu`.
fn parse(list: &str) -> Result<Vec<DeviceName>, String> {
    let mut names: Vec<DeviceName> = Vec::new();
    for name in list.split(',').map(str::trim) {
        let one = parse_one(name)?;
        let same = |other: &DeviceName| match (one, other) {
            (DeviceName::Gpu { ordinal, .. }, DeviceName::Gpu { ordinal: other, .. }) => {
                ordinal == *other
            }
            _ => false,
        };
        // Two contexts on one GPU cannot preempt each other's best effort.
        if names.iter().any(same) {
            let gpu = name.split('/').next().unwrap_or(name);
            return Err(format!(
                "{gpu} is named twice: two devices on one GPU are parts of it, as {gpu}/2"
            ));
        }
        names.push(one);
    }
    let count: usize = names.iter().map(DeviceName::count).sum();
    match count <= DEVICES_MAX {
        true => Ok(names),
        false => Err(format!("{count} devices; {DEVICES_MAX} is the max")),
    }
}

fn parse_one(name: &str) -> Result<DeviceName, String> {
    if name == "cpu" {
        return Ok(DeviceName::Cpu);
    }
    let unknown = || {
        format!(
            "there is no device '{name}'; there are: cpu, cuda:N for the N-th GPU, and cuda:N/P \
             for P parts of it"
        )
    };
    let number = name.strip_prefix("cuda:").ok_or_else(unknown)?;
    let (number, parts) = number.split_once('/').unwrap_or((number, "1"));
    let ordinal = number.parse().map_err(|_| unknown())?;
    let parts = parts.parse().map_err(|_| unknown())?;
    match (1..=PARTS_MAX).contains(&parts) {
        true => Ok(DeviceName::Gpu { ordinal, parts }),
        false => Err(format!("'{name}': a GPU has 1 to {PARTS_MAX} parts")),
    }
}

impl DeviceName {
    /// Number of devices.
    fn count(&self) -> usize {
        match self {
            DeviceName::Cpu => 1,
            DeviceName::Gpu { parts, .. } => *parts,
        }
    }
}

/// What becomes of a GPU that has faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFault {
    /// This process opens it again, if the driver lets it.
    Reopen,
    /// The caller replaces the process once no device is left ([`DeviceGroup::is_lost`]).
    ReplaceProcess,
}

/// Why the process is replaced.
const ONE_GPU: &str = "a process cannot use a GPU any more on which a kernel of it has faulted";

/// An open device with its budget for weights.
struct OpenDevice {
    device: Arc<dyn Device>,
    budget: Bytes,
}

/// Opens all devices that `args` name and starts a node on each. GPUs load and evict weights on
/// demand, within `memory` bytes per device.
///
/// # Errors
/// When a device does not exist or cannot be used, or when `memory` is more than is free.
pub fn open_device_group(
    args: &DeviceArgs,
    memory: Option<Bytes>,
    options: &NodeOptions,
    on_fault: OnFault,
) -> Result<Arc<DeviceGroup>, Failure> {
    let named = parse(&args.device).map_err(Failure::usage)?;
    let several = named.len() > 1;
    let cpus = named.iter().filter(|one| **one == DeviceName::Cpu).count();
    if memory.is_some() && cpus == named.len() {
        return Err(Failure::usage(
            "--gpu-memory is for a GPU (--device cuda:0); the CPU device computes in the host's \
             own memory",
        ));
    }
    thread_watch::report_from(Duration::from_micros(args.settings.thread_watch_us));
    place_threads(args, &named);
    // Only calls of a driver wait for other threads that map memory.
    if cpus < named.len() {
        cuda::keep_large_blocks(kept_memory());
    }
    let clock = Arc::new(MonotonicClock::new());
    let (mut nodes, mut domains) = (Vec::new(), Vec::new());
    for one in named {
        let opened = match one {
            DeviceName::Cpu => vec![open_cpu(args, cpus)?],
            DeviceName::Gpu { ordinal, parts } => open_gpu(args, memory, ordinal, parts)?,
        };
        let (first, mut gpu_options) = (nodes.len(), Vec::new());
        for OpenDevice { device, budget } in opened {
            let watchdog = match one {
                DeviceName::Cpu => None,
                DeviceName::Gpu { .. } => watchdog(args),
            };
            let options = NodeOptions { memory: Some(budget), watchdog, ..options.clone() };
            gpu_options.push(options.clone());
            nodes.push(Arc::new(start(device, options, clock.clone())?));
        }
        if let DeviceName::Gpu { ordinal, parts } = one {
            // Where there is nothing else to serve, the time that the attempt takes is lost.
            let attempts = on_fault == OnFault::Reopen || several;
            let open: NodeOpener = match attempts {
                true => reopener(args, ordinal, parts, gpu_options, clock.clone()),
                false => Box::new(|| Err(ReopenError::OnlyNewProcess(ONE_GPU.to_string()))),
            };
            domains.push(FaultDomain { devices: first..nodes.len(), open });
        }
    }
    DeviceGroup::start_with(nodes, DeviceGroupOptions::default(), domains)
        .map(Arc::new)
        .map_err(Failure::failed)
}

/// Places the threads of this process as a server's on the devices that `args` name.
///
/// # Errors
/// When there is no such device.
pub fn place_threads_as_served(args: &DeviceArgs) -> Result<(), Failure> {
    place_threads(args, &parse(&args.device).map_err(Failure::usage)?);
    Ok(())
}

/// Places threads where all devices are GPUs: a CPU that computes models needs all processors.
fn place_threads(args: &DeviceArgs, named: &[DeviceName]) {
    let gpus: usize = named.iter().map(DeviceName::count).sum();
    let computes_here = named.contains(&DeviceName::Cpu);
    match args.settings.thread_placement {
        ThreadPlacementArg::Auto if !computes_here => {
            thread_placement::start(cuda::lone_threads(gpus));
        }
        _ => thread_placement::leave_to_system(),
    }
}

fn watchdog(args: &DeviceArgs) -> Option<Nanos> {
    Some(Nanos::from_millis(args.settings.watchdog_ms)).filter(|limit| *limit > Nanos::ZERO)
}

/// Opens a faulted GPU again and starts its nodes with the options they had.
fn reopener(
    args: &DeviceArgs,
    ordinal: usize,
    parts: usize,
    options: Vec<NodeOptions>,
    clock: Arc<MonotonicClock>,
) -> NodeOpener {
    let args = args.clone();
    let device = format!("cuda:{ordinal}");
    Box::new(move || {
        if cuda::is_refused(ordinal) {
            return Err(ReopenError::OnlyNewProcess(ONE_GPU.to_string()));
        }
        let refused = |err: Failure| match cuda::is_refused(ordinal) {
            true => ReopenError::OnlyNewProcess(err.message().to_string()),
            false => {
                let (device, reason) = (device.clone(), err.message().to_string());
                ReopenError::NotYet(DeviceError::Faulted { device, reason })
            }
        };
        let opened = open_gpu(&args, None, ordinal, parts).map_err(refused)?;
        opened
            .into_iter()
            .zip(&options)
            .map(|(opened, options)| start(opened.device, options.clone(), clock.clone()))
            .collect::<Result<Vec<Node>, Failure>>()
            .map_err(refused)
    })
}

/// Opens one of `count` CPU devices, which share cores and memory equally.
fn open_cpu(args: &DeviceArgs, count: usize) -> Result<OpenDevice, Failure> {
    let settings = &args.settings;
    let queues = usize::from(settings.cpu_queues);
    let threads = match settings.threads {
        0 if count > 1 => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            (cores / (count * queues.max(1))).max(1)
        }
        threads => threads,
    };
    let device = CpuDevice::new(CpuOptions { threads, queues, ..CpuOptions::default() });
    let budget = Bytes(weight_budget(None, device.info().memory)?.0 / count as u64);
    Ok(OpenDevice { device: Arc::new(device), budget })
}

fn open_gpu(
    args: &DeviceArgs,
    memory: Option<Bytes>,
    ordinal: usize,
    parts: usize,
) -> Result<Vec<OpenDevice>, Failure> {
    let gpus = devices::open_gpu_parts(args, ordinal, parts, |options| {
        options.weights_on_demand = true;
        options.sizes_ahead = true;
    })?;
    let opened = |gpu: cuda::CudaDevice| {
        let budget = weight_budget(memory, gpu.info().memory)?;
        Ok(OpenDevice { budget, device: Arc::new(devices::with_host(Arc::new(gpu), args)) })
    };
    gpus.into_iter().map(opened).collect()
}

/// Budget for weights: what was requested, or all free memory less a tenth, which runs and kernels
/// need.
fn weight_budget(requested: Option<Bytes>, free: Bytes) -> Result<Bytes, Failure> {
    match requested {
        Some(requested) if requested > free => {
            Err(Failure::usage(format!("--gpu-memory {requested}: only {free} are free")))
        }
        Some(requested) => Ok(requested),
        None => Ok(Bytes(free.0 - free.0 / 10)),
    }
}

fn start(
    device: Arc<dyn Device>,
    options: NodeOptions,
    clock: Arc<MonotonicClock>,
) -> Result<Node, Failure> {
    Node::start(device, options, clock).map_err(|err| match err {
        NodeError::Device(err) => Failure::failed(err),
        other => Failure::usage(other),
    })
}

fn device_group_of(nodes: Vec<Arc<Node>>) -> Result<Arc<DeviceGroup>, Failure> {
    DeviceGroup::start(nodes, DeviceGroupOptions::default()).map(Arc::new).map_err(Failure::failed)
}

/// Starts the device group of one open device.
///
/// # Errors
/// When the node does not start.
pub fn device_group_on(
    device: Arc<dyn Device>,
    options: NodeOptions,
) -> Result<Arc<DeviceGroup>, Failure> {
    device_group_of(vec![Arc::new(start(device, options, Arc::new(MonotonicClock::new()))?)])
}

/// Describes the devices of a group in one line.
pub fn describe(device_group: &DeviceGroup) -> String {
    let one = |node: &Arc<Node>| node.device().info().description.clone();
    device_group.nodes().iter().map(one).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_lists_are_parsed() {
        let gpu = |ordinal, parts| DeviceName::Gpu { ordinal, parts };
        assert_eq!(parse("cpu"), Ok(vec![DeviceName::Cpu]));
        assert_eq!(parse("cpu, cpu"), Ok(vec![DeviceName::Cpu, DeviceName::Cpu]));
        assert_eq!(parse("cuda:0,cuda:3/2"), Ok(vec![gpu(0, 1), gpu(3, 2)]));
        let refused = |list: &str| parse(list).expect_err("no such devices");
        assert!(refused("cuda:0,cuda:0").contains("cuda:0/2"));
        assert!(refused("cuda:1/2,cuda:1").contains("named twice"));
        assert!(refused("cuda:0/0").contains("1 to 16"));
        assert!(refused("cuda").contains("there are: cpu"));
        assert!(refused("cpu,").contains("there is no device ''"));
        assert!(refused(&vec!["cpu"; 65].join(",")).contains("65 devices"));
    }
}
