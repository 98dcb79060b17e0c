//! Requests that take long before they can be admitted.
//!
//! Preparing sizes may take seconds: kernels are compiled. Such requests wait on threads of their
//! own, one per class, so that neither the threads that receive requests nor real time wait for
//! another model's compiler. Large inputs of best effort are copied on the threads for heavy work:
//! on those that receive requests, real time would wait for the copy.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use device::{DeviceError, Program, heavy_threads, thread_priority, thread_watch};
use model::Tensor;
use model::config::Class;

use super::batch_jobs::BatchStaging;
use super::submission::Submission;
use super::{Rejection, RequestHandle, RequestLocation, Shared};

/// Requests of one class that wait for a preparation, and of best effort for a copy, at most.
const MAX_WAITING: usize = 1024;

/// Inputs of best effort that have so many bytes are copied on the threads for heavy work.
const LARGE_INPUT_BYTES: u64 = 256 << 10;

/// A request with all that admits it.
pub(super) struct UnpreparedRequest {
    pub(super) submission: Submission,
    pub(super) inputs: Vec<Tensor>,
    pub(super) program: Arc<dyn Program>,
    pub(super) staging: Option<BatchStaging>,
    /// The device is prepared for its sizes.
    pub(super) is_prepared: bool,
}

impl UnpreparedRequest {
    /// Whether its inputs are copied where real time does not wait for it.
    pub(super) fn is_copied_apart(&self) -> bool {
        let Submission { class, bytes, .. } = self.submission;
        class == Class::BestEffort
            && bytes >= LARGE_INPUT_BYTES
            && heavy_threads::exist()
            && self.program.copies_on_caller(&self.inputs)
    }
}

/// A request from its arrival until its sizes are prepared, and until its inputs are copied where
/// that is done apart.
pub(super) struct PreparingRequest {
    progress: Mutex<Progress>,
}

enum Progress {
    Waiting(Box<UnpreparedRequest>),
    /// A thread prepares its sizes, or it has ended.
    Taken {
        cancelled: bool,
    },
    Submitted(RequestHandle),
}

impl PreparingRequest {
    fn new(request: UnpreparedRequest) -> Arc<PreparingRequest> {
        Arc::new(PreparingRequest { progress: Mutex::new(Progress::Waiting(Box::new(request))) })
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The request, unless it was cancelled.
    fn take(&self) -> Option<Box<UnpreparedRequest>> {
        let mut progress = self.lock();
        match std::mem::replace(&mut *progress, Progress::Taken { cancelled: false }) {
            Progress::Waiting(request) => Some(request),
            other => {
                *progress = other;
                None
            }
        }
    }

    fn is_cancelled(&self) -> bool {
        matches!(*self.lock(), Progress::Taken { cancelled: true })
    }

    /// The request is in the core or a batcher.
    fn submitted(&self, handle: RequestHandle) {
        let mut progress = self.lock();
        if matches!(*progress, Progress::Taken { cancelled: true }) {
            drop(progress);
            handle.cancel();
        } else {
            *progress = Progress::Submitted(handle);
        }
    }

    /// Cancels the request wherever it is. Its reply is still sent, once.
    pub(super) fn cancel(&self, shared: &Shared) {
        let mut progress = self.lock();
        match std::mem::replace(&mut *progress, Progress::Taken { cancelled: true }) {
            Progress::Waiting(request) => {
                drop(progress);
                request.submission.refuse(Rejection::Cancelled);
                shared.preparation_ended();
            }
            Progress::Taken { .. } => {}
            Progress::Submitted(handle) => {
                drop(progress);
                handle.cancel();
            }
        }
    }
}

/// The threads that prepare sizes.
pub(super) struct PreparationThreads {
    real_time: SyncSender<Arc<PreparingRequest>>,
    best_effort: SyncSender<Arc<PreparingRequest>>,
}

impl PreparationThreads {
    pub(super) fn start(shared: &Weak<Shared>) -> std::io::Result<PreparationThreads> {
        let thread = |name: &str, by: i32| -> std::io::Result<SyncSender<Arc<PreparingRequest>>> {
            let (sender, receiver) = sync_channel(MAX_WAITING);
            let shared = shared.clone();
            std::thread::Builder::new().name(name.to_string()).spawn(move || {
                thread_priority::lower(by);
                run(&receiver, &shared);
            })?;
            Ok(sender)
        };
        Ok(PreparationThreads {
            real_time: thread("node-prepare-rt", 0)?,
            best_effort: thread("node-prepare-be", thread_priority::LOW)?,
        })
    }
}

fn run(requests: &Receiver<Arc<PreparingRequest>>, shared: &Weak<Shared>) {
    while let Ok(preparing) = requests.recv() {
        run_one(&preparing, shared);
    }
}

fn run_one(preparing: &PreparingRequest, shared: &Weak<Shared>) {
    let Some(request) = preparing.take() else { return };
    // A node that is gone leaves no request without its answer.
    let Some(shared) = shared.upgrade() else {
        request.submission.refuse(Rejection::ShuttingDown);
        return;
    };
    let _ends = PreparationEnds(&shared);
    shared.prepare(*request, preparing);
}

/// Counts the request as ended, also after a panic.
struct PreparationEnds<'a>(&'a Shared);

