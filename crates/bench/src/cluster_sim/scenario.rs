//! A cluster scenario: GPUs, sessions, changes of load and faults, planned by the real scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use base::{Nanos, Random};
use cluster::frontend::meter::Rates;
use cluster::load_reports::LoadReporter;
use cluster::record::{
    BackendRecord, BackendState, Keys, LoadReport, LoadState, ModelLoad, ModelRecord,
    ProfileRecord, TargetRecord, decode, encode,
};
use cluster::scheduler::packing::Packer;
use cluster::scheduler::placement::PlacementSettings;
use cluster::scheduler::{Core, Decision, SchedulerSettings};
use cluster::snapshot::ClusterSnapshot;
use cluster::store::mirror::KeyValues;
use runtime::batching::BatchProfile;
use serde::Deserialize;

pub use super::report::{ClusterReport, LoadRise, text};
use super::{ClusterSession, ClusterSim, QuerySource, RouteTarget, judgement};
use crate::scenario::ScenarioError;
use crate::scenario_check::{BadValue, ValueChecks};

/// Sessions of one kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionGroup {
    /// Their name.
    pub name: String,
    /// How many.
    pub count: usize,
    /// Milliseconds that each request adds to a batch.
    pub alpha_ms: f64,
    /// Milliseconds of a batch apart from its requests.
    pub beta_ms: f64,
    /// The largest batch.
    pub batch_max: u32,
    /// SLO in milliseconds.
    pub slo_ms: u64,
    /// Requests per second of all of them together.
    pub rate: f64,
    /// Rates follow a Zipf distribution with this exponent; 0 for equal ones.
    #[serde(default)]
    pub zipf: f64,
}

/// Longest run, and latest time in one, in seconds.
const SECONDS_MAX: u64 = 1_000_000;

impl SessionGroup {
    fn check(&self, index: usize, checks: &mut ValueChecks) {
        let field = |name: &str| format!("sessions[{index}].{name}");
        checks.count(field("count"), self.count as u64, (1, 1_000_000));
        checks.number(field("alpha_ms"), self.alpha_ms, (1e-6, 1e6));
        checks.number(field("beta_ms"), self.beta_ms, (0.0, 1e6));
        checks.count(field("batch_max"), u64::from(self.batch_max), (1, 4096));
        checks.count(field("slo_ms"), self.slo_ms, (1, 1_000_000));
        checks.number(field("rate"), self.rate, (1e-3, 1e8));
        checks.number(field("zipf"), self.zipf, (0.0, 10.0));
    }
}

/// A change of load.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadStep {
    /// When, in seconds.
    pub at_s: u64,
    /// Name of the sessions; all if empty.
    #[serde(default)]
    pub name: String,
    /// Factor on the rates of the file.
    pub factor: f64,
}

/// GPUs that are lost for a time.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuLoss {
    /// When, in seconds.
    pub at_s: u64,
    /// How many.
    pub gpus: usize,
    /// For how many seconds.
    pub for_s: u64,
}

/// A cluster scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterScenario {
    /// Its name.
    pub name: String,
    /// `cluster`.
    pub kind: String,
    /// Number of GPUs.
    pub gpus: usize,
    /// Seconds of load, after the first plan is in effect.
    pub seconds: u64,
    /// Seed of everything random.
    pub seed: u64,
    /// Capacity beyond the observed load.
    pub headroom: f64,
    /// Seconds of a plan epoch.
    pub epoch_s: u64,
    /// Min seconds between two plans because of load.
    pub spacing_s: u64,
    /// Milliseconds until a lost machine's lease expires.
    pub lease_ms: u64,
    /// Milliseconds that loading a model takes.
    pub load_ms: u64,
    /// `squishy` or `certified`.
    pub packer: String,
    /// Whether machines of one session form a backend pool.
    pub pooled: bool,
    /// Number of frontends; each knows only its own requests.
    pub frontends: usize,
    /// Sessions.
    pub sessions: Vec<SessionGroup>,
    /// Changes of load.
    pub steps: Vec<LoadStep>,
    /// Lost GPUs.
    pub losses: Vec<GpuLoss>,
    /// Amplitude of a wave in load, as a share; 0 for none.
    pub wave: f64,
    /// Length of the wave in seconds.
    pub wave_s: f64,
    /// Max percent of requests that may miss their SLO.
    pub bad_percent_max: f64,
}

