//! Views of values in device memory: an element type, a buffer with an offset, sizes and strides.
//!
//! Most operators that only move data (transpose, reshape, slice, expand, split) are a change of
//! view. An operator that needs its operand in another order requests a copy.

use model::DataType;
use model::gpu::Precision;

/// A range of device memory that one or several values share; an index into the lowering's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// How an element is stored on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// `half`.
    F16,
    /// `__nv_bfloat16`.
    BF16,
    /// `float`.
    F32,
    /// `double`.
    F64,
    /// `unsigned char`, 0 or 1.
    Bool,
    /// `unsigned char`.
    U8,
    /// `signed char`.
    I8,
    /// `short`.
    I16,
    /// `unsigned short`.
    U16,
    /// `int`.
    I32,
    /// `unsigned int`.
    U32,
    /// `long long`.
    I64,
    /// `unsigned long long`.
    U64,
}

impl Element {
    /// How values of `dtype` are stored between steps; `None` for strings.
    pub fn stored(dtype: DataType, precision: Precision) -> Option<Element> {
        match (dtype, precision) {
            (DataType::F16 | DataType::BF16 | DataType::F32, Precision::F16) => Some(Element::F16),
            (DataType::F16 | DataType::BF16 | DataType::F32, Precision::BF16) => {
                Some(Element::BF16)
            }
            (DataType::F16 | DataType::BF16 | DataType::F32, Precision::F32 | Precision::TF32) => {
                Some(Element::F32)
            }
            (other, _) => Element::exact(other),
        }
    }

    /// How values of `dtype` are stored in the model's inputs and outputs; `None` for strings.
    pub fn exact(dtype: DataType) -> Option<Element> {
        Some(match dtype {
            DataType::Bool => Element::Bool,
            DataType::U8 => Element::U8,
            DataType::U16 => Element::U16,
            DataType::U32 => Element::U32,
            DataType::U64 => Element::U64,
            DataType::I8 => Element::I8,
            DataType::I16 => Element::I16,
            DataType::I32 => Element::I32,
            DataType::I64 => Element::I64,
            DataType::F16 => Element::F16,
            DataType::BF16 => Element::BF16,
            DataType::F32 => Element::F32,
            DataType::F64 => Element::F64,
            DataType::String => return None,
        })
    }

    /// Bytes.
    pub fn size(self) -> usize {
        match self {
            Element::Bool | Element::U8 | Element::I8 => 1,
            Element::F16 | Element::BF16 | Element::I16 | Element::U16 => 2,
            Element::F32 | Element::I32 | Element::U32 => 4,
            Element::F64 | Element::I64 | Element::U64 => 8,
        }
    }

    /// The C++ type.
    pub fn cuda_name(self) -> &'static str {
        match self {
            Element::F16 => "half",
            Element::BF16 => "__nv_bfloat16",
            Element::F32 => "float",
            Element::F64 => "double",
            Element::Bool | Element::U8 => "unsigned char",
            Element::I8 => "signed char",
            Element::I16 => "short",
            Element::U16 => "unsigned short",
            Element::I32 => "int",
            Element::U32 => "unsigned int",
            Element::I64 => "long long",
            Element::U64 => "unsigned long long",
        }
    }

    /// Whether it is a floating-point number.
    pub fn is_float(self) -> bool {
        matches!(self, Element::F16 | Element::BF16 | Element::F32 | Element::F64)
    }
}

/// A value in device memory. Sizes and strides are in elements and in the order of the model's
/// dimensions, whatever their order in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Its buffer.
    pub buffer: BufferId,
    /// Elements from the buffer's start to the first element.
    pub offset: usize,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Elements between neighbours along each dimension; 0 repeats.
    pub strides: Vec<usize>,
    /// How an element is stored.
    pub element: Element,
    /// Elements of slack after the innermost run of a pixel that hold finite numbers, so that a
    /// kernel may read a channel count rounded up.
    pub slack: usize,
}

/// Strides of a packed row-major tensor.
pub fn packed_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1);
    }
    strides
}

