//! Makes a quantized model file of a float one: the operands of products become bytes between
//! QuantizeLinear and DequantizeLinear. Everything else of the file is copied as it is.

mod calibration;

use std::collections::{HashMap, HashSet};

use bytes::Bytes;

use super::proto::{AttributeProto, GraphProto, Message, ModelProto, NodeProto, TensorProto};
use super::tensor::to_tensor;
use super::wire::{Fields, Payload, WireError};
use super::{ExternalData, ImportError};
use crate::content;

pub use calibration::{OutputError, RangeMethod, RangeObserver};

/// Scales along a dimension exist since this operator set.
const AXIS_OPSET: i64 = 13;

/// QuantizeLinear exists since this operator set.
const FIRST_OPSET: i64 = 10;

/// The type of quantized activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationBytes {
    /// `UINT8`; the zero point is anywhere in the range.
    Unsigned,
    /// `INT8`; the zero point is zero.
    Signed,
}

/// The range of an activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationRange {
    /// The least number that is not saturated.
    pub low: f32,
    /// The largest one.
    pub high: f32,
}

impl ActivationRange {
    /// Scale and zero point; zero has a byte of its own.
    fn quantum(self, bytes: ActivationBytes) -> (f32, i32) {
        let (low, high) = (self.low.min(0.0), self.high.max(0.0));
        let usable = |scale: f32| if scale.recip().is_finite() { scale } else { 1.0 };
        match bytes {
            ActivationBytes::Signed => (usable(high.max(-low) / 127.0), 0),
            ActivationBytes::Unsigned => {
                let scale = usable((high - low) / 255.0);
                (scale, (-low / scale).round_ties_even().clamp(0.0, 255.0) as i32)
            }
        }
    }
}

/// A node that is not quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FloatNode {
    /// Its name, or that of its output.
    pub node: String,
    /// The operator.
    pub op_type: String,
    /// Why.
    pub reason: String,
}

/// A product that is quantized.
#[derive(Clone, Debug)]
struct QuantizedProduct {
    /// Index of its node.
    node: usize,
    /// The dimension of the weight that has a scale for each index.
    axis: usize,
    is_convolution: bool,
}

/// A weight as bytes.
struct QuantizedWeight {
    /// One, or one for each index of the product's axis.
    scales: Vec<f32>,
    bytes: Vec<u8>,
    shape: Vec<usize>,
}

/// A model file whose products can be quantized.
pub struct QuantizableModel {
    bytes: Bytes,
    external: ExternalData,
    nodes: Vec<NodeProto>,
    /// The nodes as the file has them.
    raw_nodes: Vec<Bytes>,
    initializers: HashMap<String, TensorProto>,
    opset: i64,
    products: Vec<QuantizedProduct>,
    /// Max pools before products: they run on bytes, with the quantum of their input.
    pools: HashMap<String, usize>,
    float_nodes: Vec<FloatNode>,
    has_bodies: bool,
}

impl QuantizableModel {
    /// Reads a model file. The nodes called one of `keep` stay float.
    pub fn open(
        bytes: Bytes,
        external: ExternalData,
        keep: &[String],
    ) -> Result<QuantizableModel, ImportError> {
        let proto = ModelProto::decode(bytes.clone()).map_err(ImportError::Format)?;
        let none = || ImportError::Model("the model has no graph".to_string());
        let graph = proto.graph.ok_or_else(none)?;
        let is_default = |domain: &str| domain.is_empty() || domain == "ai.onnx";
        let opset = proto.opsets.iter().find(|set| is_default(&set.domain));
        let opset = opset.map_or(1, |set| set.version);
        if opset < FIRST_OPSET {
            return Err(ImportError::Model(format!(
                "operator set {opset} has no quantization; export the model with {AXIS_OPSET} or \
                 newer"
            )));
        }
        let GraphProto { nodes, initializers, .. } = graph;
        let initializers = initializers.into_iter().map(|each| (each.name.clone(), each)).collect();
        let has_bodies = nodes.iter().any(has_body);
        let raw_nodes = raw_nodes(bytes.clone())?;
        let mut model = QuantizableModel {
            bytes,
            external,
            nodes,
            raw_nodes,
            initializers,
            opset,
            products: Vec::new(),
            pools: HashMap::new(),
            float_nodes: Vec::new(),
            has_bodies,
        };
        let unknown = |name: &&String| !model.nodes.iter().any(|node| node_name(node) == **name);
        if let Some(name) = keep.iter().find(unknown) {
            return Err(ImportError::Model(format!("the model has no node '{name}'")));
        }
        model.select(keep);
        Ok(model)
    }

