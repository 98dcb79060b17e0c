//! Sizes for symbolic dimensions, and inputs made up to fit.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::Random;
use model::sample::random_tensor;
use model::{Dim, HostPool, LaunchPlan, Tensor, ValueInfo};

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
fn shape_of(info: &ValueInfo, bindings: &Bindings) -> Vec<usize> {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => *size,
        Dim::Symbol(symbol) => bindings.get(symbol).copied().unwrap_or(1),
        Dim::Expr(_) | Dim::Unknown => 1,
    };
    info.shape.as_deref().unwrap_or_default().iter().map(size).collect()
}

/// Random values for an input.
pub(crate) fn random_input(
    info: &ValueInfo,
    bindings: &Bindings,
    random: &mut Random,
) -> Result<Tensor, String> {
    random_tensor(info.dtype, shape_of(info, bindings), random).map_err(|err| err.to_string())
}

/// Random values for all inputs of `plan`.
pub(crate) fn random_inputs(
    plan: &LaunchPlan,
    bindings: &Bindings,
    random: &mut Random,
) -> Result<Vec<Tensor>, String> {
    plan.inputs.iter().map(|id| random_input(plan.value(*id), bindings, random)).collect()
}

/// The same inputs in memory of `host_pool`, as a server's requests are; those it has no room for stay where they are.
pub(crate) fn settled(host_pool: Option<Arc<dyn HostPool>>, inputs: Vec<Tensor>) -> Vec<Tensor> {
    let Some(host_pool) = host_pool else { return inputs };
    inputs.into_iter().map(|tensor| tensor.copied_to(&*host_pool).unwrap_or(tensor)).collect()
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
}
