//! `atoll check`: what a model needs, and whether it runs here.

use std::collections::BTreeMap;

use assembly::{CheckedPlans, Failure, sample_inputs};
use base::Bytes;
use compiler::CompileError;
use compiler::memory::peak_activation_bytes;
use device::{DeviceError, HostSection, HostStep};
use graph::ImportError;
use model::row_independence::{batch_symbol, mixing_step};
use model::{Dim, LaunchPlan, ValueId};
use serde::Serialize;

use crate::args::CheckArgs;

/// What is known of a model without running it.
#[derive(Debug, Serialize)]
struct CheckReport {
    model: String,
    device: String,
    runs: bool,
    inputs: Vec<TensorReport>,
    outputs: Vec<TensorReport>,
    weight_bytes: u64,
    /// Peak of all live values; absent if a shape is known only at run time.
    activation_bytes: Option<u64>,
    /// Whether requests may share a run.
    batching: BatchingReport,
    /// Every symbolic dimension of the inputs, and the size that the estimate assumes.
    bindings: BTreeMap<String, usize>,
    operators: BTreeMap<String, usize>,
    steps: Vec<StepReport>,
    /// What runs on the host because the device has no kernel for it, in order.
    host_sections: Vec<HostSectionReport>,
    /// What a person should know of the file.
    warnings: Vec<String>,
    unsupported: Vec<String>,
}

/// Whether rows of several requests may run as one batch.
#[derive(Debug, Serialize)]
struct BatchingReport {
    possible: bool,
    /// The symbol that all inputs and outputs begin with.
    symbol: Option<String>,
    /// Why requests are not batched; what would be needed.
    reason: Option<String>,
}

/// Steps that run on the host one after another.
#[derive(Debug, Serialize)]
struct HostSectionReport {
    steps: Vec<HostStepReport>,
    /// Bytes copied from the device; absent if they depend on the data.
    copied_in_bytes: Option<u64>,
    /// Bytes copied to the device; absent if they depend on the data.
    copied_out_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct HostStepReport {
    name: String,
    op: String,
    reason: String,
}

#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    datatype: String,
    shape: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
struct StepReport {
    name: String,
    op: String,
    outputs: Vec<TensorReport>,
}

/// Runs the command. A model that does not run is a failure with exit code 2.
pub(crate) fn run(args: &CheckArgs) -> Result<(), Failure> {
    let device = assembly::open_device(&args.device)?;
    let bindings = sample_inputs::parse_bindings(&args.bind)?;
    let compiled = assembly::compile_file_with_sizes(&args.model, |plan| sizes(plan, &bindings));
    let CheckedPlans { plan, bound, warnings } = match compiled {
        Ok(plans) => plans,
        Err(CompileError::Import(ImportError::Unsupported(nodes))) => {
            let message = format!("{} nodes are not supported", nodes.len());
            return refuse(args, nodes.iter().map(ToString::to_string).collect(), message);
        }
        Err(err) => {
            return refuse(args, vec![err.to_string()], format!("{}: {err}", args.model.display()));
        }
    };
    sample_inputs::check_known(&plan, &bindings)?;
    let unsupported = device.unsupported_steps(&plan);
    let mut report = report(args, &device.info().description, &plan, &bindings, &unsupported);
    report.warnings = warnings;
    report.activation_bytes =
        peak_activation_bytes(bound.as_ref().unwrap_or(&plan), &bound_names(&report.bindings));
    let sizes: Vec<(String, usize)> = report.bindings.clone().into_iter().collect();
    report.host_sections =
        device.host_sections(&plan, &sizes).into_iter().map(host_section).collect();
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        print(&report, args.steps);
    }
    if report.runs {
        return Ok(());
    }
    Err(Failure::usage(format!("{} steps cannot run on {}", unsupported.len(), report.device)))
}

/// The size of every symbolic dimension of the inputs: 1 without a binding.
fn sizes(plan: &LaunchPlan, bindings: &sample_inputs::Bindings) -> Vec<(String, usize)> {
    let size = |symbol: &str| (symbol.to_string(), bindings.get(symbol).copied().unwrap_or(1));
    sample_inputs::symbols(plan).into_iter().map(size).collect()
}

fn bound_names(bindings: &BTreeMap<String, usize>) -> Vec<(&str, usize)> {
    bindings.iter().map(|(symbol, size)| (symbol.as_str(), *size)).collect()
}

fn batching(plan: &LaunchPlan) -> BatchingReport {
    let Some(symbol) = batch_symbol(plan) else {
        let reason = "inputs and outputs do not all begin with one symbolic dimension";
        return BatchingReport { possible: false, symbol: None, reason: Some(reason.to_string()) };
    };
    let reason = mixing_step(plan, symbol).map(|step| {
        let (name, op) = (&step.name, step.op.name());
        format!(
            "rows may depend on each other after '{name}' ({op}); if they do not, set \
             batching.policy"
        )
    });
    BatchingReport { possible: reason.is_none(), symbol: Some(symbol.to_string()), reason }
}

