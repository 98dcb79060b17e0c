//! `grpc_call` under libFuzzer.
#![no_main]

fuzz::under_libfuzzer!("grpc_call");
