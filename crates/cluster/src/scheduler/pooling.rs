//! Backend pools: several machines that serve only one session.
//!
//! A single machine collects a batch while the previous one runs, so an SLO has to hold two batch
//! times (Nexus, SOSP'19, section 4.1). In a pool, frontends send each request to the machine whose
//! next batch starts soonest (`balance`): a batch is collected in a fraction of a batch time, an
//! SLO holds little more than one batch time, and batches can be larger.

use std::collections::{BTreeMap, BTreeSet};

use planner::squishy::{Node, Part, Session};

use super::plan::{Curves, Demand, Machine, Placement};

/// In a pool of `n` machines a request is planned to wait this many `n`ths of a batch time: one
/// until the next batch starts, and half as much for variance.
const WAIT_BATCHES: f64 = 1.5;
const SLACK: f64 = 1e-9;

/// Share of a batch time that a request waits in a pool of `machines`.
pub(crate) fn wait_share(machines: usize) -> f64 {
    (WAIT_BATCHES / machines.max(1) as f64).min(1.0)
}

/// The batch of a pool, its time, and the number of machines it fills.
struct SessionPool {
    batch: u32,
    ms: f64,
    machines: usize,
}

impl SessionPool {
    /// Requests per second of one machine.
    fn throughput(&self) -> f64 {
        f64::from(self.batch) / self.ms * 1000.0
    }

    /// The pool with the highest throughput per machine, where it exceeds that of a single machine.
    fn of(session: &Session) -> Option<SessionPool> {
        let alone = session.throughput().unwrap_or(0.0);
        let pool = |&(batch, ms): &(u32, f64)| {
            let machines = session.rate * ms / 1000.0 / f64::from(batch) * (1.0 + SLACK);
            SessionPool { batch, ms, machines: machines as usize }
        };
        let fits = |pool: &SessionPool| {
            pool.ms * (1.0 + wait_share(pool.machines)) <= session.slo_ms * (1.0 + SLACK)
                && pool.machines > 1
                && pool.throughput() > alone * (1.0 + SLACK)
        };
        let pools = session.curve.iter().map(pool).filter(fits);
        pools.max_by(|a, b| a.throughput().total_cmp(&b.throughput()))
    }
}

/// Nodes for the sessions that fill pools, and the remainder of every session. Only sessions that
/// are `single` models form pools. At most one node more than `max` is made: that there are
/// too many is all that a caller with `max` machines needs to know.
pub(crate) fn fill_pools(
    sessions: &[Session],
    max: usize,
    single: impl Fn(usize) -> bool,
) -> (Vec<Node>, Vec<Session>) {
    let (mut nodes, mut rest) = (Vec::new(), sessions.to_vec());
    for (index, session) in rest.iter_mut().enumerate() {
        let Some(pool) = SessionPool::of(session).filter(|_| single(index)) else { continue };
        let part = Part { session: index, batch: pool.batch, rate: pool.throughput() };
        let node = Node { cycle_ms: pool.ms, parts: vec![part], occupancy: 1.0 };
        session.rate = (session.rate - pool.machines as f64 * pool.throughput()).max(0.0);
        let room = max.saturating_add(1).saturating_sub(nodes.len());
        nodes.extend(std::iter::repeat_n(node, pool.machines.min(room)));
    }
    (nodes, rest)
}

/// Maximum requests per second of one machine for a session, in a pool of any size: one batch time
/// within the SLO.
pub(crate) fn max_throughput(session: &Session) -> Option<f64> {
    let fits = session.curve.iter().filter(|(_, ms)| *ms <= session.slo_ms * (1.0 + SLACK));
    fits.map(|(batch, ms)| f64::from(*batch) / ms * 1000.0).reduce(f64::max)
}

/// The smallest budget in milliseconds in which a session of this rate can use a batch of `ms`.
pub(crate) fn budget_ms(rate: f64, batch: u32, ms: f64) -> f64 {
    let machines = rate * ms / 1000.0 / f64::from(batch) * (1.0 + SLACK);
    ms * (1.0 + wait_share(machines as usize))
}

