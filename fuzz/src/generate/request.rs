//! Inference requests: JSON, JSON with binary tensors, and protobuf.

use std::fmt::Write;

use api::proto;
use base::Random;
use prost::Message;

use super::{shape, small_count};
use crate::mutate::{one_in, pick};

const TYPES: [(&str, usize); 13] = [
    ("BOOL", 1),
    ("UINT8", 1),
    ("UINT16", 2),
    ("UINT32", 4),
    ("UINT64", 8),
    ("INT8", 1),
    ("INT16", 2),
    ("INT32", 4),
    ("INT64", 8),
    ("FP16", 2),
    ("FP32", 4),
    ("FP64", 8),
    ("BYTES", 0),
];

const PARAMETERS: [&str; 8] = [
    "\"binary_data_output\":true",
    "\"priority\":1",
    "\"timeout\":1000",
    "\"atoll_class\":\"be\"",
    "\"sequence_id\":7",
    "\"custom\":[1,{\"a\":null}]",
    "\"timeout\":-1",
    "\"atoll_deadline_ms\":0.5",
];

fn number(random: &mut Random, dtype: &str) -> String {
    match dtype {
        "BOOL" => pick(random, &["true", "false", "1"]).to_string(),
        "BYTES" => {
            pick(random, &["\"\"", "\"a\"", "\"\\u00e9\\n\"", "\"\\ud83d\\ude00\""]).to_string()
        }
        "FP16" | "FP32" | "FP64" => match random.below(6) {
            0 => pick(random, &["1e30", "-0.0", "1e-45", "3.4e38", "1e309", "7"]).to_string(),
            _ => format!("{:.3}", random.symmetric_f32()),
        },
        _ => match random.below(8) {
            0 => pick(random, &["-1", "128", "65536", "4294967296", "18446744073709551615", "1.5"])
                .to_string(),
            _ => random.below(100).to_string(),
        },
    }
}

/// The data of a tensor, flat or nested as its shape is.
fn data(random: &mut Random, dtype: &str, shape: &[i64], text: &mut String) {
    let nested = one_in(random, 2);
    match (nested, shape) {
        (true, [first, rest @ ..]) if !rest.is_empty() => {
            text.push('[');
            for index in 0..(*first).clamp(0, 8) {
                text.push_str(if index > 0 { "," } else { "" });
                data(random, dtype, rest, text);
            }
            text.push(']');
        }
        _ => {
            let count = small_count(shape).unwrap_or(3).min(64);
            text.push('[');
            for index in 0..count {
                text.push_str(if index > 0 { "," } else { "" });
                text.push_str(&number(random, dtype));
            }
            text.push(']');
        }
    }
}

/// The JSON of a request, and the bytes that follow it where `binary`.
fn request(random: &mut Random, binary: bool) -> (String, Vec<u8>) {
    let (mut text, mut tail) = (String::from("{"), Vec::new());
    if one_in(random, 3) {
        text.push_str("\"id\":\"42\",");
    }
    if one_in(random, 3) {
        let (one, two) = (pick(random, &PARAMETERS), pick(random, &PARAMETERS));
        let _ = write!(text, "\"parameters\":{{{one},{two}}},");
    }
    text.push_str("\"inputs\":[");
    for index in 0..1 + random.below(3) {
        let (dtype, bytes) = *pick(random, &TYPES);
        let shape = shape(random);
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(
            text,
            "{comma}{{\"name\":\"INPUT{index}\",\"shape\":{shape:?},\"datatype\":\"{dtype}\","
        );
        if binary && !one_in(random, 4) {
            let before = tail.len();
            let count = small_count(&shape).unwrap_or(3);
            match bytes {
                0 => (0..count).for_each(|_| tail.extend_from_slice(b"\x02\0\0\0ab")),
                bytes => tail.resize(before + count * bytes, random.next_u64() as u8),
            }
            let size = tail.len() - before;
            let _ = write!(text, "\"parameters\":{{\"binary_data_size\":{size}}}}}");
        } else {
            text.push_str("\"data\":");
            data(random, dtype, &shape, &mut text);
            text.push('}');
        }
    }
    text.push(']');
    if one_in(random, 2) {
        let parameter = pick(random, &["\"binary_data\":true", "\"classification\":2", ""]);
        let _ =
            write!(text, ",\"outputs\":[{{\"name\":\"OUTPUT0\",\"parameters\":{{{parameter}}}}}]");
    }
    text.push('}');
    (text, tail)
}

/// An inference request in JSON.
pub fn json_request(random: &mut Random) -> Vec<u8> {
    request(random, false).0.into_bytes()
}

/// The length of the JSON as 4 bytes (all ones for none), the JSON, and binary tensors.
pub fn binary_request(random: &mut Random) -> Vec<u8> {
    let (json, tail) = request(random, true);
    let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.extend_from_slice(&tail);
    bytes
}

/// A `ModelInferRequest`.
pub fn infer_message(random: &mut Random) -> Vec<u8> {
    let raw = one_in(random, 2);
    let mut message = proto::ModelInferRequest {
        model_name: "identity".to_string(),
        id: "7".to_string(),
        ..Default::default()
    };
    for index in 0..1 + random.below(3) {
        let (dtype, bytes) = *pick(random, &TYPES);
        let shape = shape(random);
        let count = small_count(&shape).unwrap_or(3);
        let mut contents = None;
        if raw {
            let bytes = match bytes {
                0 => b"\x02\0\0\0ab".repeat(count),
                bytes => vec![random.next_u64() as u8; count * bytes],
            };
            message.raw_input_contents.push(bytes.into());
        } else {
            contents = Some(contents_of(random, dtype, count.min(64)));
        }
        message.inputs.push(proto::model_infer_request::InferInputTensor {
            name: format!("INPUT{index}"),
            datatype: dtype.to_string(),
            shape,
            contents,
            ..Default::default()
        });
    }
    message.encode_to_vec()
}

fn contents_of(random: &mut Random, dtype: &str, count: usize) -> proto::InferTensorContents {
    let mut contents = proto::InferTensorContents::default();
    for _ in 0..count {
        let value = random.next_u64();
        match dtype {
            "BOOL" => contents.bool_contents.push(value.is_multiple_of(2)),
            "INT8" | "INT16" | "INT32" => contents.int_contents.push(value as i32 % 120),
            "INT64" => contents.int64_contents.push(value as i64),
            "UINT8" | "UINT16" | "UINT32" => contents.uint_contents.push(value as u32 % 200),
            "UINT64" => contents.uint64_contents.push(value),
            "FP64" => contents.fp64_contents.push(f64::from_bits(value)),
            "BYTES" => contents.bytes_contents.push(value.to_le_bytes().to_vec().into()),
            _ => contents.fp32_contents.push(random.symmetric_f32()),
        }
    }
    contents
}
