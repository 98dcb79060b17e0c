//! How much of its rate and concurrency a credential or a model uses.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use model::config::Rate;

use super::{Reason, Refusal};

/// The use of one credential or model; it survives a reload of the file that defines a credential.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    in_flight: AtomicU32,
    /// Requests that may still come now, and when that was computed.
    left: Mutex<Option<(f64, Instant)>>,
}

impl Usage {
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(SeqCst)
    }

    /// Takes one request off the rate of `owner`.
    pub(crate) fn take(&self, rate: Option<Rate>, owner: &str) -> Result<(), Refusal> {
        let Some(rate) = rate else { return Ok(()) };
        let (now, full) = (Instant::now(), f64::from(rate.count));
        let per_second = full / rate.period.as_secs_f64();
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, at) = left.unwrap_or((full, now));
        let available = (before + (now - at).as_secs_f64() * per_second).min(full);
        if available < 1.0 {
            *left = Some((available, now));
            let seconds = ((1.0 - available) / per_second).ceil().clamp(1.0, 3600.0);
            let message = format!("{owner}: the rate of {rate} is used up");
            return Err(Refusal::new(Reason::Rate, message).retry_after(seconds as u32));
        }
        *left = Some((available - 1.0, now));
        Ok(())
    }
}

/// One request in flight of a credential or model.
#[derive(Debug)]
pub(crate) struct Slot(Option<Arc<Usage>>);

impl Slot {
    /// A request that no limit counts.
    pub(crate) fn unlimited() -> Slot {
        Slot(None)
    }

    pub(crate) fn take(
        usage: Arc<Usage>,
        limit: Option<u32>,
        owner: &str,
    ) -> Result<Slot, Refusal> {
        let before = usage.in_flight.fetch_add(1, SeqCst);
        let slot = Slot(Some(usage));
        match limit {
            Some(limit) if before >= limit => {
                let message = format!("{owner}: {limit} requests are in flight, its limit");
                Err(Refusal::new(Reason::Concurrency, message).retry_after(1))
            }
            _ => Ok(slot),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(usage) = &self.0 {
            usage.in_flight.fetch_sub(1, SeqCst);
        }
    }
}
