//! The subset of YAML that kubeconfig files use.
//!
//! Mappings, sequences, plain and quoted scalars, block scalars, and flow collections on one line.
//! Anchors, aliases, tags, several documents and quoted scalars over several lines are errors. A
//! complete YAML reader is larger than the rest of the Kubernetes client, and
//! `kubectl config view --raw -o json` converts any file.

use serde_json::{Map, Value};

/// How deeply collections nest at most.
const DEPTH_MAX: usize = 32;

/// Reads one document. Numbers stay strings.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    let text = text.trim_start_matches('\u{feff}');
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|error| error.to_string());
    }
    let raw: Vec<&str> = text.lines().collect();
    let mut lines = Vec::new();
    for (number, line) in raw.iter().enumerate() {
        let content = line.trim_start_matches(' ');
        let indent = line.len() - content.len();
        let content = content.trim_end();
        if content.is_empty() || content.starts_with('#') {
            continue;
        }
        if content.starts_with('\t') {
            return Err(at(number, "a tab indents this line"));
        }
        if indent == 0 && (content == "---" || content == "...") {
            match lines.is_empty() && content == "---" {
                true => continue,
                false => return Err(at(number, "only one document is supported")),
            }
        }
        lines.push(Line { number, indent, content });
    }
    let mut reader = Reader { raw, lines, next: 0 };
    let Some(first) = reader.peek() else { return Ok(Value::Null) };
    let value = reader.block(first.indent, 0)?;
    match reader.peek() {
        None => Ok(value),
        Some(line) => Err(at(line.number, "the indentation does not match any open block")),
    }
}

fn at(number: usize, message: &str) -> String {
    format!("line {}: {message}", number + 1)
}

/// A line with content.
#[derive(Clone, Copy)]
struct Line<'a> {
    number: usize,
    indent: usize,
    content: &'a str,
}

impl Line<'_> {
    fn is_item(&self) -> bool {
        self.content == "-" || self.content.starts_with("- ")
    }
}

