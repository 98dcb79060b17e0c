//! Inlines the model's own functions.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::ImportError;
use super::importer::{Opsets, SourceNode};
use super::proto::{AttributeProto, FunctionProto, NodeProto};

/// The maximum nesting of functions.
const MAX_DEPTH: usize = 16;

/// The maximum memory of copied bodies. Every call adds its name to those inside of it, so that
/// names grow with every level.
const MAX_EXPANDED_BYTES: usize = 512 << 20;

type Key = (String, String, String);

fn key_of(node: &NodeProto) -> Key {
    (node.domain.clone(), node.op_type.clone(), node.overload.clone())
}

/// One call of a function: how the graphs inside of its nodes name values and attributes.
#[derive(Debug)]
pub(crate) struct Call {
    /// The caller's names of the function's inputs and outputs.
    names: HashMap<String, String>,
    label: String,
    /// What attributes of the function are, given or by default.
    attributes: Vec<AttributeProto>,
}

impl Call {
    /// The name outside of the function for `name` in it.
    pub fn rename(&self, name: &mut String) {
        if !name.is_empty() {
            *name = match self.names.get(name) {
                Some(outer) => outer.clone(),
                None => format!("{}/{name}", self.label),
            };
        }
    }

    /// Attributes of a node in a graph inside of the function.
    pub fn resolve(&self, attributes: &mut Vec<AttributeProto>) {
        if attributes.iter().any(|attribute| !attribute.reference.is_empty()) {
            *attributes = resolve(attributes, &self.attributes);
        }
    }

    /// Bytes that a copied name may take beside its own.
    pub fn name_bytes(&self) -> usize {
        let longest = self.names.values().map(String::len).max().unwrap_or(0);
        longest.max(self.label.len() + 1)
    }
}

/// The model's own functions, and what expanding their calls has cost so far.
#[derive(Default)]
pub(crate) struct Functions {
    table: HashMap<Key, Arc<FunctionProto>>,
    /// The maximum number of nodes of one expansion, and of calls in all.
    limit: usize,
    /// Calls expanded: functions without nodes cost time too.
    calls: usize,
    /// Bytes of the copied bodies and their names.
    bytes: usize,
}

impl Functions {
    pub fn new(functions: Vec<FunctionProto>, limit: usize) -> Functions {
        let key = |f: &FunctionProto| (f.domain.clone(), f.name.clone(), f.overload.clone());
        let table = functions.into_iter().map(|f| (key(&f), Arc::new(f))).collect();
        Functions { table, limit, calls: 0, bytes: 0 }
    }

    /// Inlines calls until none remains.
    pub fn expand(&mut self, nodes: Vec<SourceNode>) -> Result<Vec<SourceNode>, ImportError> {
        if self.table.is_empty() {
            self.check_limit("nodes", nodes.len().saturating_sub(1))?;
            return Ok(nodes);
        }
        let mut out = Vec::with_capacity(nodes.len());
        for node in nodes {
            self.add(node, 0, &mut out)?;
        }
        Ok(out)
    }

    fn check_limit(&self, what: &'static str, actual: usize) -> Result<(), ImportError> {
        match actual >= self.limit {
            false => Ok(()),
            true => {
                let (actual, limit) = (actual as u64 + 1, self.limit as u64);
                Err(ImportError::TooLarge { what, actual, limit })
            }
        }
    }

    /// Counts memory of a copy before it is made.
    fn count_bytes(&mut self, bytes: usize) -> Result<(), ImportError> {
        self.bytes = self.bytes.saturating_add(bytes);
        match self.bytes <= MAX_EXPANDED_BYTES {
            true => Ok(()),
            false => Err(ImportError::TooLarge {
                what: "bytes in expanded functions",
                actual: self.bytes as u64,
                limit: MAX_EXPANDED_BYTES as u64,
            }),
        }
    }

    /// Adds `node`, or the body of the function that it calls.
    fn add(
        &mut self,
        node: SourceNode,
        depth: usize,
        out: &mut Vec<SourceNode>,
    ) -> Result<(), ImportError> {
        self.check_limit("nodes", out.len())?;
        let Some(function) = self.table.get(&key_of(&node.proto)).cloned() else {
            out.push(node);
            return Ok(());
        };
        if depth >= MAX_DEPTH {
            return Err(ImportError::Model(format!(
                "function '{}' is nested more than {MAX_DEPTH} deep",
                function.name
            )));
        }
        self.calls += 1;
        self.check_limit("calls of functions", self.calls)?;
        let opsets = Arc::new(Opsets::new(&function.opsets));
        let given = node.proto.attributes.iter().chain(&function.defaults);
        let call = Arc::new(Call {
            names: call_names(&node, &function),
            label: node.label.clone(),
            attributes: given.cloned().collect(),
        });
        let given: usize = call.attributes.iter().map(attribute_bytes).sum();
        self.count_bytes(given)?;
        for (index, body) in function.nodes.iter().enumerate() {
            self.count_bytes(copied_bytes(body, &node, &function))?;
            let mut proto = body.clone();
            proto.inputs.iter_mut().for_each(|name| call.rename(name));
            proto.outputs.iter_mut().for_each(|name| call.rename(name));
            proto.name = if body.name.is_empty() {
                format!("{}/{}_{index}", node.label, body.op_type)
            } else {
                format!("{}/{}", node.label, body.name)
            };
            proto.attributes = resolve(&body.attributes, &call.attributes);
            let inner = SourceNode::new(proto, opsets.clone(), index).inside(call.clone());
            self.add(inner, depth + 1, out)?;
        }
        Ok(())
    }
}

