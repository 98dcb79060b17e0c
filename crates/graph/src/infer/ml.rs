//! Trees, support vectors and labels.

use model::DataType;
use model::dim::SymDim;
use model::op::Ml;

use super::{Fact, Inferred, Operands, fail};

pub fn ml(ml: &Ml, x: &Operands) -> Inferred<Vec<Fact>> {
    let rows = || match x.shape(0) {
        Some([rows, _]) => Ok(rows.clone()),
        Some([_]) => Ok(SymDim::Fixed(1)),
        Some(other) => fail(format!("{} dimensions instead of rows and columns", other.len())),
        None => Ok(SymDim::Unknown),
    };
    match ml {
        Ml::Trees(trees) => {
            x.require(7)?;
            let dims = vec![rows()?, SymDim::from(trees.targets)];
            Ok(vec![Fact::new(real(x)?, Some(dims))])
        }
        Ml::Classify(_) => {
            x.require(2)?;
            let (rows, labels) = (rows()?, x.shape(1).and_then(|shape| shape.first().cloned()));
            let scores = match x.shape(0) {
                Some([_, columns]) if !columns.is(1) => Some(columns.clone()),
                _ => labels,
            };
            let scores = vec![rows.clone(), scores.unwrap_or(SymDim::Unknown)];
            let label = Fact::new(x.dtype(1)?, Some(vec![rows]));
            Ok(vec![label, Fact::new(real(x)?, Some(scores))])
        }
        Ml::MapLabels => {
            x.require(4)?;
            x.same_type([0, 1])?;
            let dtype = x.same_type([2, 3])?;
            Ok(vec![Fact::new(dtype, x.owned_shape(0))])
        }
        Ml::OneHotLabels { .. } => {
            x.require(2)?;
            x.same_type([0, 1])?;
            let categories = x.shape(1).and_then(|shape| shape.first().cloned());
            let dims = x.owned_shape(0).map(|mut dims| {
                dims.push(categories.unwrap_or(SymDim::Unknown));
                dims
            });
            Ok(vec![Fact::new(DataType::F32, dims)])
        }
        Ml::PostTransform(_) => Ok(vec![Fact::new(real(x)?, x.owned_shape(0))]),
        Ml::Svm(svm) => {
            x.require(4)?;
            let columns = match (svm.classes, x.has(4)) {
                (0, _) => 1,
                (classes, true) => classes,
                (classes, false) => classes * classes.saturating_sub(1) / 2,
            };
            let dims = vec![rows()?, SymDim::from(columns)];
            let votes = vec![rows()?, SymDim::from(svm.classes)];
            Ok(vec![Fact::new(real(x)?, Some(dims)), Fact::new(DataType::F32, Some(votes))])
        }
    }
}

fn real(x: &Operands) -> Inferred<DataType> {
    match x.dtype(0)? {
        dtype @ (DataType::F32 | DataType::F64) => Ok(dtype),
        other => fail(format!("{other} instead of numbers of single or double precision")),
    }
}
