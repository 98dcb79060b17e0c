//! The changes to a machine that carry out a plan, in order. Nothing is executed here.
//!
//! [`changes`] makes the list; [`check_changes`] replays a list independently and reports
//! violations. The executor undoes the list from the end if a change fails.

pub mod part;
pub mod transition;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::gpu::GpuKind;
use crate::plan::{GpuFile, ShareFile, SliceFile};

/// How a GPU is partitioned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Partition {
    /// MIG instances, with an MPS daemon in each.
    Mig,
    /// One MPS daemon per GPU; a slice is a share of the GPU's threads.
    Mps,
}

/// Where processes run: a slice, given by its first memory slice, or the whole GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SliceLocation {
    /// Number of the GPU in the machine.
    pub gpu: u32,
    /// First memory slice; `None` for the whole GPU.
    pub start: Option<u8>,
}

impl fmt::Display for SliceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.start {
            Some(start) => write!(f, "gpu{}-{start}", self.gpu),
            None => write!(f, "gpu{}", self.gpu),
        }
    }
}

/// A server process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerSpec {
    /// Where it runs.
    pub place: SliceLocation,
    /// Start of its slice.
    pub slice: u8,
    /// Services it serves: one, or all of a shared slice.
    pub services: Vec<String>,
    /// Their models, in the same order.
    pub models: Vec<String>,
    /// Batch of each.
    pub batches: Vec<u32>,
    /// Batches of each that the server runs at the same time: more than one where services share
    /// the slice and the plan gives a service several processes in its turn. One in journals that
    /// do not say.
    #[serde(default)]
    pub concurrent: Vec<u32>,
    /// Length of the duty cycle in milliseconds, if services share the slice.
    #[serde(default)]
    pub cycle_ms: Option<f64>,
    /// Which of the service's processes in this slice, from 0.
    pub process: u32,
    /// Share of the location's threads in percent.
    pub percentage: u32,
}

/// One change to a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Enables MIG mode.
    EnableMig {
        /// Number of the GPU.
        gpu: u32,
    },
    /// Creates a GPU instance with one compute instance.
    CreateSlice {
        /// Where.
        place: SliceLocation,
        /// NVIDIA's identifier of the profile.
        profile_id: u8,
        /// First memory slice.
        start: u8,
    },
    /// Starts an MPS control daemon.
    StartDaemon {
        /// Where.
        place: SliceLocation,
    },
    /// Starts a server.
    StartServer(ServerSpec),
}

/// Why a plan cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// More GPUs in the plan than were named.
    #[error(
        "the plan has {needed} gpus and {given} were named; name more with --gpus, or with \
         --plan-gpus those of the plan that are for this machine"
    )]
    TooFewGpus {
        /// GPUs in use.
        needed: usize,
        /// GPUs named.
        given: usize,
    },
    /// MIG instances of a GPU that has none.
    #[error("{gpu} has no MIG; its parts are shares of threads: use --partition mps")]
    NoMig {
        /// The GPU kind.
        gpu: String,
    },
    /// A GPU named twice.
    #[error("gpu {gpu} is named twice")]
    NamedTwice {
        /// Its number.
        gpu: u32,
    },
    /// A GPU that the plan does not use.
    #[error("the plan does not use gpu {gpu} of {kind}; it uses {used}")]
    NoSuchGpu {
        /// Its number.
        gpu: usize,
        /// Its kind.
        kind: String,
        /// GPUs with slices.
        used: String,
    },
    /// GPUs that the plan has in several failure domains.
    #[error(
        "the plan is for machines that fail one by one, and these gpus are of several; name those \
         of one with --plan-gpus, such as {machine}"
    )]
    SeveralMachines {
        /// GPUs of the first one.
        machine: String,
    },
    /// No way from the plan in effect.
    #[error("the plan in effect cannot be replaced: {what}")]
    NoWay {
        /// Why.
        what: String,
    },
    /// Something about a slice.
    #[error("gpu {gpu} of the plan, slice at {start}: {what}")]
    Slice {
        /// Number within the plan.
        gpu: usize,
        /// First memory slice.
        start: u8,
        /// What.
        what: String,
    },
}

