//! Strings.

mod counts;
mod tokens;

use bytes::Bytes;
use model::DataType;
use model::op::{LetterCase, Op, Text};
use regex::Regex;

use super::operand::{Element, dtype_of, elements, one, output_len};
use super::{Inputs, Kernel, KernelResult, Outputs, StepFacts, dense, no_kernel};
use crate::buffer::{self, Buffer};
use crate::kernel::{KernelError, invalid};
use crate::string_contents::StringContents;
use crate::value::{Value, with_value};
use crate::yield_point;

/// The most memory of a compiled regular expression.
const MAX_EXPRESSION_BYTES: usize = 10 << 20;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let Op::Text(text) = &facts.step.op else { return Err(no_kernel(facts)) };
    if !matches!(text, Text::TfIdf(_)) && dtype_of(facts, 0)? != DataType::String {
        return Err(no_kernel(facts));
    }
    match text.clone() {
        Text::Join => Ok(Kernel::new(|_, inputs| join(&inputs))),
        Text::Split { delimiter, max_splits } => {
            Ok(Kernel::new(move |_, inputs| split(&inputs, &delimiter, max_splits)))
        }
        Text::Match { pattern } => {
            let regex = expression(&format!("^(?:{pattern})$"))?;
            Ok(Kernel::new(move |_, inputs| matches(&inputs, &regex)))
        }
        Text::Normalize { case, case_sensitive, stopwords } => {
            let rule = Normalization { case, case_sensitive, stopwords };
            Ok(Kernel::new(move |_, inputs| rule.run(&inputs)))
        }
        Text::Tokenize(tokenize) => tokens::build(tokenize),
        Text::TfIdf(tf_idf) => counts::build(facts, tf_idf),
    }
}

/// A compiled expression. Its matching takes time linear in the text.
fn expression(pattern: &str) -> Result<Regex, KernelError> {
    let built = regex::RegexBuilder::new(pattern).size_limit(MAX_EXPRESSION_BYTES).build();
    built.map_err(|error| invalid!("'{pattern}': {error}"))
}

/// The strings of operand `index`, with their shape.
fn strings<'a>(
    inputs: &'a Inputs,
    index: usize,
) -> Result<(&'a [Bytes], &'a [usize]), KernelError> {
    let tensor = inputs.typed::<Bytes>(index)?;
    Ok((elements(tensor), tensor.shape()))
}

fn text(bytes: &Bytes) -> Result<&str, KernelError> {
    std::str::from_utf8(bytes).map_err(|_| invalid!("a string is not UTF-8"))
}

fn join(inputs: &Inputs) -> KernelResult {
    let (a, b) = (inputs.typed::<Bytes>(0)?, inputs.typed::<Bytes>(1)?);
    let shape = broadcast_shape(a.shape(), b.shape())?;
    let (a, b) = (dense::broadcast(a, &shape)?, dense::broadcast(b, &shape)?);
    let length = |strings: &[Bytes]| strings.iter().map(Bytes::len).fold(0, usize::saturating_add);
    let mut out = StringContents::with_capacity(a.len(), length(&a).saturating_add(length(&b)))?;
    for (a, b) in a.iter().zip(b.iter()) {
        yield_point::did_work(50 + a.len() + b.len());
        out.write(a)?;
        out.write(b)?;
        out.end()?;
    }
    one(Bytes::wrap(&shape, out.finish()?))
}

fn broadcast_shape(a: &[usize], b: &[usize]) -> Result<Vec<usize>, KernelError> {
    let rank = a.len().max(b.len());
    let at = |shape: &[usize], axis: usize| {
        (axis + shape.len()).checked_sub(rank).map_or(1, |axis| shape[axis])
    };
    let dim = |axis: usize| match (at(a, axis), at(b, axis)) {
        (x, y) if x == y || y == 1 => Ok(x),
        (1, y) => Ok(y),
        _ => Err(invalid!("shapes {a:?} and {b:?} do not broadcast")),
    };
    let shape: Result<Vec<usize>, KernelError> = (0..rank).map(dim).collect();
    output_len(&shape.clone()?)?;
    shape
}

