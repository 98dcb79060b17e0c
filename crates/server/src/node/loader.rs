//! Where a node's models come from.

use api::{ApiError, RegisterRequest};
use model::config::ModelConfig;
use runtime::PlacedProgram;
use thiserror::Error;

/// A model that is ready to run.
pub struct LoadedModel {
    /// The program, on the device that was chosen for it.
    pub placed: PlacedProgram,
    /// What its user says of it.
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

/// Why a model cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LoadError {
    /// The repository has no such model or version.
    #[error("{0}")]
    NotFound(String),
    /// The model's files are wrong.
    #[error("{0}")]
    Invalid(String),
    /// The model needs something that is not there.
    #[error("{0}")]
    Unsupported(String),
    /// No room for it now.
    #[error("{0}")]
    Unavailable(String),
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
            LoadError::Internal(message) => ApiError::internal(message),
        }
    }
}

/// The repository and the compiler, as a node sees them. Every call may take long and runs on a
/// thread of its own.
pub trait ModelLoader: Send + Sync + 'static {
    /// Makes a version of `name` ready to run; the newest when none is given.
    fn load(&self, name: &str, version: Option<u64>) -> Result<LoadedModel, LoadError>;

    /// Every model and version there is.
    fn index(&self) -> Result<Vec<RepositoryEntry>, LoadError>;

    /// Keeps a new model and returns the version it got. What cannot be run is refused.
    fn register(&self, request: RegisterRequest) -> Result<u64, LoadError>;
}
