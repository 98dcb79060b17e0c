//! What becomes of a request. Every request is counted once, in one of six outcomes.

use serde::Serialize;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// The reply came within the deadline.
    Good,
    /// The deadline passed first, with or without a reply after it.
    Late,
    /// It was not accepted: no queue, no model, no backend.
    Refused,
    /// The client cancelled it.
    Cancelled,
    /// The device or machine was lost with it.
    Failed,
    /// It had no reply when the run ended.
    Pending,
}

/// How many requests arrived, and how many had each outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OutcomeCounts {
    /// Requests that clients sent.
    pub arrivals: u64,
    /// Replies within the deadline.
    pub good: u64,
    /// Deadlines that passed first.
    pub late: u64,
    /// Requests that were not accepted.
    pub refused: u64,
    /// Requests that the client cancelled.
    pub cancelled: u64,
    /// Requests lost with a device or machine.
    pub failed: u64,
    /// Requests without reply when the run ended.
    pub pending: u64,
}

impl OutcomeCounts {
    /// Counts one request's outcome.
    pub fn count(&mut self, outcome: RequestOutcome) {
        *match outcome {
            RequestOutcome::Good => &mut self.good,
            RequestOutcome::Late => &mut self.late,
            RequestOutcome::Refused => &mut self.refused,
            RequestOutcome::Cancelled => &mut self.cancelled,
            RequestOutcome::Failed => &mut self.failed,
            RequestOutcome::Pending => &mut self.pending,
        } += 1;
    }

    /// Requests without a good reply.
    pub fn bad(&self) -> u64 {
        self.late + self.refused + self.cancelled + self.failed + self.pending
    }

    /// Why the counts cannot be right; `None` if every request is counted once. `open` are the
    /// requests that the simulation itself still holds.
    pub fn violation(&self, open: u64) -> Option<String> {
        let ended = self.good + self.bad();
        if ended != self.arrivals {
            return Some(format!("{} requests arrived and {ended} have an outcome", self.arrivals));
        }
        (self.pending != open)
            .then(|| format!("{} requests count as pending and {open} are open", self.pending))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_lost_or_counted_twice_is_a_violation() {
        let mut counts = OutcomeCounts { arrivals: 2, ..OutcomeCounts::default() };
        counts.count(RequestOutcome::Good);
        assert!(counts.violation(0).is_some_and(|what| what.contains("2 requests arrived and 1")));
        counts.count(RequestOutcome::Pending);
        assert_eq!(counts.violation(1), None);
        assert!(counts.violation(0).is_some());
        counts.count(RequestOutcome::Late);
        assert!(counts.violation(1).is_some());
        assert_eq!(counts.bad(), 2);
    }
}
