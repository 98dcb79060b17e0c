//! Where the server's models come from: the user's repositories and the registry.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use api::RegisterRequest;
use compiler::CompileError;
use device::DeviceError;
use graph::ImportError;
use model::repository::{Repository, RepositoryError};
use model::store::{Store, StoreError};
use model::{LaunchPlan, ModelConfig};
use runtime::{Fleet, Placed};
use server::{LoadError, LoadedModel, ModelLoader, RepositoryEntry};

use crate::engine;

/// Models from disk, made ready on the device where each had best live.
pub(crate) struct DiskLoader {
    fleet: Arc<Fleet>,
    repositories: Vec<Repository>,
    registry: Result<Store, String>,
    /// Programs that registration has made already, for the load that follows it.
    prepared: Mutex<HashMap<(String, u64), Placed>>,
}

impl DiskLoader {
    /// A loader over `repositories` and a registry, or the reason why there is none.
    pub(crate) fn new(
        fleet: Arc<Fleet>,
        repositories: Vec<Repository>,
        registry: Result<Store, String>,
    ) -> DiskLoader {
        DiskLoader { fleet, repositories, registry, prepared: Mutex::default() }
    }

    /// When each model of the repositories was last changed, for those who follow changes.
    pub(crate) fn fingerprints(&self) -> HashMap<String, Vec<(u64, Option<SystemTime>)>> {
        let mut prints: HashMap<String, Vec<(u64, Option<SystemTime>)>> = HashMap::new();
        for entry in self.repositories.iter().filter_map(|r| r.list().ok()).flatten() {
            let changed = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
            let settings = entry.path.with_extension("toml");
            let changed = changed(&entry.path).max(changed(&settings));
            prints.entry(entry.name).or_default().push((entry.version, changed));
        }
        prints
    }

    fn load_from_repository(
        &self,
        name: &str,
        version: Option<u64>,
    ) -> Result<Option<LoadedModel>, LoadError> {
        for repository in &self.repositories {
            let entry = match repository.find(name, version) {
                Ok(entry) => entry,
                Err(RepositoryError::NotFound { .. }) => continue,
                Err(err) => return Err(LoadError::Internal(err.to_string())),
            };
            let config = entry.config().map_err(|err| LoadError::Invalid(err.to_string()))?;
            let plan = engine::compile_file(&entry.path).map_err(compile_error)?;
            let placed = make_program(&self.fleet, plan)?;
            return Ok(Some(LoadedModel { placed, config, version: entry.version }));
        }
        Ok(None)
    }

    fn load_from_registry(
        &self,
        name: &str,
        version: Option<u64>,
    ) -> Result<Option<LoadedModel>, LoadError> {
        let Ok(store) = &self.registry else { return Ok(None) };
        let Some(manifest) = store.find(name, version).map_err(store_error)? else {
            return Ok(None);
        };
        let key = (manifest.name.clone(), manifest.version);
        let prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        let placed = match prepared {
            Some(placed) => placed,
            None => {
                let onnx = store.read(&manifest).map_err(store_error)?;
                make_program(&self.fleet, engine::compile_bytes(&onnx).map_err(compile_error)?)?
            }
        };
        Ok(Some(LoadedModel { placed, config: manifest.config, version: manifest.version }))
    }
}

fn make_program(fleet: &Fleet, plan: LaunchPlan) -> Result<Placed, LoadError> {
    fleet.load(Arc::new(plan)).map_err(|err| match err {
        DeviceError::Unsupported { .. } => LoadError::Unsupported(err.to_string()),
        DeviceError::OutOfMemory { .. } => LoadError::Unavailable(err.to_string()),
        DeviceError::Faulted { .. } => LoadError::Unavailable(err.to_string()),
        _ => LoadError::Invalid(err.to_string()),
    })
}

/// The model in a file, made ready on a device of `fleet`.
pub(crate) fn load_file(fleet: &Fleet, path: &Path) -> Result<Placed, LoadError> {
    make_program(fleet, engine::compile_file(path).map_err(compile_error)?)
}

fn compile_error(err: CompileError) -> LoadError {
    match err {
        CompileError::Import(ImportError::Unsupported(_)) => {
            LoadError::Unsupported(err.to_string())
        }
        _ => LoadError::Invalid(err.to_string()),
    }
}

fn store_error(err: StoreError) -> LoadError {
    match err {
        StoreError::BadName(_) => LoadError::Invalid(err.to_string()),
        _ => LoadError::Internal(err.to_string()),
    }
}

impl ModelLoader for DiskLoader {
    fn load(&self, name: &str, version: Option<u64>) -> Result<LoadedModel, LoadError> {
        if let Some(loaded) = self.load_from_repository(name, version)? {
            return Ok(loaded);
        }
        if let Some(loaded) = self.load_from_registry(name, version)? {
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

    fn register(&self, request: RegisterRequest) -> Result<u64, LoadError> {
        let store = self.registry.as_ref().map_err(|why| LoadError::Unavailable(why.clone()))?;
        let taken = self.repositories.iter().any(|r| r.find(&request.name, None).is_ok());
        if taken {
            return Err(LoadError::Invalid(format!(
                "'{}' is a model of the repository; register under another name",
                request.name
            )));
        }
        // What cannot run is refused before anything of it is kept.
        let plan = engine::compile_bytes(&request.onnx).map_err(compile_error)?;
        let placed = make_program(&self.fleet, plan)?;
        let config = ModelConfig {
            class: request.class.unwrap_or_default(),
            labels: request.labels,
            preprocessing: request.preprocessing,
            slo_ms: request.slo_ms,
            ..ModelConfig::default()
        };
        let manifest = store.register(&request.name, &request.onnx, config).map_err(store_error)?;
        let key = (manifest.name, manifest.version);
        let version = manifest.version;
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner).insert(key, placed);
        Ok(version)
    }
}
