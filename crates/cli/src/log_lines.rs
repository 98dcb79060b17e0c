//! Log lines as they may be written: one line per event, without control characters, and not
//! endlessly long. Names come from models and requests, which may contain anything.

use std::io::{self, Write};

use assembly::progress;
use tracing_subscriber::fmt::MakeWriter;

/// Longest line in bytes.
const MAX_LINE: usize = 16 << 10;

/// Writes to standard error.
#[derive(Clone, Copy, Default)]
pub(crate) struct LogLines {
    /// Whether escape sequences for colours may be written.
    pub(crate) colours: bool,
}

impl MakeWriter<'_> for LogLines {
    type Writer = EventWriter<io::Stderr>;

    fn make_writer(&self) -> Self::Writer {
        EventWriter { line: Vec::new(), colours: self.colours, target: io::stderr() }
    }
}

/// Collects one event and writes it as one line when dropped.
pub(crate) struct EventWriter<W: Write> {
    line: Vec<u8>,
    colours: bool,
    target: W,
}

impl<W: Write> Write for EventWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // What exceeds the longest line is not even collected.
        let room = (MAX_LINE + 1).saturating_sub(self.line.len());
        self.line.extend_from_slice(&bytes[..bytes.len().min(room)]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<W: Write> Drop for EventWriter<W> {
    fn drop(&mut self) {
        if !self.line.is_empty() {
            // There is no other place to report that standard error is closed.
            let line = cleaned(&self.line, self.colours);
            let _ = progress::above(|| self.target.write_all(&line));
        }
    }
}

/// `line` with a newline at its end only, escaped control characters and at most [`MAX_LINE`]
/// bytes of it.
fn cleaned(line: &[u8], colours: bool) -> Vec<u8> {
    let content = line.strip_suffix(b"\n").unwrap_or(line);
    let cut = content.len() > MAX_LINE;
    let text = String::from_utf8_lossy(&content[..content.len().min(MAX_LINE)]);
    let mut clean = String::with_capacity(text.len() + 1);
    let mut rest = text.char_indices().peekable();
    while let Some((at, character)) = rest.next() {
        if colours && character == '\u{1b}' {
            // The formatter's own colours: a bracket, digits, an m.
            let sequence = colour_length(&text[at..]);
            clean.push_str(&text[at..at + sequence]);
            while rest.peek().is_some_and(|(next, _)| *next < at + sequence) {
                rest.next();
            }
            if sequence > 0 {
                continue;
            }
        }
        match character {
            '\t' => clean.push('\t'),
            // Also the line separators that terminals and log readers break lines at.
            '\u{2028}' | '\u{2029}' => clean.extend(character.escape_unicode()),
            _ if character.is_control() => clean.extend(character.escape_default()),
            _ => clean.push(character),
        }
    }
    if cut {
        clean.push_str("... (cut)");
    }
    clean.push('\n');
    clean.into_bytes()
}

/// Length of the colour sequence that `text` begins with; 0 if it is something else.
fn colour_length(text: &str) -> usize {
    let Some(codes) = text.strip_prefix("\u{1b}[") else { return 0 };
    let digits = codes.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b';').count();
    if codes.as_bytes().get(digits) == Some(&b'm') { digits + 3 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(parts: &[&[u8]]) -> String {
        let mut target = Vec::new();
        let mut writer = EventWriter { line: Vec::new(), colours: false, target: &mut target };
        parts.iter().for_each(|part| writer.write_all(part).unwrap());
        drop(writer);
        String::from_utf8(target).unwrap()
    }

    #[test]
    fn an_event_is_one_line() {
        assert_eq!(written(&[b"INFO a", b" b\n"]), "INFO a b\n");
        let forged = "node 'x\n2026-01-01 ERROR forged\r\u{1b}[2Jy' \u{2028}z\u{85}\n";
        let line = written(&[forged.as_bytes()]);
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(line.contains("x\\n2026-01-01 ERROR forged\\r\\u{1b}[2Jy"), "{line}");
        assert!(!line.chars().any(|c| c.is_control() && c != '\n'), "{line}");
        assert_eq!(written(&[]), "");
    }

    #[test]
    fn long_events_are_cut() {
        let long = "\u{e4}".repeat(4 << 20);
        let line = written(&[long.as_bytes(), b"tail\n"]);
        assert!(line.len() < MAX_LINE + 100, "{}", line.len());
        assert!(line.ends_with("... (cut)\n"));
        let fits = "a".repeat(MAX_LINE);
        assert_eq!(written(&[fits.as_bytes(), b"\n"]), format!("{fits}\n"));
    }

    #[test]
    fn the_formatters_colours_stay() {
        let line = cleaned(b"\x1b[32m INFO\x1b[0m x\x1b]0;title\x07\n", true);
        assert_eq!(line, b"\x1b[32m INFO\x1b[0m x\\u{1b}]0;title\\u{7}\n");
        assert_eq!(cleaned(b"\x1b[32mx\n", false), b"\\u{1b}[32mx\n");
    }
}
