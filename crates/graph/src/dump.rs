//! Graphs as text, for people and golden files.

use std::fmt;

use model::ValueId;

use crate::ir::Graph;
use model::dim::shape_text;

impl fmt::Display for Graph {
    /// One line per input, node and output. Constants are shown only where they are read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for id in &self.inputs {
            writeln!(f, "input {}", self.typed(*id))?;
        }
        for node in &self.nodes {
            let outputs: Vec<String> =
                node.outputs.iter().map(|id| id.map_or("-".into(), |id| self.typed(id))).collect();
            let inputs: Vec<String> =
                node.inputs.iter().map(|id| id.map_or("-".into(), |id| self.operand(id))).collect();
            let op = format!("{:?}", node.op);
            writeln!(f, "{} = {op}({})", outputs.join(", "), inputs.join(", "))?;
        }
        for id in &self.outputs {
            writeln!(f, "output {}", self.typed(*id))?;
        }
        Ok(())
    }
}

impl Graph {
    fn typed(&self, id: ValueId) -> String {
        let value = self.value(id);
        format!("{}: {}{}", value.name, value.dtype, shape_text(value.shape.as_deref()))
    }

    fn operand(&self, id: ValueId) -> String {
        let value = self.value(id);
        if self.constant(id).is_none() {
            return value.name.clone();
        }
        // Small integers are shown as values: they are axes, shapes and the like.
        match &value.content {
            Some(content) if content.len() <= 8 => shape_text(Some(content)),
            _ => format!("const {}{}", value.dtype, shape_text(value.shape.as_deref())),
        }
    }
}
