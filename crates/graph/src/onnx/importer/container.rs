//! Inputs and outputs of a model that are no tensors. The protocol carries tensors only:
//!
//! - A sequence of an unknown number of tensors of one shape is one tensor, whose first dimension
//!   counts them.
//! - A sequence of a known number of tensors is an output for each: `name.0`, `name.1`, ...
//! - A map is two vectors: `name` has the values, `name.keys` the keys.
//! - An optional is its value, which a request always gives.

use model::ValueId;
use model::dim::SymDim;

use super::super::ImportError;
use super::super::ml::KEYS;
use super::super::proto::{TypeProto, ValueInfoProto};
use super::super::tensor::{data_type, held_type};
use super::control::ControlError;
use super::sequence::Members;
use super::{Importer, MapError};
use crate::infer::Fact;

/// Why an output cannot be given.
fn refused(name: &str, reason: &str) -> ImportError {
    ImportError::Model(format!("output '{name}' is {reason}"))
}

impl Importer<'_> {
    /// Adds an input that is no tensor; whether it is one of those that can be carried.
    pub(super) fn define_container(&mut self, info: &ValueInfoProto) -> Result<bool, ImportError> {
        let name = info.name.as_str();
        let optional = info.kind.other == Some("optional");
        let inner = if optional { info.kind.element() } else { None };
        let kind = inner.as_ref().unwrap_or(&info.kind);
        let tensor = ValueInfoProto { name: info.name.clone(), kind: kind.clone() };
        if optional && kind.tensor.is_some() {
            self.warn(format!("input '{name}' is optional; requests always give it"));
            let (fact, poisoned) = self.input_fact(&tensor)?;
            return self.add_input(name, fact, poisoned).map(|_| true);
        }
        match kind.other {
            Some("sequence") => self.define_sequence(name, kind),
            Some("map") => self.define_map(name, kind),
            _ => Ok(false),
        }
    }

    fn define_sequence(&mut self, name: &str, kind: &TypeProto) -> Result<bool, ImportError> {
        let Some(element) = kind.element().filter(|element| element.tensor.is_some()) else {
            return Ok(false);
        };
        let info = ValueInfoProto { name: name.to_string(), kind: element };
        let (mut fact, poisoned) = self.input_fact(&info)?;
        if let Some(dims) = &mut fact.shape {
            dims.insert(0, self.fresh_symbol());
        }
        let id = self.add_input(name, fact, poisoned)?;
        if !poisoned {
            self.names.remove(name);
            self.members.insert(name.to_string(), Members::Stack(id));
            self.warn(format!(
                "input '{name}' is a sequence; requests give one tensor, whose first dimension \
                 counts the members, all of one shape"
            ));
        }
        Ok(true)
    }

    fn define_map(&mut self, name: &str, kind: &TypeProto) -> Result<bool, ImportError> {
        let Some((keys, values)) = kind.entries() else { return Ok(false) };
        let (Some(keys), Some((values, None))) = (data_type(keys), held_type(values.data_type))
        else {
            return Ok(false);
        };
        let length = self.fresh_symbol();
        let vector = |dtype| Fact::new(dtype, Some(vec![length.clone()]));
        let values = self.add_input(name, vector(values), false)?;
        let keys = self.add_input(&format!("{name}{KEYS}"), vector(keys), false)?;
        self.names.remove(name);
        self.members.insert(name.to_string(), Members::Map { keys, values });
        self.warn(format!(
            "input '{name}' is a map; requests give its values as '{name}' and its keys as \
             '{name}{KEYS}', two vectors of one length"
        ));
        Ok(true)
    }

    /// Adds an input that is a tensor.
    pub(super) fn add_input(
        &mut self,
        name: &str,
        fact: Fact,
        poisoned: bool,
    ) -> Result<ValueId, ImportError> {
        let id = self.graph.add_value(name, fact);
        if poisoned {
            self.poisoned.insert(id);
        }
        self.name(name, id)?;
        self.graph.inputs.push(id);
        Ok(id)
    }

    /// Adds the outputs that carry `members`.
    pub(super) fn give_members(&mut self, name: &str, members: Members) -> Result<(), ImportError> {
        let given = match members {
            Members::Nothing => return Err(refused(name, "an optional without a value")),
            Members::Sequence(list) if list.is_empty() => {
                return Err(refused(name, "a sequence without members"));
            }
            Members::Sequence(list) => {
                let last = list.len() - 1;
                self.warn(format!(
                    "output '{name}' is a sequence; its members are the outputs '{name}.0' to \
                     '{name}.{last}'"
                ));
                let named = |(at, id)| (format!("{name}.{at}"), id);
                list.into_iter().enumerate().map(named).collect()
            }
            Members::Stack(id) => {
                self.warn(format!(
                    "output '{name}' is a sequence; it is one tensor, whose first dimension \
                     counts the members"
                ));
                vec![(name.to_string(), id)]
            }
            Members::Map { keys, values } => {
                vec![(name.to_string(), values), (format!("{name}{KEYS}"), keys)]
            }
        };
        for (name, id) in given {
            let id = self.rename(&name, id).map_err(|error| match error {
                ControlError::Import(error) => error,
                ControlError::Map(MapError::Invalid(reason)) => refused(&name, &reason),
                ControlError::Map(MapError::Unsupported(_)) => refused(&name, "not supported"),
            })?;
            self.graph.outputs.push(id);
        }
        Ok(())
    }

    /// Notes something that a person should know of the model.
    pub(super) fn warn(&mut self, text: String) {
        self.warnings.push(text);
    }
}

/// The dimensions of a stack's members, when they are known.
pub(super) fn member_dims(stack: Option<&[SymDim]>) -> Option<&[SymDim]> {
    stack.and_then(|dims| dims.get(1..))
}
