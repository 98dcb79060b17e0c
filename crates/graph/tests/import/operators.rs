//! How nodes are mapped, and which are refused.

use graph::{ExternalData, Graph, ImportError, import, optimize};
use model::op::{Op, Softmax};
use rten_onnx::onnx::DataType;

use crate::models::{
    D, attention, convolutional, float, floats, info, int, ints, longs, model, node, old, output,
    picture, shapes, with,
};
use rten_onnx::onnx::{GraphProto, NodeProto};

fn imported(bytes: &[u8]) -> Graph {
    match import(bytes, &ExternalData::none()) {
        Ok(graph) => graph,
        Err(error) => panic!("{error}"),
    }
}

fn refused(bytes: &[u8]) -> String {
    import(bytes, &ExternalData::none()).map(|graph| graph.to_string()).unwrap_err().to_string()
}

fn names(graph: &Graph) -> Vec<String> {
    graph.nodes.iter().map(|node| node.op.name()).collect()
}

fn shape(graph: &Graph, name: &str) -> String {
    let value = graph.values.iter().find(|value| value.name == name).unwrap();
    format!("{}{}", value.dtype, model::dim::shape_text(value.shape.as_deref()))
}

#[test]
fn a_convolutional_network_shrinks_to_its_heavy_steps() {
    let mut graph = imported(&convolutional());
    assert_eq!(shape(&graph, "r2"), "FP32[batch,4,8,8]");
    optimize(&mut graph, None);
    assert_eq!(names(&graph), ["Conv", "Conv", "GlobalAveragePool", "Flatten", "Gemm"]);
    assert_eq!(shape(&graph, "y"), "FP32[batch,2]");
}

#[test]
fn traced_attention_is_found_behind_its_shape_arithmetic() {
    let mut graph = imported(&attention());
    assert_eq!(shape(&graph, "q2"), "FP32[batch,tokens,2,4]");
    optimize(&mut graph, None);
    let found = names(&graph);
    assert_eq!(found.iter().filter(|name| *name == "Attention").count(), 1, "{graph}");
    assert!(!found.contains(&"Shape".to_string()), "{graph}");
}

#[test]
fn shapes_follow_slices_scales_and_products() {
    let graph = imported(&shapes());
    assert_eq!(shape(&graph, "s"), "FP32[batch,3,8,7]");
    assert_eq!(shape(&graph, "r"), "FP32[batch,3,16,14]");
    assert_eq!(shape(&graph, "z"), "FP32[batch,672]");
    assert_eq!(shape(&graph, "a"), "FP32[batch,336]");
    let bound = graph::bind(&graph, &[("batch", 4)]).unwrap();
    assert_eq!(shape(&bound, "y"), "FP32[4,672]");
    let count = bound.values.iter().find(|value| value.name == "count").unwrap();
    assert_eq!(count.content.as_ref().unwrap()[0].to_string(), (4 * 672).to_string());
}

#[test]
fn attributes_of_old_opsets_become_inputs() {
    let graph = imported(&old());
    assert_eq!(names(&graph), ["Clip", "Pad", "Unsqueeze", "Squeeze", "ReduceMean", "Softmax"]);
    assert!(matches!(graph.nodes[5].op, Op::Softmax(Softmax { axis: 1, flatten: true, .. })));
    assert_eq!(graph.nodes[0].inputs.len(), 3);
    assert_eq!(shape(&graph, "p"), "FP32[batch,3,10,10]");
    assert_eq!(shape(&graph, "y"), "FP32[batch,3]");
}

#[test]
fn legacy_broadcasts_align_by_axis() {
    let add = with("Add", &["x", "c"], &["y"], vec![int("broadcast", 1), int("axis", 1)]);
    let graph = imported(&picture(6, vec![add], vec![floats("c", &[3], &[1.0, 2.0, 3.0])]));
    assert_eq!(names(&graph), ["Unsqueeze", "Add"]);
    assert_eq!(shape(&graph, "y"), "FP32[batch,3,8,8]");
    let bare = node("Add", &["x", "c"], &["y"]);
    let message = refused(&picture(6, vec![bare], vec![floats("c", &[8], &[0.0; 8])]));
    assert!(message.contains("without broadcast"), "{message}");
}

