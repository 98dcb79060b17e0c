//! Round trips, false lengths, and mutations of valid requests.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::infer::InferResponse;

fn binary_body(json: &str, tail: &[u8]) -> (Bytes, Option<usize>) {
    (Bytes::from([json.as_bytes(), tail].concat()), Some(json.len()))
}

fn decode_json(json: &str) -> ApiResult<Decoded> {
    decode(Bytes::copy_from_slice(json.as_bytes()), None)
}

fn only_input(decoded: Decoded) -> Tensor {
    match decoded.request.inputs {
        Inputs::Named(mut inputs) => inputs.remove(0).tensor,
        Inputs::Raw(_) => panic!("raw"),
    }
}

fn input_json(dtype: &str, shape: &str, data: &str) -> String {
    format!(r#"{{"inputs":[{{"name":"x","shape":{shape},"data":{data},"datatype":"{dtype}"}}]}}"#)
}

#[test]
fn binary_tensors_share_the_body() {
    let json = r#"{"id":"7","inputs":[
        {"name":"x","shape":[1],"datatype":"FP32","parameters":{"binary_data_size":4}},
        {"name":"s","shape":[2],"datatype":"BYTES","parameters":{"binary_data_size":11}}],
        "outputs":[{"name":"y","parameters":{"binary_data":true}}]}"#;
    let mut tail = 1.5f32.to_le_bytes().to_vec();
    strings::encode(&[Bytes::from_static(b"abc"), Bytes::new()], &mut tail);
    let (body, length) = binary_body(json, &tail);
    let range = body.as_ptr_range();
    let decoded = decode(body.clone(), length).unwrap();
    assert!(decoded.encoding.is_binary("y"));
    assert_eq!(decoded.request.id, "7");
    let Inputs::Named(inputs) = decoded.request.inputs else { panic!("raw") };
    assert_eq!(inputs[0].tensor.to_vec::<f32>(), Some(vec![1.5]));
    assert!(range.contains(&inputs[0].tensor.raw().unwrap().as_ptr()));
    assert_eq!(inputs[1].tensor.size_bytes(), 3);
}

#[test]
fn refuses_false_lengths() {
    let input = |size: &str, shape: &str, dtype: &str| {
        format!(
            r#"{{"inputs":[{{"name":"x","shape":{shape},"datatype":"{dtype}",
                "parameters":{{"binary_data_size":{size}}}}}]}}"#
        )
    };
    let cases: [(String, &[u8]); 9] = [
        (input("8", "[1]", "FP32"), &[0; 4]),
        (input("4", "[1]", "FP32"), &[0; 5]),
        (input("4", "[2]", "FP32"), &[0; 4]),
        (input("18446744073709551615", "[1]", "FP32"), &[0; 4]),
        (input("-1", "[1]", "FP32"), &[0; 4]),
        (input("4", "[-1]", "FP32"), &[0; 4]),
        (input("4", "[9223372036854775807,9223372036854775807]", "FP32"), &[0; 4]),
        (input("4", "[1099511627776]", "BYTES"), &[0; 4]),
        (input("5", "[1]", "BYTES"), &[9, 0, 0, 0, 1]),
    ];
    for (json, tail) in cases {
        let (body, length) = binary_body(&json, tail);
        assert!(decode(body, length).is_err(), "{json}");
    }
    assert!(decode(Bytes::from_static(b"{}"), Some(3)).is_err());
}

