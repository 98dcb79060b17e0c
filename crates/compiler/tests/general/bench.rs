//! Runs generated kernels on the host: see `tests/emulation/cuda_fp16.h`.

use std::path::{Path, PathBuf};
use std::process::Command;

use compiler::gpu::args::Address;
use compiler::gpu::draft::{LaunchDraft, StepDraft};
use compiler::gpu::view::{BufferId, Element, View, packed_in};
use half::{bf16, f16};
use model::gpu::{GpuPlan, Kernel, KernelFacts, MemoryLocation, Patch};
use model::{DataType, Tensor};

/// Numbers that are the same in every run.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit
    }

    /// Between -2 and 2, in steps that half precision can represent.
    pub fn floats(&mut self, shape: &[usize]) -> Tensor {
        let len = shape.iter().product();
        let values =
            (0..len).map(|_| (self.below(1025) as f32 - 512.0) / 256.0).collect::<Vec<_>>();
        Tensor::from_vec(shape.to_vec(), values).unwrap()
    }

    pub fn integers(&mut self, shape: &[usize], low: i64, high: i64) -> Tensor {
        let len = shape.iter().product();
        let values =
            (0..len).map(|_| low + self.below((high - low) as usize) as i64).collect::<Vec<_>>();
        Tensor::from_vec(shape.to_vec(), values).unwrap()
    }
}

/// The layout of a tensor in its buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// Row-major.
    Packed,
    /// Dimension 1 fastest, with a number of unused elements behind each pixel.
    ChannelsLast(usize),
    /// Row-major with a gap behind each row, beginning at an odd element.
    Gapped,
    /// Dimensions in reverse order.
    Reversed,
}

struct Launch {
    kernel: usize,
    tiles: usize,
    args: Vec<u8>,
    patches: Vec<(u32, u32, u64)>,
}

struct Check {
    name: String,
    view: View,
    expected: Vec<f64>,
    tolerance: f64,
}

/// Buffers, launches and expected results.
#[derive(Default)]
pub struct Bench {
    buffers: Vec<Vec<u8>>,
    kernels: Vec<Kernel>,
    launches: Vec<Launch>,
    checks: Vec<Check>,
    turns: usize,
}

impl Bench {
    /// A buffer that holds `tensor`, as `element`.
    pub fn place(&mut self, tensor: &Tensor, layout: Layout, element: Element) -> View {
        let view = self.buffer(tensor.shape(), layout, element);
        let buffer = &mut self.buffers[view.buffer.0 as usize];
        for (offset, value) in offsets(&view).into_iter().zip(numbers(tensor)) {
            store(buffer, offset, element, value);
        }
        view
    }

    /// As [`Bench::place`] with channels fastest; what rounds a pixel up holds finite numbers.
    pub fn place_pixels(&mut self, tensor: &Tensor, slack: usize, element: Element) -> View {
        let view = self.buffer(tensor.shape(), Layout::ChannelsLast(slack), element);
        let buffer = &mut self.buffers[view.buffer.0 as usize];
        for offset in 0..buffer.len() / element.size() {
            store(buffer, offset, element, 1.0);
        }
        for (offset, value) in offsets(&view).into_iter().zip(numbers(tensor)) {
            store(buffer, offset, element, value);
        }
        view
    }

    /// A buffer of these bytes.
    pub fn raw(&mut self, bytes: Vec<u8>, element: Element) -> View {
        let buffer = BufferId(self.buffers.len() as u32);
        let shape = vec![bytes.len() / element.size()];
        self.buffers.push(bytes);
        View { buffer, offset: 0, shape, strides: vec![1], element, slack: 0 }
    }

    /// A buffer for a value of `shape`, filled with NaN.
    pub fn buffer(&mut self, shape: &[usize], layout: Layout, element: Element) -> View {
        let rank = shape.len();
        let order: Vec<usize> = match layout {
            Layout::ChannelsLast(_) if rank > 2 => {
                [0].into_iter().chain(2..rank).chain([1]).collect()
            }
            Layout::Reversed => (0..rank).rev().collect(),
            _ => (0..rank).collect(),
        };
        let (gap, offset) = match layout {
            Layout::ChannelsLast(gap) => (gap, 0),
            Layout::Gapped => (3, 1),
            _ => (0, 0),
        };
        let mut strides = vec![1; rank];
        let mut next = 1;
        for (place, axis) in order.iter().rev().enumerate() {
            strides[*axis] = next;
            next *= shape[*axis];
            next += if place == 0 { gap } else { 0 };
        }
        let slack = if matches!(layout, Layout::ChannelsLast(_)) { gap } else { 0 };
        let buffer = BufferId(self.buffers.len() as u32);
        let view = View { buffer, offset, shape: shape.to_vec(), strides, element, slack };
        self.buffers.push(vec![0xff; (view.extent().end + slack) * element.size()]);
        view
    }

