//! Decodes messages whose tensors are repeated fields into memory that may be refused.
//!
//! prost grows a repeated field as it reads it, and ends the process when there is no memory. Where
//! a message has large contents, their elements are counted first and room for them is made; prost
//! then reads them without growing anything.

use bytes::Bytes;
use prost::{DecodeError, Message};
use tonic::Status;

use crate::decoded_size::{FieldPlace, places};
use crate::fallible::out_of_memory;
use crate::proto::model_infer_request::InferInputTensor;
use crate::proto::{InferTensorContents, ModelInferRequest};

/// The field of a request with its inputs, and that of an input with its contents.
const INPUTS: u64 = 5;
const CONTENTS: u64 = 5;

/// Inputs below this size are left to prost.
const LARGE: usize = 64 << 10;

fn malformed(error: DecodeError) -> Status {
    Status::internal(error.to_string())
}

/// Decodes a request.
///
/// # Errors
/// When it is malformed, or when there is not enough memory for its contents.
pub fn decode_message(bytes: Bytes) -> Result<ModelInferRequest, Status> {
    let is_large = |place: &FieldPlace| place.number == INPUTS && place.whole.len() >= LARGE;
    // Groups have fields between their ends; nobody sends them.
    let by_prost =
        !places(&bytes).any(|place| is_large(&place)) || places(&bytes).any(|p| p.is_group);
    if by_prost {
        return ModelInferRequest::decode(bytes).map_err(malformed);
    }
    let mut message = ModelInferRequest::default();
    each_field(&bytes, |place| match &place.payload {
        Some(payload) if is_large(place) => {
            message.inputs.push(decode_input(&bytes.slice(payload.clone()))?);
            Ok(())
        }
        _ => message.merge(bytes.slice(place.whole.clone())).map_err(malformed),
    })?;
    Ok(message)
}

/// Calls `read` for every field of `bytes`, and for what follows a malformed one: it is for prost
/// to say what is wrong.
fn each_field(
    bytes: &Bytes,
    mut read: impl FnMut(&FieldPlace) -> Result<(), Status>,
) -> Result<(), Status> {
    let mut end = 0;
    for place in places(bytes) {
        end = place.whole.end;
        read(&place)?;
    }
    if end < bytes.len() {
        let whole = end..bytes.len();
        read(&FieldPlace { number: 0, whole, payload: None, is_group: false })?;
    }
    Ok(())
}

fn decode_input(bytes: &Bytes) -> Result<InferInputTensor, Status> {
    if places(bytes).any(|place| place.is_group) {
        return InferInputTensor::decode(bytes.clone()).map_err(malformed);
    }
    let mut input = InferInputTensor::default();
    each_field(bytes, |place| match &place.payload {
        Some(payload) if place.number == CONTENTS => {
            let contents = input.contents.get_or_insert_default();
            merge_contents(contents, &bytes.slice(payload.clone()))
        }
        _ => input.merge(bytes.slice(place.whole.clone())).map_err(malformed),
    })?;
    Ok(input)
}

fn merge_contents(contents: &mut InferTensorContents, bytes: &Bytes) -> Result<(), Status> {
    if places(bytes).any(|place| place.is_group) {
        return contents.merge(bytes.clone()).map_err(malformed);
    }
    each_field(bytes, |place| {
        make_room(contents, place, bytes)?;
        contents.merge(bytes.slice(place.whole.clone())).map_err(malformed)
    })
}

