//! Places models on machines: rates, SLOs and profiles to duty cycles on the machines that exist.
//!
//! The packing is the planner's. This module adds a given number of machines of several kinds,
//! memory, standby copies, and keeps moves few.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use planner::squishy::{self, Node, Session};

use super::packing::{Packer, pack};
use super::plan::{
    Curve, Curves, Demand, DutyCycle, LoadedModels, Machine, PlacedPart, Placement, PrefixGroup,
    SLO_SHARE,
};
use super::{pooling, prefix_batching};

/// Settings of placements.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacementSettings {
    /// Capacity beyond the observed rate, for bursts: 0.2 is 20 % more.
    pub headroom: f64,
    /// Minimum number of backends that hold a model, where there are enough.
    pub copies: usize,
    /// Whether load is spread over all machines; else as few as possible serve.
    pub spread: bool,
    /// The solver.
    pub packer: Packer,
    /// Whether machines that serve only one model form a backend pool.
    pub pooled: bool,
}

impl Default for PlacementSettings {
    fn default() -> Self {
        PlacementSettings {
            headroom: 0.2,
            copies: 2,
            spread: true,
            packer: Packer::Squishy,
            pooled: true,
        }
    }
}

/// Maximum factor by which rates are raised to use idle machines.
const SPREAD_MAX: f64 = 64.0;
/// Steps of the search for the largest scale that fits.
const SCALE_STEPS: usize = 12;
/// The assumed latency of unmeasured models, which only decides where they are loaded first: a
/// share of the SLO, at most so many milliseconds.
const GUESS_SHARE: f64 = 0.1;
const GUESS_MAX_MS: f64 = 10.0;
/// An SLO can be planned for if it exceeds the shortest run by this factor.
const ATTAINABLE: f64 = 2.05;

/// Machines of one kind, and the demands as sessions on it.
struct MachineGroup<'a> {
    machines: Vec<&'a Machine>,
    sessions: Vec<Session>,
    prefix_groups: &'a [Option<PrefixGroup>],
}

fn sessions(
    device: &str,
    demands: &[Demand],
    curves: &Curves,
    unattainable: &mut BTreeSet<String>,
) -> Vec<Session> {
    let session = |demand: &Demand| {
        let key = (device.to_string(), demand.model.clone());
        let guess = || vec![(1, (demand.slo_ms * GUESS_SHARE).min(GUESS_MAX_MS))];
        let curve = curves.get(&key).filter(|curve| !curve.is_empty()).cloned();
        let curve = curve.unwrap_or_else(guess);
        let min = curve.iter().map(|(_, ms)| *ms).fold(f64::INFINITY, f64::min) * ATTAINABLE;
        if demand.slo_ms < min {
            unattainable.insert(demand.model.clone());
        }
        Session {
            name: demand.model.clone(),
            rate: demand.rate,
            slo_ms: (demand.slo_ms * SLO_SHARE).max(min),
            curve,
        }
    };
    demands.iter().map(session).collect()
}

fn prefix_groups(demands: &[Demand]) -> Vec<Option<PrefixGroup>> {
    demands.iter().map(|demand| demand.prefix_group.clone()).collect()
}

