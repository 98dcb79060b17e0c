//! Gather and scatter.

use model::gpu::MemoryLocation;
use model::op::ScatterReduction;

use super::super::args::{Address, ArgsWriter};
use super::super::draft::{LaunchDraft, StepDraft};
use super::super::elementwise::{bits, copy};
use super::super::loop_nest::{
    LoopNest, MAX_RANK, address, check_output, check_view, computed_name, describe_all, kernel,
    single,
};
use super::super::view::{Element, View};
use super::is_index;

/// Where kernels report an index out of range.
const FAULT: Address = Address::Fixed(MemoryLocation::Fault);

/// The maximum number of dimensions that one index addresses.
const MAX_PARTS: usize = 6;

/// `y = x[.., indices, ..]` along `axis`.
pub fn gather(axis: usize, x: &View, indices: &View, y: &View) -> Result<StepDraft, String> {
    if axis >= x.shape.len() {
        return Err(format!("dimension {axis} of {:?}", x.shape));
    }
    let shape = [&x.shape[..axis], &indices.shape[..], &x.shape[axis + 1..]].concat();
    let none = |count: usize| vec![0; count];
    let data = [&x.strides[..axis], &none(indices.shape.len()), &x.strides[axis + 1..]].concat();
    let after = x.shape.len() - axis - 1;
    let places = [&none(axis)[..], &indices.strides, &none(after)].concat();
    let parts = IndexedDims { size: vec![x.shape[axis]], stride: vec![x.strides[axis]], part: 0 };
    gathered("Gather", GatherStrides { shape, data, indices: places }, parts, x, indices, y)
}

/// `y[.., i, ..] = x[.., indices[.., i, ..], ..]` along `axis`.
pub fn gather_elements(
    axis: usize,
    x: &View,
    indices: &View,
    y: &View,
) -> Result<StepDraft, String> {
    let fits = axis < x.shape.len() && indices.shape.len() == x.shape.len();
    let inside = |at: usize| at == axis || indices.shape[at] <= x.shape[at];
    if !fits || !(0..x.shape.len()).all(inside) {
        return Err(format!("indices {:?} into {:?} along {axis}", indices.shape, x.shape));
    }
    let mut data = x.strides.clone();
    data[axis] = 0;
    let parts = IndexedDims { size: vec![x.shape[axis]], stride: vec![x.strides[axis]], part: 0 };
    let loops =
        GatherStrides { shape: indices.shape.clone(), data, indices: indices.strides.clone() };
    gathered("GatherElements", loops, parts, x, indices, y)
}

/// `y` is the elements that the tuples along the last dimension of `indices` address, per batch.
pub fn gather_nd(
    batch_dims: usize,
    x: &View,
    indices: &View,
    y: &View,
) -> Result<StepDraft, String> {
    let wrong = || format!("indices {:?} into {:?}", indices.shape, x.shape);
    let last = indices.shape.len().checked_sub(1).ok_or_else(wrong)?;
    let parts = indices.shape[last];
    let fits = batch_dims <= last && batch_dims + parts <= x.shape.len() && parts > 0;
    if !fits || x.shape[..batch_dims] != indices.shape[..batch_dims] {
        return Err(wrong());
    }
    let pointed = batch_dims..batch_dims + parts;
    let rest = pointed.end..x.shape.len();
    let shape = [&indices.shape[..last], &x.shape[rest.clone()]].concat();
    let data =
        [&x.strides[..batch_dims], &vec![0; last - batch_dims], &x.strides[rest.clone()]].concat();
    let places = [&indices.strides[..last], &vec![0; rest.len()]].concat();
    let parts = IndexedDims {
        size: x.shape[pointed.clone()].to_vec(),
        stride: x.strides[pointed].to_vec(),
        part: indices.strides[last],
    };
    gathered("GatherND", GatherStrides { shape, data, indices: places }, parts, x, indices, y)
}

