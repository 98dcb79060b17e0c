//! Random inputs for a model, with sizes for its symbolic dimensions.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::Random;
use model::sample::random_tensor;
use model::{Dim, HostPool, LaunchPlan, Tensor, ValueInfo};

use crate::failure::Failure;

/// Sizes by symbol.
pub type Bindings = BTreeMap<String, usize>;

/// Parses `SYMBOL=SIZE` arguments.
///
/// # Errors
/// When one has another form.
pub fn parse_bindings(arguments: &[String]) -> Result<Bindings, Failure> {
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

/// The symbolic dimensions of the inputs, sorted.
pub fn symbols(plan: &LaunchPlan) -> Vec<&str> {
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

/// The symbol of the batch: the first dimension of the first input.
pub fn batch_symbol(plan: &LaunchPlan) -> Option<String> {
    let shape = plan.value(*plan.inputs.first()?).shape.as_ref()?;
    match shape.first()? {
        Dim::Symbol(name) => Some(name.clone()),
        _ => None,
    }
}

/// Checks that every bound symbol is a dimension of an input.
///
/// # Errors
/// Names the first one that is not.
pub fn check_known(plan: &LaunchPlan, bindings: &Bindings) -> Result<(), Failure> {
    let known = symbols(plan);
    match bindings.keys().find(|symbol| !known.contains(&symbol.as_str())) {
        None => Ok(()),
        Some(symbol) => Err(Failure::usage(format!(
            "the model's inputs have no dimension '{symbol}'; they have: {}",
            known.join(", ")
        ))),
    }
}

/// The shape of an input under `bindings`; a dimension without binding is 1.
fn shape_of(info: &ValueInfo, bindings: &Bindings) -> Vec<usize> {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => *size,
        Dim::Symbol(symbol) => bindings.get(symbol).copied().unwrap_or(1),
        Dim::Expr(_) | Dim::Unknown => 1,
    };
    info.shape.as_deref().unwrap_or_default().iter().map(size).collect()
}

/// Random values for an input.
///
/// # Errors
/// When there is no such tensor, for example because it is too large.
pub fn random_input(
    info: &ValueInfo,
    bindings: &Bindings,
    random: &mut Random,
) -> Result<Tensor, String> {
    random_tensor(info.dtype, shape_of(info, bindings), random).map_err(|err| err.to_string())
}

/// Random values for all inputs of `plan`.
///
/// # Errors
/// When there is no such tensor, for example because it is too large.
pub fn random_inputs(
    plan: &LaunchPlan,
    bindings: &Bindings,
    random: &mut Random,
) -> Result<Vec<Tensor>, String> {
    plan.inputs.iter().map(|id| random_input(plan.value(*id), bindings, random)).collect()
}

/// Copies inputs to the pinned host pool, where a server's requests are. An input that does not fit
/// stays where it is.
pub fn in_host_pool(host_pool: Option<Arc<dyn HostPool>>, inputs: Vec<Tensor>) -> Vec<Tensor> {
    let Some(host_pool) = host_pool else { return inputs };
    inputs.into_iter().map(|tensor| tensor.copied_to(&*host_pool).unwrap_or(tensor)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings_are_parsed() {
        let bindings = parse_bindings(&["batch=4".to_string()]).unwrap();
        assert_eq!(bindings["batch"], 4);
        assert!(parse_bindings(&["batch".to_string()]).is_err());
        assert!(parse_bindings(&["batch=x".to_string()]).is_err());
    }
}