/// Places `demands` on `machines`, close to the models they hold now.
pub fn place(
    machines: &[Machine],
    demands: &[Demand],
    curves: &Curves,
    held: &LoadedModels,
    settings: &PlacementSettings,
) -> Placement {
    let mut placement = Placement { scale: 1.0, ..Placement::default() };
    if machines.is_empty() || demands.is_empty() {
        return placement;
    }
    let mut unattainable = BTreeSet::new();
    let mut kinds: BTreeMap<&str, Vec<&Machine>> = BTreeMap::new();
    machines.iter().for_each(|machine| kinds.entry(&machine.device).or_default().push(machine));
    let prefix_groups = prefix_groups(demands);
    let mut groups: Vec<MachineGroup<'_>> = kinds
        .into_iter()
        .map(|(device, machines)| MachineGroup {
            machines,
            sessions: sessions(device, demands, curves, &mut unattainable),
            prefix_groups: &prefix_groups,
        })
        .collect();
    // The most common kind is filled first; the remainder goes to the next.
    groups.sort_by_key(|group| std::cmp::Reverse(group.machines.len()));
    let (scale, mut packed) = fit(&groups, demands, settings);
    placement.scale = scale;
    if packed.is_empty() {
        packed = pack_regardless_of_slo(&groups, &mut unattainable);
        let served = served(&packed, demands.len());
        let shares = demands.iter().zip(served).map(|(demand, rate)| rate / demand.rate.max(1e-9));
        placement.scale = shares.fold(1.0, f64::min);
    }
    for (group, nodes) in groups.iter().zip(packed) {
        placement.bound += bound(group, &nodes, settings.pooled);
        let nodes = split_by_memory(&group.machines, demands, &group.sessions, nodes);
        assign_machines(&group.machines, demands, held, nodes, &mut placement);
    }
    add_standbys(machines, demands, curves, held, settings.copies, &mut placement);
    placement.unattainable = unattainable.into_iter().collect();
    placement
}

/// Gives idle machines to models whose planned rate is less than `min` times the demand; what
/// serves does not move. Machines that hold such a model already come first, because they can serve
/// at once. Returns whether any machine was added.
pub fn extend(
    placement: &mut Placement,
    machines: &[Machine],
    demands: &[Demand],
    curves: &Curves,
    held: &LoadedModels,
    settings: &PlacementSettings,
    min: f64,
) -> bool {
    let serves = |machine: &&Machine| {
        let cycle = placement.duty_cycles.get(&machine.name);
        cycle.is_some_and(|cycle| cycle.parts.iter().any(|part| part.rate > 0.0))
    };
    let idle: Vec<&Machine> = machines.iter().filter(|machine| !serves(machine)).collect();
    let planned = placement.rates();
    let lacking = |demand: &Demand| {
        let rate = planned.get(demand.model.as_str()).copied().unwrap_or(0.0);
        let more = demand.rate * (1.0 + settings.headroom) - rate;
        (rate < demand.rate * min).then(|| Demand { rate: more, ..demand.clone() })
    };
    let short: Vec<Demand> = demands.iter().filter_map(lacking).collect();
    let Some(device) = idle.first().map(|machine| machine.device.clone()) else { return false };
    let idle: Vec<&Machine> = idle.into_iter().filter(|m| m.device == device).collect();
    let mut unattainable = BTreeSet::new();
    let sessions = sessions(&device, &short, curves, &mut unattainable);
    let prefix_groups = prefix_groups(&short);
    let packed = pack(&sessions, &prefix_groups, Packer::Squishy, settings.pooled, idle.len());
    let Some(mut nodes) = packed else { return false };
    nodes.sort_by(|a, b| b.occupancy.total_cmp(&a.occupancy));
    nodes.truncate(idle.len());
    let mut more = Placement::default();
    assign_machines(&idle, &short, held, nodes, &mut more);
    let any = !more.duty_cycles.is_empty();
    for (name, mut cycle) in more.duty_cycles {
        let taken: BTreeSet<String> = cycle.parts.iter().map(|part| part.model.clone()).collect();
        let before = placement.duty_cycles.remove(&name).unwrap_or_default();
        cycle.parts.extend(before.parts.into_iter().filter(|part| !taken.contains(&part.model)));
        cycle.parts.sort_by(|a, b| a.model.cmp(&b.model));
        placement.duty_cycles.insert(name, cycle);
    }
    any
}

/// Adapts the current placement to these machines and demands with few changes: the work of lost
/// machines and the excess of models that outgrew their plan go to idle machines. `None` where
/// these are not enough.
pub fn repair(
    placement: &Placement,
    machines: &[Machine],
    demands: &[Demand],
    curves: &Curves,
    held: &LoadedModels,
    settings: &PlacementSettings,
) -> Option<Placement> {
    if machines.is_empty() {
        return None;
    }
    let known: BTreeSet<&str> = machines.iter().map(|machine| machine.name.as_str()).collect();
    let demanded: BTreeSet<&str> = demands.iter().map(|demand| demand.model.as_str()).collect();
    let mut repaired = placement.clone();
    repaired.duty_cycles.retain(|name, _| known.contains(name.as_str()));
    for cycle in repaired.duty_cycles.values_mut() {
        cycle.parts.retain(|part| demanded.contains(part.model.as_str()));
    }
    repaired.duty_cycles.retain(|_, cycle| !cycle.parts.is_empty());
    let min = 1.0 + settings.headroom / 2.0;
    extend(&mut repaired, machines, demands, curves, held, settings, min);
    add_standbys(machines, demands, curves, held, settings.copies, &mut repaired);
    let enough = repaired.slack(demands) >= min && repaired.covers(machines, demands);
    enough.then_some(repaired)
}

