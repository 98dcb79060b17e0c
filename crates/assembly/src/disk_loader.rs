//! Loads a server's models from model repositories and from the registry.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use api::RegisterRequest;
use compiler::CompileError;
use device::DeviceError;
use graph::ImportError;
use model::repository::{Repository, RepositoryError};
use model::store::{Store, StoreError};
use model::{HostMemory, LaunchPlan, MemoryError, ModelConfig, Reservation};
use runtime::{DeviceGroup, PlacedProgram};
use server::{LoadError, LoadedModel, ModelLoader, RepositoryEntry};

use crate::compile::{compile_bytes, compile_file};

/// Loads models from disk to the device of the group that suits each best.
pub struct DiskLoader {
    device_group: Arc<DeviceGroup>,
    repositories: Vec<Repository>,
    registry: Result<Store, String>,
    /// Programs made by registrations, for the loads that follow them.
    prepared: Mutex<PreparedPrograms<PlacedProgram>>,
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
    /// A loader for `repositories` and a registry, or the reason why there is no registry.
    pub fn new(
        device_group: Arc<DeviceGroup>,
        repositories: Vec<Repository>,
        registry: Result<Store, String>,
    ) -> DiskLoader {
        DiskLoader { device_group, repositories, registry, prepared: Mutex::default() }
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
    ) -> Result<Option<LoadedModel>, LoadError> {
        for repository in &self.repositories {
            let entry = match repository.find(name, version) {
                Ok(entry) => entry,
                Err(RepositoryError::NotFound { .. }) => continue,
                Err(err) => return Err(LoadError::Internal(err.to_string())),
            };
            let config = entry.config().map_err(|err| LoadError::Invalid(err.to_string()))?;
            let plan = compile_file(&entry.path).map_err(compile_error)?;
            let placed = make_program(&self.device_group, plan)?;
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
        let taken = self.prepared().take(&manifest.name, manifest.version);
        let placed = match taken {
            Some((version, placed)) if version == manifest.version => placed,
            older => {
                // Frees its memory for the new program.
                drop(older);
                let onnx = store.read(&manifest).map_err(store_error)?;
                make_program(&self.device_group, compile_bytes(&onnx).map_err(compile_error)?)?
            }
        };
        Ok(Some(LoadedModel { placed, config: manifest.config, version: manifest.version }))
    }
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
        DeviceError::Unsupported { .. } => LoadError::Unsupported(err.to_string()),
        DeviceError::OutOfMemory { .. } | DeviceError::HostMemory(MemoryError::Busy { .. }) => {
            LoadError::Unavailable(err.to_string())
        }
        DeviceError::Faulted { .. } => LoadError::Unavailable(err.to_string()),
        _ => LoadError::Invalid(err.to_string()),
    })
}

/// Loads the model in a file to a device of `device_group`.
///
/// # Errors
/// When it cannot be compiled or loaded.
pub fn load_file(device_group: &DeviceGroup, path: &Path) -> Result<PlacedProgram, LoadError> {
    make_program(device_group, compile_file(path).map_err(compile_error)?)
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
        // A model that cannot run is refused before it is stored.
        let memory = reserve_compiling(request.onnx.len())?;
        let plan = compile_bytes(&request.onnx).map_err(compile_error)?;
        drop(memory);
        let placed = make_program(&self.device_group, plan)?;
        let config = ModelConfig {
            class: request.class.unwrap_or_default(),
            labels: request.labels,
            preprocessing: request.preprocessing,
            slo_ms: request.slo_ms,
            ..ModelConfig::default()
        };
        let manifest = store.register(&request.name, &request.onnx, config).map_err(store_error)?;
        let superseded = self.prepared().insert(manifest.name, manifest.version, placed);
        // Outside the lock, because freeing a program's memory may take long.
        drop(superseded);
        Ok(manifest.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
