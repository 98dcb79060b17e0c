//! What loading and running programs on one GPU needs.

use std::sync::Arc;

use crate::compile::CompileService;
use crate::device_context::DeviceContext;
use crate::memory::MemoryServices;
use crate::preempt::PreemptionServices;
use crate::program::graph_recorder::GraphRecorder;

/// The parts of one device. Code takes the part it needs; programs and measurements, which need
/// most of them, take all.
#[derive(Clone)]
pub(crate) struct DeviceServices {
    /// First, so that the SM partition is destroyed before the context it belongs to.
    pub(crate) recorder: Arc<GraphRecorder>,
    pub(crate) preemption: Arc<PreemptionServices>,
    pub(crate) memory: Arc<MemoryServices>,
    pub(crate) compile: Arc<CompileService>,
    pub(crate) device: Arc<DeviceContext>,
}
