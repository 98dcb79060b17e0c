//! The registry: models given over `POST /register`, kept across restarts and crashes.
//!
//! A model's bytes are in a file named by their SHA-256, in a folder that only the registry uses;
//! its manifest is a record in an embedded database, with a copy beside the files. A file is
//! complete and on disk before its record is written, so a crash leaves either the whole model or
//! an unreferenced file, which the next start removes.
//!
//! The registry removes only what it wrote. Where the database is new, unreadable or of another
//! registry than the files, it removes nothing and says what to do.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ModelConfig;
use crate::durable;
use crate::repository::is_valid_name;

mod changed_settings;
mod files;
mod limits;
mod load_markers;
mod maintenance;
#[cfg(test)]
mod tests;

pub use changed_settings::ChangedSettings;
use files::RegistryFiles;
pub use limits::RegistryLimits;
pub use load_markers::{LoadMarker, LoadMarkers, LoadStage, MarkedModel, Quarantined, Suspect};
pub use maintenance::{CheckReport, ImportReport, RepairReport, repair};

/// Name and version to the JSON of a [`Manifest`].
const MODELS: TableDefinition<(&str, u64), &str> = TableDefinition::new("models");
/// Name to the version in force, where it is not the newest.
const SELECTED: TableDefinition<&str, u64> = TableDefinition::new("selected");
/// Name to the newest version there ever was, so that numbers are not used twice.
const NEWEST: TableDefinition<&str, u64> = TableDefinition::new("newest");
/// Facts about the registry.
const FACTS: TableDefinition<&str, &str> = TableDefinition::new("facts");
/// The fact that the marker in the files' folder repeats.
const IDENTITY: &str = "identity";

/// The database's file in the data folder.
pub const DATABASE: &str = "registry.redb";

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
    /// Another process uses the registry.
    #[error("{0} is in use by another process")]
    InUse(PathBuf),
    /// The database cannot be read.
    #[error(
        "{database} cannot be read ({reason}); nothing was changed. Restore it, or rebuild it with \
         'atoll registry repair --data-dir {data_dir}'"
    )]
    Unreadable {
        /// The database.
        database: PathBuf,
        /// Its folder.
        data_dir: PathBuf,
        /// Why.
        reason: String,
    },
    /// There are models, but their database is gone or empty.
    #[error(
        "{data_dir} holds {models} registered models, but {database} is missing or empty; nothing \
         was changed. Restore it, or rebuild it with 'atoll registry repair --data-dir {data_dir}'"
    )]
    Lost {
        /// The folder.
        data_dir: PathBuf,
        /// The database.
        database: PathBuf,
        /// Files of models there.
        models: usize,
    },
    /// The files belong to another registry than the database.
    #[error(
        "{files} belongs to another registry than {database}; nothing was changed. Put the two \
         that belong together in one folder, or give another --data-dir"
    )]
    Foreign {
        /// The folder of files.
        files: PathBuf,
        /// The database.
        database: PathBuf,
    },
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
    #[error("the file of {name} version {version} is damaged; register the model again")]
    Damaged {
        /// The model.
        name: String,
        /// Its version.
        version: u64,
    },
    /// The registry is full.
    #[error("{0}")]
    Full(String),
}

/// The registry in a folder of its own.
pub struct Store {
    /// `None` only while it is opened again after an error.
    database: RwLock<Option<Database>>,
    data_dir: PathBuf,
    files: RegistryFiles,
    limits: RegistryLimits,
    /// Whether files without a record may be removed.
    may_clean: bool,
    /// What was noticed when it was opened.
    notes: Vec<String>,
    /// Held while files and records change, so that a removal does not delete a file whose record
    /// is about to be written.
    changing: Mutex<()>,
}

fn io_error(path: &Path) -> impl FnOnce(std::io::Error) -> StoreError + '_ {
    move |source| StoreError::Io { path: path.to_path_buf(), source }
}

fn database<E: Into<redb::Error>>(err: E) -> StoreError {
    StoreError::Database(err.into())
}

/// A number that no other registry has.
fn new_identity() -> String {
    use std::hash::{BuildHasher, RandomState};
    let half = || RandomState::new().hash_one(std::time::SystemTime::now());
    format!("{:016x}{:016x}", half(), half())
}