/// Reports a model that cannot be imported.
fn refuse(args: &CheckArgs, unsupported: Vec<String>, message: String) -> Result<(), Failure> {
    if args.json {
        let report = serde_json::json!({
            "model": args.model.display().to_string(),
            "runs": false,
            "unsupported": unsupported,
        });
        println!("{report:#}");
    } else if unsupported.iter().all(|reason| !message.contains(reason.as_str())) {
        unsupported.iter().for_each(|node| println!("{node}"));
    }
    Err(Failure::usage(message))
}

fn report(
    args: &CheckArgs,
    device: &str,
    plan: &LaunchPlan,
    bindings: &sample_inputs::Bindings,
    unsupported: &[DeviceError],
) -> CheckReport {
    let mut operators = BTreeMap::new();
    for step in &plan.steps {
        *operators.entry(step.op.name()).or_default() += 1;
    }
    let steps = plan.steps.iter().map(|step| StepReport {
        name: step.name.clone(),
        op: step.op.name(),
        outputs: step.outputs.iter().flatten().map(|id| tensor(plan, *id)).collect(),
    });
    CheckReport {
        model: args.model.display().to_string(),
        device: device.to_string(),
        runs: unsupported.is_empty(),
        inputs: plan.inputs.iter().map(|id| tensor(plan, *id)).collect(),
        outputs: plan.outputs.iter().map(|id| tensor(plan, *id)).collect(),
        weight_bytes: plan.constant_bytes(),
        activation_bytes: None,
        batching: batching(plan),
        bindings: sizes(plan, bindings).into_iter().collect(),
        operators,
        steps: steps.collect(),
        host_sections: Vec::new(),
        warnings: Vec::new(),
        unsupported: unsupported.iter().map(ToString::to_string).collect(),
    }
}

fn host_section(section: HostSection) -> HostSectionReport {
    let steps = section.steps.into_iter().map(|HostStep { step, op, reason }| HostStepReport {
        name: step,
        op,
        reason,
    });
    HostSectionReport {
        steps: steps.collect(),
        copied_in_bytes: section.copied_in,
        copied_out_bytes: section.copied_out,
    }
}

fn tensor(plan: &LaunchPlan, id: ValueId) -> TensorReport {
    let info = plan.value(id);
    TensorReport {
        name: info.name.clone(),
        datatype: info.dtype.to_string(),
        shape: info.shape.as_ref().map(|dims| dims.iter().map(Dim::to_string).collect()),
    }
}

impl TensorReport {
    fn describe(&self) -> String {
        let shape = self.shape.as_ref().map_or("?".to_string(), |dims| dims.join(","));
        format!("{} {}[{shape}]", self.name, self.datatype)
    }
}

fn print(report: &CheckReport, steps: bool) {
    println!("{} on {}", report.model, report.device);
    report.inputs.iter().for_each(|input| println!("  input   {}", input.describe()));
    report.outputs.iter().for_each(|output| println!("  output  {}", output.describe()));
    report.warnings.iter().for_each(|warning| println!("  warning: {warning}"));
    println!("  weights {}", Bytes(report.weight_bytes));
    let sizes: Vec<String> =
        report.bindings.iter().map(|(symbol, size)| format!("{symbol}={size}")).collect();
    let bound =
        if sizes.is_empty() { String::new() } else { format!(" with {}", sizes.join(", ")) };
    match report.activation_bytes {
        Some(bytes) => println!("  activations {} at their peak{bound}", Bytes(bytes)),
        None => println!("  activations unknown: a shape depends on the data"),
    }
    let operators: Vec<String> =
        report.operators.iter().map(|(name, count)| format!("{count} {name}")).collect();
    println!("  {} steps: {}", report.steps.len(), operators.join(", "));
    if steps {
        for (index, step) in report.steps.iter().enumerate() {
            let outputs: Vec<String> = step.outputs.iter().map(TensorReport::describe).collect();
            println!("  {index:>4} {:<16} {:<32} -> {}", step.op, step.name, outputs.join(", "));
        }
    }
    report.unsupported.iter().for_each(|problem| println!("  {problem}"));
    if report.runs {
        println!("  every step runs");
    }
    match (&report.batching.symbol, &report.batching.reason) {
        (Some(symbol), None) => println!("  requests are batched along '{symbol}'"),
        (_, reason) => println!("  requests are not batched: {}", reason.as_deref().unwrap_or("-")),
    }
    report.host_sections.iter().for_each(print_host_section);
}

fn print_host_section(section: &HostSectionReport) {
    let bytes = |bytes: Option<u64>| {
        bytes.map_or("bytes that depend on the data".to_string(), |bytes| Bytes(bytes).to_string())
    };
    println!(
        "  on the host, {} copied from the device and {} to it:",
        bytes(section.copied_in_bytes),
        bytes(section.copied_out_bytes)
    );
    for step in &section.steps {
        println!("    {:<16} {:<32} {}", step.op, step.name, step.reason);
    }
}