impl Default for ClusterScenario {
    fn default() -> Self {
        ClusterScenario {
            name: String::new(),
            kind: "cluster".to_string(),
            gpus: 100,
            seconds: 60,
            seed: 1,
            headroom: 0.2,
            epoch_s: 30,
            spacing_s: 10,
            lease_ms: 3000,
            load_ms: 1000,
            packer: "squishy".to_string(),
            pooled: true,
            frontends: 1,
            sessions: Vec::new(),
            steps: Vec::new(),
            losses: Vec::new(),
            wave: 0.0,
            wave_s: 600.0,
            bad_percent_max: 1.0,
        }
    }
}

impl ClusterScenario {
    /// Reads a TOML file.
    pub fn read(path: &Path) -> Result<ClusterScenario, ScenarioError> {
        let name = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|err| ScenarioError::Read(name.clone(), err))?;
        ClusterScenario::from_toml(&name, &text)
    }

    /// Reads the text of a file and checks every value.
    pub fn from_toml(file: &str, text: &str) -> Result<ClusterScenario, ScenarioError> {
        let scenario: ClusterScenario =
            toml::from_str(text).map_err(|err| ScenarioError::Parse(file.to_string(), err))?;
        scenario.check().map_err(|bad| {
            let (file, line) = (file.to_string(), bad.line_in(text));
            ScenarioError::Bad { file, line, bad }
        })?;
        Ok(scenario)
    }

    /// Checks every value: what passes has an end.
    pub fn check(&self) -> Result<(), BadValue> {
        let mut checks = ValueChecks::default();
        checks.holds(self.kind == "cluster", "kind", "is not 'cluster'");
        checks.count("gpus", self.gpus as u64, (1, 100_000));
        checks.count("seconds", self.seconds, (1, SECONDS_MAX));
        checks.number("headroom", self.headroom, (0.0, 10.0));
        checks.count("epoch_s", self.epoch_s, (1, SECONDS_MAX));
        checks.count("spacing_s", self.spacing_s, (0, SECONDS_MAX));
        checks.count("lease_ms", self.lease_ms, (1, SECONDS_MAX * 1000));
        checks.count("load_ms", self.load_ms, (0, SECONDS_MAX * 1000));
        if let Err(why) = self.packer.parse::<Packer>() {
            checks.wrong("packer", format_args!("= {why}"));
        }
        checks.count("frontends", self.frontends as u64, (1, 1000));
        checks.number("wave", self.wave, (0.0, 1.0));
        checks.number("wave_s", self.wave_s, (1e-3, SECONDS_MAX as f64));
        checks.number("bad_percent_max", self.bad_percent_max, (0.0, 100.0));
        checks.holds(!self.sessions.is_empty(), "sessions", "is empty; nothing would run");
        if !self.name.is_empty() {
            checks.name("name", &self.name);
        }
        let names = self.sessions.iter().map(|group| group.name.as_str());
        checks.names(|index| format!("sessions[{index}].name"), names);
        for (index, group) in self.sessions.iter().enumerate() {
            group.check(index, &mut checks);
        }
        let count: u64 = self.sessions.iter().map(|group| group.count as u64).sum();
        checks.count("sessions", count, (0, 1_000_000));
        let rate: f64 = self.sessions.iter().map(|group| group.rate).sum();
        let all = rate * self.seconds as f64;
        checks.holds(all <= 1e10, "seconds", format_args!("are {all:e} requests, more than 1e10"));
        self.check_changes(&mut checks);
        checks.result()
    }

    fn check_changes(&self, checks: &mut ValueChecks) {
        let mut last = 0;
        for (index, step) in self.steps.iter().enumerate() {
            let field = |name: &str| format!("steps[{index}].{name}");
            checks.count(field("at_s"), step.at_s, (last, SECONDS_MAX));
            last = step.at_s;
            checks.number(field("factor"), step.factor, (0.0, 1e6));
            let known = step.name.is_empty() || self.sessions.iter().any(|s| s.name == step.name);
            checks.holds(known, field("name"), format_args!("= '{}' names no session", step.name));
        }
        for (index, loss) in self.losses.iter().enumerate() {
            let field = |name: &str| format!("losses[{index}].{name}");
            checks.count(field("at_s"), loss.at_s, (0, SECONDS_MAX));
            checks.count(field("gpus"), loss.gpus as u64, (1, self.gpus as u64));
            checks.count(field("for_s"), loss.for_s, (1, SECONDS_MAX));
        }
    }

    /// Whether a TOML text is a cluster scenario.
    pub fn is_one(text: &str) -> bool {
        let kind = text.parse::<toml::Table>().ok().and_then(|table| table.get("kind").cloned());
        kind.and_then(|kind| kind.as_str().map(|kind| kind == "cluster")).unwrap_or(false)
    }

    /// Rates of single sessions.
    fn rates(&self) -> Vec<(usize, f64)> {
        let mut rates = Vec::new();
        for (group, sessions) in self.sessions.iter().enumerate() {
            let weight = |rank: usize| 1.0 / ((rank + 1) as f64).powf(sessions.zipf);
            let total: f64 = (0..sessions.count).map(weight).sum();
            let rate = |rank| (group, sessions.rate * weight(rank) / total);
            rates.extend((0..sessions.count).map(rate));
        }
        rates
    }
}

