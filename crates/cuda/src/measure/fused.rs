//! A real-time and a best-effort operator in one kernel, as REEF pads real time (OSDI '22, section 5).
//!
//! The first blocks of a launch do tiles of the one operator, the others tiles of the other, both without looking whether they shall leave.
//! REEF calls both through pointers and keeps a caller for every occupancy; here every pair is a module of its own, whose
//! registers are those that the two need.

use model::gpu::Kernel;

/// What a block does. A block that is larger than real time's own needs as many registers a thread all the same, so fewer of them are asked
/// for at once: registers of an SM are shared by threads.
const FUSED: &str = r#"
struct Fused {
    static constexpr int kThreads = RealTime::kThreads > BestEffort::kThreads ? RealTime::kThreads : BestEffort::kThreads;
    static constexpr int kShared = RealTime::kShared > BestEffort::kShared ? RealTime::kShared : BestEffort::kShared;
    static constexpr int kAsked = RealTime::kBlocks * RealTime::kThreads / kThreads;
    static constexpr int kBlocks = kAsked > 0 ? kAsked : 1;
    static_assert(RealTime::kThreads % 32 == 0 && BestEffort::kThreads % 32 == 0, "whole warps leave");

    // Threads beyond an operator's own leave before its first barrier, which waits for none that are gone.
    template <class Op, class Watch, class Gate>
    static __device__ __forceinline__ void tile(const typename Op::Args& args, int number, unsigned char* shared)
    {
        if ((int)threadIdx.x >= Op::kThreads) return;
        Watch watch;
        Op::tile(args, number, shared, watch, Gate());
    }
    // Each has a watch and a gate of its own headers, by which functions are looked up.
    template <class RealTimeGate, class BestEffortGate>
    static __device__ __forceinline__ void block(const RealTime::Args& real_time, const BestEffort::Args& best_effort,
                                                 int real_time_blocks, int first_tile, unsigned char* shared)
    {
        int number = (int)blockIdx.x;
        if (number < real_time_blocks)
            tile<RealTime, tiles::NoWatch, RealTimeGate>(real_time, number, shared);
        else
            tile<BestEffort, ::best_effort::tiles::NoWatch, BestEffortGate>(
                best_effort, first_tile + number - real_time_blocks, shared);
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
    Fused::block<tiles::LaunchGate, ::best_effort::tiles::LaunchGate>(real_time, best_effort, real_time_blocks, first_tile, shared);
}
"#;

/// Headers by their names.
pub(crate) type Headers<'a> = &'a [(&'a str, &'a str)];

/// The kernel that does tiles of both; its parameters are the arguments of the one, those of the other, the number of blocks that do
/// real time's tiles, and the first tile of best effort's.
pub(crate) fn fuse(real_time: &Kernel, best_effort: &Kernel, headers: Headers<'_>) -> Kernel {
    Kernel {
        source: fused_operators(real_time, best_effort, headers) + ENTRY,
        expression: format!("{} + {}", real_time.expression, best_effort.expression),
        threads: real_time.threads.max(best_effort.threads),
        shared_bytes: real_time.shared_bytes.max(best_effort.shared_bytes),
        args_bytes: real_time.args_bytes + best_effort.args_bytes + 8,
    }
}

/// A module without its entry point: both operators, and `Fused`, a block of either.
///
/// Not all headers can stand beside each other, and two generated operators have one name. So best effort has all that it includes
/// once more, in a namespace of its own.
pub fn fused_operators(
    real_time: &Kernel,
    best_effort: &Kernel,
    headers: &[(&str, &str)],
) -> String {
    let mut guest = String::new();
    let source = format!("#include \"base.cuh\"\n{}", best_effort.source);
    expand(&source, headers, &mut Vec::new(), &mut guest);
    format!(
        "#include \"entry.cuh\"\n{}\nusing RealTime = {};\n{}namespace {SPACE} {{\n{guest}\nusing Operator = {};\n}}\n\
         using BestEffort = {SPACE}::Operator;\n{}{FUSED}",
        real_time.source,
        real_time.expression,
        expected("RealTime", real_time),
        best_effort.expression,
        expected("BestEffort", best_effort),
    )
}

/// Where best effort's operator and its headers are.
const SPACE: &str = "best_effort";

/// What the plan believes of the operator `name`, checked by the compiler.
fn expected(name: &str, kernel: &Kernel) -> String {
    let Kernel { threads, shared_bytes, args_bytes, .. } = kernel;
    format!("TILES_EXPECT({name}, {threads}, {shared_bytes}, {args_bytes});\n")
}

/// Writes `text` to `to` with headers in place of their names, each once. Those of CUDA are no part of any namespace.
fn expand<'a>(text: &str, headers: Headers<'a>, seen: &mut Vec<&'a str>, to: &mut String) {
    for line in text.lines() {
        let included = line.strip_prefix("#include \"").and_then(|rest| rest.split('"').next());
        let header = headers.iter().find(|(name, _)| included == Some(*name));
        match header {
            Some((name, _)) if seen.contains(name) => {}
            Some((name, body)) => {
                seen.push(name);
                expand(body, headers, seen, to);
            }
            None if line.starts_with("#pragma once") => {}
            None if line.starts_with("#include") => {
                *to += &format!("}}\n{line}\nnamespace {SPACE} {{\n");
            }
            None => *to += &format!("{line}\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADERS: Headers<'static> = &[
        ("base.cuh", "#pragma once\n#include <cuda_fp16.h>\nint base;\n"),
        ("one.cuh", "#pragma once\n#include \"base.cuh\"\n#include \"two.cuh\"\nint one;\n"),
        ("two.cuh", "#pragma once\n#include \"base.cuh\"\nint two;\n"),
    ];

    fn kernel(source: &str, expression: &str, threads: u32) -> Kernel {
        let (source, expression) = (source.to_string(), expression.to_string());
        Kernel { source, expression, threads, shared_bytes: threads * 8, args_bytes: 24 }
    }

    #[test]
    fn a_fused_kernel_has_room_for_either() {
        let fused = fuse(&kernel("", "A", 128), &kernel("", "B", 256), HEADERS);
        assert_eq!((fused.threads, fused.shared_bytes, fused.args_bytes), (256, 2048, 56));
        assert_eq!(fused.expression, "A + B");
    }

    #[test]
    fn best_effort_has_its_headers_in_a_namespace_of_its_own() {
        let source = "#define X\n#include \"one.cuh\"\n#include \"two.cuh\"\nstruct B {\n#pragma unroll\n};\n";
        let (host, guest) = (kernel("#include \"one.cuh\"", "A", 32), kernel(source, "B", 32));
        let text = fuse(&host, &guest, HEADERS).source;
        let (before, inside) = text.split_once("namespace best_effort {\n").expect("a namespace");
        assert!(before.contains("#include \"one.cuh\"\nusing RealTime = A;\n"), "{before}");
        let (inside, _) = inside.split_once("using BestEffort").expect("an end");
        let want = "}\n#include <cuda_fp16.h>\nnamespace best_effort {\nint base;\n#define X\nint two;\nint one;\n\
                    struct B {\n#pragma unroll\n};\n\nusing Operator = B;\n}\n";
        assert_eq!(inside, want);
    }
}