#[test]
fn json_data_is_flat_or_nested_and_of_any_type() {
    let nested = decode_json(&input_json("FP32", "[2,2]", "[[1,2],[3,4.5]]")).unwrap();
    assert_eq!(only_input(nested).to_vec::<f32>(), Some(vec![1.0, 2.0, 3.0, 4.5]));
    let wide = decode_json(&input_json("UINT64", "[2]", "[1,18446744073709551615]")).unwrap();
    assert_eq!(only_input(wide).to_vec::<u64>(), Some(vec![1, u64::MAX]));
    for (dtype, data) in [
        ("BOOL", "[true,false]"),
        ("UINT8", "[0,255]"),
        ("INT8", "[-128,127]"),
        ("INT16", "[-1,1]"),
        ("UINT16", "[0,65535]"),
        ("INT32", "[-1,2]"),
        ("UINT32", "[1,2]"),
        ("INT64", "[1,-2]"),
        ("FP16", "[1.5,2]"),
        ("BF16", "[1.5,2]"),
        ("FP64", "[1e300,2]"),
        ("BYTES", r#"["a","é"]"#),
    ] {
        let tensor = only_input(decode_json(&input_json(dtype, "[2]", data)).unwrap());
        assert_eq!(tensor.dtype().wire_name(), dtype);
    }
}

#[test]
fn json_data_that_does_not_fit_is_refused() {
    let deep = format!("{}1{}", "[".repeat(40), "]".repeat(40));
    for (dtype, shape, data) in [
        ("UINT8", "[1]", "[256]"),
        ("INT8", "[1]", "[-129]"),
        ("INT32", "[1]", "[1.5]"),
        ("FP32", "[1]", "[1e39]"),
        ("FP32", "[2]", "[1]"),
        ("FP32", "[1]", "[\"1\"]"),
        ("BYTES", "[1]", "[1]"),
        ("BOOL", "[1]", "[2]"),
        ("FP32", "[2]", "[1,true]"),
        ("FP32", "[1]", "[null]"),
        ("FP32", "[1]", "[{}]"),
        ("FLOAT", "[1]", "[1]"),
        ("FP32", "[1]", deep.as_str()),
    ] {
        let json = input_json(dtype, shape, data);
        assert!(decode_json(&json).is_err(), "{json}");
    }
}

#[test]
fn malformed_requests_are_refused() {
    let many: String =
        vec![r#"{"name":"x","shape":[1],"datatype":"FP32","data":[1]}"#; 1025].join(",");
    for json in [
        "".to_string(),
        "[]".to_string(),
        "{}".to_string(),
        r#"{"inputs":[{}]}"#.to_string(),
        r#"{"inputs":[{"name":"","shape":[1],"datatype":"FP32","data":[1]}]}"#.to_string(),
        r#"{"inputs":[{"name":"x","shape":[1],"datatype":"FP32"}]}"#.to_string(),
        format!(r#"{{"inputs":[{many}]}}"#),
        format!(r#"{{"inputs":[],"id":"{}"}}"#, "i".repeat(2000)),
    ] {
        assert!(decode_json(&json).is_err(), "{}", &json[..json.len().min(80)]);
    }
}

#[test]
fn raw_bodies_are_passed_to_the_model() {
    let decoded = decode(Bytes::from_static(b"1234"), Some(0)).unwrap();
    assert_eq!(decoded.request.inputs, Inputs::Raw(Bytes::from_static(b"1234")));
    assert!(decoded.encoding.binary);
}

fn response(tensor: Tensor) -> InferResponse {
    InferResponse {
        model_name: "m".into(),
        model_version: "1".into(),
        id: "a\"b".into(),
        outputs: vec![NamedTensor { name: "y".into(), tensor }],
        timing: None,
    }
}

#[test]
fn responses_are_json_followed_by_binary() {
    let reply = response(Tensor::from_vec(vec![2], vec![1.5f32, f32::NAN]).unwrap());
    let json = encode(&reply, &OutputEncoding::default()).unwrap();
    assert_eq!(json.header_length, None);
    let text = json.into_bytes();
    assert_eq!(
        std::str::from_utf8(&text).unwrap(),
        concat!(
            r#"{"id":"a\"b","model_name":"m","model_version":"1","outputs":"#,
            r#"[{"name":"y","datatype":"FP32","shape":[2],"data":[1.5,null]}]}"#
        )
    );
    let encoding = OutputEncoding { binary: true, exceptions: vec![] };
    let binary = encode(&reply, &encoding).unwrap();
    let length = binary.header_length.unwrap();
    assert_eq!(binary.len(), length + 8);
    let header: serde_json::Value = serde_json::from_slice(&binary.parts[0][..length]).unwrap();
    assert_eq!(header["outputs"][0]["parameters"]["binary_data_size"], 8);
    let large = response(Tensor::from_vec(vec![1 << 16], vec![0f32; 1 << 16]).unwrap());
    assert_eq!(encode(&large, &encoding).unwrap().parts.len(), 2);
}

#[test]
fn text_that_is_not_utf8_needs_binary() {
    let reply = response(Tensor::from_strings(vec![1], vec![Bytes::from_static(&[0xff])]).unwrap());
    assert!(encode(&reply, &OutputEncoding::default()).is_err());
    assert!(encode(&reply, &OutputEncoding { binary: true, exceptions: vec![] }).is_ok());
}

fn seeds() -> Vec<Vec<u8>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/binary");
    let mut seeds: Vec<Vec<u8>> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect();
    seeds.sort();
    seeds
}

#[test]
fn mutated_requests_never_panic() {
    let mut random = base::Random::new(7);
    let mut accepted = 0;
    for seed in seeds() {
        accepted += usize::from(decode_binary_request(&seed).is_ok());
        for _ in 0..3000 {
            let mut data = seed.clone();
            for _ in 0..1 + random.next_u64() % 4 {
                let at = (random.next_u64() as usize) % data.len().max(1);
                match random.next_u64() % 4 {
                    0 => data[at] ^= 1 << (random.next_u64() % 8),
                    1 => data[at] = random.next_u64() as u8,
                    2 => data.truncate(at.max(1)),
                    _ => data.insert(at, b"[]{}\",0-9\\"[random.next_u64() as usize % 10]),
                }
            }
            let _ = decode_binary_request(&data);
        }
    }
    assert!(accepted >= 4, "most seeds are valid requests");
}

proptest! {
    #[test]
    fn floats_survive_both_forms(
        values in vec(any::<f32>().prop_filter("finite", |v| v.is_finite()), 0..50)
    ) {
        let tensor = Tensor::from_vec(vec![values.len()], values.clone()).unwrap();
        let json = encode(&response(tensor), &OutputEncoding::default()).unwrap().into_bytes();
        let parsed: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let data = parsed["outputs"][0]["data"].to_string();
        let back = decode_json(&input_json("FP32", &format!("[{}]", values.len()), &data)).unwrap();
        prop_assert_eq!(only_input(back).to_vec::<f32>(), Some(values));
    }

    #[test]
    fn strings_round_trip(strings in vec(vec(any::<u8>(), 0..20), 0..20)) {
        let strings: Vec<Bytes> = strings.into_iter().map(Bytes::from).collect();
        let mut bytes = Vec::new();
        strings::encode(&strings, &mut bytes);
        prop_assert_eq!(bytes.len(), strings::encoded_len(&strings));
        prop_assert_eq!(strings::decode(bytes.into(), strings.len()).unwrap(), strings);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..200), count in any::<usize>()) {
        let _ = decode_binary_request(&bytes);
        let _ = strings::decode(bytes.into(), count);
    }
}

#[test]
fn copies_of_strings_are_known_before_they_are_made() {
    let words = Tensor::from_strings(vec![2], vec![Bytes::from("ab"), Bytes::new()]).unwrap();
    assert_eq!(response::copied_bytes(&words), response::tensor_bytes(&words).unwrap().len());
    assert_eq!(response::copied_bytes(&words), 10);
    let numbers = Tensor::from_vec(vec![2], vec![1f32, 2.0]).unwrap();
    assert_eq!(response::copied_bytes(&numbers), 0);
}
