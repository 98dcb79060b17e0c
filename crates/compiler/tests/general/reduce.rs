//! Reductions, softmax, normalizations, cumulative sums, top-k.

use compiler::gpu::reduce;
use compiler::gpu::view::Element;
use model::Tensor;
use model::op::{ArgReduce, Op, Reduce, ReduceKind, Softmax, SoftmaxKind};

use crate::Case;
use crate::bench::{Bench, Layout, Random};

const KINDS: [ReduceKind; 10] = [
    ReduceKind::L1,
    ReduceKind::L2,
    ReduceKind::LogSum,
    ReduceKind::LogSumExp,
    ReduceKind::Max,
    ReduceKind::Mean,
    ReduceKind::Min,
    ReduceKind::Prod,
    ReduceKind::Sum,
    ReduceKind::SumSquare,
];

fn axes(list: &[i64]) -> Tensor {
    Tensor::from_vec(vec![list.len()], list.to_vec()).unwrap()
}

#[test]
fn reductions() {
    let mut bench = Bench::default();
    let mut random = Random::new(11);
    let x = random.floats(&[3, 40, 4, 5]);
    let integers = random.integers(&[3, 7, 4], -9, 9);
    let op = |kind, keep_dims| Op::Reduce(Reduce { kind, keep_dims, noop_with_empty_axes: false });
    for kind in KINDS {
        let along = axes(&[2, 3]);
        Case::new(op(kind, true), &[&x, &along])
            .check(&mut bench, |i, o| Ok(vec![reduce::reduce(kind, &i[0], &[2, 3], &o[0])?]));
    }
    for (along, keep) in [
        (&[1usize][..], false),
        (&[0, 2], true),
        (&[3], false),
        (&[0, 1, 2, 3], false),
        (&[1, 2, 3], true),
    ] {
        let list = axes(&along.iter().map(|axis| *axis as i64).collect::<Vec<_>>());
        for layout in [Layout::Packed, Layout::ChannelsLast(8), Layout::Gapped] {
            for element in [Element::F16, Element::BF16] {
                Case::new(op(ReduceKind::Mean, keep), &[&x, &list])
                    .lying(layout, Layout::Packed)
                    .of(element)
                    .check(&mut bench, |i, o| {
                        Ok(vec![reduce::reduce(ReduceKind::Mean, &i[0], along, &o[0])?])
                    });
            }
        }
    }
    for kind in [ReduceKind::Sum, ReduceKind::Max, ReduceKind::Prod, ReduceKind::Mean] {
        let along = axes(&[1]);
        Case::new(op(kind, false), &[&integers, &along])
            .check(&mut bench, |i, o| Ok(vec![reduce::reduce(kind, &i[0], &[1], &o[0])?]));
    }
    let long = random.floats(&[2, 5000]);
    let along = axes(&[1]);
    Case::new(op(ReduceKind::Sum, false), &[&long, &along])
        .check(&mut bench, |i, o| Ok(vec![reduce::reduce(ReduceKind::Sum, &i[0], &[1], &o[0])?]));
    bench.finish("reductions");
}

#[test]
fn argmax_and_argmin() {
    let mut bench = Bench::default();
    let mut random = Random::new(12);
    let x = random.floats(&[3, 9, 33]);
    let equal = random.integers(&[4, 50], 0, 5);
    for axis in [0i64, 1, -1] {
        for (max, select_last) in [(true, false), (false, true)] {
            let arg = ArgReduce { max, axis, keep_dims: axis == 0, select_last };
            Case::new(Op::ArgReduce(arg), &[&x])
                .lying(Layout::Gapped, Layout::Packed)
                .check(&mut bench, |i, o| Ok(vec![reduce::arg_reduce(&arg, &i[0], &o[0])?]));
        }
    }
    for select_last in [true, false] {
        let arg = ArgReduce { max: true, axis: 1, keep_dims: false, select_last };
        Case::new(Op::ArgReduce(arg), &[&equal])
            .check(&mut bench, |i, o| Ok(vec![reduce::arg_reduce(&arg, &i[0], &o[0])?]));
    }
    let distinct: Vec<f32> = (0..600u32).map(|i| ((i * 7919) % 601) as f32 / 64.0).collect();
    let distinct = Tensor::from_vec(vec![2, 300], distinct).unwrap();
    let k = axes(&[7]);
    for (largest, axis) in [(true, 1i64), (false, -1)] {
        Case::new(Op::TopK { axis, largest, sorted: true }, &[&distinct, &k])
            .giving(2)
            .check(&mut bench, |i, o| Ok(vec![reduce::top_k(axis, largest, &i[0], &o[0], &o[1])?]));
    }
    bench.finish("places");
}

