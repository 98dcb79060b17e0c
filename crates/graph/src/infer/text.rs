//! Strings.

use model::DataType;
use model::dim::SymDim;
use model::op::Text;

use super::shape::broadcast_all;
use super::{Fact, Inferred, Operands, fail};

pub fn text(text: &Text, x: &Operands) -> Inferred<Vec<Fact>> {
    let strings = |index: usize| match x.dtype(index)? {
        DataType::String => Ok(()),
        other => fail(format!("{other} instead of strings")),
    };
    let longer = || {
        x.owned_shape(0).map(|mut dims| {
            dims.push(SymDim::Unknown);
            dims
        })
    };
    match text {
        Text::Join => {
            strings(0)?;
            strings(1)?;
            let shape = broadcast_all([0, 1].map(|index| x.shape(index)))?;
            Ok(vec![Fact::new(DataType::String, shape)])
        }
        Text::Split { .. } => {
            strings(0)?;
            let counts = Fact::new(DataType::I64, x.owned_shape(0));
            Ok(vec![Fact::new(DataType::String, longer()), counts])
        }
        Text::Match { .. } => {
            strings(0)?;
            Ok(vec![Fact::new(DataType::Bool, x.owned_shape(0))])
        }
        Text::Normalize { stopwords, .. } => {
            strings(0)?;
            let dims = x.owned_shape(0).map(|mut dims| {
                if let Some(last) = dims.last_mut().filter(|_| !stopwords.is_empty()) {
                    *last = SymDim::Unknown;
                }
                dims
            });
            Ok(vec![Fact::new(DataType::String, dims)])
        }
        Text::Tokenize(_) => {
            strings(0)?;
            Ok(vec![Fact::new(DataType::String, longer())])
        }
        Text::TfIdf(tf_idf) => {
            x.require(4)?;
            let columns = SymDim::from(tf_idf.columns);
            let dims = match x.shape(0) {
                Some([]) | Some([_]) => Some(vec![columns]),
                Some([rows, _]) => Some(vec![rows.clone(), columns]),
                Some(other) => return fail(format!("{} dimensions", other.len())),
                None => None,
            };
            Ok(vec![Fact::new(DataType::F32, dims)])
        }
    }
}
