//! Request parameters: untyped in the protocol, checked once, then typed fields.

use base::Nanos;
use model::config::Class;
use model::excerpt::excerpt;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::error::{ApiError, ApiResult};
use crate::infer::InferOptions;

/// Maximum number of parameters of one object.
pub const MAX_PARAMETERS: usize = 256;

/// The value of one parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ParameterValue {
    /// `true` or `false`.
    Bool(bool),
    /// A number that is not negative.
    Unsigned(u64),
    /// A negative number.
    Signed(i64),
    /// A number with a fraction.
    Float(f64),
    /// Text.
    Text(String),
    /// `null`, which is ignored.
    Null,
}

/// The parameters of a request, an input or an output, in the order received.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters(pub Vec<(String, ParameterValue)>);

impl<'de> Deserialize<'de> for Parameters {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Parameters;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of strings, numbers and booleans")
            }
            fn visit_unit<E>(self) -> Result<Parameters, E> {
                Ok(Parameters::default())
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parameters, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry::<String, ParameterValue>()? {
                    if pairs.len() == MAX_PARAMETERS {
                        return Err(serde::de::Error::custom("too many parameters"));
                    }
                    pairs.push(pair);
                }
                Ok(Parameters(pairs))
            }
        }
        deserializer.deserialize_any(Pairs)
    }
}

