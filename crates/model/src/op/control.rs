//! Control flow: steps that run plans of their own.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::LaunchPlan;

/// A step that runs bodies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Control {
    /// When bodies run, and on what.
    pub kind: ControlKind,
    /// Which of its graph's bodies are its own, before they are plans.
    pub id: u32,
    /// What runs: the two branches of an `If`, the one body of a loop.
    pub bodies: Vec<Body>,
}

/// When bodies run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ControlKind {
    /// `condition, captured...`: the first body if the condition holds, else the second.
    If,
    /// `[rounds], [condition], state..., captured...`: the body on the number of the round, the
    /// condition and the state, until the rounds are over or the condition fails. The body gives
    /// the condition, the state, and what is collected.
    Loop {
        /// Values of the state.
        carried: usize,
    },
    /// `state..., sequences..., captured...`: the body on the state and one slice of every
    /// sequence. The body gives the state, and what is collected.
    Scan(Scan),
}

/// The sequences of a scan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scan {
    /// Values of the state.
    pub carried: usize,
    /// For every sequence its dimension of slices, and whether it is read from the end.
    pub inputs: Vec<(i64, bool)>,
    /// For everything collected its dimension of slices, and whether it is written from the end.
    pub outputs: Vec<(i64, bool)>,
}

impl ControlKind {
    /// How many of a body's inputs the step itself makes; the others are operands.
    pub fn arguments(&self) -> usize {
        match self {
            ControlKind::If => 0,
            ControlKind::Loop { carried } => 2 + carried,
            ControlKind::Scan(scan) => scan.carried + scan.inputs.len(),
        }
    }

    /// How many operands come before those that bodies capture.
    pub fn operands(&self) -> usize {
        match self {
            ControlKind::If => 1,
            other => other.arguments(),
        }
    }
}

/// A plan without constants of its own.
#[derive(Clone)]
pub struct Body {
    /// The plan. Its first inputs are the step's arguments.
    pub plan: Arc<LaunchPlan>,
    /// For every input behind the arguments, the operand of the step that it is.
    pub operands: Vec<usize>,
}

impl PartialEq for Body {
    fn eq(&self, other: &Body) -> bool {
        Arc::ptr_eq(&self.plan, &other.plan) && self.operands == other.operands
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without names: what a body computes does not depend on them.
        let steps = self.plan.steps.iter().map(|step| (&step.op, &step.inputs, &step.outputs));
        f.debug_list().entries(steps).finish()?;
        write!(f, "{:?} {:?} {:?}", self.plan.inputs, self.plan.outputs, self.operands)
    }
}

impl Serialize for Body {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("bodies of control flow are not written"))
    }
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Body, D::Error> {
        Err(serde::de::Error::custom("bodies of control flow are not read"))
    }
}
