//! Pooling, resizing, sampling.

use compiler::gpu::view::Element;
use compiler::gpu::window;
use model::Tensor;
use model::op::{
    AspectPolicy, CoordinateMode, GlobalPool, GridPadding, NearestMode, Op, Padding, Pool,
    PoolKind, Resize, ResizeMode, Window,
};

use crate::Case;
use crate::bench::{Bench, Layout, Random};

fn sliding(kernel: &[usize], strides: &[usize], dilations: &[usize], padding: Padding) -> Window {
    Window {
        kernel: kernel.to_vec(),
        strides: strides.to_vec(),
        dilations: dilations.to_vec(),
        padding,
    }
}

#[test]
fn pooling() {
    let mut bench = Bench::default();
    let mut random = Random::new(31);
    let explicit = |list: &[usize]| Padding::Explicit(list.to_vec());
    let windows: [(&[usize], Window, bool); 5] = [
        (&[2, 12, 9, 8], sliding(&[3, 3], &[2, 2], &[], explicit(&[1, 1, 1, 1])), false),
        (&[2, 3, 9, 8], sliding(&[2, 3], &[2, 1], &[2, 1], explicit(&[0, 1, 1, 0])), true),
        (&[1, 3, 7, 7], sliding(&[3, 2], &[2, 2], &[], Padding::SameUpper), false),
        (&[1, 3, 30], sliding(&[4], &[3], &[], explicit(&[1, 2])), false),
        (
            &[1, 3, 5, 6, 7],
            sliding(&[2, 3, 2], &[1, 2, 2], &[], explicit(&[1, 0, 1, 0, 1, 0])),
            false,
        ),
    ];
    let kinds = [
        PoolKind::Max,
        PoolKind::MaxWithIndices { column_major: false },
        PoolKind::MaxWithIndices { column_major: true },
        PoolKind::Average { count_include_pad: false },
        PoolKind::Average { count_include_pad: true },
        PoolKind::Lp { p: 3 },
    ];
    for (shape, window, ceil_mode) in windows {
        let x = random.floats(shape);
        for kind in kinds {
            let outputs = if matches!(kind, PoolKind::MaxWithIndices { .. }) { 2 } else { 1 };
            let spec = Pool { kind, window: window.clone(), ceil_mode };
            for (layout, element) in
                [(Layout::Packed, Element::F32), (Layout::ChannelsLast(4), Element::F16)]
            {
                Case::new(Op::Pool(spec.clone()), &[&x])
                    .lying(layout, layout)
                    .of(element)
                    .giving(outputs)
                    .check(&mut bench, |i, o| {
                        Ok(vec![window::pool(&spec, &i[0], &o[0], o.get(1))?])
                    });
            }
        }
        for kind in
            [GlobalPool::Average, GlobalPool::Max, GlobalPool::Lp { p: 2 }, GlobalPool::Lp { p: 3 }]
        {
            Case::new(Op::GlobalPool(kind), &[&x])
                .lying(Layout::ChannelsLast(0), Layout::Packed)
                .check(&mut bench, |i, o| Ok(vec![window::global_pool(kind, &i[0], &o[0])?]));
        }
    }
    let x = random.floats(&[2, 9, 3, 4]);
    let (alpha, beta, bias) = (0.3, 0.75, 1.5);
    for size in [3, 4] {
        Case::new(Op::Lrn { alpha, beta, bias, size }, &[&x])
            .lying(Layout::ChannelsLast(0), Layout::Packed)
            .check(&mut bench, |i, o| {
                Ok(vec![window::lrn(size, (alpha, beta, bias), &i[0], &o[0])?])
            });
    }
    bench.finish("pooling");
}

fn resizing(mode: ResizeMode, coordinates: CoordinateMode, nearest: NearestMode) -> Resize {
    Resize {
        mode,
        coordinates,
        nearest,
        cubic_coefficient: -0.75,
        exclude_outside: false,
        extrapolation_value: 3.0,
        antialias: false,
        axes: None,
        keep_aspect: AspectPolicy::Stretch,
    }
}

fn vector<T: model::tensor::Element + Clone>(values: &[T]) -> Tensor {
    Tensor::from_vec(vec![values.len()], values.to_vec()).unwrap()
}

/// All coordinate modes and filters.
fn all_resizings() -> Vec<Resize> {
    let coordinates = [
        CoordinateMode::HalfPixel,
        CoordinateMode::HalfPixelSymmetric,
        CoordinateMode::PytorchHalfPixel,
        CoordinateMode::AlignCorners,
        CoordinateMode::Asymmetric,
        CoordinateMode::CropAndResize,
    ];
    let mut all = Vec::new();
    for mode in coordinates {
        for nearest in [
            NearestMode::RoundPreferFloor,
            NearestMode::RoundPreferCeil,
            NearestMode::Floor,
            NearestMode::Ceil,
        ] {
            all.push(resizing(ResizeMode::Nearest, mode, nearest));
        }
        all.push(resizing(ResizeMode::Linear, mode, NearestMode::Floor));
        all.push(resizing(ResizeMode::Cubic, mode, NearestMode::Floor));
    }
    let cubic = resizing(ResizeMode::Cubic, CoordinateMode::HalfPixel, NearestMode::Floor);
    all.push(Resize { exclude_outside: true, ..cubic });
    all
}

