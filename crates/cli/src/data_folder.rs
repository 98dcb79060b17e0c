//! The user's data folder.

use std::path::PathBuf;

/// The folder in which a server keeps its data unless one is named.
pub(crate) fn user_data_folder() -> Option<PathBuf> {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base =
        absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))?;
    Some(base.join("atoll"))
}
