//! Ctrl-C, SIGTERM and a closed terminal during `atoll apply`: the change under way is finished and
//! noted, and no further one begins.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use assembly::Failure;
use tokio::signal::unix::{SignalKind, signal};

/// Exit code after Ctrl-C, as in shells.
const INTERRUPTED: u8 = 130;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Whether this call was asked to end.
#[derive(Clone, Debug, Default)]
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes the signals from now on. A second one ends this process at once; the change under way
    /// may then be missing in the list.
    pub(super) fn install() -> Result<Interrupt, Failure> {
        let interrupt = Interrupt::default();
        let flag = Arc::clone(&interrupt.0);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(Failure::failed)?;
        // Handlers belong to the runtime that is entered.
        let entered = runtime.enter();
        let take = |kind| signal(kind).map_err(Failure::failed);
        let mut interrupt_signal = take(SignalKind::interrupt())?;
        let mut terminate = take(SignalKind::terminate())?;
        let mut hang_up = take(SignalKind::hangup())?;
        drop(entered);
        let wait = move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = interrupt_signal.recv() => {}
                        _ = terminate.recv() => {}
                        _ = hang_up.recv() => {}
                    }
                    if flag.swap(true, Ordering::SeqCst) {
                        std::process::exit(i32::from(INTERRUPTED));
                    }
                    eprintln!("ending after the change under way; once more ends at once");
                }
            });
        };
        std::thread::Builder::new().name("signals".into()).spawn(wait).map_err(Failure::failed)?;
        Ok(interrupt)
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// An error if this call was asked to end.
    pub(super) fn check(&self) -> Result<(), Failure> {
        match self.is_set() {
            true => Err(interrupted("interrupted")),
            false => Ok(()),
        }
    }

    /// Waits, unless this call is asked to end.
    pub(super) fn sleep(&self, time: Duration) -> Result<(), Failure> {
        let until = Instant::now() + time;
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
    }
}

/// The failure of a call that was asked to end.
pub(super) fn interrupted(message: impl ToString) -> Failure {
    Failure::with_code(message, INTERRUPTED)
}
