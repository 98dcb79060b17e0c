//! Checks a model in a process of its own before this process reads it.
//!
//! The child is the same binary ([`run_child`]). It gives up its rights (`crate::sandbox`), then
//! compiles the model and runs it as a server would when it measures it. What the model does there,
//! it does to the child. If that runs out of memory or time, or crashes, the registration is
//! refused with the reason.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use base::Bytes;
use compiler::CompileError;
use graph::ImportError;
use model::ModelConfig;
use serde::{Deserialize, Serialize};
use server::LoadError;

use crate::memory_available::memory_available;

mod child;
pub use child::run_child;

/// Name of the hidden command that runs the child.
pub const COMMAND: &str = "model-check";

/// Checks that run at the same time.
const CONCURRENT: usize = 2;
/// Interval in which a running check is looked after.
const POLL: Duration = Duration::from_millis(5);
/// Max bytes of the child's messages that are kept.
const MESSAGES_MAX: usize = 16 << 10;
/// Address space of the smallest check; threads and allocator need that much.
const MEMORY_MIN: u64 = 1 << 30;

/// How models are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckSettings {
    /// Address space of the check, beside eight times the model's size. Never more than this
    /// machine can spare.
    pub memory: Bytes,
    /// Time limit of one check.
    pub limit: Duration,
    /// Whether a model that compiles, but whose run takes longer than the limit, is refused. Not
    /// where a faster device than the child's processor runs it.
    pub run_must_finish: bool,
}

impl Default for CheckSettings {
    fn default() -> CheckSettings {
        CheckSettings {
            memory: Bytes(4 << 30),
            limit: Duration::from_secs(60),
            run_must_finish: true,
        }
    }
}

/// Starts checks and waits for them.
pub struct ModelChecker {
    settings: CheckSettings,
    program: PathBuf,
    running: Mutex<usize>,
    finished: Condvar,
    stopping: AtomicBool,
}

/// What the child is told before the model's bytes, in one line.
#[derive(Debug, Serialize, Deserialize)]
struct CheckOrder {
    memory: u64,
    cpu_seconds: u64,
    size: usize,
    config: ModelConfig,
}

/// What the child does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CheckStage {
    Start,
    Compile,
    Load,
    Run,
    Measure,
}

impl CheckStage {
    fn as_text(self) -> &'static str {
        match self {
            CheckStage::Start => "read the model",
            CheckStage::Compile => "compiled the model",
            CheckStage::Load => "loaded the model",
            CheckStage::Run | CheckStage::Measure => "ran the model",
        }
    }
}

/// What the child reports, in lines.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CheckEvent {
    /// A stage begins.
    Stage(CheckStage),
    /// The model passed.
    Passed {
        /// Whether Landlock was in force.
        landlock: bool,
    },
    /// The model is wrong.
    Invalid(String),
    /// The model needs something that is not supported.
    Unsupported(String),
    /// The child could not do its work.
    Failed(String),
}

impl From<&CompileError> for CheckEvent {
    fn from(error: &CompileError) -> CheckEvent {
        match error {
            CompileError::Import(ImportError::Unsupported(_)) => {
                CheckEvent::Unsupported(error.to_string())
            }
            _ => CheckEvent::Invalid(error.to_string()),
        }
    }
}

/// How a child ended.
struct Outcome {
    status: ExitStatus,
    stage: CheckStage,
    verdict: Option<CheckEvent>,
    messages: String,
    /// Why it was ended from here.
    ended: Option<LoadError>,
}

impl ModelChecker {
    /// Checks with children of this binary.
    pub fn new(settings: CheckSettings) -> ModelChecker {
        // The running program, even when its file has been replaced since.
        ModelChecker::with_program(settings, PathBuf::from("/proc/self/exe"))
    }

    /// Checks with children of `program`.
    pub fn with_program(settings: CheckSettings, program: PathBuf) -> ModelChecker {
        ModelChecker {
            settings,
            program,
            running: Mutex::new(0),
            finished: Condvar::new(),
            stopping: AtomicBool::new(false),
        }
    }

