//! Loads a server's models from model repositories and from the registry.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use api::RegisterRequest;
use compiler::CompileError;
use device::DeviceError;
use graph::ImportError;
use model::repository::{Repository, RepositoryError};
use model::store::{ChangedSettings, LoadStage, Manifest, MarkedModel, Store, StoreError};
use model::{HostMemory, LaunchPlan, MemoryError, ModelConfig, Reservation};
use runtime::{DeviceGroup, PlacedProgram};
use server::{KeptSettings, LoadError, LoadedModel, ModelLoader, RepositoryEntry, check_cancelled};

use crate::compile::{compile_bytes, compile_bytes_until, compile_file_until};
use crate::load_checks::LoadChecks;
use crate::model_check::ModelChecker;

/// Loads models from disk to the device of the group that suits each best.
pub struct DiskLoader {
    device_group: Arc<DeviceGroup>,
    repositories: Vec<Repository>,
    registry: Result<Store, String>,
    /// Programs made by registrations, for the loads that follow them.
    prepared: Mutex<PreparedPrograms<PlacedProgram>>,
    checks: LoadChecks,
}

/// Programs made by registrations, at most one version of each name: a load takes the newest, and
/// nothing loads an older one.
struct PreparedPrograms<T> {
    by_name: HashMap<String, (u64, T)>,
}

impl<T> Default for PreparedPrograms<T> {
    fn default() -> PreparedPrograms<T> {
        PreparedPrograms { by_name: HashMap::new() }
    }
}

impl<T> PreparedPrograms<T> {
    /// Inserts `program` unless a newer version is there; returns the older of the two.
    fn insert(&mut self, name: String, version: u64, program: T) -> Option<T> {
        match self.by_name.get(&name) {
            Some((newer, _)) if *newer > version => Some(program),
            _ => self.by_name.insert(name, (version, program)).map(|(_, older)| older),
        }
    }

    /// Removes the program of `version`, or of an older version, which nothing will load; returns
    /// its version too.
    fn take(&mut self, name: &str, version: u64) -> Option<(u64, T)> {
        match self.by_name.get(name) {
            Some((prepared, _)) if *prepared <= version => self.by_name.remove(name),
            _ => None,
        }
    }
}

impl DiskLoader {
    /// A loader for `repositories` and a registry, or the reason why there is no registry. Models
    /// are not checked.
    pub fn new(
        device_group: Arc<DeviceGroup>,
        repositories: Vec<Repository>,
        registry: Result<Store, String>,
    ) -> DiskLoader {
        DiskLoader::with_checks(device_group, repositories, registry, None, false)
    }

    /// The same with a checker for models that are registered and, with `check_repositories`, for
    /// those of repositories.
    pub fn with_checks(
        device_group: Arc<DeviceGroup>,
        repositories: Vec<Repository>,
        registry: Result<Store, String>,
        checker: Option<Arc<ModelChecker>>,
        check_repositories: bool,
    ) -> DiskLoader {
        let checks = {
            let markers = registry.as_ref().ok().map(Store::load_markers);
            LoadChecks::new(markers, checker, check_repositories)
        };
        DiskLoader { device_group, repositories, registry, prepared: Mutex::default(), checks }
    }

    /// The server stops: ends checks, and notes that no model is to blame for the end of the
    /// process.
    pub fn stop(&self) {
        self.checks.stop();
    }

    /// Versions of each model in the repositories, with the time of their last change.
    pub fn fingerprints(&self) -> HashMap<String, Vec<(u64, Option<SystemTime>)>> {
        let mut prints: HashMap<String, Vec<(u64, Option<SystemTime>)>> = HashMap::new();
        for entry in self.repositories.iter().filter_map(|r| r.list().ok()).flatten() {
            let changed = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
            let settings = entry.path.with_extension("toml");
            let changed = changed(&entry.path).max(changed(&settings));
            prints.entry(entry.name).or_default().push((entry.version, changed));
        }
        prints
    }

