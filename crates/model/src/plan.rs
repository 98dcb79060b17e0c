//! Launch plans: a model as the ordered steps a device runs.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::dim::Polynomial;
use crate::op::Op;
use crate::{DataType, Tensor};

mod peak;

pub use peak::PeakMemory;

/// A value of a plan: an index into [`LaunchPlan::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueId(pub u32);

impl ValueId {
    /// The position in [`LaunchPlan::values`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One dimension of a value's shape.
///
/// [`SymDim`](crate::dim::SymDim) is the same with arithmetic; the two convert into each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known when the model is loaded.
    Fixed(usize),
    /// Named by the model and bound by a request, such as the batch.
    Symbol(String),
    /// Computed from symbols, such as `2*T+1`; never one symbol alone.
    Expr(Arc<Polynomial>),
    /// Known only once the value is computed.
    Unknown,
}

impl Dim {
    /// The size called `name`.
    pub fn symbol(name: &str) -> Dim {
        Dim::Symbol(name.to_string())
    }

    /// Whether the size depends on the symbol called `name`.
    pub fn has_symbol(&self, name: &str) -> bool {
        match self {
            Dim::Symbol(symbol) => symbol == name,
            Dim::Expr(poly) => poly.has_symbol(name),
            Dim::Fixed(_) | Dim::Unknown => false,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Symbol(name) => f.write_str(name),
            Dim::Expr(poly) => poly.fmt(f),
            Dim::Unknown => f.write_str("?"),
        }
    }
}

/// A value's properties before the plan runs.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueInfo {
    /// The name in the source model, for messages.
    pub name: String,
    /// Element type.
    pub dtype: DataType,
    /// Dimensions; `None` when not even the rank is known.
    pub shape: Option<Vec<Dim>>,
}

/// One node of a plan; on a GPU one kernel launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The source node's name, for messages and traces.
    pub name: String,
    /// What is computed.
    pub op: Op,
    /// Operands in the operator's order; absent optional ones are `None`.
    pub inputs: Vec<Option<ValueId>>,
    /// Results in the operator's order; unused ones are `None`.
    pub outputs: Vec<Option<ValueId>>,
    /// Values that no later step reads: their buffers become free.
    pub last_uses: Vec<ValueId>,
}

/// A model ready for a device: constants, and steps in an order that respects every dependency.
#[derive(Clone, Debug, Default)]
pub struct LaunchPlan {
    /// Every value by [`ValueId`].
    pub values: Vec<ValueInfo>,
    /// Weights and other constants.
    pub constants: Vec<(ValueId, Tensor)>,
    /// The model's inputs, in its order.
    pub inputs: Vec<ValueId>,
    /// The model's outputs, in its order.
    pub outputs: Vec<ValueId>,
    /// The steps.
    pub steps: Vec<Step>,
    /// What a person should know of the model's file.
    pub warnings: Vec<String>,
}

/// Why a plan is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// A value is read before any step, input or constant wrote it, or after its last use.
    #[error("step {step} ({name}) reads value {value}, which is not available")]
    NotThere {
        /// Index of the step; the number of steps for the plan's outputs.
        step: usize,
        /// The step's name.
        name: String,
        /// The value.
        value: u32,
    },
    /// A value is written twice, or does not exist.
    #[error("step {step} ({name}) writes value {value}, which exists already or not at all")]
    BadWrite {
        /// Index of the step.
        step: usize,
        /// The step's name.
        name: String,
        /// The value.
        value: u32,
    },
}

impl LaunchPlan {
    /// The properties of `id`.
    pub fn value(&self, id: ValueId) -> &ValueInfo {
        &self.values[id.index()]
    }

    /// Bytes of all constants.
    pub fn constant_bytes(&self) -> u64 {
        self.constants.iter().map(|(_, tensor)| tensor.size_bytes() as u64).sum()
    }

