//! Records the events and actions of a node's core and checks them.

use std::sync::{Mutex, PoisonError};

use base::Nanos;
use model::config::Class;
use runtime::Observer;
use runtime::core::{Action, Event};
use runtime::order::Edf;

use crate::checker::{Checker, CheckerLimits};

/// Max entries recorded between two calls of `take`; later ones are dropped, and the trace is not
/// checked.
const ENTRIES_MAX: usize = 4_000_000;

/// An event or action of the core.
pub(super) enum TraceEntry {
    In(Nanos, Event),
    Out(Nanos, Action),
}

/// The recorded trace of a node.
#[derive(Default)]
pub(super) struct Recorder {
    entries: Mutex<Vec<TraceEntry>>,
}

impl Recorder {
    fn push(&self, entry: TraceEntry) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() < ENTRIES_MAX {
            entries.push(entry);
        }
    }

    /// Removes and returns what was recorded.
    pub(super) fn take(&self) -> Vec<TraceEntry> {
        std::mem::take(&mut *self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Violations in the trace of a node with `models` models.
    pub(super) fn check(&self, models: usize) -> Vec<String> {
        let mut check = TraceChecker::new(models);
        check.feed(self.take());
        if check.is_whole() { check.finish() } else { Vec::new() }
    }
}

/// Checks a trace that arrives in slices: requests that ended twice, never or without arrival, and
/// real time out of order. It checks no times. It remembers only requests in flight.
pub(super) struct TraceChecker {
    checker: Checker,
    last: Nanos,
    whole: bool,
    entries: u64,
    arrivals: [u64; 2],
}

impl TraceChecker {
    /// For a node with at most `models` models at a time.
    pub(super) fn new(models: usize) -> TraceChecker {
        let limits = CheckerLimits {
            wait: None,
            grace: None,
            memory: u64::MAX,
            sms: 0,
            order: &Edf,
            run_times: Vec::new(),
            starvation: None,
            best_effort: true,
            rt_streams: 0..0,
            streams: 0,
            needs: Vec::new(),
        };
        let checker = Checker::new(limits, models, false);
        TraceChecker { checker, last: Nanos::ZERO, whole: true, entries: 0, arrivals: [0; 2] }
    }

    /// Checks the next slice.
    pub(super) fn feed(&mut self, slice: Vec<TraceEntry>) {
        let checker = &mut self.checker;
        self.whole &= slice.len() < ENTRIES_MAX;
        self.entries += slice.len() as u64;
        for entry in slice {
            match entry {
                TraceEntry::In(
                    now,
                    Event::Arrival { request, model, class, priority, deadline },
                ) => {
                    checker.arrived(now, request, model.0 as usize, class, priority, deadline);
                    checker.input_ready(now, request);
                    self.arrivals[usize::from(class == Class::BestEffort)] += 1;
                }
                TraceEntry::Out(now, Action::Launch { request, .. }) => {
                    checker.launched(now, request)
                }
                TraceEntry::Out(now, Action::End { request, end }) => {
                    checker.ended(now, request, end);
                    self.last = now;
                }
                _ => {}
            }
        }
    }

    /// Whether no slice was cut.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Number of entries checked.
    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// Number of real-time and of best-effort requests.
    pub(super) fn arrivals(&self) -> [u64; 2] {
        self.arrivals
    }

    /// All violations, including requests that never ended.
    pub(super) fn finish(&mut self) -> Vec<String> {
        self.checker.finish(self.last)
    }
}

impl Observer for Recorder {
    fn event(&self, now: Nanos, event: &Event) {
        if matches!(event, Event::Arrival { .. }) {
            self.push(TraceEntry::In(now, event.clone()));
        }
    }

    fn action(&self, now: Nanos, action: &Action) {
        if matches!(action, Action::Launch { .. } | Action::End { .. }) {
            self.push(TraceEntry::Out(now, action.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use runtime::core::{Core, CoreOptions, End, ModelId, RequestId};

    use super::*;

    fn arrive(recorder: &Recorder, request: RequestId, class: Class) {
        let (model, deadline) = (ModelId(0), Nanos::MAX);
        let event = Event::Arrival { request, model, class, priority: 1, deadline };
        recorder.event(Nanos(1), &event);
    }

    fn found(record: impl Fn(&Recorder, RequestId, RequestId)) -> Vec<String> {
        let mut core = Core::new(CoreOptions::default());
        let (one, other) = (core.next_request_id().unwrap(), core.next_request_id().unwrap());
        let recorder = Recorder::default();
        record(&recorder, one, other);
        recorder.check(1)
    }

    #[test]
    fn violations_of_a_trace_are_found() {
        let end = |request| Action::End { request, end: End::Done };
        let launch = |request| Action::Launch { queue: 0, request, steps: 0..1, tile: 0 };
        let fine = found(|recorder, one, other| {
            arrive(recorder, one, Class::RealTime);
            arrive(recorder, other, Class::RealTime);
            for request in [one, other] {
                recorder.action(Nanos(2), &launch(request));
                recorder.action(Nanos(3), &end(request));
            }
        });
        assert_eq!(fine, Vec::<String>::new());
        let twice = found(|recorder, one, _| {
            arrive(recorder, one, Class::BestEffort);
            recorder.action(Nanos(2), &end(one));
            recorder.action(Nanos(3), &end(one));
        });
        assert!(twice[0].contains("twice"), "{twice:?}");
        let never = found(|recorder, one, _| arrive(recorder, one, Class::BestEffort));
        assert!(never[0].contains("never"), "{never:?}");
        let overtaken = found(|recorder, one, other| {
            arrive(recorder, one, Class::RealTime);
            arrive(recorder, other, Class::RealTime);
            recorder.action(Nanos(2), &launch(other));
            recorder.action(Nanos(3), &end(other));
            recorder.action(Nanos(4), &end(one));
        });
        assert!(overtaken[0].contains("overtook"), "{overtaken:?}");
    }

    #[test]
    fn slices_are_checked_like_a_whole_trace() {
        let mut core = Core::new(CoreOptions::default());
        let (one, other) = (core.next_request_id().unwrap(), core.next_request_id().unwrap());
        let end = |request| Action::End { request, end: End::Done };
        let recorder = Recorder::default();
        let mut check = TraceChecker::new(1);
        arrive(&recorder, one, Class::RealTime);
        check.feed(recorder.take());
        recorder.action(Nanos(2), &end(one));
        check.feed(recorder.take());
        arrive(&recorder, other, Class::RealTime);
        recorder.action(Nanos(3), &end(one));
        check.feed(recorder.take());
        assert_eq!((check.entries(), check.is_whole()), (4, true));
        let found = check.finish();
        assert!(found.len() == 2 && found[0].contains("twice"), "{found:?}");
        assert!(found[1].contains("never"), "{found:?}");
    }
}
