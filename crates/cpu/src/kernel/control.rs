//! Branches and loops: kernels that run plans of their own.
//!
//! The steps of a body are kernels with yield points like all others, and there is one before each
//! of them, so a task inside a loop is preempted as soon as one outside.

mod body;
#[cfg(test)]
mod tests;

use model::DataType;
use model::op::{Control, ControlKind, Scan};

use super::layout::{reshaped, transposed};
use super::operand::{Element, elements, integer_scalar, resolve_axis};
use super::{Context, Inputs, Kernel, KernelResult, Outputs, StepFacts};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, with_value};
use body::BodyKernels;

/// The most rounds of a step, those of loops inside of it included.
const MAX_ROUNDS: usize = 1_000_000;

/// The deepest nesting of bodies; the importer allows less.
const MAX_DEPTH: usize = 32;

thread_local! {
    static DEPTH: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    /// Loops that run on this thread, and their rounds so far.
    static ROUNDS: std::cell::Cell<(usize, usize)> = const { std::cell::Cell::new((0, 0)) };
}

/// A loop that runs: a body runs on the thread of its step, so loops inside of it add to the same
/// count.
struct Running;

impl Running {
    fn start() -> Running {
        let (loops, rounds) = ROUNDS.get();
        ROUNDS.set((loops + 1, rounds));
        Running
    }

    fn count_round(&self) -> Result<(), KernelError> {
        let (loops, rounds) = ROUNDS.get();
        if rounds >= MAX_ROUNDS {
            return Err(invalid!("a loop of more than {MAX_ROUNDS} rounds"));
        }
        ROUNDS.set((loops, rounds + 1));
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let (loops, rounds) = ROUNDS.get();
        ROUNDS.set(if loops > 1 { (loops - 1, rounds) } else { (0, 0) });
    }
}

pub(crate) fn build(facts: &StepFacts, control: &Control) -> Result<Kernel, KernelError> {
    let depth = DEPTH.get();
    if depth >= MAX_DEPTH {
        return Err(invalid!("bodies nested more than {MAX_DEPTH} deep"));
    }
    DEPTH.set(depth + 1);
    let arguments = control.kind.arguments();
    let bodies: Result<Vec<BodyKernels>, KernelError> =
        control.bodies.iter().map(|body| BodyKernels::new(facts, body, arguments)).collect();
    DEPTH.set(depth);
    let bodies = bodies?;
    let resident_bytes = bodies.iter().map(|body| body.resident_bytes).sum();
    // Constants that bodies capture are theirs now.
    let first = control.kind.operands();
    let captured = (first..facts.step.inputs.len()).filter(|at| facts.constant(*at).is_some());
    let packed_inputs = captured.collect();
    let wanted = if control.kind == ControlKind::If { 2 } else { 1 };
    if bodies.len() != wanted {
        return Err(invalid!("{} bodies instead of {wanted}", bodies.len()));
    }
    let kind = control.kind.clone();
    let run = move |context: &Context, inputs: Inputs| match &kind {
        ControlKind::If => branch(context, &inputs, &bodies),
        ControlKind::Loop { carried } => rounds(context, &inputs, &bodies[0], *carried),
        ControlKind::Scan(scan) => slices(context, &inputs, &bodies[0], scan),
    };
    Ok(Kernel { run: Box::new(run), resident_bytes, packed_inputs })
}

/// The only element of a boolean value.
fn truth(value: &Value) -> Result<bool, KernelError> {
    match value {
        Value::Bool(tensor) if tensor.len() == 1 => Ok(elements(tensor)[0]),
        other => Err(invalid!("a condition of {} {:?}", other.dtype(), other.shape())),
    }
}

fn branch(context: &Context, inputs: &Inputs, bodies: &[BodyKernels]) -> KernelResult {
    let taken = usize::from(!truth(inputs.get(0)?)?);
    Ok(bodies[taken].run(context, Vec::new(), inputs)?.into_iter().collect())
}

fn scalar<T: Element + Clone>(x: T) -> Result<Value, KernelError> {
    Ok(T::wrap(&[], Buffer::filled(1, x)?))
}

/// What rounds collect: for each output the values of all, along a new first dimension. They are
/// in one buffer, which is counted; a million small values would not be.
struct Collected(Vec<Option<Value>>);

impl Collected {
    fn new(count: usize) -> Collected {
        Collected((0..count).map(|_| None).collect())
    }

    fn add(
        &mut self,
        context: &Context,
        values: impl Iterator<Item = Value>,
    ) -> Result<(), KernelError> {
        for (rows, value) in self.0.iter_mut().zip(values) {
            let shape = [&[1], value.shape()].concat();
            match rows {
                None => *rows = Some(reshaped(value, &shape)?),
                Some(rows) => {
                    with_value!(&value, row => push_row(rows, row))?;
                    value.recycle(context.pool);
                }
            }
        }
        Ok(())
    }
}

fn push_row<T: Element + Clone>(rows: &mut Value, row: &TypedTensor<T>) -> Result<(), KernelError> {
    match T::get_mut(rows).map(|rows| rows.push_row(row)).transpose()? {
        Some(true) => Ok(()),
        _ => Err("rounds collect values of different shapes".into()),
    }
}

