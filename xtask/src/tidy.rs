//! Rules about the house that the compiler does not know.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

/// Longer files have more than one subject.
const LINES_MAX: usize = 1000;

/// Crates whose decisions must not depend on the wall clock.
const CLOCKLESS: [&str; 3] = ["runtime", "planner", "cluster"];

/// The only crate that may hold `unsafe` code.
const UNSAFE_CRATE: &str = "cuda";

/// Crate to the crates it may use.
type Table = BTreeMap<String, BTreeSet<String>>;

/// Everything that is out of order, in words; empty when nothing is.
pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    match crate_table(root) {
        Err(problem) => problems.push(problem),
        Ok(table) => match metadata(root) {
            Err(problem) => problems.push(problem),
            Ok(metadata) => problems.extend(check_edges(&metadata, &table)),
        },
    }
    problems.extend(check_dependencies_documented(root));
    for path in source_files(root) {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        problems.extend(check_file(&name, &text));
    }
    problems
}

fn metadata(root: &Path) -> Result<Metadata, String> {
    let manifest = root.join("Cargo.toml");
    MetadataCommand::new()
        .manifest_path(&manifest)
        .no_deps()
        .exec()
        .map_err(|err| format!("{}: {err}", manifest.display()))
}

/// The rows `| `crate` | ... | may use |` of the crate table in the architecture document.
fn crate_table(root: &Path) -> Result<Table, String> {
    let path = root.join("docs/ARCHITECTURE.md");
    let text =
        std::fs::read_to_string(&path).map_err(|err| format!("{}: {err}", path.display()))?;
    let table = parse_table(&text);
    if table.is_empty() {
        return Err(format!("{}: there is no crate table", path.display()));
    }
    Ok(table)
}

fn parse_table(text: &str) -> Table {
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let [name, _, uses] = cells[..] else { return None };
        let name = name.strip_prefix('`')?.strip_suffix('`')?;
        let uses = uses.split_whitespace().filter(|word| *word != "-").map(str::to_string);
        Some((name.to_string(), uses.collect()))
    };
    text.lines().filter(|line| line.starts_with("| `")).filter_map(row).collect()
}

fn check_edges(metadata: &Metadata, table: &Table) -> Vec<String> {
    let mut problems = Vec::new();
    let house: BTreeSet<&str> = metadata.packages.iter().map(|p| p.name.as_str()).collect();
    for package in &metadata.packages {
        let name = package.name.as_str();
        if name == "xtask" {
            continue;
        }
        let Some(allowed) = table.get(name) else {
            problems.push(format!("crate {name} is not in the crate table"));
            continue;
        };
        for dependency in &package.dependencies {
            let other = dependency.name.as_str();
            let is_ours = house.contains(other) && other != name;
            let in_tests = dependency.kind == DependencyKind::Development;
            let may = allowed.contains(other)
                || allowed.contains("all")
                || (in_tests && allowed.contains(&format!("{other}(tests)")));
            if is_ours && !may {
                let kind = if in_tests { "tests use" } else { "uses" };
                problems
                    .push(format!("crate {name} {kind} {other}, which the table does not allow"));
            }
        }
        let manifest = std::fs::read_to_string(&package.manifest_path).unwrap_or_default();
        if name != UNSAFE_CRATE && !manifest.contains("[lints]\nworkspace = true") {
            problems.push(format!("crate {name} does not take the workspace's lints"));
        }
    }
    problems
}

/// Each external dependency of the workspace has a line that says what for and why this one.
fn check_dependencies_documented(root: &Path) -> Vec<String> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    undocumented(&read("Cargo.toml"), &read("docs/DEPENDENCIES.md"))
}

fn undocumented(manifest: &str, documented: &str) -> Vec<String> {
    let section = manifest.split("[workspace.dependencies]").nth(1).unwrap_or_default();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    lines
        .filter(|line| !line.contains("path = \"crates/"))
        .filter_map(|line| line.split_once(" = "))
        .map(|(name, _)| name.trim())
        .filter(|name| !documented.contains(&format!("`{name}`")))
        .map(|name| format!("dependency {name} has no line in docs/DEPENDENCIES.md"))
        .collect()
}

fn source_files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = ["crates", "xtask", "scripts", "tests", "fuzz"]
        .iter()
        .map(|name| root.join(name))
        .collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let extension = path.extension().and_then(|ext| ext.to_str()).unwrap_or_default();
            if path.is_dir() && entry.file_name() != "target" && entry.file_name() != "corpus" {
                folders.push(path);
            } else if ["rs", "cu", "cuh", "py", "sh", "proto"].contains(&extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn check_file(name: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let lines = text.lines().count();
    if lines > LINES_MAX {
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
    fn the_house_is_in_order() {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let problems = check(&root);
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    #[test]
    fn tables_are_read() {
        let table = parse_table(
            "| crate | holds | may use |\n|---|---|---|\n| `a` | x | - |\n| `b` | y | a |",
        );
        assert_eq!(table["a"], BTreeSet::new());
        assert_eq!(table["b"], BTreeSet::from(["a".to_string()]));
    }

    #[test]
    fn forbidden_edges_are_found() {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let metadata = metadata(&root).unwrap();
        let mut table = crate_table(&root).unwrap();
        table.get_mut("graph").unwrap().clear();
        let problems = check_edges(&metadata, &table);
        assert_eq!(problems, ["crate graph uses model, which the table does not allow"]);
    }

    #[test]
    fn broken_rules_are_found() {
        let one = |name: &str, text: &str| check_file(name, text).len();
        assert_eq!(one("crates/cpu/src/a.rs", "fn f() { unsafe { g() } }"), 1);
        assert_eq!(one("crates/cuda/src/a.rs", "fn f() { unsafe { g() } }"), 0);
        assert_eq!(one("crates/cpu/src/a.rs", "// unsafe\nlet unsafe_code = 1;"), 0);
        assert_eq!(one("crates/runtime/src/a.rs", "let t = Instant::now();"), 1);
        assert_eq!(one("crates/cpu/src/a.rs", "let t = Instant::now();"), 0);
        assert_eq!(one("crates/cpu/src/a.rs", &"\n".repeat(1001)), 1);
        assert_eq!(undocumented("[workspace.dependencies]\nserde = \"1\"\n[x]", "").len(), 1);
        assert_eq!(
            undocumented("[workspace.dependencies]\nserde = \"1\"\n[x]", "| `serde` |").len(),
            0
        );
    }
}
