//! Products of any strides and types: matrix products, convolutions and transposed convolutions.
//! Those of 16-bit operands run on tensor cores (`kernels/tensor.cuh`), those of single precision
//! only where tf32 is allowed (`kernels/tensor_float.cuh`), bytes too (`kernels/bytes.cuh`), all
//! others do not (`kernels/product.cuh`).
//!
//! The weights of a convolution must be constant. All strides are supported; if the input has its
//! channels fastest, weights with input channels fastest are also read in whole lines.

mod attention;
mod bytes;
mod convolution;
mod einsum;
mod packed;
mod tensor;

use model::gpu::{GpuTarget, Precision};
use model::op::{Activation, Gemm, MatMul};

use super::args::{Address, ArgsWriter};
use super::draft::{LaunchDraft, StepDraft};
use super::loop_nest::{
    LoopNest, MAX_ITEMS, address, check_output, check_view, describe_all, kernel,
};
use super::view::{Element, View};

pub use attention::attention;
pub use bytes::{ByteColumns, ByteEpilogue, ByteProduct, CHUNK, Quantum};
pub(super) use convolution::{Sizes, begins, three};
pub use convolution::{conv, conv_transpose};
pub use einsum::einsum;
pub use packed::PackedConv;
use tensor::TensorLoops;

/// `output = activation(alpha * op(a) @ op(b) + bias + residual)`, with the batching and vectors of
/// numpy; `bias` and `residual` broadcast to the output.
pub fn matmul(
    target: &GpuTarget,
    spec: &MatMul,
    (a, b): (&View, &View),
    (bias, residual): (Option<&View>, Option<&View>),
    output: &View,
) -> Result<StepDraft, String> {
    let turned = |view: &View, turn: bool| if turn { transposed(view) } else { view.clone() };
    let (a, b) = (turned(a, spec.transpose_a), turned(b, spec.transpose_b));
    let epilogue = Epilogue { alpha: spec.alpha, beta: 1.0, activation: spec.activation };
    matrix(target, "MatMul", (&a, &b), Extra { bias, residual }, epilogue, output)
}

/// `output = activation(alpha * op(a) @ op(b) + beta * c)` on matrices; `c` broadcasts to the
/// output.
pub fn gemm(
    target: &GpuTarget,
    spec: &Gemm,
    (a, b): (&View, &View),
    c: Option<&View>,
    output: &View,
) -> Result<StepDraft, String> {
    if a.shape.len() != 2 || b.shape.len() != 2 {
        return Err(format!("no matrices: {:?} and {:?}", a.shape, b.shape));
    }
    let turned = |view: &View, turn: bool| if turn { transposed(view) } else { view.clone() };
    let (a, b) = (turned(a, spec.transpose_a), turned(b, spec.transpose_b));
    let epilogue = Epilogue { alpha: spec.alpha, beta: spec.beta, activation: spec.activation };
    matrix(target, "Gemm", (&a, &b), Extra { bias: c, residual: None }, epilogue, output)
}

/// Operands that are added to a product.
#[derive(Clone, Copy)]
struct Extra<'a> {
    bias: Option<&'a View>,
    residual: Option<&'a View>,
}

/// What is applied to the sums.
#[derive(Clone, Copy, Debug)]
struct Epilogue {
    alpha: f32,
    beta: f32,
    activation: Activation,
}

/// The last two dimensions swapped.
fn transposed(view: &View) -> View {
    let rank = view.shape.len();
    if rank < 2 {
        return view.clone();
    }
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(rank - 2, rank - 1);
    view.permuted(&perm)
}

/// The view with one more dimension of size one.
fn widened(view: &View, axis: usize) -> View {
    let mut wide = view.clone();
    wide.shape.insert(axis, 1);
    wide.strides.insert(axis, 0);
    wide
}