fn rounds(context: &Context, inputs: &Inputs, body: &BodyKernels, carried: usize) -> KernelResult {
    let most = match inputs.optional(0) {
        Some(_) => usize::try_from(integer_scalar(inputs, 0)?).unwrap_or(0),
        None => usize::MAX,
    };
    let mut goes_on = inputs.optional(1).map_or(Ok(true), truth)?;
    let mut state = Vec::with_capacity(carried);
    for index in 2..2 + carried {
        state.push(inputs.get(index)?.try_clone()?);
    }
    let mut collected = Collected::new(body.outputs().saturating_sub(1 + carried));
    let running = Running::start();
    let mut round = 0;
    while goes_on && round < most {
        running.count_round()?;
        let mut arguments = vec![scalar(round as i64)?, scalar(true)?];
        arguments.append(&mut state);
        let mut outputs = body.run(context, arguments, inputs)?.into_iter();
        goes_on = truth(&outputs.next().ok_or("a body without a condition")?)?;
        state.extend(outputs.by_ref().take(carried));
        collected.add(context, outputs)?;
        round += 1;
    }
    let mut results: Outputs = state.into_iter().collect();
    for (index, rows) in collected.0.into_iter().enumerate() {
        results.push(rows.map_or_else(|| nothing(body.output_info(1 + carried + index)), Ok)?);
    }
    Ok(results)
}

fn slices(context: &Context, inputs: &Inputs, body: &BodyKernels, scan: &Scan) -> KernelResult {
    let mut state = Vec::with_capacity(scan.carried);
    for index in 0..scan.carried {
        state.push(inputs.get(index)?.try_clone()?);
    }
    let mut sequences = Vec::with_capacity(scan.inputs.len());
    for (index, (axis, _)) in scan.inputs.iter().enumerate() {
        sequences.push(axis_first(context, inputs.get(scan.carried + index)?, *axis)?);
    }
    let lengths: Vec<usize> = sequences.iter().map(|value| value.shape()[0]).collect();
    let length = lengths.first().copied().unwrap_or(0);
    if lengths.iter().any(|other| *other != length) || length > MAX_ROUNDS {
        return Err(invalid!("sequences of lengths {lengths:?}, at most {MAX_ROUNDS}"));
    }
    let mut collected = Collected::new(scan.outputs.len());
    let running = Running::start();
    for round in 0..length {
        running.count_round()?;
        let mut arguments = std::mem::take(&mut state);
        for (value, (_, backwards)) in sequences.iter().zip(&scan.inputs) {
            arguments.push(row(value, if *backwards { length - 1 - round } else { round })?);
        }
        let mut outputs = body.run(context, arguments, inputs)?.into_iter();
        state.extend(outputs.by_ref().take(scan.carried));
        collected.add(context, outputs)?;
    }
    let mut results: Outputs = state.into_iter().collect();
    for (index, rows) in collected.0.into_iter().enumerate() {
        let (axis, backwards) = scan.outputs[index];
        let mut rows = rows.map_or_else(|| nothing(body.output_info(scan.carried + index)), Ok)?;
        if backwards {
            with_value!(&mut rows, tensor => tensor.reverse_rows());
        }
        results.push(axis_from_first(context, rows, axis)?);
    }
    Ok(results)
}

/// `value` with one dimension moved to the front.
fn axis_first(context: &Context, value: &Value, axis: i64) -> Result<Value, KernelError> {
    let axis = resolve_axis(axis, value.shape().len())?;
    if axis == 0 {
        return value.try_clone();
    }
    let rest = (0..value.shape().len()).filter(|other| *other != axis);
    let perm: Vec<usize> = [axis].into_iter().chain(rest).collect();
    transposed(context.pool, value, &perm)
}

/// `value` with its first dimension moved to `axis`.
fn axis_from_first(context: &Context, value: Value, axis: i64) -> Result<Value, KernelError> {
    let rank = value.shape().len();
    let axis = resolve_axis(axis, rank)?;
    if axis == 0 {
        return Ok(value);
    }
    let mut perm: Vec<usize> = (1..rank).collect();
    perm.insert(axis, 0);
    transposed(context.pool, &value, &perm)
}

/// Slice `index` of the first dimension.
fn row(value: &Value, index: usize) -> Result<Value, KernelError> {
    fn part<T: Element + Clone>(tensor: &TypedTensor<T>, at: usize) -> Result<Value, KernelError> {
        let rest = &tensor.shape()[1..];
        let size: usize = rest.iter().product();
        Ok(T::wrap(rest, Buffer::copy_of(&elements(tensor)[at * size..][..size])?))
    }
    with_value!(value, tensor => part(tensor, index))
}

/// What no round collected.
fn nothing(info: &model::ValueInfo) -> Result<Value, KernelError> {
    let size = |dim: &model::Dim| match dim {
        model::Dim::Fixed(size) => *size,
        _ => 0,
    };
    let shape: Vec<usize> = [0].into_iter().chain(info.shape.iter().flatten().map(size)).collect();
    let empty = match info.dtype {
        DataType::String => {
            model::Tensor::from_strings(vec![0], Vec::new()).map_err(|error| error.to_string())?
        }
        dtype => model::Tensor::from_raw(dtype, vec![0], bytes::Bytes::new())
            .map_err(|error| error.to_string())?,
    };
    reshaped(Value::from_host(&empty)?, &shape)
}