fn split(inputs: &Inputs, delimiter: &str, max_splits: Option<usize>) -> KernelResult {
    let (data, shape) = strings(inputs, 0)?;
    let most = max_splits.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Buffer<Bytes> = Buffer::default();
    let mut counts: Buffer<i64> = Buffer::with_capacity(data.len())?;
    for bytes in data {
        yield_point::did_work(50 + bytes.len() * 2);
        let (text, before) = (text(bytes)?, parts.len());
        match delimiter {
            "" => {
                for part in &words(text, most)? {
                    parts.push(bytes.slice_ref(part.as_bytes()))?;
                }
            }
            delimiter => {
                for part in text.splitn(most, delimiter) {
                    parts.push(bytes.slice_ref(part.as_bytes()))?;
                }
            }
        }
        counts.extend([(parts.len() - before) as i64]);
    }
    let width = counts.iter().copied().max().unwrap_or(0) as usize;
    let out_shape = [shape, &[width]].concat();
    let mut out: Buffer<Bytes> = Buffer::filled(output_len(&out_shape)?, Bytes::new())?;
    let mut rest = parts.iter();
    for (row, count) in out.chunks_mut(width.max(1)).zip(&counts) {
        row.iter_mut().zip(rest.by_ref().take(*count as usize)).for_each(|(slot, part)| {
            *slot = part.clone();
        });
    }
    Ok(Outputs::from_iter([Bytes::wrap(&out_shape, out), i64::wrap(shape, counts)]))
}

/// Words between white space; the last of `most` takes what is left.
fn words(text: &str, most: usize) -> Result<Buffer<&str>, KernelError> {
    let mut rest = text.trim();
    let mut words = Buffer::default();
    while !rest.is_empty() {
        let end = rest.find(char::is_whitespace).filter(|_| words.len() + 1 < most);
        let Some(end) = end else {
            words.push(rest)?;
            break;
        };
        words.push(&rest[..end])?;
        rest = rest[end..].trim_start();
    }
    Ok(words)
}

fn matches(inputs: &Inputs, regex: &Regex) -> KernelResult {
    let (data, shape) = strings(inputs, 0)?;
    let mut out = Buffer::with_capacity(data.len())?;
    for bytes in data {
        yield_point::did_work(100 + bytes.len() * 10);
        out.extend([regex.is_match(text(bytes)?)]);
    }
    one(bool::wrap(shape, out))
}

/// Another case, and strings that are removed.
struct Normalization {
    case: Option<LetterCase>,
    case_sensitive: bool,
    stopwords: Vec<String>,
}

impl Normalization {
    fn run(&self, inputs: &Inputs) -> KernelResult {
        let (data, shape) = strings(inputs, 0)?;
        let rows = match *shape {
            [_] => false,
            [1, _] => true,
            _ if self.stopwords.is_empty() && shape.len() <= 2 => true,
            ref other => return Err(invalid!("strings of shape {other:?}")),
        };
        let folded: Vec<String> = self.stopwords.iter().map(|word| word.to_lowercase()).collect();
        let mut same: Buffer<Bytes> = Buffer::with_capacity(data.len())?;
        let mut changed = StringContents::with_capacity(0, 0)?;
        let mut other = Buffer::default();
        for bytes in data {
            yield_point::did_work(100 + bytes.len() * 4);
            let text = text(bytes)?;
            let stopped = match self.case_sensitive {
                true => self.stopwords.iter().any(|word| word == text),
                false if folded.is_empty() => false,
                false => {
                    in_case(text, LetterCase::Lower, &mut other)?;
                    folded.iter().any(|word| word.as_bytes() == &other[..])
                }
            };
            if stopped {
                continue;
            }
            match self.case {
                None => same.extend([bytes.clone()]),
                Some(case) => {
                    in_case(text, case, &mut other)?;
                    changed.write(&other)?;
                    changed.end()?;
                }
            }
        }
        let mut out = if self.case.is_some() { changed.finish()? } else { same };
        if out.is_empty() && !data.is_empty() {
            out = Buffer::filled(1, Bytes::new())?;
        }
        let kept = out.len();
        let shape = match (rows, kept == data.len()) {
            (_, true) => shape.to_vec(),
            (true, false) => vec![1, kept],
            (false, false) => vec![kept],
        };
        one(Bytes::wrap(&shape, out))
    }
}

