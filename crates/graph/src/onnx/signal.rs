//! Spectra, and linear attention with its convolution.

use model::DataType;
use model::op::{
    Activation, Conv, LinearAttention, Op, Padding, Signal, Unary, Window, WindowKind,
};

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::nn::dimension;
use super::tensor::{data_type, data_type_name};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "DFT" => {
            let inverse = cx.attributes.flag("inverse", false)?;
            let onesided = cx.attributes.flag("onesided", false)?;
            let axis = if cx.opset < 20 { cx.attributes.int_or("axis", 1)? } else { -2 };
            let inputs = if cx.opset < 20 { 2 } else { 3 };
            cx.emit_all(Op::Signal(Signal::Dft { inverse, onesided, axis }), inputs)
        }
        "STFT" => {
            let onesided = cx.attributes.flag("onesided", true)?;
            cx.emit_all(Op::Signal(Signal::Stft { onesided }), 4)
        }
        "HannWindow" => window(cx, WindowKind::Hann),
        "HammingWindow" => window(cx, WindowKind::Hamming),
        "BlackmanWindow" => window(cx, WindowKind::Blackman),
        "MelWeightMatrix" => {
            let dtype = output_type(cx)?;
            cx.emit_all(Op::Signal(Signal::MelWeights { dtype }), 5)
        }
        "LinearAttention" => linear_attention(cx),
        "CausalConvWithState" => causal_conv(cx),
        _ => Ok(false),
    }
}

fn output_type(cx: &Context) -> Result<DataType, MapError> {
    let number = cx.attributes.int_or("output_datatype", 1)?;
    match data_type(number) {
        Some(dtype) if dtype != DataType::String => Ok(dtype),
        _ => unsupported(format!("an output of {}", data_type_name(number))),
    }
}

fn window(cx: &mut Context, kind: WindowKind) -> Mapped {
    let periodic = cx.attributes.flag("periodic", true)?;
    let dtype = output_type(cx)?;
    cx.emit_all(Op::Signal(Signal::Window { kind, periodic, dtype }), 1)
}

fn linear_attention(cx: &mut Context) -> Mapped {
    cx.attributes.ignore(&["chunk_size"]);
    let heads = cx.attributes.size_or("q_num_heads", 0)?;
    let kv_heads = cx.attributes.size_or("kv_num_heads", 0)?;
    let scale = cx.attributes.float("scale")?.filter(|scale| *scale != 0.0);
    let rule = cx.attributes.string("update_rule")?;
    let (gated, delta) = match rule.as_deref().unwrap_or("gated_delta") {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => return unsupported(format!("update_rule '{other}'")),
    };
    let op = LinearAttention { heads, kv_heads, scale, gated, delta };
    cx.emit_all(Op::LinearAttention(op), 6)
}

/// A depthwise convolution of the signal behind what came before it.
fn causal_conv(cx: &mut Context) -> Mapped {
    cx.at_most(4)?;
    let silu = match cx.attributes.string("activation")?.as_deref() {
        None | Some("none") => false,
        Some("silu" | "swish") => true,
        Some(other) => return unsupported(format!("activation '{other}'")),
    };
    let (x, weight) = (cx.input(0)?, cx.input(1)?);
    let (channels, taps) = (dimension(cx, weight, 0)?, dimension(cx, weight, 2)?);
    let padded = match cx.optional(3) {
        Some(past) => cx.part(Op::Concat { axis: 2 }, &[past, x])?,
        None => {
            let pads = cx.ints(&[0, 0, taps - 1, 0, 0, 0])?;
            cx.part(Op::Pad { mode: model::op::PadMode::Constant }, &[x, pads])?
        }
    };
    if cx.wants(1) {
        // From the end, also where there is no state at all.
        let length = cx.part(Op::Shape { start: 2, end: Some(3) }, &[padded])?;
        let kept = cx.ints(&[taps - 1])?;
        let start = cx.part(Op::Binary(model::op::Binary::Sub), &[length, kept])?;
        let axis = cx.ints(&[2])?;
        let state = cx.part(Op::Slice, &[padded, start, length, axis])?;
        cx.emit_identity(1, state)?;
    }
    let Ok(groups) = usize::try_from(channels) else { return invalid("no channels") };
    let none = Vec::new;
    let padding = Padding::Explicit(none());
    let window = Window { kernel: none(), strides: none(), dilations: none(), padding };
    let conv = Conv { window, groups, activation: Activation::None };
    let mut inputs = vec![Some(padded), Some(weight)];
    inputs.extend(cx.optional(2).map(Some));
    let mut y = cx.parts(Op::Conv(conv), inputs, 1)?[0];
    if silu {
        y = cx.part(Op::Unary(Unary::Silu { alpha: 1.0 }), &[y])?;
    }
    cx.emit_identity(0, y)
}
