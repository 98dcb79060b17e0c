//! Squishy bin packing (Nexus, SOSP'19, section 6.1, algorithm 1): sessions in duty cycles on whole
//! GPUs.
//!
//! Also the incremental form of the same section, the paper's batch-oblivious baseline, and an
//! exact solver to measure the loss of the greedy one.

pub mod exact;

use crate::error::PlanError;
use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::Problem;

/// Relative slack of comparisons.
pub(crate) const SLACK: f64 = 1e-9;

/// Requests for one model with one SLO.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// Its name, for messages.
    pub name: String,
    /// Requests per second.
    pub rate: f64,
    /// SLO in milliseconds.
    pub slo_ms: f64,
    /// Latency in milliseconds of each batch size, batches rising.
    pub curve: Vec<(u32, f64)>,
}

/// A session's share of a node's duty cycle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// Index of the session.
    pub session: usize,
    /// Batch size of a turn.
    pub batch: u32,
    /// Requests per second routed to it.
    pub rate: f64,
}

/// A session and its residual rate.
pub type Residual = (usize, f64);

/// One GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Length of the duty cycle in milliseconds.
    pub cycle_ms: f64,
    /// Services that run in it.
    pub parts: Vec<Part>,
    /// Share of the cycle in use.
    pub occupancy: f64,
}

impl Session {
    /// Latency of a batch: that of the smallest measured batch that is not smaller.
    pub fn latency_ms(&self, batch: f64) -> Option<(u32, f64)> {
        let needed = batch * (1.0 - SLACK);
        self.curve.iter().copied().find(|(size, _)| f64::from(*size) >= needed)
    }

    /// The largest batch on a GPU of its own: twice its latency must be within the SLO.
    pub fn saturating(&self) -> Option<(u32, f64)> {
        self.curve.iter().copied().rfind(|(_, ms)| 2.0 * ms <= self.slo_ms * (1.0 + SLACK))
    }

    /// Maximum requests per second of one GPU.
    pub fn throughput(&self) -> Option<f64> {
        self.saturating().map(|(batch, ms)| f64::from(batch) / ms * 1000.0)
    }

    /// The batch that takes the least share of a GPU for a rate below its maximum, and the cycle in
    /// which it fills. A batch that does not fill in time runs partly filled if that is cheaper
    /// than a smaller one or the only possibility.
    fn residual(&self, rate: f64) -> Option<(u32, f64, f64)> {
        let option = |&(batch, ms): &(u32, f64)| {
            let cycle = (f64::from(batch) / rate * 1000.0).min(self.slo_ms - ms);
            (ms <= cycle * (1.0 + SLACK)).then_some((batch, ms, cycle))
        };
        let options = self.curve.iter().filter_map(option);
        options.min_by(|a, b| (a.1 / a.2).total_cmp(&(b.1 / b.2)))
    }
}

/// Algorithm 1: saturated nodes, then best-fit decreasing of the residual loads.
pub fn pack(sessions: &[Session]) -> Result<Vec<Node>, PlanError> {
    let (mut nodes, residual) = saturate(sessions, usize::MAX)?;
    nodes.extend(pack_residual(sessions, &residual)?);
    Ok(nodes)
}

/// Saturated GPUs of one session each, and the residual rates. Ends as soon as there are more than
/// `max` GPUs, because a rate from outside may ask for any number of them.
pub fn saturate(sessions: &[Session], max: usize) -> Result<(Vec<Node>, Vec<Residual>), PlanError> {
    let (mut nodes, mut residual) = (Vec::new(), Vec::new());
    for (index, session) in sessions.iter().enumerate() {
        let (batch, ms) = session.saturating().ok_or_else(|| infeasible(session))?;
        let throughput = f64::from(batch) / ms * 1000.0;
        let whole = (session.rate / throughput * (1.0 + SLACK)).floor();
        // One more than may be used says that they do not suffice.
        let room = max.saturating_add(1).saturating_sub(nodes.len());
        for _ in 0..(whole as usize).min(room) {
            let part = Part { session: index, batch, rate: throughput };
            nodes.push(Node { cycle_ms: ms, parts: vec![part], occupancy: 1.0 });
        }
        let rest = session.rate - whole * throughput;
        if rest > session.rate * SLACK {
            residual.push((index, rest));
        }
    }
    Ok((nodes, residual))
}

