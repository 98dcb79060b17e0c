//! A factor and a summand for each channel of an image in channel blocks.

use model::op::Activation;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, SimdOp};

use super::super::parallel::for_each;
use super::super::{Context, Inputs, Kernel, KernelResult, activation};
use super::BlockedShape;
use super::layout::{Piece, output, pieces_of};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::spare_buffers;
use crate::value::{Value, elements, into_elements};
use crate::yield_point;

/// Elements of one task.
const TASK_ELEMENTS: usize = 32 * 1024;

/// The kernel of `x, scale, shift` for `channels` channels: `activation(x * scale[c] + shift[c])`.
pub(crate) fn build(activation: Activation, channels: usize) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| run(context, inputs, activation, channels))
}

/// Operand `index`, which has a number for each channel, for `room` channels.
fn padded(
    inputs: &Inputs,
    index: usize,
    channels: usize,
    room: usize,
) -> Result<Buffer<f32>, KernelError> {
    let given = elements(inputs.typed::<f32>(index)?);
    if given.len() != channels || channels > room {
        return Err(invalid!("{} numbers for {channels} of {room} channels", given.len()));
    }
    let mut all = Buffer::filled(room, 0.0)?;
    all[..given.len()].copy_from_slice(given);
    Ok(all)
}

fn run(
    context: &Context,
    mut inputs: Inputs,
    activation: Activation,
    channels: usize,
) -> KernelResult {
    let shape = inputs.get(0)?.shape().to_vec();
    let dims = BlockedShape::new(&shape)?;
    let (lanes, blocks, plane) = (dims.lanes, dims.blocks, dims.plane());
    let scale = padded(&inputs, 1, channels, blocks * lanes)?;
    let shift = padded(&inputs, 2, channels, blocks * lanes)?;
    // Memory of an image that no later step reads becomes the result.
    let mut out = if inputs.is_owned(0) {
        match inputs.take(0)? {
            Value::F32(tensor) => into_elements(tensor),
            other => return Err(invalid!("operand 0 is {}", other.dtype())),
        }
    } else {
        spare_buffers::take(context.pool, dims.images * blocks * plane)?
    };
    let source = inputs.optional_typed::<f32>(0)?.map(elements);
    let parallel = out.len() > TASK_ELEMENTS;
    let mut pieces = pieces_of(&mut out, plane, TASK_ELEMENTS / lanes * lanes)?;
    let compute = |piece: &mut Piece| {
        let channel = piece.number % blocks * lanes;
        if let Some(source) = source {
            let from = piece.number * plane + piece.start;
            piece.data.copy_from_slice(&source[from..from + piece.data.len()]);
        }
        ScalePiece { data: &mut *piece.data, scale: &scale[channel..], shift: &shift[channel..] }
            .dispatch();
        activation::apply(activation, piece.data);
        yield_point::did_work(piece.data.len() / 8);
    };
    match parallel {
        true => for_each(pieces.iter_mut(), &compute),
        false => pieces.iter_mut().for_each(compute),
    }
    drop(pieces);
    output(&shape, out)
}

/// Positions of one block.
struct ScalePiece<'a> {
    data: &'a mut [f32],
    scale: &'a [f32],
    shift: &'a [f32],
}

impl SimdOp for ScalePiece<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let (scale, shift) = (ops.load(self.scale), ops.load(self.shift));
        for x in self.data.chunks_exact_mut(ops.len()) {
            ops.store(ops.mul_add(ops.load(x), scale, shift), x);
        }
    }
}
