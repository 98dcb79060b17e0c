//! The way from an applied plan to another one: new servers start beside the old ones, requests are
//! switched over, and only then the old ones end.
//!
//! [`transition`] makes the list; [`check_transition`] replays it independently.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{ApplyError, Change, ServerSpec, SliceLocation};
use crate::gpu::{GpuKind, SliceKind};

/// One step from a plan to the next.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransitionChange {
    /// Applies a change of the new plan.
    Apply(Change),
    /// Sends requests only to servers that run now and stay.
    Switch,
    /// Undoes a change of the old plan.
    Undo(Change),
}

/// The steps from the changes that are in effect to those that are wanted. What is equal stays.
/// Slices that overlap old ones are made last. A service of both plans always has a server, or the
/// way is refused.
pub fn transition(
    kind: &GpuKind,
    now: &[Change],
    wanted: &[Change],
) -> Result<Vec<TransitionChange>, ApplyError> {
    let places = Places::new(kind, now, wanted);
    let kept =
        |change: &Change| now.contains(change) && wanted.contains(change) && places.is_kept(change);
    let fresh = wanted.iter().filter(|change| !kept(change));
    let (late, early): (Vec<&Change>, Vec<&Change>) = fresh.partition(|c| places.is_late(c));
    let ends: Vec<&Change> = now.iter().rev().filter(|change| !kept(change)).collect();
    let apply = |change: &Change| TransitionChange::Apply(change.clone());
    let mut steps: Vec<TransitionChange> = early.into_iter().map(apply).collect();
    if !(steps.is_empty() && ends.is_empty()) {
        steps.push(TransitionChange::Switch);
    }
    steps.extend(ends.into_iter().map(|change| TransitionChange::Undo(change.clone())));
    if !late.is_empty() {
        steps.extend(late.into_iter().map(apply));
        steps.push(TransitionChange::Switch);
    }
    match check_transition(kind, now, wanted, &steps).into_iter().next() {
        None => Ok(steps),
        Some(what) => Err(ApplyError::NoWay { what }),
    }
}

/// Servers to which requests go after the switch at `steps[at]`: those of `running` that no later
/// step ends.
pub fn switched_to<'s>(
    steps: &[TransitionChange],
    at: usize,
    running: impl Iterator<Item = &'s ServerSpec>,
) -> Vec<&'s ServerSpec> {
    let ends = |spec: &ServerSpec| {
        steps[at..].iter().any(|step| match step {
            TransitionChange::Undo(Change::StartServer(other)) => other == spec,
            _ => false,
        })
    };
    running.filter(|spec| !ends(spec)).collect()
}

/// Which places stay, and which can be made only when others are gone.
struct Places {
    kept: BTreeSet<SliceLocation>,
    late: BTreeSet<SliceLocation>,
    /// GPUs that change between MIG and shares of threads.
    other_mode: BTreeSet<u32>,
}

impl Places {
    fn new(kind: &GpuKind, now: &[Change], wanted: &[Change]) -> Places {
        let mig = |list: &[Change], gpu: u32| list.contains(&Change::EnableMig { gpu });
        let gpus = now.iter().chain(wanted).map(gpu_of);
        let other_mode = gpus
            .filter(|&gpu| {
                let used = |list: &[Change]| list.iter().any(|change| gpu_of(change) == gpu);
                used(now) && used(wanted) && mig(now, gpu) != mig(wanted, gpu)
            })
            .collect();
        let mut occupied: BTreeMap<u32, Vec<(&SliceKind, u8)>> = BTreeMap::new();
        for (place, slice, start) in now.iter().filter_map(|change| slice_of(kind, change)) {
            occupied.entry(place.gpu).or_default().push((slice, start));
        }
        let (mut kept, mut late) = (BTreeSet::new(), BTreeSet::new());
        for change in wanted {
            let Some((place, slice, start)) = slice_of(kind, change) else { continue };
            if now.contains(change) {
                kept.insert(place);
                continue;
            }
            let others = occupied.entry(place.gpu).or_default();
            match fits(kind, others, slice, start) {
                true => others.push((slice, start)),
                false => drop(late.insert(place)),
            }
        }
        Places { kept, late, other_mode }
    }

    /// Whether a change of both lists may stay: what it stands on stays, too.
    fn is_kept(&self, change: &Change) -> bool {
        let on_slice = place_of(change).filter(|place| place.start.is_some());
        !self.other_mode.contains(&gpu_of(change))
            && on_slice.is_none_or(|place| self.kept.contains(&place))
    }

    fn is_late(&self, change: &Change) -> bool {
        self.other_mode.contains(&gpu_of(change))
            || place_of(change).is_some_and(|place| self.late.contains(&place))
    }
}

fn place_of(change: &Change) -> Option<SliceLocation> {
    match change {
        Change::EnableMig { .. } => None,
        Change::CreateSlice { place, .. } | Change::StartDaemon { place } => Some(*place),
        Change::StartServer(spec) => Some(spec.place),
    }
}

