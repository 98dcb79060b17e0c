//! A file of kernels compiled ahead, for machines without a compiler.
//!
//! It begins with a magic, the version of the compiler, the number of entries and a digest of the
//! index. The index has an entry for each kernel: its key, the digest of its cubin, and where the
//! compressed cubin is. A reader keeps the index and reads cubins when they are asked for. Nothing
//! in the file is believed: sizes have limits, and a cubin is used only if its digest is right.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use sha2::{Digest, Sha256};

use super::cubin_cache::CacheKey;

/// First bytes of a library; they change with the layout.
const MAGIC: &[u8; 8] = b"atollkl1";

/// Magic, major and minor version, number of entries, a reserved word, digest of the index.
const HEAD_BYTES: usize = 8 + 4 * 4 + 32;

/// Key, digest, offset, compressed and plain size.
const ENTRY_BYTES: usize = 32 + 32 + 8 + 4 + 4;

/// Entries of one library, at most: the kernels of some hundred networks for all architectures.
const MAX_ENTRIES: usize = 1 << 16;

/// Size of a cubin, plain or compressed, at most.
const MAX_CUBIN_BYTES: u32 = 32 << 20;

/// A library that is open.
pub(crate) struct KernelLibrary {
    path: PathBuf,
    file: File,
    version: (i32, i32),
    entries: HashMap<CacheKey, Entry>,
}

#[derive(Clone, Copy)]
struct Entry {
    digest: [u8; 32],
    offset: u64,
    stored: u32,
    plain: u32,
}

impl KernelLibrary {
    /// Opens the library in `path` and checks its index.
    pub(crate) fn open(path: &Path) -> Result<KernelLibrary, String> {
        let of_path = |why: String| format!("the kernel library {}: {why}", path.display());
        KernelLibrary::open_file(path).map_err(of_path)
    }

    fn open_file(path: &Path) -> Result<KernelLibrary, String> {
        let file = File::open(path).map_err(|err| err.to_string())?;
        let length = file.metadata().map_err(|err| err.to_string())?.len();
        let read = |bytes: &mut [u8], at: usize| {
            file.read_exact_at(bytes, at as u64).map_err(|err| format!("it is cut off: {err}"))
        };
        let mut head = [0; HEAD_BYTES];
        read(&mut head, 0)?;
        let mut fields = Fields(&head);
        if fields.take::<8>() != Some(*MAGIC) {
            return Err("it is no library of this version of atoll".to_string());
        }
        let version = (fields.number(), fields.number());
        let count = fields.number() as usize;
        fields.number();
        if count > MAX_ENTRIES {
            return Err(format!("it claims {count} kernels, at most {MAX_ENTRIES} are read"));
        }
        let mut index = vec![0; count * ENTRY_BYTES];
        read(&mut index, HEAD_BYTES)?;
        if fields.take::<32>() != Some(Sha256::digest(&index).into()) {
            return Err("its index is damaged".to_string());
        }
        let mut entries = HashMap::with_capacity(count);
        for bytes in index.chunks_exact(ENTRY_BYTES) {
            let (key, entry) = Entry::read(bytes, length).ok_or("its index has a wrong entry")?;
            entries.insert(key, entry);
        }
        let version = (version.0 as i32, version.1 as i32);
        Ok(KernelLibrary { path: path.to_path_buf(), file, version, entries })
    }

    /// The version of the compiler that made the cubins.
    pub(crate) fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Number of kernels, for all architectures.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn has(&self, key: &CacheKey) -> bool {
        self.entries.contains_key(key)
    }

    /// The cubin, unless it is missing or damaged.
    pub(crate) fn get(&self, key: &CacheKey) -> Option<Vec<u8>> {
        let cubin = self.read(self.entries.get(key)?);
        if cubin.is_none() {
            tracing::error!(path = %self.path.display(), key = key.hex(), "kernel damaged");
        }
        cubin
    }

