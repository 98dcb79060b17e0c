//! Where cubins come from: the library of kernels compiled ahead, the folder of those that were
//! compiled here, and the compiler.

use std::path::Path;

use device::DeviceError;

use crate::compile::cubin_cache::{CubinCache, KeyBase};
use crate::compile::kernel_library::KernelLibrary;
use crate::compile::nvrtc::{self, Nvrtc};
use crate::compile::toolkit::Toolkit;
use crate::error::OpenError;
use crate::options::CudaOptions;

/// Characters of a kernel's name in an error.
const NAME_LENGTH: usize = 80;

/// Cubins of one architecture.
pub(crate) struct KernelSources {
    architecture: String,
    library: Option<(KernelLibrary, KeyBase)>,
    compiler: Result<Compiler, String>,
}

struct Compiler {
    nvrtc: Nvrtc,
    cache: CubinCache,
    keys: KeyBase,
}

/// Which source a cubin is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Library,
    Folder,
}

impl KernelSources {
    /// Finds the sources that `options` name. Fails when there is neither a library nor a compiler.
    pub(crate) fn open(
        options: &CudaOptions,
        architecture: String,
        headers: &[(&str, &str)],
    ) -> Result<KernelSources, OpenError> {
        let toolkit = Toolkit::find(options.toolkit.as_deref());
        KernelSources::with_toolkit(toolkit, options, architecture, headers)
    }

    pub(crate) fn with_toolkit(
        toolkit: Result<Toolkit, OpenError>,
        options: &CudaOptions,
        architecture: String,
        headers: &[(&str, &str)],
    ) -> Result<KernelSources, OpenError> {
        let found = toolkit.map_err(|err| err.to_string());
        let nvrtc = found.and_then(|found| Nvrtc::new(&found, architecture.clone(), headers));
        let library = options.kernel_library.as_deref().and_then(open_library).map(|library| {
            let parts = nvrtc::identity(library.version(), &architecture, headers);
            (library, KeyBase::of(parts.iter().map(Vec::as_slice)))
        });
        let compiler = match nvrtc {
            Ok(nvrtc) => {
                let parts = nvrtc::identity(nvrtc.version(), &architecture, headers);
                let cache =
                    CubinCache::open(options.cache_dir.as_deref()).map_err(OpenError::Cache)?;
                let keys = KeyBase::of(parts.iter().map(Vec::as_slice));
                Ok(Compiler { nvrtc, cache, keys })
            }
            Err(why) if library.is_none() => {
                return Err(OpenError::NoCompiler(format!(
                    "{why}; or make a library of kernels where NVRTC is, with '{}', and name it \
                     with --kernel-library",
                    build_command(&architecture)
                )));
            }
            Err(why) => {
                tracing::info!(why, "no compiler of kernels: only those of the library are used");
                Err(why)
            }
        };
        Ok(KernelSources { architecture, library, compiler })
    }

    /// The compiler's version, or that of the one that made the library.
    pub(crate) fn compiler_version(&self) -> (i32, i32) {
        match (&self.compiler, &self.library) {
            (Ok(compiler), _) => compiler.nvrtc.version(),
            (Err(_), Some((library, _))) => library.version(),
            (Err(_), None) => (0, 0),
        }
    }

    /// Whether every kernel can be had, not only those of the library.
    pub(crate) fn can_compile(&self) -> bool {
        self.compiler.is_ok()
    }

    /// Whether the library has the module `text`.
    pub(crate) fn has_ahead(&self, text: &str) -> bool {
        let library = self.library.as_ref();
        library.is_some_and(|(library, keys)| library.has(&keys.key(&[text.as_bytes()])))
    }

    /// The cubin of the module `text` in `source`, if it is there.
    pub(crate) fn stored(&self, source: Source, text: &str) -> Option<Vec<u8>> {
        let text = text.as_bytes();
        match source {
            Source::Library => {
                let (library, keys) = self.library.as_ref()?;
                library.get(&keys.key(&[text]))
            }
            Source::Folder => {
                let compiler = self.compiler.as_ref().ok()?;
                compiler.cache.get(&compiler.keys.key(&[text]))
            }
        }
    }

    /// Compiles the module `text` of the kernel called `name`.
    pub(crate) fn compile(&self, name: &str, text: &str) -> Result<Vec<u8>, DeviceError> {
        let compiler = self.compiler.as_ref().map_err(|why| self.no_compiler(name, why))?;
        let compiled = compiler.nvrtc.compile(text).map_err(|reason| failed(name, reason))?;
        Ok(compiled.cubin)
    }

