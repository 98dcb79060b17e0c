//! Maps as vectors of numbers or strings: `DictVectorizer` and `CastMap`.

use bytes::Bytes;
use model::op::{Cast, Ml, Op};
use model::{DataType, Tensor, ValueId};

use super::super::attributes::Attributes;
use super::control::{Controlled, invalid, unsupported};
use super::sequence::Members;
use super::{Importer, SourceNode};
use crate::content;

/// The maximum number of columns of a map that has a value for few of them.
const MAX_COLUMNS: i64 = 1 << 20;

impl Importer<'_> {
    fn entries(&self, node: &SourceNode) -> Controlled<(ValueId, ValueId)> {
        match node.proto.inputs.first().and_then(|name| self.members.get(name)) {
            Some(Members::Map { keys, values }) => Ok((*keys, *values)),
            _ => invalid("input 0 is no map"),
        }
    }

    /// One row: the value of every word, and zero or nothing for those without one.
    pub(super) fn dict_vectorizer(&mut self, node: &SourceNode) -> Controlled<ValueId> {
        let (keys, values) = self.entries(node)?;
        let attributes = Attributes::new(&node.proto.attributes);
        let numbers = attributes.ints("int64_vocabulary").filter(|list| !list.is_empty());
        let words = attributes.strings("string_vocabulary").filter(|list| !list.is_empty());
        let vocabulary = match (numbers, words) {
            (Some(numbers), None) => content::int_vector(numbers),
            (None, Some(words)) => Tensor::from_strings(vec![words.len()], words.to_vec()).ok(),
            _ => return invalid("a vocabulary must be either integers or strings"),
        };
        let vocabulary = self.constant(&node.label, vocabulary)?;
        if self.graph.value(vocabulary).dtype != self.graph.value(keys).dtype {
            return invalid("a vocabulary of another type than the keys");
        }
        self.row_of(&node.label, vocabulary, keys, values)
    }

    /// The values of the keys `wanted` as a row.
    fn row_of(
        &mut self,
        label: &str,
        wanted: ValueId,
        keys: ValueId,
        values: ValueId,
    ) -> Controlled<ValueId> {
        let default = match self.graph.value(values).dtype {
            DataType::String => Tensor::from_strings(vec![], vec![Bytes::new()]).ok(),
            dtype => content::scalar(dtype, 0.0),
        };
        let default = self.constant(label, default)?;
        let row = self.add(label, Op::Ml(Ml::MapLabels), &[wanted, keys, values, default])?;
        let axes = self.constant(label, content::int_vector(&[0]))?;
        self.add(label, Op::Unsqueeze, &[row, axes])
    }

    /// One row: the values in the order of their keys, or each in the column that its key is.
    pub(super) fn cast_map(&mut self, node: &SourceNode) -> Controlled<ValueId> {
        let (keys, values) = self.entries(node)?;
        let label = node.label.as_str();
        let attributes = Attributes::new(&node.proto.attributes);
        let to = match attributes.string("cast_to")?.as_deref() {
            None | Some("TO_FLOAT") => DataType::F32,
            Some("TO_STRING") => DataType::String,
            Some("TO_INT64") => DataType::I64,
            Some(other) => return unsupported(format!("cast_to '{other}'")),
        };
        let columns = attributes.int_or("max_map", 1)?;
        let sparse = match attributes.string("map_form")?.as_deref() {
            None | Some("DENSE") => false,
            Some("SPARSE") => true,
            Some(other) => return unsupported(format!("map_form '{other}'")),
        };
        let cast = Op::Cast(Cast { to });
        let values = self.add(label, cast, &[values])?;
        if sparse {
            if !(1..=MAX_COLUMNS).contains(&columns) {
                return invalid(format!("max_map {columns}"));
            }
            let all: Vec<i64> = (0..columns).collect();
            let wanted = self.constant(label, content::int_vector(&all))?;
            return self.row_of(label, wanted, keys, values);
        }
        let wanted = self.sorted(label, keys)?;
        self.row_of(label, wanted, keys, values)
    }

    /// Integers in order.
    fn sorted(&mut self, label: &str, keys: ValueId) -> Controlled<ValueId> {
        let count = self.add(label, Op::Shape { start: 0, end: Some(1) }, &[keys])?;
        let order = Op::TopK { axis: 0, largest: false, sorted: true };
        self.add(label, order, &[keys, count])
    }
}