    fn read(&self, entry: &Entry) -> Option<Vec<u8>> {
        let mut stored = vec![0; entry.stored as usize];
        self.file.read_exact_at(&mut stored, entry.offset).ok()?;
        let mut cubin = Vec::with_capacity(entry.plain as usize);
        // One byte more than it should be tells that it is too long.
        let mut decoder = DeflateDecoder::new(&stored[..]).take(u64::from(entry.plain) + 1);
        decoder.read_to_end(&mut cubin).ok()?;
        let is_whole = cubin.len() == entry.plain as usize;
        (is_whole && Sha256::digest(&cubin).as_slice() == entry.digest).then_some(cubin)
    }
}

impl Entry {
    fn read(bytes: &[u8], file_length: u64) -> Option<(CacheKey, Entry)> {
        let mut fields = Fields(bytes);
        let key = CacheKey::from_bytes(fields.take()?);
        let digest = fields.take()?;
        let offset = u64::from_le_bytes(fields.take()?);
        let entry = Entry { digest, offset, stored: fields.number(), plain: fields.number() };
        let end = entry.offset.checked_add(u64::from(entry.stored))?;
        let fits = entry.stored.max(entry.plain) <= MAX_CUBIN_BYTES && end <= file_length;
        fits.then_some((key, entry))
    }

    fn write(&self, key: &CacheKey, to: &mut Vec<u8>) {
        to.extend(key.bytes());
        to.extend(self.digest);
        to.extend(self.offset.to_le_bytes());
        to.extend(self.stored.to_le_bytes());
        to.extend(self.plain.to_le_bytes());
    }
}

/// Fields of fixed sizes, one after another.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    /// The next number; 0 behind the end, where the caller's sizes are wrong.
    fn number(&mut self) -> u32 {
        self.take().map_or(0, u32::from_le_bytes)
    }
}

/// A library that is being made.
#[derive(Default)]
pub(crate) struct LibraryContents {
    version: (i32, i32),
    cubins: BTreeMap<CacheKey, StoredCubin>,
}

struct StoredCubin {
    digest: [u8; 32],
    plain: u32,
    compressed: Vec<u8>,
}

impl LibraryContents {
    /// An empty library of cubins that a compiler of this version makes.
    pub(crate) fn new(version: (i32, i32)) -> LibraryContents {
        LibraryContents { version, cubins: BTreeMap::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.cubins.len()
    }

    /// Bytes of the compressed cubins.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.cubins.values().map(|cubin| cubin.compressed.len() as u64).sum()
    }

    /// Adds `cubin`. Fails when it is larger than a reader accepts.
    pub(crate) fn add(&mut self, key: CacheKey, cubin: &[u8]) -> Result<(), String> {
        let compressed = compressed(cubin).map_err(|err| err.to_string())?;
        if self.cubins.len() >= MAX_ENTRIES {
            return Err(format!("a library has at most {MAX_ENTRIES} kernels"));
        }
        let plain = u32::try_from(cubin.len()).unwrap_or(u32::MAX);
        if plain > MAX_CUBIN_BYTES || compressed.len() > MAX_CUBIN_BYTES as usize {
            return Err(format!("a compiled kernel has {plain} bytes"));
        }
        let digest = Sha256::digest(cubin).into();
        self.cubins.insert(key, StoredCubin { digest, plain, compressed });
        Ok(())
    }

    /// Writes the library to `path`; a reader finds the old file or the new one, never a part.
    pub(crate) fn write(&self, path: &Path) -> std::io::Result<()> {
        let mut index = Vec::with_capacity(self.cubins.len() * ENTRY_BYTES);
        let mut offset = (HEAD_BYTES + self.cubins.len() * ENTRY_BYTES) as u64;
        for (key, cubin) in &self.cubins {
            let stored = cubin.compressed.len() as u32;
            let entry = Entry { digest: cubin.digest, offset, stored, plain: cubin.plain };
            entry.write(key, &mut index);
            offset += u64::from(stored);
        }
        let unfinished = path.with_extension(format!("{}.part", std::process::id()));
        let mut file = std::io::BufWriter::new(File::create(&unfinished)?);
        file.write_all(MAGIC)?;
        let count = self.cubins.len() as u32;
        for number in [self.version.0 as u32, self.version.1 as u32, count, 0] {
            file.write_all(&number.to_le_bytes())?;
        }
        file.write_all(&Sha256::digest(&index))?;
        file.write_all(&index)?;
        self.cubins.values().try_for_each(|cubin| file.write_all(&cubin.compressed))?;
        file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
        std::fs::rename(&unfinished, path).inspect_err(|_| {
            let _ = std::fs::remove_file(&unfinished);
        })
    }
}

