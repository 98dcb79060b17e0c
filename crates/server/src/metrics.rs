//! Metrics in the Prometheus text format, under the names that dashboards for Triton use.
//!
//! Some of these names lack the `_total` that client libraries enforce, so the format, three kinds
//! of lines, is written here.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::extract::State;
use axum::response::IntoResponse;
use http::header::CONTENT_TYPE;

use crate::auth::Reason;
use crate::connection::CloseReason;
use crate::descriptors;
use crate::rest::Routes;
use crate::server::AppState;

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Monotonically increasing.
    Counter,
    /// Can increase and decrease.
    Gauge,
    /// Cumulative counts by upper bound.
    Histogram,
}

/// Writes metrics with their samples.
pub struct Exposition<'a> {
    text: &'a mut String,
}

impl<'a> Exposition<'a> {
    /// Appends to `text`.
    pub fn new(text: &'a mut String) -> Exposition<'a> {
        Exposition { text }
    }

    /// Starts the metric `name`; its samples follow.
    pub fn family(&mut self, name: &str, kind: MetricKind, help: &str) {
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One sample.
    pub fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(name);
        for (index, (key, label)) in labels.iter().enumerate() {
            self.text.push(if index == 0 { '{' } else { ',' });
            let _ = write!(self.text, "{key}=\"");
            for c in label.chars() {
                match c {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    c => self.text.push(c),
                }
            }
            self.text.push('"');
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }
}

pub(crate) fn with_metrics(routes: Routes) -> Routes {
    routes.get("/metrics", page)
}

async fn page(State(app): State<Arc<AppState>>) -> impl IntoResponse {
    let mut text = String::with_capacity(16 * 1024);
    let mut exposition = Exposition::new(&mut text);
    exposition.family(
        "atoll_requests_in_flight",
        MetricKind::Gauge,
        "Inference requests in flight",
    );
    exposition.sample("atoll_requests_in_flight", &[], app.requests.in_flight());
    exposition.family("atoll_draining", MetricKind::Gauge, "1 while the server drains");
    exposition.sample("atoll_draining", &[], u8::from(app.requests.is_closed()));
    let memory = app.bodies.memory;
    let name = "atoll_host_memory_bytes";
    exposition.family(name, MetricKind::Gauge, "Host memory reserved by requests and models");
    exposition.sample(name, &[], memory.used());
    let name = "atoll_host_memory_limit_bytes";
    exposition.family(name, MetricKind::Gauge, "Host memory that may be reserved");
    exposition.sample(name, &[], memory.limit());
    let name = "atoll_host_memory_refused_total";
    exposition.family(name, MetricKind::Counter, "Reservations of host memory that were refused");
    exposition.sample(name, &[], memory.refused());
    write_refusals(&mut exposition, &app);
    write_connections(&mut exposition, &app);
    write_spans(&mut exposition, &app);
    app.service.write_metrics(&mut text);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

fn write_refusals(exposition: &mut Exposition<'_>, app: &AppState) {
    let name = "atoll_requests_refused_total";
    exposition.family(name, MetricKind::Counter, "Requests refused for lack of permission");
    for reason in Reason::ALL {
        let labels = [("reason", reason.as_str())];
        exposition.sample(name, &labels, app.access.refused(reason));
    }
}

/// Spans for OpenTelemetry, where they are sent.
fn write_spans(exposition: &mut Exposition<'_>, app: &AppState) {
    let Some(telemetry) = &app.telemetry else { return };
    let counts = &telemetry.counts;
    let name = "atoll_spans_total";
    exposition.family(name, MetricKind::Counter, "Spans for OpenTelemetry, by what became of them");
    for (result, count) in
        [("exported", &counts.exported), ("dropped", &counts.dropped), ("failed", &counts.failed)]
    {
        exposition.sample(name, &[("result", result)], count.load(Relaxed));
    }
}

fn write_connections(exposition: &mut Exposition<'_>, app: &AppState) {
    let name = "atoll_connections";
    exposition.family(name, MetricKind::Gauge, "Open connections");
    for table in &app.tables {
        exposition.sample(name, &[("listener", table.listener)], table.len());
    }
    let name = "atoll_connections_closed_total";
    exposition.family(name, MetricKind::Counter, "Connections closed or refused by the server");
    for table in &app.tables {
        for reason in CloseReason::ALL {
            let labels = [("listener", table.listener), ("reason", reason.as_str())];
            exposition.sample(name, &labels, table.closed(reason));
        }
    }
    let name = "atoll_accept_failures_total";
    let help = "Connections that could not be accepted for lack of file descriptors or memory";
    exposition.family(name, MetricKind::Counter, help);
    for table in &app.tables {
        exposition.sample(name, &[("listener", table.listener)], table.accept_failures());
    }
    let name = "atoll_file_descriptors";
    exposition.family(name, MetricKind::Gauge, "Open file descriptors");
    if let Some(open) = descriptors::open() {
        exposition.sample(name, &[], open);
    }
    let name = "atoll_file_descriptors_limit";
    exposition.family(name, MetricKind::Gauge, "Limit on open file descriptors");
    exposition.sample(name, &[], descriptors::limit());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut text = String::new();
        let mut exposition = Exposition::new(&mut text);
        exposition.family("a", MetricKind::Counter, "Help");
        exposition.sample("a", &[("model", "x\"y\\z\n"), ("version", "1")], 3);
        exposition.sample("a", &[], 1.5);
        assert_eq!(
            text,
            "# HELP a Help\n# TYPE a counter\na{model=\"x\\\"y\\\\z\\n\",version=\"1\"} 3\na 1.5\n"
        );
    }
}