    fn prepared(&self) -> MutexGuard<'_, PreparedPrograms<PlacedProgram>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load_from_repository(
        &self,
        name: &str,
        version: Option<u64>,
        cancelled: &AtomicBool,
    ) -> Result<Option<LoadedModel>, LoadError> {
        for repository in &self.repositories {
            let entry = match repository.find(name, version) {
                Ok(entry) => entry,
                Err(RepositoryError::NotFound { .. }) => continue,
                Err(err) => return Err(LoadError::Internal(err.to_string())),
            };
            let files = entry.config().map_err(|err| LoadError::Invalid(err.to_string()))?;
            let config = self.with_changes(&entry, files);
            let model = repository_model(&entry);
            let read = || std::fs::read(&entry.path).map_err(|err| internal(&err));
            let check = self.checks.repositories;
            let _mark = self.checks.admit(&model, &config, check, read, cancelled)?;
            let placed = load_file(&self.device_group, &entry.path, cancelled)?;
            return Ok(Some(LoadedModel { placed, config, version: entry.version }));
        }
        Ok(None)
    }

    fn load_from_registry(
        &self,
        name: &str,
        version: Option<u64>,
        cancelled: &AtomicBool,
    ) -> Result<Option<LoadedModel>, LoadError> {
        let Ok(store) = &self.registry else { return Ok(None) };
        let Some(manifest) = store.find(name, version).map_err(store_error)? else {
            return Ok(None);
        };
        let taken = self.prepared().take(&manifest.name, manifest.version);
        if let Some((prepared, placed)) = taken
            && prepared == manifest.version
        {
            let (config, version) = (manifest.config, manifest.version);
            return Ok(Some(LoadedModel { placed, config, version }));
        }
        let refused = match self.load_manifest(store, &manifest, cancelled) {
            Ok(loaded) => return Ok(Some(loaded)),
            Err(LoadError::Cancelled) => return Err(LoadError::Cancelled),
            Err(error) => error,
        };
        // A version that cannot be trusted does not take the older ones along.
        let is_quarantined = self.checks.quarantined(&registered_model(&manifest)).is_some();
        let older = store.versions(name).map_err(store_error)?;
        let older = older.into_iter().rev().filter(|v| *v < manifest.version);
        for older in older.filter(|_| version.is_none() && is_quarantined) {
            let Some(manifest) = store.find(name, Some(older)).map_err(store_error)? else {
                continue;
            };
            if let Ok(loaded) = self.load_manifest(store, &manifest, cancelled) {
                tracing::warn!(model = name, version = older, %refused, "older version is loaded");
                return Ok(Some(loaded));
            }
        }
        Err(refused)
    }

    fn load_manifest(
        &self,
        store: &Store,
        manifest: &Manifest,
        cancelled: &AtomicBool,
    ) -> Result<LoadedModel, LoadError> {
        let model = registered_model(manifest);
        let read = || store.read(manifest).map_err(store_error);
        // It was checked when it was registered.
        let _mark = self.checks.admit(&model, &manifest.config, false, read, cancelled)?;
        let plan = compile_bytes_until(read()?, cancelled).map_err(compile_error)?;
        check_cancelled(cancelled)?;
        let placed = make_program(&self.device_group, plan)?;
        Ok(LoadedModel { placed, config: manifest.config.clone(), version: manifest.version })
    }

    /// The settings of a repository's model: those of its files, unless clients changed them and
    /// the files have not changed since.
    fn with_changes(
        &self,
        entry: &model::repository::RepositoryEntry,
        files: ModelConfig,
    ) -> ModelConfig {
        let Ok(store) = &self.registry else { return files };
        let (name, place) = (entry.name.as_str(), settings_place(entry));
        let changed = match store.changed_settings(&place) {
            Ok(Some(changed)) => changed,
            Ok(None) => return files,
            Err(error) => {
                tracing::warn!(model = name, %error, "changed settings are not used");
                return files;
            }
        };
        if changed.files == files {
            tracing::info!(model = name, "settings that were changed while it was served are used");
            return changed.config;
        }
        tracing::warn!(model = name, "its files have new settings: earlier changes are forgotten");
        if let Err(error) = store.set_changed_settings(&place, None) {
            tracing::warn!(model = name, %error, "changed settings are not forgotten");
        }
        files
    }

    fn find_in_repositories(
        &self,
        name: &str,
        version: u64,
    ) -> Option<model::repository::RepositoryEntry> {
        self.repositories.iter().find_map(|r| r.find(name, Some(version)).ok())
    }

    fn is_in_repository(&self, name: &str) -> bool {
        self.repositories.iter().any(|repository| repository.find(name, None).is_ok())
    }

    fn registry(&self) -> Result<&Store, LoadError> {
        self.registry.as_ref().map_err(|why| LoadError::Unavailable(why.clone()))
    }

    /// The registry, for changes to the model `name`.
    fn registry_for(&self, name: &str) -> Result<&Store, LoadError> {
        if self.is_in_repository(name) {
            return Err(LoadError::Invalid(format!(
                "'{name}' is a model of the repository, which only its owner changes"
            )));
        }
        self.registry()
    }
}

