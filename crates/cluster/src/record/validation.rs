//! Checks every value that is read from the store, in one place.
//!
//! Anybody who has the store's password can write to it, and so can a writer of another release. A
//! number that cannot be true becomes the nearest one that can. A value that makes no sense is
//! ignored: logged once, with its kind and key, and counted.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{LazyLock, Mutex, PoisonError};

use api::canary::SHARE_MAX_PERCENT;
use model::ModelConfig;
use model::repository::is_valid_name;
use serde::de::DeserializeOwned;

use super::canary::{
    BUCKET_MAX, CanaryLoad, CanaryProgress, CanaryRecord, VersionCounts, is_served_name,
};
use super::{
    AVOIDED_MAX, Assignment, BackendRecord, BackendState, ColdStartLoad, FrontendRecord,
    LoadReport, LoadState, ModelLoad, ModelRecord, OTHER_VERSIONS_MAX, PlanRecord, ProfileRecord,
    QueryLoad, RouteRecord, SplitRecord, is_tombstone,
};
use crate::candidate::CandidateRecord;
use crate::query::spec::{QuerySpec, STAGES_MAX};
use crate::store::VALUE_MAX;

/// Maximum number of records of one kind, and of names in one record.
pub const RECORDS_MAX: usize = 100_000;
/// Requests per second of one model at one frontend.
const RATE_MAX: f64 = 1e7;
/// Times, in milliseconds: a month.
const TIME_MAX_MS: f64 = 2.6e9;
/// The shortest run of a batch, in milliseconds: a microsecond.
const RUN_MIN_MS: f64 = 1e-3;
/// Points of a curve.
const CURVE_MAX: usize = 256;
/// Requests per batch.
const BATCH_MAX: u32 = 1 << 16;
/// Counts, numbers of versions and of plans: large, and far from an overflow.
const COUNT_MAX: u64 = 1 << 53;
/// Memory of a machine, in bytes.
const MEMORY_MAX: u64 = 1 << 50;
/// Texts: addresses and kinds of devices; reasons.
const TEXT_MAX: usize = 256;
const REASON_MAX: usize = 4096;

/// A record as it comes from the store.
pub trait StoredRecord: DeserializeOwned {
    /// Its kind, as in its key.
    const KIND: &'static str;

    /// Moves numbers into their ranges.
    ///
    /// # Errors
    /// When the record makes no sense.
    fn limit(&mut self) -> Result<(), String>;
}

/// Reads a stored value; `None` for one that says that the record was deleted.
///
/// # Errors
/// When it is damaged.
pub fn read<T: StoredRecord>(value: &[u8]) -> Result<Option<T>, String> {
    if value.len() > VALUE_MAX {
        return Err(format!("it has {} bytes, more than {VALUE_MAX}", value.len()));
    }
    if is_tombstone(value) {
        return Ok(None);
    }
    let mut record: T = serde_json::from_slice(value).map_err(|error| error.to_string())?;
    record.limit()?;
    Ok(Some(record))
}

/// Values already logged, by key.
const LOGGED_MAX: usize = 4096;

#[derive(Default)]
struct DamageLog {
    logged: HashMap<String, u64>,
    counts: BTreeMap<&'static str, u64>,
}

/// What this process found damaged.
static DAMAGE: LazyLock<Mutex<DamageLog>> = LazyLock::new(Mutex::default);

/// Logs and counts a damaged value, once for each value of a key.
pub(super) fn report(kind: &'static str, key: &str, value: &[u8], error: &str) {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    let hash = hasher.finish();
    let mut damage = DAMAGE.lock().unwrap_or_else(PoisonError::into_inner);
    if damage.logged.len() >= LOGGED_MAX {
        damage.logged.clear();
    }
    if damage.logged.insert(format!("{kind} {key}"), hash) == Some(hash) {
        return;
    }
    *damage.counts.entry(kind).or_default() += 1;
    drop(damage);
    tracing::warn!(kind, key, error, "damaged record ignored");
}

