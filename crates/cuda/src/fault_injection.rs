//! Faults made on purpose, to show that a server survives them.

use std::sync::Arc;

use device::{DeviceError, InjectedFault};
use model::gpu::{Kernel, KernelFacts};

use crate::compile::kernel_cache::LoadedKernel;
use crate::compile::kernel_text::KernelClass;
use crate::driver::{LaunchShape, Priority, Stream};
use crate::error::CudaError;
use crate::services::DeviceServices;

/// What the kernel does, an address of the device, and how long it runs.
const ARGS_BYTES: usize = 24;
const THREADS: u32 = 256;

const SOURCE: &str = r#"
struct FaultArgs {
    unsigned long long kind;
    unsigned long long address;
    unsigned long long nanos;
};
struct Fault {
    using Args = FaultArgs;
    static constexpr int kThreads = 256, kShared = 0, kBlocks = 1;
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int, unsigned char*, YieldPoint&,
                                                const Dependency& dependency)
    {
        dependency.wait();
        if (a.kind == 0) *(volatile unsigned*)(a.address) = 1;
        if (a.kind == 1) *(volatile unsigned*)(a.address + 1) = 1;
        if (a.kind == 2) asm volatile("trap;");
        assert(a.kind != 4);
        if (a.kind == 3) {
            unsigned long long began, now;
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
            do {
                asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
            } while (now - began < a.nanos);
        }
        return true;
    }
};
"#;

pub(crate) fn kernel() -> Kernel {
    Kernel::new(KernelFacts {
        source: format!("#include \"base.cuh\"\nusing namespace tiles;\n{SOURCE}"),
        expression: "Fault".to_string(),
        threads: THREADS,
        shared_bytes: 0,
        args_bytes: ARGS_BYTES as u32,
    })
}

/// Makes `fault` happen on a device; what its kernel does is noticed later, as any fault is. The
/// result is the kernel, which must stay while it may run.
pub(crate) fn inject(
    services: &DeviceServices,
    fault: InjectedFault,
) -> Result<Option<Arc<LoadedKernel>>, DeviceError> {
    let context = services.device.context();
    // Far from everything that is mapped; the misaligned address is never accessed as a whole.
    let (kind, address, millis) = match fault {
        InjectedFault::IllegalAddress => (0u64, 1u64 << 46, 0),
        InjectedFault::MisalignedAddress => (1, 1 << 46, 0),
        InjectedFault::Trap => (2, 0, 0),
        InjectedFault::Hang { millis } => (3, 0, millis),
        InjectedFault::Assert => (4, 0, 0),
        InjectedFault::Lost => {
            context.set_faulted("the device is lost (injected)");
            return Ok(None);
        }
        InjectedFault::OutOfMemory { after } => {
            context.fail_allocation(after);
            return Ok(None);
        }
    };
    let request = (kernel(), KernelClass::RealTime);
    let kernels = services.compile.kernels.get(std::slice::from_ref(&request), &|_, _| {})?;
    let Some(kernel) = kernels.get(&request) else {
        return Err(DeviceError::Defect("the kernel of a fault is missing".to_string()));
    };
    let mut args = [0; ARGS_BYTES];
    args[0..8].copy_from_slice(&kind.to_le_bytes());
    args[8..16].copy_from_slice(&address.to_le_bytes());
    args[16..24].copy_from_slice(&(millis * 1_000_000).to_le_bytes());
    // A hang occupies every SM, so that nothing else ends.
    let blocks = services.device.target().multiprocessors * 8;
    let grid = if kind == 3 { blocks } else { 1 };
    let shape = LaunchShape { grid, threads: THREADS, shared: 0, cluster: 1, dependent: false };
    let launch = || -> Result<(), CudaError> {
        let stream = Stream::new(context, Priority::High)?;
        // SAFETY: the arguments have the layout of `FaultArgs`. The kernel is meant to fault; it
        // writes to no memory that anything uses.
        unsafe { stream.launch(kernel.function(), shape, &[&args]) }
    };
    launch().map_err(|err| services.device.error(err))?;
    Ok(Some(kernel.clone()))
}

#[cfg(test)]
mod tests {
    use device::KernelCompiler;

    use super::*;
    use crate::compile::kernel_text::module_text;
    use crate::compile::nvrtc::Nvrtc;
    use crate::compile::toolkit::Toolkit;
    use crate::toy;

    #[test]
    fn the_kernel_of_faults_compiles() {
        let toolkit = match Toolkit::find(None) {
            Ok(toolkit) => toolkit,
            Err(err) => return println!("skipped: {err}"),
        };
        let nvrtc = Nvrtc::new(&toolkit, "sm_90a".to_string(), toy::ToyCompiler.headers());
        let text = module_text(&kernel(), KernelClass::RealTime);
        nvrtc.expect("NVRTC").compile(&text).map(drop).expect("a cubin");
    }
}
