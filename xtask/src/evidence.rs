//! Whether the figures in `evidence/` were measured on the sources that are there now.

use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

/// Where the sources lie that evidence names by file name alone.
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
    let stale = |(file, hash): (&String, &Value)| match std::fs::read(root.join(KERNELS).join(file))
    {
        Err(_) => Some(format!("{file} is gone")),
        Ok(bytes) if Some(hex(&Sha256::digest(&bytes)).as_str()) == hash.as_str() => None,
        Ok(_) => Some(format!("{file} has changed")),
    };
    Ok(sources.iter().filter_map(stale).collect())
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
    fn changes_make_it_stale() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let stale = |text| stale_sources(&root, text).unwrap();
        assert_eq!(stale(r#"{"sha256":{"base.cuh":"00"}}"#), ["base.cuh has changed"]);
        assert_eq!(stale(r#"{"sha256":{"nothing.cuh":"00"}}"#), ["nothing.cuh is gone"]);
        assert_eq!(stale("{}").len(), 1);
    }
}
