//! Inlines the model's own functions.

use std::collections::HashMap;
use std::sync::Arc;

use super::ImportError;
use super::importer::{Opsets, SourceNode};
use super::proto::{AttributeProto, FunctionProto, NodeProto};

/// The maximum nesting of functions.
const MAX_DEPTH: usize = 16;

type Key = (String, String, String);

fn key_of(node: &NodeProto) -> Key {
    (node.domain.clone(), node.op_type.clone(), node.overload.clone())
}

/// Inlines calls until none remains. `limit` bounds the number of resulting nodes.
pub(crate) fn expand(
    nodes: Vec<NodeProto>,
    functions: Vec<FunctionProto>,
    opsets: Arc<Opsets>,
    limit: usize,
) -> Result<Vec<SourceNode>, ImportError> {
    let table: HashMap<Key, FunctionProto> = functions
        .into_iter()
        .map(|f| ((f.domain.clone(), f.name.clone(), f.overload.clone()), f))
        .collect();
    let mut out = Vec::with_capacity(nodes.len());
    for (index, proto) in nodes.into_iter().enumerate() {
        let node = SourceNode::new(proto, opsets.clone(), index);
        expand_into(node, &table, 0, limit, &mut out)?;
    }
    Ok(out)
}

fn expand_into(
    node: SourceNode,
    table: &HashMap<Key, FunctionProto>,
    depth: usize,
    limit: usize,
    out: &mut Vec<SourceNode>,
) -> Result<(), ImportError> {
    if out.len() >= limit {
        let actual = out.len() as u64 + 1;
        return Err(ImportError::TooLarge { what: "nodes", actual, limit: limit as u64 });
    }
    let function = if table.is_empty() { None } else { table.get(&key_of(&node.proto)) };
    let Some(function) = function else {
        out.push(node);
        return Ok(());
    };
    if depth >= MAX_DEPTH {
        return Err(ImportError::Model(format!(
            "function '{}' is nested more than {MAX_DEPTH} deep",
            function.name
        )));
    }
    let opsets = Arc::new(Opsets::new(&function.opsets));
    let names = call_names(&node, function);
    for (index, body) in function.nodes.iter().enumerate() {
        let mut proto = body.clone();
        let rename = |name: &mut String| {
            if !name.is_empty() {
                *name = names
                    .get(name.as_str())
                    .cloned()
                    .unwrap_or_else(|| format!("{}/{name}", node.label));
            }
        };
        proto.inputs.iter_mut().for_each(rename);
        proto.outputs.iter_mut().for_each(rename);
        proto.name = if body.name.is_empty() {
            format!("{}/{}_{index}", node.label, body.op_type)
        } else {
            format!("{}/{}", node.label, body.name)
        };
        proto.attributes = resolve(&body.attributes, &node.proto.attributes, function);
        let inner = SourceNode::new(proto, opsets.clone(), index);
        expand_into(inner, table, depth + 1, limit, out)?;
    }
    Ok(())
}

/// The caller's name for each of the function's inputs and outputs; absent ones are empty.
fn call_names<'a>(node: &SourceNode, function: &'a FunctionProto) -> HashMap<&'a str, String> {
    let actual = |list: &[String], index: usize| list.get(index).cloned().unwrap_or_default();
    let inputs = function.inputs.iter().enumerate();
    let mut names: HashMap<&str, String> =
        inputs.map(|(i, name)| (name.as_str(), actual(&node.proto.inputs, i))).collect();
    for (index, name) in function.outputs.iter().enumerate() {
        let outer = actual(&node.proto.outputs, index);
        if !outer.is_empty() {
            names.insert(name, outer);
        }
    }
    names
}

/// Attributes of a body's node: references replaced by the caller's values or the defaults.
fn resolve(
    body: &[AttributeProto],
    caller: &[AttributeProto],
    function: &FunctionProto,
) -> Vec<AttributeProto> {
    let given = |name: &str| {
        caller.iter().chain(&function.defaults).find(|attribute| attribute.name == name)
    };
    body.iter()
        .filter_map(|attribute| match attribute.reference.as_str() {
            "" => Some(attribute.clone()),
            reference => given(reference)
                .map(|found| AttributeProto { name: attribute.name.clone(), ..found.clone() }),
        })
        .collect()
}
