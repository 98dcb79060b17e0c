//! Reads TOML with errors that name the line.

use serde::de::DeserializeOwned;
use toml::Spanned;

use crate::error::PlanError;

/// Reads `text`; an error names the line and, where the reader knows it, the field.
pub(crate) fn read<T: DeserializeOwned>(text: &str) -> Result<T, PlanError> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_of(text, span.start));
        let what = error.message().trim();
        let what = match key_of(text, line).filter(|key| !what.contains(key)) {
            Some(key) => format!("{key}: {what}"),
            None => what.to_string(),
        };
        PlanError::BadFile { line, what }
    })
}

/// The key that a line sets.
fn key_of(text: &str, line: usize) -> Option<&str> {
    let (key, _) = text.lines().nth(line - 1)?.split_once('=')?;
    let key = key.trim();
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    (!key.is_empty() && key.len() <= 64 && key.chars().all(plain)).then_some(key)
}

/// The line of a byte of `text`, from one.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count()
}

/// The error that a value is wrong.
pub(crate) fn wrong<T>(text: &str, value: &Spanned<T>, what: String) -> PlanError {
    PlanError::BadFile { line: line_of(text, value.span().start), what }
}

/// The value if it is in the range; otherwise an error with its line and `field`.
pub(crate) fn in_range(
    text: &str,
    field: &str,
    value: &Spanned<f64>,
    (min, max): (f64, f64),
) -> Result<f64, PlanError> {
    let number = *value.get_ref();
    match (min..=max).contains(&number) {
        true => Ok(number),
        false => Err(wrong(text, value, format!("{field} {number} is not from {min} to {max}"))),
    }
}

/// Whether a text may be a name: printable, not empty and not long.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty() && !text.chars().any(char::is_control) && text.len() <= 256
}

/// The text if it may be a name: printable, not empty and not long.
pub(crate) fn name(text: &str, field: &str, value: &Spanned<String>) -> Result<String, PlanError> {
    let name = value.get_ref();
    match is_name(name) {
        true => Ok(name.clone()),
        false => {
            let what = format!("{field} {name:?} is not a printable name of at most 256 bytes");
            Err(wrong(text, value, what))
        }
    }
}