/// Fails for operand types that the kernels do not support.
fn check(a: &View, b: &View, extra: Extra, output: &View) -> Result<(), String> {
    check_output(output)?;
    let all = [Some(a), Some(b), extra.bias, extra.residual].into_iter().flatten();
    for view in all.chain([output]) {
        check_view(view)?;
        if !view.element.is_float() || view.element == Element::F64 {
            return Err(format!("product of {:?} is not supported", view.element));
        }
    }
    match extra.residual {
        Some(residual) if residual.element != output.element => {
            Err(format!("a residual of {:?} onto {:?}", residual.element, output.element))
        }
        _ => Ok(()),
    }
}

/// The microseconds that reading `a` and `b` in small pieces costs the product; more than a copy
/// costs, and a copy is worthwhile.
pub fn matmul_reading(spec: &MatMul, (a, b): (&View, &View), output: &View) -> [f64; 2] {
    let turned = |view: &View, turn: bool| if turn { transposed(view) } else { view.clone() };
    let (a, b) = (turned(a, spec.transpose_a), turned(b, spec.transpose_b));
    let extra = Extra { bias: None, residual: None };
    let views = Views { a: &a, b: &b, bias: None, residual: None, output };
    let problem = matrix_problem((&a, &b), extra, output).ok();
    let problem = problem.filter(|_| tensor::multiplies(&views));
    let loops = problem.and_then(|(problem, ..)| TensorLoops::of(&problem, false));
    loops.map_or([0.0; 2], |loops| [0, 1].map(|at| loops.reading_us(at, &views)))
}

fn matrix(
    target: &GpuTarget,
    op: &'static str,
    (a, b): (&View, &View),
    extra: Extra,
    epilogue: Epilogue,
    output: &View,
) -> Result<StepDraft, String> {
    let (problem, bias, residual) = matrix_problem((a, b), extra, output)?;
    let views = Views { a, b, bias: bias.as_ref(), residual: residual.as_ref(), output };
    problem.work(target, op, &views, epilogue)
}

/// The loops of a product, and what is added to it, broadcast to the output.
fn matrix_problem(
    (a, b): (&View, &View),
    extra: Extra,
    output: &View,
) -> Result<(Problem, Option<View>, Option<View>), String> {
    check(a, b, extra, output)?;
    let spread = |view: &View| {
        view.broadcast(&output.shape)
            .ok_or_else(|| format!("{:?} onto {:?}", view.shape, output.shape))
    };
    let (mut bias, mut residual) =
        (extra.bias.map(spread).transpose()?, extra.residual.map(spread).transpose()?);
    let (mut left, mut right, mut result) = (a.clone(), b.clone(), output.clone());
    // Vectors are matrices with one row or column that the output does not have.
    if a.shape.len() == 1 {
        left = widened(a, 0);
        let at = output.shape.len() - usize::from(b.shape.len() > 1 && !output.shape.is_empty());
        result = widened(&result, at);
        (bias, residual) =
            (bias.map(|view| widened(&view, at)), residual.map(|view| widened(&view, at)));
    }
    if b.shape.len() == 1 {
        right = widened(b, 1);
        let at = result.shape.len();
        result = widened(&result, at);
        (bias, residual) =
            (bias.map(|view| widened(&view, at)), residual.map(|view| widened(&view, at)));
    }
    let problem = batched(&left, &right, &bias, &residual, &result)?;
    Ok((problem, bias, residual))
}

