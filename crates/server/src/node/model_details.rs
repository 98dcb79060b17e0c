//! Settings of a model, and what its launch plan consists of.

use std::collections::BTreeMap;
use std::sync::Arc;

use device::TuningProgress;
use model::row_independence::{batch_symbol, mixing_step};
use model::{LaunchPlan, ValueId};
use runtime::DeviceGroup;
use serde_json::{Value, json};

use super::served_model::ServedModel;
use super::settings::settings_json;

/// Warnings, and steps on the host, that are listed.
const MAX_LISTED: usize = 100;

/// What is known of a served model without running it.
pub(super) fn details(served: &ServedModel, group: &Arc<DeviceGroup>) -> Value {
    let (plan, config) = (served.plan(), &served.config);
    let mut operators: BTreeMap<String, usize> = BTreeMap::new();
    for step in &plan.steps {
        *operators.entry(step.op.name()).or_default() += 1;
    }
    let tensors = |values: &[ValueId]| -> Vec<Value> {
        values.iter().map(|value| tensor(plan, *value)).collect()
    };
    let times: Vec<Value> = group
        .profile_of(served.key)
        .iter()
        .map(|(rows, time)| json!([rows, time.as_micros()]))
        .collect();
    let replicas = group.replicas(served.key);
    let devices: Vec<&String> =
        replicas.iter().map(|(replica, _)| &group.names()[replica.device]).collect();
    json!({
        "name": *served.name,
        "version": *served.version_text,
        "devices": devices,
        "settings": settings_json(config),
        "labels": config.labels.len(),
        "classifies_images": config.preprocessing.is_some(),
        "inputs": tensors(&plan.inputs),
        "outputs": tensors(&plan.outputs),
        "steps": plan.steps.len(),
        "operators": operators,
        "weight_bytes": plan.constant_bytes(),
        "batching": batching(plan),
        "batch_times_us": times,
        "tuning": tuning(served, group),
        "warnings": plan.warnings.iter().take(MAX_LISTED).collect::<Vec<_>>(),
        "host_steps": host_steps(served, group),
    })
}

/// The steps that its first device runs on the host because it has no kernel for them.
fn host_steps(served: &ServedModel, group: &DeviceGroup) -> Vec<Value> {
    let Some((replica, _)) = group.replicas(served.key).into_iter().next() else {
        return Vec::new();
    };
    let sections = group.node(replica.device).device().host_sections(served.plan(), &[]);
    let steps = sections.iter().flat_map(|section| &section.steps).take(MAX_LISTED);
    steps
        .map(|host| json!({ "step": host.step, "operator": host.op, "reason": host.reason }))
        .collect()
}

/// How far the steps of a model are tuned; null where there is nothing to tune.
fn tuning(served: &ServedModel, group: &DeviceGroup) -> Value {
    let prefix = served.split.as_ref().and_then(|split| group.tuning(split.prefix.key));
    let parts: Vec<TuningProgress> = prefix.into_iter().chain(group.tuning(served.key)).collect();
    if parts.is_empty() {
        return Value::Null;
    }
    let TuningProgress { tuned, steps } = parts.into_iter().sum();
    json!({ "tuned": tuned, "steps": steps })
}

fn tensor(plan: &LaunchPlan, value: ValueId) -> Value {
    let info = plan.value(value);
    let shape = info
        .shape
        .as_ref()
        .map(|shape| shape.iter().map(|dimension| dimension.to_string()).collect::<Vec<_>>());
    json!({ "name": info.name, "datatype": info.dtype.to_string(), "shape": shape })
}

/// Whether requests may share a batch, or why not.
fn batching(plan: &LaunchPlan) -> Value {
    let Some(symbol) = batch_symbol(plan) else {
        let reason = "inputs and outputs do not all begin with one symbolic dimension";
        return json!({ "possible": false, "reason": reason });
    };
    match mixing_step(plan, symbol) {
        None => json!({ "possible": true, "symbol": symbol }),
        Some(step) => {
            let reason = format!(
                "step '{}' ({}) may mix rows; if it does not, set batching.policy",
                step.name,
                step.op.name()
            );
            json!({ "possible": false, "symbol": symbol, "reason": reason })
        }
    }
}
