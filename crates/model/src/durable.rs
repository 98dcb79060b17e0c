//! Files that are complete and on disk when a call returns, or not there at all.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Ending of a file that is being written.
pub const PARTIAL: &str = ".partial";

/// Bytes that are compared at once after a write.
const CHUNK: usize = 1 << 20;

/// A file under a temporary name; removed unless it gets its final name.
struct Partial {
    path: PathBuf,
    renamed: bool,
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.renamed {
            // A full disk must not stay full because of what could not be written.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Writes `bytes` to `path`, which appears or is replaced atomically. When it returns, content and
/// name are on disk, and the content was read back. After an error nothing of it remains.
///
/// Several processes, also on several machines, may write one path at the same time: each uses a
/// temporary name of its own.
///
/// # Errors
/// When the file system fails, or when it returns other bytes than were written.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (folder, name) = split(path)?;
    // A process id is not unique: the processes of two containers often have the same one.
    let unique = RandomState::new().hash_one((std::process::id(), name));
    let partial = folder.join(format!(".{name}.{unique:016x}{PARTIAL}"));
    let mut file = OpenOptions::new().write(true).create_new(true).open(&partial)?;
    let mut partial = Partial { path: partial, renamed: false };
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    verify(&partial.path, bytes)?;
    fs::rename(&partial.path, path)?;
    partial.renamed = true;
    sync_folder(folder)
}

/// Removes the file at `path`, durably; `false` if there is none.
///
/// # Errors
/// When the file system fails.
pub fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => sync_folder(split(path)?.0).map(|()| true),
        Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(err) => Err(err),
    }
}

/// Creates `folder` with its parents, durably.
///
/// # Errors
/// When the file system fails.
pub fn create_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    match folder.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        Some(parent) => sync_folder(parent),
        None => Ok(()),
    }
}

/// Writes the names in `folder` to disk.
///
/// # Errors
/// When the file system fails.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Whether `name` is the temporary name of a file that [`write()`] was writing.
pub fn is_partial(name: &str) -> bool {
    let Some((rest, unique)) =
        name.strip_suffix(PARTIAL).and_then(|name| name.strip_prefix('.')?.rsplit_once('.'))
    else {
        return false;
    };
    !rest.is_empty() && unique.len() == 16 && unique.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Removes what writers that were killed left half written in `folder`, longer than `age` ago.
///
/// # Errors
/// When the folder cannot be read.
pub fn remove_abandoned(folder: &Path, age: Duration) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // One that another process removes first is gone, too.
        let Ok(changed) = entry.metadata().and_then(|metadata| metadata.modified()) else {
            continue;
        };
        let is_old = SystemTime::now().duration_since(changed).is_ok_and(|past| past > age);
        if is_old && entry.file_name().to_str().is_some_and(is_partial) {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

fn split(path: &Path) -> io::Result<(&Path, &str)> {
    let name = path.file_name().and_then(|name| name.to_str());
    let folder = path.parent().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
    folder.zip(name).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{} is no file", path.display()))
    })
}

fn verify(path: &Path, expected: &[u8]) -> io::Result<()> {
    let differs = || io::Error::other("the file system returned other bytes than were written");
    let mut file = File::open(path)?;
    if file.metadata()?.len() != expected.len() as u64 {
        return Err(differs());
    }
    let mut buffer = vec![0; CHUNK.min(expected.len())];
    for chunk in expected.chunks(CHUNK) {
        file.read_exact(&mut buffer[..chunk.len()])?;
        if buffer[..chunk.len()] != *chunk {
            return Err(differs());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string();
        fs::read_dir(folder).unwrap().map(|entry| name(entry).unwrap()).collect()
    }

    #[test]
    fn files_appear_whole_and_replace_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for bytes in [vec![], vec![1], vec![7; CHUNK + 3]] {
            write(&path, &bytes).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(names(folder.path()), ["file"]);
        assert!(remove(&path).unwrap());
        assert!(!remove(&path).unwrap());
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        // A folder of this name cannot be replaced by a file: the last step fails.
        let path = folder.path().join("taken");
        fs::create_dir(&path).unwrap();
        assert!(write(&path, b"content").is_err());
        assert_eq!(names(folder.path()), ["taken"]);
        assert!(write(&folder.path().join("missing/file"), b"content").is_err());
    }

    #[test]
    fn many_writers_of_one_file_do_not_collide() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..20).for_each(|_| write(&path, b"the same").unwrap()));
            }
        });
        assert_eq!(fs::read(&path).unwrap(), b"the same");
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn only_abandoned_temporary_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let partial = ".model.0123456789abcdef.partial";
        for name in [partial, "model"] {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        remove_abandoned(folder.path(), Duration::from_secs(60)).unwrap();
        assert_eq!(names(folder.path()).len(), 2);
        std::thread::sleep(Duration::from_millis(20));
        remove_abandoned(folder.path(), Duration::from_millis(1)).unwrap();
        assert_eq!(names(folder.path()), ["model"]);
    }

    #[test]
    fn temporary_names_are_recognised() {
        assert!(is_partial(".model.onnx.0123456789abcdef.partial"));
        for name in ["model.partial", ".partial", ".x.partial", "..0123456789abcdef.partial"] {
            assert!(!is_partial(name), "{name}");
        }
    }
}
