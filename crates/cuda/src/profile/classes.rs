//! What being able to leave costs on the device: one plan as real time and as best effort with nothing to leave for.

use device::DeviceError;
use model::LaunchPlan;
use serde::Serialize;

use super::{Timing, summary};
use crate::device::CudaDevice;
use crate::driver::{Event, Graph, PinnedBuffer, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::hub::{Hub, Place};
use crate::instance::{BestEffortLaunch, Instance};
use crate::lowered::Lowered;
use crate::program::{first_of, lower};
use crate::weights::ProgramWeights;

/// Replays before the clocks and caches are warm.
const WARM_UP: usize = 5;

/// One plan in its several forms, replayed in turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ClassTiming {
    /// As real time, in one graph.
    pub real_time: Timing,
    /// As best effort, in one graph: what looking, counting and marking cost.
    pub best_effort: Timing,
    /// As best effort in the chains it is launched in, each with a mark behind it.
    pub best_effort_chains: Timing,
}

impl CudaDevice {
    /// Times `plan` for `sizes` with the variants in use, as real time and as best effort. Needs the device for itself to
    /// mean anything.
    pub fn time_classes(
        &self,
        plan: &LaunchPlan,
        sizes: &[(String, usize)],
        replays: usize,
    ) -> Result<ClassTiming, DeviceError> {
        let hub = self.hub();
        hub.alive()?;
        let gpu = lower(hub, plan, sizes).map_err(first_of)?;
        let weights = ProgramWeights::new(hub, false);
        let lowered = Lowered::new(hub, gpu, &weights, &|_, _| {})?;
        let instance = Instance::new(hub, &lowered)?;
        let mut bench = Bench::new(hub, &lowered, instance).map_err(|err| hub.error(err))?;
        bench.run(replays).map_err(|err| hub.error(err))
    }
}

#[derive(Clone, Copy)]
enum Form {
    RealTime,
    BestEffort,
    Chains,
}

/// The forms, and what launching them takes.
struct Bench<'a> {
    hub: &'a Hub,
    lowered: &'a Lowered,
    real_time: Graph,
    best_effort: Graph,
    /// Behind the graphs, which point into it.
    instance: Instance,
    /// Words of best-effort launches as a fresh run finds them.
    fresh: PinnedBuffer,
    mark: PinnedWord,
    stream: Stream,
    from: Event,
    to: Event,
}

impl<'a> Bench<'a> {
    fn new(hub: &'a Hub, lowered: &'a Lowered, instance: Instance) -> Result<Bench<'a>, CudaError> {
        let context = hub.context();
        let steps = 0..lowered.kernels.len();
        let real_time = hub.capture(Place::High, |stream| {
            for index in steps.clone() {
                // SAFETY: recorded only; the instance outlives the graph.
                unsafe { instance.launch_real_time(hub, lowered, index, index > 0, stream) }?;
            }
            Ok(())
        })?;
        let best_effort = hub.capture(Place::High, |stream| {
            for index in steps.clone() {
                let how = BestEffortLaunch { restored: false, dependent: index > 0 };
                // SAFETY: as above.
                unsafe { instance.launch_best_effort(hub, lowered, index, how, stream) }?;
            }
            Ok(())
        })?;
        let fresh = PinnedBuffer::zeroed(context, lowered.layout.staged_bytes as usize)?;
        let stream = Stream::new(context, Priority::High)?;
        instance.seat().arm(instance.seat().number(), &stream)?;
        Ok(Bench {
            hub,
            lowered,
            real_time,
            best_effort,
            instance,
            fresh,
            mark: PinnedWord::new(context)?,
            stream,
            from: Event::new(context)?,
            to: Event::new(context)?,
        })
    }

    fn run(&mut self, replays: usize) -> Result<ClassTiming, CudaError> {
        let forms = [Form::RealTime, Form::BestEffort, Form::Chains];
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

    fn timed(&mut self, form: Form) -> Result<f64, CudaError> {
        // SAFETY: both sides live until the event behind is waited for.
        unsafe { self.instance.copy_words(self.lowered, &self.fresh, &self.stream) }?;
        self.from.record(&self.stream)?;
        match form {
            // SAFETY: the instance is this bench's with fresh words, and the launch is waited for.
            Form::RealTime => unsafe { self.real_time.launch(&self.stream) }?,
            // SAFETY: as above.
            Form::BestEffort => unsafe { self.best_effort.launch(&self.stream) }?,
            Form::Chains => self.launch_chains()?,
        }
        self.to.record(&self.stream)?;
        self.to.wait()?;
        self.to.micros_since(&self.from)
    }

    fn launch_chains(&mut self) -> Result<(), CudaError> {
        for (number, steps) in self.lowered.chains.iter().enumerate() {
            self.instance.ready_chain(self.hub, self.lowered, steps, Place::Low)?;
            // SAFETY: as above; the word lives as long as this bench.
            unsafe {
                self.instance.launch_chain(steps, Place::Low, &self.stream)?;
                self.stream.write_word(self.mark.device_address(), number as u32 + 1)?;
            }
        }
        Ok(())
    }
}
