//! The loops of reductions.

use model::DataType;
use model::op::ReduceKind;
use rten_simd::{Isa, SimdOp};

use crate::kernel::binary::Number;
use crate::kernel::cast::convert;
use crate::kernel::operand::{Element, elements, one};
use crate::kernel::parallel::in_weighted_pieces;
use crate::kernel::{Context, KernelResult};
use crate::value::Value;
use crate::yield_point;

/// Independent sums of a row: as many as the widest vector has lanes, twice.
const LANES: usize = 32;

/// Elements of a row that one loop folds.
const BLOCK: usize = 2048;

/// Reduces `value`, seen as `outer * along * inner`, along the middle.
pub(super) fn reduce(
    context: &Context,
    value: &Value,
    extents: [usize; 3],
    kind: ReduceKind,
    shape: &[usize],
) -> KernelResult {
    macro_rules! typed {
        ($tensor:expr) => {{
            let mut out = context.pool.filled(extents[0] * extents[2], Default::default())?;
            by_kind(elements($tensor), extents, kind, &mut out);
            one(Element::wrap(shape, out))
        }};
    }
    match value {
        Value::U32(tensor) => typed!(tensor),
        Value::U64(tensor) => typed!(tensor),
        Value::I32(tensor) => typed!(tensor),
        Value::I64(tensor) => typed!(tensor),
        Value::F32(tensor) => typed!(tensor),
        Value::F64(tensor) => typed!(tensor),
        // Narrow integers are reduced in a wider type; only their extremes are computed, which
        // fit back.
        narrow => {
            let wide = convert(narrow, DataType::I32)?;
            let mut result = reduce(context, &wide, extents, kind, shape)?;
            one(convert(&result.remove(0), narrow.dtype())?)
        }
    }
}

fn by_kind<T: Number>(data: &[T], extents: [usize; 3], kind: ReduceKind, out: &mut [T]) {
    let zero = T::default();
    let magnitude = |x: T| if x < zero { zero.sub(x) } else { x };
    let count = extents[1] as f64;
    let same = |x: T| x;
    let sum = Fold { start: zero, map: same, f: T::add };
    let squares = Fold { start: zero, map: |x: T| x.mul(x), f: T::add };
    let mut fold = |f: &dyn FoldRow<T>, last: &(dyn Fn(T) -> T + Sync)| {
        fold(data, extents, &mut *out, f, last);
    };
    match kind {
        ReduceKind::Sum => fold(&sum, &same),
        ReduceKind::L1 => fold(&Fold { start: zero, map: magnitude, f: T::add }, &same),
        ReduceKind::SumSquare => fold(&squares, &same),
        ReduceKind::L2 => fold(&squares, &|x| T::from_f64(x.to_f64().sqrt())),
        ReduceKind::LogSum => fold(&sum, &|x| T::from_f64(x.to_f64().ln())),
        ReduceKind::Mean => fold(&sum, &|x| T::from_f64(x.to_f64() / count)),
        ReduceKind::Prod => fold(&Fold { start: T::ONE, map: same, f: T::mul }, &same),
        ReduceKind::Max => fold(&Fold { start: T::LOWEST, map: same, f: T::larger }, &same),
        ReduceKind::Min => fold(&Fold { start: T::HIGHEST, map: same, f: T::smaller }, &same),
        ReduceKind::LogSumExp => log_sum_exp(data, extents, out),
    }
}

/// Elements of columns that are added up before their work is reported.
const REPORT_AFTER: usize = 4096;

/// The loops of a fold, compiled per element type and function.
trait FoldRow<T>: Sync {
    /// The result of no elements.
    fn start(&self) -> T;
    /// Folds a row of at most [`BLOCK`] elements.
    fn row(&self, row: &[T]) -> T;
    /// Folds the results of two parts of a row.
    fn join(&self, a: T, b: T) -> T;
    /// Folds `along` rows of `inner` elements each into `target`, column by column; `target` has as
    /// many elements as columns that are folded.
    fn columns(&self, source: &[T], target: &mut [T], along: usize, inner: usize);
}

/// Folds `f` over `map` of each element.
#[derive(Clone, Copy)]
struct Fold<T, M, F> {
    start: T,
    map: M,
    f: F,
}

impl<T, M, F> FoldRow<T> for Fold<T, M, F>
where
    T: Number,
    M: Fn(T) -> T + Sync + Copy,
    F: Fn(T, T) -> T + Sync + Copy,
{
    fn start(&self) -> T {
        self.start
    }

    fn row(&self, row: &[T]) -> T {
        run(RowLoop { row, fold: *self })
    }

    fn join(&self, a: T, b: T) -> T {
        (self.f)(a, b)
    }

    fn columns(&self, source: &[T], target: &mut [T], along: usize, inner: usize) {
        run(ColumnLoop { source, target, along, inner, fold: *self });
    }
}

