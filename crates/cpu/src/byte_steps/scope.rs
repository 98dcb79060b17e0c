//! What is known of a plan's values and readers.

use std::collections::HashMap;

use model::op::{Binary, Op};
use model::plan::Dim;
use model::{DataType, LaunchPlan, Step, Tensor, ValueId};

use crate::kernel::bytes::elementwise::Quantum;
use crate::kernel::bytes::{self as byte_kernels, ByteLayout};

/// A plan with its producers and readers.
pub(super) struct Scope<'a> {
    pub(super) plan: &'a LaunchPlan,
    constants: HashMap<ValueId, &'a Tensor>,
    producers: Vec<Option<usize>>,
    /// The step that reads a value; none if there are none or several, or if it is a result.
    readers: Vec<Option<usize>>,
}

/// A constant weight; scales and zero points are one, or one for each channel.
pub(super) struct Weight<'a> {
    pub(super) tensor: &'a Tensor,
    pub(super) scales: Vec<f32>,
    pub(super) zeros: Vec<i32>,
    pub(super) channels: usize,
}

/// The elements of a tensor of small integers.
pub(super) fn integers(tensor: &Tensor) -> Option<Vec<i32>> {
    match tensor.dtype() {
        DataType::U8 => Some(tensor.to_vec::<u8>()?.into_iter().map(i32::from).collect()),
        DataType::I8 => Some(tensor.to_vec::<i8>()?.into_iter().map(i32::from).collect()),
        DataType::I32 => tensor.to_vec::<i32>(),
        _ => None,
    }
}

impl<'a> Scope<'a> {
    pub(super) fn new(plan: &'a LaunchPlan) -> Scope<'a> {
        let mut producers = vec![None; plan.values.len()];
        let mut counts = vec![0usize; plan.values.len()];
        let mut readers = vec![None; plan.values.len()];
        for (index, step) in plan.steps.iter().enumerate() {
            for id in step.inputs.iter().flatten() {
                counts[id.index()] += 1;
                readers[id.index()] = Some(index);
            }
            for id in step.outputs.iter().flatten() {
                producers[id.index()] = Some(index);
            }
        }
        plan.outputs.iter().for_each(|id| counts[id.index()] = usize::MAX);
        for (reader, count) in readers.iter_mut().zip(counts) {
            if count != 1 {
                *reader = None;
            }
        }
        let constants = plan.constants.iter().map(|(id, tensor)| (*id, tensor)).collect();
        Scope { plan, constants, producers, readers }
    }

    /// The step that writes each value.
    pub(super) fn into_producers(self) -> Vec<Option<usize>> {
        self.producers
    }

    pub(super) fn input(&self, step: &Step, index: usize) -> Option<ValueId> {
        step.inputs.get(index).copied().flatten()
    }

    pub(super) fn constant(&self, id: ValueId) -> Option<&'a Tensor> {
        self.constants.get(&id).copied()
    }

    /// The only step that reads the only result of `step`.
    pub(super) fn only_reader(&self, step: &Step) -> Option<usize> {
        let [Some(output)] = step.outputs[..] else { return None };
        self.readers[output.index()]
    }

    /// Whether a value has signed bytes; `None` if it has no bytes.
    pub(super) fn is_signed(&self, id: ValueId) -> Option<bool> {
        match self.plan.value(id).dtype {
            DataType::U8 => Some(false),
            DataType::I8 => Some(true),
            _ => None,
        }
    }

    /// Constant scales that are numbers to divide by.
    fn scales(&self, id: ValueId) -> Option<Vec<f32>> {
        let usable = |scale: &f32| *scale > 0.0 && scale.is_finite() && scale.recip().is_finite();
        let scales = self.constant(id)?.to_vec::<f32>()?;
        (!scales.is_empty() && scales.iter().all(usable)).then_some(scales)
    }

    /// The quantum of one scale and zero point, for bytes of `id`.
    fn quantum(&self, step: &Step, id: ValueId) -> Option<Quantum> {
        let [scale] = self.scales(self.input(step, 1)?)?[..] else { return None };
        let zero = match self.input(step, 2) {
            None => 0,
            Some(zero) => {
                let same = self.is_signed(zero)? == self.is_signed(id)?;
                *integers(self.constant(zero)?)?.first().filter(|_| same)?
            }
        };
        Some(Quantum { scale, zero, signed: self.is_signed(id)? })
    }

    /// The bytes of a value that is dequantized with one scale, and how.
    pub(super) fn dequantized(&self, id: ValueId) -> Option<(ValueId, Quantum)> {
        let step = &self.plan.steps[self.producers[id.index()]?];
        let Op::DequantizeLinear { .. } = step.op else { return None };
        let bytes = self.input(step, 0).filter(|bytes| self.constant(*bytes).is_none())?;
        Some((bytes, self.quantum(step, bytes)?))
    }

    /// How step `index` quantizes, if it does with one scale.
    pub(super) fn quantizes(&self, index: usize) -> Option<Quantum> {
        let step = &self.plan.steps[index];
        let Op::QuantizeLinear { .. } = step.op else { return None };
        let x = self.input(step, 0)?;
        let [Some(output)] = step.outputs[..] else { return None };
        let is_number = self.plan.value(x).dtype == DataType::F32;
        self.quantum(step, output).filter(|_| is_number)
    }

