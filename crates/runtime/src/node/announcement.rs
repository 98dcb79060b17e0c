//! Announcement of real-time requests before they arrive.

use super::{ModelKey, Shared};
use crate::core::{Event, ModelId};

/// An announced real-time request; the announcement ends when this is dropped.
pub(super) struct Announcement<'a> {
    pub(super) shared: &'a Shared,
    pub(super) made: bool,
}

impl Announcement<'_> {
    pub(super) fn make(&mut self, model: ModelKey) {
        self.made = true;
        self.shared.handle(Event::ArrivalExpected { model: ModelId(model.slot) });
    }

    /// The event that ends the announcement, for the caller to send.
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
