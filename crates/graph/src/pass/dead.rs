//! Removes what no output depends on.

use crate::ir::Graph;

/// Removes nodes, outputs of nodes and constants without a reader. Returns how many nodes it
/// removed.
pub fn run(graph: &mut Graph) -> usize {
    let mut live = vec![false; graph.values.len()];
    for id in &graph.outputs {
        live[id.index()] = true;
    }
    let mut keep = vec![false; graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        if node.outputs.iter().flatten().any(|id| live[id.index()]) {
            keep[index] = true;
            node.inputs.iter().flatten().for_each(|id| live[id.index()] = true);
        }
    }
    let before = graph.nodes.len();
    let mut index = 0;
    graph.nodes.retain(|_| {
        index += 1;
        keep[index - 1]
    });
    for node in &mut graph.nodes {
        for output in &mut node.outputs {
            *output = output.filter(|id| live[id.index()]);
        }
    }
    graph.constants.retain(|id| live[id.index()]);
    before - graph.nodes.len()
}
