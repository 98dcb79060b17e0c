//! ONNX's own node tests: every operator's reference inputs and outputs.
//!
//! The data comes with the `onnx` package (1.22.0). The test looks for it in
//! `ATOLL_ONNX_NODE_TESTS` and in virtual environments of the workspace. The verdict on each test
//! is committed beside this file; `ATOLL_BLESS=1` rewrites it.
//!
//! They run on the CPU device; on the CPU as a GPU that has the kernels of our compiler, with the
//! host for the rest; and, with `ATOLL_ONNX_DEVICE=cuda:0`, on a GPU in single precision.
//! `scripts/gpu/node_tests.sh` runs the last of these, in parts, where there is no workspace.

#[path = "support/lowering_device.rs"]
mod lowering_device;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use assembly::DeviceArgs;
use clap::Parser;
use cpu::{CpuDevice, CpuOptions};
use device::hybrid::HybridDevice;
use device::{Completion, CompletionSink, Device, Outcome, Queue, QueueOptions, Segment};
use model::config::Class;
use model::op::Op;
use model::{DataType, Tensor, TensorData};

/// Tolerances of ONNX's own runner.
const RELATIVE: f64 = 1e-3;
const ABSOLUTE: f64 = 1e-7;

/// Tests whose results are drawn by chance: only types, shapes and the range are compared.
const RANDOM: [&str; 1] = ["test_bernoulli"];

/// Tests whose expected zeros are rounding errors of single precision.
const ROUNDED: [&str; 1] = ["test_dft_inverse"];
const ROUNDED_ABSOLUTE: f64 = 1e-6;

/// How outputs are compared.
#[derive(Clone, Copy)]
struct Tolerance {
    absolute: f64,
    random: bool,
}

impl Tolerance {
    fn of(folder: &Path) -> Tolerance {
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.unwrap_or_default();
        let is_one_of = |list: &[&str]| list.iter().any(|prefix| name.starts_with(prefix));
        let absolute = if is_one_of(&ROUNDED) { ROUNDED_ABSOLUTE } else { ABSOLUTE };
        Tolerance { absolute, random: is_one_of(&RANDOM) }
    }
}

/// What became of a test.
#[derive(Clone, Debug, PartialEq)]
enum Verdict {
    Passed,
    /// An output is not what it should be.
    Failed(String),
    /// The model was refused before it ran.
    Unsupported(String),
    /// A step failed while running.
    Error(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Passed => "passed",
            Verdict::Failed(_) => "failed",
            Verdict::Unsupported(_) => "unsupported",
            Verdict::Error(_) => "error",
        })
    }
}

/// Completions, one by one.
struct ChannelSink(SyncSender<Completion>);

impl CompletionSink for ChannelSink {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

/// Folds constants as the product does.
pub(crate) struct CpuEvaluator;

impl graph::Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

/// The device with a queue for every class that is tested.
struct TestDevice {
    device: Arc<dyn Device>,
    queues: Vec<(Box<dyn Queue>, Receiver<Completion>)>,
    /// How often each operator ran on the host of a GPU.
    on_host: Mutex<BTreeMap<String, usize>>,
}

impl TestDevice {
    fn new(device: Arc<dyn Device>, classes: &[Class]) -> TestDevice {
        let open = |(id, class): (usize, &Class)| {
            let (sender, completions) = sync_channel(1);
            let preemptible = *class == Class::BestEffort;
            let id = id as u32;
            let options =
                QueueOptions { id, capacity: 1, high_priority: !preemptible, preemptible };
            let sink = Arc::new(ChannelSink(sender));
            (device.open_queue(options, sink).expect("a queue"), completions)
        };
        let queues = classes.iter().enumerate().map(open).collect();
        TestDevice { device, queues, on_host: Mutex::default() }
    }

    /// The verdict on the test in `folder`.
    fn judge(&self, folder: &Path) -> Verdict {
        let run = AssertUnwindSafe(|| self.run(folder).err().unwrap_or(Verdict::Passed));
        catch_unwind(run).unwrap_or_else(|_| Verdict::Error("panicked".to_string()))
    }

