//! The memory that decoding a request takes, counted on its bytes before anything is decoded.
//!
//! Two bytes of protobuf may become a message of 300, and three of JSON a string of 100. Both
//! counts are upper bounds, so that a budget that grants them is enough.

use std::ops::Range;

use bytes::Bytes;

use crate::codec::MAX_TENSORS;
use crate::error::{ApiError, ApiResult};
use crate::parameters::MAX_PARAMETERS;
use crate::proto::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};

/// A vector that grows holds up to twice its elements, and while it grows its elements once more.
const GROWTH: usize = 3;

/// Bytes of a small allocation beside its contents.
const ALLOCATION: usize = 32;

/// Bytes of one parameter: its key, its value and its share of a tree's node.
const PARAMETER: usize = 160;

/// Bytes of the objects of a JSON request: inputs, outputs and their parameters.
const JSON_OBJECT: usize = GROWTH * 320;

/// Bytes of a string of JSON data: its handle in a vector and an allocation.
const JSON_STRING: usize = GROWTH * size_of::<Bytes>() + ALLOCATION;

/// Bytes of a number of JSON data. Numbers are collected as 8 bytes and converted once.
const JSON_NUMBER: usize = GROWTH * size_of::<f64>();

/// Bytes beside the raw tensors of a message that are decoded at once, and fields after which the
/// rest counts as such.
const WIDE_BYTES: usize = 64 << 10;
const WIDE_FIELDS: usize = 1024;

/// Below this bound, JSON is not examined more closely.
const CLOSE_LOOK: usize = 1 << 20;

/// The most memory that decoding an inference request of the REST protocol takes: its JSON, and
/// `binary` bytes of tensors after it. These are slices of the body unless they are strings.
pub fn of_request(json: &[u8], binary: usize) -> usize {
    // An escape may hide the name of the type.
    let strings = json.contains(&b'\\') || json.windows(5).any(|text| text == b"BYTES");
    of_json(json).saturating_add(if strings { strings_in(binary) } else { 0 })
}

/// The most memory of the elements of a `BYTES` tensor of `bytes`: each has a length of 4 bytes.
fn strings_in(bytes: usize) -> usize {
    (bytes / 4).saturating_mul(size_of::<Bytes>())
}

/// Whether a message has so much beside its raw tensors that decoding it takes long. It looks at
/// few fields only.
pub fn is_wide(message: &[u8]) -> bool {
    let mut rest = message.len();
    for (index, (field, payload)) in Fields(message).enumerate() {
        if rest <= WIDE_BYTES || index >= WIDE_FIELDS {
            break;
        }
        if let (7, Payload::Bytes(raw)) = (field, payload) {
            rest = rest.saturating_sub(raw.len());
        }
    }
    rest > WIDE_BYTES
}

/// The most memory that decoding the JSON of an inference request takes.
fn of_json(json: &[u8]) -> usize {
    // A string with escapes is first put together in a buffer that grows.
    let scratch = if json.contains(&b'\\') { json.len().saturating_mul(GROWTH) } else { 0 };
    of_elements(json).saturating_add(scratch)
}

fn of_elements(json: &[u8]) -> usize {
    let count = |wanted: u8| json.iter().filter(|&&byte| byte == wanted).count();
    let rough = json_bytes(json.len(), count(b'{'), count(b'"') / 2, count(b',') + count(b'['));
    if rough < CLOSE_LOOK {
        return rough;
    }
    let (mut objects, mut strings, mut separators) = (0, 0, 0);
    let mut rest = json;
    loop {
        // Braces and commas inside of strings are no objects and no numbers.
        let end = rest.iter().position(|&byte| byte == b'"').unwrap_or(rest.len());
        let (outside, after) = rest.split_at(end);
        objects += outside.iter().filter(|&&byte| byte == b'{').count();
        separators += outside.iter().filter(|&&byte| matches!(byte, b',' | b'[')).count();
        let Some(text) = after.get(1..) else { break };
        strings += 1;
        rest = &text[string_length(text)..];
    }
    json_bytes(json.len(), objects, strings, separators)
}