/// Damaged values found so far, by kind.
pub fn damaged() -> BTreeMap<&'static str, u64> {
    DAMAGE.lock().unwrap_or_else(PoisonError::into_inner).counts.clone()
}

/// Writes the number of damaged values for Prometheus.
pub fn write_metrics(text: &mut String) {
    let name = "atoll_cluster_damaged_records_total";
    let help = "Values of the store that made no sense and were ignored";
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
    for (kind, count) in damaged() {
        let _ = writeln!(text, "{name}{{kind=\"{kind}\"}} {count}");
    }
}

pub(super) fn clamp(value: &mut f64, min: f64, max: f64) {
    *value = if value.is_nan() { min } else { value.clamp(min, max) };
}

fn check_names<'a>(names: impl ExactSizeIterator<Item = &'a String>) -> Result<(), String> {
    check_names_by(names, is_valid_name)
}

/// Checks names under which backends serve models and canaries.
fn check_served_names<'a>(names: impl ExactSizeIterator<Item = &'a String>) -> Result<(), String> {
    check_names_by(names, is_served_name)
}

fn check_names_by<'a>(
    mut names: impl ExactSizeIterator<Item = &'a String>,
    is_name: fn(&str) -> bool,
) -> Result<(), String> {
    if names.len() > RECORDS_MAX {
        return Err(format!("it has {} names, more than {RECORDS_MAX}", names.len()));
    }
    match names.find(|name| !is_name(name)) {
        Some(name) => Err(format!("{} is no name", shortened(name))),
        None => Ok(()),
    }
}

/// The start of a text, quoted, for an error message.
fn shortened(text: &str) -> String {
    format!("{:?}", text.chars().take(64).collect::<String>())
}

pub(super) fn check_text(what: &str, text: &str) -> Result<(), String> {
    let plain = text.len() <= TEXT_MAX && !text.chars().any(char::is_control);
    if plain { Ok(()) } else { Err(format!("{what} {} is not plausible", shortened(text))) }
}

pub(super) fn truncate(reason: &mut String) {
    if reason.len() > REASON_MAX {
        *reason = reason.chars().take(REASON_MAX / 4).collect();
    }
}

/// Addresses or names of backends: no more than are ever written, and only plausible ones.
fn limit_avoided(backends: &mut Vec<String>) {
    backends.truncate(AVOIDED_MAX);
    backends.retain(|backend| check_text("the backend", backend).is_ok());
}

fn limit_config(config: &mut ModelConfig) {
    let most = TIME_MAX_MS as u64;
    config.timeout_ms = config.timeout_ms.map(|ms| ms.min(most));
    config.slo_ms = config.slo_ms.map(|ms| ms.min(most));
    config.max_batch_size = config.max_batch_size.min(BATCH_MAX as usize);
}

impl StoredRecord for BackendRecord {
    const KIND: &'static str = "backends";

    fn limit(&mut self) -> Result<(), String> {
        self.memory_bytes = self.memory_bytes.min(MEMORY_MAX);
        check_text("the address", &self.grpc)?;
        check_text("the address", &self.http)?;
        check_text("the device", &self.device)
    }
}

impl StoredRecord for BackendState {
    const KIND: &'static str = "states";

    fn limit(&mut self) -> Result<(), String> {
        check_served_names(self.models.keys())?;
        check_served_names(self.failed.keys())?;
        for state in self.models.values_mut() {
            match state {
                LoadState::Loading => {}
                LoadState::Ready { version } => *version = (*version).min(COUNT_MAX),
                LoadState::Failed { version, reason } => {
                    *version = (*version).min(COUNT_MAX);
                    truncate(reason);
                }
            }
        }
        for update in self.failed.values_mut() {
            update.version = update.version.min(COUNT_MAX);
            truncate(&mut update.reason);
        }
        Ok(())
    }
}

impl StoredRecord for FrontendRecord {
    const KIND: &'static str = "frontends";

    fn limit(&mut self) -> Result<(), String> {
        check_text("the address", &self.grpc)?;
        check_text("the address", &self.http)
    }
}

