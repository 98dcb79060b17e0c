use model::op::*;

use super::super::testing::*;

fn resize(mode: ResizeMode, coordinates: CoordinateMode) -> Resize {
    Resize {
        mode,
        coordinates,
        nearest: NearestMode::RoundPreferFloor,
        cubic_coefficient: -0.75,
        exclude_outside: false,
        extrapolation_value: 0.0,
        antialias: false,
        axes: None,
        keep_aspect: AspectPolicy::Stretch,
    }
}

fn sized(op: Resize, x: &model::Tensor, sizes: &[i64]) -> Result<model::Tensor, String> {
    let inputs = [Some(x.clone()), None, None, Some(integers(&[sizes.len()], sizes))];
    try_run(Op::Resize(op), &inputs, 1).map(|mut out| out.remove(0))
}

#[test]
fn linear_halves_and_doubles() {
    let x = floats(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let op = resize(ResizeMode::Linear, CoordinateMode::HalfPixel);
    let up = sized(op.clone(), &x, &[1, 1, 4, 4]).unwrap();
    let want =
        [1.0, 1.25, 1.75, 2.0, 1.5, 1.75, 2.25, 2.5, 2.5, 2.75, 3.25, 3.5, 3.0, 3.25, 3.75, 4.0];
    assert_eq!(values::<f32>(&up), want);
    assert_eq!(values::<f32>(&sized(op, &x, &[1, 1, 1, 1]).unwrap()), [2.5]);
    let corners = resize(ResizeMode::Linear, CoordinateMode::AlignCorners);
    let line = sized(corners, &floats(&[2], &[0.0, 3.0]), &[4]).unwrap();
    assert_eq!(values::<f32>(&line), [0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn nearest_moves_any_type() {
    let op = resize(ResizeMode::Nearest, CoordinateMode::Asymmetric);
    let got = sized(op, &integers(&[1, 2], &[i64::MAX, 7]), &[2, 4]).unwrap();
    assert_eq!(values::<i64>(&got), [i64::MAX, i64::MAX, 7, 7, i64::MAX, i64::MAX, 7, 7]);
}

#[test]
fn hostile_sizes_are_refused() {
    let x = floats(&[1, 1, 2, 2], &[1.0; 4]);
    let op = resize(ResizeMode::Linear, CoordinateMode::HalfPixel);
    assert!(sized(op.clone(), &x, &[1, 1, 1 << 20, 1 << 19]).unwrap_err().contains("bytes"));
    assert!(sized(op.clone(), &x, &[1, 1, -4, 4]).unwrap_err().contains("negative"));
    assert!(sized(op.clone(), &x, &[1, 1, 4]).is_err());
    assert!(sized(op.clone(), &floats(&[1, 0], &[]), &[1, 4]).is_err());
    let scales = floats(&[4], &[1.0, 1.0, f32::NAN, 1.0]);
    assert!(try_run(Op::Resize(op), &[Some(x), None, Some(scales)], 1).is_err());
}

#[test]
fn grids_read_pixels_and_borders() {
    let x = floats(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let grid = floats(&[1, 1, 3, 2], &[0.0, 0.0, -1.0, -1.0, 5.0, f32::INFINITY]);
    let on = |padding| {
        let op = Op::GridSample { mode: ResizeMode::Linear, padding, align_corners: true };
        values::<f32>(&run(op, &[x.clone(), grid.clone()])[0])
    };
    assert_eq!(on(GridPadding::Zeros), [2.5, 1.0, 0.0]);
    assert_eq!(on(GridPadding::Border), [2.5, 1.0, 4.0]);
    assert!(on(GridPadding::Reflection)[..2] == [2.5, 1.0]);
}
