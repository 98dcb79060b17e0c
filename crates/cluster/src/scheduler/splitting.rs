//! Splits the SLOs of queries over their stages, by measured fan-outs and profiles.

use std::collections::{BTreeMap, HashMap};

use model::config::Class;

use super::plan::{Curve, Curves, Machine};
use crate::query::spec::{Checked, QuerySpec};
use crate::query::{QueryStage, stage_demands};
use crate::record::{LoadReport, QueryLoad, SplitRecord, StageBudget};
use crate::snapshot::ClusterSnapshot;

/// Assumed requests per query request for a stage that fans out and is not measured.
const FAN_OUT_GUESS: f64 = 4.0;
/// Maximum share of an SLO that is reserved for the time between stages.
const BETWEEN_MAX: f64 = 0.5;

/// What queries require of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryDemand {
    /// The shortest budget of its stages.
    pub budget_ms: f64,
    /// Whether one of the queries is real time.
    pub real_time: bool,
}

/// Whether a frontend reports requests of a query.
fn is_requested<'a>(name: &str, mut loads: impl Iterator<Item = &'a LoadReport>) -> bool {
    let rate = |load: &QueryLoad| load.requests.fast + load.requests.slow;
    loads.any(|report| report.queries.get(name).is_some_and(|load| rate(load) > 0.0))
}

/// What queries require of models, by model. A query without requests requires nothing: it must not
/// make the batches of other requests small.
pub fn budgets<'a>(
    queries: &'a BTreeMap<String, QuerySpec>,
    splits: &BTreeMap<String, SplitRecord>,
    loads: &BTreeMap<String, LoadReport>,
) -> HashMap<&'a str, QueryDemand> {
    let mut demands: HashMap<&str, QueryDemand> = HashMap::new();
    for (name, query) in queries.iter().filter(|(name, _)| is_requested(name, loads.values())) {
        let Some(split) = splits.get(name) else { continue };
        for stage in &query.stages {
            let Some(budget) = split.stages.get(&stage.name) else { continue };
            let real_time = query.class == Some(Class::RealTime);
            let mine = QueryDemand { budget_ms: budget.budget_ms, real_time };
            let all = demands.entry(stage.model.as_str()).or_insert(mine);
            all.budget_ms = all.budget_ms.min(mine.budget_ms);
            all.real_time |= real_time;
        }
    }
    demands
}

/// The budgets of all queries. Invalid queries are skipped; frontends report them.
pub fn splits(
    snapshot: &ClusterSnapshot,
    machines: &[Machine],
    curves: &Curves,
) -> BTreeMap<String, SplitRecord> {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    machines.iter().for_each(|machine| *kinds.entry(&machine.device).or_default() += 1);
    // The most common kind of machine decides.
    let mut kinds: Vec<(&str, usize)> = kinds.into_iter().collect();
    kinds.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let curve = |model: &str| {
        kinds.iter().find_map(|(kind, _)| curves.get(&(kind.to_string(), model.to_string())))
    };
    let mut splits = BTreeMap::new();
    for (name, query) in &snapshot.queries {
        let Ok(checked) = query.clone().check() else { continue };
        let loads: Vec<&QueryLoad> =
            snapshot.loads.values().filter_map(|report| report.queries.get(name)).collect();
        splits.insert(name.clone(), split(&checked, &loads, curve));
    }
    splits
}

/// Requests to each stage per query request: measured, or as the query declares.
fn fan_outs(query: &Checked, loads: &[&QueryLoad]) -> Vec<f64> {
    let completed: f64 = loads.iter().map(|load| load.completed).sum();
    let mut fan_outs: Vec<f64> = Vec::new();
    for (index, stage) in query.spec.stages.iter().enumerate() {
        let seen: f64 =
            loads.iter().filter_map(|load| load.stages.get(&stage.name)).map(|s| s.slow).sum();
        let above = match query.chains[index].iter().rev().find(|&&fan| fan != index) {
            Some(&fan) => fan_outs[fan],
            None => 1.0,
        };
        let guess = if stage.each.is_some() { above * FAN_OUT_GUESS } else { above };
        fan_outs.push(match (query.chains[index].is_empty(), completed > 0.0) {
            (true, _) => 1.0,
            // A stage without requests must still be planned for.
            (false, true) => (seen / completed).max(0.01),
            (false, false) => stage.fan_out.unwrap_or(guess),
        });
    }
    fan_outs
}

