//! The cluster's shared state: keys with revisions, leases, watches and transactions.
//!
//! This one trait is all that the roles need; consensus is the engine's task. [`memory`] is the
//! engine for one process, [`etcd`] the one for a cluster. Both pass [`conformance`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use base::Clock;
use bytes::Bytes;
use thiserror::Error;
use tokio::sync::mpsc;

use calls::{CountedStore, StoreCalls};

pub mod calls;
pub mod conformance;
pub mod etcd;
pub mod health;
pub mod memory;
pub mod mirror;

/// When a key was last written. Later writes have larger revisions, across all keys. 0 means that
/// the key does not exist.
pub type Revision = u64;

/// A lease: its keys are removed when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub i64);

/// Maximum number of writes in a transaction; etcd's default.
pub const OPERATIONS_MAX: usize = 128;

/// Maximum size of a value in bytes; etcd accepts requests of 1.5 MiB.
pub const VALUE_MAX: usize = 1 << 20;

/// Why a call to the store failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// The engine cannot be reached or does not reply; a retry may help.
    #[error("the store is not reachable: {0}")]
    Unreachable(String),
    /// The lease does not exist, or has ended.
    #[error("the lease does not exist")]
    NoLease,
    /// A watch missed changes; list again and watch from there.
    #[error("the watch fell behind and missed changes")]
    Behind,
    /// The engine has no space for writes; reads and leases still work.
    #[error("the store is full: {0}; compact and defragment it, or raise its quota")]
    Full(String),
    /// The engine refuses the call.
    #[error("the store refuses: {0}")]
    Refused(String),
}

impl StoreError {
    /// Whether the same call may succeed later, without anybody changing it.
    pub fn is_transient(&self) -> bool {
        !matches!(self, StoreError::Refused(_))
    }
}

/// What a process knows of its store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreHealth {
    /// The last call was not answered.
    pub unreachable: bool,
    /// The last write was refused for lack of space.
    pub full: bool,
}

/// Space that a store takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSpace {
    /// Bytes of its files, of the largest member; what its quota limits.
    pub bytes: u64,
    /// Of those, bytes that are in use.
    pub used_bytes: u64,
    /// It has raised its alarm for lack of space.
    pub full: bool,
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: Bytes,
    /// When it was last written.
    pub revision: Revision,
    /// The lease that it belongs to.
    pub lease: Option<LeaseId>,
}

/// All keys with a prefix at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The entries, by key.
    pub entries: Vec<Entry>,
    /// The moment. A watch that starts here misses nothing.
    pub revision: Revision,
}

/// A change that a watch reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The key has this value now.
    Put(Entry),
    /// The key was removed.
    Delete {
        /// The key.
        key: String,
        /// When it was removed.
        revision: Revision,
    },
}

/// A write of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Sets a key.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: Bytes,
        /// The lease that the key belongs to.
        lease: Option<LeaseId>,
    },
    /// Removes a key.
    Delete {
        /// The key.
        key: String,
    },
}

impl Write {
    /// Sets `key` without a lease.
    pub fn put(key: impl Into<String>, value: impl Into<Bytes>) -> Write {
        Write::Put { key: key.into(), value: value.into(), lease: None }
    }

    /// Sets `key` until `lease` ends.
    pub fn put_leased(key: impl Into<String>, value: impl Into<Bytes>, lease: LeaseId) -> Write {
        Write::Put { key: key.into(), value: value.into(), lease: Some(lease) }
    }

    /// Removes `key`.
    pub fn delete(key: impl Into<String>) -> Write {
        Write::Delete { key: key.into() }
    }
}

/// A precondition of a transaction: the key was last written at this revision; 0 for a key that
/// must not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The key.
    pub key: String,
    /// Its revision.
    pub revision: Revision,
}

/// A stream of changes. After an error the watcher has to list again; dropping it ends the watch.
pub struct Watch {
    pub(crate) changes: mpsc::Receiver<Result<Vec<Change>, StoreError>>,
}