struct ScenarioRun<'a> {
    scenario: &'a ClusterScenario,
    cluster: ClusterSim,
    view: ClusterSnapshot,
    core: Core,
    meters: Vec<Rates>,
    reporter: LoadReporter,
    /// What the reporter has written.
    stored: KeyValues,
    base: Vec<(usize, f64)>,
    /// When the lease of a lost machine expires.
    expiries: BTreeMap<usize, Nanos>,
    /// When a lost machine is back.
    returns: BTreeMap<usize, Nanos>,
    /// Loads in flight: GPU and session, and when they end.
    loading: BTreeMap<(usize, usize), Nanos>,
    /// The latest value of each key.
    written: BTreeMap<String, Vec<u8>>,
    report: ClusterReport,
    /// GPUs that the load of the seconds so far needed at least, added up.
    needed_gpus: f64,
    random: Random,
    names: Vec<String>,
}

/// Name of the simulated cluster.
const CLUSTER: &str = "default";

fn gpu_name(index: usize) -> String {
    format!("g{index:05}")
}

fn session_name(index: usize) -> String {
    format!("s{index:05}")
}

/// Runs a scenario.
pub fn run(scenario: &ClusterScenario) -> Result<ClusterReport, String> {
    scenario.check().map_err(|bad| bad.to_string())?;
    let packer: Packer = scenario.packer.parse()?;
    let mut run = ScenarioRun::new(scenario, packer);
    // The models of the first plan are loaded before the load begins.
    for _ in 0..4 {
        run.decide(Nanos::ZERO);
        run.finish_loads(Nanos::MAX);
    }
    run.decide(Nanos::ZERO);
    for second in 0..scenario.seconds {
        run.second(second);
    }
    Ok(run.finish())
}

