//! A model's settings as the batcher follows them.

use base::Nanos;
use device::PreemptionLevel;
use model::config::{Batching, BatchingPolicy, CopyTime, ModelConfig};

use super::Member;
use crate::batching::{
    Adaptive, AdaptiveOptions, Auto, BatchPolicy, BatchProfile, Deferred, EarlyDrop, Elastic,
    LazyDrop, Staggered, StaggeredBatch, WaitingRequest, Window,
};

/// Workers of policies that run batches of any size: one that computes and one to go on with.
const WORKERS: usize = 2;

/// How requests of a model are put together.
#[derive(Clone, Debug)]
pub(in crate::node) struct Rules {
    policy: BatchingPolicy,
    /// The largest batch of each worker.
    pub(in crate::node) workers: Vec<usize>,
    /// Workers run no other batch than theirs.
    pub(in crate::node) exact: bool,
    pub(in crate::node) copy: CopyTime,
    max_wait: Nanos,
    objective: Option<Nanos>,
    /// Nobody set the workers: they may be chosen.
    chosen: bool,
    /// Nobody set the policy: it may be chosen.
    auto: bool,
    /// What batches are made of, where somebody else decides that.
    staggered: Option<StaggeredBatch>,
}

impl Rules {
    /// Those of `config` on a device of that level; `None` when requests run one by one.
    pub(in crate::node) fn of(config: &ModelConfig, level: PreemptionLevel) -> Option<Rules> {
        let Batching { policy, ref workers, max_batch, max_wait_us, copy } = config.batching;
        // Where batches run side by side, the times they take say little of what a larger one would: workers of fixed sizes
        // do better there than a rule that goes by such times.
        let policy = match (policy, level) {
            (BatchingPolicy::Auto, PreemptionLevel::InsideTile) => BatchingPolicy::Elastic,
            _ => policy,
        };
        if policy == BatchingPolicy::None {
            return None;
        }
        let most = if max_batch == 0 { Batching::MAX_BATCH } else { max_batch };
        let most = if config.max_batch_size == 0 { most } else { most.min(config.max_batch_size) };
        let exact = policy == BatchingPolicy::Elastic;
        let own: Vec<usize> = match policy {
            BatchingPolicy::Elastic => Elastic::WORKERS.to_vec(),
            BatchingPolicy::Auto => vec![most; WORKERS],
            _ => vec![most],
        };
        let chosen = workers.is_empty();
        let workers = if chosen { own } else { workers.clone() };
        let workers: Vec<usize> = workers.into_iter().filter(|batch| *batch <= most).collect();
        let workers = if workers.is_empty() { vec![most] } else { workers };
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

    /// Makes batches of `staggered`, or as before; not where a policy was set. Whether that is a change.
    pub(super) fn set_staggered_batch(&mut self, staggered: Option<StaggeredBatch>) -> bool {
        let within = |staggered: StaggeredBatch| StaggeredBatch {
            batch: staggered.batch.clamp(1, self.batch_max()),
            ..staggered
        };
        let staggered = staggered.filter(|_| self.auto).map(within);
        std::mem::replace(&mut self.staggered, staggered) != staggered
    }

    /// The largest batch.
    pub(in crate::node) fn batch_max(&self) -> usize {
        self.workers.iter().copied().max().unwrap_or(1)
    }

    /// Numbers of rows the device is to be prepared for, each as often as workers may run it at once.
    pub(in crate::node) fn batches(&self) -> Vec<usize> {
        if self.exact {
            return self.workers.clone();
        }
        let sizes = Auto::new(self.batch_max(), None, 1).sizes;
        let each = |size: usize| std::iter::repeat_n(size, self.workers.len());
        sizes.into_iter().flat_map(each).collect()
    }

    /// Whether a batch that starts late simply takes everybody: asking the policy twice would count twice.
    pub(super) fn takes_all_waiting(&self) -> bool {
        self.policy == BatchingPolicy::Adaptive
    }

    /// Time within which requests shall be answered.
    pub(in crate::node) fn objective(&self) -> Option<Nanos> {
        self.objective
    }

    /// The largest batch of workers of fixed sizes by what was measured, if they are not set by hand. A request that just misses
    /// a batch waits for it and runs in the next, so two of them fit the objective. Other policies go by the objective themselves.
    pub(super) fn max_fitting(&self, measured: &BatchProfile) -> usize {
        match self.staggered {
            None if self.exact && self.chosen => self.limit(measured),
            _ => usize::MAX,
        }
    }

    /// The largest batch that fits the objective by what is known.
    fn limit(&self, profile: &BatchProfile) -> usize {
        self.objective.map_or(usize::MAX, |objective| profile.batch_for_objective(objective))
    }

    /// A request as policies see it: due when its answer is of no more use, or when it was promised.
    pub(super) fn seen<M>(&self, member: &Member<M>) -> WaitingRequest {
        let promised = self.objective.map_or(Nanos::MAX, |objective| member.arrived + objective);
        WaitingRequest { arrived: member.arrived, deadline: member.deadline.min(promised) }
    }

    /// A fresh policy.
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

    /// Follows what was learned, where a policy goes by a batch of its session.
    pub(super) fn refresh(&self, policy: &mut Box<dyn BatchPolicy>, profile: &BatchProfile) {
        if matches!(self.policy, BatchingPolicy::EarlyDrop | BatchingPolicy::Deferred) {
            *policy = self.policy(profile);
        }
    }

    fn session(&self, profile: &BatchProfile) -> usize {
        self.limit(profile).min(self.batch_max())
    }
}