    /// The activations whose ranges are needed.
    pub fn activations(&self) -> Vec<String> {
        let mut seen = HashSet::new();
        let sources =
            self.products.iter().map(|each| self.source(&self.nodes[each.node].inputs[0]));
        sources.filter(|name| seen.insert(*name)).map(str::to_string).collect()
    }

    /// How many products are quantized.
    pub fn product_count(&self) -> usize {
        self.products.len()
    }

    /// The products that stay float.
    pub fn float_nodes(&self) -> &[FloatNode] {
        &self.float_nodes
    }

    /// Whether weights that are copied as they are lie in other files.
    pub fn needs_other_files(&self) -> bool {
        let weights: HashSet<&str> =
            self.products.iter().map(|each| self.nodes[each.node].inputs[1].as_str()).collect();
        self.initializers
            .iter()
            .any(|(name, tensor)| tensor.is_external && !weights.contains(name.as_str()))
    }

    fn select(&mut self, keep: &[String]) {
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            if !matches!(node.op_type.as_str(), "Conv" | "MatMul" | "Gemm")
                || !matches!(node.domain.as_str(), "" | "ai.onnx")
            {
                continue;
            }
            let product = match keep.contains(&node_name(node)) {
                true => Err("it was asked for".to_string()),
                false => self.product(index),
            };
            match product {
                Ok(product) => self.products.push(product),
                Err(reason) => self.float_nodes.push(FloatNode {
                    node: node_name(&self.nodes[index]),
                    op_type: self.nodes[index].op_type.clone(),
                    reason,
                }),
            }
        }
        let read: HashSet<&String> =
            self.products.iter().map(|each| &self.nodes[each.node].inputs[0]).collect();
        let is_pool = |node: &NodeProto| {
            node.op_type == "MaxPool" && node.outputs.len() == 1 && node.inputs.len() == 1
        };
        let pools = self.nodes.iter().enumerate().filter(|(_, node)| is_pool(node));
        self.pools = pools
            .filter(|(_, node)| read.contains(&node.outputs[0]))
            .map(|(index, node)| (node.outputs[0].clone(), index))
            .collect();
    }

    /// The product at node `index`, or why it stays float.
    fn product(&self, index: usize) -> Result<QuantizedProduct, String> {
        let node = &self.nodes[index];
        let (Some(x), Some(weight)) = (node.inputs.first(), node.inputs.get(1)) else {
            return Err("an operand is absent".to_string());
        };
        let Some(tensor) = self.initializers.get(weight) else {
            return Err("its weight is not constant".to_string());
        };
        if x.is_empty() || self.initializers.contains_key(x) {
            return Err("its activations are constant".to_string());
        }
        if tensor.data_type != 1 {
            return Err("its weight is not FP32".to_string());
        }
        let int = |name: &str| int_attribute(node, name);
        let rank = tensor.dims.len();
        let is_convolution = node.op_type == "Conv";
        let axis = match node.op_type.as_str() {
            "Conv" if rank < 3 => return Err(format!("its weight has {rank} dimensions")),
            "Conv" if int("group").unwrap_or(1) > 1 && tensor.dims[1] == 1 => {
                return Err("one filter for each channel is no product of bytes".to_string());
            }
            "Conv" => 0,
            _ if rank != 2 => return Err(format!("its weight has {rank} dimensions")),
            "Gemm" if int("transA").unwrap_or(0) != 0 => {
                return Err("its activations are transposed".to_string());
            }
            "Gemm" if int("transB").unwrap_or(0) != 0 => 0,
            _ => 1,
        };
        Ok(QuantizedProduct { node: index, axis, is_convolution })
    }

    /// The activation whose range is that of `name`.
    fn source<'a>(&'a self, name: &'a str) -> &'a str {
        let mut name = name;
        for _ in 0..self.pools.len() {
            match self.pools.get(name) {
                Some(pool) => name = &self.nodes[*pool].inputs[0],
                None => break,
            }
        }
        name
    }

    /// The quantized file. Every activation needs its range.
    pub fn write(
        &self,
        ranges: &HashMap<String, ActivationRange>,
        activations: ActivationBytes,
    ) -> Result<Vec<u8>, ImportError> {
        let mut writer = GraphWriter::new(self, ranges, activations);
        for index in 0..self.nodes.len() {
            writer.node(index)?;
        }
        let format = ImportError::Format;
        let mut out = Vec::with_capacity(self.bytes.len() / 2);
        let mut fields = Fields::new(ModelProto::NAME, self.bytes.clone());
        while let Some(field) = fields.next().map_err(format)? {
            match (field.number, &field.payload) {
                (7, Payload::Bytes(graph)) => {
                    let graph = writer.graph(graph.clone()).map_err(format)?;
                    put_bytes(&mut out, 7, &graph);
                }
                (number, payload) => put(&mut out, number, payload),
            }
        }
        Ok(out)
    }
}

