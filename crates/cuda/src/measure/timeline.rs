//! When whole RT runs began and ended on the device, by its own clock; recorded only on request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Event, Stream};
use crate::error::CudaError;

/// Runs that are recorded, at most.
const MAX_RUNS: usize = 1 << 20;

/// The recorded runs.
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

    /// An event on `stream`, if runs are recorded.
    pub(crate) fn stamp(&self, stream: &Stream) -> Result<Option<Event>, CudaError> {
        if !self.on.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let event = Event::new(stream.context())?;
        event.record(stream)?;
        Ok(Some(event))
    }

    /// Records a run between two completed events.
    pub(crate) fn add(&self, from: &Event, to: &Event) {
        let mut recorded = self.recorded();
        let Some(base) = &recorded.base else { return };
        if let (Ok(from), Ok(to)) = (from.micros_since(base), to.micros_since(base))
            && recorded.runs.len() < MAX_RUNS
        {
            recorded.runs.push((from, to));
        }
    }

    /// Records runs from now on. `stream` is idle afterwards.
    pub(crate) fn begin(&self, stream: &Stream) -> Result<(), CudaError> {
        let base = Event::new(stream.context())?;
        base.record(stream)?;
        stream.synchronize()?;
        *self.recorded() = RecordedRuns { base: Some(base), runs: Vec::new() };
        self.on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Stops recording and returns the runs as microseconds since it began.
    pub(crate) fn end(&self) -> Vec<(f64, f64)> {
        self.on.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.recorded()).runs
    }
}
