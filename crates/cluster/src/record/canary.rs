//! A version of a model that is served beside the one in force: the canary.
//!
//! It is part of the model's record, so that a promotion or a rollback is one write. Backends and
//! plans know it as a model of its own, under a name that no model can have: `digits@7`. So it has
//! its own copies, route, measurements and counters, and nothing of the version in force changes
//! until the canary is promoted.

use std::borrow::Cow;
use std::collections::BTreeMap;

use api::canary::VersionFigures;
use api::{CanaryOptions, canary::CanaryState};
use base::Nanos;
use model::repository::is_valid_name;
use serde::{Deserialize, Serialize};

use super::{ModelRecord, VersionRecord};

/// Between the name of a model and the version of its canary.
const SEPARATOR: char = '@';

/// The name under which backends serve a version as canary.
pub fn served_name(model: &str, version: u64) -> String {
    format!("{model}{SEPARATOR}{version}")
}

/// The model of a name under which backends serve it, and the version where that is a canary.
pub fn split_served(name: &str) -> (&str, Option<u64>) {
    match name.split_once(SEPARATOR) {
        Some((model, version)) => (model, Some(version.parse().unwrap_or(0))),
        None => (name, None),
    }
}

/// Whether backends serve a model or a canary under such a name.
pub fn is_served_name(name: &str) -> bool {
    match name.split_once(SEPARATOR) {
        None => is_valid_name(name),
        Some((model, version)) => {
            let number: Option<u64> = version.parse().ok();
            // One way to write a number only.
            is_valid_name(model) && number.is_some_and(|n| n > 0 && n.to_string() == version)
        }
    }
}

/// A version that is served beside the one in force.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CanaryRecord {
    /// The version.
    pub version: u64,
    /// Number of this canary among those of the model: what was counted of another one is not its.
    pub number: u64,
    /// Its share of the requests, from 0 to 1.
    pub share: f64,
    /// Milliseconds after which it is promoted if it is good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promote_after_ms: Option<u64>,
    /// Share of its requests that may fail or be late beyond the share of the version in force.
    pub max_errors: f64,
    /// By how much it may be slower: 0.2 for a fifth.
    pub max_slowdown: f64,
    /// Whether it is in force already, and stays until backends have replaced the version before.
    #[serde(default, skip_serializing_if = "is_false")]
    pub promoted: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl CanaryRecord {
    /// The canary `number` of a model.
    pub fn new(version: u64, number: u64, options: &CanaryOptions) -> CanaryRecord {
        CanaryRecord {
            version,
            number,
            share: options.share_percent / 100.0,
            promote_after_ms: options.promote_after_ms,
            max_errors: options.max_errors_percent / 100.0,
            max_slowdown: options.max_slowdown_percent / 100.0,
            promoted: false,
        }
    }
}

/// What became of a canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryOutcome {
    /// It was put in force.
    Promoted,
    /// It was worse than the version in force.
    RolledBack,
    /// An operator ended it, or it could not be served.
    Aborted,
    /// Another version was put in force, or this one deleted.
    Replaced,
}

impl CanaryOutcome {
    /// All of them.
    pub const ALL: [CanaryOutcome; 4] = [
        CanaryOutcome::Promoted,
        CanaryOutcome::RolledBack,
        CanaryOutcome::Aborted,
        CanaryOutcome::Replaced,
    ];

    /// The name in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            CanaryOutcome::Promoted => "promoted",
            CanaryOutcome::RolledBack => "rolled_back",
            CanaryOutcome::Aborted => "aborted",
            CanaryOutcome::Replaced => "replaced",
        }
    }

    /// The state of a canary that ended so.
    pub const fn state(self) -> CanaryState {
        match self {
            CanaryOutcome::Promoted => CanaryState::Promoted,
            CanaryOutcome::RolledBack => CanaryState::RolledBack,
            CanaryOutcome::Aborted => CanaryState::Aborted,
            CanaryOutcome::Replaced => CanaryState::Replaced,
        }
    }
}

