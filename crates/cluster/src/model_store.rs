//! The model store of a cluster: records in the store; files in a shared folder or a bucket, named
//! by the digest of their content.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use model::store::RegistryLimits;
use model::{ModelConfig, durable};
use sha2::{Digest, Sha256};
use thiserror::Error;

use bucket::BucketStore;

use crate::candidate::{self, BACKENDS_WANTED, CandidateError, CandidateRecord};
use crate::query::spec::QuerySpec;
use crate::record::{
    Keys, ModelRecord, RecordKind, Tombstone, VersionRecord, decode, encode, is_tombstone,
};
use crate::store::{Condition, Store, StoreError, Write};

pub mod bucket;
pub mod ownership;

/// Age of a half-written file whose writer is gone for sure.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// Attempts to change a record that other processes change too.
const ATTEMPTS: usize = 16;

/// The SHA-256 of a file's content, in hexadecimal: its name.
pub fn digest(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether this is a well-formed digest.
fn is_digest(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Where the models' files are.
#[derive(Clone, Debug)]
pub enum ModelStore {
    /// A folder that all machines mount.
    Folder(FileStore),
    /// A bucket that all machines can reach.
    Bucket(BucketStore),
}

/// Why a model's file cannot be read or stored.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModelStoreError {
    /// The file does not exist.
    #[error("{0}")]
    Missing(String),
    /// The file's content does not match its digest.
    #[error("{0}")]
    Damaged(String),
    /// The store cannot be used, at least not now.
    #[error("{0}")]
    Unavailable(String),
}

impl ModelStore {
    /// Returns a local file with the content of this digest and size. The content of a bucket is
    /// verified when it is downloaded; the loader verifies the file again.
    pub async fn fetch(&self, digest: &str, bytes: u64) -> Result<PathBuf, ModelStoreError> {
        match self {
            ModelStore::Folder(files) => files.path(digest).ok_or_else(|| {
                let folder = files.folder.display();
                ModelStoreError::Missing(format!("{folder} has no {digest}"))
            }),
            ModelStore::Bucket(bucket) => bucket.fetch(digest, bytes).await,
        }
    }

    /// Stores a file and returns its digest.
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

    /// Reports that a file from [`ModelStore::fetch`] is damaged: it is downloaded again.
    pub fn discard(&self, digest: &str) {
        if let ModelStore::Bucket(bucket) = self {
            bucket.discard(digest);
        }
    }
}

/// A folder of files named by their digest.
#[derive(Clone, Debug)]
pub struct FileStore {
    /// With folders beside it: of marks who has written which file, and of files that are being
    /// removed.
    folder: PathBuf,
}

impl FileStore {
    /// Opens `folder`, which is created where it does not exist.
    pub fn open(folder: &Path) -> std::io::Result<FileStore> {
        let folder = folder.join("sha256");
        durable::create_folder(&folder)?;
        // Other machines may be writing now.
        durable::remove_abandoned(&folder, ABANDONED)?;
        Ok(FileStore { folder })
    }

    /// The path of the file with this digest.
    pub fn path(&self, digest: &str) -> Option<PathBuf> {
        let path = self.folder.join(digest);
        (is_digest(digest) && path.is_file()).then_some(path)
    }

    /// Stores a file and returns its digest. The file appears atomically and is on disk when this
    /// returns; a damaged one is replaced. After an error nothing of it remains.
    pub fn put(&self, bytes: &[u8]) -> std::io::Result<String> {
        let name = digest(bytes);
        let path = self.folder.join(&name);
        if !std::fs::read(&path).is_ok_and(|there| there == bytes) {
            durable::write(&path, bytes)?;
        }
        Ok(name)
    }
}

/// Reads and changes the records of models and queries in the store.
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

    /// The store that they are in.
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Changes the record of `name` by `change`, which gets the current record and may keep it by
    /// returning `None`. Returns the record that is in force afterwards. Where a model of this name
    /// was deleted, `change` gets the highest number that its versions had.
    pub async fn change(
        &self,
        name: &str,
        change: impl Fn(Option<&ModelRecord>, u64) -> Option<ModelRecord>,
    ) -> Result<Option<ModelRecord>, StoreError> {
        let key = self.keys.one(RecordKind::Model, name);
        for _ in 0..ATTEMPTS {
            let entry = self.store.get(&key).await?;
            let before: Option<ModelRecord> =
                entry.as_ref().and_then(|entry| decode(&key, &entry.value));
            let deleted = entry.as_ref().and_then(|entry| Tombstone::read(&entry.value));
            let highest = deleted.map_or(0, |deleted| deleted.highest);
            let Some(after) = change(before.as_ref(), highest) else { return Ok(before) };
            let revision = entry.map_or(0, |entry| entry.revision);
            let put = self.store.compare_and_put(&key, revision, encode(&after), None).await?;
            if put.is_some() {
                return Ok(Some(after));
            }
        }
        Err(StoreError::Unreachable(format!(
            "the record of '{name}' is changed concurrently too often"
        )))
    }

    /// Publishes a model of a backend's folder, where the cluster has none of this name. Returns
    /// whether the cluster has an older version instead: then `replace` says whether this one takes
    /// its place. A version that was in force once stays as it is.
    pub async fn publish(
        &self,
        name: &str,
        version: &VersionRecord,
        replace: bool,
    ) -> Result<bool, StoreError> {
        let is_newer = AtomicBool::new(false);
        let change = |before: Option<&ModelRecord>, highest: u64| {
            is_newer.store(false, Relaxed);
            match before {
                Some(before) if before.version == version.version => {
                    if before.digest != version.digest {
                        let number = version.version;
                        tracing::warn!(
                            model = name,
                            version = number,
                            "version is already published with other content"
                        );
                    }
                    None
                }
                // Also where a newer version was rolled back: a restart does not undo that.
                Some(before) if before.highest_version() >= version.version => None,
                Some(_) if !replace => {
                    is_newer.store(true, Relaxed);
                    None
                }
                before => Some(first_or_next(before, highest, version.clone())),
            }
        };
        self.change(name, change).await?;
        Ok(is_newer.into_inner())
    }

    /// Whether a record needs the file with this digest. One that cannot be read may.
    pub async fn refer_to(&self, digest: &str) -> Result<bool, StoreError> {
        let needs = |found: Option<bool>| found.unwrap_or(true);
        let models = self.store.list(&self.keys.of(RecordKind::Model)).await?;
        let mut models = models.entries.iter().filter(|entry| !is_tombstone(&entry.value));
        let by_model = models.any(|entry| {
            let record: Option<ModelRecord> = decode(&entry.key, &entry.value);
            needs(record.map(|record| record.files().any(|(own, _)| own == digest)))
        });
        let candidates = self.store.list(&self.keys.of(RecordKind::Candidate)).await?;
        Ok(by_model
            || candidates.entries.iter().any(|entry| {
                let record: Option<CandidateRecord> = decode(&entry.key, &entry.value);
                needs(record.map(|record| record.digest == digest))
            }))
    }

    /// Checks that a new version of `name` exceeds no limit: its digest and size.
    ///
    /// # Errors
    /// The inner one says which limit it exceeds.
    pub async fn check_limits(
        &self,
        limits: &RegistryLimits,
        name: &str,
        (digest, bytes): (&str, u64),
    ) -> Result<Result<(), String>, StoreError> {
        let prefix = self.keys.of(RecordKind::Model);
        let mut records: BTreeMap<String, ModelRecord> = BTreeMap::new();
        for entry in self.store.list(&prefix).await?.entries {
            let of = entry.key.strip_prefix(&prefix).unwrap_or(&entry.key).to_string();
            if let Some(record) = decode(&entry.key, &entry.value) {
                records.insert(of, record);
            }
        }
        let version = records.get(name).map_or(0, ModelRecord::highest_version) + 1;
        let (digest, config) = (digest.to_string(), ModelConfig::default());
        let fresh = VersionRecord { version, digest, bytes, config };
        // Older versions go with it.
        let after = first_or_next(records.get(name), 0, fresh);
        records.insert(name.to_string(), after);
        let files = records.iter().flat_map(|(name, record)| {
            record.files().map(move |(digest, bytes)| (name.as_str(), digest, bytes))
        });
        Ok(limits.check_files(files, name))
    }

    /// The record of a model.
    pub async fn find(&self, name: &str) -> Result<Option<ModelRecord>, StoreError> {
        let key = self.keys.one(RecordKind::Model, name);
        let entry = self.store.get(&key).await?;
        Ok(entry.and_then(|entry| decode(&key, &entry.value)))
    }

    /// Has a version checked by as many backends as there should be, of those there are, before it
    /// replaces anything: name, digest and size. Returns how many can load it, and how many should.
    pub async fn propose(
        &self,
        candidate: (&str, &str, u64),
        config: &ModelConfig,
        limit: Duration,
    ) -> Result<(usize, usize), CandidateError> {
        let present = self.store.list(&self.keys.of(RecordKind::Backend)).await?.entries.len();
        let wanted = BACKENDS_WANTED.min(present).max(1);
        let (store, keys) = (&self.store, &self.keys);
        let passed = candidate::propose(store, keys, candidate, config, limit, wanted).await?;
        Ok((passed, wanted))
    }

    /// Stores a new version of a model and returns its number.
    pub async fn register(
        &self,
        name: &str,
        digest: &str,
        bytes: u64,
        config: &ModelConfig,
    ) -> Result<u64, StoreError> {
        let change = |before: Option<&ModelRecord>, highest: u64| {
            let fresh = VersionRecord {
                version: before.map_or(highest, ModelRecord::highest_version) + 1,
                digest: digest.to_string(),
                bytes,
                config: config.clone(),
            };
            Some(first_or_next(before, highest, fresh))
        };
        let record = self.change(name, change).await?;
        Ok(record.map_or(1, |record| record.version))
    }

    /// Puts another version of a model in force; `None` when its record does not have it.
    pub async fn roll_back(
        &self,
        name: &str,
        version: u64,
    ) -> Result<Option<ModelRecord>, StoreError> {
        let change = |before: Option<&ModelRecord>, _| {
            let target = before?.rollback_target(Some(version))?.clone();
            Some(before?.replaced_by(target))
        };
        Ok(self.change(name, change).await?.filter(|record| record.version == version))
    }

    /// Deletes a version of a model, or all of them: how many there were, and the record that is
    /// left. Where the version was in force, the newest of the others is. Where nothing is left, a
    /// tombstone says so.
    pub async fn delete(
        &self,
        name: &str,
        version: Option<u64>,
    ) -> Result<(usize, Option<ModelRecord>), StoreError> {
        let key = self.keys.one(RecordKind::Model, name);
        for _ in 0..ATTEMPTS {
            let Some(entry) = self.store.get(&key).await? else { return Ok((0, None)) };
            if Tombstone::read(&entry.value).is_some() {
                return Ok((0, None));
            }
            let record: Option<ModelRecord> = decode(&key, &entry.value);
            let highest = record.as_ref().map_or(0, ModelRecord::highest_version);
            let count = 1 + record.as_ref().map_or(0, |record| record.others.len());
            let left = match (&record, version) {
                (Some(record), Some(version)) => match record.without(version) {
                    None if record.version != version => return Ok((0, Some(record.clone()))),
                    left => left,
                },
                _ => None,
            };
            let write = match &left {
                Some(left) => Write::put(key.clone(), encode(left)),
                None => Write::put(key.clone(), encode(&Tombstone::new(highest))),
            };
            let condition = Condition { key: key.clone(), revision: entry.revision };
            if self.store.transact(vec![condition], vec![write]).await?.is_some() {
                return Ok((if version.is_some() { 1 } else { count }, left));
            }
        }
        Err(StoreError::Unreachable(format!(
            "the record of '{name}' is changed concurrently too often"
        )))
    }

    /// Enables or disables a model; `None` when it does not exist.
    pub async fn enable(
        &self,
        name: &str,
        enabled: bool,
    ) -> Result<Option<ModelRecord>, StoreError> {
        let change = |before: Option<&ModelRecord>, _| {
            let before = before.filter(|before| before.enabled != enabled)?;
            Some(ModelRecord { enabled, ..before.clone() })
        };
        self.change(name, change).await
    }

    /// Stores a query under `name`; replaces an existing one.
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
        Err(StoreError::Unreachable(format!(
            "the query '{name}' is changed concurrently too often"
        )))
    }

    /// Deletes a query; a tombstone says so.
    pub async fn delete_query(&self, name: &str) -> Result<(), StoreError> {
        let key = self.keys.one(RecordKind::Query, name);
        self.store.put(&key, encode(&Tombstone::new(0)), None).await.map(|_| ())
    }

    /// Restores the previous record, or removes the record where there was none, after a
    /// registration that failed.
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
            None => {
                let value = encode(&Tombstone::new(version));
                self.store.compare_and_put(&key, entry.revision, value, None).await.map(|_| ())
            }
        }
    }
}

