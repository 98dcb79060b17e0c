//! The CUDA C++ text of a kernel's module.

use std::ffi::CStr;

use model::gpu::Kernel;

/// The class that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum KernelClass {
    /// One block per tile, without checks; the entry point is `rt`.
    RealTime,
    /// Exits when preempted; the entry points are `be`, `be_grid` and `be_long`.
    BestEffort,
}

impl KernelClass {
    /// The entry points of a module of this class.
    pub(crate) fn entries(self) -> &'static [&'static CStr] {
        match self {
            KernelClass::RealTime => &[c"rt"],
            KernelClass::BestEffort => &[c"be", c"be_grid", c"be_long"],
        }
    }
}

/// The module of `kernel`. Compiling it checks what the plan assumes of the operator.
pub(crate) fn module_text(kernel: &Kernel, class: KernelClass) -> String {
    let Kernel { source, expression, threads, shared_bytes, args_bytes } = kernel;
    let entry = match class {
        KernelClass::RealTime => "TILES_REAL_TIME",
        KernelClass::BestEffort => "TILES_BEST_EFFORT",
    };
    format!(
        "#include \"entry.cuh\"\n{source}\nusing Op = {expression};\n\
         TILES_EXPECT(Op, {threads}, {shared_bytes}, {args_bytes});\n{entry}(Op)\n"
    )
}

/// A module with the entry points of both classes, which compiles faster than two modules.
pub(crate) fn whole_text(kernel: &Kernel) -> String {
    module_text(kernel, KernelClass::RealTime) + "TILES_BEST_EFFORT(Op)\n"
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
        Kernel {
            source: "#include \"elementwise.cuh\"".to_string(),
            expression: "tiles::Pair<int, 2>".to_string(),
            threads: 128,
            shared_bytes: 64,
            args_bytes: 24,
        }
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
        assert!(
            module_text(&kernel(), KernelClass::BestEffort).ends_with("TILES_BEST_EFFORT(Op)\n")
        );
        assert_eq!(KernelClass::BestEffort.entries(), [c"be", c"be_grid", c"be_long"]);
    }

    #[test]
    fn architecture_of_hopper_has_its_own_instructions() {
        assert_eq!(architecture(90), "sm_90a");
        assert_eq!(architecture(80), "sm_80");
    }
}
