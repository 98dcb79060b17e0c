//! Memory that this machine, or the control group this process is in, can still give.

use std::path::Path;

/// Bytes that can be used without taking them from others; `None` when that is unknown.
pub(crate) fn memory_available() -> Option<u64> {
    let group = control_group(Path::new("/sys/fs/cgroup"));
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| machine(&text));
    match (machine, group) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Share of the memory that can be used, and bytes, that freed blocks may keep for others at most.
const KEPT_SHARE: u64 = 16;
const MAX_KEPT_BYTES: u64 = 1 << 30;

/// Bytes of freed memory that this process may keep for later use.
pub(crate) fn kept_memory() -> usize {
    let kept = memory_available().map_or(0, |free| free / KEPT_SHARE).min(MAX_KEPT_BYTES);
    usize::try_from(kept).unwrap_or(0)
}

fn machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What is left of the limit of a control group of either version.
fn control_group(root: &Path) -> Option<u64> {
    let number = |name: &str| {
        let text = std::fs::read_to_string(root.join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let (limit, used) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?),
        None => (number("memory/memory.limit_in_bytes")?, number("memory/memory.usage_in_bytes")?),
    };
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_both_versions_are_read() {
        assert_eq!(machine("MemTotal: 9 kB\nMemAvailable:      5 kB\n"), Some(5120));
        assert_eq!(machine("MemTotal: 9 kB\n"), None);
        let root = tempfile::tempdir().unwrap();
        assert_eq!(control_group(root.path()), None);
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("memory/memory.limit_in_bytes", "100\n");
        write("memory/memory.usage_in_bytes", "40\n");
        assert_eq!(control_group(root.path()), Some(60));
        write("memory.max", "max\n");
        assert_eq!(control_group(root.path()), Some(60));
        write("memory.max", "50\n");
        write("memory.current", "60\n");
        assert_eq!(control_group(root.path()), Some(0));
    }
}