    /// Computes every step's `last_uses`. Outputs and constants have no last use.
    pub fn plan_lifetimes(&mut self) {
        let mut last_step = vec![None; self.values.len()];
        for (index, step) in self.steps.iter().enumerate() {
            for id in step.inputs.iter().chain(&step.outputs).flatten() {
                last_step[id.index()] = Some(index);
            }
        }
        for id in self.constants.iter().map(|(id, _)| id).chain(&self.outputs) {
            last_step[id.index()] = None;
        }
        self.steps.iter_mut().for_each(|step| step.last_uses.clear());
        for (value, step) in last_step.into_iter().enumerate() {
            if let Some(step) = step {
                self.steps[step].last_uses.push(ValueId(value as u32));
            }
        }
    }

    /// Checks that every value is written once before it is read and never read after its last use.
    pub fn check(&self) -> Result<(), PlanError> {
        let mut there = vec![false; self.values.len()];
        for id in self.inputs.iter().chain(self.constants.iter().map(|(id, _)| id)) {
            match there.get_mut(id.index()) {
                Some(slot @ false) => *slot = true,
                _ => {
                    let name = "inputs and constants".to_string();
                    return Err(PlanError::BadWrite { step: 0, name, value: id.0 });
                }
            }
        }
        for (index, step) in self.steps.iter().enumerate() {
            self.check_step(index, step, &mut there)?;
        }
        match self.outputs.iter().find(|id| there.get(id.index()) != Some(&true)) {
            None => Ok(()),
            Some(id) => Err(PlanError::NotThere {
                step: self.steps.len(),
                name: "outputs".to_string(),
                value: id.0,
            }),
        }
    }

    fn check_step(&self, index: usize, step: &Step, there: &mut [bool]) -> Result<(), PlanError> {
        for id in step.inputs.iter().flatten() {
            if there.get(id.index()) != Some(&true) {
                return Err(PlanError::NotThere {
                    step: index,
                    name: step.name.clone(),
                    value: id.0,
                });
            }
        }
        for id in step.outputs.iter().flatten() {
            match there.get_mut(id.index()) {
                Some(slot @ false) => *slot = true,
                _ => {
                    return Err(PlanError::BadWrite {
                        step: index,
                        name: step.name.clone(),
                        value: id.0,
                    });
                }
            }
        }
        for id in &step.last_uses {
            there[id.index()] = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Unary;

    fn chain(length: u32) -> LaunchPlan {
        let info = |i: u32| ValueInfo { name: format!("v{i}"), dtype: DataType::F32, shape: None };
        let step = |i: u32| Step {
            name: format!("s{i}"),
            op: Op::Unary(Unary::Relu),
            inputs: vec![Some(ValueId(i))],
            outputs: vec![Some(ValueId(i + 1))],
            last_uses: vec![],
        };
        LaunchPlan {
            values: (0..=length).map(info).collect(),
            constants: vec![],
            inputs: vec![ValueId(0)],
            outputs: vec![ValueId(length)],
            steps: (0..length).map(step).collect(),
            warnings: vec![],
        }
    }

    #[test]
    fn lifetimes_end_at_the_last_reader() {
        let mut plan = chain(3);
        plan.plan_lifetimes();
        assert_eq!(plan.steps[0].last_uses, vec![ValueId(0)]);
        assert_eq!(plan.steps[2].last_uses, vec![ValueId(2)]);
        assert_eq!(plan.check(), Ok(()));
    }

    #[test]
    fn invalid_plans_are_refused() {
        let mut plan = chain(2);
        plan.steps.swap(0, 1);
        assert!(matches!(plan.check(), Err(PlanError::NotThere { step: 0, value: 1, .. })));
        let mut plan = chain(2);
        plan.steps[1].outputs = vec![Some(ValueId(1))];
        assert!(matches!(plan.check(), Err(PlanError::BadWrite { step: 1, value: 1, .. })));
    }
}
