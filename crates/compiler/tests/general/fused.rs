//! Two operators in one launch compute the same as each alone, whichever has the larger blocks.

use compiler::gpu::args::{Address, ArgsWriter};
use compiler::gpu::draft::{KernelText, LaunchDraft};
use compiler::gpu::reduce;
use compiler::gpu::view::{Element, View};
use model::Tensor;
use model::op::{Op, Softmax, SoftmaxKind};

use crate::bench::{Bench, Layout, Random};
use crate::reference;

/// Elements that a block of [`BACKWARDS`] reverses, one per thread.
const BLOCK: usize = 64;

/// An operator of small blocks whose threads depend on each other: a misplaced barrier shows.
const BACKWARDS: &str = r#"#include "base.cuh"
namespace tiles {
struct Backwards {
    struct Args { const float* from; float* to; };
    static constexpr int kThreads = 64, kShared = 256, kBlocks = 1;
    template <class Watch, class Gate>
    static __device__ __forceinline__ bool tile(
        const Args& a, int number, unsigned char* shared, Watch&, const Gate& gate)
    {
        float* all = (float*)shared;
        gate.wait();
        all[threadIdx.x] = a.from[number * kThreads + threadIdx.x];
        __syncthreads();
        a.to[number * kThreads + threadIdx.x] = all[kThreads - 1 - threadIdx.x];
        return true;
    }
};
}
"#;

/// A launch, its output's view and the expected result.
type Side = (LaunchDraft, View, Tensor);

fn backwards(bench: &mut Bench, x: &Tensor) -> Side {
    let values = x.to_vec::<f32>().unwrap();
    let turned = values.chunks(BLOCK).flat_map(|block| block.iter().rev().copied()).collect();
    let expected = Tensor::from_vec(x.shape().to_vec(), turned).unwrap();
    let from = bench.place(x, Layout::Packed, Element::F32);
    let to = bench.buffer(x.shape(), Layout::Packed, Element::F32);
    let mut args = ArgsWriter::new();
    args.address(Address::Buffer(from.buffer, 0)).address(Address::Buffer(to.buffer, 0));
    let text = KernelText {
        source: BACKWARDS.to_string(),
        expression: "tiles::Backwards".to_string(),
        threads: BLOCK as u32,
        shared_bytes: 4 * BLOCK as u32,
    };
    (LaunchDraft::plain(text, values.len() / BLOCK, args), to, expected)
}

fn softmax(bench: &mut Bench, x: &Tensor) -> Side {
    let spec = Softmax { axis: 1, kind: SoftmaxKind::Softmax, flatten: false };
    let expected = reference(&Op::Softmax(spec), &[x], 1).remove(0);
    let from = bench.place(x, Layout::Packed, Element::F32);
    let to = bench.buffer(x.shape(), Layout::Packed, Element::F32);
    let work = reduce::softmax(&spec, &from, &to).unwrap();
    (work.drafts[0].clone(), to, expected)
}

#[test]
fn tiles_of_two_operators_in_one_launch() {
    let mut random = Random::new(71);
    let (small, large) = (random.floats(&[11, BLOCK]), random.floats(&[9, 3000]));
    for small_first in [true, false] {
        let mut bench = Bench::default();
        let mut sides = [backwards(&mut bench, &small), softmax(&mut bench, &large)];
        assert!(sides[0].0.kernel.threads < sides[1].0.kernel.threads);
        if !small_first {
            sides.reverse();
        }
        let [first, second] = &sides;
        let outputs = [(&first.1, &first.2), (&second.1, &second.2)];
        bench.check_fused("fused", [&first.0, &second.0], outputs);
        bench.finish(if small_first { "fused_small_first" } else { "fused_large_first" });
    }
}
