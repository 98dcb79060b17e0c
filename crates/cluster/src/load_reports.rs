//! What a frontend writes of its load, so that a day of it is small.
//!
//! A frontend observes every model each second. It writes a whole report seldom, and in between the
//! models whose rate has changed by more than chance explains, as deltas to that report. Models are
//! spread over a few deltas, so that a change of one writes few others again. All is paid for from
//! one budget of bytes: a change in load is written at once from what was saved, and counters,
//! which change always, only from what is left. The less is saved, the larger a change must be.
//!
//! What is counted of canaries is written whenever it has grown by a part of itself: often at
//! first, so that a failing one ends soon, and seldom later.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use base::Nanos;
use bytes::Bytes;

use crate::record::canary::{CanaryLoad, VersionCounts};
use crate::record::{Keys, LoadReport, ModelLoad, QueryLoad, RecordKind, encode};

/// Bytes that a frontend may write on average: seven megabytes a day.
const BYTES_PER_SECOND: f64 = 80.0;
/// Bytes that it may save up for changes in load.
const SAVINGS_MAX: f64 = 256.0 * 1024.0;
/// Of these, what counters must leave.
const COUNTERS_LEAVE: f64 = 128.0 * 1024.0;
/// By how much larger a change must be when nothing is saved.
const STRICTNESS_MAX: f64 = 8.0;
/// Bytes that an urgent report may have, whatever is saved.
const URGENT_BYTES: f64 = 8.0 * 1024.0;
/// What the store keeps for each write beside key and value: revisions, lease, indexes.
const WRITE_OVERHEAD: usize = 120;
/// Shortest time between two writes that only bring counters up to date.
const COUNTERS_INTERVAL: Nanos = Nanos::from_millis(10_000);
/// A change in load: relative to the reported rate, and in standard deviations of chance.
const CHANGE: f64 = 0.1;
const SURPRISE: f64 = 4.0;
/// Growth of a canary's counts that is written, and the shortest and longest time between two.
const CANARY_GROWTH: f64 = 0.2;
const CANARY_INTERVAL: Nanos = Nanos::from_millis(1000);
const CANARY_INTERVAL_MAX: Nanos = Nanos::from_millis(30_000);
/// Seconds that the slow average covers, as chance sees it.
const SLOW_WINDOW: f64 = 20.0;
/// Deltas of one frontend.
const DELTAS: u64 = 32;
/// The delta with everything but models.
const REST: &str = "rest";

/// Keys and values to write together.
pub type Writes = Vec<(String, Bytes)>;

/// Decides what a frontend writes.
pub struct LoadReporter {
    base_key: String,
    delta_prefix: String,
    /// What readers know: the whole report with its deltas.
    known: Option<LoadReport>,
    /// Number of the whole report.
    number: u64,
    /// The models that each delta has.
    changed: BTreeMap<u64, BTreeSet<String>>,
    savings: f64,
    at: Nanos,
    written_at: Nanos,
    /// When what was counted of canaries was last written.
    canaries_at: Nanos,
}

impl LoadReporter {
    /// For the frontend `name`.
    pub fn new(keys: &Keys, name: &str) -> LoadReporter {
        LoadReporter {
            base_key: keys.one(RecordKind::Load, name),
            delta_prefix: format!("{}/", keys.one(RecordKind::LoadDelta, name)),
            known: None,
            number: 0,
            changed: BTreeMap::new(),
            savings: SAVINGS_MAX,
            at: Nanos::ZERO,
            written_at: Nanos::ZERO,
            canaries_at: Nanos::ZERO,
        }
    }

    /// What is to be written at `now`, where the frontend observes `report`.
    pub fn next(&mut self, now: Nanos, report: &LoadReport) -> Writes {
        let seconds = (now - self.at).0 as f64 / 1e9;
        self.savings = (self.savings + seconds * BYTES_PER_SECOND).min(SAVINGS_MAX);
        self.at = now;
        let strictness = self.strictness();
        let Some(known) = &self.known else { return self.write_all(now, report, 0.0) };
        let (fresh, is_common) = significant(known, report, strictness);
        let rest = rest_differs(known, report, strictness)
            || canaries_grew(known, report, now - self.canaries_at);
        if is_urgent(known, report) {
            // Requests wait for it.
            self.savings = self.savings.max(URGENT_BYTES);
        }
        let counters_due = now - self.written_at >= COUNTERS_INTERVAL && known != report;
        if is_common {
            let writes = self.write_all(now, report, 0.0);
            if !writes.is_empty() {
                return writes;
            }
        }
        if rest || !fresh.is_empty() {
            return self.write_changes(now, report, &fresh, rest);
        }
        match counters_due {
            true => self.write_all(now, report, COUNTERS_LEAVE),
            false => Vec::new(),
        }
    }

