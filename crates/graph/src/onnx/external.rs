//! Weights in external files.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;

/// Where external weights may be read from: the model's own folder, or nowhere.
#[derive(Clone, Debug, Default)]
pub struct ExternalData {
    folder: Option<PathBuf>,
}

impl ExternalData {
    /// What the error says where weights are external and [`ExternalData::none`] is given.
    pub const NO_FOLDER: &str = "the weights are external, and no folder is given";

    /// Refuses models with external weights.
    pub fn none() -> ExternalData {
        ExternalData::default()
    }

    /// Weights may be in the folder of the model file `model`, and below it.
    pub fn beside(model: &Path) -> ExternalData {
        let parent = model.parent().filter(|parent| !parent.as_os_str().is_empty());
        ExternalData { folder: Some(parent.unwrap_or(Path::new(".")).to_path_buf()) }
    }

    /// Reads what `entries` describe; it must be `expected` bytes.
    pub(crate) fn read(
        &self,
        entries: &[(String, String)],
        expected: usize,
    ) -> Result<Bytes, String> {
        let entry = |key: &str| entries.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str());
        let number = |key: &str| -> Result<Option<u64>, String> {
            entry(key)
                .map(|text| {
                    text.parse().map_err(|_| format!("external {key} '{text}' is not a size"))
                })
                .transpose()
        };
        let location = entry("location").ok_or("external data without a location")?;
        let path = self.resolve(location)?;
        let mut file = File::open(&path).map_err(|e| format!("cannot open '{location}': {e}"))?;
        let size = file.metadata().map_err(|e| format!("cannot read '{location}': {e}"))?.len();
        let offset = number("offset")?.unwrap_or(0);
        let length = match number("length")? {
            Some(length) => length,
            None => size.checked_sub(offset).ok_or_else(|| past_end(location, offset, 0, size))?,
        };
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(past_end(location, offset, length, size));
        }
        if length != expected as u64 {
            return Err(format!("'{location}' holds {length} bytes for a tensor of {expected}"));
        }
        let mut bytes = vec![0; expected];
        file.seek(SeekFrom::Start(offset))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|e| format!("cannot read '{location}': {e}"))?;
        Ok(bytes.into())
    }

    /// The file at `location`, which must be inside the model's folder, also after following links.
    fn resolve(&self, location: &str) -> Result<PathBuf, String> {
        let folder = self.folder.as_ref().ok_or(ExternalData::NO_FOLDER)?;
        let relative = Path::new(location);
        let plain = relative
            .components()
            .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        if location.is_empty() || !plain {
            return Err(format!("external location '{location}' is not a path below the model"));
        }
        let root =
            folder.canonicalize().map_err(|e| format!("cannot open the model's folder: {e}"))?;
        let path = root
            .join(relative)
            .canonicalize()
            .map_err(|e| format!("cannot open external file '{location}': {e}"))?;
        if !path.starts_with(&root) {
            return Err(format!("external location '{location}' leaves the model's folder"));
        }
        if !path.is_file() {
            return Err(format!("external location '{location}' is not a file"));
        }
        Ok(path)
    }
}

fn past_end(location: &str, offset: u64, length: u64, size: u64) -> String {
    format!("'{location}' has {size} bytes, {length} at {offset} are wanted")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(location: &str, offset: &str, length: &str) -> Vec<(String, String)> {
        [("location", location), ("offset", offset), ("length", length)]
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .to_vec()
    }

    #[test]
    fn only_files_below_the_model_are_read() {
        let base = std::env::temp_dir().join(format!("atoll-external-{}", std::process::id()));
        let folder = base.join("model");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(base.join("secret"), b"12345678").unwrap();
        std::fs::write(folder.join("weights"), b"abcdefgh").unwrap();
        let data = ExternalData::beside(&folder.join("model.onnx"));
        assert_eq!(data.read(&entries("weights", "2", "4"), 4).unwrap(), "cdef");
        assert!(data.read(&entries("../secret", "0", "8"), 8).is_err());
        let absolute = base.join("secret").to_string_lossy().into_owned();
        assert!(data.read(&entries(&absolute, "0", "8"), 8).is_err());
        #[cfg(unix)]
        {
            let _ = std::fs::remove_file(folder.join("link"));
            std::os::unix::fs::symlink(base.join("secret"), folder.join("link")).unwrap();
            let error = data.read(&entries("link", "0", "8"), 8).unwrap_err();
            assert!(error.contains("leaves the model's folder"), "{error}");
        }
        for (offset, length) in [("6", "4"), ("18446744073709551615", "4"), ("0", "1e9")] {
            assert!(data.read(&entries("weights", offset, length), 4).is_err());
        }
        assert!(ExternalData::none().read(&entries("weights", "0", "8"), 8).is_err());
        std::fs::remove_dir_all(&base).unwrap();
    }
}
