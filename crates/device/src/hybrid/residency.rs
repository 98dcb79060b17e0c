//! Weights of a program in sections: loaded and evicted together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::Bytes;

use crate::DeviceError;
use crate::residency::{LoadCallback, LoadProgress, Residency};

/// The weights of one section. They may grow when the section is prepared for more sizes; the new
/// ones are there after the next load.
pub(super) struct SectionWeights {
    inner: Arc<dyn Residency>,
    /// Their size when the last load began; 0 when they are evicted.
    loaded: AtomicU64,
}

impl SectionWeights {
    pub(super) fn new(inner: Arc<dyn Residency>) -> SectionWeights {
        SectionWeights { inner, loaded: AtomicU64::new(0) }
    }

    /// Whether they have grown since the last load, so that some are not on the device.
    pub(super) fn have_grown(&self) -> bool {
        self.inner.bytes().0 > self.loaded.load(Ordering::Acquire)
    }
}

impl Residency for SectionWeights {
    fn bytes(&self) -> Bytes {
        self.inner.bytes()
    }

    fn load(&self, urgent: bool, report: LoadCallback) {
        self.loaded.store(self.inner.bytes().0, Ordering::Release);
        self.inner.load(urgent, report);
    }

    fn evict(&self) {
        self.loaded.store(0, Ordering::Release);
        self.inner.evict();
    }
}

/// The weights of several programs as those of one.
pub(super) struct JointResidency(pub(super) Vec<Arc<dyn Residency>>);

/// Progress of a joint load.
struct JointLoad {
    programs: Vec<Arc<dyn Residency>>,
    report: Mutex<LoadCallback>,
    state: Mutex<JointState>,
}

#[derive(Default)]
struct JointState {
    /// Programs that may run, loaded ones included.
    runnable: Vec<usize>,
    loaded: Vec<usize>,
    failed: Option<DeviceError>,
    ended: usize,
}

impl Residency for JointResidency {
    fn bytes(&self) -> Bytes {
        Bytes(self.0.iter().map(|program| program.bytes().0).sum())
    }

    fn load(&self, urgent: bool, report: LoadCallback) {
        let (programs, report) = (self.0.clone(), Mutex::new(report));
        let load = Arc::new(JointLoad { programs, report, state: Mutex::default() });
        for (index, program) in self.0.iter().enumerate() {
            let load = load.clone();
            program.load(urgent, Box::new(move |progress| load.advance(index, progress)));
        }
    }

    fn evict(&self) {
        self.0.iter().for_each(|program| program.evict());
    }
}

impl JointLoad {
    fn report(&self, progress: LoadProgress) {
        let report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        report(progress);
    }

    /// Counts the progress of program `index`, and reports that of all.
    fn advance(&self, index: usize, progress: LoadProgress) {
        let all = self.programs.len();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let becomes_runnable = !state.runnable.contains(&index);
        match progress {
            LoadProgress::Runnable => {
                if becomes_runnable {
                    state.runnable.push(index);
                }
                let all_run = becomes_runnable && state.runnable.len() == all;
                if all_run && state.failed.is_none() {
                    drop(state);
                    self.report(LoadProgress::Runnable);
                }
                return;
            }
            LoadProgress::Loaded => {
                if becomes_runnable {
                    state.runnable.push(index);
                }
                state.loaded.push(index);
            }
            LoadProgress::Failed(err) => state.failed = state.failed.take().or(Some(err)),
        }
        state.ended += 1;
        if state.ended < all {
            return;
        }
        let (failed, loaded) = (state.failed.take(), std::mem::take(&mut state.loaded));
        drop(state);
        match failed {
            None => self.report(LoadProgress::Loaded),
            Some(err) => {
                loaded.into_iter().for_each(|index| self.programs[index].evict());
                self.report(LoadProgress::Failed(err));
            }
        }
    }
}
