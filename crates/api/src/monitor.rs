//! What the console, `atoll top` and traces read from a service.

use base::Nanos;
use serde_json::Value;

/// Numbers of one span in [`LiveUpdate::spans`], each a little-endian `f64`.
pub const SPAN_NUMBERS: usize = 14;

/// Where a viewer is in the spans of each device.
#[derive(Clone, Debug, Default)]
pub struct LiveCursor {
    /// By device: the position from which it reads on. Empty before the first update.
    pub positions: Vec<u64>,
    /// Time of its last update, by the clock of the service.
    pub at: Nanos,
}

/// What changed since the last update of a viewer.
#[derive(Clone, Debug, Default)]
pub struct LiveUpdate {
    /// Figures of models and devices.
    pub figures: Value,
    /// Spans of [`SPAN_NUMBERS`] numbers each; empty for viewers that do not ask for them.
    pub spans: Vec<u8>,
}

/// A source of figures and spans. Calls may take milliseconds.
pub trait Monitor: Send + Sync {
    /// What changed since the last update. A viewer that was away too long loses spans.
    fn update(&self, cursor: &mut LiveCursor, with_spans: bool) -> LiveUpdate;

    /// The spans of the last `window`, in the trace event format.
    fn trace(&self, window: Nanos) -> String;

    /// Why a request took as long as it did; `None` if it is no longer recorded.
    fn explain(&self, device: usize, request: u64) -> Option<Value>;
}
