//! Churn beside a workload: loads and unloads temporary copies of models, replaces models in use,
//! and cancels requests before their replies.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use base::{Nanos, Random};
use device::{Device, Program};
use model::Tensor;
use model::config::Class;
use runtime::{ModelKey, Rejection, Reply, Request, RequestHandle};

use super::super::client::{CurrentKey, bits_equal};
use super::super::{CellModel, TestNode, config};
use super::{locked, rejection_name};

/// Max time of a reply, and of freeing a model.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Max requests that one action submits.
const REQUESTS_MAX: u64 = 6;

/// One of so many loads replaces a model in use.
const RELOAD_OF: u64 = 4;

/// Min pause between two loads, so that memory can be sampled without temporary copies.
const PAUSE_MIN: Duration = Duration::from_millis(30);

/// How long a device may take to release the memory of a dropped program.
const MEMORY_RELEASE: Duration = Duration::from_millis(20);

/// A model of the workload that churn copies.
pub(super) struct ChurnModel<'a> {
    pub(super) model: &'a CellModel,
    pub(super) key: CurrentKey,
    /// Its reply as best effort when undisturbed.
    pub(super) expected: Vec<Tensor>,
    /// Latency of that reply.
    pub(super) took: Nanos,
}

/// What churn did, and the results.
#[derive(Debug, Default)]
pub(super) struct ChurnStats {
    pub(super) loads: u64,
    pub(super) unloads: u64,
    pub(super) reloads: u64,
    pub(super) cancellations: u64,
    /// Replies with outputs.
    pub(super) replies: u64,
    pub(super) wrong: u64,
    /// Expected rejections, by name.
    pub(super) expected: BTreeMap<&'static str, u64>,
    /// All other failures, by name.
    pub(super) unexpected: BTreeMap<&'static str, u64>,
    pub(super) first_unexpected: Option<String>,
}

/// Loads, unloads, replaces and cancels until it is stopped.
pub(super) struct ChurnInjector<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) test_node: &'a TestNode<'a>,
    pub(super) churn_models: Vec<ChurnModel<'a>>,
    pub(super) stop: AtomicBool,
    /// Held while the device has temporary copies.
    pub(super) temporary_models: Mutex<()>,
    pub(super) stats: Mutex<ChurnStats>,
    /// Mean pause between two actions of one kind, in seconds.
    pub(super) pause_s: f64,
}

/// A request without reply yet.
struct PendingRequest {
    replies: mpsc::Receiver<Reply>,
    handle: RequestHandle,
}