/// Makes `out` the text in another case.
fn in_case(text: &str, case: LetterCase, out: &mut Buffer<u8>) -> Result<(), KernelError> {
    out.clear();
    // The small letter of this one depends on those around it, up to the next white space.
    const SIGMA: char = '\u{3a3}';
    if case == LetterCase::Lower && text.contains(SIGMA) {
        for word in text.split_inclusive(char::is_whitespace) {
            // A letter has at most three small ones.
            let _memory = buffer::memory().reserve(word.len().saturating_mul(3))?;
            out.append(word.to_lowercase().as_bytes())?;
        }
        return Ok(());
    }
    let mut write = |letter: char| out.append(letter.encode_utf8(&mut [0; 4]).as_bytes());
    for letter in text.chars() {
        match case {
            LetterCase::Lower => letter.to_lowercase().try_for_each(&mut write)?,
            LetterCase::Upper => letter.to_uppercase().try_for_each(&mut write)?,
        }
    }
    Ok(())
}

/// The elements of a value as keys of text, whatever their type.
fn keys(value: &Value) -> Result<Buffer<Bytes>, KernelError> {
    match value {
        Value::String(tensor) => Ok(Buffer::copy_of(elements(tensor))?),
        Value::I64(tensor) => {
            let mut keys = StringContents::with_capacity(tensor.len(), 8 * tensor.len())?;
            for x in elements(tensor) {
                keys.write(&x.to_le_bytes())?;
                keys.end()?;
            }
            Ok(keys.finish()?)
        }
        other => with_value!(other, _tensor => Err(invalid!("{} are not counted", other.dtype()))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::strings;
    use super::super::testing::*;
    use super::*;

    #[test]
    fn words_are_split_as_python_does() {
        assert_eq!(words("  a  b c ", usize::MAX).unwrap()[..], ["a", "b", "c"]);
        assert_eq!(words(" a  b  c ", 2).unwrap()[..], ["a", "b  c"]);
        assert!(words("   ", usize::MAX).unwrap().is_empty());
        let op = Op::Text(Text::Split { delimiter: ",".to_string(), max_splits: Some(1) });
        let got = try_run(op, &[Some(strings(&[2], &["a,b,c", ""]))], 2).unwrap();
        assert_eq!(got[0], strings(&[2, 2], &["a", "b,c", "", ""]));
        assert_eq!(values::<i64>(&got[1]), [2, 1]);
    }

    #[test]
    fn cases_are_those_of_the_standard_library() {
        let mut out = Buffer::default();
        for text in
            ["", "abC", "\u{130}x\u{df}", "\u{3a3}\u{391}\u{3a3} \u{3a3}", "\u{3a3}", "\u{1c5}"]
        {
            in_case(text, LetterCase::Lower, &mut out).unwrap();
            assert_eq!(out[..], *text.to_lowercase().as_bytes(), "{text}");
            in_case(text, LetterCase::Upper, &mut out).unwrap();
            assert_eq!(out[..], *text.to_uppercase().as_bytes(), "{text}");
        }
    }

    #[test]
    fn whole_strings_match_and_bad_patterns_are_refused() {
        let op = |pattern: &str| Op::Text(Text::Match { pattern: pattern.to_string() });
        let x = strings(&[3], &["ab", "abc", "b"]);
        let got = run(op("ab|b"), std::slice::from_ref(&x)).remove(0);
        assert_eq!(got, bools(&[3], &[true, false, true]));
        assert!(error(op("("), std::slice::from_ref(&x)).contains("unclosed"));
        let large = format!("{}{}", "(?:a{1000}){1000}", "b");
        assert!(!error(op(&large), &[x]).is_empty());
    }

    #[test]
    fn shapes_that_do_not_broadcast_are_refused() {
        let join = Op::Text(Text::Join);
        let got = run(join.clone(), &[strings(&[2, 1], &["a", "b"]), strings(&[2], &["x", "y"])]);
        assert_eq!(got[0], strings(&[2, 2], &["ax", "ay", "bx", "by"]));
        let bad = [strings(&[2], &["a", "b"]), strings(&[3], &["x", "y", "z"])];
        assert!(error(join, &bad).contains("broadcast"));
    }
}