/// Machines that the rates of `nodes` need at the best batch of each session: a lower bound for any
/// packing.
fn bound(group: &MachineGroup<'_>, nodes: &[Node], pooled: bool) -> f64 {
    let mut rates = vec![0.0; group.sessions.len()];
    nodes.iter().flat_map(|node| &node.parts).for_each(|part| rates[part.session] += part.rate);
    let merged = prefix_batching::merge(&group.sessions, group.prefix_groups);
    let throughput = |session: &Session| match pooled {
        true => pooling::max_throughput(session),
        false => session.throughput(),
    };
    let share =
        |(session, rate): (&Session, f64)| rate / throughput(session).unwrap_or(f64::INFINITY);
    merged.sessions.iter().zip(merged.rates(&rates)).map(share).sum()
}

/// Packs at the largest scale that fits the machines: real time keeps its whole rate where best
/// effort can be cut instead.
fn fit(
    groups: &[MachineGroup<'_>],
    demands: &[Demand],
    settings: &PlacementSettings,
) -> (f64, Vec<Vec<Node>>) {
    let demanded = 1.0 + settings.headroom;
    let attempt = |real_time: f64, rest: f64| {
        let scale = |demand: &Demand| if demand.real_time { real_time } else { rest };
        let scales: Vec<f64> = demands.iter().map(scale).collect();
        pack_groups(groups, &scales, settings)
    };
    if let Some(packed) = attempt(demanded, demanded) {
        if !settings.spread {
            return (demanded, packed);
        }
        let (scale, more) = largest_scale(demanded, SPREAD_MAX, |scale| attempt(scale, scale));
        return if more.is_empty() { (demanded, packed) } else { (scale, more) };
    }
    if demands.iter().any(|demand| demand.real_time) && demands.iter().any(|d| !d.real_time) {
        let (rest, packed) = largest_scale(0.0, demanded, |rest| attempt(demanded, rest));
        if !packed.is_empty() {
            return (rest, packed);
        }
        let (scale, packed) = largest_scale(0.0, demanded, |scale| attempt(scale, 0.0));
        return (scale.min(0.999), packed);
    }
    largest_scale(0.0, demanded, |scale| attempt(scale, scale))
}

/// The largest scale in the range that works, to a few percent, and its packing; an empty packing
/// where none works.
fn largest_scale(
    mut low: f64,
    mut high: f64,
    attempt: impl Fn(f64) -> Option<Vec<Vec<Node>>>,
) -> (f64, Vec<Vec<Node>>) {
    let mut best = (low, Vec::new());
    for _ in 0..SCALE_STEPS {
        if high - low < 0.02 * high {
            break;
        }
        let middle = (low + high) / 2.0;
        match attempt(middle) {
            Some(packed) => {
                best = (middle, packed);
                low = middle;
            }
            None => high = middle,
        }
    }
    best
}

fn served(packed: &[Vec<Node>], sessions: usize) -> Vec<f64> {
    let mut rates = vec![0.0; sessions];
    let parts = packed.iter().flatten().flat_map(|node| &node.parts);
    parts.for_each(|part| rates[part.session] += part.rate);
    rates
}

/// The last resort when SLOs cannot be met at any rate: every model on the least busy machine, in
/// cycles as long as needed. Models whose SLO this misses are added to `unattainable`.
fn pack_regardless_of_slo(
    groups: &[MachineGroup<'_>],
    unattainable: &mut BTreeSet<String>,
) -> Vec<Vec<Node>> {
    let mut packed: Vec<Vec<Node>> = groups.iter().map(|_| Vec::new()).collect();
    let Some(group) = groups.first() else { return packed };
    let empty = Node { cycle_ms: 0.0, parts: Vec::new(), occupancy: 1.0 };
    let mut nodes = vec![empty; group.machines.len()];
    for (index, session) in group.sessions.iter().enumerate() {
        let Some((batch, ms)) = session.saturating().or(session.curve.first().copied()) else {
            continue;
        };
        let Some(node) = nodes.iter_mut().min_by(|a, b| a.cycle_ms.total_cmp(&b.cycle_ms)) else {
            continue;
        };
        node.cycle_ms += ms;
        node.parts.push(squishy::Part { session: index, batch, rate: session.rate });
    }
    for node in &mut nodes {
        for part in &mut node.parts {
            let session = &group.sessions[part.session];
            part.rate = part.rate.min(f64::from(part.batch) / node.cycle_ms * 1000.0);
            if 2.0 * node.cycle_ms > session.slo_ms {
                unattainable.insert(session.name.clone());
            }
        }
    }
    nodes.retain(|node| !node.parts.is_empty());
    packed[0] = nodes;
    packed
}

/// Nodes of each group at these scales; `None` when they need more machines than there are.
fn pack_groups(
    groups: &[MachineGroup<'_>],
    scales: &[f64],
    settings: &PlacementSettings,
) -> Option<Vec<Vec<Node>>> {
    let mut left: Vec<f64> = match groups.first() {
        Some(group) => group.sessions.iter().zip(scales).map(|(s, scale)| s.rate * scale).collect(),
        None => return None,
    };
    let mut packed = Vec::new();
    for group in groups {
        let open: Vec<usize> = (0..left.len()).filter(|&index| left[index] > 1e-9).collect();
        let sessions: Vec<Session> = open
            .iter()
            .map(|&index| Session { rate: left[index], ..group.sessions[index].clone() })
            .collect();
        let prefix_groups: Vec<Option<PrefixGroup>> =
            open.iter().map(|&index| group.prefix_groups[index].clone()).collect();
        let mut nodes = pack(
            &sessions,
            &prefix_groups,
            settings.packer,
            settings.pooled,
            group.machines.len(),
        )?;
        nodes.iter_mut().flat_map(|node| &mut node.parts).for_each(|p| p.session = open[p.session]);
        if nodes.len() > group.machines.len() {
            nodes.sort_by(|a, b| b.occupancy.total_cmp(&a.occupancy));
            nodes.truncate(group.machines.len());
        }
        for part in nodes.iter().flat_map(|node| &node.parts) {
            left[part.session] -= part.rate;
        }
        packed.push(nodes);
    }
    let total: f64 = left.iter().map(|rate| rate.max(0.0)).sum();
    (total < 1e-6).then_some(packed)
}

/// Moves parts out of nodes whose models do not fit a machine's memory together, to idle machines.
fn split_by_memory(
    machines: &[&Machine],
    demands: &[Demand],
    sessions: &[Session],
    nodes: Vec<Node>,
) -> Vec<Node> {
    let bounds = machines.iter().map(|machine| machine.memory_bytes).filter(|bytes| *bytes > 0);
    let Some(memory) = bounds.min() else { return nodes };
    let mut spare = machines.len().saturating_sub(nodes.len());
    let mut split = Vec::with_capacity(nodes.len());
    for mut node in nodes {
        let memory_of = |parts: &[squishy::Part]| -> u64 {
            parts.iter().map(|part| demands[part.session].memory_bytes).sum()
        };
        let mut out = Vec::new();
        while node.parts.len() > 1 && memory_of(&node.parts) > memory && spare > 0 {
            out.extend(node.parts.pop());
            if memory_of(&out) > memory || memory_of(&node.parts) <= memory {
                split.extend(single_node(sessions, std::mem::take(&mut out), node.cycle_ms));
                spare -= 1;
            }
        }
        node.parts.extend(out);
        split.push(node);
    }
    split
}

fn single_node(sessions: &[Session], parts: Vec<squishy::Part>, cycle_ms: f64) -> Option<Node> {
    let ms = |part: &squishy::Part| {
        let curve = &sessions[part.session].curve;
        curve.iter().find(|(batch, _)| *batch == part.batch).map_or(0.0, |(_, ms)| *ms)
    };
    let busy: f64 = parts.iter().map(ms).sum();
    (!parts.is_empty()).then(|| Node { cycle_ms, occupancy: busy / cycle_ms, parts })
}

/// Assigns each node to the machine that holds most of its models already.
fn assign_machines(
    machines: &[&Machine],
    demands: &[Demand],
    held: &LoadedModels,
    nodes: Vec<Node>,
    placement: &mut Placement,
) {
    let mut holders: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, machine) in machines.iter().enumerate() {
        for model in held.get(&machine.name).into_iter().flatten() {
            holders.entry(model).or_default().push(index);
        }
    }
    // Pairs by common models, most first; of two equal machines the one that holds fewer others
    // wins.
    let mut pairs: Vec<(usize, usize, usize, usize)> = Vec::new();
    let mut common: HashMap<usize, usize> = HashMap::new();
    for (number, node) in nodes.iter().enumerate() {
        common.clear();
        for part in &node.parts {
            let of = holders.get(demands[part.session].model.as_str()).map_or(&[][..], |h| h);
            of.iter().for_each(|&machine| *common.entry(machine).or_default() += 1);
        }
        for (&machine, &count) in &common {
            let others = held.get(&machines[machine].name).map_or(0, BTreeSet::len) - count;
            pairs.push((count, others, number, machine));
        }
    }
    pairs.sort_unstable_by_key(|&(count, others, number, machine)| {
        (std::cmp::Reverse(count), others, number, machine)
    });
    let mut chosen: Vec<Option<usize>> = vec![None; nodes.len()];
    let mut taken = vec![false; machines.len()];
    for (_, _, number, machine) in pairs {
        if chosen[number].is_none() && !taken[machine] {
            chosen[number] = Some(machine);
            taken[machine] = true;
        }
    }
    let mut free = (0..machines.len()).filter(|&machine| !taken[machine]);
    for (node, chosen) in nodes.into_iter().zip(chosen) {
        let Some(machine) = chosen.or_else(|| free.next()) else { break };
        let part = |part: &squishy::Part| PlacedPart {
            model: demands[part.session].model.clone(),
            batch: part.batch,
            rate: part.rate,
        };
        let mut parts: Vec<PlacedPart> = node.parts.iter().map(part).collect();
        parts.sort_by(|a, b| a.model.cmp(&b.model));
        let cycle = DutyCycle { cycle_ms: node.cycle_ms, parts };
        placement.duty_cycles.insert(machines[machine].name.clone(), cycle);
    }
}

/// Maximum number of standby models on an idle machine.
const WARM_MODELS: usize = 16;

/// Memory and models of machines while standbys are added.
struct CapacityTracker<'a> {
    machines: &'a [Machine],
    /// Bytes and models of each machine.
    filled: Vec<(u64, usize)>,
    /// Machines by how much they hold.
    order: BTreeSet<((u64, usize), usize)>,
    copies: HashMap<String, BTreeSet<usize>>,
    before: HashMap<&'a str, Vec<usize>>,
}

impl<'a> CapacityTracker<'a> {
    fn new(
        machines: &'a [Machine],
        demands: &[Demand],
        held: &'a LoadedModels,
        placement: &Placement,
    ) -> CapacityTracker<'a> {
        let memory: HashMap<&str, u64> =
            demands.iter().map(|demand| (demand.model.as_str(), demand.memory_bytes)).collect();
        let index: HashMap<&str, usize> =
            machines.iter().enumerate().map(|(index, m)| (m.name.as_str(), index)).collect();
        let mut filled: Vec<(u64, usize)> = vec![(0, 0); machines.len()];
        let mut copies: HashMap<String, BTreeSet<usize>> = HashMap::new();
        for (name, cycle) in &placement.duty_cycles {
            let Some(&machine) = index.get(name.as_str()) else { continue };
            for part in &cycle.parts {
                filled[machine].0 += memory.get(part.model.as_str()).copied().unwrap_or(0);
                filled[machine].1 += 1;
                copies.entry(part.model.clone()).or_default().insert(machine);
            }
        }
        let mut before: HashMap<&str, Vec<usize>> = HashMap::new();
        for (name, models) in held {
            let Some(&machine) = index.get(name.as_str()) else { continue };
            models.iter().for_each(|model| before.entry(model).or_default().push(machine));
        }
        let order = filled.iter().enumerate().map(|(machine, fill)| (*fill, machine)).collect();
        CapacityTracker { machines, filled, order, copies, before }
    }

    fn copies_of(&self, model: &str) -> usize {
        self.copies.get(model).map_or(0, BTreeSet::len)
    }

    /// Adds a copy to one of the machines that `may` take it: one that held the model before, else
    /// the emptiest.
    fn take(&mut self, demand: &Demand, may: impl Fn(usize, usize) -> bool) -> Option<usize> {
        let mine = self.copies.get(&demand.model);
        let fits = |machine: &usize| {
            let (bytes, models) = self.filled[*machine];
            let most = self.machines[*machine].memory_bytes;
            mine.is_none_or(|mine| !mine.contains(machine))
                && (most == 0 || bytes + demand.memory_bytes <= most)
                && may(*machine, models)
        };
        let kept = self.before.get(demand.model.as_str()).into_iter().flatten().copied();
        let free = self.order.iter().map(|(_, machine)| *machine);
        let machine = kept.chain(free).find(fits)?;
        self.order.remove(&(self.filled[machine], machine));
        self.filled[machine].0 += demand.memory_bytes;
        self.filled[machine].1 += 1;
        self.order.insert((self.filled[machine], machine));
        self.copies.entry(demand.model.clone()).or_default().insert(machine);
        Some(machine)
    }
}

