//! Hashes of sub-graphs.

use graph::{ExternalData, Graph, import, subgraph_hashes};

use crate::models::{convolutional, floats, int, node, picture, with};

fn hashes(bytes: &[u8]) -> Vec<[u8; 32]> {
    subgraph_hashes(&import(bytes, &ExternalData::none()).unwrap())
}

/// A prefix of two nodes and one of two heads.
fn network(name: &str, weight: f32, axis: i64, head: &str) -> Vec<u8> {
    let (w, a, b) = (format!("{name}_w"), format!("{name}_a"), format!("{name}_b"));
    let nodes = vec![
        node("Mul", &["x", &w], &[&a]),
        with("Concat", &[&a, &a], &[&b], vec![int("axis", axis)]),
        node(head, &[&b], &["y"]),
    ];
    picture(17, nodes, vec![floats(&w, &[1], &[weight])])
}

#[test]
fn names_do_not_matter_and_contents_do() {
    let base = hashes(&network("one", 0.5, 1, "Relu"));
    assert_eq!(base, hashes(&network("two", 0.5, 1, "Relu")));
    assert_ne!(base[0], hashes(&network("one", 0.25, 1, "Relu"))[0]);
    let other_axis = hashes(&network("one", 0.5, 2, "Relu"));
    assert_eq!(base[0], other_axis[0]);
    assert_ne!(base[1], other_axis[1]);
}

#[test]
fn models_with_one_prefix_share_its_hashes() {
    let (relu, tanh) =
        (hashes(&network("a", 0.5, 1, "Relu")), hashes(&network("b", 0.5, 1, "Tanh")));
    assert_eq!(relu[..2], tanh[..2]);
    assert_ne!(relu[2], tanh[2]);
}

#[test]
fn renaming_everything_keeps_every_hash() {
    let original = import(&convolutional(), &ExternalData::none()).unwrap();
    let mut renamed: Graph = original.clone();
    renamed.values.iter_mut().enumerate().for_each(|(i, value)| value.name = format!("value{i}"));
    renamed.nodes.iter_mut().enumerate().for_each(|(i, node)| node.name = format!("node{i}"));
    for id in renamed.inputs.clone() {
        let shape = renamed.values[id.index()].shape.as_mut().unwrap();
        shape[0] = graph::SymDim::symbol("another");
    }
    renamed.infer_all().unwrap();
    assert_eq!(subgraph_hashes(&original), subgraph_hashes(&renamed));
}
