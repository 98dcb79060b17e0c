//! `atoll quantize`: makes a quantized file of a float model, with its measured accuracy.

mod samples;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use assembly::progress::Progress;
use assembly::{Failure, TaskRunner};
use bytes::Bytes;
use clap::{Args, ValueEnum};
use device::{Device, Outcome, Program};
use graph::content;
use graph::onnx::{
    ActivationBytes, ActivationRange, ExternalData, OutputError, QuantizableModel, RangeMethod,
    RangeObserver,
};
use model::{LaunchPlan, Tensor};
use serde::Serialize;

use samples::Sample;

/// How the range of an activation is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Method {
    /// The least and the largest number
    Max,
    /// All numbers but the rarest; see --percentile
    Percentile,
    /// The range whose bytes are distributed most like the numbers
    Entropy,
}

/// The type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Activations {
    Uint8,
    Int8,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll quantize model.onnx --calibrate samples --output model.int8.onnx
  atoll quantize model.onnx --calibrate samples --output m.onnx --method entropy --json

A sample is a .npy file for a model of one input, or a .npz file (np.savez) with an array for each
input, called as the input is. The float model runs on all of them, on the CPU.")]
pub(crate) struct QuantizeArgs {
    /// The ONNX file, in single precision
    pub(crate) model: PathBuf,

    /// Folder of samples: .npy or .npz files
    #[arg(long, value_name = "FOLDER")]
    calibrate: PathBuf,

    /// The quantized file to write
    #[arg(long, value_name = "FILE")]
    output: PathBuf,

    /// How the range of an activation is chosen
    #[arg(long, value_enum, default_value_t = Method::Max)]
    method: Method,

    /// Percentage of numbers that are not saturated, with --method percentile
    #[arg(long, default_value_t = 99.99)]
    percentile: f64,

    /// Type of activations; weights are int8
    #[arg(long, value_enum, default_value_t = Activations::Uint8)]
    activations: Activations,

    /// A node that stays float; may be repeated
    #[arg(long, value_name = "NODE")]
    keep: Vec<String>,

    /// Max samples
    #[arg(long, default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    samples: u32,

    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct QuantizeReport {
    model: String,
    output: String,
    samples: usize,
    method: String,
    activations: String,
    quantized_products: usize,
    bytes_before: u64,
    bytes_after: u64,
    outputs: Vec<OutputReport>,
    float_nodes: Vec<FloatNodeReport>,
}

/// The error of one output against the float model.
#[derive(Debug, Serialize)]
struct OutputReport {
    name: String,
    max_error: f64,
    mean_error: f64,
    /// Absent where both are equal.
    signal_to_noise_db: Option<f64>,
    /// Absent where a row is one number.
    top1_agreement: Option<f64>,
}

#[derive(Debug, Serialize)]
struct FloatNodeReport {
    node: String,
    op: String,
    reason: String,
}

/// Runs the command.
pub(crate) fn run(args: &QuantizeArgs) -> Result<(), Failure> {
    if !(50.0..=100.0).contains(&args.percentile) {
        return Err(Failure::usage("--percentile is a number from 50 to 100"));
    }
    let named = |err: String| Failure::failed(format!("{}: {err}", args.model.display()));
    let bytes = Bytes::from(std::fs::read(&args.model).map_err(|err| named(err.to_string()))?);
    let external = ExternalData::beside(&args.model);
    let model = QuantizableModel::open(bytes.clone(), external, &args.keep)
        .map_err(|err| named(err.to_string()))?;
    if model.product_count() == 0 {
        let reasons: Vec<String> = model
            .float_nodes()
            .iter()
            .map(|node| format!("\n  {} {}: {}", node.op_type, node.node, node.reason))
            .collect();
        return Err(named(format!("no product can be quantized{}", reasons.concat())));
    }
    let folder = |path: &Path| path.parent().map(|parent| parent.canonicalize().ok());
    if model.needs_other_files() && folder(&args.model) != folder(&args.output) {
        return Err(named("its weights are in other files: write the output beside it".into()));
    }
    let paths = samples::list(&args.calibrate, args.samples as usize)?;
    let device = cpu_device();
    let ranges = ranges(args, &model, device.as_ref(), &paths)?;
    let activations = match args.activations {
        Activations::Uint8 => ActivationBytes::Unsigned,
        Activations::Int8 => ActivationBytes::Signed,
    };
    let quantized = model.write(&ranges, activations).map_err(|err| named(err.to_string()))?;
    write_whole(&args.output, &quantized)?;
    let outputs = accuracy(args, device.as_ref(), &paths)?;
    let report = QuantizeReport {
        model: args.model.display().to_string(),
        output: args.output.display().to_string(),
        samples: paths.len(),
        method: format!("{:?}", args.method).to_lowercase(),
        activations: format!("{:?}", args.activations).to_lowercase(),
        quantized_products: model.product_count(),
        bytes_before: bytes.len() as u64,
        bytes_after: quantized.len() as u64,
        outputs,
        float_nodes: float_nodes(&model),
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        print(&report);
    }
    Ok(())
}

fn cpu_device() -> Arc<dyn Device> {
    Arc::new(cpu::CpuDevice::new(cpu::CpuOptions::default()))
}

/// Replaces the file at once: what reads it sees the old or the new one.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let failed = |err: std::io::Error| Failure::failed(format!("{}: {err}", path.display()));
    let partial = path.with_extension("partial");
    std::fs::write(&partial, bytes).map_err(failed)?;
    std::fs::rename(&partial, path).map_err(failed)
}

