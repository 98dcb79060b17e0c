//! Control flow: from what bodies give to what their step gives.

use model::dim::SymDim;
use model::op::{Control, ControlKind};
use model::{DataType, Dim};

use super::{Fact, Inferred, Operands, Shape, fail};

/// The facts of the outputs of body `index`.
fn given(control: &Control, index: usize, x: &Operands) -> Inferred<Vec<Fact>> {
    if let Some(body) = x.graph.bodies.get(&control.id).and_then(|bodies| bodies.get(index)) {
        let fact = |id: &model::ValueId| {
            let value = body.value(*id);
            Fact { kind: value.kind, ..Fact::new(value.dtype, value.shape.clone()) }
        };
        return Ok(body.outputs.iter().map(fact).collect());
    }
    let Some(body) = control.bodies.get(index) else { return fail("a body is missing") };
    let fact = |id: &model::ValueId| {
        let info = body.plan.value(*id);
        let dims = |shape: &Vec<Dim>| shape.iter().map(SymDim::from).collect();
        Fact::new(info.dtype, info.shape.as_ref().map(dims))
    };
    Ok(body.plan.outputs.iter().map(fact).collect())
}

/// What is known of a value that is one of two.
fn either(a: &Fact, b: &Fact) -> Inferred<Fact> {
    if a.dtype != b.dtype || a.kind != b.kind {
        return fail(format!("a value that is {} or {}", a.dtype, b.dtype));
    }
    Ok(Fact { kind: a.kind, ..Fact::new(a.dtype, common(&a.shape, &b.shape)) })
}

/// The sizes that two shapes have in common.
pub(crate) fn common(a: &Shape, b: &Shape) -> Shape {
    let (a, b) = (a.as_ref()?, b.as_ref()?);
    let dim = |(a, b): (&SymDim, &SymDim)| if a.is_same(b) { a.clone() } else { SymDim::Unknown };
    (a.len() == b.len()).then(|| a.iter().zip(b).map(dim).collect())
}

fn operand(x: &Operands, index: usize) -> Inferred<Fact> {
    let Some(id) = x.id(index) else { return fail(format!("operand {index} is missing")) };
    let value = x.graph.value(id);
    Ok(Fact { kind: value.kind, ..Fact::new(value.dtype, value.shape.clone()) })
}

/// What is collected along a new dimension.
fn collected(fact: &Fact, axis: i64, length: SymDim) -> Inferred<Fact> {
    let Some(mut dims) = fact.shape.clone() else { return Ok(Fact::new(fact.dtype, None)) };
    let rank = dims.len() as i64 + 1;
    let at = if axis < 0 { axis + rank } else { axis };
    match usize::try_from(at).ok().filter(|at| *at <= dims.len()) {
        Some(at) => dims.insert(at, length),
        None => return fail(format!("axis {axis} of what is collected")),
    }
    Ok(Fact::new(fact.dtype, Some(dims)))
}

pub fn control(control: &Control, x: &Operands) -> Inferred<Vec<Fact>> {
    match &control.kind {
        ControlKind::If => {
            if x.dtype(0)? != DataType::Bool {
                return fail("the condition is not boolean");
            }
            let (on, off) = (given(control, 0, x)?, given(control, 1, x)?);
            if on.len() != off.len() {
                return fail("branches with different numbers of outputs");
            }
            on.iter().zip(&off).map(|(on, off)| either(on, off)).collect()
        }
        ControlKind::Loop { carried } => {
            let facts = given(control, 0, x)?;
            if facts.len() < 1 + carried {
                return fail("a body with too few outputs");
            }
            let mut out = Vec::with_capacity(facts.len());
            for index in 0..*carried {
                out.push(either(&operand(x, 2 + index)?, &facts[1 + index])?);
            }
            for fact in &facts[1 + carried..] {
                out.push(collected(fact, 0, SymDim::Unknown)?);
            }
            Ok(out)
        }
        ControlKind::Scan(scan) => {
            let facts = given(control, 0, x)?;
            if facts.len() != scan.carried + scan.outputs.len() {
                return fail("a body with another number of outputs");
            }
            let mut out = Vec::with_capacity(facts.len());
            for (index, fact) in facts[..scan.carried].iter().enumerate() {
                out.push(either(&operand(x, index)?, fact)?);
            }
            let length = scan.inputs.first().and_then(|(axis, _)| {
                let shape = x.shape(scan.carried)?;
                let at = if *axis < 0 { axis + shape.len() as i64 } else { *axis };
                shape.get(usize::try_from(at).ok()?).cloned()
            });
            let length = length.unwrap_or(SymDim::Unknown);
            for (fact, (axis, _)) in facts[scan.carried..].iter().zip(&scan.outputs) {
                out.push(collected(fact, *axis, length.clone())?);
            }
            Ok(out)
        }
    }
}
