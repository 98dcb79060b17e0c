//! Where the server's models come from: the user's repositories and the registry.

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
use model::{LaunchPlan, ModelConfig};
use runtime::{DeviceGroup, PlacedProgram};
use server::{LoadError, LoadedModel, ModelLoader, RepositoryEntry};

use crate::engine;

/// Models from disk, made ready on the device where each had best live.
pub(crate) struct DiskLoader {
    device_group: Arc<DeviceGroup>,
    repositories: Vec<Repository>,
    registry: Result<Store, String>,
    /// Programs that registration has made already, for the load that follows it.
    prepared: Mutex<Prepared<PlacedProgram>>,
}

/// What registrations have made ready, one version of a name at most: a load takes the newest, and what is older waits for nobody.
struct Prepared<T> {
    by_name: HashMap<String, (u64, T)>,
}

impl<T> Default for Prepared<T> {
    fn default() -> Prepared<T> {
        Prepared { by_name: HashMap::new() }
    }
}

impl<T> Prepared<T> {
    /// Keeps `made` unless a newer version is kept; what is not needed any more comes back.
    fn keep(&mut self, name: String, version: u64, made: T) -> Option<T> {
        match self.by_name.get(&name) {
            Some((newer, _)) if *newer > version => Some(made),
            _ => self.by_name.insert(name, (version, made)).map(|(_, older)| older),
        }
    }

    /// Takes what is kept for a load of `version` out, or of an older one which nobody will load; the version it is of.
    fn take(&mut self, name: &str, version: u64) -> Option<(u64, T)> {
        match self.by_name.get(name) {
            Some((kept, _)) if *kept <= version => self.by_name.remove(name),
            _ => None,
        }
    }
}

impl DiskLoader {
    /// A loader over `repositories` and a registry, or the reason why there is none.
    pub(crate) fn new(
        device_group: Arc<DeviceGroup>,
        repositories: Vec<Repository>,
        registry: Result<Store, String>,
    ) -> DiskLoader {
        DiskLoader { device_group, repositories, registry, prepared: Mutex::default() }
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

    fn prepared(&self) -> MutexGuard<'_, Prepared<PlacedProgram>> {
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
            let plan = engine::compile_file(&entry.path).map_err(compile_error)?;
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
                // Its memory is free for the one that is made.
                drop(older);
                let onnx = store.read(&manifest).map_err(store_error)?;
                make_program(
                    &self.device_group,
                    engine::compile_bytes(&onnx).map_err(compile_error)?,
                )?
            }
        };
        Ok(Some(LoadedModel { placed, config: manifest.config, version: manifest.version }))
    }
}

fn make_program(device_group: &DeviceGroup, plan: LaunchPlan) -> Result<PlacedProgram, LoadError> {
    device_group.load(Arc::new(plan)).map_err(|err| match err {
        DeviceError::Unsupported { .. } => LoadError::Unsupported(err.to_string()),
        DeviceError::OutOfMemory { .. } => LoadError::Unavailable(err.to_string()),
        DeviceError::Faulted { .. } => LoadError::Unavailable(err.to_string()),
        _ => LoadError::Invalid(err.to_string()),
    })
}

/// The model in a file, made ready on a device of `device_group`.
pub(crate) fn load_file(
    device_group: &DeviceGroup,
    path: &Path,
) -> Result<PlacedProgram, LoadError> {
    make_program(device_group, engine::compile_file(path).map_err(compile_error)?)
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
        let placed = make_program(&self.device_group, plan)?;
        let config = ModelConfig {
            class: request.class.unwrap_or_default(),
            labels: request.labels,
            preprocessing: request.preprocessing,
            slo_ms: request.slo_ms,
            ..ModelConfig::default()
        };
        let manifest = store.register(&request.name, &request.onnx, config).map_err(store_error)?;
        let superseded = self.prepared().keep(manifest.name, manifest.version, placed);
        // Behind the lock: taking a program apart frees memory, which may take its time.
        drop(superseded);
        Ok(manifest.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_registrations_made_is_taken_or_dropped() {
        let mut prepared = Prepared::default();
        let keep = |prepared: &mut Prepared<&'static str>, version, made: &'static str| {
            prepared.keep("m".to_string(), version, made)
        };
        // Two registrations of one name before either is loaded: the older is of no use.
        assert_eq!(keep(&mut prepared, 1, "one"), None);
        assert_eq!(keep(&mut prepared, 2, "two"), Some("one"));
        assert_eq!(prepared.take("m", 2), Some((2, "two")));
        assert_eq!(prepared.take("m", 2), None);
        // One that comes late stays until the next load of the name, whatever its version.
        assert_eq!(keep(&mut prepared, 1, "late"), None);
        assert_eq!(prepared.take("m", 2), Some((1, "late")));
        // A load that has seen less leaves the newer for the one that follows.
        assert_eq!(keep(&mut prepared, 4, "four"), None);
        assert_eq!(keep(&mut prepared, 3, "three"), Some("three"));
        assert_eq!(prepared.take("m", 3), None);
        assert_eq!(prepared.take("m", 4), Some((4, "four")));
        assert!(prepared.by_name.is_empty());
    }
}
