//! Loops that apply a function to each element, or to each pair of elements.
//!
//! Only the innermost loops are compiled per function. What surrounds them is compiled per element
//! type and calls them through vtables, once per row or block.

use rten_simd::{Isa, SimdOp};

use super::operand::Element;
use super::parallel::in_pieces;
use super::strided::StridedLoop;

/// Elements that are copied to the stack at once, for loops that read slices only.
const BLOCK: usize = 128;

/// One operand of an innermost loop.
#[derive(Clone, Copy)]
pub(crate) enum RowOperand<'a, T> {
    /// One element for each element of the row.
    Each(&'a [T]),
    /// One element for the whole row.
    Broadcast(T),
}

impl<'a, T: Copy> RowOperand<'a, T> {
    fn new(data: &'a [T], offset: usize, length: usize, stride: isize) -> RowOperand<'a, T> {
        match stride {
            0 => RowOperand::Broadcast(data[offset]),
            _ => RowOperand::Each(&data[offset..][..length]),
        }
    }

    /// The part of the operand for `length` elements of the row from `start` on.
    fn part(self, start: usize, length: usize) -> RowOperand<'a, T> {
        match self {
            RowOperand::Each(data) => RowOperand::Each(&data[start..][..length]),
            all => all,
        }
    }
}

/// Runs `op`, compiled for the processor's widest vectors if `wide`.
#[inline(always)]
fn run<Op: SimdOp<Output = ()>>(op: Op, wide: bool) {
    if wide { op.dispatch() } else { op.eval(rten_simd::isa::GenericIsa::new()) }
}

/// Applies a function to each element of a row, in place.
pub(crate) trait MapRow<T>: Send + Sync {
    fn run(&self, row: &mut [T]);
}

/// The [`MapRow`] of a function of one element.
pub(crate) struct MapFn<F>(pub(crate) F);

impl<T: Element + Copy, F: Fn(T) -> T + Copy + Send + Sync> MapRow<T> for MapFn<F> {
    fn run(&self, row: &mut [T]) {
        run(MapInPlace { row, f: self.0 }, T::WIDE);
    }
}

struct MapInPlace<'a, T, F> {
    row: &'a mut [T],
    f: F,
}

impl<T: Copy, F: Fn(T) -> T> SimdOp for MapInPlace<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        for slot in self.row {
            *slot = (self.f)(*slot);
        }
    }
}

/// `data[i] = f(data[i])`.
pub(crate) fn map_in_place<T: Element + Copy>(data: &mut [T], f: &dyn MapRow<T>) {
    in_pieces(data, &|_: usize, piece: &mut [T]| f.run(piece));
}

/// `target[i] = f(source[i])`.
pub(crate) fn map<T: Element + Copy>(source: &[T], target: &mut [T], f: &dyn MapRow<T>) {
    in_pieces(target, &|start: usize, piece: &mut [T]| {
        piece.copy_from_slice(&source[start..][..piece.len()]);
        f.run(piece);
    });
}

/// `target[i] = f(source[i])`, where the types differ.
pub(crate) fn convert<T: Element + Copy, U: Send>(
    source: &[T],
    target: &mut [U],
    f: impl Fn(T) -> U + Sync + Copy,
) {
    in_pieces(target, &|start: usize, piece: &mut [U]| {
        run(ConvertLoop { source: &source[start..], target: piece, f }, T::WIDE);
    });
}

/// Like [`convert`], on the calling thread.
pub(crate) fn convert_run<T: Copy, U>(source: &[T], target: &mut [U], f: impl Fn(T) -> U) {
    ConvertLoop { source, target, f }.dispatch();
}

struct ConvertLoop<'a, T, U, F> {
    source: &'a [T],
    target: &'a mut [U],
    f: F,
}

impl<T: Copy, U, F: Fn(T) -> U> SimdOp for ConvertLoop<'_, T, U, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        for (slot, &x) in self.target.iter_mut().zip(self.source) {
            *slot = (self.f)(x);
        }
    }
}

/// Applies a function to each pair of elements of two rows.
pub(crate) trait ZipRow<A, B, U>: Send + Sync {
    /// `out[i] = f(a[i], b[i])`. Only elements with [`Element::WIDE`] may be broadcast.
    fn run(&self, a: RowOperand<A>, b: RowOperand<B>, out: &mut [U]);

    /// `row[i] = f(row[i], other[i])`, or `f(other[i], row[i])` if `swapped`. `false` if there is
    /// no such loop.
    fn run_in_place(&self, _row: &mut [U], _other: RowOperand<B>, _swapped: bool) -> bool {
        false
    }
}

/// The [`ZipRow`] of a function of two elements.
pub(crate) struct ZipFn<F>(pub(crate) F);

impl<A, B, U, F> ZipRow<A, B, U> for ZipFn<F>
where
    A: Element + Copy,
    B: Copy,
    F: Fn(A, B) -> U + Copy + Send + Sync,
{
    fn run(&self, a: RowOperand<A>, b: RowOperand<B>, out: &mut [U]) {
        let f = self.0;
        if A::WIDE {
            ZipLoop { a, b, out, f }.dispatch();
        } else if let (RowOperand::Each(a), RowOperand::Each(b)) = (a, b) {
            for ((slot, &a), &b) in out.iter_mut().zip(a).zip(b) {
                *slot = f(a, b);
            }
        }
    }
}

/// A [`ZipFn`] that has in-place loops as well, for the functions that models use most.
pub(crate) struct InPlaceFn<F> {
    pub(crate) f: F,
    /// Whether the order of the operands does not matter.
    pub(crate) commutes: bool,
}

