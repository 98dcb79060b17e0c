//! The file of services: their models, rates and objectives, and what each is worth.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::error::PlanError;
use crate::gpu_mix::FailureDomain;
use crate::problem::Service;
use crate::toml_file::{in_range, name, read, wrong};

/// Priority of a service that names none; 1 is the highest.
pub const PRIORITY_DEFAULT: u32 = 100;
/// The lowest priority.
const PRIORITY_MAX: u32 = 1_000_000;
/// Rates and SLOs that a plan can serve.
const FIGURES: (f64, f64) = (0.001, 1e9);
const HEADROOMS: (f64, f64) = (0.0, 10.0);
const REVENUES: (f64, f64) = (0.0, 1e12);

/// What a service is worth, for when not all services can be served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceTerms {
    /// Its priority; 1 is the highest.
    pub priority: u32,
    /// Revenue of a thousand requests, in the currency of the prices.
    pub revenue: f64,
    /// GPU kinds that it may run on; all if empty.
    pub gpus: Vec<String>,
    /// No two services of this group share a GPU; empty for no group.
    pub apart: String,
    /// What they do not share: a GPU, a machine or a rack. The widest of a group counts.
    #[serde(default)]
    pub apart_by: FailureDomain,
    /// All services of this group are on one GPU, in one machine or in one rack; empty for none.
    #[serde(default)]
    pub together: String,
    /// What they share. The narrowest of a group counts.
    #[serde(default)]
    pub together_by: FailureDomain,
}

impl Default for ServiceTerms {
    fn default() -> ServiceTerms {
        ServiceTerms {
            priority: PRIORITY_DEFAULT,
            revenue: 0.0,
            gpus: Vec::new(),
            apart: String::new(),
            apart_by: FailureDomain::Gpu,
            together: String::new(),
            together_by: FailureDomain::Gpu,
        }
    }
}

/// The services of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceList {
    /// The services.
    pub services: Vec<Service>,
    /// What each is worth, in the same order.
    pub terms: Vec<ServiceTerms>,
    /// Headroom of services that have one of their own.
    pub own_headroom: BTreeMap<String, f64>,
    /// Where the file says so, in the same order as the services.
    pub lines: Vec<ServiceLines>,
}

/// Lines of a service's fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceLines {
    name: usize,
    model: usize,
    rate: usize,
    slo_ms: usize,
}

impl ServiceLines {
    /// The line of the field that an error of the service is about.
    pub fn of(self, error: &PlanError) -> usize {
        match error {
            PlanError::NoProfile { .. } | PlanError::NoPoint { .. } => self.model,
            PlanError::BadRate { .. } | PlanError::TooManySlices { .. } => self.rate,
            PlanError::BadSlo { .. } | PlanError::Infeasible { .. } => self.slo_ms,
            _ => self.name,
        }
    }
}

/// An unknown key is refused, because it is likely a typing error.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ServicesFile {
    #[serde(default)]
    service: Vec<Spanned<ServiceEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ServiceEntry {
    name: Spanned<String>,
    model: Spanned<String>,
    rate: Spanned<f64>,
    slo_ms: Spanned<f64>,
    headroom: Option<Spanned<f64>>,
    priority: Option<Spanned<u32>>,
    revenue: Option<Spanned<f64>>,
    #[serde(default)]
    gpus: Vec<Spanned<String>>,
    apart: Option<Spanned<String>>,
    apart_by: Option<Spanned<String>>,
    together: Option<Spanned<String>>,
    together_by: Option<Spanned<String>>,
}

