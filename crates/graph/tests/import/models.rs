//! Small models, written with another crate's encoder.

use std::cell::RefCell;

use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataType, Dimension, GraphProto, ModelProto, NodeProto,
    OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto, TypeProtoTensor, ValueInfoProto,
};

/// A dimension of an input.
#[derive(Clone, Copy)]
pub enum D {
    N(i64),
    S(&'static str),
}

pub fn info(name: &str, dtype: DataType, dims: &[D]) -> ValueInfoProto {
    let dim = dims
        .iter()
        .map(|dim| match dim {
            D::N(size) => Dimension { dim_value: Some(*size), dim_param: None },
            D::S("") => Dimension::default(),
            D::S(symbol) => Dimension { dim_value: None, dim_param: Some(symbol.to_string()) },
        })
        .collect();
    let tensor = TypeProtoTensor { elem_type: Some(dtype), shape: Some(TensorShapeProto { dim }) };
    let kind = TypeProto { tensor_type: Some(tensor), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.to_string()), r#type: Some(kind) }
}

pub fn output(name: &str) -> ValueInfoProto {
    ValueInfoProto { name: Some(name.to_string()), r#type: None }
}

pub fn floats(name: &str, dims: &[i64], data: &[f32]) -> TensorProto {
    TensorProto {
        name: Some(name.to_string()),
        dims: dims.to_vec(),
        data_type: Some(DataType::FLOAT),
        raw_data: Some(RefCell::new(data.iter().flat_map(|x| x.to_le_bytes()).collect())),
        ..TensorProto::default()
    }
}

pub fn longs(name: &str, data: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.to_string()),
        dims: vec![data.len() as i64],
        data_type: Some(DataType::INT64),
        int64_data: data.to_vec(),
        ..TensorProto::default()
    }
}

pub fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_string()),
        i: Some(value),
        r#type: Some(AttributeType::INT),
        ..AttributeProto::default()
    }
}

pub fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_string()),
        ints: values.to_vec(),
        r#type: Some(AttributeType::INTS),
        ..AttributeProto::default()
    }
}

pub fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_string()),
        f: Some(value),
        r#type: Some(AttributeType::FLOAT),
        ..AttributeProto::default()
    }
}

/// An attribute with a body.
pub fn body(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_string()),
        g: Some(graph),
        r#type: Some(AttributeType::GRAPH),
        ..AttributeProto::default()
    }
}

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    with(op, inputs, outputs, vec![])
}

pub fn with(
    op: &str,
    inputs: &[&str],
    outputs: &[&str],
    attribute: Vec<AttributeProto>,
) -> NodeProto {
    let strings = |list: &[&str]| list.iter().map(|name| name.to_string()).collect();
    NodeProto {
        op_type: Some(op.to_string()),
        input: strings(inputs),
        output: strings(outputs),
        name: Some(format!("{op}_{}", outputs.first().unwrap_or(&"none"))),
        attribute,
        ..NodeProto::default()
    }
}

pub fn model(opset: i64, graph: GraphProto) -> Vec<u8> {
    let set = OperatorSetIdProto { domain: Some(String::new()), version: Some(opset) };
    let model = ModelProto {
        ir_version: Some(8),
        graph: Some(graph),
        opset_import: vec![set],
        ..ModelProto::default()
    };
    model.write_buf().unwrap()
}