    fn run(&self, folder: &Path) -> Result<(), Verdict> {
        let refuse = |err: &dyn fmt::Display| Verdict::Unsupported(err.to_string());
        let bytes = std::fs::read(folder.join("model.onnx")).map_err(|err| refuse(&err))?;
        let plan =
            compiler::compile_onnx(&bytes, Some(&CpuEvaluator)).map_err(|err| refuse(&err))?;
        for step in self.device.host_sections(&plan, &[]).iter().flat_map(|s| &s.steps) {
            *self.on_host.lock().unwrap().entry(step.op.clone()).or_default() += 1;
        }
        let tolerance = Tolerance::of(folder);
        let program = self.device.load(Arc::new(plan)).map_err(|err| refuse(&err))?;
        for set in 0.. {
            let data = folder.join(format!("test_data_set_{set}"));
            if !data.is_dir() {
                return if set == 0 { Err(refuse(&"there is no data")) } else { Ok(()) };
            }
            let inputs = tensors(&data, "input")?;
            let want = tensors(&data, "output")?;
            for queue in &self.queues {
                let task = program.prepare(inputs.clone());
                let task = task.map_err(|err| Verdict::Error(err.to_string()))?;
                compare(&outputs(queue, task)?, &want, tolerance)?;
            }
        }
        Ok(())
    }
}

fn outputs(
    (queue, completions): &(Box<dyn Queue>, Receiver<Completion>),
    task: Box<dyn device::Task>,
) -> Result<Vec<Tensor>, Verdict> {
    let steps = 0..task.step_count();
    assert!(queue.launch(Segment { token: 0, task, steps }).is_ok(), "the queue is full");
    let completion = completions.recv().expect("the queue is alive");
    match completion.outcome {
        Outcome::Done => {
            completion.task.into_outputs().map_err(|err| Verdict::Error(err.to_string()))
        }
        other => Err(Verdict::Error(format!("{other:?}"))),
    }
}

/// The numbered tensors of a data set.
fn tensors(folder: &Path, kind: &str) -> Result<Vec<Tensor>, Verdict> {
    let mut tensors = Vec::new();
    for index in 0.. {
        let Ok(bytes) = std::fs::read(folder.join(format!("{kind}_{index}.pb"))) else { break };
        // Sequences and optionals are no tensors, and some element types are none of ours.
        let (_, tensor) = graph::parse_tensor_proto(&bytes)
            .map_err(|err| Verdict::Unsupported(format!("test data: {err}")))?;
        tensors.push(tensor);
    }
    Ok(tensors)
}

fn compare(got: &[Tensor], want: &[Tensor], tolerance: Tolerance) -> Result<(), Verdict> {
    let fail = |why: String| Err(Verdict::Failed(why));
    if got.len() != want.len() {
        return fail(format!("{} outputs instead of {}", got.len(), want.len()));
    }
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        if (got.dtype(), got.shape()) != (want.dtype(), want.shape()) {
            return fail(format!(
                "output {index} is {} {:?} instead of {} {:?}",
                got.dtype(),
                got.shape(),
                want.dtype(),
                want.shape()
            ));
        }
        if let Some(why) = difference(got, want, tolerance) {
            return fail(format!("output {index}: {why}"));
        }
    }
    Ok(())
}

/// The first difference between two tensors of one type and shape.
fn difference(got: &Tensor, want: &Tensor, tolerance: Tolerance) -> Option<String> {
    if tolerance.random {
        let outside = reals(got).into_iter().find(|x| *x != 0.0 && *x != 1.0);
        return outside.map(|x| format!("{x} is neither 0 nor 1"));
    }
    if !got.dtype().is_float() {
        return match (got.data(), want.data()) {
            (TensorData::Raw(a), TensorData::Raw(b)) if a == b => None,
            (TensorData::Strings(a), TensorData::Strings(b)) if a == b => None,
            _ => Some("the elements differ".to_string()),
        };
    }
    let pairs = reals(got).into_iter().zip(reals(want)).enumerate();
    for (position, (got, want)) in pairs {
        let same = got == want || (got.is_nan() && want.is_nan());
        let close = (got - want).abs() <= tolerance.absolute + RELATIVE * want.abs();
        if !same && !close {
            return Some(format!("element {position} is {got} instead of {want}"));
        }
    }
    None
}

fn reals(tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        DataType::F16 => tensor.to_vec::<half::f16>().unwrap().iter().map(|x| x.to_f64()).collect(),
        DataType::BF16 => {
            tensor.to_vec::<half::bf16>().unwrap().iter().map(|x| x.to_f64()).collect()
        }
        DataType::F32 => tensor.to_vec::<f32>().unwrap().into_iter().map(f64::from).collect(),
        _ => tensor.to_vec::<f64>().unwrap(),
    }
}

