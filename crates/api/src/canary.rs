//! Canaries: a version of a model that gets a share of the requests until it is promoted or rolled
//! back.

use serde::{Deserialize, Serialize};

use crate::error::{ApiError, ApiResult};

/// Header by which a request chooses between a canary and the stable version: `always` or `never`.
pub const CANARY: &str = "x-atoll-canary";
/// Header with a text, such as a user's name: requests with the same text get the same version.
pub const CANARY_KEY: &str = "x-atoll-canary-key";
/// Largest share of a canary in percent: it is compared with what the stable version replies.
pub const SHARE_MAX_PERCENT: f64 = 90.0;
/// The longest time before a promotion, in milliseconds: a month.
const PROMOTE_AFTER_MAX_MS: u64 = 2_600_000_000;

/// Which version a request wants, where a model has a canary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CanaryChoice {
    /// The canary, with the probability of its share.
    #[default]
    ByShare,
    /// The canary or not, the same for all requests with this hash of their key.
    ByKey(u64),
    /// The canary.
    Always,
    /// The stable version.
    Never,
}

impl CanaryChoice {
    /// The choice of a request with these values of [`CANARY`] and [`CANARY_KEY`]; one that is not
    /// valid is ignored.
    pub fn read(wish: Option<&[u8]>, key: Option<&[u8]>) -> CanaryChoice {
        match wish.map(<[u8]>::trim_ascii) {
            Some(wish) if wish.eq_ignore_ascii_case(b"always") => return CanaryChoice::Always,
            Some(wish) if wish.eq_ignore_ascii_case(b"never") => return CanaryChoice::Never,
            _ => {}
        }
        key.map_or(CanaryChoice::ByShare, CanaryChoice::by_key)
    }

    /// The choice of all requests with this key.
    pub fn by_key(key: &[u8]) -> CanaryChoice {
        // FNV-1a: the same on all frontends, whatever they were built with.
        let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        CanaryChoice::ByKey(key.iter().fold(0xcbf2_9ce4_8422_2325, add))
    }
}

fn default_max_errors() -> f64 {
    1.0
}

fn default_max_slowdown() -> f64 {
    20.0
}

/// How a canary is served and judged.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CanaryOptions {
    /// Its share of the requests in percent. With 0, only requests that ask for it get it.
    pub share_percent: f64,
    /// Time after which it is promoted if it is good; without, an operator does that.
    #[serde(default)]
    pub promote_after_ms: Option<u64>,
    /// Share of its requests in percent that may fail or be late, beyond those of the stable
    /// version.
    #[serde(default = "default_max_errors")]
    pub max_errors_percent: f64,
    /// By how much it may be slower than the stable version, in percent.
    #[serde(default = "default_max_slowdown")]
    pub max_slowdown_percent: f64,
}

impl CanaryOptions {
    /// The defaults with a share.
    pub fn with_share(share_percent: f64) -> CanaryOptions {
        CanaryOptions {
            share_percent,
            promote_after_ms: None,
            max_errors_percent: default_max_errors(),
            max_slowdown_percent: default_max_slowdown(),
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// When a value is outside of its range; the message names it.
    pub fn check(&self) -> ApiResult<()> {
        let wrong = |what: String| Err(ApiError::invalid(what));
        let CanaryOptions { share_percent, max_errors_percent, max_slowdown_percent, .. } = self;
        if !(0.0..=SHARE_MAX_PERCENT).contains(share_percent) {
            return wrong(format!(
                "the share of a canary is 0 to {SHARE_MAX_PERCENT} %, not {share_percent}: \
                 promote it to give it all requests"
            ));
        }
        if !(0.1..=100.0).contains(max_errors_percent) {
            return wrong(format!("max_errors_percent is 0.1 to 100, not {max_errors_percent}"));
        }
        if !(0.0..=10_000.0).contains(max_slowdown_percent) {
            return wrong(format!(
                "max_slowdown_percent is 0 to 10000, not {max_slowdown_percent}"
            ));
        }
        match self.promote_after_ms {
            Some(ms) if !(1000..=PROMOTE_AFTER_MAX_MS).contains(&ms) => {
                wrong(format!("promote_after_ms is 1000 to {PROMOTE_AFTER_MAX_MS}, not {ms}"))
            }
            _ => Ok(()),
        }
    }
}

/// Reads a share such as `5%` or `5`, in percent.
///
/// # Errors
/// When it is no number.
pub fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.trim();
    let number = number.strip_suffix('%').unwrap_or(number).trim_end();
    let percent = number.parse().ok().filter(|percent: &f64| percent.is_finite());
    percent.ok_or_else(|| {
        let text: String = text.chars().take(32).collect();
        format!("'{}' is no percentage, such as 5%", text.escape_debug())
    })
}

/// Reads a time such as `90s`, `10m` or `2h`, in milliseconds.
///
/// # Errors
/// When it is no time.
pub fn parse_time_ms(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    let read = |(unit, ms): &(&str, u64)| {
        let number: u64 = trimmed.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*ms)
    };
    units.iter().find_map(read).ok_or_else(|| {
        let text: String = text.chars().take(32).collect();
        format!("'{}' is no time, such as 90s, 10m or 2h", text.escape_debug())
    })
}

