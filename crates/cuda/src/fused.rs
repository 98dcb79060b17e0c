//! A real-time and a best-effort operator in one kernel, as REEF pads real time (OSDI '22, section 5).
//!
//! The first blocks of a launch do tiles of the one operator, the others tiles of the other, both without looking whether they shall leave.
//! REEF calls both through pointers and keeps a caller for every occupancy; here every pair is a module of its own, whose
//! registers are those that the two need.

use model::gpu::Kernel;

/// Registers of a multiprocessor, and thus of all blocks it holds, are shared by threads: a block that is larger than real
/// time's own gets along with as many registers a thread when fewer blocks are asked for.
const ENTRY: &str = r#"
constexpr int kFusedThreads = RealTime::kThreads > BestEffort::kThreads ? RealTime::kThreads : BestEffort::kThreads;
constexpr int kFusedBlocks = RealTime::kBlocks * RealTime::kThreads / kFusedThreads;
static_assert(RealTime::kThreads % 32 == 0 && BestEffort::kThreads % 32 == 0, "whole warps leave");

// Threads beyond an operator's own leave before its first barrier, which waits for none that are gone.
template <class Op>
__device__ __forceinline__ void run_fused(const typename Op::Args& args, int tile)
{
    extern __shared__ __align__(128) unsigned char shared[];
    tiles::LaunchGate::release_next();
    if ((int)threadIdx.x >= Op::kThreads) return;
    tiles::NoWatch watch;
    Op::tile(args, tile, shared, watch, tiles::LaunchGate());
}

extern "C" __global__ void __launch_bounds__(kFusedThreads, kFusedBlocks > 0 ? kFusedBlocks : 1) dkp(
    const __grid_constant__ RealTime::Args real_time, const __grid_constant__ BestEffort::Args best_effort,
    const int real_time_blocks, const int first_tile)
{
    if ((int)blockIdx.x < real_time_blocks)
        run_fused<RealTime>(real_time, (int)blockIdx.x);
    else
        run_fused<BestEffort>(best_effort, first_tile + (int)blockIdx.x - real_time_blocks);
}
"#;

/// The kernel that does tiles of both; its parameters are the arguments of the one, those of the other, the number of blocks that do
/// real time's tiles, and the first tile of best effort's.
pub(crate) fn fuse(real_time: &Kernel, best_effort: &Kernel) -> Kernel {
    Kernel {
        source: text(real_time, best_effort),
        expression: format!("{} + {}", real_time.expression, best_effort.expression),
        threads: real_time.threads.max(best_effort.threads),
        shared_bytes: real_time.shared_bytes.max(best_effort.shared_bytes),
        args_bytes: real_time.args_bytes + best_effort.args_bytes + 8,
    }
}

/// The module: headers of both, each operator in a namespace of its own, the entry point.
fn text(real_time: &Kernel, best_effort: &Kernel) -> String {
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
    text + ENTRY
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
