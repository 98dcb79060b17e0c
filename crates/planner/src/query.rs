//! Latency split of a query (Nexus, SOSP'19, section 6.2): one SLO for several models that feed
//! each other.
//!
//! The budget of a stage limits its batches and so determines the cost of a request. Dynamic
//! programming over pieces of the SLO finds the cheapest split: by series and parallel reductions
//! for trees and fork-join graphs, and over the times of the remaining points for other graphs. A
//! graph that is too large for this gets a good split and a bound.

mod potential;

use self::potential::LatencyGraph;

use crate::error::PlanError;
use crate::problem::{Problem, Service};

/// Maximum number of steps of the exact search in a graph that series and parallel reductions do
/// not reduce.
const STEPS_MAX: f64 = 2e6;

/// One model of a query.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitStage {
    /// Its name.
    pub name: String,
    /// Requests per second: the query's rate times the yield of the stages before it.
    pub rate: f64,
    /// Cost in GPUs of one request per second at each latency budget in milliseconds; budgets
    /// ascend, costs descend.
    pub curve: Vec<(f64, f64)>,
    /// Stages that take its output.
    pub next: Vec<usize>,
}

/// A latency split.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencySplit {
    /// Budget of each stage in milliseconds.
    pub budgets_ms: Vec<f64>,
    /// GPUs of all stages together.
    pub cost: f64,
    /// No split at this resolution costs less.
    pub bound: f64,
    /// Whether it is proven best at this resolution.
    pub exact: bool,
}

impl SplitStage {
    /// GPUs at a budget; infinite if the budget cannot be met.
    fn cost(&self, budget_ms: f64) -> f64 {
        let met = self.curve.iter().rfind(|(latency, _)| *latency <= budget_ms * (1.0 + 1e-9));
        met.map_or(f64::INFINITY, |(_, cost)| self.rate * cost)
    }
}

/// The best split of `slo_ms` over the stages, in `pieces` equal parts. Stage 0 is the root.
pub fn split(stages: &[SplitStage], slo_ms: f64, pieces: usize) -> Result<LatencySplit, PlanError> {
    split_within(stages, slo_ms, pieces, STEPS_MAX)
}

fn split_within(
    stages: &[SplitStage],
    slo_ms: f64,
    pieces: usize,
    steps_max: f64,
) -> Result<LatencySplit, PlanError> {
    let order = topological(stages)?;
    if pieces == 0 || pieces > usize::from(u16::MAX) / 2 {
        return Err(PlanError::BadQuery { what: format!("{pieces} pieces are no resolution") });
    }
    let piece = slo_ms / pieces as f64;
    let mut parts = reduce(stages, pieces, piece);
    let split = if parts.len() == 1 {
        let part = parts.remove(0);
        let mut budgets = vec![0.0; stages.len()];
        part.unfold(pieces, piece, &mut budgets);
        proven(stages, budgets)
    } else {
        split_rest(stages, &order, &parts, slo_ms, pieces, steps_max)
    };
    if split.cost.is_finite() {
        return Ok(split);
    }
    let min = longest(stages, &order, |stage| stages[stage].curve.first().map_or(0.0, |c| c.0));
    Err(PlanError::BadQuery {
        what: format!("its longest path takes {min} ms at least, more than {slo_ms} ms"),
    })
}

fn proven(stages: &[SplitStage], budgets_ms: Vec<f64>) -> LatencySplit {
    let cost = total(stages, &budgets_ms);
    LatencySplit { budgets_ms, cost, bound: cost, exact: true }
}

