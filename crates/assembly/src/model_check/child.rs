//! The process that checks a model.

use std::io::{self, BufRead, Read, Write};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use cpu::{CpuDevice, CpuOptions};
use device::DeviceError;
use model::config::Class;
use model::tensor::element_count;
use model::{Dim, LaunchPlan, Tensor, ValueInfo};
use runtime::{DeviceGroup, NodeOptions, Request};

use super::{CheckEvent, CheckOrder, CheckStage};
use crate::compile::compile_bytes;
use crate::device_group::device_group_on;
use crate::sandbox::{self, SandboxLimits};

/// Threads that compute.
pub(super) const THREADS: usize = 2;
/// How long the model is measured.
const MEASURE_LIMIT: Duration = Duration::from_secs(2);
/// Max bytes of the line before the model.
const ORDER_MAX: u64 = 1 << 20;
/// Max bytes of the zero inputs of the first run.
const INPUT_BYTES_MAX: usize = 256 << 20;

/// Checks the model on standard input and reports on standard output. Returns the exit code.
pub fn run_child() -> u8 {
    let verdict = match check() {
        Ok(event) | Err(event) => event,
    };
    let passed = matches!(verdict, CheckEvent::Passed { .. });
    report(&verdict);
    u8::from(!passed)
}

fn report(event: &CheckEvent) {
    let Ok(mut line) = serde_json::to_vec(event) else { return };
    line.push(b'\n');
    // Without a reader there is nothing to check for.
    let _ = io::stdout().lock().write_all(&line);
}

fn failed(why: impl ToString) -> CheckEvent {
    CheckEvent::Failed(why.to_string())
}

fn check() -> Result<CheckEvent, CheckEvent> {
    // Ends with the server, whatever happens to it.
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).map_err(failed)?;
    // Only the lowest priority and the first place when memory is short; both are optional.
    let _ = rustix::process::setpriority_process(None, 19);
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let mut input = io::stdin().lock();
    let mut line = String::new();
    input.by_ref().take(ORDER_MAX).read_line(&mut line).map_err(failed)?;
    let order: CheckOrder = serde_json::from_str(&line).map_err(failed)?;
    let limits = SandboxLimits { memory: order.memory, cpu_seconds: order.cpu_seconds };
    let status = sandbox::enter(limits).map_err(failed)?;
    // Nothing of the model has been read until here.
    let mut onnx = Vec::new();
    let full = || CheckEvent::Invalid("the model does not fit in the memory of its check".into());
    onnx.try_reserve_exact(order.size).map_err(|_| full())?;
    input.take(order.size as u64).read_to_end(&mut onnx).map_err(failed)?;
    if onnx.len() != order.size {
        return Err(failed("the model was cut off"));
    }
    report(&CheckEvent::Stage(CheckStage::Compile));
    let plan = compile_bytes(onnx).map_err(|err| CheckEvent::from(&err))?;
    report(&CheckEvent::Stage(CheckStage::Load));
    let device =
        CpuDevice::new(CpuOptions { threads: THREADS, queues: 1, ..CpuOptions::default() });
    let group = device_group_on(Arc::new(device), NodeOptions::default())
        .map_err(|failure| failed(failure.message()))?;
    run(&group, Arc::new(plan), &order)?;
    Ok(CheckEvent::Passed { landlock: status.landlock })
}

/// Runs the model on zeros, then as the server does to measure it. That a run fails is no reason to
/// refuse a model: its sizes may be none that it takes.
fn run(group: &DeviceGroup, plan: Arc<LaunchPlan>, order: &CheckOrder) -> Result<(), CheckEvent> {
    let placed = match group.load(plan.clone()) {
        Ok(placed) => placed,
        // Another device may run it: what serves the model says so.
        Err(DeviceError::Unsupported { .. }) => return Ok(()),
        Err(error) => return Err(CheckEvent::Invalid(error.to_string())),
    };
    let key = group.add_model(placed, &order.config);
    report(&CheckEvent::Stage(CheckStage::Run));
    if let Some(inputs) = zeros(&plan) {
        let (sender, receiver) = sync_channel(1);
        let class = Some(Class::BestEffort);
        let request = Request { model: key, inputs, class, priority: None, timeout: None };
        let reply = Box::new(move |_| {
            // The receiver waits for it.
            let _ = sender.send(());
        });
        let _handle = group.submit(request, reply);
        receiver.recv().map_err(failed)?;
    }
    report(&CheckEvent::Stage(CheckStage::Measure));
    group.profile(key, MEASURE_LIMIT);
    Ok(())
}

/// Zeros as inputs, with symbolic dimensions of 1; `None` where they would be too large.
fn zeros(plan: &LaunchPlan) -> Option<Vec<Tensor>> {
    let mut bytes = 0usize;
    let mut zero = |info: &ValueInfo| {
        let extent = |dim: &Dim| match dim {
            Dim::Fixed(extent) => *extent,
            Dim::Symbol(_) | Dim::Expr(_) | Dim::Unknown => 1,
        };
        let shape: Vec<usize> =
            info.shape.as_deref().unwrap_or_default().iter().map(extent).collect();
        let count = element_count(&shape).ok()?;
        let size = count.checked_mul(info.dtype.size_bytes().unwrap_or(32))?;
        bytes = bytes.checked_add(size).filter(|bytes| *bytes <= INPUT_BYTES_MAX)?;
        match info.dtype.size_bytes() {
            Some(_) => Tensor::from_raw(info.dtype, shape, vec![0; size].into()).ok(),
            None => Tensor::from_strings(shape, vec![Default::default(); count]).ok(),
        }
    };
    plan.inputs.iter().map(|id| zero(plan.value(*id))).collect()
}
