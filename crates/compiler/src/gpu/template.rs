//! A launch plan as it is before sizes are bound: what every lowering of it begins with, made once.

use device::{DeviceError, LaunchChoices, LoweringTemplate};
use graph::infer::Fact;
use graph::{Evaluator, Graph, GraphNode, SymDim};
use model::gpu::{GpuPlan, GpuTarget};
use model::{Dim, LaunchPlan};

use super::memo::StepMemo;
use super::{PlanConstants, SharedEvaluator, lower};

/// A launch plan, ready to be lowered for sizes.
pub struct PlanTemplate {
    graph: Graph,
    constants: PlanConstants,
    target: GpuTarget,
    evaluator: Option<SharedEvaluator>,
}

impl PlanTemplate {
    /// The template of `plan` for `target`. Constants share the plan's memory.
    pub fn new(
        plan: &LaunchPlan,
        target: &GpuTarget,
        evaluator: Option<SharedEvaluator>,
    ) -> Result<PlanTemplate, Vec<DeviceError>> {
        let graph = graph_of(plan).map_err(|why| vec![DeviceError::BadPlan(why)])?;
        Ok(PlanTemplate { graph, constants: PlanConstants::of(plan), target: *target, evaluator })
    }
}

impl LoweringTemplate for PlanTemplate {
    fn lower_with(
        &self,
        sizes: &[(String, usize)],
        choices: LaunchChoices,
    ) -> Result<GpuPlan, Vec<DeviceError>> {
        let graph = self.bound(sizes)?;
        lower(&graph, &self.target, &self.constants, (choices, StepMemo::default()))
    }
}

impl PlanTemplate {
    /// The same without what saves time: every step is made as if it were the only one. For
    /// comparisons.
    pub fn lower_step_by_step(
        &self,
        sizes: &[(String, usize)],
        choices: LaunchChoices,
    ) -> Result<GpuPlan, Vec<DeviceError>> {
        let graph = self.bound(sizes)?;
        lower(&graph, &self.target, &self.constants, (choices, StepMemo::forgetful()))
    }

    /// The graph for `sizes`.
    fn bound(&self, sizes: &[(String, usize)]) -> Result<Graph, Vec<DeviceError>> {
        let bindings: Vec<(&str, usize)> =
            sizes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        let mut graph = graph::bind(&self.graph, &bindings)
            .map_err(|err| vec![DeviceError::BadPlan(err.to_string())])?;
        let evaluator = self.evaluator.as_deref().map(|evaluator| evaluator as &dyn Evaluator);
        graph::optimize(&mut graph, evaluator);
        Ok(graph)
    }
}

/// The graph that a launch plan was lowered from.
fn graph_of(plan: &LaunchPlan) -> Result<Graph, String> {
    let mut graph = Graph::default();
    for value in &plan.values {
        // If one dimension depends on data, the whole shape is inferred again.
        let known = |dim: &Dim| Some(SymDim::from(dim)).filter(|dim| *dim != SymDim::Unknown);
        let shape = value.shape.as_ref().and_then(|dims| dims.iter().map(known).collect());
        graph.add_value(value.name.clone(), Fact::new(value.dtype, shape));
    }
    for (id, tensor) in &plan.constants {
        if id.index() >= graph.values.len() {
            return Err(format!("constant {} is not a value of the plan", id.0));
        }
        graph.set_constant(*id, tensor.clone());
    }
    graph.inputs.clone_from(&plan.inputs);
    graph.outputs.clone_from(&plan.outputs);
    graph.nodes = plan
        .steps
        .iter()
        .map(|step| GraphNode {
            name: step.name.clone(),
            op: step.op.clone(),
            inputs: step.inputs.clone(),
            outputs: step.outputs.clone(),
        })
        .collect();
    Ok(graph)
}