    fn strictness(&self) -> f64 {
        let missing = 1.0 - (self.savings / COUNTERS_LEAVE).clamp(0.0, 1.0);
        1.0 + missing * (STRICTNESS_MAX - 1.0)
    }

    /// Writes the deltas of `fresh`, which has the largest changes first, as far as the savings go;
    /// or the whole report where that is less.
    fn write_changes(
        &mut self,
        now: Nanos,
        report: &LoadReport,
        fresh: &[&str],
        rest: bool,
    ) -> Writes {
        let mut known = self.known.clone().unwrap_or_default();
        let mut changed = self.changed.clone();
        let mut writes = Vec::new();
        if rest {
            let mut delta = report.clone();
            (delta.number, delta.models) = (self.number, BTreeMap::new());
            writes.push((format!("{}{REST}", self.delta_prefix), encode(&delta)));
            (delta.number, delta.models) = (0, known.models);
            known = delta;
        }
        let mut seen = BTreeSet::new();
        let slots = fresh.iter().map(|model| slot(model)).filter(|slot| seen.insert(*slot));
        for slot_number in slots.collect::<Vec<u64>>() {
            let mine = fresh.iter().filter(|model| slot(model) == slot_number);
            let mut names = changed.get(&slot_number).cloned().unwrap_or_default();
            names.extend(mine.map(|model| model.to_string()));
            // What is in it anyway is written as it is now.
            let loads = names.iter().filter_map(|n| Some((n.clone(), *report.models.get(n)?)));
            let models: BTreeMap<String, ModelLoad> = loads.collect();
            let delta =
                LoadReport { number: self.number, models: models.clone(), ..LoadReport::default() };
            writes.push((format!("{}{slot_number:02}", self.delta_prefix), encode(&delta)));
            if cost(&writes) as f64 > self.savings {
                writes.pop();
                break;
            }
            known.models.extend(models);
            changed.insert(slot_number, names);
        }
        if !writes.is_empty() && cost(&self.whole(report)) <= cost(&writes) {
            return self.write_all(now, report, 0.0);
        }
        if writes.is_empty() || !self.pay(&writes, 0.0) {
            return Vec::new();
        }
        (self.known, self.changed) = (Some(known), changed);
        if rest {
            self.canaries_at = now;
        }
        writes
    }

    /// The whole report, which makes all deltas obsolete.
    fn whole(&self, report: &LoadReport) -> Writes {
        let mut base = report.clone();
        base.number = self.number + 1;
        // A model that nobody requests needs no row.
        base.models.retain(|_, load| load.arrived > 0 || load.slow > 0.0);
        vec![(self.base_key.clone(), encode(&base))]
    }

    fn write_all(&mut self, now: Nanos, report: &LoadReport, leave: f64) -> Writes {
        let writes = self.whole(report);
        if !self.pay(&writes, leave) {
            return Vec::new();
        }
        self.number += 1;
        (self.known, self.changed, self.written_at) = (Some(report.clone()), BTreeMap::new(), now);
        self.canaries_at = now;
        writes
    }

    /// Pays for `writes`, if `leave` is left then.
    fn pay(&mut self, writes: &Writes, leave: f64) -> bool {
        let cost = cost(writes) as f64;
        // A report that costs more than can be saved is written when everything is saved.
        let affordable = self.savings >= (cost + leave).min(SAVINGS_MAX);
        if affordable {
            self.savings -= cost;
        }
        affordable
    }
}

/// The delta that a model belongs to.
fn slot(model: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    model.hash(&mut hasher);
    hasher.finish() % DELTAS
}

/// Bytes that writes take in the store's history.
pub fn cost(writes: &[(String, Bytes)]) -> usize {
    writes.iter().map(|(key, value)| key.len() + value.len() + WRITE_OVERHEAD).sum()
}