/// The changes that apply `plan` to the machine's GPUs `gpus`, in order.
pub fn changes(
    kind: &GpuKind,
    plan: &[GpuFile],
    gpus: &[u32],
    partition: Partition,
) -> Result<Vec<Change>, ApplyError> {
    let mut known = BTreeSet::new();
    if let Some(&gpu) = gpus.iter().find(|gpu| !known.insert(**gpu)) {
        return Err(ApplyError::NamedTwice { gpu });
    }
    if partition == Partition::Mig && !kind.has_mig() {
        return Err(ApplyError::NoMig { gpu: kind.name.to_string() });
    }
    let used = || plan.iter().enumerate().filter(|(_, gpu)| !gpu.slices.is_empty());
    if used().count() > gpus.len() {
        return Err(ApplyError::TooFewGpus { needed: used().count(), given: gpus.len() });
    }
    let (mut cuts, mut daemons, mut servers) = (Vec::new(), Vec::new(), Vec::new());
    for ((number, file), &gpu) in used().zip(gpus) {
        check_geometry(kind, number, file)?;
        if partition == Partition::Mig {
            cuts.push(Change::EnableMig { gpu });
        } else {
            daemons.push(Change::StartDaemon { place: SliceLocation { gpu, start: None } });
        }
        for slice in &file.slices {
            let facts = slice_kind(kind, slice).ok_or_else(|| unknown(number, slice))?;
            let (place, share) = match partition {
                Partition::Mig => (SliceLocation { gpu, start: Some(slice.start) }, 100),
                Partition::Mps => {
                    let share = 100 * u32::from(facts.gpcs) / u32::from(kind.gpcs);
                    (SliceLocation { gpu, start: None }, share)
                }
            };
            if partition == Partition::Mig {
                let (profile_id, start) = (facts.profile_id, slice.start);
                cuts.push(Change::CreateSlice { place, profile_id, start });
                daemons.push(Change::StartDaemon { place });
            }
            servers.extend(servers_of(number, slice, place, share)?);
        }
    }
    cuts.extend(daemons);
    cuts.extend(servers.into_iter().map(Change::StartServer));
    Ok(cuts)
}

fn slice_kind<'k>(kind: &'k GpuKind, slice: &SliceFile) -> Option<&'k crate::gpu::SliceKind> {
    let named = kind.slices.iter().find(|facts| facts.name == slice.profile);
    let sized = || kind.slices.iter().find(|facts| facts.gpcs == slice.size);
    named.or_else(|| slice.profile.is_empty().then(sized).flatten())
}

fn unknown(gpu: usize, slice: &SliceFile) -> ApplyError {
    let what = format!("this gpu has no profile '{}' of size {}", slice.profile, slice.size);
    ApplyError::Slice { gpu, start: slice.start, what }
}

fn check_geometry(kind: &GpuKind, gpu: usize, file: &GpuFile) -> Result<(), ApplyError> {
    let (mut occupied, mut gpcs) = (0u16, 0);
    for slice in &file.slices {
        let bad =
            |what: &str| ApplyError::Slice { gpu, start: slice.start, what: what.to_string() };
        let facts = slice_kind(kind, slice).ok_or_else(|| unknown(gpu, slice))?;
        if !facts.starts.contains(&slice.start) {
            return Err(bad("it may not start there"));
        }
        gpcs += facts.gpcs;
        if occupied & facts.mask(slice.start) != 0 || gpcs > kind.gpcs {
            return Err(bad("it does not fit beside the others"));
        }
        occupied |= facts.mask(slice.start);
    }
    Ok(())
}

/// Most processes of a service in a slice.
const PROCESSES_MAX: u32 = 64;
/// Largest batch that a server forms.
const BATCH_MAX: u32 = 1024;

/// The servers of a slice. A shared slice has one server, whose scheduler runs the duty cycle: a
/// service with several processes in its turn gets as many batches at the same time there.
fn servers_of(
    gpu: usize,
    slice: &SliceFile,
    place: SliceLocation,
    share: u32,
) -> Result<Vec<ServerSpec>, ApplyError> {
    let bad = |what: String| ApplyError::Slice { gpu, start: slice.start, what };
    let model = |one: &ShareFile| if one.model.is_empty() { &one.name } else { &one.model }.clone();
    let shared = slice.services.len() > 1;
    let spec = |shares: &[ShareFile], process: u32, percentage: u32| ServerSpec {
        place,
        slice: slice.start,
        services: shares.iter().map(|one| one.name.clone()).collect(),
        models: shares.iter().map(model).collect(),
        batches: shares.iter().map(|one| one.batch).collect(),
        concurrent: shares.iter().map(|one| if shared { one.processes } else { 1 }).collect(),
        cycle_ms: slice.cycle_ms,
        process,
        percentage: percentage.max(1),
    };
    for one in &slice.services {
        let ShareFile { name, batch, processes, .. } = one;
        if !(1..=PROCESSES_MAX).contains(processes) {
            return Err(bad(format!("'{name}' has {processes} processes, not 1 to 64")));
        }
        if !(1..=BATCH_MAX).contains(batch) {
            return Err(bad(format!("'{name}' has a batch of {batch}, not 1 to {BATCH_MAX}")));
        }
    }
    if slice.cycle_ms.is_some_and(|cycle_ms| !(cycle_ms > 0.0 && cycle_ms <= 1e9)) {
        return Err(bad(format!("its cycle is {:?} ms", slice.cycle_ms)));
    }
    let Some(one) = slice.services.first() else { return Ok(Vec::new()) };
    if shared {
        return Ok(vec![spec(&slice.services, 0, share)]);
    }
    let each = share / one.processes;
    Ok((0..one.processes).map(|process| spec(&slice.services, process, each)).collect())
}

