//! Arbitrary bytes as an inference request with binary tensors: decoding never panics.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = api::codec::decode_binary_request(data);
});
