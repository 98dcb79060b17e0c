//! Functions of quantized elements whose results are quantized again, without numbers in memory.

use rten_simd::{Isa, SimdOp};

use super::bytes_of;
use super::finish::{Target, clamped};
use crate::buffer::Data;
use crate::buffer_pool::Pooled;
use crate::kernel::parallel::in_pieces;
use crate::kernel::{Context, Inputs, Kernel, KernelError, KernelResult, dense, invalid};
use crate::value::{TypedTensor, Value};

/// The scale, zero point and sign of quantized elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Quantum {
    pub(crate) scale: f32,
    pub(crate) zero: i32,
    pub(crate) signed: bool,
}

impl Quantum {
    /// The least and the largest byte.
    pub(crate) fn range(self) -> (i32, i32) {
        if self.signed { (-128, 127) } else { (0, 255) }
    }
}

/// A sum or a product of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteBinary {
    Add,
    Mul,
}

/// A function of two quantized operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ByteZip {
    pub(crate) function: ByteBinary,
    pub(crate) operands: [Quantum; 2],
    /// The result's least and largest number.
    pub(crate) clamp: (f32, f32),
    pub(crate) output: Quantum,
}

/// The kernel of `zip`.
pub(crate) fn build_zip(zip: ByteZip) -> Kernel {
    match zip.output.signed {
        true => Kernel::new(move |context, inputs| run_zip::<i8>(context, &inputs, zip)),
        false => Kernel::new(move |context, inputs| run_zip::<u8>(context, &inputs, zip)),
    }
}

/// The bytes of an operand, repeated to `shape`.
fn spread<'a>(value: &'a Value, shape: &[usize]) -> Result<Data<'a, u8>, KernelError> {
    let (bytes, _) = bytes_of(value)?;
    if value.shape() == shape {
        return Ok(Data::Borrowed(bytes));
    }
    let copy = crate::buffer::Buffer::copy_of(bytes)?;
    let tensor = TypedTensor::try_from_data(value.shape(), copy)?;
    Ok(Data::Owned(dense::broadcast(&tensor, shape)?))
}

fn run_zip<T: Target + Pooled>(context: &Context, inputs: &Inputs, zip: ByteZip) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let (a, b) = (inputs.get(0)?, inputs.get(1)?);
    for (value, quantum) in [a, b].into_iter().zip(zip.operands) {
        if bytes_of(value)?.1 != quantum.signed {
            return Err(invalid!("an operand is {}", value.dtype()));
        }
    }
    let shape = dense::broadcast_shapes(a.shape(), b.shape())?;
    let (a, b) = (spread(a, &shape)?, spread(b, &shape)?);
    let mut out = context.pool.filled(dense::count(&shape)?, T::default())?;
    in_pieces(&mut out, &|start: usize, out: &mut [T]| {
        let end = start + out.len();
        ZipBytes { a: &a[start..end], b: &b[start..end], out, zip }.dispatch();
    });
    dense::output(&shape, out)
}

struct ZipBytes<'a, T> {
    a: &'a [u8],
    b: &'a [u8],
    out: &'a mut [T],
    zip: ByteZip,
}

impl<T: Target> SimdOp for ZipBytes<'_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let [a, b] = self.zip.operands;
        let output = self.zip.output;
        let flip = |quantum: Quantum| if quantum.signed { 0x80 } else { 0 };
        let shift = |quantum: Quantum| quantum.zero + i32::from(flip(quantum));
        let (least, most) = output.range();
        let (least, most) = ((least - output.zero) as f32, (most - output.zero) as f32);
        let (low, high) = self.zip.clamp;
        let number = |byte: u8, quantum: Quantum| {
            (i32::from(byte ^ flip(quantum)) - shift(quantum)) as f32 * quantum.scale
        };
        let store = |value: f32| {
            let value = clamped(value, low, high) / output.scale;
            T::of(0, clamped(value, least, most), output.zero)
        };
        let pairs = self.out.iter_mut().zip(self.a.iter().zip(self.b));
        match self.zip.function {
            ByteBinary::Add => {
                pairs.for_each(|(slot, (x, y))| *slot = store(number(*x, a) + number(*y, b)));
            }
            ByteBinary::Mul => {
                pairs.for_each(|(slot, (x, y))| *slot = store(number(*x, a) * number(*y, b)));
            }
        }
    }
}

/// The kernel that replaces each byte by that of `table`, at the byte's bits.
pub(crate) fn build_table(table: [u8; 256], signed: bool) -> Kernel {
    Kernel::new(move |context, inputs| {
        let x = inputs.get(0)?;
        let (bytes, _) = bytes_of(x)?;
        let mut out = context.pool.filled(bytes.len(), 0u8)?;
        in_pieces(&mut out, &|start: usize, out: &mut [u8]| {
            for (slot, byte) in out.iter_mut().zip(&bytes[start..]) {
                *slot = table[usize::from(*byte)];
            }
        });
        match signed {
            true => dense::output(x.shape(), out.cast::<i8>()),
            false => dense::output(x.shape(), out),
        }
    })
}
