//! Steps of bytes in channel blocks.

use model::op::{Op, Pool, PoolKind};
use model::{DataType, Step};

use super::{Blocked, BlockedKernel, Content, Finder};
use crate::byte_steps::ByteStep;
use crate::kernel::bytes::blocks::{self, BlockConv, BlockDepthwise};
use crate::kernel::bytes::elementwise::{self, ByteZip};
use crate::kernel::bytes::{ByteLayout, ByteOutput, ByteSpec};
use crate::kernel::{Kernel, KernelError};
use crate::value::Value;

/// How a step of bytes over blocks is computed, and what it reads.
pub(super) enum BlockedBytes {
    /// The convolution of the step of bytes.
    Conv {
        reads: Blocked,
    },
    Depthwise {
        reads: Blocked,
    },
    /// Functions of the step of bytes.
    Zip {
        reads: [Blocked; 2],
    },
    Table {
        reads: Blocked,
    },
    Window {
        pool: Pool,
        reads: Blocked,
    },
    Mean {
        reads: Blocked,
    },
}

/// Whether a step of bytes is a convolution whose result is bytes.
pub(super) fn is_convolution(step: &ByteStep) -> bool {
    matches!(step, ByteStep::Product { spec, .. }
        if matches!(spec.layout, ByteLayout::Convolution(_))
            && matches!(spec.output, ByteOutput::Bytes { .. }))
}

impl BlockedBytes {
    pub(super) fn is_convolution(&self) -> bool {
        matches!(self, BlockedBytes::Conv { .. } | BlockedBytes::Depthwise { .. })
    }

    /// The form in which operand `position` is read.
    pub(super) fn reads(&self, position: usize) -> Option<Blocked> {
        match (self, position) {
            (BlockedBytes::Zip { reads }, _) => reads.get(position).copied(),
            (
                BlockedBytes::Conv { reads }
                | BlockedBytes::Depthwise { reads }
                | BlockedBytes::Table { reads }
                | BlockedBytes::Window { reads, .. }
                | BlockedBytes::Mean { reads },
                0,
            ) => Some(*reads),
            _ => None,
        }
    }

    /// The kernel; `step` is the step of bytes, if it is one.
    pub(super) fn build(&self, step: Option<&ByteStep>) -> Result<Kernel, KernelError> {
        match (self, step) {
            (BlockedBytes::Conv { reads }, Some(ByteStep::Product { spec, weight })) => {
                let Content::Bytes { lanes, .. } = reads.content else {
                    return Err("a convolution of bytes reads numbers".into());
                };
                Ok(BlockConv::new(spec, &Value::from_host(weight)?, lanes)?.into_kernel())
            }
            (BlockedBytes::Depthwise { .. }, Some(ByteStep::Product { spec, weight })) => {
                Ok(BlockDepthwise::new(spec, &Value::from_host(weight)?)?.into_kernel())
            }
            (BlockedBytes::Zip { .. }, Some(ByteStep::Zip(zip))) => {
                let operands = zip.operands.map(blocks::in_blocks);
                let output = blocks::in_blocks(zip.output);
                Ok(elementwise::build_zip(ByteZip { operands, output, ..*zip }))
            }
            (BlockedBytes::Table { .. }, Some(ByteStep::Table { table, from_signed, signed })) => {
                let table = blocks::table_in_blocks(table, *from_signed, *signed);
                Ok(elementwise::build_table(table, false))
            }
            (BlockedBytes::Window { pool, .. }, _) => Ok(blocks::build_window(pool.clone())),
            (BlockedBytes::Mean { .. }, Some(ByteStep::Mean(mean))) => {
                Ok(blocks::build_mean(*mean))
            }
            _ => Err("a step in blocks is another one".into()),
        }
    }
}