impl ModelLoad {
    fn limit(&mut self) {
        let ModelLoad { fast, window, slow, arrived, answered, late, refused, retried, p99_ms } =
            self;
        clamp(fast, 0.0, RATE_MAX);
        clamp(slow, 0.0, RATE_MAX);
        clamp(window, 0.0, 3600.0);
        clamp(p99_ms, 0.0, TIME_MAX_MS);
        for count in [arrived, answered, late, refused, retried] {
            *count = (*count).min(COUNT_MAX);
        }
    }
}

impl QueryLoad {
    fn limit(&mut self) {
        self.requests.limit();
        clamp(&mut self.completed, 0.0, RATE_MAX);
        clamp(&mut self.between_ms, 0.0, TIME_MAX_MS);
        for stage in self.stages.values_mut() {
            clamp(&mut stage.slow, 0.0, RATE_MAX);
            clamp(&mut stage.p99_ms, 0.0, TIME_MAX_MS);
        }
    }
}

impl VersionCounts {
    /// Counts of requests that cannot have been: more failures than requests, or more replies.
    fn limit(&mut self) {
        self.requests = self.requests.min(COUNT_MAX);
        self.failures = self.failures.min(self.requests);
        self.latencies.retain(|bucket, _| *bucket <= BUCKET_MAX);
        let mut left = self.requests;
        for count in self.latencies.values_mut() {
            *count = (*count).min(left);
            left -= *count;
        }
        self.latencies.retain(|_, count| *count > 0);
    }
}

impl CanaryLoad {
    fn limit(&mut self) {
        self.number = self.number.min(COUNT_MAX);
        self.stable.limit();
        self.canary.limit();
    }
}

impl StoredRecord for CanaryProgress {
    const KIND: &'static str = "canaries";

    fn limit(&mut self) -> Result<(), String> {
        self.number = self.number.min(COUNT_MAX);
        self.elapsed_ms = self.elapsed_ms.min(TIME_MAX_MS as u64);
        self.stable.limit();
        self.canary.limit();
        truncate(&mut self.why);
        Ok(())
    }
}

impl CanaryRecord {
    fn limit(&mut self) {
        self.number = self.number.min(COUNT_MAX);
        clamp(&mut self.share, 0.0, SHARE_MAX_PERCENT / 100.0);
        clamp(&mut self.max_errors, 1e-3, 1.0);
        clamp(&mut self.max_slowdown, 0.0, 100.0);
        // One that is too short would promote what nobody has looked at.
        self.promote_after_ms = self.promote_after_ms.map(|ms| ms.clamp(1000, TIME_MAX_MS as u64));
    }
}

impl ModelRecord {
    /// Limits the canary. One that makes no sense is ignored: the version in force serves.
    fn limit_canary(&mut self) {
        if let Some(canary) = &mut self.canary {
            canary.limit();
            let is_in_force = canary.version == self.version;
            let exists = self.others.iter().any(|other| other.version == canary.version);
            if is_in_force != canary.promoted || !(is_in_force || exists) {
                self.canary = None;
            }
        }
        if let Some(ended) = &mut self.ended_canary {
            ended.version = ended.version.min(COUNT_MAX);
            ended.number = ended.number.min(COUNT_MAX);
            truncate(&mut ended.reason);
        }
    }
}

impl StoredRecord for LoadReport {
    const KIND: &'static str = "loads";

    fn limit(&mut self) -> Result<(), String> {
        check_served_names(self.models.keys())?;
        check_names(self.queries.keys())?;
        check_names(self.canaries.keys())?;
        self.models.values_mut().for_each(ModelLoad::limit);
        self.queries.values_mut().for_each(QueryLoad::limit);
        check_names(self.waiting.keys())?;
        self.waiting.values_mut().for_each(|count| *count = (*count).min(COUNT_MAX));
        self.cold_starts.iter_mut().for_each(ColdStartLoad::limit);
        self.canaries.values_mut().for_each(CanaryLoad::limit);
        limit_avoided(&mut self.ejected);
        Ok(())
    }
}

