//! Finds the lines of values in JSON, for messages about values that the reader accepts.

/// A step from a value to one inside it.
#[derive(Clone, Copy, Debug)]
pub enum JsonStep<'a> {
    /// The value of a key.
    Key(&'a str),
    /// An element of a list.
    Index(usize),
}

/// The line, from one, of the value at `path` in JSON that was read; of the last value on the way
/// if there is none.
pub fn line_of(text: &str, path: &[JsonStep<'_>]) -> usize {
    let text = text.as_bytes();
    let mut at = after_space(text, 0);
    for step in path {
        match inside(text, at, *step) {
            Some(next) => at = next,
            None => break,
        }
    }
    1 + text.iter().take(at).filter(|byte| **byte == b'\n').count()
}

/// `text` without the mark that some editors put at the start.
pub(crate) fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

fn after_space(text: &[u8], from: usize) -> usize {
    let space = |byte: &&u8| byte.is_ascii_whitespace();
    from + text[from.min(text.len())..].iter().take_while(space).count()
}

/// Where the value that `step` leads to begins.
fn inside(text: &[u8], from: usize, step: JsonStep<'_>) -> Option<usize> {
    let opening = match step {
        JsonStep::Key(_) => b'{',
        JsonStep::Index(_) => b'[',
    };
    if text.get(from) != Some(&opening) {
        return None;
    }
    let mut at = from + 1;
    let mut number = 0;
    loop {
        at = after_space(text, at);
        let found = match step {
            JsonStep::Key(wanted) => {
                let end = end_of_value(text, at);
                let key = serde_json::from_slice::<String>(text.get(at..end)?).ok()?;
                at = after_space(text, after_space(text, end) + 1);
                key == wanted
            }
            JsonStep::Index(wanted) => number == wanted,
        };
        if found {
            return (at < text.len()).then_some(at);
        }
        number += 1;
        at = after_space(text, end_of_value(text, at));
        if text.get(at) != Some(&b',') {
            return None;
        }
        at += 1;
    }
}

/// The byte after the value that begins at `from`.
fn end_of_value(text: &[u8], from: usize) -> usize {
    let (mut depth, mut string, mut escaped) = (0usize, false, false);
    for (at, byte) in text.iter().enumerate().skip(from) {
        if string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' if depth == 0 => return at + 1,
                b'"' => string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => string = true,
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 0 => return at,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            b',' if depth == 0 => return at,
            _ if depth == 0 && byte.is_ascii_whitespace() => return at,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::JsonStep::{Index, Key};
    use super::line_of;

    #[test]
    fn values_are_found_by_key_and_index() {
        let text = "{\n\"[\\\"{\": [1,\n{\"x\": \"}\"}], \"plan\" : \n[ {}, {\n\"start\":\n7} ]\n}";
        for (path, line) in [
            (&[][..], 1),
            (&[Key("[\"{")], 2),
            (&[Key("[\"{"), Index(1)], 3),
            (&[Key("plan")], 4),
            (&[Key("plan"), Index(1), Key("start")], 6),
            // The last value that is there.
            (&[Key("plan"), Index(1), Key("end")], 4),
            (&[Key("plan"), Index(9)], 4),
            (&[Index(0)], 1),
        ] {
            assert_eq!(line_of(text, path), line, "{path:?}");
        }
        // What is no JSON ends, too.
        for broken in ["", "{", "{\"a\"", "{\"a\":", "[1,", "{\"a\" 1}"] {
            line_of(broken, &[Key("a"), Index(3)]);
            line_of(broken, &[Index(3)]);
        }
    }
}