impl Store {
    /// Opens the registry in `data_dir` with the default limits, or creates it. One process at a
    /// time.
    ///
    /// # Errors
    /// When it cannot be read, or when models are there and their database is not.
    pub fn open(data_dir: &Path) -> Result<Store, StoreError> {
        Store::open_with(data_dir, RegistryLimits::default())
    }

    /// Opens the registry in `data_dir`, or creates it. One process at a time.
    ///
    /// # Errors
    /// When it cannot be read, or when models are there and their database is not.
    pub fn open_with(data_dir: &Path, limits: RegistryLimits) -> Result<Store, StoreError> {
        let files = RegistryFiles::new(data_dir);
        let path = data_dir.join(DATABASE);
        let is_new = fs::metadata(&path).map_or(true, |metadata| metadata.len() == 0);
        if is_new {
            let models = files.count()?.max(files.records()?.len());
            if models > 0 {
                let data_dir = data_dir.to_path_buf();
                return Err(StoreError::Lost { data_dir, database: path, models });
            }
        }
        durable::create_folder(data_dir).map_err(io_error(data_dir))?;
        files.create()?;
        let database = open_database(data_dir)?;
        durable::sync_folder(data_dir).map_err(io_error(data_dir))?;
        let mut store = Store {
            database: RwLock::new(Some(database)),
            data_dir: data_dir.to_path_buf(),
            files,
            limits,
            may_clean: false,
            notes: Vec::new(),
            changing: Mutex::new(()),
        };
        store.identify()?;
        store.reconcile()?;
        Ok(store)
    }

