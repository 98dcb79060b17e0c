//! Writing at positions given by a tensor of indices.

use half::{bf16, f16};
use model::DataType;
use model::op::ScatterReduction;

use super::{element_offsets, tuple_offsets};
use crate::kernel::binary::Number;
use crate::kernel::operand::{Element, dtype_of, elements, integers, one, resolve_axis};
use crate::kernel::{Inputs, KernelResult, StepFacts, no_kernel};
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, into_elements, with_value};

/// An error for updates of another type and for reductions of elements that cannot be added.
pub(super) fn check_types(
    facts: &StepFacts,
    reduction: ScatterReduction,
) -> Result<(), KernelError> {
    let dtype = dtype_of(facts, 0)?;
    let adds = !matches!(reduction, ScatterReduction::None);
    let addable = dtype.is_float() || dtype.is_integer() || dtype == DataType::Bool;
    if dtype_of(facts, 2)? != dtype || (adds && !addable) {
        return Err(no_kernel(facts));
    }
    Ok(())
}

pub(super) fn scatter_elements(
    mut inputs: Inputs,
    axis: i64,
    reduction: ScatterReduction,
) -> KernelResult {
    let value = inputs.take(0)?;
    let (indices, updates) = (inputs.get(1)?, inputs.get(2)?);
    let axis = resolve_axis(axis, value.shape().len())?;
    if indices.shape() != updates.shape() {
        return Err(invalid!("{:?} indices for {:?} updates", indices.shape(), updates.shape()));
    }
    let offsets = element_offsets(value.shape(), axis, &integers(indices)?, indices.shape())?;
    write(value, updates, &offsets, 1, reduction)
}

pub(super) fn nd(mut inputs: Inputs, reduction: ScatterReduction) -> KernelResult {
    let value = inputs.take(0)?;
    let (indices, updates) = (inputs.get(1)?, inputs.get(2)?);
    let index_shape = indices.shape();
    let (offsets, length) = tuple_offsets(value.shape(), &integers(indices)?, index_shape, 0)?;
    let depth = index_shape[index_shape.len() - 1];
    let want = [&index_shape[..index_shape.len() - 1], &value.shape()[depth..]].concat();
    if updates.shape() != want {
        return Err(invalid!("updates have shape {:?} and not {want:?}", updates.shape()));
    }
    write(value, updates, &offsets, length, reduction)
}

/// Puts runs of `length` updates at `offsets`, in order.
fn write(
    value: Value,
    updates: &Value,
    offsets: &[usize],
    length: usize,
    reduction: ScatterReduction,
) -> KernelResult {
    let shape = value.shape().to_vec();
    with_value!(value, tensor => put(tensor, updates, &shape, offsets, length, reduction))
}

fn put<T: Updatable>(
    tensor: TypedTensor<T>,
    updates: &Value,
    shape: &[usize],
    offsets: &[usize],
    length: usize,
    reduction: ScatterReduction,
) -> KernelResult {
    let updates = elements(T::get(updates).ok_or("the updates have another type")?);
    let mut data = into_elements(tensor);
    if length > 0 {
        for (&offset, update) in offsets.iter().zip(updates.chunks(length)) {
            let target = &mut data[offset..][..length];
            match reduction {
                ScatterReduction::None => target.clone_from_slice(update),
                _ => {
                    for (slot, update) in target.iter_mut().zip(update) {
                        *slot = slot.updated(update, reduction);
                    }
                }
            }
        }
    }
    one(T::wrap(shape, data))
}

/// An element that can be updated.
trait Updatable: Element {
    /// The element after an update.
    fn updated(&self, update: &Self, reduction: ScatterReduction) -> Self;
}

fn updated_number<T: Number>(a: T, b: T, reduction: ScatterReduction) -> T {
    match reduction {
        ScatterReduction::None => b,
        ScatterReduction::Add => a.add(b),
        ScatterReduction::Mul => a.mul(b),
        ScatterReduction::Max => a.larger(b),
        ScatterReduction::Min => a.smaller(b),
    }
}

macro_rules! updates {
    ($($rust:ty),+) => {
        $(impl Updatable for $rust {
            fn updated(&self, update: &Self, reduction: ScatterReduction) -> Self {
                updated_number(*self, *update, reduction)
            }
        })+
    };
}

updates!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);

impl Updatable for f16 {
    fn updated(&self, update: &Self, reduction: ScatterReduction) -> Self {
        f16::from_f32(updated_number(self.to_f32(), update.to_f32(), reduction))
    }
}

impl Updatable for bf16 {
    fn updated(&self, update: &Self, reduction: ScatterReduction) -> Self {
        bf16::from_f32(updated_number(self.to_f32(), update.to_f32(), reduction))
    }
}

impl Updatable for bool {
    fn updated(&self, update: &Self, reduction: ScatterReduction) -> Self {
        match reduction {
            ScatterReduction::None => *update,
            ScatterReduction::Add | ScatterReduction::Max => *self | *update,
            ScatterReduction::Mul | ScatterReduction::Min => *self & *update,
        }
    }
}

impl Updatable for bytes::Bytes {
    fn updated(&self, update: &Self, _: ScatterReduction) -> Self {
        update.clone()
    }
}
