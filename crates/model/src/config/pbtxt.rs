//! Reads Triton's `config.pbtxt`.
//!
//! A field either becomes a setting of [`ModelConfig`], has no effect on how Atoll serves the
//! model, or is refused by name (`unsupported.rs`): a model never behaves other than its file says.

use std::path::Path;

use thiserror::Error;

use super::{BatchingPolicy, Class, ModelConfig};
use text_format::Value;

mod text_format;
mod unsupported;

/// Why a `config.pbtxt` cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PbtxtError {
    /// Not protobuf text format.
    #[error("line {line}: {reason}")]
    Syntax {
        /// 1-based.
        line: usize,
        /// What was expected.
        reason: String,
    },
    /// Requests something that Atoll does not support.
    #[error("{0}")]
    Unsupported(String),
}

/// The settings in `text`. Label files are looked up in `folder`, the model's own.
pub fn parse(text: &str, folder: &Path) -> Result<ModelConfig, PbtxtError> {
    let fields = text_format::parse(text)?;
    let mut config = ModelConfig::default();
    unsupported::check(&fields)?;
    for (name, value) in &fields {
        apply(&mut config, name, value, folder)?;
    }
    Ok(config)
}

fn apply(
    config: &mut ModelConfig,
    name: &str,
    value: &Value,
    folder: &Path,
) -> Result<(), PbtxtError> {
    match name {
        "platform" | "backend" => check_backend(value)?,
        "max_batch_size" => config.max_batch_size = value.number(name)? as usize,
        "dynamic_batching" => apply_batching(config, value)?,
        "output" => {
            if let Some(Value::Scalar(file)) = value.field("label_filename") {
                config.labels = read_labels(&folder.join(file), file)?;
            }
        }
        "parameters" => apply_parameter(config, value)?,
        _ => {}
    }
    Ok(())
}

fn check_backend(value: &Value) -> Result<(), PbtxtError> {
    match value {
        Value::Scalar(text)
            if ["onnxruntime_onnx", "onnxruntime", "onnx", "atoll", ""]
                .contains(&text.as_str()) =>
        {
            Ok(())
        }
        Value::Scalar(text) => Err(PbtxtError::Unsupported(format!(
            "backend '{text}' is not served; only ONNX models are (backend: \"onnxruntime\")"
        ))),
        Value::Message(_) => Err(PbtxtError::Unsupported("backend is not a string".to_string())),
    }
}

fn apply_batching(config: &mut ModelConfig, value: &Value) -> Result<(), PbtxtError> {
    if let Some(level) = value.field("default_priority_level") {
        config.priority = level.number("default_priority_level")? as u32;
    }
    config.batching.policy = BatchingPolicy::Window;
    config.batching.max_wait_us = match value.field("max_queue_delay_microseconds") {
        Some(micros) => micros.number("max_queue_delay_microseconds")?,
        None => 0,
    };
    let preferred = value.fields().iter().filter(|(name, _)| name == "preferred_batch_size");
    for (name, size) in preferred {
        let size = usize::try_from(size.number(name)?).unwrap_or(usize::MAX);
        config.batching.max_batch = config.batching.max_batch.max(size);
    }
    config.batching.check().map_err(PbtxtError::Unsupported)?;
    let Some(policy) = value.field("default_queue_policy") else { return Ok(()) };
    if let Some(micros) = policy.field("default_timeout_microseconds") {
        let micros = micros.number("default_timeout_microseconds")?;
        config.timeout_ms = (micros > 0).then(|| micros.div_ceil(1000));
    }
    if let Some(size) = policy.field("max_queue_size") {
        let size = size.number("max_queue_size")? as usize;
        if size > 0 {
            config.queue_capacity = size;
        }
    }
    Ok(())
}

