//! Operators that move or create elements by shape alone.

use model::{DataType, Tensor};

use super::shape::{axes_indices, axis_index, broadcast, product, unify};
use super::tracked::{TrackedElements, zip};
use super::{Fact, Inferred, Operands, fail};
use crate::content::{self, MAX_CONTENT};
use model::dim::SymDim;

fn owned_content(x: &Operands, index: usize) -> Option<Vec<SymDim>> {
    x.content(index).map(<[SymDim]>::to_vec)
}

pub fn shape_of(start: i64, end: Option<i64>, x: &Operands) -> Inferred<Fact> {
    x.require(1)?;
    let Some(shape) = x.shape(0) else {
        return Ok(Fact::new(DataType::I64, Some(vec![SymDim::Unknown])));
    };
    let rank = shape.len() as i64;
    let clamp = |at: i64| if at < 0 { at.saturating_add(rank) } else { at }.clamp(0, rank) as usize;
    let (start, end) = (clamp(start), clamp(end.unwrap_or(rank)));
    let dims = shape.get(start..end).unwrap_or_default().to_vec();
    Ok(Fact::new(DataType::I64, Some(vec![SymDim::from(dims.len())])).with_content(Some(dims)))
}

pub fn size(x: &Operands) -> Inferred<Fact> {
    x.require(1)?;
    let content = x.shape(0).map(|shape| vec![product(shape)]);
    Ok(Fact::new(DataType::I64, Some(vec![])).with_content(content))
}

pub fn reshape(allow_zero: bool, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.dtype(0)?;
    x.expect_rank(1, 1)?;
    let Some(target) = x.content(1) else {
        let rank = x.shape(1).and_then(|shape| shape[0].size()).filter(|rank| *rank <= 64);
        return Ok(Fact::new(dtype, rank.map(|rank| vec![SymDim::Unknown; rank])));
    };
    let mut dims = Vec::with_capacity(target.len());
    for (index, dim) in target.iter().enumerate() {
        dims.push(match dim.fixed() {
            Some(0) if !allow_zero => match x.shape(0) {
                Some(shape) => match shape.get(index) {
                    Some(dim) => dim.clone(),
                    None => return fail(format!("dimension {index} of the target copies nothing")),
                },
                None => SymDim::Unknown,
            },
            Some(size) if size < -1 => return fail(format!("a target dimension of {size}")),
            _ => dim.clone(),
        });
    }
    resolve_rest(x, &mut dims)?;
    let content = owned_content(x, 0);
    Ok(Fact::new(dtype, Some(dims)).with_content(content))
}

/// Computes the one dimension that follows from the element count.
fn resolve_rest(x: &Operands, dims: &mut [SymDim]) -> Inferred<()> {
    let open = |dim: &SymDim| dim.is(-1) || *dim == SymDim::Unknown;
    if dims.iter().filter(|dim| dim.is(-1)).count() > 1 {
        return fail("the target shape has more than one -1");
    }
    let total = x.shape(0).map_or(SymDim::Unknown, product);
    let known = dims.iter().filter(|dim| !open(dim)).fold(SymDim::Fixed(1), |p, dim| p.mul(dim));
    let open_count = dims.iter().filter(|dim| open(dim)).count();
    if let (Some(total), Some(known)) = (total.fixed(), known.fixed()) {
        let fits = match open_count {
            0 => total == known,
            _ => known == 0 || total % known == 0,
        };
        if !fits {
            let input = model::dim::shape_text(x.shape(0));
            return fail(format!(
                "{input} cannot be reshaped to {}",
                model::dim::shape_text(Some(dims))
            ));
        }
    }
    let rest = match open_count {
        1 => total.div(&known),
        _ => SymDim::Unknown,
    };
    // A quotient whose remainder no request can have stays symbolic, but equal to itself.
    dims.iter_mut().filter(|dim| open(dim)).for_each(|dim| *dim = rest.clone());
    Ok(())
}

pub fn flatten(axis: i64, x: &Operands) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    let dims = match x.shape(0) {
        Some(shape) => {
            let split = if axis == shape.len() as i64 {
                shape.len()
            } else {
                axis_index(axis, shape.len())?
            };
            vec![product(&shape[..split]), product(&shape[split..])]
        }
        None => vec![SymDim::Unknown; 2],
    };
    Ok(Fact::new(dtype, Some(dims)).with_content(owned_content(x, 0)))
}

