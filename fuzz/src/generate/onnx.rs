//! Random ONNX models: graphs of supported operators with mostly fitting operands and attributes.

mod nested;

use base::Random;

use super::{shape, size, small_count};
use crate::mutate::{one_in, pick};
use crate::protobuf::{Field, put_varint, write};

/// What an operator reads, one letter for each operand: `x` a value, `c` a constant of few floats,
/// `w` a weight, `i` a constant of few integers, `n` a single integer, `s` a single float, `b` a
/// weight of bytes, `z` a single byte, `B` a single boolean, `S` a constant of few strings, `?` the
/// rest is optional.
type Operands = &'static str;

/// Operators, their operands and the attributes they may have. `name:ints`, `name:int`,
/// `name:float`, `name=text`. A domain comes before a colon.
const OPERATORS: &[(&str, Operands, &[&str])] = &[
    ("Add", "xx", &[]),
    ("Mul", "xc", &[]),
    ("Div", "xx", &[]),
    ("Pow", "xs", &[]),
    ("Mod", "xx", &["fmod:int"]),
    ("Where", "xxx", &[]),
    ("Relu", "x", &[]),
    ("Gelu", "x", &["approximate=tanh"]),
    ("Erf", "x", &[]),
    ("Cast", "x", &["to:int", "saturate:int"]),
    ("Clip", "x?ss", &[]),
    ("LeakyRelu", "x", &["alpha:float"]),
    ("Softmax", "x", &["axis:int"]),
    ("LogSoftmax", "x", &["axis:int"]),
    ("Hardmax", "x", &["axis:int"]),
    ("MatMul", "xx", &[]),
    ("MatMul", "xw", &[]),
    ("Gemm", "xw?c", &["alpha:float", "beta:float", "transA:int", "transB:int"]),
    (
        "Conv",
        "xw?c",
        &[
            "kernel_shape:ints",
            "strides:ints",
            "pads:ints",
            "dilations:ints",
            "group:int",
            "auto_pad=SAME_UPPER",
        ],
    ),
    (
        "ConvTranspose",
        "xw?c",
        &["strides:ints", "pads:ints", "output_padding:ints", "output_shape:ints", "group:int"],
    ),
    (
        "MaxPool",
        "x",
        &["kernel_shape:ints", "strides:ints", "pads:ints", "ceil_mode:int", "dilations:ints"],
    ),
    (
        "AveragePool",
        "x",
        &["kernel_shape:ints", "strides:ints", "pads:ints", "count_include_pad:int"],
    ),
    ("LpPool", "x", &["kernel_shape:ints", "p:int"]),
    ("GlobalAveragePool", "x", &[]),
    ("BatchNormalization", "xcccc", &["epsilon:float"]),
    ("LayerNormalization", "xc?c", &["axis:int", "epsilon:float"]),
    ("GroupNormalization", "xcc", &["num_groups:int"]),
    ("InstanceNormalization", "xcc", &["epsilon:float"]),
    ("LRN", "x", &["size:int", "alpha:float"]),
    ("ReduceSum", "x?i", &["axes:ints", "keepdims:int", "noop_with_empty_axes:int"]),
    ("ReduceMean", "x?i", &["axes:ints", "keepdims:int"]),
    ("ReduceMax", "x?i", &["axes:ints", "keepdims:int"]),
    ("ArgMax", "x", &["axis:int", "keepdims:int", "select_last_index:int"]),
    ("TopK", "xn", &["axis:int", "largest:int", "sorted:int"]),
    ("CumSum", "xn", &["exclusive:int", "reverse:int"]),
    ("Reshape", "xi", &["allowzero:int"]),
    ("Transpose", "x", &["perm:ints"]),
    ("Squeeze", "x?i", &["axes:ints"]),
    ("Unsqueeze", "xi", &["axes:ints"]),
    ("Flatten", "x", &["axis:int"]),
    ("Concat", "xx", &["axis:int"]),
    ("Concat", "xxx", &["axis:int"]),
    ("Split", "x?i", &["axis:int", "num_outputs:int", "split:ints"]),
    ("Slice", "xiiii", &[]),
    ("Pad", "xi?si", &["mode=reflect", "mode=edge", "mode=wrap"]),
    ("Tile", "xi", &[]),
    ("Expand", "xi", &[]),
    ("Gather", "xi", &["axis:int"]),
    ("GatherElements", "xx", &["axis:int"]),
    ("GatherND", "xi", &["batch_dims:int"]),
    ("ScatterND", "xix", &["reduction=add"]),
    ("ScatterElements", "xxx", &["axis:int", "reduction=max"]),
    ("OneHot", "xnc", &["axis:int"]),
    ("Shape", "x", &["start:int", "end:int"]),
    ("Size", "x", &[]),
    ("ConstantOfShape", "i", &[]),
    ("Range", "nnn", &[]),
    ("Range", "sss", &[]),
    ("EyeLike", "x", &["k:int", "dtype:int"]),
    ("Trilu", "x?n", &["upper:int"]),
    ("NonZero", "x", &[]),
    ("Compress", "xx", &["axis:int"]),
    (
        "Resize",
        "x?cci",
        &[
            "mode=linear",
            "mode=cubic",
            "coordinate_transformation_mode=align_corners",
            "nearest_mode=ceil",
        ],
    ),
    ("Upsample", "xc", &["mode=nearest"]),
    ("GridSample", "xx", &["mode=bilinear", "padding_mode=border", "align_corners:int"]),
    ("DepthToSpace", "x", &["blocksize:int", "mode=CRD"]),
    ("SpaceToDepth", "x", &["blocksize:int"]),
    ("CenterCropPad", "xi", &["axes:ints"]),
    ("ReverseSequence", "xi", &["batch_axis:int", "time_axis:int"]),
    (
        "Einsum",
        "xx",
        &["equation=ij,jk->ik", "equation=...ij,...jk", "equation=ii->i", "equation=abc,cd"],
    ),
    ("LSTM", "xww?ci", &["hidden_size:int", "direction=bidirectional", "layout:int"]),
    ("GRU", "xww?ci", &["hidden_size:int", "direction=reverse", "linear_before_reset:int"]),
    ("RNN", "xww?c", &["hidden_size:int", "direction=forward"]),
    ("NonMaxSuppression", "xx?nss", &["center_point_box:int"]),
    ("QuantizeLinear", "xs?n", &["axis:int"]),
    ("DequantizeLinear", "xs?n", &["axis:int"]),
    ("DynamicQuantizeLinear", "x", &[]),
    (
        "Attention",
        "xxx?x",
        &["q_num_heads:int", "kv_num_heads:int", "is_causal:int", "scale:float"],
    ),
    ("RotaryEmbedding", "xcc?i", &["num_heads:int", "interleaved:int"]),
    ("HannWindow", "n", &["periodic:int"]),
    ("NegativeLogLikelihoodLoss", "xi?c", &["reduction=none", "ignore_index:int"]),
    ("SoftmaxCrossEntropyLoss", "xi?c", &["reduction=sum"]),
    ("BitShift", "xx", &["direction=LEFT"]),
    ("Equal", "xx", &[]),
    ("Not", "x", &[]),
    ("And", "xx", &[]),
    ("IsNaN", "x", &[]),
    ("Identity", "x", &[]),
    ("Dropout", "x?s", &[]),
    ("Sum", "xxx", &[]),
    ("Max", "xx", &[]),
    ("PRelu", "xc", &[]),
    ("Cast", "S", &["to:int"]),
    ("StringConcat", "SS", &[]),
    ("StringConcat", "xx", &[]),
    ("StringSplit", "S", &["delimiter=,", "maxsplit:int"]),
    ("StringSplit", "x", &["delimiter= "]),
    ("RegexFullMatch", "S", &["pattern=[a-c]+", "pattern=(", "pattern=(a|b)*c{1,9}"]),
    (
        "StringNormalizer",
        "S",
        &["case_change_action=UPPER", "case_change_action=LOWER", "is_case_sensitive:int"],
    ),
    (
        "TfIdfVectorizer",
        "i",
        &[
            "mode=TF",
            "min_gram_length:int",
            "max_gram_length:int",
            "max_skip_count:int",
            "ngram_counts:ints",
            "ngram_indexes:ints",
            "pool_int64s:ints",
        ],
    ),
    ("ai.onnx.ml:LabelEncoder", "i", &["keys_int64s:ints", "values_int64s:ints"]),
    ("ai.onnx.ml:LabelEncoder", "S", &["default_int64:int"]),
    ("ai.onnx.ml:OneHotEncoder", "x", &["cats_int64s:ints", "zeros:int"]),
    ("ai.onnx.ml:ArrayFeatureExtractor", "xi", &[]),
    ("ai.onnx.ml:Binarizer", "x", &["threshold:float"]),
    ("ai.onnx.ml:Normalizer", "x", &["norm=L2"]),
    ("QLinearMatMul", "xszbszsz", &[]),
    ("QLinearMatMul", "bszbszsz", &[]),
    ("QLinearConv", "xszbszsz?i", &["pads:ints", "strides:ints", "group:int"]),
    ("QLinearConv", "bszbszsz", &["kernel_shape:ints"]),
    ("MatMulInteger", "xb?zz", &[]),
    ("ConvInteger", "xb?zz", &["pads:ints"]),
    ("com.microsoft:QLinearAdd", "xszbszsz", &[]),
    ("com.microsoft:QLinearMul", "bszbszsz", &[]),
    ("com.microsoft:QLinearSigmoid", "xszsz", &[]),
    ("com.microsoft:QLinearLeakyRelu", "bszsz", &["alpha:float"]),
    ("com.microsoft:QLinearSoftmax", "xszsz", &["axis:int", "opset:int"]),
    ("com.microsoft:QLinearAveragePool", "xszsz", &["kernel_shape:ints", "pads:ints"]),
    ("com.microsoft:QLinearGlobalAveragePool", "xszsz", &["channels_last:int"]),
    ("com.microsoft:QLinearConcat", "szbszxsz", &["axis:int"]),
    ("com.microsoft:Gelu", "x", &[]),
    ("com.microsoft:QuickGelu", "x", &["alpha:float"]),
    ("com.microsoft:BiasGelu", "xc", &[]),
    ("com.microsoft:FastGelu", "x?c", &[]),
    ("com.microsoft:FusedMatMul", "xw", &["alpha:float", "transA:int", "transB:int"]),
    ("com.microsoft:FusedGemm", "xw?c", &["activation=Relu", "transB:int"]),
    ("com.microsoft:FusedConv", "xw?c", &["activation=Relu", "pads:ints", "group:int"]),
    ("com.microsoft:SkipLayerNormalization", "xxc?cc", &["epsilon:float"]),
    ("com.microsoft:SkipSimplifiedLayerNormalization", "xxc?c", &["epsilon:float"]),
    ("com.microsoft:EmbedLayerNormalization", "xxwwwcc", &["epsilon:float"]),
    ("com.microsoft:Attention", "xwc?i", &["num_heads:int", "unidirectional:int"]),
    ("com.microsoft:MultiHeadAttention", "xxx?c", &["num_heads:int", "scale:float"]),
    ("com.microsoft:GroupQueryAttention", "xxx", &["num_heads:int", "kv_num_heads:int"]),
    ("com.microsoft:RotaryEmbedding", "xicc", &["interleaved:int"]),
    ("com.microsoft:Tokenizer", "S", &["mark:int", "mincharnum:int", "tokenexp=[a-z]+"]),
];