fn gpu_of(change: &Change) -> u32 {
    match change {
        Change::EnableMig { gpu } => *gpu,
        other => place_of(other).map_or(0, |place| place.gpu),
    }
}

fn slice_of<'k>(kind: &'k GpuKind, change: &Change) -> Option<(SliceLocation, &'k SliceKind, u8)> {
    let Change::CreateSlice { place, profile_id, start } = change else { return None };
    let slice = kind.slices.iter().find(|slice| slice.profile_id == *profile_id)?;
    Some((*place, slice, *start))
}

/// Whether a slice fits beside others of a GPU.
fn fits(kind: &GpuKind, others: &[(&SliceKind, u8)], slice: &SliceKind, start: u8) -> bool {
    let gpcs: u8 = others.iter().map(|(other, _)| other.gpcs).sum();
    let mask = slice.mask(start);
    gpcs + slice.gpcs <= kind.gpcs && others.iter().all(|(one, at)| one.mask(*at) & mask == 0)
}

/// Violations of a transition, replayed step by step.
pub fn check_transition(
    kind: &GpuKind,
    now: &[Change],
    wanted: &[Change],
    steps: &[TransitionChange],
) -> Vec<String> {
    let mut machine = Machine { kind, changes: now.to_vec(), wrong: Vec::new() };
    let services = |list: &[Change]| -> BTreeSet<String> {
        servers(list).flat_map(|spec| spec.services.iter().cloned()).collect()
    };
    let both: Vec<String> = services(now).intersection(&services(wanted)).cloned().collect();
    let mut published: Vec<ServerSpec> = servers(now).cloned().collect();
    for (at, step) in steps.iter().enumerate() {
        match step {
            TransitionChange::Apply(change) => machine.apply(change),
            TransitionChange::Undo(change) => {
                if matches!(change, Change::StartServer(spec) if published.contains(spec)) {
                    machine.wrong.push("a server ends while requests go to it".to_string());
                }
                machine.undo(change);
            }
            TransitionChange::Switch => {
                let running = servers(&machine.changes);
                published = switched_to(steps, at, running).into_iter().cloned().collect();
                for service in &both {
                    if !published.iter().any(|spec| spec.services.contains(service)) {
                        machine.wrong.push(format!(
                            "'{service}' would have no server while its gpu is divided again; name \
                             a free gpu with --gpus, or use --undo first"
                        ));
                    }
                }
            }
        }
    }
    let missing = wanted.iter().any(|change| !machine.changes.contains(change));
    if missing || machine.changes.len() != wanted.len() {
        machine.wrong.push("the steps do not end in the plan".to_string());
    }
    let running: Vec<&ServerSpec> = servers(&machine.changes).collect();
    if running.len() != published.len() {
        machine.wrong.push("not every server gets requests in the end".to_string());
    }
    machine.wrong
}

fn servers(list: &[Change]) -> impl Iterator<Item = &ServerSpec> {
    list.iter().filter_map(|change| match change {
        Change::StartServer(spec) => Some(spec),
        _ => None,
    })
}

/// A machine with changes in effect.
struct Machine<'k> {
    kind: &'k GpuKind,
    changes: Vec<Change>,
    wrong: Vec<String>,
}

