//! NVIDIA's run-time compiler: CUDA C++ text in, a cubin out.

use std::ffi::{CStr, CString, c_char, c_int};

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use crate::compile::toolkit::Toolkit;

/// A compiler for one architecture.
pub(crate) struct Nvrtc {
    version: (i32, i32),
    architecture: String,
    options: Vec<CString>,
    headers: Vec<(CString, CString)>,
}

/// The result of a compilation.
pub(crate) struct Compiled {
    pub(crate) cubin: Vec<u8>,
    /// The compiler's messages.
    pub(crate) log: String,
}

impl Nvrtc {
    /// A compiler for `architecture` that finds `headers` by name and the toolkit's headers on
    /// disk.
    pub(crate) fn new(
        toolkit: &Toolkit,
        architecture: String,
        headers: &[(&str, &str)],
    ) -> Result<Nvrtc, String> {
        let version = version()?;
        let mut options = vec![text(&format!("--gpu-architecture={architecture}"))?];
        options.push(text("--std=c++17")?);
        for include in &toolkit.includes {
            options.push(text(&format!("--include-path={}", include.display()))?);
        }
        let headers = headers
            .iter()
            .map(|(name, body)| Ok((text(name)?, text(body)?)))
            .collect::<Result<Vec<_>, String>>()?;
        Ok(Nvrtc { version, architecture, options, headers })
    }

    /// The same compiler with an option that does not change the cubin.
    pub(crate) fn with_option(mut self, option: &str) -> Result<Nvrtc, String> {
        self.options.push(text(option)?);
        Ok(self)
    }

    pub(crate) fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The compiler, the architecture and the language.
    pub(crate) fn identity_without_headers(&self) -> Vec<Vec<u8>> {
        identity_without_headers(self.version, &self.architecture)
    }

    /// The name and the body of a header, unless the toolkit has it.
    pub(crate) fn header(&self, name: &str) -> Option<(&str, &str)> {
        let (name, body) = self.headers.iter().find(|(own, _)| own.to_str() == Ok(name))?;
        Some((name.to_str().ok()?, body.to_str().ok()?))
    }

    /// Compiles `source`; the error is the compiler's message.
    pub(crate) fn compile(&self, source: &str) -> Result<Compiled, String> {
        let source = text(source)?;
        let names: Vec<*const c_char> =
            self.headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let bodies: Vec<*const c_char> =
            self.headers.iter().map(|(_, body)| body.as_ptr()).collect();
        let mut raw: nvrtcProgram = std::ptr::null_mut();
        // SAFETY: all texts are NUL-terminated and outlive the program, which is destroyed below.
        let code = unsafe {
            sys::nvrtcCreateProgram(
                &mut raw,
                source.as_ptr(),
                c"kernel.cu".as_ptr(),
                names.len() as c_int,
                bodies.as_ptr(),
                names.as_ptr(),
            )
        };
        checked("nvrtcCreateProgram", code)?;
        let program = ProgramGuard(raw);
        let options: Vec<*const c_char> =
            self.options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, the options is NUL-terminated.
        let code = unsafe {
            sys::nvrtcCompileProgram(program.0, options.len() as c_int, options.as_ptr())
        };
        if code != nvrtcResult::NVRTC_SUCCESS {
            let log = program.log().unwrap_or_default();
            return Err(format!("{}: {log}", name_of(code)));
        }
        Ok(Compiled { cubin: program.cubin()?, log: program.log()? })
    }
}

/// The version of the compiler; only where a toolkit was found.
pub(crate) fn version() -> Result<(i32, i32), String> {
    let mut version = (0, 0);
    // SAFETY: the library is loaded (a toolkit was found) and both receive the results.
    let code = unsafe { sys::nvrtcVersion(&mut version.0, &mut version.1) };
    checked("nvrtcVersion", code)?;
    Ok(version)
}

/// Everything besides the text that determines the cubin. Folders do not count: their headers
/// belong to the compiler's version.
pub(crate) fn identity(
    version: (i32, i32),
    architecture: &str,
    headers: &[(&str, &str)],
) -> Vec<Vec<u8>> {
    let mut parts = identity_without_headers(version, architecture);
    let headers = headers.iter().flat_map(|(name, body)| [name.as_bytes(), body.as_bytes()]);
    parts.extend(headers.map(<[u8]>::to_vec));
    parts
}

