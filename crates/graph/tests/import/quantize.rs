//! Quantized files made of float ones, and how quantized graphs are read.

use std::collections::HashMap;

use bytes::Bytes;
use graph::onnx::{ActivationBytes, ActivationRange, QuantizableModel};
use graph::{ExternalData, Graph, import, optimize};
use model::DataType;

use crate::models::{float, floats, int, ints, node, picture, with};

/// A convolution, a pool, a convolution with a residual, one filter for each channel, and a fully
/// connected layer.
fn network(opset: i64) -> Vec<u8> {
    let pads = || ints("pads", &[1, 1, 1, 1]);
    let noise = |count: usize| -> Vec<f32> { (0..count).map(|i| (i % 13) as f32 - 6.0).collect() };
    let nodes = vec![
        with("Conv", &["x", "w1", "b1"], &["c1"], vec![pads()]),
        node("Relu", &["c1"], &["r1"]),
        with(
            "MaxPool",
            &["r1"],
            &["p"],
            vec![ints("kernel_shape", &[2, 2]), ints("strides", &[2, 2])],
        ),
        with("Conv", &["p", "w2"], &["c2"], vec![pads()]),
        node("Add", &["c2", "p"], &["s"]),
        with("Conv", &["s", "w3"], &["c3"], vec![pads(), int("group", 4)]),
        node("GlobalAveragePool", &["c3"], &["g"]),
        node("Flatten", &["g"], &["f"]),
        with("Gemm", &["f", "w4", "b4"], &["y"], vec![int("transB", 1), float("alpha", 0.5)]),
    ];
    let constants = vec![
        floats("w1", &[4, 3, 3, 3], &noise(108)),
        floats("b1", &[4], &noise(4)),
        floats("w2", &[4, 4, 3, 3], &noise(144)),
        floats("w3", &[4, 1, 3, 3], &noise(36)),
        floats("w4", &[2, 4], &noise(8)),
        floats("b4", &[2], &noise(2)),
    ];
    picture(opset, nodes, constants)
}

fn open(bytes: &[u8], keep: &[String]) -> Result<QuantizableModel, String> {
    let bytes = Bytes::copy_from_slice(bytes);
    QuantizableModel::open(bytes, ExternalData::none(), keep).map_err(|err| err.to_string())
}

fn ranges(model: &QuantizableModel) -> HashMap<String, ActivationRange> {
    let range = ActivationRange { low: -1.0, high: 3.0 };
    model.activations().into_iter().map(|name| (name, range)).collect()
}

fn quantized(opset: i64, bytes: ActivationBytes) -> Graph {
    let model = open(&network(opset), &[]).unwrap();
    let file = model.write(&ranges(&model), bytes).unwrap();
    match import(&file, &ExternalData::none()) {
        Ok(graph) => graph,
        Err(error) => panic!("{error}"),
    }
}

fn count(graph: &Graph, op: &str) -> usize {
    graph.nodes.iter().filter(|node| node.op.name() == op).count()
}

#[test]
fn products_are_quantized_and_the_rest_stays() {
    let model = open(&network(17), &[]).unwrap();
    // The pool before a convolution has the range of its input.
    assert_eq!(model.activations(), ["x", "r1", "f"]);
    assert_eq!(model.product_count(), 3);
    let kept: Vec<&str> = model.float_nodes().iter().map(|node| node.node.as_str()).collect();
    assert_eq!(kept, ["Conv_c3"]);
    for bytes in [ActivationBytes::Unsigned, ActivationBytes::Signed] {
        let graph = quantized(17, bytes);
        // Activations x, r1, p and f; three weights, and one bias in the scale of its sums.
        assert_eq!(count(&graph, "QuantizeLinear"), 4);
        assert_eq!(count(&graph, "DequantizeLinear"), 4 + 3 + 1);
        let constant = |name: &str| graph.values.iter().any(|value| value.name == name);
        assert!(constant("w3") && constant("b4") && !constant("w1") && !constant("b1"));
        let weight = graph.values.iter().find(|value| value.name == "w1_quantized").unwrap();
        assert_eq!(weight.dtype, DataType::I8);
    }
    // Before operator set 13 a weight has one scale.
    let graph = quantized(11, ActivationBytes::Unsigned);
    let scale = graph.values.iter().find(|value| value.name == "w1_scale").unwrap();
    assert_eq!(scale.shape.as_ref().map(Vec::len), Some(0));
}

#[test]
fn bytes_stay_bytes_through_the_pool() {
    let mut graph = quantized(17, ActivationBytes::Unsigned);
    optimize(&mut graph, None);
    let pool = graph.nodes.iter().find(|node| node.op.name() == "MaxPool").unwrap();
    assert_eq!(graph.value(pool.inputs[0].unwrap()).dtype, DataType::U8);
    // Weights of products are still bytes.
    assert_eq!(count(&graph, "QuantizeLinear"), 3);
    let kept = ["w1_quantized", "w2_quantized", "w4_quantized"];
    for name in kept {
        let read = |id: &model::ValueId| graph.value(*id).name == name;
        let mut inputs = graph.nodes.iter().flat_map(|node| node.inputs.iter().flatten());
        assert!(inputs.any(read), "{name}");
    }
}

#[test]
fn nodes_may_be_kept_and_must_exist() {
    let kept = open(&network(17), &["Conv_c1".to_string()]).unwrap();
    assert_eq!(kept.product_count(), 2);
    let unknown = open(&network(17), &["Conv_c9".to_string()]).err().unwrap();
    assert!(unknown.contains("Conv_c9"), "{unknown}");
    let old = open(&network(9), &[]).err().unwrap();
    assert!(old.contains("operator set 9"), "{old}");
    let model = open(&network(17), &[]).unwrap();
    let missing = model.write(&HashMap::new(), ActivationBytes::Signed).unwrap_err();
    assert!(missing.to_string().contains("'x'"), "{missing}");
    let range = ActivationRange { low: f32::NAN, high: 1.0 };
    let bad = model.activations().into_iter().map(|name| (name, range)).collect();
    assert!(model.write(&bad, ActivationBytes::Signed).is_err());
}

#[test]
fn broken_files_give_an_error() {
    let good = network(17);
    for length in (0..good.len()).step_by(7) {
        let mut cut = good[..length].to_vec();
        if let Ok(model) = open(&cut, &[]) {
            let _ = model.write(&ranges(&model), ActivationBytes::Unsigned);
        }
        cut.extend_from_slice(&good);
        let _ = open(&cut, &[]);
    }
}

#[test]
fn scales_must_be_positive_and_finite() {
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let nodes = vec![
            node("QuantizeLinear", &["x", "scale"], &["q"]),
            node("DequantizeLinear", &["q", "scale"], &["y"]),
        ];
        let bytes = picture(17, nodes, vec![floats("scale", &[], &[scale])]);
        let error = import(&bytes, &ExternalData::none()).unwrap_err().to_string();
        assert!(error.contains("QuantizeLinear_q") && error.contains("scale"), "{error}");
    }
}