fn check_digest(digest: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    match digest.len() <= 128 && digest.bytes().all(is_plain) {
        true => Ok(()),
        false => Err(format!("{} is no digest", shortened(digest))),
    }
}

fn check_version(version: u64) -> Result<(), String> {
    match (1..=COUNT_MAX).contains(&version) {
        true => Ok(()),
        false => Err(format!("{version} is no version")),
    }
}

impl StoredRecord for ModelRecord {
    const KIND: &'static str = "models";

    fn limit(&mut self) -> Result<(), String> {
        check_version(self.version)?;
        check_digest(&self.digest)?;
        if self.highest > COUNT_MAX {
            return Err(format!("{} is no version", self.highest));
        }
        self.bytes = self.bytes.min(MEMORY_MAX);
        limit_config(&mut self.config);
        self.others.truncate(2 * OTHER_VERSIONS_MAX);
        for other in &mut self.others {
            check_version(other.version)?;
            check_digest(&other.digest)?;
            other.bytes = other.bytes.min(MEMORY_MAX);
            limit_config(&mut other.config);
        }
        self.limit_canary();
        Ok(())
    }
}

impl StoredRecord for ProfileRecord {
    const KIND: &'static str = "profiles";

    fn limit(&mut self) -> Result<(), String> {
        if self.curve.len() > CURVE_MAX {
            return Err(format!("its curve has {} points", self.curve.len()));
        }
        let ascending = self.curve.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let batches = self.curve.iter().all(|(batch, _)| (1..=BATCH_MAX).contains(batch));
        if !ascending || !batches {
            return Err("the batch sizes of its curve do not ascend from 1".to_string());
        }
        self.curve.iter_mut().for_each(|(_, ms)| clamp(ms, RUN_MIN_MS, TIME_MAX_MS));
        self.memory_bytes = self.memory_bytes.min(MEMORY_MAX);
        self.marks.truncate(RECORDS_MAX);
        self.marks.iter_mut().for_each(|(_, share)| clamp(share, 0.0, 1.0));
        Ok(())
    }
}

impl StoredRecord for Assignment {
    const KIND: &'static str = "assignments";

    fn limit(&mut self) -> Result<(), String> {
        if self.models.len() > RECORDS_MAX {
            return Err(format!("it has {} models", self.models.len()));
        }
        self.epoch = self.epoch.min(COUNT_MAX);
        clamp(&mut self.cycle_ms, 0.0, TIME_MAX_MS);
        for assigned in &mut self.models {
            if !is_served_name(&assigned.model) {
                return Err(format!("{} is no model", shortened(&assigned.model)));
            }
            assigned.version = assigned.version.min(COUNT_MAX);
            assigned.batch = assigned.batch.min(BATCH_MAX);
            assigned.min_batch = assigned.min_batch.min(assigned.batch);
            clamp(&mut assigned.rate, 0.0, RECORDS_MAX as f64 * RATE_MAX);
        }
        Ok(())
    }
}

impl StoredRecord for RouteRecord {
    const KIND: &'static str = "routes";

    fn limit(&mut self) -> Result<(), String> {
        if self.targets.len() > RECORDS_MAX {
            return Err(format!("it has {} targets", self.targets.len()));
        }
        self.epoch = self.epoch.min(COUNT_MAX);
        if let Some(rate) = &mut self.rate_max {
            clamp(rate, 0.0, RECORDS_MAX as f64 * RATE_MAX);
        }
        for target in &mut self.targets {
            check_text("the address", &target.grpc)?;
            check_text("the address", &target.http)?;
            clamp(&mut target.weight, 0.0, RECORDS_MAX as f64 * RATE_MAX);
            clamp(&mut target.batch_ms, 0.0, TIME_MAX_MS);
            clamp(&mut target.cycle_ms, 0.0, TIME_MAX_MS);
            target.batch = target.batch.min(BATCH_MAX);
            target.min_batch = target.min_batch.min(target.batch);
            target.version = target.version.min(COUNT_MAX);
        }
        Ok(())
    }
}

impl StoredRecord for QuerySpec {
    const KIND: &'static str = "queries";

