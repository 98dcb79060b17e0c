//! Plans models that share a prefix as one session: the prefix runs as one batch on machines that
//! hold all of them, and every suffix runs by itself.

use std::collections::{BTreeMap, BTreeSet};

use planner::squishy::{Node, Part, Session};

use super::plan::{Curve, Demand, PrefixGroup};

/// Minimum share of the work that models of a prefix group have in common; nodes use the same
/// limit.
pub const SHARE_MIN: f64 = 0.5;
/// Maximum ratio of SLOs within a group: the tightest one applies to all.
const SLO_RATIO_MAX: f64 = 1.25;

/// Share of the work that two models have in common, of the one with the smaller share; from the
/// marks of both.
fn common_share(a: &[(String, f64)], b: &[(String, f64)]) -> f64 {
    let of_b: BTreeMap<&str, f64> = b.iter().map(|(mark, share)| (mark.as_str(), *share)).collect();
    let mut both = (0.0, 0.0);
    for (mark, share) in a {
        if let Some(other) = of_b.get(mark.as_str()) {
            both = (both.0 + share, both.1 + other);
        }
    }
    f64::min(both.0, both.1)
}

/// Sets the prefix group of each of `demands`. `marks` are the expensive steps by model (see
/// `ProfileRecord::marks`); `compatible` tells whether nodes may batch two models together.
pub fn assign(
    demands: &mut [Demand],
    marks: &BTreeMap<&str, &[(String, f64)]>,
    compatible: impl Fn(&str, &str) -> bool,
) {
    // Only models with a common mark are compared.
    let mut firsts_by_mark: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let mut groups: BTreeMap<usize, (Vec<usize>, f64)> = BTreeMap::new();
    for (index, demand) in demands.iter().enumerate() {
        let own = marks.get(demand.model.as_str()).filter(|own| !own.is_empty());
        let Some(own) = own else { continue };
        let candidates = own.iter().filter_map(|(mark, _)| firsts_by_mark.get(mark.as_str()));
        let candidates: BTreeSet<usize> = candidates.flatten().copied().collect();
        let found = candidates.into_iter().find_map(|candidate| {
            let first = &demands[candidate];
            let share = common_share(marks[first.model.as_str()], own);
            let (low, high) = (first.slo_ms.min(demand.slo_ms), first.slo_ms.max(demand.slo_ms));
            let fits = share >= SHARE_MIN
                && first.real_time == demand.real_time
                && high <= low * SLO_RATIO_MAX
                && compatible(&first.model, &demand.model);
            fits.then_some((candidate, share))
        });
        match found {
            Some((first, share)) => {
                let group = groups.entry(first).or_insert_with(|| (vec![first], 1.0));
                group.0.push(index);
                group.1 = group.1.min(share);
            }
            None => own
                .iter()
                .for_each(|(mark, _)| firsts_by_mark.entry(mark.as_str()).or_default().push(index)),
        }
    }
    for (first, (members, share)) in groups {
        let name = demands[first].model.clone();
        for member in members {
            demands[member].prefix_group = Some(PrefixGroup { name: name.clone(), share });
        }
    }
}

/// The smallest measured batch of at least `batch`.
fn measured(curve: &Curve, batch: u32) -> Option<(u32, f64)> {
    curve.iter().find(|(size, _)| *size >= batch).copied()
}

/// The sessions to pack, with prefix groups merged, and how to expand them again.
pub(super) struct MergedSessions {
    pub(super) sessions: Vec<Session>,
    /// Members of each session, with their share of its rate.
    members: Vec<Vec<(usize, f64)>>,
    /// Batches of the members, by session and its batch.
    batches: BTreeMap<(usize, u32), Vec<u32>>,
}

/// Batches of the members, by batch of the group.
type MemberBatches = Vec<(u32, Vec<u32>)>;

