//! A whole plan with its fastest variants, and which of its steps must not start early.

use std::collections::BTreeSet;

use device::DeviceError;

use super::{PlanProfile, Profiler, Timing, time};
use crate::error::CudaError;
use crate::program::graph_recorder::LaunchTarget;
use crate::program::layout::Addresses;
use crate::program::specialization::BoundKernel;

/// Replays that decide on one pair of steps.
const REPLAYS: usize = 8;

/// The minimum gain of starting a step after the previous one, as a share of the whole plan: less
/// is noise.
const MIN_GAIN: f64 = 0.003;

/// Launches of all steps, ready to be recorded.
pub(super) struct WholePlan<'a> {
    profiler: &'a Profiler<'a>,
    launches: Vec<(BoundKernel, Vec<u8>)>,
}

impl<'a> WholePlan<'a> {
    pub(super) fn new(
        profiler: &'a Profiler<'a>,
        profile: &PlanProfile,
    ) -> Result<WholePlan<'a>, DeviceError> {
        let specialization = &profiler.specialization;
        let addresses = Addresses {
            block: profiler.instance.address(),
            layout: &specialization.layout,
            weights: &specialization.weights,
        };
        let mut launches = Vec::with_capacity(profile.steps.len());
        for (index, (step, chosen)) in
            specialization.gpu.steps.iter().zip(&profile.steps).enumerate()
        {
            let args = addresses
                .patch(&step.choices[chosen.rt], specialization.layout.real_time_words(index))
                .map_err(DeviceError::BadPlan)?;
            launches.push((profiler.bound(step, chosen.rt), args));
        }
        Ok(WholePlan { profiler, launches })
    }

    /// The plan as one graph, in which steps start early unless they are `apart`.
    pub(super) fn time(&self, apart: &[bool], replays: usize) -> Result<Timing, CudaError> {
        let Profiler { services, stream, .. } = self.profiler;
        let graph = services.recorder.capture(LaunchTarget::High, |stream| {
            for (index, (bound, args)) in self.launches.iter().enumerate() {
                let mut shape = bound.shape;
                shape.dependent =
                    index > 0 && !apart[index] && services.device.has_dependent_launches();
                // SAFETY: recorded only; the instance and the weights outlive the graph.
                unsafe { stream.launch(bound.kernel.function(), shape, &[args]) }?;
            }
            Ok(())
        })?;
        time(services, &graph, stream, replays, f64::INFINITY)
    }

    /// Which steps are better apart: each pair of steps is tried, at all its occurrences, and kept
    /// if the plan gets faster.
    pub(super) fn best_apart(&self, profile: &PlanProfile) -> Result<Vec<bool>, CudaError> {
        let mut apart = vec![false; profile.steps.len()];
        if !self.profiler.services.device.has_dependent_launches() {
            return Ok(apart);
        }
        let mut best_us = self.time(&apart, REPLAYS)?.median_us;
        let mut tried = BTreeSet::new();
        for pair in profile.steps.iter().filter_map(|step| step.pair.as_ref()) {
            if !tried.insert(pair) {
                continue;
            }
            let mut other = apart.clone();
            for (apart, step) in other.iter_mut().zip(&profile.steps) {
                *apart |= step.pair.as_ref() == Some(pair);
            }
            let took_us = self.time(&other, REPLAYS)?.median_us;
            if took_us < best_us * (1.0 - MIN_GAIN) {
                (best_us, apart) = (took_us, other);
            }
        }
        Ok(apart)
    }
}
