//! A queue's segments: one under way, some waiting, and the crews that take turns.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::Nanos;
use device::{Completion, CompletionSink, DeviceError, Outcome, QueueOptions, Segment};

use crate::crew::{self, Crew, Job};
use crate::program::{Begin, Run};
use crate::standing::{STANDING_MOST, Shared};

/// One queue.
pub(crate) struct Line {
    options: QueueOptions,
    threads: usize,
    sink: Arc<dyn CompletionSink>,
    shared: Arc<Shared>,
    epoch: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Launched>,
    /// Who works, or is about to.
    running: Option<Arc<Crew>>,
    /// Crews that are idle.
    spare: Vec<Arc<Crew>>,
    closed: bool,
}

/// A segment and the epoch it was launched in.
struct Launched {
    segment: Segment,
    epoch: u64,
}

/// What becomes of a segment whose turn it is.
enum Turn {
    /// A crew that stood goes on.
    Resumed(Arc<Crew>),
    /// Somebody is to begin.
    New(Box<(Job, Run)>),
    /// It is over before it began.
    Over(Segment, Outcome),
}

impl Line {
    pub(crate) fn open(
        options: QueueOptions,
        threads: usize,
        sink: Arc<dyn CompletionSink>,
        shared: Arc<Shared>,
    ) -> Result<Arc<Line>, String> {
        let line = Line {
            options,
            threads,
            sink,
            shared,
            epoch: AtomicU64::new(0),
            state: Mutex::default(),
        };
        let crew = line.crew()?;
        line.lock().spare.push(crew);
        Ok(Arc::new(line))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Whether its threads are to give way: where real time has a queue that goes before this one.
    fn stands_behind(&self) -> bool {
        !self.options.high_priority && self.shared.real_time.load(Ordering::Relaxed)
    }

    fn crew(&self) -> Result<Arc<Crew>, String> {
        Crew::start(self.options.id, self.threads, self.stands_behind(), &self.shared)
    }

    pub(crate) fn launch(self: &Arc<Line>, segment: Segment) -> Result<(), Segment> {
        if self.options.high_priority {
            self.shared.real_time.store(true, Ordering::Relaxed);
        }
        let mut state = self.lock();
        let launched = Launched { segment, epoch: self.epoch() };
        if state.running.is_some() {
            if state.waiting.len() >= self.options.capacity.max(1) {
                return Err(launched.segment);
            }
            state.waiting.push_back(launched);
            return Ok(());
        }
        state.waiting.push_back(launched);
        if let Some((segment, outcome)) = self.start(&mut state) {
            drop(state);
            // The caller may hold what whoever hears of it needs.
            self.shared.tell_later(self.completion(segment, outcome, Nanos::ZERO), &self.sink);
        }
        Ok(())
    }

    /// Makes all that was launched leave.
    pub(crate) fn preempt(&self) {
        let state = self.lock();
        self.epoch.fetch_add(1, Ordering::AcqRel);
        if let Some(crew) = &state.running {
            crew.order(self);
        }
    }

    /// No more is launched; threads end when they have nothing to do.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.spare.drain(..).for_each(|crew| crew.close());
    }

    /// Whether a segment that begins may be left inside a step, for which there must be threads to take its place. Makes
    /// them if need be.
    pub(crate) fn can_be_left_inside(&self) -> bool {
        if !self.options.preemptible
            || self.shared.standing.load(Ordering::Acquire) >= STANDING_MOST
        {
            return false;
        }
        let behind = self.stands_behind();
        if self.lock().spare.iter().any(|crew| crew.behind == behind) {
            return true;
        }
        let Ok(crew) = self.crew() else { return !self.lock().spare.is_empty() };
        self.lock().spare.push(crew);
        true
    }

    /// Reports how a job ended.
    pub(crate) fn complete(&self, job: Job, outcome: Outcome) {
        let busy = job.started.elapsed().into();
        self.sink.complete(self.completion(job.segment, outcome, busy));
    }

    fn completion(&self, segment: Segment, outcome: Outcome, busy: Nanos) -> Completion {
        let Segment { token, task, .. } = segment;
        Completion { queue: self.options.id, token, task, outcome, busy }
    }

