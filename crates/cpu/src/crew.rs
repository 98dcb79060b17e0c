//! Threads that run a task's steps together, and can stand still in the middle of one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::buffer_pool::BufferPool;
use base::Nanos;
use device::{DeviceError, Outcome, Segment};

use crate::line::Line;
use crate::program::{Begin, CpuTask, Run};
use crate::standing::Shared;
use crate::watch::Watch;

/// A segment on its way.
pub(crate) struct Job {
    pub(crate) segment: Segment,
    /// The line's epoch when it was launched.
    pub(crate) epoch: u64,
    pub(crate) line: Arc<Line>,
    pub(crate) started: Instant,
    /// Whether it may be left inside a step: there are other threads to go on with.
    pub(crate) inside: bool,
}

impl Job {
    /// The task, which is this device's: others are refused before they become a job.
    fn task(&mut self) -> Option<&mut CpuTask> {
        self.segment.task.as_any_mut().downcast_mut::<CpuTask>()
    }
}

/// A pool of threads of which the first runs steps and the others help.
pub(crate) struct Crew {
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    /// What it works on, for whoever orders it to leave.
    job: Mutex<Option<Job>>,
    watch: Arc<Watch>,
    shared: Arc<Shared>,
    /// Whether its threads give way to real time's.
    pub(crate) behind: bool,
    /// Time it stood since it was made.
    stood: AtomicU64,
    stopped: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Inbox {
    job: Option<(Job, Run)>,
    closed: bool,
}

/// A task's hold on the crew that stands in the middle of its step. Dropping it sends the crew home.
pub(crate) struct Standing {
    crew: Arc<Crew>,
    resumed: bool,
}

impl Standing {
    /// The crew goes on, for `job`.
    pub(crate) fn resume(mut self, job: Job) -> Arc<Crew> {
        self.resumed = true;
        self.crew.resume(job);
        self.crew.clone()
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.crew.shared.standing.fetch_sub(1, Ordering::AcqRel);
        if !self.resumed {
            self.crew.watch.abandon();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Crew {
    /// Starts `threads` threads, named after queue `id`.
    pub(crate) fn start(
        id: u32,
        threads: usize,
        behind: bool,
        shared: &Arc<Shared>,
    ) -> Result<Arc<Crew>, String> {
        let threads = threads.max(1);
        let watch = Arc::new(Watch::new(threads));
        let posted = watch.clone();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |worker| format!("cpu-q{id}-{worker}"))
            .start_handler(move |worker| {
                posted.post(worker);
                if behind {
                    crate::standing::give_way();
                }
            })
            .build()
            .map_err(|err| format!("cannot start {threads} threads: {err}"))?;
        let crew = Arc::new(Crew {
            inbox: Mutex::default(),
            arrived: Condvar::new(),
            job: Mutex::default(),
            watch,
            shared: shared.clone(),
            behind,
            stood: AtomicU64::new(0),
            stopped: Mutex::default(),
        });
        let still = Arc::downgrade(&crew);
        crew.watch.when_still(move || {
            if let Some(crew) = still.upgrade() {
                Crew::stand(&crew);
            }
        });
        let main = crew.clone();
        // The loop occupies one thread of the pool, so that a step's own parallelism starts there and finds the others
        // idle.
        pool.spawn(move || main.serve());
        Ok(crew)
    }

    /// Gives an idle crew something to do.
    pub(crate) fn assign(&self, job: Job, run: Run) {
        lock(&self.inbox).job = Some((job, run));
        self.arrived.notify_one();
    }

    /// Ends the threads when they are idle.
    pub(crate) fn close(&self) {
        lock(&self.inbox).closed = true;
        self.arrived.notify_one();
    }

    /// Tells it to leave what it does for `line`.
    pub(crate) fn order(&self, line: &Line) {
        let job = lock(&self.job);
        let concerns = |job: &Job| job.inside && std::ptr::eq(&raw const *job.line, line);
        if job.as_ref().is_some_and(concerns) {
            *lock(&self.stopped) = Some(Instant::now());
            self.watch.stop();
        }
    }

    fn resume(&self, job: Job) {
        if let Some(stopped) = lock(&self.stopped).take() {
            self.stood.fetch_add(Nanos::from(stopped.elapsed()).0, Ordering::Relaxed);
        }
        *lock(&self.job) = Some(job);
        self.watch.go();
    }

    /// All of its threads stand in the middle of a step: the task goes back without them.
    fn stand(crew: &Arc<Crew>) {
        let Some(mut job) = lock(&crew.job).take() else { return };
        crew.shared.standing.fetch_add(1, Ordering::AcqRel);
        crew.shared.left_inside.fetch_add(1, Ordering::Relaxed);
        if let Some(task) = job.task() {
            task.stand(Standing { crew: crew.clone(), resumed: false });
        }
        let line = job.line.clone();
        line.complete(job, Outcome::Preempted);
        line.free(crew);
    }

    fn serve(self: Arc<Crew>) {
        let buffers = BufferPool::new();
        while let Some((job, run)) = self.next() {
            let mut next = Some((job, run));
            while let Some((job, run)) = next {
                next = self.work(job, run, &buffers);
            }
        }
    }

    fn next(&self) -> Option<(Job, Run)> {
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(job) = inbox.job.take() {
                return Some(job);
            }
            if inbox.closed {
                return None;
            }
            inbox = self.arrived.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs a job to its end, and says what comes next on its line if that is for this crew.
    fn work(
        self: &Arc<Crew>,
        mut job: Job,
        mut run: Run,
        buffers: &BufferPool,
    ) -> Option<(Job, Run)> {
        let line = job.line.clone();
        job.inside = line.can_be_left_inside();
        *lock(&self.job) = Some(job);
        // A kernel that panics is a defect, but it must cost its request and not the queue.
        let steps = AssertUnwindSafe(|| self.steps(&mut run, buffers));
        let outcome = catch_unwind(steps);
        let finished = {
            let mut job = lock(&self.job);
            // What was ordered too late concerns nobody any more.
            self.watch.go();
            *lock(&self.stopped) = None;
            job.take()
        };
        let Some(mut job) = finished else {
            // Nobody wanted the task any more while it stood; the line has other threads.
            line.take_home(self);
            return None;
        };
        let outcome = outcome.unwrap_or_else(|_| {
            Outcome::Failed(DeviceError::StepFailed {
                step: format!("#{}", job.segment.task.next_step()),
                op: "?".to_string(),
                reason: "the kernel panicked".to_string(),
            })
        });
        if let Some(task) = job.task() {
            task.end(run);
        }
        if outcome == Outcome::Preempted {
            self.shared.left_between.fetch_add(1, Ordering::Relaxed);
        }
        let line = job.line.clone();
        line.complete(job, outcome);
        line.next(self)
    }

    /// Step after step, of whichever launch it is now: a task that stood may go on as part of another.
    fn steps(&self, run: &mut Run, buffers: &BufferPool) -> Outcome {
        loop {
            let step = {
                let mut job = lock(&self.job);
                let Some(job) = job.as_mut() else { return Outcome::Preempted };
                let step = job.segment.task.next_step();
                if step >= job.segment.steps.end {
                    return Outcome::Done;
                }
                if job.line.epoch() > job.epoch {
                    return Outcome::Preempted;
                }
                step
            };
            let (started, stood) = (Instant::now(), self.stood.load(Ordering::Relaxed));
            if let Err(err) = run.step(step, buffers) {
                return Outcome::Failed(err);
            }
            let stood = self.stood.load(Ordering::Relaxed) - stood;
            let time = Nanos(Nanos::from(started.elapsed()).0.saturating_sub(stood));
            if let Some(task) = lock(&self.job).as_mut().and_then(Job::task) {
                task.advance(time);
            }
        }
    }
}

/// What a task of this device is to begin with, or the reason why it cannot.
pub(crate) fn begin(segment: &mut Segment) -> Result<Begin, DeviceError> {
    let Some(task) = segment.task.as_any_mut().downcast_mut::<CpuTask>() else {
        return Err(DeviceError::BadPlan("the task belongs to another device".to_string()));
    };
    task.begin().ok_or_else(|| DeviceError::BadPlan("the task is under way elsewhere".to_string()))
}