/// Milliseconds of one batch of a group: the prefix once for all members, and every suffix.
pub(super) fn group_batch_ms(share: f64, parts: &[(&Curve, u32)]) -> Option<f64> {
    let all: u32 = parts.iter().map(|(_, batch)| batch).sum();
    let mut prefix_ms: f64 = 0.0;
    let mut suffix_ms = 0.0;
    for (curve, batch) in parts {
        prefix_ms = prefix_ms.max(measured(curve, all)?.1);
        suffix_ms += (1.0 - share) * measured(curve, *batch)?.1;
    }
    Some(share * prefix_ms + suffix_ms)
}

/// Merges each prefix group into one session.
pub(super) fn merge(sessions: &[Session], prefix_groups: &[Option<PrefixGroup>]) -> MergedSessions {
    let mut merged =
        MergedSessions { sessions: Vec::new(), members: Vec::new(), batches: BTreeMap::new() };
    let mut by_name: BTreeMap<&str, (f64, Vec<usize>)> = BTreeMap::new();
    for (index, session) in sessions.iter().enumerate() {
        match prefix_groups.get(index).and_then(Option::as_ref).filter(|_| session.rate > 0.0) {
            Some(prefix_group) => {
                by_name
                    .entry(&prefix_group.name)
                    .or_insert((prefix_group.share, Vec::new()))
                    .1
                    .push(index);
            }
            None => merged.push(session.clone(), vec![(index, 1.0)]),
        }
    }
    for (share, members) in by_name.into_values() {
        match merge_group(sessions, share, &members) {
            Some((session, batches)) if members.len() > 1 => {
                let index = merged.sessions.len();
                batches.into_iter().for_each(|(batch, sizes)| {
                    merged.batches.insert((index, batch), sizes);
                });
                let rate = session.rate;
                let shares = members.iter().map(|&m| (m, sessions[m].rate / rate)).collect();
                merged.push(session, shares);
            }
            _ => {
                for index in members {
                    merged.push(sessions[index].clone(), vec![(index, 1.0)]);
                }
            }
        }
    }
    merged
}

/// A group as one session, and the batch of each member for every batch of it; `None` where no
/// measured batch meets the SLO.
fn merge_group(
    sessions: &[Session],
    share: f64,
    members: &[usize],
) -> Option<(Session, MemberBatches)> {
    let first = &sessions[*members.first()?];
    let rate: f64 = members.iter().map(|&member| sessions[member].rate).sum();
    let slo_ms = members.iter().map(|&m| sessions[m].slo_ms).fold(f64::INFINITY, f64::min);
    let (mut curve, mut batches) = (Curve::new(), Vec::new());
    for &(batch, _) in &first.curve {
        let sizes = |&member: &usize| {
            let part = f64::from(batch) * sessions[member].rate / rate;
            measured(&sessions[member].curve, (part.ceil() as u32).max(1)).map(|(size, _)| size)
        };
        let Some(sizes) = members.iter().map(sizes).collect::<Option<Vec<u32>>>() else { break };
        let curves = members.iter().map(|&member| &sessions[member].curve);
        let parts: Vec<(&Curve, u32)> = curves.zip(sizes.iter().copied()).collect();
        let Some(ms) = group_batch_ms(share, &parts) else { break };
        let least = curve.last().map_or(0.0, |(_, ms): &(u32, f64)| *ms);
        curve.push((batch, ms.max(least)));
        batches.push((batch, sizes));
    }
    let fits = curve.first().is_some_and(|(_, ms)| 2.0 * ms <= slo_ms);
    let session = Session { name: first.name.clone(), rate, slo_ms, curve };
    fits.then_some((session, batches))
}

impl MergedSessions {
    fn push(&mut self, session: Session, members: Vec<(usize, f64)>) {
        self.sessions.push(session);
        self.members.push(members);
    }

    /// Whether a session is a single model.
    pub(super) fn is_single(&self, session: usize) -> bool {
        self.members[session].len() == 1
    }

