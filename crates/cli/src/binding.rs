//! Sizes for symbolic dimensions, and inputs made up to fit.

use std::collections::BTreeMap;

use base::Random;
use model::{DataType, Dim, LaunchPlan, Tensor, ValueInfo};

use crate::failure::Failure;

/// Symbol to size.
pub(crate) type Bindings = BTreeMap<String, usize>;

/// The bindings in `SYMBOL=SIZE` arguments.
pub(crate) fn parse(arguments: &[String]) -> Result<Bindings, Failure> {
    let one = |argument: &String| {
        let (symbol, size) = argument.split_once('=')?;
        Some((symbol.to_string(), size.parse().ok()?))
    };
    arguments
        .iter()
        .map(|argument| {
            one(argument).ok_or_else(|| {
                Failure::usage(format!("'{argument}' is not of the form SYMBOL=SIZE"))
            })
        })
        .collect()
}

/// The symbolic dimensions of the inputs.
pub(crate) fn symbols(plan: &LaunchPlan) -> Vec<&str> {
    let dims = plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten();
    let mut symbols: Vec<&str> = dims
        .filter_map(|dim| match dim {
            Dim::Symbol(name) => Some(name.as_str()),
            _ => None,
        })
        .collect();
    symbols.sort_unstable();
    symbols.dedup();
    symbols
}

/// Fails for a name that no input's shape has.
pub(crate) fn check_known(plan: &LaunchPlan, bindings: &Bindings) -> Result<(), Failure> {
    let known = symbols(plan);
    match bindings.keys().find(|symbol| !known.contains(&symbol.as_str())) {
        None => Ok(()),
        Some(symbol) => Err(Failure::usage(format!(
            "the model's inputs have no dimension '{symbol}'; they have: {}",
            known.join(", ")
        ))),
    }
}

/// The shape of an input under `bindings`; whatever nobody bound is 1.
pub(crate) fn shape_of(info: &ValueInfo, bindings: &Bindings) -> Vec<usize> {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => *size,
        Dim::Symbol(symbol) => bindings.get(symbol).copied().unwrap_or(1),
        Dim::Unknown => 1,
    };
    info.shape.as_deref().unwrap_or_default().iter().map(size).collect()
}

/// A random tensor for an input. Whole numbers are 0 or 1, which any vocabulary has.
pub(crate) fn random_tensor(
    dtype: DataType,
    shape: Vec<usize>,
    random: &mut Random,
) -> Result<Tensor, String> {
    let count = model::tensor::element_count(&shape).map_err(|err| err.to_string())?;
    macro_rules! whole {
        ($rust:ty) => {
            Tensor::from_vec(shape, (0..count).map(|_| random.below(2) as $rust).collect())
        };
    }
    macro_rules! real {
        ($convert:expr) => {{
            let values = (0..count).map(|_| $convert(random.symmetric_f32())).collect::<Vec<_>>();
            Tensor::from_vec(shape, values)
        }};
    }
    match dtype {
        DataType::F32 => real!(|x: f32| x),
        DataType::F64 => real!(f64::from),
        DataType::F16 => real!(half::f16::from_f32),
        DataType::BF16 => real!(half::bf16::from_f32),
        DataType::U8 => whole!(u8),
        DataType::U16 => whole!(u16),
        DataType::U32 => whole!(u32),
        DataType::U64 => whole!(u64),
        DataType::I8 => whole!(i8),
        DataType::I16 => whole!(i16),
        DataType::I32 => whole!(i32),
        DataType::I64 => whole!(i64),
        DataType::Bool => {
            let bytes: Vec<u8> = (0..count).map(|_| random.below(2) as u8).collect();
            Tensor::from_raw(DataType::Bool, shape, bytes.into())
        }
        DataType::String => {
            Tensor::from_strings(shape, vec![bytes::Bytes::from_static(b"text"); count])
        }
    }
    .map_err(|err| err.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings_are_read() {
        let bindings = parse(&["batch=4".to_string()]).unwrap();
        assert_eq!(bindings["batch"], 4);
        assert!(parse(&["batch".to_string()]).is_err());
        assert!(parse(&["batch=x".to_string()]).is_err());
    }

    #[test]
    fn every_type_has_random_values() {
        for dtype in DataType::ALL {
            let tensor = random_tensor(dtype, vec![2, 3], &mut Random::new(1)).unwrap();
            assert_eq!((tensor.dtype(), tensor.len()), (dtype, 6));
        }
        assert!(random_tensor(DataType::F32, vec![usize::MAX, 3], &mut Random::new(1)).is_err());
    }
}
