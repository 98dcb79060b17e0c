//! Checks, repairs, exports and imports a registry.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, RwLock};

use serde::{Deserialize, Serialize};

use super::files::{RegistryFiles, hash};
use super::{
    DATABASE, FACTS, IDENTITY, Manifest, RegistryLimits, SELECTED, Store, StoreError, database,
    insert_record, io_error, new_identity, open_database, to_json,
};
use crate::durable;
use crate::repository::{Repository, is_valid_name};

/// The list of an export.
const LIST: &str = "registry.json";

/// The state of a registry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// Models and versions.
    pub models: usize,
    /// Bytes of their files.
    pub bytes: u64,
    /// What is wrong.
    pub problems: Vec<String>,
}

/// What a repair did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// Where the damaged database was moved to.
    pub moved_database: Option<PathBuf>,
    /// Models whose record was restored, as `NAME:VERSION`.
    pub restored: Vec<String>,
    /// Files that no record names, and where they were moved to.
    pub unnamed: Vec<PathBuf>,
    /// What could not be repaired.
    pub problems: Vec<String>,
}

/// What an import did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// Models added, as `NAME:VERSION`.
    pub added: Vec<String>,
    /// Models that were there already.
    pub present: Vec<String>,
}

/// The list of an export.
#[derive(Debug, Serialize, Deserialize)]
struct ExportList {
    models: Vec<Manifest>,
    /// Versions in force, where they are not the newest.
    #[serde(default)]
    selected: BTreeMap<String, u64>,
}

fn text(manifest: &Manifest) -> String {
    format!("{}:{}", manifest.name, manifest.version)
}

fn bad_list(path: &Path, reason: impl ToString) -> StoreError {
    io_error(path)(std::io::Error::new(std::io::ErrorKind::InvalidData, reason.to_string()))
}

impl Store {
    /// Reads every file and compares it with its record.
    ///
    /// # Errors
    /// When the database or a folder cannot be read.
    pub fn check(&self) -> Result<CheckReport, StoreError> {
        let manifests = self.list()?;
        let mut report = CheckReport { models: manifests.len(), ..CheckReport::default() };
        report.problems.extend(self.notes().iter().cloned());
        for manifest in &manifests {
            match self.read(manifest) {
                Ok(bytes) => report.bytes += bytes.len() as u64,
                Err(error) => report.problems.push(error.to_string()),
            }
        }
        for (path, record) in self.files.records()? {
            if let Err(why) = record {
                report.problems.push(format!("{}: {why}", path.display()));
            }
        }
        for quarantined in self.load_markers().list().map_err(io_error(self.data_dir()))? {
            let model = &quarantined.model;
            report.problems.push(format!(
                "{}:{} is quarantined: {}",
                model.name, model.version, quarantined.reason
            ));
        }
        Ok(report)
    }

    /// Copies all models, or those of one name, to the empty or new folder `to`: a model repository
    /// with a list for [`Store::import`].
    ///
    /// # Errors
    /// When a model is damaged, or the folder is not empty or cannot be written.
    pub fn export(&self, to: &Path, only: Option<&str>) -> Result<usize, StoreError> {
        durable::create_folder(to).map_err(io_error(to))?;
        if fs::read_dir(to).map_err(io_error(to))?.next().is_some() {
            return Err(bad_list(to, "the folder is not empty"));
        }
        let mut models = self.list()?;
        models.retain(|manifest| only.is_none_or(|name| name == manifest.name));
        let mut selected = BTreeMap::new();
        for manifest in &models {
            let folder = to.join(&manifest.name).join(manifest.version.to_string());
            fs::create_dir_all(&folder).map_err(io_error(&folder))?;
            let path = folder.join("model.onnx");
            durable::write(&path, &self.read(manifest)?).map_err(io_error(&path))?;
            if let Some(current) = self.find(&manifest.name, None)? {
                // A repository has one set of settings for all versions.
                let settings = to.join(&manifest.name).join("atoll.toml");
                let toml = toml::to_string(&current.config).map_err(|e| bad_list(&settings, e))?;
                durable::write(&settings, toml.as_bytes()).map_err(io_error(&settings))?;
                selected.insert(current.name, current.version);
            }
        }
        let count = models.len();
        let path = to.join(LIST);
        let list = serde_json::to_vec_pretty(&ExportList { models, selected });
        durable::write(&path, &list.map_err(|e| bad_list(&path, e))?).map_err(io_error(&path))?;
        Ok(count)
    }

