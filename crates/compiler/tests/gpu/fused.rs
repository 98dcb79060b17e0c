//! Kernels of two operators each compile, even if both define the same names, and need about the
//! registers of the larger one.

use compiler::gpu::GpuCompiler;
use cuda::{EntryFacts, KernelReport};
use device::KernelCompiler;
use model::gpu::{GpuPlan, Kernel};

use crate::{kernels, lower_for, models};

/// The kernels that several plans use at batch 1.
fn plans() -> Vec<GpuPlan> {
    let plans = [kernels::layers(), models::dense(), models::odd(), models::encoder()];
    plans.iter().map(|plan| lower_for(plan, 1, 90)).collect()
}

/// The first kernel that `wanted` accepts, after skipping `skip` of them.
fn kernel(plans: &[GpuPlan], skip: usize, wanted: impl Fn(&Kernel) -> bool) -> Kernel {
    let mut all: Vec<&Kernel> =
        plans.iter().flat_map(|plan| &plan.kernels).filter(|k| wanted(k)).collect();
    all.dedup();
    all[skip].clone()
}

#[test]
fn fused_pairs_compile() {
    let report = match KernelReport::new(None, 90, GpuCompiler::default().headers()) {
        Ok(report) => report,
        Err(err) if std::env::var_os("ATOLL_REQUIRE_NVRTC").is_none() => {
            return println!("kernels were not compiled: {err}");
        }
        Err(err) => panic!("{err}"),
    };
    let plans = plans();
    let named = |word: &'static str| move |kernel: &Kernel| kernel.expression.contains(word);
    let narrow = kernel(&plans, 0, |k| k.expression.contains("ConvConfig") && k.threads == 128);
    let wide = kernel(&plans, 0, |k| k.expression.contains("ConvConfig") && k.threads == 256);
    let pool = kernel(&plans, 0, named("Pool"));
    let attention = kernel(&plans, 0, named("Attention"));
    let (one, other) = (kernel(&plans, 0, named("Function")), kernel(&plans, 1, named("Function")));
    assert!(one.source != other.source, "two functions of one name");
    let pairs = [
        (&narrow, &wide),
        (&wide, &narrow),
        (&narrow, &pool),
        (&pool, &narrow),
        (&narrow, &narrow),
        (&attention, &narrow),
        (&narrow, &one),
        (&one, &narrow),
        (&one, &other),
        (&one, &one),
    ];
    for (real_time, best_effort) in pairs {
        check(&report, real_time, best_effort);
    }
}

fn check(report: &KernelReport, real_time: &Kernel, best_effort: &Kernel) {
    let name = format!("{} + {}", real_time.expression, best_effort.expression);
    let facts = report.fused_facts(real_time, best_effort);
    let facts = facts.unwrap_or_else(|err| panic!("{name}: {err}"));
    let [EntryFacts { entry, registers, spilled_bytes }] = &facts[..] else {
        panic!("{name}: {facts:?}");
    };
    let alone = [real_time, best_effort].map(registers_alone);
    println!("{registers} registers ({alone:?}), {spilled_bytes} spilled: {name}");
    assert_eq!((entry.as_str(), *spilled_bytes), ("dkp", 0), "{name}");
    // An operator that the compiler removed would need none; the real-time operator keeps its
    // registers.
    let needed = alone[0].max(alone[1]);
    assert!(
        *registers + 8 >= needed && *registers <= needed.max(64) + 24,
        "{name}: {registers} of {alone:?}"
    );
}

/// Registers of `kernel` alone as real time, from the committed table; none for a generated one.
fn registers_alone(kernel: &Kernel) -> u32 {
    let table = include_str!("../../kernels/registers.txt");
    let found = table.lines().find_map(|line| {
        let mut words = line.splitn(5, ' ');
        let (capability, entry) = (words.next()?, words.next()?);
        let (registers, expression) = (words.next()?, words.nth(1)?);
        let same = (capability, entry, expression) == ("90", "rt", kernel.expression.as_str());
        same.then(|| registers.parse().unwrap())
    });
    assert!(found.is_some() || kernel.expression.contains("Function"), "{}", kernel.expression);
    found.unwrap_or(0)
}
