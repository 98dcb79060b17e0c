//! What goes on beside a workload: models that come, are asked and go, models that are replaced while they are in use, and
//! clients that go away before they are answered.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use base::{Nanos, Random};
use device::{Device, Program};
use model::Tensor;
use model::config::Class;
use runtime::{ModelKey, Rejection, Reply, Request, RequestHandle};

use super::super::client::{CurrentKey, same};
use super::super::{KeptModel, Stage, config};
use super::{kind, locked};

/// How long a reply may take, and how long a model may take to be taken apart.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests that one disturbance submits at most.
const REQUESTS_MOST: u64 = 6;

/// Of so many loads one replaces a model that is in use.
const RELOAD_OF: u64 = 4;

/// The least pause between two loads, so that somebody sees the device without them.
const PAUSE_LEAST: Duration = Duration::from_millis(30);

/// How long a device may take to give memory back behind a program that is no more.
const GIVE_BACK: Duration = Duration::from_millis(20);

/// A model that can be disturbed.
pub(super) struct Subject<'a> {
    pub(super) model: &'a KeptModel,
    pub(super) key: CurrentKey,
    /// What it answers as best effort when nothing disturbs it.
    pub(super) expected: Vec<Tensor>,
    /// How long that took.
    pub(super) took: Nanos,
}

/// What was done and what became of it.
#[derive(Debug, Default)]
pub(super) struct Disturbance {
    pub(super) loads: u64,
    pub(super) unloads: u64,
    pub(super) reloads: u64,
    pub(super) cancellations: u64,
    /// Answers with outputs.
    pub(super) answers: u64,
    pub(super) wrong: u64,
    /// Rejections that were asked for, by kind.
    pub(super) expected: BTreeMap<&'static str, u64>,
    /// All other failures.
    pub(super) unexpected: BTreeMap<&'static str, u64>,
    pub(super) first_unexpected: Option<String>,
}

/// Disturbs a node until it is told to stop.
pub(super) struct Disturber<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) stage: &'a Stage<'a>,
    pub(super) subjects: Vec<Subject<'a>>,
    pub(super) stop: AtomicBool,
    /// Held while the device has models that come and go again.
    pub(super) calm: Mutex<()>,
    pub(super) done: Mutex<Disturbance>,
    /// Mean pause between two disturbances of one kind, in seconds.
    pub(super) pause_s: f64,
}

/// A request whose answer is due.
struct Pending {
    replies: mpsc::Receiver<Reply>,
    handle: RequestHandle,
}

