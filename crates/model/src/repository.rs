//! Model repositories: folders of models that users maintain.
//!
//! Two layouts can be mixed: `NAME/[config.pbtxt|atoll.toml]/VERSION/model.onnx`, and a bare
//! `NAME.onnx` with an optional `NAME.toml`. A path to one `.onnx` file is a repository of that one
//! model.

use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::ModelConfig;
use crate::config::pbtxt;

/// The maximum length of a model's name.
pub const NAME_LENGTH_MAX: usize = 128;

/// One version of a model in a repository.
#[derive(Clone, Debug, PartialEq)]
pub struct RepositoryEntry {
    /// The model's name.
    pub name: String,
    /// Its version; 1 for a bare file.
    pub version: u64,
    /// The ONNX file.
    pub path: PathBuf,
}

/// Why a repository or a model in it cannot be used.
#[derive(Debug, Error)]
pub enum RepositoryError {
    /// The file system reports an error.
    #[error("{path}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// What.
        source: std::io::Error,
    },
    /// A configuration file cannot be used.
    #[error("{path}: {reason}")]
    BadConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// No such model or version.
    #[error("model '{name}'{} is not in the repository", version_text(*version))]
    NotFound {
        /// The requested name.
        name: String,
        /// The requested version, if any.
        version: Option<u64>,
    },
}

fn version_text(version: Option<u64>) -> String {
    version.map(|version| format!(" version {version}")).unwrap_or_default()
}

/// Whether `name` is a valid model name: letters, digits, `_`, `-` and `.`, and not a path.
pub fn is_valid_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_LENGTH_MAX
        && !name.starts_with('.')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
}

/// A folder of models, or one model file.
#[derive(Clone, Debug)]
pub struct Repository {
    root: PathBuf,
}

impl Repository {
    /// The repository at `root`, which must exist.
    pub fn open(root: &Path) -> Result<Repository, RepositoryError> {
        std::fs::metadata(root)
            .map_err(|source| RepositoryError::Io { path: root.to_path_buf(), source })?;
        Ok(Repository { root: root.to_path_buf() })
    }

    /// Every model and version, sorted by name and version.
    pub fn list(&self) -> Result<Vec<RepositoryEntry>, RepositoryError> {
        if self.root.is_file() {
            return Ok(bare_entry(&self.root).into_iter().collect());
        }
        let mut entries = Vec::new();
        for path in children(&self.root)? {
            if path.is_dir() {
                entries.extend(versions(&path)?);
            } else {
                entries.extend(bare_entry(&path));
            }
        }
        entries.sort_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
        Ok(entries)
    }

    /// The named version, or the latest one.
    pub fn find(
        &self,
        name: &str,
        version: Option<u64>,
    ) -> Result<RepositoryEntry, RepositoryError> {
        let entries = self.list()?;
        let fits = |entry: &&RepositoryEntry| {
            entry.name == name && version.is_none_or(|v| v == entry.version)
        };
        entries
            .iter()
            .rev()
            .find(fits)
            .cloned()
            .ok_or_else(|| RepositoryError::NotFound { name: name.to_string(), version })
    }
}

impl RepositoryEntry {
    /// The model's settings; the defaults without a configuration file.
    pub fn config(&self) -> Result<ModelConfig, RepositoryError> {
        let folder = self.path.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        let is_bare = self.path.file_name().is_none_or(|file| file != "model.onnx");
        if is_bare {
            return read_toml(&self.path.with_extension("toml")).map(Option::unwrap_or_default);
        }
        if let Some(config) = read_toml(&folder.join("atoll.toml"))? {
            return Ok(config);
        }
        let path = folder.join("config.pbtxt");
        match read_text(&path)? {
            None => Ok(ModelConfig::default()),
            Some(text) => pbtxt::parse(&text, folder)
                .map_err(|err| RepositoryError::BadConfig { path, reason: err.to_string() }),
        }
    }
}

fn children(folder: &Path) -> Result<Vec<PathBuf>, RepositoryError> {
    let io = |source| RepositoryError::Io { path: folder.to_path_buf(), source };
    let entries = std::fs::read_dir(folder).map_err(io)?;
    entries.map(|entry| Ok(entry.map_err(io)?.path())).collect()
}

