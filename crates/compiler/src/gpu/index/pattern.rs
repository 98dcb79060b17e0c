//! Tensors computed from their indices: chains of element-wise operators with coordinates.

use model::op::{Binary, Compare};

use super::super::draft::StepDraft;
use super::super::elementwise::{Expr, work};
use super::super::loop_nest::computed;
use super::super::view::{Element, View};

/// `values` are off and on; on is where the index along `axis` equals that in `indices`.
pub fn one_hot(axis: usize, indices: &View, values: &View, y: &View) -> Result<StepDraft, String> {
    if axis > indices.shape.len() || values.shape != [2] || y.shape.len() != indices.shape.len() + 1
    {
        return Err(format!(
            "one-hot of {:?} along {axis} as {:?} is not supported",
            indices.shape, y.shape
        ));
    }
    let depth = i64::try_from(y.shape[axis]).map_err(|_| "a depth beyond counting".to_string())?;
    let mut wide = indices.clone();
    wide.shape.insert(axis, 1);
    wide.strides.insert(axis, 0);
    let value = |at: usize| values.sliced(0, at, 1, 1);
    let index = || Box::new(Expr::Cast(Element::I64, Box::new(Expr::Input(0))));
    let negative = Expr::Compare(Compare::Less, index(), long(0));
    let wrapped = Expr::Binary(Binary::Add, index(), long(depth));
    let counted = Expr::Where(Box::new(negative), Box::new(wrapped), index());
    let hit = Expr::Compare(Compare::Equal, Box::new(counted), Box::new(Expr::Coordinate(axis)));
    let expr = Expr::Where(Box::new(hit), Box::new(Expr::Input(2)), Box::new(Expr::Input(1)));
    Ok(StepDraft { op: "OneHot", ..work(&expr, &[wide, value(0), value(1)], y)? })
}

/// `start + i * delta`; both are views of one element of the output's type.
pub fn range(start: &View, delta: &View, y: &View) -> Result<StepDraft, String> {
    if y.shape.len() != 1 {
        return Err(format!("range of shape {:?} is not supported", y.shape));
    }
    let position = Expr::Cast(computed(y.element), Box::new(Expr::Coordinate(0)));
    let way = Expr::Binary(Binary::Mul, Box::new(position), Box::new(Expr::Input(1)));
    let expr = Expr::Binary(Binary::Add, Box::new(Expr::Input(0)), Box::new(way));
    Ok(StepDraft { op: "Range", ..work(&expr, &[start.clone(), delta.clone()], y)? })
}

/// The triangle of the last two dimensions above (`upper`) or below diagonal `k`, zeros elsewhere.
pub fn trilu(upper: bool, k: i64, x: &View, y: &View) -> Result<StepDraft, String> {
    let compare = if upper { Compare::GreaterOrEqual } else { Compare::LessOrEqual };
    let kept = diagonal(compare, k, y)?;
    let expr =
        Expr::Where(Box::new(kept), Box::new(Expr::Input(0)), Box::new(constant(x.element, 0)));
    Ok(StepDraft { op: "Trilu", ..work(&expr, std::slice::from_ref(x), y)? })
}

/// Ones on diagonal `k` of a matrix, zeros elsewhere.
pub fn eye_like(k: i64, y: &View) -> Result<StepDraft, String> {
    let hit = diagonal(Compare::Equal, k, y)?;
    let (one, zero) = (constant(y.element, 1), constant(y.element, 0));
    let expr = Expr::Where(Box::new(hit), Box::new(one), Box::new(zero));
    Ok(StepDraft { op: "EyeLike", ..work(&expr, &[], y)? })
}

/// Compares the diagonal of an element in the last two dimensions with `k`.
fn diagonal(compare: Compare, k: i64, y: &View) -> Result<Expr, String> {
    let rank = y.shape.len();
    if rank < 2 {
        return Err(format!("no matrix: {:?}", y.shape));
    }
    let (row, column) = (Expr::Coordinate(rank - 2), Expr::Coordinate(rank - 1));
    let diagonal = Expr::Binary(Binary::Sub, Box::new(column), Box::new(row));
    Ok(Expr::Compare(compare, Box::new(diagonal), long(k)))
}

fn long(value: i64) -> Box<Expr> {
    Box::new(Expr::Integer(Element::I64, value))
}

/// A small number in the type that `element` is computed in.
fn constant(element: Element, value: i8) -> Expr {
    match computed(element) {
        Element::F32 => Expr::Float(f32::from(value)),
        Element::F64 => Expr::Double(f64::from(value)),
        other => Expr::Integer(other, i64::from(value)),
    }
}
