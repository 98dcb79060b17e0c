//! Sorts nodes so that every dependency comes first.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use super::ImportError;
use super::importer::SourceNode;

/// The maximum number of names in a message about a cycle.
const NAMES_SHOWN: usize = 8;

/// Sorts nodes so that everything is written before it is read, otherwise in the file's order.
/// `defined` are the names of inputs and initializers.
pub(crate) fn sort(
    nodes: Vec<SourceNode>,
    defined: &HashSet<String>,
) -> Result<Vec<SourceNode>, ImportError> {
    let mut writers: HashMap<&str, usize> = HashMap::new();
    for (index, node) in nodes.iter().enumerate() {
        for name in node.proto.outputs.iter().filter(|name| !name.is_empty()) {
            if defined.contains(name) || writers.insert(name, index).is_some() {
                return Err(ImportError::Duplicate { name: name.clone() });
            }
        }
    }
    let mut waiting = vec![0usize; nodes.len()];
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (index, node) in nodes.iter().enumerate() {
        let read = node.proto.inputs.iter().chain(&node.captures);
        for name in read.filter(|name| !name.is_empty()) {
            match writers.get(name.as_str()) {
                Some(writer) => {
                    waiting[index] += 1;
                    readers[*writer].push(index);
                }
                None if defined.contains(name) => {}
                None => {
                    return Err(ImportError::Missing {
                        node: node.label.clone(),
                        name: name.clone(),
                    });
                }
            }
        }
    }
    let free = (0..nodes.len()).filter(|index| waiting[*index] == 0).map(Reverse);
    let mut ready: BinaryHeap<Reverse<usize>> = free.collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(Reverse(index)) = ready.pop() {
        order.push(index);
        for reader in &readers[index] {
            waiting[*reader] -= 1;
            if waiting[*reader] == 0 {
                ready.push(Reverse(*reader));
            }
        }
    }
    if order.len() < nodes.len() {
        let stuck = nodes.iter().zip(&waiting).filter(|(_, waiting)| **waiting > 0);
        let names = stuck.map(|(node, _)| node.label.clone()).take(NAMES_SHOWN).collect();
        return Err(ImportError::Cycle(names));
    }
    let mut slots: Vec<Option<SourceNode>> = nodes.into_iter().map(Some).collect();
    Ok(order.into_iter().filter_map(|index| slots[index].take()).collect())
}
