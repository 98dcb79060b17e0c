//! The ONNX messages, as far as inference needs them.
//!
//! Bodies of control flow are kept as bytes, so that decoding never recurses.

use bytes::Bytes;

use super::wire::{Field, Fields, WireError, push_limited};

const MAX_LIST: usize = 1 << 16;

/// Strings of one attribute: trees name the mode of every node.
const MAX_STRINGS: usize = 1 << 24;

/// How many nodes and initializers a decoder accepts.
pub(crate) const MAX_NODES: usize = 1_000_000;

pub(crate) trait Message: Default {
    const NAME: &'static str;

    fn field(&mut self, field: Field) -> Result<(), WireError>;

    fn decode(bytes: Bytes) -> Result<Self, WireError> {
        let mut message = Self::default();
        let mut fields = Fields::new(Self::NAME, bytes);
        while let Some(field) = fields.next()? {
            message.field(field)?;
        }
        Ok(message)
    }
}

fn push<T>(list: &mut Vec<T>, item: T, message: &'static str, field: u64) -> Result<(), WireError> {
    push_limited(list, item, MAX_LIST, message, field)
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ModelProto {
    pub ir_version: i64,
    pub graph: Option<GraphProto>,
    pub opsets: Vec<OperatorSet>,
    pub functions: Vec<FunctionProto>,
}

impl Message for ModelProto {
    const NAME: &'static str = "ModelProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        let number = field.number;
        match number {
            1 => self.ir_version = field.int()?,
            7 => self.graph = Some(GraphProto::decode(field.bytes()?)?),
            8 => push(&mut self.opsets, OperatorSet::decode(field.bytes()?)?, Self::NAME, number)?,
            25 => push(
                &mut self.functions,
                FunctionProto::decode(field.bytes()?)?,
                Self::NAME,
                number,
            )?,
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct OperatorSet {
    pub domain: String,
    pub version: i64,
}

impl Message for OperatorSet {
    const NAME: &'static str = "OperatorSetIdProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        match field.number {
            1 => self.domain = field.string()?,
            2 => self.version = field.int()?,
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct FunctionProto {
    pub name: String,
    pub domain: String,
    pub overload: String,
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    pub attributes: Vec<String>,
    pub defaults: Vec<AttributeProto>,
    pub nodes: Vec<NodeProto>,
    pub opsets: Vec<OperatorSet>,
}

impl Message for FunctionProto {
    const NAME: &'static str = "FunctionProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        let number = field.number;
        match number {
            1 => self.name = field.string()?,
            4 => push(&mut self.inputs, field.string()?, Self::NAME, number)?,
            5 => push(&mut self.outputs, field.string()?, Self::NAME, number)?,
            6 => push(&mut self.attributes, field.string()?, Self::NAME, number)?,
            7 => push(&mut self.nodes, NodeProto::decode(field.bytes()?)?, Self::NAME, number)?,
            9 => push(&mut self.opsets, OperatorSet::decode(field.bytes()?)?, Self::NAME, number)?,
            10 => self.domain = field.string()?,
            11 => push(
                &mut self.defaults,
                AttributeProto::decode(field.bytes()?)?,
                Self::NAME,
                number,
            )?,
            13 => self.overload = field.string()?,
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct GraphProto {
    pub name: String,
    pub nodes: Vec<NodeProto>,
    pub initializers: Vec<TensorProto>,
    pub sparse_initializers: usize,
    pub inputs: Vec<ValueInfoProto>,
    pub outputs: Vec<ValueInfoProto>,
    pub value_infos: Vec<ValueInfoProto>,
}

impl Message for GraphProto {
    const NAME: &'static str = "GraphProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        let number = field.number;
        match number {
            1 => push_limited(
                &mut self.nodes,
                NodeProto::decode(field.bytes()?)?,
                MAX_NODES,
                Self::NAME,
                number,
            )?,
            2 => self.name = field.string()?,
            5 => push_limited(
                &mut self.initializers,
                TensorProto::decode(field.bytes()?)?,
                MAX_NODES,
                Self::NAME,
                number,
            )?,
            11 => {
                push(&mut self.inputs, ValueInfoProto::decode(field.bytes()?)?, Self::NAME, number)?
            }
            12 => push(
                &mut self.outputs,
                ValueInfoProto::decode(field.bytes()?)?,
                Self::NAME,
                number,
            )?,
            13 => push_limited(
                &mut self.value_infos,
                ValueInfoProto::decode(field.bytes()?)?,
                MAX_NODES,
                Self::NAME,
                number,
            )?,
            15 => self.sparse_initializers += 1,
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct NodeProto {
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    pub name: String,
    pub op_type: String,
    pub domain: String,
    pub overload: String,
    pub attributes: Vec<AttributeProto>,
}

impl Message for NodeProto {
    const NAME: &'static str = "NodeProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        let number = field.number;
        match number {
            1 => push(&mut self.inputs, field.string()?, Self::NAME, number)?,
            2 => push(&mut self.outputs, field.string()?, Self::NAME, number)?,
            3 => self.name = field.string()?,
            4 => self.op_type = field.string()?,
            5 => push(
                &mut self.attributes,
                AttributeProto::decode(field.bytes()?)?,
                Self::NAME,
                number,
            )?,
            7 => self.domain = field.string()?,
            8 => self.overload = field.string()?,
            _ => {}
        }
        Ok(())
    }
}

/// An attribute's value. The type selects the field; in old files, the field that is present.
#[derive(Clone, Debug, Default)]
pub(crate) struct AttributeProto {
    pub name: String,
    pub reference: String,
    pub kind: i64,
    pub float: Option<f32>,
    pub int: Option<i64>,
    pub bytes: Option<Bytes>,
    pub tensor: Option<TensorProto>,
    pub graph: Option<Bytes>,
    pub floats: Vec<f32>,
    pub ints: Vec<i64>,
    pub strings: Vec<Bytes>,
    pub other: bool,
}

impl Message for AttributeProto {
    const NAME: &'static str = "AttributeProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        let number = field.number;
        match number {
            1 => self.name = field.string()?,
            2 => self.float = Some(field.float()?),
            3 => self.int = Some(field.int()?),
            4 => self.bytes = Some(field.bytes()?),
            5 => self.tensor = Some(TensorProto::decode(field.bytes()?)?),
            6 => self.graph = Some(field.bytes()?),
            7 => field.floats(&mut self.floats)?,
            8 => field.ints(&mut self.ints)?,
            9 => push_limited(&mut self.strings, field.bytes()?, MAX_STRINGS, Self::NAME, number)?,
            10 | 11 | 14 | 15 | 22 | 23 => self.other = true,
            20 => self.kind = field.int()?,
            21 => self.reference = field.string()?,
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TensorProto {
    pub name: String,
    pub dims: Vec<i64>,
    pub data_type: i64,
    pub floats: Vec<f32>,
    pub ints: Vec<i64>,
    pub longs: Vec<i64>,
    pub strings: Vec<Bytes>,
    pub doubles: Vec<f64>,
    pub unsigneds: Vec<i64>,
    pub raw: Option<Bytes>,
    pub external: Vec<(String, String)>,
    pub is_external: bool,
    pub is_segment: bool,
}

impl Message for TensorProto {
    const NAME: &'static str = "TensorProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        match field.number {
            1 => field.ints(&mut self.dims)?,
            2 => self.data_type = field.int()?,
            3 => self.is_segment = true,
            4 => field.floats(&mut self.floats)?,
            5 => field.ints(&mut self.ints)?,
            6 => self.strings.push(field.bytes()?),
            7 => field.ints(&mut self.longs)?,
            8 => self.name = field.string()?,
            9 => self.raw = Some(field.bytes()?),
            10 => field.doubles(&mut self.doubles)?,
            11 => field.ints(&mut self.unsigneds)?,
            13 => {
                let entry = StringEntry::decode(field.bytes()?)?;
                push_limited(&mut self.external, (entry.key, entry.value), 64, Self::NAME, 13)?;
            }
            14 => self.is_external = field.int()? == 1,
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
struct StringEntry {
    key: String,
    value: String,
}

impl Message for StringEntry {
    const NAME: &'static str = "StringStringEntryProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        match field.number {
            1 => self.key = field.string()?,
            2 => self.value = field.string()?,
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ValueInfoProto {
    pub name: String,
    pub kind: TypeProto,
}

impl Message for ValueInfoProto {
    const NAME: &'static str = "ValueInfoProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        match field.number {
            1 => self.name = field.string()?,
            2 => self.kind = TypeProto::decode(field.bytes()?)?,
            _ => {}
        }
        Ok(())
    }
}

/// A type: a tensor's, or the name of another kind and what it contains.
#[derive(Clone, Debug, Default)]
pub(crate) struct TypeProto {
    pub tensor: Option<TensorType>,
    pub other: Option<&'static str>,
    /// A [`ContainerType`], decoded on demand: types may be nested deeply.
    contents: Option<Bytes>,
}

impl TypeProto {
    /// The type of what a sequence or an optional contains.
    pub fn element(&self) -> Option<TypeProto> {
        let contents = ContainerType::decode(self.contents.clone()?).ok()?;
        TypeProto::decode(contents.first.filter(|_| self.other != Some("map"))?).ok()
    }

    /// The data types of a map's keys and values, if these are tensors or numbers.
    pub fn entries(&self) -> Option<(i64, TensorType)> {
        let contents = ContainerType::decode(self.contents.clone()?).ok()?;
        let values = TypeProto::decode(contents.second.filter(|_| self.other == Some("map"))?);
        Some((contents.key_type, values.ok()?.tensor?))
    }
}

/// `TypeProto.Sequence`, `TypeProto.Optional` or `TypeProto.Map`.
#[derive(Clone, Debug, Default)]
struct ContainerType {
    first: Option<Bytes>,
    key_type: i64,
    second: Option<Bytes>,
}

impl Message for ContainerType {
    const NAME: &'static str = "TypeProto.Sequence";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        match field.number {
            // A map has the type of its keys here, the others that of their elements.
            1 => match field.int() {
                Ok(key_type) => self.key_type = key_type,
                Err(_) => self.first = Some(field.bytes()?),
            },
            2 => self.second = Some(field.bytes()?),
            _ => {}
        }
        Ok(())
    }
}

impl Message for TypeProto {
    const NAME: &'static str = "TypeProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        match field.number {
            1 => self.tensor = Some(TensorType::decode(field.bytes()?)?),
            4 => (self.other, self.contents) = (Some("sequence"), Some(field.bytes()?)),
            5 => (self.other, self.contents) = (Some("map"), Some(field.bytes()?)),
            7 => self.other = Some("opaque"),
            8 => self.other = Some("sparse tensor"),
            9 => (self.other, self.contents) = (Some("optional"), Some(field.bytes()?)),
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TensorType {
    pub data_type: i64,
    pub shape: Option<ShapeProto>,
}

impl Message for TensorType {
    const NAME: &'static str = "TypeProto.Tensor";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        match field.number {
            1 => self.data_type = field.int()?,
            2 => self.shape = Some(ShapeProto::decode(field.bytes()?)?),
            _ => {}
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ShapeProto {
    pub dims: Vec<DimProto>,
}

impl Message for ShapeProto {
    const NAME: &'static str = "TensorShapeProto";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        if field.number == 1 {
            push_limited(&mut self.dims, DimProto::decode(field.bytes()?)?, 256, Self::NAME, 1)?;
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct DimProto {
    pub value: Option<i64>,
    pub param: String,
}

impl Message for DimProto {
    const NAME: &'static str = "Dimension";

    fn field(&mut self, field: Field) -> Result<(), WireError> {
        match field.number {
            1 => self.value = Some(field.int()?),
            2 => self.param = field.string()?,
            _ => {}
        }
        Ok(())
    }
}
