//! The models of a cluster: records in the store, files in a folder that all machines see or in a bucket, named by their
//! content.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use model::ModelConfig;
use sha2::{Digest, Sha256};
use thiserror::Error;

use bucket::BucketStore;

use crate::query::spec::QuerySpec;
use crate::record::{Keys, ModelRecord, RecordKind, decode, encode};
use crate::store::{Store, StoreError};

pub mod bucket;

/// Attempts to change a record that others change too.
const ATTEMPTS: usize = 16;

/// The name of a content.
pub fn digest(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether this can be the name of a content.
fn is_digest(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Where the models' files are, for all machines.
#[derive(Clone, Debug)]
pub enum ModelStore {
    /// A folder that all machines see.
    Folder(FileStore),
    /// A bucket that all machines reach.
    Bucket(BucketStore),
}

/// Why a model's file cannot be had or kept.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModelStoreError {
    /// It is not there.
    #[error("{0}")]
    Missing(String),
    /// It is there and is not what its name says.
    #[error("{0}")]
    Damaged(String),
    /// The store cannot be used, or not now.
    #[error("{0}")]
    Unavailable(String),
}

impl ModelStore {
    /// The content with this name and of this many bytes, as a file of this machine. What a bucket holds is compared with
    /// its name when it is brought; whoever reads the file later compares again.
    pub async fn fetch(&self, digest: &str, bytes: u64) -> Result<PathBuf, ModelStoreError> {
        match self {
            ModelStore::Folder(files) => files.path(digest).ok_or_else(|| {
                let folder = files.folder.display();
                ModelStoreError::Missing(format!("{folder} has no {digest}"))
            }),
            ModelStore::Bucket(bucket) => bucket.fetch(digest, bytes).await,
        }
    }

    /// Keeps a content and returns its name.
    pub async fn put(&self, bytes: Bytes) -> Result<String, ModelStoreError> {
        match self {
            ModelStore::Folder(files) => {
                let files = files.clone();
                let fail = |why: String| ModelStoreError::Unavailable(why);
                let work = tokio::task::spawn_blocking(move || files.put(&bytes));
                work.await.map_err(|e| fail(e.to_string()))?.map_err(|e| fail(e.to_string()))
            }
            ModelStore::Bucket(bucket) => bucket.put(bytes).await,
        }
    }

    /// Says that a file that [`ModelStore::fetch`] gave was found to be damaged: a copy of it is brought anew.
    pub fn discard(&self, digest: &str) {
        if let ModelStore::Bucket(bucket) = self {
            bucket.discard(digest);
        }
    }
}

/// A folder of files named by their content.
#[derive(Clone, Debug)]
pub struct FileStore {
    folder: PathBuf,
}

impl FileStore {
    /// Files in `folder`, which is made where it is not there.
    pub fn open(folder: &Path) -> std::io::Result<FileStore> {
        std::fs::create_dir_all(folder.join("sha256"))?;
        Ok(FileStore { folder: folder.join("sha256") })
    }

    /// Where the content with this name is.
    pub fn path(&self, digest: &str) -> Option<PathBuf> {
        let path = self.folder.join(digest);
        (is_digest(digest) && path.is_file()).then_some(path)
    }

    /// Keeps a content and returns its name. A file appears whole or not at all.
    pub fn put(&self, bytes: &[u8]) -> std::io::Result<String> {
        let name = digest(bytes);
        let path = self.folder.join(&name);
        if !path.is_file() {
            let part = self.folder.join(format!(".{name}.{}", std::process::id()));
            std::fs::write(&part, bytes)?;
            std::fs::rename(&part, &path)?;
        }
        Ok(name)
    }
}

/// Changes to model records.
#[derive(Clone)]
pub struct ModelRecords {
    store: Arc<dyn Store>,
    keys: Keys,
}

impl ModelRecords {
    /// The records under `keys`.
    pub fn new(store: Arc<dyn Store>, keys: Keys) -> ModelRecords {
        ModelRecords { store, keys }
    }

    /// Changes the record of `name` by `change`, which sees what is there and may leave it (`None`). Returns the
    /// record that stands afterwards.
    pub async fn change(
        &self,
        name: &str,
        change: impl Fn(Option<&ModelRecord>) -> Option<ModelRecord>,
    ) -> Result<Option<ModelRecord>, StoreError> {
        let key = self.keys.one(RecordKind::Model, name);
        for _ in 0..ATTEMPTS {
            let entry = self.store.get(&key).await?;
            let before: Option<ModelRecord> =
                entry.as_ref().and_then(|entry| decode(&key, &entry.value));
            let Some(after) = change(before.as_ref()) else { return Ok(before) };
            let revision = entry.map_or(0, |entry| entry.revision);
            let put = self.store.compare_and_put(&key, revision, encode(&after), None).await?;
            if put.is_some() {
                return Ok(Some(after));
            }
        }
        Err(StoreError::Unreachable(format!("the record of '{name}' changes all the time")))
    }

    /// Makes a model of a repository known. A newer version replaces an older one; what is there already stays.
    pub async fn publish(
        &self,
        name: &str,
        version: u64,
        digest: &str,
        bytes: u64,
        config: &ModelConfig,
    ) -> Result<(), StoreError> {
        let fresh = || ModelRecord {
            version,
            digest: digest.to_string(),
            bytes,
            enabled: true,
            config: config.clone(),
        };
        let change = |before: Option<&ModelRecord>| match before {
            Some(before) if before.version == version && before.digest != digest => {
                tracing::warn!(
                    model = name,
                    version,
                    "version is already published with other content"
                );
                None
            }
            Some(before) if before.version >= version => None,
            _ => Some(fresh()),
        };
        self.change(name, change).await.map(|_| ())
    }

    /// Keeps a new version of a model and returns it.
    pub async fn register(
        &self,
        name: &str,
        digest: &str,
        bytes: u64,
        config: &ModelConfig,
    ) -> Result<u64, StoreError> {
        let change = |before: Option<&ModelRecord>| {
            Some(ModelRecord {
                version: before.map_or(1, |before| before.version + 1),
                digest: digest.to_string(),
                bytes,
                enabled: true,
                config: config.clone(),
            })
        };
        let record = self.change(name, change).await?;
        Ok(record.map_or(1, |record| record.version))
    }

    /// Says whether a model is to be served; `None` when there is no such model.
    pub async fn enable(
        &self,
        name: &str,
        enabled: bool,
    ) -> Result<Option<ModelRecord>, StoreError> {
        let change = |before: Option<&ModelRecord>| {
            let before = before.filter(|before| before.enabled != enabled)?;
            Some(ModelRecord { enabled, ..before.clone() })
        };
        self.change(name, change).await
    }

    /// Keeps a query under `name`, in place of one that is there.
    pub async fn put_query(&self, name: &str, query: &QuerySpec) -> Result<(), StoreError> {
        let key = self.keys.one(RecordKind::Query, name);
        for _ in 0..ATTEMPTS {
            let entry = self.store.get(&key).await?;
            let value = encode(query);
            if entry.as_ref().is_some_and(|entry| entry.value == value) {
                return Ok(());
            }
            let revision = entry.map_or(0, |entry| entry.revision);
            if self.store.compare_and_put(&key, revision, value, None).await?.is_some() {
                return Ok(());
            }
        }
        Err(StoreError::Unreachable(format!("the query '{name}' changes all the time")))
    }

    /// Forgets a query.
    pub async fn delete_query(&self, name: &str) -> Result<(), StoreError> {
        self.store.delete(&self.keys.one(RecordKind::Query, name)).await
    }

    /// Puts a record back, or removes it where there was none: a registration that failed leaves nothing.
    pub async fn restore(
        &self,
        name: &str,
        version: u64,
        before: Option<ModelRecord>,
    ) -> Result<(), StoreError> {
        let key = self.keys.one(RecordKind::Model, name);
        let Some(entry) = self.store.get(&key).await? else { return Ok(()) };
        let now: Option<ModelRecord> = decode(&key, &entry.value);
        if now.is_none_or(|now| now.version != version) {
            return Ok(());
        }
        match before {
            Some(before) => {
                let value = encode(&before);
                self.store.compare_and_put(&key, entry.revision, value, None).await.map(|_| ())
            }
            None => self.store.delete(&key).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_by_content_and_by_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let files = FileStore::open(folder.path()).unwrap();
        let name = files.put(b"model").unwrap();
        assert_eq!(name, digest(b"model"));
        assert_eq!(std::fs::read(files.path(&name).unwrap()).unwrap(), b"model");
        for bad in ["", "../secret", &"0".repeat(64), &"/".repeat(64)] {
            assert_eq!(files.path(bad), None, "{bad}");
        }
    }
}
