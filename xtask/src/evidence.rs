//! Whether the figures in `evidence/` were measured on the sources that are there now.
//!
//! A source is bound by the hash of what the compiler sees: comments and layout do not count, so
//! that rewording a comment does not ask for hours of measurements. `scripts/gpu/evidence.py`
//! computes the same hash where the figures are measured. JSON files carry their hashes; those of
//! texts are in a file beside them, which `cargo xtask evidence --bind` writes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

/// Folder of the sources that evidence names by file name alone; it names others by their path.
const KERNELS: &str = "crates/compiler/kernels";

/// Verdicts on ONNX's node tests, on the CPU and on a GPU (`scripts/gpu/node_tests.sh`).
const CPU_NODE_TESTS: &str = "crates/cli/tests/onnx_nodes.txt";
const GPU_NODE_TESTS: &str = "crates/cli/tests/onnx_nodes_cuda.txt";

/// Evidence files that wait for a new measurement, one per line.
const KNOWN_STALE: &str = "evidence/stale.txt";

/// What texts belong to: lines of a file in `evidence/`, a source and its hash, with tabs between.
const TEXT_SOURCES: &str = "evidence/sources.tsv";

/// The files whose figures were measured with earlier sources, as the project admits.
pub(crate) fn known_stale(root: &Path) -> Result<HashSet<String>, String> {
    let text = match std::fs::read_to_string(root.join(KNOWN_STALE)) {
        Ok(text) => text,
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(err) => return Err(format!("{KNOWN_STALE}: {err}")),
    };
    let lines = text.lines().map(str::trim);
    Ok(lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from).collect())
}

/// Every evidence file with what is stale about it; nothing when it is fresh.
pub(crate) fn check(root: &Path) -> Result<Vec<(String, Vec<String>)>, String> {
    let folder = root.join("evidence");
    let entries =
        std::fs::read_dir(&folder).map_err(|err| format!("{}: {err}", folder.display()))?;
    let mut report = Vec::new();
    let mut texts = text_sources(root)?;
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => {
                let text = std::fs::read_to_string(&path).map_err(|err| err.to_string())?;
                report.push((name, stale_sources(root, &text)?));
            }
            Some("txt" | "md") if path != root.join(KNOWN_STALE) => {
                let stale = match texts.remove(&name) {
                    Some(sources) => changed(root, &sources),
                    None => vec![format!("{TEXT_SOURCES} names no sources of it")],
                };
                report.push((name, stale));
            }
            _ => {}
        }
    }
    let gone = |name| (name, vec![format!("it is gone, but {TEXT_SOURCES} names it")]);
    report.extend(texts.into_keys().map(gone));
    let list = |path: &str| {
        std::fs::read_to_string(root.join(path)).map_err(|err| format!("{path}: {err}"))
    };
    let (cpu, gpu) = (list(CPU_NODE_TESTS)?, list(GPU_NODE_TESTS)?);
    report.push((GPU_NODE_TESTS.to_string(), not_on_a_gpu(&cpu, &gpu)));
    report.sort();
    Ok(report)
}

/// Sources with their hashes.
type Sources = BTreeMap<String, String>;

/// The sources of each text.
fn text_sources(root: &Path) -> Result<BTreeMap<String, Sources>, String> {
    let text = match std::fs::read_to_string(root.join(TEXT_SOURCES)) {
        Ok(text) => text,
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(err) => return Err(format!("{TEXT_SOURCES}: {err}")),
    };
    let mut all: BTreeMap<String, Sources> = BTreeMap::new();
    for (index, line) in text.lines().enumerate() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [file, source, hash] = fields[..] else {
            return Err(format!("{TEXT_SOURCES}, line {}: not three fields", index + 1));
        };
        all.entry(file.to_string()).or_default().insert(source.to_string(), hash.to_string());
    }
    Ok(all)
}

/// Notes that a text of `evidence/` was measured with the sources as they are now: with these, or
/// without any with those that it was bound to before. Returns how many they are.
pub(crate) fn bind(root: &Path, file: &str, sources: &[String]) -> Result<usize, String> {
    if !root.join("evidence").join(file).is_file() {
        return Err(format!("evidence/{file} does not exist"));
    }
    let mut all = text_sources(root)?;
    let before = all.remove(file).unwrap_or_default();
    let sources = match sources {
        [] => before.into_keys().collect(),
        sources => sources.to_vec(),
    };
    if sources.is_empty() {
        return Err(format!("name the sources that the figures of {file} depend on"));
    }
    let hash = |source: String| match std::fs::read(root.join(&source)) {
        Ok(bytes) => Ok((source, source_hash(&bytes))),
        Err(err) => Err(format!("{source}: {err}")),
    };
    let bound = sources.into_iter().map(hash).collect::<Result<Sources, String>>()?;
    let count = bound.len();
    all.insert(file.to_string(), bound);
    let mut text = String::new();
    for (file, sources) in &all {
        for (source, hash) in sources {
            text.push_str(&format!("{file}\t{source}\t{hash}\n"));
        }
    }
    std::fs::write(root.join(TEXT_SOURCES), text)
        .map_err(|err| format!("{TEXT_SOURCES}: {err}"))?;
    Ok(count)
}