/// A view of `shape` at the start of the first buffer, its dimensions packed in `order`, slowest
/// first: for questions that do not depend on an address.
pub fn packed_in(shape: &[usize], order: &[usize], element: Element) -> View {
    let mut strides = vec![0; shape.len()];
    let mut next = 1;
    for axis in order.iter().rev() {
        strides[*axis] = next;
        next *= shape[*axis].max(1);
    }
    View { buffer: BufferId(0), offset: 0, shape: shape.to_vec(), strides, element, slack: 0 }
}

impl View {
    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// From the first to one past the last element it touches, in elements from the buffer's start.
    pub fn extent(&self) -> std::ops::Range<usize> {
        if self.is_empty() {
            return self.offset..self.offset;
        }
        let last: usize =
            self.shape.iter().zip(&self.strides).map(|(size, stride)| (size - 1) * stride).sum();
        self.offset..self.offset + last + 1
    }

    /// Whether elements are packed in row-major order.
    pub fn is_packed(&self) -> bool {
        let packed = packed_strides(&self.shape);
        let same =
            |((size, stride), want): ((&usize, &usize), &usize)| *size == 1 || stride == want;
        self.shape.iter().zip(&self.strides).zip(&packed).all(same)
    }

    /// The dimensions from the slowest to the fastest in memory; those of size one keep their
    /// position.
    pub fn memory_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.shape.len()).collect();
        order.sort_by_key(|axis| std::cmp::Reverse(self.strides[*axis]));
        order
    }

    /// Whether it certainly shares no element with `other`: another buffer, or adjacent channels of
    /// one image.
    pub fn is_apart(&self, other: &View) -> bool {
        let (a, b) = (self.extent(), other.extent());
        if self.buffer != other.buffer || a.is_empty() || b.is_empty() {
            return true;
        }
        if a.end <= b.start || b.end <= a.start {
            return true;
        }
        let fast = |view: &View| view.strides.iter().position(|stride| *stride == 1);
        let (Some(axis), true) = (fast(self), self.strides == other.strides) else { return false };
        let others =
            self.strides.iter().enumerate().filter(|(at, stride)| *at != axis && **stride > 0);
        let Some(pixel) = others.map(|(_, stride)| *stride).min() else { return false };
        let even =
            self.strides.iter().enumerate().all(|(at, s)| at == axis || s.is_multiple_of(pixel));
        let (first, second) = (self.offset % pixel, other.offset % pixel);
        let (end, other_end) = (first + self.shape[axis], second + other.shape[axis]);
        even && end <= pixel && other_end <= pixel && (end <= second || other_end <= first)
    }

    /// Other sizes and strides at the same place.
    pub fn with(&self, shape: Vec<usize>, strides: Vec<usize>, slack: usize) -> View {
        let View { buffer, offset, element, .. } = *self;
        View { buffer, offset, shape, strides, element, slack }
    }

    /// Dimensions in another order.
    pub fn permuted(&self, perm: &[usize]) -> View {
        let pick = |from: &[usize]| perm.iter().map(|axis| from[*axis]).collect();
        self.with(pick(&self.shape), pick(&self.strides), self.slack)
    }

    /// `length` elements from `start` on along `axis`, every `step`-th.
    pub fn sliced(&self, axis: usize, start: usize, length: usize, step: usize) -> View {
        let mut view = self.clone();
        view.offset += start * view.strides[axis];
        view.shape[axis] = length;
        view.strides[axis] *= step;
        view.slack = 0;
        view
    }

    /// `axis` as two dimensions, the first of size `count`, which divides it.
    pub fn split(&self, axis: usize, count: usize) -> View {
        let mut view = View { slack: 0, ..self.clone() };
        let inner = view.shape[axis] / count;
        view.shape[axis] = inner;
        view.shape.insert(axis, count);
        view.strides.insert(axis, inner * self.strides[axis]);
        view
    }

    /// The same elements broadcast to `shape` as in numpy; `None` when the shapes are not
    /// compatible.
    pub fn broadcast(&self, shape: &[usize]) -> Option<View> {
        let missing = shape.len().checked_sub(self.shape.len())?;
        let mut strides = vec![0; shape.len()];
        for (axis, (&size, &stride)) in self.shape.iter().zip(&self.strides).enumerate() {
            let want = shape[missing + axis];
            if size != want && size != 1 {
                return None;
            }
            strides[missing + axis] = if size == 1 { 0 } else { stride };
        }
        Some(self.with(shape.to_vec(), strides, 0))
    }

    /// The same elements, in row-major order of the model's dimensions, with another shape; `None`
    /// when that requires a copy.
    pub fn reshaped(&self, shape: &[usize]) -> Option<View> {
        if self.len() != shape.iter().product::<usize>() {
            return None;
        }
        let strides = if self.is_empty() {
            packed_strides(shape)
        } else {
            reshaped_strides(&self.merged(), shape)?
        };
        Some(self.with(shape.to_vec(), strides, 0))
    }

    /// Runs of adjacent dimensions with a common stride, as (size, stride), without those of size
    /// one.
    pub fn merged(&self) -> Vec<(usize, usize)> {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (&size, &stride) in self.shape.iter().zip(&self.strides).filter(|(size, _)| **size != 1)
        {
            match runs.last_mut() {
                Some((total, inner)) if *inner == size * stride => {
                    (*total, *inner) = (*total * size, stride);
                }
                _ => runs.push((size, stride)),
            }
        }
        runs
    }
}

