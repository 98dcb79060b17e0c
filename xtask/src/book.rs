//! The book: its links, and building it with mdBook.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// The version of mdBook that builds it.
const MDBOOK_VERSION: &str = "0.5.4";

/// Where the book's pages are.
const PAGES: &str = "docs/book/src";

/// Builds the book into `target/book`; installs mdBook into `.cache/tools` where it is missing.
pub(crate) fn build(root: &Path) -> Result<PathBuf, String> {
    let problems = check(root);
    if !problems.is_empty() {
        return Err(problems.join("\n"));
    }
    let tools = root.join(".cache/tools");
    let mdbook = tools.join("bin/mdbook");
    if !mdbook.exists() {
        let mut install = Command::new("cargo");
        install.args(["install", "--quiet", "--locked", "--no-default-features", "--root"]);
        run(install.arg(&tools).arg(format!("mdbook@{MDBOOK_VERSION}")))?;
    }
    let output = root.join("target/book");
    run(Command::new(mdbook).arg("build").arg(root.join("docs/book")).arg("-d").arg(&output))?;
    Ok(output.join("index.html"))
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name} ended with {status}")),
        Err(err) => Err(format!("{name}: {err}")),
    }
}

/// Links that lead nowhere, in the book and in the other documents, and pages that the summary
/// does not list.
pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    for page in documents(root) {
        let Ok(text) = std::fs::read_to_string(root.join(&page)) else { continue };
        problems.extend(broken_links(root, &page, &text));
    }
    problems.extend(unlisted_pages(root));
    problems
}

/// Every Markdown file of the project, relative to its root.
fn documents(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> =
        ["docs", "experiments", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
            .iter()
            .map(PathBuf::from)
            .collect();
    while let Some(path) = open.pop() {
        if root.join(&path).is_dir() {
            let entries = std::fs::read_dir(root.join(&path)).into_iter().flatten().flatten();
            open.extend(entries.map(|entry| path.join(entry.file_name())));
        } else if path.extension().is_some_and(|end| end == "md") {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn broken_links(root: &Path, page: &Path, text: &str) -> Vec<String> {
    let folder = page.parent().unwrap_or(Path::new(""));
    let mut problems = Vec::new();
    for (line, target) in links(text) {
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        let to = normalize(&folder.join(file));
        let at = format!("{}:{line}", page.display());
        if !file.is_empty() && !root.join(&to).exists() {
            problems.push(format!("{at}: the link to '{target}' leads nowhere"));
        } else if !anchor.is_empty() {
            let other = std::fs::read_to_string(root.join(&to)).unwrap_or_default();
            let target_text = if file.is_empty() { text } else { &other };
            if !anchors(target_text).contains(anchor) {
                problems.push(format!("{at}: '{target}' has no heading '#{anchor}'"));
            }
        }
    }
    problems
}

/// Relative link targets with their lines; code is skipped.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut in_block = false;
    for (index, line) in text.lines().enumerate() {
        in_block ^= line.trim_start().starts_with("```");
        if in_block || line.starts_with("    ") {
            continue;
        }
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            let Some(end) = rest.find(')') else { continue };
            let target = rest[..end].split(' ').next().unwrap_or_default();
            let outside = target.contains("://") || target.starts_with("mailto:");
            let in_code = line[..at].matches('`').count() % 2 == 1;
            if !outside && !in_code && !target.is_empty() {
                found.push((index + 1, target));
            }
        }
    }
    found
}

/// The anchors of a page's headings, as mdBook and GitHub make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let heading = |line: &&str| line.starts_with('#');
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    text.lines().filter(heading).map(anchor).collect()
}

fn normalize(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(clean.pop()),
            Component::CurDir => {}
            other => clean.push(other),
        }
    }
    clean
}

fn unlisted_pages(root: &Path) -> Vec<String> {
    let summary = std::fs::read_to_string(root.join(PAGES).join("SUMMARY.md")).unwrap_or_default();
    let listed: BTreeSet<PathBuf> =
        links(&summary).iter().map(|(_, target)| normalize(Path::new(target))).collect();
    let pages = documents(root).into_iter().filter_map(|page| {
        let page = page.strip_prefix(PAGES).ok()?.to_path_buf();
        (page != Path::new("SUMMARY.md") && !listed.contains(&page)).then_some(page)
    });
    pages.map(|page| format!("{PAGES}/SUMMARY.md does not list {}", page.display())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_links_lead_somewhere() {
        let problems = check(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".."));
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    #[test]
    fn broken_links_are_found() {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let page = Path::new("docs/x.md");
        let broken = |text| broken_links(&root, page, text).len();
        assert_eq!(broken("see [the map](ARCHITECTURE.md) and [us](https://example.com)"), 0);
        assert_eq!(broken("see [the map](MISSING.md)"), 1);
        assert_eq!(broken("see [a heading](ARCHITECTURE.md#there-is-none)"), 1);
        assert_eq!(broken("`[code](MISSING.md)`\n```\n[x](MISSING.md)\n```"), 0);
        assert_eq!(broken("# A title\n[up](#a-title) [down](#no-title)"), 1);
    }
}