/// Folds the middle dimension with `f` and applies `last` to the results.
fn fold<T: Number>(
    data: &[T],
    [_, along, inner]: [usize; 3],
    out: &mut [T],
    f: &dyn FoldRow<T>,
    last: &(dyn Fn(T) -> T + Sync),
) {
    if along == 0 {
        out.fill(last(f.start()));
        return;
    }
    if inner == 1 {
        in_weighted_pieces(out, 1, along, &|first: usize, piece: &mut [T]| {
            for (slot, row) in piece.iter_mut().zip(data[first * along..].chunks_exact(along)) {
                *slot = last(fold_row(row, f));
            }
        });
        return;
    }
    in_weighted_pieces(out, 1, along, &|first: usize, piece: &mut [T]| {
        let mut done = 0;
        while done < piece.len() {
            let (row, column) = ((first + done) / inner, (first + done) % inner);
            let length = (inner - column).min(piece.len() - done);
            let source = &data[row * along * inner + column..];
            let target = &mut piece[done..done + length];
            f.columns(source, target, along, inner);
            target.iter_mut().for_each(|slot| *slot = last(*slot));
            done += length;
        }
    });
}

/// Folds one row in blocks whose results are folded pairwise, so that sums of many floats do not
/// lose the small ones.
fn fold_row<T: Number>(row: &[T], f: &dyn FoldRow<T>) -> T {
    if row.len() <= BLOCK {
        yield_point::did_work(row.len());
        return f.row(row);
    }
    let (left, right) = row.split_at((row.len() / 2).next_multiple_of(LANES));
    f.join(fold_row(left, f), fold_row(right, f))
}

/// Runs a loop, compiled for the processor's widest vectors if its element type gains from them.
#[inline(always)]
fn run<Op: SimdOp + TypedLoop>(op: Op) -> Op::Output {
    if Op::WIDE { op.dispatch() } else { op.eval(rten_simd::isa::GenericIsa::new()) }
}

/// A loop over elements of one type.
trait TypedLoop {
    /// [`Element::WIDE`] of that type.
    const WIDE: bool;
}

struct RowLoop<'a, T, M, F> {
    row: &'a [T],
    fold: Fold<T, M, F>,
}

impl<T: Number, M, F> TypedLoop for RowLoop<'_, T, M, F> {
    const WIDE: bool = T::WIDE;
}

impl<T: Number, M: Fn(T) -> T, F: Fn(T, T) -> T> SimdOp for RowLoop<'_, T, M, F> {
    type Output = T;

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) -> T {
        let Fold { start, map, f } = self.fold;
        let mut lanes = [start; LANES];
        let chunks = self.row.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane = f(*lane, map(x));
            }
        }
        let mut result = start;
        for &x in rest {
            result = f(result, map(x));
        }
        if self.row.len() >= LANES {
            let mut width = LANES / 2;
            while width > 0 {
                for lane in 0..width {
                    lanes[lane] = f(lanes[lane], lanes[lane + width]);
                }
                width /= 2;
            }
            result = f(lanes[0], result);
        }
        result
    }
}

struct ColumnLoop<'a, T, M, F> {
    source: &'a [T],
    target: &'a mut [T],
    along: usize,
    inner: usize,
    fold: Fold<T, M, F>,
}

impl<T: Number, M, F> TypedLoop for ColumnLoop<'_, T, M, F> {
    const WIDE: bool = T::WIDE;
}

impl<T: Number, M: Fn(T) -> T, F: Fn(T, T) -> T> SimdOp for ColumnLoop<'_, T, M, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Fold { start, map, f } = self.fold;
        self.target.fill(start);
        let mut unreported = 0;
        for step in 0..self.along {
            unreported += self.target.len();
            if unreported >= REPORT_AFTER {
                yield_point::did_work(unreported / 2);
                unreported = 0;
            }
            let row = &self.source[step * self.inner..][..self.target.len()];
            for (slot, &x) in self.target.iter_mut().zip(row) {
                *slot = f(*slot, map(x));
            }
        }
    }
}

/// `ln(sum(exp(x)))`, with the largest element factored out so that nothing overflows.
fn log_sum_exp<T: Number>(data: &[T], [_, along, inner]: [usize; 3], out: &mut [T]) {
    in_weighted_pieces(out, 1, along * 8, &|first: usize, piece: &mut [T]| {
        for (number, slot) in piece.iter_mut().enumerate() {
            let (row, column) = ((first + number) / inner, (first + number) % inner);
            let at = |step: usize| data[(row * along + step) * inner + column].to_f64();
            yield_point::did_work(along * 8);
            let top = (0..along).map(at).fold(f64::NEG_INFINITY, Number::larger);
            // Differences to an infinite one would be meaningless.
            let shift = if top.is_finite() { top } else { 0.0 };
            let sum: f64 = (0..along).map(|step| (at(step) - shift).exp()).sum();
            *slot = T::from_f64(shift + sum.ln());
        }
    });
}