    /// Runs `works` one after the other, once per variant, and expects `outputs`.
    pub fn check(
        &mut self,
        name: &str,
        works: &[StepDraft],
        outputs: &[(&View, &Tensor)],
        tolerance: f64,
    ) {
        self.check_with_fault(name, works, outputs, tolerance, false);
    }

    /// As [`Bench::check`], and expects that an index out of range is reported, or not.
    pub fn check_with_fault(
        &mut self,
        name: &str,
        works: &[StepDraft],
        outputs: &[(&View, &Tensor)],
        tolerance: f64,
        fault: bool,
    ) {
        let works = &works.iter().map(|work| self.some_variants(work)).collect::<Vec<_>>();
        let variants = works.iter().map(|work| work.drafts.len()).max().unwrap_or(0);
        for variant in 0..variants {
            let fault_word = self.buffer(&[1], Layout::Packed, Element::I32);
            self.buffers[fault_word.buffer.0 as usize].fill(0);
            let word = fault_word.buffer;
            let expected = vec![f64::from(u8::from(fault))];
            let label = format!("{name}, variant {variant}, fault");
            self.checks.push(Check { name: label, view: fault_word, expected, tolerance: 0.0 });
            let drafts: Vec<&LaunchDraft> =
                works.iter().map(|work| &work.drafts[variant.min(work.drafts.len() - 1)]).collect();
            let scratch: Vec<(u32, u32)> = drafts.iter().map(|draft| self.scratch(draft)).collect();
            let first = self.buffers.len() as u32;
            let moved = |buffer: BufferId| {
                let place = outputs.iter().position(|(view, _)| view.buffer == buffer);
                place.map_or(buffer, |place| BufferId(first + place as u32))
            };
            for (draft, scratch) in drafts.iter().zip(scratch) {
                self.launch(draft, &moved, word, scratch);
            }
            for (view, expected) in outputs {
                let fresh = self.buffers[view.buffer.0 as usize].clone();
                let view = View { buffer: BufferId(self.buffers.len() as u32), ..(*view).clone() };
                assert_eq!(view.shape, expected.shape(), "{name}");
                self.buffers.push(fresh);
                let name = format!("{name}, variant {variant}");
                let expected = numbers(expected);
                self.checks.push(Check { name, view, expected, tolerance });
            }
        }
    }

    /// Tensor-core products have too many variants to compile all for every case: other cases try
    /// others.
    fn some_variants(&mut self, work: &StepDraft) -> StepDraft {
        let mut work = work.clone();
        if is_tiled(&work.drafts[0].kernel) {
            self.turns += 1;
            let all = work.drafts.len();
            let chosen = [0, self.turns % all];
            let mut at = 0;
            work.drafts.retain(|_| {
                at += 1;
                chosen.contains(&(at - 1))
            });
        }
        work
    }

