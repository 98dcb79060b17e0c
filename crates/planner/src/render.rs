//! A plan as text: a picture for terminals, an SVG, the commands that would set it up, a mig-parted file.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::plan::{Gpu, Plan, Slice};
use crate::problem::Problem;
use crate::replan::steps::Step;

/// Columns of one memory slice in the picture.
const CELL: usize = 9;
/// GPUs drawn; the rest is counted.
const DRAWN_MAX: usize = 64;

/// Slots by service, one line a GPU, coloured by service where the terminal can.
pub fn picture(problem: &Problem, plan: &Plan, colours: bool) -> String {
    let mut text = String::new();
    for (number, gpu) in plan.gpus.iter().enumerate().take(DRAWN_MAX) {
        let _ = write!(text, "gpu {number:<4}|");
        let mut at = 0;
        for slice in &gpu.slices {
            let gap = usize::from(slice.start).saturating_sub(at);
            let _ = write!(text, "{}", " ".repeat(gap * CELL));
            let width = usize::from(problem.gpu.slices[slice.kind].memory_slices);
            text.push_str(&block(problem, slice, width * CELL - 1, colours));
            text.push('|');
            at = usize::from(slice.start) + width;
        }
        let rest = usize::from(problem.gpu.memory_slices).saturating_sub(at);
        let _ = writeln!(text, "{}|", " ".repeat((rest * CELL).saturating_sub(1)));
    }
    if plan.gpus.len() > DRAWN_MAX {
        let _ = writeln!(text, "... and {} more", plan.gpus.len() - DRAWN_MAX);
    }
    text
}

fn block(problem: &Problem, slice: &Slice, width: usize, colours: bool) -> String {
    let names: Vec<&str> =
        slice.shares.iter().map(|share| problem.services[share.service].name.as_str()).collect();
    let size = problem.gpu.slices[slice.kind].gpcs;
    let label: String = format!("{size}g {}", names.join("+")).chars().take(width).collect();
    let text = format!("{label:<width$}");
    let first = slice.shares.first().map_or(0, |share| share.service);
    match colours {
        true => format!("\x1b[48;5;{}m\x1b[38;5;16m{text}\x1b[0m", 67 + (first * 37) % 150),
        false => text,
    }
}

/// The same as an SVG.
pub fn svg(problem: &Problem, plan: &Plan) -> String {
    let (cell, row) = (90, 28);
    let width = 70 + cell * usize::from(problem.gpu.memory_slices);
    let height = row * plan.gpus.len() + 10;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n"
    );
    for (number, gpu) in plan.gpus.iter().enumerate() {
        let y = 5 + number * row;
        let _ = writeln!(text, "<text x=\"4\" y=\"{}\">gpu {number}</text>", y + 17);
        for slice in &gpu.slices {
            let kind = &problem.gpu.slices[slice.kind];
            let x = 60 + cell * usize::from(slice.start);
            let wide = cell * usize::from(kind.memory_slices) - 3;
            let first = slice.shares.first().map_or(0, |share| share.service);
            let names: Vec<String> = slice
                .shares
                .iter()
                .map(|share| escape(&problem.services[share.service].name))
                .collect();
            let hue = (first * 47) % 360;
            let _ = writeln!(
                text,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{wide}\" height=\"{}\" rx=\"3\" \
                 fill=\"hsl({hue},60%,75%)\"><title>{} {}</title></rect>\
                 <text x=\"{}\" y=\"{}\">{}</text>",
                row - 4,
                kind.name,
                names.join(", "),
                x + 4,
                y + 16,
                names.join("+").chars().take(wide / 7).collect::<String>()
            );
        }
    }
    text.push_str("</svg>\n");
    text
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// `nvidia-smi mig` and MPS commands that set the plan up, GPU by GPU. Nothing is run.
pub fn commands(problem: &Problem, plan: &Plan) -> String {
    let mut text =
        String::from("# Needs GPUs without running work; starts are given as profile:start.\n");
    for (number, gpu) in plan.gpus.iter().enumerate().filter(|(_, gpu)| !gpu.slices.is_empty()) {
        let places: Vec<String> = gpu
            .slices
            .iter()
            .map(|slice| format!("{}:{}", problem.gpu.slices[slice.kind].profile_id, slice.start))
            .collect();
        let _ = writeln!(text, "nvidia-smi -i {number} -mig 1");
        let _ = writeln!(text, "nvidia-smi mig -i {number} -cgi {} -C", places.join(","));
        for slice in &gpu.slices {
            mps(problem, number, slice, &mut text);
        }
    }
    text
}

/// The daemon of a slice, and what its processes are started with.
fn mps(problem: &Problem, gpu: usize, slice: &Slice, text: &mut String) {
    let kind = problem.gpu.slices[slice.kind].name;
    let uuid = format!("MIG_UUID_GPU{gpu}_START{}", slice.start);
    let pipe = format!("/tmp/atoll-mps/gpu{gpu}-{}", slice.start);
    let _ = writeln!(text, "# {kind} at {}: set {uuid} from `nvidia-smi -L`", slice.start);
    let _ = writeln!(
        text,
        "mkdir -p {pipe} && CUDA_VISIBLE_DEVICES=${uuid} CUDA_MPS_PIPE_DIRECTORY={pipe} \
         CUDA_MPS_LOG_DIRECTORY={pipe} nvidia-cuda-mps-control -d"
    );
    for share in &slice.shares {
        let percentage = 100 / share.processes.max(1);
        let _ = writeln!(
            text,
            "# {}: {} processes, batch {}, {:.1} requests/s, \
             CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage}",
            problem.services[share.service].name, share.processes, share.batch, share.rate
        );
    }
}

