//! Batching settings of a model.

use base::Nanos;
use device::PreemptionLevel;
use model::config::{Batching, BatchingPolicy, CopyTime, ModelConfig};

use super::Member;
use crate::batching::{
    Adaptive, AdaptiveOptions, Auto, BatchPolicy, BatchProfile, Deferred, EarlyDrop, Elastic,
    LazyDrop, Staggered, StaggeredBatch, WaitingRequest, Window,
};

/// Workers of policies with any batch size: one runs and one is next.
const WORKERS: usize = 2;

/// The same where batches run beside each other.
const WORKERS_BESIDE: usize = 6;

/// How requests of a model are batched.
#[derive(Clone, Debug)]
pub(in crate::node) struct Rules {
    policy: BatchingPolicy,
    /// The largest batch of each worker.
    pub(in crate::node) workers: Vec<usize>,
    /// Workers run only batches of exactly their size.
    pub(in crate::node) exact: bool,
    pub(in crate::node) copy: CopyTime,
    max_wait: Nanos,
    objective: Option<Nanos>,
    /// The workers are not configured: they may be chosen.
    chosen: bool,
    /// The policy is not configured: it may be chosen.
    auto: bool,
    /// The batches of a backend pool, while the model is in one.
    staggered: Option<StaggeredBatch>,
}

impl Rules {
    /// The settings of `config` on a device of that level; `None` without batching.
    pub(in crate::node) fn of(config: &ModelConfig, level: PreemptionLevel) -> Option<Rules> {
        let Batching { policy, ref workers, max_batch, max_wait_us, copy, .. } = config.batching;
        if policy == BatchingPolicy::None {
            return None;
        }
        let max_rows = if max_batch == 0 { Batching::MAX_BATCH } else { max_batch };
        let max_rows =
            if config.max_batch_size == 0 { max_rows } else { max_rows.min(config.max_batch_size) };
        let exact = policy == BatchingPolicy::Elastic;
        let own: Vec<usize> = match policy {
            BatchingPolicy::Elastic => Elastic::WORKERS.to_vec(),
            BatchingPolicy::Auto if level == PreemptionLevel::InsideTile => {
                vec![max_rows; WORKERS_BESIDE]
            }
            BatchingPolicy::Auto => vec![max_rows; WORKERS],
            _ => vec![max_rows],
        };
        let chosen = workers.is_empty();
        let workers = if chosen { own } else { workers.clone() };
        let workers: Vec<usize> = workers.into_iter().filter(|batch| *batch <= max_rows).collect();
        let workers = if workers.is_empty() { vec![max_rows] } else { workers };
        Some(Rules {
            policy,
            workers,
            exact,
            copy,
            max_wait: Nanos::from_micros(max_wait_us),
            objective: config.slo_ms.map(Nanos::from_millis),
            chosen,
            auto: config.batching.policy == BatchingPolicy::Auto,
            staggered: None,
        })
    }

    /// Sets the batches of a backend pool, unless a policy is configured. Returns whether that is a
    /// change.
    pub(super) fn set_staggered_batch(&mut self, staggered: Option<StaggeredBatch>) -> bool {
        let within = |staggered: StaggeredBatch| StaggeredBatch {
            batch: staggered.batch.clamp(1, self.batch_max()),
            ..staggered
        };
        let staggered = staggered.filter(|_| self.auto).map(within);
        std::mem::replace(&mut self.staggered, staggered) != staggered
    }

    /// The batches of a backend pool, while the model is in one.
    pub(super) fn staggered(&self) -> Option<StaggeredBatch> {
        self.staggered
    }

    /// The largest batch.
    pub(in crate::node) fn batch_max(&self) -> usize {
        self.workers.iter().copied().max().unwrap_or(1)
    }

    /// Batch sizes to prepare, each as often as workers may run it at once.
    pub(in crate::node) fn batches(&self) -> Vec<usize> {
        if self.exact {
            return self.workers.clone();
        }
        Auto::batches(self.batch_max(), self.workers.len())
    }

    /// Whether a delayed batch takes all waiting requests: a second call of the policy would count
    /// them twice.
    pub(super) fn takes_all_waiting(&self) -> bool {
        self.policy == BatchingPolicy::Adaptive
    }

    /// The SLO.
    pub(in crate::node) fn objective(&self) -> Option<Nanos> {
        self.objective
    }

    /// The largest batch of workers of fixed sizes by measured times, unless configured. A request
    /// that just misses a batch waits for it and runs in the next, so two batches fit the SLO.
    /// Other policies use the SLO themselves.
    pub(super) fn max_fitting(&self, measured: &BatchProfile) -> usize {
        match self.staggered {
            None if self.exact && self.chosen => self.limit(measured),
            _ => usize::MAX,
        }
    }

    /// The largest batch that fits the SLO.
    fn limit(&self, profile: &BatchProfile) -> usize {
        self.objective.map_or(usize::MAX, |objective| profile.batch_for_objective(objective))
    }

    /// A request for a policy: due at its deadline or its SLO.
    pub(super) fn seen<M>(&self, member: &Member<M>) -> WaitingRequest {
        let due = self.objective.map_or(Nanos::MAX, |objective| member.arrived + objective);
        WaitingRequest { arrived: member.arrived, deadline: member.deadline.min(due) }
    }

    /// A new policy.
    pub(super) fn policy(&self, profile: &BatchProfile) -> Box<dyn BatchPolicy> {
        let batch_max = self.batch_max();
        if let Some(staggered) = self.staggered {
            return Box::new(Staggered { batches: staggered });
        }
        match self.policy {
            BatchingPolicy::Auto | BatchingPolicy::None => {
                Box::new(Auto::new(batch_max, self.objective, self.workers.len()))
            }
            BatchingPolicy::Elastic => {
                Box::new(Elastic { inferences_max: self.workers.iter().sum() })
            }
            BatchingPolicy::Adaptive => Box::new(Adaptive::new(AdaptiveOptions {
                threshold_max: batch_max as f64,
                batch_max,
                adapt_quantum: true,
                ..AdaptiveOptions::default()
            })),
            BatchingPolicy::Window => Box::new(Window { batch_max, wait_max: self.max_wait }),
            BatchingPolicy::LazyDrop => Box::new(LazyDrop { batch_max }),
            BatchingPolicy::EarlyDrop => Box::new(EarlyDrop { batch: self.session(profile) }),
            BatchingPolicy::Deferred => {
                Box::new(Deferred { batch: self.session(profile), margin: Nanos::ZERO })
            }
        }
    }

    /// Applies learned times to policies with a session batch.
    pub(super) fn refresh(&self, policy: &mut Box<dyn BatchPolicy>, profile: &BatchProfile) {
        if matches!(self.policy, BatchingPolicy::EarlyDrop | BatchingPolicy::Deferred) {
            *policy = self.policy(profile);
        }
    }

    fn session(&self, profile: &BatchProfile) -> usize {
        self.limit(profile).min(self.batch_max())
    }
}