/// The folder with the tests, if it is somewhere.
fn data_folder() -> Option<PathBuf> {
    if let Ok(path) = std::env::var("ATOLL_ONNX_NODE_TESTS") {
        return Some(PathBuf::from(path));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let entries = |path: &Path| {
        std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path())
    };
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let starts =
        |path: &Path, prefix: &str| name(path).is_some_and(|name| name.starts_with(prefix));
    entries(&root)
        .filter(|path| starts(path, ".venv"))
        .flat_map(|venv| entries(&venv.join("lib")).collect::<Vec<_>>())
        .filter(|path| starts(path, "python"))
        .map(|python| python.join("site-packages/onnx/backend/test/data/node"))
        .find(|path| path.is_dir())
}

/// A list of verdicts: of the CPU, or of a GPU. `ATOLL_ONNX_LISTS` names another folder.
fn list_path(name: &str) -> PathBuf {
    match std::env::var("ATOLL_ONNX_LISTS") {
        Ok(folder) => PathBuf::from(folder).join(name),
        Err(_) => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name),
    }
}

const CPU_LIST: &str = "onnx_nodes.txt";
const CUDA_LIST: &str = "onnx_nodes_cuda.txt";

/// The committed verdicts by test.
fn committed(list: &str) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(list_path(list)).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, verdict)| (name.to_string(), verdict.to_string()))
        .collect()
}

/// The names of the tests to run, in order. `ATOLL_ONNX_ONLY` is a part of a name,
/// `ATOLL_ONNX_PART=2/14` takes every fourteenth test from the third on, and the tests that a list
/// in `ATOLL_ONNX_DONE` judges are left out.
fn selected(folder: &Path) -> Vec<String> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (only, part) = (variable("ATOLL_ONNX_ONLY"), variable("ATOLL_ONNX_PART"));
    let done = std::fs::read_to_string(variable("ATOLL_ONNX_DONE")).unwrap_or_default();
    let done: HashSet<&str> = done.lines().filter_map(|line| line.split(' ').next()).collect();
    let (part, parts) = match part.split_once('/') {
        Some((part, parts)) => (part.parse().expect("a part"), parts.parse().expect("parts")),
        None => (0, 1),
    };
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .expect("the folder of tests")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("test_") && name.contains(&only))
        .collect();
    names.sort();
    let names = names.into_iter().skip(part).step_by(parts);
    names.filter(|name| !done.contains(name.as_str())).collect()
}

/// Every test's verdict, by name. Calls `after` with what is known after each of them; ends when
/// the device is lost.
fn judge_all(
    folder: &Path,
    device: Arc<dyn Device>,
    classes: &[Class],
    after: impl Fn(&BTreeMap<String, Verdict>),
) -> BTreeMap<String, Verdict> {
    let bench = TestDevice::new(device, classes);
    let mut verdicts = BTreeMap::new();
    for name in selected(folder) {
        let verdict = bench.judge(&folder.join(&name));
        verdicts.insert(name, verdict);
        after(&verdicts);
        if let Some(fault) = bench.device.fault() {
            println!("the device is lost: {fault}");
            break;
        }
    }
    let on_host = bench.on_host.lock().unwrap();
    if !on_host.is_empty() {
        println!("steps on the host: {on_host:?}");
    }
    verdicts
}

/// A reason to refuse without the names of its model's nodes and values.
fn reason(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    match (first.split_once(" at node '"), first.split_once("' (")) {
        (Some((operator, place)), _) if operator.contains("'input'") => {
            format!("{operator}{}", place.rsplit(':').next().unwrap_or_default())
        }
        (Some((operator, _)), _) => operator.to_string(),
        (None, Some((_, step))) => format!("step ({step}"),
        _ => first.to_string(),
    }
}

/// Prints counts, what is wrong, and how often each reason to refuse was given.
fn print(verdicts: &BTreeMap<String, Verdict>) {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut reasons: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (name, verdict) in verdicts {
        *counts.entry(verdict.to_string()).or_default() += 1;
        match verdict {
            Verdict::Passed => {}
            Verdict::Unsupported(why) => reasons.entry(reason(why)).or_default().push(name),
            Verdict::Failed(why) | Verdict::Error(why) => println!("{verdict} {name}: {why}"),
        }
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, names)| std::cmp::Reverse(names.len()));
    for (reason, names) in reasons {
        println!("{:5} {reason} ({})", names.len(), names[0]);
    }
    println!("{} tests: {counts:?}", verdicts.len());
}