/// The split of a graph that is not reduced to one subgraph: exact if `STEPS_MAX` allows it,
/// otherwise as fine as it allows and then improved.
fn split_rest(
    stages: &[SplitStage],
    order: &[usize],
    parts: &[SubGraph],
    slo_ms: f64,
    pieces: usize,
    steps_max: f64,
) -> LatencySplit {
    let graph = LatencyGraph::new(parts);
    let piece = slo_ms / pieces as f64;
    let budgets = |horizon: usize, multiple: usize| {
        let choice = graph.cheapest(horizon, multiple)?;
        let mut budgets = vec![0.0; stages.len()];
        for (part, &pieces) in parts.iter().zip(&choice.pieces) {
            part.unfold(pieces, piece, &mut budgets);
        }
        Some(budgets)
    };
    let allowed = |horizon: usize| graph.steps(horizon).is_some_and(|steps| steps <= steps_max);
    if allowed(pieces) {
        let none = || vec![0.0; stages.len()];
        return proven(stages, budgets(pieces, 1).unwrap_or_else(none));
    }
    let even = vec![slo_ms / longest(stages, order, |_| 1.0); stages.len()];
    let longer = |multiple: usize| pieces.div_ceil(multiple) + graph.length();
    match (2..=pieces).find(|&multiple| allowed(longer(multiple))) {
        None => improve(stages, order, slo_ms, piece, even, 0.0),
        Some(multiple) => {
            let bound = graph.cheapest(longer(multiple), multiple);
            let bound = bound.map_or(f64::INFINITY, |choice| choice.cost);
            let start = budgets(pieces / multiple, multiple).unwrap_or(even);
            improve(stages, order, slo_ms, piece, start, bound)
        }
    }
}

/// The baseline: the SLO divided by the number of stages of the longest path, the same budget for
/// all.
pub fn split_evenly(stages: &[SplitStage], slo_ms: f64) -> Result<LatencySplit, PlanError> {
    let order = topological(stages)?;
    let depth = longest(stages, &order, |_| 1.0);
    let budgets_ms = vec![slo_ms / depth; stages.len()];
    Ok(LatencySplit { cost: total(stages, &budgets_ms), budgets_ms, bound: 0.0, exact: false })
}

fn total(stages: &[SplitStage], budgets: &[f64]) -> f64 {
    stages.iter().zip(budgets).map(|(stage, budget)| stage.cost(*budget)).sum()
}

/// Topological order of the stages; an error for cycles and for stages the root does not reach.
fn topological(stages: &[SplitStage]) -> Result<Vec<usize>, PlanError> {
    let bad = |what: &str| Err(PlanError::BadQuery { what: what.to_string() });
    if stages.is_empty() {
        return bad("it has no stages");
    }
    let mut feeds = vec![0; stages.len()];
    for &next in stages.iter().flat_map(|stage| &stage.next) {
        match feeds.get_mut(next) {
            Some(count) => *count += 1,
            None => return bad("a stage feeds one that is not there"),
        }
    }
    let (mut order, mut ready) = (Vec::new(), vec![0]);
    if feeds[0] > 0 {
        return bad("its root is fed by another stage");
    }
    while let Some(stage) = ready.pop() {
        order.push(stage);
        for &next in &stages[stage].next {
            feeds[next] -= 1;
            if feeds[next] == 0 {
                ready.push(next);
            }
        }
    }
    if order.len() < stages.len() {
        return bad("its stages form a circle or are not reached from the root");
    }
    Ok(order)
}

fn longest(stages: &[SplitStage], order: &[usize], weight: impl Fn(usize) -> f64) -> f64 {
    let mut until = vec![0.0f64; stages.len()];
    let mut longest = 0.0f64;
    for &stage in order {
        let end = until[stage] + weight(stage);
        longest = longest.max(end);
        stages[stage].next.iter().for_each(|&next| until[next] = until[next].max(end));
    }
    longest
}

/// A subgraph between two points, with its minimum cost for every number of pieces.
struct SubGraph {
    from: usize,
    to: usize,
    costs: Vec<f64>,
    composition: Composition,
}

enum Composition {
    Stage(usize),
    /// No time, no cost: a bypass, or the exit.
    Empty,
    /// Two in series; with the number of pieces for the first.
    Series(Box<SubGraph>, Box<SubGraph>, Vec<usize>),
    Parallel(Box<SubGraph>, Box<SubGraph>),
}