#[test]
fn every_unsupported_node_is_named_once_with_its_operands() {
    let nodes = vec![
        node("Frobnicate", &["x"], &["a"]),
        node("Relu", &["a"], &["b"]),
        node("Defenestrate", &["b"], &["y"]),
    ];
    let error = import(&picture(17, nodes, vec![]), &ExternalData::none()).unwrap_err();
    let ImportError::Unsupported(found) = &error else { panic!("{error}") };
    assert_eq!(found.len(), 2);
    let first = "unsupported operator 'Frobnicate' (domain 'ai.onnx', opset 17) at node \
                 'Frobnicate_a', inputs x: FP32[batch,3,8,8]";
    assert!(error.to_string().starts_with(first), "{error}");
}

#[test]
fn unknown_attributes_are_refused() {
    let relu = with("Relu", &["x"], &["y"], vec![float("wobble", 1.0)]);
    let message = refused(&picture(17, vec![relu], vec![]));
    assert!(message.contains("attribute 'wobble' is not understood"), "{message}");
}

/// In training mode the statistics are those of the batch.
#[test]
fn batch_normalization_in_training_mode_computes_its_statistics() {
    let training = with(
        "BatchNormalization",
        &["x", "s", "s", "s", "s"],
        &["y"],
        vec![int("training_mode", 1)],
    );
    let graph = imported(&picture(17, vec![training], vec![floats("s", &[3], &[1.0; 3])]));
    assert!(names(&graph).contains(&"ReduceMean".to_string()), "{:?}", names(&graph));
}

#[test]
fn nodes_are_sorted_and_cycles_named() {
    let nodes = vec![node("Relu", &["b"], &["y"]), node("Abs", &["x"], &["b"])];
    assert_eq!(names(&imported(&picture(17, nodes, vec![]))), ["Abs", "Relu"]);
    let nodes = vec![node("Add", &["x", "b"], &["y"]), node("Abs", &["y"], &["b"])];
    let message = refused(&picture(17, nodes, vec![]));
    assert!(message.contains("cycle through Add_y, Abs_b"), "{message}");
}

