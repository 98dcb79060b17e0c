//! The registry's own folder: contents of models by hash, and a copy of every record, from which
//! the database can be rebuilt.
//!
//! The folder carries a marker with the registry's identity. Only files of the forms that the
//! registry writes are ever removed from it.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{Manifest, StoreError, io_error};
use crate::durable;
use crate::repository::is_valid_name;

/// Name of the marker.
const OWNER: &str = "OWNER";

/// Files of the registry in `DATA_DIR`.
#[derive(Clone, Debug)]
pub(super) struct RegistryFiles {
    root: PathBuf,
    contents: PathBuf,
    records: PathBuf,
    /// Where releases without a folder of their own kept contents.
    legacy: PathBuf,
}

/// A copy of a record, and what is wrong with it.
pub(super) type RecordFile = (PathBuf, Result<Manifest, String>);

/// The SHA-256 of `bytes` in hexadecimal.
pub(super) fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_hash(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// `NAME@VERSION`; names have no `@`.
pub(super) fn key(name: &str, version: u64) -> String {
    format!("{name}@{version}")
}

/// The inverse of [`key`].
pub(super) fn parse_key(key: &str) -> Option<(&str, u64)> {
    let (name, version) = key.split_once('@')?;
    Some((name, version.parse().ok()?)).filter(|(name, _)| is_valid_name(name))
}

fn file_names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    match fs::read_dir(folder) {
        Ok(entries) => {
            for entry in entries {
                names.extend(entry?.file_name().into_string().ok());
            }
        }
        Err(err) if err.kind() == io::ErrorKind::NotFound => {}
        Err(err) => return Err(err),
    }
    names.sort_unstable();
    Ok(names)
}

impl RegistryFiles {
    /// The files of the registry in `data_dir`; creates nothing.
    pub(super) fn new(data_dir: &Path) -> RegistryFiles {
        let root = data_dir.join("registry");
        let (contents, records) = (root.join("files"), root.join("records"));
        RegistryFiles { root, contents, records, legacy: data_dir.join("models") }
    }

    /// Creates the folders.
    pub(super) fn create(&self) -> Result<(), StoreError> {
        for folder in [&self.root, &self.contents, &self.records] {
            durable::create_folder(folder).map_err(io_error(folder))?;
        }
        Ok(())
    }

    /// The registry's own folder.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The identity in the marker; `None` without a marker.
    pub(super) fn owner(&self) -> Result<Option<String>, StoreError> {
        let path = self.root.join(OWNER);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim().to_string())),
            Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(err) => Err(io_error(&path)(err)),
        }
    }

    /// Writes the marker.
    pub(super) fn set_owner(&self, identity: &str) -> Result<(), StoreError> {
        let path = self.root.join(OWNER);
        durable::write(&path, format!("{identity}\n").as_bytes()).map_err(io_error(&path))
    }

    /// Number of models that are here, with or without a database.
    pub(super) fn count(&self) -> Result<usize, StoreError> {
        let is_content = |name: &&String| name.strip_suffix(".onnx").is_some_and(is_hash);
        let mut count = 0;
        for folder in [&self.contents, &self.legacy] {
            let names = file_names(folder).map_err(io_error(folder))?;
            count += names.iter().filter(is_content).count();
        }
        Ok(count)
    }

    /// The file with the content of this hash.
    pub(super) fn content_path(&self, sha256: &str) -> PathBuf {
        self.contents.join(format!("{sha256}.onnx"))
    }

    /// Writes a content. One that is there already is verified, and replaced if it is damaged.
    pub(super) fn put_content(&self, sha256: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.content_path(sha256);
        if fs::read(&path).is_ok_and(|there| there == bytes) {
            return Ok(());
        }
        durable::write(&path, bytes).map_err(io_error(&path))
    }

    /// Moves the contents of an older release's records here. Other files there are not touched.
    pub(super) fn adopt(&self, sha256: &str) -> Result<(), StoreError> {
        let (from, to) = (self.legacy.join(format!("{sha256}.onnx")), self.content_path(sha256));
        if !is_hash(sha256) || to.exists() || !from.is_file() {
            return Ok(());
        }
        let bytes = fs::read(&from).map_err(io_error(&from))?;
        if hash(&bytes) != sha256 {
            return Ok(());
        }
        durable::write(&to, &bytes).map_err(io_error(&to))?;
        durable::remove(&from).map_err(io_error(&from))?;
        Ok(())
    }

    /// Removes the content of this hash.
    pub(super) fn remove_content(&self, sha256: &str) -> Result<(), StoreError> {
        let path = self.content_path(sha256);
        durable::remove(&path).map(|_| ()).map_err(io_error(&path))
    }

    fn record_path(&self, name: &str, version: u64) -> PathBuf {
        self.records.join(format!("{}.json", key(name, version)))
    }

    /// Writes the copy of a record.
    pub(super) fn put_record(&self, manifest: &Manifest, json: &str) -> Result<(), StoreError> {
        let path = self.record_path(&manifest.name, manifest.version);
        if fs::read(&path).is_ok_and(|there| there == json.as_bytes()) {
            return Ok(());
        }
        durable::write(&path, json.as_bytes()).map_err(io_error(&path))
    }

    /// Removes the copy of a record.
    pub(super) fn remove_record(&self, name: &str, version: u64) -> Result<(), StoreError> {
        let path = self.record_path(name, version);
        durable::remove(&path).map(|_| ()).map_err(io_error(&path))
    }

    /// All copies of records.
    pub(super) fn records(&self) -> Result<Vec<RecordFile>, StoreError> {
        let mut records = Vec::new();
        for name in file_names(&self.records).map_err(io_error(&self.records))? {
            let Some((model, version)) = name.strip_suffix(".json").and_then(parse_key) else {
                continue;
            };
            let path = self.records.join(&name);
            let read = fs::read(&path).map_err(|err| err.to_string()).and_then(|bytes| {
                serde_json::from_slice::<Manifest>(&bytes).map_err(|err| err.to_string())
            });
            let matches = |manifest: Manifest| match manifest.name == model
                && manifest.version == version
                && is_hash(&manifest.sha256)
            {
                true => Ok(manifest),
                false => Err("does not describe the model it is named after".to_string()),
            };
            records.push((path, read.and_then(matches)));
        }
        Ok(records)
    }

    /// Contents without a record and files whose writing was interrupted, as paths.
    pub(super) fn unreferenced(
        &self,
        referenced: &HashSet<String>,
    ) -> Result<Vec<PathBuf>, StoreError> {
        let mut found = Vec::new();
        for folder in [&self.root, &self.contents, &self.records] {
            for name in file_names(folder).map_err(io_error(folder))? {
                let content = name.strip_suffix(".onnx").filter(|name| is_hash(name));
                let orphan = folder == &self.contents
                    && content.is_some_and(|sha256| !referenced.contains(sha256));
                if orphan || durable::is_partial(&name) {
                    found.push(folder.join(name));
                }
            }
        }
        Ok(found)
    }
}
