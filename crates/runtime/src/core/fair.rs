//! Best-effort queue: models share the device by deficit round robin over the time they use.

use std::collections::VecDeque;

use base::Nanos;

use super::ready::{Key, ReadyHeap};
use super::{ModelId, RequestId};

/// Time that a model may use before it is the next one's turn.
const QUANTUM_NS: i64 = 1_000_000;

#[derive(Debug, Default)]
struct ModelQueue {
    /// By priority, then arrival; preempted work keeps its arrival.
    waiting: ReadyHeap,
    /// Remaining time in this round; negative when it used more.
    deficit_ns: i64,
    in_round: bool,
}

/// One queue per model, and the round.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    queues: Vec<ModelQueue>,
    round: VecDeque<ModelId>,
    waiting: usize,
}

impl FairQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Adds `model`.
    pub(super) fn ensure(&mut self, model: ModelId) {
        let index = model.0 as usize;
        if index >= self.queues.len() {
            self.queues.resize_with(index + 1, ModelQueue::default);
        }
        self.queues[index].deficit_ns = 0;
    }

    pub(super) fn push(&mut self, model: ModelId, key: Key, request: RequestId) {
        self.queues[model.0 as usize].waiting.push(key, request);
        self.enter_round(model);
    }

    fn enter_round(&mut self, model: ModelId) {
        self.waiting += 1;
        let queue = &mut self.queues[model.0 as usize];
        if !queue.in_round {
            queue.in_round = true;
            self.round.push_back(model);
        }
    }

    /// Models with waiting requests.
    pub(super) fn waiting_models(&self) -> impl Iterator<Item = ModelId> + Clone {
        self.round.iter().copied().filter(|model| !self.queues[model.0 as usize].waiting.is_empty())
    }

    /// The first request of `model`, out of turn; its time is charged all the same.
    pub(super) fn pop_of(&mut self, model: ModelId) -> Option<RequestId> {
        let request = self.queues.get_mut(model.0 as usize)?.waiting.pop()?;
        self.waiting -= 1;
        Some(request)
    }

    /// The first request of the model whose turn it is.
    pub(super) fn pop(&mut self) -> Option<RequestId> {
        // Every iteration removes an idle model or tops one up, so the loop ends: a debt is at most
        // the time of one segment, and only models with waiting work stay in the round.
        while let Some(&model) = self.round.front() {
            let queue = &mut self.queues[model.0 as usize];
            if queue.waiting.is_empty() {
                // An idle model saves nothing.
                queue.deficit_ns = queue.deficit_ns.min(0);
                queue.in_round = false;
                self.round.pop_front();
                continue;
            }
            if queue.deficit_ns <= 0 {
                self.top_up();
                continue;
            }
            self.waiting -= 1;
            return queue.waiting.pop();
        }
        None
    }

    /// Moves the front of the round to its back with a new quantum. When all are in debt, all get
    /// the number of quanta that the least indebted one needs.
    fn top_up(&mut self) {
        let best =
            self.round.iter().map(|m| self.queues[m.0 as usize].deficit_ns).max().unwrap_or(0);
        let rounds = if best <= 0 { 1 + best.unsigned_abs() / QUANTUM_NS as u64 } else { 0 };
        if rounds > 0 {
            for model in &self.round {
                let queue = &mut self.queues[model.0 as usize];
                let grant = i64::try_from(rounds).unwrap_or(i64::MAX).saturating_mul(QUANTUM_NS);
                queue.deficit_ns = queue.deficit_ns.saturating_add(grant);
            }
        }
        self.round.rotate_left(1);
    }

    /// Charges `model` for time it used.
    pub(super) fn charge(&mut self, model: ModelId, busy: Nanos) {
        if let Some(queue) = self.queues.get_mut(model.0 as usize) {
            let busy = i64::try_from(busy.0).unwrap_or(i64::MAX);
            queue.deficit_ns = queue.deficit_ns.saturating_sub(busy);
        }
    }

    /// Removes a waiting request.
    pub(super) fn remove(&mut self, model: ModelId, request: RequestId) {
        self.queues[model.0 as usize].waiting.remove(request);
        self.waiting -= 1;
    }
}
