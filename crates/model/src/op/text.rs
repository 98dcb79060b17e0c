//! Operators on strings.

use serde::{Deserialize, Serialize};

/// Operators on strings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Text {
    /// `a, b`, broadcast: one string after the other.
    Join,
    /// `x`; outputs the parts of each string along a new dimension, and their number.
    Split {
        /// What separates parts; runs of white space when empty.
        delimiter: String,
        /// The most separations of one string.
        max_splits: Option<usize>,
    },
    /// `x`: whether each string matches as a whole; boolean.
    Match {
        /// The regular expression.
        pattern: String,
    },
    /// `x`, one or two dimensions: strings in another case, some removed.
    Normalize {
        /// The case of the result.
        case: Option<LetterCase>,
        /// Whether case matters for the strings that are removed.
        case_sensitive: bool,
        /// The strings that are removed.
        stopwords: Vec<String>,
    },
    /// `x`, one or two dimensions: the tokens of each string along a new dimension, padded.
    Tokenize(Tokenize),
    /// `x, counts, columns, pool, [weights]`: how often each sequence of the pool occurs, `F32`.
    TfIdf(TfIdf),
}

/// A case of letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum LetterCase {
    Lower,
    Upper,
}

/// How strings become tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tokenize {
    /// Every string begins and ends with a mark.
    pub mark: bool,
    /// Fills rows up.
    pub pad: String,
    /// What separates tokens; each character is a token when there is one empty separator.
    pub separators: Vec<String>,
    /// What tokens look like, instead of separators.
    pub expression: Option<String>,
    /// Shorter tokens are left out.
    pub min_chars: usize,
}

/// How sequences are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TfIdf {
    /// What the result is.
    pub mode: TfIdfMode,
    /// The shortest sequences.
    pub min_length: usize,
    /// The longest sequences.
    pub max_length: usize,
    /// The most elements left out between two of a sequence.
    pub max_skip: usize,
    /// Columns of the output.
    pub columns: usize,
}

/// What counts become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TfIdfMode {
    /// The count.
    Count,
    /// The weight of what occurs.
    Weight,
    /// The count times the weight.
    Product,
}
