//! A node's attributes. An attribute that no code reads is an error: ignoring it could change the
//! result.

use std::cell::Cell;

use super::context::MapError;
use super::proto::{AttributeProto, TensorProto};

/// Attributes that never change what inference computes.
const HARMLESS: [&str; 3] = ["consumed_inputs", "doc_string", "onnx_name"];

pub(crate) struct Attributes<'a> {
    list: &'a [AttributeProto],
    used: Vec<Cell<bool>>,
}

impl<'a> Attributes<'a> {
    pub fn new(list: &'a [AttributeProto]) -> Attributes<'a> {
        Attributes { list, used: vec![Cell::new(false); list.len()] }
    }

    fn find(&self, name: &str) -> Option<&'a AttributeProto> {
        let index = self.list.iter().position(|attribute| attribute.name == name)?;
        self.used[index].set(true);
        Some(&self.list[index])
    }

    pub fn int(&self, name: &str) -> Result<Option<i64>, MapError> {
        self.find(name)
            .map(|a| a.int.or(default_of(a, 2, 0)).ok_or_else(|| wrong(name, "an integer")))
            .transpose()
    }

    pub fn int_or(&self, name: &str, default: i64) -> Result<i64, MapError> {
        Ok(self.int(name)?.unwrap_or(default))
    }

    pub fn flag(&self, name: &str, default: bool) -> Result<bool, MapError> {
        match self.int(name)? {
            None => Ok(default),
            Some(0) => Ok(false),
            Some(1) => Ok(true),
            Some(_) => Err(wrong(name, "0 or 1")),
        }
    }

    pub fn size_or(&self, name: &str, default: usize) -> Result<usize, MapError> {
        match self.int(name)? {
            None => Ok(default),
            Some(value) => usize::try_from(value).map_err(|_| wrong(name, "a size")),
        }
    }

    pub fn float(&self, name: &str) -> Result<Option<f32>, MapError> {
        self.find(name)
            .map(|a| a.float.or(default_of(a, 1, 0.0)).ok_or_else(|| wrong(name, "a float")))
            .transpose()
    }

    pub fn float_or(&self, name: &str, default: f32) -> Result<f32, MapError> {
        Ok(self.float(name)?.unwrap_or(default))
    }

    pub fn string(&self, name: &str) -> Result<Option<String>, MapError> {
        let text = |a: &AttributeProto| {
            let bytes = a.bytes.clone().unwrap_or_default();
            String::from_utf8(bytes.to_vec()).map_err(|_| wrong(name, "a string"))
        };
        self.find(name).map(text).transpose()
    }

    pub fn bytes(&self, name: &str) -> Option<bytes::Bytes> {
        self.find(name).map(|a| a.bytes.clone().unwrap_or_default())
    }

    pub fn ints(&self, name: &str) -> Option<&'a [i64]> {
        self.find(name).map(|a| a.ints.as_slice())
    }

    pub fn floats(&self, name: &str) -> Option<&'a [f32]> {
        self.find(name).map(|a| a.floats.as_slice())
    }

    pub fn strings(&self, name: &str) -> Option<&'a [bytes::Bytes]> {
        self.find(name).map(|a| a.strings.as_slice())
    }

    pub fn sizes(&self, name: &str) -> Result<Option<Vec<usize>>, MapError> {
        let convert = |values: &[i64]| -> Option<Vec<usize>> {
            values.iter().map(|v| usize::try_from(*v).ok()).collect()
        };
        match self.ints(name) {
            None => Ok(None),
            Some(values) => convert(values).map(Some).ok_or_else(|| wrong(name, "sizes")),
        }
    }

    pub fn tensor(&self, name: &str) -> Result<Option<&'a TensorProto>, MapError> {
        self.find(name)
            .map(|a| a.tensor.as_ref().ok_or_else(|| wrong(name, "a tensor")))
            .transpose()
    }

    /// Attributes the operator accepts without any effect on inference.
    pub fn ignore(&self, names: &[&str]) {
        names.iter().for_each(|name| {
            self.find(name);
        });
    }

    /// The first attribute that was not read.
    pub fn unused(&self) -> Option<&'a str> {
        let mut pairs = self.list.iter().zip(&self.used);
        let open = |(a, used): &(&AttributeProto, &Cell<bool>)| {
            !used.get() && !HARMLESS.contains(&a.name.as_str())
        };
        pairs.find(open).map(|(attribute, _)| attribute.name.as_str())
    }
}

/// Writers may omit a default value while naming the type.
fn default_of<T>(attribute: &AttributeProto, kind: i64, default: T) -> Option<T> {
    (attribute.kind == kind).then_some(default)
}

fn wrong(name: &str, expected: &str) -> MapError {
    MapError::Invalid(format!("attribute '{name}' is not {expected}"))
}
