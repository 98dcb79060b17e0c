//! Gather, scatter, padding, slices, repetition, patterns.

use compiler::gpu::index;
use compiler::gpu::view::Element;
use model::op::{Op, PadMode, ScatterReduction};
use model::{DataType, Tensor};

use crate::Case;
use crate::bench::{Bench, Layout, Random};

fn list(values: &[i64]) -> Tensor {
    Tensor::from_vec(vec![values.len()], values.to_vec()).unwrap()
}

#[test]
fn gathers() {
    let mut bench = Bench::default();
    let mut random = Random::new(41);
    let table = random.floats(&[9, 5, 16]);
    for (axis, shape) in [(0usize, &[4usize, 3][..]), (1, &[7]), (2, &[]), (0, &[5])] {
        let size = table.shape()[axis] as i64;
        let indices = random.integers(shape, -size, size);
        for (layout, element) in [(Layout::Packed, Element::F16), (Layout::Gapped, Element::F32)] {
            Case::new(Op::Gather { axis: axis as i64 }, &[&table, &indices])
                .lying(layout, Layout::Packed)
                .of(element)
                .check(&mut bench, |i, o| Ok(vec![index::gather(axis, &i[0], &i[1], &o[0])?]));
        }
    }
    for (axis, shape) in [(0usize, [4usize, 5, 16]), (1, [9, 11, 3]), (2, [2, 2, 2])] {
        let size = table.shape()[axis] as i64;
        let indices = random.integers(&shape, -size, size);
        Case::new(Op::GatherElements { axis: axis as i64 }, &[&table, &indices])
            .check(&mut bench, |i, o| Ok(vec![index::gather_elements(axis, &i[0], &i[1], &o[0])?]));
    }
    for (batch_dims, shape) in
        [(0usize, &[4usize, 2][..]), (0, &[3, 2, 1]), (1, &[9, 2, 1]), (1, &[9, 2]), (0, &[6, 3])]
    {
        let indices = random.integers(shape, -5, 5);
        Case::new(Op::GatherNd { batch_dims }, &[&table, &indices])
            .check(&mut bench, |i, o| Ok(vec![index::gather_nd(batch_dims, &i[0], &i[1], &o[0])?]));
    }
    bench.finish("gathers");
}

