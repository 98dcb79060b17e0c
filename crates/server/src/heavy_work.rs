//! Work that takes long, off the serving threads: that of many bytes (decompressing, decoding,
//! encoding) on the threads of [`heavy_threads`], loads on threads of their own.

use api::ApiError;
use api::error::ApiResult;
use device::{heavy_threads, thread_priority};
use tokio::sync::oneshot;

/// From here on work is heavy.
pub(crate) const LARGE_BYTES: usize = 1 << 20;

/// Runs `work` that processes `bytes`; off the serving threads if these are many. What waits holds
/// memory of the budget, so that it is not without limit. Work whose client is gone is left out.
pub(crate) async fn heavy<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    if bytes < LARGE_BYTES || !heavy_threads::exist() {
        return work();
    }
    let (sender, receiver) = oneshot::channel();
    let work = move || {
        if !sender.is_closed() {
            // The client may have disconnected meanwhile.
            let _ = sender.send(work());
        }
    };
    heavy_threads::run(Box::new(work));
    receiver.await.unwrap_or_else(|_| Err(ApiError::internal("the server failed on this request")))
}

/// Runs `work` that takes long whatever the size of its input, such as a load, on a thread of its
/// own with the lowest priority. `None` if it panics, or if no thread can be started.
pub(crate) async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = oneshot::channel();
    let low = move || {
        thread_priority::lower(thread_priority::LOWEST);
        // The one who asked may be gone.
        let _ = sender.send(work());
    };
    match std::thread::Builder::new().name("background".to_string()).spawn(low) {
        Ok(_) => receiver.await.ok(),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;

    fn thread_name() -> ApiResult<String> {
        Ok(std::thread::current().name().unwrap_or_default().to_string())
    }

    #[tokio::test]
    async fn only_heavy_work_leaves_the_serving_thread() {
        let here = thread_name().unwrap();
        assert_eq!(heavy(LARGE_BYTES - 1, thread_name).await.unwrap(), here);
        assert!(heavy(LARGE_BYTES, thread_name).await.unwrap().starts_with("heavy-"));
    }

    #[tokio::test]
    async fn work_in_the_background_has_a_lower_priority() {
        let own = || rustix::process::getpriority_process(None).unwrap();
        assert_eq!(in_background(own).await, Some(19));
        assert_eq!(in_background(|| -> u32 { panic!("on purpose") }).await, None);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_its_request_only() {
        for _ in 0..100 {
            let failed = heavy(LARGE_BYTES, || -> ApiResult<()> { panic!("on purpose") }).await;
            assert!(failed.is_err());
        }
        assert_eq!(heavy(LARGE_BYTES, || Ok(7)).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn work_of_clients_that_are_gone_is_left_out() {
        let done = Arc::new(AtomicUsize::new(0));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // All threads are busy, so that what follows waits.
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let busy: Vec<_> = (0..cores)
            .map(|_| {
                let wait = wait.clone();
                tokio::spawn(heavy(LARGE_BYTES, move || {
                    let _ = wait.lock().map(|wait| wait.recv());
                    Ok(())
                }))
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(50)).await;
        for _ in 0..10 {
            let done = done.clone();
            let work = heavy(LARGE_BYTES, move || Ok(done.fetch_add(1, Ordering::SeqCst)));
            // Starts to wait, and disconnects.
            assert!(tokio::time::timeout(Duration::from_millis(5), work).await.is_err());
        }
        drop(go);
        for one in busy {
            one.await.unwrap().unwrap();
        }
        assert_eq!(heavy(LARGE_BYTES, || Ok(1)).await.unwrap(), 1);
        assert_eq!(done.load(Ordering::SeqCst), 0);
    }
}
