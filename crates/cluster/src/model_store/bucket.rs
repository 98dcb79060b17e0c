//! Models in an S3-like object store, downloaded to a local cache on demand.
//!
//! Objects are named `PREFIX/sha256/DIGEST`, as are the files of a model store's folder. A download
//! becomes a file of the cache only when it is complete and matches its digest.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3Builder, Checksum};
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, ClientOptions, Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    RetryConfig,
};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;

use super::ownership::Owner;
use super::{ModelStoreError, digest, hexadecimal, is_digest};

/// Maximum number of concurrent downloads.
const DOWNLOADS_MAX: usize = 4;
/// A store that sends nothing for this long has failed.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Time limit of an upload, in addition to what its size takes at [`UPLOAD_MIN`].
const UPLOAD_MAX: Duration = Duration::from_secs(60);
/// Minimum rate of an upload in bytes per second.
const UPLOAD_MIN: u64 = 1 << 20;
/// Maximum size of one S3 request.
const OBJECT_MAX: u64 = 5 << 30;

/// A bucket, or a prefix of one, with a local cache.
#[derive(Clone)]
pub struct BucketStore {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn ObjectStore>,
    /// The address as the user gave it.
    url: String,
    prefix: Key,
    cache: PathBuf,
    permits: Semaphore,
    /// Downloads in flight: later callers wait for the first.
    flights: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    parts: AtomicU64,
}

impl std::fmt::Debug for BucketStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BucketStore({})", self.inner.url)
    }
}

impl BucketStore {
    /// Opens `s3://BUCKET[/PREFIX]` with credentials, region and endpoint from AWS's environment
    /// variables. `cache` is created where it does not exist.
    pub fn open(url: &str, cache: &Path) -> Result<BucketStore, String> {
        let rest =
            url.strip_prefix("s3://").ok_or_else(|| format!("{url} is not an s3:// address"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(format!("{url} names no bucket: s3://BUCKET/PREFIX"));
        }
        crate::tls::choose();
        let options = ClientOptions::new()
            .with_timeout_disabled()
            .with_read_timeout(SILENCE_MAX)
            .with_connect_timeout(Duration::from_secs(5))
            // An endpoint without TLS is used only where its address says so.
            .with_allow_http(endpoint().is_some_and(|endpoint| endpoint.starts_with("http://")));
        let retry = RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: 4,
            retry_timeout: Duration::from_secs(30),
        };
        let store = AmazonS3Builder::from_env()
            .with_client_options(options)
            .with_bucket_name(bucket)
            .with_checksum_algorithm(Checksum::SHA256)
            .with_retry(retry)
            .build()
            .map_err(|error| format!("{url}: {error}"))?;
        BucketStore::with_store(Arc::new(store), url, prefix, cache)
    }

    /// A prefix of any object store, called `url` in messages.
    pub fn with_store(
        store: Arc<dyn ObjectStore>,
        url: &str,
        prefix: &str,
        cache: &Path,
    ) -> Result<BucketStore, String> {
        let prefix =
            Key::parse(prefix.trim_end_matches('/')).map_err(|error| format!("{url}: {error}"))?;
        let cache = cache.join("sha256");
        std::fs::create_dir_all(&cache)
            .map_err(|error| format!("the model cache {}: {error}", cache.display()))?;
        let url = url.trim_end_matches('/').to_string();
        let inner = Inner {
            store,
            url,
            prefix,
            cache,
            permits: Semaphore::new(DOWNLOADS_MAX),
            flights: Mutex::default(),
            parts: AtomicU64::new(0),
        };
        Ok(BucketStore { inner: Arc::new(inner) })
    }

    /// See [`super::ModelStore::fetch`]. Concurrent calls for one digest share one download.
    pub async fn fetch(&self, name: &str, bytes: u64) -> Result<PathBuf, ModelStoreError> {
        if !is_digest(name) {
            return Err(ModelStoreError::Missing(format!("'{name}' is not a digest")));
        }
        if let Some(path) = self.cached(name) {
            return Ok(path);
        }
        let flight = {
            let mut flights = self.inner.flights.lock().unwrap_or_else(PoisonError::into_inner);
            flights.entry(name.to_string()).or_default().clone()
        };
        let landed = {
            let _alone = flight.lock().await;
            match self.cached(name) {
                Some(path) => Ok(path),
                None => self.download(name, bytes).await,
            }
        };
        let mut flights = self.inner.flights.lock().unwrap_or_else(PoisonError::into_inner);
        // Another holder waits for the lock; later callers must wait for the same one.
        if flights.get(name).is_some_and(|kept| Arc::strong_count(kept) <= 2) {
            flights.remove(name);
        }
        landed
    }