/// Makes room for the elements of one field.
fn make_room(
    contents: &mut InferTensorContents,
    place: &FieldPlace,
    bytes: &Bytes,
) -> Result<(), Status> {
    let packed = place.payload.clone().map(|payload| &bytes[payload]);
    // The last byte of each integer has no continuation bit.
    let integers = packed.map_or(1, |packed| packed.iter().filter(|byte| **byte < 0x80).count());
    let fixed = |size: usize| packed.map_or(1, |packed| packed.len() / size);
    let room = match place.number {
        1 => contents.bool_contents.try_reserve(integers),
        2 => contents.int_contents.try_reserve(integers),
        3 => contents.int64_contents.try_reserve(integers),
        4 => contents.uint_contents.try_reserve(integers),
        5 => contents.uint64_contents.try_reserve(integers),
        6 => contents.fp32_contents.try_reserve(fixed(4)),
        7 => contents.fp64_contents.try_reserve(fixed(8)),
        8 => contents.bytes_contents.try_reserve(1),
        _ => Ok(()),
    };
    room.map_err(|error| Status::from(out_of_memory(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same_as_prost(bytes: Vec<u8>) -> bool {
        let bytes = Bytes::from(bytes);
        let (ours, theirs) =
            (decode_message(bytes.clone()), ModelInferRequest::decode(bytes.clone()));
        assert_eq!(ours.is_ok(), theirs.is_ok(), "{ours:?}");
        if let (Ok(ours), Ok(theirs)) = (&ours, &theirs) {
            assert_eq!(ours, theirs);
        }
        ours.is_ok()
    }

    fn large() -> ModelInferRequest {
        let count = 30_000;
        let contents = InferTensorContents {
            bool_contents: vec![true; count],
            int_contents: (0..count as i32).collect(),
            int64_contents: vec![-1; count],
            uint_contents: vec![300; count],
            uint64_contents: vec![u64::MAX; count],
            fp32_contents: vec![1.5; count],
            fp64_contents: vec![-2.5; count],
            bytes_contents: vec![Bytes::from_static(b"ab"); count],
        };
        let input = |name: &str, contents| InferInputTensor {
            name: name.to_string(),
            datatype: "FP32".to_string(),
            shape: vec![count as i64],
            contents,
            ..InferInputTensor::default()
        };
        ModelInferRequest {
            model_name: "m".to_string(),
            inputs: vec![input("a", Some(contents)), input("b", None)],
            raw_input_contents: vec![Bytes::from_static(b"xyz"); 2],
            ..ModelInferRequest::default()
        }
    }

    #[test]
    fn large_contents_are_decoded_as_prost_does() {
        assert!(same_as_prost(large().encode_to_vec()));
        assert!(same_as_prost(ModelInferRequest::default().encode_to_vec()));
        // Elements one by one, contents in two parts, fields nobody knows, and a group.
        let one_by_one: Vec<u8> =
            std::iter::repeat_n([0x35, 0, 0, 0x80, 0x3f], 20_000).flatten().collect();
        let field = |number: u8, bytes: &[u8]| {
            let mut out = vec![number << 3 | 2];
            prost::encoding::encode_varint(bytes.len() as u64, &mut out);
            out.extend_from_slice(bytes);
            out
        };
        let parts = [field(5, &one_by_one), field(1, b"x"), field(5, &[0x08, 1]), vec![0x78, 5]];
        let message = [field(5, &parts.concat()), field(1, b"m"), field(20 - 5, b"?")].concat();
        assert!(same_as_prost(message.clone()));
        let group = [message, vec![0x7b, 0x08, 1, 0x7c]].concat();
        assert!(same_as_prost(group));
    }

    #[test]
    fn malformed_messages_are_refused_as_prost_does() {
        let whole = large().encode_to_vec();
        let mut random = base::Random::new(3);
        let mut refused = 0;
        for _ in 0..40 {
            let mut bytes = whole.clone();
            bytes.truncate(random.below(bytes.len() as u64) as usize);
            refused += usize::from(!same_as_prost(bytes));
            let mut bytes = whole.clone();
            // Mostly heads: most of the message is numbers.
            let at = random.below(64) as usize;
            bytes[at] ^= 1 << random.below(8);
            refused += usize::from(!same_as_prost(bytes));
        }
        assert!(refused > 20, "{refused}");
    }
}