    /// Runs `plan` on `inputs`, twice with other variants, and expects `outputs`.
    pub fn check_plan(
        &mut self,
        name: &str,
        plan: &GpuPlan,
        inputs: &[Tensor],
        outputs: &[(Tensor, f64)],
    ) {
        for round in 0..2 {
            let first = self.buffers.len() as u32;
            self.buffers.push(vec![0xff; plan.arena_bytes as usize]);
            self.buffers.push(vec![0xff; plan.workspace_bytes as usize]);
            self.buffers.push(vec![0; 4]);
            let weights = self.buffers.len() as u32;
            self.buffers.extend(plan.weights.iter().map(|weight| (weight.pack.0)()));
            let given = self.buffers.len() as u32;
            self.buffers.extend(inputs.iter().map(|tensor| tensor.raw().unwrap().to_vec()));
            let results = self.buffers.len() as u32;
            self.buffers.extend(plan.outputs.iter().map(|slot| vec![0xff; slot.bytes as usize]));
            for step in &plan.steps {
                self.turns += 1;
                let plain: Vec<_> = step.choices.iter().filter(|each| each.cluster <= 1).collect();
                let launch = plain[if round == 0 { 0 } else { self.turns % plain.len() }];
                let arrivals = self.buffers.len() as u32;
                self.buffers.push(vec![0; launch.arrivals as usize * 4]);
                let patch = |patch: &Patch| {
                    let (buffer, offset) = match patch.to {
                        MemoryLocation::Arena(offset) => (first, offset),
                        MemoryLocation::Workspace(offset) => (first + 1, offset),
                        MemoryLocation::Fault => (first + 2, 0),
                        MemoryLocation::Arrivals => (arrivals, 0),
                        MemoryLocation::Weight(number, offset) => (weights + number, offset),
                        MemoryLocation::Input(number, offset) => (given + number, offset),
                        MemoryLocation::Output(number, offset) => (results + number, offset),
                    };
                    (patch.at, buffer, offset)
                };
                let patches = launch.patches.iter().map(patch).collect();
                let kernel = self.kernel_number(&plan.kernels[launch.kernel]);
                let (tiles, args) = (launch.tiles as usize, launch.args.clone());
                self.launches.push(Launch { kernel, tiles, args, patches });
            }
            for (number, (expected, tolerance)) in outputs.iter().enumerate() {
                let element = Element::exact(expected.dtype()).unwrap();
                let order: Vec<usize> = (0..expected.shape().len()).collect();
                let buffer = BufferId(results + number as u32);
                let view = View { buffer, ..packed_in(expected.shape(), &order, element) };
                let name = format!("{name}, output {number}, round {round}");
                let (expected, tolerance) = (numbers(expected), *tolerance);
                self.checks.push(Check { name, view, expected, tolerance });
            }
        }
    }

    fn kernel_number(&mut self, kernel: &Kernel) -> usize {
        let known = self.kernels.iter().position(|other| other == kernel);
        known.unwrap_or_else(|| {
            self.kernels.push(kernel.clone());
            self.kernels.len() - 1
        })
    }

    /// Workspace and arrival words of one launch; the words begin as zero.
    fn scratch(&mut self, draft: &LaunchDraft) -> (u32, u32) {
        let first = self.buffers.len() as u32;
        self.buffers.push(vec![0xff; draft.workspace_bytes]);
        self.buffers.push(vec![0; draft.arrivals * 4]);
        (first, first + 1)
    }

    fn launch(
        &mut self,
        draft: &LaunchDraft,
        moved: &dyn Fn(BufferId) -> BufferId,
        fault: BufferId,
        (workspace, arrivals): (u32, u32),
    ) {
        let kernel = self.kernel_number(&draft.kernel);
        let patch = |(at, address): &(u32, Address)| match address {
            Address::Buffer(buffer, offset) => (*at, moved(*buffer).0, *offset),
            Address::Fixed(MemoryLocation::Fault) => (*at, fault.0, 0),
            Address::Fixed(MemoryLocation::Workspace(offset)) => (*at, workspace, *offset),
            Address::Fixed(MemoryLocation::Arrivals) => (*at, arrivals, 0),
            other => panic!("{other:?} has no buffer"),
        };
        let patches = draft.args.1.iter().map(patch).collect();
        self.launches.push(Launch {
            kernel,
            tiles: draft.tiles,
            args: draft.args.0.clone(),
            patches,
        });
    }

