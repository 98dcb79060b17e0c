//! The CUDA C++ text of a kernel's module.

use std::ffi::CStr;

use model::gpu::{Kernel, KernelFacts};

use crate::preempt::best_effort_variant::BestEffortVariant;

/// The class that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum KernelClass {
    /// One block per tile, without checks.
    RealTime,
    /// Exits when preempted. A step has one form; each is a module of its own, because compiling
    /// all of them takes three times as long.
    BestEffort(BestEffortVariant),
}

impl KernelClass {
    /// The entry point of a module of this class.
    pub(crate) fn entry(self) -> &'static CStr {
        match self {
            KernelClass::RealTime => c"rt",
            KernelClass::BestEffort(BestEffortVariant::Loop) => c"be",
            KernelClass::BestEffort(BestEffortVariant::Grid) => c"be_grid",
            KernelClass::BestEffort(BestEffortVariant::CheckedGrid) => c"be_long",
        }
    }

    /// The macro of `entry.cuh` that makes it.
    fn entry_macro(self) -> &'static str {
        match self {
            KernelClass::RealTime => "TILES_REAL_TIME",
            KernelClass::BestEffort(BestEffortVariant::Loop) => "TILES_LOOP",
            KernelClass::BestEffort(BestEffortVariant::Grid) => "TILES_GRID",
            KernelClass::BestEffort(BestEffortVariant::CheckedGrid) => "TILES_CHECKED_GRID",
        }
    }
}

/// The module of `kernel`. Compiling it checks what the plan assumes of the operator.
pub(crate) fn module_text(kernel: &Kernel, class: KernelClass) -> String {
    text_with(kernel, &format!("{}(Op)\n", class.entry_macro()))
}

/// A module with the entry points of all classes, which compiles faster than one of each.
pub(crate) fn whole_text(kernel: &Kernel) -> String {
    text_with(kernel, "TILES_REAL_TIME(Op)\nTILES_BEST_EFFORT(Op)\n")
}

fn text_with(kernel: &Kernel, entries: &str) -> String {
    let KernelFacts { source, expression, threads, shared_bytes, args_bytes } = &**kernel;
    format!(
        "#include \"entry.cuh\"\n{source}\nusing Op = {expression};\n\
         TILES_EXPECT(Op, {threads}, {shared_bytes}, {args_bytes});\n{entries}"
    )
}

/// NVRTC's name of a GPU of `capability`; from 9.0 on with the instructions of that generation
/// only.
pub(crate) fn architecture(capability: u32) -> String {
    let suffix = if capability >= 90 { "a" } else { "" };
    format!("sm_{capability}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> Kernel {
        Kernel::new(KernelFacts {
            source: "#include \"elementwise.cuh\"".to_string(),
            expression: "tiles::Pair<int, 2>".to_string(),
            threads: 128,
            shared_bytes: 64,
            args_bytes: 24,
        })
    }

    #[test]
    fn module_checks_the_assumptions_of_the_plan() {
        let text = module_text(&kernel(), KernelClass::RealTime);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "#include \"entry.cuh\"",
                "#include \"elementwise.cuh\"",
                "using Op = tiles::Pair<int, 2>;",
                "TILES_EXPECT(Op, 128, 64, 24);",
                "TILES_REAL_TIME(Op)",
            ]
        );
    }

    #[test]
    fn classes_differ_in_their_entry_points() {
        let forms = [
            (BestEffortVariant::Loop, "\nTILES_LOOP(Op)\n", c"be"),
            (BestEffortVariant::Grid, "\nTILES_GRID(Op)\n", c"be_grid"),
            (BestEffortVariant::CheckedGrid, "\nTILES_CHECKED_GRID(Op)\n", c"be_long"),
        ];
        for (form, end, entry) in forms {
            let class = KernelClass::BestEffort(form);
            assert!(module_text(&kernel(), class).ends_with(end));
            assert_eq!(class.entry(), entry);
        }
        assert!(whole_text(&kernel()).ends_with("TILES_REAL_TIME(Op)\nTILES_BEST_EFFORT(Op)\n"));
    }

    #[test]
    fn architecture_of_hopper_has_its_own_instructions() {
        assert_eq!(architecture(90), "sm_90a");
        assert_eq!(architecture(80), "sm_80");
    }
}
