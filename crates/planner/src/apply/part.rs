//! The part of a plan that one machine applies: GPUs of one kind, and of these its own.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::ApplyError;
use crate::gpu::GpuKind;
use crate::gpu_mix::FailureDomain;
use crate::plan::GpuFile;
use crate::verify::mix::{KindFile, MixFile};

/// Largest number of a GPU, and most numbers of a list.
const NUMBER_MAX: usize = 10_000_000;
const NUMBERS_MAX: usize = 4096;

/// Numbers of a plan's GPUs in ascending order, written as `0-3,6`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GpuNumbers(Vec<usize>);

impl FromStr for GpuNumbers {
    type Err = String;

    fn from_str(text: &str) -> Result<GpuNumbers, String> {
        let bad = |part: &str| format!("'{part}' is not a number or a range such as 0-3");
        let mut numbers = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse().ok().filter(|n| *n <= NUMBER_MAX);
            let first: usize = number(first).ok_or_else(|| bad(part))?;
            let last: usize = number(last).filter(|l| *l >= first).ok_or_else(|| bad(part))?;
            if last - first >= NUMBERS_MAX || numbers.len() + (last - first) >= NUMBERS_MAX {
                return Err(format!("more than {NUMBERS_MAX} gpus"));
            }
            numbers.extend(first..=last);
        }
        numbers.sort_unstable();
        match numbers.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("gpu {} is there twice", pair[0])),
            None => Ok(GpuNumbers(numbers)),
        }
    }
}

impl fmt::Display for GpuNumbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.0.chunk_by(|a, b| a + 1 == *b).map(|range| match range {
            [first, .., last] => format!("{first}-{last}"),
            one => one.iter().map(usize::to_string).collect(),
        });
        f.write_str(&ranges.collect::<Vec<String>>().join(","))
    }
}

/// GPUs of a plan that other machines apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OtherPart {
    /// Their kind.
    pub gpu_kind: String,
    /// How many there are.
    pub count: usize,
    /// Their numbers within the plan of that kind, as ranges.
    pub gpus: String,
}

impl fmt::Display for OtherPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OtherPart { gpu_kind, count, gpus } = self;
        write!(f, "{count} x {gpu_kind} (gpus {gpus} of the plan)")
    }
}

/// The part of a plan for one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanPart {
    /// The GPUs of this machine, as planned.
    pub plan: Vec<GpuFile>,
    /// What other machines apply.
    pub elsewhere: Vec<OtherPart>,
}

/// GPUs with slices, by number.
fn used(plan: &[GpuFile]) -> GpuNumbers {
    let used = plan.iter().enumerate().filter(|(_, gpu)| !gpu.slices.is_empty());
    GpuNumbers(used.map(|(number, _)| number).collect())
}

fn other(gpu_kind: &str, gpus: &GpuNumbers) -> Option<OtherPart> {
    let count = gpus.0.len();
    (count > 0).then(|| OtherPart { gpu_kind: gpu_kind.to_string(), count, gpus: gpus.to_string() })
}

/// The chosen GPUs of a plan of one kind; all of them without a choice.
pub fn part_of(
    gpu_kind: &str,
    plan: &[GpuFile],
    chosen: Option<&GpuNumbers>,
) -> Result<PlanPart, ApplyError> {
    let used = used(plan);
    let Some(chosen) = chosen else {
        return Ok(PlanPart { plan: plan.to_vec(), elsewhere: Vec::new() });
    };
    if let Some(&gpu) = chosen.0.iter().find(|number| used.0.binary_search(number).is_err()) {
        return Err(ApplyError::NoSuchGpu {
            gpu,
            kind: gpu_kind.to_string(),
            used: used.to_string(),
        });
    }
    let left = used.0.into_iter().filter(|number| chosen.0.binary_search(number).is_err());
    let left = GpuNumbers(left.collect());
    Ok(PlanPart {
        plan: chosen.0.iter().map(|&number| plan[number].clone()).collect(),
        elsewhere: other(gpu_kind, &left).into_iter().collect(),
    })
}

/// The chosen GPUs of one kind of a plan over several. A machine's GPUs must be in one of the
/// plan's failure domains: otherwise its loss would cost more than the plan has spare capacity for.
pub fn mix_part(
    file: &MixFile,
    kind: &KindFile,
    chosen: Option<&GpuNumbers>,
) -> Result<PlanPart, ApplyError> {
    let mut part = part_of(&kind.gpu_kind, &kind.plan, chosen)?;
    let numbers = chosen.cloned().unwrap_or_else(|| used(&kind.plan)).0;
    let beyond_gpus = |domain: FailureDomain| domain > FailureDomain::Gpu;
    let matters = file.survives.is_some_and(beyond_gpus)
        || file.terms.iter().any(|terms| !terms.apart.is_empty() && beyond_gpus(terms.apart_by));
    let domain_gpus = file.machine_gpus.or(file.rack_gpus).unwrap_or(1).max(1);
    if let [first, .., last] = numbers.as_slice()
        && matters
        && first / domain_gpus != last / domain_gpus
    {
        let own = first / domain_gpus * domain_gpus;
        let machine = format!("{own}-{}", own + domain_gpus - 1);
        return Err(ApplyError::SeveralMachines { machine });
    }
    for one in file.kinds.iter().filter(|one| one.gpu_kind != kind.gpu_kind) {
        part.elsewhere.extend(other(&one.gpu_kind, &used(&one.plan)));
    }
    Ok(part)
}