    fn limit(&mut self) -> Result<(), String> {
        // Whether it is a query is checked where it is used.
        match self.stages.len() <= STAGES_MAX && self.slo_ms.is_finite() {
            true => Ok(()),
            false => Err("it has too many stages, or no objective".to_string()),
        }
    }
}

impl StoredRecord for SplitRecord {
    const KIND: &'static str = "splits";

    fn limit(&mut self) -> Result<(), String> {
        if self.stages.len() > STAGES_MAX {
            return Err(format!("it has {} stages", self.stages.len()));
        }
        clamp(&mut self.cost, 0.0, f64::MAX);
        for stage in self.stages.values_mut() {
            clamp(&mut stage.budget_ms, 0.0, TIME_MAX_MS);
            clamp(&mut stage.reserve_ms, 0.0, TIME_MAX_MS);
            clamp(&mut stage.fan_out, 0.0, RATE_MAX);
        }
        Ok(())
    }
}

impl StoredRecord for CandidateRecord {
    const KIND: &'static str = "candidates";

    fn limit(&mut self) -> Result<(), String> {
        if !is_valid_name(&self.model) {
            return Err(format!("{} is no model", shortened(&self.model)));
        }
        check_digest(&self.digest)?;
        limit_config(&mut self.config);
        self.tried.truncate(RECORDS_MAX);
        Ok(())
    }
}

impl StoredRecord for PlanRecord {
    const KIND: &'static str = "plan";