#[test]
fn differences_are_found() {
    let of = |data: &[f32]| Tensor::from_vec(vec![data.len()], data.to_vec()).unwrap();
    let exact = Tolerance { absolute: ABSOLUTE, random: false };
    let wrong = |got: Tensor, want: Tensor| compare(&[got], &[want], exact).is_err();
    assert!(!wrong(of(&[1.0, f32::NAN]), of(&[1.0005, f32::NAN])));
    assert!(!wrong(of(&[f32::INFINITY]), of(&[f32::INFINITY])));
    assert!(wrong(of(&[1.0]), of(&[1.01])));
    assert!(wrong(of(&[1.0]), of(&[f32::NAN])));
    assert!(wrong(of(&[f32::INFINITY]), of(&[1.0])));
    assert!(wrong(of(&[1.0]), of(&[1.0, 1.0])));
    let whole = |x: i64| Tensor::from_vec(vec![1], vec![x]).unwrap();
    assert!(wrong(whole(1), of(&[1.0])));
    assert!(wrong(whole(1 << 60), whole((1 << 60) + 1)));
    assert!(compare(&[], &[of(&[1.0])], exact).is_err());
    let random = Tolerance { absolute: ABSOLUTE, random: true };
    assert!(compare(&[of(&[1.0, 0.0])], &[of(&[0.0, 0.0])], random).is_ok());
    assert!(compare(&[of(&[0.5])], &[of(&[0.0])], random).is_err());
}

/// The folder with the tests; `None`, with how to get it, when it is nowhere.
fn data_or_skip() -> Option<PathBuf> {
    let found = data_folder();
    if found.is_none() {
        let how = "get it with `pip download --no-deps onnx==1.22.0`, unzip it and set \
                   ATOLL_ONNX_NODE_TESTS to onnx/backend/test/data/node in it";
        assert!(std::env::var("ATOLL_REQUIRE_ONNX").is_err(), "no ONNX node tests: {how}");
        println!("skipped: no ONNX node tests; {how}");
    }
    found
}

fn write_list(list: &str, verdicts: &BTreeMap<String, Verdict>) {
    let lines: Vec<String> =
        verdicts.iter().map(|(name, verdict)| format!("{name} {verdict}\n")).collect();
    std::fs::write(list_path(list), lines.concat()).expect("the list is written");
}

/// The tests that passed according to `before` and did not pass now.
fn lost<'a>(
    verdicts: &'a BTreeMap<String, Verdict>,
    before: &BTreeMap<String, String>,
) -> Vec<&'a String> {
    let passed = |name: &String| before.get(name).is_some_and(|was| was == "passed");
    let lost = verdicts.iter().filter(|(name, now)| **now != Verdict::Passed && passed(name));
    lost.map(|(name, _)| name).collect()
}

/// The tests with wrong outputs.
fn wrong(verdicts: &BTreeMap<String, Verdict>) -> Vec<&String> {
    let wrong = verdicts.iter().filter(|(_, verdict)| matches!(verdict, Verdict::Failed(_)));
    wrong.map(|(name, _)| name).collect()
}

#[test]
fn node_tests_do_as_they_did() {
    let Some(folder) = data_or_skip() else { return };
    let device = Arc::new(CpuDevice::new(CpuOptions::default()));
    let verdicts = judge_all(&folder, device, &[Class::BestEffort], |_| {});
    print(&verdicts);
    if std::env::var("ATOLL_BLESS").is_ok() {
        write_list(CPU_LIST, &verdicts);
    }
    let lost = lost(&verdicts, &committed(CPU_LIST));
    assert!(lost.is_empty(), "passed before and not now: {lost:?}");
    assert!(wrong(&verdicts).is_empty(), "wrong outputs: {:?}", wrong(&verdicts));
}