/// `y = x`, then `y[.., indices[.., i, ..], ..] = updates[.., i, ..]` along `axis`, or combined
/// with the existing element.
pub fn scatter_elements(
    axis: usize,
    reduction: ScatterReduction,
    (x, indices, updates): (&View, &View, &View),
    y: &View,
) -> Result<Vec<StepDraft>, String> {
    let rank = x.shape.len();
    let inside = |at: usize| at == axis || indices.shape[at] <= x.shape[at];
    if axis >= rank
        || indices.shape.len() != rank
        || indices.shape != updates.shape
        || !(0..rank).all(inside)
    {
        return Err(format!("updates {:?} of {:?} along {axis}", updates.shape, x.shape));
    }
    let mut target = y.strides.clone();
    if target.len() != rank {
        return Err(format!("{:?} as {:?}", x.shape, y.shape));
    }
    target[axis] = 0;
    let operands = Operands { x, indices, updates, y };
    let parts = IndexedDims { size: vec![x.shape[axis]], stride: vec![y.strides[axis]], part: 0 };
    if reduction == ScatterReduction::None {
        let nest = [updates.strides.clone(), indices.strides.clone(), target];
        return operands.replace("ScatterElements", &updates.shape, nest, &parts);
    }
    if (0..rank).any(|at| at != axis && indices.shape[at] != x.shape[at]) {
        return Err(format!("a folding scatter of {:?} onto part of {:?}", updates.shape, x.shape));
    }
    let without =
        |strides: &[usize]| (0..rank).map(|at| if at == axis { 0 } else { strides[at] }).collect();
    let along = (0..rank).map(|at| usize::from(at == axis)).collect();
    let nest = [without(&updates.strides), without(&indices.strides)];
    let candidates = LoopNest::new(
        &[updates.shape[axis]],
        &[vec![updates.strides[axis]], vec![indices.strides[axis]]],
    );
    operands.fold(
        "ScatterElements",
        reduction,
        (nest, vec![along]),
        (candidates, updates.shape[axis]),
        &parts,
    )
}

/// `y = x`, then `y[indices[i]] = updates[i]`, or combined with the existing element.
pub fn scatter_nd(
    reduction: ScatterReduction,
    (x, indices, updates): (&View, &View, &View),
    y: &View,
) -> Result<Vec<StepDraft>, String> {
    let wrong = || format!("updates {:?} at {:?} of {:?}", updates.shape, indices.shape, x.shape);
    let last = indices.shape.len().checked_sub(1).ok_or_else(wrong)?;
    let count = indices.shape[last];
    let rank = x.shape.len();
    if count == 0 || count > rank || y.shape.len() != rank {
        return Err(wrong());
    }
    let rest = rank - count;
    if updates.shape != [&indices.shape[..last], &x.shape[count..]].concat() {
        return Err(wrong());
    }
    let operands = Operands { x, indices, updates, y };
    let parts = IndexedDims {
        size: x.shape[..count].to_vec(),
        stride: y.strides[..count].to_vec(),
        part: indices.strides[last],
    };
    if reduction == ScatterReduction::None {
        let places = [&indices.strides[..last], &vec![0; rest]].concat();
        let target = [&vec![0; last][..], &y.strides[count..]].concat();
        return operands.replace(
            "ScatterND",
            &updates.shape,
            [updates.strides.clone(), places, target],
            &parts,
        );
    }
    let base = [&vec![0; count][..], &updates.strides[last..]].concat();
    let coordinates =
        (0..count).map(|part| (0..rank).map(|at| usize::from(at == part)).collect()).collect();
    let nest = [base, vec![0; rank]];
    let tuples = LoopNest::new(
        &indices.shape[..last],
        &[updates.strides[..last].to_vec(), indices.strides[..last].to_vec()],
    );
    let amount = indices.shape[..last].iter().product();
    operands.fold("ScatterND", reduction, (nest, coordinates), (tuples.merged(), amount), &parts)
}