impl<T: Element + Copy, F: Fn(T, T) -> T + Copy + Send + Sync> ZipRow<T, T, T> for InPlaceFn<F> {
    fn run(&self, a: RowOperand<T>, b: RowOperand<T>, out: &mut [T]) {
        ZipFn(self.f).run(a, b, out);
    }

    fn run_in_place(&self, row: &mut [T], other: RowOperand<T>, swapped: bool) -> bool {
        if swapped && !self.commutes {
            return false;
        }
        run(ZipInPlaceLoop { row, other, f: self.f }, T::WIDE);
        true
    }
}

struct ZipLoop<'a, A, B, U, F> {
    a: RowOperand<'a, A>,
    b: RowOperand<'a, B>,
    out: &'a mut [U],
    f: F,
}

impl<A: Copy, B: Copy, U, F: Fn(A, B) -> U> SimdOp for ZipLoop<'_, A, B, U, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let f = self.f;
        match (self.a, self.b) {
            (RowOperand::Each(a), RowOperand::Each(b)) => {
                for ((slot, &a), &b) in self.out.iter_mut().zip(a).zip(b) {
                    *slot = f(a, b);
                }
            }
            (RowOperand::Each(a), RowOperand::Broadcast(b)) => {
                for (slot, &a) in self.out.iter_mut().zip(a) {
                    *slot = f(a, b);
                }
            }
            (RowOperand::Broadcast(a), RowOperand::Each(b)) => {
                for (slot, &b) in self.out.iter_mut().zip(b) {
                    *slot = f(a, b);
                }
            }
            (RowOperand::Broadcast(a), RowOperand::Broadcast(b)) => {
                for slot in self.out {
                    *slot = f(a, b);
                }
            }
        }
    }
}

struct ZipInPlaceLoop<'a, T, F> {
    row: &'a mut [T],
    other: RowOperand<'a, T>,
    f: F,
}

impl<T: Copy, F: Fn(T, T) -> T> SimdOp for ZipInPlaceLoop<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let f = self.f;
        match self.other {
            RowOperand::Each(other) => {
                for (slot, &x) in self.row.iter_mut().zip(other) {
                    *slot = f(*slot, x);
                }
            }
            RowOperand::Broadcast(x) => {
                for slot in self.row {
                    *slot = f(*slot, x);
                }
            }
        }
    }
}

/// Runs `f` on one row. Repeats broadcast operands on the stack where `f` reads slices only.
fn zip_row<A: Element + Copy, B: Element + Copy, U>(
    a: RowOperand<A>,
    b: RowOperand<B>,
    out: &mut [U],
    f: &dyn ZipRow<A, B, U>,
) {
    if A::WIDE || matches!((a, b), (RowOperand::Each(_), RowOperand::Each(_))) {
        f.run(a, b, out);
        return;
    }
    let used = out.len().min(BLOCK);
    let (mut a_block, mut b_block) = ([A::default(); BLOCK], [B::default(); BLOCK]);
    if let RowOperand::Broadcast(a) = a {
        a_block[..used].fill(a);
    }
    if let RowOperand::Broadcast(b) = b {
        b_block[..used].fill(b);
    }
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let (start, length) = (index * BLOCK, out.len());
        let a = match a {
            RowOperand::Each(a) => &a[start..][..length],
            RowOperand::Broadcast(_) => &a_block[..length],
        };
        let b = match b {
            RowOperand::Each(b) => &b[start..][..length],
            RowOperand::Broadcast(_) => &b_block[..length],
        };
        f.run(RowOperand::Each(a), RowOperand::Each(b), out);
    }
}

/// `out[i] = f(a[..], b[..])` for the operands of `strided`.
pub(crate) fn zip<A: Element + Copy, B: Element + Copy, U: Element>(
    strided: &StridedLoop<2>,
    a: &[A],
    b: &[B],
    out: &mut [U],
    f: &dyn ZipRow<A, B, U>,
) {
    let [a_stride, b_stride] = strided.inner_strides;
    in_pieces(out, &|start: usize, piece: &mut [U]| {
        strided.for_each_run(start, start + piece.len(), &mut |position, length, [a_at, b_at]| {
            let row = &mut piece[position - start..][..length];
            let a = RowOperand::new(a, a_at, length, a_stride);
            let b = RowOperand::new(b, b_at, length, b_stride);
            zip_row(a, b, row, f);
        });
    });
}

/// `data[i] = f(data[i], other[..])` for the operand of `strided`; with the operands of `f` swapped
/// if `swapped`.
pub(crate) fn zip_in_place<T: Element + Copy>(
    strided: &StridedLoop<1>,
    data: &mut [T],
    other: &[T],
    f: &dyn ZipRow<T, T, T>,
    swapped: bool,
) {
    let [stride] = strided.inner_strides;
    in_pieces(data, &|start: usize, piece: &mut [T]| {
        strided.for_each_run(start, start + piece.len(), &mut |position, length, [at]| {
            let row = &mut piece[position - start..][..length];
            let other = RowOperand::new(other, at, length, stride);
            if f.run_in_place(row, other, swapped) {
                return;
            }
            let mut copy = [T::default(); BLOCK];
            for (index, block) in row.chunks_mut(BLOCK).enumerate() {
                let length = block.len();
                copy[..length].copy_from_slice(block);
                let own = RowOperand::Each(&copy[..length]);
                let other = other.part(index * BLOCK, length);
                let (a, b) = if swapped { (other, own) } else { (own, other) };
                zip_row(a, b, block, f);
            }
        });
    });
}
