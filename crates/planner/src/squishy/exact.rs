//! Squishy packing of residual loads to a proven optimum.
//!
//! A set of sessions fits one GPU when some cycle holds all their turns; only cycles at which a
//! turn is about to change need to be tried. All maximal sets are enumerated. The relaxation over
//! them gives each session a weight such that no set weighs more than one. A depth-first search
//! with these weights as the bound covers the sessions with the fewest sets.

use std::collections::HashMap;

use super::{Node, SLACK, Session, pack_residual};
use crate::error::PlanError;
use crate::simplex::Simplex;

/// Sessions are bits of a word.
const SESSIONS_MAX: usize = 32;
/// Maximum number of sets.
const SETS_MAX: usize = 400_000;
const NODES_MAX: usize = 2_000_000;

/// An optimum, or the best packing found with its bound.
#[derive(Clone, Debug)]
pub struct Optimum {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// No packing has fewer nodes.
    pub lower_bound: usize,
}

/// Packs sessions, each below a GPU and whole on one, on as few GPUs as possible.
pub fn solve(sessions: &[Session]) -> Result<Optimum, PlanError> {
    if sessions.len() > SESSIONS_MAX {
        return Err(PlanError::Unsupported {
            algorithm: "exact squishy packing",
            what: format!("{} sessions are more than {SESSIONS_MAX}", sessions.len()),
        });
    }
    let residual: Vec<(usize, f64)> =
        sessions.iter().enumerate().map(|(index, session)| (index, session.rate)).collect();
    let greedy = pack_residual(sessions, &residual)?;
    let sizes = Sizes::new(sessions);
    let shares: f64 = (0..sessions.len()).map(|index| sizes.min_share(index)).sum();
    let by_shares = (shares - 1e-6).ceil().max(1.0) as usize;
    if greedy.len() <= by_shares {
        return Ok(Optimum { lower_bound: greedy.len(), nodes: greedy });
    }
    let Some(sets) = sizes.maximal_sets() else {
        return Ok(Optimum { nodes: greedy, lower_bound: by_shares });
    };
    let weights = weights(&sets, sessions.len());
    let bound = |mask: u32| -> f64 {
        weights.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, w)| w).sum()
    };
    let all = if sessions.len() == 32 { u32::MAX } else { (1 << sessions.len()) - 1 };
    let mut search = Search {
        sets: &sets,
        weights: &weights,
        best: greedy.len(),
        chosen: Vec::new(),
        found: None,
        seen: HashMap::new(),
        nodes: 0,
    };
    search.cover(all);
    let complete = search.nodes < NODES_MAX;
    let nodes = match &search.found {
        Some(chosen) => sizes.nodes(sessions, chosen),
        None => greedy,
    };
    let relaxed = (bound(all) - 1e-6).ceil().max(1.0) as usize;
    let lower_bound = if complete { nodes.len() } else { relaxed.max(by_shares) };
    Ok(Optimum { nodes, lower_bound })
}

/// Share of each session's turn, for every cycle to try.
struct Sizes {
    cycles: Vec<f64>,
    /// By session, then cycle; infinite if it cannot run.
    shares: Vec<Vec<f64>>,
}

impl Sizes {
    fn new(sessions: &[Session]) -> Sizes {
        let mut cycles: Vec<f64> = Vec::new();
        for session in sessions {
            for &(batch, ms) in &session.curve {
                cycles.push(f64::from(batch) / session.rate * 1000.0);
                cycles.push(session.slo_ms - ms);
            }
        }
        let longest = sessions.iter().map(|session| session.slo_ms).fold(0.0, f64::max);
        cycles.retain(|cycle| *cycle > 0.0 && *cycle < longest);
        cycles.sort_by(f64::total_cmp);
        cycles.dedup_by(|later, first| *later <= *first * (1.0 + 1e-12));
        let share = |session: &Session, cycle: f64| match session
            .latency_ms(session.rate * cycle / 1000.0)
        {
            Some((_, ms)) if cycle + ms <= session.slo_ms * (1.0 + SLACK) => ms / cycle,
            _ => f64::INFINITY,
        };
        let row = |session| cycles.iter().map(|&cycle| share(session, cycle)).collect();
        let shares: Vec<Vec<f64>> = sessions.iter().map(row).collect();
        let mut sizes = Sizes { cycles, shares };
        sizes.drop_dominated();
        sizes
    }

    /// Cycles at which every turn takes at least the share it takes at another are dropped.
    fn drop_dominated(&mut self) {
        let count = self.cycles.len();
        let mut keep = vec![true; count];
        for a in 0..count {
            for b in 0..count {
                if a != b && keep[a] && keep[b] {
                    let worse = self.shares.iter().all(|row| row[b] <= row[a]);
                    let equal = self.shares.iter().all(|row| row[b] == row[a]);
                    if worse && (!equal || b < a) {
                        keep[a] = false;
                    }
                }
            }
        }
        for row in self.shares.iter_mut().chain([&mut self.cycles]) {
            let kept = row.iter().zip(&keep).filter(|(_, keep)| **keep);
            *row = kept.map(|(value, _)| *value).collect();
        }
    }