/// Strides for `shape` over `runs`: every run must be a product of neighbouring new dimensions.
fn reshaped_strides(runs: &[(usize, usize)], shape: &[usize]) -> Option<Vec<usize>> {
    let mut strides = vec![1; shape.len()];
    let mut runs = runs.iter().rev();
    // Elements remaining in the run, and the stride of the next dimension.
    let mut current = (1usize, 1usize);
    for axis in (0..shape.len()).rev() {
        if shape[axis] == 1 {
            strides[axis] = current.1;
            continue;
        }
        if current.0 == 1 {
            current = *runs.next()?;
        }
        if !current.0.is_multiple_of(shape[axis]) {
            return None;
        }
        strides[axis] = current.1;
        current = (current.0 / shape[axis], current.1 * shape[axis]);
    }
    (current.0 == 1 && runs.next().is_none()).then_some(strides)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A packed view at the start of the first buffer.
    pub fn packed(shape: &[usize]) -> View {
        packed_in(shape, &(0..shape.len()).collect::<Vec<_>>(), Element::F16)
    }

    /// The offsets of a view's elements, in row-major order of its dimensions.
    pub fn offsets(view: &View) -> Vec<usize> {
        let mut all = vec![view.offset];
        for (&size, &stride) in view.shape.iter().zip(&view.strides) {
            all = all.iter().flat_map(|at| (0..size).map(move |i| at + i * stride)).collect();
        }
        all
    }

    #[test]
    fn reshapes_visit_the_same_elements_in_the_same_order() {
        let image = packed(&[2, 5, 7, 24]).permuted(&[0, 3, 1, 2]);
        let cases: [(&View, &[usize], bool); 7] = [
            (&image, &[2, 24, 35], true),
            (&image, &[2, 3, 8, 5, 7], true),
            (&image, &[2, 24 * 35], false),
            (&image, &[48, 35], false),
            (&packed(&[2, 3, 4]), &[6, 1, 4, 1], true),
            (&packed(&[6, 4]), &[3, 8], true),
            (&packed(&[1, 4, 6]).permuted(&[0, 2, 1]), &[6, 4], true),
        ];
        for (view, shape, possible) in cases {
            let reshaped = view.reshaped(shape);
            assert_eq!(reshaped.is_some(), possible, "{view:?} as {shape:?}");
            if let Some(reshaped) = reshaped {
                assert_eq!(offsets(&reshaped), offsets(view), "{view:?} as {shape:?}");
            }
        }
    }

    #[test]
    fn slices_and_broadcasts_stay_inside() {
        let view = packed(&[4, 6]).sliced(1, 1, 3, 2);
        assert_eq!(offsets(&view), [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23]);
        assert_eq!(view.extent(), 1..24);
        let row = packed(&[6]).broadcast(&[2, 6]).unwrap();
        assert_eq!(row.strides, [0, 1]);
        assert!(packed(&[5]).broadcast(&[2, 6]).is_none());
    }

    #[test]
    fn images_have_channels_fastest() {
        let image = packed(&[2, 5, 7, 24]).permuted(&[0, 3, 1, 2]);
        assert_eq!(image.memory_order(), [0, 2, 3, 1]);
        assert!(!image.is_packed() && packed(&[3, 1, 2]).is_packed());
    }
}
