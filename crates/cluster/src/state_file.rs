//! What a process last knew of the cluster, on its disk: enough to serve before the store can be
//! reached.
//!
//! The file is one line with the digest of the rest, and JSON. It is replaced as a whole, so that a
//! process which ends meanwhile leaves the previous one. A file that is too large, damaged or of
//! another cluster is ignored: it is a help, never a condition.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Maximum size of a file.
const BYTES_MAX: u64 = 64 << 20;
/// Maximum number of entries.
const ENTRIES_MAX: usize = 200_000;
/// Version of the format; others are ignored.
const FORMAT: u32 = 1;

/// Keys without the cluster's prefix, and their values.
pub type Entries = BTreeMap<String, Bytes>;

/// A file with the last state of a process.
#[derive(Clone, Debug)]
pub struct StateFile {
    path: PathBuf,
    cluster: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: u32,
    cluster: String,
    entries: BTreeMap<String, String>,
}

impl StateFile {
    /// The file `name` in `folder`, of a process of `cluster`.
    pub fn new(folder: &Path, name: &str, cluster: &str) -> StateFile {
        StateFile { path: folder.join(name), cluster: cluster.to_string() }
    }

    /// Its entries; none if there is no file or it cannot be used, which is logged.
    pub fn read(&self) -> Entries {
        match self.try_read() {
            Ok(entries) => entries.unwrap_or_default(),
            Err(why) => {
                tracing::warn!(file = %self.path.display(), why, "saved state ignored");
                Entries::new()
            }
        }
    }

    fn try_read(&self) -> Result<Option<Entries>, String> {
        let file = match std::fs::File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let mut text = String::new();
        // One byte more than allowed, so that a file that grows is noticed.
        let limited = &mut file.take(BYTES_MAX + 1);
        limited.read_to_string(&mut text).map_err(|error| error.to_string())?;
        if text.len() as u64 > BYTES_MAX {
            return Err(format!("it has more than {BYTES_MAX} bytes"));
        }
        let (expected, json) = text.split_once('\n').ok_or("it has no digest")?;
        if expected != digest(json) {
            return Err("it is damaged".to_string());
        }
        let content: Content = serde_json::from_str(json).map_err(|error| error.to_string())?;
        match content {
            Content { format, .. } if format != FORMAT => {
                Err(format!("its format is {format}, not {FORMAT}"))
            }
            Content { cluster, .. } if cluster != self.cluster => {
                Err("it belongs to another cluster".to_string())
            }
            Content { entries, .. } if entries.len() > ENTRIES_MAX => {
                Err(format!("it has more than {ENTRIES_MAX} entries"))
            }
            Content { entries, .. } => {
                Ok(Some(entries.into_iter().map(|(key, value)| (key, value.into())).collect()))
            }
        }
    }

    /// Replaces it. Values that are no text are left out; state that would be too large to read is
    /// not written.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, entries: &Entries) -> std::io::Result<()> {
        let text = |(key, value): (&String, &Bytes)| {
            Some((key.clone(), std::str::from_utf8(value).ok()?.to_string()))
        };
        let entries: BTreeMap<String, String> = entries.iter().filter_map(text).collect();
        let content = Content { format: FORMAT, cluster: self.cluster.clone(), entries };
        let json = serde_json::to_string(&content)?;
        let text = format!("{}\n{json}", digest(&json));
        if text.len() as u64 > BYTES_MAX || content.entries.len() > ENTRIES_MAX {
            return Err(std::io::Error::other("the state is too large to be saved"));
        }
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let next = self.path.with_extension("next");
        let mut file = std::fs::File::create(&next)?;
        file.write_all(text.as_bytes())?;
        // The content before the name: after a power failure the file is the old or the new one.
        file.sync_all()?;
        std::fs::rename(next, &self.path)
    }
}

fn digest(text: &str) -> String {
    use std::fmt::Write;
    let mut hex = String::with_capacity(64);
    for byte in Sha256::digest(text.as_bytes()) {
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;

    fn entries() -> Entries {
        let value = |index: usize| Bytes::from(format!("{{\"weight\":{index}}}"));
        (0..20).map(|index| (format!("routes/m{index}"), value(index))).collect()
    }

    #[test]
    fn what_was_written_is_read_and_only_by_the_same_cluster() {
        let folder = tempfile::tempdir().unwrap();
        let file = StateFile::new(&folder.path().join("new"), "plan", "one");
        assert!(file.read().is_empty());
        file.write(&entries()).unwrap();
        assert_eq!(file.read(), entries());
        file.write(&Entries::new()).unwrap();
        assert!(file.read().is_empty());
        file.write(&entries()).unwrap();
        let other = StateFile::new(&folder.path().join("new"), "plan", "two");
        assert!(other.read().is_empty());
    }

    #[test]
    fn a_damaged_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let file = StateFile::new(folder.path(), "plan", "one");
        file.write(&entries()).unwrap();
        let good = std::fs::read(&file.path).unwrap();
        let mut random = Random::new(8);
        for _ in 0..300 {
            let mut bad = good.clone();
            match random.below(3) {
                0 => bad.truncate(random.below(good.len() as u64) as usize),
                1 => {
                    let at = random.below(good.len() as u64) as usize;
                    bad[at] ^= 1 << random.below(8);
                }
                _ => bad.extend_from_slice(b"x"),
            }
            std::fs::write(&file.path, &bad).unwrap();
            assert!(file.read().is_empty(), "{:?}", String::from_utf8_lossy(&bad));
        }
        for text in ["", "\n", "{}", "e3b0\n{}"] {
            std::fs::write(&file.path, text).unwrap();
            assert!(file.read().is_empty());
        }
    }

    #[test]
    fn a_file_that_is_too_large_is_not_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let file = StateFile::new(folder.path(), "plan", "one");
        let large = std::fs::File::create(&file.path).unwrap();
        large.set_len(BYTES_MAX + 2).unwrap();
        assert!(file.try_read().unwrap_err().contains("more than"));
        let many = Bytes::from(vec![b'x'; 1 << 20]);
        let entries: Entries = (0..80).map(|index| (index.to_string(), many.clone())).collect();
        assert!(file.write(&entries).is_err());
    }
}