/// The dimensions that an index addresses: their sizes and strides, and the stride between the
/// parts of an index.
struct IndexedDims {
    size: Vec<usize>,
    stride: Vec<usize>,
    part: usize,
}

impl IndexedDims {
    fn write(&self, args: &mut ArgsWriter) {
        args.int(self.part);
        for value in self.size.iter().chain(&self.stride) {
            args.int(*value);
        }
    }
}

/// The strides of data and indices along the output's dimensions.
struct GatherStrides {
    shape: Vec<usize>,
    data: Vec<usize>,
    indices: Vec<usize>,
}

fn gathered(
    op: &'static str,
    loops: GatherStrides,
    mut parts: IndexedDims,
    x: &View,
    indices: &View,
    y: &View,
) -> Result<StepDraft, String> {
    check_view(x)?;
    check_view(indices)?;
    check_output(y)?;
    if y.shape != loops.shape
        || x.element != y.element
        || !is_index(indices.element)
        || x.is_empty()
    {
        return Err(format!(
            "{op} of {:?} at {:?} as {:?} is not supported",
            x.shape, indices.shape, y.shape
        ));
    }
    if parts.size.len() > MAX_PARTS {
        return Err(format!("indices of {} parts, at most {MAX_PARTS}", parts.size.len()));
    }
    let mut nest = LoopNest::new(&y.shape, &[y.strides.clone(), loops.data, loops.indices])
        .ordered_by(0)
        .merged();
    nest.check()?;
    let unit = unit(&mut nest, &mut parts, x, y);
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(indices)).address(address(y));
    args.address(FAULT).int(nest.len());
    parts.write(&mut args);
    nest.write(&mut args);
    let expression = format!(
        "tiles::Gather<{unit}, {}, {}, {}>",
        indices.element.cuda_name(),
        nest.rank(),
        parts.size.len()
    );
    let draft = LaunchDraft::plain(
        kernel("index.cuh", &[], expression, 128),
        nest.len().div_ceil(128),
        args,
    );
    let signature = format!("{op} {:?} {}", parts.size, describe_all(&[x, indices, y]));
    Ok(single(op, signature, draft, &[x, indices], y))
}

/// Combines elements that are adjacent in data and output into units of up to 16 bytes, and returns
/// the unit's type.
fn unit(nest: &mut LoopNest, parts: &mut IndexedDims, x: &View, y: &View) -> &'static str {
    let size = x.element.size();
    let mut count = 16 / size;
    let rows = nest.loops.last().filter(|dim| dim.strides == [1, 1, 0]).map_or(1, |dim| dim.size);
    let outer = nest.loops.len().saturating_sub(1);
    let even = |count: usize| {
        let steps =
            nest.loops[..outer].iter().flat_map(|dim| &dim.strides[..2]).chain(&parts.stride);
        rows.is_multiple_of(count)
            && steps.chain([&x.offset, &y.offset]).all(|step| step.is_multiple_of(count))
    };
    while count > 1 && !even(count) {
        count /= 2;
    }
    if count > 1 {
        for dim in &mut nest.loops[..outer] {
            dim.strides[0] /= count;
            dim.strides[1] /= count;
        }
        nest.loops[outer].size /= count;
        parts.stride.iter_mut().for_each(|stride| *stride /= count);
    }
    match size * count {
        1 => "unsigned char",
        2 => "unsigned short",
        4 => "unsigned int",
        8 => "unsigned long long",
        _ => "uint4",
    }
}

/// The operands of a scatter.
struct Operands<'a> {
    x: &'a View,
    indices: &'a View,
    updates: &'a View,
    y: &'a View,
}

