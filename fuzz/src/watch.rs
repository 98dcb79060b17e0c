//! Ends a process whose present input takes too long.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The status with which a process ends that the watch has ended.
pub const HANG_STATUS: i32 = 77;

/// How often the watch looks.
const INTERVAL: Duration = Duration::from_millis(100);

/// An input that waits for this long without computing waits for ever.
const BLOCKED: Duration = Duration::from_secs(60);

/// No input is running.
const IDLE: u64 = u64::MAX;

static PRESENT: AtomicU64 = AtomicU64::new(IDLE);

/// The input `number` begins.
pub fn begin(number: u64) {
    PRESENT.store(number, Relaxed);
}

/// No input is running.
pub fn end() {
    PRESENT.store(IDLE, Relaxed);
}

/// Processor time of all threads. Time on a clock would grow with the load of the machine.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in brackets may hold anything; the fields after it are numbers.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(10 * ticks)
}

/// Watches this process from now on: an input may take `limit` of processor time.
pub fn start(limit: Duration) {
    std::thread::spawn(move || {
        let mut since = (IDLE, Duration::ZERO, Instant::now());
        loop {
            std::thread::sleep(INTERVAL);
            let present = PRESENT.load(Relaxed);
            if present != since.0 {
                since = (present, processor_time(), Instant::now());
                continue;
            }
            let computed = processor_time().saturating_sub(since.1);
            if present != IDLE && (computed > limit || since.2.elapsed() > BLOCKED) {
                eprintln!("input {present} hangs: {computed:?} of processor time");
                std::process::exit(HANG_STATUS);
            }
        }
    });
}