pub fn squeeze(x: &Operands) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    let Some(shape) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let drop: Vec<usize> = if x.has(1) {
        let Some(axes) = x.ints(1) else { return Ok(Fact::new(dtype, None)) };
        let axes = axes_indices(&axes, shape.len())?;
        for axis in &axes {
            unify(&shape[*axis], &SymDim::Fixed(1), "a squeezed dimension")?;
        }
        axes
    } else {
        // Which dimensions are removed depends on sizes that may not be known.
        if shape.iter().any(|dim| dim.fixed().is_none()) {
            return Ok(Fact::new(dtype, None));
        }
        (0..shape.len()).filter(|axis| shape[*axis].is(1)).collect()
    };
    let kept = shape.iter().enumerate().filter(|(axis, _)| !drop.contains(axis));
    let dims = kept.map(|(_, dim)| dim.clone()).collect();
    Ok(Fact::new(dtype, Some(dims)).with_content(owned_content(x, 0)))
}

pub fn unsqueeze(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.dtype(0)?;
    let (Some(shape), Some(axes)) = (x.shape(0), x.ints(1)) else {
        return Ok(Fact::new(dtype, None));
    };
    let rank = shape.len() + axes.len();
    let places = axes_indices(&axes, rank)?;
    let mut rest = shape.iter();
    let dims = (0..rank)
        .map(|axis| match places.contains(&axis) {
            true => SymDim::Fixed(1),
            false => rest.next().cloned().unwrap_or(SymDim::Unknown),
        })
        .collect();
    Ok(Fact::new(dtype, Some(dims)).with_content(owned_content(x, 0)))
}

pub fn transpose(perm: Option<&[usize]>, x: &Operands) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    let Some(shape) = x.shape(0) else {
        let rank = perm.map(<[usize]>::len);
        return Ok(Fact::new(dtype, rank.map(|rank| vec![SymDim::Unknown; rank])));
    };
    let reversed: Vec<usize> = (0..shape.len()).rev().collect();
    let perm = perm.unwrap_or(&reversed);
    let mut seen = vec![false; shape.len()];
    for axis in perm {
        match seen.get_mut(*axis) {
            Some(slot @ false) => *slot = true,
            _ => {
                return fail(format!(
                    "{perm:?} is not a permutation of {} dimensions",
                    shape.len()
                ));
            }
        }
    }
    if perm.len() != shape.len() {
        return fail(format!("{perm:?} is not a permutation of {} dimensions", shape.len()));
    }
    let dims = perm.iter().map(|axis| shape[*axis].clone()).collect();
    let content = owned_content(x, 0).filter(|_| shape.len() <= 1);
    Ok(Fact::new(dtype, Some(dims)).with_content(content))
}

pub fn expand(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.dtype(0)?;
    x.expect_rank(1, 1)?;
    let Some(shape) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let target = match (x.content(1), x.shape(1)) {
        (Some(target), _) => target.to_vec(),
        (None, Some([length])) => match length.size().filter(|rank| *rank <= 64) {
            Some(rank) => vec![SymDim::Unknown; rank],
            None => return Ok(Fact::new(dtype, None)),
        },
        _ => return Ok(Fact::new(dtype, None)),
    };
    if target.iter().any(|dim| dim.fixed().is_some_and(|size| size < 0)) {
        return fail("a negative target dimension");
    }
    let dims = broadcast(shape, &target)?;
    let content = x.content(0).and_then(|elements| {
        zip(&dims, &[TrackedElements { shape, elements }], |e| Some(e[0].clone()))
    });
    Ok(Fact::new(dtype, Some(dims)).with_content(content))
}

pub fn tile(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.dtype(0)?;
    let Some(shape) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let dims = match x.content(1) {
        Some(repeats) if repeats.len() != shape.len() => {
            return fail(format!("{} repeats for rank {}", repeats.len(), shape.len()));
        }
        Some(repeats) => shape.iter().zip(repeats).map(|(dim, times)| dim.mul(times)).collect(),
        None => vec![SymDim::Unknown; shape.len()],
    };
    Ok(Fact::new(dtype, Some(dims)))
}

