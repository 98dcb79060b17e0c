//! Changes to the settings of a model that is served.

use serde_json::{Map, Value};

use super::ModelConfig;

/// Settings that may change, and for those with parts of their own, these parts.
const SETTINGS: [(&str, &[&str]); 9] = [
    ("class", &[]),
    ("priority", &[]),
    ("timeout_ms", &[]),
    ("queue_capacity", &[]),
    ("pinned", &[]),
    ("max_batch_size", &[]),
    ("slo_ms", &[]),
    ("batching", &["policy", "workers", "max_batch", "max_wait_us", "copy", "mix_lengths", "mask"]),
    ("limits", &["rate", "concurrency", "classes", "max_priority"]),
];

/// What belongs to the model's file: only a new registration, or its owner, changes it.
const FIXED: [&str; 2] = ["labels", "preprocessing"];

/// The longest deadline and SLO that may be set: a day.
const TIME_MOST_MS: u64 = 86_400_000;

/// The most requests that may wait.
const QUEUE_MOST: usize = 1 << 20;

/// The longest wait for a batch: a minute.
const WAIT_MOST_US: u64 = 60_000_000;

/// A change to settings as a JSON merge patch (RFC 7396): what is named changes, and `null` returns
/// to what the model's file says, or to the default.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingsChange(Map<String, Value>);

impl SettingsChange {
    /// Reads a change.
    ///
    /// # Errors
    /// For text that is no JSON object, and for names that are no settings.
    pub fn parse(json: &[u8]) -> Result<SettingsChange, String> {
        let change: Value = serde_json::from_slice(json)
            .map_err(|error| format!("the change is not valid JSON: {error}"))?;
        let Value::Object(change) = change else {
            return Err("the change must be a JSON object of settings".to_string());
        };
        for (name, value) in &change {
            let Some((_, parts)) = SETTINGS.iter().find(|(known, _)| known == name) else {
                return Err(unknown(name));
            };
            match value {
                Value::Object(own) => {
                    if let Some(part) = own.keys().find(|part| !parts.contains(&part.as_str())) {
                        return Err(unknown_part(name, part, parts));
                    }
                }
                Value::Null => {}
                _ if parts.is_empty() => {}
                _ => {
                    return Err(format!("'{name}' must be an object with {}", parts.join(", ")));
                }
            }
        }
        Ok(SettingsChange(change))
    }

    /// What the change sets the class and the priority to.
    ///
    /// # Errors
    /// For values that are none.
    pub fn class_and_priority(&self) -> Result<(Option<super::Class>, Option<u32>), String> {
        let only = |name: &str| self.0.get(name).filter(|value| !value.is_null()).cloned();
        let read = |name: &str, error: serde_json::Error| wrong(name, &error);
        let class = only("class").map(serde_json::from_value).transpose();
        let priority = only("priority").map(serde_json::from_value).transpose();
        Ok((
            class.map_err(|error| read("class", error))?,
            priority.map_err(|error| read("priority", error))?,
        ))
    }

    /// `current` with the change; `null` returns to `base`.
    ///
    /// # Errors
    /// For impossible values; the text names the setting.
    pub fn apply(&self, current: &ModelConfig, base: &ModelConfig) -> Result<ModelConfig, String> {
        let mut config = current.clone();
        for (name, value) in &self.0 {
            match value {
                Value::Object(parts) => {
                    for (part, value) in parts {
                        config = with(&config, base, &[name, part], value)?;
                    }
                }
                value => config = with(&config, base, &[name], value)?,
            }
        }
        check(&config)?;
        Ok(config)
    }
}

fn unknown(name: &str) -> String {
    let name: String = name.chars().take(64).collect();
    if FIXED.contains(&name.as_str()) {
        return format!("'{name}' is set with the model's file: register the model again");
    }
    let known: Vec<&str> = SETTINGS.iter().map(|(name, _)| *name).collect();
    format!("unknown setting '{}'; known are {}", name.escape_debug(), known.join(", "))
}

fn unknown_part(name: &str, part: &str, parts: &[&str]) -> String {
    let part: String = part.chars().take(64).collect();
    match parts.is_empty() {
        true => format!("'{name}' has no parts"),
        false => format!(
            "unknown setting '{name}.{}'; known are {}",
            part.escape_debug(),
            parts.join(", ")
        ),
    }
}

fn wrong(name: &str, error: &serde_json::Error) -> String {
    format!("'{name}': {error}")
}

/// `config` with one setting changed; `null` takes it from `base`.
fn with(
    config: &ModelConfig,
    base: &ModelConfig,
    path: &[&String],
    value: &Value,
) -> Result<ModelConfig, String> {
    let name = path.iter().map(|part| part.as_str()).collect::<Vec<_>>().join(".");
    let json = |config: &ModelConfig| {
        serde_json::to_value(config).map_err(|error| format!("settings cannot be read: {error}"))
    };
    let (mut changed, base) = (json(config)?, json(base)?);
    let pointer = format!("/{}", path.iter().map(|p| p.as_str()).collect::<Vec<_>>().join("/"));
    let value = match value {
        Value::Null => base.pointer(&pointer),
        value => Some(value),
    };
    let (parent, last) = pointer.rsplit_once('/').unwrap_or_default();
    let holder = changed.pointer_mut(parent).and_then(Value::as_object_mut);
    let holder = holder.ok_or_else(|| format!("'{name}' cannot be changed"))?;
    match value {
        Some(value) => holder.insert(last.to_string(), value.clone()),
        // Not written where it has no value.
        None => holder.remove(last),
    };
    serde_json::from_value(changed).map_err(|error| wrong(&name, &error))
}

