//! Spans of requests for OpenTelemetry, sent to a collector over OTLP.
//!
//! A request that is sampled becomes one record when it ends. Records wait in a bounded queue for
//! the exporter, which turns them into spans and sends them. When the queue is full, as with a
//! collector that does not answer, records are dropped and counted: a request never waits.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::error::ApiResult;
use api::infer::RequestTiming;
use api::trace::{SpanSink, StageSpan};
use api::{ApiError, ErrorKind, RequestContext, TraceContext};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

mod exporter;
mod options;
mod otlp;

pub use options::{Sampler, TelemetryOptions};

use exporter::Exporter;

/// How long the last records may take when the server shuts down.
const CLOSE_TIME: Duration = Duration::from_secs(3);

/// What became of spans.
#[derive(Debug, Default)]
pub(crate) struct SpanCounts {
    /// The collector took them.
    pub(crate) exported: AtomicU64,
    /// The queue was full.
    pub(crate) dropped: AtomicU64,
    /// The collector did not take them.
    pub(crate) failed: AtomicU64,
}

/// Numbers of traces and spans, which other processes do not use.
#[derive(Debug)]
struct SpanIds {
    seed: u64,
    count: AtomicU64,
}

impl SpanIds {
    fn new() -> Result<SpanIds, String> {
        let mut seed = [0; 8];
        let failed = |_| "the system has no random numbers".to_string();
        SystemRandom::new().fill(&mut seed).map_err(failed)?;
        Ok(SpanIds { seed: u64::from_le_bytes(seed), count: AtomicU64::new(0) })
    }

    /// A number that is not zero: SplitMix64 of a counter with a random start.
    fn next(&self) -> u64 {
        let count = self.count.fetch_add(1, Relaxed);
        let mut mixed = self.seed.wrapping_add(count.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).max(1)
    }

    fn next_trace(&self) -> u128 {
        u128::from(self.next()) << 64 | u128::from(self.next())
    }
}

/// A request, or a stage of a query, that ended.
#[derive(Clone, Debug, PartialEq)]
struct RequestRecord {
    trace_id: u128,
    span_id: u64,
    /// The caller's span.
    parent_id: Option<u64>,
    /// What the request does.
    name: &'static str,
    model: String,
    /// The stage, where it is one.
    stage: Option<String>,
    /// `rest` or `grpc`; of a stage: `grpc`, to its backends.
    protocol: &'static str,
    began_unix_ns: u64,
    ended_unix_ns: u64,
    error: Option<(ErrorKind, String)>,
    timing: Option<RequestTiming>,
}

impl RequestRecord {
    /// How many spans it becomes.
    fn span_count(&self) -> u64 {
        1 + self.timing.map_or(0, |timing| otlp::phase_count(&timing) as u64)
    }
}

/// What a span says of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestName<'a> {
    /// What the request does: `infer`, `classify`, `query`.
    pub(crate) name: &'static str,
    /// The model or query.
    pub(crate) model: &'a str,
    /// `rest` or `grpc`.
    pub(crate) protocol: &'static str,
}

/// Takes what has ended. Cloning shares it.
#[derive(Clone)]
struct Recorder {
    ids: Arc<SpanIds>,
    sender: mpsc::Sender<RequestRecord>,
    counts: Arc<SpanCounts>,
}

impl Recorder {
    fn record(&self, record: RequestRecord) {
        let spans = record.span_count();
        if self.sender.try_send(record).is_err() {
            self.counts.dropped.fetch_add(spans, Relaxed);
        }
    }
}

/// The source of spans of a server.
pub(crate) struct Telemetry {
    sampler: Sampler,
    recorder: Recorder,
    pub(crate) counts: Arc<SpanCounts>,
    stop: watch::Sender<bool>,
    exporter: Mutex<Option<JoinHandle<()>>>,
}

impl Telemetry {
    /// Starts the exporter. Must run inside a tokio runtime.
    pub(crate) fn start(options: TelemetryOptions) -> Result<Telemetry, String> {
        let (sender, receiver) = mpsc::channel(options.queue_size);
        let (stop, stopped) = watch::channel(false);
        let (ids, counts) = (Arc::new(SpanIds::new()?), Arc::new(SpanCounts::default()));
        let sampler = options.sampler;
        tracing::info!(endpoint = options.endpoint, "traces are sent over OTLP");
        let exporter = Exporter::new(options, ids.clone(), counts.clone())?;
        let exporter = Mutex::new(Some(tokio::spawn(exporter.run(receiver, stopped))));
        let recorder = Recorder { ids, sender, counts: counts.clone() };
        Ok(Telemetry { sampler, recorder, counts, stop, exporter })
    }

    /// Where services record stages of queries.
    pub(crate) fn sink(&self) -> Arc<dyn SpanSink> {
        Arc::new(self.recorder.clone())
    }