fn internal(error: &dyn std::fmt::Display) -> LoadError {
    LoadError::Internal(error.to_string())
}

/// A registered model as marks name it.
fn registered_model(manifest: &Manifest) -> MarkedModel {
    MarkedModel {
        name: manifest.name.clone(),
        version: manifest.version,
        content: manifest.sha256.clone(),
    }
}

/// The path that stands for the settings of a repository's model: of all versions in its folder.
fn settings_place(entry: &model::repository::RepositoryEntry) -> String {
    let folder = entry.path.parent().and_then(Path::parent);
    let is_bare = entry.path.file_name().is_none_or(|file| file != "model.onnx");
    let place = if is_bare { entry.path.as_path() } else { folder.unwrap_or(&entry.path) };
    place.canonicalize().unwrap_or_else(|_| place.to_path_buf()).to_string_lossy().into_owned()
}

/// A model of a repository as marks name it: a changed file is another model.
fn repository_model(entry: &model::repository::RepositoryEntry) -> MarkedModel {
    let metadata = entry.path.metadata().ok();
    let changed = metadata.as_ref().and_then(|m| m.modified().ok());
    let since = changed.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    let size = metadata.map_or(0, |metadata| metadata.len());
    let content = format!("{size}:{}", since.unwrap_or_default().as_nanos());
    MarkedModel { name: entry.name.clone(), version: entry.version, content }
}

/// The settings with which a request registers its model.
fn requested_config(request: &mut RegisterRequest) -> Result<ModelConfig, LoadError> {
    request.take_config().map_err(|error| LoadError::Invalid(error.message.into()))
}

/// Reserves the memory of a model of `bytes` while it is compiled: its file, and copies of it.
fn reserve_compiling(bytes: usize) -> Result<Reservation, LoadError> {
    let needed = bytes.saturating_mul(2);
    HostMemory::process().reserve(needed).map_err(|err| match err {
        MemoryError::TooLarge { .. } => LoadError::Invalid(err.to_string()),
        MemoryError::Busy { .. } => LoadError::Unavailable(err.to_string()),
    })
}

fn make_program(device_group: &DeviceGroup, plan: LaunchPlan) -> Result<PlacedProgram, LoadError> {
    device_group.load(Arc::new(plan)).map_err(|err| match err {
        DeviceError::Unsupported { .. } | DeviceError::NoCompiler(_) => {
            LoadError::Unsupported(err.to_string())
        }
        DeviceError::OutOfMemory { .. } | DeviceError::HostMemory(MemoryError::Busy { .. }) => {
            LoadError::Unavailable(err.to_string())
        }
        DeviceError::Faulted { .. } => LoadError::Unavailable(err.to_string()),
        _ => LoadError::Invalid(err.to_string()),
    })
}

/// Loads the model in a file to a device of `device_group`. Ends early once `cancelled` is set.
///
/// # Errors
/// When it cannot be compiled or loaded, or is cancelled.
pub fn load_file(
    device_group: &DeviceGroup,
    path: &Path,
    cancelled: &AtomicBool,
) -> Result<PlacedProgram, LoadError> {
    check_cancelled(cancelled)?;
    let plan = compile_file_until(path, cancelled).map_err(compile_error)?;
    // A plan whose constants were not all folded is of no use.
    check_cancelled(cancelled)?;
    make_program(device_group, plan)
}

fn compile_error(err: CompileError) -> LoadError {
    match err {
        CompileError::Import(ImportError::Unsupported(_)) => {
            LoadError::Unsupported(err.to_string())
        }
        _ => LoadError::Invalid(err.to_string()),
    }
}

fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

fn store_error(err: StoreError) -> LoadError {
    match err {
        StoreError::BadName(_) => LoadError::Invalid(err.to_string()),
        StoreError::Full(why) => LoadError::Full(why),
        StoreError::Io { ref source, .. } if is_full(source) => LoadError::Full(err.to_string()),
        _ => LoadError::Internal(err.to_string()),
    }
}