/// A configuration for mig-parted. It knows counts, not starts; the driver then chooses starts itself.
pub fn mig_parted(problem: &Problem, plan: &Plan) -> String {
    let counts = |gpu: &Gpu| {
        let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
        for slice in &gpu.slices {
            *counts.entry(problem.gpu.slices[slice.kind].name).or_default() += 1;
        }
        counts
    };
    let mut groups: BTreeMap<BTreeMap<&str, u32>, Vec<usize>> = BTreeMap::new();
    for (number, gpu) in plan.gpus.iter().enumerate().filter(|(_, gpu)| !gpu.slices.is_empty()) {
        groups.entry(counts(gpu)).or_default().push(number);
    }
    let mut text = String::from("version: v1\nmig-configs:\n  atoll:\n");
    for (counts, gpus) in groups {
        let gpus: Vec<String> = gpus.iter().map(usize::to_string).collect();
        let _ = writeln!(text, "    - devices: [{}]", gpus.join(", "));
        let _ = writeln!(text, "      mig-enabled: true\n      mig-devices:");
        for (name, count) in counts {
            let _ = writeln!(text, "        \"{name}\": {count}");
        }
    }
    text
}

/// One line a step.
pub fn steps(problem: &Problem, steps: &[Step]) -> String {
    let mut text = String::new();
    for (index, step) in steps.iter().enumerate() {
        let (verb, gpu, slice) = match step {
            Step::Create { gpu, slice, shadow: true } => ("shadow", gpu, slice),
            Step::Create { gpu, slice, .. } => ("create", gpu, slice),
            Step::Route { gpu, slice } => ("route", gpu, slice),
            Step::Destroy { gpu, slice } => ("destroy", gpu, slice),
        };
        let names: Vec<&str> = slice
            .shares
            .iter()
            .map(|share| problem.services[share.service].name.as_str())
            .collect();
        let kind = problem.gpu.slices[slice.kind].name;
        let _ = writeln!(
            text,
            "{:>4}. {verb:<8} gpu {gpu} {kind} at {} for {}",
            index + 1,
            slice.start,
            names.join(", ")
        );
    }
    text
}

/// Why a service runs as it does: its choices a kind of slice, their price a request, and what it got.
pub fn explain(problem: &Problem, plan: &Plan, prices: &[f64], service: usize) -> String {
    let about = &problem.services[service];
    let demand = &problem.demands()[service];
    let points = problem.profiles.points(&about.model).unwrap_or_default();
    let mut text = format!(
        "{}: {} at {:.1} requests/s ({:.1} with headroom), slo {} ms\n",
        about.name, about.model, about.rate, demand.rate, about.slo_ms
    );
    for (kind, slice) in problem.gpu.slices.iter().enumerate() {
        let throughput = demand.throughput[kind];
        if throughput <= 0.0 {
            let _ = writeln!(text, "  {:<9} no point meets the slo", slice.name);
            continue;
        }
        let point = &points[demand.point[kind] as usize];
        let _ = writeln!(
            text,
            "  {:<9} batch {:>3}, {} processes: {throughput:>8.1} requests/s in {:.0} ms, \
             {:.3} gpu for 1000/s",
            slice.name,
            point.batch,
            point.processes,
            point.latency_ms,
            prices[kind] / throughput * 1000.0
        );
    }
    for (number, gpu) in plan.gpus.iter().enumerate() {
        for slice in &gpu.slices {
            for share in slice.shares.iter().filter(|share| share.service == service) {
                let beside = slice.shares.len() - 1;
                let _ = writeln!(
                    text,
                    "  gets gpu {number}, {} at {}: batch {}, {} processes, {:.1} requests/s{}",
                    problem.gpu.slices[slice.kind].name,
                    slice.start,
                    share.batch,
                    share.processes,
                    share.rate,
                    if beside > 0 { format!(", beside {beside} others") } else { String::new() }
                );
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Share;
    use crate::{GpuKind, Point, Profiles, Rules, Service};

    fn example() -> (Problem, Plan) {
        let mut profiles = Profiles::default();
        let point = Point {
            gpcs: 3,
            batch: 8,
            processes: 2,
            throughput: 100.0,
            latency_ms: 10.0,
            memory_mib: None,
        };
        profiles.push("m", point).unwrap();
        let (name, model) = ("a<b".to_string(), "m".to_string());
        let services = vec![Service { name, model, rate: 50.0, slo_ms: 100.0 }];
        let gpu = GpuKind::find("a100-80gb").unwrap();
        let problem = Problem { gpu, services, profiles, rules: Rules::default() };
        let shares = vec![Share { service: 0, batch: 8, processes: 2, rate: 50.0 }];
        let slices = vec![Slice { kind: 3, start: 4, cycle_ms: None, shares }];
        (problem, Plan { gpus: vec![Gpu { slices }] })
    }

    #[test]
    fn commands_name_profile_and_start() {
        let (problem, plan) = example();
        let text = commands(&problem, &plan);
        assert!(text.contains("nvidia-smi mig -i 0 -cgi 9:4 -C"), "{text}");
        assert!(text.contains("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"), "{text}");
        assert!(mig_parted(&problem, &plan).contains("\"3g.40gb\": 1"));
    }

    #[test]
    fn pictures_show_every_slice() {
        let (problem, plan) = example();
        let text = picture(&problem, &plan, false);
        assert!(text.starts_with("gpu 0   |") && text.contains("3g a<b"), "{text}");
        assert!(svg(&problem, &plan).contains("a&lt;b"));
        assert!(explain(&problem, &plan, &[1.0; 6], 0).contains("gets gpu 0, 3g.40gb at 4"));
    }
}