    /// Begins the span of a request, if it is sampled and there is room for it.
    fn begin(&self, caller: Option<TraceContext>, name: RequestName<'_>) -> Option<OpenSpan> {
        let ids = &self.recorder.ids;
        let trace_id = caller.map_or_else(|| ids.next_trace(), |caller| caller.trace_id);
        if !self.sampler.samples(trace_id, caller) {
            return None;
        }
        if self.recorder.sender.capacity() == 0 {
            self.counts.dropped.fetch_add(1, Relaxed);
            return None;
        }
        let record = RequestRecord {
            trace_id,
            span_id: ids.next(),
            parent_id: caller.map(|caller| caller.parent_id),
            name: name.name,
            model: name.model.to_string(),
            stage: None,
            protocol: name.protocol,
            began_unix_ns: unix_ns(),
            ended_unix_ns: 0,
            error: Some((ErrorKind::Cancelled, "the client gave the request up".to_string())),
            timing: None,
        };
        Some(OpenSpan { recorder: self.recorder.clone(), record: Some(record) })
    }

    /// Sends what is left, within a few seconds.
    pub(crate) async fn close(&self) {
        let _ = self.stop.send(true);
        let exporter = self.exporter.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut exporter) = exporter
            && tokio::time::timeout(CLOSE_TIME, &mut exporter).await.is_err()
        {
            exporter.abort();
        }
    }
}

/// Runs a request under a span, if it is sampled. `work` gets the context to pass on: its span is
/// the parent of what other servers do for it.
pub(crate) async fn traced<T, F>(
    telemetry: Option<&Telemetry>,
    caller: RequestContext,
    name: RequestName<'_>,
    work: impl FnOnce(RequestContext) -> F,
) -> ApiResult<T>
where
    F: Future<Output = ApiResult<(T, Option<RequestTiming>)>>,
{
    let Some(mut span) = telemetry.and_then(|telemetry| telemetry.begin(caller.trace, name)) else {
        return work(caller).await.map(|(value, _)| value);
    };
    let context = RequestContext { trace: span.context(), is_recorded: true, ..caller };
    match work(context).await {
        Ok((value, timing)) => {
            span.succeed(timing);
            Ok(value)
        }
        Err(error) => {
            span.fail(&error);
            Err(error)
        }
    }
}

/// A request or stage that has not ended. When it is dropped without a result, it was given up.
struct OpenSpan {
    recorder: Recorder,
    record: Option<RequestRecord>,
}

impl OpenSpan {
    fn context(&self) -> Option<TraceContext> {
        let record = self.record.as_ref()?;
        Some(TraceContext { trace_id: record.trace_id, parent_id: record.span_id, flags: 1 })
    }

    fn succeed(&mut self, timing: Option<RequestTiming>) {
        if let Some(record) = &mut self.record {
            (record.error, record.timing) = (None, timing);
        }
    }

    fn fail(&mut self, error: &ApiError) {
        if let Some(record) = &mut self.record {
            record.error = Some((error.kind, error.message.to_string()));
        }
    }
}

impl SpanSink for Recorder {
    fn begin_stage(&self, parent: TraceContext, stage: &str, model: &str) -> Box<dyn StageSpan> {
        let record = Some(RequestRecord {
            trace_id: parent.trace_id,
            span_id: self.ids.next(),
            parent_id: Some(parent.parent_id),
            name: "stage",
            model: model.to_string(),
            stage: Some(stage.to_string()),
            protocol: "grpc",
            began_unix_ns: unix_ns(),
            ended_unix_ns: 0,
            error: Some((ErrorKind::Cancelled, "the stage was given up".to_string())),
            timing: None,
        });
        Box::new(OpenStage { parent, span: OpenSpan { recorder: self.clone(), record } })
    }
}

/// A stage that has not ended.
struct OpenStage {
    parent: TraceContext,
    span: OpenSpan,
}

impl StageSpan for OpenStage {
    fn context(&self) -> TraceContext {
        self.span.context().unwrap_or(self.parent)
    }

    fn finish(&mut self, result: Result<(), &ApiError>) {
        match result {
            Ok(()) => self.span.succeed(None),
            Err(error) => self.span.fail(error),
        }
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        if let Some(mut record) = self.record.take() {
            record.ended_unix_ns = unix_ns();
            self.recorder.record(record);
        }
    }
}