/// Domains that models import, with their versions, beside the operators of ONNX.
const IMPORTS: &[(&str, u64)] = &[("", 17), ("ai.onnx.ml", 3), ("com.microsoft", 1), ("local", 1)];

const FLOAT: u64 = 1;
const UINT8: u64 = 2;
const INT64: u64 = 7;
const STRING: u64 = 8;
const BOOL: u64 = 9;

/// Grows a model node by node.
struct Builder<'a> {
    random: &'a mut Random,
    nodes: Vec<Field>,
    constants: Vec<Field>,
    inputs: Vec<Field>,
    /// Names that nodes may read.
    values: Vec<String>,
    names: usize,
    /// How many bodies are around the nodes that are made.
    depth: usize,
    /// Inputs of the model's function, once it is defined.
    function: Option<usize>,
}

fn text(number: u64, text: &str) -> Field {
    Field::Bytes(number, text.as_bytes().to_vec())
}

/// The type of a tensor (`TypeProto`).
fn tensor_type(element: u64, dims: &[Field]) -> Vec<Field> {
    let shape = Field::Message(2, dims.to_vec());
    vec![Field::Message(1, vec![Field::Varint(1, element), shape])]
}

impl Builder<'_> {
    fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    fn input(&mut self) {
        let name = self.name();
        let element = *pick(self.random, &[1, 1, 1, 1, 1, 1, 7, 8, 9, 10, 11, 6, 2, 3]);
        let mut dims = Vec::new();
        for size in shape(self.random) {
            dims.push(Field::Message(
                1,
                vec![match one_in(self.random, 5) {
                    true => text(2, pick::<&str>(self.random, &["N", "T", "2*N", "N+1"])),
                    false => Field::Varint(1, size as u64),
                }],
            ));
        }
        let kind = Field::Message(2, tensor_type(element, &dims));
        self.inputs.push(Field::Message(11, vec![text(1, &name), kind]));
        self.values.push(name);
    }

    /// Adds an initializer and returns its name.
    fn constant(&mut self, dims: &[i64], element: u64) -> String {
        let count = small_count(dims).unwrap_or(1);
        let mut raw = Vec::new();
        for _ in 0..count {
            match element {
                INT64 => raw.extend_from_slice(&self.small_integer().to_le_bytes()),
                UINT8 => raw.push(self.random.next_u64() as u8),
                BOOL => raw.push(self.random.below(2) as u8),
                _ => raw.extend_from_slice(&self.random.symmetric_f32().to_le_bytes()),
            }
        }
        self.initializer(dims, element, raw)
    }

    fn initializer(&mut self, dims: &[i64], element: u64, raw: Vec<u8>) -> String {
        self.tensor(dims, element, vec![Field::Bytes(9, raw)])
    }

    fn tensor(&mut self, dims: &[i64], element: u64, data: Vec<Field>) -> String {
        let name = self.name();
        let mut tensor: Vec<Field> = dims.iter().map(|&dim| Field::Varint(1, dim as u64)).collect();
        tensor.push(Field::Varint(2, element));
        tensor.push(text(8, &name));
        tensor.extend(data);
        self.constants.push(Field::Message(5, tensor));
        name
    }

    /// A constant of few strings.
    fn strings(&mut self) -> String {
        let count = self.random.below(4);
        let words = ["", "a", "b,c", " A  b ", "\u{130}\u{3a3}", "12.5", "aaaaaaaaaaaaaaaa"];
        let data = (0..count).map(|_| text(6, pick::<&str>(self.random, &words))).collect();
        self.tensor(&[count as i64], STRING, data)
    }

    fn small_integer(&mut self) -> i64 {
        match self.random.below(12) {
            0 => size(self.random),
            1 => -(self.random.below(4) as i64),
            _ => self.random.below(5) as i64,
        }
    }

    fn operand(&mut self, kind: char) -> String {
        match kind {
            'c' => {
                let count = 1 + self.random.below(4) as i64;
                self.constant(&[count], FLOAT)
            }
            'w' => {
                let dims = shape(self.random);
                self.constant(&dims, FLOAT)
            }
            'i' => {
                let count = self.random.below(5) as i64;
                self.constant(&[count], INT64)
            }
            'n' => self.constant(&[], INT64),
            's' => self.constant(&[], FLOAT),
            'b' => {
                let dims = shape(self.random);
                self.constant(&dims, UINT8)
            }
            'z' => self.constant(&[], UINT8),
            'B' => self.constant(&[], BOOL),
            'S' => self.strings(),
            _ if self.values.is_empty() => String::new(),
            // Later values more often, so that nodes form chains.
            _ => {
                let last = self.values.len() - 1;
                let most = self.random.below(last as u64 + 1);
                let back = self.random.below(most + 1) as usize;
                self.values[last - back].clone()
            }
        }
    }

    fn attribute(&mut self, spec: &str) -> Field {
        if let Some((name, value)) = spec.split_once('=') {
            return Field::Message(5, vec![text(1, name), text(4, value), Field::Varint(20, 3)]);
        }
        let (name, kind) = spec.split_once(':').unwrap_or((spec, "int"));
        let mut fields = vec![text(1, name)];
        match kind {
            "float" => {
                let value = *pick(self.random, &[0.0, 1.0, 0.1, -1.0, 1e-5, f32::NAN, 1e30]);
                fields.push(Field::Fixed32(2, value.to_le_bytes()));
                fields.push(Field::Varint(20, 1));
            }
            "ints" => {
                let mut packed = Vec::new();
                for _ in 0..self.random.below(5) {
                    put_varint(self.small_integer() as u64, &mut packed);
                }
                fields.push(Field::Bytes(8, packed));
                fields.push(Field::Varint(20, 7));
            }
            _ => {
                fields.push(Field::Varint(3, self.small_integer() as u64));
                fields.push(Field::Varint(20, 2));
            }
        }
        Field::Message(5, fields)
    }

    fn node(&mut self) {
        match one_in(self.random, 6) {
            true => self.special_node(),
            false => self.operator_node(),
        }
    }

    fn operator_node(&mut self) {
        let (operator, operands, attributes) = *pick(self.random, OPERATORS);
        let (domain, operator) = operator.split_once(':').unwrap_or(("", operator));
        let mut fields = Vec::new();
        let mut optional = false;
        for kind in operands.chars() {
            if kind == '?' {
                optional = true;
            } else if optional && one_in(self.random, 2) {
                break;
            } else {
                let name = self.operand(kind);
                fields.push(text(1, &name));
            }
        }
        let outputs = match operator {
            "Split" | "TopK" | "LSTM" | "GRU" | "RNN" | "DynamicQuantizeLinear" => {
                1 + self.random.below(3)
            }
            "StringSplit" => 2,
            "MaxPool" | "Dropout" | "LayerNormalization" => 1 + self.random.below(2),
            _ => 1,
        };
        for _ in 0..outputs {
            let name = self.name();
            fields.push(text(2, &name));
            self.values.push(name);
        }
        fields.push(text(4, operator));
        if !domain.is_empty() {
            fields.push(text(7, domain));
        }
        for attribute in attributes {
            if one_in(self.random, 2) {
                let attribute = self.attribute(attribute);
                fields.push(attribute);
            }
        }
        self.nodes.push(Field::Message(1, fields));
    }
}

