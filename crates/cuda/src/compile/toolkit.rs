//! Finds the parts of a CUDA toolkit that kernels are compiled with: headers and NVRTC.
//!
//! An installed toolkit has them under one root; the PyPI packages put the same folders into
//! `nvidia/cu13`. They may also be beside the binary: the libraries in its folder or in `lib`, the
//! headers in `include`, or both in `cuda`.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::sys;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};

use crate::error::OpenError;

/// A header that every kernel includes; the other headers are next to it.
const HEADER: &str = "cuda_fp16.h";

/// Folders of headers, in the order they are searched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Toolkit {
    pub(crate) includes: Vec<PathBuf>,
}

impl Toolkit {
    /// Finds the headers and loads NVRTC; `setting` is tried first.
    pub(crate) fn find(setting: Option<&Path>) -> Result<Toolkit, OpenError> {
        let roots = roots(setting);
        load_compiler(&roots)?;
        Toolkit::among(&roots)
    }

    /// The headers below the first of `roots` that has them.
    fn among(roots: &[PathBuf]) -> Result<Toolkit, OpenError> {
        let found = roots.iter().find_map(|root| {
            let include = root.join("include");
            include.join(HEADER).is_file().then(|| vec![include.clone(), include.join("cccl")])
        });
        match found {
            Some(includes) => Ok(Toolkit { includes }),
            None => Err(OpenError::NoCompiler(format!(
                "CUDA's headers ({HEADER}) are missing, searched below {}; install a CUDA toolkit, \
                 or the PyPI packages nvidia-cuda-runtime and nvidia-cuda-crt, and name its folder \
                 with CUDA_HOME",
                listed(roots)
            ))),
        }
    }
}

fn listed(paths: &[PathBuf]) -> String {
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    if names.is_empty() { "no folder at all".to_string() } else { names.join(", ") }
}

/// Folders that may be a toolkit, best first.
fn roots(setting: Option<&Path>) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = setting.map(Path::to_path_buf).into_iter().collect();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        roots.extend(std::env::var_os(variable).map(PathBuf::from));
    }
    roots.extend(std::env::current_exe().ok().iter().flat_map(|binary| beside(binary)));
    roots.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
    for base in python_bases() {
        for site in site_packages(&base) {
            roots.push(site.join("nvidia/cu13"));
            roots.push(site.join("nvidia/cuda_runtime"));
            roots.push(site.join("nvidia/cuda_nvrtc"));
        }
    }
    roots.retain(|root| root.is_dir());
    roots
}

/// Folders beside `binary` that may be a toolkit.
fn beside(binary: &Path) -> Vec<PathBuf> {
    let Some(folder) = binary.parent() else { return Vec::new() };
    vec![folder.join("cuda"), folder.to_path_buf()]
}

/// Folders that hold a Python's `lib`.
fn python_bases() -> Vec<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let mut bases: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(set).collect();
    bases.extend(set("HOME").map(|home| home.join(".local")));
    bases.extend(pythons_in(&std::env::var_os("PATH").unwrap_or_default()));
    bases.extend(["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from));
    let mut seen = HashSet::new();
    bases.retain(|base| seen.insert(base.clone()));
    bases
}

/// The bases of the Pythons among the folders of `path`, and those that they are links to.
fn pythons_in(path: &OsStr) -> Vec<PathBuf> {
    let base = |python: &Path| Some(python.parent()?.parent()?.to_path_buf());
    let pythons = std::env::split_paths(path).map(|folder| folder.join("python3"));
    let mut bases = Vec::new();
    for python in pythons.filter(|python| python.is_file()) {
        let target = python.canonicalize().ok();
        bases.extend([Some(python), target].into_iter().flatten().filter_map(|one| base(&one)));
    }
    bases
}

/// `lib/python3.*/{site,dist}-packages` below `base`, and Debian's folder without a version.
fn site_packages(base: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(base.join("lib")) else { return Vec::new() };
    let mut sites = Vec::new();
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with("python3") {
            sites.push(entry.path().join("site-packages"));
            sites.push(entry.path().join("dist-packages"));
        }
    }
    sites.sort();
    sites
}