/// The last canary of a model that was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedCanary {
    /// Its version.
    pub version: u64,
    /// Its number.
    pub number: u64,
    /// What became of it.
    pub outcome: CanaryOutcome,
    /// Why.
    pub reason: String,
}

impl ModelRecord {
    /// Number of the next canary.
    fn next_canary(&self) -> u64 {
        let running = self.canary.as_ref().map_or(0, |canary| canary.number);
        let ended = self.ended_canary.as_ref().map_or(0, |ended| ended.number);
        running.max(ended) + 1
    }

    /// The version that is the canary.
    pub fn canary_version(&self) -> Option<VersionRecord> {
        let version = self.canary.as_ref()?.version;
        match version == self.version {
            true => Some(self.in_force()),
            false => self.others.iter().find(|other| other.version == version).cloned(),
        }
    }

    /// The canary that has not been decided.
    pub fn running_canary(&self) -> Option<&CanaryRecord> {
        self.canary.as_ref().filter(|canary| !canary.promoted)
    }

    /// The record with `version`, which may be new, as canary. A canary before is replaced.
    pub fn with_canary(&self, version: VersionRecord, options: &CanaryOptions) -> ModelRecord {
        let number = version.version;
        let mut after = self.without_canary(
            CanaryOutcome::Replaced,
            &format!("version {number} became the canary"),
        );
        after.highest = after.highest_version().max(number);
        after.add_other(version);
        after.canary = Some(CanaryRecord::new(number, self.next_canary(), options));
        after
    }

    /// The record without its canary, which ended so. One that was promoted stays promoted.
    pub fn without_canary(&self, outcome: CanaryOutcome, reason: &str) -> ModelRecord {
        let mut after = self.clone();
        let Some(canary) = after.canary.take() else { return after };
        if !canary.promoted {
            let CanaryRecord { version, number, .. } = canary;
            let reason = reason.to_string();
            after.ended_canary = Some(EndedCanary { version, number, outcome, reason });
        }
        after
    }

    /// The record with its canary in force. The canary stays in service until backends have
    /// replaced the version before.
    pub fn with_promoted_canary(&self, reason: &str) -> Option<ModelRecord> {
        let canary = self.running_canary()?.clone();
        let ended = self.without_canary(CanaryOutcome::Promoted, reason);
        let after = ended.replaced_by(self.canary_version()?);
        let canary = Some(CanaryRecord { promoted: true, ..canary });
        Some(ModelRecord { canary, enabled: self.enabled, ..after })
    }

    /// What backends serve under `name`, which is that of this model or of its canary.
    pub fn served(&self, name: &str) -> Option<Cow<'_, ModelRecord>> {
        let Some(version) = split_served(name).1 else { return Some(Cow::Borrowed(self)) };
        let canary = self.canary_version().filter(|canary| canary.version == version)?;
        let VersionRecord { version, digest, bytes, config } = canary;
        let enabled = self.enabled;
        let canary = ModelRecord { version, digest, bytes, enabled, config, ..Default::default() };
        Some(Cow::Owned(canary))
    }
}

/// Adds the canaries of `models` as models under their own names.
pub fn with_canaries(mut models: BTreeMap<String, ModelRecord>) -> BTreeMap<String, ModelRecord> {
    let canary = |(name, record): (&String, &ModelRecord)| {
        let served = served_name(name, record.canary.as_ref()?.version);
        let canary = record.served(&served)?.into_owned();
        Some((served, canary))
    };
    let canaries: Vec<(String, ModelRecord)> = models.iter().filter_map(canary).collect();
    models.extend(canaries);
    models
}

/// Buckets of latencies: each reaches 9 % further than the one before, from a microsecond on.
const BUCKETS_PER_OCTAVE: f64 = 8.0;
/// The bucket of an hour, and of all that is longer.
pub const BUCKET_MAX: u16 = 254;
const BUCKET_BASE_MS: f64 = 1e-3;

/// Where a bucket starts, in milliseconds.
fn bucket_start(bucket: u16) -> f64 {
    BUCKET_BASE_MS * (f64::from(bucket) / BUCKETS_PER_OCTAVE).exp2()
}