    /// Ends all checks; later ones fail.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.finished.notify_all();
    }

    /// Checks a model; blocks. `cancelled` ends it early.
    ///
    /// # Errors
    /// When the model is wrong, needs too much or crashes, with the reason; or when it cannot be
    /// checked.
    pub fn check(
        &self,
        onnx: &[u8],
        config: &ModelConfig,
        cancelled: &AtomicBool,
    ) -> Result<(), LoadError> {
        let end = Instant::now() + self.settings.limit;
        let _turn = self.wait_for_turn(end, cancelled)?;
        let memory = self.memory_for(onnx.len() as u64)?;
        let order = CheckOrder {
            memory,
            // The child's threads together; the time limit below counts in any case.
            cpu_seconds: self.settings.limit.as_secs().max(1) * child::THREADS as u64 + 1,
            size: onnx.len(),
            config: ModelConfig { labels: Vec::new(), preprocessing: None, ..config.clone() },
        };
        let end = Instant::now() + self.settings.limit;
        let outcome = self.run(&order, onnx, end, cancelled)?;
        self.judge(outcome, memory)
    }

    fn wait_for_turn(&self, end: Instant, cancelled: &AtomicBool) -> Result<Turn<'_>, LoadError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        while *running >= CONCURRENT {
            if let Some(why) = self.interruption(cancelled) {
                return Err(why);
            }
            if Instant::now() >= end {
                let why = "too many models are being checked; try again later";
                return Err(LoadError::Unavailable(why.to_string()));
            }
            let waited = self.finished.wait_timeout(running, 10 * POLL);
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *running += 1;
        Ok(Turn(self))
    }

    fn interruption(&self, cancelled: &AtomicBool) -> Option<LoadError> {
        let why = match (self.stopping.load(Ordering::SeqCst), cancelled.load(Ordering::SeqCst)) {
            (true, _) => "the server is shutting down",
            (_, true) => "the registration was cancelled",
            _ => return None,
        };
        Some(LoadError::Unavailable(why.to_string()))
    }

    /// Address space of the check of a model of `size` bytes.
    fn memory_for(&self, size: u64) -> Result<u64, LoadError> {
        let wanted = self.settings.memory.0.saturating_add(size.saturating_mul(8)).max(MEMORY_MIN);
        let spare = memory_available().map_or(u64::MAX, |free| free / CONCURRENT as u64);
        // Address space is more than memory: what allocator and stacks only reserve counts, too.
        let limit = wanted.min(spare.saturating_add(MEMORY_MIN));
        if spare < size.saturating_mul(3) {
            return Err(LoadError::Unavailable(format!(
                "not enough memory to check a model of {} now",
                Bytes(size)
            )));
        }
        Ok(limit)
    }

    fn run(
        &self,
        order: &CheckOrder,
        onnx: &[u8],
        end: Instant,
        cancelled: &AtomicBool,
    ) -> Result<Outcome, LoadError> {
        let cannot = |err: std::io::Error| {
            LoadError::Unavailable(format!("the process that checks models cannot start: {err}"))
        };
        let mut child = KillOnDrop(self.spawn().map_err(cannot)?);
        let mut head = serde_json::to_vec(order).map_err(|err| cannot(err.into()))?;
        head.push(b'\n');
        let stage = Mutex::new(CheckStage::Start);
        let (stdin, stdout, stderr) =
            (child.0.stdin.take(), child.0.stdout.take(), child.0.stderr.take());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if let Some(mut stdin) = stdin {
                    // A child that ends early does not read on; its end says why.
                    let _ = stdin.write_all(&head).and_then(|()| stdin.write_all(onnx));
                }
            });
            let verdict = scope.spawn(|| stdout.and_then(|stdout| read_events(stdout, &stage)));
            let messages = scope.spawn(|| stderr.map(read_messages).unwrap_or_default());
            let waited = self.wait(&mut child.0, end, cancelled);
            if waited.is_err() {
                // The threads above read until the child is gone.
                let _ = child.0.kill();
            }
            let (status, ended) = waited.map_err(cannot)?;
            Ok(Outcome {
                status,
                verdict: verdict.join().ok().flatten(),
                messages: messages.join().unwrap_or_default(),
                stage: *stage.lock().unwrap_or_else(PoisonError::into_inner),
                ended,
            })
        })
    }

    fn spawn(&self) -> std::io::Result<Child> {
        Command::new(&self.program)
            .arg(COMMAND)
            // Secrets in the environment are no business of a model.
            .env_clear()
            // The allocator reserves address space for each arena, which counts.
            .env("MALLOC_ARENA_MAX", "2")
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    }

    /// Waits for the child's end, or ends it.
    fn wait(
        &self,
        child: &mut Child,
        end: Instant,
        cancelled: &AtomicBool,
    ) -> std::io::Result<(ExitStatus, Option<LoadError>)> {
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok((status, None));
            }
            let late = || {
                LoadError::Invalid(format!(
                    "its check took longer than {} s (--model-check-secs)",
                    self.settings.limit.as_secs()
                ))
            };
            let ended = self.interruption(cancelled).or_else(|| (Instant::now() >= end).then(late));
            if let Some(ended) = ended {
                child.kill()?;
                return Ok((child.wait()?, Some(ended)));
            }
            std::thread::sleep(POLL);
        }
    }

    fn judge(&self, outcome: Outcome, memory: u64) -> Result<(), LoadError> {
        let Outcome { status, stage, verdict, messages, ended } = outcome;
        let runs = matches!(stage, CheckStage::Run | CheckStage::Measure);
        match (ended, verdict) {
            (Some(LoadError::Invalid(_)), _) if runs && !self.settings.run_must_finish => {
                tracing::info!("a model was only compiled in its check: its run takes too long");
                Ok(())
            }
            (Some(LoadError::Invalid(why)), _) => {
                let doing = stage.as_text();
                let why = format!("the model is refused: {why} and was ended while it {doing}");
                Err(LoadError::Invalid(why))
            }
            (Some(other), _) => Err(other),
            (None, Some(CheckEvent::Passed { landlock })) if status.success() => {
                tracing::debug!(landlock, "model checked");
                Ok(())
            }
            (None, Some(CheckEvent::Invalid(why))) => Err(LoadError::Invalid(why)),
            (None, Some(CheckEvent::Unsupported(why))) => Err(LoadError::Unsupported(why)),
            (None, Some(CheckEvent::Failed(why))) => Err(LoadError::Unavailable(format!(
                "models cannot be checked here ({why}); --model-check off serves them unchecked"
            ))),
            (None, _) => Err(LoadError::Invalid(crash(status, stage, &messages, memory))),
        }
    }
}

