//! `plan` under libFuzzer.
#![no_main]

fuzz::under_libfuzzer!("plan");