/// Indices past the end read the nearest element, write nothing, and are reported.
#[test]
fn indices_out_of_range_are_clamped() {
    let mut bench = Bench::default();
    let x = Tensor::from_vec(vec![3, 2], vec![1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    let wild = list(&[7, -9, i64::MAX, i64::MIN]);
    let (data, places) = (
        bench.place(&x, Layout::Packed, Element::F32),
        bench.place(&wild, Layout::Packed, Element::I64),
    );
    let output = bench.buffer(&[4, 2], Layout::Packed, Element::F32);
    let expected =
        Tensor::from_vec(vec![4, 2], vec![5f32, 6.0, 1.0, 2.0, 5.0, 6.0, 1.0, 2.0]).unwrap();
    let made = index::gather(0, &data, &places, &output).unwrap();
    bench.check_with_fault("wild gather", &[made], &[(&output, &expected)], 0.0, true);
    for (wild, nearest) in [(3, [5f32, 6.0]), (-4, [1.0, 2.0]), (i64::MAX, [5.0, 6.0])] {
        let places = bench.place(&list(&[wild]), Layout::Packed, Element::I64);
        let output = bench.buffer(&[1, 2], Layout::Packed, Element::F32);
        let expected = Tensor::from_vec(vec![1, 2], nearest.to_vec()).unwrap();
        let made = index::gather(0, &data, &places, &output).unwrap();
        bench.check_with_fault("one wild", &[made], &[(&output, &expected)], 0.0, true);
    }
    let tuples = Tensor::from_vec(vec![4, 1], vec![7i64, -9, i64::MAX, i64::MIN]).unwrap();
    let tuples = bench.place(&tuples, Layout::Packed, Element::I64);
    let updates = bench.place(&expected, Layout::Packed, Element::F32);
    for reduction in [ScatterReduction::None, ScatterReduction::Add] {
        let output = bench.buffer(&[3, 2], Layout::Packed, Element::F32);
        let made = index::scatter_nd(reduction, (&data, &tuples, &updates), &output).unwrap();
        bench.check_with_fault("wild scatter", &made, &[(&output, &x)], 0.0, true);
    }
    bench.finish("wild");
}

#[test]
fn scatters() {
    let mut bench = Bench::default();
    let mut random = Random::new(42);
    let x = random.floats(&[6, 5, 4]);
    let all = [
        ScatterReduction::None,
        ScatterReduction::Add,
        ScatterReduction::Mul,
        ScatterReduction::Max,
        ScatterReduction::Min,
    ];
    for reduction in all {
        // Without a reduction, indices must be distinct.
        let apart: Vec<i64> = (0..3 * 20).map(|i| (i / 20 + i) % 6).collect();
        let apart = Tensor::from_vec(vec![3, 5, 4], apart).unwrap();
        let meeting = random.integers(&[3, 5, 4], -6, 6);
        let indices = if reduction == ScatterReduction::None { &apart } else { &meeting };
        let updates = random.floats(&[3, 5, 4]);
        for layout in [Layout::Packed, Layout::Gapped] {
            Case::new(Op::ScatterElements { axis: 0, reduction }, &[&x, indices, &updates])
                .lying(layout, layout)
                .check(&mut bench, |i, o| {
                    index::scatter_elements(0, reduction, (&i[0], &i[1], &i[2]), &o[0])
                });
        }
        let tuples = Tensor::from_vec(vec![3, 2], vec![0i64, 1, -1, 4, 3, -2]).unwrap();
        let rows = random.floats(&[3, 4]);
        let twice = Tensor::from_vec(vec![2, 2, 1], vec![0i64, 5, -6, 2]).unwrap();
        let planes = random.floats(&[2, 2, 5, 4]);
        Case::new(Op::ScatterNd { reduction }, &[&x, &tuples, &rows])
            .lying(Layout::Gapped, Layout::Packed)
            .check(&mut bench, |i, o| index::scatter_nd(reduction, (&i[0], &i[1], &i[2]), &o[0]));
        if reduction != ScatterReduction::None {
            Case::new(Op::ScatterNd { reduction }, &[&x, &twice, &planes])
                .check(&mut bench, |i, o| {
                    index::scatter_nd(reduction, (&i[0], &i[1], &i[2]), &o[0])
                });
        }
    }
    bench.finish("scatters");
}

#[test]
fn padding_and_slices() {
    let mut bench = Bench::default();
    let mut random = Random::new(43);
    let x = random.floats(&[2, 3, 4, 5]);
    let value = Tensor::from_vec(vec![], vec![1.5f32]).unwrap();
    for mode in [PadMode::Constant, PadMode::Reflect, PadMode::Edge, PadMode::Wrap] {
        for pads in
            [[0i64, 0, 1, 2, 0, 0, 2, 1], [0, 1, 0, 3, 1, 1, 0, 0], [0, 0, -1, 2, 0, -1, 1, -2]]
        {
            let all = list(&pads);
            for (layout, element) in
                [(Layout::Packed, Element::F32), (Layout::ChannelsLast(0), Element::F16)]
            {
                Case::new(Op::Pad { mode }, &[&x, &all, &value])
                    .lying(layout, layout)
                    .of(element)
                    .check(&mut bench, |i, o| {
                        Ok(vec![index::pad(mode, &pads[..4], 1.5, &i[0], &o[0])?])
                    });
            }
        }
    }
    let (starts, ends) = (list(&[1, -1, 3, 0]), list(&[-10, -10, 0, 5]));
    let (axes, steps) = (list(&[0, 1, 2, 3]), list(&[-1, -2, -1, 2]));
    Case::new(Op::Slice, &[&x, &starts, &ends, &axes, &steps]).check(&mut bench, |i, o| {
        Ok(vec![index::slice(&[1, 2, 3, 0], &[-1, -2, -1, 2], &i[0], &o[0])?])
    });
    let lengths = list(&[3, 1, 2]);
    let time = random.floats(&[4, 3, 2]);
    Case::new(Op::ReverseSequence { batch_axis: 1, time_axis: 0 }, &[&time, &lengths])
        .check(&mut bench, |i, o| Ok(vec![index::reverse_sequence((1, 0), &i[0], &i[1], &o[0])?]));
    bench.finish("borders");
}

#[test]
fn repetitions() {
    let mut bench = Bench::default();
    let mut random = Random::new(44);
    let (x, y) = (random.floats(&[2, 3, 4]), random.floats(&[2, 5, 4]));
    let repeats = list(&[2, 1, 3]);
    Case::new(Op::Tile, &[&x, &repeats])
        .lying(Layout::Gapped, Layout::Packed)
        .check(&mut bench, |i, o| Ok(vec![index::tile(&[2, 1, 3], &i[0], &o[0])?]));
    Case::new(Op::Concat { axis: 1 }, &[&x, &y, &x])
        .lying(Layout::Packed, Layout::Gapped)
        .of(Element::F16)
        .check(&mut bench, |i, o| index::concat(1, i, &o[0]));
    let image = random.floats(&[2, 12, 3, 5]);
    let pixels = random.floats(&[2, 3, 4, 6]);
    for layout in [Layout::Packed, Layout::ChannelsLast(0)] {
        for crd in [true, false] {
            Case::new(Op::DepthToSpace { block: 2, crd }, &[&image])
                .lying(layout, layout)
                .check(&mut bench, |i, o| Ok(vec![index::depth_to_space(2, crd, &i[0], &o[0])?]));
        }
        Case::new(Op::SpaceToDepth { block: 2 }, &[&pixels])
            .lying(layout, layout)
            .check(&mut bench, |i, o| Ok(vec![index::space_to_depth(2, &i[0], &o[0])?]));
    }
    bench.finish("repetitions");
}

#[test]
fn patterns() {
    let mut bench = Bench::default();
    let mut random = Random::new(45);
    let x = random.floats(&[2, 5, 7]);
    for (upper, k) in [(true, 0i64), (false, 0), (true, 2), (false, -1)] {
        let diagonal = Tensor::from_vec(vec![], vec![k]).unwrap();
        Case::new(Op::Trilu { upper }, &[&x, &diagonal])
            .of(Element::F16)
            .check(&mut bench, |i, o| Ok(vec![index::trilu(upper, k, &i[0], &o[0])?]));
    }
    let matrix = random.floats(&[4, 6]);
    for k in [0i64, 2, -1] {
        Case::new(Op::EyeLike { dtype: None, k }, &[&matrix])
            .check(&mut bench, |_, o| Ok(vec![index::eye_like(k, &o[0])?]));
        Case::new(Op::EyeLike { dtype: Some(DataType::I64), k }, &[&matrix])
            .check(&mut bench, |_, o| Ok(vec![index::eye_like(k, &o[0])?]));
    }
    let (indices, depth) =
        (random.integers(&[3, 4], -6, 7), Tensor::from_vec(vec![], vec![6i64]).unwrap());
    let values = Tensor::from_vec(vec![2], vec![-1f32, 4.0]).unwrap();
    for axis in [0i64, 1, -1] {
        let at = if axis < 0 { 2 } else { axis as usize };
        Case::new(Op::OneHot { axis }, &[&indices, &depth, &values])
            .check(&mut bench, |i, o| Ok(vec![index::one_hot(at, &i[0], &i[2], &o[0])?]));
    }
    let scalars =
        |values: [i64; 3]| values.map(|value| Tensor::from_vec(vec![], vec![value]).unwrap());
    let [start, limit, delta] = scalars([3, -20, -4]);
    Case::new(Op::Range, &[&start, &limit, &delta])
        .check(&mut bench, |i, o| Ok(vec![index::range(&i[0], &i[2], &o[0])?]));
    bench.finish("patterns");
}