impl Machine<'_> {
    fn apply(&mut self, change: &Change) {
        let is_there = |other: &Change| self.changes.contains(other);
        let gpu = gpu_of(change);
        let mig = is_there(&Change::EnableMig { gpu });
        let whole = SliceLocation { gpu, start: None };
        let possible = !is_there(change)
            && match change {
                Change::EnableMig { .. } => !is_there(&Change::StartDaemon { place: whole }),
                Change::CreateSlice { .. } => mig && self.has_room(change),
                Change::StartDaemon { place } => match place.start {
                    Some(_) => self.depends_on_slice(*place),
                    None => !mig,
                },
                Change::StartServer(spec) => is_there(&Change::StartDaemon { place: spec.place }),
            };
        if !possible {
            self.wrong.push(format!("{change:?} is not possible yet"));
        }
        self.changes.push(change.clone());
    }

    fn undo(&mut self, change: &Change) {
        let needed = |other: &Change| match (change, other) {
            (Change::EnableMig { gpu }, Change::CreateSlice { place, .. }) => place.gpu == *gpu,
            (Change::CreateSlice { place, .. }, Change::StartDaemon { place: other }) => {
                place == other
            }
            (Change::StartDaemon { place }, Change::StartServer(spec)) => spec.place == *place,
            _ => false,
        };
        if self.changes.iter().any(needed) || !self.changes.contains(change) {
            self.wrong.push(format!("{change:?} cannot be undone yet"));
        }
        self.changes.retain(|other| other != change);
    }

    fn has_room(&self, change: &Change) -> bool {
        let Some((place, slice, start)) = slice_of(self.kind, change) else { return false };
        let here = self.changes.iter().filter_map(|other| slice_of(self.kind, other));
        let others: Vec<(&SliceKind, u8)> =
            here.filter(|(p, ..)| p.gpu == place.gpu).map(|(_, s, at)| (s, at)).collect();
        slice.starts.contains(&start) && fits(self.kind, &others, slice, start)
    }

    fn depends_on_slice(&self, place: SliceLocation) -> bool {
        self.changes.iter().any(
            |change| matches!(change, Change::CreateSlice { place: other, .. } if *other == place),
        )
    }
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::super::{Partition, changes};
    use super::*;
    use crate::plan::{GpuFile, ShareFile, SliceFile};

    /// A legal plan of random slices with services of a few names.
    fn plan(kind: &GpuKind, gpus: usize, random: &mut Random) -> Vec<GpuFile> {
        let share = |random: &mut Random| ShareFile {
            name: format!("s{}", random.below(4)),
            model: "m".to_string(),
            batch: 1 << random.below(3),
            processes: 1 + random.below(2) as u32,
            rate: 1.0,
        };
        let mut plan = Vec::new();
        for _ in 0..gpus {
            let mut slices: Vec<SliceFile> = Vec::new();
            let mut taken: Vec<(&SliceKind, u8)> = Vec::new();
            for _ in 0..6 {
                let slice = &kind.slices[random.below(kind.slices.len() as u64) as usize];
                let start = slice.starts[random.below(slice.starts.len() as u64) as usize];
                if fits(kind, &taken, slice, start) {
                    taken.push((slice, start));
                    slices.push(SliceFile {
                        start,
                        size: slice.gpcs,
                        profile: slice.name.to_string(),
                        cycle_ms: None,
                        services: vec![share(random)],
                    });
                }
            }
            plan.push(GpuFile { slices });
        }
        plan
    }

    #[test]
    fn random_plans_are_replaced_without_a_gap_or_refused() {
        let kind = GpuKind::find("a100-80gb").unwrap();
        let mut random = Random::new(3);
        let (mut done, mut refused) = (0, 0);
        for _ in 0..400 {
            let mut list = |gpus: usize, partition: Partition| {
                changes(kind, &plan(kind, gpus, &mut random), &[0, 1, 2], partition).unwrap()
            };
            let (now, next) = (list(2, Partition::Mig), list(3, Partition::Mig));
            match transition(kind, &now, &next) {
                Ok(_) => done += 1,
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains("would have no server"), "{error}");
                }
            }
            // Shares of threads lie beside each other, so the way is never refused.
            let (now, next) = (list(2, Partition::Mps), list(2, Partition::Mps));
            assert!(transition(kind, &now, &next).is_ok());
            // From MIG to shares on the same GPUs there is no room for both.
            let (now, next) = (list(1, Partition::Mig), list(1, Partition::Mps));
            let way = transition(kind, &now, &next);
            let both = servers(&now).any(|one| {
                servers(&next).any(|other| one.services.iter().any(|s| other.services.contains(s)))
            });
            assert_eq!(way.is_err(), both, "{way:?}");
        }
        assert!(done > 50 && refused > 50, "{done} {refused}");
    }

    #[test]
    fn equal_plans_need_no_step_and_equal_slices_stay() {
        let kind = GpuKind::find("a100-80gb").unwrap();
        let one = plan(kind, 2, &mut Random::new(9));
        let now = changes(kind, &one, &[0, 1], Partition::Mig).unwrap();
        assert_eq!(transition(kind, &now, &now).unwrap(), []);
        // Another batch: the slice and its daemon stay, the server is replaced.
        let mut other = one;
        other[0].slices[0].services[0].batch = 16;
        other[0].slices[0].services[0].processes = 1;
        let next = changes(kind, &other, &[0, 1], Partition::Mig).unwrap();
        let steps = transition(kind, &now, &next).unwrap();
        let server = |change: &Change| matches!(change, Change::StartServer(_));
        let only_servers = steps.iter().all(|step| match step {
            TransitionChange::Apply(change) | TransitionChange::Undo(change) => server(change),
            TransitionChange::Switch => true,
        });
        assert!(only_servers && steps.len() >= 3, "{steps:?}");
        assert!(matches!(&steps[0], TransitionChange::Apply(change) if server(change)));
    }

    #[test]
    fn the_checker_sees_steps_that_are_missing_or_too_early() {
        let kind = GpuKind::find("a100-80gb").unwrap();
        let mut random = Random::new(11);
        let mut list = |gpus: usize| {
            changes(kind, &plan(kind, gpus, &mut random), &[0, 1], Partition::Mps).unwrap()
        };
        let (now, next) = (list(1), list(2));
        let steps = transition(kind, &now, &next).unwrap();
        for at in 0..steps.len() {
            let mut less = steps.clone();
            less.remove(at);
            assert!(!check_transition(kind, &now, &next, &less).is_empty(), "{at}");
        }
        let mut backwards = steps;
        backwards.reverse();
        assert!(!check_transition(kind, &now, &next, &backwards).is_empty());
    }
}
