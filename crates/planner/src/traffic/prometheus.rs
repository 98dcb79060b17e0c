//! Answers of Prometheus' `query_range`, read as samples of rates. Nothing is requested here.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::{RATE_MAX, SAMPLES_MAX, TIME_S_MAX, Traffic};
use crate::toml_file::is_name;

/// Most series of an answer.
const SERIES_MAX: usize = 20_000;
/// Most characters of a name or message of the server that an error shows.
const SHOWN_MAX: usize = 200;
/// Most labels that an error lists.
const LABELS_SHOWN: usize = 12;

/// Why an answer is no traffic.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AnswerError {
    /// The server did not run the query.
    #[error("the server refuses the query: {message} ({kind})")]
    Refused {
        /// The server's word for the kind of error: `bad_data`, `timeout`, `execution`.
        kind: String,
        /// The server's message.
        message: String,
    },
    /// Not JSON of this form.
    #[error("this is no answer of query_range: {what}; name the address of a Prometheus server")]
    NotAnAnswer {
        /// What is wrong.
        what: String,
    },
    /// More than is read.
    #[error("the answer has more than {max} {what}; aggregate the query, or take a longer step")]
    TooMuch {
        /// Of what.
        what: &'static str,
        /// The limit.
        max: usize,
    },
    /// A series that names no service.
    #[error(
        "a series has no label '{label}'; it has {found}; name another with --service-label, or \
         keep it: sum by ({label}) (...)"
    )]
    NoLabel {
        /// The label that was looked for.
        label: String,
        /// Labels of the series.
        found: String,
    },
    /// Two series name one service.
    #[error("two series have {label}='{service}'; add them up: sum by ({label}) (...)")]
    TwoSeries {
        /// The label that names services.
        label: String,
        /// The service.
        service: String,
    },
    /// A value that is no rate.
    #[error(
        "'{service}' has {value:?} at {time_s:?}, which is not from 0 to 1e9 requests a second"
    )]
    BadRate {
        /// The service.
        service: String,
        /// The value.
        value: String,
        /// Its time.
        time_s: f64,
    },
    /// A time that is none.
    #[error("'{service}' has a sample at time {time_s:?}")]
    BadTime {
        /// The service.
        service: String,
        /// The time.
        time_s: f64,
    },
    /// Memory for the samples is not to be had.
    #[error("there is no memory for {samples} samples; take a longer step")]
    NoMemory {
        /// Samples of one series.
        samples: usize,
    },
}

#[derive(Deserialize)]
struct Answer<'a> {
    status: String,
    #[serde(borrow, default)]
    data: Option<AnswerData<'a>>,
    #[serde(default, rename = "errorType")]
    error_type: String,
    #[serde(default)]
    error: String,
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Deserialize)]
struct AnswerData<'a> {
    #[serde(rename = "resultType")]
    result_type: String,
    #[serde(borrow, default)]
    result: Vec<Series<'a>>,
}

#[derive(Deserialize)]
struct Series<'a> {
    #[serde(default)]
    metric: BTreeMap<String, String>,
    /// Seconds since 1970, and a number in quotes.
    #[serde(borrow, default)]
    values: Vec<(f64, &'a str)>,
}

/// What an answer says beside its samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerNotes {
    /// Warnings of the server.
    pub warnings: Vec<String>,
    /// Samples that are not a number, which count as gaps.
    pub gaps: usize,
}

impl Traffic {
    /// Adds the samples of an answer. `label` names the service of a series.
    pub fn add_prometheus(
        &mut self,
        answer: &[u8],
        label: &str,
    ) -> Result<AnswerNotes, AnswerError> {
        let not = |what: String| AnswerError::NotAnAnswer { what };
        let answer: Answer<'_> =
            serde_json::from_slice(answer).map_err(|error| not(error.to_string()))?;
        if answer.status != "success" {
            return Err(AnswerError::Refused {
                kind: shown(&answer.error_type),
                message: shown(&answer.error),
            });
        }
        let data = answer.data.ok_or_else(|| not("it has no data".to_string()))?;
        if data.result_type != "matrix" {
            return Err(not(format!("its result is a {}", shown(&data.result_type))));
        }
        if data.result.len() > SERIES_MAX {
            return Err(AnswerError::TooMuch { what: "series", max: SERIES_MAX });
        }
        let warnings = answer.warnings.iter().map(|text| shown(text)).collect();
        let mut notes = AnswerNotes { warnings, gaps: 0 };
        let known = self.services.iter().cloned().enumerate().map(|(index, name)| (name, index));
        let mut index: BTreeMap<String, usize> = known.collect();
        let mut seen = BTreeSet::new();
        for mut series in data.result {
            let name = series.metric.remove(label).filter(|name| is_name(name));
            let Some(name) = name else { return Err(no_label(label, &series)) };
            let services = &mut self.services;
            let service = *index.entry(name.clone()).or_insert_with(|| {
                services.push(name.clone());
                services.len() - 1
            });
            if !seen.insert(service) {
                let service = shown(&name);
                return Err(AnswerError::TwoSeries { label: label.to_string(), service });
            }
            notes.gaps += self.add_series(service, &series.values)?;
        }
        Ok(notes)
    }

