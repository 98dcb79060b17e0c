//! W3C trace context: the `traceparent` header, read strictly and otherwise ignored; and the parts
//! of a request that become spans of its trace.

use std::fmt;

use crate::error::ApiError;

/// The header's name.
pub const TRACEPARENT: &str = "traceparent";

/// The position of a request in a distributed trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace, 16 bytes, not all zero.
    pub trace_id: u128,
    /// The caller's span, 8 bytes, not all zero.
    pub parent_id: u64,
    /// Flags; bit 0: the caller records the trace.
    pub flags: u8,
}

impl TraceContext {
    /// Reads a `traceparent` header. Versions after 00 may carry more fields, which are skipped.
    pub fn parse(header: &str) -> Option<TraceContext> {
        let bytes = header.as_bytes();
        if bytes.len() < 55 || bytes[2] != b'-' || bytes[35] != b'-' || bytes[52] != b'-' {
            return None;
        }
        let version = hex(&bytes[0..2])?;
        let longer = bytes.len() > 55;
        if version == 0xff || (version == 0 && longer) || (longer && bytes[55] != b'-') {
            return None;
        }
        let trace_id = hex(&bytes[3..35])?;
        let parent_id = hex(&bytes[36..52])? as u64;
        let flags = hex(&bytes[53..55])? as u8;
        (trace_id != 0 && parent_id != 0).then_some(TraceContext { trace_id, parent_id, flags })
    }
}

/// Where a service records the parts of requests: its server, which sends spans to a collector.
pub trait SpanSink: Send + Sync {
    /// Begins the span of a stage of a query, as a child of the span that `parent` names. The
    /// stage has ended when the result is dropped.
    fn begin_stage(&self, parent: TraceContext, stage: &str, model: &str) -> Box<dyn StageSpan>;
}

/// The span of a stage that has not ended. One that is dropped without a result was given up.
pub trait StageSpan: Send {
    /// The position of what is done for the stage.
    fn context(&self) -> TraceContext;

    /// Notes what became of it.
    fn finish(&mut self, result: Result<(), &ApiError>);
}

fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0u128, |value, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(digit))
    })
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.parent_id, self.flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn good_headers_round_trip() {
        assert_eq!(TraceContext::parse(GOOD).unwrap().to_string(), GOOD);
        let newer = format!("01{}-extra", &GOOD[2..]);
        assert_eq!(TraceContext::parse(&newer), TraceContext::parse(GOOD));
    }

    #[test]
    fn bad_headers_are_ignored() {
        let zero_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        let upper = GOOD.to_uppercase();
        let longer = format!("{GOOD}-extra");
        let bad =
            ["", "00", &GOOD[..54], &zero_trace, &upper, &longer, "ff-..", "é".repeat(40).as_str()]
                .map(TraceContext::parse);
        assert!(bad.iter().all(Option::is_none));
    }
}