    /// What is next, for `crew`, which has just finished; it is idle when that is nothing.
    pub(crate) fn next(self: &Arc<Line>, crew: &Arc<Crew>) -> Option<(Job, Run)> {
        let mut state = self.lock();
        loop {
            state.running = None;
            let Some(launched) = state.waiting.pop_front() else { break };
            match self.turn(launched) {
                Turn::New(begun) => {
                    state.running = Some(crew.clone());
                    return Some(*begun);
                }
                Turn::Resumed(other) => {
                    state.running = Some(other);
                    break;
                }
                Turn::Over(segment, outcome) => {
                    // Nothing else begins before this is told.
                    state.running = Some(crew.clone());
                    drop(state);
                    self.sink.complete(self.completion(segment, outcome, Nanos::ZERO));
                    state = self.lock();
                }
            }
        }
        Self::rest(&mut state, crew, self.stands_behind());
        None
    }

    /// `crew` stands in the middle of what it did: somebody else goes on.
    pub(crate) fn free(self: &Arc<Line>, crew: &Arc<Crew>) {
        let mut state = self.lock();
        loop {
            state.running = None;
            match self.start(&mut state) {
                None => return,
                Some((segment, outcome)) => {
                    state.running = Some(crew.clone());
                    drop(state);
                    self.sink.complete(self.completion(segment, outcome, Nanos::ZERO));
                    state = self.lock();
                }
            }
        }
    }

    /// Takes a crew in whose task nobody wanted any more.
    pub(crate) fn take_home(&self, crew: &Arc<Crew>) {
        Self::rest(&mut self.lock(), crew, self.stands_behind());
    }

    /// `crew` has nothing to do. It is kept, unless nothing will come or others are to be preferred.
    fn rest(state: &mut State, crew: &Arc<Crew>, behind: bool) {
        let better = |spare: &Arc<Crew>| spare.behind == behind;
        let outdated = crew.behind != behind && state.spare.iter().any(better);
        // Crews that stood and were given up come back in addition to those who took their place.
        if state.closed || outdated || state.spare.len() > STANDING_MOST {
            crew.close();
        } else {
            state.spare.push(crew.clone());
        }
    }

    /// Starts the first that waits on a crew that is idle, or gives it back when it is over before it began.
    fn start(self: &Arc<Line>, state: &mut State) -> Option<(Segment, Outcome)> {
        match self.turn(state.waiting.pop_front()?) {
            Turn::Over(segment, outcome) => Some((segment, outcome)),
            Turn::Resumed(crew) => {
                state.running = Some(crew);
                None
            }
            Turn::New(begun) => {
                let (job, run) = *begun;
                match self.idle_crew(state) {
                    Ok(crew) => {
                        state.running = Some(crew.clone());
                        crew.assign(job, run);
                        None
                    }
                    Err(reason) => {
                        let err = DeviceError::Faulted { device: "cpu".to_string(), reason };
                        Some((job.segment, Outcome::Failed(err)))
                    }
                }
            }
        }
    }

    /// An idle crew, of the right standing if there is one. A job is left inside a step only where there is a spare crew, so
    /// there is nearly always one.
    fn idle_crew(&self, state: &mut State) -> Result<Arc<Crew>, String> {
        let behind = self.stands_behind();
        let best = state.spare.iter().rposition(|crew| crew.behind == behind);
        match best.or(state.spare.len().checked_sub(1)) {
            Some(best) => Ok(state.spare.swap_remove(best)),
            None => self.crew(),
        }
    }

    fn turn(self: &Arc<Line>, launched: Launched) -> Turn {
        let Launched { mut segment, epoch } = launched;
        if self.epoch() > epoch {
            return Turn::Over(segment, Outcome::Preempted);
        }
        let begin = match crew::begin(&mut segment) {
            Ok(begin) => begin,
            Err(err) => return Turn::Over(segment, Outcome::Failed(err)),
        };
        let inside = self.options.preemptible;
        let job = Job { segment, epoch, line: self.clone(), started: Instant::now(), inside };
        match begin {
            Begin::With(run) => Turn::New(Box::new((job, run))),
            Begin::Resume(standing) => Turn::Resumed(standing.resume(job)),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // Crews may have come to rest here after the queue was closed.
        self.close();
    }
}
