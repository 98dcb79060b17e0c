//! Lines that are too long to be read side by side.

/// Columns of a line.
const COLUMNS_MAX: usize = 100;

/// Lines of a file that are too long; in Markdown, tables and code blocks are exempt.
pub(crate) fn check(name: &str, source: &str) -> Vec<String> {
    let markdown = name.ends_with(".md");
    let mut in_block = false;
    let mut found = Vec::new();
    for (index, line) in source.lines().enumerate() {
        let fence = line.trim_start().starts_with("```");
        in_block ^= markdown && fence;
        let columns = line.chars().count();
        let exempt = markdown && (in_block || is_exempt(line));
        if columns > COLUMNS_MAX && !exempt {
            found.push(format!("{name}:{}: {columns} columns, at most {COLUMNS_MAX}", index + 1));
        }
    }
    found
}

/// Rows of tables, indented code, and links that no line break can shorten.
fn is_exempt(line: &str) -> bool {
    let text = line.trim_start();
    text.starts_with('|') || line.starts_with("    ") || !text.trim().contains(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_found() {
        let long = "word ".repeat(25);
        assert_eq!(check("a.rs", &long).len(), 1);
        assert_eq!(check("a.md", &long).len(), 1);
        assert_eq!(check("a.md", &format!("| {long} |")).len(), 0);
        assert_eq!(check("a.md", &format!("```\n{long}\n```\n{long}")).len(), 1);
        assert_eq!(check("a.rs", &"x".repeat(100)).len(), 0);
    }
}
