//! Many launches as one.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUDA_KERNEL_NODE_PARAMS, CUgraph, CUgraphExec, CUgraphNode};

use super::{Context, Function, LaunchShape, Stream};
use crate::error::CudaError;

/// A recorded chain of launches. What its kernels point to must outlive it.
pub(crate) struct Graph {
    exec: CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: an executable graph may be launched from any thread; only one at a time does (`launch` takes `&self` of a value
// that one queue owns).
unsafe impl Send for Graph {}

impl Graph {
    /// Makes `captured` ready to be launched, and puts it on the device so that the first launch is not slower.
    pub(super) fn instantiate(
        context: &Arc<Context>,
        captured: CUgraph,
        stream: &Stream,
    ) -> Result<Graph, CudaError> {
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: `captured` is a graph that capture ended with; `exec` is a place for the answer.
        let made = context.check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut exec, captured, 0)
        });
        // SAFETY: the executable graph does not need the one it is made of.
        let freed = context.check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(captured) });
        made?;
        let graph = Graph { exec, context: context.clone() };
        freed?;
        // SAFETY: both handles are alive.
        context.check("cuGraphUpload", unsafe { sys::cuGraphUpload(graph.exec, stream.raw()) })?;
        stream.synchronize()?;
        Ok(graph)
    }

    /// Queues all of it.
    ///
    /// # Safety
    /// What the recorded kernels read and write is alive until they are done, and no other launch of this graph or
    /// of one over the same memory is in flight elsewhere.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both handles are alive; the caller answers for the memory.
        self.context.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `instantiate` and not used after this.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// A kernel with all it is launched with.
pub(crate) struct ChainLink<'a> {
    pub(crate) function: &'a Function,
    pub(crate) shape: LaunchShape,
    /// The arguments, as bytes that are copied.
    pub(crate) params: [&'a [u8]; 2],
}

/// A few launches one after another whose arguments can be changed between two runs.
pub(crate) struct Chain {
    exec: CUgraphExec,
    /// Kept because the nodes are its own.
    graph: CUgraph,
    nodes: Vec<CUgraphNode>,
    context: Arc<Context>,
}

// SAFETY: graph handles may be used from any thread; only the one that owns this value does.
unsafe impl Send for Chain {}

impl Chain {
    /// Makes the launches of `links` ready to run in their order.
    pub(crate) fn new(context: &Arc<Context>, links: &[ChainLink<'_>]) -> Result<Chain, CudaError> {
        context.enter()?;
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: `graph` is a place for the answer; destroyed when this value is dropped.
        context.check("cuGraphCreate", unsafe { sys::cuGraphCreate(&mut graph, 0) })?;
        let exec = std::ptr::null_mut();
        let mut chain = Chain { exec, graph, nodes: Vec::new(), context: context.clone() };
        for link in links {
            let mut node: CUgraphNode = std::ptr::null_mut();
            let before = chain.nodes.last().map_or(std::ptr::null(), std::ptr::from_ref);
            let count = usize::from(!chain.nodes.is_empty());
            let code = with_params(link, |params| {
                // SAFETY: all handles are alive; the arguments are as many and as large as the kernel's and are
                // copied during the call.
                unsafe { sys::cuGraphAddKernelNode_v2(&mut node, graph, before, count, params) }
            });
            context.check("cuGraphAddKernelNode", code)?;
            chain.nodes.push(node);
        }
        // SAFETY: the graph is complete and `exec` is a place for the answer.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut chain.exec, graph, 0) };
        context.check("cuGraphInstantiate", code)?;
        Ok(chain)
    }

    /// Gives the launches the arguments of `links`, which are otherwise those it was made of.
    pub(crate) fn update(&mut self, links: &[ChainLink<'_>]) -> Result<(), CudaError> {
        self.context.enter()?;
        for (node, link) in self.nodes.iter().zip(links) {
            let code = with_params(link, |params| {
                // SAFETY: as when the node was made; a run that was queued before keeps its own copy.
                unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.exec, *node, params) }
            });
            self.context.check("cuGraphExecKernelNodeSetParams", code)?;
        }
        Ok(())
    }

    /// Queues all of it.
    ///
    /// # Safety
    /// What the kernels read and write is alive until they are done, and is used by this stream alone.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both handles are alive; the caller answers for the memory.
        self.context.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `new` and not used after this; an executable graph that was never made is null.
            unsafe {
                if !self.exec.is_null() {
                    let _ = sys::cuGraphExecDestroy(self.exec);
                }
                let _ = sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

/// Calls `call` with `link` as the driver takes it.
fn with_params<R>(
    link: &ChainLink<'_>,
    call: impl FnOnce(*const CUDA_KERNEL_NODE_PARAMS) -> R,
) -> R {
    let mut pointers: [*mut c_void; 2] =
        link.params.map(|param| param.as_ptr().cast_mut().cast::<c_void>());
    let params = CUDA_KERNEL_NODE_PARAMS {
        func: link.function.raw(),
        gridDimX: link.shape.grid,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: link.shape.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: link.shape.shared,
        kernelParams: pointers.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    };
    call(&params)
}