fn float_nodes(model: &QuantizableModel) -> Vec<FloatNodeReport> {
    let each = |node: &graph::onnx::FloatNode| FloatNodeReport {
        node: node.node.clone(),
        op: node.op_type.clone(),
        reason: node.reason.clone(),
    };
    model.float_nodes().iter().map(each).collect()
}

/// A model on the CPU device.
struct LoadedModel {
    plan: Arc<LaunchPlan>,
    program: Arc<dyn Program>,
    runner: TaskRunner,
}

impl LoadedModel {
    fn load(device: &dyn Device, plan: LaunchPlan) -> Result<LoadedModel, Failure> {
        let plan = Arc::new(plan);
        let program = device.load(plan.clone()).map_err(Failure::failed)?;
        Ok(LoadedModel { plan, program, runner: TaskRunner::open(device, false)? })
    }

    fn run(&self, sample: &Sample) -> Result<Vec<Tensor>, Failure> {
        let names: Vec<&str> =
            self.plan.inputs.iter().map(|id| self.plan.value(*id).name.as_str()).collect();
        let inputs = sample.inputs(&names)?;
        let failed = |err: String| Failure::failed(format!("{}: {err}", sample.path.display()));
        let task = self.program.prepare(inputs).map_err(|err| failed(err.to_string()))?;
        let completion = self.runner.run(task)?;
        match completion.outcome {
            Outcome::Done => completion.task.into_outputs().map_err(|err| failed(err.to_string())),
            Outcome::Preempted => Err(failed("the run was interrupted".to_string())),
            Outcome::Failed(err) => Err(failed(err.to_string())),
        }
    }
}

