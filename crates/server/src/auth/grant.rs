//! What a credential allows.

use std::fmt;
use std::str::FromStr;

use model::config::{Class, Rate};
use serde::{Deserialize, Serialize};

/// One thing that a credential may allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Run models, and read their metadata.
    Infer,
    /// Read metrics, statistics and the index.
    Metrics,
    /// Register, replace and delete models.
    Register,
    /// Everything, also loading, unloading and queries.
    Admin,
}

impl Scope {
    const ALL: [Scope; 4] = [Scope::Infer, Scope::Metrics, Scope::Register, Scope::Admin];

    /// The name on the command line and in files.
    pub const fn as_str(self) -> &'static str {
        match self {
            Scope::Infer => "infer",
            Scope::Metrics => "metrics",
            Scope::Register => "register",
            Scope::Admin => "admin",
        }
    }
}

impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Scope, String> {
        let found = Scope::ALL.into_iter().find(|scope| scope.as_str() == text);
        found.ok_or_else(|| "scopes are infer, metrics, register and admin".to_string())
    }
}

/// A set of scopes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    /// The set of these scopes.
    pub const fn of(scopes: &[Scope]) -> Scopes {
        let (mut bits, mut index) = (0, 0);
        while index < scopes.len() {
            bits |= 1 << scopes[index] as u8;
            index += 1;
        }
        Scopes(bits)
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether this set has one of `needed`. Admin has all.
    pub(crate) const fn allows(self, needed: Scopes) -> bool {
        let admin = Scopes::of(&[Scope::Admin]).0;
        self.0 & (needed.0 | admin) != 0
    }

    /// The names of its scopes.
    pub(crate) fn names(self) -> impl Iterator<Item = &'static str> {
        let has = move |scope: &Scope| self.0 & (1 << *scope as u8) != 0;
        Scope::ALL.into_iter().filter(has).map(Scope::as_str)
    }
}

impl fmt::Display for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().collect::<Vec<_>>().join(" or "))
    }
}

/// What a credential allows, as files and JSON Web Tokens write it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GrantRecord {
    /// Scopes.
    pub scopes: Vec<Scope>,
    /// Models by name; `*` stands for any characters. None means all.
    pub models: Vec<String>,
    /// Classes that requests may have: `rt`, `be`. None means best effort.
    pub classes: Vec<String>,
    /// Highest priority that requests may choose; 1 is the highest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_priority: Option<u32>,
    /// Requests in a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// Requests at the same time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
}

impl GrantRecord {
    pub(crate) fn grant(&self) -> Result<Grant, String> {
        let class = |text: &String| {
            Class::parse(text).ok_or_else(|| format!("'{text}' is not a class: rt or be"))
        };
        let mut classes: Vec<Class> = self.classes.iter().map(class).collect::<Result<_, _>>()?;
        if classes.is_empty() {
            classes.push(Class::BestEffort);
        }
        classes.dedup();
        Ok(Grant {
            scopes: Scopes::of(&self.scopes),
            models: self.models.clone(),
            classes,
            forces_class: true,
            max_priority: self.max_priority,
            rate: self.rate,
            concurrency: self.concurrency,
        })
    }
}

/// What a caller may do.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) scopes: Scopes,
    models: Vec<String>,
    pub(crate) classes: Vec<Class>,
    /// Whether requests get the only allowed class instead of their model's.
    pub(crate) forces_class: bool,
    pub(crate) max_priority: Option<u32>,
    pub(crate) rate: Option<Rate>,
    pub(crate) concurrency: Option<u32>,
}

impl Grant {
    /// The grant where no credentials are required: everything, with a limit on what requests may
    /// choose. Models keep their own class.
    pub(crate) fn anonymous(classes: Vec<Class>, max_priority: Option<u32>) -> Grant {
        Grant {
            scopes: Scopes::of(&Scope::ALL),
            models: Vec::new(),
            classes,
            forces_class: false,
            max_priority,
            rate: None,
            concurrency: None,
        }
    }

    pub(crate) fn allows_model(&self, name: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|pattern| matches(pattern, name))
    }
}

/// Whether `name` matches `pattern`, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, expected) in [
            ("a*", "abc", true),
            ("a*", "ba", false),
            ("abc", "abc", true),
            ("abc", "abcd", false),
            ("*", "", true),
            ("*b", "aab", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("ab*ba", "aba", false),
            ("", "x", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn admin_has_every_scope() {
        let infer = Scopes::of(&[Scope::Infer]);
        assert!(Scopes::of(&[Scope::Admin]).allows(infer));
        assert!(!Scopes::of(&[Scope::Register, Scope::Metrics]).allows(infer));
        assert!(!Scopes::default().allows(infer));
        let either = Scopes::of(&[Scope::Infer, Scope::Register]);
        assert!(infer.allows(either) && either.to_string() == "infer or register");
    }
}
