//! Conformance tests that every device passes: programs, tasks and queues on small plans whose
//! outputs a slow reference computes.
//!
//! A plan that a device refuses with a reason is skipped; one that it accepts must run and be
//! right.

mod batches;
mod plans;
mod queues;
mod reference;
mod residency;
mod results;

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use model::{LaunchPlan, Tensor};

use crate::{
    Completion, CompletionSink, Device, DeviceError, Outcome, Program, Queue, QueueOptions,
    Segment, Task,
};

/// Time of one segment after which the device counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// Result of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Conforms.
    Passed,
    /// Does not conform: what was wrong.
    Failed(String),
    /// The device does not support it: its reason.
    Skipped(String),
}

/// One case.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// Its result.
    pub verdict: Verdict,
}

/// Results of all cases.
#[derive(Clone, Debug, Default)]
pub struct ConformanceReport {
    /// In the order they ran.
    pub cases: Vec<Case>,
}

impl ConformanceReport {
    /// The cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = &Case> {
        self.cases.iter().filter(|case| matches!(case.verdict, Verdict::Failed(_)))
    }

    fn add(&mut self, name: &str, outcome: Result<(), Stop>) {
        let verdict = match outcome {
            Ok(()) => Verdict::Passed,
            Err(Stop::Wrong(why)) => Verdict::Failed(why),
            Err(Stop::Unsupported(why)) => Verdict::Skipped(why),
        };
        self.cases.push(Case { name: name.to_string(), verdict });
    }
}

impl fmt::Display for ConformanceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for case in &self.cases {
            match &case.verdict {
                Verdict::Passed => writeln!(f, "passed   {}", case.name)?,
                Verdict::Failed(why) => writeln!(f, "FAILED   {}: {why}", case.name)?,
                Verdict::Skipped(why) => writeln!(f, "skipped  {}: {why}", case.name)?,
            }
        }
        Ok(())
    }
}

/// Why a case ends early.
enum Stop {
    Wrong(String),
    Unsupported(String),
}

impl From<String> for Stop {
    fn from(why: String) -> Stop {
        Stop::Wrong(why)
    }
}

impl From<&str> for Stop {
    fn from(why: &str) -> Stop {
        Stop::Wrong(why.to_string())
    }
}

/// Fails a case unless `holds`.
fn ensure(holds: bool, why: impl Into<String>) -> Result<(), Stop> {
    if holds { Ok(()) } else { Err(Stop::Wrong(why.into())) }
}

/// Runs all cases on `device`.
pub fn run(device: &dyn Device) -> ConformanceReport {
    let mut report = ConformanceReport::default();
    results::run(device, &mut report);
    queues::run(device, &mut report);
    batches::run(device, &mut report);
    report
}

/// Runs the residency cases on `device`, which loads and evicts weights. Nothing else may use it
/// meanwhile.
pub fn run_residency(device: &dyn Device) -> ConformanceReport {
    let mut report = ConformanceReport::default();
    residency::run(device, &mut report);
    report
}

/// Forwards completions.
struct Inbox(Sender<Completion>);

impl CompletionSink for Inbox {
    fn complete(&self, completion: Completion) {
        // The receiver is gone when a case ends early.
        let _ = self.0.send(completion);
    }
}

/// A queue and its completions.
struct TestQueue {
    queue: Box<dyn Queue>,
    completions: Receiver<Completion>,
}

impl TestQueue {
    fn open(device: &dyn Device, id: u32, capacity: usize) -> Result<TestQueue, Stop> {
        let (sender, completions) = channel();
        let options = QueueOptions { id, capacity, high_priority: false, preemptible: true };
        let queue = device
            .open_queue(options, Arc::new(Inbox(sender)))
            .map_err(|err| format!("no queue: {err}"))?;
        Ok(TestQueue { queue, completions })
    }

    /// The next completion.
    fn wait(&self) -> Result<Completion, Stop> {
        self.completions
            .recv_timeout(PATIENCE)
            .map_err(|err| Stop::Wrong(format!("a launched segment did not complete: {err}")))
    }

    /// Launches steps of `task` and waits for them.
    fn run(&self, task: Box<dyn Task>, steps: std::ops::Range<usize>) -> Result<Completion, Stop> {
        let segment = Segment { token: 1, task, steps };
        self.queue.launch(segment).map_err(|_| "an idle queue refused a segment".to_string())?;
        self.wait()
    }

    /// Runs all of `task` at once.
    fn outputs(&self, task: Box<dyn Task>) -> Result<Vec<Tensor>, Stop> {
        let steps = task.next_step()..task.step_count();
        finished(self.run(task, steps)?)
    }
}

/// The outputs of a task whose last segment is done.
fn finished(completion: Completion) -> Result<Vec<Tensor>, Stop> {
    match completion.outcome {
        Outcome::Done => {
            completion.task.into_outputs().map_err(|err| Stop::Wrong(format!("no outputs: {err}")))
        }
        other => Err(Stop::Wrong(format!("the segment ended with {other:?}"))),
    }
}

/// Loads `plan`, or skips the case with the device's reason.
fn load(device: &dyn Device, plan: LaunchPlan) -> Result<Arc<dyn Program>, Stop> {
    let refused = device.unsupported_steps(&plan);
    match (device.load(Arc::new(plan)), refused.first()) {
        (Ok(program), None) => Ok(program),
        (Err(err @ DeviceError::Unsupported { .. }), Some(_)) => {
            Err(Stop::Unsupported(err.to_string()))
        }
        (Ok(_), Some(err)) => Err(Stop::Wrong(format!("loaded although {err}"))),
        (Err(err), _) => Err(Stop::Wrong(format!("not loaded: {err}"))),
    }
}
