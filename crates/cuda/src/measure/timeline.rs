//! When whole real-time runs began and ended on the device, by its own clock; recorded only while somebody asks for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::CudaDevice;
use crate::driver::{Event, Stream};
use crate::error::CudaError;
use crate::hub::Hub;

/// Runs that are recorded.
const MAX_RUNS: usize = 1 << 20;

/// Runs since somebody asked.
#[derive(Default)]
pub(crate) struct Timeline {
    on: AtomicBool,
    recorded: Mutex<RecordedRuns>,
}

#[derive(Default)]
struct RecordedRuns {
    base: Option<Event>,
    runs: Vec<(f64, f64)>,
}

impl Timeline {
    fn recorded(&self) -> MutexGuard<'_, RecordedRuns> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A point in `stream` if runs are recorded.
    pub(crate) fn stamp(&self, hub: &Hub, stream: &Stream) -> Result<Option<Event>, CudaError> {
        if !self.on.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let event = Event::new(hub.context())?;
        event.record(stream)?;
        Ok(Some(event))
    }

    /// Keeps a run between two points that have been passed.
    pub(crate) fn add(&self, from: &Event, to: &Event) {
        let mut recorded = self.recorded();
        let Some(base) = &recorded.base else { return };
        if let (Ok(from), Ok(to)) = (from.micros_since(base), to.micros_since(base))
            && recorded.runs.len() < MAX_RUNS
        {
            recorded.runs.push((from, to));
        }
    }
}

impl CudaDevice {
    /// Keeps when whole real-time runs begin and end from now on; each costs two more events.
    pub fn begin_timeline(&self) -> Result<(), CudaError> {
        let hub = self.hub();
        let base = Event::new(hub.context())?;
        base.record(hub.memory_stream())?;
        hub.memory_stream().synchronize()?;
        *hub.timeline.recorded() = RecordedRuns { base: Some(base), runs: Vec::new() };
        hub.timeline.on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The runs since then, in microseconds, without their copies.
    pub fn end_timeline(&self) -> Vec<(f64, f64)> {
        let timeline = &self.hub().timeline;
        timeline.on.store(false, Ordering::Relaxed);
        std::mem::take(&mut *timeline.recorded()).runs
    }
}
