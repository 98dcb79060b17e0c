//! The loops of reductions.

use model::DataType;
use model::op::ReduceKind;
use rten_simd::{Isa, SimdOp};

use crate::kernel::binary::Number;
use crate::kernel::cast::convert;
use crate::kernel::operand::{Element, filled, flat, one};
use crate::kernel::walk::in_weighted_pieces;
use crate::kernel::{Context, KernelResult};
use crate::value::Value;
use crate::watch;

/// Independent sums of a row: as many as the widest vector has lanes, twice.
const LANES: usize = 32;

/// Elements summed in the element's own type before the sum goes to a wider one.
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
            let mut out = filled(context.pool, extents[0] * extents[2], Default::default());
            by_kind(&flat($tensor), extents, kind, &mut out);
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
        // Narrow integers are reduced in a wider type; only their extremes exist, which fit back.
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
    let real = |f: fn(f64) -> f64| move |x: T| T::from_f64(f(x.to_f64()));
    match kind {
        ReduceKind::Sum => fold(data, extents, out, zero, same, T::add, same),
        ReduceKind::L1 => fold(data, extents, out, zero, magnitude, T::add, same),
        ReduceKind::SumSquare => fold(data, extents, out, zero, |x| x.mul(x), T::add, same),
        ReduceKind::L2 => {
            fold(data, extents, out, zero, |x| x.mul(x), T::add, real(f64::sqrt));
        }
        ReduceKind::LogSum => fold(data, extents, out, zero, same, T::add, real(f64::ln)),
        ReduceKind::Mean => {
            fold(data, extents, out, zero, same, T::add, |x| T::from_f64(x.to_f64() / count));
        }
        ReduceKind::Prod => fold(data, extents, out, T::ONE, same, T::mul, same),
        ReduceKind::Max => fold(data, extents, out, T::LOWEST, same, T::larger, same),
        ReduceKind::Min => fold(data, extents, out, T::HIGHEST, same, T::smaller, same),
        ReduceKind::LogSumExp => log_sum_exp(data, extents, out),
    }
}

/// Elements of columns that are added up before they are told.
const TELL_AFTER: usize = 4096;

/// Folds `f` over `map` of the middle dimension and applies `last`.
fn fold<T: Number>(
    data: &[T],
    [_, along, inner]: [usize; 3],
    out: &mut [T],
    start: T,
    map: impl Fn(T) -> T + Sync + Copy,
    f: impl Fn(T, T) -> T + Sync + Copy,
    last: impl Fn(T) -> T + Sync + Copy,
) {
    if along == 0 {
        out.fill(last(start));
        return;
    }
    if inner == 1 {
        in_weighted_pieces(out, 1, along, |first, piece| {
            for (slot, row) in piece.iter_mut().zip(data[first * along..].chunks_exact(along)) {
                *slot = last(fold_row(row, start, map, f));
            }
        });
        return;
    }
    in_weighted_pieces(out, 1, along, |first, piece| {
        let mut done = 0;
        while done < piece.len() {
            let (row, column) = ((first + done) / inner, (first + done) % inner);
            let length = (inner - column).min(piece.len() - done);
            let source = &data[row * along * inner + column..];
            let target = &mut piece[done..done + length];
            run(ColumnFold { source, target, along, inner, start, map, f });
            target.iter_mut().for_each(|slot| *slot = last(*slot));
            done += length;
        }
    });
}

/// Folds one row in blocks whose results are folded pairwise, so that sums of many floats do not
/// drown the small ones.
fn fold_row<T: Number>(
    row: &[T],
    start: T,
    map: impl Fn(T) -> T + Copy,
    f: impl Fn(T, T) -> T + Copy,
) -> T {
    if row.len() <= BLOCK {
        watch::did(row.len());
        return run(RowFold { row, start, map, f });
    }
    let (left, right) = row.split_at((row.len() / 2).next_multiple_of(LANES));
    f(fold_row(left, start, map, f), fold_row(right, start, map, f))
}

/// Runs a loop, for the processor's widest vectors where its element type gains from them.
#[inline(always)]
fn run<Op: SimdOp + Loop>(op: Op) -> Op::Output {
    if Op::WIDE { op.dispatch() } else { op.eval(rten_simd::isa::GenericIsa::new()) }
}

/// A loop that knows whether wide vectors are worth their code.
trait Loop {
    const WIDE: bool;
}

struct RowFold<'a, T, M, F> {
    row: &'a [T],
    start: T,
    map: M,
    f: F,
}

impl<T: Number, M, F> Loop for RowFold<'_, T, M, F> {
    const WIDE: bool = T::WIDE;
}

impl<T: Number, M: Fn(T) -> T, F: Fn(T, T) -> T> SimdOp for RowFold<'_, T, M, F> {
    type Output = T;

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) -> T {
        let (map, f) = (self.map, self.f);
        let mut lanes = [self.start; LANES];
        let chunks = self.row.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane = f(*lane, map(x));
            }
        }
        let mut result = self.start;
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

struct ColumnFold<'a, T, M, F> {
    /// Rows of `inner` elements, of which the first as many as `target` has are folded.
    source: &'a [T],
    target: &'a mut [T],
    along: usize,
    inner: usize,
    start: T,
    map: M,
    f: F,
}

impl<T: Number, M, F> Loop for ColumnFold<'_, T, M, F> {
    const WIDE: bool = T::WIDE;
}

impl<T: Number, M: Fn(T) -> T, F: Fn(T, T) -> T> SimdOp for ColumnFold<'_, T, M, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let (map, f) = (self.map, self.f);
        self.target.fill(self.start);
        let mut told = 0;
        for step in 0..self.along {
            told += self.target.len();
            if told >= TELL_AFTER {
                watch::did(told / 2);
                told = 0;
            }
            let row = &self.source[step * self.inner..][..self.target.len()];
            for (slot, &x) in self.target.iter_mut().zip(row) {
                *slot = f(*slot, map(x));
            }
        }
    }
}

/// `ln(sum(exp(x)))`, with the largest element taken out so that nothing overflows.
fn log_sum_exp<T: Number>(data: &[T], [_, along, inner]: [usize; 3], out: &mut [T]) {
    in_weighted_pieces(out, 1, along * 8, |first, piece| {
        for (number, slot) in piece.iter_mut().enumerate() {
            let (row, column) = ((first + number) / inner, (first + number) % inner);
            let at = |step: usize| data[(row * along + step) * inner + column].to_f64();
            watch::did(along * 8);
            let top = (0..along).map(at).fold(f64::NEG_INFINITY, Number::larger);
            // An infinite top would make the differences meaningless.
            let shift = if top.is_finite() { top } else { 0.0 };
            let sum: f64 = (0..along).map(|step| (at(step) - shift).exp()).sum();
            *slot = T::from_f64(shift + sum.ln());
        }
    });
}
