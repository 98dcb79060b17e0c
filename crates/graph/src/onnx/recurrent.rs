//! Recurrent layers.

use model::op::{Op, Rnn, RnnCell, RnnDirection};

use super::context::{Context, MapError, Mapped, invalid, unsupported};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "RNN" => layer(cx, RnnCell::Simple),
        "LSTM" => {
            let input_forget = cx.attributes.flag("input_forget", false)?;
            layer(cx, RnnCell::Lstm { input_forget })
        }
        "GRU" => {
            let linear_before_reset = cx.attributes.flag("linear_before_reset", false)?;
            layer(cx, RnnCell::Gru { linear_before_reset })
        }
        _ => Ok(false),
    }
}

fn layer(cx: &mut Context, cell: RnnCell) -> Mapped {
    // The recurrence weight is [directions, gates * hidden, hidden].
    let rnn = rnn_of(cx, cell, 2)?;
    let inputs = if matches!(cell, RnnCell::Lstm { .. }) { 8 } else { 6 };
    cx.emit_all(Op::Rnn(rnn), inputs)
}

/// A layer whose recurrence weight has the width of the state in dimension `hidden_axis`.
pub(super) fn rnn_of(cx: &Context, cell: RnnCell, hidden_axis: usize) -> Result<Rnn, MapError> {
    let a = &cx.attributes;
    let direction = match a.string("direction")?.as_deref() {
        None | Some("forward") => RnnDirection::Forward,
        Some("reverse") => RnnDirection::Reverse,
        Some("bidirectional") => RnnDirection::Bidirectional,
        Some(other) => return invalid(format!("direction '{other}'")),
    };
    if a.floats("activation_alpha").is_some_and(|list| !list.is_empty())
        || a.floats("activation_beta").is_some_and(|list| !list.is_empty())
    {
        return unsupported("parameters of activations");
    }
    // In the first opset it only selects the outputs to compute; all are computed.
    a.ignore(&["output_sequence"]);
    let texts = a.strings("activations").unwrap_or_default();
    let activations: Option<Vec<String>> =
        texts.iter().map(|text| String::from_utf8(text.to_vec()).ok()).collect();
    let Some(activations) = activations else { return invalid("activations are not names") };
    let given = a.size_or("hidden_size", 0)?;
    let weight = cx.shape(cx.input(2)?);
    let from_weight = weight.and_then(|shape| shape.get(hidden_axis)).and_then(|dim| dim.size());
    let hidden_size = match (given, from_weight) {
        (0, Some(size)) => size,
        (0, None) => return unsupported("the hidden size is not known"),
        (given, Some(size)) if given != size => {
            return invalid(format!("hidden_size is {given}, the weight has {size}"));
        }
        (given, _) => given,
    };
    Ok(Rnn {
        cell,
        direction,
        hidden_size,
        batch_first: cx.attributes.flag("layout", false)?,
        clip: cx.attributes.float("clip")?,
        activations,
    })
}
