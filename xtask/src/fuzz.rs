//! `cargo xtask fuzz`: long runs of the fuzz targets, and their figures in `evidence/`.
//!
//! Targets are built with coverage counters, which stable compilers can insert as well, and run
//! by libFuzzer one after another in slices. Every slice is added to `evidence/fuzz.json` when it
//! ends, so that a run can be stopped at any time.

mod figures;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use figures::{Figures, Slice};

pub(crate) const HELP: &str = "\
usage: cargo xtask fuzz --hours N [--target NAME]... [--slice SECONDS] [--plain]
       cargo xtask fuzz --merge | --allocations | --table | --add FILE...

  --hours N      run for N hours, guided by coverage; figures are added to evidence/fuzz.json
  --target NAME  only this target
  --slice N      seconds that a target runs before the next one's turn (60)
  --plain        without coverage: more inputs a second, none of them guided
  --merge        add to fuzz/corpus what the runs found to cover more, as far as it is small
  --allocations  count what becomes of requests whose k-th allocation fails, for every k
  --add FILE     add reports of `fuzz_driver run --json FILE` to the figures
  --table        write the figures into evidence/fuzz.md; every other command does that too";

/// Bytes that the merge adds to the corpus of one target at most.
const CORPUS_MAX: u64 = 32 << 10;

/// Longest input.
const LENGTH_MAX: usize = 4096;

/// Memory of a process at which libFuzzer ends it.
const RSS_LIMIT_MIB: usize = 3072;

/// Seconds on the clock after which an input hangs. The targets' own limits count processor time.
const TIMEOUT_SECONDS: usize = 60;

/// What `cargo-fuzz` sets, less the sanitizers, which need a nightly compiler: memory errors would
/// be those of `unsafe` code, and only the crate of the GPU has any.
const RUSTFLAGS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
];

/// Runs the command with its arguments.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let options = Options::parse(arguments)?;
    let fuzzing = Fuzzing::new(root)?;
    match &options.what {
        What::Run { time, plain } => fuzzing.run(&options, *time, *plain)?,
        What::Merge => fuzzing.merge(&options)?,
        What::Allocations => fuzzing.allocations()?,
        What::Add(files) => fuzzing.add(files)?,
        What::Table => {}
    }
    Figures::read(root)?.write(root)
}

enum What {
    Run { time: Duration, plain: bool },
    Merge,
    Allocations,
    Add(Vec<String>),
    Table,
}

struct Options {
    what: What,
    targets: Vec<String>,
    slice: Duration,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Options, String> {
        let (mut hours, mut plain, mut what) = (None, false, None);
        let (mut targets, mut slice) = (Vec::new(), 60.0);
        let mut words = arguments.iter().map(String::as_str);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            let number = |text: &str| text.parse::<f64>().map_err(|_| format!("{word}: {text}?"));
            match word {
                "--hours" => hours = Some(number(value()?)?),
                "--slice" => slice = number(value()?)?,
                "--target" => targets.push(value()?.to_string()),
                "--plain" => plain = true,
                "--merge" => what = Some(What::Merge),
                "--allocations" => what = Some(What::Allocations),
                "--add" => what = Some(What::Add(words.by_ref().map(String::from).collect())),
                "--table" => what = Some(What::Table),
                _ => return Err(HELP.to_string()),
            }
        }
        let seconds = |value: f64| Duration::try_from_secs_f64(value).map_err(|e| e.to_string());
        let slice = seconds(slice)?.max(Duration::from_secs(1));
        let what = match (what, hours) {
            (None, Some(hours)) => What::Run { time: seconds(3600.0 * hours)?, plain },
            (Some(what), None) => what,
            _ => return Err(HELP.to_string()),
        };
        Ok(Options { what, targets, slice })
    }
}

struct Fuzzing {
    root: PathBuf,
    /// Where cargo builds; the instrumented build has a folder of its own in it.
    target_folder: PathBuf,
}

impl Fuzzing {
    fn new(root: &Path) -> Result<Fuzzing, String> {
        let root = root.canonicalize().map_err(|error| error.to_string())?;
        let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        let target_folder = target.unwrap_or_else(|| root.join("target"));
        Ok(Fuzzing { target_folder, root })
    }