/// Loads NVRTC from the loader's path, or from below `roots`.
fn load_compiler(roots: &[PathBuf]) -> Result<(), OpenError> {
    let folders: Vec<PathBuf> = roots
        .iter()
        .flat_map(|root| {
            ["lib64", "lib", "targets/x86_64-linux/lib", ""].map(|name| root.join(name))
        })
        .filter(|folder| folder.is_dir())
        .collect();
    // NVRTC looks up its builtins by name and cannot compile unless they are loaded already or on
    // the loader's path.
    load_named(&folders, "libnvrtc-builtins.so");
    if is_present() {
        return Ok(());
    }
    load_named(&folders, "libnvrtc.so");
    if is_present() {
        return Ok(());
    }
    Err(OpenError::NoCompiler(format!(
        "NVRTC (libnvrtc.so), which compiles the kernels, is neither on the loader's path nor \
         below {}; install a CUDA toolkit, or the PyPI package nvidia-cuda-nvrtc, and name its \
         folder with CUDA_HOME",
        listed(roots)
    )))
}

fn is_present() -> bool {
    // SAFETY: asks the loader for the library by name; NVRTC has no unsound start-up code.
    unsafe { sys::is_culib_present() }
}

/// Loads the first library in `folders` whose name starts with `prefix`, and never unloads it.
fn load_named(folders: &[PathBuf], prefix: &str) {
    for folder in folders {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        let mut names: Vec<PathBuf> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
            })
            .collect();
        names.sort();
        for path in names {
            // SAFETY: a library of the toolkit, loaded as the toolkit itself loads it.
            if let Ok(library) = unsafe { Library::open(Some(&path), RTLD_LAZY | RTLD_GLOBAL) } {
                std::mem::forget(library);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_headers_are_reported_with_the_searched_folders() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let roots = [folder.path().to_path_buf()];
        let err = Toolkit::among(&roots).expect_err("an empty folder has no headers").to_string();
        assert!(err.contains("cuda_fp16.h"), "{err}");
        assert!(err.contains(&folder.path().display().to_string()), "{err}");
        assert!(err.contains("CUDA_HOME"), "{err}");
    }

    #[test]
    fn headers_may_be_beside_the_binary() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let roots = beside(&folder.path().join("atoll"));
        for root in [roots[1].clone(), roots[0].clone()] {
            std::fs::create_dir_all(root.join("include")).expect("a folder");
            std::fs::write(root.join("include").join(HEADER), "").expect("a file");
            let toolkit = Toolkit::among(&roots).expect("the header is there");
            assert_eq!(toolkit.includes[0], root.join("include"));
        }
    }

    #[test]
    fn pythons_of_the_path_are_searched() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [own, linked] = ["own", "linked"].map(|name| folder.path().join(name));
        for base in [&own, &linked] {
            std::fs::create_dir_all(base.join("bin")).expect("a folder");
        }
        std::fs::write(own.join("bin/python3"), "").expect("a file");
        std::os::unix::fs::symlink(own.join("bin/python3"), linked.join("bin/python3"))
            .expect("a link");
        let path = std::env::join_paths([linked.join("bin"), folder.path().join("none")]);
        let found = pythons_in(&path.expect("a path"));
        let own = own.canonicalize().expect("a folder");
        assert_eq!(found, [linked, own]);
    }

    #[test]
    fn configured_folder_is_first() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(folder.path().join("include")).expect("a folder");
        std::fs::write(folder.path().join("include").join(HEADER), "").expect("a file");
        let roots = roots(Some(folder.path()));
        assert_eq!(roots[0], folder.path());
        let toolkit = Toolkit::among(&roots).expect("the header is there");
        assert_eq!(toolkit.includes[0], folder.path().join("include"));
    }
}
