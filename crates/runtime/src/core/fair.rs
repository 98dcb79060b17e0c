//! Best effort, shared between models by deficit round robin over the time they use.

use std::collections::VecDeque;

use base::Nanos;

use super::ready::{Key, ReadyHeap};
use super::{ModelId, RequestId};

/// What a model may use before the next one gets its turn.
const QUANTUM_NS: i64 = 1_000_000;

#[derive(Debug, Default)]
struct ModelQueue {
    /// By priority, then arrival; work that was made to leave is older than what came since.
    waiting: ReadyHeap,
    /// Time the model may still use in this round; negative when it used more.
    deficit_ns: i64,
    in_round: bool,
}

/// A queue per model, and whose turn it is.
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

    /// Makes room for `model`.
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

    /// Models of which requests wait.
    pub(super) fn waiting_models(&self) -> impl Iterator<Item = ModelId> + Clone {
        self.round.iter().copied().filter(|model| !self.queues[model.0 as usize].waiting.is_empty())
    }

    /// The first request of `model`, whoever's turn it is; what it uses is charged all the same.
    pub(super) fn pop_of(&mut self, model: ModelId) -> Option<RequestId> {
        let request = self.queues.get_mut(model.0 as usize)?.waiting.pop()?;
        self.waiting -= 1;
        Some(request)
    }

    /// The first request of the model whose turn it is.
    pub(super) fn pop(&mut self) -> Option<RequestId> {
        // Each turn of the loop drops an idle model or tops one up, so it ends: a model's debt is at
        // most one segment's time, and only models with waiting work stay in the round.
        while let Some(&model) = self.round.front() {
            let queue = &mut self.queues[model.0 as usize];
            if queue.waiting.is_empty() {
                // A model that has nothing to do saves nothing up.
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

    /// Moves the front of the round to its back with a fresh quantum. When everyone is in debt, all
    /// get as many quanta as the least indebted needs, at once.
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

    /// Books time that `model` used.
    pub(super) fn charge(&mut self, model: ModelId, busy: Nanos) {
        if let Some(queue) = self.queues.get_mut(model.0 as usize) {
            let busy = i64::try_from(busy.0).unwrap_or(i64::MAX);
            queue.deficit_ns = queue.deficit_ns.saturating_sub(busy);
        }
    }

    /// Takes a waiting `request` out of the middle.
    pub(super) fn remove(&mut self, model: ModelId, request: RequestId) {
        self.queues[model.0 as usize].waiting.remove(request);
        self.waiting -= 1;
    }
}
