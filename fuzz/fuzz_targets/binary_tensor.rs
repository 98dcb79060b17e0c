//! Inference requests with binary tensors: any bytes are answered, none bring the server down.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = api::codec::decode_binary_request(data);
});