fn split<'a>(
    query: &Checked,
    loads: &[&QueryLoad],
    curve: impl Fn(&str) -> Option<&'a Curve>,
) -> SplitRecord {
    let stages = &query.spec.stages;
    let fan_outs = fan_outs(query, loads);
    let between_ms = loads.iter().map(|load| load.between_ms).fold(0.0, f64::max);
    let slo_ms = query.spec.slo_ms - between_ms.min(query.spec.slo_ms * BETWEEN_MAX);
    let known: Vec<Option<&Curve>> = stages.iter().map(|stage| curve(&stage.model)).collect();
    let shortest = |index: usize| {
        let times = known[index].into_iter().flatten().map(|(_, ms)| *ms);
        times.reduce(f64::min).unwrap_or(0.0)
    };
    // Backwards: a stage comes before those that read its output.
    let mut reserves = vec![0.0f64; stages.len()];
    for index in (0..stages.len()).rev() {
        let after = query.next(index).into_iter().map(|next| shortest(next) + reserves[next]);
        reserves[index] = after.fold(0.0, f64::max);
    }
    let missing = stages.iter().zip(&known).find(|(_, curve)| curve.is_none());
    let (budgets_ms, cost, exact, why) = match missing {
        Some((stage, _)) => {
            let why = format!("model '{}' is not measured yet", stage.model);
            (evenly(query, slo_ms), 0.0, false, Some(why))
        }
        None => match best(query, request_rate(loads), &fan_outs, &known, slo_ms) {
            Ok((budgets_ms, cost, exact)) => {
                (stretched(query, slo_ms, budgets_ms), cost, exact, None)
            }
            Err(why) => (evenly(query, slo_ms), 0.0, false, Some(why)),
        },
    };
    let budget = |(index, stage): (usize, &crate::query::spec::StageSpec)| {
        let budget = StageBudget {
            budget_ms: thousandths(budgets_ms[index]),
            reserve_ms: thousandths(reserves[index]),
            fan_out: thousandths(fan_outs[index]),
        };
        (stage.name.clone(), budget)
    };
    SplitRecord {
        stages: stages.iter().enumerate().map(budget).collect(),
        cost,
        exact,
        even_because: why,
    }
}

