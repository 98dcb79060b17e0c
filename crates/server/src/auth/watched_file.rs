//! A file whose content is in use and that may change.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::SystemTime;

/// What a change of a file changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp(Option<(SystemTime, u64, u64)>);

impl Stamp {
    pub(crate) fn of(path: &Path) -> Stamp {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata(path).ok();
        Stamp(metadata.and_then(|found| Some((found.modified().ok()?, found.len(), found.ino()))))
    }
}

type Read<T> = dyn Fn(&Path, Option<&T>) -> Result<T, String> + Send + Sync;

/// The content of a file; `reload` replaces it when the file changed.
pub(crate) struct Watched<T> {
    path: PathBuf,
    read: Box<Read<T>>,
    content: RwLock<Arc<T>>,
    seen: Mutex<Stamp>,
}

impl<T> Watched<T> {
    /// Reads the file, which must be valid. `read` gets the content before, except at first.
    pub(crate) fn open(
        path: PathBuf,
        read: impl Fn(&Path, Option<&T>) -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Watched<T>, String> {
        let seen = Mutex::new(Stamp::of(&path));
        let content = RwLock::new(Arc::new(read(&path, None)?));
        Ok(Watched { path, read: Box::new(read), content, seen })
    }

    /// The content in use.
    pub(crate) fn get(&self) -> Arc<T> {
        self.content.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again if it changed; `None` if it did not.
    pub(crate) fn reload(&self) -> Option<Result<(), String>> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Stamp::of(&self.path);
        if *seen == now {
            return None;
        }
        *seen = now;
        let before = self.get();
        Some((self.read)(&self.path, Some(&before)).map(|content| {
            *self.content.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(content);
        }))
    }
}