impl ServiceList {
    /// Reads `[[service]]` tables with `name`, `model`, `rate`, `slo_ms` and, where wanted,
    /// `headroom`, `priority`, `revenue`, `gpus`, `apart`, `apart_by`, `together` and
    /// `together_by`. Returns the services whose values are in range, and for each of the others
    /// an error with its line.
    pub fn from_toml(text: &str) -> Result<(ServiceList, Vec<PlanError>), PlanError> {
        let file: ServicesFile = read(text)?;
        let (mut list, mut faults) = (ServiceList::default(), Vec::new());
        let breaks: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
        let mut names = BTreeSet::new();
        for entry in &file.service {
            let entry = entry.get_ref();
            let checked = match names.insert(entry.name.get_ref()) {
                true => checked(text, entry),
                false => Err(wrong(text, &entry.name, given_twice(entry.name.get_ref()))),
            };
            match checked {
                Ok((service, terms, headroom)) => {
                    list.lines.push(lines_of(&breaks, entry));
                    list.own_headroom.extend(headroom.map(|own| (service.name.clone(), own)));
                    list.services.push(service);
                    list.terms.push(terms);
                }
                Err(error) => faults.push(error),
            }
        }
        Ok((list, faults))
    }
}

fn given_twice(name: &str) -> String {
    PlanError::Duplicate { service: name.to_string() }.to_string()
}

/// `breaks` are the places of the file's line breaks.
fn lines_of(breaks: &[usize], entry: &ServiceEntry) -> ServiceLines {
    let line = |at: usize| 1 + breaks.partition_point(|place| *place < at);
    ServiceLines {
        name: line(entry.name.span().start),
        model: line(entry.model.span().start),
        rate: line(entry.rate.span().start),
        slo_ms: line(entry.slo_ms.span().start),
    }
}

