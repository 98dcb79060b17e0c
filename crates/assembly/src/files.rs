//! Text files that users name, with the path in every error message.

use std::path::Path;

use crate::failure::Failure;

/// Reads a text file.
///
/// # Errors
/// When it cannot be read.
pub fn read_file(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|err| named(path, &err))
}

/// Writes a text file.
///
/// # Errors
/// When it cannot be written.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|err| named(path, &err))
}

fn named(path: &Path, err: &std::io::Error) -> Failure {
    Failure::failed(format!("{}: {err}", path.display()))
}
