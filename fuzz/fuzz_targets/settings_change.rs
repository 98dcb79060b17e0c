//! `settings_change` under libFuzzer.
#![no_main]

fuzz::under_libfuzzer!("settings_change");
