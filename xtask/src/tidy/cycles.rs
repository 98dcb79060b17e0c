//! Files of one crate that import each other in a circle.

use std::collections::{BTreeMap, BTreeSet};

/// Files that may import each other in a circle: a parent and some children, or a pair of peers.
const CYCLE_FILES_MAX: usize = 4;

/// A crate's files: path below `src` to source.
pub(crate) type Files = BTreeMap<String, String>;

/// Circles of more files than are allowed.
pub(crate) fn check(crate_name: &str, files: &Files) -> Vec<String> {
    let imports = import_graph(files);
    let cycles = components(&imports).into_iter().filter(|cycle| cycle.len() > CYCLE_FILES_MAX);
    cycles
        .map(|cycle| {
            let (count, names) = (cycle.len(), cycle.join(", "));
            format!("crate {crate_name}: {count} files import each other in a circle: {names}")
        })
        .collect()
}

/// Each file with the files it imports from.
fn import_graph(files: &Files) -> BTreeMap<&str, BTreeSet<&str>> {
    let modules: BTreeMap<Vec<&str>, &str> =
        files.keys().map(|path| (module_of(path), path.as_str())).collect();
    let mut graph = BTreeMap::new();
    for (path, source) in files {
        let module = module_of(path);
        let mut targets = BTreeSet::new();
        for import in imports_of(source) {
            if let Some(target) = resolve(&module, &import, &modules)
                && target != path
            {
                targets.insert(target);
            }
        }
        graph.insert(path.as_str(), targets);
    }
    graph
}

/// `queue/real_time.rs` as a module path.
fn module_of(path: &str) -> Vec<&str> {
    let stem = path.trim_end_matches(".rs");
    if stem == "lib" || stem == "main" { Vec::new() } else { stem.split('/').collect() }
}

/// The file an import leads to: that of the longest module path it begins with.
fn resolve<'a>(
    module: &[&str],
    import: &[String],
    modules: &BTreeMap<Vec<&str>, &'a str>,
) -> Option<&'a str> {
    let mut at: Vec<&str> = match import.first()?.as_str() {
        "crate" => Vec::new(),
        "self" => module.to_vec(),
        "super" => module[..module.len().checked_sub(1)?].to_vec(),
        _ => return None,
    };
    for name in &import[1..] {
        if name == "super" {
            at.pop();
            continue;
        }
        let mut deeper = at.clone();
        deeper.push(name);
        if !modules.contains_key(&deeper) {
            break;
        }
        at = deeper;
    }
    modules.get(&at).copied()
}

/// The paths of all `use` items, and paths from the crate's root, in front of the file's tests.
fn imports_of(source: &str) -> Vec<Vec<String>> {
    let code = without_tests(source);
    let mut found = Vec::new();
    let mut statement = String::new();
    for line in code.lines() {
        let line = line.split("//").next().unwrap_or_default().trim();
        let starts = ["use ", "pub use ", "pub(crate) use ", "pub(super) use "];
        let begin = starts.iter().find_map(|start| line.strip_prefix(start));
        match begin {
            Some(rest) => statement = rest.to_string(),
            None if !statement.is_empty() => statement.push_str(line),
            None => {
                found.extend(inline_paths(line));
                continue;
            }
        }
        if statement.ends_with(';') {
            expand(statement.trim_end_matches(';'), &[], &mut found);
            statement.clear();
        }
    }
    found
}

/// `source` up to its test module.
fn without_tests(source: &str) -> &str {
    let starts = source.match_indices("#[cfg(test)]\n");
    let is_module = |at: usize| {
        let item = source[at..].lines().nth(1).unwrap_or_default();
        item.contains("mod ") && item.ends_with('{')
    };
    let end = starts.map(|(at, _)| at).find(|at| is_module(*at));
    &source[..end.unwrap_or(source.len())]
}

/// The paths `crate::a::b` inside a line.
fn inline_paths(line: &str) -> impl Iterator<Item = Vec<String>> {
    line.match_indices("crate::").map(|(at, _)| {
        let path = &line[at..];
        let end = path.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
        path[..end.unwrap_or(path.len())].split("::").map(str::to_string).collect()
    })
}

/// `a::{b, c::d}` as `a::b` and `a::c::d`.
fn expand(tree: &str, prefix: &[String], found: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    if let Some((head, group)) = tree.split_once('{') {
        let names = head.split("::").map(str::trim).filter(|name| !name.is_empty());
        let prefix: Vec<String> = prefix.iter().cloned().chain(names.map(str::to_string)).collect();
        let group = group.strip_suffix('}').unwrap_or(group);
        split_group(group).into_iter().for_each(|part| expand(part, &prefix, found));
    } else if !tree.is_empty() {
        let path = tree.split(" as ").next().unwrap_or_default();
        let names = path.split("::").map(|name| name.trim().to_string());
        found.push(prefix.iter().cloned().chain(names).collect());
    }
}

/// The parts of a group, by the commas outside of inner groups.
fn split_group(group: &str) -> Vec<&str> {
    let (mut depth, mut begin) = (0, 0);
    let mut parts = Vec::new();
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&group[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&group[begin..]);
    parts
}

/// Sets of files that all reach each other, by repeated reachability: crates are small.
fn components<'a>(graph: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Vec<Vec<&'a str>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|start| (*start, reachable(graph, start))).collect();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for start in graph.keys() {
        if seen.contains(start) {
            continue;
        }
        let together =
            |other: &&&str| reach[*start].contains(**other) && reach[**other].contains(start);
        let component: Vec<&str> = graph.keys().filter(together).copied().collect();
        seen.extend(component.iter().copied());
        if component.len() > 1 {
            found.push(component);
        }
    }
    found
}

fn reachable<'a>(graph: &BTreeMap<&'a str, BTreeSet<&'a str>>, start: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&str> = graph[start].iter().copied().collect();
    while let Some(file) = open.pop() {
        if found.insert(file) {
            open.extend(graph.get(file).into_iter().flatten().copied());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[(&str, &str)]) -> Files {
        list.iter().map(|(path, source)| (path.to_string(), source.to_string())).collect()
    }

    #[test]
    fn circles_of_more_than_four_files_are_found() {
        let mut list = vec![
            ("lib.rs", "mod a;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "use crate::c::{inner::C, D};"),
            ("c.rs", "pub use self::inner::C;"),
            ("c/inner.rs", "use super::super::d::X;"),
            ("d.rs", "// crate::a::A"),
        ];
        assert!(check("x", &files(&list)).is_empty());
        list[5] = ("d.rs", "use crate::{\n    a::A,\n};");
        let inline = [&list[..5], &[("d.rs", "fn f(x: crate::a::A) {}")]].concat();
        assert_eq!(check("x", &files(&inline)).len(), 1);
        let found = check("x", &files(&list));
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("5 files"), "{found:?}");
    }

    #[test]
    fn tests_may_import_anything() {
        let list = [
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "#[cfg(test)]\npub(crate) mod tests {\n    use crate::a::A;\n}"),
        ];
        let files = files(&list);
        assert!(components(&import_graph(&files)).is_empty());
    }
}
