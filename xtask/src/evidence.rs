//! Whether the figures in `evidence/` were measured on the sources that are there now.

use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

/// Where the sources lie that evidence names by file name alone; others it names by their path.
const KERNELS: &str = "crates/compiler/kernels";

/// Every evidence file with what is stale about it; nothing when it is fresh.
pub(crate) fn check(root: &Path) -> Result<Vec<(String, Vec<String>)>, String> {
    let folder = root.join("evidence");
    let entries =
        std::fs::read_dir(&folder).map_err(|err| format!("{}: {err}", folder.display()))?;
    let mut report = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let text = std::fs::read_to_string(&path).map_err(|err| err.to_string())?;
            let name = entry.file_name().to_string_lossy().into_owned();
            report.push((name, stale_sources(root, &text)?));
        }
    }
    report.sort();
    Ok(report)
}

fn stale_sources(root: &Path, text: &str) -> Result<Vec<String>, String> {
    let evidence: Value = serde_json::from_str(text).map_err(|err| err.to_string())?;
    let sources = evidence.get("sha256").and_then(Value::as_object);
    let Some(sources) = sources else {
        return Ok(vec!["it names no sources ('sha256')".to_string()]);
    };
    let place = |file: &str| match file.contains('/') {
        true => root.join(file),
        false => root.join(KERNELS).join(file),
    };
    let stale = |(file, hash): (&String, &Value)| match std::fs::read(place(file)) {
        Err(_) => Some(format!("{file} is gone")),
        Ok(bytes) if Some(hex(&Sha256::digest(&bytes)).as_str()) == hash.as_str() => None,
        Ok(_) => Some(format!("{file} has changed")),
    };
    Ok(sources.iter().filter_map(stale).collect())
}

/// GPU latencies as the README shows them.
pub(crate) fn latency_table(root: &Path) -> Result<String, String> {
    let path = root.join("evidence/latency.json");
    let text =
        std::fs::read_to_string(&path).map_err(|err| format!("{}: {err}", path.display()))?;
    let evidence: Value = serde_json::from_str(&text).map_err(|err| err.to_string())?;
    let field = |name: &str| evidence.get(name).and_then(Value::as_str).unwrap_or("?");
    let mut table = format!(
        "{}, driver {}, PyTorch {}, {}; microseconds:\n\n| network | batch | atoll | p99 | PyTorch graph | compiled | ratio to the better | error | PyTorch's |\n|---|---|---|---|---|---|---|---|---|\n",
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

    #[test]
    fn evidence_is_fresh() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (name, stale) in check(&root).unwrap() {
            assert!(stale.is_empty(), "{name} is stale, measure again: {}", stale.join(", "));
        }
    }

    #[test]
    fn the_readme_shows_what_was_measured() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
        let table = latency_table(&root).unwrap();
        assert!(readme.contains(&table), "put this into README.md:\n{table}");
    }

    #[test]
    fn changes_make_it_stale() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let stale = |text| stale_sources(&root, text).unwrap();
        assert_eq!(stale(r#"{"sha256":{"base.cuh":"00"}}"#), ["base.cuh has changed"]);
        assert_eq!(stale(r#"{"sha256":{"nothing.cuh":"00"}}"#), ["nothing.cuh is gone"]);
        let path = "crates/cuda/src/lib.rs";
        let by_path = format!(r#"{{"sha256":{{"{path}":"00"}}}}"#);
        assert_eq!(stale(&by_path), [format!("{path} has changed")]);
        assert_eq!(stale("{}").len(), 1);
    }
}
