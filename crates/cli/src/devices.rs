//! The devices that `--device` names, and the device_group over them.

use std::sync::Arc;

use base::{Bytes, MonotonicClock};
use cpu::{CpuDevice, CpuOptions};
use device::Device;
use runtime::{DeviceGroup, DeviceGroupOptions, Node, NodeError, NodeOptions};

use crate::args::DeviceArgs;
use crate::engine;
use crate::failure::Failure;

/// The most devices of one server.
const DEVICES_MOST: usize = 64;

/// The most parts of one GPU; each has eight multiprocessors at least.
const PARTS_MOST: usize = 16;

/// What one name of the list stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Cpu,
    /// A GPU in so many parts, each a device.
    Gpu {
        ordinal: usize,
        parts: usize,
    },
}

/// Reads a list of devices like `cuda:0,cuda:1`, `cuda:0/2` or `cpu,cpu`.
fn parse(list: &str) -> Result<Vec<Named>, String> {
    let mut named: Vec<Named> = Vec::new();
    for name in list.split(',').map(str::trim) {
        let one = parse_one(name)?;
        let same = |other: &Named| match (one, other) {
            (Named::Gpu { ordinal, .. }, Named::Gpu { ordinal: other, .. }) => ordinal == *other,
            _ => false,
        };
        // Real time of one engine would wait for best effort of the other, which neither could make leave.
        if named.iter().any(same) {
            let gpu = name.split('/').next().unwrap_or(name);
            return Err(format!(
                "{gpu} is named twice: two devices on one GPU are parts of it, as {gpu}/2"
            ));
        }
        named.push(one);
    }
    let count: usize = named.iter().map(Named::count).sum();
    match count <= DEVICES_MOST {
        true => Ok(named),
        false => Err(format!("{count} devices; {DEVICES_MOST} are the most")),
    }
}

fn parse_one(name: &str) -> Result<Named, String> {
    if name == "cpu" {
        return Ok(Named::Cpu);
    }
    let unknown = || {
        format!(
            "there is no device '{name}'; there are: cpu, cuda:N for the N-th GPU, and cuda:N/P for P parts of it"
        )
    };
    let number = name.strip_prefix("cuda:").ok_or_else(unknown)?;
    let (number, parts) = number.split_once('/').unwrap_or((number, "1"));
    let ordinal = number.parse().map_err(|_| unknown())?;
    let parts = parts.parse().map_err(|_| unknown())?;
    match (1..=PARTS_MOST).contains(&parts) {
        true => Ok(Named::Gpu { ordinal, parts }),
        false => Err(format!("'{name}': a GPU has 1 to {PARTS_MOST} parts")),
    }
}

impl Named {
    /// Devices it stands for.
    fn count(&self) -> usize {
        match self {
            Named::Cpu => 1,
            Named::Gpu { parts, .. } => *parts,
        }
    }
}

/// A device, and what weights may take there.
struct Opened {
    device: Arc<dyn Device>,
    budget: Bytes,
}

/// Opens all devices that `args` name and starts a node on each. Weights come and go on GPUs. `memory` bounds what weights may
/// take of each device.
pub(crate) fn open_device_group(
    args: &DeviceArgs,
    memory: Option<Bytes>,
    options: &NodeOptions,
) -> Result<Arc<DeviceGroup>, Failure> {
    let named = parse(&args.device).map_err(Failure::usage)?;
    let cpus = named.iter().filter(|one| **one == Named::Cpu).count();
    if memory.is_some() && cpus == named.len() {
        return Err(Failure::usage(
            "--gpu-memory is for a GPU (--device cuda:0); the CPU device computes in the host's own memory",
        ));
    }
    let clock = Arc::new(MonotonicClock::new());
    let mut nodes = Vec::new();
    for one in named {
        let opened = match one {
            Named::Cpu => vec![open_cpu(args, cpus)?],
            Named::Gpu { ordinal, parts } => open_gpu(args, memory, ordinal, parts)?,
        };
        for Opened { device, budget } in opened {
            let options = NodeOptions { memory: Some(budget), ..options.clone() };
            nodes.push(Arc::new(start(device, options, clock.clone())?));
        }
    }
    device_group_of(nodes)
}

/// One of `count` CPU devices: cores and memory are divided among them.
fn open_cpu(args: &DeviceArgs, count: usize) -> Result<Opened, Failure> {
    let settings = &args.settings;
    let queues = usize::from(settings.cpu_queues);
    let threads = match settings.threads {
        0 if count > 1 => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            (cores / (count * queues.max(1))).max(1)
        }
        threads => threads,
    };
    let device = CpuDevice::new(CpuOptions { threads, queues });
    let budget = Bytes(weight_budget(None, device.info().memory)?.0 / count as u64);
    Ok(Opened { device: Arc::new(device), budget })
}

fn open_gpu(
    args: &DeviceArgs,
    memory: Option<Bytes>,
    ordinal: usize,
    parts: usize,
) -> Result<Vec<Opened>, Failure> {
    let gpus =
        engine::open_gpu_parts(args, ordinal, parts, |options| options.weights_on_demand = true)?;
    let opened = |gpu: cuda::CudaDevice| {
        Ok(Opened { budget: weight_budget(memory, gpu.info().memory)?, device: Arc::new(gpu) })
    };
    gpus.into_iter().map(opened).collect()
}

/// What weights may take: what was asked for, if the device has it, or most of what is free. The rest is for what runs and for
/// kernels.
fn weight_budget(asked: Option<Bytes>, free: Bytes) -> Result<Bytes, Failure> {
    match asked {
        Some(asked) if asked > free => {
            Err(Failure::usage(format!("--gpu-memory {asked}: only {free} are free")))
        }
        Some(asked) => Ok(asked),
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

/// The device_group of one device that is open already.
pub(crate) fn device_group_on(
    device: Arc<dyn Device>,
    options: NodeOptions,
) -> Result<Arc<DeviceGroup>, Failure> {
    device_group_of(vec![Arc::new(start(device, options, Arc::new(MonotonicClock::new()))?)])
}

/// What the devices of a device_group are, in words.
pub(crate) fn describe(device_group: &DeviceGroup) -> String {
    let one = |node: &Arc<Node>| node.device().info().description.clone();
    device_group.nodes().iter().map(one).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_devices_are_read() {
        let gpu = |ordinal, parts| Named::Gpu { ordinal, parts };
        assert_eq!(parse("cpu"), Ok(vec![Named::Cpu]));
        assert_eq!(parse("cpu, cpu"), Ok(vec![Named::Cpu, Named::Cpu]));
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