/// Fails for settings with which no request, or none without options of its own, could run.
fn check(config: &ModelConfig) -> Result<(), String> {
    config.batching.check()?;
    for (name, time) in [("timeout_ms", config.timeout_ms), ("slo_ms", config.slo_ms)] {
        if time.is_some_and(|time| !(1..=TIME_MOST_MS).contains(&time)) {
            return Err(format!("'{name}' must be from 1 to {TIME_MOST_MS}"));
        }
    }
    if config.priority == 0 {
        return Err("'priority' must be at least 1, which is the highest".to_string());
    }
    if !(1..=QUEUE_MOST).contains(&config.queue_capacity) {
        return Err(format!("'queue_capacity' must be from 1 to {QUEUE_MOST}"));
    }
    if config.batching.max_wait_us > WAIT_MOST_US {
        return Err(format!("'batching.max_wait_us' must be at most {WAIT_MOST_US}"));
    }
    let limits = &config.limits;
    if limits.concurrency == Some(0) {
        return Err("'limits.concurrency' must be at least 1".to_string());
    }
    if !limits.classes.is_empty() && !limits.classes.contains(&config.class) {
        let class = config.class.as_str();
        return Err(format!("'class' is {class}, which 'limits.classes' does not allow"));
    }
    match limits.max_priority {
        Some(highest) if config.priority < highest => Err(format!(
            "'priority' is {}, but 'limits.max_priority' allows {highest} at the highest",
            config.priority
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BatchingPolicy, Class, CopyTime};
    use super::*;

    fn change(text: &str) -> Result<ModelConfig, String> {
        let base = ModelConfig { priority: 7, slo_ms: Some(50), ..ModelConfig::default() };
        let current = ModelConfig { priority: 3, slo_ms: None, ..base.clone() };
        SettingsChange::parse(text.as_bytes())?.apply(&current, &base)
    }

    #[test]
    fn only_what_is_named_changes() {
        let text = r#"{"class": "rt", "batching": {"policy": "window", "copy": "late"},
                       "limits": {"rate": "5/s"}}"#;
        let config = change(text).unwrap();
        assert_eq!((config.class, config.priority), (Class::RealTime, 3));
        assert_eq!(config.batching.policy, BatchingPolicy::Window);
        assert_eq!((config.batching.copy, config.batching.max_wait_us), (CopyTime::Late, 2_000));
        assert_eq!(config.limits.rate.unwrap().to_string(), "5/s");
        assert_eq!(change("{}").unwrap().priority, 3);
    }

    #[test]
    fn null_returns_to_the_file() {
        let config = change(r#"{"priority": null, "slo_ms": null, "batching": null}"#).unwrap();
        assert_eq!((config.priority, config.slo_ms), (7, Some(50)));
        assert_eq!(change(r#"{"limits": {"rate": null}}"#).unwrap().limits.rate, None);
    }

    #[test]
    fn impossible_values_are_named() {
        for (text, named) in [
            ("", "not valid JSON"),
            ("[]", "object"),
            (r#"{"prioritty": 1}"#, "'prioritty'"),
            (r#"{"labels": []}"#, "register the model again"),
            (r#"{"class": "fast"}"#, "'class'"),
            (r#"{"class": {"x": 1}}"#, "'class' has no parts"),
            (r#"{"priority": 0}"#, "'priority'"),
            (r#"{"priority": -1}"#, "'priority'"),
            (r#"{"priority": 4294967296}"#, "'priority'"),
            (r#"{"slo_ms": 0}"#, "'slo_ms'"),
            (r#"{"timeout_ms": 18446744073709551615}"#, "'timeout_ms'"),
            (r#"{"timeout_ms": "5"}"#, "'timeout_ms'"),
            (r#"{"queue_capacity": 0}"#, "'queue_capacity'"),
            (r#"{"queue_capacity": 1e99}"#, "'queue_capacity'"),
            (r#"{"batching": "window"}"#, "'batching'"),
            (r#"{"batching": {"policy": "x"}}"#, "'batching.policy'"),
            (r#"{"batching": {"max_batch": 1025}}"#, "batching.max_batch"),
            (r#"{"batching": {"workers": [0]}}"#, "batching.workers"),
            (r#"{"batching": {"max_wait_us": 60000001}}"#, "'batching.max_wait_us'"),
            (r#"{"batching": {"x": 1}}"#, "'batching.x'"),
            (r#"{"limits": {"rate": "fast"}}"#, "'limits.rate'"),
            (r#"{"limits": {"concurrency": 0}}"#, "'limits.concurrency'"),
            (r#"{"limits": {"classes": ["rt"]}}"#, "'limits.classes'"),
            (r#"{"limits": {"max_priority": 4}}"#, "'limits.max_priority'"),
        ] {
            let error = change(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