impl MixFile {
    /// The kind of a file that `is_mine` accepts; the message lists those that there are.
    pub fn kind_for(
        &self,
        is_mine: impl Fn(&GpuKind) -> bool,
    ) -> Result<(&KindFile, &'static GpuKind), String> {
        let mut found = Vec::new();
        for file in &self.kinds {
            let kind = file.gpu().map_err(|error| error.to_string())?;
            if is_mine(kind) {
                found.push((file, kind));
            }
        }
        match found.as_slice() {
            [one] => Ok(*one),
            [] => Err("none of its kinds is that of the gpus here".to_string()),
            _ => Err("several of its kinds could be that of the gpus here".to_string()),
        }
    }

    /// The parts of a file, one for each kind that it uses.
    pub fn parts(&self) -> String {
        let parts = self.kinds.iter().filter_map(|kind| other(&kind.gpu_kind, &used(&kind.plan)));
        parts.map(|part| part.to_string()).collect::<Vec<String>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{ShareFile, SliceFile};

    fn gpu(name: &str) -> GpuFile {
        let model = "m".to_string();
        let share = ShareFile { name: name.to_string(), model, batch: 1, processes: 1, rate: 1.0 };
        let profile = String::new();
        let slice = SliceFile { start: 0, size: 7, profile, cycle_ms: None, services: vec![share] };
        GpuFile { slices: vec![slice] }
    }

    fn mix(survives: Option<&str>) -> MixFile {
        let kind = |name: &str, plan: Vec<GpuFile>| {
            serde_json::json!({
                "gpu_kind": name, "gpus": plan.len(), "offers": [], "plan": plan, "prices": [],
                "profiles": { "models": {} },
            })
        };
        let empty = GpuFile { slices: Vec::new() };
        let many = vec![gpu("a"), gpu("b"), empty.clone(), gpu("c"), gpu("d"), gpu("e")];
        let value = serde_json::json!({
            "objective": "cost", "total": 1.0, "bound": 1.0, "gpus": 6, "seconds": 0.0,
            "machine_gpus": 3, "rack_gpus": 6, "survives": survives,
            "rules": crate::verify::RulesFile::from(&crate::PlanRules::default()),
            "services": [], "terms": [],
            "kinds": [kind("a100-80gb", many), kind("l4-24gb", vec![gpu("f")]),
                      kind("h100-80gb", vec![empty])],
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn numbers_are_lists_of_ranges() {
        let numbers: GpuNumbers = "6, 0-3".parse().unwrap();
        assert_eq!((numbers.to_string(), numbers.0.len()), ("0-3,6".to_string(), 5));
        for bad in ["", "x", "3-1", "-1", "1-", "0-4096", "1,1", "0-3,2", "99999999999"] {
            assert!(bad.parse::<GpuNumbers>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_machine_gets_its_gpus_of_its_kind() {
        let file = mix(None);
        let (kind, _) = file.kind_for(|kind| kind.name == "a100-80gb").unwrap();
        let chosen: GpuNumbers = "1,3-4".parse().unwrap();
        let part = mix_part(&file, kind, Some(&chosen)).unwrap();
        assert_eq!(part.plan, [gpu("b"), gpu("c"), gpu("d")]);
        let lines: Vec<String> = part.elsewhere.iter().map(OtherPart::to_string).collect();
        assert_eq!(
            lines,
            ["2 x a100-80gb (gpus 0,5 of the plan)", "1 x l4-24gb (gpus 0 of the plan)"]
        );
        let whole = mix_part(&file, kind, None).unwrap();
        assert_eq!((whole.plan.len(), whole.elsewhere.len()), (6, 1));
        // GPU 2 of the plan is empty, and there is no GPU 6.
        for numbers in ["2", "6"] {
            let error = mix_part(&file, kind, Some(&numbers.parse().unwrap())).unwrap_err();
            assert!(error.to_string().contains("0-1,3-5"), "{error}");
        }
        assert!(file.kind_for(|_| false).is_err() && file.kind_for(|_| true).is_err());
        assert!(file.parts().starts_with("5 x a100-80gb") && !file.parts().contains("h100"));
    }

    #[test]
    fn a_machine_takes_no_gpus_of_two_planned_ones() {
        let file = mix(Some("machine"));
        let (kind, _) = file.kind_for(|kind| kind.name == "a100-80gb").unwrap();
        let part = |numbers: &str| mix_part(&file, kind, Some(&numbers.parse().unwrap()));
        assert!(part("3-5").is_ok() && part("0-1").is_ok());
        let error = part("1,3").unwrap_err();
        assert_eq!(error, ApplyError::SeveralMachines { machine: "0-2".to_string() });
        assert!(mix_part(&file, kind, None).is_err());
        // Any one GPU may fail: how many a machine has does not matter then.
        let file = mix(Some("gpu"));
        let (kind, _) = file.kind_for(|kind| kind.name == "a100-80gb").unwrap();
        assert!(mix_part(&file, kind, None).is_ok());
    }
}