    /// Compiles all kernels into one program, runs it, and compares.
    pub fn finish(self, name: &str) {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).unwrap();
        self.dump(name);
        let source = folder.join("kernels.cpp");
        std::fs::write(&source, self.program()).unwrap();
        let program = folder.join("kernels");
        if !compile(&source, &program) {
            return;
        }
        let (job, results) = (folder.join("job"), folder.join("results"));
        std::fs::write(&job, self.job()).unwrap();
        let output = Command::new(&program)
            .arg(&job)
            .arg(&results)
            .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{text}", self.last_kernel(&text));
        let bytes = std::fs::read(&results).unwrap();
        self.compare(&bytes);
    }

    /// What was running when the program crashed.
    fn last_kernel(&self, log: &str) -> String {
        let number =
            log.lines().filter_map(|line| line.strip_prefix("launch of kernel ")).next_back();
        let kernel = number.and_then(|number| self.kernels.get(number.parse::<usize>().ok()?));
        kernel.map_or(String::new(), |kernel| format!("{}{}", kernel.source, kernel.expression))
    }

    /// With `ATOLL_KERNELS`, writes every kernel to that folder as a module for a CUDA compiler.
    fn dump(&self, name: &str) {
        let Some(folder) = std::env::var_os("ATOLL_KERNELS").map(PathBuf::from) else { return };
        std::fs::create_dir_all(&folder).unwrap();
        for (number, kernel) in self.kernels.iter().enumerate() {
            let KernelFacts { source, expression, threads, shared_bytes, args_bytes } = &**kernel;
            let text = format!(
                "#include \"entry.cuh\"\n{source}using Op = {expression};\n\
                 TILES_EXPECT(Op, {threads}, {shared_bytes}, {args_bytes});\n\
                 TILES_REAL_TIME(Op)\nTILES_BEST_EFFORT(Op)\n"
            );
            std::fs::write(folder.join(format!("{name}{number}.cu")), text).unwrap();
        }
    }

    /// The kernels as one C++ program: each in its own namespace, headers first.
    fn program(&self) -> String {
        let mut text =
            "#define TILES_BF16\n#include \"number.cuh\"\n#include \"machine.h\"\n".to_string();
        let is_include = |line: &&str| line.starts_with("#include");
        let mut headers: Vec<&str> = self
            .kernels
            .iter()
            .flat_map(|kernel| kernel.source.lines().filter(is_include))
            .collect();
        headers.sort_unstable();
        headers.dedup();
        headers.iter().for_each(|header| text += &format!("{header}\n"));
        let mut table = String::new();
        for (number, kernel) in self.kernels.iter().enumerate() {
            let body: Vec<&str> = kernel
                .source
                .lines()
                .filter(|line| !line.starts_with("#include") && !line.starts_with("#define"))
                .collect();
            // A generated operator is always called `Function`; each gets its own name.
            let function = format!("Function{number}");
            let body = body.join("\n").replace("struct Function", &format!("struct {function}"));
            let expression =
                kernel.expression.replace("tiles::Function", &format!("tiles::{function}"));
            let (threads, shared, args) = (kernel.threads, kernel.shared_bytes, kernel.args_bytes);
            text += &format!(
                "{body}\nusing Op{number} = {expression};\n\
                 static_assert(Op{number}::kThreads == {threads});\n\
                 static_assert(Op{number}::kShared == {shared});\n\
                 static_assert(sizeof(Op{number}::Args) == {args});\n"
            );
            table += &format!("emulation::launch<Op{number}>, ");
        }
        text + &format!(
            "int main(int c, char** v) {{ return emulation::run(c, v, {{{table}}}); }}\n"
        )
    }

    fn job(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let word = |bytes: &mut Vec<u8>, value: usize| {
            bytes.extend_from_slice(&u32::try_from(value).unwrap().to_le_bytes());
        };
        word(&mut bytes, self.buffers.len());
        for buffer in &self.buffers {
            word(&mut bytes, buffer.len());
            bytes.extend_from_slice(buffer);
        }
        word(&mut bytes, self.launches.len());
        for launch in &self.launches {
            word(&mut bytes, launch.kernel);
            word(&mut bytes, launch.tiles);
            word(&mut bytes, launch.args.len());
            bytes.extend_from_slice(&launch.args);
            word(&mut bytes, launch.patches.len());
            for (at, buffer, offset) in &launch.patches {
                word(&mut bytes, *at as usize);
                word(&mut bytes, *buffer as usize);
                word(&mut bytes, *offset as usize);
            }
        }
        bytes
    }

    fn compare(&self, bytes: &[u8]) {
        let mut starts = vec![0];
        for buffer in &self.buffers {
            starts.push(starts[starts.len() - 1] + buffer.len());
        }
        assert_eq!(bytes.len(), starts[self.buffers.len()]);
        let mut wrong = Vec::new();
        for check in &self.checks {
            let buffer = &bytes[starts[check.view.buffer.0 as usize]..];
            let places = offsets(&check.view);
            for (at, (offset, want)) in places.iter().zip(&check.expected).enumerate() {
                let got = load(buffer, *offset, check.view.element);
                let close = (got - want).abs() <= check.tolerance * want.abs().max(1.0);
                if !(close || got == *want || got.is_nan() && want.is_nan()) {
                    wrong.push(format!("{}: element {at} is {got}, expected {want}", check.name));
                    break;
                }
            }
        }
        assert!(
            wrong.is_empty(),
            "{} of {}:\n{}",
            wrong.len(),
            self.checks.len(),
            wrong.join("\n")
        );
        println!("{} kernels, {} outputs", self.kernels.len(), self.checks.len());
    }
}

