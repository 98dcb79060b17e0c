//! Limits on a model's requests.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Class;

/// A number of requests in a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rate {
    /// Requests.
    pub count: u32,
    /// The time; so many requests may come at once.
    pub period: Duration,
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        let wrong = || format!("'{text}' is not a rate such as 100/s, 50/m or 1000/h");
        let (count, unit) = text.split_once('/').ok_or_else(wrong)?;
        let seconds = match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            _ => return Err(wrong()),
        };
        let count = count.parse().ok().filter(|count| *count > 0).ok_or_else(wrong)?;
        Ok(Rate { count, period: Duration::from_secs(seconds) })
    }
}

impl TryFrom<String> for Rate {
    type Error = String;

    fn try_from(text: String) -> Result<Rate, String> {
        text.parse()
    }
}

impl From<Rate> for String {
    fn from(rate: Rate) -> String {
        rate.to_string()
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self.period.as_secs() {
            1 => "s",
            60 => "m",
            _ => "h",
        };
        write!(f, "{}/{unit}", self.count)
    }
}

/// What all clients of a model together may do on one server; tokens limit each client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RequestLimits {
    /// Requests in a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// Requests at the same time, waiting ones included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
    /// Classes that requests may have; none means any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<Class>,
    /// Highest priority that requests may have; 1 is the highest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_priority: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_written() {
        for text in ["100/s", "1/m", "5/h"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
        for wrong in ["100", "0/s", "-1/s", "1/d", "x/s"] {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_are_settings_of_a_model() {
        let text = "[limits]\nrate = \"100/s\"\nconcurrency = 8\nclasses = [\"be\"]\n";
        let config: super::super::ModelConfig = toml::from_str(text).unwrap();
        let rate = Rate { count: 100, period: Duration::from_secs(1) };
        assert_eq!(config.limits.rate, Some(rate));
        assert_eq!(config.limits.concurrency, Some(8));
        assert_eq!(config.limits.classes, [Class::BestEffort]);
        assert!(toml::from_str::<super::super::ModelConfig>("[limits]\nrate = \"fast\"").is_err());
    }
}