    /// Expands nodes of merged sessions to nodes of models.
    pub(super) fn expand(&self, nodes: Vec<Node>) -> Vec<Node> {
        let expanded = |part: &Part| -> Vec<Part> {
            let batches = self.batches.get(&(part.session, part.batch));
            let members = self.members[part.session].iter().enumerate();
            members
                .map(|(place, &(session, share))| Part {
                    session,
                    batch: batches.map_or(part.batch, |batches| batches[place]),
                    rate: part.rate * share,
                })
                .collect()
        };
        let node =
            |node: Node| Node { parts: node.parts.iter().flat_map(expanded).collect(), ..node };
        nodes.into_iter().map(node).collect()
    }

    /// Rates of the merged sessions, from those of models.
    pub(super) fn rates(&self, rates: &[f64]) -> Vec<f64> {
        let sum =
            |members: &Vec<(usize, f64)>| members.iter().map(|(index, _)| rates[*index]).sum();
        self.members.iter().map(sum).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(model: &str, slo_ms: f64) -> Demand {
        Demand {
            model: model.to_string(),
            rate: 100.0,
            slo_ms,
            real_time: true,
            ..Demand::default()
        }
    }

    fn marks(list: &[(&str, f64)]) -> Vec<(String, f64)> {
        list.iter().map(|(mark, share)| (mark.to_string(), *share)).collect()
    }

    #[test]
    fn groups_models_with_enough_common_work() {
        let prefix_ms = [("t1", 0.4), ("t2", 0.5)];
        let all = [
            ("a", marks(&[&prefix_ms[..], &[("a3", 0.1)]].concat())),
            ("b", marks(&[&prefix_ms[..], &[("b3", 0.1)]].concat())),
            ("other", marks(&[("x", 0.5), ("y", 0.5)])),
            ("short", marks(&[("t1", 0.2), ("z", 0.8)])),
            ("slow", marks(&prefix_ms)),
        ];
        let by_name = all.iter().map(|(name, marks)| (*name, marks.as_slice())).collect();
        let mut demands: Vec<Demand> = all
            .iter()
            .map(|(name, _)| demand(name, if *name == "slow" { 900.0 } else { 100.0 }))
            .collect();
        assign(&mut demands, &by_name, |_, _| true);
        let names: Vec<Option<&str>> = demands
            .iter()
            .map(|d| d.prefix_group.as_ref().map(|prefix_group| prefix_group.name.as_str()))
            .collect();
        assert_eq!(names, [Some("a"), Some("a"), None, None, None]);
        assert!((demands[0].prefix_group.as_ref().unwrap().share - 0.9).abs() < 1e-9);
        let mut apart: Vec<Demand> = all.iter().map(|(name, _)| demand(name, 100.0)).collect();
        assign(&mut apart, &by_name, |_, _| false);
        assert!(apart.iter().all(|demand| demand.prefix_group.is_none()));
    }

    #[test]
    fn prefix_group_needs_fewer_machines_at_the_same_rates() {
        let curve: Curve = [1, 2, 4, 8, 16, 32].map(|b| (b, 8.0 + 0.2 * f64::from(b))).into();
        let session = |index: usize| Session {
            name: format!("m{index}"),
            rate: 95.0 + index as f64,
            slo_ms: 50.0,
            curve: curve.clone(),
        };
        let sessions: Vec<Session> = (0..16).map(session).collect();
        let prefix_group = Some(PrefixGroup { name: "m0".to_string(), share: 0.95 });
        let merged = merge(&sessions, &vec![prefix_group; 16]);
        assert_eq!(merged.sessions.len(), 1);
        let apart = planner::squishy::pack(&sessions).unwrap();
        let together = merged.expand(planner::squishy::pack(&merged.sessions).unwrap());
        assert!(together.len() < apart.len(), "{} and {}", together.len(), apart.len());
        for (index, session) in sessions.iter().enumerate() {
            let parts = together.iter().flat_map(|node| &node.parts);
            let rate: f64 = parts.filter(|part| part.session == index).map(|part| part.rate).sum();
            assert!((rate - session.rate).abs() < 1e-6, "{index}: {rate}");
        }
    }
}