impl ScenarioRun<'_> {
    fn new(scenario: &ClusterScenario, packer: Packer) -> ScenarioRun<'_> {
        let base = scenario.rates();
        let (mut view, mut sessions, mut sources) =
            (ClusterSnapshot::default(), Vec::new(), Vec::new());
        for gpu in 0..scenario.gpus {
            let record = BackendRecord { device: "gpu".to_string(), ..Default::default() };
            view.backends.insert(gpu_name(gpu), record);
            view.states.insert(gpu_name(gpu), BackendState::default());
        }
        for (index, (group, rate)) in base.iter().enumerate() {
            let group = &scenario.sessions[*group];
            let ms = |batch: u32| group.alpha_ms * f64::from(batch) + group.beta_ms;
            let digest = format!("group-{}", group.name);
            let config =
                model::ModelConfig { timeout_ms: Some(group.slo_ms), ..Default::default() };
            let record = ModelRecord {
                version: 1,
                digest: digest.clone(),
                bytes: 0,
                enabled: true,
                config,
                ..ModelRecord::default()
            };
            view.models.insert(session_name(index), record);
            let curve = (1..=group.batch_max).map(|batch| (batch, ms(batch))).collect();
            let profile = ProfileRecord { curve, memory_bytes: 0, marks: Vec::new() };
            view.profiles.insert(("gpu".to_string(), digest), profile);
            let nanos = |ms: f64| Nanos((ms * 1e6) as u64);
            sessions.push(ClusterSession {
                profile: BatchProfile::linear(
                    nanos(group.alpha_ms),
                    nanos(group.beta_ms),
                    group.batch_max as usize,
                ),
                budget: Nanos::from_millis(group.slo_ms),
                feeds: Vec::new(),
            });
            sources.push(QuerySource {
                rate: *rate,
                sessions_per_query: vec![(index, 1)],
                poisson: true,
            });
        }
        let settings = SchedulerSettings {
            epoch: Nanos::from_millis(scenario.epoch_s * 1000),
            spacing: Nanos::from_millis(scenario.spacing_s * 1000),
            rate_min: 0.1,
            placement: PlacementSettings {
                headroom: scenario.headroom,
                copies: 2,
                spread: false,
                packer,
                pooled: scenario.pooled,
            },
            ..SchedulerSettings::default()
        };
        let core = Core::resume(settings, Nanos::ZERO, &view);
        let mut cluster = ClusterSim::new(sessions, scenario.gpus, sources, scenario.seed, false);
        cluster.set_frontends(scenario.frontends);
        let mut run = ScenarioRun {
            cluster,
            core,
            meters: base.iter().map(|_| Rates::default()).collect(),
            reporter: LoadReporter::new(&Keys::new(CLUSTER), "f"),
            stored: KeyValues::default(),
            expiries: BTreeMap::new(),
            returns: BTreeMap::new(),
            loading: BTreeMap::new(),
            written: BTreeMap::new(),
            report: ClusterReport { name: scenario.name.clone(), ..ClusterReport::default() },
            needed_gpus: 0.0,
            random: Random::new(scenario.seed + 1),
            names: (0..base.len()).map(session_name).collect(),
            base,
            view,
            scenario,
        };
        let known =
            |rate: f64| ModelLoad { fast: rate, slow: rate, window: 2.0, ..Default::default() };
        let loads = run.names.iter().zip(&run.base);
        let models = loads.map(|(name, (_, rate))| (name.clone(), known(*rate))).collect();
        run.view.loads.insert("f".to_string(), LoadReport { models, ..LoadReport::default() });
        run
    }

    /// The factor that steps put on the rates of a group.
    fn step_factor(&self, group: usize, second: u64) -> f64 {
        let name = &self.scenario.sessions[group].name;
        let mine =
            |step: &&LoadStep| step.at_s <= second && (step.name.is_empty() || step.name == *name);
        self.scenario.steps.iter().rfind(mine).map_or(1.0, |step| step.factor)
    }

    fn factor(&self, group: usize, second: u64) -> f64 {
        let turn = second as f64 / self.scenario.wave_s * std::f64::consts::TAU;
        self.step_factor(group, second) * (1.0 + self.scenario.wave * turn.sin())
    }

    /// GPUs that the load of a second needs at least.
    fn needed(&self, second: u64) -> f64 {
        let rates =
            self.base.iter().map(|(group, rate)| (*group, rate * self.factor(*group, second)));
        judgement::gpus_needed(&self.scenario.sessions, rates)
    }

    /// The same for the rates that the plan in effect is for.
    fn needed_by_plan(&self) -> f64 {
        let planned = self.core.placement().rates();
        let group = |name: &str| Some(self.base.get(index_of(name)?)?.0);
        let rates = planned.iter().filter_map(|(name, rate)| Some((group(name)?, *rate)));
        judgement::gpus_needed(&self.scenario.sessions, rates)
    }

    fn second(&mut self, second: u64) {
        for index in 0..self.base.len() {
            let (group, rate) = self.base[index];
            self.cluster.set_rate(index, rate * self.factor(group, second));
        }
        for loss in self.scenario.losses.iter().filter(|loss| loss.at_s == second) {
            self.lose(loss, second);
        }
        // Frontends measure their load four times per second. The scheduler runs as often: its
        // agent follows every report.
        for part in 0..4 {
            let now = Nanos::from_millis(second * 1000 + part * 250);
            self.cluster.run_until(now);
            self.turn_events(now);
            self.finish_loads(now);
            self.observe(now);
            self.decide(now);
            self.react(now);
        }
        self.report.used.push(self.core.placement().used());
        self.needed_gpus += self.needed(second);
    }

    fn react(&mut self, now: Nanos) {
        let Some(step) = self.scenario.steps.first().filter(|step| step.factor > 1.0) else {
            return;
        };
        let before = step.at_s.checked_sub(1).and_then(|at| self.report.used.get(at as usize));
        let since = now.0.checked_sub(step.at_s * 1_000_000_000);
        let used = self.core.placement().used();
        if let (Some(before), Some(since)) = (before, since)
            && used > *before
            && self.loading.is_empty()
        {
            self.report.larger_plan_s.get_or_insert(since as f64 / 1e9);
        }
    }

    /// Loses as many different machines as the scenario says, of those that are up.
    fn lose(&mut self, loss: &GpuLoss, second: u64) {
        let mut up: Vec<usize> =
            (0..self.scenario.gpus).filter(|gpu| !self.returns.contains_key(gpu)).collect();
        let at = Nanos::from_millis(second * 1000);
        for _ in 0..loss.gpus.min(up.len()) {
            let gpu = up.swap_remove(self.random.below(up.len() as u64) as usize);
            self.cluster.lose(gpu);
            self.loading.retain(|(other, _), _| *other != gpu);
            self.expiries.insert(gpu, at + Nanos::from_millis(self.scenario.lease_ms));
            self.returns.insert(gpu, at + Nanos::from_millis(loss.for_s * 1000));
        }
    }

    fn turn_events(&mut self, now: Nanos) {
        let due = |(gpu, at): (&usize, &Nanos)| (*at <= now).then_some(*gpu);
        let back: Vec<usize> = self.returns.iter().filter_map(due).collect();
        let expired: Vec<usize> = self.expiries.iter().filter_map(due).collect();
        for gpu in expired {
            self.expiries.remove(&gpu);
            self.view.backends.remove(&gpu_name(gpu));
            self.view.states.remove(&gpu_name(gpu));
        }
        for gpu in back {
            // A machine that is back claims a lease of its own; the old one means nothing then.
            self.expiries.remove(&gpu);
            self.returns.remove(&gpu);
            self.cluster.restore(gpu);
            let record = BackendRecord { device: "gpu".to_string(), ..Default::default() };
            self.view.backends.insert(gpu_name(gpu), record);
            self.view.states.insert(gpu_name(gpu), BackendState::default());
            // Its process starts without models and loads those that are assigned to it.
            if let Some(assignment) = self.view.assignments.get(&gpu_name(gpu)).cloned() {
                self.load_missing(now, gpu, &assignment);
                self.refresh(gpu, &assignment);
            }
        }
    }

    /// Starts to load the assigned models that a machine does not have.
    fn load_missing(&mut self, now: Nanos, gpu: usize, assignment: &cluster::record::Assignment) {
        let state = self.view.states.entry(gpu_name(gpu)).or_default();
        let wanted: BTreeSet<&str> =
            assignment.models.iter().map(|share| share.model.as_str()).collect();
        state.models.retain(|model, _| wanted.contains(model.as_str()));
        for share in &assignment.models {
            let Some(session) = index_of(&share.model) else { continue };
            if !state.models.contains_key(&share.model) {
                state.models.insert(share.model.clone(), LoadState::Loading);
                let done = now + Nanos::from_millis(self.scenario.load_ms);
                self.loading.insert((gpu, session), done);
            }
        }
    }

    /// Measures the load, and reports what has changed of it.
    fn observe(&mut self, now: Nanos) {
        let mut report = LoadReport::default();
        for (index, count) in self.cluster.arrived().iter().enumerate() {
            let (fast, window, slow) = self.meters[index].tick(now, *count);
            let load = ModelLoad { fast, window, slow, arrived: *count, ..Default::default() };
            report.models.insert(self.names[index].clone(), load);
        }
        // The first plans are for the rates that the scenario gives.
        if now.0 < 2_000_000_000 {
            return;
        }
        let writes = self.reporter.next(now, &report);
        if writes.is_empty() {
            return;
        }
        let keys = Keys::new(CLUSTER);
        let short = |key: String| key.trim_start_matches(keys.all()).to_string();
        let writes = writes.into_iter().map(|(key, value)| (short(key), value));
        Arc::make_mut(&mut self.stored).extend(writes);
        self.view.loads = ClusterSnapshot::read(&self.stored).loads;
    }

    fn decide(&mut self, now: Nanos) {
        let started = Instant::now();
        let epoch = self.report.plans;
        let Some(decision) = self.core.step(now, &self.view) else { return };
        let took_ms = started.elapsed().as_secs_f64() * 1e3;
        if decision.plan.epoch > epoch {
            self.report.plans = decision.plan.epoch;
            self.report.plan_ms_max = self.report.plan_ms_max.max(took_ms);
            self.report.packing.push((self.core.placement().used(), self.needed_by_plan()));
        }
        self.report.moves = decision.plan.moves;
        self.apply(now, decision);
    }

    /// Applies what changed, as a watch would: assignments to backends, routes to frontends.
    fn apply(&mut self, now: Nanos, decision: Decision) {
        let changed: Vec<(String, Vec<u8>)> = decision
            .routes
            .iter()
            .map(|(name, route)| (format!("route/{name}"), encode(route).to_vec()))
            .filter(|(key, value)| self.written.get(key) != Some(value))
            .collect();
        let started = Instant::now();
        for (key, value) in &changed {
            let route: Option<cluster::record::RouteRecord> = decode(key, value);
            let session = key.strip_prefix("route/").and_then(index_of);
            if let (Some(route), Some(session)) = (route, session) {
                let targets = route.targets.iter();
                let target = |t: &TargetRecord| {
                    Some(RouteTarget {
                        gpu: index_of(&t.backend)?,
                        weight: t.weight,
                        least: t.min_batch as usize,
                    })
                };
                let targets: Vec<RouteTarget> = targets.filter_map(target).collect();
                self.cluster.route(session, &targets);
            }
        }
        let took_ms = started.elapsed().as_secs_f64() * 1e3;
        self.report.table_ms_max = self.report.table_ms_max.max(took_ms);
        self.written.extend(changed);
        // Frontends learn routes before a model is unloaded, so that requests go elsewhere.
        for (name, assignment) in &decision.assignments {
            let value = encode(assignment).to_vec();
            if self.written.get(name) == Some(&value) {
                continue;
            }
            self.written.insert(name.clone(), value);
            let Some(gpu) = index_of(name) else { continue };
            // A lost machine does nothing; it learns its assignment when it is back.
            if self.returns.contains_key(&gpu) {
                continue;
            }
            self.load_missing(now, gpu, assignment);
            self.refresh(gpu, assignment);
        }
        self.view.assignments = decision.assignments;
    }

    fn refresh(&mut self, gpu: usize, assignment: &cluster::record::Assignment) {
        let state = self.view.states.get(&gpu_name(gpu));
        let ready = |model: &str| {
            let load_state = state.and_then(|state| state.models.get(model));
            matches!(load_state, Some(LoadState::Ready { .. }))
        };
        let mut held = Vec::new();
        for share in assignment.models.iter().filter(|share| ready(&share.model)) {
            let Some(session) = index_of(&share.model) else { continue };
            let session_facts = &self.cluster.sessions[session];
            let alone = session_facts.profile.batch_for_objective(session_facts.budget);
            let batch = if share.rate > 0.0 { share.batch as usize } else { alone };
            held.push((session, batch.max(1)));
        }
        self.cluster.hold(gpu, &held);
    }

    fn finish_loads(&mut self, now: Nanos) {
        let due: Vec<(usize, usize)> =
            self.loading.iter().filter(|(_, at)| **at <= now).map(|(key, _)| *key).collect();
        let mut changed = BTreeSet::new();
        for (gpu, session) in due {
            self.loading.remove(&(gpu, session));
            if let Some(state) = self.view.states.get_mut(&gpu_name(gpu))
                && let Some(load_state) = state.models.get_mut(&self.names[session])
            {
                *load_state = LoadState::Ready { version: 1 };
                changed.insert(gpu);
            }
        }
        for gpu in changed {
            if let Some(assignment) = self.view.assignments.get(&gpu_name(gpu)).cloned() {
                self.refresh(gpu, &assignment);
            }
        }
    }

    fn finish(mut self) -> ClusterReport {
        // The last half of the last second, then the replies to what arrived in it.
        let end = Nanos::from_millis(self.scenario.seconds * 1000);
        self.cluster.run_until(Nanos(end.0 - 1));
        self.cluster.stop_sources();
        let slo_ms = self.scenario.sessions.iter().map(|group| group.slo_ms).max().unwrap_or(0);
        self.cluster.run_until(end + Nanos::from_millis(slo_ms + 2000));
        let percent = |bad: u64, sent_queries: u64| bad as f64 * 100.0 / sent_queries.max(1) as f64;
        let offered = |second: u64| -> f64 {
            let rates = self.base.iter();
            rates.map(|(group, rate)| rate * self.step_factor(*group, second)).sum()
        };
        let target = self.scenario.bad_percent_max;
        let rise = |(at_s, to): (u64, u64)| LoadRise {
            at_s,
            reaction_s: judgement::reaction(self.cluster.tenths(), at_s, to, target),
        };
        let rises = judgement::rises(self.scenario, offered).into_iter().map(rise).collect();
        let report = &mut self.report;
        report.rises = rises;
        let used: usize = report.used.iter().sum();
        report.needed_percent = 100.0 * self.needed_gpus / used.max(1) as f64;
        for counts in self.cluster.seconds() {
            report
                .seconds
                .push((counts.sent_queries as f64 / 1e3, percent(counts.bad, counts.sent_queries)));
        }
        report.outcomes = self.cluster.outcomes();
        report.requests = report.outcomes.arrivals;
        report.bad = report.outcomes.bad();
        report.violations.extend(self.cluster.violation());
        report.bad_percent = percent(report.bad, report.requests);
        report.record_bytes = self.written.iter().map(|(key, value)| key.len() + value.len()).sum();
        if report.bad_percent > self.scenario.bad_percent_max {
            report.violations.push(format!(
                "{:.3} % of requests missed their SLO, at most {} % may",
                report.bad_percent, self.scenario.bad_percent_max
            ));
        }
        self.report
    }
}