    fn cached(&self, name: &str) -> Option<PathBuf> {
        let path = self.inner.cache.join(name);
        path.is_file().then_some(path)
    }

    /// Removes a file from the cache.
    pub fn discard(&self, name: &str) {
        if let Some(path) = is_digest(name).then(|| self.cached(name)).flatten() {
            let _ = std::fs::remove_file(path);
        }
    }

    fn key(&self, name: &str) -> Key {
        self.inner.prefix.clone().join("sha256").join(name)
    }

    fn address(&self, name: &str) -> String {
        format!("{}/sha256/{name}", self.inner.url)
    }

    async fn download(&self, name: &str, bytes: u64) -> Result<PathBuf, ModelStoreError> {
        let _permit = self.inner.permits.acquire().await;
        let part = self.part(name);
        let done = self.stream(name, bytes, &part).await;
        let path = self.inner.cache.join(name);
        let landed = match done {
            Ok(()) => tokio::fs::rename(&part, &path).await.map_err(|error| self.disk(error)),
            Err(error) => Err(error),
        };
        if landed.is_err() {
            let _ = tokio::fs::remove_file(&part).await;
        }
        landed.map(|()| path)
    }

    /// Downloads an object into a file and verifies its size and digest.
    async fn stream(&self, name: &str, bytes: u64, part: &Path) -> Result<(), ModelStoreError> {
        let fail = |error| self.failure(name, error);
        let found = self.inner.store.get(&self.key(name)).await.map_err(fail)?;
        let size = found.meta.size;
        if size != bytes {
            return Err(self.damaged(name, &format!("it has {size} bytes instead of {bytes}")));
        }
        let mut file = tokio::fs::File::create(part).await.map_err(|error| self.disk(error))?;
        let (mut hash, mut left) = (Sha256::new(), bytes);
        let mut stream = found.into_stream();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(fail)?;
            left = left
                .checked_sub(chunk.len() as u64)
                .ok_or_else(|| self.damaged(name, &format!("it has more than {bytes} bytes")))?;
            hash.update(&chunk);
            file.write_all(&chunk).await.map_err(|error| self.disk(error))?;
        }
        if left > 0 {
            let why = format!("{} ended {left} bytes early; try again", self.address(name));
            return Err(ModelStoreError::Unavailable(why));
        }
        file.sync_all().await.map_err(|error| self.disk(error))?;
        let found = hexadecimal(&hash.finalize());
        match found == name {
            true => Ok(()),
            false => Err(self.damaged(name, &format!("its SHA-256 is {found}"))),
        }
    }

    /// A temporary name that is never taken for a model.
    fn part(&self, name: &str) -> PathBuf {
        let number = self.inner.parts.fetch_add(1, Ordering::Relaxed);
        self.inner.cache.join(format!(".{name}.{}.{number}", std::process::id()))
    }

    /// See [`super::ModelStore::put`]. An existing object is read and verified; a damaged one is
    /// overwritten.
    pub async fn put(&self, bytes: Bytes) -> Result<String, ModelStoreError> {
        let (content, size) = (bytes.clone(), bytes.len() as u64);
        let name = tokio::task::spawn_blocking(move || digest(&content)).await;
        let name = name.map_err(|error| ModelStoreError::Unavailable(error.to_string()))?;
        if size > OBJECT_MAX {
            let why = format!(
                "{size} bytes exceed the limit of one S3 request (5 GiB): copy the file to {} \
                 yourself",
                self.address(&name)
            );
            return Err(ModelStoreError::Unavailable(why));
        }
        match self.upload(&name, bytes.clone(), PutMode::Create).await {
            Ok(()) => {}
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
                self.discard(&name);
                match self.fetch(&name, size).await {
                    Ok(_) => return Ok(name),
                    Err(ModelStoreError::Damaged(why)) => {
                        tracing::warn!(reason = why, "damaged object overwritten");
                        let again = self.upload(&name, bytes, PutMode::Overwrite).await;
                        again.map_err(|error| self.failure(&name, error))?;
                    }
                    Err(error) => return Err(error),
                }
            }
            Err(error) => return Err(self.failure(&name, error)),
        }
        let kept = self.inner.store.head(&self.key(&name)).await;
        let kept = kept.map_err(|error| self.failure(&name, error))?;
        match kept.size == size {
            true => Ok(name),
            false => Err(self.damaged(&name, &format!("{} of {size} bytes arrived", kept.size))),
        }
    }

    /// See [`super::ModelStore::has`].
    pub(super) async fn has(&self, name: &str) -> Result<bool, ModelStoreError> {
        match self.inner.store.head(&self.key(name)).await {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(self.failure(name, error)),
        }
    }

    fn beside(&self, folder: &str, name: &str) -> Key {
        self.inner.prefix.clone().join(folder).join(name)
    }

    fn mark_key(&self, name: &str, owner: &Owner) -> Key {
        self.beside("owners", name).join(owner.as_str())
    }

    pub(super) async fn owners(&self, name: &str) -> Result<Vec<String>, ModelStoreError> {
        let marks = self.inner.store.list(Some(&self.beside("owners", name)));
        let marks: Result<Vec<_>, Error> = marks.try_collect().await;
        let marks = marks.map_err(|error| self.failure(name, error))?;
        let owner = |mark: &object_store::ObjectMeta| mark.location.filename().map(str::to_string);
        Ok(marks.iter().filter_map(owner).collect())
    }

    pub(super) async fn mark(&self, name: &str, owner: &Owner) -> Result<(), ModelStoreError> {
        let put = self.inner.store.put(&self.mark_key(name, owner), Bytes::new().into()).await;
        put.map(|_| ()).map_err(|error| self.failure(name, error))
    }

    pub(super) async fn unmark(&self, name: &str, owner: &Owner) -> Result<(), ModelStoreError> {
        let gone = self.inner.store.delete(&self.mark_key(name, owner)).await;
        self.unless_missing(name, gone).map(|_| ())
    }

    pub(super) async fn set_aside(&self, name: &str) -> Result<bool, ModelStoreError> {
        let aside = self.beside("removed", name);
        let moved = self.inner.store.rename(&self.key(name), &aside).await;
        self.unless_missing(name, moved)
    }

    pub(super) async fn put_back(&self, name: &str) -> Result<(), ModelStoreError> {
        let aside = self.beside("removed", name);
        let moved = self.inner.store.rename(&aside, &self.key(name)).await;
        moved.map_err(|error| self.failure(name, error))
    }

    pub(super) async fn remove_set_aside(&self, name: &str) -> Result<(), ModelStoreError> {
        let gone = self.inner.store.delete(&self.beside("removed", name)).await;
        self.discard(name);
        self.unless_missing(name, gone).map(|_| ())
    }

    /// Whether the object was there.
    fn unless_missing(&self, name: &str, done: Result<(), Error>) -> Result<bool, ModelStoreError> {
        match done {
            Ok(()) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(self.failure(name, error)),
        }
    }

    async fn upload(&self, name: &str, bytes: Bytes, mode: PutMode) -> Result<(), Error> {
        let limit = UPLOAD_MAX + Duration::from_secs(bytes.len() as u64 / UPLOAD_MIN);
        let options = PutOptions { mode, ..PutOptions::default() };
        let key = self.key(name);
        let put = self.inner.store.put_opts(&key, bytes.into(), options);
        match tokio::time::timeout(limit, put).await {
            Ok(done) => done.map(|_| ()),
            Err(late) => Err(Error::Generic { store: "S3", source: Box::new(late) }),
        }
    }

    fn damaged(&self, name: &str, how: &str) -> ModelStoreError {
        ModelStoreError::Damaged(format!(
            "{} is not what was registered: {how}; register the model again, or restore the object",
            self.address(name)
        ))
    }

    fn disk(&self, error: std::io::Error) -> ModelStoreError {
        let cache = self.inner.cache.display();
        ModelStoreError::Unavailable(format!(
            "the model cache {cache} cannot be written: {error}; --model-cache names another folder"
        ))
    }

    fn failure(&self, name: &str, error: Error) -> ModelStoreError {
        let address = self.address(name);
        match error {
            Error::NotFound { .. } => ModelStoreError::Missing(format!(
                "{address} does not exist; check --model-store, or register the model again"
            )),
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
                ModelStoreError::Unavailable(format!(
                    "{address}: access is denied; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, \
                     or give this machine a role that may get and put objects there"
                ))
            }
            error => ModelStoreError::Unavailable(format!(
                "{address}: {error}; check AWS_ENDPOINT_URL ({}) and AWS_REGION",
                endpoint().unwrap_or_else(|| "not set: Amazon's".to_string())
            )),
        }
    }
}