fn has_body(node: &NodeProto) -> bool {
    node.attributes.iter().any(|attribute| attribute.graph.is_some() || attribute.other)
}

fn int_attribute(node: &NodeProto, name: &str) -> Option<i64> {
    let named = |attribute: &&AttributeProto| attribute.name == name;
    node.attributes.iter().find(named).and_then(|attribute| attribute.int)
}

fn node_name(node: &NodeProto) -> String {
    if node.name.is_empty() {
        node.outputs.first().cloned().unwrap_or_default()
    } else {
        node.name.clone()
    }
}

/// The nodes and constants of the quantized graph.
struct GraphWriter<'a> {
    model: &'a QuantizableModel,
    ranges: &'a HashMap<String, ActivationRange>,
    activations: ActivationBytes,
    names: HashSet<String>,
    products: HashMap<usize, &'a QuantizedProduct>,
    /// Activations of quantized convolutions.
    images: HashSet<&'a str>,
    /// All quantized activations.
    quantized: HashSet<&'a str>,
    /// The dequantized form of an activation or weight.
    dequantized: HashMap<String, String>,
    nodes: Vec<Vec<u8>>,
    constants: Vec<Vec<u8>>,
    /// Names that are read.
    read: HashSet<String>,
}

impl<'a> GraphWriter<'a> {
    fn new(
        model: &'a QuantizableModel,
        ranges: &'a HashMap<String, ActivationRange>,
        activations: ActivationBytes,
    ) -> GraphWriter<'a> {
        let mut names: HashSet<String> = model.initializers.keys().cloned().collect();
        for node in &model.nodes {
            names.extend(node.inputs.iter().chain(&node.outputs).cloned());
        }
        let input = |product: &&'a QuantizedProduct| model.nodes[product.node].inputs[0].as_str();
        let images = model.products.iter().filter(|each| each.is_convolution);
        let images: HashSet<&str> = images.map(|each| input(&each)).collect();
        let mut quantized: HashSet<&str> = model.products.iter().map(|each| input(&each)).collect();
        let pools: Vec<usize> = model.pools.values().copied().collect();
        quantized.extend(pools.into_iter().map(|pool| model.nodes[pool].inputs[0].as_str()));
        GraphWriter {
            model,
            ranges,
            activations,
            names,
            products: model.products.iter().map(|each| (each.node, each)).collect(),
            images,
            quantized,
            dequantized: HashMap::new(),
            nodes: Vec::new(),
            constants: Vec::new(),
            read: HashSet::new(),
        }
    }

    fn fresh(&mut self, name: &str, what: &str) -> String {
        let mut fresh = format!("{name}_{what}");
        for number in 2.. {
            if self.names.insert(fresh.clone()) {
                break;
            }
            fresh = format!("{name}_{what}{number}");
        }
        fresh
    }

    /// Writes node `index` with the quantized forms of what it reads.
    fn node(&mut self, index: usize) -> Result<(), ImportError> {
        let node = &self.model.nodes[index];
        let mut inputs = node.inputs.clone();
        if let Some(product) = self.products.get(&index).copied() {
            inputs[0] = self.activation(&node.inputs[0])?;
            inputs[1] = self.weight(product)?;
            if let Some(bias) = node.inputs.get(2).filter(|name| !name.is_empty()) {
                inputs[2] = self.bias(product, bias)?;
            }
        } else if self.model.pools.values().any(|pool| *pool == index) {
            inputs[0] = self.activation(&node.inputs[0])?;
        } else if matches!(node.op_type.as_str(), "Add" | "Sum") {
            // The other path of a residual network: bytes as well.
            for (slot, name) in inputs.iter_mut().zip(&node.inputs) {
                if self.images.contains(name.as_str()) && self.quantized.contains(name.as_str()) {
                    *slot = self.activation(name)?;
                }
            }
        }
        self.read.extend(inputs.iter().cloned());
        let mut raw = Vec::new();
        inputs.iter().for_each(|name| put_bytes(&mut raw, 1, name.as_bytes()));
        let mut fields = Fields::new(NodeProto::NAME, self.model.raw_nodes[index].clone());
        while let Some(field) = fields.next().map_err(ImportError::Format)? {
            if field.number != 1 {
                put(&mut raw, field.number, &field.payload);
            }
        }
        self.nodes.push(raw);
        Ok(())
    }

    /// The dequantized form of an activation.
    fn activation(&mut self, name: &str) -> Result<String, ImportError> {
        if let Some(known) = self.dequantized.get(name) {
            return Ok(known.clone());
        }
        let source = self.model.source(name);
        let range = self.ranges.get(source).ok_or_else(|| {
            ImportError::Model(format!("the range of activation '{source}' is not known"))
        })?;
        let finite = range.low.is_finite() && range.high.is_finite();
        if !finite || range.low > range.high {
            let ActivationRange { low, high } = range;
            return Err(ImportError::Model(format!(
                "activation '{source}' has the range {low} to {high}"
            )));
        }
        let (scale, zero) = range.quantum(self.activations);
        let (scale_name, zero_name) = (self.fresh(name, "scale"), self.fresh(name, "zero_point"));
        let bytes = match self.activations {
            ActivationBytes::Unsigned => (2, zero as u8),
            ActivationBytes::Signed => (3, zero as i8 as u8),
        };
        self.constant(&scale_name, 1, &[], &scale.to_le_bytes());
        self.constant(&zero_name, bytes.0, &[], &[bytes.1]);
        let quantized = self.fresh(name, "quantized");
        let dequantized = self.fresh(name, "dequantized");
        let quantum = [scale_name.as_str(), zero_name.as_str()];
        self.new_node("QuantizeLinear", &[name, quantum[0], quantum[1]], &quantized, None);
        let operands = [quantized.as_str(), quantum[0], quantum[1]];
        self.new_node("DequantizeLinear", &operands, &dequantized, None);
        self.dequantized.insert(name.to_string(), dequantized.clone());
        Ok(dequantized)
    }

    /// The scales of a weight, and the weight as bytes.
    fn quantized_weight(&self, product: &QuantizedProduct) -> Result<QuantizedWeight, ImportError> {
        let name = &self.model.nodes[product.node].inputs[1];
        let tensor = to_tensor(&self.model.initializers[name], &self.model.external)?;
        let bad = |reason: &str| ImportError::Tensor { name: name.clone(), reason: reason.into() };
        let values = content::floats(&tensor).ok_or_else(|| bad("it is not FP32"))?;
        if values.iter().any(|value| !value.is_finite()) {
            return Err(bad("a weight is not finite"));
        }
        let shape = tensor.shape().to_vec();
        let inner: usize = shape[product.axis + 1..].iter().product();
        let groups = if self.model.opset >= AXIS_OPSET { shape[product.axis] } else { 1 };
        let group = |index: usize| if groups == 1 { 0 } else { index / inner.max(1) % groups };
        let mut largest = vec![0f32; groups];
        for (index, value) in values.iter().enumerate() {
            let most = &mut largest[group(index)];
            *most = most.max(value.abs());
        }
        let scale = |most: f32| {
            let scale = most / 127.0;
            if scale.recip().is_finite() { scale } else { 1.0 }
        };
        let scales: Vec<f32> = largest.into_iter().map(scale).collect();
        let byte = |(index, value): (usize, &f32)| {
            (value / scales[group(index)]).round_ties_even().clamp(-127.0, 127.0) as i8 as u8
        };
        let bytes = values.iter().enumerate().map(byte).collect();
        Ok(QuantizedWeight { scales, bytes, shape })
    }

    /// The dequantized form of a weight.
    fn weight(&mut self, product: &QuantizedProduct) -> Result<String, ImportError> {
        let name = self.model.nodes[product.node].inputs[1].clone();
        let key = format!("{name} along {}", product.axis);
        if let Some(known) = self.dequantized.get(&key) {
            return Ok(known.clone());
        }
        let QuantizedWeight { scales, bytes, shape } = self.quantized_weight(product)?;
        let dims = if self.model.opset >= AXIS_OPSET { vec![scales.len()] } else { vec![] };
        let names = ["quantized", "scale", "zero_point", "dequantized"];
        let [quantized, scale, zero, dequantized] = names.map(|what| self.fresh(&name, what));
        self.constant(&quantized, 3, &shape, &bytes);
        let raw: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.constant(&scale, 1, &dims, &raw);
        self.constant(&zero, 3, &dims, &vec![0; scales.len()]);
        let axis = (!dims.is_empty()).then_some(product.axis);
        self.new_node("DequantizeLinear", &[&quantized, &scale, &zero], &dequantized, axis);
        self.dequantized.insert(key, dequantized.clone());
        Ok(dequantized)
    }

    /// A constant bias as 32-bit integers in the scale of the sums, or as it is.
    fn bias(&mut self, product: &QuantizedProduct, name: &str) -> Result<String, ImportError> {
        let Some(proto) = self.model.initializers.get(name).filter(|bias| bias.data_type == 1)
        else {
            return Ok(name.to_string());
        };
        let tensor = to_tensor(proto, &self.model.external)?;
        let plain = !has_factor(&self.model.nodes[product.node]);
        let QuantizedWeight { scales, .. } = self.quantized_weight(product)?;
        let activation = self.model.source(&self.model.nodes[product.node].inputs[0]);
        let (scale, _) = self.ranges[activation].quantum(self.activations);
        let one_each = tensor.shape() == [scales.len()] && self.model.opset >= AXIS_OPSET;
        let Some(values) = content::floats(&tensor).filter(|_| one_each && plain) else {
            return Ok(name.to_string());
        };
        let scales: Vec<f32> = scales.into_iter().map(|weight| scale * weight).collect();
        let whole = |(value, scale): (&f32, &f32)| (value / scale).round_ties_even();
        let values: Vec<f32> = values.iter().zip(&scales).map(whole).collect();
        let fits = |value: &f32| value.abs() < (1u32 << 30) as f32;
        if !values.iter().all(fits) || scales.iter().any(|scale| !scale.recip().is_finite()) {
            return Ok(name.to_string());
        }
        let names = ["quantized", "scale", "dequantized"];
        let [quantized, scale, dequantized] = names.map(|what| self.fresh(name, what));
        let raw: Vec<u8> = values.iter().flat_map(|value| (*value as i32).to_le_bytes()).collect();
        self.constant(&quantized, 6, &[values.len()], &raw);
        let raw: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.constant(&scale, 1, &[scales.len()], &raw);
        self.new_node("DequantizeLinear", &[&quantized, &scale], &dequantized, Some(0));
        Ok(dequantized)
    }

    fn constant(&mut self, name: &str, data_type: u64, shape: &[usize], raw: &[u8]) {
        let mut out = Vec::with_capacity(raw.len() + name.len() + 32);
        shape.iter().for_each(|size| put_int(&mut out, 1, *size as u64));
        put_int(&mut out, 2, data_type);
        put_bytes(&mut out, 8, name.as_bytes());
        put_bytes(&mut out, 9, raw);
        self.constants.push(out);
    }

    fn new_node(&mut self, op: &str, inputs: &[&str], output: &str, axis: Option<usize>) {
        let mut out = Vec::new();
        for name in inputs {
            put_bytes(&mut out, 1, name.as_bytes());
            self.read.insert((*name).to_string());
        }
        put_bytes(&mut out, 2, output.as_bytes());
        put_bytes(&mut out, 3, format!("{output}/{op}").as_bytes());
        put_bytes(&mut out, 4, op.as_bytes());
        if let Some(axis) = axis {
            let mut attribute = Vec::new();
            put_bytes(&mut attribute, 1, b"axis");
            put_int(&mut attribute, 3, axis as u64);
            put_int(&mut attribute, 20, 2);
            put_bytes(&mut out, 5, &attribute);
        }
        self.nodes.push(out);
    }

    /// The graph with these nodes and constants. Constants that are not read any more are left out.
    fn graph(&self, bytes: Bytes) -> Result<Vec<u8>, WireError> {
        let mut out = Vec::with_capacity(bytes.len() / 2);
        self.nodes.iter().for_each(|node| put_bytes(&mut out, 1, node));
        self.constants.iter().for_each(|constant| put_bytes(&mut out, 5, constant));
        let replaced: HashSet<&str> = self
            .model
            .products
            .iter()
            .flat_map(|each| self.model.nodes[each.node].inputs[1..].iter().map(String::as_str))
            .filter(|name| !self.read.contains(*name) && !self.model.has_bodies)
            .collect();
        let mut outputs = HashSet::new();
        let mut fields = Fields::new(GraphProto::NAME, bytes.clone());
        while let Some(field) = fields.next()? {
            if let (12, Payload::Bytes(value)) = (field.number, &field.payload) {
                outputs.insert(name_in(value.clone(), 1)?);
            }
        }
        let mut fields = Fields::new(GraphProto::NAME, bytes);
        while let Some(field) = fields.next()? {
            let name = match (field.number, &field.payload) {
                (1, _) => continue,
                (5, Payload::Bytes(tensor)) => name_in(tensor.clone(), 8)?,
                (11, Payload::Bytes(input)) => name_in(input.clone(), 1)?,
                _ => String::new(),
            };
            if !replaced.contains(name.as_str()) || outputs.contains(&name) {
                put(&mut out, field.number, &field.payload);
            }
        }
        Ok(out)
    }
}