impl Drop for PreparationEnds<'_> {
    fn drop(&mut self) {
        self.0.preparation_ended();
    }
}

/// A place among the requests whose inputs are copied apart.
struct CopyPlace(Arc<AtomicUsize>);

impl CopyPlace {
    fn take(places: &Arc<AtomicUsize>) -> Option<CopyPlace> {
        let place = CopyPlace(places.clone());
        (places.fetch_add(1, Ordering::SeqCst) < MAX_WAITING).then_some(place)
    }
}

impl Drop for CopyPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Makes the program ready for the sizes of `inputs`.
fn specialize(program: &dyn Program, inputs: &[Tensor]) -> Result<(), DeviceError> {
    let shapes: Vec<Vec<usize>> = inputs.iter().map(|input| input.shape().to_vec()).collect();
    // A panic here is a defect, but it must cost one request and not all that wait behind it.
    thread_watch::call("specialize");
    let work = std::panic::AssertUnwindSafe(|| program.specialize(&shapes));
    std::panic::catch_unwind(work)
        .unwrap_or_else(|_| Err(DeviceError::BadPlan("the compiler panicked".to_string())))
}

impl Shared {
    /// Keeps `request` until its sizes are prepared.
    pub(super) fn submit_unprepared(&self, request: UnpreparedRequest) -> RequestHandle {
        let Some(threads) = self.preparation.get() else {
            return self.refuse(request.submission, Rejection::ShuttingDown);
        };
        let queue = match request.submission.class {
            Class::RealTime => &threads.real_time,
            Class::BestEffort => &threads.best_effort,
        };
        let preparing = PreparingRequest::new(request);
        self.unsent.fetch_add(1, Ordering::SeqCst);
        match queue.try_send(preparing.clone()) {
            Ok(()) => {
                let location = RequestLocation::Preparing(preparing);
                RequestHandle { shared: self.own.clone(), location }
            }
            Err(TrySendError::Full(refused) | TrySendError::Disconnected(refused)) => {
                let why = Rejection::QueueFull { capacity: MAX_WAITING };
                if let Some(request) = refused.take() {
                    self.count_rejected(request.submission.model);
                    self.refuse(request.submission, why);
                }
                self.preparation_ended();
                RequestHandle { shared: Weak::new(), location: RequestLocation::Ended }
            }
        }
    }

    /// Copies the inputs of `request`, whose sizes are prepared, on a thread for heavy work.
    pub(super) fn submit_large(&self, request: UnpreparedRequest) -> RequestHandle {
        let Some(place) = CopyPlace::take(&self.copied_apart) else {
            self.count_rejected(request.submission.model);
            let why = Rejection::QueueFull { capacity: MAX_WAITING };
            return self.refuse(request.submission, why);
        };
        let preparing = PreparingRequest::new(request);
        self.unsent.fetch_add(1, Ordering::SeqCst);
        let (shared, waiting) = (self.own.clone(), preparing.clone());
        heavy_threads::run(Box::new(move || {
            run_one(&waiting, &shared);
            drop(place);
        }));
        let location = RequestLocation::Preparing(preparing);
        RequestHandle { shared: self.own.clone(), location }
    }

    fn count_rejected(&self, model: super::ModelKey) {
        if let Some(entry) = self.lock().model_mut(model) {
            entry.stats.rejected += 1;
        }
    }

    fn prepare(&self, request: UnpreparedRequest, preparing: &PreparingRequest) {
        let UnpreparedRequest { submission, inputs, program, staging, is_prepared } = request;
        if submission.deadline <= self.clock.now() {
            self.count_rejected(submission.model);
            self.refuse(submission, Rejection::DeadlineExceeded);
            return;
        }
        let fault = self.lock().fault.clone();
        let prepared = match fault {
            Some(fault) => Err(fault),
            None if is_prepared => Ok(()),
            None => specialize(&*program, &inputs),
        };
        if preparing.is_cancelled() {
            self.refuse(submission, Rejection::Cancelled);
            return;
        }
        let handle = match prepared {
            Ok(()) => self.submit_prepared(submission, inputs, &program, staging),
            Err(err) => self.submit_alone(submission, Err(err), None),
        };
        preparing.submitted(handle);
    }

    /// A request that was counted as unsent is answered, or counted elsewhere.
    fn preparation_ended(&self) {
        self.unsent.fetch_sub(1, Ordering::SeqCst);
        if self.drain_waits.load(Ordering::SeqCst) {
            let _state = self.lock();
            self.idle.notify_all();
        }
    }
}

#[cfg(test)]
mod tests;
