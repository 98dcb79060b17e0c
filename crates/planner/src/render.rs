//! A plan as a terminal drawing, an SVG, setup commands, or a mig-parted file.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::plan::{Plan, PlannedGpu, PlannedSlice, ServiceShare};
use crate::problem::Problem;
use crate::replan::steps::TransitionStep;

/// Columns of one memory slice in the picture.
const CELL: usize = 9;
/// Maximum number of GPUs drawn; the others are counted.
const DRAWN_MAX: usize = 64;

/// Draws the slots of each GPU on one line, coloured by service if the terminal supports it.
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

fn block(problem: &Problem, slice: &PlannedSlice, width: usize, colours: bool) -> String {
    let label = label(problem, slice, width);
    let text = format!("{label:<width$}");
    let first = slice.shares.first().map_or(0, |share| share.service);
    match colours {
        true => format!("\x1b[48;5;{}m\x1b[38;5;16m{text}\x1b[0m", 67 + (first * 37) % 150),
        false => text,
    }
}

/// Size and services within a width. If names are cut off, a shared slice shows the number of
/// others.
fn label(problem: &Problem, slice: &PlannedSlice, width: usize) -> String {
    let name = |share: &ServiceShare| printable(&problem.services[share.service].name);
    let names: Vec<String> = slice.shares.iter().map(name).collect();
    let kind = &problem.gpu.slices[slice.kind];
    let size = match problem.gpu.has_mig() {
        true => format!("{}g", kind.gpcs),
        false => kind.name.to_string(),
    };
    let all = format!("{size} {}", names.join("+"));
    if all.chars().count() <= width || names.len() < 2 {
        return all.chars().take(width).collect();
    }
    let others = format!("+{}", names.len() - 1);
    let first = format!("{size} {}", names[0]);
    let first: String = first.chars().take(width.saturating_sub(others.len())).collect();
    first + &others
}

/// A distinct light colour for every service, as six hexadecimal digits, which all viewers read.
fn colour(service: usize) -> String {
    let hue = (service * 47 % 360) as f64 / 60.0;
    let part = |shift: f64| {
        let at = (hue + shift).rem_euclid(6.0);
        let high = (2.0 - (at - 3.0).abs()).clamp(0.0, 1.0);
        (165.0 + 75.0 * (1.0 - high)) as u8
    };
    format!("#{:02x}{:02x}{:02x}", part(0.0), part(4.0), part(2.0))
}

/// Draws the plan as an SVG.
pub fn svg(problem: &Problem, plan: &Plan) -> String {
    let (cell, row) = (90, 28);
    let width = 70 + cell * usize::from(problem.gpu.memory_slices);
    let height = row * plan.gpus.len() + 10;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (number, gpu) in plan.gpus.iter().enumerate() {
        let y = 5 + number * row;
        let _ = writeln!(text, "<text x=\"4\" y=\"{}\">gpu {number}</text>", y + 17);
        for slice in &gpu.slices {
            let kind = &problem.gpu.slices[slice.kind];
            let x = 60 + cell * usize::from(slice.start);
            let wide = cell * usize::from(kind.memory_slices) - 3;
            let first = slice.shares.first().map_or(0, |share| share.service);
            let share = |share: &ServiceShare| {
                let name = printable(&problem.services[share.service].name);
                let (batch, processes) = (share.batch, share.processes);
                format!("{name}: batch {batch}, {}, {:.1}/s", count(processes), share.rate)
            };
            let shares: Vec<String> = slice.shares.iter().map(share).collect();
            let _ = writeln!(
                text,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{wide}\" height=\"{}\" rx=\"3\" \
                 fill=\"{}\"><title>{} {}</title></rect>\
                 <text x=\"{}\" y=\"{}\">{}</text>",
                row - 4,
                colour(first),
                kind.name,
                escape(&shares.join("; ")),
                x + 4,
                y + 16,
                escape(&label(problem, slice, wide / 7))
            );
        }
    }
    text.push_str("</svg>\n");
    text
}

fn count(processes: u32) -> String {
    if processes == 1 { "1 process".to_string() } else { format!("{processes} processes") }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A name for a line of text: control characters, which would end the line or move a terminal's
/// cursor, are escaped.
fn printable(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        match c.is_control() {
            true => text.extend(c.escape_default()),
            false => text.push(c),
        }
    }
    text
}

/// `nvidia-smi mig` and MPS commands that set the plan up, GPU by GPU. Nothing is run.
pub fn commands(problem: &Problem, plan: &Plan) -> String {
    let mig = problem.gpu.has_mig();
    let mut text = String::from(match mig {
        true => "# Needs GPUs without running work; starts are given as profile:start.\n",
        false => "# Needs GPUs without running work; a part is a share of a GPU's threads.\n",
    });
    for (number, gpu) in plan.gpus.iter().enumerate().filter(|(_, gpu)| !gpu.slices.is_empty()) {
        let places: Vec<String> = gpu
            .slices
            .iter()
            .map(|slice| format!("{}:{}", problem.gpu.slices[slice.kind].profile_id, slice.start))
            .collect();
        if mig {
            let _ = writeln!(text, "nvidia-smi -i {number} -mig 1");
            let _ = writeln!(text, "nvidia-smi mig -i {number} -cgi {} -C", places.join(","));
        } else {
            daemon(&format!("/tmp/atoll-mps/gpu{number}"), &number.to_string(), &mut text);
        }
        for slice in &gpu.slices {
            mps(problem, number, slice, &mut text);
        }
    }
    text
}

fn daemon(pipe: &str, device: &str, text: &mut String) {
    let _ = writeln!(
        text,
        "mkdir -p {pipe} && CUDA_VISIBLE_DEVICES={device} CUDA_MPS_PIPE_DIRECTORY={pipe} \
         CUDA_MPS_LOG_DIRECTORY={pipe} nvidia-cuda-mps-control -d"
    );
}

