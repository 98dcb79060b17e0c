//! CUDA streams: copies, launches and writes of words, in order.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUgraph, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterDimension, CUlaunchConfig, CUresult,
    CUstream, CUstream_flags, CUstreamBatchMemOpParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as WriteValue,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 as WrittenValue,
    CUstreamBatchMemOpType, CUstreamCaptureMode,
};

use super::call_thread::at_normal_priority;
use super::slow_calls;
use super::{Context, Function, Graph, SmPartition};
use crate::error::CudaError;

/// Memory operations per call, at most.
const WORDS_PER_CALL: usize = 256;

/// Whose blocks are placed first when both wait for an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    High,
    Low,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchShape {
    pub(crate) grid: u32,
    pub(crate) threads: u32,
    pub(crate) shared: u32,
    /// Blocks per cluster; 1 for none.
    pub(crate) cluster: u32,
    /// Blocks may start while the last ones of the previous kernel still run; the kernel waits
    /// itself.
    pub(crate) dependent: bool,
}

/// A CUDA stream.
pub(crate) struct Stream {
    raw: CUstream,
    context: Arc<Context>,
    /// The partition that its kernels are confined to, if any.
    _part: Option<Arc<SmPartition>>,
}

// SAFETY: a stream handle may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>, priority: Priority) -> Result<Stream, CudaError> {
        let number = number_of(context, priority)?;
        let own = |raw| Stream { raw, context: context.clone(), _part: None };
        if let Some(part) = context.part() {
            return part.stream(number).map(own);
        }
        let mut raw: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` receives the result; destroyed when this value is dropped.
        let code = unsafe { sys::cuStreamCreateWithPriority(&mut raw, flags, number) };
        context.check("cuStreamCreateWithPriority", code)?;
        Ok(own(raw))
    }

    /// A stream of low priority whose kernels run in `partition` only.
    pub(crate) fn in_partition(
        context: &Arc<Context>,
        partition: &Arc<SmPartition>,
    ) -> Result<Stream, CudaError> {
        Stream::in_part(context, partition, Priority::Low)
    }

    /// A stream whose kernels run in `part` only, a partition of the same GPU.
    pub(crate) fn in_part(
        context: &Arc<Context>,
        part: &Arc<SmPartition>,
        priority: Priority,
    ) -> Result<Stream, CudaError> {
        let raw = part.stream(number_of(context, priority)?)?;
        Ok(Stream { raw, context: context.clone(), _part: Some(part.clone()) })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits for everything enqueued.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the handle is alive.
        self.context.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Whether everything enqueued is done. Also reports kernels that failed.
    pub(crate) fn is_idle(&self) -> Result<bool, CudaError> {
        self.context.enter()?;
        // SAFETY: the handle is alive.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => self.context.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Copies to the device.
    ///
    /// # Safety
    /// Both sides are `bytes` long and alive, and nothing writes to them, until the copy is done.
    pub(crate) unsafe fn copy_in(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: the caller is responsible for both sides.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw) };
        self.context.check("cuMemcpyHtoDAsync", code)
    }

    /// Copies from the device.
    ///
    /// # Safety
    /// Both sides are `bytes` long and alive, and nothing else uses the target, until the copy is
    /// done.
    pub(crate) unsafe fn copy_out(
        &self,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: the caller is responsible for both sides.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw) };
        self.context.check("cuMemcpyDtoHAsync", code)
    }

    /// Writes zeros over `words` 32-bit words.
    ///
    /// # Safety
    /// The words are alive until the write is done.
    pub(crate) unsafe fn clear(&self, address: u64, words: usize) -> Result<(), CudaError> {
        // SAFETY: the caller is responsible for the words.
        unsafe { self.fill(address, 0, words) }
    }

    /// Writes `value` over `words` 32-bit words.
    ///
    /// # Safety
    /// The words are alive until the write is done.
    pub(crate) unsafe fn fill(
        &self,
        address: u64,
        value: u32,
        words: usize,
    ) -> Result<(), CudaError> {
        if words == 0 {
            return Ok(());
        }
        at_normal_priority(|| {
            self.context.enter()?;
            // SAFETY: the caller is responsible for the words.
            let code = unsafe { sys::cuMemsetD32Async(address, value, words, self.raw) };
            self.context.check("cuMemsetD32Async", code)
        })
    }

    /// Writes one word once everything before it is done. Uses no SM; the word must not be in pool
    /// memory.
    ///
    /// # Safety
    /// The word is alive until the write is done.
    pub(crate) unsafe fn write_word(&self, address: u64, value: u32) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the caller is responsible for the word. The function without `_v2` is an older
        // one that fails here.
        let code = unsafe { sys::cuStreamWriteValue32_v2(self.raw, address, value, 0) };
        self.context.check("cuStreamWriteValue32_v2", code)
    }

    /// Writes several words as [`Self::write_word`] does, in as few calls as the driver allows.
    ///
    /// # Safety
    /// The words are alive until they are written.
    pub(crate) unsafe fn write_words(&self, words: &[(u64, u32)]) -> Result<(), CudaError> {
        if let [(address, value)] = words {
            // SAFETY: the caller is responsible for the word.
            return unsafe { self.write_word(*address, *value) };
        }
        self.context.enter()?;
        for some in words.chunks(WORDS_PER_CALL) {
            let mut writes: Vec<_> = some.iter().map(|word| write_of(*word)).collect();
            // SAFETY: `writes` lives through the call; the caller is responsible for the words.
            let code = unsafe {
                sys::cuStreamBatchMemOp_v2(self.raw, writes.len() as u32, writes.as_mut_ptr(), 0)
            };
            self.context.check("cuStreamBatchMemOp_v2", code)?;
        }
        Ok(())
    }

    /// Launches a kernel. `params` are its arguments, as bytes that are copied during the call.
    ///
    /// # Safety
    /// `params` are as many and as large as the kernel's parameters, and what they point to is
    /// alive until it is done.
    pub(crate) unsafe fn launch(
        &self,
        function: &Function,
        shape: LaunchShape,
        params: &[&[u8]],
    ) -> Result<(), CudaError> {
        self.context.enter()?;
        let mut attributes = [attribute_of_cluster(shape.cluster), attribute_of_dependence()];
        // The attributes that apply are a prefix or a suffix of the two.
        let first = usize::from(shape.cluster <= 1);
        let count = usize::from(shape.cluster > 1) + usize::from(shape.dependent);
        let mut pointers = [std::ptr::null_mut::<c_void>(); 4];
        for (pointer, param) in pointers.iter_mut().zip(params) {
            *pointer = param.as_ptr().cast_mut().cast();
        }
        let config = CUlaunchConfig {
            gridDimX: shape.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared,
            hStream: self.raw,
            attrs: attributes[first..].as_mut_ptr(),
            numAttrs: count as u32,
        };
        // SAFETY: `config` and `pointers` live through the call; the caller is responsible for the
        // parameters.
        let code = unsafe {
            sys::cuLaunchKernelEx(
                &config,
                function.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.context.check("cuLaunchKernelEx", code)
    }

    /// The work that `record` enqueues, as a graph instead of running it.
    pub(crate) fn capture(
        &self,
        record: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        self.context.enter()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the handle is alive.
        let code = unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) };
        self.context.check("cuStreamBeginCapture", code)?;
        let recorded = record(self);
        let mut captured: CUgraph = std::ptr::null_mut();
        // SAFETY: capture was begun on this stream by this thread; it is ended whether or not
        // `record` failed.
        let code = unsafe { sys::cuStreamEndCapture(self.raw, &mut captured) };
        let ended = self.context.check("cuStreamEndCapture", code);
        recorded?;
        ended?;
        Graph::instantiate(&self.context, captured, self)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `new` and not used after this; enqueued work still runs.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
            slow_calls::end("cuStreamDestroy");
        }
    }
}

/// The driver's number of `priority`.
fn number_of(context: &Arc<Context>, priority: Priority) -> Result<i32, CudaError> {
    context.enter()?;
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: both receive the results.
    let code = unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) };
    context.check("cuCtxGetStreamPriorityRange", code)?;
    Ok(if priority == Priority::High { greatest } else { least })
}

fn write_of((address, value): (u64, u32)) -> CUstreamBatchMemOpParams {
    let operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
    let value = WrittenValue { value };
    let mut params = CUstreamBatchMemOpParams { pad: [0; 6] };
    params.writeValue =
        WriteValue { operation, address, __bindgen_anon_1: value, flags: 0, alias: 0 };
    params
}

fn attribute_of_cluster(blocks: u32) -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { clusterDim: ClusterDimension { x: blocks, y: 1, z: 1 } },
    }
}

fn attribute_of_dependence() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}
