//! Rules about the workspace that the compiler does not know.

mod cycles;
mod edges;
mod lexer;
mod names;
mod width;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use self::names::PublicNames;
use self::words::BannedWords;

/// Longer files have more than one subject.
const LINES_MAX: usize = 1000;

/// Crates whose decisions must not depend on the wall clock.
const CLOCKLESS: [&str; 3] = ["runtime", "planner", "cluster"];

/// Crates whose files must not import each other in large circles.
const WITHOUT_CYCLES: [&str; 4] = ["cuda", "cli", "benchmarks", "cluster"];

/// The only crate that may hold `unsafe` code anywhere.
const UNSAFE_CRATE: &str = "cuda";

/// Files elsewhere: the calls of functions that are compiled for a detected instruction set, and a
/// global allocator that counts and fails, which is no part of the product.
const UNSAFE_FILES: [&str; 2] = ["crates/int8/src/lib.rs", "fuzz/src/allocator.rs"];

/// Folders and files that are read.
const SOURCES: [&str; 12] = [
    "crates",
    "xtask",
    "scripts",
    "tests",
    "fuzz",
    "docs",
    "experiments",
    ".github",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "test",
];

/// The file that names the banned words.
const GLOSSARY: &str = "docs/GLOSSARY.md";

/// Everything that breaks a rule, in words; empty when nothing does.
pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut problems = edges::check(root);
    let glossary = std::fs::read_to_string(root.join(GLOSSARY)).unwrap_or_default();
    let banned = BannedWords::parse(&glossary);
    if banned.is_empty() {
        problems.push(format!("{GLOSSARY} has no table of words that are not used"));
    }
    let mut public_names = PublicNames::default();
    let mut files_by_crate: BTreeMap<String, cycles::Files> = BTreeMap::new();
    for path in source_files(root) {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        problems.extend(check_file(&name, &text));
        // What a program generates, and the declarations of a protocol, have their own layout.
        if !name.ends_with(".proto") && !name.contains("/golden/") {
            problems.extend(width::check(&name, &text));
        }
        if name != GLOSSARY && !name.starts_with("xtask/") {
            problems.extend(banned.check(&name, &text));
        }
        if let Some((crate_name, file)) = library_file(&name) {
            public_names.add(crate_name, &text);
            files_by_crate.entry(crate_name.into()).or_default().insert(file.into(), text);
        }
    }
    problems.extend(public_names.check());
    for crate_name in WITHOUT_CYCLES {
        let files = files_by_crate.remove(crate_name).unwrap_or_default();
        problems.extend(cycles::check(crate_name, &files));
    }
    problems
}

/// `crates/NAME/src/FILE.rs` as `NAME` and `FILE.rs`.
fn library_file(name: &str) -> Option<(&str, &str)> {
    let (crate_name, file) = name.strip_prefix("crates/")?.split_once("/src/")?;
    file.ends_with(".rs").then_some((crate_name, file))
}

fn source_files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = SOURCES.iter().map(|name| root.join(name)).collect();
    while let Some(path) = open.pop() {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let extension = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
        if path.is_dir() && !["target", "corpus", "__pycache__"].contains(&name) {
            open.extend(std::fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()));
        } else if ["rs", "cu", "cuh", "py", "sh", "proto", "md"].contains(&extension)
            || name == "test"
        {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn check_file(name: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let lines = text.lines().count();
    if lines > LINES_MAX && !name.ends_with(".md") {
        problems.push(format!("{name} has {lines} lines, at most {LINES_MAX} are allowed"));
    }
    if !name.ends_with(".rs") || name.starts_with("xtask/") {
        return problems;
    }
    let code: Vec<(usize, &str)> = text
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.split("//").next().unwrap_or_default()))
        .collect();
    let find = |words: &[&str]| {
        code.iter().find(|(_, line)| words.iter().any(|word| contains_word(line, word)))
    };
    if !name.starts_with(&format!("crates/{UNSAFE_CRATE}/"))
        && !UNSAFE_FILES.contains(&name)
        && let Some((line, _)) = find(&["unsafe"])
    {
        problems.push(format!("{name}:{line} is unsafe outside crates/{UNSAFE_CRATE}"));
    }
    let clockless =
        CLOCKLESS.iter().any(|name_of| name.starts_with(&format!("crates/{name_of}/src/")));
    if clockless && let Some((line, _)) = find(&["Instant::now", "SystemTime"]) {
        problems.push(format!("{name}:{line} reads the wall clock; take a base::Clock instead"));
    }
    problems
}

fn contains_word(line: &str, word: &str) -> bool {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| {
        !is_part(line[..at].chars().next_back()) && !is_part(line[at + word.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_keeps_its_rules() {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let problems = check(&root);
        let count = problems.len();
        assert!(problems.is_empty(), "{count} problems:\n{}", problems.join("\n"));
    }

    #[test]
    fn broken_rules_are_found() {
        let one = |name: &str, text: &str| check_file(name, text).len();
        assert_eq!(one("crates/cpu/src/a.rs", "fn f() { unsafe { g() } }"), 1);
        assert_eq!(one("crates/cuda/src/a.rs", "fn f() { unsafe { g() } }"), 0);
        assert_eq!(one("fuzz/src/allocator.rs", "fn f() { unsafe { g() } }"), 0);
        assert_eq!(one("crates/int8/src/lib.rs", "fn f() { unsafe { g() } }"), 0);
        assert_eq!(one("crates/int8/src/x86.rs", "fn f() { unsafe { g() } }"), 1);
        assert_eq!(one("fuzz/src/driver.rs", "fn f() { unsafe { g() } }"), 1);
        assert_eq!(one("crates/cpu/src/a.rs", "// unsafe\nlet unsafe_code = 1;"), 0);
        assert_eq!(one("crates/runtime/src/a.rs", "let t = Instant::now();"), 1);
        assert_eq!(one("crates/cpu/src/a.rs", "let t = Instant::now();"), 0);
        assert_eq!(one("crates/cpu/src/a.rs", &"\n".repeat(1001)), 1);
    }
}
