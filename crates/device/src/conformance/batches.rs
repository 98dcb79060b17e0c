//! Batches: every member gets its own rows back.

use std::sync::Arc;

use base::Random;
use model::config::CopyTime;
use model::op::{Binary, MatMul, Op, Unary};
use model::{DataType, Dim, HostPool, Tensor};

use super::plans::{Builder, noise, reals};
use super::{ConformanceReport, Stop, TestQueue, ensure, load};
use crate::batch::split;
use crate::{Device, DeviceError, Program, StagedInputs};

/// Columns of an input.
const WIDTH: usize = 33;

/// Allowed error between a row of a batch and the same row alone, which another kernel may compute.
const TOLERANCE: f64 = 2e-4;

pub(super) fn run(device: &dyn Device, report: &mut ConformanceReport) {
    for (name, copy) in [("early", CopyTime::Early), ("late", CopyTime::Late)] {
        let case = |rows: &'static [usize]| move || together(device, copy, rows);
        let cases: [(&str, &[usize]); 4] = [
            ("one request", &[1]),
            ("two requests", &[1, 1]),
            ("an odd number of rows", &[1, 2, 1, 1]),
            ("requests of several rows", &[3, 1, 4, 2, 6]),
        ];
        for (what, rows) in cases {
            report.add(&format!("a batch of {what}, copied {name}"), case(rows)());
        }
    }
    if let Some(host_pool) = device.host_pool() {
        for (name, copy) in [("early", CopyTime::Early), ("late", CopyTime::Late)] {
            let what =
                format!("inputs in the pinned host pool, alone and in a batch copied {name}");
            report.add(&what, host_pool_inputs(device, &*host_pool, copy));
        }
    }
    report.add("staged inputs are checked", checked(device));
    report.add("more requests wait than the input pool holds", many(device));
    report.add("dropped inputs do not affect other members", dropped_inputs(device));
    report.add("prepared batches are reported", prepared(device));
}

/// `tanh(x @ weight) + y`, with two inputs that have a batch dimension.
fn program(device: &dyn Device) -> Result<Arc<dyn Program>, Stop> {
    let mut builder = Builder::default();
    let rows = || vec![Dim::Symbol("batch".to_string()), Dim::Fixed(WIDTH)];
    let (x, y) = (builder.input_of(DataType::F32, rows()), builder.input_of(DataType::F32, rows()));
    let weight = builder.constant(noise(&mut Random::new(7), &[WIDTH, WIDTH]));
    let product = builder.real(Op::MatMul(MatMul::default()), &[x, weight]);
    let bent = builder.real(Op::Unary(Unary::Tanh), &[product]);
    let sum = builder.real(Op::Binary(Binary::Add), &[bent, y]);
    load(device, builder.finish(&[sum]))
}

fn request(random: &mut Random, rows: usize) -> Vec<Tensor> {
    (0..2).map(|_| noise(random, &[rows, WIDTH])).collect()
}

fn stage(
    program: &dyn Program,
    inputs: &[Tensor],
    copy: CopyTime,
) -> Result<Box<dyn StagedInputs>, Stop> {
    let staged = program
        .stage(inputs.to_vec(), copy, &mut || {})
        .map_err(|err| format!("not staged: {err}"))?;
    let rows = inputs[0].shape()[0];
    ensure(staged.rows() == rows, format!("{} rows instead of {rows}", staged.rows()))?;
    Ok(staged)
}

