//! Operators on strings.

use model::op::{LetterCase, Op, Text, TfIdf, TfIdfMode, Tokenize};
use model::{DataType, Tensor, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "StringConcat" => cx.emit_all(Op::Text(Text::Join), 2),
        "StringSplit" => {
            let delimiter = cx.attributes.string("delimiter")?.unwrap_or_default();
            let max_splits = match cx.attributes.int("maxsplit")? {
                Some(most) => usize::try_from(most).ok(),
                None => None,
            };
            cx.emit_all(Op::Text(Text::Split { delimiter, max_splits }), 1)
        }
        "RegexFullMatch" => match cx.attributes.string("pattern")? {
            Some(pattern) => cx.emit_all(Op::Text(Text::Match { pattern }), 1),
            None => invalid("attribute 'pattern' is missing"),
        },
        "StringNormalizer" => normalize(cx),
        "TfIdfVectorizer" => tf_idf(cx),
        _ => Ok(false),
    }
}

/// A list of strings in an attribute.
pub(super) fn texts(cx: &Context, name: &str) -> Result<Vec<String>, MapError> {
    let one = |bytes: &bytes::Bytes| match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_string()),
        Err(_) => invalid(format!("attribute '{name}' is not text")),
    };
    cx.attributes.strings(name).unwrap_or_default().iter().map(one).collect()
}

fn normalize(cx: &mut Context) -> Mapped {
    // Letters change their case in the same way everywhere.
    cx.attributes.ignore(&["locale"]);
    let case = match cx.attributes.string("case_change_action")?.as_deref() {
        None | Some("NONE") => None,
        Some("LOWER") => Some(LetterCase::Lower),
        Some("UPPER") => Some(LetterCase::Upper),
        Some(other) => return unsupported(format!("case_change_action '{other}'")),
    };
    let case_sensitive = cx.attributes.flag("is_case_sensitive", false)?;
    let stopwords = texts(cx, "stopwords")?;
    cx.emit_all(Op::Text(Text::Normalize { case, case_sensitive, stopwords }), 1)
}

/// ONNX Runtime's own operator.
pub(super) fn tokenizer(cx: &mut Context) -> Mapped {
    let mark = cx.attributes.flag("mark", false)?;
    let pad = cx.attributes.string("pad_value")?.unwrap_or_default();
    let separators = texts(cx, "separators")?;
    let expression = cx.attributes.string("tokenexp")?;
    let min_chars = cx.attributes.size_or("mincharnum", 1)?;
    let tokenize = Tokenize { mark, pad, separators, expression, min_chars };
    cx.emit_all(Op::Text(Text::Tokenize(tokenize)), 1)
}

fn tf_idf(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    let mode = match cx.attributes.string("mode")?.as_deref() {
        Some("TF") => TfIdfMode::Count,
        Some("IDF") => TfIdfMode::Weight,
        Some("TFIDF") => TfIdfMode::Product,
        other => return unsupported(format!("mode {other:?}")),
    };
    let a = &cx.attributes;
    let min_length = a.size_or("min_gram_length", 1)?;
    let max_length = a.size_or("max_gram_length", 1)?;
    let max_skip = a.size_or("max_skip_count", 0)?;
    let counts = a.ints("ngram_counts").unwrap_or_default();
    let indexes = a.ints("ngram_indexes").unwrap_or_default();
    let columns = match indexes.iter().max() {
        Some(last) if *last >= 0 => *last as usize + 1,
        _ => return invalid("no columns"),
    };
    let pool = match (a.strings("pool_strings"), a.ints("pool_int64s")) {
        (Some(pool), None) => Tensor::from_strings(vec![pool.len()], pool.to_vec()),
        (None, Some(pool)) => Tensor::from_vec(vec![pool.len()], pool.to_vec()),
        _ => return invalid("neither a pool of strings nor one of integers"),
    };
    let Ok(pool) = pool else { return invalid("a pool that no tensor holds") };
    let weights = a.floats("weights").map(<[f32]>::to_vec);
    let (counts, indexes) = (cx.ints(counts)?, cx.ints(indexes)?);
    let pool = cx.constant(pool);
    let x: ValueId = match (cx.dtype(x), cx.dtype(pool)) {
        (DataType::I32, DataType::I64) => {
            cx.part(Op::Cast(model::op::Cast { to: DataType::I64 }), &[x])?
        }
        (own, wanted) if own == wanted => x,
        (own, wanted) => return invalid(format!("{own} counted in a pool of {wanted}")),
    };
    let mut inputs = vec![Some(x), Some(counts), Some(indexes), Some(pool)];
    if let Some(weights) = weights {
        match Tensor::from_vec(vec![weights.len()], weights) {
            Ok(weights) => inputs.push(Some(cx.constant(weights))),
            Err(error) => return invalid(error.to_string()),
        }
    }
    let tf_idf = TfIdf { mode, min_length, max_length, max_skip, columns };
    cx.emit(Op::Text(Text::TfIdf(tf_idf)), inputs)
}
