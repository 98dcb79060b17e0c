//! Source of a node's models.

use std::sync::atomic::{AtomicBool, Ordering};

use api::{ApiError, ErrorKind, RegisterRequest};
use model::config::ModelConfig;
use runtime::PlacedProgram;
use thiserror::Error;

/// A compiled model.
pub struct LoadedModel {
    /// The program, on its selected device.
    pub placed: PlacedProgram,
    /// Its configuration.
    pub config: ModelConfig,
    /// The version that was loaded.
    pub version: u64,
}

/// A model of the repository, loaded or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryEntry {
    /// The model.
    pub name: String,
    /// One of its versions.
    pub version: u64,
}

/// How long changed settings of a model hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptSettings {
    /// They are in the record of the registered version.
    InRegistry,
    /// They are in the data folder, until the model's settings in its repository change.
    InDataFolder,
    /// Until the model is loaded again, for this reason.
    UntilLoad(String),
}

/// Why a model cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LoadError {
    /// The repository has no such model or version.
    #[error("{0}")]
    NotFound(String),
    /// The model's files are wrong.
    #[error("{0}")]
    Invalid(String),
    /// The model needs something that is not supported.
    #[error("{0}")]
    Unsupported(String),
    /// Not enough memory now.
    #[error("{0}")]
    Unavailable(String),
    /// The load was cancelled.
    #[error("the load was cancelled")]
    Cancelled,
    /// The registry is full.
    #[error("{0}")]
    Full(String),
    /// Anything else.
    #[error("{0}")]
    Internal(String),
}

impl From<LoadError> for ApiError {
    fn from(error: LoadError) -> ApiError {
        match error {
            LoadError::NotFound(message) => ApiError::not_found(message),
            LoadError::Invalid(message) => ApiError::invalid(message),
            LoadError::Unsupported(message) => ApiError::unsupported(message),
            LoadError::Unavailable(message) => ApiError::unavailable(message),
            LoadError::Cancelled => ApiError::new(ErrorKind::Cancelled, error.to_string()),
            LoadError::Full(message) => ApiError::new(ErrorKind::TooLarge, message),
            LoadError::Internal(message) => ApiError::internal(message),
        }
    }
}

/// An error once `cancelled` is set.
///
/// # Errors
/// [`LoadError::Cancelled`].
pub fn check_cancelled(cancelled: &AtomicBool) -> Result<(), LoadError> {
    match cancelled.load(Ordering::SeqCst) {
        true => Err(LoadError::Cancelled),
        false => Ok(()),
    }
}

/// Repository and compiler of a node. Every call may block and runs on a thread of its own.
pub trait ModelLoader: Send + Sync + 'static {
    /// Compiles a version of `name`; the newest if none is given. Ends early once `cancelled` is
    /// set.
    fn load(
        &self,
        name: &str,
        version: Option<u64>,
        cancelled: &AtomicBool,
    ) -> Result<LoadedModel, LoadError>;

    /// Writes metrics of where the models come from.
    fn write_metrics(&self, _text: &mut String) {}

    /// All models and versions.
    fn index(&self) -> Result<Vec<RepositoryEntry>, LoadError>;

    /// Checks a model that is about to be registered, where it can do no harm. Ends early once
    /// `cancelled` is set.
    fn check(&self, _request: &RegisterRequest, _cancelled: &AtomicBool) -> Result<(), LoadError> {
        Ok(())
    }

    /// Stores a new model and returns its version. A model that cannot run is refused.
    fn register(&self, request: RegisterRequest) -> Result<u64, LoadError>;

    /// Deletes a registered version of `name`, or all of them; returns how many there were.
    fn delete(&self, _name: &str, _version: Option<u64>) -> Result<usize, LoadError> {
        Err(no_registry())
    }

    /// Puts an older registered version of `name` in force: the given one, or the one before.
    /// Returns the version that was in force and the one that is.
    fn roll_back(&self, _name: &str, _version: Option<u64>) -> Result<(u64, u64), LoadError> {
        Err(no_registry())
    }

    /// The settings of `name` in its files, without those that were changed since.
    fn settings(&self, _name: &str, _version: u64) -> Result<ModelConfig, LoadError> {
        Err(LoadError::Unsupported("the settings of this server's models are fixed".to_string()))
    }

    /// Keeps the settings of `name`, for loads that follow.
    fn keep_settings(
        &self,
        _name: &str,
        _version: u64,
        _config: &ModelConfig,
    ) -> Result<KeptSettings, LoadError> {
        Ok(KeptSettings::UntilLoad("this server keeps no settings".to_string()))
    }

    /// Notes on disk that the model is being measured, until the result is dropped. If the process
    /// ends meanwhile, the next one knows.
    fn begin_measuring(&self, _name: &str, _version: u64) -> Option<Box<dyn Send>> {
        None
    }
}

fn no_registry() -> LoadError {
    LoadError::Unsupported("this server has no registry of its own".to_string())
}
