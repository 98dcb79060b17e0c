//! What the compiler said of kernels, kept in a file: compiling all of them takes minutes.
//!
//! `kernels/compiled.txt` has a line for each kernel that the tests compile, by a digest of all
//! that determines the result, the compiler's version included. A kernel with a line is not
//! compiled again, but for one of sixteen, whose line must agree; `ATOLL_ALL_KERNELS=1` compiles
//! all. `ATOLL_BLESS=1` records what was compiled.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use compiler::gpu::GpuCompiler;
use cuda::{EntryFacts, KernelReport};
use device::KernelCompiler;
use model::gpu::{Kernel, KernelFacts};

/// Kernels of one test, which has lines of its own in the file.
pub(crate) struct Compiled {
    test: &'static str,
    known: BTreeMap<String, Vec<EntryFacts>>,
    seen: Mutex<BTreeMap<String, Vec<EntryFacts>>>,
}

/// Held while the file is written.
static WRITING: Mutex<()> = Mutex::new(());

/// Characters of a digest that the file keeps.
const DIGEST_LENGTH: usize = 24;

impl Compiled {
    pub(crate) fn open(test: &'static str) -> Compiled {
        let all = std::env::var_os("ATOLL_ALL_KERNELS").is_some();
        let text = if all { String::new() } else { read() };
        let own = text.lines().filter_map(|line| line.strip_prefix(test)?.strip_prefix(' '));
        let known = own.filter_map(parse).collect();
        Compiled { test, known, seen: Mutex::default() }
    }

    /// The compiler's word on each of `kernels`, two at a time: the cores of a small machine.
    pub(crate) fn facts(
        &self,
        report: &KernelReport,
        kernels: &[&Kernel],
    ) -> Vec<Result<Vec<EntryFacts>, String>> {
        let (queue, done) = (Mutex::new(kernels.iter().enumerate()), Mutex::new(BTreeMap::new()));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    loop {
                        let Some((index, kernel)) = queue.lock().unwrap().next() else { break };
                        let facts = self.one(report, kernel);
                        done.lock().unwrap().insert(index, facts);
                    }
                });
            }
        });
        done.into_inner().unwrap().into_values().collect()
    }

    fn one(&self, report: &KernelReport, kernel: &Kernel) -> Result<Vec<EntryFacts>, String> {
        let digest = report.digest(kernel)[..DIGEST_LENGTH].to_string();
        let known = self.known.get(&digest);
        let facts = match known {
            Some(known) if !digest.starts_with('0') => known.clone(),
            _ => report.facts(kernel)?,
        };
        if let Some(known) = known {
            assert_eq!(*known, facts, "{}: the line of {digest} is wrong", kernel.expression);
        }
        self.seen.lock().unwrap().insert(digest, facts.clone());
        Ok(facts)
    }

    /// Replaces the test's lines when `ATOLL_BLESS` is set; else says how many are missing.
    pub(crate) fn record(self) {
        let seen = self.seen.into_inner().unwrap();
        let missing = seen.keys().filter(|digest| !self.known.contains_key(*digest)).count();
        if std::env::var_os("ATOLL_BLESS").is_none() {
            return println!("{missing} of {} kernels are new; ATOLL_BLESS=1", seen.len());
        }
        let _writing = WRITING.lock().unwrap();
        let text = read();
        let others = text.lines().filter(|line| line.split(' ').next() != Some(self.test));
        let mut lines: Vec<String> = others.map(str::to_string).collect();
        lines.extend(seen.iter().map(|(digest, facts)| line(self.test, digest, facts)));
        lines.sort();
        std::fs::write(path(), lines.join("\n") + "\n").unwrap();
    }
}

/// The compiler for GPUs of `capability`. `ATOLL_REQUIRE_NVRTC=1` makes a missing one a failure.
pub(crate) fn compiler_for(capability: u32) -> Option<KernelReport> {
    match KernelReport::new(None, capability, GpuCompiler::default().headers()) {
        Ok(report) => Some(report),
        Err(err) if std::env::var_os("ATOLL_REQUIRE_NVRTC").is_none() => {
            println!("kernels were not compiled: {err}");
            None
        }
        Err(err) => panic!("{err}"),
    }
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/compiled.txt")
}

fn read() -> String {
    std::fs::read_to_string(path()).unwrap_or_default()
}

fn line(test: &str, digest: &str, facts: &[EntryFacts]) -> String {
    let mut line = format!("{test} {digest}");
    for EntryFacts { entry, registers, spilled_bytes } in facts {
        let _ = write!(line, " {entry}:{registers}:{spilled_bytes}");
    }
    line
}

fn parse(line: &str) -> Option<(String, Vec<EntryFacts>)> {
    let mut words = line.split(' ');
    let digest = words.next()?.to_string();
    let facts = words.map(|word| {
        let mut parts = word.split(':');
        Some(EntryFacts {
            entry: parts.next()?.to_string(),
            registers: parts.next()?.parse().ok()?,
            spilled_bytes: parts.next()?.parse().ok()?,
        })
    });
    Some((digest, facts.collect::<Option<_>>()?))
}

/// A digest follows what the compiler reads, and nothing else.
#[test]
fn digests_follow_the_text() {
    let Some(report) = compiler_for(90) else { return };
    let kernel = |source: &str| {
        Kernel::new(KernelFacts {
            source: source.to_string(),
            expression: "X".to_string(),
            threads: 32,
            shared_bytes: 0,
            args_bytes: 8,
        })
    };
    let digest = |source: &str| report.digest(&kernel(source));
    let before = digest("#include \"norm.cuh\"\nint a;");
    assert_eq!(before, digest("#include \"norm.cuh\"\n  int a;  // first\n"));
    assert_ne!(before, digest("#include \"norm.cuh\"\nint b;"));
    assert_ne!(before, digest("#include \"pool.cuh\"\nint a;"));
    let other = compiler_for(80).unwrap();
    assert_ne!(before, other.digest(&kernel("#include \"norm.cuh\"\nint a;")));
    let mut headers = GpuCompiler::default().headers().to_vec();
    for header in headers.iter_mut().filter(|header| header.0 == "norm.cuh") {
        header.1 = "int changed;";
    }
    let changed = KernelReport::new(None, 90, &headers).unwrap();
    assert_ne!(before, changed.digest(&kernel("#include \"norm.cuh\"\nint a;")));
    assert_eq!(digest("int a;"), changed.digest(&kernel("int a;")));
}