#[test]
fn contradictions_are_refused() {
    let cases = [
        (vec![node("Relu", &["nowhere"], &["y"])], "reads 'nowhere'"),
        (vec![node("Relu", &["x"], &["y"]), node("Abs", &["x"], &["y"])], "'y' is defined twice"),
        (vec![node("Relu", &["x"], &["x"])], "'x' is defined twice"),
        (vec![node("Relu", &["x"], &["z"])], "'outputs' reads 'y'"),
        (vec![node("Conv", &["x", "w"], &["y"])], "input channels: 3 and 5 differ"),
        (vec![node("Reshape", &["w", "seven"], &["y"])], "cannot be reshaped"),
        (vec![node("MatMul", &["x", "seven"], &["y"])], "operands of different types"),
        (vec![with("Transpose", &["x"], &["y"], vec![ints("perm", &[0, 0, 1, 2])])], "permutation"),
    ];
    for (nodes, expected) in cases {
        let initializers = vec![floats("w", &[4, 5, 1, 1], &[0.0; 20]), longs("seven", &[7])];
        let message = refused(&picture(17, nodes, initializers));
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn unnamed_dimensions_get_names_of_their_own() {
    let dims = [D::S(""), D::S("dim0"), D::S("my batch!"), D::S("")];
    let bytes = model(
        17,
        GraphProto {
            node: vec![node("Relu", &["x"], &["y"])],
            input: vec![info("x", DataType::FLOAT, &dims)],
            output: vec![output("y")],
            ..GraphProto::default()
        },
    );
    let graph = imported(&bytes);
    assert_eq!(shape(&graph, "x"), "FP32[dim1,dim0,my_batch_,dim2]");
    assert_eq!(graph.symbols().len(), 4);
}

#[test]
fn a_name_that_inputs_share_without_need_stands_for_several_sizes() {
    let frame = [D::S("batch"), D::N(3), D::S("height"), D::S("width")];
    let state = [D::S("batch"), D::N(1), D::S("height"), D::S("width")];
    let graph_of = |nodes: Vec<NodeProto>, outputs: &[&str]| {
        let bytes = model(
            17,
            GraphProto {
                node: nodes,
                input: vec![
                    info("x", DataType::FLOAT, &frame),
                    info("s", DataType::FLOAT, &state),
                    info("t", DataType::FLOAT, &state),
                ],
                output: outputs.iter().map(|name| output(name)).collect(),
                ..GraphProto::default()
            },
        );
        imported(&bytes)
    };
    let sum = node("Add", &["s", "t"], &["z"]);
    let apart = graph_of(vec![node("Relu", &["x"], &["y"]), sum.clone()], &["y", "z"]);
    assert_eq!(shape(&apart, "x"), "FP32[batch,3,height,width]");
    assert_eq!(shape(&apart, "s"), "FP32[batch,1,height_s,width_s]");
    assert_eq!(shape(&apart, "t"), shape(&apart, "s"), "inputs of one shape stay together");
    // A sum of frame and state needs one height for both.
    let joined = graph_of(vec![node("Add", &["x", "s"], &["y"]), sum], &["y", "z"]);
    assert_eq!(shape(&joined, "s"), "FP32[batch,1,height,width]");
    assert_eq!(shape(&joined, "y"), "FP32[batch,3,height,width]");
}

/// Features and the boxes they belong to, which are integers: one width for both would be wrong.
#[test]
fn names_shared_by_inputs_of_different_types_are_taken_apart_and_warned_of() {
    let dims = [D::S("batch"), D::S("height"), D::S("width")];
    let features = info("x", DataType::FLOAT, &dims);
    let boxes = info("dets", DataType::INT64, &dims);
    let last = with("Gather", &["dets", "zero"], &["left"], vec![int("axis", 2)]);
    let file = |nodes: Vec<NodeProto>| {
        let graph = GraphProto {
            node: nodes,
            initializer: vec![longs("zero", &[0]), floats("table", &[9, 4], &[0.5; 36])],
            input: vec![features.clone(), boxes.clone()],
            output: vec![output("y")],
            ..GraphProto::default()
        };
        imported(&model(17, graph))
    };
    let embedded = node("Gather", &["table", "left"], &["e"]);
    let narrow = with("ReduceMean", &["x"], &["m"], vec![ints("axes", &[2])]);
    let axes = vec![ints("axes", &[2, 3]), int("keepdims", 0)];
    let squeezed = with("ReduceMean", &["e"], &["n"], axes);
    let three = node("Unsqueeze", &["n", "two"], &["u"]);
    let mut nodes = vec![last, embedded, narrow, squeezed, three];
    nodes.push(node("Add", &["m", "u"], &["y"]));
    nodes.insert(0, with("Constant", &[], &["two"], vec![ints("value_ints", &[2])]));
    let graph = file(nodes);
    assert_eq!(shape(&graph, "dets"), "INT64[batch,height,width_dets]");
    assert_eq!(shape(&graph, "y"), "FP32[batch,height,1]");
    let [warning] = &graph.warnings[..] else { panic!("{:?}", graph.warnings) };
    assert!(warning.contains("'width' of input 'dets'"), "{warning}");
}

/// What a file says of its outputs is not what it computes.
#[test]
fn outputs_declared_with_other_sizes_are_warned_of() {
    let file = |dims: &[D]| {
        let graph = GraphProto {
            node: vec![node("Relu", &["x"], &["y"])],
            input: vec![info("x", DataType::FLOAT, &[D::S("n"), D::N(3)])],
            output: vec![info("y", DataType::FLOAT, dims)],
            ..GraphProto::default()
        };
        imported(&model(17, graph)).warnings
    };
    assert!(file(&[D::S("m"), D::N(3)]).is_empty());
    assert!(file(&[D::N(7), D::S("")]).is_empty());
    let warnings = file(&[D::S("n"), D::N(4)]);
    assert!(warnings[0].contains("output y: FP32[n,3] is declared"), "{warnings:?}");
    assert_eq!(file(&[D::N(3)]).len(), 1);
}

#[test]
fn placeholders_are_not_dimension_names() {
    let bytes = model(
        17,
        GraphProto {
            node: vec![node("Relu", &["x"], &["y"])],
            input: vec![info("x", DataType::FLOAT, &[D::S("-1"), D::S("?"), D::S("?")])],
            output: vec![output("y")],
            ..GraphProto::default()
        },
    );
    assert_eq!(shape(&imported(&bytes), "x"), "FP32[dim0,dim1,dim2]");
}

/// A model that makes parts of `x: FP32[5,2]`, moves them and joins two of them.
fn sequence_model(sizes: &[i64], position: &[i64]) -> Vec<u8> {
    let nodes = vec![
        node("SplitToSequence", &["x", "sizes"], &["parts"]),
        node("SequenceErase", &["parts", "zero"], &["shorter"]),
        node("SequenceAt", &["parts", "last"], &["part"]),
        node("SequenceEmpty", &[], &["none"]),
        node("SequenceInsert", &["none", "part"], &["one"]),
        node("Identity", &["one"], &["same"]),
        node("SequenceInsert", &["same", "x", "zero"], &["two"]),
        with("ConcatFromSequence", &["two"], &["y"], vec![int("axis", 0)]),
        node("SequenceLength", &["shorter"], &["length"]),
    ];
    model(
        17,
        GraphProto {
            node: nodes,
            initializer: vec![longs("sizes", sizes), longs("zero", &[0]), longs("last", position)],
            input: vec![info("x", DataType::FLOAT, &[D::N(5), D::N(2)])],
            output: vec![output("y"), output("length")],
            ..GraphProto::default()
        },
    )
}

#[test]
fn sequences_of_known_members_are_written_out() {
    let graph = imported(&sequence_model(&[1, 1, 3], &[-1]));
    assert_eq!(shape(&graph, "y"), "FP32[8,2]");
    let length = graph.outputs[1];
    assert_eq!(graph.constant_ints(length), Some(vec![2]));
    let ops: Vec<String> = graph.nodes.iter().map(|node| node.op.name()).collect();
    assert!(ops.iter().all(|op| ["Split", "Identity", "Concat"].contains(&&**op)), "{ops:?}");
}

#[test]
fn a_position_outside_of_a_sequence_is_refused() {
    let error = import(&sequence_model(&[2, 3], &[2]), &ExternalData::none()).unwrap_err();
    assert!(error.to_string().contains("position 2 of a sequence of 2"), "{error}");
}

#[test]
fn operators_on_sequences_as_a_whole_are_refused_by_name() {
    let nodes = vec![node("SequenceConstruct", &["x", "x"], &["s"]), node("Relu", &["s"], &["y"])];
    let message = refused(&picture(17, nodes, vec![]));
    assert!(message.contains("Relu") && message.contains("is a sequence"), "{message}");
}

#[test]
fn numbers_of_few_bits_are_rounded_to_steps() {
    let quant = |bits: f32| {
        let domain = Some("onnx.brevitas".to_string());
        let attributes = vec![int("signed", 1), int("narrow", 1)];
        let node = with("Quant", &["x", "scale", "zero", "bits"], &["y"], attributes);
        let constants = vec![
            floats("scale", &[], &[0.5]),
            floats("zero", &[], &[0.0]),
            floats("bits", &[], &[bits]),
        ];
        picture(17, vec![NodeProto { domain, ..node }], constants)
    };
    let graph = imported(&quant(4.0));
    assert_eq!(names(&graph), ["Div", "Add", "Clip", "Round", "Sub", "Mul"]);
    let limits: Vec<Option<f32>> =
        graph.nodes[2].inputs[1..].iter().map(|id| graph.constant_float(id.unwrap())).collect();
    assert_eq!(limits, [Some(-7.0), Some(7.0)]);
    assert_eq!(shape(&graph, "y"), "FP32[batch,3,8,8]");
    assert!(refused(&quant(0.0)).contains("0 bits"));
}

#[test]
fn operators_in_blocks_of_channels_are_turned_back() {
    let blocked = |op: &str, inputs: &[&str], output: &str, attributes| NodeProto {
        domain: Some("com.microsoft.nchwc".to_string()),
        ..with(op, inputs, &[output], attributes)
    };
    // 24 channels are whole blocks of eight, not of sixteen.
    let nodes = vec![
        blocked("Conv", &["x", "w"], "a", vec![int("group", 1)]),
        blocked("MaxPool", &["a"], "b", vec![ints("kernel_shape", &[2, 2])]),
        blocked("ReorderOutput", &["b"], "y", vec![int("channels", 20)]),
    ];
    let weights: Vec<f32> = (0..24 * 3).map(|index| index as f32).collect();
    let graph = imported(&picture(17, nodes, vec![floats("w", &[24, 3, 1, 1], &weights)]));
    assert_eq!(shape(&graph, "b"), "FP32[batch,24,7,7]");
    assert_eq!(shape(&graph, "y"), "FP32[batch,20,7,7]");
    let plain = graph.constant(graph.nodes[0].inputs[1].unwrap()).unwrap();
    // Output 9 is the second of the second block; its inputs lie eight apart.
    let row = &plain.to_vec::<f32>().unwrap()[9 * 3..10 * 3];
    assert_eq!(row, [25.0, 33.0, 41.0]);
}