/// Violations of a list of changes, replayed one by one against the plan.
pub fn check_changes(
    kind: &GpuKind,
    plan: &[GpuFile],
    partition: Partition,
    list: &[Change],
) -> Vec<String> {
    let mut replay = Replay::default();
    list.iter().for_each(|change| replay.step(kind, partition, change));
    let mut wanted: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    let slices: Vec<&SliceFile> = plan.iter().flat_map(|gpu| &gpu.slices).collect();
    for share in slices.iter().flat_map(|slice| &slice.services) {
        let model = if share.model.is_empty() { &share.name } else { &share.model };
        *wanted.entry((&share.name, model)).or_default() += share.processes;
    }
    for ((service, model), count) in wanted {
        let key = (service.to_string(), model.to_string());
        let started = replay.started.remove(&key).unwrap_or(0);
        if started != count {
            replay.wrong.push(format!("'{service}' has {started} processes of {count}"));
        }
    }
    let extra: Vec<String> = replay.started.keys().map(|(service, _)| service.clone()).collect();
    replay.wrong.extend(extra.iter().map(|name| format!("'{name}' is not in the plan")));
    if partition == Partition::Mig
        && replay.masks.values().map(Vec::len).sum::<usize>() != slices.len()
    {
        replay.wrong.push(format!("not every one of {} slices is made", slices.len()));
    }
    for (place, percent) in &replay.percent {
        if *percent > 100 {
            replay.wrong.push(format!("{place} gives {percent} % of its threads"));
        }
    }
    replay.wrong
}

/// State of the machine after a list of changes.
#[derive(Default)]
struct Replay {
    mig: BTreeSet<u32>,
    masks: BTreeMap<u32, Vec<u16>>,
    places: BTreeSet<SliceLocation>,
    daemons: BTreeSet<SliceLocation>,
    percent: BTreeMap<String, u32>,
    started: BTreeMap<(String, String), u32>,
    wrong: Vec<String>,
}

impl Replay {
    fn step(&mut self, kind: &GpuKind, partition: Partition, change: &Change) {
        match change {
            Change::EnableMig { gpu } => {
                self.mig.insert(*gpu);
            }
            Change::CreateSlice { place, profile_id, start } => {
                self.cut(kind, *place, *profile_id, *start);
            }
            Change::StartDaemon { place } => {
                if place.start.is_some() && !self.places.contains(place) {
                    self.wrong.push(format!("{place} has a daemon before it is made"));
                }
                if !self.daemons.insert(*place) {
                    self.wrong.push(format!("{place} has two daemons"));
                }
            }
            Change::StartServer(spec) => {
                if !self.daemons.contains(&spec.place) {
                    self.wrong.push(format!("{} has a server before its daemon", spec.place));
                }
                let place = match partition {
                    Partition::Mig => spec.place.to_string(),
                    Partition::Mps => format!("gpu{}", spec.place.gpu),
                };
                *self.percent.entry(place).or_default() += spec.percentage;
                let counts = spec.concurrent.iter().copied();
                let named = spec.services.iter().zip(&spec.models).zip(counts);
                for ((service, model), count) in named {
                    *self.started.entry((service.clone(), model.clone())).or_default() += count;
                }
            }
        }
    }