/// Why the process that checked a model ended, in one line.
fn crash(status: ExitStatus, stage: CheckStage, messages: &str, memory: u64) -> String {
    let how = match status.signal() {
        Some(6) => "aborted".to_string(),
        Some(7 | 11) => "accessed memory it does not have".to_string(),
        Some(9) => "was killed, out of memory or by hand".to_string(),
        Some(24) => "used up its processor time".to_string(),
        Some(signal) => format!("ended with signal {signal}"),
        None => format!("ended with {status}"),
    };
    // The last line of a crash names its cause; other text of the child is of no use to a client.
    let cause = messages
        .lines()
        .rfind(|line| line.contains("memory allocation") || line.contains("overflowed its stack"))
        .map(|line| format!(": {}", line.trim().chars().take(200).collect::<String>()))
        .unwrap_or_default();
    format!(
        "the model is refused: the process that checked it {how} while it {}{cause}; its limit is \
         {} (--model-check-memory)",
        stage.as_text(),
        Bytes(memory)
    )
}

/// Reads the child's reports; returns the last one that is a verdict.
fn read_events(stdout: impl Read, stage: &Mutex<CheckStage>) -> Option<CheckEvent> {
    let mut verdict = None;
    // A child that the model has taken over may write anything, without end.
    for line in BufReader::new(stdout.take(MESSAGES_MAX as u64)).lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(CheckEvent::Stage(begun)) => {
                *stage.lock().unwrap_or_else(PoisonError::into_inner) = begun;
            }
            Ok(event) => verdict = Some(event),
            Err(_) => {}
        }
    }
    verdict
}

/// The end of the child's messages.
fn read_messages(mut stderr: impl Read) -> String {
    let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = stderr.read(&mut buffer) {
        kept.extend_from_slice(&buffer[..count]);
        let surplus = kept.len().saturating_sub(MESSAGES_MAX);
        kept.drain(..surplus);
    }
    String::from_utf8_lossy(&kept).into_owned()
}

/// A child that does not outlive its check.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One of the checks that may run.
struct Turn<'a>(&'a ModelChecker);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.finished.notify_one();
    }
}

#[cfg(test)]
mod tests;
