//! Reads Triton's `config.pbtxt` as far as it says something Atoll has a setting for.

use std::path::Path;

use thiserror::Error;

use super::{BatchingPolicy, Class, ModelConfig};

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
    /// Asks for something Atoll does not do.
    #[error("{0}")]
    Unsupported(String),
}

/// A field's value.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Scalar(String),
    Message(Vec<(String, Value)>),
}

/// Fields that change how a model behaves in ways Atoll has no counterpart for.
const REFUSED: [&str; 3] = ["sequence_batching", "ensemble_scheduling", "model_operations"];

/// The settings in `text`. Label files are looked up in `folder`, the model's own.
pub fn parse(text: &str, folder: &Path) -> Result<ModelConfig, PbtxtError> {
    let fields = Parser::new(text)?.message(false)?;
    let mut config = ModelConfig::default();
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
        "max_batch_size" => config.max_batch_size = number(value, name)? as usize,
        "dynamic_batching" => apply_batching(config, value)?,
        "output" => {
            if let Some(Value::Scalar(file)) = find(value, "label_filename") {
                config.labels = read_labels(&folder.join(file), file)?;
            }
        }
        "parameters" => apply_parameter(config, value)?,
        refused if REFUSED.contains(&refused) => {
            return Err(PbtxtError::Unsupported(format!("'{refused}' is not supported")));
        }
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
    if let Some(level) = find(value, "default_priority_level") {
        config.priority = number(level, "default_priority_level")? as u32;
    }
    config.batching.policy = BatchingPolicy::Window;
    config.batching.max_wait_us = match find(value, "max_queue_delay_microseconds") {
        Some(micros) => number(micros, "max_queue_delay_microseconds")?,
        None => 0,
    };
    if let Value::Message(fields) = value {
        let preferred = fields.iter().filter(|(name, _)| name == "preferred_batch_size");
        for (name, size) in preferred {
            let size = usize::try_from(number(size, name)?).unwrap_or(usize::MAX);
            config.batching.max_batch = config.batching.max_batch.max(size);
        }
    }
    config.batching.check().map_err(PbtxtError::Unsupported)?;
    let Some(policy) = find(value, "default_queue_policy") else { return Ok(()) };
    if let Some(micros) = find(policy, "default_timeout_microseconds") {
        let micros = number(micros, "default_timeout_microseconds")?;
        config.timeout_ms = (micros > 0).then(|| micros.div_ceil(1000));
    }
    if let Some(size) = find(policy, "max_queue_size") {
        let size = number(size, "max_queue_size")? as usize;
        if size > 0 {
            config.queue_capacity = size;
        }
    }
    Ok(())
}

fn apply_parameter(config: &mut ModelConfig, value: &Value) -> Result<(), PbtxtError> {
    let Some(Value::Scalar(key)) = find(value, "key") else { return Ok(()) };
    let wrong = |what: &str| PbtxtError::Unsupported(format!("parameter {key} is {what}"));
    let text = match find(value, "value").and_then(|value| find(value, "string_value")) {
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

fn find<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Message(fields) => {
            fields.iter().find(|(key, _)| key == name).map(|(_, value)| value)
        }
        Value::Scalar(_) => None,
    }
}

fn number(value: &Value, name: &str) -> Result<u64, PbtxtError> {
    match value {
        Value::Scalar(text) => text.parse().ok(),
        Value::Message(_) => None,
    }
    .ok_or_else(|| PbtxtError::Unsupported(format!("'{name}' is not a number")))
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Mark(char),
}

/// Nesting beyond this is hostile.
const MAX_DEPTH: usize = 32;

struct Parser {
    tokens: Vec<(usize, Token)>,
    position: usize,
    depth: usize,
}

impl Parser {
    fn new(text: &str) -> Result<Parser, PbtxtError> {
        let mut tokens = Vec::new();
        for (index, line) in text.lines().enumerate() {
            tokenize(index + 1, line, &mut tokens)?;
        }
        Ok(Parser { tokens, position: 0, depth: 0 })
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.position).map(|(_, token)| token)
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.peek().cloned();
        self.position += 1;
        token
    }

    fn skip(&mut self, mark: char) -> bool {
        let there = self.peek() == Some(&Token::Mark(mark));
        self.position += usize::from(there);
        there
    }

    fn error<T>(&self, reason: &str) -> Result<T, PbtxtError> {
        let last = self.tokens.last().map_or(1, |(line, _)| *line);
        let line = self.tokens.get(self.position.saturating_sub(1)).map_or(last, |(line, _)| *line);
        Err(PbtxtError::Syntax { line, reason: reason.to_string() })
    }

    /// Fields up to a closing brace, or up to the end of the file at the top.
    fn message(&mut self, nested: bool) -> Result<Vec<(String, Value)>, PbtxtError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return self.error("nested too deeply");
        }
        let mut fields = Vec::new();
        loop {
            match self.next() {
                None if nested => return self.error("a '}' is missing"),
                None => break,
                Some(Token::Mark('}')) if nested => break,
                Some(Token::Mark(',' | ';')) => {}
                Some(Token::Word(name)) => self.field(name, &mut fields)?,
                Some(_) => return self.error("a field name was expected"),
            }
        }
        self.depth -= 1;
        Ok(fields)
    }

    fn field(&mut self, name: String, fields: &mut Vec<(String, Value)>) -> Result<(), PbtxtError> {
        self.skip(':');
        if !self.skip('[') {
            let value = self.value()?;
            fields.push((name, value));
            return Ok(());
        }
        while !self.skip(']') {
            if self.peek().is_none() {
                return self.error("a ']' is missing");
            }
            let value = self.value()?;
            fields.push((name.clone(), value));
            self.skip(',');
        }
        Ok(())
    }

    fn value(&mut self) -> Result<Value, PbtxtError> {
        match self.next() {
            Some(Token::Mark('{')) => Ok(Value::Message(self.message(true)?)),
            Some(Token::Word(word)) => Ok(Value::Scalar(word)),
            Some(Token::Text(mut text)) => {
                // Adjacent strings are one string.
                while let Some(Token::Text(more)) = self.peek() {
                    text.push_str(more);
                    self.position += 1;
                }
                Ok(Value::Scalar(text))
            }
            _ => self.error("a value was expected"),
        }
    }
}

fn tokenize(number: usize, line: &str, tokens: &mut Vec<(usize, Token)>) -> Result<(), PbtxtError> {
    let mut rest = line.trim_start();
    while let Some(first) = rest.chars().next() {
        match first {
            '#' => break,
            '"' | '\'' => {
                let Some(end) = rest[1..].find(first) else {
                    let reason = "a string does not end".to_string();
                    return Err(PbtxtError::Syntax { line: number, reason });
                };
                tokens.push((number, Token::Text(rest[1..=end].to_string())));
                rest = &rest[end + 2..];
            }
            '{' | '}' | '[' | ']' | ':' | ',' | ';' | '<' | '>' => {
                let mark = match first {
                    '<' => '{',
                    '>' => '}',
                    other => other,
                };
                tokens.push((number, Token::Mark(mark)));
                rest = &rest[1..];
            }
            _ => {
                let is_mark = |c: char| c.is_whitespace() || "{}[]:,;<>#\"'".contains(c);
                let end = rest.find(is_mark).unwrap_or(rest.len());
                tokens.push((number, Token::Word(rest[..end].to_string())));
                rest = &rest[end..];
            }
        }
        rest = rest.trim_start();
    }
    Ok(())
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
    fn known_settings_are_taken() {
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
    fn what_cannot_be_served_is_refused() {
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