impl ChurnInjector<'_> {
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

    fn any(&self, random: &mut Random) -> &ChurnModel<'_> {
        &self.churn_models[random.below(self.churn_models.len() as u64) as usize]
    }

    /// Loads and unloads copies, one after another.
    pub(super) fn load_and_unload(&self, seed: u64) {
        let mut random = Random::new(seed);
        while !self.stopped() {
            self.pause(&mut random, PAUSE_MIN);
            let model = self.any(&mut random);
            let _busy = locked(&self.temporary_models);
            let program = match self.device.load(model.model.plan.clone()) {
                Ok(program) => program,
                Err(why) => {
                    let message = format!("model '{}' does not load: {why}", model.model.name);
                    locked(&self.stats).record_failure(false, "load", message);
                    continue;
                }
            };
            match random.below(RELOAD_OF) {
                0 => self.replace(model, program),
                _ => self.use_temporary_copy(model, program, &mut random),
            }
            if !self.test_node.node.wait_discarded(TIMEOUT) {
                let message = "a model that was removed is not taken apart";
                locked(&self.stats).record_failure(false, "discard", message);
            }
            std::thread::sleep(MEMORY_RELEASE);
        }
    }

    /// Replaces the model by `program`. Its requests in flight still get their replies.
    fn replace(&self, model: &ChurnModel<'_>, program: Arc<dyn Program>) {
        let key = self.test_node.node.add_model(program, &config());
        // A request to the former copy, which must still reply.
        let queued = self.submit(model, *model.key.read());
        let former = model.key.replace(key);
        let removed = self.test_node.node.remove_model(former);
        self.await_reply(model, queued, None);
        let mut stats = locked(&self.stats);
        stats.reloads += 1;
        if !removed {
            stats.record_failure(
                false,
                "unload",
                "a model that is in use was not there to be removed",
            );
        }
    }

    /// Adds `program`, sends it a few requests and removes it, before or after their replies.
    fn use_temporary_copy(
        &self,
        model: &ChurnModel<'_>,
        program: Arc<dyn Program>,
        random: &mut Random,
    ) {
        let key = self.test_node.node.add_model(program, &config());
        locked(&self.stats).loads += 1;
        let count = 1 + random.below(REQUESTS_MAX);
        let mut pending_requests: Vec<PendingRequest> =
            (0..count).map(|_| self.submit(model, key)).collect();
        if random.below(2) == 0 {
            pending_requests.drain(..).for_each(|pending| self.await_reply(model, pending, None));
        }
        let removed = self.test_node.node.remove_model(key);
        // A request after the removal, which must be rejected.
        let late = self.submit(model, key);
        pending_requests.into_iter().for_each(|pending| self.await_reply(model, pending, None));
        self.await_reply(model, late, Some(rejection_name(&Rejection::NoSuchModel)));
        let mut stats = locked(&self.stats);
        stats.unloads += 1;
        if !removed {
            stats.record_failure(
                false,
                "unload",
                "a model that was just loaded was not there to be removed",
            );
        }
    }

    /// Sends requests and cancels half of them before their replies.
    pub(super) fn cancel_requests(&self, seed: u64) {
        let mut random = Random::new(seed);
        while !self.stopped() {
            self.pause(&mut random, Duration::ZERO);
            let model = self.any(&mut random);
            let count = 1 + random.below(REQUESTS_MAX);
            let pending_requests: Vec<PendingRequest> =
                (0..count).map(|_| self.submit(model, *model.key.read())).collect();
            // A random moment between before its start and after its end.
            let wait = (model.took.0 as f64 * 2.0 * random.unit_f64()) as u64;
            std::thread::sleep(Duration::from_nanos(wait.min(1_000_000_000)));
            for pending in pending_requests {
                let gone = random.below(2) == 0;
                if gone {
                    pending.handle.cancel();
                    locked(&self.stats).cancellations += 1;
                }
                let allowed = gone.then_some(rejection_name(&Rejection::Cancelled));
                self.await_reply(model, pending, allowed);
            }
        }
    }

    fn submit(&self, model: &ChurnModel<'_>, key: ModelKey) -> PendingRequest {
        let (sender, replies) = mpsc::sync_channel(1);
        let request = Request {
            model: key,
            inputs: model.model.inputs.clone(),
            class: Some(Class::BestEffort),
            priority: None,
            timeout: None,
        };
        let reply = move |reply: Reply| {
            // The receiver may have timed out, which is recorded there.
            let _ = sender.send(reply);
        };
        PendingRequest { handle: self.test_node.node.submit(request, Box::new(reply)), replies }
    }

    /// Waits for the reply and records it; only a rejection named `allowed` is expected.
    fn await_reply(
        &self,
        model: &ChurnModel<'_>,
        pending: PendingRequest,
        allowed: Option<&'static str>,
    ) {
        let reply = pending.replies.recv_timeout(TIMEOUT);
        let mut stats = locked(&self.stats);
        match reply.map(|reply| reply.result) {
            Ok(Ok(outputs)) => {
                stats.replies += 1;
                stats.wrong += u64::from(!bits_equal(&outputs, &model.expected));
            }
            Ok(Err(why)) => {
                let expected = allowed == Some(rejection_name(&why));
                stats.record_failure(
                    expected,
                    rejection_name(&why),
                    format!("model '{}': {why}", model.model.name),
                );
            }
            Err(_) => {
                let message = format!("a request of model '{}' got no reply", model.model.name);
                stats.record_failure(false, "unanswered", message);
            }
        }
    }
}
