//! What `atoll plan` does by its flags. A flag that a mode would ignore is refused: who gives it
//! expects that it counts.

use assembly::Failure;
use planner::Algorithm;

use crate::args::PlanArgs;

/// A mode and the flags that it takes, by their names in [`PlanArgs`].
struct PlanMode {
    /// What chooses it, for messages.
    chosen_by: &'static str,
    flags: &'static [&'static [&'static str]],
}

const INPUTS: &[&str] = &[
    "services",
    "profiles",
    "gpu_table",
    "foreign_profiles",
    "headroom",
    "sharing",
    "keep_going",
    "json",
];
const PRINTED: &[&str] = &["gpu", "explain", "svg", "commands", "mig_parted"];
const WINDOWS: &[&str] = &["gpu", "window_s", "percentile", "unfolded", "plans"];

const VERIFY: PlanMode = PlanMode { chosen_by: "--verify", flags: &[&["verify", "json"]] };
const STOCK: PlanMode = PlanMode {
    chosen_by: "--stock",
    flags: &[
        INPUTS,
        &["stock", "objective", "max_gpus", "serve_first", "survive", "machine_gpus", "rack_gpus"],
    ],
};
const SWEEP: PlanMode =
    PlanMode { chosen_by: "--sweep", flags: &[INPUTS, &["gpu", "sweep", "algorithm", "svg"]] };
const TRAFFIC: PlanMode =
    PlanMode { chosen_by: "--traffic", flags: &[INPUTS, WINDOWS, &["traffic"]] };
const PROMETHEUS: PlanMode = PlanMode {
    chosen_by: "--prometheus",
    flags: &[
        INPUTS,
        WINDOWS,
        &[
            "prometheus",
            "query",
            "service_label",
            "start",
            "end",
            "step_s",
            "prometheus_token_file",
            "prometheus_timeout_secs",
        ],
    ],
};
const FROM: PlanMode = PlanMode {
    chosen_by: "--from",
    flags: &[INPUTS, PRINTED, &["from", "max_moves", "algorithm"]],
};
const FRESH: PlanMode =
    PlanMode { chosen_by: "a new plan", flags: &[INPUTS, PRINTED, &["algorithm"]] };
const MODES: [&PlanMode; 7] = [&VERIFY, &STOCK, &SWEEP, &TRAFFIC, &PROMETHEUS, &FROM, &FRESH];

impl PlanMode {
    fn of(args: &PlanArgs) -> &'static PlanMode {
        match args {
            _ if args.verify.is_some() => &VERIFY,
            _ if args.stock.is_some() => &STOCK,
            _ if args.sweep.is_some() => &SWEEP,
            _ if args.traffic.is_some() => &TRAFFIC,
            _ if args.prometheus.is_some() => &PROMETHEUS,
            _ if args.from.is_some() => &FROM,
            _ => &FRESH,
        }
    }

    fn takes(&self, flag: &str) -> bool {
        self.flags.iter().any(|flags| flags.contains(&flag))
    }
}

/// Refuses flags that would be ignored. Values from the environment are no flags: they are for the
/// calls that take them.
pub(super) fn check(args: &PlanArgs) -> Result<(), Failure> {
    let mode = PlanMode::of(args);
    for flag in &args.given {
        let modes = MODES.iter().filter(|mode| mode.takes(flag)).map(|mode| mode.chosen_by);
        let modes: Vec<&str> = modes.collect();
        if !modes.is_empty() && !mode.takes(flag) {
            let (flag, own) = (flag.replace('_', "-"), mode.chosen_by);
            return Err(Failure::usage(format!(
                "--{flag} does nothing with {own}; it is for {}",
                modes.join(", ")
            )));
        }
    }
    check_algorithm(args)?;
    let text = [("json", args.json), ("commands", args.commands)];
    if let Some((flag, _)) = text.iter().find(|(_, given)| *given && args.explain.is_some()) {
        return Err(Failure::usage(format!(
            "--explain prints one service alone; leave --{flag} out"
        )));
    }
    if args.json && args.commands {
        return Err(Failure::usage("--commands prints text; leave --json out"));
    }
    Ok(())
}

/// Flags that only some algorithms can follow.
fn check_algorithm(args: &PlanArgs) -> Result<(), Failure> {
    let shares = match args.algorithm {
        Algorithm::Certified => args.sharing.as_str(),
        Algorithm::Squishy => "time",
        _ => "none",
    };
    if args.given.contains("sharing") && args.sharing != shares {
        let sharing = &args.sharing;
        return Err(Failure::usage(format!(
            "--sharing {sharing} does nothing with this --algorithm, which has {shares}"
        )));
    }
    if super::has_plan(args) || args.sweep.is_some() {
        return Ok(());
    }
    let slices = [
        ("svg", args.svg.is_some()),
        ("explain", args.explain.is_some()),
        ("commands", args.commands),
        ("mig-parted", args.mig_parted.is_some()),
    ];
    match slices.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((flag, _)) => Err(Failure::usage(format!(
            "--{flag} does nothing with this --algorithm, which only counts gpus"
        ))),
    }
}
