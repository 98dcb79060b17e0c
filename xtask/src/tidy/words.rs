//! Words that the glossary bans.

use std::collections::BTreeMap;

use super::lexer::{PieceKind, name_parts, pieces};

/// Where a word is banned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    Code,
    Text,
    All,
}

impl Scope {
    fn covers(self, kind: PieceKind) -> bool {
        match self {
            Scope::All => true,
            Scope::Code => kind == PieceKind::Code,
            Scope::Text => kind == PieceKind::Text,
        }
    }
}

/// The words of the glossary's last table, each with what to use instead.
#[derive(Debug)]
pub(crate) struct BannedWords(BTreeMap<String, (Scope, String)>);

impl BannedWords {
    /// Reads the rows `| word | code, text or all | use instead |` behind "## Words not used".
    pub(crate) fn parse(glossary: &str) -> BannedWords {
        let section = glossary.split("\n## Words not used").nth(1).unwrap_or_default();
        let row = |line: &str| {
            let cells: Vec<&str> =
                line.trim().trim_matches('|').split('|').map(str::trim).collect();
            let [word, scope, instead] = cells[..] else { return None };
            let scope = match scope {
                "code" => Scope::Code,
                "text" => Scope::Text,
                "all" => Scope::All,
                _ => return None,
            };
            Some((word.to_lowercase(), (scope, instead.to_string())))
        };
        BannedWords(section.lines().filter_map(row).collect())
    }

    /// Whether the glossary bans nothing, which means that it could not be read.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Uses of banned words in a file.
    pub(crate) fn check(&self, name: &str, source: &str) -> Vec<String> {
        let is_code = [".rs", ".cu", ".cuh", ".proto"].iter().any(|end| name.ends_with(end));
        if is_code {
            return pieces(source)
                .iter()
                .flat_map(|piece| self.check_line(name, piece.line, piece.kind, piece.text))
                .collect();
        }
        // The grammar of other files is not known here; what they say is text.
        let lines = source.lines().enumerate();
        lines
            .flat_map(|(index, line)| self.check_line(name, index + 1, PieceKind::Text, line))
            .collect()
    }

    fn check_line(&self, name: &str, line: usize, kind: PieceKind, text: &str) -> Vec<String> {
        let banned = |word: &String| {
            let (word, (scope, instead)) = self
                .0
                .get_key_value(word)
                .or_else(|| self.0.get_key_value(word.strip_suffix('s')?))?;
            scope
                .covers(kind)
                .then(|| format!("{name}:{line}: the glossary bans '{word}'; use: {instead}"))
        };
        name_parts(text).iter().filter_map(banned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GLOSSARY: &str = "# Glossary\n\n| seat | all | not a ban |\n\n## Words not used\n\n\
        | word | where | use instead |\n|---|---|---|\n| berth | all | pool slot |\n\
        | cargo | code | batch inputs |\n";

    fn check(name: &str, source: &str) -> usize {
        BannedWords::parse(GLOSSARY).check(name, source).len()
    }

    #[test]
    fn banned_words_are_found_in_every_form() {
        assert_eq!(check("a.rs", "struct FreeBerth; // a berth"), 2);
        assert_eq!(check("a.rs", "let free_berths = \"Berths\";"), 2);
        assert_eq!(check("a.md", "A berth is taken."), 1);
        assert_eq!(check("a.py", "berth = 1"), 1);
        assert_eq!(check("a.rs", "let seat = 1;"), 0);
    }

    #[test]
    fn scopes_are_kept() {
        assert_eq!(check("a.rs", "// run cargo\nlet x = \"cargo\";"), 0);
        assert_eq!(check("a.rs", "let cargo = 1;"), 1);
        assert_eq!(check("a.sh", "cargo test"), 0);
    }

    #[test]
    fn the_message_says_what_to_use() {
        let found = BannedWords::parse(GLOSSARY).check("a.rs", "\nlet berth = 1;");
        assert_eq!(found, ["a.rs:2: the glossary bans 'berth'; use: pool slot"]);
    }
}