    /// Adds the models of an export, or of any model repository, in `from`. A version that is there
    /// with another content gets the next number.
    ///
    /// # Errors
    /// When a file differs from the list, or the registry is full or cannot be written.
    pub fn import(&self, from: &Path) -> Result<ImportReport, StoreError> {
        let path = from.join(LIST);
        let mut report = ImportReport::default();
        if !path.is_file() {
            return self.import_repository(from, report);
        }
        let bytes = fs::read(&path).map_err(io_error(&path))?;
        let list: ExportList = serde_json::from_slice(&bytes).map_err(|e| bad_list(&path, e))?;
        for manifest in list.models {
            if !is_valid_name(&manifest.name) || manifest.version == 0 {
                return Err(StoreError::BadName(manifest.name));
            }
            let file = from.join(&manifest.name).join(format!("{}/model.onnx", manifest.version));
            let onnx = fs::read(&file).map_err(io_error(&file))?;
            if hash(&onnx) != manifest.sha256 || onnx.len() as u64 != manifest.size_bytes {
                return Err(bad_list(&file, "the file differs from what was exported"));
            }
            self.import_one(manifest, &onnx, &mut report)?;
        }
        for (name, version) in list.selected {
            if self.find(&name, None)?.is_some_and(|current| current.version != version) {
                self.roll_back(&name, Some(version))?;
            }
        }
        Ok(report)
    }

    fn import_one(
        &self,
        manifest: Manifest,
        onnx: &[u8],
        report: &mut ImportReport,
    ) -> Result<(), StoreError> {
        match self.find(&manifest.name, Some(manifest.version))? {
            Some(there) if there.sha256 == manifest.sha256 => {
                report.present.push(text(&manifest));
                return Ok(());
            }
            Some(_) => {
                let added = self.register(&manifest.name, onnx, manifest.config)?;
                report.added.push(text(&added));
                return Ok(());
            }
            None => {}
        }
        let _changing = self.lock();
        let all = self.list()?;
        let kept: Vec<&Manifest> = all.iter().collect();
        self.limits.check(&kept, &manifest).map_err(StoreError::Full)?;
        self.insert(&manifest, onnx)?;
        report.added.push(text(&manifest));
        Ok(())
    }

    fn import_repository(
        &self,
        from: &Path,
        mut report: ImportReport,
    ) -> Result<ImportReport, StoreError> {
        let list = Repository::open(from).and_then(|r| r.list()).map_err(|e| bad_list(from, e))?;
        for entry in list {
            let config = entry.config().map_err(|e| bad_list(&entry.path, e))?;
            let onnx = fs::read(&entry.path).map_err(io_error(&entry.path))?;
            let there = self.find(&entry.name, None)?;
            match there.filter(|there| there.sha256 == hash(&onnx) && there.config == config) {
                Some(there) => report.present.push(text(&there)),
                None => report.added.push(text(&self.register(&entry.name, &onnx, config)?)),
            }
        }
        Ok(report)
    }
}

