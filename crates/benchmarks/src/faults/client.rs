//! A client that sends without pause and compares every reply.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use assembly::Failure;
use device::DeviceError;
use model::{LaunchPlan, Tensor};
use runtime::device_group::router::GroupModelId;
use runtime::{DeviceGroup, Rejection, ReplyResult, Request};

/// A request without a reply after this time has none.
const REPLY_LIMIT: Duration = Duration::from_secs(120);
/// Pause after a refusal.
const REFUSED_PAUSE: Duration = Duration::from_millis(1);

/// A network with the reply that it must give.
pub(super) struct ServedNetwork {
    name: String,
    model: GroupModelId,
    pub(super) plan: Arc<LaunchPlan>,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    right: AtomicU64,
    /// The last right reply, and the longest time between two since the last reset.
    gap: Mutex<(Instant, Duration)>,
}

impl ServedNetwork {
    /// # Errors
    /// When it gives no reply.
    pub(super) fn new(
        name: String,
        model: GroupModelId,
        plan: Arc<LaunchPlan>,
        inputs: Vec<Tensor>,
        group: &DeviceGroup,
    ) -> Result<ServedNetwork, Failure> {
        let (right, gap) = (AtomicU64::new(0), Mutex::new((Instant::now(), Duration::ZERO)));
        let mut network = ServedNetwork { name, model, plan, inputs, outputs: vec![], right, gap };
        network.outputs = match network.ask(group, model) {
            Some(Ok(outputs)) => outputs,
            other => return Err(Failure::failed(format!("{}: {other:?}", network.name))),
        };
        Ok(network)
    }

    /// The reply of `model` to the inputs of this network; `None` when there is none.
    pub(super) fn ask(&self, group: &DeviceGroup, model: GroupModelId) -> Option<ReplyResult> {
        let (sender, receiver) = channel();
        let inputs = self.inputs.clone();
        let request = Request { model, inputs, class: None, priority: None, timeout: None };
        group.submit(request, Box::new(move |reply| drop(sender.send(reply.result))));
        receiver.recv_timeout(REPLY_LIMIT).ok()
    }

    /// Right replies so far.
    pub(super) fn right(&self) -> u64 {
        self.right.load(Ordering::SeqCst)
    }

    pub(super) fn reset_gap(&self) {
        self.gap.lock().unwrap_or_else(PoisonError::into_inner).1 = Duration::ZERO;
    }

    /// The longest time between two right replies since the last reset.
    pub(super) fn gap(&self) -> Duration {
        self.gap.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    fn count_right(&self) {
        let mut gap = self.gap.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        gap.1 = gap.1.max(now - gap.0);
        gap.0 = now;
        drop(gap);
        self.right.fetch_add(1, Ordering::SeqCst);
    }
}

/// What became of the requests of a client.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ClientRecord {
    pub(super) right: u64,
    /// Refused because the device is faulted or has no memory.
    pub(super) refused: u64,
    pub(super) wrong: u64,
    pub(super) unanswered: u64,
}

impl ClientRecord {
    pub(super) fn add(&mut self, other: &ClientRecord) {
        self.right += other.right;
        self.refused += other.refused;
        self.wrong += other.wrong;
        self.unanswered += other.unanswered;
    }
}

pub(super) struct Client<'a> {
    pub(super) group: &'a DeviceGroup,
    pub(super) network: &'a ServedNetwork,
    pub(super) end: &'a AtomicBool,
}

impl Client<'_> {
    /// Sends one request after another until the end.
    pub(super) fn run(&self) -> ClientRecord {
        let mut record = ClientRecord::default();
        while !self.end.load(Ordering::SeqCst) {
            match self.network.ask(self.group, self.network.model) {
                None => record.unanswered += 1,
                Some(Ok(outputs)) if outputs == self.network.outputs => {
                    record.right += 1;
                    self.network.count_right();
                }
                Some(Err(Rejection::Device(
                    DeviceError::Faulted { .. } | DeviceError::OutOfMemory { .. },
                ))) => {
                    record.refused += 1;
                    std::thread::sleep(REFUSED_PAUSE);
                }
                Some(other) => {
                    let what = other.map(|_| "other outputs than before");
                    eprintln!("{}: {what:?}", self.network.name);
                    record.wrong += 1;
                }
            }
        }
        record
    }
}