fn bare_entry(path: &Path) -> Option<RepositoryEntry> {
    let name = path.file_stem()?.to_str()?.to_string();
    let is_model = path.extension()? == "onnx" && is_valid_name(&name);
    is_model.then(|| RepositoryEntry { name, version: 1, path: path.to_path_buf() })
}

fn versions(folder: &Path) -> Result<Vec<RepositoryEntry>, RepositoryError> {
    let Some(name) = folder.file_name().and_then(|name| name.to_str()) else { return Ok(vec![]) };
    if !is_valid_name(name) {
        return Ok(vec![]);
    }
    let entry = |path: PathBuf| {
        let version: u64 = path.file_name()?.to_str()?.parse().ok().filter(|v| *v > 0)?;
        let file = path.join("model.onnx");
        file.is_file().then(|| RepositoryEntry { name: name.to_string(), version, path: file })
    };
    Ok(children(folder)?.into_iter().filter_map(entry).collect())
}

fn read_text(path: &Path) -> Result<Option<String>, RepositoryError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(RepositoryError::Io { path: path.to_path_buf(), source }),
    }
}

fn read_toml(path: &Path) -> Result<Option<ModelConfig>, RepositoryError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    let bad = |reason: String| RepositoryError::BadConfig { path: path.to_path_buf(), reason };
    let config: ModelConfig = toml::from_str(&text).map_err(|err| bad(err.to_string()))?;
    config.batching.check().map_err(bad)?;
    Ok(Some(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{BatchingPolicy, Class, CopyTime};

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn both_layouts_are_found() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "bare.onnx", "");
        write(root.path(), "bare.toml", "class = 'rt'\ntimeout_ms = 5");
        write(root.path(), "tree/1/model.onnx", "");
        write(root.path(), "tree/12/model.onnx", "");
        write(root.path(), "tree/config.pbtxt", "max_batch_size: 3");
        write(root.path(), "tree/notes/model.onnx", "");
        write(root.path(), "not a name!/1/model.onnx", "");
        let repository = Repository::open(root.path()).unwrap();
        let found: Vec<(String, u64)> =
            repository.list().unwrap().into_iter().map(|e| (e.name, e.version)).collect();
        assert_eq!(found, [("bare".into(), 1), ("tree".into(), 1), ("tree".into(), 12)]);
        let bare = repository.find("bare", None).unwrap().config().unwrap();
        assert_eq!((bare.class, bare.timeout_ms), (Class::RealTime, Some(5)));
        let tree = repository.find("tree", None).unwrap();
        assert_eq!((tree.version, tree.config().unwrap().max_batch_size), (12, 3));
        assert!(matches!(repository.find("tree", Some(2)), Err(RepositoryError::NotFound { .. })));
    }

    #[test]
    fn a_misspelt_setting_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "m/1/model.onnx", "");
        write(root.path(), "m/atoll.toml", "timeout = 5");
        let entry = Repository::open(root.path()).unwrap().find("m", None).unwrap();
        assert!(entry.config().unwrap_err().to_string().contains("timeout"));
    }

    #[test]
    fn batching_settings_are_read() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "m/1/model.onnx", "");
        let config = |text: &str| {
            write(root.path(), "m/atoll.toml", text);
            Repository::open(root.path()).unwrap().find("m", None).unwrap().config()
        };
        let text =
            "slo_ms = 25\nbatching = { policy = 'elastic', workers = [1, 2], copy = 'late' }";
        let set = config(text).unwrap();
        assert_eq!((set.slo_ms, set.batching.policy), (Some(25), BatchingPolicy::Elastic));
        assert_eq!((set.batching.workers, set.batching.copy), (vec![1, 2], CopyTime::Late));
        let none = config("[batching]\nworkers = [0]").unwrap_err().to_string();
        assert!(none.contains("workers has 0"), "{none}");
        assert!(config("[batching]\npolicy = 'never'").is_err());
    }

    #[test]
    fn names_are_not_paths() {
        for name in ["", ".hidden", "..", "a/b", "a b", "ü", &"x".repeat(129)] {
            assert!(!is_valid_name(name), "{name}");
        }
        assert!(is_valid_name("resnet-50_v1.5"));
    }
}
