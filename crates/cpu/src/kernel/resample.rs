//! Resampling: resizing of any dimensions, and sampling at the points of a grid.

mod grid;
mod resize;
mod taps;

use model::DataType;
use model::op::Op;

use super::operand::{dtype_of, is_half, through_f32};
use super::{Kernel, StepFacts, no_kernel};
use crate::kernel::KernelError;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    match &facts.step.op {
        Op::Resize(resize) => resize::build(facts, resize.clone(), dtype),
        Op::GridSample { mode, padding, align_corners } => {
            let sampler = grid::Sampler::new(*mode, *padding, *align_corners);
            match dtype {
                _ if is_half(dtype) => {
                    let single =
                        Kernel::new(move |_, inputs| grid::sample::<f32>(&inputs, sampler));
                    Ok(through_f32(dtype, single))
                }
                DataType::F32 => {
                    Ok(Kernel::new(move |_, inputs| grid::sample::<f32>(&inputs, sampler)))
                }
                DataType::F64 => {
                    Ok(Kernel::new(move |_, inputs| grid::sample::<f64>(&inputs, sampler)))
                }
                _ => Err(no_kernel(facts)),
            }
        }
        _ => Err(no_kernel(facts)),
    }
}

#[cfg(test)]
mod tests;