fn endpoint() -> Option<String> {
    let named = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    named("AWS_ENDPOINT_URL_S3").or_else(|| named("AWS_ENDPOINT_URL"))
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    fn bucket(store: &Arc<InMemory>) -> (BucketStore, tempfile::TempDir) {
        let cache = tempfile::tempdir().unwrap();
        let store: Arc<dyn ObjectStore> = store.clone();
        let bucket = BucketStore::with_store(store, "s3://b/p", "p", cache.path()).unwrap();
        (bucket, cache)
    }

    fn files(cache: &tempfile::TempDir) -> Vec<String> {
        let entries = std::fs::read_dir(cache.path().join("sha256")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[tokio::test]
    async fn fetches_what_another_machine_stored() {
        let store = Arc::new(InMemory::new());
        let (here, there) = (bucket(&store), bucket(&store));
        let name = here.0.put(Bytes::from_static(b"model")).await.unwrap();
        assert_eq!(name, digest(b"model"));
        let path = there.0.fetch(&name, 5).await.unwrap();
        assert_eq!(std::fs::read(path).unwrap(), b"model");
        assert_eq!(files(&there.1), std::slice::from_ref(&name));
        // From now on without the bucket.
        store.delete(&here.0.key(&name)).await.unwrap();
        assert!(there.0.fetch(&name, 5).await.is_ok());
        there.0.discard(&name);
        let error = there.0.fetch(&name, 5).await.unwrap_err();
        assert!(matches!(&error, ModelStoreError::Missing(why) if why.contains(&name)), "{error}");
        assert!(files(&there.1).is_empty());
    }

    #[tokio::test]
    async fn rejects_damaged_objects_without_a_trace() {
        let store = Arc::new(InMemory::new());
        let (bucket, cache) = bucket(&store);
        let name = bucket.put(Bytes::from_static(b"model")).await.unwrap();
        for (wrong, why) in [(&b"mOdel"[..], "SHA-256"), (b"longer than it was", "18 bytes")] {
            store.put(&bucket.key(&name), Bytes::from_static(wrong).into()).await.unwrap();
            let error = bucket.fetch(&name, 5).await.unwrap_err();
            let said = matches!(&error, ModelStoreError::Damaged(text) if text.contains(why));
            assert!(said, "{error}");
            assert!(files(&cache).is_empty(), "{:?}", files(&cache));
        }
        // Registering it again repairs it.
        assert_eq!(bucket.put(Bytes::from_static(b"model")).await.unwrap(), name);
        assert!(bucket.fetch(&name, 5).await.is_ok());
        // An intact object is not written again.
        let before = store.head(&bucket.key(&name)).await.unwrap().e_tag;
        bucket.put(Bytes::from_static(b"model")).await.unwrap();
        assert_eq!(store.head(&bucket.key(&name)).await.unwrap().e_tag, before);
    }

    #[tokio::test]
    async fn rejects_names_that_are_no_digests() {
        let (bucket, cache) = bucket(&Arc::new(InMemory::new()));
        for bad in ["", "../secret", &"/".repeat(64), &"G".repeat(64)] {
            assert!(bucket.fetch(bad, 1).await.is_err(), "{bad}");
        }
        for bad in ["s3://", "s3:///p", "http://x/y"] {
            assert!(BucketStore::open(bad, cache.path()).is_err(), "{bad}");
        }
        // A client without credentials can be created; what is missing is reported when it is used.
        let opened = BucketStore::open("s3://bucket/some/prefix/", cache.path()).unwrap();
        assert_eq!(opened.key("x").as_ref(), "some/prefix/sha256/x");
        assert_eq!(opened.address("x"), "s3://bucket/some/prefix/sha256/x");
    }

    #[tokio::test]
    async fn downloads_once_for_concurrent_fetches() {
        let (bucket, cache) = bucket(&Arc::new(InMemory::new()));
        let content = Bytes::from(vec![7; 100_000]);
        let name = bucket.put(content.clone()).await.unwrap();
        let want = || bucket.fetch(&name, content.len() as u64);
        let got = futures_util::future::join_all((0..32).map(|_| want())).await;
        assert!(got.iter().all(Result::is_ok), "{got:?}");
        assert_eq!(bucket.inner.parts.load(Ordering::Relaxed), 1);
        assert!(bucket.inner.flights.lock().unwrap().is_empty());
        assert_eq!(files(&cache), [name]);
    }
}