/// The most bytes that a copy of `body` takes for `call`.
fn copied_bytes(body: &NodeProto, call: &SourceNode, function: &FunctionProto) -> usize {
    let longest = |names: &[String]| names.iter().map(String::len).max().unwrap_or(0);
    let given = longest(&call.proto.inputs).max(longest(&call.proto.outputs));
    let name = |own: usize| size_of::<String>() + given.max(call.label.len() + 1 + own);
    let values = body.inputs.iter().chain(&body.outputs).map(|own| name(own.len()));
    // The node's name, and once more as its label.
    let names = 2 * name(body.name.len().max(body.op_type.len() + 20)) + values.sum::<usize>();
    let referenced = |attribute: &AttributeProto| {
        let given = call.proto.attributes.iter().chain(&function.defaults);
        let found = given.filter(|given| given.name == attribute.reference);
        found.map(attribute_bytes).max().unwrap_or(0)
    };
    let attribute = |own: &AttributeProto| attribute_bytes(own) + referenced(own);
    let attributes: usize = body.attributes.iter().map(attribute).sum();
    size_of::<SourceNode>() + names + body.op_type.len() + body.domain.len() + attributes
}

/// Bytes of an attribute that a copy does not share.
pub(crate) fn attribute_bytes(attribute: &AttributeProto) -> usize {
    let tensor = attribute.tensor.as_ref().map_or(0, |tensor| {
        let longs = tensor.dims.len() + tensor.ints.len() + tensor.longs.len();
        let wide = longs + tensor.doubles.len() + tensor.unsigneds.len();
        8 * wide + 4 * tensor.floats.len() + size_of::<Bytes>() * tensor.strings.len()
    });
    size_of::<AttributeProto>()
        + attribute.name.len()
        + attribute.reference.len()
        + 4 * attribute.floats.len()
        + 8 * attribute.ints.len()
        + size_of::<Bytes>() * attribute.strings.len()
        + tensor
}

/// The caller's name for each of the function's inputs and outputs; absent ones are empty.
fn call_names(node: &SourceNode, function: &FunctionProto) -> HashMap<String, String> {
    let actual = |list: &[String], index: usize| list.get(index).cloned().unwrap_or_default();
    let inputs = function.inputs.iter().enumerate();
    let mut names: HashMap<String, String> =
        inputs.map(|(i, name)| (name.clone(), actual(&node.proto.inputs, i))).collect();
    for (index, name) in function.outputs.iter().enumerate() {
        let outer = actual(&node.proto.outputs, index);
        if !outer.is_empty() {
            names.insert(name.clone(), outer);
        }
    }
    names
}

/// Attributes of a body's node: references replaced by what is given, the caller's first.
fn resolve(body: &[AttributeProto], given: &[AttributeProto]) -> Vec<AttributeProto> {
    let given = |name: &str| given.iter().find(|attribute| attribute.name == name);
    body.iter()
        .filter_map(|attribute| match attribute.reference.as_str() {
            "" => Some(attribute.clone()),
            reference => given(reference)
                .map(|found| AttributeProto { name: attribute.name.clone(), ..found.clone() }),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, label: &str) -> NodeProto {
        NodeProto {
            op_type: name.to_string(),
            domain: "own".to_string(),
            name: label.to_string(),
            ..NodeProto::default()
        }
    }

    /// Functions `f0` to `f{depth - 1}`, each of which calls the next one `width` times. The last
    /// one has `leaves` nodes.
    fn nested(depth: usize, width: usize, leaves: usize, label: &str) -> Vec<FunctionProto> {
        let function = |level: usize| FunctionProto {
            name: format!("f{level}"),
            domain: "own".to_string(),
            nodes: match level + 1 == depth {
                true => vec![call("Leaf", label); leaves],
                false => vec![call(&format!("f{}", level + 1), label); width],
            },
            ..FunctionProto::default()
        };
        (0..depth).map(function).collect()
    }

    fn expanded(functions: Vec<FunctionProto>, label: &str) -> Result<usize, String> {
        let node = SourceNode::new(call("f0", label), Arc::new(Opsets::default()), 0);
        let result = Functions::new(functions, 100_000).expand(vec![node]);
        result.map(|nodes| nodes.len()).map_err(|error| error.to_string())
    }

    #[test]
    fn functions_without_nodes_end() {
        assert_eq!(expanded(nested(5, 4, 0, ""), ""), Ok(0));
        assert_eq!(expanded(nested(5, 4, 2, ""), ""), Ok(512));
        // 11 KB of these are 10^15 calls.
        let started = std::time::Instant::now();
        let error = expanded(nested(16, 10, 0, ""), "").unwrap_err();
        assert!(error.contains("calls of functions"), "{error}");
        assert!(started.elapsed().as_secs() < 20);
    }

    #[test]
    fn names_that_grow_with_every_level_are_limited() {
        let long = "n".repeat(30_000);
        let error = expanded(nested(10, 3, 1, &long), &long).unwrap_err();
        assert!(error.contains("bytes in expanded functions"), "{error}");
        assert_eq!(expanded(nested(3, 3, 1, &long), &long), Ok(9));
    }

    #[test]
    fn functions_that_call_themselves_are_refused() {
        let own = FunctionProto {
            name: "f0".to_string(),
            domain: "own".to_string(),
            nodes: vec![call("f0", "")],
            ..FunctionProto::default()
        };
        assert!(expanded(vec![own], "").unwrap_err().contains("nested more than 16 deep"));
    }

    #[test]
    fn large_attributes_are_counted() {
        let mut functions = nested(6, 8, 1, "");
        let ints = vec![1; 100_000];
        functions[5].nodes[0].attributes = vec![AttributeProto { ints, ..Default::default() }];
        let error = expanded(functions, "").unwrap_err();
        assert!(error.contains("bytes in expanded functions"), "{error}");
    }
}
