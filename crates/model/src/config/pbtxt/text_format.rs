//! Parses protobuf text format into fields, without a schema.

use super::PbtxtError;

/// A field's value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// A number, an identifier or a string.
    Scalar(String),
    /// A nested message: its fields in the order of the file.
    Message(Vec<(String, Value)>),
}

impl Value {
    /// The first field called `name`, if this is a message that has one.
    pub(super) fn field(&self, name: &str) -> Option<&Value> {
        self.fields().iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// The fields of a message; none of a scalar.
    pub(super) fn fields(&self) -> &[(String, Value)] {
        match self {
            Value::Message(fields) => fields,
            Value::Scalar(_) => &[],
        }
    }

    /// The text of a scalar.
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Value::Scalar(text) => Some(text),
            Value::Message(_) => None,
        }
    }

    /// The number, or an error that names the field.
    pub(super) fn number(&self, name: &str) -> Result<u64, PbtxtError> {
        let number = self.text().and_then(|text| text.parse().ok());
        number.ok_or_else(|| PbtxtError::Unsupported(format!("'{name}' is not a number")))
    }
}

/// The fields of the file's top-level message.
pub(super) fn parse(text: &str) -> Result<Vec<(String, Value)>, PbtxtError> {
    Parser::new(text)?.message(false)
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Mark(char),
}

/// Limits the recursion that a hostile file can cause.
const MAX_DEPTH: usize = 32;

/// Parses tokens into fields.
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
