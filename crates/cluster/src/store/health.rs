//! What a process saw of its store: changes are logged once, and exported as metrics.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::{Store, StoreError, StoreHealth};

/// Follows the results of calls to one store.
#[derive(Debug, Default)]
pub struct HealthRecord {
    unreachable: AtomicBool,
    full: AtomicBool,
}

impl HealthRecord {
    /// Records the result of a call; `writes` where it needed space.
    pub fn record<T>(&self, result: &Result<T, StoreError>, writes: bool) {
        match result {
            Err(StoreError::Unreachable(reason)) => {
                if !self.unreachable.swap(true, Relaxed) {
                    tracing::warn!(reason, "store unreachable; continuing with the last state");
                }
                return;
            }
            Err(StoreError::Full(reason)) if !self.full.swap(true, Relaxed) => {
                tracing::error!(reason, "store full; continuing with the last state");
            }
            Ok(_) if writes && self.full.swap(false, Relaxed) => {
                tracing::info!("store has space again");
            }
            _ => {}
        }
        if self.unreachable.swap(false, Relaxed) {
            tracing::info!("store reachable again");
        }
    }

    /// The present state.
    pub fn get(&self) -> StoreHealth {
        StoreHealth { unreachable: self.unreachable.load(Relaxed), full: self.full.load(Relaxed) }
    }
}

/// Writes the store's state and the calls to it for Prometheus.
pub fn write_metrics(text: &mut String, store: &dyn Store) {
    let StoreHealth { unreachable, full } = store.health();
    let values = [
        ("store_reachable", "Whether the store answered the last call", !unreachable),
        ("store_full", "Whether the store refused the last write for lack of space", full),
    ];
    for (name, help, value) in values {
        let name = format!("atoll_cluster_{name}");
        let value = u8::from(value);
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
    }
    if let Some(calls) = store.calls() {
        calls.write_metrics(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_ends_unreachable_and_a_write_ends_full() {
        let health = HealthRecord::default();
        let down: Result<(), StoreError> = Err(StoreError::Unreachable("x".to_string()));
        let full: Result<(), StoreError> = Err(StoreError::Full("x".to_string()));
        let state = |unreachable, full| StoreHealth { unreachable, full };
        health.record(&down, true);
        assert_eq!(health.get(), state(true, false));
        health.record(&full, true);
        assert_eq!(health.get(), state(false, true));
        health.record(&Ok(()), false);
        assert_eq!(health.get(), state(false, true), "a read needs no space");
        health.record(&Ok(()), true);
        assert_eq!(health.get(), state(false, false));
    }
}