/// What a frontend counted of one of two versions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VersionCounts {
    /// Requests that were drawn for it and have ended.
    pub requests: u64,
    /// Those that failed or were late.
    pub failures: u64,
    /// Replies by bucket of their latency.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub latencies: BTreeMap<u16, u64>,
}

impl VersionCounts {
    /// Counts a reply.
    pub fn reply(&mut self, latency: Nanos, late: bool) {
        self.requests += 1;
        self.failures += u64::from(late);
        let octaves = (latency.0 as f64 / 1e6 / BUCKET_BASE_MS).max(1.0).log2();
        let bucket = (octaves * BUCKETS_PER_OCTAVE).floor().min(f64::from(BUCKET_MAX)) as u16;
        *self.latencies.entry(bucket).or_default() += 1;
    }

    /// Counts a failure without a reply.
    pub fn fail(&mut self) {
        self.requests += 1;
        self.failures += 1;
    }

    /// Adds what another frontend counted.
    pub fn add(&mut self, other: &VersionCounts) {
        self.requests += other.requests;
        self.failures += other.failures;
        for (bucket, count) in &other.latencies {
            *self.latencies.entry(*bucket).or_default() += count;
        }
    }

    /// Number of replies.
    pub fn replies(&self) -> u64 {
        self.latencies.values().sum()
    }

    /// The share of its requests that failed; 0 without any.
    pub fn failure_share(&self) -> f64 {
        if self.requests == 0 { 0.0 } else { self.failures as f64 / self.requests as f64 }
    }

    /// The latency in milliseconds that a share `quantile` of the replies does not exceed; 0
    /// without replies.
    pub fn quantile_ms(&self, quantile: f64) -> f64 {
        let wanted = quantile * self.replies() as f64;
        let mut below = 0.0;
        for (bucket, count) in &self.latencies {
            let count = *count as f64;
            if below + count >= wanted && count > 0.0 {
                let inside = ((wanted - below) / count).clamp(0.0, 1.0);
                return bucket_start(*bucket) * (inside / BUCKETS_PER_OCTAVE).exp2();
            }
            below += count;
        }
        0.0
    }

    /// About how many replies took longer than `ms`.
    pub fn replies_above(&self, ms: f64) -> f64 {
        let above = |(bucket, count): (&u16, &u64)| {
            // The part of the bucket, which is even on a logarithmic scale, above the limit.
            let octaves = (ms.max(1e-9) / bucket_start(*bucket)).log2();
            *count as f64 * (1.0 - octaves * BUCKETS_PER_OCTAVE).clamp(0.0, 1.0)
        };
        self.latencies.iter().map(above).sum()
    }

    /// The figures for clients.
    pub fn figures(&self) -> VersionFigures {
        let rounded = |ms: f64| (ms * 1000.0).round() / 1000.0;
        VersionFigures {
            requests: self.requests,
            failures: self.failures,
            median_ms: rounded(self.quantile_ms(0.5)),
            p95_ms: rounded(self.quantile_ms(0.95)),
        }
    }
}

/// What a frontend counted of both versions since the canary started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CanaryLoad {
    /// Number of the canary.
    pub number: u64,
    /// The version in force.
    pub stable: VersionCounts,
    /// The canary.
    pub canary: VersionCounts,
}