impl ModelLoader for DiskLoader {
    fn load(
        &self,
        name: &str,
        version: Option<u64>,
        cancelled: &AtomicBool,
    ) -> Result<LoadedModel, LoadError> {
        if let Some(loaded) = self.load_from_repository(name, version, cancelled)? {
            return Ok(loaded);
        }
        if let Some(loaded) = self.load_from_registry(name, version, cancelled)? {
            return Ok(loaded);
        }
        let what = version.map(|version| format!(" version {version}")).unwrap_or_default();
        Err(LoadError::NotFound(format!("there is no model '{name}'{what}")))
    }

    fn index(&self) -> Result<Vec<RepositoryEntry>, LoadError> {
        let mut entries = Vec::new();
        for repository in &self.repositories {
            let list = repository.list().map_err(|err| LoadError::Internal(err.to_string()))?;
            entries.extend(
                list.into_iter().map(|e| RepositoryEntry { name: e.name, version: e.version }),
            );
        }
        if let Ok(store) = &self.registry {
            let list = store.list().map_err(store_error)?;
            entries.extend(
                list.into_iter().map(|m| RepositoryEntry { name: m.name, version: m.version }),
            );
        }
        Ok(entries)
    }

    fn check(&self, request: &RegisterRequest, cancelled: &AtomicBool) -> Result<(), LoadError> {
        self.registry_for(&request.name)?;
        match &self.checks.checker {
            Some(checker) => {
                checker.check(&request.onnx, &requested_config(&mut request.clone())?, cancelled)
            }
            None => Ok(()),
        }
    }

    fn register(&self, mut request: RegisterRequest) -> Result<u64, LoadError> {
        let store = self.registry_for(&request.name)?;
        // A model that cannot run is refused before it is stored.
        let memory = reserve_compiling(request.onnx.len())?;
        let plan = compile_bytes(request.onnx.clone()).map_err(compile_error)?;
        drop(memory);
        let placed = make_program(&self.device_group, plan)?;
        let config = requested_config(&mut request)?;
        let manifest = store.register(&request.name, &request.onnx, config).map_err(store_error)?;
        let superseded = self.prepared().insert(manifest.name, manifest.version, placed);
        // Outside the lock, because freeing a program's memory may take long.
        drop(superseded);
        Ok(manifest.version)
    }

    fn delete(&self, name: &str, version: Option<u64>) -> Result<usize, LoadError> {
        let store = self.registry_for(name)?;
        let count = match version {
            Some(version) => usize::from(store.remove(name, version).map_err(store_error)?),
            None => store.remove_all(name).map_err(store_error)?,
        };
        let unused = self.prepared().take(name, version.unwrap_or(u64::MAX));
        drop(unused);
        match count {
            0 => Err(not_found(name, version)),
            count => Ok(count),
        }
    }

    fn roll_back(&self, name: &str, version: Option<u64>) -> Result<(u64, u64), LoadError> {
        let store = self.registry_for(name)?;
        let Some(before) = store.find(name, None).map_err(store_error)? else {
            return Err(not_found(name, None));
        };
        match store.roll_back(name, version).map_err(store_error)? {
            Some(now) => Ok((before.version, now.version)),
            None => Err(LoadError::NotFound(match version {
                Some(version) => format!("there is no version {version} of '{name}'"),
                None => format!("there is no version of '{name}' before {}", before.version),
            })),
        }
    }

    fn settings(&self, name: &str, version: u64) -> Result<ModelConfig, LoadError> {
        if let Some(entry) = self.find_in_repositories(name, version) {
            return entry.config().map_err(|err| LoadError::Invalid(err.to_string()));
        }
        // Those of a registered model change in its record; there is no file to return to.
        Ok(ModelConfig::default())
    }

    fn keep_settings(
        &self,
        name: &str,
        version: u64,
        config: &ModelConfig,
    ) -> Result<KeptSettings, LoadError> {
        let Some(entry) = self.find_in_repositories(name, version) else {
            let kept = self.registry()?.set_config(name, version, config.clone());
            return match kept.map_err(store_error)? {
                true => Ok(KeptSettings::InRegistry),
                false => Err(not_found(name, Some(version))),
            };
        };
        let store = match &self.registry {
            Ok(store) => store,
            Err(why) => return Ok(KeptSettings::UntilLoad(why.clone())),
        };
        let files = entry.config().map_err(|err| LoadError::Invalid(err.to_string()))?;
        let changed = ChangedSettings { files, config: config.clone() };
        let is_changed = changed.files != changed.config;
        let (place, changed) = (settings_place(&entry), is_changed.then_some(&changed));
        store.set_changed_settings(&place, changed).map_err(store_error)?;
        Ok(KeptSettings::InDataFolder)
    }