impl Disturber<'_> {
    fn pause(&self, random: &mut Random, least: Duration) {
        let span = Duration::from_secs_f64(random.exponential(self.pause_s).min(1.0)).max(least);
        let until = std::time::Instant::now() + span;
        while !self.stopped() && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5).min(span));
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn any(&self, random: &mut Random) -> &Subject<'_> {
        &self.subjects[random.below(self.subjects.len() as u64) as usize]
    }

    /// Loads and unloads, one model after another.
    pub(super) fn come_and_go(&self, seed: u64) {
        let mut random = Random::new(seed);
        while !self.stopped() {
            self.pause(&mut random, PAUSE_LEAST);
            let subject = self.any(&mut random);
            let _busy = locked(&self.calm);
            let program = match self.device.load(subject.model.plan.clone()) {
                Ok(program) => program,
                Err(why) => {
                    let words = format!("model '{}' does not load: {why}", subject.model.name);
                    locked(&self.done).note(false, "load", words);
                    continue;
                }
            };
            match random.below(RELOAD_OF) {
                0 => self.replace(subject, program),
                _ => self.visit(subject, program, &mut random),
            }
            if !self.stage.node.wait_discarded(PATIENCE) {
                let words = "a model that was removed is not taken apart";
                locked(&self.done).note(false, "discard", words);
            }
            std::thread::sleep(GIVE_BACK);
        }
    }

    /// Puts `program` in the place of the model, whose requests under way still end as they should.
    fn replace(&self, subject: &Subject<'_>, program: Arc<dyn Program>) {
        let key = self.stage.node.add_model(program, &config());
        // One that finds the former copy in use, and is answered by it.
        let queued = self.submit(subject, *subject.key.hold());
        let former = subject.key.replace(key);
        let removed = self.stage.node.remove_model(former);
        self.settle(subject, queued, None);
        let mut done = locked(&self.done);
        done.reloads += 1;
        if !removed {
            done.note(false, "unload", "a model that is in use was not there to be removed");
        }
    }

    /// Adds `program`, asks it a few times and takes it away, in the midst of its requests or behind them.
    fn visit(&self, subject: &Subject<'_>, program: Arc<dyn Program>, random: &mut Random) {
        let key = self.stage.node.add_model(program, &config());
        locked(&self.done).loads += 1;
        let count = 1 + random.below(REQUESTS_MOST);
        let mut asked: Vec<Pending> = (0..count).map(|_| self.submit(subject, key)).collect();
        if random.below(2) == 0 {
            asked.drain(..).for_each(|pending| self.settle(subject, pending, None));
        }
        let removed = self.stage.node.remove_model(key);
        // Whoever comes now is too late, and hears so.
        let late = self.submit(subject, key);
        asked.into_iter().for_each(|pending| self.settle(subject, pending, None));
        self.settle(subject, late, Some(kind(&Rejection::NoSuchModel)));
        let mut done = locked(&self.done);
        done.unloads += 1;
        if !removed {
            done.note(false, "unload", "a model that was just loaded was not there to be removed");
        }
    }

    /// Asks as a client does that goes away before it is answered, as often as not.
    pub(super) fn go_away(&self, seed: u64) {
        let mut random = Random::new(seed);
        while !self.stopped() {
            self.pause(&mut random, Duration::ZERO);
            let subject = self.any(&mut random);
            let count = 1 + random.below(REQUESTS_MOST);
            let asked: Vec<Pending> =
                (0..count).map(|_| self.submit(subject, *subject.key.hold())).collect();
            // Anywhere between before it runs and after it is done.
            let wait = (subject.took.0 as f64 * 2.0 * random.unit_f64()) as u64;
            std::thread::sleep(Duration::from_nanos(wait.min(1_000_000_000)));
            for pending in asked {
                let gone = random.below(2) == 0;
                if gone {
                    pending.handle.cancel();
                    locked(&self.done).cancellations += 1;
                }
                let allowed = gone.then_some(kind(&Rejection::Cancelled));
                self.settle(subject, pending, allowed);
            }
        }
    }

    fn submit(&self, subject: &Subject<'_>, key: ModelKey) -> Pending {
        let (sender, replies) = mpsc::sync_channel(1);
        let request = Request {
            model: key,
            inputs: subject.model.inputs.clone(),
            class: Some(Class::BestEffort),
            priority: None,
            timeout: None,
        };
        let reply = move |reply: Reply| {
            // Whoever asked may have lost patience, which is booked there.
            let _ = sender.send(reply);
        };
        Pending { handle: self.stage.node.submit(request, Box::new(reply)), replies }
    }

    /// Waits for the answer and books it; a rejection only of the kind that is `allowed` was to be expected.
    fn settle(&self, subject: &Subject<'_>, pending: Pending, allowed: Option<&'static str>) {
        let reply = pending.replies.recv_timeout(PATIENCE);
        let mut done = locked(&self.done);
        match reply.map(|reply| reply.result) {
            Ok(Ok(outputs)) => {
                done.answers += 1;
                done.wrong += u64::from(!same(&outputs, &subject.expected));
            }
            Ok(Err(why)) => {
                let expected = allowed == Some(kind(&why));
                done.note(expected, kind(&why), format!("model '{}': {why}", subject.model.name));
            }
            Err(_) => {
                let words = format!("a request of model '{}' was not answered", subject.model.name);
                done.note(false, "unanswered", words);
            }
        }
    }
}
