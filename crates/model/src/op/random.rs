//! Random numbers.

use serde::{Deserialize, Serialize};

use crate::DataType;

/// Random elements. One operand: the shape as `I64`, or what the distribution reads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Draw {
    /// How elements are distributed.
    pub distribution: Distribution,
    /// Element type of the output.
    pub dtype: DataType,
    /// The same seed gives the same elements in every run; without one, runs differ.
    pub seed: Option<u32>,
}

/// How random elements are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Distribution {
    /// `shape`: between the two.
    Uniform {
        /// The least number.
        low: f32,
        /// No number reaches it.
        high: f32,
    },
    /// `shape`.
    Normal {
        /// The mean.
        mean: f32,
        /// The standard deviation.
        scale: f32,
    },
    /// `x`: one with probability `x`, else zero.
    Bernoulli,
    /// `x`, rows of logarithms of weights: drawn columns.
    Multinomial {
        /// Columns drawn per row.
        count: usize,
    },
}