/// Applies the delta of this name to the whole report that it belongs to.
pub fn apply(report: &mut LoadReport, name: &str, delta: LoadReport) {
    if delta.number != report.number {
        return;
    }
    if name == REST {
        let models = std::mem::take(&mut report.models);
        *report = LoadReport { models, ..delta };
    } else {
        report.models.extend(delta.models);
    }
}

/// Whether a request waits for a backend, or a first one came, and the scheduler does not know.
fn is_urgent(known: &LoadReport, report: &LoadReport) -> bool {
    let is_new = |model: &String| !known.waiting.contains_key(model);
    report.waiting.keys().any(is_new) || (known.idle && !report.idle)
}

/// Whether what was counted of a canary has grown by so much that it is written, `since` the last
/// time.
fn canaries_grew(known: &LoadReport, report: &LoadReport, since: Nanos) -> bool {
    if known.canaries == report.canaries {
        return false;
    }
    let grew = |before: u64, now: u64| now as f64 > before as f64 * (1.0 + CANARY_GROWTH);
    let is_fresh = |before: &VersionCounts, now: &VersionCounts| {
        grew(before.requests, now.requests) || grew(before.failures, now.failures)
    };
    let is_due = |(model, load): (&String, &CanaryLoad)| match known.canaries.get(model) {
        Some(known) if known.number == load.number => {
            is_fresh(&known.stable, &load.stable) || is_fresh(&known.canary, &load.canary)
        }
        _ => true,
    };
    since >= CANARY_INTERVAL_MAX
        || (since >= CANARY_INTERVAL
            && (known.canaries.len() != report.canaries.len()
                || report.canaries.iter().any(is_due)))
}

/// Whether anything but rates and counters differs.
fn rest_differs(known: &LoadReport, report: &LoadReport, strictness: f64) -> bool {
    let rest = |report: &LoadReport| {
        let mut rest = report.clone();
        rest.models.clear();
        rest.queries.clear();
        rest.canaries.clear();
        rest
    };
    let query = |(name, load): (&String, &QueryLoad)| {
        let known = known.queries.get(name);
        known.is_none_or(|known| changed(&known.requests, &load.requests, strictness))
    };
    report.queries.iter().any(query) || (rest(known) != rest(report))
}

