//! Request counts of models, saved across runs of the server: models with the most requests are
//! loaded first.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Max models that are saved.
const MODELS_MAX: usize = 100_000;

/// Counts by model, as in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Popularity {
    inferences: BTreeMap<String, u64>,
}

impl Popularity {
    /// The file in `folder`.
    pub(crate) fn path(folder: &Path) -> PathBuf {
        folder.join("popularity.json")
    }

    /// Reads the file; empty if there is none, or if it cannot be read, which is logged.
    pub(crate) fn read(path: &Path) -> Popularity {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Popularity::default(),
            Err(err) => {
                tracing::warn!("{}: {err}; models are preloaded by name", path.display());
                return Popularity::default();
            }
        };
        serde_json::from_str(&text).unwrap_or_else(|err| {
            tracing::warn!("{}: {err}; models are preloaded by name", path.display());
            Popularity::default()
        })
    }

    /// Models, those with the most requests first.
    pub(crate) fn order(&self) -> Vec<String> {
        let mut models: Vec<(&String, &u64)> = self.inferences.iter().collect();
        models.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        models.into_iter().map(|(name, _)| name.clone()).collect()
    }

    /// Adds the counts of a run to half of the old ones, so that old counts fade.
    pub(crate) fn after(&self, counts: impl IntoIterator<Item = (String, u64)>) -> Popularity {
        let mut inferences: BTreeMap<String, u64> =
            self.inferences.iter().map(|(name, count)| (name.clone(), count / 2)).collect();
        for (name, count) in counts {
            if inferences.len() < MODELS_MAX || inferences.contains_key(&name) {
                *inferences.entry(name).or_default() += count;
            }
        }
        inferences.retain(|_, count| *count > 0);
        Popularity { inferences }
    }

    /// Replaces the file atomically.
    pub(crate) fn write(&self, path: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        let fresh = path.with_extension("json.new");
        std::fs::write(&fresh, text)?;
        std::fs::rename(&fresh, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_with_most_requests_come_first_and_old_counts_fade() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = Popularity::path(folder.path());
        assert_eq!(Popularity::read(&path), Popularity::default(), "none yet");
        let counts = [("a", 10), ("b", 30), ("c", 0), ("d", 30)];
        let first = Popularity::default().after(counts.map(|(name, n)| (name.to_string(), n)));
        assert_eq!(first.order(), ["b", "d", "a"]);
        first.write(&path).expect("it is written");
        let read = Popularity::read(&path);
        assert_eq!(read, first);
        let second = read.after([("a".to_string(), 11), ("e".to_string(), 1)]);
        assert_eq!(second.order(), ["a", "b", "d", "e"]);
        std::fs::write(&path, "no json").expect("it is written");
        assert_eq!(Popularity::read(&path), Popularity::default());
    }
}