    /// The names of all targets.
    fn all_targets(&self) -> Result<Vec<String>, String> {
        let folder = self.root.join("fuzz/fuzz_targets");
        let stem = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_string());
        let files = files_of(&folder)?.into_iter();
        let mut all: Vec<String> = files.filter_map(|(path, _)| stem(path)).collect();
        all.sort();
        Ok(all)
    }

    /// All targets, or those that the options name.
    fn targets(&self, options: &Options) -> Result<Vec<String>, String> {
        let all = self.all_targets()?;
        if let Some(unknown) = options.targets.iter().find(|name| !all.contains(name)) {
            return Err(format!("there is no target '{unknown}'; there are: {}", all.join(", ")));
        }
        let wanted = |name: &String| options.targets.is_empty() || options.targets.contains(name);
        Ok(all.into_iter().filter(wanted).collect())
    }

    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        command.current_dir(&self.root).args(arguments);
        command
    }

    /// Builds the driver without coverage and returns its path.
    fn build_driver(&self) -> Result<PathBuf, String> {
        succeed(&mut self.cargo(&["build", "--release", "--package", "fuzz"]))?;
        Ok(self.target_folder.join("release/fuzz_driver"))
    }

    /// Builds all targets with coverage counters and returns their folder.
    fn build_guided(&self) -> Result<PathBuf, String> {
        let host = host()?;
        let folder = self.target_folder.join("fuzz");
        let mut build =
            self.cargo(&["build", "--release", "--package", "fuzz", "--features", "libfuzzer"]);
        for target in self.all_targets()? {
            build.args(["--bin", &target]);
        }
        // With an explicit target, build scripts and macros stay without counters.
        build.args(["--target", &host]).arg("--target-dir").arg(&folder);
        build.env("RUSTFLAGS", RUSTFLAGS.join(" "));
        build.env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
        build.env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true");
        build.env("CARGO_PROFILE_RELEASE_STRIP", "none");
        succeed(&mut build)?;
        Ok(folder.join(host).join("release"))
    }

    fn corpus(&self, target: &str) -> PathBuf {
        self.root.join("fuzz/corpus").join(target)
    }

    /// Inputs that runs found to cover more; not part of the repository.
    fn found(&self, target: &str) -> PathBuf {
        self.target_folder.join("fuzz/corpus").join(target)
    }

    fn artifacts(&self, target: &str) -> PathBuf {
        self.root.join("fuzz/artifacts").join(target)
    }

    /// Runs slices of all targets in turn until the time is over.
    fn run(&self, options: &Options, time: Duration, plain: bool) -> Result<(), String> {
        let targets = self.targets(options)?;
        let programs = if plain { self.build_driver()? } else { self.build_guided()? };
        let end = Instant::now() + time;
        let commit = commit(&self.root);
        for target in targets.iter().cycle() {
            let left = end.saturating_duration_since(Instant::now());
            if left < Duration::from_secs(1) {
                break;
            }
            let length = options.slice.min(left);
            let slice = match plain {
                true => self.plain_slice(&programs, target, length)?,
                false => self.guided_slice(&programs, target, length)?,
            };
            println!("{target}: {slice}");
            let mut figures = Figures::read(&self.root)?;
            figures.add(target, &slice, &commit);
            figures.write(&self.root)?;
        }
        Ok(())
    }

    /// Adds reports that the driver wrote.
    fn add(&self, files: &[String]) -> Result<(), String> {
        let mut figures = Figures::read(&self.root)?;
        let commit = commit(&self.root);
        for file in files {
            let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
            for (target, slice) in Slice::of_driver(&text).map_err(|e| format!("{file}: {e}"))? {
                figures.add(&target, &slice, &commit);
            }
        }
        figures.write(&self.root)
    }

    fn plain_slice(&self, driver: &Path, target: &str, time: Duration) -> Result<Slice, String> {
        let report = self.target_folder.join("fuzz-report.json");
        let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        let status = Command::new(driver)
            .args(["run", "--target", target, "--seed", &since.as_millis().to_string()])
            .args(["--seconds", &time.as_secs_f64().to_string()])
            .arg("--json")
            .arg(&report)
            .stdout(Stdio::null())
            .status();
        status.map_err(|error| format!("{}: {error}", driver.display()))?;
        let text = std::fs::read_to_string(&report).map_err(|error| error.to_string())?;
        let one = Slice::of_driver(&text)?.into_iter().next();
        one.map(|(_, slice)| slice).ok_or("the driver reports nothing".to_string())
    }

    fn guided_slice(&self, folder: &Path, target: &str, time: Duration) -> Result<Slice, String> {
        let (found, artifacts) = (self.found(target), self.artifacts(target));
        for folder in [&found, &artifacts] {
            std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
        }
        let begin = Instant::now();
        let output = Command::new(folder.join(target))
            .args([
                format!("-max_total_time={}", time.as_secs().max(1)),
                format!("-max_len={LENGTH_MAX}"),
                format!("-rss_limit_mb={RSS_LIMIT_MIB}"),
                format!("-timeout={TIMEOUT_SECONDS}"),
                format!("-artifact_prefix={}/", artifacts.display()),
                "-print_final_stats=1".to_string(),
                "-reload=0".to_string(),
                "-detect_leaks=0".to_string(),
            ])
            .arg(&found)
            .arg(self.corpus(target))
            .output()
            .map_err(|error| format!("{target}: {error}"))?;
        let text = String::from_utf8_lossy(&output.stderr);
        Ok(Slice::of_libfuzzer(&text, begin.elapsed(), output.status.success()))
    }

    /// Adds inputs to the corpus that cover more than it does, small ones first.
    fn merge(&self, options: &Options) -> Result<(), String> {
        let programs = self.build_guided()?;
        for target in self.targets(options)? {
            let found = self.found(&target);
            if !found.exists() {
                continue;
            }
            let merged = self.target_folder.join("fuzz/merged").join(&target);
            let _ = std::fs::remove_dir_all(&merged);
            copy_folder(&self.corpus(&target), &merged)?;
            let mut merge = Command::new(programs.join(&target));
            merge.arg("-merge=1").arg(&merged).arg(&found);
            succeed(merge.stderr(Stdio::null()))?;
            let added = self.add_small(&merged, &self.corpus(&target))?;
            println!("{target}: {added} inputs added");
        }
        Ok(())
    }

    fn add_small(&self, merged: &Path, corpus: &Path) -> Result<usize, String> {
        let mut files = files_of(merged)?;
        files.retain(|(path, size)| {
            *size > 0 && path.file_name().is_some_and(|name| !corpus.join(name).exists())
        });
        files.sort_by_key(|(path, size)| (*size, path.clone()));
        let (mut total, mut added) = (0, 0);
        for (path, size) in files {
            total += size;
            if total > CORPUS_MAX {
                break;
            }
            let name = path.file_name().unwrap_or_default();
            std::fs::copy(&path, corpus.join(name)).map_err(|error| error.to_string())?;
            added += 1;
        }
        Ok(added)
    }

    /// Counts the allocations of requests whose failure ends the process.
    fn allocations(&self) -> Result<(), String> {
        let driver = self.build_driver()?;
        let report = self.target_folder.join("fuzz-report.json");
        let mut figures = Figures::read(&self.root)?;
        for min in ["1048576", "0"] {
            let mut count = Command::new(&driver);
            succeed(count.args(["allocations", "--min", min]).arg("--json").arg(&report))?;
            let text = std::fs::read_to_string(&report).map_err(|error| error.to_string())?;
            figures.set_allocations(min, &text)?;
        }
        figures.write(&self.root)
    }
}

fn succeed(command: &mut Command) -> Result<(), String> {
    let status = command.status().map_err(|error| format!("{command:?}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?} ended with {status}")) }
}

fn files_of(folder: &Path) -> Result<Vec<(PathBuf, u64)>, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| error.to_string())?;
    let file = |entry: std::fs::DirEntry| Some((entry.path(), entry.metadata().ok()?.len()));
    Ok(entries.flatten().filter_map(file).collect())
}

fn copy_folder(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::create_dir_all(to).map_err(|error| error.to_string())?;
    for (path, _) in files_of(from)? {
        let name = path.file_name().unwrap_or_default();
        std::fs::copy(&path, to.join(name)).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The compiler's name of this machine.
fn host() -> Result<String, String> {
    let output = Command::new("rustc").arg("-vV").output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(String::from).ok_or("rustc does not name its host".to_string())
}

/// The commit that is checked out, shortened.
fn commit(root: &Path) -> String {
    let mut git = Command::new("git");
    let output = git.current_dir(root).args(["rev-parse", "--short=12", "HEAD"]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_string());
    text.ok().filter(|text| !text.is_empty()).unwrap_or("unknown".to_string())
}