    fn begin_measuring(&self, name: &str, version: u64) -> Option<Box<dyn Send>> {
        let model = match self.find_in_repositories(name, version) {
            Some(entry) => repository_model(&entry),
            None => registered_model(&self.registry().ok()?.find(name, Some(version)).ok()??),
        };
        let mark = self.checks.begin(&model, LoadStage::Measure)?;
        Some(Box::new(mark))
    }
}

fn not_found(name: &str, version: Option<u64>) -> LoadError {
    let what = version.map(|version| format!(" version {version}")).unwrap_or_default();
    LoadError::NotFound(format!("there is no registered model '{name}'{what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load that nobody cancels.
    static GO: AtomicBool = AtomicBool::new(false);

    #[test]
    fn loads_take_the_newest_prepared_program() {
        let mut prepared = PreparedPrograms::default();
        let insert =
            |prepared: &mut PreparedPrograms<&'static str>, version, program: &'static str| {
                prepared.insert("m".to_string(), version, program)
            };
        // Two registrations of one name before the first load: the older is of no use.
        assert_eq!(insert(&mut prepared, 1, "one"), None);
        assert_eq!(insert(&mut prepared, 2, "two"), Some("one"));
        assert_eq!(prepared.take("m", 2), Some((2, "two")));
        assert_eq!(prepared.take("m", 2), None);
        // A late one stays until the next load of the name, whatever its version.
        assert_eq!(insert(&mut prepared, 1, "late"), None);
        assert_eq!(prepared.take("m", 2), Some((1, "late")));
        // A load of an older version does not take the newer program.
        assert_eq!(insert(&mut prepared, 4, "four"), None);
        assert_eq!(insert(&mut prepared, 3, "three"), Some("three"));
        assert_eq!(prepared.take("m", 3), None);
        assert_eq!(prepared.take("m", 4), Some((4, "four")));
        assert!(prepared.by_name.is_empty());
    }

    /// A loader of the same repositories without a registry.
    fn start_without(loader: &DiskLoader) -> DiskLoader {
        let (group, repositories) = (loader.device_group.clone(), loader.repositories.clone());
        DiskLoader::new(group, repositories, Err("no data folder".to_string()))
    }

    fn loader(folder: &Path) -> DiskLoader {
        let device = cpu::CpuDevice::new(cpu::CpuOptions {
            threads: 1,
            queues: 1,
            ..cpu::CpuOptions::default()
        });
        let group = crate::device_group::device_group_on(Arc::new(device), Default::default());
        DiskLoader::new(group.unwrap(), Vec::new(), Ok(Store::open(folder).unwrap()))
    }

    fn digits() -> RegisterRequest {
        RegisterRequest {
            name: "m".to_string(),
            onnx: bytes::Bytes::from_static(crate::demo_model::DIGITS_ONNX),
            labels: Vec::new(),
            preprocessing: None,
            class: None,
            slo_ms: None,
            settings: None,
            canary: None,
        }
    }

    #[test]
    fn an_older_version_is_loaded_instead_of_a_quarantined_one() {
        let folder = tempfile::tempdir().unwrap();
        let first = loader(folder.path());
        assert_eq!(first.register(digits()).unwrap(), 1);
        assert_eq!(first.register(digits()).unwrap(), 2);
        // The process ends while it measures the model.
        let mark = first.begin_measuring("m", 2);
        assert!(mark.is_some());
        std::mem::forget(mark);
        drop(first);
        let second = loader(folder.path());
        assert_eq!(second.load("m", None, &GO).unwrap().version, 1);
        let refused = second.load("m", Some(2), &GO).map(|loaded| loaded.version).unwrap_err();
        assert!(refused.to_string().contains("atoll registry release m:2"), "{refused}");
        second.registry().unwrap().load_markers().release("m", 2).unwrap();
        assert_eq!(second.load("m", None, &GO).unwrap().version, 2);
        assert_eq!(second.roll_back("m", None).unwrap(), (2, 1));
        assert_eq!(second.load("m", None, &GO).unwrap().version, 1);
        assert_eq!(second.delete("m", None).unwrap(), 2);
        assert!(matches!(second.load("m", None, &GO), Err(LoadError::NotFound(_))));
    }

    #[test]
    fn changed_settings_of_a_registered_model_are_in_its_record() {
        let folder = tempfile::tempdir().unwrap();
        let changed = ModelConfig { priority: 5, ..ModelConfig::default() };
        {
            let loader = loader(folder.path());
            loader.register(digits()).unwrap();
            let kept = loader.keep_settings("m", 1, &changed).unwrap();
            assert_eq!(kept, KeptSettings::InRegistry);
            assert!(loader.keep_settings("n", 1, &changed).is_err());
        }
        let loader = loader(folder.path());
        assert_eq!(loader.load("m", None, &GO).unwrap().config, changed);
    }

    #[test]
    fn changed_settings_of_a_repository_hold_until_its_files_change() {
        let (folder, models) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = |name: &str, bytes: &[u8]| {
            std::fs::write(models.path().join(name), bytes).unwrap();
        };
        file("m.onnx", crate::demo_model::DIGITS_ONNX);
        file("m.toml", b"priority = 7");
        let start = || DiskLoader {
            repositories: vec![Repository::open(models.path()).unwrap()],
            ..loader(folder.path())
        };
        let priority = |loader: &DiskLoader| loader.load("m", None, &GO).unwrap().config.priority;
        let first = start();
        let config = first.load("m", None, &GO).unwrap().config;
        assert_eq!(first.settings("m", 1).unwrap().priority, 7);
        let changed = ModelConfig { priority: 5, ..config };
        let kept = first.keep_settings("m", 1, &changed).unwrap();
        assert_eq!((kept, priority(&first)), (KeptSettings::InDataFolder, 5));
        assert_eq!(std::fs::read(models.path().join("m.toml")).unwrap(), b"priority = 7");
        drop(first);
        let second = start();
        assert_eq!(priority(&second), 5);
        // What its owner writes later wins, also when it is written back afterwards.
        file("m.toml", b"priority = 8");
        assert_eq!(priority(&second), 8);
        file("m.toml", b"priority = 7");
        assert_eq!(priority(&second), 7);
        // Without a registry nothing is kept.
        let without = start_without(&second);
        let kept = without.keep_settings("m", 1, &changed).unwrap();
        assert_eq!(kept, KeptSettings::UntilLoad("no data folder".to_string()));
        assert_eq!(priority(&without), 7);
    }

    #[test]
    fn a_cancelled_load_ends_before_it_takes_memory() {
        let folder = tempfile::tempdir().unwrap();
        let loader = loader(folder.path());
        assert_eq!(loader.register(digits()).unwrap(), 1);
        drop(loader.load("m", None, &GO).unwrap());
        let cancelled = AtomicBool::new(true);
        let result = loader.load("m", None, &cancelled).map(|loaded| loaded.version);
        assert_eq!(result, Err(LoadError::Cancelled));
        let path = folder.path().join("m.onnx");
        std::fs::write(&path, crate::demo_model::DIGITS_ONNX).unwrap();
        let result = load_file(&loader.device_group, &path, &cancelled).map(|_| ());
        assert_eq!(result, Err(LoadError::Cancelled));
        assert!(load_file(&loader.device_group, &path, &GO).is_ok());
    }

    #[test]
    fn weights_that_can_never_fit_are_refused_before_they_are_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let options = cpu::CpuOptions { threads: 1, queues: 1, ..cpu::CpuOptions::default() };
        let memory = Some(base::Bytes(100));
        let options_of_node = runtime::NodeOptions { memory, ..Default::default() };
        let device = Arc::new(cpu::CpuDevice::new(options));
        let group = crate::device_group::device_group_on(device, options_of_node).unwrap();
        let loader = DiskLoader::new(group, Vec::new(), Ok(Store::open(folder.path()).unwrap()));
        let refused = loader.register(digits()).unwrap_err();
        assert!(matches!(refused, LoadError::Unavailable(_)), "{refused}");
        assert!(refused.to_string().contains("100 B"), "{refused}");
        assert!(loader.index().unwrap().is_empty());
    }
}
