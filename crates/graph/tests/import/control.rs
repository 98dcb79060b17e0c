//! Control flow: what is written out, and what is refused within bounded time. The results are
//! compared with ONNX Runtime's by the test `onnx_nodes` of crate cli.

use std::time::Instant;

use graph::{ExternalData, Graph, import};
use rten_onnx::onnx::{DataType, GraphProto, NodeProto, TensorProto};

use crate::models::{D, body, info, int, model, node, output, with};

fn scalar(name: &str, dtype: DataType, value: i64) -> TensorProto {
    let mut tensor = crate::models::longs(name, &[value]);
    tensor.dims.clear();
    if dtype == DataType::BOOL {
        tensor.data_type = Some(dtype);
        tensor.int64_data.clear();
        tensor.int32_data = vec![value as i32];
    }
    tensor
}

/// A model of `nodes` with `x: FP32[3]`, a number `rounds` and the constant `yes`.
fn file(rounds: i64, nodes: Vec<NodeProto>) -> Vec<u8> {
    let dims = [D::N(3)];
    model(
        17,
        GraphProto {
            node: nodes,
            initializer: vec![
                scalar("rounds", DataType::INT64, rounds),
                scalar("yes", DataType::BOOL, 1),
            ],
            input: vec![info("x", DataType::FLOAT, &dims), info("flag", DataType::BOOL, &[])],
            output: vec![output("y")],
            ..GraphProto::default()
        },
    )
}

/// The body of a loop with one value: `s` to `t`.
fn round(nodes: Vec<NodeProto>, condition: &str) -> GraphProto {
    GraphProto {
        node: nodes,
        input: vec![
            info("i", DataType::INT64, &[]),
            info("c", DataType::BOOL, &[]),
            info("s", DataType::FLOAT, &[D::N(3)]),
        ],
        output: vec![output(condition), output("t")],
        ..GraphProto::default()
    }
}

fn branch(nodes: Vec<NodeProto>) -> GraphProto {
    GraphProto { node: nodes, output: vec![output("a")], ..GraphProto::default() }
}

fn imported(bytes: &[u8]) -> Result<Graph, String> {
    import(bytes, &ExternalData::none()).map_err(|error| error.to_string())
}

fn looped(body_graph: GraphProto) -> NodeProto {
    with("Loop", &["rounds", "yes", "x"], &["y"], vec![body("body", body_graph)])
}

#[test]
fn a_loop_is_written_once_per_round() {
    let step = |op: &str| round(vec![node(op, &["s"], &["t"])], "c");
    let count =
        |graph: &Graph, op: &str| graph.nodes.iter().filter(|node| node.op.name() == op).count();
    let graph = imported(&file(5, vec![looped(step("Relu"))])).unwrap();
    assert_eq!(count(&graph, "Relu"), 5);
    let graph = imported(&file(0, vec![looped(step("Relu"))])).unwrap();
    assert_eq!(count(&graph, "Relu"), 0);
    // The condition is false after the first round.
    let once = round(vec![node("Relu", &["s"], &["t"]), node("Not", &["c"], &["d"])], "d");
    let graph = imported(&file(5, vec![looped(once)])).unwrap();
    assert_eq!(count(&graph, "Relu"), 1);
}

/// What cannot be written out is a step with plans of its own.
#[test]
fn what_depends_on_data_is_a_step() {
    let step = || round(vec![node("Relu", &["s"], &["t"])], "c");
    let looped_by = |inputs: &[&str]| with("Loop", inputs, &["y"], vec![body("body", step())]);
    let doubled = with("Concat", &["x", "x"], &["a"], vec![int("axis", 0)]);
    let branches = vec![
        body("then_branch", branch(vec![node("Relu", &["x"], &["a"])])),
        body("else_branch", branch(vec![doubled])),
    ];
    let cases = [
        ("Loop", file(1 << 40, vec![looped(step())])),
        ("Loop", file(2, vec![looped_by(&["rounds", "flag", "x"])])),
        ("Loop", file(2, vec![looped_by(&["", "yes", "x"])])),
        ("If", file(2, vec![with("If", &["flag"], &["y"], branches)])),
    ];
    for (op, bytes) in cases {
        let graph = imported(&bytes).unwrap();
        assert!(graph.nodes.iter().any(|node| node.op.name() == op), "{graph}");
    }
}