pub fn concat(axis: i64, x: &Operands) -> Inferred<Fact> {
    x.require(x.count().max(1))?;
    let dtype = x.same_type(0..x.count())?;
    let shapes: Option<Vec<&[SymDim]>> = (0..x.count()).map(|index| x.shape(index)).collect();
    let Some(shapes) = shapes else { return Ok(Fact::new(dtype, None)) };
    let rank = shapes[0].len();
    let axis = axis_index(axis, rank)?;
    let mut dims = shapes[0].to_vec();
    for shape in &shapes[1..] {
        if shape.len() != rank {
            return fail(format!("operands of ranks {rank} and {}", shape.len()));
        }
        for index in 0..rank {
            dims[index] = match index == axis {
                true => dims[index].add(&shape[index]),
                false => unify(&dims[index], &shape[index], "a dimension beside the axis")?,
            };
        }
    }
    let parts: Option<Vec<&[SymDim]>> = (0..x.count()).map(|index| x.content(index)).collect();
    let content = parts.filter(|_| rank == 1).map(|parts| parts.concat());
    Ok(Fact::new(dtype, Some(dims)).with_content(content))
}

pub fn split(axis: i64, outputs: usize, x: &Operands) -> Inferred<Vec<Fact>> {
    let dtype = x.dtype(0)?;
    let Some(shape) = x.shape(0) else { return Ok(vec![Fact::new(dtype, None); outputs]) };
    let axis = axis_index(axis, shape.len())?;
    if outputs == 0 {
        return fail("a split without outputs");
    }
    let sizes = match (x.has(1), x.content(1)) {
        (true, Some(sizes)) if sizes.len() != outputs => {
            return fail(format!("{} sizes for {outputs} outputs", sizes.len()));
        }
        (true, Some(sizes)) => {
            let total = sizes.iter().fold(SymDim::Fixed(0), |sum, size| sum.add(size));
            unify(&total, &shape[axis], "the sum of the parts")?;
            sizes.to_vec()
        }
        (true, None) => vec![SymDim::Unknown; outputs],
        (false, _) => {
            let parts = SymDim::from(outputs);
            if shape[axis].rem(&parts).fixed().is_some_and(|rest| rest != 0) {
                return fail(format!("{} in {outputs} equal parts", shape[axis]));
            }
            vec![shape[axis].div(&parts); outputs]
        }
    };
    let mut start = 0usize;
    let mut facts = Vec::with_capacity(outputs);
    for size in sizes {
        let mut dims = shape.to_vec();
        let end = size.size().and_then(|size| start.checked_add(size));
        let content = x.content(0).filter(|_| shape.len() == 1).and_then(|c| c.get(start..end?));
        start = end.unwrap_or(usize::MAX);
        dims[axis] = size;
        facts.push(Fact::new(dtype, Some(dims)).with_content(content.map(<[SymDim]>::to_vec)));
    }
    Ok(facts)
}

pub fn pad(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.same_type([0, 2])?;
    let Some(shape) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let axes = match (x.has(3), x.ints(3)) {
        (false, _) => Some((0..shape.len()).collect()),
        (true, Some(axes)) => Some(axes_indices(&axes, shape.len())?),
        (true, None) => None,
    };
    let (Some(axes), Some(pads)) = (axes, x.content(1)) else {
        return Ok(Fact::new(dtype, Some(vec![SymDim::Unknown; shape.len()])));
    };
    if pads.len() != 2 * axes.len() {
        return fail(format!("{} pads for {} dimensions", pads.len(), axes.len()));
    }
    let mut dims = shape.to_vec();
    for (index, axis) in axes.iter().enumerate() {
        dims[*axis] = dims[*axis].add(&pads[index]).add(&pads[index + axes.len()]);
    }
    Ok(Fact::new(dtype, Some(dims)))
}

