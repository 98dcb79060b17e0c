//! Samples in files of NumPy: one array, or several with names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use assembly::Failure;
use bytes::Bytes;
use model::Tensor;

use crate::npy;

/// Max bytes of one sample's file.
const MAX_BYTES: u64 = 4 << 30;

/// The sample files of `folder`, in the order of their names, at most `limit`.
pub(super) fn list(folder: &Path, limit: usize) -> Result<Vec<PathBuf>, Failure> {
    let failed = |err: std::io::Error| Failure::failed(format!("{}: {err}", folder.display()));
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some("npy" | "npz")) {
            paths.push(path);
        }
    }
    paths.sort();
    paths.truncate(limit);
    if paths.is_empty() {
        return Err(Failure::failed(format!(
            "{} has no .npy or .npz file; a sample is what a client would send",
            folder.display()
        )));
    }
    Ok(paths)
}

/// The inputs of one run.
pub(super) struct Sample {
    /// Its file.
    pub path: PathBuf,
    /// By name; the only array of a `.npy` file has none.
    arrays: BTreeMap<String, Tensor>,
}

impl Sample {
    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Sample, Failure> {
        let failed = |err: String| Failure::failed(format!("{}: {err}", path.display()));
        let bytes = std::fs::metadata(path).map_err(|err| failed(err.to_string()))?.len();
        if bytes > MAX_BYTES {
            return Err(failed(format!("a sample of {bytes} bytes, at most {MAX_BYTES}")));
        }
        let arrays = if path.extension().is_some_and(|extension| extension == "npz") {
            let bytes = std::fs::read(path).map_err(|err| failed(err.to_string()))?;
            archive(&bytes.into()).map_err(failed)?
        } else {
            BTreeMap::from([(String::new(), npy::read(path)?)])
        };
        Ok(Sample { path: path.to_path_buf(), arrays })
    }

    /// The tensors of the inputs called `names`, in that order.
    pub(super) fn inputs(&self, names: &[&str]) -> Result<Vec<Tensor>, Failure> {
        if let (Some(only), [_]) = (self.arrays.get(""), names) {
            return Ok(vec![only.clone()]);
        }
        let find = |name: &&str| {
            self.arrays.get(*name).cloned().ok_or_else(|| {
                let known: Vec<&str> = self.arrays.keys().map(String::as_str).collect();
                Failure::failed(format!(
                    "{}: no array '{name}' for the model's input; it has: {}",
                    self.path.display(),
                    known.join(", ")
                ))
            })
        };
        names.iter().map(find).collect()
    }
}

/// The arrays of a `.npz` file: a zip archive of `.npy` files that are stored as they are.
fn archive(bytes: &Bytes) -> Result<BTreeMap<String, Tensor>, String> {
    const END: [u8; 4] = *b"PK\x05\x06";
    const ENTRY: [u8; 4] = *b"PK\x01\x02";
    const LOCAL: [u8; 4] = *b"PK\x03\x04";
    let broken = || "not a .npz file".to_string();
    let short = |at: usize| -> Result<usize, String> {
        let two = bytes.get(at..at + 2).ok_or_else(broken)?;
        Ok(usize::from(u16::from_le_bytes([two[0], two[1]])))
    };
    let long = |at: usize| -> Result<usize, String> {
        let four = bytes.get(at..at + 4).ok_or_else(broken)?;
        Ok(u32::from_le_bytes([four[0], four[1], four[2], four[3]]) as usize)
    };
    let starts = |at: usize, mark: [u8; 4]| bytes.get(at..at.saturating_add(4)) == Some(&mark[..]);
    // The end has a comment of up to 64 KiB behind it.
    let last = bytes.len().saturating_sub(22);
    let end = (last.saturating_sub(1 << 16)..=last).rev().find(|at| starts(*at, END));
    let end = end.ok_or_else(broken)?;
    let (count, mut at) = (short(end + 10)?, long(end + 16)?);
    let mut arrays = BTreeMap::new();
    for _ in 0..count {
        if !starts(at, ENTRY) {
            return Err(broken());
        }
        let (method, size, local) = (short(at + 10)?, long(at + 20)?, long(at + 42)?);
        let (name_len, extra, comment) = (short(at + 28)?, short(at + 30)?, short(at + 32)?);
        let name = bytes.get(at + 46..at + 46 + name_len).ok_or_else(broken)?;
        let name = std::str::from_utf8(name).map_err(|_| broken())?;
        if method != 0 {
            return Err(format!("array '{name}' is compressed; save it with np.savez"));
        }
        if !starts(local, LOCAL) {
            return Err(broken());
        }
        let start = local + 30 + short(local + 26)? + short(local + 28)?;
        let end = start.checked_add(size).filter(|end| *end <= bytes.len()).ok_or_else(broken)?;
        let tensor = npy::decode(bytes.slice(start..end))
            .map_err(|reason| format!("array '{name}': {reason}"))?;
        arrays.insert(name.trim_end_matches(".npy").to_string(), tensor);
        at += 46 + name_len + extra + comment;
    }
    Ok(arrays)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A zip archive of one stored file.
    fn stored(name: &str, content: &[u8], method: u8) -> Vec<u8> {
        let length = (content.len() as u32).to_le_bytes();
        let name_len = (name.len() as u16).to_le_bytes();
        let mut bytes = b"PK\x03\x04".to_vec();
        bytes.extend([20, 0, 0, 0, method, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(length.iter().chain(&length).chain(&name_len).chain(&[0, 0]));
        bytes.extend(name.as_bytes().iter().chain(content));
        let directory = (bytes.len() as u32).to_le_bytes();
        bytes.extend(b"PK\x01\x02");
        bytes.extend([20, 0, 20, 0, 0, 0, method, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(length.iter().chain(&length).chain(&name_len));
        bytes.extend([0; 16]);
        bytes.extend(name.as_bytes());
        let size = (bytes.len() as u32 - u32::from_le_bytes(directory)).to_le_bytes();
        bytes.extend(b"PK\x05\x06");
        bytes.extend([0, 0, 0, 0, 1, 0, 1, 0]);
        bytes.extend(size.iter().chain(&directory).chain(&[0, 0]));
        bytes
    }

    #[test]
    fn archives_of_arrays_are_read_and_broken_ones_refused() {
        let tensor = Tensor::from_vec(vec![2], vec![1f32, 2.0]).unwrap();
        let content = npy::encode(&tensor).unwrap();
        let good = stored("image.npy", &content, 0);
        let arrays = archive(&good.clone().into()).unwrap();
        assert_eq!(arrays, BTreeMap::from([("image".to_string(), tensor)]));
        for length in 0..good.len() {
            assert!(archive(&good[..length].to_vec().into()).is_err(), "cut at {length}");
        }
        let packed = archive(&stored("image.npy", &content, 8).into()).unwrap_err();
        assert!(packed.contains("np.savez"), "{packed}");
    }
}