/// The loops of a batched product of matrices.
fn batched(
    a: &View,
    b: &View,
    bias: &Option<View>,
    residual: &Option<View>,
    output: &View,
) -> Result<Problem, String> {
    let rank = output.shape.len();
    let wrong = || {
        format!("product of {:?} and {:?} as {:?} is not supported", a.shape, b.shape, output.shape)
    };
    if rank < 2 || a.shape.len() < 2 || b.shape.len() < 2 {
        return Err(wrong());
    }
    let (rows, columns) = (output.shape[rank - 2], output.shape[rank - 1]);
    let depth = a.shape[a.shape.len() - 1];
    let batch = &output.shape[..rank - 2];
    let a = a.broadcast(&[batch, &[rows, depth]].concat()).ok_or_else(wrong)?;
    let b = b.broadcast(&[batch, &[depth, columns]].concat()).ok_or_else(wrong)?;
    let strides =
        |view: &Option<View>| view.as_ref().map_or(vec![0; rank], |view| view.strides.clone());
    let (bias, residual) = (strides(bias), strides(residual));
    // If all batches share `b`, they are rows of one product.
    let shared = (0..rank - 2).all(|axis| b.strides[axis] == 0 || batch[axis] == 1);
    let cut = if shared { 0 } else { rank - 2 };
    let of = |strides: &[usize], range: std::ops::Range<usize>| strides[range].to_vec();
    let over = |range: std::ops::Range<usize>, operands: &[&[usize]]| {
        let all: Vec<Vec<usize>> =
            operands.iter().map(|strides| of(strides, range.clone())).collect();
        LoopNest::new(&output.shape[range], &all).merged()
    };
    let group = over(0..cut, &[&a.strides, &b.strides, &bias, &output.strides, &residual]);
    let row = over(cut..rank - 1, &[&a.strides, &bias, &output.strides, &residual]);
    let last = rank - 1;
    let inner = LoopNest::new(&[depth], &[vec![a.strides[last]], vec![b.strides[rank - 2]]]);
    let column = [b.strides[last], bias[last], output.strides[last], residual[last]];
    Ok(Problem {
        kind: Kind::Matrix,
        group,
        row,
        inner,
        columns,
        depth,
        column,
        picture: Picture::default(),
    })
}

/// `ProductKind` of `kernels/product.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Matrix,
    Convolution,
    Transposed,
}

/// `Picture` of `kernels/product.cuh`.
#[derive(Clone, Copy, Debug)]
struct Picture {
    size: [usize; 3],
    stride: [usize; 3],
    pad: [i32; 3],
    step: [usize; 3],
}

impl Default for Picture {
    fn default() -> Self {
        Picture { size: [1; 3], stride: [0; 3], pad: [0; 3], step: [1; 3] }
    }
}

impl Picture {
    fn write(&self, args: &mut ArgsWriter) {
        self.size.iter().chain(&self.stride).for_each(|value| drop_ref(args.int(*value)));
        self.pad.iter().for_each(|value| drop_ref(args.signed(*value)));
        self.step.iter().for_each(|value| drop_ref(args.fast_div(*value)));
    }
}

/// Ends a chain of writes.
fn drop_ref(_: &mut ArgsWriter) {}

/// The operands with their addresses.
struct Views<'a> {
    a: &'a View,
    b: &'a View,
    bias: Option<&'a View>,
    residual: Option<&'a View>,
    output: &'a View,
}

impl Views<'_> {
    fn reads(&self) -> Vec<&View> {
        [Some(self.a), Some(self.b), self.bias, self.residual].into_iter().flatten().collect()
    }

    fn addresses(&self, args: &mut ArgsWriter) {
        args.address(address(self.a)).address(address(self.b));
        args.address(self.bias.map_or(Address::Null, address));
        args.address(self.residual.map_or(Address::Null, address));
        args.address(address(self.output));
    }

    /// The types of a, b, bias and output.
    fn elements(&self) -> [Element; 4] {
        let bias = self.bias.map_or(self.output.element, |view| view.element);
        [self.a.element, self.b.element, bias, self.output.element]
    }
}

/// A product as the loops of its kernel.
struct Problem {
    kind: Kind,
    /// Operands: a, b, bias, output, residual.
    group: LoopNest,
    /// Operands: a, bias, output, residual, and the position in the image.
    row: LoopNest,
    /// Operands: a, b, and the position in the window.
    inner: LoopNest,
    columns: usize,
    depth: usize,
    /// Strides along the columns: b, bias, output, residual.
    column: [usize; 4],
    picture: Picture,
}