#[test]
fn cumulative_sums() {
    let mut bench = Bench::default();
    let mut random = Random::new(13);
    let (x, integers) = (random.floats(&[3, 70, 2]), random.integers(&[5, 33], -4, 5));
    for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
        for (tensor, axis) in [(&x, 1), (&x, 2), (&integers, 0), (&integers, 1)] {
            let along = Tensor::from_vec(vec![], vec![axis as i64]).unwrap();
            Case::new(Op::CumSum { exclusive, reverse }, &[tensor, &along])
                .lying(Layout::Packed, Layout::Gapped)
                .check(&mut bench, |i, o| {
                    Ok(vec![reduce::cum_sum(axis, exclusive, reverse, &i[0], &o[0])?])
                });
        }
    }
    bench.finish("running");
}

#[test]
fn softmaxes() {
    let mut bench = Bench::default();
    let mut random = Random::new(14);
    let x = random.floats(&[2, 20, 3, 7]);
    for kind in [SoftmaxKind::Softmax, SoftmaxKind::LogSoftmax, SoftmaxKind::Hardmax] {
        for (axis, flatten) in [(1, false), (-1, false), (2, true), (0, false)] {
            let softmax = Softmax { kind, axis, flatten };
            for (layout, element) in
                [(Layout::Packed, Element::F32), (Layout::ChannelsLast(4), Element::F16)]
            {
                Case::new(Op::Softmax(softmax), &[&x])
                    .lying(layout, layout)
                    .of(element)
                    .check(&mut bench, |i, o| Ok(vec![reduce::softmax(&softmax, &i[0], &o[0])?]));
            }
        }
    }
    bench.finish("softmax");
}

#[test]
fn normalizations() {
    let mut bench = Bench::default();
    let mut random = Random::new(15);
    let x = random.floats(&[3, 12, 5, 7]);
    let (scale, bias) = (random.floats(&[5, 7]), random.floats(&[5, 7]));
    let (wide, slope, shift) =
        (random.floats(&[5, 770]), random.floats(&[770]), random.floats(&[770]));
    let (channel_scale, channel_bias) = (random.floats(&[12]), random.floats(&[12]));
    let epsilon = 1e-3;
    Case::new(Op::LayerNorm { axis: 2, epsilon }, &[&x, &scale, &bias]).giving(3).check(
        &mut bench,
        |i, o| {
            let outputs = (&o[0], Some(&o[1]), Some(&o[2]));
            Ok(vec![reduce::layer_norm(2, epsilon, (&i[0], &i[1], Some(&i[2])), outputs)?])
        },
    );
    for element in [Element::F16, Element::BF16, Element::F32] {
        Case::new(Op::LayerNorm { axis: -1, epsilon }, &[&wide, &slope, &shift]).of(element).check(
            &mut bench,
            |i, o| {
                Ok(vec![reduce::layer_norm(
                    -1,
                    epsilon,
                    (&i[0], &i[1], Some(&i[2])),
                    (&o[0], None, None),
                )?])
            },
        );
        Case::new(Op::RmsNorm { axis: -1, epsilon }, &[&wide, &slope])
            .of(element)
            .check(&mut bench, |i, o| {
                Ok(vec![reduce::rms_norm(-1, epsilon, &i[0], &i[1], &o[0])?])
            });
    }
    for (layout, element) in
        [(Layout::Packed, Element::F32), (Layout::ChannelsLast(4), Element::F16)]
    {
        Case::new(Op::InstanceNorm { epsilon }, &[&x, &channel_scale, &channel_bias])
            .lying(layout, layout)
            .of(element)
            .check(&mut bench, |i, o| {
                Ok(vec![reduce::instance_norm(epsilon, &i[0], &i[1], &i[2], &o[0])?])
            });
        Case::new(Op::GroupNorm { groups: 3, epsilon }, &[&x, &channel_scale, &channel_bias])
            .lying(layout, layout)
            .of(element)
            .check(&mut bench, |i, o| {
                Ok(vec![reduce::group_norm(3, epsilon, &i[0], &i[1], &i[2], &o[0])?])
            });
        for p in [1, 2] {
            Case::new(Op::LpNorm { axis: 1, p }, &[&x])
                .lying(layout, layout)
                .of(element)
                .check(&mut bench, |i, o| Ok(vec![reduce::lp_norm(1, p, &i[0], &o[0])?]));
        }
    }
    bench.finish("normalizations");
}