impl Operands<'_> {
    fn check(&self, parts: &IndexedDims) -> Result<(), String> {
        let Operands { x, indices, updates, y } = *self;
        check_view(indices)?;
        check_view(updates)?;
        check_output(y)?;
        let types_fit =
            x.element == y.element && updates.element == y.element && is_index(indices.element);
        if x.shape != y.shape || !types_fit || parts.size.len() > MAX_PARTS {
            return Err(format!(
                "scatter of {:?} {:?} onto {:?} is not supported",
                updates.element, updates.shape, y.shape
            ));
        }
        Ok(())
    }

    /// A copy, then the updates over it. `strides`: of updates, indices, output.
    fn replace(
        &self,
        op: &'static str,
        shape: &[usize],
        strides: [Vec<usize>; 3],
        parts: &IndexedDims,
    ) -> Result<Vec<StepDraft>, String> {
        self.check(parts)?;
        let Operands { x, indices, updates, y } = *self;
        let first = copy(x, y)?;
        if updates.is_empty() {
            return Ok(vec![first]);
        }
        let nest = LoopNest::new(shape, &strides).merged();
        nest.check()?;
        let mut args = ArgsWriter::new();
        args.address(address(updates)).address(address(indices)).address(address(y));
        args.address(FAULT).int(nest.len());
        parts.write(&mut args);
        nest.write(&mut args);
        let expression = format!(
            "tiles::Scatter<{}, {}, {}, {}>",
            bits(y.element).cuda_name(),
            indices.element.cuda_name(),
            nest.rank(),
            parts.size.len()
        );
        let draft = LaunchDraft::plain(
            kernel("index.cuh", &[], expression, 128),
            nest.len().div_ceil(128),
            args,
        );
        let signature = format!("{op} {:?} {}", parts.size, describe_all(&[indices, updates, y]));
        let mut work = single(op, signature, draft, &[indices, updates], y);
        work.finish_tiles = Some("two updates may have the same position".to_string());
        Ok(vec![first, work])
    }

    /// Every output combines the updates that address it. `strides`: of updates and indices along
    /// the output's dimensions, and of the coordinates that an index is compared with;
    /// `candidates`: the loops over updates, and their number.
    fn fold(
        &self,
        op: &'static str,
        reduction: ScatterReduction,
        (strides, coordinates): ([Vec<usize>; 2], Vec<Vec<usize>>),
        (candidates, amount): (LoopNest, usize),
        parts: &IndexedDims,
    ) -> Result<Vec<StepDraft>, String> {
        self.check(parts)?;
        let Operands { x, indices, updates, y } = *self;
        if y.element == Element::Bool || candidates.rank() > MAX_RANK {
            return Err(format!(
                "scatter with reduction of {:?} {:?} is not supported",
                y.element, updates.shape
            ));
        }
        let operands =
            [vec![y.strides.clone(), x.strides.clone()], strides.to_vec(), coordinates].concat();
        let nest = LoopNest::new(&y.shape, &operands).ordered_by(0).merged();
        nest.check()?;
        let mut args = ArgsWriter::new();
        args.address(address(x))
            .address(address(updates))
            .address(address(indices))
            .address(address(y));
        args.address(FAULT).int(nest.len()).int(amount).int(parts.part);
        for size in &parts.size {
            args.int(*size);
        }
        nest.write(&mut args);
        candidates.write(&mut args);
        let expression = format!(
            "tiles::ScatterFold<{}, {}, {}, {}, {}, {}, {}>",
            reduction as u32,
            y.element.cuda_name(),
            computed_name(y.element),
            indices.element.cuda_name(),
            nest.rank(),
            candidates.rank(),
            parts.size.len()
        );
        let text = kernel("index.cuh", &[y.element], expression, 128);
        let draft = LaunchDraft::plain(text, nest.len().div_ceil(128), args);
        let signature = format!(
            "{op} {reduction:?} {:?} {}",
            parts.size,
            describe_all(&[x, indices, updates, y])
        );
        let mut work = single(op, signature, draft, &[x, indices, updates], y);
        work.flops = updates.len() as u64;
        Ok(vec![work])
    }
}
