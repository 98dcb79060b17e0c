//! One name for one thing: a public type's name is not used in many crates.

use std::collections::{BTreeMap, BTreeSet};

/// Crates that may each have a public type of one name.
const CRATES_PER_NAME_MAX: usize = 2;

/// Public types by name, with the crates that define one.
#[derive(Debug, Default)]
pub(crate) struct PublicNames(BTreeMap<String, BTreeSet<String>>);

impl PublicNames {
    /// Takes note of the public types of a file of `crate_name`.
    pub(crate) fn add(&mut self, crate_name: &str, source: &str) {
        for name in source.lines().filter_map(public_type) {
            self.0.entry(name.to_string()).or_default().insert(crate_name.to_string());
        }
    }

    /// The names that too many crates use.
    pub(crate) fn check(&self) -> Vec<String> {
        let many = self.0.iter().filter(|(_, crates)| crates.len() > CRATES_PER_NAME_MAX);
        many.map(|(name, crates)| {
            let crates = crates.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            format!("{name} is a public type of {crates}: add a qualifier")
        })
        .collect()
    }
}

/// The type that a line at the outermost level makes public.
fn public_type(line: &str) -> Option<&str> {
    let item = line.strip_prefix("pub ")?;
    let kinds = ["struct ", "enum ", "trait ", "type ", "union "];
    let name = kinds.iter().find_map(|kind| item.strip_prefix(kind))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    Some(&name[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_many_crates_are_found() {
        let mut names = PublicNames::default();
        for crate_name in ["a", "b", "c"] {
            names.add(crate_name, "pub struct Pool<T> {\n}\npub(crate) struct Own;\nstruct Mine;");
            names.add(crate_name, "    pub struct Inner;");
        }
        names.add("a", "pub enum Pair {}");
        names.add("b", "pub trait Pair {}");
        assert_eq!(names.check(), ["Pool is a public type of a, b, c: add a qualifier"]);
    }
}