/// The record of a model's first version, or of the next one.
fn first_or_next(before: Option<&ModelRecord>, highest: u64, fresh: VersionRecord) -> ModelRecord {
    let VersionRecord { version, digest, bytes, config } = fresh.clone();
    match before {
        Some(before) => before.replaced_by(fresh),
        None => ModelRecord {
            version,
            digest,
            bytes,
            enabled: true,
            config,
            highest: highest.max(version),
            ..ModelRecord::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use base::MonotonicClock;

    use super::*;

    fn records() -> ModelRecords {
        let clock = Arc::new(MonotonicClock::new());
        let access = crate::store::etcd::EtcdAccess::default();
        let store = crate::store::open("memory", access, clock).unwrap();
        ModelRecords::new(store, Keys::new("test"))
    }

    #[tokio::test]
    async fn versions_are_rolled_back_and_deleted() {
        let (records, config) = (records(), ModelConfig::default());
        for (expected, digest) in [(1, "a"), (2, "b"), (3, "c")] {
            assert_eq!(records.register("m", digest, 1, &config).await.unwrap(), expected);
        }
        let now = records.find("m").await.unwrap().unwrap();
        assert_eq!(now.rollback_target(None).map(|target| target.version), Some(2));
        assert_eq!(now.rollback_target(Some(9)), None);
        let rolled = records.roll_back("m", 1).await.unwrap().unwrap();
        assert_eq!((rolled.version, rolled.digest.as_str()), (1, "a"));
        assert_eq!(rolled.rollback_target(None), None);
        assert_eq!(records.roll_back("m", 9).await.unwrap(), None);
        // A restarted backend publishes what it has, and does not end the rollback.
        let version = |version, digest: &str| VersionRecord {
            version,
            digest: digest.to_string(),
            bytes: 1,
            config: config.clone(),
        };
        assert!(!records.publish("m", &version(3, "c"), true).await.unwrap());
        assert_eq!(records.find("m").await.unwrap().unwrap().version, 1);
        // No number is used twice, also not of a version that was deleted.
        assert_eq!(records.delete("m", Some(3)).await.unwrap().0, 1);
        assert_eq!(records.delete("m", Some(3)).await.unwrap().0, 0);
        assert_eq!(records.register("m", "d", 1, &config).await.unwrap(), 4);
        let (count, left) = records.delete("m", Some(4)).await.unwrap();
        assert_eq!((count, left.unwrap().version), (1, 2));
        assert_eq!(records.delete("m", None).await.unwrap(), (2, None));
        assert_eq!(records.delete("m", None).await.unwrap(), (0, None));
        assert_eq!(records.find("m").await.unwrap(), None);
        // Numbers go on after the deletion of all.
        assert_eq!(records.register("m", "e", 1, &config).await.unwrap(), 5);
    }

    #[tokio::test]
    async fn a_folder_with_a_newer_version_replaces_nothing_by_itself() {
        let (records, config) = (records(), ModelConfig::default());
        let version = |version, digest: &str| VersionRecord {
            version,
            digest: digest.to_string(),
            bytes: 1,
            config: config.clone(),
        };
        assert!(!records.publish("m", &version(1, "a"), false).await.unwrap());
        assert!(records.publish("m", &version(2, "b"), false).await.unwrap(), "it waits");
        assert_eq!(records.find("m").await.unwrap().unwrap().version, 1);
        assert!(!records.publish("m", &version(2, "b"), true).await.unwrap());
        let now = records.find("m").await.unwrap().unwrap();
        assert_eq!((now.version, now.others[0].version), (2, 1));
        // A backend that still has the older one changes nothing.
        assert!(!records.publish("m", &version(1, "a"), true).await.unwrap());
        assert_eq!(records.find("m").await.unwrap().unwrap().version, 2);
    }

    #[tokio::test]
    async fn a_record_keeps_few_versions() {
        let (records, config) = (records(), ModelConfig::default());
        for _ in 0..20 {
            records.register("m", "a", 1, &config).await.unwrap();
        }
        let record = records.find("m").await.unwrap().unwrap();
        let others: Vec<u64> = record.others.iter().map(|other| other.version).collect();
        assert_eq!((record.version, others), (20, vec![16, 17, 18, 19]));
    }

    #[test]
    fn finds_files_only_by_digest() {
        let folder = tempfile::tempdir().unwrap();
        let files = FileStore::open(folder.path()).unwrap();
        let name = files.put(b"model").unwrap();
        assert_eq!(name, digest(b"model"));
        assert_eq!(std::fs::read(files.path(&name).unwrap()).unwrap(), b"model");
        // A damaged file is replaced when its content is stored again.
        std::fs::write(files.path(&name).unwrap(), b"mod").unwrap();
        assert_eq!(files.put(b"model").unwrap(), name);
        assert_eq!(std::fs::read(files.path(&name).unwrap()).unwrap(), b"model");
        for bad in ["", "../secret", &"0".repeat(64), &"/".repeat(64)] {
            assert_eq!(files.path(bad), None, "{bad}");
        }
    }

    #[test]
    fn writers_with_the_same_process_id_do_not_collide() {
        let folder = tempfile::tempdir().unwrap();
        // Two containers on one shared folder: both write as process 1.
        let pods = [0, 1].map(|_| FileStore::open(folder.path()).unwrap());
        let content: Vec<u8> = (0..1 << 20).map(|byte| byte as u8).collect();
        let name = digest(&content);
        std::thread::scope(|scope| {
            for pod in &pods {
                scope.spawn(|| {
                    for _ in 0..10 {
                        assert_eq!(pod.put(&content).unwrap(), name);
                        // Whatever the other one does, the file is never seen half written.
                        if let Some(seen) = pod.path(&name).and_then(|p| std::fs::read(p).ok()) {
                            assert_eq!(digest(&seen), name);
                        }
                        let _ = std::fs::remove_file(folder.path().join("sha256").join(&name));
                    }
                });
            }
        });
        let left = std::fs::read_dir(folder.path().join("sha256")).unwrap().count();
        assert!(left <= 1, "{left} files");
    }
}