#[test]
fn a_branch_that_gives_a_sequence_is_refused_by_name() {
    let side = || branch(vec![node("SequenceConstruct", &["x", "x"], &["a"])]);
    let branches = vec![body("then_branch", side()), body("else_branch", side())];
    let error = imported(&file(2, vec![with("If", &["flag"], &["y"], branches)])).unwrap_err();
    assert!(error.contains("'If'") && error.contains("is a sequence"), "{error}");
}

#[test]
fn a_branch_that_depends_on_data_is_selected() {
    let branches = |op: &str| {
        vec![
            body("then_branch", branch(vec![node("Relu", &["x"], &["a"])])),
            body("else_branch", branch(vec![node(op, &["x"], &["a"])])),
        ]
    };
    let ops =
        |graph: &Graph| -> Vec<String> { graph.nodes.iter().map(|node| node.op.name()).collect() };
    let graph = imported(&file(2, vec![with("If", &["flag"], &["y"], branches("Exp"))])).unwrap();
    assert!(ops(&graph).contains(&"Where".to_string()), "{graph}");
    // A known condition takes one branch, and what is in the other need not be supported.
    let unknown = branches("NoSuchOperator");
    let graph = imported(&file(2, vec![with("If", &["yes"], &["y"], unknown)])).unwrap();
    assert_eq!(ops(&graph), ["Relu", "Identity"]);
}

/// Bodies may read what is written outside later in the file, and names return to what they were.
#[test]
fn bodies_see_the_names_outside() {
    let branches = vec![
        body("then_branch", branch(vec![node("Add", &["x", "late"], &["a"])])),
        body("else_branch", branch(vec![node("Sub", &["x", "late"], &["a"])])),
    ];
    let nodes = vec![
        with("If", &["flag"], &["z"], branches),
        node("Exp", &["x"], &["late"]),
        node("Neg", &["x"], &["a"]),
        node("Add", &["a", "z"], &["y"]),
    ];
    let graph = imported(&file(2, nodes)).unwrap();
    let last = graph.nodes.last().unwrap();
    let negated = graph.nodes.iter().find(|node| node.op.name() == "Neg").unwrap();
    assert_eq!(last.inputs[0], negated.outputs[0], "{graph}");
    let missing = vec![body("then_branch", branch(vec![node("Relu", &["nowhere"], &["a"])]))];
    let error = imported(&file(2, vec![with("If", &["yes"], &["y"], missing)])).unwrap_err();
    assert!(error.contains("nowhere"), "{error}");
}

#[test]
fn small_files_do_not_become_large_graphs() {
    // Eight loops inside each other, of 4096 rounds each.
    let mut inner = round(vec![node("Identity", &["s"], &["t"])], "c");
    for _ in 0..7 {
        let nested = with("Loop", &["rounds", "yes", "s"], &["t"], vec![body("body", inner)]);
        inner = round(vec![nested], "c");
    }
    let began = Instant::now();
    let error = imported(&file(4096, vec![looped(inner)])).unwrap_err();
    assert!(error.contains("Loop"), "{error}");
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    // Deeper than is allowed.
    let mut deep = branch(vec![node("Relu", &["x"], &["a"])]);
    for _ in 0..40 {
        let inner = vec![body("then_branch", deep)];
        deep = branch(vec![with("If", &["yes"], &["a"], inner)]);
    }
    let outer = with("If", &["yes"], &["y"], vec![body("then_branch", deep)]);
    assert!(imported(&file(1, vec![outer])).is_err());
}
