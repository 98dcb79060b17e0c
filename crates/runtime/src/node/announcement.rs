//! How the core hears of a real-time request before it is there.

use super::{ModelKey, Shared};
use crate::core::{Event, ModelId};

/// The word to the core that a real-time request is coming; taken back when it is dropped.
pub(super) struct Announcement<'a> {
    pub(super) shared: &'a Shared,
    pub(super) made: bool,
}

impl Announcement<'_> {
    pub(super) fn make(&mut self, model: ModelKey) {
        self.made = true;
        self.shared.handle(Event::ArrivalExpected { model: ModelId(model.slot) });
    }

    /// What takes it back, to be told by whoever asks.
    pub(super) fn take(&mut self) -> Option<Event> {
        std::mem::take(&mut self.made).then_some(Event::ExpectationEnded)
    }
}

impl Drop for Announcement<'_> {
    fn drop(&mut self) {
        if let Some(event) = self.take() {
            self.shared.handle(event);
        }
    }
}
