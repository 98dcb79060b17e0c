//! Backends that live and get no requests: frontends eject them, or the plan does without them.

use std::collections::{BTreeMap, BTreeSet};

use super::ClusterProblem;
use crate::snapshot::ClusterSnapshot;

/// Frontends that a problem names.
const NAMED_MAX: usize = 4;

const ADVICE: &str = "after a pause a request probes it, and a good answer brings it back; if it \
                      stays away, restart it: its log and atoll_cluster_ejections say why";

/// Which backends are avoided, and by which frontends.
pub(super) struct AvoidedBackends<'a> {
    /// Frontends by the address of the backend that they ejected.
    ejected_by: BTreeMap<&'a str, Vec<&'a str>>,
    planned_without: BTreeSet<&'a str>,
}

impl<'a> AvoidedBackends<'a> {
    pub(super) fn of(snapshot: &'a ClusterSnapshot) -> AvoidedBackends<'a> {
        let mut ejected_by: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (frontend, report) in &snapshot.loads {
            let unique: BTreeSet<&str> = report.ejected.iter().map(String::as_str).collect();
            for address in unique {
                ejected_by.entry(address).or_default().push(frontend);
            }
        }
        let plan = snapshot.plan.iter();
        let planned_without = plan.flat_map(|plan| &plan.avoided).map(String::as_str).collect();
        AvoidedBackends { ejected_by, planned_without }
    }

    /// Frontends that avoid the backend at this address because of its replies.
    pub(super) fn ejected_by(&self, address: &str) -> Vec<String> {
        let frontends = self.ejected_by.get(address).map_or(&[][..], Vec::as_slice);
        frontends.iter().map(|frontend| frontend.to_string()).collect()
    }

    /// Whether the plan does without the backend of this name.
    pub(super) fn is_planned_without(&self, name: &str) -> bool {
        self.planned_without.contains(name)
    }

    /// One problem for each backend that has joined and is avoided.
    pub(super) fn problems(&self, snapshot: &ClusterSnapshot) -> Vec<ClusterProblem> {
        let all = snapshot.loads.len();
        let problem = |(name, address): (&String, &str)| {
            let by = self.ejected_by.get(address).map_or(&[][..], Vec::as_slice);
            let mut named = by[..by.len().min(NAMED_MAX)].join(", ");
            if by.len() > NAMED_MAX {
                named.push_str(", ...");
            }
            let some = format!("{} of {all} frontends ({named}) avoid backend {name}", by.len());
            let what = match (by.is_empty(), self.is_planned_without(name)) {
                (true, false) => return None,
                (true, true) => format!("the plan does without {name}: frontends avoided it"),
                (false, false) => some,
                (false, true) => format!("{some}, and so does the plan"),
            };
            Some(ClusterProblem::new(what, ADVICE))
        };
        let backends = snapshot.backends.iter();
        backends.filter_map(|(name, record)| problem((name, record.grpc.as_str()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::record::{BackendRecord, LoadReport, PlanRecord};
    use crate::snapshot::ClusterSnapshot;
    use crate::status::{ClusterProblem, Status, render};

    fn snapshot(reports: &[&[&str]]) -> ClusterSnapshot {
        let mut snapshot = ClusterSnapshot::default();
        for index in 0..3 {
            let record = BackendRecord { grpc: format!("h:{index}"), ..Default::default() };
            snapshot.backends.insert(format!("b{index}"), record);
        }
        for (index, ejected) in reports.iter().enumerate() {
            let ejected = ejected.iter().map(|address| address.to_string()).collect();
            let report = LoadReport { ejected, ..LoadReport::default() };
            snapshot.loads.insert(format!("f{index}"), report);
        }
        snapshot
    }

    fn problems(status: &Status) -> Vec<&ClusterProblem> {
        status.problems.iter().filter(|problem| problem.what.contains("avoid")).collect()
    }

    #[test]
    fn a_backend_that_frontends_avoid_is_a_problem_with_advice() {
        let status = Status::of(&snapshot(&[&["gone:9", "h:1", "h:1"], &[]]));
        let found = problems(&status);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].what, "1 of 2 frontends (f0) avoid backend b1");
        let text = render(&status, false);
        let rows: Vec<&str> = text.lines().filter(|line| line.contains("AVOIDED")).collect();
        assert!(rows.len() == 1 && rows[0].starts_with("b1 "), "{text}");
        let json = serde_json::to_value(&status).expect("plain structs have a JSON form");
        assert_eq!(json["backends"][1]["ejected_by"], serde_json::json!(["f0"]));
        assert_eq!(json["backends"][0]["ejected_by"], serde_json::json!([]));
    }

    /// Frontends have no route to it then, and nothing to say of it.
    #[test]
    fn a_backend_that_the_plan_does_without_stays_a_problem() {
        let mut snapshot = snapshot(&[&[], &[]]);
        assert!(problems(&Status::of(&snapshot)).is_empty());
        let plan = PlanRecord { avoided: vec!["b2".to_string()], ..PlanRecord::default() };
        snapshot.plan = Some(plan);
        let status = Status::of(&snapshot);
        let found = problems(&status);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].what, "the plan does without b2: frontends avoided it");
        assert!(status.backends[2].avoided && !status.backends[1].avoided);
    }

    #[test]
    fn many_frontends_are_counted_and_few_are_named() {
        let status = Status::of(&snapshot(&[&["h:0"][..]; 40]));
        let what = "40 of 40 frontends (f0, f1, f10, f11, ...) avoid backend b0";
        assert_eq!(problems(&status)[0].what, what);
    }
}
