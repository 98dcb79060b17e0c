//! Waits for the signal that ends a server.

use assembly::Failure;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// SIGTERM and Ctrl-C, and the end of standard input for those who want it.
pub(crate) struct ShutdownSignal {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    input: Option<oneshot::Receiver<()>>,
}

impl ShutdownSignal {
    /// Takes the signals over.
    pub(crate) fn new() -> Result<ShutdownSignal, Failure> {
        let take = |kind| signal(kind).map_err(Failure::failed);
        Ok(ShutdownSignal {
            terminate: take(SignalKind::terminate())?,
            interrupt: take(SignalKind::interrupt())?,
            input: None,
        })
    }

    /// The same, or when standard input ends.
    pub(crate) fn with_input() -> Result<ShutdownSignal, Failure> {
        let (sender, ended) = oneshot::channel::<()>();
        let read_to_the_end = move || {
            // An error is an end as well, and the sender goes with the thread.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            drop(sender);
        };
        let thread = std::thread::Builder::new().name("input".to_string());
        thread.spawn(read_to_the_end).map_err(Failure::failed)?;
        Ok(ShutdownSignal { input: Some(ended), ..ShutdownSignal::new()? })
    }

    /// Returns when one of them came.
    pub(crate) async fn wait(mut self) {
        let input = async {
            match self.input.take() {
                // Fires with an error when the thread drops its end, which is the message.
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