/// Runs staged inputs as one batch and compares each member with a run of its own.
fn compare(
    device: &dyn Device,
    program: &dyn Program,
    requests: &[Vec<Tensor>],
    staged: Vec<Box<dyn StagedInputs>>,
) -> Result<(), Stop> {
    let lane = TestQueue::open(device, 0, 1)?;
    let task = program.gather(staged).map_err(|err| format!("not gathered: {err}"))?;
    let outputs = lane.outputs(task)?;
    let rows: Vec<usize> = requests.iter().map(|request| request[0].shape()[0]).collect();
    let apart = split(&outputs, &rows).map_err(|err| err.to_string())?;
    let tolerance = TOLERANCE.max(16.0 * device.info().rounding);
    for (index, (request, got)) in requests.iter().zip(&apart).enumerate() {
        let alone = program.prepare(request.clone()).map_err(|err| err.to_string())?;
        let want = lane.outputs(alone)?;
        let (got, want) = (values(&got[0])?, values(&want[0])?);
        ensure(got.len() == want.len(), format!("request {index} got {} values", got.len()))?;
        for (got, want) in got.iter().zip(&want) {
            let off = f64::from((got - want).abs());
            ensure(off <= tolerance, format!("request {index} got {got} instead of {want}"))?;
        }
    }
    Ok(())
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, Stop> {
    tensor.to_vec().ok_or_else(|| Stop::Wrong("an output of another type".to_string()))
}

fn together(device: &dyn Device, copy: CopyTime, rows: &[usize]) -> Result<(), Stop> {
    let program = program(device)?;
    let mut random = Random::new(rows.len() as u64);
    // Twice, since memory is reused the second time.
    for _ in 0..2 {
        let requests: Vec<_> = rows.iter().map(|rows| request(&mut random, *rows)).collect();
        let staged = requests.iter().map(|inputs| stage(&*program, inputs, copy));
        let staged = staged.collect::<Result<Vec<_>, _>>()?;
        compare(device, &*program, &requests, staged)?;
    }
    Ok(())
}

/// Some inputs in the pinned host pool, at any offset, beside some that are not.
fn host_pool_inputs(
    device: &dyn Device,
    host_pool: &dyn HostPool,
    copy: CopyTime,
) -> Result<(), Stop> {
    let program = program(device)?;
    let lane = TestQueue::open(device, 0, 1)?;
    let mut random = Random::new(11);
    for _ in 0..20 {
        let plain = request(&mut random, 4);
        let move_over = |tensor: &Tensor| tensor.copied_to(host_pool);
        let moved: Vec<Tensor> = plain.iter().filter_map(move_over).collect();
        ensure(moved == plain, "the pinned host pool does not hold what was written")?;
        let row = |request: &[Tensor], row: usize| -> Vec<Tensor> {
            request.iter().filter_map(|tensor| tensor.rows(row..row + 1)).collect()
        };
        let requests: Vec<_> =
            (0..4).map(|at| row(if at == 1 { &plain } else { &moved }, at)).collect();
        let staged = requests.iter().map(|inputs| stage(&*program, inputs, copy));
        compare(device, &*program, &requests, staged.collect::<Result<Vec<_>, _>>()?)?;
        let [got, want] = [moved, plain].map(|inputs| {
            let task = program.prepare(inputs).map_err(|err| err.to_string())?;
            lane.outputs(task)
        });
        ensure(got? == want?, "the same inputs elsewhere give something else")?;
    }
    Ok(())
}

fn checked(device: &dyn Device) -> Result<(), Stop> {
    let program = program(device)?;
    let of = |rows: usize, width: usize| reals(&[rows, width], vec![0.0; rows * width]);
    let bad = [vec![of(1, WIDTH)], vec![of(1, WIDTH), of(1, 2)], vec![of(1, WIDTH), of(2, WIDTH)]];
    for inputs in bad {
        match program.stage(inputs, CopyTime::Early, &mut || {}) {
            Err(DeviceError::BadInput(_)) => {}
            Err(other) => return Err(format!("bad inputs give '{other}'").into()),
            Ok(_) => return Err("bad inputs were staged".into()),
        }
    }
    Ok(())
}

/// Far more rows wait than any input pool has; batches are formed from both ends.
fn many(device: &dyn Device) -> Result<(), Stop> {
    let program = program(device)?;
    let mut random = Random::new(3);
    let requests: Vec<_> = (0..600).map(|_| request(&mut random, 1)).collect();
    let staged = requests.iter().map(|inputs| stage(&*program, inputs, CopyTime::Early));
    let mut staged = staged.collect::<Result<Vec<_>, _>>()?;
    let last = staged.split_off(596);
    compare(device, &*program, &requests[596..], last)?;
    staged.truncate(4);
    compare(device, &*program, &requests[..4], staged)
}

fn dropped_inputs(device: &dyn Device) -> Result<(), Stop> {
    let program = program(device)?;
    let mut random = Random::new(4);
    for round in 0..40 {
        let requests: Vec<_> = (0..9).map(|_| request(&mut random, 1)).collect();
        let staged = requests.iter().map(|inputs| stage(&*program, inputs, CopyTime::Early));
        let staged = staged.collect::<Result<Vec<_>, _>>()?;
        let kept = |index: usize| !(index + round).is_multiple_of(3);
        let mut remaining = Vec::new();
        for (index, staged) in staged.into_iter().enumerate() {
            if kept(index) {
                remaining.push(staged);
            }
        }
        let requests: Vec<_> =
            requests.into_iter().enumerate().filter(|(i, _)| kept(*i)).map(|(_, r)| r).collect();
        compare(device, &*program, &requests, remaining)?;
    }
    Ok(())
}

fn prepared(device: &dyn Device) -> Result<(), Stop> {
    let program = program(device)?;
    program.prepare_batches(&[], &[1, 2, 2, 4]).map_err(|err| format!("not prepared: {err}"))?;
    let ready = program.prepared_batches(&[]);
    let all = ready.as_ref().is_none_or(|ready| [1, 2, 4].iter().all(|size| ready.contains(size)));
    ensure(all, format!("prepared are {ready:?} after 1, 2 and 4 were requested"))?;
    // Three rows on a plan of four, whose last row has stale data.
    for round in 0..3 {
        let mut random = Random::new(round);
        let rows = if round == 0 { 4 } else { 3 };
        let requests: Vec<_> = (0..rows).map(|_| request(&mut random, 1)).collect();
        let staged = requests.iter().map(|inputs| stage(&*program, inputs, CopyTime::Early));
        let staged = staged.collect::<Result<Vec<_>, _>>()?;
        compare(device, &*program, &requests, staged)?;
    }
    Ok(())
}
