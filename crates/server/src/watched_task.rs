//! Tasks whose polls are turns of the workers that poll them: while a worker is in one, the other
//! connections of that worker wait.

use std::pin::pin;

use device::thread_watch;

/// `future`, whose polls are turns ([`thread_watch`]).
pub(crate) async fn watched<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        let _turn = thread_watch::turn();
        future.as_mut().poll(context)
    })
    .await
}

/// Spawns watched tasks: the streams of an HTTP/2 connection.
#[derive(Clone)]
pub(crate) struct WatchedExecutor;

impl<F> hyper::rt::Executor<F> for WatchedExecutor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        tokio::spawn(watched(future));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_worker_is_in_a_turn_while_it_polls() {
        assert!(!thread_watch::is_in_turn());
        let inside = watched(async {
            let before = thread_watch::is_in_turn();
            tokio::task::yield_now().await;
            before && thread_watch::is_in_turn()
        });
        assert!(inside.await);
        assert!(!thread_watch::is_in_turn());
    }
}
