//! What a node's core took in and decided, kept while it runs and checked afterwards.

use std::sync::{Mutex, PoisonError};

use base::Nanos;
use runtime::Observer;
use runtime::core::{Action, Event};

use crate::checker::{Checker, Limits};

/// Entries kept; a cell that has more is checked as far as they go.
const ENTRIES_MOST: usize = 4_000_000;

enum Entry {
    In(Nanos, Event),
    Out(Nanos, Action),
}

/// The recorded trace of a node.
#[derive(Default)]
pub(super) struct Recorder {
    entries: Mutex<Vec<Entry>>,
}

impl Recorder {
    fn push(&self, entry: Entry) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() < ENTRIES_MOST {
            entries.push(entry);
        }
    }

    /// What the checkers find in the trace of a node with so many models: requests that ended twice, never or without
    /// having come, and real time that was overtaken. Times are not judged.
    pub(super) fn check(&self, models: usize) -> Vec<String> {
        let entries =
            std::mem::take(&mut *self.entries.lock().unwrap_or_else(PoisonError::into_inner));
        let whole = entries.len() < ENTRIES_MOST;
        let limits = Limits {
            wait: None,
            grace: None,
            memory: u64::MAX,
            sms: 0,
            earliest_deadline_first: true,
            starvation: None,
            rt_streams: 0..0,
            streams: 0,
            needs: Vec::new(),
        };
        let mut checker = Checker::new(limits, models, false);
        let mut last = Nanos::ZERO;
        for entry in entries {
            match entry {
                Entry::In(now, Event::Arrival { request, model, class, priority, deadline }) => {
                    checker.arrived(now, request, model.0 as usize, class, priority, deadline);
                    checker.input_ready(now, request);
                }
                Entry::Out(now, Action::Launch { request, .. }) => checker.launched(now, request),
                Entry::Out(now, Action::End { request, end }) => {
                    checker.ended(now, request, end);
                    last = now;
                }
                _ => {}
            }
        }
        if whole { checker.finish(last) } else { Vec::new() }
    }
}

impl Observer for Recorder {
    fn event(&self, now: Nanos, event: &Event) {
        if matches!(event, Event::Arrival { .. }) {
            self.push(Entry::In(now, event.clone()));
        }
    }

    fn action(&self, now: Nanos, action: &Action) {
        if matches!(action, Action::Launch { .. } | Action::End { .. }) {
            self.push(Entry::Out(now, action.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use model::config::Class;
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
    fn what_is_wrong_with_a_trace_is_found() {
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
}