impl Parameters {
    /// The parameter with this name.
    pub fn get(&self, name: &str) -> Option<&ParameterValue> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// The parameter as a boolean.
    pub fn bool(&self, name: &str) -> ApiResult<Option<bool>> {
        match self.get(name) {
            None | Some(ParameterValue::Null) => Ok(None),
            Some(ParameterValue::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(wrong_type(name, "a boolean")),
        }
    }

    /// The parameter as a number that is not negative.
    pub fn unsigned(&self, name: &str) -> ApiResult<Option<u64>> {
        self.get(name).map_or(Ok(None), |value| unsigned(name, value))
    }
}

fn wrong_type(name: &str, want: &str) -> ApiError {
    ApiError::invalid(format!("parameter '{name}' must be {want}"))
}

fn unsigned(name: &str, value: &ParameterValue) -> ApiResult<Option<u64>> {
    match value {
        ParameterValue::Null => Ok(None),
        ParameterValue::Unsigned(value) => Ok(Some(*value)),
        ParameterValue::Signed(value) if *value >= 0 => Ok(Some(*value as u64)),
        _ => Err(wrong_type(name, "a whole number that is not negative")),
    }
}

/// Reads the parameters of an inference request. Unknown ones are ignored as the protocol requires,
/// except those with this server's prefix: these are refused, because they are misspelt.
pub fn infer_options(parameters: &Parameters) -> ApiResult<InferOptions> {
    let mut options = InferOptions::default();
    for (name, value) in &parameters.0 {
        match name.as_str() {
            "priority" => options.priority = priority(value)?,
            "timeout" => {
                let micros = unsigned(name, value)?.filter(|&micros| micros > 0);
                options.limit_timeout(micros.map(Nanos::from_micros));
            }
            "binary_data_output" => options.binary_output = bool_of(name, value)?,
            "sequence_id" | "sequence_start" | "sequence_end" => refuse_sequence(name, value)?,
            _ if name.starts_with("atoll_") => own_parameter(&mut options, name, value)?,
            _ => {}
        }
    }
    // Clients that do not know classes request real time with the highest priority.
    if options.priority == Some(HIGHEST_PRIORITY) && options.class.is_none() {
        options.class = Some(Class::RealTime);
    }
    Ok(options)
}

/// The highest priority; the protocol counts upwards from it.
const HIGHEST_PRIORITY: u32 = 1;

fn priority(value: &ParameterValue) -> ApiResult<Option<u32>> {
    match unsigned("priority", value)?.unwrap_or(0) {
        0 => Ok(None),
        priority => u32::try_from(priority)
            .map(Some)
            .map_err(|_| wrong_type("priority", "at most 4294967295")),
    }
}

fn bool_of(name: &str, value: &ParameterValue) -> ApiResult<bool> {
    match value {
        ParameterValue::Bool(value) => Ok(*value),
        ParameterValue::Null => Ok(false),
        _ => Err(wrong_type(name, "a boolean")),
    }
}

fn refuse_sequence(name: &str, value: &ParameterValue) -> ApiResult<()> {
    match value {
        ParameterValue::Null | ParameterValue::Bool(false) | ParameterValue::Unsigned(0) => Ok(()),
        ParameterValue::Text(text) if text.is_empty() => Ok(()),
        _ => Err(ApiError::invalid(format!(
            "parameter '{name}' is set, but models here keep no state between requests"
        ))),
    }
}

fn own_parameter(options: &mut InferOptions, name: &str, value: &ParameterValue) -> ApiResult<()> {
    match name {
        "atoll_class" => {
            let ParameterValue::Text(text) = value else {
                return Err(wrong_type(name, "\"rt\" or \"be\""));
            };
            let class = Class::parse(text).ok_or_else(|| wrong_type(name, "\"rt\" or \"be\""))?;
            options.class = Some(class);
        }
        "atoll_deadline_ms" => {
            let nanos = match value {
                // The shortest deadline is one nanosecond: zero would mean none.
                ParameterValue::Float(millis) if *millis > 0.0 => {
                    Nanos(((millis * 1e6) as u64).max(1))
                }
                ParameterValue::Float(0.0) => Nanos::ZERO,
                _ => Nanos::from_millis(unsigned(name, value)?.unwrap_or(0)),
            };
            options.limit_timeout(Some(nanos).filter(|nanos| *nanos > Nanos::ZERO));
        }
        _ => {
            return Err(ApiError::invalid(format!(
                "unknown parameter '{}'; known are atoll_class and atoll_deadline_ms",
                excerpt(name)
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(json: &str) -> ApiResult<InferOptions> {
        infer_options(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn known_parameters_become_fields() {
        let read = options(
            r#"{"priority":1,"timeout":5000,"atoll_class":"rt","atoll_deadline_ms":2,"foo":"x"}"#,
        )
        .unwrap();
        assert_eq!(read.priority, Some(1));
        assert_eq!(read.timeout, Some(Nanos::from_millis(2)));
        assert_eq!(read.class, Some(Class::RealTime));
        assert_eq!(options(r#"{"priority":0,"timeout":0}"#).unwrap(), InferOptions::default());
        let class = |text: &str| options(text).unwrap().class;
        assert_eq!(class(r#"{"priority":1}"#), Some(Class::RealTime));
        assert_eq!(class(r#"{"priority":2}"#), None);
        assert_eq!(class(r#"{"priority":1,"atoll_class":"be"}"#), Some(Class::BestEffort));
    }

    #[test]
    fn deadlines_below_a_nanosecond_are_deadlines() {
        let timeout = |json: &str| options(json).unwrap().timeout;
        for millis in ["1e-7", "1e-300", "0.0000001"] {
            let json = format!(r#"{{"atoll_deadline_ms":{millis}}}"#);
            assert_eq!(timeout(&json), Some(Nanos(1)), "{millis}");
        }
        assert_eq!(timeout(r#"{"atoll_deadline_ms":0.0}"#), None);
        assert_eq!(timeout(r#"{"atoll_deadline_ms":0}"#), None);
        assert_eq!(timeout(r#"{"atoll_deadline_ms":1e300}"#), Some(Nanos(u64::MAX)));
        assert!(options(r#"{"atoll_deadline_ms":-0.5}"#).is_err());
    }

    #[test]
    fn wrong_parameters_are_refused() {
        for json in [
            r#"{"priority":-1}"#,
            r#"{"priority":4294967296}"#,
            r#"{"timeout":"soon"}"#,
            r#"{"atoll_class":"fast"}"#,
            r#"{"atoll_klass":"rt"}"#,
            r#"{"sequence_id":7}"#,
            r#"{"sequence_start":true}"#,
            r#"{"binary_data_output":3}"#,
        ] {
            assert!(options(json).is_err(), "{json}");
        }
        assert!(options(r#"{"sequence_id":0,"sequence_start":false}"#).is_ok());
    }
}