/// The models whose rate has changed by more than chance explains, the largest changes first, and
/// whether the sum of all has: a common rise is significant sooner than that of any model. Both
/// maps are in order, so they are read side by side.
fn significant<'a>(
    known: &LoadReport,
    report: &'a LoadReport,
    strictness: f64,
) -> (Vec<&'a str>, bool) {
    let mut found: Vec<(f64, &str)> = Vec::new();
    let mut before = known.models.iter().peekable();
    let (mut all_before, mut all_now) = (ModelLoad::default(), ModelLoad::default());
    for (model, load) in &report.models {
        while before.next_if(|(name, _)| *name < model).is_some() {}
        let old = before.next_if(|(name, _)| *name == model).map(|(_, load)| *load);
        let old = old.unwrap_or_default();
        for (sum, of) in [(&mut all_before, &old), (&mut all_now, load)] {
            sum.fast += of.fast;
            sum.slow += of.slow;
            sum.window = sum.window.max(of.window);
        }
        if changed(&old, load, strictness) {
            found.push(((load.fast - old.fast).abs(), model.as_str()));
        }
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    let found = found.into_iter().map(|(_, model)| model).collect();
    (found, changed(&all_before, &all_now, strictness))
}

/// Whether a rate differs from the one reported.
fn changed(old: &ModelLoad, new: &ModelLoad, strictness: f64) -> bool {
    let differs = |old: f64, new: f64, window: f64| {
        let most = old.max(new);
        let chance = SURPRISE * (most / window.max(1.0)).sqrt();
        (new - old).abs() > strictness * (CHANGE * old).max(chance)
    };
    differs(old.fast, new.fast, new.window) || differs(old.slow, new.slow, SLOW_WINDOW)
}

#[cfg(test)]
mod tests {
    use api::CanaryOptions;
    use base::Random;

    use super::*;
    use crate::frontend::meter::Rates;
    use crate::record::canary::with_canaries;
    use crate::record::{
        ModelRecord, ReplicaPoolRecord, RouteRecord, ScalingRecord, TargetRecord, VersionRecord,
    };
    use crate::scheduler::canary_judge::CanaryJudge;
    use crate::snapshot::ClusterSnapshot;

    /// Rates of models over a day: a wave, steps at random, and chance.
    struct Day {
        random: Random,
        report: LoadReport,
        rates: Vec<(f64, Rates, u64)>,
    }

    impl Day {
        fn new(models: usize, seed: u64) -> Day {
            let mut random = Random::new(seed);
            let names = (0..models).map(|i| (format!("model-{i:03}"), ModelLoad::default()));
            let report = LoadReport { models: names.collect(), ..LoadReport::default() };
            // Most models are requested seldom, some often.
            let rate = |random: &mut Random| 0.05 * (9.0 * random.unit_f64()).exp();
            let rates = (0..models).map(|_| (rate(&mut random), Rates::default(), 0)).collect();
            Day { random, report, rates }
        }

        /// `seconds` later.
        fn advance(&mut self, now: Nanos, seconds: f64) {
            let wave = 1.0 + 0.5 * (now.0 as f64 / 86_400e9 * std::f64::consts::TAU).sin();
            for (load, (rate, rates, count)) in self.report.models.values_mut().zip(&mut self.rates)
            {
                // Every model steps by up to a factor of two, every hour on average.
                if self.random.unit_f64() < seconds / 3600.0 {
                    *rate = (*rate * (0.5 + 1.5 * self.random.unit_f64())).clamp(0.01, 1000.0);
                }
                let mean = *rate * wave * seconds;
                let normal: f64 = (0..3).map(|_| self.random.unit_f64() - 0.5).sum::<f64>() * 2.0;
                *count += (mean + mean.sqrt() * normal).max(0.0).round() as u64;
                let (fast, window, slow) = rates.tick(now, *count);
                let tenths = |rate: f64| (rate * 10.0).round() / 10.0;
                *load = ModelLoad {
                    fast: tenths(fast),
                    window: tenths(window),
                    slow: tenths(slow),
                    arrived: *count,
                    answered: *count,
                    p99_ms: 12.34,
                    ..ModelLoad::default()
                };
            }
        }
    }

    /// What readers see after writes.
    fn read(store: &mut BTreeMap<String, Bytes>, writes: Writes) -> LoadReport {
        let short = |key: String| key["/atoll/default/".len()..].to_string();
        store.extend(writes.into_iter().map(|(key, value)| (short(key), value)));
        ClusterSnapshot::read(store).loads.remove("f").unwrap_or_default()
    }

    /// Bytes that one frontend writes in `days`, where rates change `faster` than in a day.
    fn written(days: u64, faster: u64) -> usize {
        // The budget is one of time, so that coarse steps cost no less.
        const STEP_SECONDS: u64 = 40;
        let mut day = Day::new(400, 7);
        let mut reporter = LoadReporter::new(&Keys::new("default"), "frontend-0");
        let mut bytes = 0;
        for step in 0..days * 86_400 / STEP_SECONDS {
            let now = Nanos::from_millis(1000 * STEP_SECONDS * step);
            day.advance(now, (STEP_SECONDS * faster) as f64);
            bytes += cost(&reporter.next(now, &day.report));
        }
        assert!(encode(&day.report).len() > 10_000, "the report is too small to show anything");
        bytes
    }

    #[test]
    fn a_day_of_400_models_and_ten_frontends_is_less_than_100_megabytes() {
        for faster in [1, 7] {
            let all = 10.0 * written(1, faster) as f64 / 1e6;
            println!("{all:.1} MB a day where rates change {faster} times as fast");
            assert!((1.0..90.0).contains(&all), "{all:.1} MB");
        }
    }

    /// One of `CANARIES` models with a canary: it is started again every six hours.
    const CANARIES: usize = 4;

    fn canary_record(number: u64) -> ModelRecord {
        let (digest, enabled) = ("old".to_string(), true);
        let record = ModelRecord { version: 1, digest, enabled, ..ModelRecord::default() };
        let digest = "new".to_string();
        let version = VersionRecord { version: 2, digest, bytes: 1, config: Default::default() };
        let options = CanaryOptions { promote_after_ms: None, ..CanaryOptions::with_share(10.0) };
        let mut record = record.with_canary(version, &options);
        record.canary.iter_mut().for_each(|canary| canary.number = number);
        record
    }

    fn target() -> TargetRecord {
        TargetRecord {
            backend: "b".to_string(),
            grpc: String::new(),
            http: String::new(),
            weight: 1.0,
            batch: 1,
            batch_ms: 1.0,
            cycle_ms: 1.0,
            min_batch: 0,
            version: 1,
        }
    }

    /// What frontends and the leader write in a day where some models have canaries, and backends
    /// are scaled in three pools whose numbers change with every look: both parts.
    fn written_with_canaries() -> (usize, usize, usize) {
        const STEP_SECONDS: u64 = 40;
        let mut frontends: Vec<(Day, LoadReporter)> = (0..10)
            .map(|index| {
                let reporter = LoadReporter::new(&Keys::new("default"), &format!("f{index}"));
                (Day::new(400, 70 + index), reporter)
            })
            .collect();
        let (mut reports, mut progress, mut random) = (0, 0, Random::new(5));
        let (mut judge, mut snapshot) = (CanaryJudge::default(), ClusterSnapshot::default());
        for step in 0..86_400 / STEP_SECONDS {
            let (second, number) = (step * STEP_SECONDS, step * STEP_SECONDS / 21_600 + 1);
            let records = (0..CANARIES).map(|i| (format!("model-{i:03}"), canary_record(number)));
            snapshot.models = with_canaries(records.collect());
            let route = RouteRecord { targets: vec![target()], ..RouteRecord::default() };
            let routes = snapshot.models.keys().map(|name| (name.clone(), route.clone()));
            snapshot.routes = routes.collect();
            for (index, (day, reporter)) in frontends.iter_mut().enumerate() {
                let now = Nanos::from_millis(1000 * second);
                day.advance(now, STEP_SECONDS as f64);
                for model in 0..CANARIES {
                    let name = format!("model-{model:03}");
                    let load = day.report.canaries.entry(name).or_default();
                    if load.number != number {
                        *load = CanaryLoad { number, ..CanaryLoad::default() };
                    }
                    for request in 0..50 {
                        let latency = Nanos((4e6 * (2.0 * random.unit_f64()).exp()) as u64);
                        let canary = request % 10 == 0;
                        let counts = if canary { &mut load.canary } else { &mut load.stable };
                        counts.reply(latency, random.below(1000) == 0);
                    }
                }
                reports += cost(&reporter.next(now, &day.report));
                snapshot.loads.insert(format!("f{index}"), day.report.clone());
            }
            // The leader plans twice a second, and counts at most five seconds at once.
            for at in (second..second + STEP_SECONDS).step_by(5) {
                let decided = judge.step(Nanos::from_millis(1000 * at), &snapshot);
                for (name, fresh) in decided.progress {
                    if snapshot.canaries.get(&name) != Some(&fresh) {
                        let key = Keys::new("default").one(RecordKind::Canary, &name);
                        progress += cost(&[(key, encode(&fresh))]);
                        snapshot.canaries.insert(name, fresh);
                    }
                }
            }
        }
        let pool = ReplicaPoolRecord {
            target: "deployment/atoll-backend-large".to_string(),
            kind: "nvidia-a100-80gb".to_string(),
            memory_bytes: 80 << 30,
            ..ReplicaPoolRecord::default()
        };
        let target = "3 workloads".to_string();
        let record = ScalingRecord { target, pools: vec![pool; 3], ..ScalingRecord::default() };
        let scaling = cost(&[(Keys::new("default").scaling(), encode(&record))]);
        (reports, progress, scaling * 86_400 / 5)
    }

    #[test]
    fn a_day_with_canaries_and_replica_pools_is_less_than_100_megabytes() {
        let (reports, progress, scaling) = written_with_canaries();
        let megabytes = |bytes: usize| bytes as f64 / 1e6;
        println!(
            "{:.1} MB a day of ten frontends, {:.1} of {CANARIES} canaries, at most {:.1} of pools",
            megabytes(reports),
            megabytes(progress),
            megabytes(scaling)
        );
        assert!(reports > 1_000_000 && progress > 100_000);
        let all = megabytes(reports + progress + scaling);
        assert!(all < 100.0, "{all:.1} MB");
    }

    #[test]
    fn a_step_in_load_is_written_at_once() {
        let mut day = Day::new(400, 3);
        let mut reporter = LoadReporter::new(&Keys::new("default"), "f");
        let mut store = BTreeMap::new();
        day.rates[5].0 = 10.0;
        // Long enough that nothing is saved any more.
        for step in 0..1500u64 {
            let now = Nanos::from_millis(10_000 * step);
            day.advance(now, 10.0);
            read(&mut store, reporter.next(now, &day.report));
        }
        day.rates[5].0 = 900.0;
        let mut seen = LoadReport::default();
        for second in 0..3u64 {
            let now = Nanos::from_millis(14_990_000 + 1000 * (second + 1));
            day.advance(now, 1.0);
            seen = read(&mut store, reporter.next(now, &day.report));
        }
        let (reported, real) = (&seen.models["model-005"], &day.report.models["model-005"]);
        assert!((reported.fast - real.fast).abs() < 0.4 * real.fast, "{reported:?} {real:?}");
        // Of the others, what is known is close to the truth as far as bytes allow.
        for (model, real) in &day.report.models {
            let reported = seen.models.get(model).copied().unwrap_or_default();
            let most = real.slow.max(reported.slow);
            let allowed =
                STRICTNESS_MAX * (CHANGE * most).max(SURPRISE * (most / SLOW_WINDOW).sqrt());
            let off = (reported.slow - real.slow).abs();
            assert!(off <= allowed + 0.1, "{model}: {reported:?} {real:?}");
        }
    }

    /// A canary that is restarted every ten minutes, where nothing is saved any more.
    #[test]
    fn counts_of_a_canary_arrive_soon_within_the_budget() {
        const SECONDS: u64 = 7200;
        let mut day = Day::new(400, 11);
        let mut random = Random::new(2);
        let mut reporter = LoadReporter::new(&Keys::new("default"), "f");
        reporter.savings = 20_000.0;
        let (mut store, mut seen, mut bytes) = (BTreeMap::new(), LoadReport::default(), 0);
        let (mut load, mut late) = (CanaryLoad::default(), 0);
        for second in 0..SECONDS {
            let (now, age) = (Nanos::from_millis(1000 * second), second % 600);
            if second % 40 == 0 {
                day.advance(now, 40.0);
            }
            if age == 0 {
                load = CanaryLoad { number: second / 600 + 1, ..CanaryLoad::default() };
            }
            for _ in 0..100 {
                let latency = Nanos((4e6 * (2.0 * random.unit_f64()).exp()) as u64);
                match random.below(10) {
                    0 if age >= 300 => load.canary.fail(),
                    0 => load.canary.reply(latency, false),
                    _ => load.stable.reply(latency, false),
                }
            }
            day.report.canaries.insert("m".to_string(), load.clone());
            let writes = reporter.next(now, &day.report);
            bytes += cost(&writes);
            if !writes.is_empty() {
                seen = read(&mut store, writes);
            }
            // It has failed for five seconds.
            let known = seen.canaries.get("m").cloned().unwrap_or_default();
            if age == 305 && (known.number != load.number || known.canary.failures == 0) {
                late += 1;
            }
        }
        assert!(late <= 1, "late {late} times of {}", SECONDS / 600);
        assert!((bytes as u64) < 20_000 + 80 * SECONDS, "{bytes} bytes");
    }

    #[test]
    fn counters_of_a_small_cluster_are_fresh() {
        let mut day = Day::new(3, 1);
        let mut reporter = LoadReporter::new(&Keys::new("default"), "f");
        let (mut store, mut history) = (BTreeMap::new(), Vec::new());
        let sum = |report: &LoadReport| report.models.values().map(|l| l.arrived).sum::<u64>();
        for second in 0..2000u64 {
            let now = Nanos::from_millis(1000 * second);
            day.advance(now, 1.0);
            let seen = read(&mut store, reporter.next(now, &day.report));
            history.push(sum(&day.report));
            let before = history[history.len().saturating_sub(30)];
            assert!(sum(&seen) >= before, "second {second}: {seen:?}");
        }
    }
}
