//! Which backends the plan does without because frontends avoid them, although they renew their
//! leases. Pure, with time as a parameter.

use std::collections::{BTreeMap, BTreeSet};

use base::Nanos;

use crate::snapshot::ClusterSnapshot;

/// How long frontends have to avoid a backend before the plan does.
const CONFIRM: Nanos = Nanos::from_millis(3000);
/// How long the plan does without it, the first time and at most. Frontends without a route to it
/// cannot know whether it is better.
const HOLD_MIN: Nanos = Nanos::from_millis(30_000);
const HOLD_MAX: Nanos = Nanos::from_millis(600_000);

/// Backends that most frontends avoid.
#[derive(Clone, Debug, Default)]
pub(super) struct EjectedBackends {
    suspects: BTreeMap<String, Suspect>,
}

#[derive(Clone, Copy, Debug)]
struct Suspect {
    /// Since when most frontends avoid it.
    since: Option<Nanos>,
    /// Until when the plan does without it.
    held_until: Nanos,
    /// How often it was held, less how often that was forgotten.
    times: u32,
}

impl EjectedBackends {
    /// The backends to do without at `now`. More than half of them are never held.
    pub(super) fn update(&mut self, now: Nanos, snapshot: &ClusterSnapshot) -> BTreeSet<String> {
        let avoided = avoided(snapshot);
        self.suspects.retain(|name, _| snapshot.backends.contains_key(name));
        for name in &avoided {
            let suspect = self.suspects.entry(name.clone()).or_insert(Suspect {
                since: None,
                held_until: Nanos::ZERO,
                times: 0,
            });
            let since = *suspect.since.get_or_insert(now);
            if now - since >= CONFIRM && suspect.held_until <= now {
                let hold = Nanos(HOLD_MIN.0 << suspect.times.min(10)).min(HOLD_MAX);
                suspect.held_until = now + hold;
                suspect.times += 1;
                tracing::warn!(backend = name, "planning without a backend that frontends avoid");
            }
        }
        self.suspects.retain(|name, suspect| {
            if !avoided.contains(name) {
                suspect.since = None;
            }
            // Forgotten after as long a time in service.
            suspect.since.is_some() || now < suspect.held_until + HOLD_MAX
        });
        let mut held: Vec<(Nanos, &String)> = self
            .suspects
            .iter()
            .filter(|(_, suspect)| now < suspect.held_until)
            .map(|(name, suspect)| (suspect.held_until, name))
            .collect();
        held.sort_unstable();
        held.truncate(snapshot.backends.len() / 2);
        held.into_iter().map(|(_, name)| name.clone()).collect()
    }
}

/// Names of the backends that more than half of the frontends avoid.
fn avoided(snapshot: &ClusterSnapshot) -> BTreeSet<String> {
    let mut votes: BTreeMap<&str, usize> = BTreeMap::new();
    for report in snapshot.loads.values() {
        let unique: BTreeSet<&str> = report.ejected.iter().map(String::as_str).collect();
        unique.into_iter().for_each(|address| *votes.entry(address).or_default() += 1);
    }
    let is_avoided =
        |address: &str| votes.get(address).is_some_and(|count| 2 * count > snapshot.loads.len());
    let backends = snapshot.backends.iter().filter(|(_, backend)| is_avoided(&backend.grpc));
    backends.map(|(name, _)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{BackendRecord, LoadReport};

    fn at(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    fn snapshot(backends: usize, reports: &[&[usize]]) -> ClusterSnapshot {
        let mut snapshot = ClusterSnapshot::default();
        for index in 0..backends {
            let record = BackendRecord { grpc: format!("h:{index}"), ..BackendRecord::default() };
            snapshot.backends.insert(format!("b{index}"), record);
        }
        for (index, ejected) in reports.iter().enumerate() {
            let ejected = ejected.iter().map(|index| format!("h:{index}")).collect();
            let report = LoadReport { ejected, ..LoadReport::default() };
            snapshot.loads.insert(format!("f{index}"), report);
        }
        snapshot
    }

    #[test]
    fn a_backend_that_most_frontends_avoid_is_left_out_for_a_time_that_grows() {
        let mut ejected = EjectedBackends::default();
        let (ill, well) = (snapshot(3, &[&[1], &[1], &[]]), snapshot(3, &[&[], &[], &[]]));
        assert!(ejected.update(at(0), &ill).is_empty());
        assert!(ejected.update(at(2000), &ill).is_empty(), "not confirmed");
        assert!(ejected.update(at(2500), &well).is_empty());
        assert!(ejected.update(at(4000), &ill).is_empty(), "it was well in between");
        assert_eq!(ejected.update(at(7000), &ill), ["b1".to_string()].into());
        // Nobody has a route to it now.
        assert_eq!(ejected.update(at(36_999), &well).len(), 1);
        assert!(ejected.update(at(37_000), &well).is_empty());
        ejected.update(at(38_000), &ill);
        assert_eq!(ejected.update(at(41_000), &ill).len(), 1);
        assert_eq!(ejected.update(at(100_999), &well).len(), 1, "twice as long");
        assert!(ejected.update(at(101_000), &well).is_empty());
        ejected.update(at(1_000_000), &well);
        ejected.update(at(1_000_000), &ill);
        ejected.update(at(1_003_000), &ill);
        assert!(ejected.update(at(1_033_000), &well).is_empty(), "forgotten");
    }

    #[test]
    fn one_frontend_of_several_is_no_reason_and_half_of_the_backends_stay() {
        let mut ejected = EjectedBackends::default();
        for second in 0..20 {
            let one = snapshot(3, &[&[1], &[]]);
            assert!(ejected.update(at(second * 1000), &one).is_empty());
        }
        for second in 20..40 {
            let all = snapshot(5, &[&[0, 1, 2, 3, 4], &[4, 3, 2, 1, 0, 0, 0]]);
            assert!(ejected.update(at(second * 1000), &all).len() <= 2);
        }
        let alone = snapshot(1, &[&[0]]);
        for second in 40..60 {
            assert!(ejected.update(at(second * 1000), &alone).is_empty());
        }
    }
}