    /// Keeps what was compiled and could be loaded.
    pub(crate) fn keep(&self, text: &str, cubin: &[u8]) {
        if let Ok(compiler) = &self.compiler {
            compiler.cache.put(&compiler.keys.key(&[text.as_bytes()]), cubin);
        }
    }

    fn no_compiler(&self, name: &str, why: &str) -> DeviceError {
        let name: String = name.chars().take(NAME_LENGTH).collect();
        DeviceError::NoCompiler(format!(
            "the kernel library has no kernel '{name}' for {}: {why}; or make a library of this \
             model where NVRTC is, with '{}', and name it with --kernel-library",
            self.architecture,
            build_command(&self.architecture)
        ))
    }
}

/// A kernel that the compiler or the driver refuses.
pub(crate) fn failed(name: &str, reason: String) -> DeviceError {
    DeviceError::Unsupported { step: name.to_string(), op: "kernel".to_string(), reason }
}

/// How a library with the kernels of a model is made.
fn build_command(architecture: &str) -> String {
    format!("atoll kernels build --output FILE --arch {architecture} MODEL.onnx")
}

/// A library that cannot be read is as if there was none.
fn open_library(path: &Path) -> Option<KernelLibrary> {
    match KernelLibrary::open(path) {
        Ok(library) => {
            let (major, minor) = library.version();
            let (path, kernels) = (path.display(), library.len());
            tracing::info!(%path, kernels, nvrtc = %format!("{major}.{minor}"), "kernel library");
            Some(library)
        }
        Err(err) => {
            tracing::error!(err, "kernel library not used");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::compile::kernel_library::LibraryContents;

    const HEADERS: &[(&str, &str)] = &[("a.cuh", "int a;")];

    fn missing() -> Result<Toolkit, OpenError> {
        Err(OpenError::NoCompiler("NVRTC is missing".to_string()))
    }

    fn library(folder: &Path, headers: &[(&str, &str)]) -> PathBuf {
        let parts = nvrtc::identity((13, 0), "sm_90a", headers);
        let keys = KeyBase::of(parts.iter().map(Vec::as_slice));
        let mut contents = LibraryContents::new((13, 0));
        contents.add(keys.key(&[b"text"]), b"cubin").expect("it fits");
        let path = folder.join("kernels.bin");
        contents.write(&path).expect("a write");
        path
    }

    fn sources(library: Option<PathBuf>) -> Result<KernelSources, OpenError> {
        let options = CudaOptions { kernel_library: library, ..CudaOptions::default() };
        KernelSources::with_toolkit(missing(), &options, "sm_90a".to_string(), HEADERS)
    }

    #[test]
    fn without_a_compiler_kernels_are_those_of_the_library() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let sources = sources(Some(library(folder.path(), HEADERS))).expect("a library");
        assert!(!sources.can_compile());
        assert_eq!(sources.compiler_version(), (13, 0));
        assert!(sources.has_ahead("text") && !sources.has_ahead("other"));
        let cubin = sources.stored(Source::Library, "text");
        assert_eq!(cubin.as_deref(), Some(b"cubin".as_slice()));
        assert_eq!(sources.stored(Source::Folder, "text"), None);
        let err = sources.compile("tiles::Pair", "other").expect_err("no compiler").to_string();
        for part in ["tiles::Pair", "NVRTC is missing", "atoll kernels build", "--arch sm_90a"] {
            assert!(err.contains(part), "{err}");
        }
    }

    #[test]
    fn a_library_of_other_headers_has_no_kernel() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = library(folder.path(), &[("a.cuh", "int changed;")]);
        let sources = sources(Some(path)).expect("a library");
        assert!(!sources.has_ahead("text"));
        assert_eq!(sources.stored(Source::Library, "text"), None);
    }

    #[test]
    fn without_compiler_and_library_the_error_says_what_to_do() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let damaged = folder.path().join("damaged.bin");
        std::fs::write(&damaged, "not a library").expect("a write");
        for library in [None, Some(folder.path().join("missing.bin")), Some(damaged)] {
            let err = sources(library).err().expect("nothing to take kernels from").to_string();
            for part in ["NVRTC is missing", "atoll kernels build", "--kernel-library"] {
                assert!(err.contains(part), "{err}");
            }
        }
    }
}