/// Whether a kernel is a product with many tile shapes.
fn is_tiled(kernel: &Kernel) -> bool {
    kernel.expression.contains("Tensor<") || kernel.expression.contains("Bytes<")
}

/// False where there is no compiler: the same text is then only compiled for GPUs.
fn compile(source: &Path, program: &Path) -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let run = Command::new("g++")
        .args([
            "-std=c++17",
            "-O0",
            "-fwrapv",
            "-fsanitize=address",
            "-w",
            "-fno-strict-aliasing",
            "-I",
        ])
        .arg(root.join("tests/emulation"))
        .arg("-I")
        .arg(root.join("kernels"))
        .arg(source)
        .arg("-o")
        .arg(program)
        .output();
    match run {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}", &text[..text.len().min(6000)]);
            true
        }
        Err(error) => {
            println!("kernels were not run: g++: {error}");
            false
        }
    }
}

/// The elements of a view, in row-major order of its dimensions.
fn offsets(view: &View) -> Vec<usize> {
    let mut all = vec![view.offset];
    for (&size, &stride) in view.shape.iter().zip(&view.strides) {
        all = all.iter().flat_map(|at| (0..size).map(move |i| at + i * stride)).collect();
    }
    all
}

/// Every element as a number.
pub fn numbers(tensor: &Tensor) -> Vec<f64> {
    let wide = |values: Vec<i64>| values.into_iter().map(|value| value as f64).collect();
    match tensor.dtype() {
        DataType::F32 => tensor.to_vec::<f32>().unwrap().into_iter().map(f64::from).collect(),
        DataType::F64 => tensor.to_vec::<f64>().unwrap(),
        DataType::I64 => wide(tensor.to_vec::<i64>().unwrap()),
        DataType::I32 => tensor.to_vec::<i32>().unwrap().into_iter().map(f64::from).collect(),
        DataType::U8 => tensor.to_vec::<u8>().unwrap().into_iter().map(f64::from).collect(),
        DataType::I8 => tensor.to_vec::<i8>().unwrap().into_iter().map(f64::from).collect(),
        DataType::Bool => tensor.raw().unwrap().iter().map(|byte| f64::from(*byte)).collect(),
        other => panic!("no numbers of {other}"),
    }
}

fn store(buffer: &mut [u8], offset: usize, element: Element, value: f64) {
    let to = &mut buffer[offset * element.size()..][..element.size()];
    match element {
        Element::F16 => to.copy_from_slice(&f16::from_f64(value).to_le_bytes()),
        Element::BF16 => to.copy_from_slice(&bf16::from_f64(value).to_le_bytes()),
        Element::F32 => to.copy_from_slice(&(value as f32).to_le_bytes()),
        Element::F64 => to.copy_from_slice(&value.to_le_bytes()),
        _ => to.copy_from_slice(&(value as i64).to_le_bytes()[..element.size()]),
    }
}

fn load(buffer: &[u8], offset: usize, element: Element) -> f64 {
    let from = &buffer[offset * element.size()..][..element.size()];
    let mut wide = [0; 8];
    wide[..from.len()].copy_from_slice(from);
    match element {
        Element::F16 => f16::from_le_bytes([from[0], from[1]]).to_f64(),
        Element::BF16 => bf16::from_le_bytes([from[0], from[1]]).to_f64(),
        Element::F32 => f64::from(f32::from_le_bytes([from[0], from[1], from[2], from[3]])),
        Element::F64 => f64::from_le_bytes(wide),
        Element::Bool | Element::U8 => f64::from(from[0]),
        Element::I8 => f64::from(from[0] as i8),
        Element::I32 => f64::from(i64::from_le_bytes(wide) as i32),
        _ => i64::from_le_bytes(wide) as f64,
    }
}
