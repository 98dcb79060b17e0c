//! Strings as tokens.

use bytes::Bytes;
use model::op::Tokenize;
use regex::Regex;

use super::{expression, strings, text};
use crate::buffer::Buffer;
use crate::kernel::operand::{Element, one, output_len};
use crate::kernel::{Inputs, Kernel, KernelError, KernelResult, invalid};
use crate::yield_point;

/// The marks at the beginning and the end of a string.
const START: Bytes = Bytes::from_static(&[0x02]);
const END: Bytes = Bytes::from_static(&[0x03]);

/// How a string is cut.
enum Cut {
    /// Into its characters.
    Characters,
    /// At these expressions, one after the other.
    At(Vec<Regex>),
    /// Into what matches.
    Matches(Regex),
}

pub(super) fn build(op: Tokenize) -> Result<Kernel, KernelError> {
    let cut = match (&op.expression, &op.separators[..]) {
        (Some(pattern), []) => Cut::Matches(expression(pattern)?),
        (None, [only]) if only.is_empty() => Cut::Characters,
        (None, separators) if !separators.is_empty() => {
            let all: Result<Vec<Regex>, KernelError> =
                separators.iter().map(|separator| expression(separator)).collect();
            Cut::At(all?)
        }
        _ => return Err("a tokenizer has separators or an expression".into()),
    };
    Ok(Kernel::new(move |_, inputs| run(&inputs, &op, &cut)))
}

fn cut_text<'a>(text: &'a str, cut: &Cut) -> Result<Buffer<&'a str>, KernelError> {
    let mut parts = Buffer::default();
    match cut {
        Cut::Characters => {
            for (at, letter) in text.char_indices() {
                parts.push(&text[at..at + letter.len_utf8()])?;
            }
        }
        Cut::Matches(regex) => {
            for found in regex.find_iter(text) {
                parts.push(found.as_str())?;
            }
        }
        Cut::At(separators) => {
            parts.push(text)?;
            for separator in separators {
                let mut smaller = Buffer::default();
                for part in parts.iter().copied().flat_map(|part| separator.split(part)) {
                    smaller.push(part)?;
                }
                parts = smaller;
            }
        }
    }
    Ok(parts)
}

fn run(inputs: &Inputs, op: &Tokenize, cut: &Cut) -> KernelResult {
    let (data, shape) = strings(inputs, 0)?;
    if !(1..=2).contains(&shape.len()) {
        return Err(invalid!("strings of shape {shape:?}"));
    }
    let mut tokens: Buffer<Bytes> = Buffer::default();
    let mut counts: Buffer<usize> = Buffer::with_capacity(data.len())?;
    for bytes in data {
        yield_point::did_work(100 + bytes.len() * 10);
        let before = tokens.len();
        if op.mark {
            tokens.push(START)?;
        }
        for part in &cut_text(text(bytes)?, cut)? {
            if !part.is_empty() && part.chars().count() >= op.min_chars {
                tokens.push(bytes.slice_ref(part.as_bytes()))?;
            }
        }
        if op.mark {
            tokens.push(END)?;
        }
        counts.extend([tokens.len() - before]);
    }
    let width = counts.iter().copied().max().unwrap_or(0);
    let out_shape = [shape, &[width]].concat();
    let pad = Bytes::copy_from_slice(op.pad.as_bytes());
    let mut out = Buffer::filled(output_len(&out_shape)?, pad)?;
    let mut rest = tokens.iter();
    for (row, count) in out.chunks_mut(width.max(1)).zip(&counts) {
        for (slot, token) in row.iter_mut().zip(rest.by_ref().take(*count)) {
            *slot = token.clone();
        }
    }
    one(Bytes::wrap(&out_shape, out))
}
