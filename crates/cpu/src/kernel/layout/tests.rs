use base::Random;
use model::op::{Op, PadMode};
use model::{DataType, Tensor};

use super::super::testing::*;

fn count_up(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    floats(shape, &(0..count).map(|i| i as f32).collect::<Vec<_>>())
}

#[test]
fn reshapes_infer_and_copy_dimensions() {
    let x = count_up(&[2, 3, 4]);
    let on = |target: &[i64], allow_zero| {
        let inputs = [Some(x.clone()), Some(integers(&[target.len()], target))];
        try_run(Op::Reshape { allow_zero }, &inputs, 1).map(|out| out[0].shape().to_vec())
    };
    assert_eq!(on(&[0, -1], false), Ok(vec![2, 12]));
    assert_eq!(on(&[4, 6], false), Ok(vec![4, 6]));
    assert!(on(&[5, -1], false).is_err());
    assert!(on(&[-1, -1], false).is_err());
    assert!(on(&[i64::MAX, i64::MAX], false).is_err());
    let empty = [Some(count_up(&[0, 3])), Some(integers(&[2], &[0, -1]))];
    assert_eq!(try_run(Op::Reshape { allow_zero: false }, &empty, 1).unwrap()[0].shape(), [0, 0]);
}

#[test]
fn transposes_agree_with_a_naive_reference() {
    let mut random = Random::new(3);
    let cases: [(&[usize], &[usize]); 8] = [
        (&[3, 5], &[1, 0]),
        (&[2, 3, 4, 5], &[0, 2, 3, 1]),
        (&[2, 40, 70], &[0, 2, 1]),
        (&[1, 64, 33, 35], &[0, 2, 3, 1]),
        (&[2, 3, 4, 5], &[3, 1, 0, 2]),
        (&[1, 7, 1], &[2, 0, 1]),
        (&[2, 0, 3], &[2, 1, 0]),
        (&[300, 200], &[1, 0]),
    ];
    for (shape, perm) in cases {
        let x = random_floats(&mut random, shape);
        let got = &run(Op::Transpose { perm: Some(perm.to_vec()) }, std::slice::from_ref(&x))[0];
        let want_shape: Vec<usize> = perm.iter().map(|&axis| shape[axis]).collect();
        assert_eq!(got.shape(), want_shape);
        let (data, strides) = (values::<f32>(&x), super::super::operand::row_strides(shape));
        let want: Vec<f32> = (0..data.len())
            .map(|mut position| {
                let mut offset = 0;
                for axis in (0..perm.len()).rev() {
                    offset += position % want_shape[axis] * strides[perm[axis]];
                    position /= want_shape[axis];
                }
                data[offset]
            })
            .collect();
        assert_eq!(values::<f32>(got), want, "{shape:?} {perm:?}");
    }
    let words = run(Op::Transpose { perm: None }, &[strings(&[1, 2], &["a", "b"])]);
    assert_eq!(words[0], strings(&[2, 1], &["a", "b"]));
}

#[test]
fn slices_follow_numpy() {
    let x = count_up(&[20]);
    let on = |start: i64, end: i64, step: i64| {
        let one = |x: i64| integers(&[1], &[x]);
        values::<f32>(&run(Op::Slice, &[x.clone(), one(start), one(end), one(0), one(step)])[0])
    };
    assert_eq!(on(0, 3, 1), [0.0, 1.0, 2.0]);
    assert_eq!(on(-3, i64::MAX, 1), [17.0, 18.0, 19.0]);
    assert_eq!(on(1000, 1000, 1), [0.0f32; 0]);
    assert_eq!(on(19, i64::MIN, -9), [19.0, 10.0, 1.0]);
    assert_eq!(on(2, i64::MIN, i64::MIN), [2.0]);
    assert_eq!(on(-1, -4, -1), [19.0, 18.0, 17.0]);
    assert_eq!(on(i64::MIN, i64::MAX, i64::MAX), [0.0]);
    let grid = count_up(&[3, 4]);
    let part = run(Op::Slice, &[grid, integers(&[2], &[1, 1]), integers(&[2], &[3, 3])]);
    assert_eq!(part[0], floats(&[2, 2], &[5.0, 6.0, 9.0, 10.0]));
}

