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
