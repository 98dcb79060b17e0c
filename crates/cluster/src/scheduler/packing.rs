//! Packs sessions into duty cycles with the planner's solvers.

use base::{Clock, Nanos};
use planner::gpu::{Division, SliceKind};
use planner::squishy::{self, Node, Part, Session};
use planner::{
    GpuKind, OperatingPoint, PlanRules, Problem, Profiles, SearchControl, Service, Sharing,
    certified,
};

use super::plan::PrefixGroup;
use super::{pooling, prefix_batching};

/// The solver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packer {
    /// Nexus's greedy packing: fast at any size.
    #[default]
    Squishy,
    /// The planner with a certificate; falls back to the greedy packing where that needs fewer
    /// machines.
    Certified,
    /// The batch-oblivious baseline of Nexus's evaluation; its plans may miss SLOs. For comparison
    /// only.
    Oblivious,
}

impl std::str::FromStr for Packer {
    type Err = String;

    fn from_str(name: &str) -> Result<Packer, String> {
        match name {
            "squishy" => Ok(Packer::Squishy),
            "certified" => Ok(Packer::Certified),
            "oblivious" => Ok(Packer::Oblivious),
            _ => Err(format!("'{name}' is not a packer; use squishy, certified or oblivious")),
        }
    }
}

/// A machine for the planner: a GPU with one slice.
static WHOLE: GpuKind = GpuKind {
    name: "whole",
    words: &[],
    division: Division::Mig,
    gpcs: 1,
    memory_slices: 1,
    slices: &[SliceKind {
        name: "whole",
        profile_id: 0,
        gpcs: 1,
        memory_mib: 1 << 30,
        memory_slices: 1,
        starts: &[0],
    }],
};

/// Number of sessions beyond which the certified planner is not used: a plan has to be ready in
/// time.
const CERTIFIED_MAX: usize = 200;
/// Rounds after which the certified planner returns its best plan.
const ROUNDS_MAX: u32 = 400;

/// Nodes for all sessions, with prefix groups as one session each; `None` when one cannot be packed
/// at all. The packers stop once there are more nodes than `machines`, so callers check the number.
/// With `pooled`, machines of one session form a backend pool.
pub(crate) fn pack(
    sessions: &[Session],
    prefix_groups: &[Option<PrefixGroup>],
    packer: Packer,
    pooled: bool,
    machines: usize,
) -> Option<Vec<Node>> {
    if prefix_groups.iter().all(Option::is_none) {
        return pack_pooled(sessions, packer, machines, |_| pooled);
    }
    let merged = prefix_batching::merge(sessions, prefix_groups);
    let single = |session: usize| pooled && merged.is_single(session);
    pack_pooled(&merged.sessions, packer, machines, single).map(|nodes| merged.expand(nodes))
}

/// Fills pools first; the remainder of each session is packed with the others.
fn pack_pooled(
    sessions: &[Session],
    packer: Packer,
    machines: usize,
    single: impl Fn(usize) -> bool,
) -> Option<Vec<Node>> {
    let single = |session| packer != Packer::Oblivious && single(session);
    let (mut nodes, rest) = pooling::fill_pools(sessions, machines, single);
    if nodes.len() > machines {
        return Some(nodes);
    }
    let open: Vec<usize> =
        (0..rest.len()).filter(|&index| rest[index].rate > sessions[index].rate * 1e-9).collect();
    let remaining: Vec<Session> = open.iter().map(|&index| rest[index].clone()).collect();
    let mut others = pack_each(&remaining, packer, machines - nodes.len())?;
    others.iter_mut().flat_map(|node| &mut node.parts).for_each(|p| p.session = open[p.session]);
    nodes.extend(others);
    Some(nodes)
}

fn pack_each(sessions: &[Session], packer: Packer, machines: usize) -> Option<Vec<Node>> {
    if packer == Packer::Oblivious {
        return oblivious(sessions, machines);
    }
    // Whole machines first: where these are too many already, the remainder need not be packed.
    let (whole, _) = squishy::saturate(sessions, machines).ok()?;
    if whole.len() > machines {
        return Some(whole);
    }
    let greedy = squishy::pack(sessions).ok()?;
    if packer == Packer::Squishy || sessions.len() > CERTIFIED_MAX {
        return Some(greedy);
    }
    let proven = certified_nodes(sessions).filter(|nodes| nodes.len() < greedy.len());
    Some(proven.unwrap_or(greedy))
}

/// A clock that stands still: the planner is limited by rounds, so that a plan does not depend on
/// the speed of the machine.
struct RoundClock;

impl Clock for RoundClock {
    fn now(&self) -> Nanos {
        Nanos::ZERO
    }
}

/// The planner's problem for whole machines.
pub fn problem(sessions: &[Session]) -> Problem {
    let mut profiles = Profiles::default();
    for session in sessions {
        for &(batch, ms) in &session.curve {
            let throughput = f64::from(batch) / ms * 1000.0;
            let point = OperatingPoint {
                gpcs: 1,
                batch,
                processes: 1,
                throughput,
                latency_ms: ms,
                // Memory is checked when nodes are assigned to machines.
                memory_mib: Some(1),
            };
            // Only points without time or size are refused, and curves have none.
            let _ = profiles.push(&session.name, point);
        }
    }
    let service = |session: &Session| Service {
        name: session.name.clone(),
        model: session.name.clone(),
        rate: session.rate,
        slo_ms: session.slo_ms,
    };
    let rules = PlanRules { slo_share: 1.0, sharing: Sharing::Time, ..PlanRules::default() };
    Problem { gpu: &WHOLE, services: sessions.iter().map(service).collect(), profiles, rules }
}

