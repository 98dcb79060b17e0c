//! Whoever runs the backends' machines, as the scheduler sees it.

use std::future::Future;
use std::pin::Pin;

use thiserror::Error;

use super::scaler::Removal;

/// A call to whoever runs the machines.
pub type ScaleFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ScaleError>> + Send + 'a>>;

/// One replica as whoever runs it sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replica {
    /// Its name, which is its backend's name too.
    pub name: String,
    /// Its number, where replicas have one.
    pub ordinal: u64,
    /// Whether it is thought ready.
    pub ready: bool,
    /// Whether it is on its way out.
    pub ending: bool,
    /// Whether it is marked as one to go first.
    pub marked: bool,
}

/// What there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Replicas asked for.
    pub replicas: u32,
    /// The state that a change is conditional on.
    pub version: String,
    /// The replicas.
    pub members: Vec<Replica>,
}

/// Something with replicas.
pub trait ScaleTarget: Send + Sync + 'static {
    /// What it is, such as `deployment/atoll-backend`.
    fn name(&self) -> String;

    /// Which replicas go first.
    fn removal(&self) -> Removal;

    /// What there is.
    fn read(&self) -> ScaleFuture<'_, Scale>;

    /// Asks for `replicas`, if nothing has changed since `version`.
    fn write<'a>(&'a self, version: &'a str, replicas: u32) -> ScaleFuture<'a, ()>;

    /// Marks a replica as one to go first, or as any other.
    fn mark<'a>(&'a self, replica: &'a str, first: bool) -> ScaleFuture<'a, ()>;
}

/// Why a target did not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ScaleError {
    /// It may not be read or written.
    #[error("not allowed: {0}")]
    Forbidden(String),
    /// It is not there.
    #[error("not found: {0}")]
    NotFound(String),
    /// It changed since it was read.
    #[error("changed concurrently: {0}")]
    Conflict(String),
    /// It cannot be reached, or does not answer in time.
    #[error("not reachable: {0}")]
    Unreachable(String),
    /// It refuses for another reason.
    #[error("refused: {0}")]
    Refused(String),
}

impl ScaleError {
    /// What somebody who reads the log can do.
    pub fn advice(&self) -> &'static str {
        match self {
            ScaleError::Forbidden(_) => {
                "bind the scheduler's service account to a role with get and patch on the scale and get, \
                 list and patch on pods (deploy/kubernetes has one)"
            }
            ScaleError::NotFound(_) => "check --kubernetes-scale and --kubernetes-namespace",
            ScaleError::Conflict(_) => {
                "nothing to do: it is read again; if this persists, something else scales it too, such \
                 as an autoscaler"
            }
            ScaleError::Unreachable(_) => {
                "check the API server and the network policy between it and the scheduler; planning \
                 continues"
            }
            ScaleError::Refused(_) => "see the message of the API server; planning continues",
        }
    }

    /// Whether two errors have the same cause.
    pub fn is_like(&self, other: &ScaleError) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}