/// A random model.
pub fn model(random: &mut Random) -> Vec<u8> {
    let mut builder = Builder {
        random,
        nodes: Vec::new(),
        constants: Vec::new(),
        inputs: Vec::new(),
        values: Vec::new(),
        names: 0,
        depth: 0,
        function: None,
    };
    let function = one_in(builder.random, 4).then(|| builder.define_function());
    for _ in 0..1 + builder.random.below(2) {
        builder.input();
    }
    // Most models are refused for one bad node: short ones get further.
    let most = builder.random.below(6);
    for _ in 0..1 + builder.random.below(1 + most) {
        builder.node();
    }
    let Builder { random, nodes, constants, inputs, values, .. } = builder;
    let mut graph = nodes;
    graph.push(text(2, "g"));
    graph.extend(constants);
    graph.extend(inputs);
    let mut outputs = vec![values.last().cloned().unwrap_or_default()];
    if one_in(random, 4) {
        outputs.push(pick(random, &values).clone());
    }
    for output in outputs {
        graph.push(Field::Message(12, vec![text(1, &output)]));
    }
    let opset = *pick(random, &[7, 11, 12, 13, 17, 18, 20, 21, 22, 23]);
    let mut model = vec![Field::Varint(1, 8), Field::Message(7, graph)];
    for (domain, version) in IMPORTS {
        let version = if domain.is_empty() { opset } else { *version };
        model.push(Field::Message(8, vec![text(1, domain), Field::Varint(2, version)]));
    }
    model.extend(function);
    let mut bytes = Vec::new();
    write(&model, &mut bytes);
    bytes
}

