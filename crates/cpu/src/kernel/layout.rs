//! Reordering of elements: reshape, transpose, concat, slice and pad.

mod border;
mod join;
mod matrix;
mod permute;
mod reshape;
mod window;

pub(crate) use permute::transposed;
pub(crate) use reshape::reshaped;

use model::op::Op;

use super::{Kernel, StepFacts, no_kernel};
use crate::kernel::KernelError;

/// Calls `$body` with `$data` bound to the elements of `$value`, and wraps the resulting vector as
/// a value of the same type and of shape `$shape`. Types of one width share their machine code.
macro_rules! rearrange {
    ($value:expr, $shape:expr, $data:ident => $body:expr) => {{
        use crate::buffer::Buffer;
        use crate::kernel::operand::{Element as _, elements};
        use crate::value::Value;
        let shape: &[usize] = $shape;
        macro_rules! as_bits {
            ($tensor:expr, $rust:ty, $bits:ty) => {{
                let $data: &[$bits] = bytemuck::cast_slice(elements($tensor));
                let moved: Buffer<$bits> = $body;
                <$rust>::wrap(shape, moved.cast())
            }};
        }
        match $value {
            Value::Bool(tensor) => {
                let $data: &[bool] = elements(tensor);
                let moved: Buffer<bool> = $body;
                bool::wrap(shape, moved)
            }
            Value::String(tensor) => {
                let $data: &[bytes::Bytes] = elements(tensor);
                let moved: Buffer<bytes::Bytes> = $body;
                bytes::Bytes::wrap(shape, moved)
            }
            Value::U8(tensor) => as_bits!(tensor, u8, u8),
            Value::I8(tensor) => as_bits!(tensor, i8, u8),
            Value::U16(tensor) => as_bits!(tensor, u16, u16),
            Value::I16(tensor) => as_bits!(tensor, i16, u16),
            Value::F16(tensor) => as_bits!(tensor, half::f16, u16),
            Value::BF16(tensor) => as_bits!(tensor, half::bf16, u16),
            Value::U32(tensor) => as_bits!(tensor, u32, u32),
            Value::I32(tensor) => as_bits!(tensor, i32, u32),
            Value::F32(tensor) => as_bits!(tensor, f32, u32),
            Value::U64(tensor) => as_bits!(tensor, u64, u64),
            Value::I64(tensor) => as_bits!(tensor, i64, u64),
            Value::F64(tensor) => as_bits!(tensor, f64, u64),
        }
    }};
}

pub(crate) use rearrange;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    Ok(match facts.step.op.clone() {
        Op::Shape { start, end } => {
            Kernel::new(move |_, inputs| reshape::shape(&inputs, start, end))
        }
        Op::Size => Kernel::new(|_, inputs| reshape::size(&inputs)),
        Op::Reshape { allow_zero } => {
            Kernel::new(move |_, inputs| reshape::reshape(inputs, allow_zero))
        }
        Op::Flatten { axis } => Kernel::new(move |_, inputs| reshape::flatten(inputs, axis)),
        Op::Squeeze => Kernel::new(|_, inputs| reshape::squeeze(inputs)),
        Op::Unsqueeze => Kernel::new(|_, inputs| reshape::unsqueeze(inputs)),
        Op::Transpose { perm } => {
            Kernel::new(move |context, inputs| permute::transpose(context, inputs, perm.as_deref()))
        }
        Op::DepthToSpace { block, crd } => Kernel::new(move |context, inputs| {
            permute::depth_to_space(context, &inputs, block, crd)
        }),
        Op::SpaceToDepth { block } => {
            Kernel::new(move |context, inputs| permute::space_to_depth(context, &inputs, block))
        }
        Op::ReverseSequence { batch_axis, time_axis } => Kernel::new(move |context, inputs| {
            matrix::reverse_sequence(context, &inputs, batch_axis, time_axis)
        }),
        Op::Trilu { upper } => {
            Kernel::new(move |context, inputs| matrix::trilu(context, &inputs, upper))
        }
        Op::Expand => Kernel::new(window::expand),
        Op::Tile => Kernel::new(join::tile),
        Op::Concat { axis } => {
            join::same_types(facts)?;
            Kernel::new(move |context, inputs| join::concat(context, inputs, axis))
        }
        Op::Split { axis } => {
            let parts = facts.step.outputs.len();
            Kernel::new(move |context, inputs| window::split(context, inputs, axis, parts))
        }
        Op::Slice => Kernel::new(window::slice),
        Op::Pad { mode } => Kernel::new(move |context, inputs| border::pad(context, inputs, mode)),
        _ => return Err(no_kernel(facts)),
    })
}

#[cfg(test)]
mod tests;