    /// Adds the samples of a series; returns how many are not a number.
    fn add_series(&mut self, service: usize, values: &[(f64, &str)]) -> Result<usize, AnswerError> {
        if self.samples.len() + values.len() > SAMPLES_MAX {
            return Err(AnswerError::TooMuch { what: "samples", max: SAMPLES_MAX });
        }
        let no_memory = |_| AnswerError::NoMemory { samples: values.len() };
        self.samples.try_reserve(values.len()).map_err(no_memory)?;
        let mut gaps = 0;
        for &(time_s, text) in values {
            let name = || shown(&self.services[service]);
            if !(0.0..=TIME_S_MAX).contains(&time_s) {
                return Err(AnswerError::BadTime { service: name(), time_s });
            }
            match text.parse::<f64>() {
                // A share of nothing, such as 0/0, is a gap in the recording.
                Ok(rate) if rate.is_nan() => gaps += 1,
                Ok(rate) if (0.0..=RATE_MAX).contains(&rate) => {
                    self.samples.push((time_s as u64, service, rate));
                }
                _ => {
                    let value = shown(text);
                    return Err(AnswerError::BadRate { service: name(), value, time_s });
                }
            }
        }
        Ok(gaps)
    }

    /// How many samples there are.
    pub fn samples(&self) -> usize {
        self.samples.len()
    }
}

fn no_label(label: &str, series: &Series<'_>) -> AnswerError {
    let names = series.metric.keys().filter(|name| *name != "__name__");
    let names: Vec<String> = names.take(LABELS_SHOWN).map(|name| shown(name)).collect();
    let found = if names.is_empty() { "none".to_string() } else { names.join(", ") };
    AnswerError::NoLabel { label: label.to_string(), found }
}

/// Text of the server for a message: short, and without characters of control.
fn shown(text: &str) -> String {
    let mut short: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(SHOWN_MAX).collect();
    if text.chars().nth(SHOWN_MAX).is_some() {
        short += "...";
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::WindowRate;

    fn series(label: &str, name: &str, values: &str) -> String {
        format!(r#"{{"metric":{{"{label}":"{name}"}},"values":[{values}]}}"#)
    }

    fn matrix(series: &[String]) -> String {
        let result = series.join(",");
        format!(r#"{{"status":"success","data":{{"resultType":"matrix","result":[{result}]}}}}"#)
    }

    #[test]
    fn answers_say_the_same_as_a_file() {
        let mut traffic = Traffic::default();
        // Two answers, one after the other in time; the second has a service more.
        let first = series("model", "a", r#"[0,"10"],[3599.999,"30.5"],[3600,"NaN"]"#);
        let notes = traffic.add_prometheus(matrix(&[first]).as_bytes(), "model").unwrap();
        assert_eq!((notes.gaps, notes.warnings.len()), (1, 0));
        let second = [
            series("model", "b", r#"[7200,"1e1"]"#),
            series("model", "a", r#"[7200,"5"],[10799,"7"]"#),
        ];
        traffic.add_prometheus(matrix(&second).as_bytes(), "model").unwrap();
        let file = Traffic::from_csv("time,a,b\n0,10,\n3599,30.5,\n7200,5,10\n10799,7,\n").unwrap();
        for rate in [WindowRate::Peak, WindowRate::Percentile(50.0)] {
            for fold in [false, true] {
                let windows = |traffic: &Traffic| traffic.windows(3600, fold, rate).unwrap();
                assert_eq!(windows(&traffic), windows(&file));
            }
        }
        assert_eq!((traffic.samples(), traffic.services.len()), (5, 2));
    }

    #[test]
    fn warnings_are_passed_on() {
        let text = matrix(&[]).replace("{\"status\"", "{\"warnings\":[\"partial\\n\"],\"status\"");
        let notes = Traffic::default().add_prometheus(text.as_bytes(), "model").unwrap();
        assert_eq!(notes.warnings, ["partial "]);
    }

    #[test]
    fn what_is_no_traffic_is_named() {
        let long = "x".repeat(5000);
        let point = r#"[1,"1"]"#;
        let cases = [
            (String::new(), "no answer"),
            ("<html>".to_string(), "no answer"),
            (r#"{"status":"success"}"#.to_string(), "no data"),
            (matrix(&[]).replace("matrix", "vector"), "a vector"),
            (
                r#"{"status":"error","errorType":"bad_data","error":"1:5: parse error"}"#
                    .to_string(),
                "1:5: parse error (bad_data)",
            ),
            (matrix(&[series("pod", "p", point)]), "no label 'model'; it has pod"),
            (matrix(&[series("model", "", point)]), "no label 'model'; it has none"),
            (matrix(&[series("model", "a", point), series("model", "a", point)]), "sum by (model)"),
            (matrix(&[series("model", "a", r#"[1,"+Inf"]"#)]), "\"+Inf\" at 1.0"),
            (matrix(&[series("model", "a", r#"[1,"-1"]"#)]), "\"-1\" at 1.0"),
            (matrix(&[series("model", "a", r#"[1,"ten"]"#)]), "\"ten\" at 1.0"),
            (matrix(&[series("model", "a", r#"[-1,"1"]"#)]), "at time -1.0"),
            (matrix(&[series("model", "a", r#"[1e300,"1"]"#)]), "at time 1e300"),
            (matrix(&[series("model", "a", r#"["1","1"]"#)]), "no answer"),
            (matrix(&[series("model", "a", r#"[1]"#)]), "no answer"),
            (matrix(&[series(&long, "a", point)]), "..."),
        ];
        for (text, what) in cases {
            let error = Traffic::default().add_prometheus(text.as_bytes(), "model");
            let error = error.unwrap_err().to_string();
            assert!(error.contains(what) && error.len() < 1000, "{error}");
        }
        let many: Vec<String> =
            (0..=SERIES_MAX).map(|index| series("model", &index.to_string(), point)).collect();
        let error = Traffic::default().add_prometheus(matrix(&many).as_bytes(), "model");
        assert_eq!(error, Err(AnswerError::TooMuch { what: "series", max: SERIES_MAX }));
    }
}