#[test]
fn resizes() {
    let mut bench = Bench::default();
    let mut random = Random::new(32);
    let x = random.floats(&[2, 3, 5, 7]);
    let volume = random.floats(&[1, 2, 3, 4, 5]);
    let region = [0.0f32, 0.0, 0.2, -0.1, 1.0, 1.0, 0.9, 1.2];
    for spec in all_resizings() {
        for scales in [[1.0f32, 1.0, 2.0, 2.0], [1.0, 1.0, 0.6, 1.7]] {
            let (roi, factors) = (vector(&region), vector(&scales));
            for layout in [Layout::Packed, Layout::ChannelsLast(0)] {
                Case::new(Op::Resize(spec.clone()), &[&x, &roi, &factors])
                    .lying(layout, layout)
                    .check(&mut bench, |i, o| {
                        let all = window::resize_axes(
                            &spec,
                            &i[0].shape,
                            Some(&region),
                            Some(&scales),
                            None,
                        )?;
                        Ok(vec![window::resize(&spec, &all, &i[0], &o[0])?])
                    });
            }
        }
        if spec.coordinates != CoordinateMode::CropAndResize {
            let (none, sizes) = (vector::<f32>(&[]), [1i64, 2, 6, 2, 9]);
            let list = vector(&sizes);
            Case::new(Op::Resize(spec.clone()), &[&volume, &none, &none, &list]).check(
                &mut bench,
                |i, o| {
                    let all = window::resize_axes(&spec, &i[0].shape, None, None, Some(&sizes))?;
                    Ok(vec![window::resize(&spec, &all, &i[0], &o[0])?])
                },
            );
        }
    }
    bench.finish("resizes");
}

/// Adjacent channels are resized in vectors.
#[test]
fn resizes_of_many_channels() {
    let mut bench = Bench::default();
    let mut random = Random::new(34);
    for (channels, gap, element, vec) in
        [(16, 0, Element::F16, 8), (12, 4, Element::F16, 4), (6, 0, Element::F32, 2)]
    {
        let x = random.floats(&[2, channels, 5, 7]);
        let region = [0.0f32, 0.0, 0.2, -0.1, 1.0, 1.0, 0.9, 1.2];
        let scales = [1.0f32, 1.0, 2.0, 1.7];
        let (roi, factors) = (vector(&region), vector(&scales));
        for spec in all_resizings() {
            let layout = Layout::ChannelsLast(gap);
            Case::new(Op::Resize(spec.clone()), &[&x, &roi, &factors])
                .lying(layout, layout)
                .of(element)
                .check(&mut bench, |i, o| {
                    let all = window::resize_axes(
                        &spec,
                        &i[0].shape,
                        Some(&region),
                        Some(&scales),
                        None,
                    )?;
                    let work = window::resize(&spec, &all, &i[0], &o[0])?;
                    let kernel = &work.drafts[0].kernel.expression;
                    assert!(kernel.ends_with(&format!(", {vec}>")), "{kernel}");
                    Ok(vec![work])
                });
        }
    }
    bench.finish("wide_resizes");
}

#[test]
fn grids() {
    let mut bench = Bench::default();
    let mut random = Random::new(33);
    let (x, grid) = (random.floats(&[2, 3, 5, 7]), random.floats(&[2, 4, 3, 2]));
    let (volume, points) = (random.floats(&[1, 2, 3, 4, 5]), random.floats(&[1, 2, 3, 2, 3]));
    for mode in [ResizeMode::Nearest, ResizeMode::Linear, ResizeMode::Cubic] {
        for padding in [GridPadding::Zeros, GridPadding::Border, GridPadding::Reflection] {
            for align_corners in [true, false] {
                let op = Op::GridSample { mode, padding, align_corners };
                for (x, grid, layout) in
                    [(&x, &grid, Layout::ChannelsLast(1)), (&volume, &points, Layout::Packed)]
                {
                    Case::new(op.clone(), &[x, grid]).lying(layout, layout).check(
                        &mut bench,
                        |i, o| {
                            Ok(vec![window::grid_sample(
                                mode,
                                padding,
                                align_corners,
                                (&i[0], &i[1]),
                                &o[0],
                            )?])
                        },
                    );
                }
            }
        }
    }
    bench.finish("grids");
}
