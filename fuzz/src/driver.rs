//! Runs one target on random inputs that follow from a seed.
//!
//! Input `i` of a seed is always the same, so that a process which dies can be followed by one
//! that stores each input before it runs it.

use std::any::Any;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use base::Random;
use serde_json::{Value, json};

use crate::mutate;
use crate::targets::{Target, execute};
use crate::{allocator, watch};

/// Inputs between two looks at the clock and two marks of progress.
const STEP: u64 = 64;

/// Different panics after which a run ends.
const FINDS_MAX: usize = 16;

/// One run of a target.
pub struct Run {
    /// What is run.
    pub target: &'static Target,
    /// Every input follows from it.
    pub seed: u64,
    /// Number of the first input.
    pub from: u64,
    /// The run ends after this time.
    pub time: Duration,
    /// Gets the number of the present input from time to time.
    pub progress: Option<PathBuf>,
    /// Gets every input before it runs.
    pub save: Option<PathBuf>,
    /// Gets the inputs that broke a rule.
    pub artifacts: PathBuf,
}

/// What a run did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// Inputs that ran.
    pub inputs: u64,
    /// Seconds it took.
    pub seconds: f64,
    /// Most memory of one input.
    pub peak: u64,
    /// What broke a rule, and the file with the input.
    pub finds: Vec<String>,
}

impl RunReport {
    /// As a line that [`RunReport::read`] reads.
    pub fn to_line(&self) -> String {
        let RunReport { inputs, seconds, peak, finds } = self;
        json!({"inputs": inputs, "seconds": seconds, "peak": peak, "finds": finds}).to_string()
    }

    /// Reads a line.
    pub fn read(line: &str) -> Option<RunReport> {
        let value: Value = serde_json::from_str(line).ok()?;
        let finds = value["finds"].as_array()?.iter().filter_map(Value::as_str);
        Some(RunReport {
            inputs: value["inputs"].as_u64()?,
            seconds: value["seconds"].as_f64()?,
            peak: value["peak"].as_u64()?,
            finds: finds.map(String::from).collect(),
        })
    }
}

/// Panics of all threads so far, and the last one.
static PANICS: AtomicU64 = AtomicU64::new(0);
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Counts panics instead of printing them: servers catch those of their requests.
fn count_panics() {
    std::panic::set_hook(Box::new(|info| {
        PANICS.fetch_add(1, Relaxed);
        let place = info.location().map(|place| format!("{}:{}", place.file(), place.line()));
        let payload: &dyn Any = info.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default();
        let text: String = text.chars().take(300).collect();
        if let Ok(mut last) = LAST_PANIC.lock() {
            *last = format!("{}: {text}", place.unwrap_or_default());
        }
    }));
}

/// Input number `index` of `seed`: first the corpus as it is, then edits of it.
pub fn input(target: &Target, corpus: &[Vec<u8>], seed: u64, index: u64) -> Vec<u8> {
    if let Some(whole) = corpus.get(index as usize) {
        return whole.clone();
    }
    let mut random = Random::new(seed ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut data = match target.generate {
        Some(generate) if mutate::one_in(&mut random, 4) || corpus.is_empty() => {
            let whole = generate(&mut random);
            if mutate::one_in(&mut random, 2) {
                return whole;
            }
            whole
        }
        _ if corpus.is_empty() => Vec::new(),
        _ => mutate::pick(&mut random, corpus).clone(),
    };
    let Target { format, words, max_len, .. } = *target;
    mutate::mutate(&mut random, format, words, corpus, max_len, &mut data);
    data
}

/// A name for a file with `data`.
fn artifact_name(data: &[u8]) -> String {
    // FNV-1a: names need not resist anybody.
    let hash = data.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// Stores `data` under `folder` and returns its path.
pub fn save_artifact(folder: &Path, target: &str, data: &[u8]) -> PathBuf {
    let folder = folder.join(target);
    let path = folder.join(artifact_name(data));
    let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, data));
    if let Err(error) = written {
        eprintln!("{}: {error}", path.display());
    }
    path
}

/// Runs a target in this process. Panics are found; what ends the process is found by the
/// supervisor.
pub fn run(run: &Run) -> RunReport {
    let target = run.target;
    let corpus = target.corpus();
    let progress = run.progress.as_ref().and_then(|path| File::create(path).ok());
    count_panics();
    watch::start(target.time);
    // Twice the limit of a target: what exceeds the limit is reported, what exceeds this as well
    // ends the process before it ends the machine.
    allocator::set_limit(allocator::live() + 2 * target.memory + (256 << 20));
    let start = Instant::now();
    let mut report = RunReport::default();
    let mut places = Vec::new();
    for index in run.from.. {
        if index % STEP == 0 {
            if start.elapsed() >= run.time || places.len() >= FINDS_MAX {
                break;
            }
            if let Some(file) = &progress {
                let _ = file.write_at(&index.to_le_bytes(), 0);
            }
        }
        let data = input(target, &corpus, run.seed, index);
        if let Some(path) = &run.save {
            let _ = std::fs::write(path, &data);
        }
        let panics = PANICS.load(Relaxed);
        watch::begin(index);
        let taken = catch_unwind(AssertUnwindSafe(|| execute(target, &data)));
        watch::end();
        report.inputs += 1;
        report.peak = report.peak.max(taken.unwrap_or_default() as u64);
        if PANICS.load(Relaxed) != panics {
            let what = LAST_PANIC.lock().map(|last| last.clone()).unwrap_or_default();
            let place = what.split(": ").next().unwrap_or_default().to_string();
            if !places.contains(&place) {
                places.push(place);
                let path = save_artifact(&run.artifacts, target.name, &data);
                report.finds.push(format!("{what} ({})", path.display()));
            }
        }
    }
    report.seconds = start.elapsed().as_secs_f64();
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::TARGETS;

    #[test]
    fn inputs_follow_from_the_seed() {
        for target in TARGETS {
            let corpus = target.corpus();
            let of = |seed, index| input(target, &corpus, seed, index);
            let beyond = corpus.len() as u64;
            let mut distinct = std::collections::HashSet::new();
            for index in beyond..beyond + 64 {
                assert_eq!(of(1, index), of(1, index), "{}", target.name);
                assert!(of(1, index).len() <= target.max_len.max(1 << 16));
                distinct.insert(of(1, index));
            }
            assert!(distinct.len() > 32, "{} repeats its inputs", target.name);
            assert_ne!(of(1, beyond + 7), of(2, beyond + 7), "{}", target.name);
        }
    }

    #[test]
    fn reports_are_read_as_they_are_written() {
        let report =
            RunReport { inputs: 3, seconds: 0.5, peak: 7, finds: vec!["a: \"b\"".to_string()] };
        assert_eq!(RunReport::read(&report.to_line()), Some(report));
    }
}