/// Adds standby copies: for every model that too few machines hold, and on idle machines in
/// proportion to load, so that a rise finds the models loaded.
fn add_standbys(
    machines: &[Machine],
    demands: &[Demand],
    curves: &Curves,
    held: &LoadedModels,
    copies: usize,
    placement: &mut Placement,
) {
    let mut capacity = CapacityTracker::new(machines, demands, held, placement);
    let mut added: Vec<(usize, usize)> = Vec::new();
    for (index, demand) in demands.iter().enumerate() {
        while capacity.copies_of(&demand.model) < copies.min(machines.len()) {
            let Some(machine) = capacity.take(demand, |_, _| true) else { break };
            added.push((index, machine));
        }
    }
    let idle: Vec<bool> =
        machines.iter().map(|machine| !placement.duty_cycles.contains_key(&machine.name)).collect();
    let duty_cycles = idle.iter().filter(|idle| **idle).count() * WARM_MODELS;
    // Only idle machines matter from here on; a search among thousands of others would be slow.
    capacity.order.retain(|(_, machine)| idle[*machine]);
    let load = |demand: &Demand| {
        let key = (machines[0].device.clone(), demand.model.clone());
        let best = curves
            .get(&key)
            .and_then(|c| c.iter().map(|(b, ms)| f64::from(*b) / ms).reduce(f64::max));
        demand.rate / best.unwrap_or(1.0)
    };
    let total: f64 = demands.iter().map(load).sum();
    for (index, demand) in demands.iter().enumerate().filter(|_| duty_cycles > 0) {
        let demanded = (duty_cycles as f64 * load(demand) / total.max(1e-9)).round() as usize;
        for _ in 0..demanded {
            let warm = |machine: usize, models: usize| idle[machine] && models < WARM_MODELS;
            let Some(machine) = capacity.take(demand, warm) else { break };
            added.push((index, machine));
        }
    }
    for (index, machine) in added {
        let (demand, machine) = (&demands[index], &machines[machine]);
        let curve = curves.get(&(machine.device.clone(), demand.model.clone()));
        let largest = curve.and_then(|c| c.iter().rfind(|(_, ms)| 2.0 * ms <= demand.slo_ms));
        let batch = largest.map_or(1, |(batch, _)| *batch);
        let cycle = placement.duty_cycles.entry(machine.name.clone()).or_default();
        let part = PlacedPart { model: demand.model.clone(), batch, rate: 0.0 };
        let at = cycle.parts.partition_point(|other| other.model < part.model);
        cycle.parts.insert(at, part);
    }
}

