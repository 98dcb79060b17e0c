//! Messages of OTLP, as far as they are used, and the spans of a request.
//!
//! The definition is `opentelemetry/proto/trace/v1/trace.proto`; field numbers are its own.

use api::infer::RequestTiming;
use base::Nanos;

use super::{RequestRecord, SpanIds};

/// What is posted to a collector.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ExportTraceServiceRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub(super) resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub(super) scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub(super) attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub(super) scope: Option<InstrumentationScope>,
    #[prost(message, repeated, tag = "2")]
    pub(super) spans: Vec<Span>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct InstrumentationScope {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) version: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Span {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) span_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    pub(super) parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub(super) name: String,
    #[prost(int32, tag = "6")]
    pub(super) kind: i32,
    #[prost(fixed64, tag = "7")]
    pub(super) start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    pub(super) end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    pub(super) attributes: Vec<KeyValue>,
    #[prost(message, optional, tag = "15")]
    pub(super) status: Option<Status>,
    #[prost(fixed32, tag = "16")]
    pub(super) flags: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Status {
    #[prost(string, tag = "2")]
    pub(super) message: String,
    #[prost(int32, tag = "3")]
    pub(super) code: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KeyValue {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(message, optional, tag = "2")]
    pub(super) value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AnyValue {
    #[prost(oneof = "AttributeValue", tags = "1, 3")]
    pub(super) value: Option<AttributeValue>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum AttributeValue {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(int64, tag = "3")]
    Number(i64),
}

/// What a collector replies.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ExportTraceServiceResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) partial_success: Option<PartialSuccess>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PartialSuccess {
    #[prost(int64, tag = "1")]
    pub(super) rejected_spans: i64,
    #[prost(string, tag = "2")]
    pub(super) error_message: String,
}

const INTERNAL: i32 = 1;
const SERVER: i32 = 2;
const ERROR: i32 = 2;
/// The caller's decision is recorded (bit 0).
const SAMPLED: u32 = 1;

pub(super) fn text(key: &str, value: &str) -> KeyValue {
    let value = Some(AttributeValue::Text(value.to_string()));
    KeyValue { key: key.to_string(), value: Some(AnyValue { value }) }
}

fn number(key: &str, value: u64) -> KeyValue {
    let value = Some(AttributeValue::Number(i64::try_from(value).unwrap_or(i64::MAX)));
    KeyValue { key: key.to_string(), value: Some(AnyValue { value }) }
}

/// How many children the span of a request has.
pub(super) fn phase_count(timing: &RequestTiming) -> usize {
    4 + usize::from(timing.rows > 0)
}

/// The message with `records` of a server with these attributes.
pub(super) fn request(
    resource: &[(String, String)],
    records: &[RequestRecord],
    ids: &SpanIds,
) -> ExportTraceServiceRequest {
    let attributes = resource.iter().map(|(key, value)| text(key, value)).collect();
    let scope = InstrumentationScope {
        name: "atoll".to_string(),
        version: env!("CARGO_PKG_VERSION").to_string(),
    };
    let spans = records.iter().flat_map(|record| spans(record, ids)).collect();
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource { attributes }),
            scope_spans: vec![ScopeSpans { scope: Some(scope), spans }],
        }],
    }
}

/// The span of a request and its children: inputs, queue, batch, compute, outputs.
fn spans(record: &RequestRecord, ids: &SpanIds) -> Vec<Span> {
    let mut attributes =
        vec![text("atoll.model", &record.model), text("atoll.protocol", record.protocol)];
    attributes.extend(record.stage.as_deref().map(|stage| text("atoll.stage", stage)));
    let status = record.error.as_ref().map(|(kind, message)| {
        attributes.push(text("error.type", &kind.http_status().to_string()));
        Status { message: message.clone(), code: ERROR }
    });
    let whole = Span {
        trace_id: record.trace_id.to_be_bytes().to_vec(),
        span_id: record.span_id.to_be_bytes().to_vec(),
        parent_span_id: record.parent_id.map_or_else(Vec::new, |id| id.to_be_bytes().to_vec()),
        name: format!("{} {}", record.name, record.stage.as_ref().unwrap_or(&record.model)),
        kind: if record.stage.is_some() { INTERNAL } else { SERVER },
        start_time_unix_nano: record.began_unix_ns,
        end_time_unix_nano: record.ended_unix_ns,
        attributes,
        status,
        flags: SAMPLED,
    };
    let mut spans = vec![whole];
    if let Some(timing) = &record.timing {
        add_phases(&mut spans, timing, ids);
    }
    spans
}