    /// Compares the identities of database and files, and decides whether files may be removed.
    fn identify(&mut self) -> Result<(), StoreError> {
        let known = self.query(|transaction| {
            let table = transaction.open_table(FACTS).map_err(database)?;
            let known = table.get(IDENTITY).map_err(database)?;
            Ok(known.map(|identity| identity.value().to_string()))
        })?;
        match (known, self.files.owner()?) {
            (Some(known), Some(owner)) if known == owner => self.may_clean = true,
            (Some(_), Some(_)) => {
                let files = self.files.root().to_path_buf();
                return Err(StoreError::Foreign { files, database: self.data_dir.join(DATABASE) });
            }
            (Some(_), None) => self.notes.push(format!(
                "{} has lost its marker; files without a record are kept there until 'atoll \
                 registry repair --data-dir {}'",
                self.files.root().display(),
                self.data_dir.display()
            )),
            // New, or written by a release without identities: nothing is removed this time.
            (None, owner) => {
                let identity = owner.unwrap_or_else(new_identity);
                for manifest in self.list()? {
                    self.files.adopt(&manifest.sha256)?;
                }
                self.files.set_owner(&identity)?;
                self.update(|transaction| {
                    let mut table = transaction.open_table(FACTS).map_err(database)?;
                    table.insert(IDENTITY, identity.as_str()).map_err(database)?;
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Completes what an interrupted change left: copies of records, and files without a record.
    fn reconcile(&mut self) -> Result<(), StoreError> {
        let manifests = self.list()?;
        for manifest in &manifests {
            self.files.put_record(manifest, &to_json(manifest)?)?;
        }
        let strays = self.stray_records(&manifests)?;
        for (path, _) in &strays {
            self.notes.push(format!(
                "{} is not in the database; 'atoll registry repair --data-dir {}' restores it",
                path.display(),
                self.data_dir.display()
            ));
        }
        if self.may_clean {
            self.remove_unreferenced()?;
        }
        Ok(())
    }

    /// Copies of records that the database does not have.
    fn stray_records(&self, manifests: &[Manifest]) -> Result<Vec<files::RecordFile>, StoreError> {
        let known: HashSet<(&str, u64)> =
            manifests.iter().map(|m| (m.name.as_str(), m.version)).collect();
        let mut strays = self.files.records()?;
        strays.retain(|(_, record)| match record {
            Ok(manifest) => !known.contains(&(manifest.name.as_str(), manifest.version)),
            Err(_) => true,
        });
        Ok(strays)
    }

    /// What was noticed when the registry was opened, for the log.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The folder it is in.
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Marks of models that are being loaded or measured.
    pub fn load_markers(&self) -> LoadMarkers {
        LoadMarkers::in_data_dir(&self.data_dir)
    }

    /// Every registered model and version, sorted.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn list(&self) -> Result<Vec<Manifest>, StoreError> {
        self.query(|transaction| {
            let table = transaction.open_table(MODELS).map_err(database)?;
            let mut manifests = Vec::new();
            for row in table.iter().map_err(database)? {
                let (key, value) = row.map_err(database)?;
                let (name, version) = key.value();
                manifests.push(read_record(name, version, value.value())?);
            }
            Ok(manifests)
        })
    }

    /// The named version, or the one in force; `None` when there is none.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn find(&self, name: &str, version: Option<u64>) -> Result<Option<Manifest>, StoreError> {
        self.query(|transaction| {
            let table = transaction.open_table(MODELS).map_err(database)?;
            let selected = transaction.open_table(SELECTED).map_err(database)?;
            let selected = selected.get(name).map_err(database)?.map(|version| version.value());
            let version = version.or(selected);
            let (first, last) = (version.unwrap_or(0), version.unwrap_or(u64::MAX));
            let mut range = table.range((name, first)..=(name, last)).map_err(database)?;
            let Some(row) = range.next_back() else { return Ok(None) };
            let (key, value) = row.map_err(database)?;
            let (name, version) = key.value();
            read_record(name, version, value.value()).map(Some)
        })
    }

    /// Registers `onnx` as the next version of `name`, puts it in force and removes versions that
    /// are no longer kept. Durable when it returns; after an error nothing of it remains.
    ///
    /// # Errors
    /// When the registry is full, or files or database cannot be written.
    pub fn register(
        &self,
        name: &str,
        onnx: &[u8],
        config: ModelConfig,
    ) -> Result<Manifest, StoreError> {
        if !is_valid_name(name) {
            return Err(StoreError::BadName(name.to_string()));
        }
        let _changing = self.lock();
        let all = self.list()?;
        let manifest = Manifest {
            name: name.to_string(),
            version: self.newest_ever(name)? + 1,
            sha256: files::hash(onnx),
            size_bytes: onnx.len() as u64,
            config,
        };
        let expired = self.limits.expired(&all, name);
        let is_kept = |m: &&Manifest| m.name != name || !expired.contains(&m.version);
        let kept: Vec<&Manifest> = all.iter().filter(is_kept).collect();
        self.limits.check(&kept, &manifest).map_err(StoreError::Full)?;
        let is_new = !self.path_of(&manifest).exists();
        if let Err(error) = self.insert(&manifest, onnx) {
            // The next start removes what cannot be removed now.
            let _ = self.files.remove_record(name, manifest.version);
            if is_new {
                let _ = self.files.remove_content(&manifest.sha256);
            }
            return Err(error);
        }
        for version in expired {
            // The model is registered; what stays of older versions goes with the next one.
            let _ = self.remove_version(name, version);
        }
        Ok(manifest)
    }

    /// Writes file, record and copy of the record, in this order.
    fn insert(&self, manifest: &Manifest, onnx: &[u8]) -> Result<(), StoreError> {
        let json = to_json(manifest)?;
        self.files.put_content(&manifest.sha256, onnx)?;
        self.update(|transaction| insert_record(transaction, manifest, &json, true))?;
        if let Err(error) = self.files.put_record(manifest, &json) {
            self.update(|transaction| {
                remove_record(transaction, &manifest.name, manifest.version)
            })?;
            return Err(error);
        }
        Ok(())
    }

    /// Removes one version; `false` if it does not exist. Where it was in force, the newest of the
    /// others is.
    ///
    /// # Errors
    /// When files or database cannot be written.
    pub fn remove(&self, name: &str, version: u64) -> Result<bool, StoreError> {
        let _changing = self.lock();
        self.remove_version(name, version)
    }

    /// Removes all versions of `name`; returns how many there were.
    ///
    /// # Errors
    /// When files or database cannot be written.
    pub fn remove_all(&self, name: &str) -> Result<usize, StoreError> {
        let _changing = self.lock();
        let versions = self.versions(name)?;
        for version in &versions {
            self.remove_version(name, *version)?;
        }
        self.update(|transaction| {
            transaction.open_table(NEWEST).map_err(database)?.remove(name).map_err(database)?;
            Ok(())
        })?;
        Ok(versions.len())
    }

    fn remove_version(&self, name: &str, version: u64) -> Result<bool, StoreError> {
        let Some(manifest) = self.find(name, Some(version))? else { return Ok(false) };
        // The copy first: a copy without a record would be restored by a repair.
        self.files.remove_record(name, version)?;
        self.update(|transaction| remove_record(transaction, name, version))?;
        self.remove_content(&manifest.sha256)?;
        // What was counted against it must not be held against a later model of this number.
        self.load_markers().release(name, version).map_err(io_error(self.files.root()))?;
        Ok(true)
    }

    /// Removes a content that no record names any more.
    fn remove_content(&self, sha256: &str) -> Result<(), StoreError> {
        if self.referenced()?.is_none_or(|referenced| referenced.contains(sha256)) {
            return Ok(());
        }
        self.files.remove_content(sha256)
    }

    /// Hashes that a record or the copy of one names; `None` when a copy cannot be read, so that
    /// nothing is known to be of no use.
    fn referenced(&self) -> Result<Option<HashSet<String>>, StoreError> {
        let manifests = self.list()?;
        // A copy may be all that is left of a record after the database was restored from a backup.
        let strays: Option<Vec<Manifest>> =
            self.stray_records(&manifests)?.into_iter().map(|(_, record)| record.ok()).collect();
        let all = strays.map(|strays| manifests.into_iter().chain(strays));
        Ok(all.map(|all| all.map(|manifest| manifest.sha256).collect()))
    }

    /// All versions of `name`, ascending.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn versions(&self, name: &str) -> Result<Vec<u64>, StoreError> {
        self.query(|transaction| {
            let table = transaction.open_table(MODELS).map_err(database)?;
            let range = table.range((name, 0)..=(name, u64::MAX)).map_err(database)?;
            range.map(|row| Ok(row.map_err(database)?.0.value().1)).collect()
        })
    }

    /// Puts an older version of `name` in force: the given one, or the one before the one in
    /// force. `None` when there is no such version. The next registration ends it.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn roll_back(&self, name: &str, to: Option<u64>) -> Result<Option<Manifest>, StoreError> {
        let _changing = self.lock();
        let Some(current) = self.find(name, None)? else { return Ok(None) };
        let before = |versions: Vec<u64>| versions.into_iter().rfind(|v| *v < current.version);
        let to = match to {
            Some(version) => Some(version),
            None => before(self.versions(name)?),
        };
        let Some(target) = to else { return Ok(None) };
        let Some(manifest) = self.find(name, Some(target))? else { return Ok(None) };
        self.update(|transaction| {
            let mut table = transaction.open_table(SELECTED).map_err(database)?;
            table.insert(name, target).map_err(database)?;
            Ok(())
        })?;
        Ok(Some(manifest))
    }

    /// The ONNX file of a registered model.
    pub fn path_of(&self, manifest: &Manifest) -> PathBuf {
        self.files.content_path(&manifest.sha256)
    }

    /// The ONNX bytes of a registered model, verified against the registered hash.
    ///
    /// # Errors
    /// When the file cannot be read or is damaged.
    pub fn read(&self, manifest: &Manifest) -> Result<Vec<u8>, StoreError> {
        let path = self.path_of(manifest);
        let damaged =
            || StoreError::Damaged { name: manifest.name.clone(), version: manifest.version };
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Err(damaged()),
            Err(err) => return Err(io_error(&path)(err)),
        };
        if files::hash(&bytes) == manifest.sha256 { Ok(bytes) } else { Err(damaged()) }
    }

