//! The cost of being preemptible: one plan as real time and as best effort that is not preempted.

use device::DeviceError;
use model::LaunchPlan;
use serde::Serialize;

use super::{Timing, summary};
use crate::device::CudaDevice;
use crate::driver::{Event, Graph, PinnedBuffer, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::memory::weights::ProgramWeights;
use crate::program::graph_recorder::LaunchTarget;
use crate::program::instance::{BestEffortLaunch, Instance};
use crate::program::lowering::{first_of, lower};
use crate::program::specialization::Specialization;
use crate::services::DeviceServices;

/// Replays until clocks and caches are warm.
const WARM_UP: usize = 5;

/// One plan in several forms, replayed in turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ClassTiming {
    /// As real time, in one graph.
    pub real_time: Timing,
    /// As best effort, in one graph: includes checking the epoch, counting and marking tiles.
    pub best_effort: Timing,
    /// As best effort in chains, each with a fence behind it.
    pub best_effort_chains: Timing,
}

impl CudaDevice {
    /// Times `plan` for `sizes` with the tuned variants, as real time and as best effort. Nothing
    /// else may use the device meanwhile.
    pub fn time_classes(
        &self,
        plan: &LaunchPlan,
        sizes: &[(String, usize)],
        replays: usize,
    ) -> Result<ClassTiming, DeviceError> {
        let services = self.services();
        services.device.check_healthy()?;
        let gpu = lower(services, plan, sizes, device::LaunchChoices::All).map_err(first_of)?;
        let weights = ProgramWeights::new(
            &services.device,
            &services.memory,
            &services.preemption.rt_activity,
            false,
        );
        let specialization = Specialization::new(services, gpu, &weights, &|_, _| {})?;
        let instance = Instance::new(&specialization)?;
        let mut bench = ClassBench::new(services, &specialization, instance)
            .map_err(|err| services.device.error(err))?;
        bench.run(replays).map_err(|err| services.device.error(err))
    }
}

#[derive(Clone, Copy)]
enum LaunchForm {
    RealTime,
    BestEffort,
    Chains,
}

/// The graphs of a plan, and what replaying them takes.
struct ClassBench<'a> {
    specialization: &'a Specialization,
    real_time: Graph,
    best_effort: Graph,
    /// After the graphs, which point into it.
    instance: Instance,
    /// Cleared control words.
    fresh: PinnedBuffer,
    fence: PinnedWord,
    stream: Stream,
    from: Event,
    to: Event,
}

impl<'a> ClassBench<'a> {
    fn new(
        services: &'a DeviceServices,
        specialization: &'a Specialization,
        instance: Instance,
    ) -> Result<ClassBench<'a>, CudaError> {
        let context = services.device.context();
        let steps = 0..specialization.kernels.len();
        let real_time = services.recorder.capture(LaunchTarget::High, |stream| {
            for index in steps.clone() {
                // SAFETY: recorded only; the instance outlives the graph.
                unsafe { instance.launch_real_time(specialization, index, index > 0, stream) }?;
            }
            Ok(())
        })?;
        let best_effort = services.recorder.capture(LaunchTarget::High, |stream| {
            for index in steps.clone() {
                let how = BestEffortLaunch { restored: false, dependent: index > 0 };
                // SAFETY: as above.
                unsafe { instance.launch_best_effort(specialization, index, how, stream) }?;
            }
            Ok(())
        })?;
        let fresh = PinnedBuffer::zeroed(context, specialization.layout.staged_bytes as usize)?;
        let stream = Stream::new(context, Priority::High)?;
        instance.epoch_counter().set_launch_epoch(instance.epoch_counter().epoch(), &stream)?;
        Ok(ClassBench {
            specialization,
            real_time,
            best_effort,
            instance,
            fresh,
            fence: PinnedWord::new(context)?,
            stream,
            from: Event::new(context)?,
            to: Event::new(context)?,
        })
    }

    fn run(&mut self, replays: usize) -> Result<ClassTiming, CudaError> {
        let forms = [LaunchForm::RealTime, LaunchForm::BestEffort, LaunchForm::Chains];
        let mut taken: [Vec<f64>; 3] = Default::default();
        for replay in 0..replays + WARM_UP {
            for (form, all) in forms.into_iter().zip(&mut taken) {
                let micros = self.timed(form)?;
                if replay >= WARM_UP {
                    all.push(micros);
                }
            }
        }
        let [real_time, best_effort, best_effort_chains] = taken.map(summary);
        Ok(ClassTiming { real_time, best_effort, best_effort_chains })
    }

    fn timed(&mut self, form: LaunchForm) -> Result<f64, CudaError> {
        // SAFETY: both sides live until the event behind the copy is waited for.
        unsafe { self.instance.copy_words(self.specialization, &self.fresh, &self.stream) }?;
        self.from.record(&self.stream)?;
        match form {
            // SAFETY: the instance belongs to this bench, its control words are cleared, and the
            // launch is waited for.
            LaunchForm::RealTime => unsafe { self.real_time.launch(&self.stream) }?,
            // SAFETY: as above.
            LaunchForm::BestEffort => unsafe { self.best_effort.launch(&self.stream) }?,
            LaunchForm::Chains => self.launch_chains()?,
        }
        self.to.record(&self.stream)?;
        self.to.wait()?;
        self.to.micros_since(&self.from)
    }

    fn launch_chains(&mut self) -> Result<(), CudaError> {
        // Chains are recorded only for memory that is used again, as this is.
        self.instance.end_run();
        for (number, steps) in self.specialization.chains.iter().enumerate() {
            self.instance.ensure_chain(self.specialization, steps, LaunchTarget::Low)?;
            // SAFETY: as above; the word lives as long as this bench.
            unsafe {
                self.instance.launch_chain(steps, LaunchTarget::Low, &self.stream)?;
                self.stream.write_word(self.fence.device_address(), number as u32 + 1)?;
            }
        }
        Ok(())
    }
}
