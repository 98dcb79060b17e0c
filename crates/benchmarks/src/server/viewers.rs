//! Viewers of the server under test: they read its live stream with spans, as the console does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use assembly::Failure;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::child::ServerProcess;

/// How long a viewer may wait for its first bytes, and for further ones.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 18;
/// What the reply to a viewer begins with.
const GOOD: &[u8] = b"HTTP/1.1 200 ";

/// Viewers that read until they are stopped.
pub(super) struct Viewers {
    stop: Arc<AtomicBool>,
    bytes: Vec<Arc<AtomicU64>>,
    threads: Vec<JoinHandle<Result<(), String>>>,
}

impl Viewers {
    /// Opens so many; returns when each has got something.
    pub(super) fn open(server: &ServerProcess, count: u16) -> Result<Viewers, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        let bytes: Vec<Arc<AtomicU64>> = (0..count).map(|_| Arc::default()).collect();
        let start = |bytes: &Arc<AtomicU64>| {
            let (stop, bytes) = (stop.clone(), bytes.clone());
            let (address, transport) = (server.http, server.transport.clone());
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                let runtime = runtime.map_err(|error| error.to_string())?;
                runtime.block_on(async {
                    let mut stream = transport.connect(address, b"http/1.1").await?;
                    let head = format!(
                        "GET /v2/atoll/live?spans=true HTTP/1.1\r\nHost: {address}\r\n{}\r\n",
                        transport.header()
                    );
                    let failed = |error: std::io::Error| error.to_string();
                    stream.write_all(head.as_bytes()).await.map_err(failed)?;
                    let mut buffer = vec![0; READ_BYTES];
                    let mut begin = Vec::new();
                    while !stop.load(Relaxed) {
                        let read = timeout(PATIENCE, stream.read(&mut buffer)).await;
                        let count = read.map_err(|_| "no frame came".to_string())?;
                        let count = count.map_err(failed)?;
                        if count == 0 {
                            return Err("the stream ended".to_string());
                        }
                        if begin.len() < GOOD.len() {
                            begin.extend_from_slice(&buffer[..count.min(GOOD.len())]);
                            if !GOOD.starts_with(&begin[..begin.len().min(GOOD.len())]) {
                                let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
                                return Err(text);
                            }
                        }
                        bytes.fetch_add(count as u64, Relaxed);
                    }
                    Ok(())
                })
            })
        };
        let threads = bytes.iter().map(start).collect();
        let viewers = Viewers { stop, bytes, threads };
        let until = Instant::now() + PATIENCE;
        while viewers.bytes.iter().any(|bytes| bytes.load(Relaxed) == 0) {
            if Instant::now() > until || viewers.threads.iter().any(JoinHandle::is_finished) {
                viewers.close()?;
                return Err(Failure::failed("a viewer got nothing"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(viewers)
    }

    /// Bytes that came so far, of the viewer that got least.
    pub(super) fn least_bytes(&self) -> u64 {
        self.bytes.iter().map(|bytes| bytes.load(Relaxed)).min().unwrap_or(0)
    }

    /// Ends them, or says why one ended before.
    pub(super) fn close(self) -> Result<(), Failure> {
        self.stop.store(true, Relaxed);
        for thread in self.threads {
            let ended = thread.join().map_err(|_| Failure::failed("a viewer panicked"))?;
            ended.map_err(|why| Failure::failed(format!("a viewer: {why}")))?;
        }
        Ok(())
    }
}