fn add_phases(spans: &mut Vec<Span>, timing: &RequestTiming, ids: &SpanIds) {
    // The clock of the node, as Unix time.
    let unix = |at: Nanos| timing.ready_unix_ns.saturating_sub((timing.ready - at).0);
    // A point that was not passed is where the one before was.
    let staged = timing.staged.max(timing.arrived);
    let started = timing.started.max(staged);
    let finished = timing.finished.max(started);
    let root = spans[0].clone();
    let mut add = |name: &str, parent: &[u8], (from, to): (Nanos, Nanos), attributes| {
        let span_id = ids.next().to_be_bytes().to_vec();
        spans.push(Span {
            trace_id: root.trace_id.clone(),
            span_id: span_id.clone(),
            parent_span_id: parent.to_vec(),
            name: name.to_string(),
            kind: INTERNAL,
            start_time_unix_nano: unix(from),
            end_time_unix_nano: unix(to),
            attributes,
            status: None,
            flags: SAMPLED,
        });
        span_id
    };
    add("inputs", &root.span_id, (timing.arrived, staged), vec![]);
    add("queue", &root.span_id, (staged, started), vec![]);
    let mut parent = root.span_id.clone();
    if timing.rows > 0 {
        let rows = vec![number("atoll.batch.rows", timing.rows as u64)];
        parent = add("batch", &root.span_id, (started, finished), rows);
    }
    let compute = vec![
        number("atoll.device_ns", timing.busy.0),
        number("atoll.preemptions", u64::from(timing.preemptions)),
    ];
    add("compute", &parent, (started, finished), compute);
    add("outputs", &root.span_id, (finished, timing.ready.max(finished)), vec![]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(timing: Option<RequestTiming>) -> RequestRecord {
        RequestRecord {
            trace_id: 0x0102,
            span_id: 3,
            parent_id: Some(4),
            name: "infer",
            model: "resnet".to_string(),
            stage: None,
            protocol: "rest",
            began_unix_ns: 1_000,
            ended_unix_ns: 2_000,
            error: None,
            timing,
        }
    }

    #[test]
    fn phases_follow_each_other_in_unix_time() {
        let timing = RequestTiming {
            arrived: Nanos(100),
            staged: Nanos(150),
            started: Nanos(300),
            finished: Nanos(700),
            ready: Nanos(720),
            ready_unix_ns: 1_900,
            busy: Nanos(350),
            preemptions: 2,
            rows: 8,
        };
        let ids = SpanIds::new().expect("random numbers");
        let spans = spans(&record(Some(timing)), &ids);
        assert_eq!(spans.len(), 1 + phase_count(&timing));
        let times: Vec<(&str, u64, u64)> = spans
            .iter()
            .map(|s| (s.name.as_str(), s.start_time_unix_nano, s.end_time_unix_nano))
            .collect();
        assert_eq!(
            times,
            [
                ("infer resnet", 1_000, 2_000),
                ("inputs", 1_280, 1_330),
                ("queue", 1_330, 1_480),
                ("batch", 1_480, 1_880),
                ("compute", 1_480, 1_880),
                ("outputs", 1_880, 1_900),
            ]
        );
        assert_eq!(spans[0].parent_span_id, 4u64.to_be_bytes());
        assert_eq!(spans[4].parent_span_id, spans[3].span_id);
        for child in [1, 2, 3, 5] {
            assert_eq!(spans[child].parent_span_id, spans[0].span_id);
        }
        assert!(spans.iter().all(|span| span.trace_id == 0x0102u128.to_be_bytes()));
    }

    #[test]
    fn a_request_alone_has_no_batch_and_a_refused_one_no_phases() {
        let ids = SpanIds::new().expect("random numbers");
        let alone = spans(&record(Some(RequestTiming::default())), &ids);
        let names: Vec<&str> = alone.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["infer resnet", "inputs", "queue", "compute", "outputs"]);
        let mut refused = record(None);
        refused.error = Some((api::ErrorKind::NotFound, "no such model".to_string()));
        let refused = spans(&refused, &ids);
        assert_eq!(refused.len(), 1);
        let status = refused[0].status.clone().expect("a status");
        assert_eq!((status.code, status.message.as_str()), (ERROR, "no such model"));
        assert!(refused[0].attributes.contains(&text("error.type", "404")));
    }
}
