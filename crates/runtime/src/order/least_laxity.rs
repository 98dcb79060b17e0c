//! Least laxity first.

use base::Nanos;

use super::{ExecutionOrder, OrderedRequest};

/// By laxity: the time until the deadline less the device time that the request still needs.
///
/// While requests wait, the laxity of all of them shrinks at the same rate, so their order does not
/// change. The key is therefore the latest start that meets the deadline, which is fixed. A request
/// whose run time is not known counts as if it took none, which is earliest deadline first.
#[derive(Clone, Copy, Debug)]
pub struct LeastLaxity;

impl ExecutionOrder for LeastLaxity {
    fn name(&self) -> &'static str {
        "least_laxity"
    }

    fn key(&self, request: &OrderedRequest) -> u64 {
        match request.deadline {
            // Infinite laxity, however long it runs.
            Nanos::MAX => u64::MAX,
            deadline => deadline.0.saturating_sub(request.remaining.unwrap_or_default().0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use device::profile::KernelProfile;
    use model::config::Class;

    use super::*;
    use crate::core::{Action, Core, CoreOptions, Event, ModelId, SimEvent};
    use crate::order::Edf;

    fn key(deadline: u64, remaining: Option<u64>) -> u64 {
        LeastLaxity
            .key(&OrderedRequest { deadline: Nanos(deadline), remaining: remaining.map(Nanos) })
    }

    #[test]
    fn orders_by_latest_start() {
        assert!(key(1_000, Some(700)) < key(900, Some(50)));
        assert!(key(1_000, Some(100)) > key(900, Some(50)));
        assert_eq!(key(500, Some(800)), 0, "late in any case");
    }

    #[test]
    fn is_earliest_deadline_first_while_run_times_are_unknown() {
        assert!(key(900, None) < key(1_000, None));
        assert_eq!(key(u64::MAX, Some(700)), u64::MAX, "no deadline, no urgency");
    }

    /// The models in the order in which a core starts one request of each. Model 0 runs for 700 ns
    /// and is due at 1,000; model 1 runs for 50 ns and is due at 900.
    fn started(real_time_order: &'static dyn ExecutionOrder) -> Vec<u32> {
        let mut core = Core::new(CoreOptions { real_time_order, ..CoreOptions::default() });
        let mut actions = Vec::new();
        let (blocks, occupancy, memory_share, idempotent) = (1, 1, 0.1, true);
        for (model, block_ns) in [(ModelId(0), 700), (ModelId(1), 50), (ModelId(2), 10)] {
            let added = Event::ModelAdded { model, steps: 1, queue_capacity: 9 };
            core.step(Nanos::ZERO, added, &mut actions);
            let kernel = KernelProfile { blocks, block_ns, occupancy, memory_share, idempotent };
            let kernels = Arc::from([kernel]);
            let profiled = SimEvent::ModelProfiled { model, kernels, weight_bytes: 0 };
            core.step(Nanos::ZERO, Event::Sim(profiled), &mut actions);
        }
        let mut model_of = Vec::new();
        // The first one occupies the only queue, so that the other two wait.
        for (model, deadline) in [(2, u64::MAX), (1, 900), (0, 1_000)] {
            let request = core.next_request_id().expect("below the limit");
            model_of.push((request, model));
            let (class, deadline) = (Class::RealTime, Nanos(deadline));
            let model = ModelId(model);
            let arrival = Event::Arrival { request, model, class, priority: 1, deadline };
            core.step(Nanos::ZERO, arrival, &mut actions);
        }
        for now in [10, 20] {
            let done = Event::SegmentDone { queue: 0, busy: Nanos(10) };
            core.step(Nanos(now), done, &mut actions);
        }
        let launched = |action: &Action| match action {
            Action::Launch { request, .. } => {
                model_of.iter().find(|(id, _)| id == request).map(|(_, model)| *model)
            }
            _ => None,
        };
        actions.iter().filter_map(launched).collect()
    }

    #[test]
    fn core_starts_the_request_with_the_least_laxity() {
        assert_eq!(started(&LeastLaxity), [2, 0, 1]);
        assert_eq!(started(&Edf), [2, 1, 0]);
    }
}