fn index_of(name: &str) -> Option<usize> {
    name.get(1..)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario() -> ClusterScenario {
        let text = "
            kind = 'cluster'
            gpus = 12
            seconds = 40
            [[sessions]]
            name = 'a'
            count = 6
            alpha_ms = 1.0
            beta_ms = 6.0
            batch_max = 32
            slo_ms = 100
            rate = 1500.0
            zipf = 0.9
            [[steps]]
            at_s = 15
            factor = 1.6
            [[losses]]
            at_s = 30
            gpus = 1
            for_s = 5
        ";
        assert!(ClusterScenario::is_one(text));
        toml::from_str(text).unwrap()
    }

    #[test]
    fn load_steps_and_losses_are_handled_and_runs_repeat() {
        let report = run(&scenario()).unwrap();
        assert!(report.violations.is_empty(), "{}", text(&report));
        assert_eq!(report.rises.len(), 1, "{}", text(&report));
        assert!(report.rises[0].reaction_s.is_some_and(|s| s <= 13.0), "{}", text(&report));
        assert_eq!(report.packing.len() as u64, report.plans, "{}", text(&report));
        for (gpus, needed) in &report.packing {
            assert!(*needed > 0.0 && *needed <= *gpus as f64, "{}", text(&report));
        }
        assert!(report.needed_percent > 20.0 && report.needed_percent < 100.0);
        let again = run(&scenario()).unwrap();
        assert_eq!(
            (report.requests, report.bad, report.used),
            (again.requests, again.bad, again.used)
        );
    }
}
