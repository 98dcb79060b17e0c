//! The targets under libFuzzer, with its mutations and ours.

use std::sync::OnceLock;

use base::Random;

use crate::mutate;
use crate::targets::{self, Target};

/// The inputs of the corpus, for edits that copy parts of other inputs.
static CORPUS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();

/// Runs `target` on one input; what breaks a rule panics.
pub fn run(target: &Target, data: &[u8]) {
    targets::execute(target, data);
}

/// Edits the first `size` bytes of `data`, which has room for more, and returns the new size.
pub fn edit(target: &Target, data: &mut [u8], size: usize, max: usize, seed: u32) -> usize {
    let mut random = Random::new(u64::from(seed));
    let mut bytes = match target.generate {
        Some(generate) if mutate::one_in(&mut random, 32) => generate(&mut random),
        _ => data[..size].to_vec(),
    };
    let corpus = CORPUS.get_or_init(|| target.corpus());
    let max = max.min(data.len());
    mutate::mutate(&mut random, target.format, target.words, corpus, max, &mut bytes);
    data[..bytes.len()].copy_from_slice(&bytes);
    bytes.len()
}

/// Whether libFuzzer's own mutations are used for this seed. They follow compared values.
pub fn is_libfuzzers_turn(seed: u32) -> bool {
    seed % 2 == 0
}

/// The `main` of a target.
#[macro_export]
macro_rules! under_libfuzzer {
    ($name:literal) => {
        static TARGET: std::sync::LazyLock<&'static fuzz::targets::Target> =
            std::sync::LazyLock::new(|| {
                fuzz::targets::find($name).expect("the target is in the table")
            });

        libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::libfuzzer::run(&TARGET, data));

        libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
            match fuzz::libfuzzer::is_libfuzzers_turn(seed) {
                true => libfuzzer_sys::fuzzer_mutate(data, size, max_size),
                false => fuzz::libfuzzer::edit(&TARGET, data, size, max_size, seed),
            }
        });
    };
}