impl SubGraph {
    fn unfold(&self, pieces: usize, piece: f64, budgets: &mut [f64]) {
        match &self.composition {
            Composition::Stage(stage) => budgets[*stage] = pieces as f64 * piece,
            Composition::Empty => {}
            Composition::Series(first, second, for_first) => {
                let share = for_first[pieces];
                first.unfold(share, piece, budgets);
                second.unfold(pieces - share, piece, budgets);
            }
            Composition::Parallel(one, other) => {
                one.unfold(pieces, piece, budgets);
                other.unfold(pieces, piece, budgets);
            }
        }
    }

    fn in_series(self, second: SubGraph) -> SubGraph {
        let count = self.costs.len();
        let (mut costs, mut for_first) = (vec![f64::INFINITY; count], vec![0; count]);
        for pieces in 0..count {
            for share in 0..=pieces {
                let cost = self.costs[share] + second.costs[pieces - share];
                if cost < costs[pieces] {
                    (costs[pieces], for_first[pieces]) = (cost, share);
                }
            }
        }
        let (from, to) = (self.from, second.to);
        SubGraph {
            from,
            to,
            costs,
            composition: Composition::Series(self.into(), second.into(), for_first),
        }
    }

    fn in_parallel(self, other: SubGraph) -> SubGraph {
        let costs = self.costs.iter().zip(&other.costs).map(|(a, b)| a + b).collect();
        let (from, to) = (self.from, self.to);
        SubGraph { from, to, costs, composition: Composition::Parallel(self.into(), other.into()) }
    }
}

/// Applies series and parallel reductions until none applies; a series-parallel graph becomes one
/// subgraph.
fn reduce(stages: &[SplitStage], pieces: usize, piece: f64) -> Vec<SubGraph> {
    // Stage i lies between the points 2i and 2i + 1; the last point is the exit.
    let out = stages.len() * 2;
    let mut parts = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        let costs = (0..=pieces).map(|count| stage.cost(count as f64 * piece)).collect();
        let composition = Composition::Stage(index);
        parts.push(SubGraph { from: index * 2, to: index * 2 + 1, costs, composition });
        let ends = if stage.next.is_empty() { vec![out] } else { Vec::new() };
        for to in stage.next.iter().map(|next| next * 2).chain(ends) {
            let costs = vec![0.0; pieces + 1];
            parts.push(SubGraph {
                from: index * 2 + 1,
                to,
                costs,
                composition: Composition::Empty,
            });
        }
    }
    while parts.len() > 1 {
        let pair = |parts: &[SubGraph]| {
            for a in 0..parts.len() {
                for b in 0..parts.len() {
                    let same = parts[a].from == parts[b].from && parts[a].to == parts[b].to;
                    if a < b && same {
                        return Some((a, b, true));
                    }
                    let middle = parts[a].to;
                    let passes = parts.iter().filter(|p| p.to == middle).count() == 1
                        && parts.iter().filter(|p| p.from == middle).count() == 1;
                    if a != b && parts[b].from == middle && passes {
                        return Some((a, b, false));
                    }
                }
            }
            None
        };
        let Some((a, b, parallel)) = pair(&parts) else { return parts };
        let later = parts.remove(a.max(b));
        let earlier = parts.remove(a.min(b));
        let (first, second) = if a < b { (earlier, later) } else { (later, earlier) };
        parts.push(match parallel {
            true => first.in_parallel(second),
            false => first.in_series(second),
        });
    }
    parts
}

/// Moves single pieces between stages while that lowers the cost.
fn improve(
    stages: &[SplitStage],
    order: &[usize],
    slo_ms: f64,
    piece: f64,
    mut budgets: Vec<f64>,
    bound: f64,
) -> LatencySplit {
    let fits = |budgets: &[f64]| longest(stages, order, |s| budgets[s]) <= slo_ms * (1.0 + 1e-9);
    let price = |budgets: &[f64]| {
        // Unmet stages cost more the further they are from being met, so that the search has a
        // gradient.
        let one = |(stage, budget): (&SplitStage, &f64)| {
            let cost = stage.cost(*budget);
            let needed = stage.curve.first().map_or(0.0, |point| point.0);
            if cost.is_finite() { cost } else { 1e6 * (1.0 + needed - budget) }
        };
        stages.iter().zip(budgets).map(one).sum::<f64>()
    };
    let mut best = price(&budgets);
    loop {
        let mut found = None;
        for up in 0..stages.len() {
            for down in 0..stages.len() {
                for steps in [1.0, 2.0, 5.0, 10.0] {
                    let mut trial = budgets.clone();
                    trial[up] += steps * piece;
                    if down != up {
                        trial[down] = (trial[down] - steps * piece).max(0.0);
                    }
                    let cost = price(&trial);
                    if cost < best * (1.0 - 1e-12) && fits(&trial) {
                        best = cost;
                        found = Some(trial);
                    }
                }
            }
        }
        match found {
            Some(trial) => budgets = trial,
            None => break,
        }
    }
    LatencySplit { cost: total(stages, &budgets), budgets_ms: budgets, bound, exact: false }
}

