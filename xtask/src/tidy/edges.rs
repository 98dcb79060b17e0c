//! Edges between crates, and what each crate must declare.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

use super::UNSAFE_CRATE;

/// Packages outside of the table: nothing of the product uses them. They may use every crate, and
/// `fuzz` has lints of its own.
const TOOLS: [&str; 2] = ["fuzz", "xtask"];

/// Crates with `unsafe` code, which the lints of the workspace forbid.
const OWN_LINTS: [&str; 2] = [UNSAFE_CRATE, "int8"];

/// Crate to the crates it may use.
type Table = BTreeMap<String, BTreeSet<String>>;

/// Edges that the crate table does not allow, and dependencies without a line of documentation.
pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut problems = check_dependencies_documented(root);
    match crate_table(root).and_then(|table| Ok((table, metadata(root)?))) {
        Err(problem) => problems.push(problem),
        Ok((table, metadata)) => problems.extend(check_edges(&metadata, &table)),
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
    let members: BTreeSet<&str> = metadata.packages.iter().map(|p| p.name.as_str()).collect();
    for package in &metadata.packages {
        let name = package.name.as_str();
        if TOOLS.contains(&name) {
            continue;
        }
        let Some(allowed) = table.get(name) else {
            problems.push(format!("crate {name} is not in the crate table"));
            continue;
        };
        for dependency in &package.dependencies {
            let other = dependency.name.as_str();
            let is_member = members.contains(other) && other != name;
            let in_tests = dependency.kind == DependencyKind::Development;
            let may = allowed.contains(other)
                || allowed.contains("all")
                || (in_tests && allowed.contains(&format!("{other}(tests)")));
            if is_member && !may {
                let kind = if in_tests { "tests use" } else { "uses" };
                problems
                    .push(format!("crate {name} {kind} {other}, which the table does not allow"));
            }
        }
        let manifest = std::fs::read_to_string(&package.manifest_path).unwrap_or_default();
        if !OWN_LINTS.contains(&name) && !manifest.contains("[lints]\nworkspace = true") {
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn root() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
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
    fn upward_edges_are_found() {
        let metadata = metadata(&root()).unwrap();
        let mut table = crate_table(&root()).unwrap();
        table.get_mut("graph").unwrap().clear();
        let problems = check_edges(&metadata, &table);
        assert!(
            problems.contains(&"crate graph uses model, which the table does not allow".into()),
            "{problems:?}"
        );
    }

    #[test]
    fn undocumented_dependencies_are_found() {
        let manifest = "[workspace.dependencies]\nserde = \"1\"\n[x]";
        assert_eq!(undocumented(manifest, "").len(), 1);
        assert_eq!(undocumented(manifest, "| `serde` |").len(), 0);
    }
}
