//! A device that runs every plan its host can run: steps that an accelerator has no kernel for run
//! on the host, inside the same program.
//!
//! A plan that the accelerator accepts is loaded there: its tasks and segments are the
//! accelerator's own, and nothing else happens unless a request has sizes that it refuses.
//!
//! Any other plan is cut into *sections*, alternately of the accelerator and of the host, each a
//! launch plan of its own ([`section`]). A task of such a program runs its sections one after
//! another; values that another section reads pass through host memory. Sizes that depend on data
//! are symbols of the sections that read them, so these are specialised when the sizes are known.

mod placement;
mod program;
mod queue;
mod residency;
pub mod section;
mod whole;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use model::LaunchPlan;

use crate::residency::MemoryUse;
use crate::{
    CompletionSink, Device, DeviceCapabilities, DeviceError, DeviceInfo, DeviceReadings,
    HostSection, InjectedFault, MachineLimits, Program, Queue, QueueCommand, QueueOptions,
};
pub use placement::{HostReason, Placement};
pub use program::HybridProgram;
use queue::HybridQueue;
use section::Section;
use whole::WholeProgram;

/// An accelerator with a host that runs the steps it has no kernel for.
pub struct HybridDevice {
    accelerator: Arc<dyn Device>,
    host: Arc<dyn Device>,
}

impl HybridDevice {
    /// `accelerator`, with `host` for the steps that it refuses.
    pub fn new(accelerator: Arc<dyn Device>, host: Arc<dyn Device>) -> HybridDevice {
        HybridDevice { accelerator, host }
    }

    /// Which steps of `plan` run where; `None` when the accelerator runs all of them.
    pub fn place(&self, plan: &LaunchPlan) -> Result<Option<Placement>, DeviceError> {
        placement::place(&*self.accelerator, &*self.host, plan)
    }

    /// The sections of `plan` in the order they run; `None` when the accelerator runs all of it.
    pub fn sections(&self, plan: &LaunchPlan) -> Result<Option<Vec<Section>>, DeviceError> {
        Ok(self.place(plan)?.map(|placement| section::cut(plan, &placement.on_host())))
    }

    /// Loads `plan` in sections; `None` when the accelerator runs all of it.
    pub fn load_sections(
        &self,
        plan: &Arc<LaunchPlan>,
    ) -> Result<Option<Arc<HybridProgram>>, DeviceError> {
        let Some(sections) = self.sections(plan)? else { return Ok(None) };
        let program = HybridProgram::load(&*self.accelerator, &self.host, plan.clone(), sections)?;
        Ok(Some(Arc::new(program)))
    }
}

impl Device for HybridDevice {
    fn info(&self) -> &DeviceInfo {
        self.accelerator.info()
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        self.place(plan).err().into_iter().collect()
    }

    fn host_sections(&self, plan: &LaunchPlan, sizes: &[(String, usize)]) -> Vec<HostSection> {
        let Ok(Some(placement)) = self.place(plan) else { return Vec::new() };
        placement::host_sections(plan, &placement, sizes)
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        match self.accelerator.load(plan.clone()) {
            Ok(program) => return Ok(Arc::new(WholeProgram::new(program, self.host.clone()))),
            Err(DeviceError::Unsupported { .. }) => {}
            Err(err) => return Err(err),
        }
        match self.load_sections(&plan)? {
            Some(program) => Ok(program),
            // It has kernels for every step, and not for all of them together.
            None => Ok(Arc::new(whole::on_host(&self.host, &plan)?)),
        }
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        Ok(Box::new(HybridQueue::open(&*self.accelerator, self.host.clone(), options, sink)?))
    }

    fn best_effort_sms(&self) -> Option<u32> {
        self.accelerator.best_effort_sms()
    }

    fn capabilities(&self) -> DeviceCapabilities {
        self.accelerator.capabilities()
    }

    fn command(&self, commands: &[(&dyn Queue, QueueCommand)]) {
        self.accelerator.command(commands);
    }

    fn fault(&self) -> Option<DeviceError> {
        self.accelerator.fault()
    }

    fn give_up(&self, reason: &str) {
        self.accelerator.give_up(reason);
    }

    fn inject(&self, fault: InjectedFault) -> Result<(), DeviceError> {
        self.accelerator.inject(fault)
    }

    fn limits(&self) -> Option<MachineLimits> {
        self.accelerator.limits()
    }

    fn host_pool(&self) -> Option<Arc<dyn model::HostPool>> {
        self.accelerator.host_pool()
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        self.accelerator.memory_use()
    }

    fn readings(&self) -> Option<DeviceReadings> {
        self.accelerator.readings()
    }
}
