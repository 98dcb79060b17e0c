//! Arbitrary bytes as an inference request with binary tensors: an error or a request, no panic.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = api::codec::decode_binary_request(data);
});
