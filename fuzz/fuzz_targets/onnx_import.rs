//! Arbitrary bytes as an ONNX model: importing, optimizing and printing never panic.
#![no_main]

use graph::{ExternalData, import, optimize};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(mut graph) = import(bytes, &ExternalData::none()) {
        optimize(&mut graph, None);
        graph.infer_all().expect("an optimized graph infers its shapes");
        let _ = graph.to_string();
    }
});