/// What is wrong with sources: those that are gone or have changed.
fn changed(root: &Path, sources: &Sources) -> Vec<String> {
    let wrong = |(source, hash): (&String, &String)| match std::fs::read(root.join(source)) {
        Err(_) => Some(format!("{source} is gone")),
        Ok(bytes) if source_hash(&bytes) == *hash => None,
        Ok(_) => Some(format!("{source} has changed")),
    };
    sources.iter().filter_map(wrong).collect()
}

/// The node tests that pass on the CPU and not on a GPU, and those that no GPU has judged.
fn not_on_a_gpu(cpu: &str, gpu: &str) -> Vec<String> {
    fn entries(list: &str) -> impl Iterator<Item = (&str, &str)> {
        list.lines().filter_map(|line| line.split_once(' '))
    }
    let on_gpu: HashMap<&str, &str> = entries(gpu).collect();
    let behind = entries(cpu).filter_map(|(name, verdict)| match on_gpu.get(name) {
        None => Some(format!("{name} was not run on a GPU")),
        Some(&"passed") => None,
        Some(_) => (verdict == "passed").then(|| format!("{name} does not pass on a GPU")),
    });
    behind.collect()
}

fn stale_sources(root: &Path, text: &str) -> Result<Vec<String>, String> {
    let evidence: Value = serde_json::from_str(text).map_err(|err| err.to_string())?;
    let sources = evidence.get("sha256").and_then(Value::as_object);
    let Some(sources) = sources else {
        return Ok(vec!["it names no sources ('sha256')".to_string()]);
    };
    let path_of = |file: &str| match file.contains('/') {
        true => root.join(file),
        false => root.join(KERNELS).join(file),
    };
    let stale = |(file, hash): (&String, &Value)| match std::fs::read(path_of(file)) {
        Err(_) => Some(format!("{file} is gone")),
        Ok(bytes) if Some(source_hash(&bytes).as_str()) == hash.as_str() => None,
        Ok(_) => Some(format!("{file} has changed")),
    };
    Ok(sources.iter().filter_map(stale).collect())
}

/// The hash of a source without its comments and layout.
pub(crate) fn source_hash(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    hex(&Sha256::digest(without_comments(&text).as_bytes()))
}

/// `source` without line comments, and without white space except between two words. No source
/// that is hashed has a block comment, or `//` inside a string; `evidence.py` refuses the former.
fn without_comments(source: &str) -> String {
    let lines = source.lines().map(|line| line.split("//").next().unwrap_or_default());
    let mut text = String::new();
    for word in lines.flat_map(str::split_whitespace) {
        let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        if is_word(text.chars().next_back()) && is_word(word.chars().next()) {
            text.push(' ');
        }
        text.push_str(word);
    }
    text
}

