//! The memory that this process may use, as the system tells it.

use std::fs;
use std::path::{Path, PathBuf};

/// Share of the available memory that the budget takes, in percent. The rest is for what nobody
/// counts: code, stacks, connections and the allocator's own.
const PERCENT: usize = 80;

/// The smallest budget that is detected.
const MIN_BYTES: usize = 64 << 20;

/// The default limit of the budget: 80 % of what the cgroup (version 2 or 1), the limit of the
/// address space and the machine leave; `None` where none of them can be read.
pub fn detect() -> Option<usize> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let root = Path::new("/sys/fs/cgroup");
    let limits = [
        cgroup_limit(&groups, root),
        fs::read_to_string("/proc/self/limits").ok().and_then(|text| address_space(&text)),
        fs::read_to_string("/proc/meminfo").ok().and_then(|text| machine(&text)),
    ];
    let least = limits.into_iter().flatten().min()?;
    Some((least / 100).saturating_mul(PERCENT).max(MIN_BYTES))
}

/// The lowest limit of the process's cgroup and of those above it.
fn cgroup_limit(groups: &str, root: &Path) -> Option<usize> {
    let mut lowest: Option<usize> = None;
    let mut note = |limit: Option<usize>| {
        lowest = [lowest, limit].into_iter().flatten().min();
    };
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (base, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            list if list.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // In a container the path is that of the host while the container's own group is mounted
        // as the root: missing folders are skipped, and the root is read too.
        let mut folder: PathBuf = base.join(path.trim_start_matches('/'));
        loop {
            note(fs::read_to_string(folder.join(file)).ok().and_then(|text| bytes(&text)));
            if folder == base || !folder.pop() || !folder.starts_with(&base) {
                break;
            }
        }
    }
    lowest
}

/// A number of bytes; `None` for `max` and for the huge numbers that mean no limit in version 1.
fn bytes(text: &str) -> Option<usize> {
    text.trim().parse::<usize>().ok().filter(|&bytes| bytes < usize::MAX / 4)
}

/// The limit of the address space (`ulimit -v`).
fn address_space(limits: &str) -> Option<usize> {
    let line = limits.lines().find(|line| line.starts_with("Max address space"))?;
    line["Max address space".len()..].split_whitespace().next().and_then(bytes)
}

/// The machine's memory.
fn machine(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find(|line| line.starts_with("MemTotal:"))?;
    line.split_whitespace().nth(1)?.parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn the_lowest_limit_of_a_cgroup_counts() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        write(at("a/memory.max"), "3000000\n");
        write(at("a/b/memory.max"), "max\n");
        write(at("a/b/c/memory.max"), "5000000\n");
        assert_eq!(cgroup_limit("0::/a/b/c\n", root.path()), Some(3_000_000));
        assert_eq!(cgroup_limit("0::/a/b/missing/x\n", root.path()), Some(3_000_000));
        assert_eq!(cgroup_limit("0::/\n", root.path()), None);
        write(at("memory.max"), "2000000\n");
        assert_eq!(cgroup_limit("0::/of/the/host\n", root.path()), Some(2_000_000));
    }

    #[test]
    fn version_one_has_a_folder_per_controller() {
        let root = tempfile::tempdir().unwrap();
        let groups = "5:cpu,cpuacct:/x\n4:memory:/pod/x\n0::/x\n";
        assert_eq!(cgroup_limit(groups, root.path()), None);
        write(root.path().join("memory/memory.limit_in_bytes"), "9223372036854771712\n");
        assert_eq!(cgroup_limit(groups, root.path()), None);
        write(root.path().join("memory/pod/memory.limit_in_bytes"), "4096000\n");
        assert_eq!(cgroup_limit(groups, root.path()), Some(4_096_000));
    }

    #[test]
    fn reads_the_texts_of_the_kernel() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max address space         2147483648           unlimited            bytes\n";
        assert_eq!(address_space(limits), Some(2 << 30));
        assert_eq!(address_space("Max address space  unlimited  unlimited  bytes"), None);
        assert_eq!(machine("MemTotal:       1000 kB\nMemFree: 5 kB\n"), Some(1_024_000));
        assert_eq!(machine(""), None);
    }
}