impl Watch {
    /// The next changes, in order; `None` at the end.
    pub async fn next(&mut self) -> Option<Result<Vec<Change>, StoreError>> {
        self.changes.recv().await
    }
}

/// The future that a call to the store returns.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A storage engine.
pub trait Store: Send + Sync + 'static {
    /// The entry of `key`.
    fn get<'a>(&'a self, key: &'a str) -> StoreFuture<'a, Option<Entry>>;

    /// All entries whose keys begin with `prefix`.
    fn list<'a>(&'a self, prefix: &'a str) -> StoreFuture<'a, Listing>;

    /// Carries out all writes atomically if every condition holds, and returns the revision; `None`
    /// when a condition does not hold.
    fn transact(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> StoreFuture<'_, Option<Revision>>;

    /// Changes of keys that begin with `prefix`, after `since`.
    fn watch<'a>(&'a self, prefix: &'a str, since: Revision) -> StoreFuture<'a, Watch>;

    /// Grants a lease that lasts `span` after its last renewal; engines may round up.
    fn grant(&self, span: Duration) -> StoreFuture<'_, LeaseId>;

    /// Renews a lease.
    fn renew(&self, lease: LeaseId) -> StoreFuture<'_, ()>;

    /// Ends a lease and removes its keys.
    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()>;

    /// Forgets the history before `revision`. Watches that are further behind end with
    /// [`StoreError::Behind`].
    fn compact(&self, revision: Revision) -> StoreFuture<'_, ()>;

    /// Space that it takes.
    fn space(&self) -> StoreFuture<'_, StoreSpace>;

    /// Gives space that a compaction freed back, and ends the alarm for lack of space. The engine
    /// may not answer meanwhile.
    fn reclaim(&self) -> StoreFuture<'_, ()>;

    /// What this process last saw of it.
    fn health(&self) -> StoreHealth;

    /// Counts of this process's calls, where they are kept.
    fn calls(&self) -> Option<&StoreCalls> {
        None
    }
}

impl dyn Store {
    /// Sets a key unconditionally.
    pub async fn put(
        &self,
        key: &str,
        value: impl Into<Bytes>,
        lease: Option<LeaseId>,
    ) -> Result<Revision, StoreError> {
        let write = Write::Put { key: key.to_string(), value: value.into(), lease };
        match self.transact(Vec::new(), vec![write]).await? {
            Some(revision) => Ok(revision),
            None => Err(StoreError::Refused("a write without conditions failed".to_string())),
        }
    }

    /// Removes a key, if it exists.
    pub async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.transact(Vec::new(), vec![Write::delete(key)]).await.map(|_| ())
    }

    /// Sets a key that was last written at `expected`; 0 for a key that must not exist.
    pub async fn compare_and_put(
        &self,
        key: &str,
        expected: Revision,
        value: impl Into<Bytes>,
        lease: Option<LeaseId>,
    ) -> Result<Option<Revision>, StoreError> {
        let condition = Condition { key: key.to_string(), revision: expected };
        let write = Write::Put { key: key.to_string(), value: value.into(), lease };
        self.transact(vec![condition], vec![write]).await
    }
}

/// Opens the store of this name: `memory`, or `etcd://HOST:PORT[,HOST:PORT...]`. Its calls are
/// counted.
pub fn open(
    name: &str,
    access: etcd::EtcdAccess,
    clock: Arc<dyn Clock>,
) -> Result<Arc<dyn Store>, StoreError> {
    let store: Arc<dyn Store> = match name.strip_prefix("etcd://") {
        Some(endpoints) => Arc::new(etcd::EtcdStore::new(endpoints, access)?),
        None if name == "memory" => memory::MemoryStore::start(clock.clone()),
        None => {
            return Err(StoreError::Refused(format!(
                "'{name}' is not a store; use memory or etcd://HOST:PORT[,HOST:PORT...]"
            )));
        }
    };
    Ok(Arc::new(CountedStore::new(store, clock)))
}