/// A random model after the byte that says how it is used.
pub fn model_for_registration(random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![random.next_u64() as u8];
    bytes.extend(model(random));
    bytes
}

#[cfg(test)]
mod tests {
    use graph::ExternalData;

    use super::*;

    #[test]
    fn every_kind_of_node_is_imported_sometimes() {
        let mut left = vec![
            "then_branch",
            "Loop",
            "num_scan_inputs",
            "local",
            "TreeEnsembleRegressor",
            "TreeEnsembleClassifier",
            "StringConcat",
            "StringSplit",
            "StringNormalizer",
            "RegexFullMatch",
            "LabelEncoder",
            "QLinearMatMul",
            "QLinearSigmoid",
            "MatMulInteger",
            "BiasGelu",
            "FusedMatMul",
            "SkipLayerNormalization",
        ];
        let mut random = Random::new(7);
        for _ in 0..60_000 {
            let bytes = model(&mut random);
            let has = |word: &&str| {
                // How a function's domain is written, which differs from that of a call.
                let word = if *word == "local" { "R\x05local" } else { word };
                bytes.windows(word.len()).any(|part| part == word.as_bytes())
            };
            let found: Vec<&str> = left.iter().filter(|word| has(word)).copied().collect();
            if !found.is_empty() && graph::import(&bytes, &ExternalData::none()).is_ok() {
                left.retain(|word| !found.contains(word));
            }
            if left.is_empty() {
                return;
            }
        }
        panic!("never imported: {left:?}");
    }
}
