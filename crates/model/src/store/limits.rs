//! How much the registry may hold.

use std::collections::HashMap;

use super::Manifest;

/// Limits of the registry; a registration beyond them is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistryLimits {
    /// Versions that are kept of each name; a registration removes older ones. At least 1.
    pub keep_versions: usize,
    /// Number of names.
    pub max_names: usize,
    /// Bytes of all files.
    pub max_bytes: u64,
    /// Bytes of all versions of one name.
    pub max_name_bytes: u64,
}

impl Default for RegistryLimits {
    fn default() -> RegistryLimits {
        RegistryLimits {
            keep_versions: 5,
            max_names: 10_000,
            max_bytes: 1 << 40,
            max_name_bytes: 256 << 30,
        }
    }
}

impl RegistryLimits {
    /// Versions of `name` that a registration removes: all but the newest, where the new one
    /// counts. The one in force goes with them unless it is among the newest.
    pub(super) fn expired(&self, all: &[Manifest], name: &str) -> Vec<u64> {
        let mut versions: Vec<u64> =
            all.iter().filter(|m| m.name == name).map(|m| m.version).collect();
        versions.sort_unstable();
        let keep = self.keep_versions.max(1) - 1;
        versions.truncate(versions.len().saturating_sub(keep));
        versions
    }

    /// Checks the limits for `new` beside the records in `kept`.
    pub(super) fn check(&self, kept: &[&Manifest], new: &Manifest) -> Result<(), String> {
        let files = kept.iter().copied().chain([new]);
        self.check_files(files.map(|m| (&*m.name, &*m.sha256, m.size_bytes)), &new.name)
    }

    /// Checks the limits for files: the name of their model, hash and size. `changed` is the name
    /// of which one is new.
    ///
    /// # Errors
    /// What is exceeded, and which flag raises it.
    pub fn check_files<'a>(
        &self,
        all: impl Iterator<Item = (&'a str, &'a str, u64)>,
        changed: &str,
    ) -> Result<(), String> {
        let mut files: HashMap<&str, u64> = HashMap::new();
        let mut name_files: HashMap<&str, u64> = HashMap::new();
        let mut names: Vec<&str> = Vec::new();
        for (name, sha256, bytes) in all {
            // Versions with the same content share a file.
            files.insert(sha256, bytes);
            names.push(name);
            if name == changed {
                name_files.insert(sha256, bytes);
            }
        }
        names.sort_unstable();
        names.dedup();
        let sum =
            |files: &HashMap<&str, u64>| files.values().fold(0u64, |a, b| a.saturating_add(*b));
        let (own, total) = (sum(&name_files), sum(&files));
        if names.len() > self.max_names {
            return Err(format!(
                "the registry holds {} models and may hold no more; delete one, or raise \
                 --registry-max-models",
                self.max_names
            ));
        }
        if own > self.max_name_bytes {
            return Err(format!(
                "the versions of '{changed}' would take {own} bytes of at most {}; delete some, \
                 or raise --registry-max-model-size",
                self.max_name_bytes
            ));
        }
        if total > self.max_bytes {
            return Err(format!(
                "the registry would take {total} bytes of at most {}; delete models, or raise \
                 --registry-max-size",
                self.max_bytes
            ));
        }
        Ok(())
    }
}
