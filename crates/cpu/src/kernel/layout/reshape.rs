//! Changes of shape that do not move elements.

use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, into_elements, with_value};

use crate::kernel::operand::{
    Element, integer_list, one, optional_integers, resolve_axes, resolve_axis,
};
use crate::kernel::{Inputs, KernelResult};

/// `value` with `shape`, which must have as many elements.
pub(crate) fn reshaped(value: Value, shape: &[usize]) -> Result<Value, KernelError> {
    let have: usize = value.shape().iter().product();
    if model::tensor::element_count(shape).ok() != Some(have) {
        return Err(invalid!("shape {:?} cannot become {shape:?}", value.shape()));
    }
    Ok(with_value!(value, tensor => {
        Value::from(TypedTensor::from_data(shape, into_elements(tensor)))
    }))
}

pub(super) fn shape(inputs: &Inputs, start: i64, end: Option<i64>) -> KernelResult {
    let shape = inputs.get(0)?.shape();
    let rank = shape.len() as i64;
    let clamp =
        |index: i64| if index < 0 { index.saturating_add(rank) } else { index }.clamp(0, rank);
    let (start, end) = (clamp(start), clamp(end.unwrap_or(rank)));
    let dims: Vec<i64> =
        shape[start as usize..end.max(start) as usize].iter().map(|&dim| dim as i64).collect();
    one(i64::wrap(&[dims.len()], Buffer::copy_of(&dims)?))
}

pub(super) fn size(inputs: &Inputs) -> KernelResult {
    let count: usize = inputs.get(0)?.shape().iter().product();
    one(i64::wrap(&[], Buffer::filled(1, count as i64)?))
}

pub(super) fn reshape(mut inputs: Inputs, allow_zero: bool) -> KernelResult {
    let target = integer_list(&inputs, 1)?;
    let shape = target_shape(inputs.get(0)?.shape(), &target, allow_zero)?;
    one(reshaped(inputs.take(0)?, &shape)?)
}

/// The shape that `target` requests: zeros are copied, one dimension is inferred.
fn target_shape(
    from: &[usize],
    target: &[i64],
    allow_zero: bool,
) -> Result<Vec<usize>, KernelError> {
    let mut shape = Vec::with_capacity(target.len());
    let mut inferred = None;
    for (axis, &size) in target.iter().enumerate() {
        shape.push(match size {
            -1 if inferred.is_some() => return Err("only one dimension may be -1".into()),
            -1 => {
                inferred = Some(axis);
                1
            }
            0 if !allow_zero => *from
                .get(axis)
                .ok_or_else(|| invalid!("dimension {axis} is to be copied but is not there"))?,
            size => usize::try_from(size).map_err(|_| invalid!("a dimension cannot be {size}"))?,
        });
    }
    if let Some(axis) = inferred {
        let have: usize = from.iter().product();
        let rest = model::tensor::element_count(&shape)
            .map_err(|err| KernelError::from(err.to_string()))?;
        // A product that is zero for any value of the dimension determines nothing.
        let fits = rest != 0 && have.is_multiple_of(rest);
        shape[axis] = match (fits, have) {
            (true, _) => have / rest,
            (false, 0) => 0,
            _ => return Err(invalid!("shape {from:?} cannot become {target:?}")),
        };
    }
    Ok(shape)
}

pub(super) fn flatten(mut inputs: Inputs, axis: i64) -> KernelResult {
    let shape = inputs.get(0)?.shape();
    // The axis counts the positions between dimensions, one more than there are dimensions.
    let axis = match axis {
        axis if axis < 0 => resolve_axis(axis, shape.len())?,
        axis => resolve_axis(axis, shape.len() + 1)?,
    };
    let matrix = [shape[..axis].iter().product(), shape[axis..].iter().product()];
    one(reshaped(inputs.take(0)?, &matrix)?)
}

pub(super) fn squeeze(mut inputs: Inputs) -> KernelResult {
    let shape = inputs.get(0)?.shape();
    let axes = match optional_integers(&inputs, 1)? {
        Some(axes) => resolve_axes(&axes, shape.len())?,
        None => (0..shape.len()).filter(|&axis| shape[axis] == 1).collect(),
    };
    if let Some(&axis) = axes.iter().find(|&&axis| shape[axis] != 1) {
        return Err(invalid!("dimension {axis} is {} and not 1", shape[axis]));
    }
    let kept: Vec<usize> =
        (0..shape.len()).filter(|axis| !axes.contains(axis)).map(|axis| shape[axis]).collect();
    one(reshaped(inputs.take(0)?, &kept)?)
}

pub(super) fn unsqueeze(mut inputs: Inputs) -> KernelResult {
    let shape = inputs.get(0)?.shape();
    let axes = integer_list(&inputs, 1)?;
    let rank = shape.len() + axes.len();
    let axes = resolve_axes(&axes, rank)?;
    let mut rest = shape.iter();
    let expanded: Vec<usize> = (0..rank)
        .map(|axis| if axes.contains(&axis) { 1 } else { rest.next().copied().unwrap_or(1) })
        .collect();
    one(reshaped(inputs.take(0)?, &expanded)?)
}