/// Factor by which a batch's throughput has to exceed the rate: a machine at its limit starts
/// batches before they are full and is busy when the next one is due.
const CAPACITY_MARGIN: f64 = 1.1;
/// Relative change of a load factor that is published.
const FACTOR_CHANGE: f64 = 0.15;

/// The smallest batch that sustains `rate` requests per second on a machine, at most `max`.
pub fn min_batch_for(curve: &[(u32, f64)], rate: f64, max: u32) -> u32 {
    let enough =
        |&&(batch, ms): &&(u32, f64)| f64::from(batch) / ms * 1000.0 >= rate * CAPACITY_MARGIN;
    curve.iter().find(enough).map_or(max, |(batch, _)| (*batch).min(max))
}

/// Observed over planned rate, by model. It changes in steps, because every change is published.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoadFactors(BTreeMap<String, f64>);

/// The machines of backend pools, each with its model and the number of requests at which a batch
/// starts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackendPools(BTreeMap<String, (String, u32)>);

impl BackendPools {
    /// Requests at which a batch of `model` starts on a machine; 0 where the machine is in no pool.
    pub fn min_batch(&self, machine: &str, model: &str) -> u32 {
        self.0
            .get(machine)
            .filter(|(pooled, _)| pooled == model)
            .map_or(0, |(_, min_batch)| *min_batch)
    }
}

impl LoadFactors {
    /// The pools of a placement under the current demands.
    pub(crate) fn pools(
        &mut self,
        placement: &Placement,
        machines: &[Machine],
        demands: &[Demand],
        curves: &Curves,
    ) -> BackendPools {
        let planned = placement.rates();
        self.0.retain(|model, _| planned.contains_key(model.as_str()));
        for demand in demands {
            let rate = planned.get(demand.model.as_str()).copied().unwrap_or(0.0);
            let factor = demand.rate / rate.max(1e-9);
            let current = self.0.entry(demand.model.clone()).or_insert(factor);
            if (factor / *current - 1.0).abs() > FACTOR_CHANGE {
                *current = factor;
            }
        }
        let device = |machine: &Machine| (machine.name.clone(), machine.device.clone());
        pools(placement, &machines.iter().map(device).collect(), demands, curves, |model| {
            self.0.get(model).copied().unwrap_or(1.0)
        })
    }
}