/// What clients observed of one version of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct VersionFigures {
    /// Requests that were drawn for it, by share or key.
    pub requests: u64,
    /// Those that failed or were late.
    pub failures: u64,
    /// Median of the replies' latency in milliseconds; 0 without replies.
    pub median_ms: f64,
    /// 95th percentile.
    pub p95_ms: f64,
}

/// State of a canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryState {
    /// It gets its share of the requests.
    Running,
    /// It is in force, and backends are replacing the version before.
    Promoting,
    /// It is in force.
    Promoted,
    /// It was worse than the stable version, which has all requests again.
    RolledBack,
    /// An operator ended it.
    Aborted,
    /// Another version was put in force meanwhile, or this one was deleted.
    Replaced,
}

/// A canary, or the last one of its model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CanaryStatus {
    /// The model.
    pub name: String,
    /// The canary's version.
    pub version: String,
    /// The version in force.
    pub in_force: String,
    /// Its state.
    pub state: CanaryState,
    /// Why it has this state, or what is still missing for a promotion.
    pub why: String,
    /// Its share, its rules and what was observed, while it is running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<RunningCanary>,
}

/// A canary that gets requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunningCanary {
    /// Its share in percent.
    pub share_percent: f64,
    /// Time after which it is promoted if it is good.
    pub promote_after_ms: Option<u64>,
    /// See [`CanaryOptions::max_errors_percent`].
    pub max_errors_percent: f64,
    /// See [`CanaryOptions::max_slowdown_percent`].
    pub max_slowdown_percent: f64,
    /// For how long it was served.
    pub elapsed_ms: u64,
    /// What clients observed of the stable version since.
    pub stable: VersionFigures,
    /// What they observed of the canary.
    pub canary: VersionFigures,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_choose_a_version_and_wrong_ones_do_not() {
        let read = |wish: Option<&str>, key: Option<&str>| {
            CanaryChoice::read(wish.map(str::as_bytes), key.map(str::as_bytes))
        };
        assert_eq!(read(None, None), CanaryChoice::ByShare);
        assert_eq!(read(Some(" Always "), None), CanaryChoice::Always);
        assert_eq!(read(Some("never"), Some("ada")), CanaryChoice::Never);
        assert_eq!(read(Some("perhaps"), None), CanaryChoice::ByShare);
        let key = read(None, Some("ada"));
        assert_eq!(key, read(Some("perhaps"), Some("ada")));
        assert_ne!(key, read(None, Some("bob")));
    }

    #[test]
    fn texts_become_numbers_or_errors() {
        for (text, percent) in [("5%", 5.0), (" 0.5 %", 0.5), ("90", 90.0), ("-1", -1.0)] {
            assert_eq!(parse_percent(text), Ok(percent), "{text}");
        }
        for text in ["", "%", "five", "1e999", "NaN", "5%%"] {
            assert!(parse_percent(text).is_err(), "{text}");
        }
        for (text, ms) in [("90s", 90_000), ("10m", 600_000), ("250ms", 250), ("2h", 7_200_000)] {
            assert_eq!(parse_time_ms(text), Ok(ms), "{text}");
        }
        for text in ["", "10", "m", "-1s", "1.5m", "99999999999999999999s", "999999999999999999d"] {
            assert!(parse_time_ms(text).is_err(), "{text}");
        }
    }

    #[test]
    fn options_outside_of_their_ranges_are_refused() {
        let good = CanaryOptions::with_share(5.0);
        assert!(good.check().is_ok());
        let bad = [
            CanaryOptions { share_percent: f64::NAN, ..good.clone() },
            CanaryOptions { share_percent: -1.0, ..good.clone() },
            CanaryOptions { share_percent: 91.0, ..good.clone() },
            CanaryOptions { max_errors_percent: 0.0, ..good.clone() },
            CanaryOptions { max_errors_percent: f64::INFINITY, ..good.clone() },
            CanaryOptions { max_slowdown_percent: -0.1, ..good.clone() },
            CanaryOptions { promote_after_ms: Some(0), ..good.clone() },
            CanaryOptions { promote_after_ms: Some(u64::MAX), ..good },
        ];
        for options in bad {
            assert!(options.check().is_err(), "{options:?}");
        }
    }
}