/// A step of several variants.
fn finished(
    op: &'static str,
    signature: String,
    drafts: Vec<LaunchDraft>,
    flops: u64,
    views: &Views,
) -> StepDraft {
    StepDraft {
        op,
        signature,
        drafts,
        reads: views.reads().into_iter().cloned().collect(),
        writes: vec![views.output.clone()],
        flops,
        weight_bytes: 0,
        finish_tiles: None,
    }
}

/// A tile: rows, columns, and those of a thread; threads share a sum if they have less than one
/// (`Dots` of the kernels).
type Tile = [usize; 4];

const TILES: [Tile; 3] = [[128, 128, 8, 8], [64, 64, 4, 4], [32, 64, 2, 4]];

/// Tiles of the product in tf32. The last two numbers say how many threads load it.
const TF32_TILES: [Tile; 3] = [[128, 128, 8, 8], [64, 64, 8, 4], [32, 64, 4, 4]];

/// Warps along the rows and columns of a tile of tf32.
fn tf32_warps([rows, ..]: Tile) -> (usize, usize) {
    match rows {
        128 => (2, 4),
        64 => (2, 2),
        _ => (1, 4),
    }
}

/// Whether the operands may be rounded to tf32.
fn rounds(target: &GpuTarget, views: &Views) -> bool {
    let [a, b, ..] = views.elements();
    target.precision == Precision::TF32 && [a, b] == [Element::F32; 2]
}

/// Up to this many rows, reading `b` limits a product and every tile is too large.
const FEW_ROWS: usize = 8;

/// The number of tiles that occupies a large device.
const ENOUGH_TILES: usize = 128;

impl Problem {
    fn work(
        &self,
        target: &GpuTarget,
        op: &'static str,
        views: &Views,
        epilogue: Epilogue,
    ) -> Result<StepDraft, String> {
        let loops = TensorLoops::of(self, false).filter(|_| tensor::multiplies(views));
        let drafts = match loops {
            Some(loops) => loops.drafts(target, views, epilogue)?,
            None => self.drafts(views, epilogue, rounds(target, views))?,
        };
        let reads = views.reads();
        let signature = format!(
            "{op} {:?} {epilogue:?} {:?} {:?} {} to {}",
            self.kind,
            self.picture,
            self.inner,
            describe_all(&reads),
            describe_all(&[views.output])
        );
        let sums = self.group.len() as u64 * self.row.len() as u64 * self.columns as u64;
        let flops = sums.saturating_mul(2 * self.depth as u64);
        Ok(finished(op, signature, drafts, flops, views))
    }

    /// The variants of any types, on tensor cores in tf32 only.
    fn drafts(
        &self,
        views: &Views,
        epilogue: Epilogue,
        tf32: bool,
    ) -> Result<Vec<LaunchDraft>, String> {
        for nest in [&self.group, &self.row] {
            nest.check()?;
        }
        if self.depth == 0 || self.inner.rank() > super::loop_nest::MAX_RANK {
            return Err(format!("a product over {} elements", self.depth));
        }
        let all = if tf32 { TF32_TILES } else { TILES };
        let mut tiles: Vec<Tile> = all.into_iter().filter(|tile| self.fits(tile)).collect();
        // The largest tile that still occupies the device, then the others.
        let best = tiles.iter().position(|tile| self.tiles(tile) >= ENOUGH_TILES);
        let best = best.unwrap_or(tiles.len() - 1);
        tiles.swap(0, best);
        if self.row.len() <= FEW_ROWS {
            tiles.insert(0, [1, if self.is_deep(1) { 8 } else { 32 }, 0, 0]);
        }
        tiles.into_iter().map(|tile| self.draft(views, epilogue, tile, tf32)).collect()
    }

    /// Whether most of a tile is used; the smallest tile is always accepted.
    fn fits(&self, tile: &Tile) -> bool {
        tile[..2] == TILES[TILES.len() - 1][..2]
            || (self.row.len() > tile[0] / 2 && self.columns > tile[1] / 2)
    }