#[test]
fn pads_in_every_mode() {
    let x = floats(&[3], &[1.0, 2.0, 3.0]);
    let on = |mode, before: i64, after: i64| {
        values::<f32>(&run(Op::Pad { mode }, &[x.clone(), integers(&[2], &[before, after])])[0])
    };
    assert_eq!(on(PadMode::Constant, 1, 1), [0.0, 1.0, 2.0, 3.0, 0.0]);
    assert_eq!(on(PadMode::Edge, 2, 1), [1.0, 1.0, 1.0, 2.0, 3.0, 3.0]);
    assert_eq!(on(PadMode::Reflect, 2, 1), [3.0, 2.0, 1.0, 2.0, 3.0, 2.0]);
    assert_eq!(on(PadMode::Reflect, 5, 0), [2.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0]);
    assert_eq!(on(PadMode::Wrap, 1, 2), [3.0, 1.0, 2.0, 3.0, 1.0, 2.0]);
    assert_eq!(on(PadMode::Constant, -1, 1), [2.0, 3.0, 0.0]);
    let hostile = integers(&[2], &[i64::MAX, i64::MAX]);
    assert!(error(Op::Pad { mode: PadMode::Edge }, &[x.clone(), hostile]).contains("padded"));
    let huge = integers(&[2], &[1 << 39, 0]);
    assert!(error(Op::Pad { mode: PadMode::Edge }, &[x, huge]).contains("bytes"));
}

#[test]
fn concat_and_split_are_inverse() {
    let mut random = Random::new(5);
    for (shape, axis) in
        [(vec![2, 6, 5], 1), (vec![1, 6, 40, 400], 1), (vec![6], 0), (vec![0, 6], -1)]
    {
        let x = random_floats(&mut random, &shape);
        let parts =
            try_run(Op::Split { axis }, &[Some(x.clone()), Some(integers(&[3], &[1, 0, 5]))], 3)
                .unwrap();
        let back = run(Op::Concat { axis }, &parts);
        assert_eq!(back[0].shape(), x.shape());
        assert_eq!(values::<f32>(&back[0]), values::<f32>(&x));
    }
    let uneven = try_run(Op::Split { axis: 0 }, &[Some(count_up(&[7]))], 3).unwrap();
    assert_eq!(uneven.iter().map(Tensor::len).collect::<Vec<_>>(), [3, 3, 1]);
}

#[test]
fn repetitions_are_bounded() {
    let x = floats(&[2, 1], &[1.0, 2.0]);
    let tiled = run(Op::Tile, &[x.clone(), integers(&[2], &[2, 2])]);
    assert_eq!(tiled[0], floats(&[4, 2], &[1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]));
    let expanded = run(Op::Expand, &[x.clone(), integers(&[3], &[2, 1, 2])]);
    assert_eq!(expanded[0].shape(), [2, 2, 2]);
    assert_eq!(values::<f32>(&expanded[0]), [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]);
    let hostile = integers(&[2], &[1 << 20, 1 << 20]);
    assert!(error(Op::Tile, &[x.clone(), hostile]).contains("elements"));
    assert!(error(Op::Expand, &[x.clone(), integers(&[3], &[1 << 38, 2, 1])]).contains("bytes"));
    assert!(error(Op::Tile, &[x, integers(&[2], &[-1, 1])]).contains("negative"));
}

#[test]
fn trilu_and_reverse_sequence() {
    let x = count_up(&[2, 3]);
    let on =
        |upper, k| values::<f32>(&run(Op::Trilu { upper }, &[x.clone(), integers(&[], &[k])])[0]);
    assert_eq!(on(true, 0), [0.0, 1.0, 2.0, 0.0, 4.0, 5.0]);
    assert_eq!(on(false, 0), [0.0, 0.0, 0.0, 3.0, 4.0, 0.0]);
    assert_eq!(on(true, i64::MAX), [0.0; 6]);
    assert_eq!(on(true, i64::MIN), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let op = Op::ReverseSequence { batch_axis: 0, time_axis: 1 };
    let got = run(op, &[x, integers(&[2], &[2, 3])]);
    assert_eq!(values::<f32>(&got[0]), [1.0, 0.0, 2.0, 5.0, 4.0, 3.0]);
}

#[test]
fn blocks_move_between_depth_and_space() {
    let x = count_up(&[1, 8, 2, 3]);
    for crd in [false, true] {
        let space = run(Op::DepthToSpace { block: 2, crd }, std::slice::from_ref(&x));
        assert_eq!(space[0].shape(), [1, 2, 4, 6]);
        let first: Vec<f32> = values::<f32>(&space[0])[..4].to_vec();
        assert_eq!(first, if crd { [0.0, 6.0, 1.0, 7.0] } else { [0.0, 12.0, 1.0, 13.0] });
        if !crd {
            let back = run(Op::SpaceToDepth { block: 2 }, &space);
            assert_eq!(values::<f32>(&back[0]), values::<f32>(&x));
        }
    }
    assert_eq!(x.dtype(), DataType::F32);
}