/// The daemon of a slice, and the environment of its processes.
fn mps(problem: &Problem, gpu: usize, slice: &PlannedSlice, text: &mut String) {
    let kind = &problem.gpu.slices[slice.kind];
    let share = match problem.gpu.has_mig() {
        true => 100,
        false => 100 * u32::from(kind.gpcs) / u32::from(problem.gpu.gpcs),
    };
    if problem.gpu.has_mig() {
        let uuid = format!("MIG_UUID_GPU{gpu}_START{}", slice.start);
        let _ =
            writeln!(text, "# {} at {}: set {uuid} from `nvidia-smi -L`", kind.name, slice.start);
        let pipe = format!("/tmp/atoll-mps/gpu{gpu}-{}", slice.start);
        daemon(&pipe, &format!("${uuid}"), text);
    } else {
        let _ = writeln!(text, "# {} of gpu {gpu}, {} MiB", kind.name, kind.memory_mib());
    }
    for one in &slice.shares {
        let percentage = (share / one.processes.max(1)).max(1);
        let _ = writeln!(
            text,
            "# {}: {}, batch {}, {:.1} requests/s, \
             CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage}",
            printable(&problem.services[one.service].name),
            count(one.processes),
            one.batch,
            one.rate
        );
    }
}

/// A configuration for mig-parted. It has counts, not starts; the driver chooses the starts.
pub fn mig_parted(problem: &Problem, plan: &Plan) -> String {
    let counts = |gpu: &PlannedGpu| {
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

/// One line per step.
pub fn steps(problem: &Problem, steps: &[TransitionStep]) -> String {
    let mut text = String::new();
    for (index, step) in steps.iter().enumerate() {
        let (verb, gpu, slice) = match step {
            TransitionStep::Create { gpu, slice, shadow: true } => ("shadow", gpu, slice),
            TransitionStep::Create { gpu, slice, .. } => ("create", gpu, slice),
            TransitionStep::Route { gpu, slice } => ("route", gpu, slice),
            TransitionStep::Destroy { gpu, slice } => ("destroy", gpu, slice),
        };
        let names: Vec<String> = slice
            .shares
            .iter()
            .map(|share| printable(&problem.services[share.service].name))
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

/// Explains a service: its options per slice kind, their price per request, and its slices in the
/// plan.
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
            "  {:<9} batch {:>3}, {:<12} {throughput:>8.1} requests/s in {:.0} ms, \
             {:.3} gpu for 1000/s",
            slice.name,
            point.batch,
            count(point.processes) + ":",
            point.latency_ms,
            prices[kind] / throughput * 1000.0
        );
    }
    for (number, gpu) in plan.gpus.iter().enumerate() {
        for slice in &gpu.slices {
            for share in slice.shares.iter().filter(|share| share.service == service) {
                let turns = match (slice.cycle_ms, slice.shares.len()) {
                    (Some(cycle_ms), 2) => format!(", every {cycle_ms:.1} ms, beside 1 other"),
                    (Some(cycle_ms), all) => {
                        format!(", every {cycle_ms:.1} ms, beside {} others", all - 1)
                    }
                    (None, _) => String::new(),
                };
                let _ = writeln!(
                    text,
                    "  gets gpu {number}, {} at {}: batch {}, {}, {:.1} requests/s{turns}",
                    problem.gpu.slices[slice.kind].name,
                    slice.start,
                    share.batch,
                    count(share.processes),
                    share.rate
                );
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GpuKind, OperatingPoint, PlanRules, Profiles, Service};

    fn example() -> (Problem, Plan) {
        let mut profiles = Profiles::default();
        let point = OperatingPoint {
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
        let problem = Problem { gpu, services, profiles, rules: PlanRules::default() };
        let shares = vec![ServiceShare { service: 0, batch: 8, processes: 2, rate: 50.0 }];
        let slices = vec![PlannedSlice { kind: 3, start: 4, cycle_ms: None, shares }];
        (problem, Plan { gpus: vec![PlannedGpu { slices }] })
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
    fn a_name_stays_inside_its_comment() {
        let (mut problem, plan) = example();
        problem.services[0].name = "a\nreboot\r\u{1b}[2J".to_string();
        let text = commands(&problem, &plan);
        assert!(text.lines().all(|line| !line.starts_with("reboot")), "{text}");
        assert!(text.contains("# a\\nreboot\\r\\u{1b}[2J: 2 processes"), "{text}");
        assert!(!picture(&problem, &plan, false).contains('\u{1b}'));
    }

    #[test]
    fn parts_of_a_gpu_without_mig_are_thread_shares() {
        let (mut problem, mut plan) = example();
        problem.gpu = GpuKind::find("l40s-48gb").unwrap();
        plan.gpus[0].slices[0].kind = 2;
        let text = commands(&problem, &plan);
        assert!(!text.contains("mig") && text.contains("nvidia-cuda-mps-control -d"), "{text}");
        // Three eighths for two processes.
        assert!(text.contains("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=18"), "{text}");
    }

    #[test]
    fn labels_are_cut_to_their_width_and_say_how_many_share() {
        let (mut problem, mut plan) = example();
        let mut long = problem.services[0].clone();
        long.name = "a&very&long&name&that&does&not&fit".to_string();
        problem.services.insert(0, long);
        let slice = &mut plan.gpus[0].slices[0];
        slice.shares.push(ServiceShare { service: 1, batch: 8, processes: 1, rate: 1.0 });
        assert_eq!(label(&problem, slice, 10), "3g a&ver+1");
        let text = svg(&problem, &plan);
        assert!(!text.replace("&amp;", "").replace("&lt;", "").contains('&'), "{text}");
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