    fn tiles(&self, [rows, columns, ..]: &Tile) -> usize {
        self.group.len() * self.row.len().div_ceil(*rows) * self.columns.div_ceil(*columns)
    }

    fn draft(
        &self,
        views: &Views,
        epilogue: Epilogue,
        tile: Tile,
        tf32: bool,
    ) -> Result<LaunchDraft, String> {
        let [rows, columns, of_rows, of_columns] = tile;
        let tiles = self.tiles(&tile);
        if tiles > MAX_ITEMS {
            return Err(format!("a product of {tiles} tiles"));
        }
        let mut args = ArgsWriter::new();
        views.addresses(&mut args);
        args.int(self.row.len()).int(self.columns).int(self.depth);
        args.float(epilogue.alpha).float(epilogue.beta);
        write_activation(epilogue.activation, &mut args);
        args.fast_div(self.columns.div_ceil(columns)).fast_div(self.row.len().div_ceil(rows));
        self.column.iter().for_each(|stride| drop_ref(args.int(*stride)));
        self.group.write(&mut args);
        self.row.write(&mut args);
        self.inner.write(&mut args);
        self.picture.write(&mut args);
        let elements = views.elements();
        let problem = format!(
            "tiles::k{:?}, {}, {}, {}, {}",
            self.kind,
            elements.map(Element::cuda_name).join(", "),
            self.group.rank(),
            self.row.rank(),
            self.inner.rank(),
        );
        let deep = format!("{}, {}", self.is_deep(0), self.is_deep(1));
        let shape = format!("{rows}, {columns}, {of_rows}, {of_columns}");
        let (header, expression) = match (of_rows, tf32) {
            // Reading limits these, so nothing would be gained by rounding.
            (0, _) => {
                let expression = format!("tiles::Dots<{problem}, {columns}, {}>", columns == 8);
                ("product.cuh", expression)
            }
            (_, false) => ("product.cuh", format!("tiles::Product<{problem}, {shape}, {deep}>")),
            (_, true) => {
                let (m, n) = tf32_warps(tile);
                let expression =
                    format!("tiles::TensorFloat<{problem}, {shape}, {m}, {n}, {deep}>");
                ("tensor_float.cuh", expression)
            }
        };
        let threads = match of_rows {
            0 => 256,
            _ => (rows / of_rows) * (columns / of_columns),
        };
        let text = kernel(header, &elements, expression, threads as u32);
        let variant = format!("{rows}x{columns}");
        Ok(LaunchDraft { variant, ..LaunchDraft::plain(text, tiles, args) })
    }

    /// Whether neighbours in depth are adjacent in memory.
    fn is_deep(&self, operand: usize) -> bool {
        self.inner.loops.last().is_some_and(|dim| dim.strides[operand] == 1)
    }
}

/// `Epilogue` of `kernels/number.cuh`.
fn write_activation(activation: Activation, args: &mut ArgsWriter) {
    let (kind, first, second) = activation_numbers(activation);
    args.int(kind).float(first).float(second);
}

/// The kernels' number of an activation, with its parameters.
fn activation_numbers(activation: Activation) -> (usize, f32, f32) {
    match activation {
        Activation::None => (0, 0.0, 0.0),
        Activation::Relu => (1, 0.0, 0.0),
        Activation::LeakyRelu { alpha } => (2, alpha, 0.0),
        Activation::Clip { low, high } => (3, low, high),
        Activation::Sigmoid => (4, 0.0, 0.0),
        Activation::Tanh => (5, 0.0, 0.0),
        Activation::Silu => (6, 0.0, 0.0),
        Activation::Gelu { tanh: false } => (7, 0.0, 0.0),
        Activation::Gelu { tanh: true } => (8, 0.0, 0.0),
        Activation::HardSwish => (9, 0.0, 0.0),
        Activation::HardSigmoid { alpha, beta } => (10, alpha, beta),
    }
}
