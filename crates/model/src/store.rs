//! The registry: models given over `POST /register`, kept across restarts and crashes.
//!
//! A model's bytes are in a file named by their SHA-256; its manifest is a record in an embedded
//! database. The file is complete and on disk before the record is written, so a crash leaves
//! either the whole model or an unreferenced file, which the next start removes.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::ModelConfig;
use crate::repository::is_valid_name;

/// Name and version to the JSON of a [`Manifest`].
const MODELS: TableDefinition<(&str, u64), &str> = TableDefinition::new("models");

/// The record of a registered model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The model's name.
    pub name: String,
    /// Counts up from 1 with every registration under the name.
    pub version: u64,
    /// SHA-256 of the ONNX file, in hex: the name of its file.
    pub sha256: String,
    /// Size of the ONNX file.
    pub size_bytes: u64,
    /// Its settings.
    pub config: ModelConfig,
}

/// Errors of the registry.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The name is not a valid model name.
    #[error("'{0}' is not a model name: letters, digits, '_', '-' and '.', at most 128")]
    BadName(String),
    /// The file system reports an error.
    #[error("{path}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// What.
        source: std::io::Error,
    },
    /// The database reports an error.
    #[error("registry: {0}")]
    Database(#[from] redb::Error),
    /// A record cannot be read.
    #[error("registry record of {name} version {version}: {reason}")]
    BadRecord {
        /// The model.
        name: String,
        /// Its version.
        version: u64,
        /// Why.
        reason: String,
    },
    /// A model's file is missing or differs from what was registered.
    #[error("the file of {name} version {version} is damaged")]
    Damaged {
        /// The model.
        name: String,
        /// Its version.
        version: u64,
    },
}

/// The registry in a folder of its own.
pub struct Store {
    database: Database,
    files: PathBuf,
    /// Held while files and records change, so that a removal does not delete a file whose record
    /// is about to be written.
    changing: Mutex<()>,
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> StoreError + '_ {
    move |source| StoreError::Io { path: path.to_path_buf(), source }
}

fn database<E: Into<redb::Error>>(err: E) -> StoreError {
    StoreError::Database(err.into())
}

impl Store {
    /// Opens the registry in `folder`, or creates it. One process at a time.
    pub fn open(folder: &Path) -> Result<Store, StoreError> {
        let files = folder.join("models");
        fs::create_dir_all(&files).map_err(io(&files))?;
        let database = Database::create(folder.join("registry.redb")).map_err(self::database)?;
        let transaction = database.begin_write().map_err(self::database)?;
        transaction.open_table(MODELS).map_err(self::database)?;
        transaction.commit().map_err(self::database)?;
        let store = Store { database, files, changing: Mutex::new(()) };
        store.remove_orphans()?;
        Ok(store)
    }

    /// Every registered model and version, sorted.
    pub fn list(&self) -> Result<Vec<Manifest>, StoreError> {
        let transaction = self.database.begin_read().map_err(database)?;
        let table = transaction.open_table(MODELS).map_err(database)?;
        let mut manifests = Vec::new();
        for row in table.iter().map_err(database)? {
            let (key, value) = row.map_err(database)?;
            let (name, version) = key.value();
            manifests.push(read_record(name, version, value.value())?);
        }
        Ok(manifests)
    }

    /// The named version, or the latest; `None` when there is none.
    pub fn find(&self, name: &str, version: Option<u64>) -> Result<Option<Manifest>, StoreError> {
        let transaction = self.database.begin_read().map_err(database)?;
        let table = transaction.open_table(MODELS).map_err(database)?;
        let (first, last) = (version.unwrap_or(0), version.unwrap_or(u64::MAX));
        let mut range = table.range((name, first)..=(name, last)).map_err(database)?;
        let Some(row) = range.next_back() else { return Ok(None) };
        let (key, value) = row.map_err(database)?;
        let (name, version) = key.value();
        read_record(name, version, value.value()).map(Some)
    }

    /// Registers `onnx` as the next version of `name`. Durable when it returns.
    pub fn register(
        &self,
        name: &str,
        onnx: &[u8],
        config: ModelConfig,
    ) -> Result<Manifest, StoreError> {
        if !is_valid_name(name) {
            return Err(StoreError::BadName(name.to_string()));
        }
        let sha256 = hex(&Sha256::digest(onnx));
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_file(&sha256, onnx)?;
        let transaction = self.database.begin_write().map_err(database)?;
        let manifest = {
            let mut table = transaction.open_table(MODELS).map_err(database)?;
            let latest = {
                let mut range = table.range((name, 0)..=(name, u64::MAX)).map_err(database)?;
                match range.next_back() {
                    Some(row) => row.map_err(database)?.0.value().1,
                    None => 0,
                }
            };
            let manifest = Manifest {
                name: name.to_string(),
                version: latest + 1,
                sha256,
                size_bytes: onnx.len() as u64,
                config,
            };
            let record = serde_json::to_string(&manifest).map_err(|err| StoreError::BadRecord {
                name: name.to_string(),
                version: latest + 1,
                reason: err.to_string(),
            })?;
            table.insert((name, latest + 1), record.as_str()).map_err(database)?;
            manifest
        };
        transaction.commit().map_err(database)?;
        Ok(manifest)
    }