fn apply_parameter(config: &mut ModelConfig, value: &Value) -> Result<(), PbtxtError> {
    let Some(Value::Scalar(key)) = value.field("key") else { return Ok(()) };
    let wrong = |what: &str| PbtxtError::Unsupported(format!("parameter {key} is {what}"));
    let text = match value.field("value").and_then(|value| value.field("string_value")) {
        Some(Value::Scalar(text)) => text.as_str(),
        _ => "",
    };
    match key.as_str() {
        "atoll_class" => {
            config.class = Class::parse(text).ok_or_else(|| wrong("'rt' or 'be'"))?;
        }
        "atoll_pinned" => {
            config.pinned = text.parse().map_err(|_| wrong("'true' or 'false'"))?;
        }
        "atoll_slo_ms" => {
            let millis = text.parse().ok().filter(|millis| *millis > 0);
            config.slo_ms = Some(millis.ok_or_else(|| wrong("a number of milliseconds"))?);
        }
        _ => {}
    }
    Ok(())
}

fn read_labels(path: &Path, name: &str) -> Result<Vec<String>, PbtxtError> {
    if name.contains('/') || name.contains("..") {
        return Err(PbtxtError::Unsupported(format!(
            "label file '{name}' is not beside the model"
        )));
    }
    let text = std::fs::read_to_string(path)
        .map_err(|err| PbtxtError::Unsupported(format!("label file '{name}': {err}")))?;
    Ok(text.lines().map(str::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"
        name: "digits"          # a comment
        backend: "onnxruntime"
        max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 10 ] } ]
        dynamic_batching {
          priority_levels: 2
          default_priority_level: 1
          preferred_batch_size: [ 4, 8 ]
          max_queue_delay_microseconds: 700
          default_queue_policy { default_timeout_microseconds: 1500 max_queue_size: 7 }
        }
        parameters { key: "atoll_class" value: { string_value: "rt" } }
        parameters [ { key: "atoll_pinned" value: { string_value: "true" } },
                     { key: "atoll_slo_ms" value: { string_value: "25" } } ]
        instance_group [ { kind: KIND_CPU } ]
    "#;

    #[test]
    fn supported_settings_are_read() {
        let config = parse(EXAMPLE, Path::new(".")).unwrap();
        assert_eq!(config.class, Class::RealTime);
        assert_eq!((config.pinned, config.slo_ms), (true, Some(25)));
        let refused = |text: &str| parse(text, Path::new(".")).unwrap_err().to_string();
        let pinned = refused("parameters { key: 'atoll_pinned' value: { string_value: 'yes' } }");
        assert_eq!(pinned, "parameter atoll_pinned is 'true' or 'false'");
        assert_eq!((config.max_batch_size, config.priority), (8, 1));
        assert_eq!((config.timeout_ms, config.queue_capacity), (Some(2), 7));
        let batching = config.batching;
        assert_eq!((batching.policy, batching.max_batch), (BatchingPolicy::Window, 8));
        assert_eq!(batching.max_wait_us, 700);
        let plain = parse("max_batch_size: 8", Path::new(".")).unwrap().batching;
        assert_eq!(plain.policy, BatchingPolicy::Auto);
        let at_once = parse("dynamic_batching { }", Path::new(".")).unwrap().batching;
        assert_eq!((at_once.policy, at_once.max_wait_us), (BatchingPolicy::Window, 0));
    }

    #[test]
    fn unsupported_settings_are_refused() {
        let refused = |text: &str| parse(text, Path::new(".")).unwrap_err().to_string();
        assert!(refused("backend: \"python\"").contains("python"));
        let huge = "dynamic_batching { preferred_batch_size: 9999 }";
        assert!(refused(huge).contains("9999"));
        assert!(refused("sequence_batching { }").contains("sequence_batching"));
        assert!(refused("output { label_filename: \"../../etc/passwd\" }").contains("beside"));
    }

    #[test]
    fn broken_text_names_the_line() {
        let line = |text: &str| match parse(text, Path::new(".")) {
            Err(PbtxtError::Syntax { line, .. }) => line,
            other => panic!("{other:?}"),
        };
        assert_eq!(line("a: 1\nb {"), 2);
        assert_eq!(line("a: \"x"), 1);
        assert_eq!(line(&"a{".repeat(100)), 1);
    }
}