    fn limit(&mut self) -> Result<(), String> {
        self.epoch = self.epoch.min(COUNT_MAX);
        self.moves = self.moves.min(COUNT_MAX);
        clamp(&mut self.bound, 0.0, f64::MAX);
        clamp(&mut self.scale, 0.0, f64::MAX);
        clamp(&mut self.plan_ms, 0.0, TIME_MAX_MS);
        self.unattainable.truncate(RECORDS_MAX);
        self.failed.values_mut().for_each(truncate);
        limit_avoided(&mut self.avoided);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{ScalingRecord, decode, encode};

    fn load(text: &str) -> Result<Option<LoadReport>, String> {
        read(text.as_bytes())
    }

    fn of_model(fields: &str) -> String {
        format!("{{\"models\":{{\"m\":{{{fields}}}}}}}")
    }

    #[test]
    fn absurd_loads_are_limited_or_ignored() {
        let base = "\"window\":2,\"slow\":1,\"arrived\":1,\"answered\":1,\"late\":0,\
                    \"refused\":0,\"retried\":0,\"p99_ms\":1";
        for (fast, expected) in [("1e308", RATE_MAX), ("-1e308", 0.0), ("12.5", 12.5)] {
            let report = load(&of_model(&format!("\"fast\":{fast},{base}"))).unwrap().unwrap();
            assert_eq!(report.models["m"].fast, expected, "{fast}");
        }
        for fast in ["NaN", "1e999", "\"1\"", "null", "[]"] {
            assert!(load(&of_model(&format!("\"fast\":{fast},{base}"))).is_err(), "{fast}");
        }
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let large = format!("{{\"models\":{{}},\"more\":\"{}\"}}", "x".repeat(VALUE_MAX));
        let odd = "{\"models\":{\"../m\":null}}";
        for text in ["", "{", "\u{0}", &deep, &large, odd] {
            assert!(load(text).is_err(), "{}", shortened(text));
        }
    }

    #[test]
    fn reports_and_plans_name_no_more_avoided_backends_than_are_written() {
        let odd = ["a:1".to_string(), "x".repeat(TEXT_MAX + 1), "line\nbreak".to_string()];
        let many = (0..2 * AVOIDED_MAX).map(|index| format!("h:{index}"));
        let report =
            LoadReport { ejected: odd.into_iter().chain(many).collect(), ..LoadReport::default() };
        let plan = PlanRecord { avoided: report.ejected.clone(), ..PlanRecord::default() };
        let report: LoadReport = decode("loads/f", &encode(&report)).expect("a report");
        let plan: PlanRecord = decode("plan", &encode(&plan)).expect("a plan");
        for avoided in [report.ejected, plan.avoided] {
            assert_eq!(avoided.len(), AVOIDED_MAX - 2);
            assert_eq!(avoided[..2], ["a:1", "h:0"]);
        }
    }

    #[test]
    fn absurd_profiles_and_records_are_ignored() {
        let profile = |curve: &str| {
            let value = format!("{{\"curve\":{curve}}}");
            read::<ProfileRecord>(value.as_bytes()).ok().flatten().map(|profile| profile.curve)
        };
        assert_eq!(profile("[[1,1e-300],[2,-5]]"), Some(vec![(1, 1e-3), (2, 1e-3)]));
        for curve in ["[[0,1]]", "[[2,1],[1,1]]", "[[4000000000,1]]"] {
            assert_eq!(profile(curve), None, "{curve}");
        }
        let model = |version: &str| {
            let value =
                format!("{{\"version\":{version},\"digest\":\"a\",\"bytes\":1,\"enabled\":true}}");
            read::<ModelRecord>(value.as_bytes())
        };
        assert!(model("1").unwrap().is_some());
        for version in ["0", "18446744073709551615", "-1", "1.5"] {
            assert!(model(version).is_err(), "{version}");
        }
    }

    #[test]
    fn absurd_canaries_are_limited_and_never_hurt_the_version_in_force() {
        let model = |canary: &str| {
            let other = "{\"version\":2,\"digest\":\"b\",\"bytes\":1}";
            let value = format!(
                "{{\"version\":1,\"digest\":\"a\",\"bytes\":1,\"enabled\":true,\
                 \"others\":[{other}],\"canary\":{canary}}}"
            );
            read::<ModelRecord>(value.as_bytes()).unwrap().expect("a record")
        };
        let canary = |version: u64, share: &str, promoted: bool| {
            format!(
                "{{\"version\":{version},\"number\":18446744073709551615,\"share\":{share},\
                 \"promote_after_ms\":0,\"max_errors\":-1,\"max_slowdown\":1e300,\
                 \"promoted\":{promoted}}}"
            )
        };
        let limited = model(&canary(2, "1e308", false)).canary.expect("a canary");
        assert_eq!((limited.share, limited.max_errors, limited.max_slowdown), (0.9, 1e-3, 100.0));
        assert_eq!((limited.promote_after_ms, limited.number), (Some(1000), COUNT_MAX));
        for absurd in [canary(3, "0.1", false), canary(1, "0.1", false), canary(2, "0.1", true)] {
            let record = model(&absurd);
            assert_eq!((record.version, record.canary), (1, None), "{absurd}");
        }
        let load = "{\"models\":{\"m@2\":[1,1,1,1,1,0,0,0,1]},\"canaries\":{\"m\":{\"number\":1,\
                    \"stable\":{\"requests\":5,\"failures\":9,\"latencies\":{\"1\":3,\"2\":99,\
                    \"65535\":1}},\"canary\":{\"requests\":0,\"failures\":0}}}}";
        let load = read::<LoadReport>(load.as_bytes()).unwrap().expect("a report");
        let stable = &load.canaries["m"].stable;
        assert_eq!((stable.failures, stable.replies()), (5, 5));
        assert_eq!(stable.latencies, [(1, 3), (2, 2)].into());
        assert!(read::<LoadReport>(b"{\"models\":{},\"canaries\":{\"m@2\":{}}}").is_err());
    }

    #[test]
    fn a_damaged_value_is_counted_once() {
        let count = || damaged().get("scaling").copied().unwrap_or(0);
        let before = count();
        for _ in 0..5 {
            assert_eq!(decode::<ScalingRecord>("scaling", b"garbage"), None);
        }
        assert_eq!(count(), before + 1);
        assert_eq!(decode::<ScalingRecord>("scaling", b"other garbage"), None);
        assert_eq!(count(), before + 2);
        let mut text = String::new();
        write_metrics(&mut text);
        let row = format!("atoll_cluster_damaged_records_total{{kind=\"scaling\"}} {}", count());
        assert!(text.contains(&row), "{text}");
    }
}