fn infeasible(session: &Session) -> PlanError {
    let fastest = session.curve.iter().map(|(_, ms)| *ms).fold(f64::INFINITY, f64::min);
    PlanError::Infeasible {
        service: session.name.clone(),
        slo_ms: session.slo_ms,
        nearest_ms: 2.0 * fastest,
    }
}

/// Nodes for rates below a GPU's.
pub fn pack_residual(sessions: &[Session], residual: &[Residual]) -> Result<Vec<Node>, PlanError> {
    let mut singles = Vec::new();
    for &(index, rate) in residual {
        singles.push(single(sessions, index, rate)?);
    }
    singles.sort_by(|a, b| b.occupancy.total_cmp(&a.occupancy));
    let mut nodes: Vec<Node> = Vec::new();
    for node in singles {
        place(sessions, &mut nodes, node);
    }
    Ok(nodes)
}

fn single(sessions: &[Session], index: usize, rate: f64) -> Result<Node, PlanError> {
    let session = &sessions[index];
    let (batch, ms, cycle_ms) = session.residual(rate).ok_or_else(|| infeasible(session))?;
    let part = Part { session: index, batch, rate };
    Ok(Node { cycle_ms, parts: vec![part], occupancy: ms / cycle_ms })
}

/// Merges `node` where the occupancy becomes highest, or opens a node for it.
fn place(sessions: &[Session], nodes: &mut Vec<Node>, node: Node) {
    let mut best: Option<(usize, Node)> = None;
    for (index, other) in nodes.iter().enumerate() {
        if let Some(merged) = merge(sessions, other, &node)
            && best.as_ref().is_none_or(|(_, best)| merged.occupancy > best.occupancy)
        {
            best = Some((index, merged));
        }
    }
    match best {
        Some((index, merged)) => nodes[index] = merged,
        None => nodes.push(node),
    }
}

/// Merges two nodes at the shorter of their cycles; `None` if their turns do not fit.
pub fn merge(sessions: &[Session], a: &Node, b: &Node) -> Option<Node> {
    let cycle_ms = a.cycle_ms.min(b.cycle_ms);
    reschedule(sessions, a.parts.iter().chain(&b.parts), cycle_ms)
}

fn reschedule<'a>(
    sessions: &[Session],
    parts: impl Iterator<Item = &'a Part>,
    cycle_ms: f64,
) -> Option<Node> {
    let (mut merged, mut busy_ms) = (Vec::new(), 0.0);
    for part in parts {
        let session = &sessions[part.session];
        let (batch, ms) = session.latency_ms(part.rate * cycle_ms / 1000.0)?;
        if cycle_ms + ms > session.slo_ms * (1.0 + SLACK) {
            return None;
        }
        busy_ms += ms;
        merged.push(Part { batch, ..*part });
    }
    let fits = busy_ms <= cycle_ms * (1.0 + SLACK);
    fits.then(|| Node { cycle_ms, parts: merged, occupancy: busy_ms / cycle_ms })
}

/// The incremental form: `nodes` are not changed if the sessions' rates allow it.
///
/// The cheapest sessions of an overloaded node are removed until it is not overloaded; these, and
/// unserved rates, are packed again. Then the least utilised nodes are merged into the others if
/// possible.
pub fn repack(sessions: &[Session], nodes: &[Node]) -> Result<Vec<Node>, PlanError> {
    let mut served = vec![0.0; sessions.len()];
    let mut kept: Vec<Node> = Vec::new();
    for node in nodes {
        let mut parts = node.parts.clone();
        for part in &mut parts {
            let Some(session) = sessions.get(part.session) else { continue };
            part.rate = part.rate.min(session.rate - served[part.session]).max(0.0);
            // A session of one node grows there first.
            if node.parts.len() > 1 || nodes.iter().filter(|n| has(n, part.session)).count() == 1 {
                part.rate = session.rate - served[part.session];
            }
        }
        parts.retain(|part| part.session < sessions.len() && part.rate > 0.0);
        parts.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        while !parts.is_empty() {
            if let Some(node) = best_cycle(sessions, &parts) {
                parts.iter().for_each(|part| served[part.session] += part.rate);
                kept.push(node);
                break;
            }
            parts.pop();
        }
    }
    let remaining: Vec<Session> = sessions
        .iter()
        .zip(&served)
        .map(|(session, served)| Session { rate: session.rate - served, ..session.clone() })
        .collect();
    let open: Vec<usize> =
        (0..remaining.len()).filter(|&i| remaining[i].rate > sessions[i].rate * SLACK).collect();
    let missing: Vec<Session> = open.iter().map(|&index| remaining[index].clone()).collect();
    let (mut whole, residual) = saturate(&missing, usize::MAX)?;
    whole.iter_mut().flat_map(|node| &mut node.parts).for_each(|p| p.session = open[p.session]);
    for (index, rate) in residual {
        let node = single(sessions, open[index], rate)?;
        place(sessions, &mut kept, node);
    }
    kept.extend(whole);
    consolidate(sessions, &mut kept);
    Ok(kept)
}

