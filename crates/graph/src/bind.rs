//! Binds symbols to sizes.

use crate::infer::InferError;
use crate::ir::Graph;
use model::dim::SymDim;

/// The same graph with symbols replaced by sizes and every shape inferred again. Shapes are all
/// numbers unless they depend on data.
pub fn bind(graph: &Graph, bindings: &[(&str, usize)]) -> Result<Graph, InferError> {
    let lookup = |name: &str| {
        let found = bindings.iter().find(|(symbol, _)| *symbol == name);
        found.and_then(|(_, size)| i64::try_from(*size).ok())
    };
    let mut bound = graph.clone();
    for body in bound.bodies.values_mut().flatten() {
        *body = bind(body, bindings)?;
    }
    for id in &bound.inputs {
        let value = &mut bound.values[id.index()];
        let substitute = |dim: &SymDim| dim.substitute(&lookup);
        value.shape = value.shape.as_ref().map(|shape| shape.iter().map(substitute).collect());
    }
    bound.infer_all().map_err(|(node, error)| InferError(format!("node '{node}': {error}")))?;
    Ok(bound)
}
