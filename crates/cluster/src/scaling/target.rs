//! The workload that runs the backends, as the scheduler sees it.

use std::future::Future;
use std::pin::Pin;

use thiserror::Error;

use super::scaler::Removal;

/// The future that a call to the target returns.
pub type ScaleFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ScaleError>> + Send + 'a>>;

/// A replica of the workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replica {
    /// Its name, which is also its backend's name.
    pub name: String,
    /// Its ordinal, where replicas have one.
    pub ordinal: u64,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether it is terminating.
    pub ending: bool,
    /// Whether it is marked to be removed first.
    pub marked: bool,
    /// Why no machine has been found for it, where that is so.
    pub unscheduled: Option<String>,
}

/// The scale of the workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Replicas requested.
    pub replicas: u32,
    /// The version that a change is conditional on.
    pub version: String,
    /// The replicas that exist.
    pub members: Vec<Replica>,
}

/// A workload with replicas.
pub trait ScaleTarget: Send + Sync + 'static {
    /// Its name, such as `deployment/atoll-backend`.
    fn name(&self) -> String;

    /// Which replicas are removed first.
    fn removal(&self) -> Removal;

    /// Reads the scale and the replicas.
    fn read(&self) -> ScaleFuture<'_, Scale>;

    /// Requests `replicas`, if nothing has changed since `version`.
    fn write<'a>(&'a self, version: &'a str, replicas: u32) -> ScaleFuture<'a, ()>;

    /// Marks a replica to be removed first, or clears the mark.
    fn mark<'a>(&'a self, replica: &'a str, first: bool) -> ScaleFuture<'a, ()>;
}

/// Why a call to the target failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ScaleError {
    /// Access is denied.
    #[error("not allowed: {0}")]
    Forbidden(String),
    /// The workload does not exist.
    #[error("not found: {0}")]
    NotFound(String),
    /// The workload changed since it was read.
    #[error("changed concurrently: {0}")]
    Conflict(String),
    /// The API server cannot be reached, or does not reply in time.
    #[error("not reachable: {0}")]
    Unreachable(String),
    /// The API server refuses for another reason.
    #[error("refused: {0}")]
    Refused(String),
}

impl ScaleError {
    /// What an operator can do.
    pub fn advice(&self) -> &'static str {
        match self {
            ScaleError::Forbidden(_) => {
                "bind the scheduler's service account to a role with get and patch on the scale \
                 and list and patch on pods (deploy/kubernetes has one)"
            }
            ScaleError::NotFound(_) => "check --kubernetes-scale and --kubernetes-namespace",
            ScaleError::Conflict(_) => {
                "nothing to do: it is read again; if this persists, something else scales it too, \
                 such as an autoscaler"
            }
            ScaleError::Unreachable(_) => {
                "check the API server and the network policy between it and the scheduler; \
                 planning continues"
            }
            ScaleError::Refused(_) => "see the message of the API server; planning continues",
        }
    }

    /// Whether two errors are of the same kind.
    pub fn is_like(&self, other: &ScaleError) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}
