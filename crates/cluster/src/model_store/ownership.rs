//! Which cluster has written which file of a model store, and the removal of files that nobody
//! needs any more.
//!
//! `owners/DIGEST/CLUSTER` says that a frontend of this cluster has stored the file. What an
//! operator has put there has no such mark, and is never removed. A file is set aside before it is
//! removed: who registers the same content meanwhile either finds no file and writes it again, or
//! is found, and the file is put back.

use std::io;
use std::path::PathBuf;

use bytes::Bytes;
use model::durable;

use super::{FileStore, ModelStore, ModelStoreError, digest, is_digest};
use crate::record::Keys;

/// A cluster as an owner of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner(String);

impl Owner {
    /// The cluster with these keys. Its name may have any letters, a file's name may not.
    pub fn of(keys: &Keys) -> Owner {
        let mut name = digest(keys.all().as_bytes());
        name.truncate(16);
        Owner(name)
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

fn unavailable(error: impl std::fmt::Display) -> ModelStoreError {
    ModelStoreError::Unavailable(error.to_string())
}

impl ModelStore {
    /// Stores a file for `owner`, and returns its digest. A file that is there already, and that
    /// no cluster has written, stays without an owner.
    pub async fn put_owned(&self, bytes: Bytes, owner: &Owner) -> Result<String, ModelStoreError> {
        let name = digest(&bytes);
        if !self.has(&name).await? || !self.owners(&name).await?.is_empty() {
            // Before the file: a mark without one does no harm.
            self.mark(&name, owner).await?;
        }
        self.put(bytes).await
    }

    /// Removes a file, if `owner` has written it and nobody needs it: neither other clusters nor
    /// who `is_needed` knows. Returns whether it is gone.
    pub async fn remove_unneeded<F, E>(
        &self,
        name: &str,
        owner: &Owner,
        is_needed: impl Fn() -> F,
    ) -> Result<bool, ModelStoreError>
    where
        F: Future<Output = Result<bool, E>>,
        E: std::fmt::Display,
    {
        if !is_digest(name)
            || self.owners(name).await? != [owner.as_str()]
            || is_needed().await.map_err(unavailable)?
        {
            return Ok(false);
        }
        if !self.set_aside(name).await? {
            return Ok(false);
        }
        let needed = is_needed().await;
        let owners = self.owners(name).await;
        if !matches!((&needed, &owners), (Ok(false), Ok(owners)) if owners.len() < 2) {
            self.put_back(name).await?;
            needed.map_err(unavailable)?;
            owners?;
            return Ok(false);
        }
        self.unmark(name, owner).await?;
        self.remove_set_aside(name).await?;
        Ok(true)
    }

    /// Whether there is a file with this digest.
    pub async fn has(&self, name: &str) -> Result<bool, ModelStoreError> {
        match self {
            ModelStore::Folder(files) => Ok(files.path(name).is_some()),
            ModelStore::Bucket(bucket) => bucket.has(name).await,
        }
    }

    async fn owners(&self, name: &str) -> Result<Vec<String>, ModelStoreError> {
        match self {
            ModelStore::Folder(files) => files.owners(name).map_err(unavailable),
            ModelStore::Bucket(bucket) => bucket.owners(name).await,
        }
    }

    async fn mark(&self, name: &str, owner: &Owner) -> Result<(), ModelStoreError> {
        match self {
            ModelStore::Folder(files) => files.mark(name, owner).map_err(unavailable),
            ModelStore::Bucket(bucket) => bucket.mark(name, owner).await,
        }
    }

    async fn unmark(&self, name: &str, owner: &Owner) -> Result<(), ModelStoreError> {
        match self {
            ModelStore::Folder(files) => files.unmark(name, owner).map_err(unavailable),
            ModelStore::Bucket(bucket) => bucket.unmark(name, owner).await,
        }
    }

    async fn set_aside(&self, name: &str) -> Result<bool, ModelStoreError> {
        match self {
            ModelStore::Folder(files) => files.set_aside(name).map_err(unavailable),
            ModelStore::Bucket(bucket) => bucket.set_aside(name).await,
        }
    }

    async fn put_back(&self, name: &str) -> Result<(), ModelStoreError> {
        match self {
            ModelStore::Folder(files) => files.put_back(name).map_err(unavailable),
            ModelStore::Bucket(bucket) => bucket.put_back(name).await,
        }
    }

    async fn remove_set_aside(&self, name: &str) -> Result<(), ModelStoreError> {
        match self {
            ModelStore::Folder(files) => files.remove_set_aside(name).map_err(unavailable),
            ModelStore::Bucket(bucket) => bucket.remove_set_aside(name).await,
        }
    }
}

impl FileStore {
    fn beside(&self, folder: &str, name: &str) -> PathBuf {
        self.folder.with_file_name(folder).join(name)
    }

    fn owners(&self, name: &str) -> io::Result<Vec<String>> {
        let entries = match std::fs::read_dir(self.beside("owners", name)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut owners = Vec::new();
        for entry in entries {
            // A mark that is half written is one.
            owners.push(entry?.file_name().to_string_lossy().into_owned());
        }
        Ok(owners)
    }

    fn mark(&self, name: &str, owner: &Owner) -> io::Result<()> {
        let folder = self.beside("owners", name);
        durable::create_folder(&folder)?;
        durable::write(&folder.join(owner.as_str()), b"")
    }

    fn unmark(&self, name: &str, owner: &Owner) -> io::Result<()> {
        let folder = self.beside("owners", name);
        durable::remove(&folder.join(owner.as_str()))?;
        // Not where another cluster has just added its mark.
        let _ = std::fs::remove_dir(folder);
        Ok(())
    }

    fn set_aside(&self, name: &str) -> io::Result<bool> {
        let aside = self.beside("removed", name);
        durable::create_folder(&self.beside("removed", ""))?;
        match std::fs::rename(self.folder.join(name), aside) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn put_back(&self, name: &str) -> io::Result<()> {
        std::fs::rename(self.beside("removed", name), self.folder.join(name))?;
        durable::sync_folder(&self.folder)
    }

    fn remove_set_aside(&self, name: &str) -> io::Result<()> {
        durable::remove(&self.beside("removed", name)).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use object_store::memory::InMemory;

    use super::super::bucket::BucketStore;
    use super::*;

    fn stores(folder: &std::path::Path) -> [ModelStore; 2] {
        let memory = std::sync::Arc::new(InMemory::new());
        let bucket = BucketStore::with_store(memory, "s3://b/p", "p", &folder.join("cache"));
        [
            ModelStore::Folder(FileStore::open(&folder.join("files")).unwrap()),
            ModelStore::Bucket(bucket.unwrap()),
        ]
    }

    fn owners() -> [Owner; 2] {
        ["a", "b"].map(|cluster| Owner::of(&Keys::new(cluster)))
    }

    /// Removes a file that `needed` says of, at the first and at the second question.
    async fn remove(store: &ModelStore, name: &str, owner: &Owner, needed: [bool; 2]) -> bool {
        let asked = Cell::new(0);
        let is_needed = || {
            let answer = needed[asked.replace(1)];
            async move { Ok::<bool, String>(answer) }
        };
        store.remove_unneeded(name, owner, is_needed).await.unwrap()
    }

    #[tokio::test]
    async fn files_that_nobody_needs_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = owners();
        for store in stores(folder.path()) {
            let name = store.put_owned(Bytes::from_static(b"model"), &a).await.unwrap();
            assert!(!remove(&store, &name, &a, [true, true]).await);
            // A registration that began after the first question keeps the file.
            assert!(!remove(&store, &name, &a, [false, true]).await);
            assert!(store.has(&name).await.unwrap());
            // Another cluster does, too, and may not remove what it has not written.
            assert!(!remove(&store, &name, &b, [false, false]).await);
            store.put_owned(Bytes::from_static(b"model"), &b).await.unwrap();
            assert!(!remove(&store, &name, &a, [false, false]).await);
            store.unmark(&name, &b).await.unwrap();
            assert!(remove(&store, &name, &a, [false, false]).await);
            assert!(
                !store.has(&name).await.unwrap() && store.owners(&name).await.unwrap().is_empty()
            );
            assert!(!remove(&store, &name, &a, [false, false]).await);
        }
    }

    #[tokio::test]
    async fn what_others_have_put_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let [a, _] = owners();
        for store in stores(folder.path()) {
            let name = store.put(Bytes::from_static(b"mine")).await.unwrap();
            assert_eq!(store.put_owned(Bytes::from_static(b"mine"), &a).await.unwrap(), name);
            assert!(!remove(&store, &name, &a, [false, false]).await);
            assert!(store.has(&name).await.unwrap());
        }
    }

    #[tokio::test]
    async fn a_failing_question_keeps_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let [a, _] = owners();
        for store in stores(folder.path()) {
            let name = store.put_owned(Bytes::from_static(b"model"), &a).await.unwrap();
            let asked = Cell::new(false);
            let is_needed = || {
                let again = asked.replace(true);
                async move { if again { Err("the store is away") } else { Ok(false) } }
            };
            assert!(store.remove_unneeded(&name, &a, is_needed).await.is_err());
            assert!(store.has(&name).await.unwrap());
        }
    }
}