fn thousandths(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// The SLO divided evenly over the stages of the longest path.
fn evenly(query: &Checked, slo_ms: f64) -> Vec<f64> {
    let count = query.spec.stages.len();
    let mut depths = vec![1usize; count];
    for index in 0..count {
        let above = query.parents[index].iter().map(|&parent| depths[parent]).max();
        depths[index] = above.unwrap_or(0) + 1;
    }
    let longest = depths.into_iter().max().unwrap_or(1);
    vec![slo_ms / longest as f64; count]
}

/// Budgets that use the whole SLO. The planner gives each stage as little as its cheapest batch
/// needs; what is left of every path is worth nothing elsewhere, and lets batches and waits be
/// longer. A stage's budget grows by the factor that its longest path allows, so no path exceeds
/// the SLO.
fn stretched(query: &Checked, slo_ms: f64, mut budgets_ms: Vec<f64>) -> Vec<f64> {
    let count = budgets_ms.len();
    let (mut until, mut from) = (budgets_ms.clone(), budgets_ms.clone());
    for index in 0..count {
        let above = query.parents[index].iter().map(|&parent| until[parent]);
        until[index] += above.fold(0.0, f64::max);
    }
    for index in (0..count).rev() {
        let below = query.next(index).into_iter().map(|next| from[next]);
        from[index] += below.fold(0.0, f64::max);
    }
    for (index, budget_ms) in budgets_ms.iter_mut().enumerate() {
        let path_ms = until[index] + from[index] - *budget_ms;
        if path_ms > 0.0 {
            *budget_ms *= (slo_ms / path_ms).max(1.0);
        }
    }
    budgets_ms
}

/// Query requests per second, rounded down to a power of two: budgets are to stay stable while the
/// rate varies.
fn request_rate(loads: &[&QueryLoad]) -> f64 {
    let rate: f64 = loads.iter().map(|load| load.completed).sum();
    if rate > 1.0 { rate.log2().floor().exp2() } else { 1.0 }
}

/// The split that needs the fewest machines.
fn best(
    query: &Checked,
    request_rate: f64,
    fan_outs: &[f64],
    curves: &[Option<&Curve>],
    slo_ms: f64,
) -> Result<(Vec<f64>, f64, bool), String> {
    let count = query.spec.stages.len();
    // The planner needs one root: an empty stage that feeds all first stages.
    let begin = |&index: &usize| query.parents[index].is_empty();
    let mut stages = vec![QueryStage {
        model: String::new(),
        rate: 0.0,
        curve: Vec::new(),
        next: (0..count).filter(begin).map(|index| index + 1).collect(),
    }];
    for (index, stage) in query.spec.stages.iter().enumerate() {
        stages.push(QueryStage {
            model: stage.model.clone(),
            rate: request_rate * fan_outs[index],
            curve: curves[index].cloned().unwrap_or_default(),
            next: query.next(index).into_iter().map(|next| next + 1).collect(),
        });
    }
    let split = stage_demands(&stages, slo_ms, false, true).map_err(|error| error.to_string())?;
    Ok((split.budgets_ms[1..].to_vec(), split.cost / request_rate, split.exact))
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;
    use crate::record::StageLoad;

    /// A tree: `find` feeds `faces` and `cars`; `cars` feeds `plates`.
    const QUERY: &str = r#"
        slo_ms = 400
        [[stage]]
        name = "find"
        model = "ssd"
        inputs.x.value = "frame"
        [[stage]]
        name = "faces"
        model = "face"
        each.rows = { of = "find.faces" }
        inputs.x.value = "each"
        [[stage]]
        name = "cars"
        model = "car"
        each.rows = { of = "find.cars" }
        inputs.x.value = "each"
        [[stage]]
        name = "plates"
        model = "plate"
        inputs.x.value = "cars.y"
        [output]
        face = "faces.y"
        plate = "plates.y"
    "#;

    fn query() -> Checked {
        QuerySpec::read(QUERY).unwrap().check().unwrap()
    }

    fn curve(alpha: f64, beta: f64) -> Curve {
        [1, 2, 4, 8, 16].map(|batch| (batch, alpha * f64::from(batch) + beta)).to_vec()
    }

    fn load(faces: f64, cars: f64) -> QueryLoad {
        let stage = |slow: f64| StageLoad { slow, p99_ms: 0.0 };
        let stages = [("find", 10.0), ("faces", faces), ("cars", cars), ("plates", cars)];
        let stages = stages.map(|(name, slow)| (name.to_string(), stage(slow))).into();
        QueryLoad { completed: 10.0, stages, ..QueryLoad::default() }
    }

    /// A budget per batch time for which collecting and running a batch can be planned.
    const TWO_TURNS: f64 = 2.0 / 0.9;

    /// Machines of one stage within a budget, by the rule alone: a budget holds one batch time for
    /// collecting and one for running, and a machine runs one batch in each.
    fn machines(curve: &Curve, rate: f64, budget_ms: f64) -> f64 {
        let fits = curve.iter().filter(|(_, ms)| TWO_TURNS * ms <= budget_ms * (1.0 + 1e-9));
        let cost = fits.map(|(batch, ms)| rate * ms / 1000.0 / f64::from(*batch));
        cost.fold(f64::INFINITY, f64::min)
    }

    /// The minimum cost over all budgets at which some batch starts to fit, by brute force.
    fn brute(curves: &[Curve; 4], rates: &[f64; 4], slo_ms: f64) -> f64 {
        let choices = |index: usize| curves[index].iter().map(|(_, ms)| TWO_TURNS * ms);
        let mut best = f64::INFINITY;
        for find in choices(0) {
            for faces in choices(1).filter(|faces| find + faces <= slo_ms) {
                for cars in choices(2) {
                    for plates in choices(3).filter(|plates| find + cars + plates <= slo_ms) {
                        let budgets = [find, faces, cars, plates];
                        let all = (0..4).map(|i| machines(&curves[i], rates[i], budgets[i]));
                        best = best.min(all.sum());
                    }
                }
            }
        }
        best
    }

    #[test]
    fn budgets_match_brute_force() {
        let query = query();
        let mut random = Random::new(4);
        let mut solved = 0;
        for _ in 0..200 {
            let curves: [Curve; 4] = std::array::from_fn(|_| {
                curve(1.0 + 9.0 * random.unit_f64(), 1.0 + 19.0 * random.unit_f64())
            });
            let rates = [1.0, 4.0 * random.unit_f64(), 4.0 * random.unit_f64(), 0.0];
            let rates = [rates[0], rates[1].max(0.01), rates[2].max(0.01), rates[2].max(0.01)];
            let load = load(10.0 * rates[1], 10.0 * rates[2]);
            let names = ["ssd", "face", "car", "plate"];
            let found = split(&query, &[&load], |model| {
                names.iter().position(|name| *name == model).map(|index| &curves[index])
            });
            let best = brute(&curves, &rates, 400.0);
            let budget = |name: &str| found.stages[name].budget_ms;
            let path = budget("find") + budget("cars") + budget("plates");
            assert!(path <= 400.01 && budget("find") + budget("faces") <= 400.01, "{found:?}");
            if found.even_because.is_some() {
                assert!(best.is_infinite(), "{found:?}");
                continue;
            }
            solved += 1;
            let budgets = ["find", "faces", "cars", "plates"].map(budget);
            let cost: f64 = (0..4).map(|i| machines(&curves[i], rates[i], budgets[i] + 1e-3)).sum();
            // Stretched budgets allow what the planner's do, and may allow more.
            assert!(cost <= found.cost * (1.0 + 1e-6), "{cost} {found:?}");
            // The planner's budgets lie on a grid of half a percent, which may just miss a batch.
            assert!(cost >= best * (1.0 - 1e-9) && found.cost <= best * 1.15, "{cost} {best}");
            assert!(path >= 399.9 || budget("find") + budget("faces") >= 399.9, "{found:?}");
        }
        assert!(solved > 150, "{solved}");
    }

    /// A batch of these models is no cheaper than a single request, so the planner gives each stage
    /// the least it can.
    #[test]
    fn an_objective_is_used_up_by_its_stages() {
        let flat: Curve = vec![(1, 1.0), (2, 2.0), (4, 4.0)];
        let found = split(&query(), &[&load(1.0, 1.0)], |_| Some(&flat));
        assert_eq!(found.even_because, None);
        let budget = |name: &str| found.stages[name].budget_ms;
        assert!((budget("find") + budget("cars") + budget("plates") - 400.0).abs() < 0.01);
        for stage in ["find", "faces", "cars", "plates"] {
            assert!(budget(stage) > 100.0, "{stage}: {found:?}");
        }
    }

    #[test]
    fn idle_queries_require_nothing() {
        let queries = [("q".to_string(), query().spec)].into();
        let split = split(&query(), &[], |_| None);
        let splits = [("q".to_string(), split)].into();
        let loads = |fast: f64| -> BTreeMap<String, LoadReport> {
            let requests = crate::record::ModelLoad { fast, ..Default::default() };
            let queries = [("q".to_string(), QueryLoad { requests, ..QueryLoad::default() })];
            let report = LoadReport { queries: queries.into(), ..LoadReport::default() };
            [("f".to_string(), report)].into()
        };
        assert!(budgets(&queries, &splits, &BTreeMap::new()).is_empty());
        assert!(budgets(&queries, &splits, &loads(0.0)).is_empty());
        assert_eq!(budgets(&queries, &splits, &loads(0.5)).len(), 4);
    }

    #[test]
    fn fan_outs_are_measured_or_declared() {
        let query = query();
        assert_eq!(fan_outs(&query, &[]), [1.0, 4.0, 4.0, 4.0]);
        let loads = [load(3.0, 20.0), load(5.0, 40.0)];
        let measured = fan_outs(&query, &loads.iter().collect::<Vec<_>>());
        assert_eq!(measured, [1.0, 0.4, 3.0, 3.0]);
    }

    #[test]
    fn reserves_time_between_stages_and_splits_unmeasured_queries_evenly() {
        let slow = QueryLoad { between_ms: 100.0, ..load(1.0, 1.0) };
        let even = split(&query(), &[&slow], |_| None);
        assert!(even.even_because.unwrap().contains("'ssd' is not measured"));
        assert_eq!(even.stages["faces"].budget_ms, 100.0);
        let model = curve(1.0, 1.0);
        let known = split(&query(), &[&slow], |_| Some(&model));
        assert_eq!(known.even_because, None);
        let path: f64 =
            ["find", "cars", "plates"].iter().map(|name| known.stages[*name].budget_ms).sum();
        assert!(path <= 300.001, "{path}");
        assert_eq!(known.stages["find"].reserve_ms, 4.0);
        assert_eq!(known.stages["plates"].reserve_ms, 0.0);
    }
}