fn has(node: &Node, session: usize) -> bool {
    node.parts.iter().any(|part| part.session == session)
}

/// The shares at the longest of their own cycles that holds them.
fn best_cycle(sessions: &[Session], parts: &[Part]) -> Option<Node> {
    let mut cycles: Vec<f64> = Vec::new();
    for part in parts {
        let session = &sessions[part.session];
        for &(batch, ms) in &session.curve {
            cycles.push((f64::from(batch) / part.rate * 1000.0).min(session.slo_ms - ms));
        }
    }
    cycles.retain(|cycle| *cycle > 0.0);
    cycles
        .into_iter()
        .filter_map(|cycle| reschedule(sessions, parts.iter(), cycle))
        .min_by(|a, b| a.occupancy.total_cmp(&b.occupancy))
}

fn consolidate(sessions: &[Session], nodes: &mut Vec<Node>) {
    loop {
        let mut order: Vec<usize> = (0..nodes.len()).collect();
        order.sort_by(|&a, &b| nodes[a].occupancy.total_cmp(&nodes[b].occupancy));
        let emptied = order.into_iter().find_map(|victim| {
            let mut others = nodes.clone();
            let node = others.remove(victim);
            let count = others.len();
            for part in &node.parts {
                let single = single(sessions, part.session, part.rate).ok()?;
                place(sessions, &mut others, single);
            }
            (others.len() == count).then_some(others)
        });
        match emptied {
            Some(others) => *nodes = others,
            None => return,
        }
    }
}

/// The paper's batch-oblivious baseline: shares of a GPU by rate over highest throughput, packed
/// first fit. It ignores duty cycles and SLOs, so its nodes may violate them. Ends as soon as there
/// are more than `max` GPUs.
pub fn pack_obliviously(
    sessions: &[Session],
    max: usize,
) -> Result<Vec<Vec<(usize, f64)>>, PlanError> {
    let mut nodes: Vec<(f64, Vec<(usize, f64)>)> = Vec::new();
    for (index, session) in sessions.iter().enumerate() {
        let throughput = session.throughput().ok_or_else(|| infeasible(session))?;
        let mut share = session.rate / throughput;
        while share > 0.0 && nodes.len() <= max {
            let part = share.min(1.0);
            share -= part;
            match nodes.iter_mut().find(|(used, _)| used + part <= 1.0 + SLACK) {
                Some((used, parts)) => {
                    *used += part;
                    parts.push((index, part));
                }
                None => nodes.push((part, vec![(index, part)])),
            }
        }
    }
    Ok(nodes.into_iter().map(|(_, parts)| parts).collect())
}

/// Violations of nodes as a plan for sessions; empty if there are none. Independent of the packers.
pub fn check(sessions: &[Session], nodes: &[Node]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut served = vec![0.0; sessions.len()];
    for (number, node) in nodes.iter().enumerate() {
        let mut busy = 0.0;
        for part in &node.parts {
            let session = &sessions[part.session];
            let Some((_, ms)) = session.curve.iter().find(|(batch, _)| *batch == part.batch) else {
                wrong.push(format!("node {number}: batch {} was not measured", part.batch));
                continue;
            };
            busy += ms;
            served[part.session] += part.rate;
            if node.cycle_ms + ms > session.slo_ms * (1.0 + 1e-6) {
                wrong.push(format!("node {number}: {} misses its slo", session.name));
            }
            if part.rate * node.cycle_ms / 1000.0 > f64::from(part.batch) * (1.0 + 1e-6) {
                wrong.push(format!("node {number}: {} outgrows its batch", session.name));
            }
        }
        if busy > node.cycle_ms * (1.0 + 1e-6) {
            wrong.push(format!("node {number}: turns exceed the cycle"));
        }
    }
    for (session, served) in sessions.iter().zip(served) {
        if served < session.rate * (1.0 - 1e-6) {
            wrong.push(format!("{} gets {served} of {}", session.name, session.rate));
        }
    }
    wrong
}

