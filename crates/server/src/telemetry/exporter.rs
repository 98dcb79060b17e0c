//! Sends records to a collector.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue};
use prost::Message;
use reqwest::Client;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::{RequestRecord, SpanCounts, SpanIds, TelemetryOptions, otlp};

/// How often spans are sent before they are given up.
const ATTEMPTS: u32 = 3;
/// Pause after the first failure; it doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Time between two warnings.
const WARN_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum size of a collector's reply that is read.
const MAX_REPLY: usize = 64 << 10;

/// Why a collector did not take spans.
struct SendError {
    why: String,
    /// Whether it may take them later.
    retry: bool,
}

/// Sends what requests recorded.
pub(super) struct Exporter {
    options: TelemetryOptions,
    headers: HeaderMap,
    client: Client,
    ids: Arc<SpanIds>,
    counts: Arc<SpanCounts>,
    warned: Option<Instant>,
}

impl Exporter {
    pub(super) fn new(
        options: TelemetryOptions,
        ids: Arc<SpanIds>,
        counts: Arc<SpanCounts>,
    ) -> Result<Exporter, String> {
        // Fails if it was chosen before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().no_proxy().timeout(options.timeout).build();
        let client = client.map_err(|error| format!("traces cannot be sent: {error}"))?;
        let mut headers = HeaderMap::new();
        for (key, value) in &options.headers {
            let (Ok(key), Ok(value)) = (key.parse::<HeaderName>(), value.parse::<HeaderValue>())
            else {
                return Err(format!("OTEL_EXPORTER_OTLP_HEADERS: '{key}' is not a valid header"));
            };
            headers.insert(key, value);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        if options.gzip {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        Ok(Exporter { options, headers, client, ids, counts, warned: None })
    }

    /// Sends batches until `stop`; then what is left, once.
    pub(super) async fn run(
        mut self,
        mut records: mpsc::Receiver<RequestRecord>,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut batch = Vec::new();
        loop {
            let stopped = tokio::select! {
                () = self.fill(&mut records, &mut batch) => records.is_closed(),
                _ = stop.changed() => true,
            };
            if stopped {
                break;
            }
            // A collector that does not answer does not delay the end.
            tokio::select! {
                () = self.export(&batch) => batch.clear(),
                _ = stop.changed() => break,
            }
        }
        records.close();
        while let Ok(record) = records.try_recv() {
            batch.push(record);
        }
        for records in batch.chunks(self.options.batch_size) {
            let result = self.send(records).await;
            self.count(records, result.map_err(|error| error.why));
        }
    }

    /// Waits for a record, and for more until the batch is full or the time is over.
    async fn fill(
        &self,
        records: &mut mpsc::Receiver<RequestRecord>,
        batch: &mut Vec<RequestRecord>,
    ) {
        let size = self.options.batch_size;
        if records.recv_many(batch, size).await == 0 {
            return;
        }
        let end = Instant::now() + self.options.delay;
        while batch.len() < size {
            let more = records.recv_many(batch, size - batch.len());
            match tokio::time::timeout_at(end, more).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    async fn export(&mut self, batch: &[RequestRecord]) {
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            match self.send(batch).await {
                Err(error) if error.retry && attempt < ATTEMPTS => {
                    tracing::debug!(error.why, attempt, "traces are sent again");
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                result => return self.count(batch, result.map_err(|error| error.why)),
            }
        }
    }

    fn count(&mut self, batch: &[RequestRecord], result: Result<u64, String>) {
        let spans: u64 = batch.iter().map(RequestRecord::span_count).sum();
        let rejected = match &result {
            Ok(rejected) => spans.min(*rejected),
            Err(_) => spans,
        };
        self.counts.exported.fetch_add(spans - rejected, Relaxed);
        self.counts.failed.fetch_add(rejected, Relaxed);
        let due = self.warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL);
        if rejected > 0 && due {
            self.warned = Some(Instant::now());
            let why = result.err().unwrap_or_else(|| "it rejected them".to_string());
            tracing::warn!(endpoint = self.options.endpoint, spans = rejected, why, "traces lost");
        }
    }

    /// Sends records; returns how many spans the collector rejected.
    async fn send(&self, batch: &[RequestRecord]) -> Result<u64, SendError> {
        let message = otlp::request(&self.options.resource, batch, &self.ids);
        let mut body = message.encode_to_vec();
        if self.options.gzip {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            // Writing to memory does not fail.
            let _ = gzip.write_all(&body);
            body = gzip.finish().unwrap_or_default();
        }
        let request = self.client.post(&self.options.endpoint).headers(self.headers.clone());
        let lost = |error: reqwest::Error| SendError { why: error.to_string(), retry: true };
        let mut response = request.body(body).send().await.map_err(lost)?;
        let status = response.status();
        if !status.is_success() {
            let retry = matches!(status.as_u16(), 429 | 502 | 503 | 504);
            return Err(SendError { why: format!("the collector answers {status}"), retry });
        }
        let mut reply = Vec::new();
        while let Ok(Some(chunk)) = response.chunk().await {
            reply.extend_from_slice(&chunk);
            if reply.len() > MAX_REPLY {
                return Ok(0);
            }
        }
        let reply = otlp::ExportTraceServiceResponse::decode(reply.as_slice()).unwrap_or_default();
        let rejected = reply.partial_success.map_or(0, |partial| partial.rejected_spans);
        Ok(u64::try_from(rejected).unwrap_or(0))
    }
}
