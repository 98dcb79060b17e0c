//! Runs targets in processes of their own, and finds the input of a process that died.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::driver::{RunReport, save_artifact};
use crate::targets::Target;
use crate::watch::HANG_STATUS;

/// Processes of one target that may die before the target is given up.
const DEATHS_MAX: usize = 8;

/// Where and how long targets run.
#[derive(Clone, Debug)]
pub struct Supervisor {
    /// The program, which runs one target as `child`.
    pub program: PathBuf,
    /// The seed of all inputs.
    pub seed: u64,
    /// Time of each target.
    pub time: Duration,
    /// Gets the inputs that broke a rule.
    pub artifacts: PathBuf,
}

impl Supervisor {
    fn child(&self, target: &Target, from: u64, time: Duration) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("child").arg(target.name);
        command.arg(self.seed.to_string()).arg(from.to_string());
        command.arg(time.as_secs_f64().to_string());
        command.env("ATOLL_FUZZ_ARTIFACTS", &self.artifacts);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a target to the end of its time, whatever its processes do.
    pub fn run(&self, target: &Target) -> RunReport {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let progress = folder.path().join("progress");
        let (mut all, mut from) = (RunReport::default(), 0);
        for _ in 0..DEATHS_MAX {
            let left = self.time.as_secs_f64() - all.seconds;
            if left <= 0.0 {
                break;
            }
            let time = Duration::from_secs_f64(left);
            let mut child = self.child(target, from, time);
            let output = child.env("ATOLL_FUZZ_PROGRESS", &progress).output();
            let output = output.expect("the driver can be started");
            if let Some(report) = report_of(&output) {
                add(&mut all, report);
                break;
            }
            let reached = reached(&progress).max(from);
            let how = how_it_ended(&output);
            let (index, path) = self.find_input(target, reached, folder.path());
            all.inputs += reached - from;
            // A second at least, so that a target that dies at once does not run for ever.
            all.seconds += 1.0;
            all.finds.push(format!("{how} ({})", path.display()));
            from = index + 1;
        }
        all
    }

    /// The input with which a process died that had reached input `from`: each is stored before it
    /// runs.
    fn find_input(&self, target: &Target, from: u64, folder: &Path) -> (u64, PathBuf) {
        let (saved, progress) = (folder.join("input"), folder.join("again"));
        let mut child = self.child(target, from, Duration::from_secs(120));
        child.env("ATOLL_FUZZ_SAVE", &saved).env("ATOLL_FUZZ_PROGRESS", &progress);
        let died = child.output().is_ok_and(|output| report_of(&output).is_none());
        let data = std::fs::read(&saved).unwrap_or_default();
        let path = save_artifact(&self.artifacts, target.name, &data);
        if !died {
            eprintln!("{}: the second run did not die", target.name);
        }
        // The number is exact to a step, which is enough to go on behind it.
        (reached(&progress).max(from) + 64, path)
    }
}

fn add(all: &mut RunReport, more: RunReport) {
    all.inputs += more.inputs;
    all.seconds += more.seconds;
    all.peak = all.peak.max(more.peak);
    all.finds.extend(more.finds);
}

fn reached(progress: &Path) -> u64 {
    let bytes = std::fs::read(progress).unwrap_or_default();
    bytes.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The report of a process that ended well.
fn report_of(output: &Output) -> Option<RunReport> {
    if !output.status.success() {
        return None;
    }
    RunReport::read(String::from_utf8_lossy(&output.stdout).lines().last()?)
}

fn how_it_ended(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().last().unwrap_or_default();
    match output.status.code() {
        Some(HANG_STATUS) => format!("hang: {last}"),
        _ => format!("the process ended with {}: {last}", output.status),
    }
}