/// The lower bound that the planner proves for these sessions on whole machines.
pub fn proven_bound(sessions: &[Session]) -> Option<f64> {
    let mut rounds = 0;
    let mut report = |_| {
        rounds += 1;
        rounds < ROUNDS_MAX
    };
    let clock = RoundClock;
    let mut control = SearchControl::new(&clock, &mut report);
    certified::bound(&problem(sessions), &mut control).ok().map(|solution| solution.bound)
}

fn certified_nodes(sessions: &[Session]) -> Option<Vec<Node>> {
    let problem = problem(sessions);
    let mut rounds = 0;
    let mut report = |_| {
        rounds += 1;
        rounds < ROUNDS_MAX
    };
    let clock = RoundClock;
    let mut control = SearchControl::new(&clock, &mut report);
    let solution = certified::plan(&problem, &mut control).ok()?;
    if !planner::check(&problem, &solution.plan).is_empty() {
        return None;
    }
    let node = |gpu: &planner::plan::PlannedGpu| {
        let slice = gpu.slices.first()?;
        let ms = |session: usize, batch: u32| {
            let curve = &sessions[session].curve;
            curve.iter().find(|(size, _)| *size == batch).map(|(_, ms)| *ms)
        };
        let mut busy_ms = 0.0;
        let mut parts = Vec::new();
        for share in &slice.shares {
            busy_ms += ms(share.service, share.batch)?;
            parts.push(Part { session: share.service, batch: share.batch, rate: share.rate });
        }
        let cycle_ms = slice.cycle_ms.unwrap_or(busy_ms);
        Some(Node { cycle_ms, parts, occupancy: busy_ms / cycle_ms })
    };
    solution.plan.gpus.iter().map(node).collect()
}

/// Shares of machines by rate over best throughput, regardless of SLOs.
fn oblivious(sessions: &[Session], machines: usize) -> Option<Vec<Node>> {
    let packed = squishy::pack_obliviously(sessions, machines).ok()?;
    let node = |shares: Vec<(usize, f64)>| {
        let part = |&(session, share): &(usize, f64)| {
            let (batch, ms) = sessions[session].saturating()?;
            Some((Part { session, batch, rate: share * f64::from(batch) / ms * 1000.0 }, ms))
        };
        let parts: Vec<(Part, f64)> = shares.iter().map(part).collect::<Option<_>>()?;
        let cycle_ms = parts.iter().map(|(_, ms)| *ms).sum::<f64>();
        let occupancy = shares.iter().map(|(_, share)| *share).sum();
        Some(Node { cycle_ms, occupancy, parts: parts.into_iter().map(|(part, _)| part).collect() })
    };
    packed.into_iter().map(node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certified_packing_is_legal_and_not_worse() {
        let curve = vec![(4, 50.0), (8, 75.0), (16, 100.0)];
        let session = |index: usize| Session {
            name: format!("s{index}"),
            rate: 20.0 + 7.0 * index as f64,
            slo_ms: 250.0 + 20.0 * index as f64,
            curve: curve.clone(),
        };
        let sessions: Vec<Session> = (0..8).map(session).collect();
        let greedy = pack(&sessions, &[], Packer::Squishy, false, 100).unwrap();
        let proven = pack(&sessions, &[], Packer::Certified, false, 100).unwrap();
        assert!(proven.len() <= greedy.len());
        assert!(squishy::check(&sessions, &proven).is_empty());
        let bound = proven_bound(&sessions).unwrap();
        assert!(bound <= proven.len() as f64 + 1e-6, "{bound}: {proven:?}");
    }

    /// Sessions of three kinds with Zipf-distributed rates: 100 of them, as in `cluster-100.toml`.
    fn mixed() -> Vec<Session> {
        let kinds: [(usize, f64, f64, u32, f64, f64, f64); 3] = [
            (50, 1.2, 5.0, 48, 50.0, 9000.0, 0.9),
            (20, 22.0, 25.0, 16, 345.0, 700.0, 0.5),
            (30, 3.2, 3.2, 64, 200.0, 2500.0, 0.9),
        ];
        let mut sessions = Vec::new();
        for (count, alpha, beta, max, slo_ms, rate, zipf) in kinds {
            let weight = |rank: usize| 1.0 / ((rank + 1) as f64).powf(zipf);
            let total: f64 = (0..count).map(weight).sum();
            for rank in 0..count {
                let curve = (1..=max).map(|b| (b, alpha * f64::from(b) + beta)).collect();
                let rate = rate * weight(rank) / total;
                sessions.push(Session {
                    name: format!("s{}", sessions.len()),
                    rate,
                    slo_ms,
                    curve,
                });
            }
        }
        sessions
    }

    #[test]
    fn packs_a_hundred_sessions_close_to_the_bound() {
        let sessions = mixed();
        let greedy = pack(&sessions, &[], Packer::Squishy, false, 1000).unwrap();
        assert!(squishy::check(&sessions, &greedy).is_empty());
        let proven = pack(&sessions, &[], Packer::Certified, false, 1000).unwrap();
        assert!(squishy::check(&sessions, &proven).is_empty());
        let share =
            |session: &Session| session.rate / session.throughput().unwrap_or(f64::INFINITY);
        let full: f64 = sessions.iter().map(share).sum();
        let bound = proven_bound(&sessions).unwrap();
        let pooled = pack(&sessions, &[], Packer::Certified, true, 1000).unwrap().len();
        let (squishy, certified) = (greedy.len(), proven.len());
        println!(
            "{full:.2} full machines, bound {bound:.2}; squishy {squishy}, certified {certified}, \
             in pools {pooled}"
        );
        assert!(pooled <= squishy);
        assert!(bound <= certified as f64 + 1e-6);
        assert!(proven.len() <= greedy.len() && full <= proven.len() as f64);
    }
}