    /// The weight of a product: dequantized bytes, or numbers where each channel has one filter.
    pub(super) fn weight(&self, step: &Step, layout: &ByteLayout) -> Option<Weight<'a>> {
        let id = self.input(step, 1)?;
        if let ByteLayout::Convolution(conv) = layout
            && let Some(tensor) = self.constant(id)
        {
            let filters = conv.groups > 1 && tensor.shape().get(1) == Some(&1);
            let channels = *tensor.shape().first().filter(|_| filters)?;
            let is_number = tensor.dtype() == DataType::F32;
            let supported = is_number && byte_kernels::supports(layout, tensor.shape());
            let (scales, zeros) = (vec![1.0], vec![0]);
            return supported.then_some(Weight { tensor, scales, zeros, channels });
        }
        let producer = &self.plan.steps[self.producers[id.index()]?];
        let Op::DequantizeLinear { axis } = producer.op else { return None };
        let bytes = self.input(producer, 0)?;
        self.is_signed(bytes)?;
        let tensor = self.constant(bytes)?;
        let rank = tensor.shape().len();
        let own = match layout {
            ByteLayout::Convolution(_) => 0,
            ByteLayout::Matrix { transposed } if rank == 2 => 1 - usize::from(*transposed),
            ByteLayout::Matrix { .. } => return None,
        };
        let channels = *tensor.shape().get(own)?;
        let scales = self.scales(self.input(producer, 1)?)?;
        let zeros = match self.input(producer, 2) {
            None => vec![0],
            Some(id) => {
                let same = self.is_signed(id)? == self.is_signed(bytes)?;
                integers(self.constant(id)?).filter(|_| same)?
            }
        };
        let axis = if axis < 0 { axis + rank as i64 } else { axis };
        let several = scales.len() > 1 || zeros.len() > 1;
        let fits = |count: usize| count == 1 || count == channels;
        let fitting = byte_kernels::supports(layout, tensor.shape())
            && fits(scales.len())
            && fits(zeros.len())
            && (!several || axis == own as i64);
        fitting.then_some(Weight { tensor, scales, zeros, channels })
    }

    /// The operand of step `index` beside `id`.
    pub(super) fn other_operand(&self, index: usize, id: ValueId) -> Option<ValueId> {
        match self.plan.steps[index].inputs[..] {
            [Some(a), Some(b)] if a == id => Some(b),
            [Some(a), Some(b)] if b == id => Some(a),
            _ => None,
        }
    }

    fn fixed_shape(&self, id: ValueId) -> Option<Vec<usize>> {
        if let Some(tensor) = self.constant(id) {
            return Some(tensor.shape().to_vec());
        }
        let size = |dim: &Dim| if let Dim::Fixed(size) = dim { Some(*size) } else { None };
        self.plan.value(id).shape.as_ref()?.iter().map(size).collect()
    }

    /// Whether `id` is known to have one element.
    pub(super) fn is_single(&self, id: ValueId) -> bool {
        self.fixed_shape(id).is_some_and(|shape| shape.iter().all(|size| *size == 1))
    }

    /// Whether `id` has one scale, or one for each channel of a product.
    pub(super) fn is_scale(&self, id: ValueId, channels: usize, layout: &ByteLayout) -> bool {
        let Some(shape) = self.fixed_shape(id) else { return false };
        let is_number = self.plan.value(id).dtype == DataType::F32;
        is_number
            && (shape.iter().all(|size| *size == 1) || self.per_channel(&shape, channels, layout))
    }

    /// Whether a tensor of `shape` has one element for each channel of a product.
    fn per_channel(&self, shape: &[usize], channels: usize, layout: &ByteLayout) -> bool {
        match layout {
            ByteLayout::Matrix { .. } => {
                let leading = shape.iter().rev().skip(1).all(|size| *size == 1);
                shape.last() == Some(&channels) && leading
            }
            ByteLayout::Convolution(conv) => {
                let spatial = conv.window.kernel.len();
                let Some(at) = shape.len().checked_sub(spatial + 1) else { return false };
                let others = shape.iter().enumerate().all(|(index, n)| index == at || *n == 1);
                spatial > 0 && shape[at] == channels && others
            }
        }
    }

    /// The constant bias that the only reader of step `index` adds.
    pub(super) fn bias_behind(
        &self,
        index: usize,
        channels: usize,
        layout: &ByteLayout,
    ) -> Option<(usize, Vec<f32>)> {
        let step = &self.plan.steps[index];
        let at = self.only_reader(step)?;
        let Op::Binary(Binary::Add) = self.plan.steps[at].op else { return None };
        let bias = self.other_operand(at, step.outputs.first().copied().flatten()?)?;
        let tensor = self.constant(bias)?;
        let fits = self.per_channel(tensor.shape(), channels, layout);
        Some((at, tensor.to_vec::<f32>().filter(|_| fits)?))
    }
}