/// Unix time in nanoseconds.
pub(crate) fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn telemetry(
        sampler: Sampler,
        queue_size: usize,
    ) -> (Telemetry, mpsc::Receiver<RequestRecord>) {
        let (sender, receiver) = mpsc::channel(queue_size);
        let (stop, _) = watch::channel(false);
        let (ids, counts) = (Arc::new(SpanIds::new().expect("random numbers")), Arc::default());
        let telemetry = Telemetry {
            sampler,
            recorder: Recorder { ids, sender, counts: Arc::clone(&counts) },
            counts,
            stop,
            exporter: Mutex::default(),
        };
        (telemetry, receiver)
    }

    const NAME: RequestName<'static> = RequestName { name: "infer", model: "m", protocol: "rest" };
    const CALLER: TraceContext = TraceContext { trace_id: 7, parent_id: 9, flags: 1 };

    #[tokio::test]
    async fn a_request_becomes_a_record_with_the_trace_of_its_caller() {
        let (telemetry, mut records) = telemetry(Sampler::default(), 8);
        let caller = RequestContext { trace: Some(CALLER), ..RequestContext::default() };
        let inside = traced(Some(&telemetry), caller, NAME, |context| async move {
            let timing = RequestTiming { rows: 4, ..RequestTiming::default() };
            Ok((context.trace.expect("a span"), Some(timing)))
        });
        let inside = inside.await.expect("it succeeds");
        let record = records.recv().await.expect("a record");
        assert_eq!((record.trace_id, record.parent_id), (7, Some(9)));
        assert_eq!((inside.trace_id, inside.parent_id), (7, record.span_id));
        assert!(record.ended_unix_ns >= record.began_unix_ns && record.error.is_none());
        assert_eq!(record.span_count(), 6);
    }

    #[tokio::test]
    async fn errors_and_requests_given_up_are_recorded() {
        let (telemetry, mut records) = telemetry(Sampler::default(), 8);
        let refuse = |_| async { Err::<((), _), _>(ApiError::not_found("no such model")) };
        let context = RequestContext::default();
        assert!(traced(Some(&telemetry), context, NAME, refuse).await.is_err());
        let record = records.recv().await.expect("a record");
        assert_eq!(record.error, Some((ErrorKind::NotFound, "no such model".to_string())));
        assert!(record.trace_id != 0 && record.parent_id.is_none());
        let never = |_| std::future::pending::<ApiResult<((), _)>>();
        let work = traced(Some(&telemetry), context, NAME, never);
        assert!(tokio::time::timeout(Duration::from_millis(1), work).await.is_err());
        let record = records.recv().await.expect("a record");
        assert_eq!(record.error.map(|(kind, _)| kind), Some(ErrorKind::Cancelled));
    }

    #[tokio::test]
    async fn what_has_no_room_is_dropped_and_counted() {
        let (telemetry, _records) = telemetry(Sampler::default(), 2);
        for _ in 0..5 {
            let work = |_| async { Ok(((), None)) };
            traced(Some(&telemetry), RequestContext::default(), NAME, work).await.expect("done");
        }
        assert_eq!(telemetry.counts.dropped.load(Relaxed), 3);
    }

    #[tokio::test]
    async fn a_request_that_is_not_sampled_passes_its_context_on() {
        let (telemetry, mut records) = telemetry(Sampler::default(), 8);
        let trace = Some(TraceContext { flags: 0, ..CALLER });
        let caller = RequestContext { trace, ..RequestContext::default() };
        let work = |context: RequestContext| async move { Ok((context.trace, None)) };
        let passed = traced(Some(&telemetry), caller, NAME, work).await.expect("done");
        assert_eq!(passed, caller.trace);
        assert!(records.try_recv().is_err());
    }

    #[tokio::test]
    async fn stages_are_children_of_their_request() {
        let (telemetry, mut records) = telemetry(Sampler::default(), 8);
        let sink = telemetry.sink();
        let work = |context: RequestContext| async move {
            assert!(context.is_recorded);
            let parent = context.trace.expect("a span");
            let mut find = sink.begin_stage(parent, "find", "detector");
            find.finish(Ok(()));
            let inside = find.context();
            drop(find);
            drop(sink.begin_stage(parent, "read", "recognizer"));
            Ok((inside, None))
        };
        let caller = RequestContext { trace: Some(CALLER), ..RequestContext::default() };
        let inside = traced(Some(&telemetry), caller, NAME, work).await.expect("done");
        let mut next = || records.try_recv().expect("a record");
        let (find, read, request) = (next(), next(), next());
        assert_eq!((find.stage.as_deref(), find.model.as_str()), (Some("find"), "detector"));
        assert_eq!((find.trace_id, find.parent_id), (7, Some(request.span_id)));
        assert_eq!((inside.trace_id, inside.parent_id), (7, find.span_id));
        assert!(find.error.is_none() && find.ended_unix_ns >= find.began_unix_ns);
        assert_eq!(read.error.map(|(kind, _)| kind), Some(ErrorKind::Cancelled));
    }

    #[test]
    fn numbers_are_not_used_twice() {
        let ids = SpanIds::new().expect("random numbers");
        let numbers: BTreeSet<u64> = (0..10_000).map(|_| ids.next()).collect();
        assert_eq!(numbers.len(), 10_000);
        assert!(!numbers.contains(&0));
    }
}