/// Makes a registry usable again: a lost or unreadable database is rebuilt from the copies of
/// records. Removes nothing: what cannot be used is moved.
///
/// # Errors
/// When files and database belong to different registries, or the disk fails.
pub fn repair(data_dir: &Path) -> Result<RepairReport, StoreError> {
    let files = RegistryFiles::new(data_dir);
    if !data_dir.join(DATABASE).exists() && !files.root().exists() {
        return Err(bad_list(data_dir, "the folder holds no registry"));
    }
    files.create()?;
    let mut report = RepairReport::default();
    let opened = match open_database(data_dir) {
        Err(StoreError::Unreadable { database, .. }) => {
            report.moved_database = Some(move_aside(&database)?);
            open_database(data_dir)?
        }
        other => other?,
    };
    let store = Store {
        database: RwLock::new(Some(opened)),
        data_dir: data_dir.to_path_buf(),
        files,
        limits: RegistryLimits::default(),
        may_clean: false,
        notes: Vec::new(),
        changing: Mutex::new(()),
    };
    store.set_identity()?;
    store.restore_records(&mut report)?;
    store.set_unnamed_aside(&mut report)?;
    for manifest in store.list()? {
        if let Err(error) = store.read(&manifest) {
            report.problems.push(error.to_string());
        }
    }
    Ok(report)
}

/// Renames a damaged file to the first free name.
fn move_aside(path: &Path) -> Result<PathBuf, StoreError> {
    let name = |number: u32| path.with_extension(format!("redb.damaged-{number}"));
    let free = (1..=u32::MAX).map(name).find(|path| !path.exists());
    let free = free.ok_or_else(|| bad_list(path, "there are too many damaged databases"))?;
    fs::rename(path, &free).map_err(io_error(path))?;
    Ok(free)
}

impl Store {
    /// Gives database and files the same identity.
    fn set_identity(&self) -> Result<(), StoreError> {
        let known = self.query(|transaction| {
            let table = transaction.open_table(FACTS).map_err(database)?;
            let known = table.get(IDENTITY).map_err(database)?;
            Ok(known.map(|identity| identity.value().to_string()))
        })?;
        let owner = self.files.owner()?;
        let identity = match (known, &owner) {
            (Some(known), Some(owner)) if known != *owner => {
                let files = self.files.root().to_path_buf();
                return Err(StoreError::Foreign { files, database: self.data_dir.join(DATABASE) });
            }
            (Some(known), _) => known,
            (None, Some(owner)) => owner.clone(),
            (None, None) => new_identity(),
        };
        if owner.is_none() {
            self.files.set_owner(&identity)?;
        }
        self.update(|transaction| {
            let mut table = transaction.open_table(FACTS).map_err(database)?;
            table.insert(IDENTITY, identity.as_str()).map_err(database)?;
            transaction.open_table(SELECTED).map_err(database)?;
            Ok(())
        })
    }

    /// Inserts the records of which only the copy is left.
    fn restore_records(&self, report: &mut RepairReport) -> Result<(), StoreError> {
        for (path, record) in self.stray_records(&self.list()?)? {
            let manifest = match record {
                Ok(manifest) => manifest,
                Err(why) => {
                    report.problems.push(format!("{}: {why}", path.display()));
                    continue;
                }
            };
            self.files.adopt(&manifest.sha256)?;
            if let Err(error) = self.read(&manifest) {
                report.problems.push(error.to_string());
                continue;
            }
            let json = to_json(&manifest)?;
            self.update(|transaction| insert_record(transaction, &manifest, &json, false))?;
            report.restored.push(text(&manifest));
        }
        Ok(())
    }

    /// Moves files that no record names to a folder that is never cleaned.
    fn set_unnamed_aside(&self, report: &mut RepairReport) -> Result<(), StoreError> {
        let Some(referenced) = self.referenced()? else { return Ok(()) };
        let folder = self.files.root().join("unnamed");
        for path in self.files.unreferenced(&referenced)? {
            let Some(name) =
                path.file_name().filter(|name| !name.to_str().is_none_or(durable::is_partial))
            else {
                continue;
            };
            durable::create_folder(&folder).map_err(io_error(&folder))?;
            let to = folder.join(name);
            fs::rename(&path, &to).map_err(io_error(&path))?;
            report.unnamed.push(to);
        }
        Ok(())
    }
}