/// The ranges of all activations that are quantized.
fn ranges(
    args: &QuantizeArgs,
    model: &QuantizableModel,
    device: &dyn Device,
    paths: &[PathBuf],
) -> Result<HashMap<String, ActivationRange>, Failure> {
    let names = model.activations();
    let plan = assembly::compile_file_with_outputs(&args.model, &names)
        .map_err(|err| Failure::failed(format!("{}: {err}", args.model.display())))?;
    let first = plan.outputs.len() - names.len();
    let float = LoadedModel::load(device, plan)?;
    let mut observers = vec![RangeObserver::default(); names.len()];
    let method = match args.method {
        Method::Max => RangeMethod::Max,
        Method::Percentile => RangeMethod::Percentile(args.percentile),
        Method::Entropy => RangeMethod::Entropy,
    };
    let rounds = if method == RangeMethod::Max { 1 } else { 2 };
    let progress = Progress::new((rounds * paths.len()) as u64, "samples");
    progress.describe("ranges ");
    for round in 0..rounds {
        for path in paths {
            let outputs = float.run(&Sample::read(path)?)?;
            for ((observer, tensor), name) in
                observers.iter_mut().zip(&outputs[first..]).zip(&names)
            {
                let failed = |err: &str| Failure::failed(format!("activation '{name}': {err}"));
                let values = content::floats(tensor).ok_or_else(|| failed("it is not float"))?;
                match round {
                    0 => observer.observe(&values).map_err(|err| failed(&err))?,
                    _ => observer.count(&values),
                }
            }
            progress.advance();
        }
    }
    let range = |(name, observer): (String, RangeObserver)| {
        let range = observer.range(method);
        let range = range.ok_or_else(|| format!("activation '{name}' has no numbers"));
        range.map(|range| (name, range))
    };
    names.into_iter().zip(observers).map(range).collect::<Result<_, String>>().map_err(Into::into)
}

/// The error of the quantized file against the float model, on all samples.
fn accuracy(
    args: &QuantizeArgs,
    device: &dyn Device,
    paths: &[PathBuf],
) -> Result<Vec<OutputReport>, Failure> {
    let load = |path: &Path| {
        let plan = assembly::compile_file(path);
        let plan = plan.map_err(|err| Failure::failed(format!("{}: {err}", path.display())))?;
        LoadedModel::load(device, plan)
    };
    let (float, quantized) = (load(&args.model)?, load(&args.output)?);
    let mut errors = vec![OutputError::default(); float.plan.outputs.len()];
    let progress = Progress::new(paths.len() as u64, "samples");
    progress.describe("accuracy ");
    for path in paths {
        let sample = Sample::read(path)?;
        let (expected, got) = (float.run(&sample)?, quantized.run(&sample)?);
        for ((error, expected), got) in errors.iter_mut().zip(&expected).zip(&got) {
            let add = error.add(expected, got);
            add.map_err(|err| Failure::failed(format!("{}: {err}", path.display())))?;
        }
        progress.advance();
    }
    let each = |(id, error): (&model::ValueId, OutputError)| OutputReport {
        name: float.plan.value(*id).name.clone(),
        max_error: error.max(),
        mean_error: error.mean(),
        signal_to_noise_db: error.signal_to_noise_db(),
        top1_agreement: error.top1_agreement(),
    };
    Ok(float.plan.outputs.iter().zip(errors).map(each).collect())
}

fn print(report: &QuantizeReport) {
    println!(
        "{}: {} products of {} activations and int8 weights, {} samples, ranges by {}",
        report.output, report.quantized_products, report.activations, report.samples, report.method
    );
    let bytes = |bytes: u64| base::Bytes(bytes).to_string();
    println!("  {} before, {} now", bytes(report.bytes_before), bytes(report.bytes_after));
    for output in &report.outputs {
        let noise = output
            .signal_to_noise_db
            .map_or("no noise".to_string(), |db| format!("signal to noise {db:.1} dB"));
        let top1 = output
            .top1_agreement
            .map_or(String::new(), |share| format!(", top-1 agreement {:.2} %", 100.0 * share));
        println!(
            "  output {}: max error {:.4}, mean error {:.5}, {noise}{top1}",
            output.name, output.max_error, output.mean_error
        );
    }
    if !report.float_nodes.is_empty() {
        println!("  products that stay float:");
    }
    for node in &report.float_nodes {
        println!("    {:<8} {:<32} {}", node.op, node.node, node.reason);
    }
}