fn compressed(cubin: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(cubin)?;
    encoder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> CacheKey {
        CacheKey::of([text.as_bytes()])
    }

    /// A library of three cubins, and its bytes.
    fn library(folder: &Path) -> (PathBuf, Vec<u8>) {
        let mut contents = LibraryContents::new((13, 2));
        for (name, cubin) in
            [("a", vec![7; 10_000]), ("b", b"machine code".to_vec()), ("c", vec![])]
        {
            contents.add(key(name), &cubin).expect("it fits");
        }
        assert_eq!(contents.len(), 3);
        assert!(contents.stored_bytes() < 200, "compressed");
        let path = folder.join("kernels.bin");
        contents.write(&path).expect("a write");
        let bytes = std::fs::read(&path).expect("the file");
        (path, bytes)
    }

    #[test]
    fn what_was_written_is_read_back() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (path, _) = library(folder.path());
        let library = KernelLibrary::open(&path).expect("a library");
        assert_eq!((library.version(), library.len()), ((13, 2), 3));
        assert_eq!(library.get(&key("a")), Some(vec![7; 10_000]));
        assert_eq!(library.get(&key("b")).as_deref(), Some(b"machine code".as_slice()));
        assert_eq!(library.get(&key("c")), Some(Vec::new()));
        assert_eq!(library.get(&key("d")), None);
        assert!(library.has(&key("a")) && !library.has(&key("d")));
        assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 1);
    }

    /// Every cut and every flipped byte gives an error, or entries that are right.
    #[test]
    fn damaged_libraries_give_no_wrong_cubin() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (path, whole) = library(folder.path());
        let right = |name: &str, cubin: Option<Vec<u8>>| {
            let Some(cubin) = cubin else { return };
            let wanted = if name == "a" { vec![7; 10_000] } else { b"machine code".to_vec() };
            assert_eq!(cubin, wanted);
        };
        let mut tried = 0;
        let mut check = |bytes: &[u8]| {
            tried += 1;
            std::fs::write(&path, bytes).expect("a write");
            let Ok(library) = KernelLibrary::open(&path) else { return };
            ["a", "b"].iter().for_each(|name| right(name, library.get(&key(name))));
        };
        for length in 0..whole.len() {
            check(&whole[..length]);
        }
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x41;
            check(&flipped);
        }
        assert_eq!(tried, 2 * whole.len());
    }

    #[test]
    fn claims_beyond_the_limits_are_refused_before_memory_is_allocated() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (path, whole) = library(folder.path());
        let mut many = whole.clone();
        many[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        std::fs::write(&path, many).expect("a write");
        let err = KernelLibrary::open(&path).err().expect("too many");
        assert!(err.contains("4294967295 kernels") && err.contains("kernels.bin"), "{err}");
        // An entry with a huge size, and an index whose digest is right.
        let mut huge = whole.clone();
        let index = HEAD_BYTES..HEAD_BYTES + 3 * ENTRY_BYTES;
        let plain_at = HEAD_BYTES + ENTRY_BYTES - 4;
        huge[plain_at..plain_at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        let digest = Sha256::digest(&huge[index]);
        huge[HEAD_BYTES - 32..HEAD_BYTES].copy_from_slice(&digest);
        std::fs::write(&path, huge).expect("a write");
        let err = KernelLibrary::open(&path).err().expect("too large");
        assert!(err.contains("wrong entry"), "{err}");
    }
}
