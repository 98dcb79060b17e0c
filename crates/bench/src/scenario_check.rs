//! Checks the values of a scenario, and finds the line of a value in its file.

use std::collections::BTreeSet;
use std::fmt;

use toml::de::{DeTable, DeValue};

/// Longest name, and how much of one a message shows.
const NAME_MAX: usize = 256;
const SHOWN_MAX: usize = 64;

/// A value that no run can use.
#[derive(Clone, Debug, PartialEq)]
pub struct BadValue {
    /// Where it is: keys and indices from the root, such as `clients[1].arrival.rate`.
    pub field: String,
    /// What is wrong with it.
    pub what: String,
}

impl fmt::Display for BadValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.field, self.what)
    }
}

impl BadValue {
    /// Its line in `text`: that of the value, or of the nearest table that the file has.
    pub fn line_in(&self, text: &str) -> usize {
        let Ok(root) = DeTable::parse(text) else { return 1 };
        let root = root.into_inner();
        let mut keys = self.field.split('.').flat_map(keys_of);
        let mut at = keys.next().and_then(|key| root.get(key));
        let mut found = at;
        for key in keys {
            let Some(value) = at else { break };
            at = child(value.get_ref(), key);
            found = at.or(found);
        }
        let start = found.map_or(0, |value| value.span().start);
        1 + text.bytes().take(start).filter(|byte| *byte == b'\n').count()
    }
}

/// `clients[1]` as `clients` and `1`.
fn keys_of(part: &str) -> impl Iterator<Item = &str> {
    part.split(['[', ']']).filter(|key| !key.is_empty())
}

fn child<'v, 'i>(value: &'v DeValue<'i>, key: &str) -> Option<&'v toml::Spanned<DeValue<'i>>> {
    match key.parse::<usize>() {
        Ok(index) => value.get(index),
        Err(_) => value.get(key),
    }
}

/// Collects what is wrong with a scenario; the first finding is reported.
#[derive(Default)]
pub struct ValueChecks {
    bad: Option<BadValue>,
}

impl ValueChecks {
    /// Reports a value unless something was found before.
    pub fn wrong(&mut self, field: impl fmt::Display, what: impl fmt::Display) {
        let (field, what) = (field.to_string(), what.to_string());
        self.bad.get_or_insert(BadValue { field, what });
    }

    /// A number in a range; not-a-number is in none.
    pub fn number(&mut self, field: impl fmt::Display, value: f64, (min, max): (f64, f64)) {
        if !(min..=max).contains(&value) {
            self.wrong(field, format_args!("= {value} is not from {min} to {max}"));
        }
    }

    /// A count in a range.
    pub fn count(&mut self, field: impl fmt::Display, value: u64, (min, max): (u64, u64)) {
        if !(min..=max).contains(&value) {
            self.wrong(field, format_args!("= {value} is not from {min} to {max}"));
        }
    }

    /// A name: reports and messages print it, so it has no control characters.
    pub fn name(&mut self, field: impl fmt::Display, value: &str) {
        let shown: String = value.chars().take(SHOWN_MAX).collect();
        if value.is_empty() || value.chars().any(char::is_control) || value.len() > NAME_MAX {
            let what = format!("= {shown:?} is not a printable name of at most {NAME_MAX} bytes");
            self.wrong(field, what);
        }
    }

    /// Names of a list, each there once.
    pub fn names<'n>(
        &mut self,
        field: impl Fn(usize) -> String,
        names: impl Iterator<Item = &'n str>,
    ) {
        let mut seen = BTreeSet::new();
        for (index, name) in names.enumerate() {
            self.name(field(index), name);
            if !seen.insert(name) {
                self.wrong(field(index), format_args!("= {name:?} is there twice"));
            }
        }
    }

    /// Something that must hold.
    pub fn holds(&mut self, holds: bool, field: impl fmt::Display, what: impl fmt::Display) {
        if !holds {
            self.wrong(field, what);
        }
    }

    /// The first finding.
    pub fn result(self) -> Result<(), BadValue> {
        self.bad.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_values_are_found() {
        let text = "a = 1\n[[clients]]\nname = 'x'\n[[clients]]\narrival = { rate = 2 }\n\
                    [clients.more]\ndeep = [1,\n2]\n";
        let line =
            |field: &str| BadValue { field: field.to_string(), what: String::new() }.line_in(text);
        assert_eq!(
            (line("a"), line("clients[0].name"), line("clients[1].arrival.rate")),
            (1, 3, 5)
        );
        assert_eq!((line("clients[1].more.deep[1]"), line("clients[0].priority")), (8, 2));
        assert_eq!(line("absent"), 1);
    }
}