struct Reader<'a> {
    raw: Vec<&'a str>,
    lines: Vec<Line<'a>>,
    next: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<Line<'a>> {
        self.lines.get(self.next).copied()
    }

    /// The collection or scalar whose first line is at `indent`.
    fn block(&mut self, indent: usize, depth: usize) -> Result<Value, String> {
        let Some(line) = self.peek() else { return Ok(Value::Null) };
        if depth > DEPTH_MAX {
            return Err(at(line.number, "nested too deeply"));
        }
        if line.is_item() {
            return self.sequence(indent, depth);
        }
        if key_of(line.content).map_err(|error| at(line.number, &error))?.is_some() {
            return self.mapping(indent, depth);
        }
        self.next += 1;
        self.scalar(line.number, indent, line.content)
    }

    fn mapping(&mut self, indent: usize, depth: usize) -> Result<Value, String> {
        let mut map = Map::new();
        while let Some(line) = self.peek().filter(|line| line.indent == indent && !line.is_item()) {
            let fail = |error: String| at(line.number, &error);
            let Some((key, rest)) = key_of(line.content).map_err(fail)? else {
                return Err(at(line.number, "expected 'key: value'"));
            };
            self.next += 1;
            let value = match rest.is_empty() || rest.starts_with('#') {
                false => self.scalar(line.number, indent + 1, rest)?,
                true => match self.peek() {
                    Some(inner) if inner.indent > indent => self.block(inner.indent, depth + 1)?,
                    Some(inner) if inner.indent == indent && inner.is_item() => {
                        self.sequence(indent, depth + 1)?
                    }
                    _ => Value::Null,
                },
            };
            if map.insert(key.clone(), value).is_some() {
                return Err(at(line.number, &format!("'{key}' occurs twice")));
            }
        }
        Ok(Value::Object(map))
    }

    fn sequence(&mut self, indent: usize, depth: usize) -> Result<Value, String> {
        let mut items = Vec::new();
        while let Some(line) = self.peek().filter(|line| line.indent == indent && line.is_item()) {
            let rest = line.content[1..].trim_start();
            if !rest.is_empty() && !rest.starts_with('#') {
                // What follows the dash is the first line of the item.
                let indent = indent + line.content.len() - rest.len();
                self.lines[self.next] = Line { number: line.number, indent, content: rest };
                items.push(self.block(indent, depth + 1)?);
                continue;
            }
            self.next += 1;
            items.push(match self.peek() {
                Some(inner) if inner.indent > indent => self.block(inner.indent, depth + 1)?,
                _ => Value::Null,
            });
        }
        Ok(Value::Array(items))
    }

    /// The scalar or flow collection that `text` begins. Lines indented by at least `indent`
    /// continue it.
    fn scalar(&mut self, number: usize, indent: usize, text: &str) -> Result<Value, String> {
        if text.starts_with(['|', '>']) {
            return self.block_scalar(number, indent, text);
        }
        if text.starts_with(['"', '\'', '{', '[']) {
            let mut flow = Flow { rest: text };
            let value = flow.value(0).map_err(|error| at(number, &error))?;
            let rest = flow.rest.trim_start();
            return match rest.is_empty() || rest.starts_with('#') {
                true => Ok(value),
                false => Err(at(number, "unexpected text after a value")),
            };
        }
        if text.starts_with(['&', '*', '!', '%', '@', '`', '\t']) {
            return Err(at(number, "anchors, aliases, tags and directives are not supported"));
        }
        let mut scalar = without_comment(text).to_string();
        while let Some(line) = self.peek().filter(|line| line.indent >= indent) {
            if key_of(line.content).is_ok_and(|key| key.is_some()) {
                return Err(at(line.number, "a key inside a scalar; is the indentation right?"));
            }
            scalar.push(' ');
            scalar.push_str(without_comment(line.content));
            self.next += 1;
        }
        Ok(plain(&scalar))
    }

    /// A literal (`|`) or folded (`>`) scalar.
    fn block_scalar(
        &mut self,
        number: usize,
        indent: usize,
        header: &str,
    ) -> Result<Value, String> {
        let header = without_comment(header);
        let (join, keeps_end) = match header {
            "|" => ("\n", true),
            "|-" => ("\n", false),
            ">" => (" ", true),
            ">-" => (" ", false),
            _ => return Err(at(number, "this form of block scalar is not supported")),
        };
        let width = |line: &str| line.len() - line.trim_start_matches(' ').len();
        let body = self.raw[number + 1..].iter();
        let body = body.take_while(|line| line.trim().is_empty() || width(line) >= indent);
        let mut body: Vec<&str> = body.copied().collect();
        while body.last().is_some_and(|line| line.trim().is_empty()) {
            body.pop();
        }
        let end = number + 1 + body.len();
        while self.peek().is_some_and(|line| line.number < end) {
            self.next += 1;
        }
        let margin = body.iter().filter(|line| !line.trim().is_empty()).map(|line| width(line));
        let margin = margin.min().unwrap_or(0);
        let body: Vec<&str> = body.iter().map(|line| line.get(margin..).unwrap_or("")).collect();
        let mut text = body.join(join);
        if keeps_end {
            text.push('\n');
        }
        Ok(Value::String(text))
    }
}

/// The key at the start of a line, and what follows its colon.
fn key_of(content: &str) -> Result<Option<(String, &str)>, String> {
    if content.starts_with(['"', '\'']) {
        let mut flow = Flow { rest: content };
        let key = flow.quoted()?;
        let rest = flow.rest.trim_start();
        return Ok(rest.strip_prefix(':').map(|rest| (key, rest.trim_start())));
    }
    if content.starts_with(['{', '[', '|', '>']) {
        return Ok(None);
    }
    if content.starts_with("? ") {
        return Err("complex keys are not supported".to_string());
    }
    let text = without_comment(content);
    let end = text.find(": ").or_else(|| text.strip_suffix(':').map(str::len));
    Ok(end.map(|end| (text[..end].trim_end().to_string(), content[end + 1..].trim_start())))
}

fn without_comment(text: &str) -> &str {
    text.find(" #").map_or(text, |end| &text[..end]).trim_end()
}

fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" => Value::Null,
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        text => Value::String(text.to_string()),
    }
}

/// A flow collection or a quoted scalar.
struct Flow<'a> {
    rest: &'a str,
}