fn json_bytes(length: usize, objects: usize, strings: usize, numbers: usize) -> usize {
    let parts = [
        length,
        objects.saturating_add(1).saturating_mul(JSON_OBJECT),
        strings.saturating_mul(JSON_STRING),
        numbers.saturating_mul(JSON_NUMBER),
    ];
    parts.into_iter().fold(0, usize::saturating_add)
}

/// Bytes up to and including the quote that ends a string.
fn string_length(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(found) = text[at..].iter().position(|byte| matches!(byte, b'"' | b'\\')) {
        at += found;
        if text[at] == b'"' {
            return at + 1;
        }
        // The escaped byte may be a quote.
        at = (at + 2).min(text.len());
    }
    text.len()
}

/// The most memory that decoding a `ModelInferRequest` takes, beside the message itself: raw
/// contents are slices of it. Refuses messages with too many tensors or parameters.
///
/// A malformed message ends the count: its decoder stops at the same byte.
pub fn of_message(message: &[u8]) -> ApiResult<usize> {
    let mut size = MessageSize::default();
    for (field, payload) in Fields(message) {
        match (field, payload) {
            (1..=3, Payload::Bytes(text)) => size.add(ALLOCATION + text.len()),
            (4, Payload::Bytes(entry)) => size.parameter(entry)?,
            (5, Payload::Bytes(input)) => size.input(input)?,
            (6, Payload::Bytes(output)) => size.output(output)?,
            (7, Payload::Bytes(raw)) => {
                size.raw += 1;
                size.raw_bytes += raw.len();
                size.add(GROWTH * size_of::<Bytes>());
            }
            _ => {}
        }
        if size.inputs.max(size.outputs).max(size.raw) > MAX_TENSORS {
            return Err(ApiError::invalid(format!("more than {MAX_TENSORS} inputs or outputs")));
        }
    }
    let strings = if size.has_strings { strings_in(size.raw_bytes) } else { 0 };
    Ok(size.bytes.saturating_add(strings))
}

#[derive(Default)]
struct MessageSize {
    bytes: usize,
    inputs: usize,
    outputs: usize,
    raw: usize,
    raw_bytes: usize,
    has_strings: bool,
    parameters: usize,
}