/// A graph of `nodes` from the input `x: FP32[batch,3,8,8]` to the output `y`.
pub fn picture(opset: i64, nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> Vec<u8> {
    let dims = [D::S("batch"), D::N(3), D::N(8), D::N(8)];
    model(
        opset,
        GraphProto {
            node: nodes,
            initializer,
            input: vec![info("x", DataType::FLOAT, &dims)],
            output: vec![output("y")],
            ..GraphProto::default()
        },
    )
}

fn noise(seed: u32, count: usize) -> Vec<f32> {
    (0..count as u32)
        .map(|i| {
            (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 16) as f32 / 65_536.0 - 0.5
        })
        .collect()
}

/// Convolution, normalisation, activation, residual, pooling, classifier.
pub fn convolutional() -> Vec<u8> {
    let nodes = vec![
        with("Conv", &["x", "w1"], &["c1"], vec![ints("pads", &[1, 1, 1, 1])]),
        with(
            "BatchNormalization",
            &["c1", "s", "b", "m", "v"],
            &["n1"],
            vec![float("epsilon", 1e-5)],
        ),
        node("Relu", &["n1"], &["r1"]),
        with("Conv", &["r1", "w2"], &["c2"], vec![ints("pads", &[1, 1, 1, 1])]),
        node("Add", &["c2", "r1"], &["a"]),
        node("Relu", &["a"], &["r2"]),
        node("GlobalAveragePool", &["r2"], &["p"]),
        with("Flatten", &["p"], &["f"], vec![int("axis", 1)]),
        with("Gemm", &["f", "w3", "b3"], &["y"], vec![int("transB", 1)]),
    ];
    let initializers = vec![
        floats("w1", &[4, 3, 3, 3], &noise(1, 108)),
        floats("s", &[4], &[1.0, 1.1, 0.9, 1.2]),
        floats("b", &[4], &noise(2, 4)),
        floats("m", &[4], &noise(3, 4)),
        floats("v", &[4], &[1.0, 0.5, 2.0, 1.5]),
        floats("w2", &[4, 4, 3, 3], &noise(4, 144)),
        floats("w3", &[2, 4], &noise(5, 8)),
        floats("b3", &[2], &noise(6, 2)),
    ];
    picture(17, nodes, initializers)
}

/// One attention with heads split by computed shapes, as tracing exporters write it.
pub fn attention() -> Vec<u8> {
    let mut nodes = vec![
        node("Shape", &["x"], &["shape"]),
        node("Gather", &["shape", "zero"], &["n"]),
        node("Gather", &["shape", "one"], &["t"]),
        node("Unsqueeze", &["n", "axis"], &["n1"]),
        node("Unsqueeze", &["t", "axis"], &["t1"]),
        with("Concat", &["n1", "t1", "heads"], &["target"], vec![int("axis", 0)]),
    ];
    for (part, perm) in [("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])] {
        let name = |suffix: &str| format!("{part}{suffix}");
        nodes.push(node("MatMul", &["x", &name("w")], &[&name("0")]));
        nodes.push(node("Add", &[&name("0"), "bias"], &[&name("1")]));
        nodes.push(node("Reshape", &[&name("1"), "target"], &[&name("2")]));
        nodes.push(with("Transpose", &[&name("2")], &[&name("3")], vec![ints("perm", &perm)]));
    }
    nodes.extend([
        node("MatMul", &["q3", "k3"], &["scores"]),
        node("Div", &["scores", "root"], &["scaled"]),
        node("Add", &["scaled", "mask"], &["masked"]),
        with("Softmax", &["masked"], &["weights"], vec![int("axis", -1)]),
        node("MatMul", &["weights", "v3"], &["y"]),
    ]);
    let scalar = |name: &str, value: i64| TensorProto { dims: vec![], ..longs(name, &[value]) };
    let initializer = vec![
        scalar("zero", 0),
        scalar("one", 1),
        longs("axis", &[0]),
        longs("heads", &[2, 4]),
        floats("qw", &[8, 8], &noise(1, 64)),
        floats("kw", &[8, 8], &noise(2, 64)),
        floats("vw", &[8, 8], &noise(3, 64)),
        floats("bias", &[8], &noise(4, 8)),
        floats("root", &[], &[2.0]),
    ];
    let (n, t) = (D::S("batch"), D::S("tokens"));
    model(
        17,
        GraphProto {
            node: nodes,
            initializer,
            input: vec![
                info("x", DataType::FLOAT, &[n, t, D::N(8)]),
                info("mask", DataType::FLOAT, &[n, D::N(1), D::N(1), t]),
            ],
            output: vec![output("y")],
            ..GraphProto::default()
        },
    )
}

/// Shape arithmetic, slices and resampling.
pub fn shapes() -> Vec<u8> {
    let nodes = vec![
        with("Slice", &["x", "starts", "ends", "axes"], &["s"], vec![]),
        node("Resize", &["s", "", "scales"], &["r"]),
        node("Shape", &["r"], &["sh"]),
        node("ReduceProd", &["sh"], &["count"]),
        node("Reshape", &["r", "flat"], &["z"]),
        with("Split", &["z"], &["a", "b"], vec![int("axis", 1), int("num_outputs", 2)]),
        with("Concat", &["b", "a"], &["y"], vec![int("axis", 1)]),
    ];
    let initializers = vec![
        longs("starts", &[1]),
        longs("ends", &[9]),
        longs("axes", &[-1]),
        floats("scales", &[4], &[1.0, 1.0, 2.0, 2.0]),
        longs("flat", &[0, -1]),
    ];
    picture(18, nodes, initializers)
}

/// What old opsets write as attributes.
pub fn old() -> Vec<u8> {
    let nodes = vec![
        with("Clip", &["x"], &["c"], vec![float("min", 0.0), float("max", 6.0)]),
        with("Pad", &["c"], &["p"], vec![ints("pads", &[0, 0, 1, 1, 0, 0, 1, 1])]),
        with("Unsqueeze", &["p"], &["u"], vec![ints("axes", &[0])]),
        with("Squeeze", &["u"], &["q"], vec![ints("axes", &[0])]),
        with("ReduceMean", &["q"], &["m"], vec![ints("axes", &[2, 3]), int("keepdims", 0)]),
        with("Softmax", &["m"], &["y"], vec![]),
    ];
    picture(9, nodes, vec![])
}

/// Every seed, by name.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("attention", attention()),
        ("convolutional", convolutional()),
        ("old", old()),
        ("shapes", shapes()),
    ]
}
