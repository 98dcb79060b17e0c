//! Splits a source file into code and text, line by line.

/// What a piece of a source file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceKind {
    /// Identifiers, keywords and punctuation.
    Code,
    /// A comment or the inside of a string.
    Text,
}

/// A part of one line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    /// Its line, counted from 1.
    pub(crate) line: usize,
    /// What it is.
    pub(crate) kind: PieceKind,
    /// Its characters.
    pub(crate) text: &'a str,
}

/// Where the lexer is between two characters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Code,
    LineComment,
    /// Nested this deep.
    BlockComment(u32),
    String,
    /// Closed by a quote and this many `#`.
    RawString(usize),
}

impl State {
    fn kind(self) -> PieceKind {
        if self == State::Code { PieceKind::Code } else { PieceKind::Text }
    }
}

/// The pieces of a Rust, CUDA or protobuf file.
pub(crate) fn pieces(source: &str) -> Vec<Piece<'_>> {
    let mut found = Vec::new();
    let (mut state, mut line, mut begin, mut at) = (State::Code, 1, 0, 0);
    let mut end_piece = |state: State, line: usize, begin: usize, end: usize| {
        if let Some(text) = source.get(begin..end).filter(|text| !text.trim().is_empty()) {
            found.push(Piece { line, kind: state.kind(), text });
        }
    };
    while at < source.len() {
        let rest = &source[at..];
        let (next, width) = transition(state, rest);
        let ends_line = rest.starts_with('\n');
        if ends_line || next != state {
            let end = if next == State::Code { at } else { at + width };
            end_piece(state, line, begin, if state == State::Code { at } else { end });
            begin = at + width;
        }
        line += usize::from(ends_line);
        (state, at) = (next, at + width);
    }
    end_piece(state, line, begin, source.len());
    found
}

/// The state behind the first characters of `rest`, and how many bytes they are.
fn transition(state: State, rest: &str) -> (State, usize) {
    let width = rest.chars().next().map_or(1, char::len_utf8);
    match state {
        State::Code => code_transition(rest, width),
        State::LineComment if rest.starts_with('\n') => (State::Code, 1),
        State::BlockComment(depth) if rest.starts_with("*/") => {
            (if depth == 1 { State::Code } else { State::BlockComment(depth - 1) }, 2)
        }
        State::BlockComment(depth) if rest.starts_with("/*") => (State::BlockComment(depth + 1), 2),
        State::String if rest.starts_with('\\') => {
            let escaped = rest[1..].chars().next().filter(|next| *next != '\n');
            (State::String, 1 + escaped.map_or(0, char::len_utf8))
        }
        State::String if rest.starts_with('"') => (State::Code, 1),
        State::RawString(hashes) if closes_raw(rest, hashes) => (State::Code, 1 + hashes),
        same => (same, width),
    }
}

fn code_transition(rest: &str, width: usize) -> (State, usize) {
    if rest.starts_with("//") {
        return (State::LineComment, 2);
    }
    if rest.starts_with("/*") {
        return (State::BlockComment(1), 2);
    }
    if rest.starts_with('"') {
        return (State::String, 1);
    }
    if let Some(hashes) = opens_raw(rest) {
        return (State::RawString(hashes), 2 + hashes);
    }
    // A character literal may hold a quote; a lifetime has no closing one.
    let literal = rest.strip_prefix('\'').and_then(|inner| {
        let escaped = inner.starts_with('\\');
        let body = inner.chars().take(if escaped { 2 } else { 1 }).map(char::len_utf8).sum();
        inner.get(body..)?.starts_with('\'').then_some(body + 2)
    });
    (State::Code, literal.unwrap_or(width))
}

fn opens_raw(rest: &str) -> Option<usize> {
    let after = rest.strip_prefix('r')?;
    let hashes = after.bytes().take_while(|byte| *byte == b'#').count();
    after[hashes..].starts_with('"').then_some(hashes)
}

fn closes_raw(rest: &str, hashes: usize) -> bool {
    rest.strip_prefix('"')
        .is_some_and(|after| after.bytes().take_while(|byte| *byte == b'#').count() >= hashes)
}

/// `name` in its parts, lower case: `EpochCounter` and `epoch_counter` have the same two.
pub(crate) fn name_parts(name: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = String::new();
    let mut previous_is_lower = false;
    for character in name.chars() {
        let starts = character.is_uppercase() && previous_is_lower;
        if (starts || !character.is_alphanumeric()) && !part.is_empty() {
            parts.push(std::mem::take(&mut part));
        }
        if character.is_alphanumeric() {
            part.extend(character.to_lowercase());
        }
        previous_is_lower = character.is_lowercase() || character.is_ascii_digit();
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str, kind: PieceKind) -> Vec<&str> {
        let matching = pieces(source).into_iter().filter(|piece| piece.kind == kind);
        matching.map(|piece| piece.text.trim()).collect()
    }

    #[test]
    fn comments_and_strings_are_text() {
        let source = "let a = \"one\"; // two\n/* three */ let b = r#\"four \"x\"\"#;";
        let words: Vec<String> =
            texts(source, PieceKind::Text).iter().flat_map(|text| name_parts(text)).collect();
        assert_eq!(words, ["one", "two", "three", "four", "x"]);
        let code = texts(source, PieceKind::Code).join(" ");
        assert!(code.contains("let a =") && code.contains("let b ="), "{code}");
        assert!(!code.contains("four"), "{code}");
    }

    #[test]
    fn quotes_in_characters_and_lifetimes_open_no_string() {
        let source = "fn f<'a>(x: &'a str) { g('\"', '\\''); } // end";
        assert_eq!(texts(source, PieceKind::Text), ["end"]);
    }

    #[test]
    fn lines_are_counted() {
        let found = pieces("a\n\n// b\nc");
        let lines: Vec<(usize, &str)> =
            found.iter().map(|piece| (piece.line, piece.text.trim())).collect();
        assert_eq!(lines, [(1, "a"), (3, "b"), (4, "c")]);
    }

    #[test]
    fn names_have_parts() {
        assert_eq!(name_parts("EpochCounter"), ["epoch", "counter"]);
        assert_eq!(name_parts("best_effort_SMS2x"), ["best", "effort", "sms2x"]);
    }
}
