//! Takes rights away from this process before it reads a model that nobody vouches for.
//!
//! Limits of memory, time and files; no access to the file system (Landlock, where the kernel has
//! it); and a filter that allows only the system calls that computing needs. Network, files, other
//! processes and programs are out of reach from then on.

use std::collections::BTreeMap;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus,
    Scope,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Limits of a process that checks a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxLimits {
    /// Address space in bytes.
    pub memory: u64,
    /// Processor time in seconds.
    pub cpu_seconds: u64,
}

/// Descriptors: the standard ones and some for the runtime.
const OPEN_FILES: u64 = 16;

/// System calls that computing needs, whatever their arguments.
const ALLOWED: [i64; 35] = [
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_get_robust_list,
    libc::SYS_getpid,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_setpriority,
    libc::SYS_sigaltstack,
    libc::SYS_write,
    libc::SYS_writev,
];

/// By how much the nice value is raised, as for best-effort work.
const NICE_INCREMENT: i32 = 5;

/// Takes rights away for good. To be called by the only thread of a process.
///
/// # Errors
/// When a limit or the filter is refused: the process must end then.
pub fn enter(limits: SandboxLimits) -> Result<SandboxStatus, String> {
    let limit = |resource: Resource, value: u64| {
        let limit = Rlimit { current: Some(value), maximum: Some(value) };
        setrlimit(resource, limit).map_err(|err| format!("{resource:?} limit: {err}"))
    };
    // A model that is only tried does not take the processor from those in service. Where that is
    // forbidden, the limits below hold all the same.
    let _ = rustix::process::nice(NICE_INCREMENT);
    limit(Resource::Core, 0)?;
    limit(Resource::Fsize, 0)?;
    limit(Resource::Nofile, OPEN_FILES)?;
    limit(Resource::Cpu, limits.cpu_seconds)?;
    limit(Resource::As, limits.memory)?;
    let landlock = restrict_files().map_err(|err| format!("Landlock: {err}"))?;
    let filter = filter().map_err(|err| format!("seccomp filter: {err}"))?;
    seccompiler::apply_filter(&filter).map_err(|err| format!("seccomp: {err}"))?;
    Ok(SandboxStatus { landlock })
}

/// What protects the process beside limits and filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxStatus {
    /// Whether Landlock is in force.
    pub landlock: bool,
}

/// Takes all access to files, TCP ports and other processes' sockets away, as far as the kernel
/// can. The filter does so, too; this is the second wall.
fn restrict_files() -> Result<bool, landlock::RulesetError> {
    let abi = ABI::V6;
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?;
    Ok(ruleset.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

fn rule(index: u8, op: SeccompCmpOp, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let condition = SeccompCondition::new(index, SeccompCmpArgLen::Qword, op, value)?;
    SeccompRule::new(vec![condition])
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let threads = libc::CLONE_THREAD as u64;
    // New threads, but no processes. The other call for both takes its arguments in memory, where a
    // filter cannot read them; the C library falls back to this one.
    rules.insert(libc::SYS_clone, vec![rule(0, SeccompCmpOp::MaskedEq(threads), threads)?]);
    let execute = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule(2, execute.clone(), 0)?]);
    }
    // An abort sends a signal to its own process.
    let own = u64::from(std::process::id());
    for call in [libc::SYS_tgkill, libc::SYS_kill] {
        rules.insert(call, vec![rule(0, SeccompCmpOp::Eq, own)?]);
    }
    // Reads limits, does not set them.
    rules.insert(libc::SYS_prlimit64, vec![rule(2, SeccompCmpOp::Eq, 0)?]);
    // Names a thread.
    let name = vec![rule(0, SeccompCmpOp::Eq, libc::PR_SET_NAME as u64)?];
    rules.insert(libc::SYS_prctl, name);
    // Libraries take a missing call as the sign to do without, where a refusal may end them.
    let refuse = SeccompAction::Errno(libc::ENOSYS as u32);
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, refuse, SeccompAction::Allow, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_compiles_on_this_machine() {
        let program = filter().unwrap();
        assert!(!program.is_empty());
        for forbidden in
            [libc::SYS_socket, libc::SYS_openat, libc::SYS_execve, libc::SYS_ptrace, libc::SYS_bpf]
        {
            assert!(!ALLOWED.contains(&forbidden));
        }
    }

    /// Set in the process that gives up its rights.
    const INSIDE: &str = "ATOLL_TEST_INSIDE_SANDBOX";

    #[test]
    fn inside_only_computing_is_left() {
        if std::env::var_os(INSIDE).is_none() {
            let name = "sandbox::tests::inside_only_computing_is_left";
            let inside = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture", "--test-threads=1"])
                .env(INSIDE, "1")
                .output()
                .unwrap();
            assert!(inside.status.success(), "{inside:?}");
            assert!(String::from_utf8_lossy(&inside.stdout).contains("1 passed"), "{inside:?}");
            return;
        }
        enter(SandboxLimits { memory: 2 << 30, cpu_seconds: 60 }).unwrap();
        assert!(std::fs::read("/etc/passwd").is_err());
        assert!(std::fs::write("/tmp/atoll-sandbox-test", b"x").is_err());
        assert!(std::net::TcpListener::bind("127.0.0.1:0").is_err());
        assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_err());
        assert!(std::os::unix::net::UnixStream::pair().is_err());
        assert!(std::process::Command::new("/bin/true").spawn().is_err());
        assert!(setrlimit(Resource::As, Rlimit { current: None, maximum: None }).is_err());
        // Threads and memory within the limit work; more memory is an error.
        assert_eq!(std::thread::spawn(|| 1 + 1).join().unwrap(), 2);
        assert!(Vec::<u8>::new().try_reserve_exact(64 << 20).is_ok());
        assert!(Vec::<u8>::new().try_reserve_exact(4 << 30).is_err());
    }
}
