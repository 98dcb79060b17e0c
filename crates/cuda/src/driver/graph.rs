//! CUDA graphs.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec};

use super::call_thread::at_normal_priority;
use super::slow_calls;
use super::{Context, CountedResource, ResourceKind, Stream};
use crate::error::CudaError;

/// A recorded sequence of launches. What its kernels point to must outlive it.
pub(crate) struct Graph {
    exec: CUgraphExec,
    context: Arc<Context>,
    _counted: CountedResource,
}

/// A graph that capture ended with.
struct CapturedGraph(CUgraph);

// SAFETY: the handle may be used from any thread, by one at a time, and has one owner.
unsafe impl Send for CapturedGraph {}

// SAFETY: an executable graph may be launched from any thread, by one at a time; the queue that
// owns this value does.
unsafe impl Send for Graph {}
// SAFETY: a shared reference can only launch it, and who calls that answers for one at a time.
unsafe impl Sync for Graph {}

impl Graph {
    /// Instantiates `captured` and uploads it, so that the first launch is not slower.
    pub(super) fn instantiate(
        context: &Arc<Context>,
        captured: CUgraph,
        stream: &Stream,
    ) -> Result<Graph, CudaError> {
        let captured = CapturedGraph(captured);
        at_normal_priority(|| Graph::instantiate_here(context, captured, stream))
    }

    fn instantiate_here(
        context: &Arc<Context>,
        CapturedGraph(captured): CapturedGraph,
        stream: &Stream,
    ) -> Result<Graph, CudaError> {
        context.enter()?;
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

impl Graph {
    fn destroy(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `instantiate` and not used after this.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
            slow_calls::end("cuGraphExecDestroy");
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let graph = &mut *self;
        at_normal_priority(|| graph.destroy());
    }
}
