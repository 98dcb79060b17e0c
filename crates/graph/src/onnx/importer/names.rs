//! Names of dimensions that several inputs share.
//!
//! Exporters write `height` or `width` for dimensions of inputs that have nothing to do with each
//! other: a frame and a recurrent state, features and boxes. A name stands for one size only where
//! that tells a shape: where the model is known as well without it, each input has a size of its
//! own.

use std::collections::HashMap;

use super::is_name;
use crate::infer::Shape;
use crate::ir::Graph;
use crate::onnx::proto::{GraphProto, ValueInfoProto};
use model::dim::SymDim;

/// At most this many names are looked at: each costs an import.
const MAX_NAMES: usize = 4;

/// Names that stand for several sizes, with the group of each input that has them.
#[derive(Clone, Debug, Default)]
pub(super) struct SeparateNames(HashMap<(String, String), String>);

impl SeparateNames {
    /// The name of a dimension of `input` after the first.
    pub fn of<'a>(&'a self, input: &str, param: &'a str) -> &'a str {
        let own = self.0.get(&(input.to_string(), param.to_string()));
        own.map_or(param, String::as_str)
    }

    /// What is said of the names.
    pub fn warnings(&self) -> Vec<String> {
        let warning = |((input, param), own): (&(String, String), &String)| {
            format!(
                "dimension '{param}' of input '{input}' may differ from dimensions of that name \
                 in other inputs, and is called '{own}'"
            )
        };
        let mut warnings: Vec<String> = self.0.iter().map(warning).collect();
        warnings.sort();
        warnings
    }

    /// With the dimensions `param` of inputs of different kinds apart from each other.
    pub fn with(&self, source: &GraphProto, param: &str) -> SeparateNames {
        let mut separate = self.clone();
        let mut groups: Vec<&ValueInfoProto> = Vec::new();
        for info in inputs(source).filter(|info| params(info).skip(1).any(|name| name == param)) {
            match groups.iter().position(|first| same_kind(first, info)) {
                Some(0) => {}
                None if groups.is_empty() => groups.push(info),
                found => {
                    let first = found.map_or(info, |at| groups[at]);
                    let own = format!("{param}_{}", first.name);
                    separate.0.insert((info.name.clone(), param.to_string()), own);
                    if found.is_none() {
                        groups.push(info);
                    }
                }
            }
        }
        separate
    }
}

/// Names that inputs of different kinds share behind their first dimension, and that are the first
/// dimension of none.
pub(super) fn shared(source: &GraphProto) -> Vec<String> {
    let mut first_of: HashMap<&str, &ValueInfoProto> = HashMap::new();
    let mut found: Vec<String> = Vec::new();
    for info in inputs(source) {
        for name in params(info).skip(1).filter(|name| is_name(name)) {
            let first = *first_of.entry(name).or_insert(info);
            if !same_kind(first, info) && !found.iter().any(|known| known == name) {
                found.push(name.to_string());
            }
        }
    }
    found.retain(|name| !inputs(source).any(|info| params(info).next() == Some(name)));
    found.truncate(MAX_NAMES);
    found
}

/// Dimensions of all values that are known only when the model runs.
pub(super) fn unknown_dims(graph: &Graph) -> usize {
    let unknown = |shape: &Shape| match shape {
        Some(dims) => dims.iter().filter(|dim| **dim == SymDim::Unknown).count(),
        None => 1,
    };
    graph.values.iter().map(|value| unknown(&value.shape)).sum()
}

fn inputs(source: &GraphProto) -> impl Iterator<Item = &ValueInfoProto> {
    let held = |info: &&ValueInfoProto| !source.initializers.iter().any(|t| t.name == info.name);
    source.inputs.iter().filter(held)
}

/// The names of an input's dimensions; empty where there is a number.
fn params(info: &ValueInfoProto) -> impl Iterator<Item = &str> {
    let shape = info.kind.tensor.as_ref().and_then(|tensor| tensor.shape.as_ref());
    shape.into_iter().flat_map(|shape| &shape.dims).map(|dim| match dim.value {
        Some(value) if value >= 0 => "",
        _ => dim.param.as_str(),
    })
}

/// Whether two inputs have one shape and one element type. Tokens and their mask do; features and
/// the boxes they belong to do not.
fn same_kind(a: &ValueInfoProto, b: &ValueInfoProto) -> bool {
    let kind = |info: &ValueInfoProto| {
        let tensor = info.kind.tensor.clone()?;
        let dims = tensor.shape?.dims.into_iter().map(|dim| (dim.value, dim.param));
        Some((tensor.data_type, dims.collect::<Vec<_>>()))
    };
    kind(a) == kind(b)
}
