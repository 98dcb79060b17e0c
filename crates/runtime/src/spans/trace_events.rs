//! Spans in the trace event format that Perfetto and `chrome://tracing` open.
//!
//! A process is a device, its threads are the queues. Requests and copies are asynchronous spans,
//! because they overlap.

use std::fmt::Write as _;

use base::Nanos;
use model::config::Class;

use super::explanation::explain;
use super::{CopySpan, RequestSpan, RunEnd, RunSpan, Span, end_name};
use crate::node::ModelKey;

/// Thread of loads and evictions; queues have lower numbers.
const WEIGHTS_THREAD: u32 = 1_000;

/// The spans of one device.
pub struct DeviceTrace<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its spans.
    pub spans: &'a [Span],
    /// Names of its models.
    pub model_name: &'a dyn Fn(ModelKey) -> String,
    /// Spans that were not recorded any more.
    pub lost: u64,
}

/// Writes the spans of `devices`. Each request says why it took as long as it did, of the last
/// `explained` of a device.
pub fn write(devices: &[DeviceTrace<'_>], explained: usize) -> String {
    let mut out = Writer { text: String::from("{\"traceEvents\":["), first: true };
    for (index, device) in devices.iter().enumerate() {
        write_device(&mut out, index + 1, device, explained);
    }
    let lost: u64 = devices.iter().map(|device| device.lost).sum();
    let _ = writeln!(
        out.text,
        "],\"displayTimeUnit\":\"ns\",\"otherData\":{{\"source\":\"atoll\",\
         \"lost_spans\":{lost}}}}}"
    );
    out.text
}

struct Writer {
    text: String,
    first: bool,
}

/// One event; `rest` are its further fields, each after a comma.
impl Writer {
    fn event(&mut self, phase: char, process: usize, thread: u32, name: &str, rest: &str) {
        let comma = if std::mem::take(&mut self.first) { "" } else { "," };
        let name = quoted(name);
        let _ = write!(
            self.text,
            "{comma}\n{{\"ph\":\"{phase}\",\"pid\":{process},\"tid\":{thread},\
             \"name\":{name}{rest}}}"
        );
    }
}

/// A JSON string.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for letter in text.chars() {
        match letter {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            letter if (letter as u32) < 0x20 => {
                let _ = write!(quoted, "\\u{:04x}", letter as u32);
            }
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

/// Microseconds with all digits.
fn micros(at: Nanos) -> String {
    format!("{}.{:03}", at.0 / 1_000, at.0 % 1_000)
}

fn class_name(class: Class) -> &'static str {
    match class {
        Class::RealTime => "rt",
        Class::BestEffort => "be",
    }
}

fn write_device(out: &mut Writer, process: usize, device: &DeviceTrace<'_>, explained: usize) {
    let named = |name: &str| format!(",\"args\":{{\"name\":{}}}", quoted(name));
    out.event('M', process, 0, "process_name", &named(device.name));
    let mut queues: Vec<u32> = device
        .spans
        .iter()
        .filter_map(|span| match span {
            Span::Run(run) => Some(run.queue),
            _ => None,
        })
        .collect();
    queues.sort_unstable();
    queues.dedup();
    for queue in queues {
        out.event('M', process, queue + 1, "thread_name", &named(&format!("queue {queue}")));
    }
    let weights = |span: &Span| matches!(span, Span::Load(_) | Span::Eviction(_));
    if device.spans.iter().any(weights) {
        out.event('M', process, WEIGHTS_THREAD, "thread_name", &named("weights"));
    }
    let requests = device.spans.iter().filter(|span| matches!(span, Span::Request(_))).count();
    let unexplained = requests.saturating_sub(explained);
    let by_end = SpansByEnd::new(device.spans);
    let (mut seen, mut copies) = (0, 0);
    for span in device.spans {
        match span {
            Span::Run(run) => write_run(out, process, run, device.model_name),
            Span::Request(request) => {
                seen += 1;
                let near = (seen > unexplained).then(|| by_end.around(request));
                write_request(out, process, request, near, device.model_name);
            }
            Span::Copy(copy) => {
                copies += 1;
                write_copy(out, process, copy, copies, device.model_name);
            }
            Span::Load(load) => {
                let name = format!("load {}", (device.model_name)(load.model));
                let rest = format!(
                    ",\"cat\":\"weights\",\"ts\":{},\"dur\":{},\"args\":{{\"bytes\":{},\
                     \"urgent\":{},\"failed\":{}}}",
                    micros(load.began),
                    micros(load.ended - load.began),
                    load.bytes,
                    load.urgent,
                    load.failed
                );
                out.event('X', process, WEIGHTS_THREAD, &name, &rest);
            }
            Span::Eviction(eviction) => {
                let name = format!("evict {}", (device.model_name)(eviction.model));
                let rest =
                    format!(",\"cat\":\"weights\",\"s\":\"t\",\"ts\":{}", micros(eviction.at));
                out.event('i', process, WEIGHTS_THREAD, &name, &rest);
            }
        }
    }
}

/// Spans in the order of their ends, to find those around a request without reading all.
pub struct SpansByEnd(Vec<Span>);

impl SpansByEnd {
    /// Sorts `spans`.
    pub fn new(spans: &[Span]) -> SpansByEnd {
        let mut spans = spans.to_vec();
        spans.sort_by_key(Span::ended);
        SpansByEnd(spans)
    }

    /// The spans that matter to `request`: those that ended since it arrived, up to the first that
    /// ended a while after its reply.
    pub fn around(&self, request: &RequestSpan) -> &[Span] {
        // A run that kept it waiting may end after its reply, if it was given up.
        const AFTER: Nanos = Nanos::from_millis(50);
        let first = self.0.partition_point(|span| span.ended() < request.arrived);
        let last = self.0.partition_point(|span| span.ended() <= request.answered + AFTER);
        &self.0[first..last]
    }
}

fn write_run(
    out: &mut Writer,
    process: usize,
    run: &RunSpan,
    model_name: &dyn Fn(ModelKey) -> String,
) {
    let thread = run.queue + 1;
    let end = match run.end {
        RunEnd::Done => "done",
        RunEnd::Preempted => "preempted",
        RunEnd::Failed => "failed",
    };
    let preempted_for = match run.preempted_for {
        Some(model) => format!(",\"preempted_for\":{}", quoted(&model_name(model))),
        None => String::new(),
    };
    let rest = format!(
        ",\"cat\":\"{}\",\"ts\":{},\"dur\":{},\"args\":{{\"job\":{},\"rows\":{},\"steps\":\
         \"{}..{} of {}\",\"end\":\"{end}\"{preempted_for}}}",
        class_name(run.class),
        micros(run.began),
        micros(run.ended - run.began),
        run.job,
        run.rows,
        run.first_step,
        run.next_step,
        run.step_count
    );
    out.event('X', process, thread, &model_name(run.model), &rest);
    if run.preempt_requested > Nanos::ZERO {
        let at = micros(run.preempt_requested);
        let rest = format!(",\"cat\":\"preemption\",\"s\":\"t\",\"ts\":{at}");
        out.event('i', process, thread, "preempt", &rest);
    }
}

fn write_copy(
    out: &mut Writer,
    process: usize,
    copy: &CopySpan,
    number: usize,
    model_name: &dyn Fn(ModelKey) -> String,
) {
    // Clients copy at the same time; each copy has an id of its own.
    let common = format!(",\"cat\":\"copy\",\"id2\":{{\"local\":\"copy {number}\"}}");
    let begin = format!(
        "{common},\"ts\":{},\"args\":{{\"model\":{},\"class\":\"{}\",\"job\":{},\"bytes\":{}}}",
        micros(copy.began),
        quoted(&model_name(copy.model)),
        class_name(copy.class),
        copy.job,
        copy.bytes
    );
    out.event('b', process, 0, copy.kind.name(), &begin);
    let end = format!("{common},\"ts\":{}", micros(copy.ended));
    out.event('e', process, 0, copy.kind.name(), &end);
}

fn write_request(
    out: &mut Writer,
    process: usize,
    request: &RequestSpan,
    near: Option<&[Span]>,
    model_name: &dyn Fn(ModelKey) -> String,
) {
    // Ids are of one process; equal numbers on two devices are two requests.
    let common = format!(",\"cat\":\"request\",\"id2\":{{\"local\":\"{:#x}\"}}", request.number);
    let name = model_name(request.model);
    let why = near.map(|near| explain(request, near, model_name).sentence);
    let why = why.map_or(String::new(), |why| format!(",\"why\":{}", quoted(&why)));
    let begin = format!(
        "{common},\"ts\":{},\"args\":{{\"request\":{},\"job\":{},\"class\":\"{}\",\"priority\":{},\
         \"rows\":{},\"end\":\"{}\"{why}}}",
        micros(request.arrived),
        request.number,
        request.job,
        class_name(request.class),
        request.priority,
        request.rows,
        end_name(request.end)
    );
    out.event('b', process, 0, &name, &begin);
    let started = match request.started {
        Nanos::ZERO => request.answered,
        started => started,
    };
    let phases = [
        ("stage", request.arrived, request.staged),
        ("wait", request.staged, started),
        ("run", started, request.answered),
    ];
    for (phase, from, to) in phases {
        if to > from {
            out.event('b', process, 0, phase, &format!("{common},\"ts\":{}", micros(from)));
            out.event('e', process, 0, phase, &format!("{common},\"ts\":{}", micros(to)));
        }
    }
    out.event('e', process, 0, &name, &format!("{common},\"ts\":{}", micros(request.answered)));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;
    use crate::core::End;
    use crate::spans::{CopyKind, EvictionSpan, LoadSpan};

    const MODEL: ModelKey = ModelKey::new(0, 1);

    fn spans() -> Vec<Span> {
        let at = Nanos::from_micros;
        let run = RunSpan {
            job: 1,
            model: MODEL,
            class: Class::BestEffort,
            queue: 1,
            rows: 0,
            first_step: 0,
            next_step: 3,
            step_count: 9,
            began: at(10),
            ended: Nanos(19_007),
            preempt_requested: at(15),
            preempted_for: Some(ModelKey::new(1, 1)),
            end: RunEnd::Preempted,
        };
        let request = RequestSpan {
            number: 1,
            job: 1,
            model: MODEL,
            class: Class::BestEffort,
            priority: 1,
            rows: 0,
            arrived: at(5),
            staged: at(8),
            started: at(10),
            answered: at(60),
            deadline: Nanos::MAX,
            end: End::Done,
        };
        let rest = RunSpan { began: at(30), ended: at(59), end: RunEnd::Done, ..run };
        let (began, ended, bytes) = (at(1), at(4), 1 << 20);
        let copy = CopySpan {
            job: 1,
            model: MODEL,
            class: Class::BestEffort,
            kind: CopyKind::Gather,
            began: at(6),
            ended: at(9),
            bytes: 77,
        };
        vec![
            Span::Copy(copy),
            Span::Load(LoadSpan { model: MODEL, began, ended, bytes, urgent: true, failed: false }),
            Span::Run(run),
            Span::Run(rest),
            Span::Request(request),
            Span::Eviction(EvictionSpan { model: MODEL, at: at(70) }),
        ]
    }

    /// Checks what viewers require of a trace; returns the number of events by phase.
    fn check(text: &str) -> BTreeMap<String, usize> {
        let trace: Value = serde_json::from_str(text).expect("JSON");
        let mut phases = BTreeMap::new();
        let mut open: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut asynchronous = Vec::new();
        for event in trace["traceEvents"].as_array().expect("an array of events") {
            let phase = event["ph"].as_str().expect("a phase").to_string();
            assert!(event["pid"].is_u64() && event["tid"].is_u64(), "{event}");
            let name = event["name"].as_str().expect("a name").to_string();
            match phase.as_str() {
                "M" => assert!(event["args"]["name"].is_string(), "{event}"),
                "X" => assert!(event["ts"].as_f64() > Some(0.0) && event["dur"].is_f64()),
                "i" => assert!(event["ts"].is_f64() && event["s"] == "t", "{event}"),
                "b" | "e" => {
                    let local = event["id2"]["local"].as_str().expect("an id");
                    let id = format!("{} {local}", event["pid"]);
                    let order = phase == "b";
                    asynchronous.push((event["ts"].as_f64().expect("a time"), order, id, name));
                }
                other => panic!("unknown phase {other}"),
            }
            *phases.entry(phase).or_default() += 1;
        }
        // Viewers order by time and keep the order of the file: spans are closed innermost first.
        asynchronous.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (_, begins, id, name) in asynchronous {
            let stack = open.entry(id).or_default();
            match begins {
                true => stack.push(name),
                false => assert_eq!(stack.pop(), Some(name), "ends in the order of beginnings"),
            }
        }
        assert!(open.values().all(Vec::is_empty), "{open:?}");
        phases
    }

    #[test]
    fn a_trace_is_well_formed() {
        let spans = spans();
        let name = |model: ModelKey| format!("a \"name\" \n {}", model.slot());
        let device =
            |name_of| DeviceTrace { name: name_of, spans: &spans, model_name: &name, lost: 2 };
        let text = write(&[device("cpu"), device("cuda:0")], 100);
        let phases = check(&text);
        let wanted = [("M", 6), ("X", 6), ("b", 10), ("e", 10), ("i", 6)];
        let wanted = wanted.map(|(phase, count)| (phase.to_string(), count));
        assert_eq!(phases, BTreeMap::from(wanted));
        let trace: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(trace["otherData"]["lost_spans"], 4);
        let events = trace["traceEvents"].as_array().expect("events");
        let cut = events.iter().find(|event| event["cat"] == "be").expect("a run");
        assert_eq!((cut["ts"].as_f64(), cut["dur"].as_f64()), (Some(10.0), Some(9.007)));
        let request = events.iter().find(|event| event["args"]["why"].is_string());
        let why = request.expect("a request that says why")["args"]["why"].to_string();
        assert!(why.contains("in 2 parts"), "{why}");
        let copy = events.iter().find(|event| event["cat"] == "copy").expect("a copy");
        assert_eq!(copy["name"], "gather batch");
        assert_eq!(copy["args"]["bytes"], 77);
        // Explanations may be left out where there are too many.
        assert!(!write(&[device("cpu")], 0).contains("why"));
    }
}
