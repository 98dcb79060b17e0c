//! Text from outside as a part of messages and log lines.

use std::borrow::Cow;

/// Length of an excerpt in bytes.
const EXCERPT: usize = 80;

/// A text that a client or a file chose, for a message: short, and in one line.
pub fn excerpt(text: &str) -> Cow<'_, str> {
    one_line(text, EXCERPT)
}

/// `text` in one line of about `most` bytes: control characters are escaped, and what is too long
/// lacks its middle. Its end often says what would help.
pub fn one_line(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return escaped(text);
    }
    let (start, end) = (text.floor_char_boundary(most - most / 4), text.len() - most / 4);
    let end = text.ceil_char_boundary(end);
    Cow::Owned(format!("{} ... {}", escaped(&text[..start]), escaped(&text[end..])))
}

/// Control characters would end a line or move a cursor, and others turn what follows around.
fn escaped(text: &str) -> Cow<'_, str> {
    let harmful =
        |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(harmful) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match harmful(c) {
            true => safe.extend(c.escape_default()),
            false => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_become_short_lines() {
        assert_eq!(excerpt("a 'b' \u{e9}"), "a 'b' \u{e9}");
        assert_eq!(excerpt("a\r\n\u{1b}[2J\u{202e}"), "a\\r\\n\\u{1b}[2J\\u{202e}");
        let long = format!("start{}end", "\u{20ac}".repeat(100_000));
        let cut = excerpt(&long);
        assert!(cut.starts_with("start\u{20ac}") && cut.ends_with("\u{20ac}end"), "{cut}");
        assert!(cut.len() <= EXCERPT + 5, "{}", cut.len());
        for most in 0..12 {
            assert!(one_line("\u{20ac}\n\u{20ac}\u{20ac}", most).len() <= 20);
        }
    }
}