/// What the CPU runs, a GPU with our kernels and a host runs too: every step has one of the two,
/// and the sections between them are sound.
#[test]
fn nothing_is_refused_beside_a_host() {
    let Some(folder) = data_or_skip() else { return };
    let host = || Arc::new(CpuDevice::new(CpuOptions::default()));
    let device = HybridDevice::new(lowering_device::LoweringDevice::open(host()), host());
    let verdicts = judge_all(&folder, Arc::new(device), &[Class::BestEffort], |_| {});
    print(&verdicts);
    let lost = lost(&verdicts, &committed(CPU_LIST));
    assert!(lost.is_empty(), "passes on the CPU and not beside a GPU: {lost:?}");
}

/// ONNX Runtime's own operators, with its results: `scripts/contrib_cases.py` wrote them.
#[test]
fn operators_of_onnx_runtime_give_its_results() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/contrib");
    let host = || Arc::new(CpuDevice::new(CpuOptions::default()));
    let hybrid = HybridDevice::new(lowering_device::LoweringDevice::open(host()), host());
    let devices: [Arc<dyn Device>; 2] = [host(), Arc::new(hybrid)];
    for device in devices {
        let verdicts = judge_all(&folder, device, &[Class::BestEffort], |_| {});
        let wrong: Vec<_> = verdicts.iter().filter(|(_, now)| **now != Verdict::Passed).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert!(verdicts.len() >= 100 || std::env::var("ATOLL_ONNX_ONLY").is_ok());
    }
}

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    device: DeviceArgs,
}

/// The GPU to test, if there is one.
fn gpu_or_skip() -> Option<String> {
    let name = std::env::var("ATOLL_ONNX_DEVICE").ok();
    if name.is_none() {
        println!("skipped: ATOLL_ONNX_DEVICE names no GPU");
    }
    name
}

/// Needs `ATOLL_ONNX_DEVICE`; `ATOLL_PRECISIONS` names some of the precisions.
#[test]
fn a_gpu_conforms_in_every_precision() {
    let Some(name) = gpu_or_skip() else { return };
    let wanted = std::env::var("ATOLL_PRECISIONS").unwrap_or("f16 bf16 f32 tf32".to_string());
    let mut failed = Vec::new();
    for precision in wanted.split_whitespace() {
        let args = Args::parse_from(["test", "--device", &name, "--precision", precision]);
        let device = assembly::open_device(&args.device).unwrap_or_else(|err| panic!("{err:?}"));
        let report = device::conformance::run(&*device);
        println!("{precision}: {report}");
        failed.extend(report.failures().map(|case| format!("{precision}: {}", case.name)));
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Needs `ATOLL_ONNX_DEVICE`.
#[test]
fn node_tests_on_a_gpu() {
    let Some(name) = gpu_or_skip() else { return };
    let Some(folder) = data_or_skip() else { return };
    let args = Args::parse_from(["test", "--device", &name, "--precision", "f32"]);
    let device = assembly::open_device(&args.device).unwrap_or_else(|err| panic!("{err:?}"));
    let before = committed(CUDA_LIST);
    // After every test: what is known is kept when the GPU is lost or time runs out.
    let bless = std::env::var("ATOLL_BLESS").is_ok();
    let keep = |verdicts: &BTreeMap<String, Verdict>| {
        if bless {
            write_list(CUDA_LIST, verdicts);
        }
    };
    let verdicts = judge_all(&folder, device, &[Class::BestEffort, Class::RealTime], keep);
    print(&verdicts);
    let (shrunk, behind) = (lost(&verdicts, &before), lost(&verdicts, &committed(CPU_LIST)));
    assert!(shrunk.is_empty(), "passed before and not now: {shrunk:?}");
    assert!(behind.is_empty(), "passes on the CPU and not on {name}: {behind:?}");
}

#[test]
fn the_book_counts_what_the_list_says() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let list = std::fs::read_to_string(here.join("tests/onnx_nodes.txt")).unwrap();
    let count = |verdict: &str| list.lines().filter(|line| line.ends_with(verdict)).count();
    let grouped = |count: usize| match count {
        0..1000 => count.to_string(),
        _ => format!("{},{:03}", count / 1000, count % 1000),
    };
    let book = std::fs::read_to_string(here.join("../../docs/book/src/models.md")).unwrap();
    let said = book.split_whitespace().collect::<Vec<_>>().join(" ");
    let (passed, refused) = (grouped(count(" passed")), grouped(count(" unsupported")));
    let want = format!("{passed} of them pass and {refused} are refused as unsupported");
    assert!(said.contains(&want), "docs/book/src/models.md does not say: {want}");
}