    fn min_share(&self, session: usize) -> f64 {
        self.shares[session].iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// All maximal sets that fit; `None` if there are too many.
    fn maximal_sets(&self) -> Option<Vec<u32>> {
        let mut found = Vec::new();
        let empty = vec![0.0; self.cycles.len()];
        self.grow(0, 0, &empty, &mut found).then_some(found)
    }

    fn grow(&self, from: usize, mask: u32, sums: &[f64], found: &mut Vec<u32>) -> bool {
        if found.len() > SETS_MAX {
            return false;
        }
        for session in from..self.shares.len() {
            if let Some(sums) = self.add(sums, session)
                && !self.grow(session + 1, mask | 1 << session, &sums, found)
            {
                return false;
            }
        }
        let open = |session: usize| mask >> session & 1 == 0 && self.fits(sums, session);
        if mask != 0 && !(0..self.shares.len()).any(open) {
            found.push(mask);
        }
        true
    }

    fn fits(&self, sums: &[f64], session: usize) -> bool {
        sums.iter().zip(&self.shares[session]).any(|(sum, share)| sum + share <= 1.0 + SLACK)
    }

    fn add(&self, sums: &[f64], session: usize) -> Option<Vec<f64>> {
        let sums: Vec<f64> =
            sums.iter().zip(&self.shares[session]).map(|(sum, share)| sum + share).collect();
        sums.iter().any(|sum| *sum <= 1.0 + SLACK).then_some(sums)
    }

    /// Nodes for chosen sets; a session in several goes to the first.
    fn nodes(&self, sessions: &[Session], chosen: &[u32]) -> Vec<Node> {
        let mut placed = 0u32;
        let mut nodes = Vec::new();
        for &set in chosen {
            let members: Vec<usize> =
                (0..sessions.len()).filter(|i| (set & !placed) >> i & 1 == 1).collect();
            placed |= set;
            let busy =
                |cycle: usize| -> f64 { members.iter().map(|&i| self.shares[i][cycle]).sum() };
            let Some(cycle) = (0..self.cycles.len()).min_by(|&a, &b| busy(a).total_cmp(&busy(b)))
            else {
                continue;
            };
            let cycle_ms = self.cycles[cycle];
            let parts = members.iter().filter_map(|&session| {
                let rate = sessions[session].rate;
                let (batch, _) = sessions[session].latency_ms(rate * cycle_ms / 1000.0)?;
                Some(super::Part { session, batch, rate })
            });
            nodes.push(Node { cycle_ms, parts: parts.collect(), occupancy: busy(cycle) });
        }
        nodes
    }
}

/// Dual values of the relaxed covering: no set weighs more than one.
fn weights(sets: &[u32], count: usize) -> Vec<f64> {
    let mut simplex = Simplex::new(&vec![1.0; count]);
    let column = |set: u32| (0..count).map(|i| f64::from(set >> i & 1)).collect::<Vec<f64>>();
    for row in 0..count {
        let mut surplus = vec![0.0; count];
        surplus[row] = -1.0;
        simplex.add(0.0, surplus);
        simplex.add(1.0, column(1 << row));
    }
    for _ in 0..1000 {
        simplex.solve(5000);
        let weights: Vec<f64> = simplex.duals().iter().map(|dual| dual.max(0.0)).collect();
        let weight = |set: u32| -> f64 {
            weights.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).map(|(_, w)| w).sum()
        };
        let mut heavy: Vec<(f64, u32)> = sets
            .iter()
            .map(|&set| (weight(set), set))
            .filter(|(weight, _)| *weight > 1.0 + 1e-9)
            .collect();
        if heavy.is_empty() {
            return weights;
        }
        heavy.sort_by(|a, b| b.0.total_cmp(&a.0));
        heavy.truncate(count);
        heavy.iter().for_each(|(_, set)| {
            simplex.add(1.0, column(*set));
        });
    }
    // Not converged: scale down until no set weighs more than one.
    let weights: Vec<f64> = simplex.duals().iter().map(|dual| dual.max(0.0)).collect();
    let weight = |set: u32| -> f64 {
        weights.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).map(|(_, w)| w).sum()
    };
    let max_weight = sets.iter().map(|&set| weight(set)).fold(1.0, f64::max);
    weights.iter().map(|weight| weight / max_weight).collect()
}

struct Search<'a> {
    sets: &'a [u32],
    weights: &'a [f64],
    best: usize,
    chosen: Vec<u32>,
    found: Option<Vec<u32>>,
    /// Fewest sets with which an open mask was reached.
    seen: HashMap<u32, usize>,
    nodes: usize,
}

impl Search<'_> {
    fn weight(&self, mask: u32) -> f64 {
        let of = |(index, weight): (usize, &f64)| f64::from(mask >> index & 1) * weight;
        self.weights.iter().enumerate().map(of).sum()
    }

    fn cover(&mut self, open: u32) {
        if open == 0 {
            self.best = self.chosen.len();
            self.found = Some(self.chosen.clone());
            return;
        }
        self.nodes += 1;
        let needed = (self.weight(open) - 1e-6).ceil().max(1.0) as usize;
        if self.chosen.len() + needed >= self.best || self.nodes > NODES_MAX {
            return;
        }
        match self.seen.get(&open) {
            Some(&with) if with <= self.chosen.len() => return,
            _ => self.seen.insert(open, self.chosen.len()),
        };
        let heaviest = (0..self.weights.len())
            .filter(|index| open >> index & 1 == 1)
            .max_by(|&a, &b| self.weights[a].total_cmp(&self.weights[b]));
        let Some(item) = heaviest else { return };
        let mut options: Vec<(f64, u32)> = self
            .sets
            .iter()
            .filter(|set| *set >> item & 1 == 1)
            .map(|&set| (self.weight(set & open), set & open))
            .collect();
        options.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        options.dedup_by_key(|option| option.1);
        for (_, set) in options {
            self.chosen.push(set);
            self.cover(open & !set);
            self.chosen.pop();
        }
    }
}