/// Squishy packing with each GPU as one slice and one process per service.
pub(crate) fn plan(problem: &Problem) -> Result<Plan, PlanError> {
    problem.validate()?;
    let unsupported = || PlanError::Unsupported {
        algorithm: "squishy",
        what: "the gpu has no slice of its whole size".to_string(),
    };
    let kind = problem.gpu.kind_of_size(problem.gpu.gpcs).ok_or_else(unsupported)?;
    let sessions: Vec<Session> = problem
        .services
        .iter()
        .map(|service| {
            let points = problem.profiles.points(&service.model).unwrap_or_default();
            let whole = points.iter().filter(|p| p.gpcs == problem.gpu.gpcs && p.processes == 1);
            let mut curve: Vec<(u32, f64)> = whole.map(|p| (p.batch, p.turn_ms())).collect();
            curve.sort_by_key(|(batch, _)| *batch);
            Session {
                name: service.name.clone(),
                rate: service.demand(&problem.rules),
                slo_ms: service.limit_ms(&problem.rules),
                curve,
            }
        })
        .collect();
    let node = |node: Node| {
        let share = |part: &Part| ServiceShare {
            service: part.session,
            batch: part.batch,
            processes: 1,
            rate: part.rate,
        };
        let shares = node.parts.iter().map(share).collect();
        PlannedGpu {
            slices: vec![PlannedSlice { kind, start: 0, cycle_ms: Some(node.cycle_ms), shares }],
        }
    };
    Ok(Plan { gpus: pack(&sessions)?.into_iter().map(node).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(name: &str, rate: f64, slo_ms: f64, ms: [f64; 3]) -> Session {
        let curve = [4, 8, 16].into_iter().zip(ms).collect();
        Session { name: name.to_string(), rate, slo_ms, curve }
    }

    /// Table 2 of the paper.
    fn table_2(a: f64, b: f64, c: f64) -> Vec<Session> {
        vec![
            session("A", a, 200.0, [50.0, 75.0, 100.0]),
            session("B", b, 250.0, [50.0, 90.0, 125.0]),
            session("C", c, 250.0, [60.0, 95.0, 125.0]),
        ]
    }

    #[test]
    fn section_4_1_saturated() {
        let sessions = table_2(1600.0, 1280.0, 1280.0);
        let throughputs: Vec<f64> = sessions.iter().filter_map(Session::throughput).collect();
        assert_eq!(throughputs, [160.0, 128.0, 128.0]);
        assert_eq!(pack(&sessions).unwrap().len(), 30);
    }

    #[test]
    fn section_4_1_residual_puts_b_beside_a_and_not_c() {
        let sessions = table_2(64.0, 32.0, 32.0);
        let nodes = pack(&sessions).unwrap();
        assert_eq!(nodes.len(), 2);
        let with_a = nodes.iter().find(|node| has(node, 0)).unwrap();
        assert!(has(with_a, 1) && !has(with_a, 2));
        assert_eq!(with_a.cycle_ms, 125.0);
        let batches: Vec<u32> = with_a.parts.iter().map(|part| part.batch).collect();
        assert_eq!(batches, [8, 4]);
        assert!(check(&sessions, &nodes).is_empty());
    }

    #[test]
    fn less_work_releases_nodes_and_more_work_moves_little() {
        let before = pack(&table_2(64.0, 32.0, 32.0)).unwrap();
        let less = table_2(16.0, 8.0, 8.0);
        let nodes = repack(&less, &before).unwrap();
        assert!(check(&less, &nodes).is_empty(), "{:?}", check(&less, &nodes));
        assert!(nodes.len() <= pack(&less).unwrap().len());
        let more = table_2(64.0, 32.0, 64.0);
        let nodes = repack(&more, &before).unwrap();
        assert!(check(&more, &nodes).is_empty(), "{:?}", check(&more, &nodes));
        let with_a = nodes.iter().find(|node| has(node, 0)).unwrap();
        assert!(has(with_a, 1));
    }

    #[test]
    fn impossible_session_reports_the_smallest_feasible_slo() {
        let sessions = [session("A", 10.0, 90.0, [50.0, 75.0, 100.0])];
        let error = pack(&sessions).unwrap_err().to_string();
        assert!(error.contains("'A'") && error.contains("100.0 ms"), "{error}");
    }
}
