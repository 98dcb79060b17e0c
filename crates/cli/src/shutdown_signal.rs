//! Waits for the signal that ends a server.

use std::io::{BufRead, Read};

use assembly::Failure;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// A longer line of standard input is read in parts.
const MAX_LINE_BYTES: u64 = 4096;

/// SIGTERM and Ctrl-C and, if requested, the end of standard input.
pub(crate) struct ShutdownSignal {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    input: Option<oneshot::Receiver<()>>,
}

impl ShutdownSignal {
    /// Installs the signal handlers.
    pub(crate) fn new() -> Result<ShutdownSignal, Failure> {
        let take = |kind| signal(kind).map_err(Failure::failed);
        Ok(ShutdownSignal {
            terminate: take(SignalKind::terminate())?,
            interrupt: take(SignalKind::interrupt())?,
            input: None,
        })
    }

    /// The same, and the end of standard input, whose lines go to `read`.
    pub(crate) fn with_input(
        read: impl Fn(&str) + Send + 'static,
    ) -> Result<ShutdownSignal, Failure> {
        let (sender, ended) = oneshot::channel::<()>();
        let read_to_the_end = move || {
            // An error ends the input, too. The sender is dropped with the thread.
            let mut input = std::io::stdin().lock();
            let mut line = Vec::new();
            let mut next = |line: &mut Vec<u8>| {
                line.clear();
                input.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', line)
            };
            while next(&mut line).is_ok_and(|bytes| bytes > 0) {
                read(String::from_utf8_lossy(&line).trim());
            }
            drop(sender);
        };
        let thread = std::thread::Builder::new().name("input".to_string());
        thread.spawn(read_to_the_end).map_err(Failure::failed)?;
        Ok(ShutdownSignal { input: Some(ended), ..ShutdownSignal::new()? })
    }

    /// Runs `work` unless a signal comes first; `None` when one does.
    pub(crate) async fn unless_stopped<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.wait() => {
                tracing::info!("stopping before the start is complete");
                None
            }
            done = work => Some(done),
        }
    }

    /// Returns after the first of them.
    pub(crate) async fn wait(&mut self) {
        let input = async {
            match self.input.as_mut() {
                // The thread drops its sender, which is the signal.
                Some(ended) => drop(ended.await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            () = input => {}
        }
    }
}