/// GPU latencies as the book shows them.
pub(crate) fn latency_table(root: &Path) -> Result<String, String> {
    let path = root.join("evidence/latency.json");
    let text =
        std::fs::read_to_string(&path).map_err(|err| format!("{}: {err}", path.display()))?;
    let evidence: Value = serde_json::from_str(&text).map_err(|err| err.to_string())?;
    let field = |name: &str| evidence.get(name).and_then(Value::as_str).unwrap_or("?");
    let mut table = format!(
        "{}, driver {}, PyTorch {}, {}; microseconds:\n\n\
         | network | batch | atoll | p99 | PyTorch graph | compiled | ratio to the better \
         | error | PyTorch's |\n|---|---|---|---|---|---|---|---|---|\n",
        field("device"),
        field("driver"),
        field("torch"),
        field("date")
    );
    let rows = evidence.get("rows").and_then(Value::as_array).ok_or("no rows")?;
    for row in rows.iter().filter(|row| row.get("atoll_us").is_some()) {
        let number = |name: &str| row.get(name).and_then(Value::as_f64);
        let show = |name: &str, digits: usize| {
            number(name).map_or("-".to_string(), |value| format!("{value:.digits$}"))
        };
        let name = row.get("model").and_then(Value::as_str).unwrap_or("?");
        table.push_str(&format!(
            "| {name} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
            show("batch", 0),
            show("atoll_us", 0),
            show("atoll_p99_us", 0),
            show("torch_graph_us", 0),
            show("torch_compile_us", 0),
            show("ratio", 2),
            show("rel_error", 4),
            show("torch_rel_error", 4)
        ));
    }
    Ok(table)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page with the table of latencies.
    const LATENCY_PAGE: &str = "docs/book/src/benchmarks.md";

    #[test]
    fn evidence_is_fresh() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut known = known_stale(&root).unwrap();
        for (name, stale) in check(&root).unwrap() {
            let known = known.remove(&name);
            assert!(
                known || stale.is_empty(),
                "{name} is stale, measure again or list it in {KNOWN_STALE}: {}",
                stale.join(", ")
            );
            assert!(!known || !stale.is_empty(), "{name} is fresh: remove it from {KNOWN_STALE}");
        }
        assert!(known.is_empty(), "{KNOWN_STALE} lists files that do not exist: {known:?}");
    }

    #[test]
    fn texts_are_bound_to_sources_as_well() {
        let folder = std::env::temp_dir().join(format!("atoll-evidence-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("evidence")).unwrap();
        for list in [CPU_NODE_TESTS, GPU_NODE_TESTS] {
            std::fs::create_dir_all(folder.join(list).parent().unwrap()).unwrap();
            std::fs::write(folder.join(list), "").unwrap();
        }
        std::fs::write(folder.join("evidence/a.md"), "12 ms").unwrap();
        std::fs::write(folder.join("a.rs"), "let a = 1;").unwrap();
        let said = || {
            let all = check(&folder).unwrap();
            all.into_iter().find(|(name, _)| name == "a.md").unwrap().1
        };
        assert_eq!(said(), ["evidence/sources.tsv names no sources of it"]);
        assert!(bind(&folder, "a.md", &[]).unwrap_err().contains("name the sources"));
        assert!(bind(&folder, "a.md", &["b.rs".to_string()]).unwrap_err().contains("b.rs"));
        assert!(bind(&folder, "b.md", &["a.rs".to_string()]).unwrap_err().contains("b.md"));
        assert_eq!(bind(&folder, "a.md", &["a.rs".to_string()]), Ok(1));
        assert!(said().is_empty());
        std::fs::write(folder.join("a.rs"), "let a = 2; // new").unwrap();
        assert_eq!(said(), ["a.rs has changed"]);
        assert_eq!(bind(&folder, "a.md", &[]), Ok(1), "measured again");
        assert!(said().is_empty());
        std::fs::remove_file(folder.join("evidence/a.md")).unwrap();
        assert!(said()[0].contains("it is gone"));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_list_of_a_gpu_must_not_be_shorter() {
        let cpu = "test_a passed\ntest_b unsupported\ntest_c passed\n";
        let all = "test_a passed\ntest_b unsupported\ntest_c passed\n";
        assert!(not_on_a_gpu(cpu, all).is_empty());
        let behind = not_on_a_gpu(cpu, "test_a failed\ntest_b passed\n");
        assert_eq!(
            behind,
            ["test_a does not pass on a GPU", "test_c was not run on a GPU"].map(String::from)
        );
        assert_eq!(not_on_a_gpu(cpu, "test_a passed\ntest_c passed\n").len(), 1, "not judged");
    }

    #[test]
    fn the_book_shows_what_was_measured() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let page = std::fs::read_to_string(root.join(LATENCY_PAGE)).unwrap();
        let table = latency_table(&root).unwrap();
        assert!(page.contains(&table), "put this into {LATENCY_PAGE}:\n{table}");
    }

    #[test]
    fn comments_and_layout_do_not_count() {
        let hash = |text: &str| source_hash(text.as_bytes());
        assert_eq!(hash("int a; // one\n\n  int b;"), hash("// two\nint a;\nint b;"));
        assert_ne!(hash("int a;"), hash("int b;"));
        assert_eq!(hash("f(a, b) ;"), hash("f( a,b );"));
        assert_ne!(hash("int a;"), hash("inta;"));
    }

    #[test]
    fn kernels_have_no_comments_that_the_hash_would_miss() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(KERNELS);
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let text = std::fs::read_to_string(entry.path()).unwrap();
            let kernel = entry.path().extension().is_some_and(|end| end == "cuh");
            assert!(!kernel || !text.contains("/*"), "{:?} has a block comment", entry.path());
        }
    }

    #[test]
    fn changes_make_it_stale() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let stale = |text| stale_sources(&root, text).unwrap();
        assert_eq!(stale(r#"{"sha256":{"base.cuh":"00"}}"#), ["base.cuh has changed"]);
        assert_eq!(stale(r#"{"sha256":{"nothing.cuh":"00"}}"#), ["nothing.cuh is gone"]);
        let library = "crates/cuda/src/lib.rs";
        let by_path = format!(r#"{{"sha256":{{"{library}":"00"}}}}"#);
        assert_eq!(stale(&by_path), [format!("{library} has changed")]);
        assert_eq!(stale("{}").len(), 1);
    }
}