impl MessageSize {
    fn add(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// An entry of a map of parameters.
    fn parameter(&mut self, entry: &[u8]) -> ApiResult<()> {
        self.parameters += 1;
        // Of all maps together: every tensor has at most as many as the request.
        if self.parameters > MAX_PARAMETERS * (1 + self.inputs + self.outputs) {
            return Err(ApiError::invalid("too many parameters"));
        }
        self.add(PARAMETER + entry.len());
        Ok(())
    }

    fn input(&mut self, input: &[u8]) -> ApiResult<()> {
        self.inputs += 1;
        self.add(GROWTH * size_of::<InferInputTensor>());
        for (field, payload) in Fields(input) {
            match (field, payload) {
                (1 | 2, Payload::Bytes(text)) => {
                    self.has_strings |= field == 2 && text == b"BYTES";
                    self.add(ALLOCATION + text.len());
                }
                (3, payload) => self.scalars(&payload, 8),
                (4, Payload::Bytes(entry)) => self.parameter(entry)?,
                (5, Payload::Bytes(contents)) => self.contents(contents),
                _ => {}
            }
        }
        Ok(())
    }

    fn output(&mut self, output: &[u8]) -> ApiResult<()> {
        self.outputs += 1;
        self.add(GROWTH * size_of::<InferRequestedOutputTensor>());
        for (field, payload) in Fields(output) {
            match (field, payload) {
                (1, Payload::Bytes(text)) => self.add(ALLOCATION + text.len()),
                (2, Payload::Bytes(entry)) => self.parameter(entry)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn contents(&mut self, contents: &[u8]) {
        for (field, payload) in Fields(contents) {
            match field {
                1 => self.scalars(&payload, 1),
                2 | 4 => self.scalars(&payload, 4),
                3 | 5 => self.scalars(&payload, 8),
                6 | 7 => self.add(payload.len().saturating_mul(GROWTH)),
                8 => self.add(GROWTH * size_of::<Bytes>()),
                _ => {}
            }
        }
    }

    /// Integers of `size` bytes: one, or several packed.
    fn scalars(&mut self, payload: &Payload<'_>, size: usize) {
        let count = match payload {
            // The last byte of each has no continuation bit.
            Payload::Bytes(packed) => packed.iter().filter(|&&byte| byte < 0x80).count(),
            Payload::Varint | Payload::Fixed(_) => 1,
        };
        self.add(count.saturating_mul(size * GROWTH));
    }
}

/// A field's number, the bytes it takes and, where it has a length, those of its payload.
pub(crate) struct FieldPlace {
    pub(crate) number: u64,
    pub(crate) whole: Range<usize>,
    pub(crate) payload: Option<Range<usize>>,
    pub(crate) is_group: bool,
}

/// Where the fields of a message are, up to the first malformed one.
pub(crate) fn places(message: &[u8]) -> impl Iterator<Item = FieldPlace> {
    let mut fields = Fields(message);
    std::iter::from_fn(move || {
        let start = message.len() - fields.0.len();
        let (number, payload) = fields.next()?;
        let end = message.len() - fields.0.len();
        let is_group = matches!(payload, Payload::Fixed(0));
        let payload = match payload {
            Payload::Bytes(bytes) => Some(end - bytes.len()..end),
            _ => None,
        };
        Some(FieldPlace { number, whole: start..end, payload, is_group })
    })
}

enum Payload<'a> {
    Varint,
    Fixed(usize),
    Bytes(&'a [u8]),
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Payload::Varint => 8,
            Payload::Fixed(size) => *size,
            Payload::Bytes(bytes) => bytes.len(),
        }
    }
}

/// The fields of a message, up to the first malformed one.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, Payload<'a>);

    fn next(&mut self) -> Option<(u64, Payload<'a>)> {
        let tag = self.varint()?;
        let payload = match tag & 7 {
            0 => {
                self.varint()?;
                Payload::Varint
            }
            1 => {
                self.take(8)?;
                Payload::Fixed(8)
            }
            2 => {
                let length = self.varint()?;
                Payload::Bytes(self.take(usize::try_from(length).ok()?)?)
            }
            // The fields of a group count like those around it. Decoders skip groups.
            3 | 4 => Payload::Fixed(0),
            5 => {
                self.take(4)?;
                Payload::Fixed(4)
            }
            _ => return None,
        };
        Some((tag >> 3, payload))
    }
}

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::proto::{InferTensorContents, ModelInferRequest};

    /// A message of `count` times the bytes `part`.
    fn repeated(part: &[u8], count: usize) -> Vec<u8> {
        part.repeat(count)
    }

    #[test]
    fn repeated_messages_are_refused_before_they_are_decoded() {
        // Empty inputs, outputs and raw contents: two bytes each.
        for tag in [0x2a, 0x32, 0x3a] {
            let bomb = repeated(&[tag, 0], 1 << 20);
            assert!(of_message(&bomb).is_err(), "{tag:x}");
            assert!(of_message(&repeated(&[tag, 0], MAX_TENSORS)).is_ok());
        }
        // Empty parameters.
        assert!(of_message(&repeated(&[0x22, 0], 1 << 20)).is_err());
    }

