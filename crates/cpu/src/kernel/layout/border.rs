//! Padding, positive and negative.

use model::op::PadMode;

use crate::buffer::Buffer;
use crate::buffer_pool::{BufferPool, Pooled};
use crate::kernel::operand::{
    elements, integer_list, one, optional_integers, output_len, resolve_axes, row_strides,
};
use crate::kernel::parallel::in_aligned_pieces;
use crate::kernel::{Context, Inputs, KernelResult};
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, with_value};

pub(super) fn pad(context: &Context, inputs: Inputs, mode: PadMode) -> KernelResult {
    let value = inputs.get(0)?;
    let shape = value.shape();
    let pads = all_pads(&inputs, shape.len())?;
    let mut maps = Vec::with_capacity(shape.len());
    let mut out = Vec::with_capacity(shape.len());
    for (axis, &size) in shape.iter().enumerate() {
        let (before, after) = pads[axis];
        let length = (size as i64).checked_add(before).and_then(|n| n.checked_add(after));
        let length = length.and_then(|n| usize::try_from(n).ok()).ok_or_else(|| {
            format!("dimension {axis} of {size} cannot be padded by {before} and {after}")
        })?;
        out.push(length);
    }
    output_len(&out)?;
    for (axis, &size) in shape.iter().enumerate() {
        maps.push(AxisMap::new(size, out[axis], pads[axis].0, mode)?);
    }
    let fill = match (mode, inputs.optional(2)) {
        (PadMode::Constant, Some(fill)) => Some(fill),
        _ => None,
    };
    if let Some(fill) = fill.filter(|fill| fill.dtype() != value.dtype()) {
        return Err(invalid!("a {} is padded with a {}", value.dtype(), fill.dtype()));
    }
    with_value!(value, tensor => {
        let fill = match fill {
            None => Default::default(),
            Some(fill) => first_like(tensor, fill)?,
        };
        let strides = row_strides(shape);
        let data = padded(context.pool, elements(tensor), &strides, &out, &maps, fill)?;
        one(Value::from(TypedTensor::from_data(&out, data)))
    })
}

/// The only element of `fill`, which has the type of `_like`.
fn first_like<T: crate::value::Typed + Clone>(
    _like: &TypedTensor<T>,
    fill: &Value,
) -> Result<T, KernelError> {
    let fill = T::get(fill).ok_or("the fill has another type")?;
    match elements(fill) {
        [only] => Ok(only.clone()),
        many => Err(invalid!("the fill must be one element, has {}", many.len())),
    }
}

/// The border before and after every dimension.
fn all_pads(inputs: &Inputs, rank: usize) -> Result<Vec<(i64, i64)>, KernelError> {
    let pads = integer_list(inputs, 1)?;
    let axes = match optional_integers(inputs, 3)? {
        Some(axes) => resolve_axes(&axes, rank)?,
        None => (0..rank).collect(),
    };
    if pads.len() != axes.len() * 2 {
        return Err(invalid!("{} pads for {} axes", pads.len(), axes.len()));
    }
    let mut all = vec![(0, 0); rank];
    for (i, &axis) in axes.iter().enumerate() {
        all[axis] = (pads[i], pads[axes.len() + i]);
    }
    Ok(all)
}

/// Where the positions of an output dimension come from.
struct AxisMap {
    /// Extent of the input.
    size: i64,
    before: i64,
    mode: PadMode,
    /// Start and length of the output positions that are consecutive input positions.
    run: (usize, usize),
}

impl AxisMap {
    fn new(size: usize, length: usize, before: i64, mode: PadMode) -> Result<AxisMap, KernelError> {
        if size == 0 && length > 0 && mode != PadMode::Constant {
            return Err(invalid!("there is nothing to pad with in mode {mode:?}"));
        }
        let n = size as i64;
        let start = before.clamp(0, length as i64) as usize;
        let end = before.saturating_add(n).clamp(start as i64, length as i64) as usize;
        Ok(AxisMap { size: n, before, mode, run: (start, end - start) })
    }

    /// The input position of an output position; `None` is the fill.
    fn source(&self, position: usize) -> Option<usize> {
        let (n, index) = (self.size, position as i64 - self.before);
        let inside = match self.mode {
            PadMode::Constant => index,
            PadMode::Edge => index.clamp(0, n - 1),
            PadMode::Wrap => index.rem_euclid(n),
            PadMode::Reflect if n == 1 => 0,
            PadMode::Reflect => {
                let period = 2 * (n - 1);
                let folded = index.rem_euclid(period);
                folded.min(period - folded)
            }
        };
        (0..n).contains(&inside).then_some(inside as usize)
    }
}

fn padded<T: Pooled>(
    pool: &BufferPool,
    data: &[T],
    strides: &[usize],
    shape: &[usize],
    maps: &[AxisMap],
    fill: T,
) -> Result<Buffer<T>, KernelError> {
    let count = shape.iter().product();
    let (Some((last, outer)), Some(&width)) = (maps.split_last(), shape.last()) else {
        return Ok(Buffer::copy_of(data)?);
    };
    let mut out = pool.filled(count, fill)?;
    if count == 0 {
        return Ok(out);
    }
    in_aligned_pieces(&mut out, width, &|start: usize, piece: &mut [T]| {
        for (number, row) in piece.chunks_mut(width).enumerate() {
            let mut rest = start / width + number;
            let mut base = Some(0);
            for (axis, map) in outer.iter().enumerate().rev() {
                let index = map.source(rest % shape[axis]);
                rest /= shape[axis];
                base = base.zip(index).map(|(base, index)| base + index * strides[axis]);
            }
            if let Some(base) = base {
                pad_row(&data[base..], row, last);
            }
        }
    });
    Ok(out)
}

/// One innermost row: the middle as one copy, the borders element by element.
fn pad_row<T: Clone>(data: &[T], row: &mut [T], map: &AxisMap) {
    let (start, length) = map.run;
    let each = |range: std::ops::Range<usize>, row: &mut [T]| {
        for position in range {
            if let Some(index) = map.source(position) {
                row[position].clone_from(&data[index]);
            }
        }
    };
    each(0..start, row);
    if length > 0
        && let Some(first) = map.source(start)
    {
        row[start..start + length].clone_from_slice(&data[first..first + length]);
    }
    each(start + length..row.len(), row);
}
