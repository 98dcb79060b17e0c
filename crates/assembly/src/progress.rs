//! Progress of long work, with an estimate, on a terminal.
//!
//! Where standard error is no terminal, bars are silent and only [`note`] writes.

use std::sync::LazyLock;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressState, ProgressStyle};

/// All bars: lines that are written meanwhile go above them.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);
/// How often a bar is drawn while nothing advances: the estimate goes on.
const TICK: Duration = Duration::from_millis(250);

/// The progress of one piece of work. Its line disappears with it.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Progress through `count` things, such as "samples".
    pub fn new(count: u64, things: &str) -> Progress {
        let bar = ProgressBar::new(count).with_prefix(things.to_string());
        let style = ProgressStyle::with_template("{msg}{wide_bar} {pos}/{len} {prefix}, {left}");
        Progress::shown(bar, style.expect("a constant template").with_key("left", write_left))
    }

    /// Work that takes a known time.
    pub fn lasting(what: &str, time: Duration) -> Progress {
        let bar = ProgressBar::new(0).with_message(what.to_string());
        let left = move |state: &ProgressState, line: &mut dyn std::fmt::Write| {
            let left = time.saturating_sub(state.elapsed()).as_secs();
            // A line that cannot be formatted is not shown.
            let _ = write!(line, "{left} s left");
        };
        let style = ProgressStyle::with_template("{spinner} {msg}, {left}");
        Progress::shown(bar, style.expect("a constant template").with_key("left", left))
    }

    /// Work whose end cannot be known.
    pub fn endless(what: &str) -> Progress {
        let bar = ProgressBar::new_spinner().with_message(what.to_string());
        let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed}");
        Progress::shown(bar, style.expect("a constant template"))
    }

    fn shown(bar: ProgressBar, style: ProgressStyle) -> Progress {
        let bar = BARS.add(bar);
        bar.set_style(style);
        if !BARS.is_hidden() {
            bar.enable_steady_tick(TICK);
        }
        Progress { bar }
    }

    /// One thing is done.
    pub fn advance(&self) {
        self.bar.inc(1);
    }

    /// `done` of `all` things are done.
    pub fn set(&self, done: usize, all: usize) {
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
    }

    /// Says what is being done.
    pub fn describe(&self, what: &str) {
        self.bar.set_message(what.to_string());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        BARS.remove(&self.bar);
    }
}

/// Nothing is known before the first thing is done.
fn write_left(state: &ProgressState, line: &mut dyn std::fmt::Write) {
    let left = state.eta().as_secs();
    let _ = match state.pos() {
        0 => write!(line, "{} s so far", state.elapsed().as_secs()),
        _ => write!(line, "{}:{:02} left", left / 60, left % 60),
    };
}

/// Writes a line to standard error, above the bars.
pub fn note(line: &str) {
    above(|| eprintln!("{line}"));
}

/// Runs what writes to standard error while no bar is on the screen.
pub fn above<T>(write: impl FnOnce() -> T) -> T {
    if BARS.is_hidden() {
        return write();
    }
    BARS.suspend(write)
}