    /// Removes one version; `false` if it does not exist.
    pub fn remove(&self, name: &str, version: u64) -> Result<bool, StoreError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let transaction = self.database.begin_write().map_err(database)?;
        let removed = {
            let mut table = transaction.open_table(MODELS).map_err(database)?;
            table.remove((name, version)).map_err(database)?.is_some()
        };
        transaction.commit().map_err(database)?;
        self.remove_orphans()?;
        Ok(removed)
    }

    /// The ONNX file of a registered model.
    pub fn path_of(&self, manifest: &Manifest) -> PathBuf {
        self.files.join(format!("{}.onnx", manifest.sha256))
    }

    /// The ONNX bytes of a registered model, verified against the registered hash.
    pub fn read(&self, manifest: &Manifest) -> Result<Vec<u8>, StoreError> {
        let path = self.path_of(manifest);
        let bytes = fs::read(&path).map_err(io(&path))?;
        if hex(&Sha256::digest(&bytes)) == manifest.sha256 {
            return Ok(bytes);
        }
        Err(StoreError::Damaged { name: manifest.name.clone(), version: manifest.version })
    }

    fn write_file(&self, sha256: &str, onnx: &[u8]) -> Result<(), StoreError> {
        let path = self.files.join(format!("{sha256}.onnx"));
        let partial = self.files.join(format!("{sha256}.partial"));
        let mut file = File::create(&partial).map_err(io(&partial))?;
        file.write_all(onnx).map_err(io(&partial))?;
        file.sync_all().map_err(io(&partial))?;
        fs::rename(&partial, &path).map_err(io(&path))?;
        File::open(&self.files).and_then(|folder| folder.sync_all()).map_err(io(&self.files))
    }

    /// Removes files without a record, which a crash or a removal leaves.
    fn remove_orphans(&self) -> Result<(), StoreError> {
        let named: HashSet<String> =
            self.list()?.into_iter().map(|manifest| format!("{}.onnx", manifest.sha256)).collect();
        for entry in fs::read_dir(&self.files).map_err(io(&self.files))? {
            let path = entry.map_err(io(&self.files))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !named.contains(&name) {
                fs::remove_file(&path).map_err(io(&path))?;
            }
        }
        Ok(())
    }
}

fn read_record(name: &str, version: u64, text: &str) -> Result<Manifest, StoreError> {
    serde_json::from_str(text).map_err(|err| StoreError::BadRecord {
        name: name.to_string(),
        version,
        reason: err.to_string(),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_up_and_survive_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(store.register("m", b"one", ModelConfig::default()).unwrap().version, 1);
        let second = store.register("m", b"two", ModelConfig::default()).unwrap();
        assert_eq!(second.version, 2);
        store.register("n", b"one", ModelConfig::default()).unwrap();
        drop(store);
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(store.find("m", None).unwrap(), Some(second.clone()));
        assert_eq!(store.read(&second).unwrap(), b"two");
        assert_eq!(store.list().unwrap().len(), 3);
        assert!(store.remove("m", 2).unwrap());
        assert!(!store.remove("m", 2).unwrap());
        // The bytes of the other version are shared with "n" and are kept.
        let first = store.find("m", None).unwrap().unwrap();
        assert_eq!(store.read(&first).unwrap(), b"one");
        assert!(!store.path_of(&second).exists());
    }

    #[test]
    fn unreferenced_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        drop(Store::open(folder.path()).unwrap());
        let leftover = folder.path().join("models/abc.partial");
        fs::write(&leftover, b"half").unwrap();
        drop(Store::open(folder.path()).unwrap());
        assert!(!leftover.exists());
    }

    #[test]
    fn damaged_files_and_invalid_names_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        assert!(matches!(
            store.register("../m", b"x", ModelConfig::default()),
            Err(StoreError::BadName(_))
        ));
        let manifest = store.register("m", b"fine", ModelConfig::default()).unwrap();
        fs::write(store.path_of(&manifest), b"not").unwrap();
        assert!(matches!(store.read(&manifest), Err(StoreError::Damaged { .. })));
    }
}