/// Whether a fully connected layer multiplies its sums or its bias.
fn has_factor(node: &NodeProto) -> bool {
    let factor = |attribute: &AttributeProto| {
        matches!(attribute.name.as_str(), "alpha" | "beta") && attribute.float != Some(1.0)
    };
    node.attributes.iter().any(factor)
}

/// The nodes of a model's graph as the file has them.
fn raw_nodes(bytes: Bytes) -> Result<Vec<Bytes>, ImportError> {
    let format = ImportError::Format;
    let (mut nodes, mut graphs) = (Vec::new(), 0);
    let mut model = Fields::new(ModelProto::NAME, bytes);
    while let Some(field) = model.next().map_err(format)? {
        let (7, Payload::Bytes(graph)) = (field.number, &field.payload) else { continue };
        graphs += 1;
        let mut fields = Fields::new(GraphProto::NAME, graph.clone());
        while let Some(field) = fields.next().map_err(format)? {
            if let (1, Payload::Bytes(node)) = (field.number, &field.payload) {
                nodes.push(node.clone());
            }
        }
    }
    if graphs != 1 {
        return Err(ImportError::Model(format!("the file has {graphs} graphs")));
    }
    Ok(nodes)
}

/// The string in field `number` of a message.
fn name_in(bytes: Bytes, number: u64) -> Result<String, WireError> {
    let mut fields = Fields::new("a named message", bytes);
    let mut name = String::new();
    while let Some(field) = fields.next()? {
        if field.number == number {
            name = field.string()?;
        }
    }
    Ok(name)
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_int(out: &mut Vec<u8>, number: u64, value: u64) {
    put_varint(out, number << 3);
    put_varint(out, value);
}

fn put_bytes(out: &mut Vec<u8>, number: u64, bytes: &[u8]) {
    put_varint(out, number << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put(out: &mut Vec<u8>, number: u64, payload: &Payload) {
    match payload {
        Payload::Varint(value) => put_int(out, number, *value),
        Payload::Bytes(bytes) => put_bytes(out, number, bytes),
        Payload::Fixed64(bytes) => {
            put_varint(out, number << 3 | 1);
            out.extend_from_slice(bytes);
        }
        Payload::Fixed32(bytes) => {
            put_varint(out, number << 3 | 5);
            out.extend_from_slice(bytes);
        }
    }
}