    fn cut(&mut self, kind: &GpuKind, place: SliceLocation, profile_id: u8, start: u8) {
        if !self.mig.contains(&place.gpu) {
            self.wrong.push(format!("{place} is made before MIG is on"));
        }
        let Some(facts) = kind.slices.iter().find(|facts| facts.profile_id == profile_id) else {
            return self.wrong.push(format!("{place} has no profile {profile_id}"));
        };
        let masks = self.masks.entry(place.gpu).or_default();
        let mask = facts.mask(start);
        if !facts.starts.contains(&start) || masks.iter().any(|other| other & mask != 0) {
            self.wrong.push(format!("{place} does not fit"));
        }
        masks.push(mask);
        self.places.insert(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(name: &str, processes: u32) -> ShareFile {
        let model = format!("m-{name}");
        ShareFile { name: name.to_string(), model, batch: 8, processes, rate: 10.0 }
    }

    fn slice(start: u8, size: u8, services: Vec<ShareFile>) -> SliceFile {
        let cycle_ms = (services.len() > 1).then_some(10.0);
        SliceFile { start, size, profile: String::new(), cycle_ms, services }
    }

    fn plan() -> Vec<GpuFile> {
        let first =
            vec![slice(0, 4, vec![share("a", 3)]), slice(4, 3, vec![share("b", 2), share("c", 1)])];
        let second = vec![slice(0, 7, vec![share("a", 2)])];
        vec![GpuFile { slices: first }, GpuFile { slices: Vec::new() }, GpuFile { slices: second }]
    }

    #[test]
    fn changes_are_ordered() {
        let kind = GpuKind::find("a100-80gb").unwrap();
        for partition in [Partition::Mig, Partition::Mps] {
            let list = changes(kind, &plan(), &[3, 5], partition).unwrap();
            assert_eq!(check_changes(kind, &plan(), partition, &list), Vec::<String>::new());
        }
        let list = changes(kind, &plan(), &[3, 5], Partition::Mig).unwrap();
        assert_eq!(list[0], Change::EnableMig { gpu: 3 });
        let servers = |list: &[Change]| {
            let percent = |change: &Change| match change {
                Change::StartServer(spec) => Some((spec.services.len(), spec.percentage)),
                _ => None,
            };
            list.iter().filter_map(percent).collect::<Vec<_>>()
        };
        assert_eq!(servers(&list), [(1, 33), (1, 33), (1, 33), (2, 100), (1, 50), (1, 50)]);
        // A shared plan with several processes in a turn was refused; now they run as batches at
        // the same time, and batch and cycle are in the specification.
        let shared = list.iter().find_map(|change| match change {
            Change::StartServer(spec) if spec.services.len() > 1 => Some(spec),
            _ => None,
        });
        let spec = shared.unwrap();
        assert_eq!((&spec.concurrent, &spec.batches), (&vec![2, 1], &vec![8, 8]));
        assert_eq!(spec.cycle_ms, Some(10.0));
        let list = changes(kind, &plan(), &[3, 5], Partition::Mps).unwrap();
        assert_eq!(servers(&list), [(1, 19), (1, 19), (1, 19), (2, 42), (1, 50), (1, 50)]);
    }

    #[test]
    fn checker_detects_missing_early_and_duplicate_changes() {
        let kind = GpuKind::find("a100-80gb").unwrap();
        let list = changes(kind, &plan(), &[0, 1], Partition::Mig).unwrap();
        for at in 0..list.len() {
            let mut less = list.clone();
            less.remove(at);
            assert!(!check_changes(kind, &plan(), Partition::Mig, &less).is_empty(), "{at}");
            let mut twice = list.clone();
            twice.push(list[at].clone());
            let on = matches!(list[at], Change::EnableMig { .. });
            assert!(on || !check_changes(kind, &plan(), Partition::Mig, &twice).is_empty(), "{at}");
        }
        let mut backwards = list;
        backwards.reverse();
        assert!(!check_changes(kind, &plan(), Partition::Mig, &backwards).is_empty());
    }

    #[test]
    fn inapplicable_plans_are_reported() {
        let kind = GpuKind::find("a100-80gb").unwrap();
        let error = |plan: &[GpuFile], gpus: &[u32]| {
            changes(kind, plan, gpus, Partition::Mig).unwrap_err().to_string()
        };
        assert!(error(&plan(), &[0]).contains("2 gpus and 1"));
        assert!(error(&plan(), &[0, 0]).contains("named twice"));
        let with = |slices: Vec<SliceFile>| vec![GpuFile { slices }];
        let many = with(vec![slice(4, 3, vec![share("b", 65), share("c", 1)])]);
        assert!(error(&many, &[0]).contains("'b' has 65 processes"));
        let big = ShareFile { batch: 0, ..share("b", 1) };
        assert!(error(&with(vec![slice(4, 3, vec![big])]), &[0]).contains("a batch of 0"));
        let cycle = SliceFile { cycle_ms: Some(f64::NAN), ..slice(4, 3, vec![share("b", 1)]) };
        assert!(error(&with(vec![cycle]), &[0]).contains("cycle"));
        let l4 = GpuKind::find("l4-24gb").unwrap();
        let half = with(vec![slice(0, 4, vec![share("b", 2)])]);
        assert!(changes(l4, &half, &[0], Partition::Mig).is_err());
        let list = changes(l4, &half, &[0], Partition::Mps).unwrap();
        assert_eq!(check_changes(l4, &half, Partition::Mps, &list), Vec::<String>::new());
        assert!(
            error(&with(vec![slice(2, 3, vec![share("b", 1)])]), &[0]).contains("may not start")
        );
        let over = with(vec![slice(0, 4, vec![share("a", 1)]), slice(2, 2, vec![share("b", 1)])]);
        assert!(error(&over, &[0]).contains("does not fit"));
        let unknown = SliceFile { profile: "9g.9gb".to_string(), ..slice(0, 7, Vec::new()) };
        assert!(error(&with(vec![unknown]), &[0]).contains("9g.9gb"));
    }
}
