//! Compiled kernels on disk, by a digest of everything that determines them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

/// First bytes of an entry; they change with the file layout.
const MAGIC: &[u8; 8] = b"atollcb1";

/// Bytes before the cubin: the magic and the digest of the cubin.
const HEAD: usize = MAGIC.len() + 32;

/// A folder of cubins. Without one, nothing is kept.
pub(crate) struct CubinCache {
    folder: Option<PathBuf>,
    /// Makes names of unfinished files unique within the process.
    unfinished: AtomicU64,
}

/// Name of an entry: a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CacheKey([u8; 32]);

impl CacheKey {
    /// The digest of `parts`, each with its length, so that no two lists give the same bytes.
    pub(crate) fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> CacheKey {
        KeyBase::of(parts).key(&[])
    }

    /// The key of these bytes.
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> CacheKey {
        CacheKey(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(crate) fn hex(&self) -> String {
        hex(&self.0)
    }
}

/// The first parts of many keys.
#[derive(Clone)]
pub(crate) struct KeyBase(Sha256);

impl KeyBase {
    pub(crate) fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> KeyBase {
        let mut base = KeyBase(Sha256::new());
        parts.into_iter().for_each(|part| base.add(part));
        base
    }

    fn add(&mut self, part: &[u8]) {
        self.0.update((part.len() as u64).to_le_bytes());
        self.0.update(part);
    }

    /// The key of these parts and `more`.
    pub(crate) fn key(&self, more: &[&[u8]]) -> CacheKey {
        let mut all = self.clone();
        more.iter().for_each(|part| all.add(part));
        CacheKey(all.0.finalize().into())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl CubinCache {
    /// A cache in `folder`, which is created if missing.
    pub(crate) fn open(folder: Option<&Path>) -> Result<CubinCache, String> {
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder)
                .map_err(|err| format!("the kernel cache {}: {err}", folder.display()))?;
        }
        Ok(CubinCache { folder: folder.map(Path::to_path_buf), unfinished: AtomicU64::new(0) })
    }

    fn path(&self, key: &CacheKey) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{}.cubin", key.hex())))
    }

    /// The cubin, unless it is missing or damaged.
    pub(crate) fn get(&self, key: &CacheKey) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        let entry = std::fs::read(&path).ok()?;
        let cubin = checked(&entry);
        if cubin.is_none() {
            tracing::warn!(path = %path.display(), "cached kernel damaged");
        }
        cubin
    }

    /// Stores `cubin`. A reader finds all of it or nothing.
    pub(crate) fn put(&self, key: &CacheKey, cubin: &[u8]) {
        let Some(path) = self.path(key) else { return };
        if let Err(err) = self.write(&path, cubin) {
            // The kernel is usable all the same; only the next start is slower.
            tracing::warn!(path = %path.display(), %err, "kernel not cached");
        }
    }

    fn write(&self, path: &Path, cubin: &[u8]) -> std::io::Result<()> {
        let number = self.unfinished.fetch_add(1, Ordering::Relaxed);
        let unfinished = path.with_extension(format!("{}-{number}.part", std::process::id()));
        let mut file = std::fs::File::create(&unfinished)?;
        file.write_all(MAGIC)?;
        file.write_all(&Sha256::digest(cubin))?;
        file.write_all(cubin)?;
        file.sync_all()?;
        drop(file);
        std::fs::rename(&unfinished, path).inspect_err(|_| {
            let _ = std::fs::remove_file(&unfinished);
        })
    }
}

/// The cubin of an entry, if its digest is right.
fn checked(entry: &[u8]) -> Option<Vec<u8>> {
    let (head, cubin) = entry.split_at_checked(HEAD)?;
    let digest = head.strip_prefix(MAGIC)?;
    (digest == Sha256::digest(cubin).as_slice()).then(|| cubin.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> CacheKey {
        CacheKey::of([text.as_bytes(), b"sm_90a"])
    }

    #[test]
    fn stored_cubin_is_found() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = CubinCache::open(Some(folder.path())).expect("a cache");
        assert_eq!(cache.get(&key("a")), None);
        cache.put(&key("a"), b"machine code");
        assert_eq!(cache.get(&key("a")).as_deref(), Some(b"machine code".as_slice()));
        assert_eq!(cache.get(&key("b")), None);
        let files = std::fs::read_dir(folder.path()).expect("the folder").count();
        assert_eq!(files, 1, "no unfinished file remains");
    }

    #[test]
    fn damaged_entries_are_not_used() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = CubinCache::open(Some(folder.path())).expect("a cache");
        cache.put(&key("a"), b"machine code");
        let path = cache.path(&key("a")).expect("a path");
        let whole = std::fs::read(&path).expect("the entry");
        let mut flipped = whole.clone();
        *flipped.last_mut().expect("not empty") ^= 1;
        for damaged in [&flipped[..], &whole[..whole.len() - 1], &whole[..10], b"".as_slice()] {
            std::fs::write(&path, damaged).expect("a write");
            assert_eq!(cache.get(&key("a")), None);
        }
        cache.put(&key("a"), b"machine code");
        assert!(cache.get(&key("a")).is_some());
    }

    #[test]
    fn keys_depend_on_the_borders_of_parts() {
        let base = KeyBase::of([b"a".as_slice()]);
        assert_eq!(base.key(&[b"b", b""]), CacheKey::of([b"a".as_slice(), b"b", b""]));
        assert_ne!(CacheKey::of([b"ab".as_slice(), b"c"]), CacheKey::of([b"a".as_slice(), b"bc"]));
    }

    #[test]
    fn stores_nothing_without_a_folder() {
        let cache = CubinCache::open(None).expect("a cache");
        cache.put(&key("a"), b"x");
        assert_eq!(cache.get(&key("a")), None);
    }
}