/// What the leader knows of a canary, for the next leader and for those who ask.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CanaryProgress {
    /// Number of the canary.
    pub number: u64,
    /// For how long it was served.
    pub elapsed_ms: u64,
    /// What all frontends counted of the version in force.
    pub stable: VersionCounts,
    /// What they counted of the canary.
    pub canary: VersionCounts,
    /// What is missing for a decision.
    pub why: String,
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;

    fn version(number: u64) -> VersionRecord {
        let digest = format!("sha{number}");
        VersionRecord { version: number, digest, bytes: number, config: Default::default() }
    }

    fn record(number: u64) -> ModelRecord {
        let digest = format!("sha{number}");
        let bytes = number;
        ModelRecord { version: number, digest, bytes, enabled: true, ..ModelRecord::default() }
    }

    #[test]
    fn names_of_canaries_are_no_names_of_models() {
        assert_eq!(split_served(&served_name("a.b-c_d", 7)), ("a.b-c_d", Some(7)));
        assert_eq!(split_served("digits"), ("digits", None));
        assert!(is_served_name("m") && is_served_name("m@7") && !is_valid_name("m@7"));
        for bad in ["", "@", "m@", "@7", "m@0", "m@07", "m@+7", "m@7@8", "../m@1", "m@-1", "m@x"] {
            assert!(!is_served_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_canary_is_served_beside_the_version_in_force_until_it_replaces_it() {
        let options = CanaryOptions::with_share(5.0);
        let started = record(3).with_canary(version(4), &options);
        assert_eq!((started.version, started.highest_version()), (3, 4));
        let models = with_canaries([("m".to_string(), started.clone())].into());
        assert_eq!(models.keys().collect::<Vec<_>>(), ["m", "m@4"]);
        assert_eq!((models["m"].version, models["m@4"].version), (3, 4));
        assert_eq!(models["m@4"].digest, "sha4");
        assert_eq!(started.served("m@3"), None);

        let promoted = started.with_promoted_canary("good").unwrap();
        assert_eq!((promoted.version, promoted.digest.as_str()), (4, "sha4"));
        let models = with_canaries([("m".to_string(), promoted.clone())].into());
        assert_eq!((models["m"].version, models["m@4"].version), (4, 4));
        assert_eq!(promoted.rollback_target(None).map(|v| v.version), Some(3));
        assert_eq!(promoted.with_promoted_canary("again"), None, "it is decided once");
        let settled = promoted.without_canary(CanaryOutcome::Aborted, "late");
        let ended = settled.ended_canary.clone().unwrap();
        assert_eq!((ended.outcome, ended.reason.as_str()), (CanaryOutcome::Promoted, "good"));

        let aborted = started.without_canary(CanaryOutcome::RolledBack, "slow");
        assert_eq!((aborted.version, aborted.canary.clone()), (3, None));
        let again = aborted.with_canary(version(4), &options);
        assert_eq!(again.canary.clone().unwrap().number, 2, "counts of the first are not its");
        let other = again.replaced_by(version(5));
        assert_eq!((other.version, other.canary), (5, None));
        assert_eq!(other.ended_canary.unwrap().outcome, CanaryOutcome::Replaced);
        let without = again.without(4).unwrap();
        assert_eq!((without.version, without.canary, without.others.len()), (3, None, 0));
    }

    #[test]
    fn quantiles_of_counts_are_those_of_the_latencies() {
        let mut random = Random::new(5);
        for _ in 0..20 {
            let (mut counts, mut all) = (VersionCounts::default(), Vec::new());
            let scale = 0.05 * (1e5f64).powf(random.unit_f64());
            for _ in 0..2000 {
                let ms = scale * (1.5 * random.unit_f64()).exp();
                counts.reply(Nanos((ms * 1e6) as u64), false);
                all.push(ms);
            }
            all.sort_by(f64::total_cmp);
            for quantile in [0.1, 0.5, 0.95] {
                let exact = all[(quantile * 2000.0) as usize];
                let seen = counts.quantile_ms(quantile);
                assert!((seen / exact - 1.0).abs() < 0.05, "{quantile}: {seen}, not {exact}");
                let above = counts.replies_above(exact);
                assert!((above - (1.0 - quantile) * 2000.0).abs() < 60.0, "{quantile}: {above}");
            }
            let mut twice = counts.clone();
            twice.add(&counts);
            assert_eq!((twice.requests, twice.replies()), (4000, 4000));
            assert!((twice.quantile_ms(0.5) - counts.quantile_ms(0.5)).abs() < 1e-9);
        }
        assert_eq!(VersionCounts::default().quantile_ms(0.5), 0.0);
        let mut long = VersionCounts::default();
        long.reply(Nanos(u64::MAX), true);
        long.reply(Nanos(0), false);
        assert_eq!(long.latencies, [(0, 1), (BUCKET_MAX, 1)].into());
    }
}