fn identity_without_headers(version: (i32, i32), architecture: &str) -> Vec<Vec<u8>> {
    vec![
        format!("nvrtc {}.{}", version.0, version.1).into_bytes(),
        architecture.as_bytes().to_vec(),
        b"--std=c++17".to_vec(),
    ]
}

/// A program of NVRTC.
struct ProgramGuard(nvrtcProgram);

impl ProgramGuard {
    fn log(&self) -> Result<String, String> {
        let mut size = 0usize;
        // SAFETY: the program is alive and `size` receives the result.
        checked("nvrtcGetProgramLogSize", unsafe {
            sys::nvrtcGetProgramLogSize(self.0, &mut size)
        })?;
        let mut log = vec![0u8; size];
        // SAFETY: `log` has the size that was reported.
        checked("nvrtcGetProgramLog", unsafe {
            sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast())
        })?;
        log.retain(|&byte| byte != 0);
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, String> {
        let mut size = 0usize;
        // SAFETY: the program is alive and `size` receives the result.
        checked("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) })?;
        let mut cubin = vec![0u8; size];
        // SAFETY: `cubin` has the size that was reported.
        checked("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) })?;
        Ok(cubin)
    }
}

impl Drop for ProgramGuard {
    fn drop(&mut self) {
        // SAFETY: made by `nvrtcCreateProgram` and not used after this.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn text(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| "a text for the compiler contains NUL".to_string())
}

fn checked(call: &str, code: nvrtcResult) -> Result<(), String> {
    if code == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(format!("{call}: {}", name_of(code)))
}

fn name_of(code: nvrtcResult) -> String {
    // SAFETY: the result is a static NUL-terminated text.
    unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use model::gpu::{Kernel, KernelFacts};

    use super::*;
    use crate::compile::kernel_text::{KernelClass, module_text};
    use crate::preempt::best_effort_variant::BestEffortVariant::{CheckedGrid, Grid, Loop};
    use crate::toy;

    /// Compiles without a GPU, where a toolkit is installed.
    #[test]
    fn kernels_compile_for_both_classes() {
        use device::KernelCompiler;
        let toolkit = match Toolkit::find(None) {
            Ok(toolkit) => toolkit,
            Err(err) => return println!("skipped: {err}"),
        };
        let nvrtc = Nvrtc::new(&toolkit, "sm_90a".to_string(), toy::ToyCompiler.headers());
        let nvrtc = nvrtc.expect("NVRTC");
        for kernel in toy::kernels() {
            let forms = [Loop, Grid, CheckedGrid].map(KernelClass::BestEffort);
            for class in forms.into_iter().chain([KernelClass::RealTime]) {
                let compiled = nvrtc.compile(&module_text(&kernel, class)).expect("a cubin");
                assert_eq!(compiled.cubin[..4], *b"\x7fELF");
            }
        }
        let facts = KernelFacts { args_bytes: 40, ..(*toy::kernels()[0]).clone() };
        let wrong = Kernel::new(facts);
        let err = nvrtc.compile(&module_text(&wrong, KernelClass::RealTime)).err();
        assert!(err.is_some_and(|err| err.contains("size of the arguments")));
    }

    /// Kernels of a network are compiled on all cores at once.
    #[test]
    fn compiles_on_several_threads() {
        use device::KernelCompiler;
        let toolkit = match Toolkit::find(None) {
            Ok(toolkit) => toolkit,
            Err(err) => return println!("skipped: {err}"),
        };
        let nvrtc = Nvrtc::new(&toolkit, "sm_90a".to_string(), toy::ToyCompiler.headers());
        let nvrtc = nvrtc.expect("NVRTC");
        let text = |number: usize| {
            let mut facts = (*toy::kernels()[0]).clone();
            facts.source += &format!("\nnamespace n{number} {{ struct Scale : toy::Scale {{}}; }}");
            facts.expression = format!("n{number}::Scale");
            module_text(&Kernel::new(facts), KernelClass::BestEffort(Grid))
        };
        std::thread::scope(|scope| {
            for number in 0..8 {
                let (nvrtc, text) = (&nvrtc, text(number));
                scope.spawn(move || nvrtc.compile(&text).map(drop).expect("a cubin"));
            }
        });
    }
}