impl Finder<'_> {
    /// The form of a step whose result is bytes.
    pub(super) fn form_of_bytes(
        &self,
        step: &Step,
        byte_step: Option<&ByteStep>,
    ) -> Option<(BlockedKernel, Blocked)> {
        let (kernel, form) = match (byte_step, &step.op) {
            (Some(ByteStep::Product { spec, weight }), _) => {
                self.convolution_of_bytes(step, spec, weight)?
            }
            (Some(ByteStep::Zip(zip)), _) => self.zip(step, zip)?,
            (Some(ByteStep::Table { from_signed, signed, .. }), _) => {
                let reads = self.bytes_form(step, *from_signed)?;
                (BlockedBytes::Table { reads }, with_sign(reads, *signed))
            }
            (Some(ByteStep::Largest { pool, signed }), _) => {
                let reads = self.bytes_form(step, *signed)?;
                (BlockedBytes::Window { pool: pool.clone(), reads }, reads)
            }
            (Some(ByteStep::Mean(mean)), _) => {
                let reads = self.bytes_form(step, mean.input.signed)?;
                (BlockedBytes::Mean { reads }, with_sign(reads, mean.output.signed))
            }
            (None, Op::Pool(pool)) if pool.kind == PoolKind::Max => {
                let output = step.outputs.first().copied().flatten()?;
                let signed = self.plan.value(output).dtype == DataType::I8;
                let reads = self.bytes_form(step, signed)?;
                (BlockedBytes::Window { pool: pool.clone(), reads }, reads)
            }
            _ => return None,
        };
        Some((BlockedKernel::Bytes(kernel), form))
    }

    /// The form of operand 0, if it is bytes of that sign in blocks.
    fn bytes_form(&self, step: &Step, signed: bool) -> Option<Blocked> {
        let form = self.forms[self.input(step, 0)?.index()]?;
        (form == with_sign(form, signed)).then_some(form)
    }

    fn convolution_of_bytes(
        &self,
        step: &Step,
        spec: &ByteSpec,
        weight: &model::Tensor,
    ) -> Option<(BlockedBytes, Blocked)> {
        let ByteLayout::Convolution(conv) = &spec.layout else { return None };
        let ByteOutput::Bytes { signed, .. } = spec.output else { return None };
        let shape = weight.shape();
        let outputs = *shape.first()?;
        let fits = |count: usize| count == outputs;
        let only_image = (1..step.inputs.len()).all(|at| self.input(step, at).is_none());
        if !only_image
            || spec.activations_zero.is_none()
            || !spec.sum_bias.as_ref().is_none_or(|bias| fits(bias.len()))
        {
            return None;
        }
        let channels = shape.get(1)?.checked_mul(conv.groups)?;
        let depthwise = blocks::supports_depthwise(conv, shape);
        let lanes = match self.forms[self.input(step, 0)?.index()] {
            None if conv.groups == 1 => blocks::lanes_for(channels),
            _ => blocks::LANES,
        };
        let content = Content::Bytes { signed: spec.activations_signed, lanes };
        let reads = Blocked { channels, rank: shape.len(), content };
        let image_fits =
            self.forms[self.input(step, 0)?.index()].is_none_or(|given| given == reads);
        let weight_signed = weight.dtype() == DataType::I8;
        let is_bytes = matches!(weight.dtype(), DataType::U8 | DataType::I8);
        let dense =
            is_bytes && blocks::supports_conv(conv, shape, &spec.weight_zeros, weight_signed);
        if !image_fits || !(depthwise || dense) {
            return None;
        }
        let content = Content::Bytes { signed, lanes: blocks::LANES };
        let form = Blocked { channels: outputs, rank: shape.len(), content };
        let kernel = match depthwise {
            true => BlockedBytes::Depthwise { reads },
            false => BlockedBytes::Conv { reads },
        };
        Some((kernel, form))
    }

    /// A function of two operands of which at least one is in blocks.
    fn zip(&self, step: &Step, zip: &ByteZip) -> Option<(BlockedBytes, Blocked)> {
        let ids = [self.input(step, 0)?, self.input(step, 1)?];
        let given = ids.map(|id| self.forms[id.index()]);
        let form = given.iter().flatten().next().copied()?;
        let reads = |position: usize| {
            let own = with_sign(form, zip.operands[position].signed);
            let fits = match given[position] {
                Some(given) => given == own,
                None => self.channels(ids[position], form.rank) == Some(form.channels),
            };
            fits.then_some(own)
        };
        let reads = [reads(0)?, reads(1)?];
        Some((BlockedBytes::Zip { reads }, with_sign(form, zip.output.signed)))
    }
}

/// `form` with bytes of that sign.
fn with_sign(form: Blocked, signed: bool) -> Blocked {
    let lanes = match form.content {
        Content::Bytes { lanes, .. } => lanes,
        Content::Numbers => blocks::LANES,
    };
    Blocked { content: Content::Bytes { signed, lanes }, ..form }
}
