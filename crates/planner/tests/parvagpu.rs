//! ParvaGPU's published deployment maps, reproduced.

mod common;

use std::collections::BTreeMap;

use planner::parvagpu::{ParvaGpuVariant, plan};
use planner::{Plan, PlanRules, Problem, check, scenario};

/// (model, size, batch, processes) of one GPU, sorted.
type GpuMap = Vec<(String, u8, u32, u32)>;

fn published(number: usize) -> Option<Vec<GpuMap>> {
    let text = common::shared(&format!("parvagpu/published_maps/S{number}.csv"))?;
    let mut gpus: BTreeMap<(u32, u32), GpuMap> = BTreeMap::new();
    for line in text.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let number = |cell: usize| cells[cell].trim().parse::<u32>().unwrap();
        gpus.entry((number(0), number(1))).or_default().push((
            cells[2].to_string(),
            number(4) as u8,
            number(5),
            number(6),
        ));
    }
    Some(sorted(gpus.into_values().collect()))
}

fn sorted(mut gpus: Vec<GpuMap>) -> Vec<GpuMap> {
    gpus.iter_mut().for_each(|gpu| gpu.sort());
    gpus.sort();
    gpus
}

fn ours(problem: &Problem, plan: &Plan) -> Vec<GpuMap> {
    let gpu = |gpu: &planner::plan::PlannedGpu| {
        gpu.slices
            .iter()
            .map(|slice| {
                let share = &slice.shares[0];
                let size = problem.gpu.slices[slice.kind].gpcs;
                let model = problem.services[share.service].model.clone();
                (model, size, share.batch, share.processes)
            })
            .collect()
    };
    sorted(plan.gpus.iter().map(gpu).collect())
}

#[test]
fn reproduces_the_published_maps() {
    for (number, gpus) in (1..=6).zip([2, 3, 5, 7, 13, 16]) {
        let Some(expected) = published(number) else { return };
        let services = scenario::services(number);
        let problem = common::problem(services, PlanRules::default()).unwrap();
        let plan = plan(&problem, ParvaGpuVariant::Full).unwrap();
        assert_eq!(ours(&problem, &plan), expected, "S{number}");
        assert_eq!(plan.gpus.len(), gpus, "S{number}");
        let violations = check(&problem, &plan);
        assert!(violations.is_empty(), "S{number}: {violations:?}");
    }
}

#[test]
fn the_variants_need_no_fewer_gpus() {
    for number in 1..=6 {
        let Some(problem) = common::problem(scenario::services(number), PlanRules::default())
        else {
            return;
        };
        let count = |variant| {
            let plan = plan(&problem, variant).unwrap();
            assert!(check(&problem, &plan).is_empty());
            plan.gpus.len()
        };
        let full = count(ParvaGpuVariant::Full);
        let (single, unoptimised) =
            (count(ParvaGpuVariant::WithoutMps), count(ParvaGpuVariant::WithoutOptimisation));
        println!("S{number}: {full} gpus, {single} without mps, {unoptimised} unoptimised");
        assert!(single >= full && unoptimised >= full);
    }
}
