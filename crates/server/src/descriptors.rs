//! File descriptors: how many the process may open, and how many it has open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors kept for files, devices and the admin port.
const RESERVED: u64 = 256;
/// A soft limit beyond this is not asked for: some libraries visit every possible descriptor.
const ENOUGH: u64 = 1 << 20;

/// Raises the soft limit to the hard one and returns it.
pub(crate) fn raise() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum.unwrap_or(ENOUGH);
    let soft = limit.current.unwrap_or(u64::MAX);
    let wanted = hard.min(ENOUGH);
    if soft >= wanted {
        return soft;
    }
    let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => wanted,
        Err(error) => {
            tracing::warn!(%error, soft, hard, "the limit on open files cannot be raised");
            soft
        }
    }
}

/// How many connections each of `listeners` may have under a limit on descriptors.
pub(crate) fn share(limit: u64, listeners: u64) -> usize {
    let left = limit.saturating_sub(RESERVED).max(limit / 4);
    usize::try_from(left / listeners.max(1)).unwrap_or(usize::MAX).max(1)
}

/// The number of open descriptors, where the system tells.
pub(crate) fn open() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count())
}

/// The soft limit.
pub(crate) fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_share_what_is_not_reserved() {
        assert_eq!(share(1024, 2), 384);
        assert_eq!(share(64, 2), 8);
        assert_eq!(share(0, 2), 1);
        assert_eq!(share(1 << 20, 1), (1 << 20) - 256);
    }

    #[test]
    fn the_soft_limit_is_raised() {
        assert_eq!(raise(), limit());
        assert!(open().is_some_and(|open| open > 2));
    }
}