    fn newest_ever(&self, name: &str) -> Result<u64, StoreError> {
        let recorded = self.query(|transaction| {
            let table = transaction.open_table(NEWEST).map_err(database)?;
            Ok(table.get(name).map_err(database)?.map_or(0, |version| version.value()))
        })?;
        Ok(recorded.max(self.versions(name)?.last().copied().unwrap_or(0)))
    }

    /// Removes files that an interrupted registration or removal left.
    fn remove_unreferenced(&self) -> Result<(), StoreError> {
        let Some(referenced) = self.referenced()? else { return Ok(()) };
        for path in self.files.unreferenced(&referenced)? {
            durable::remove(&path).map_err(io_error(&path))?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn query<T>(
        &self,
        work: impl FnOnce(&redb::ReadTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let guard = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let opened = guard.as_ref().ok_or_else(|| StoreError::InUse(self.data_dir.clone()))?;
        work(&opened.begin_read().map_err(database)?)
    }

    fn update<T>(
        &self,
        work: impl FnOnce(&WriteTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let attempt = || {
            let guard = self.database.read().unwrap_or_else(PoisonError::into_inner);
            let opened = guard.as_ref().ok_or_else(|| StoreError::InUse(self.data_dir.clone()))?;
            let transaction = opened.begin_write().map_err(database)?;
            let value = work(&transaction)?;
            transaction.commit().map_err(database)?;
            Ok(value)
        };
        let result = attempt();
        if matches!(result, Err(StoreError::Database(_))) {
            self.reopen();
        }
        result
    }

    /// Opens the database again: after an error of the disk it refuses all work until then.
    fn reopen(&self) {
        let mut guard = self.database.write().unwrap_or_else(PoisonError::into_inner);
        *guard = None;
        *guard = open_database(&self.data_dir).ok();
    }
}

/// Opens or creates the database, with all its tables.
fn open_database(data_dir: &Path) -> Result<Database, StoreError> {
    let path = data_dir.join(DATABASE);
    let unreadable = |err: redb::Error| StoreError::Unreadable {
        database: path.clone(),
        data_dir: data_dir.to_path_buf(),
        reason: err.to_string(),
    };
    let opened = Database::create(&path).map_err(|err| match err {
        redb::DatabaseError::DatabaseAlreadyOpen => StoreError::InUse(path.clone()),
        err => unreadable(err.into()),
    })?;
    let transaction = opened.begin_write().map_err(database)?;
    transaction.open_table(MODELS).map_err(|err| unreadable(err.into()))?;
    transaction.open_table(SELECTED).map_err(|err| unreadable(err.into()))?;
    transaction.open_table(NEWEST).map_err(|err| unreadable(err.into()))?;
    transaction.open_table(FACTS).map_err(|err| unreadable(err.into()))?;
    transaction.open_table(changed_settings::CHANGED).map_err(|err| unreadable(err.into()))?;
    transaction.commit().map_err(database)?;
    Ok(opened)
}

/// Inserts a record; with `select`, it is in force from now on.
fn insert_record(
    transaction: &WriteTransaction,
    manifest: &Manifest,
    json: &str,
    select: bool,
) -> Result<(), StoreError> {
    let name = manifest.name.as_str();
    let mut models = transaction.open_table(MODELS).map_err(database)?;
    models.insert((name, manifest.version), json).map_err(database)?;
    let mut newest = transaction.open_table(NEWEST).map_err(database)?;
    let known = newest.get(name).map_err(database)?.map_or(0, |version| version.value());
    newest.insert(name, known.max(manifest.version)).map_err(database)?;
    if select {
        // The newest is in force unless another is selected.
        transaction.open_table(SELECTED).map_err(database)?.remove(name).map_err(database)?;
    }
    Ok(())
}

fn remove_record(
    transaction: &WriteTransaction,
    name: &str,
    version: u64,
) -> Result<(), StoreError> {
    let mut models = transaction.open_table(MODELS).map_err(database)?;
    models.remove((name, version)).map_err(database)?;
    let mut selected = transaction.open_table(SELECTED).map_err(database)?;
    let is_selected = selected.get(name).map_err(database)?.is_some_and(|v| v.value() == version);
    if is_selected {
        selected.remove(name).map_err(database)?;
    }
    Ok(())
}

fn read_record(name: &str, version: u64, text: &str) -> Result<Manifest, StoreError> {
    serde_json::from_str(text).map_err(|err| StoreError::BadRecord {
        name: name.to_string(),
        version,
        reason: err.to_string(),
    })
}

fn to_json(manifest: &Manifest) -> Result<String, StoreError> {
    serde_json::to_string(manifest).map_err(|err| StoreError::BadRecord {
        name: manifest.name.clone(),
        version: manifest.version,
        reason: err.to_string(),
    })
}
