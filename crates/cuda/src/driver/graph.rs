//! CUDA graphs.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec};

use super::slow_calls;
use super::{Context, CountedResource, ResourceKind, Stream};
use crate::error::CudaError;

/// A recorded sequence of launches. What its kernels point to must outlive it.
pub(crate) struct Graph {
    exec: CUgraphExec,
    context: Arc<Context>,
    _counted: CountedResource,
}

// SAFETY: an executable graph may be launched from any thread, by one at a time; the queue that
// owns this value does.
unsafe impl Send for Graph {}

impl Graph {
    /// Instantiates `captured` and uploads it, so that the first launch is not slower.
    pub(super) fn instantiate(
        context: &Arc<Context>,
        captured: CUgraph,
        stream: &Stream,
    ) -> Result<Graph, CudaError> {
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: `captured` is a graph that capture ended with; `exec` receives the result.
        let made = context.check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut exec, captured, 0)
        });
        // SAFETY: the executable graph does not need the captured one.
        let freed = context.check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(captured) });
        made?;
        let counted = context.resource_counts().count(ResourceKind::Graph, 0);
        let graph = Graph { exec, context: context.clone(), _counted: counted };
        freed?;
        // SAFETY: both handles are alive.
        context.check("cuGraphUpload", unsafe { sys::cuGraphUpload(graph.exec, stream.raw()) })?;
        stream.synchronize()?;
        Ok(graph)
    }

    /// Launches the graph.
    ///
    /// # Safety
    /// What the recorded kernels read and write is alive until they are done, and no other launch
    /// of this graph or of one over the same memory is in flight elsewhere.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both handles are alive; the caller is responsible for the memory.
        self.context.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `instantiate` and not used after this.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
            slow_calls::end("cuGraphExecDestroy");
        }
    }
}
