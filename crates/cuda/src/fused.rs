//! A real-time and a best-effort operator in one kernel, as REEF pads real time (OSDI '22, section 5).
//!
//! The first blocks of a launch do tiles of the one operator, the others tiles of the other, both without looking whether they shall leave.
//! REEF calls both through pointers and keeps a caller for every occupancy; here every pair is a module of its own, whose
//! registers are those that the two need.

use model::gpu::Kernel;

/// What a block does. A block that is larger than real time's own needs as many registers a thread all the same, so fewer of them are asked
/// for at once: registers of a multiprocessor are shared by threads.
const FUSED: &str = r#"
struct Fused {
    static constexpr int kThreads = RealTime::kThreads > BestEffort::kThreads ? RealTime::kThreads : BestEffort::kThreads;
    static constexpr int kShared = RealTime::kShared > BestEffort::kShared ? RealTime::kShared : BestEffort::kShared;
    static constexpr int kAsked = RealTime::kBlocks * RealTime::kThreads / kThreads;
    static constexpr int kBlocks = kAsked > 0 ? kAsked : 1;
    static_assert(RealTime::kThreads % 32 == 0 && BestEffort::kThreads % 32 == 0, "whole warps leave");

    // Threads beyond an operator's own leave before its first barrier, which waits for none that are gone.
    template <class Op, class Gate>
    static __device__ __forceinline__ void tile(const typename Op::Args& args, int number, unsigned char* shared, const Gate& gate)
    {
        if ((int)threadIdx.x >= Op::kThreads) return;
        tiles::NoWatch watch;
        Op::tile(args, number, shared, watch, gate);
    }
    template <class Gate>
    static __device__ __forceinline__ void block(const RealTime::Args& real_time, const BestEffort::Args& best_effort,
                                                 int real_time_blocks, int first_tile, unsigned char* shared, const Gate& gate)
    {
        int number = (int)blockIdx.x;
        if (number < real_time_blocks)
            tile<RealTime>(real_time, number, shared, gate);
        else
            tile<BestEffort>(best_effort, first_tile + number - real_time_blocks, shared, gate);
    }
};
"#;

/// The kernel made of it. As in real time, the next launch's blocks may come as soon as all of these have started.
const ENTRY: &str = r#"
extern "C" __global__ void __launch_bounds__(Fused::kThreads, Fused::kBlocks) dkp(
    const __grid_constant__ RealTime::Args real_time, const __grid_constant__ BestEffort::Args best_effort,
    const int real_time_blocks, const int first_tile)
{
    extern __shared__ __align__(128) unsigned char shared[];
    tiles::LaunchGate::release_next();
    Fused::block(real_time, best_effort, real_time_blocks, first_tile, shared, tiles::LaunchGate());
}
"#;

/// The kernel that does tiles of both; its parameters are the arguments of the one, those of the other, the number of blocks that do
/// real time's tiles, and the first tile of best effort's.
pub(crate) fn fuse(real_time: &Kernel, best_effort: &Kernel) -> Kernel {
    Kernel {
        source: fused_operators(real_time, best_effort) + ENTRY,
        expression: format!("{} + {}", real_time.expression, best_effort.expression),
        threads: real_time.threads.max(best_effort.threads),
        shared_bytes: real_time.shared_bytes.max(best_effort.shared_bytes),
        args_bytes: real_time.args_bytes + best_effort.args_bytes + 8,
    }
}

/// A module without its entry point: headers of both, each operator in a namespace of its own, and `Fused`, a block of either.
pub fn fused_operators(real_time: &Kernel, best_effort: &Kernel) -> String {
    let mut text = String::new();
    let directives = || {
        let of = |kernel: &'_ Kernel| {
            kernel.source.lines().filter(is_directive).map(str::to_string).collect::<Vec<_>>()
        };
        of(real_time).into_iter().chain(of(best_effort))
    };
    // What headers hold may depend on definitions, so all of them come before the first header.
    let mut seen: Vec<String> = Vec::new();
    let defines = directives().filter(|line| line.starts_with("#define"));
    let includes = directives().filter(|line| !line.starts_with("#define"));
    for line in defines.chain(["#include \"entry.cuh\"".to_string()]).chain(includes) {
        if !seen.contains(&line) {
            text += &format!("{line}\n");
            seen.push(line);
        }
    }
    for (space, name, kernel) in
        [("real_time", "RealTime", real_time), ("best_effort", "BestEffort", best_effort)]
    {
        text += &operator(space, name, kernel);
    }
    text + FUSED
}

/// Definitions and headers; pragmas belong to the lines below them.
fn is_directive(line: &&str) -> bool {
    line.starts_with("#define") || line.starts_with("#include")
}

/// What `kernel` defines and its operator as `name`. Its own `tiles` is found first, then that of the headers.
fn operator(space: &str, name: &str, kernel: &Kernel) -> String {
    let Kernel { source, expression, threads, shared_bytes, args_bytes } = kernel;
    let body: Vec<&str> = source.lines().filter(|line| !is_directive(line)).collect();
    let body = body.join("\n");
    format!(
        "namespace {space} {{\nnamespace tiles {{\nusing namespace ::tiles;\n}}\n{body}\nusing Operator = {expression};\n}}\n\
         using {name} = {space}::Operator;\nTILES_EXPECT({name}, {threads}, {shared_bytes}, {args_bytes});\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(source: &str, expression: &str, threads: u32) -> Kernel {
        let (source, expression) = (source.to_string(), expression.to_string());
        Kernel { source, expression, threads, shared_bytes: threads * 8, args_bytes: 24 }
    }

    #[test]
    fn a_fused_kernel_has_room_for_either() {
        let fused = fuse(&kernel("", "A", 128), &kernel("", "B", 256));
        assert_eq!((fused.threads, fused.shared_bytes, fused.args_bytes), (256, 2048, 56));
        assert_eq!(fused.expression, "A + B");
    }

    #[test]
    fn headers_come_once_and_before_names_that_both_define() {
        let one =
            "#include \"chain.cuh\"\nnamespace tiles {\nstruct Function {\n#pragma unroll\n};\n}\n";
        let other = format!("#define TILES_BF16\n{one}");
        let text =
            fuse(&kernel(one, "tiles::Chain<tiles::Function>", 128), &kernel(&other, "B", 128))
                .source;
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what} in\n{text}"));
        assert_eq!(text.matches("#include \"chain.cuh\"").count(), 1);
        assert!(at("#define TILES_BF16") < at("#include \"entry.cuh\""));
        assert!(at("#include \"chain.cuh\"") < at("namespace real_time {"));
        assert_eq!(text.matches("struct Function").count(), 2);
        assert_eq!(text.matches("#pragma unroll").count(), 2, "pragmas stay where they are");
        assert!(at("struct Function") < at("namespace best_effort {"));
    }
}
