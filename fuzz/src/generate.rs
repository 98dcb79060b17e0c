//! Inputs made from nothing but random numbers: mostly valid, so that they get past the parser.

mod onnx;
mod request;

pub use onnx::{model, model_for_registration};
pub use request::{binary_request, infer_message, json_request};

use base::Random;

use crate::mutate::{one_in, pick};

/// A size as models and requests have them; rarely one that no machine can hold.
fn size(random: &mut Random) -> i64 {
    match random.below(40) {
        0 => 0,
        1 => *pick(random, &[-1, 17, 255, 1000, 4096]),
        2 if one_in(random, 4) => {
            *pick(random, &[1 << 20, 1 << 31, 1 << 40, i64::MAX, i64::MIN, 1 << 62])
        }
        _ => 1 + random.below(4) as i64,
    }
}

/// A shape of few dimensions.
fn shape(random: &mut Random) -> Vec<i64> {
    let rank = *pick(random, &[0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5]);
    (0..rank).map(|_| size(random)).collect()
}

/// Elements of a shape, if they are few.
fn small_count(shape: &[i64]) -> Option<usize> {
    let mut count = 1usize;
    for &size in shape {
        count = count.checked_mul(usize::try_from(size).ok()?)?;
    }
    (count <= 4096).then_some(count)
}