pub fn range(x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    let dtype = x.same_type([0, 1, 2])?;
    let first = |index: usize| x.content(index).and_then(|content| content.first());
    if let (Some(start), Some(limit), Some(delta)) = (first(0), first(1), first(2)) {
        return whole_range(dtype, start, limit, delta);
    }
    let float = |index: usize| x.floats(index).and_then(|values| values.first().copied());
    let count = match (float(0), float(1), float(2)) {
        (Some(start), Some(limit), Some(delta)) => {
            let count = ((f64::from(limit) - f64::from(start)) / f64::from(delta)).ceil().max(0.0);
            if !count.is_finite() || count > model::tensor::MAX_ELEMENTS as f64 {
                return fail("an endless range");
            }
            SymDim::Fixed(count as i64)
        }
        _ => SymDim::Unknown,
    };
    Ok(Fact::new(dtype, Some(vec![count])))
}

fn whole_range(dtype: DataType, start: &SymDim, limit: &SymDim, delta: &SymDim) -> Inferred<Fact> {
    let step = match delta.fixed() {
        Some(0) => return fail("a range with a step of zero"),
        Some(step) => step,
        None => return Ok(Fact::new(dtype, Some(vec![SymDim::Unknown]))),
    };
    let (span, size) = match step > 0 {
        true => (limit.sub(start), step),
        false => (start.sub(limit), step.checked_neg().unwrap_or(i64::MAX)),
    };
    let count = span.greater(&SymDim::Fixed(0)).div_ceil(&SymDim::Fixed(size));
    let content = count.size().filter(|count| *count <= MAX_CONTENT).map(|count| {
        (0..count as i64).map(|index| start.add(&SymDim::Fixed(index).mul(delta))).collect()
    });
    Ok(Fact::new(dtype, Some(vec![count])).with_content(content))
}

pub fn constant_of_shape(dtype: DataType, value: &[u8; 8], x: &Operands) -> Inferred<Fact> {
    x.require(1)?;
    let Some(dims) = x.content(0) else {
        let rank = x.shape(0).and_then(|shape| shape.first()).and_then(SymDim::size);
        let rank = rank.filter(|rank| *rank <= 64);
        return Ok(Fact::new(dtype, rank.map(|rank| vec![SymDim::Unknown; rank])));
    };
    let content =
        content::fixed_count(dims).filter(|count| *count <= MAX_CONTENT).and_then(|count| {
            let raw = value.get(..dtype.size_bytes()?)?.to_vec();
            let element = Tensor::from_raw(dtype, vec![1], raw.into()).ok()?;
            Some(vec![content::of_tensor(&element)?.first()?.clone(); count])
        });
    Ok(Fact::new(dtype, Some(dims.to_vec())).with_content(content))
}

pub fn eye_like(dtype: Option<DataType>, x: &Operands) -> Inferred<Fact> {
    x.expect_rank(0, 2)?;
    let own = x.dtype(0)?;
    Ok(Fact::new(dtype.unwrap_or(own), x.owned_shape(0)))
}

pub fn depth_to_space(block: usize, x: &Operands) -> Inferred<Fact> {
    blocks(block, x, |[n, c, h, w], block| {
        let channels = divide(c, &block.mul(block))?;
        Ok([n.clone(), channels, h.mul(block), w.mul(block)])
    })
}

pub fn space_to_depth(block: usize, x: &Operands) -> Inferred<Fact> {
    blocks(block, x, |[n, c, h, w], block| {
        Ok([n.clone(), c.mul(block).mul(block), divide(h, block)?, divide(w, block)?])
    })
}

fn divide(dim: &SymDim, by: &SymDim) -> Inferred<SymDim> {
    if dim.rem(by).fixed().is_some_and(|rest| rest != 0) {
        return fail(format!("{dim} is not a multiple of {by}"));
    }
    Ok(dim.div(by))
}

fn blocks(
    block: usize,
    x: &Operands,
    dims: impl Fn(&[SymDim; 4], &SymDim) -> Inferred<[SymDim; 4]>,
) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    x.expect_rank(0, 4)?;
    if block == 0 || block > 1 << 16 {
        return fail(format!("a block of {block}"));
    }
    let shape: Option<&[SymDim; 4]> = x.shape(0).and_then(|shape| shape.try_into().ok());
    let dims = shape.map(|shape| dims(shape, &SymDim::from(block))).transpose()?;
    Ok(Fact::new(dtype, dims.map(|dims| dims.to_vec())))
}