impl Flow<'_> {
    fn skip(&mut self, expected: char) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(expected) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > DEPTH_MAX {
            return Err("nested too deeply".to_string());
        }
        if self.skip('[') {
            let mut items = Vec::new();
            while !self.skip(']') {
                items.push(self.value(depth + 1)?);
                self.separate(']')?;
            }
            return Ok(Value::Array(items));
        }
        if self.skip('{') {
            let mut map = Map::new();
            while !self.skip('}') {
                let Value::String(key) = self.value(depth + 1)? else {
                    return Err("a key is not a string".to_string());
                };
                if !self.skip(':') {
                    return Err(format!("expected ':' after '{key}'"));
                }
                map.insert(key, self.value(depth + 1)?);
                self.separate('}')?;
            }
            return Ok(Value::Object(map));
        }
        if self.rest.starts_with(['"', '\'']) {
            return self.quoted().map(Value::String);
        }
        let stops = self.rest.char_indices().find(|&(index, c)| {
            let after = &self.rest[index + c.len_utf8()..];
            matches!(c, ',' | ']' | '}' | '{' | '[' | '#')
                || (c == ':' && (after.is_empty() || after.starts_with([' ', '{', '['])))
        });
        let Some((end, _)) = stops.filter(|&(end, _)| end > 0) else {
            return Err("a flow collection does not end on its line".to_string());
        };
        let (scalar, rest) = self.rest.split_at(end);
        self.rest = rest;
        Ok(plain(scalar.trim_end()))
    }

    /// Consumes a comma, or checks that the collection ends.
    fn separate(&mut self, end: char) -> Result<(), String> {
        match self.skip(',') || self.rest.starts_with(end) {
            true => Ok(()),
            false => Err(format!("expected ',' or '{end}'")),
        }
    }

    fn quoted(&mut self) -> Result<String, String> {
        let unended = || "a quoted scalar does not end on its line".to_string();
        if let Some(text) = self.rest.strip_prefix('\'') {
            let mut ends = text.char_indices().peekable();
            while let Some((index, c)) = ends.next() {
                if c == '\'' && ends.next_if(|&(_, next)| next == '\'').is_none() {
                    self.rest = &text[index + 1..];
                    return Ok(text[..index].replace("''", "'"));
                }
            }
            return Err(unended());
        }
        let mut escaped = false;
        for (index, c) in self.rest.char_indices().skip(1) {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => {
                    let (text, rest) = self.rest.split_at(index + 1);
                    self.rest = rest;
                    let read = serde_json::from_str(text);
                    return read.map_err(|_| format!("{text} has an unsupported escape"));
                }
                _ => {}
            }
        }
        Err(unended())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reads_what_kubectl_writes() {
        let text = r#"---
# Written by kubectl.
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: LS0tLS1CRUdJTiBDRVJ==
    server: https://10.0.0.1:6443   # a port
  name: "kind-sea"
contexts:
  - name: 'it''s'
    context: {cluster: kind-sea, user: u, namespace: "a\tb"}
current-context: kind-sea
preferences: {}
empty:
users:
-
  name: u
  user:
    args: [get-token, --login, 'a, b', {k: v}]
    installHint: Install the plugin for use with kubectl by following
      https://example.com/auth#plugin
    token: 12345
    interactive: false
    note: |
      # not a comment
        indented
    folded: >-
      one
      two
"#;
        let user = json!({
            "args": ["get-token", "--login", "a, b", {"k": "v"}],
            "installHint": "Install the plugin for use with kubectl by following \
                https://example.com/auth#plugin",
            "token": "12345",
            "interactive": false,
            "note": "# not a comment\n  indented\n",
            "folded": "one two",
        });
        let cluster = json!({
            "certificate-authority-data": "LS0tLS1CRUdJTiBDRVJ==",
            "server": "https://10.0.0.1:6443",
        });
        let context = json!({"cluster": "kind-sea", "user": "u", "namespace": "a\tb"});
        let expected = json!({
            "apiVersion": "v1",
            "clusters": [{"cluster": cluster, "name": "kind-sea"}],
            "contexts": [{"name": "it's", "context": context}],
            "current-context": "kind-sea",
            "preferences": {},
            "empty": null,
            "users": [{"name": "u", "user": user}],
        });
        assert_eq!(parse(text), Ok(expected));
        assert_eq!(parse("{\"a\": [1,\n 2]}"), Ok(json!({"a": [1, 2]})));
        assert_eq!(parse("# nothing\n"), Ok(Value::Null));
    }

    #[test]
    fn names_the_line_of_what_it_does_not_support() {
        let cases = [
            ("a: 1\nb: &x 2", "line 2"),
            ("a: 1\na: 2", "'a' occurs twice"),
            ("a: 1\n---\nb: 2", "one document"),
            ("a: \"b", "does not end"),
            ("a: [b", "does not end"),
            ("a: 'b' c", "unexpected text"),
            ("a: b\n  c: d", "line 2"),
            ("  a: b\nc: d", "line 2"),
            ("a: |2\n  b", "block scalar"),
            ("a:\n\tb: c", "tab"),
            ("? a\n: b", "complex keys"),
        ];
        for (text, message) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.contains(message), "{text:?}: {error}");
        }
        assert!(parse(&"- ".repeat(100)).is_err());
        assert!(parse(&format!("a: {}", "[".repeat(100))).is_err());
    }
}