/// Rows of many widths: vectors of every size, rows in registers and rows read again, few and many
/// threads of a row.
#[test]
fn rows_of_any_width() {
    let mut bench = Bench::default();
    let mut random = Random::new(16);
    let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
    let log = Softmax { kind: SoftmaxKind::LogSoftmax, ..softmax };
    let epsilon = 1e-3;
    for (rows, width) in
        [(3, 1), (70, 8), (5, 36), (300, 24), (2, 257), (7, 768), (2, 3000), (1, 36_000)]
    {
        let x = random.floats(&[rows, 2, width]);
        let (scale, bias) = (random.floats(&[width]), random.floats(&[width]));
        let layouts = [Layout::Packed, Layout::Gapped];
        for (layout, element) in layouts.into_iter().zip([Element::F16, Element::F32]) {
            for spec in [softmax, log] {
                Case::new(Op::Softmax(spec), &[&x])
                    .lying(layout, layout)
                    .of(element)
                    .check(&mut bench, |i, o| Ok(vec![reduce::softmax(&spec, &i[0], &o[0])?]));
            }
            Case::new(Op::LayerNorm { axis: -1, epsilon }, &[&x, &scale, &bias])
                .lying(layout, layout)
                .of(element)
                .check(&mut bench, |i, o| {
                    let outputs = (&o[0], None, None);
                    let operands = (&i[0], &i[1], Some(&i[2]));
                    Ok(vec![reduce::layer_norm(-1, epsilon, operands, outputs)?])
                });
            Case::new(Op::RmsNorm { axis: -1, epsilon }, &[&x, &scale])
                .lying(layout, layout)
                .of(element)
                .check(&mut bench, |i, o| {
                    let work = reduce::rms_norm(-1, epsilon, &i[0], &i[1], &o[0])?;
                    let kernel = &work.drafts[0].kernel.expression;
                    assert!(kernel.contains("NormalizeRows") || width == 1, "{kernel}");
                    Ok(vec![work])
                });
        }
    }
    bench.finish("rows");
}

/// Groups of channels in every order of memory, with a scale for each channel.
#[test]
fn groups_of_channels() {
    let mut bench = Bench::default();
    let mut random = Random::new(17);
    let epsilon = 1e-3;
    for (channels, groups) in [(16, 2), (20, 2), (24, 8), (9, 3), (12, 12)] {
        let x = random.floats(&[2, channels, 6, 7]);
        let (scale, bias) = (random.floats(&[channels]), random.floats(&[channels]));
        let layouts = [
            Layout::Packed,
            Layout::ChannelsLast(0),
            Layout::ChannelsLast(4),
            Layout::Gapped,
            Layout::Reversed,
        ];
        for layout in layouts {
            for element in [Element::F16, Element::BF16] {
                Case::new(Op::GroupNorm { groups, epsilon }, &[&x, &scale, &bias])
                    .lying(layout, layout)
                    .of(element)
                    .check(&mut bench, |i, o| {
                        Ok(vec![reduce::group_norm(groups, epsilon, &i[0], &i[1], &i[2], &o[0])?])
                    });
            }
        }
    }
    bench.finish("groups");
}