/// The pools of a placement under `factor` times the planned rate of a model. Models in a prefix
/// group form none, because their machines serve several models; nor do unmeasured models.
pub fn pools(
    placement: &Placement,
    devices: &BTreeMap<String, String>,
    demands: &[Demand],
    curves: &Curves,
    factor: impl Fn(&str) -> f64,
) -> BackendPools {
    let single = |demand: &&Demand| demand.prefix_group.is_none();
    let single: BTreeSet<&str> = demands.iter().filter(single).map(|d| d.model.as_str()).collect();
    let mut pools: BTreeMap<&str, Vec<(&String, u32)>> = BTreeMap::new();
    for (machine, cycle) in &placement.duty_cycles {
        let Some(part) = cycle.only().filter(|part| single.contains(part.model.as_str())) else {
            continue;
        };
        let Some(device) = devices.get(machine) else { continue };
        let Some(curve) = curves.get(&(device.clone(), part.model.clone())) else { continue };
        let min_batch = min_batch_for(curve, part.rate * factor(&part.model), part.batch);
        pools.entry(&part.model).or_default().push((machine, min_batch));
    }
    let several = pools.into_iter().filter(|(_, machines)| machines.len() > 1);
    let entries = several.flat_map(|(model, machines)| {
        let entry = move |(machine, min_batch): (&String, u32)| {
            (machine.clone(), (model.to_string(), min_batch.max(1)))
        };
        machines.into_iter().map(entry)
    });
    BackendPools(entries.collect())
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::super::plan::{DutyCycle, PlacedPart};
    use super::*;

    fn session(random: &mut Random) -> Session {
        let (alpha, beta) = (0.1 + 5.0 * random.unit_f64(), 10.0 * random.unit_f64());
        let curve = [1, 2, 4, 8, 16, 32].map(|b| (b, alpha * f64::from(b) + beta)).to_vec();
        let slo_ms = (alpha + beta) * (2.0 + 20.0 * random.unit_f64());
        let rate = 10f64.powf(4.0 * random.unit_f64());
        Session { name: "s".to_string(), rate, slo_ms, curve }
    }

    /// Checks pools by the rule alone: every machine is full, the wait for the next batch is short
    /// enough, and the remainder fills no machine.
    #[test]
    fn pools_meet_slos_with_more_throughput_than_single_machines() {
        let mut random = Random::new(9);
        let mut pooled = 0;
        for _ in 0..2000 {
            let session = session(&mut random);
            let (nodes, rest) = fill_pools(std::slice::from_ref(&session), usize::MAX, |_| true);
            let served: f64 = nodes.iter().flat_map(|node| &node.parts).map(|p| p.rate).sum();
            assert!((served + rest[0].rate - session.rate).abs() < 1e-6 * session.rate);
            let Some(node) = nodes.first() else { continue };
            pooled += 1;
            let part = node.parts[0];
            let each = f64::from(part.batch) / node.cycle_ms * 1000.0;
            assert!(nodes.len() > 1 && nodes.iter().all(|other| other == node));
            assert!((part.rate - each).abs() < 1e-6 * each && rest[0].rate < each * (1.0 + 1e-6));
            assert!(each > session.throughput().unwrap_or(0.0));
            assert!(each <= max_throughput(&session).unwrap() * (1.0 + 1e-9));
            let wait_ms = node.cycle_ms * (1.5 / nodes.len() as f64).min(1.0);
            assert!(wait_ms + node.cycle_ms <= session.slo_ms * (1.0 + 1e-6));
        }
        assert!(pooled > 200, "{pooled}");
        let alone = session(&mut random);
        assert!(fill_pools(&[alone], usize::MAX, |_| false).0.is_empty());
    }

    #[test]
    fn min_batch_sustains_the_rate() {
        let curve = [(1, 6.0), (2, 7.0), (4, 9.0), (8, 13.0), (16, 21.0)];
        // 167, 286, 444, 615 and 762 requests per second.
        assert_eq!(min_batch_for(&curve, 10.0, 16), 1);
        assert_eq!(min_batch_for(&curve, 300.0, 16), 4);
        assert_eq!(min_batch_for(&curve, 550.0, 16), 8);
        assert_eq!(min_batch_for(&curve, 760.0, 16), 16);
        assert_eq!(min_batch_for(&curve, 760.0, 8), 8);
    }

    #[test]
    fn load_factors_change_in_steps() {
        let demand = |rate: f64| {
            [Demand { model: "a".to_string(), rate, slo_ms: 100.0, ..Demand::default() }]
        };
        let curve = vec![(1, 6.0), (2, 7.0), (4, 9.0), (8, 13.0), (16, 21.0)];
        let curves: Curves = [(("cpu".to_string(), "a".to_string()), curve)].into();
        let machine = |index: usize| Machine {
            name: format!("m{index}"),
            device: "cpu".to_string(),
            memory_bytes: 0,
        };
        let machines: Vec<Machine> = (0..3).map(machine).collect();
        let cycle = |rate: f64| DutyCycle {
            cycle_ms: 21.0,
            parts: vec![PlacedPart { model: "a".to_string(), batch: 16, rate }],
        };
        let duty_cycles = [("m0", 700.0), ("m1", 700.0), ("m2", 0.0)];
        let duty_cycles = duty_cycles.map(|(name, rate)| (name.to_string(), cycle(rate))).into();
        let placement = Placement { duty_cycles, ..Placement::default() };
        let mut factors = LoadFactors::default();
        let mut min_batch = |rate: f64, machine: &str| {
            factors.pools(&placement, &machines, &demand(rate), &curves).min_batch(machine, "a")
        };
        assert_eq!(
            (min_batch(700.0, "m0"), min_batch(700.0, "m1"), min_batch(700.0, "m2")),
            (4, 4, 0)
        );
        assert_eq!((min_batch(790.0, "m0"), min_batch(1300.0, "m0")), (4, 16));
    }
}