fn checked(
    text: &str,
    entry: &ServiceEntry,
) -> Result<(Service, ServiceTerms, Option<f64>), PlanError> {
    let own = name(text, "name", &entry.name)?;
    let field = |field: &str| format!("service '{own}': {field}");
    let service = Service {
        model: name(text, &field("model"), &entry.model)?,
        rate: in_range(text, &field("rate"), &entry.rate, FIGURES)?,
        slo_ms: in_range(text, &field("slo_ms"), &entry.slo_ms, FIGURES)?,
        name: own.clone(),
    };
    let ranged = |value: &Option<Spanned<f64>>, what: &str, range| match value {
        Some(value) => in_range(text, &field(what), value, range).map(Some),
        None => Ok(None),
    };
    let priority = match &entry.priority {
        None => PRIORITY_DEFAULT,
        Some(value) if (1..=PRIORITY_MAX).contains(value.get_ref()) => *value.get_ref(),
        Some(value) => {
            let what = format!(
                "{} {} is not from 1 to {PRIORITY_MAX}",
                field("priority"),
                value.get_ref()
            );
            return Err(wrong(text, value, what));
        }
    };
    let gpus = entry.gpus.iter().map(|gpu| name(text, &field("gpus"), gpu));
    let group = |key: &str, value: &Option<Spanned<String>>| match value {
        Some(value) => name(text, &field(key), value),
        None => Ok(String::new()),
    };
    let domain = |key: &str, group: &Option<Spanned<String>>, value: &Option<Spanned<String>>| {
        let Some(value) = value else { return Ok(FailureDomain::Gpu) };
        let bad = |what: String| wrong(text, value, field(&format!("{key}_by {what}")));
        match group {
            None => Err(bad(format!("needs {key}, the group's name"))),
            Some(_) => value.get_ref().parse().map_err(bad),
        }
    };
    let terms = ServiceTerms {
        priority,
        revenue: ranged(&entry.revenue, "revenue", REVENUES)?.unwrap_or(0.0),
        gpus: gpus.collect::<Result<_, _>>()?,
        apart: group("apart", &entry.apart)?,
        apart_by: domain("apart", &entry.apart, &entry.apart_by)?,
        together: group("together", &entry.together)?,
        together_by: domain("together", &entry.together, &entry.together_by)?,
    };
    Ok((service, terms, ranged(&entry.headroom, "headroom", HEADROOMS)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[[service]]\nname = 'a'\nmodel = 'm'\nrate = 10\nslo_ms = 50\n";

    #[test]
    fn optional_values_have_defaults() {
        let more = "[[service]]\nname = 'b'\nmodel = 'm'\nrate = 1.5\nslo_ms = 50\n\
                    headroom = 0.25\npriority = 1\nrevenue = 2\ngpus = ['l4-24gb']\napart = 'x'\n\
                    apart_by = 'rack'\ntogether = 'y'\ntogether_by = 'machine'\n";
        let (list, faults) = ServiceList::from_toml(&format!("{GOOD}{more}")).unwrap();
        assert!(faults.is_empty());
        assert_eq!(list.terms[0], ServiceTerms::default());
        assert_eq!((list.terms[1].priority, list.terms[1].revenue), (1, 2.0));
        assert_eq!(list.terms[1].gpus, ["l4-24gb"]);
        assert_eq!(list.terms[1].apart_by, FailureDomain::Rack);
        assert_eq!(list.terms[1].together, "y");
        assert_eq!(list.terms[1].together_by, FailureDomain::Machine);
        assert_eq!(list.own_headroom.get("b"), Some(&0.25));
        let service = "b".to_string();
        let infeasible = PlanError::Infeasible { service, slo_ms: 1.0, nearest_ms: 2.0 };
        assert_eq!(list.lines.iter().map(|at| at.of(&infeasible)).collect::<Vec<_>>(), [5, 10]);
    }

    #[test]
    fn every_bad_value_is_named_with_its_line() {
        for (line, bad, field) in [
            (2, GOOD.replace("'a'", "\"a\\nreboot\""), "name"),
            (3, GOOD.replace("'m'", "''"), "model"),
            (4, GOOD.replace("rate = 10", "rate = 0"), "rate 0"),
            (4, GOOD.replace("rate = 10", "rate = nan"), "rate NaN"),
            (4, GOOD.replace("rate = 10", "rate = -3.0"), "rate -3"),
            (5, GOOD.replace("slo_ms = 50", "slo_ms = inf"), "slo_ms inf"),
            (6, format!("{GOOD}headroom = -0.1\n"), "headroom -0.1"),
            (6, format!("{GOOD}priority = 0\n"), "priority 0"),
            (6, format!("{GOOD}revenue = inf\n"), "revenue inf"),
            (6, format!("{GOOD}gpus = ['']\n"), "gpus"),
            (6, format!("{GOOD}apart_by = 'rack'\n"), "apart_by needs apart"),
            (7, format!("{GOOD}apart = 'g'\napart_by = 'row'\n"), "apart_by 'row' is not gpu"),
            (6, format!("{GOOD}together_by = 'gpu'\n"), "together_by needs together"),
            (7, format!("{GOOD}together = 'g'\ntogether_by = '1'\n"), "together_by '1' is not"),
        ] {
            // The other service of the file can still be planned.
            let text = format!("{bad}{}", GOOD.replace("'a'", "'other'"));
            let (list, faults) = ServiceList::from_toml(&text).unwrap();
            assert_eq!(list.services.len(), 1, "{text}");
            let fault = faults[0].to_string();
            assert!(fault.contains(&format!("line {line}:")) && fault.contains(field), "{fault}");
        }
        // Of two services of one name the first is planned.
        let (list, faults) = ServiceList::from_toml(&format!("{GOOD}{GOOD}")).unwrap();
        assert_eq!((list.services.len(), list.lines.len()), (1, 1));
        assert_eq!(faults[0].to_string(), "line 7: service 'a' is given twice");
        // What is no service at all ends the reading.
        for (bad, line, what) in [
            (GOOD.replace("slo_ms", "slo"), 5, "slo"),
            (GOOD.replace("rate = 10", "rate = 'x'"), 4, "string"),
            (format!("{GOOD}priority = -1\n"), 6, "priority"),
            (GOOD.replace("= 'm'", "= 'm"), 3, ""),
        ] {
            let error = ServiceList::from_toml(&bad).unwrap_err();
            let PlanError::BadFile { line: found, .. } = &error else { panic!("{error}") };
            assert!(*found == line && error.to_string().contains(what), "{error}");
        }
    }
}