/// A batch of a prefix group on one machine: the prefix's share of the work, and the batches of its
/// members.
type GroupBatch<'a> = (f64, Vec<(&'a Curve, u32)>);

/// Checks a placement, independently of how it was made; returns what is wrong.
pub fn check(
    machines: &[Machine],
    demands: &[Demand],
    curves: &Curves,
    placement: &Placement,
) -> Vec<String> {
    let mut errors = Vec::new();
    let by_name: HashMap<&str, &Machine> = machines.iter().map(|m| (m.name.as_str(), m)).collect();
    let by_model: HashMap<&str, &Demand> = demands.iter().map(|d| (d.model.as_str(), d)).collect();
    // Machines that serve only one model without a break: a request waits for the next batch of the
    // whole pool.
    let mut pools: HashMap<&str, usize> = HashMap::new();
    let full = |cycle: &&DutyCycle, part: &PlacedPart| {
        part.rate * cycle.cycle_ms / 1000.0 >= f64::from(part.batch) * (1.0 - 1e-6)
    };
    for cycle in placement.duty_cycles.values() {
        if let Some(part) = cycle.only().filter(|part| full(&cycle, part)) {
            *pools.entry(&part.model).or_default() += 1;
        }
    }
    for (name, cycle) in &placement.duty_cycles {
        let Some(machine) = by_name.get(name.as_str()) else {
            errors.push(format!("there is no machine '{name}'"));
            continue;
        };
        let (mut busy_ms, mut bytes) = (0.0, 0);
        let mut group_batches: BTreeMap<&str, GroupBatch<'_>> = BTreeMap::new();
        for part in &cycle.parts {
            let Some(demand) = by_model.get(part.model.as_str()) else {
                errors.push(format!("{name}: '{}' is not demanded", part.model));
                continue;
            };
            bytes += demand.memory_bytes;
            let key = (machine.device.clone(), part.model.clone());
            let Some(curve) = curves.get(&key).filter(|_| part.rate > 0.0) else { continue };
            let found = curve.iter().find(|(batch, _)| *batch == part.batch);
            let Some((_, ms)) = found else {
                errors.push(format!("{name}: batch {} was not measured", part.batch));
                continue;
            };
            match &demand.prefix_group {
                Some(prefix_group) => {
                    let group_batch = group_batches
                        .entry(&prefix_group.name)
                        .or_insert((prefix_group.share, Vec::new()));
                    group_batch.1.push((curve, part.batch));
                }
                None => busy_ms += ms,
            }
            let attainable = !placement.unattainable.contains(&part.model);
            let pooled =
                cycle.only().filter(|part| full(&cycle, part) && demand.prefix_group.is_none());
            let machines = pooled.map_or(1, |part| pools[part.model.as_str()]);
            let wait_ms = cycle.cycle_ms * (1.5 / machines as f64).min(1.0);
            if attainable && wait_ms + ms > demand.slo_ms * (1.0 + 1e-6) {
                errors.push(format!("{name}: '{}' misses its SLO", part.model));
            }
            if part.rate * cycle.cycle_ms / 1000.0 > f64::from(part.batch) * (1.0 + 1e-6) {
                errors.push(format!("{name}: '{}' outgrows its batch", part.model));
            }
        }
        for (share, parts) in group_batches.into_values() {
            match prefix_batching::group_batch_ms(share, &parts) {
                Some(ms) => busy_ms += ms,
                None => errors.push(format!("{name}: a prefix group's batch was not measured")),
            }
        }
        if busy_ms > cycle.cycle_ms * (1.0 + 1e-6) {
            errors
                .push(format!("{name}: batches of {busy_ms} ms in a cycle of {}", cycle.cycle_ms));
        }
        if machine.memory_bytes > 0 && bytes > machine.memory_bytes {
            errors.push(format!("{name}: {bytes} bytes of models"));
        }
    }
    errors
}

#[cfg(test)]
#[path = "placement_tests.rs"]
mod tests;