/// Cost in GPUs of one request per second of a model at each latency budget, under the planner's
/// prices of slices.
pub fn curve(problem: &Problem, model: &str, prices: &[f64]) -> Vec<(f64, f64)> {
    let points = problem.profiles.points(model).unwrap_or_default();
    let patient =
        Service { name: String::new(), model: model.to_string(), rate: 1.0, slo_ms: f64::MAX };
    let mut curve: Vec<(f64, f64)> = Vec::new();
    for (kind, price) in prices.iter().enumerate().take(problem.gpu.slices.len()) {
        for point in points.iter().filter(|point| problem.fits_alone(&patient, kind, point)) {
            // A tenth of a percent above twice the latency, because the rule is strict.
            let budget = point.latency_ms * 2.0 / problem.rules.slo_share * 1.001;
            curve.push((budget, price / point.throughput));
        }
    }
    curve.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut min = f64::INFINITY;
    curve.retain(|(_, cost)| {
        let falls = *cost < min;
        min = min.min(*cost);
        falls
    });
    curve
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str, rate: f64, throughputs: &[(f64, f64)], next: &[usize]) -> SplitStage {
        let curve = throughputs.iter().map(|(ms, per_s)| (*ms, 1.0 / per_s)).collect();
        SplitStage { name: name.to_string(), rate, curve, next: next.to_vec() }
    }

    /// Models X and Y of section 4.2, figure 3.
    fn example(gamma: f64) -> Vec<SplitStage> {
        vec![
            stage("X", 1.0, &[(40.0, 200.0), (50.0, 250.0), (60.0, 300.0)], &[1]),
            stage("Y", gamma, &[(40.0, 300.0), (50.0, 400.0), (60.0, 500.0)], &[]),
        ]
    }

    #[test]
    fn section_4_2_each_gamma_has_its_own_best_split() {
        // Average throughput of the paper's figure 4 is the reciprocal of the cost.
        for (gamma, x, y, average) in
            [(0.1, 60.0, 40.0, 272.7), (1.0, 50.0, 50.0, 153.8), (10.0, 40.0, 60.0, 40.0)]
        {
            let split = split(&example(gamma), 100.0, 100).unwrap();
            assert!(split.exact);
            assert_eq!((split.budgets_ms[0], split.budgets_ms[1]), (x, y), "gamma {gamma}");
            assert!((1.0 / split.cost - average).abs() < 0.05, "{}", 1.0 / split.cost);
        }
    }

    #[test]
    fn the_even_split_costs_more() {
        let stages = example(10.0);
        let even = split_evenly(&stages, 100.0).unwrap();
        let best = split(&stages, 100.0, 50).unwrap();
        assert_eq!(even.budgets_ms, [50.0, 50.0]);
        assert!(best.cost < even.cost);
    }

    /// All budgets on a grid.
    fn brute(stages: &[SplitStage], slo_ms: f64, pieces: usize) -> f64 {
        let order = topological(stages).unwrap();
        let mut best = f64::INFINITY;
        let mut counts = vec![0usize; stages.len()];
        loop {
            let budgets: Vec<f64> =
                counts.iter().map(|count| *count as f64 * slo_ms / pieces as f64).collect();
            if longest(stages, &order, |stage| budgets[stage]) <= slo_ms * (1.0 + 1e-9) {
                best = best.min(total(stages, &budgets));
            }
            let Some(at) = counts.iter().position(|count| *count < pieces) else { return best };
            counts[at] += 1;
            counts[..at].iter_mut().for_each(|count| *count = 0);
        }
    }

    #[test]
    fn trees_and_fork_joins_match_brute_force() {
        let mut random = base::Random::new(3);
        let shapes: [&[&[usize]]; 4] = [
            &[&[1, 2], &[], &[]],
            &[&[1, 2], &[3], &[3], &[]],
            &[&[1, 2], &[2], &[]],
            &[&[1], &[2, 3], &[], &[]],
        ];
        for _ in 0..30 {
            for shape in shapes {
                let stages: Vec<SplitStage> = shape
                    .iter()
                    .map(|next| {
                        let mut throughput = 20.0;
                        let curve: Vec<(f64, f64)> = (1..=6)
                            .map(|ms| {
                                throughput += 100.0 * random.unit_f64();
                                (f64::from(ms) * 10.0, throughput)
                            })
                            .collect();
                        stage("s", 1.0 + 9.0 * random.unit_f64(), &curve, next)
                    })
                    .collect();
                let found = split(&stages, 120.0, 12).unwrap();
                assert!(found.exact);
                assert!((found.cost - brute(&stages, 120.0, 12)).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn invalid_graphs_are_reported() {
        let error =
            |stages: &[SplitStage], slo: f64| split(stages, slo, 10).unwrap_err().to_string();
        assert!(error(&[], 1.0).contains("no stages"));
        assert!(error(&example(1.0), 50.0).contains("80 ms at least"));
        let points = [(1.0, 1.0)];
        let circle = [stage("a", 1.0, &points, &[1]), stage("b", 1.0, &points, &[1])];
        assert!(error(&circle, 10.0).contains("circle"));
    }

    /// Six stages that series and parallel steps do not reduce: 1 feeds both 3 and 4, and 2 feeds
    /// 4.
    fn bridge(random: &mut base::Random) -> Vec<SplitStage> {
        let next: [&[usize]; 6] = [&[1, 2], &[3, 4], &[4], &[5], &[5], &[]];
        let one = |next: &&[usize]| {
            let mut throughput = 20.0;
            let curve: Vec<(f64, f64)> = (1..=5)
                .map(|at| {
                    throughput += 100.0 * random.unit_f64();
                    (f64::from(at) * 10.0, throughput)
                })
                .collect();
            stage("s", 1.0 + 9.0 * random.unit_f64(), &curve, next)
        };
        next.iter().map(one).collect()
    }

    #[test]
    fn irreducible_graphs_match_brute_force() {
        let mut random = base::Random::new(11);
        for _ in 0..12 {
            let stages = bridge(&mut random);
            let found = split(&stages, 80.0, 8).unwrap();
            assert!(found.exact && found.bound == found.cost);
            assert!((found.cost - brute(&stages, 80.0, 8)).abs() < 1e-9);
        }
    }

    #[test]
    fn a_graph_too_large_for_the_exact_search_gets_a_bound_that_holds() {
        let mut random = base::Random::new(12);
        let (mut above, mut worst) = (0.0, 0.0f64);
        for _ in 0..100 {
            let stages = bridge(&mut random);
            let best = split(&stages, 120.0, 48).unwrap();
            let found = split_within(&stages, 120.0, 48, 6000.0).unwrap();
            assert!(best.exact && !found.exact);
            assert!(found.bound <= best.cost * (1.0 + 1e-9), "{} {}", found.bound, best.cost);
            assert!(found.bound > 0.0 && found.cost >= best.cost * (1.0 - 1e-9));
            above += found.cost / best.cost - 1.0;
            worst = worst.max(found.cost / best.cost - 1.0);
        }
        // Budgets of such a coarse grid, moved one by one, stay above the best; the bound says by
        // how much at most.
        println!("above the best by {above:.2} % on average, {:.1} % at most", worst * 100.0);
        assert!(worst < 0.3, "{worst}");
    }
}