    #[test]
    fn the_bound_exceeds_what_decoding_takes() {
        let contents = InferTensorContents {
            int_contents: vec![0; 1000],
            int64_contents: vec![-1; 500],
            fp32_contents: vec![1.5; 2000],
            bool_contents: vec![true; 3000],
            bytes_contents: vec![Bytes::new(); 4000],
            ..InferTensorContents::default()
        };
        let held = 1000 * 4 + 500 * 8 + 2000 * 4 + 3000 + 4000 * size_of::<Bytes>();
        let input = InferInputTensor {
            name: "x".repeat(100),
            shape: vec![1; 700],
            contents: Some(contents),
            ..InferInputTensor::default()
        };
        let message = ModelInferRequest { inputs: vec![input; 3], ..ModelInferRequest::default() };
        let bound = of_message(&message.encode_to_vec()).unwrap();
        let least = 3 * (held + 700 * 8 + 100 + size_of::<InferInputTensor>());
        assert!((least..5 * least).contains(&bound), "{bound} for {least}");
    }

    #[test]
    fn raw_contents_cost_next_to_nothing() {
        let message = ModelInferRequest {
            inputs: vec![InferInputTensor::default()],
            raw_input_contents: vec![Bytes::from(vec![0; 1 << 20])],
            ..ModelInferRequest::default()
        };
        assert!(of_message(&message.encode_to_vec()).unwrap() < 4096);
        assert!(of_request(b"{\"datatype\":\"FP32\"}", 1 << 20) < 4096);
    }

    #[test]
    fn strings_cost_a_handle_each() {
        let input = InferInputTensor { datatype: "BYTES".to_string(), ..Default::default() };
        let message = ModelInferRequest {
            inputs: vec![input],
            raw_input_contents: vec![Bytes::from(vec![0; 4 << 20])],
            ..ModelInferRequest::default()
        };
        let handles = (1 << 20) * size_of::<Bytes>();
        assert!(of_message(&message.encode_to_vec()).unwrap() > handles);
        for json in [&b"{\"datatype\":\"BYTES\"}"[..], b"{\"datatype\":\"\\u0042YTES\"}"] {
            assert!(of_request(json, 4 << 20) > handles);
        }
    }

    #[test]
    fn malformed_messages_end_the_count() {
        for bytes in [&[0xff; 40][..], &[0x2a, 0x7f], &[0x0a], &[0x0b, 0x0c], &[7], &[]] {
            assert!(of_message(bytes).unwrap() < 4096, "{bytes:?}");
        }
    }

    #[test]
    fn json_is_counted_by_its_elements() {
        let strings = format!("[{}\"\"]", "\"\",".repeat(1 << 20));
        let numbers = format!("[{}0]", "0,".repeat(1 << 20));
        assert!(of_json(strings.as_bytes()) > (1 << 20) * (size_of::<Bytes>() + ALLOCATION));
        assert!(of_json(numbers.as_bytes()) > (1 << 20) * 2 * 8);
        // Text that looks like JSON is one string.
        let text = format!("[\"{}\"]", "{\\\"a\\\":[1,2]},".repeat(1 << 17));
        let bound = of_json(text.as_bytes());
        assert!(bound < 5 * text.len(), "{bound} for {}", text.len());
        for odd in ["", "\"", "\"\\", "\"\\\"", "{\"", "\\"] {
            let long = odd.repeat(1 << 20);
            assert!(of_json(long.as_bytes()) >= long.len());
        }
    }

    #[test]
    fn only_what_is_beside_raw_tensors_makes_a_message_wide() {
        let raw = |bytes: usize| {
            let mut message = ModelInferRequest { model_name: "m".into(), ..Default::default() };
            message.raw_input_contents.push(vec![0; bytes].into());
            message
        };
        assert!(!is_wide(&raw(10 << 20).encode_to_vec()));
        assert!(!is_wide(&[]));
        let mut wide = raw(10);
        wide.inputs = vec![Default::default(); 100_000];
        assert!(is_wide(&wide.encode_to_vec()));
        let mut contents = raw(10);
        let mut input = InferInputTensor::default();
        let values = vec![1; 200_000];
        input.contents = Some(InferTensorContents { int_contents: values, ..Default::default() });
        contents.inputs.push(input);
        assert!(is_wide(&contents.encode_to_vec()));
        // Garbage is not examined for long.
        assert!(is_wide(&[0x2a, 0].repeat(1 << 20)));
    }
}
