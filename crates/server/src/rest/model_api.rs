//! One model: metadata, readiness, configuration.

use std::sync::Arc;

use api::error::ApiResult;
use api::{ApiError, ModelRef, proto};
use axum::extract::{FromRequestParts, Path, State};
use http::StatusCode;
use http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};

use super::response::{self, ErrorResponse, HandlerResult};
use crate::server::AppState;

/// The model in the path of a route.
#[derive(Deserialize)]
pub(crate) struct ModelPath {
    model: String,
    #[serde(default)]
    version: String,
}

impl ModelPath {
    pub(crate) fn model(&self) -> ApiResult<ModelRef<'_>> {
        ModelRef::parse(&self.model, &self.version)
    }

    pub(crate) fn name(&self) -> &str {
        &self.model
    }
}

impl<S: Send + Sync> FromRequestParts<S> for ModelPath {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ErrorResponse> {
        match Path::<ModelPath>::from_request_parts(parts, state).await {
            Ok(Path(path)) => Ok(path),
            Err(_) => Err(ApiError::invalid("the path is not valid text").into()),
        }
    }
}

pub(super) async fn metadata(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    response::json(&app.service.model_metadata(path.model()?).await?)
}

pub(super) async fn ready(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    let ready = app.service.model_ready(path.model()?).await? && !app.requests.is_closed();
    Ok(response::empty(if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }))
}

pub(super) async fn config(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    response::json(&config_json(&app.service.model_config(path.model()?).await?))
}

pub(super) async fn details(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    response::json(&app.service.model_details(path.model()?).await?)
}

/// The configuration as Triton prints it: protobuf's names, numbers as numbers, and empty fields
/// that clients require.
fn config_json(config: &proto::ModelConfig) -> Value {
    let mut value = json!({
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "runtime": config.runtime,
        "version_policy": version_policy_json(config),
        "max_batch_size": config.max_batch_size,
        "input": config.input.iter().map(input_json).collect::<Vec<_>>(),
        "output": config.output.iter().map(output_json).collect::<Vec<_>>(),
        "batch_input": [],
        "batch_output": [],
        "optimization": {"priority": "PRIORITY_DEFAULT"},
        "instance_group": config.instance_group.iter().map(group_json).collect::<Vec<_>>(),
        "default_model_filename": config.default_model_filename,
        "cc_model_filenames": {},
        "metric_tags": config.metric_tags,
        "parameters": parameters_json(config),
        "model_warmup": [],
        "model_transaction_policy": {
            "decoupled": config.model_transaction_policy.is_some_and(|policy| policy.decoupled)
        },
        "response_cache": {"enable": config.response_cache.is_some_and(|cache| cache.enable)},
    });
    use proto::model_config::SchedulingChoice;
    if let Some(SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice {
        value["dynamic_batching"] = json!({
            "preferred_batch_size": batching.preferred_batch_size,
            "max_queue_delay_microseconds": batching.max_queue_delay_microseconds,
            "priority_levels": batching.priority_levels,
            "default_priority_level": batching.default_priority_level,
        });
    }
    value
}

fn version_policy_json(config: &proto::ModelConfig) -> Value {
    use proto::model_version_policy::PolicyChoice;
    match config.version_policy.as_ref().and_then(|policy| policy.policy_choice.as_ref()) {
        Some(PolicyChoice::All(_)) => json!({"all": {}}),
        Some(PolicyChoice::Specific(specific)) => {
            json!({"specific": {"versions": specific.versions}})
        }
        Some(PolicyChoice::Latest(latest)) => {
            json!({"latest": {"num_versions": latest.num_versions}})
        }
        None => json!({"latest": {"num_versions": 1}}),
    }
}

fn input_json(input: &proto::ModelInput) -> Value {
    json!({
        "name": input.name,
        "data_type": input.data_type().as_str_name(),
        "format": input.format().as_str_name(),
        "dims": input.dims,
        "is_shape_tensor": input.is_shape_tensor,
        "allow_ragged_batch": input.allow_ragged_batch,
        "optional": input.optional,
    })
}

fn output_json(output: &proto::ModelOutput) -> Value {
    json!({
        "name": output.name,
        "data_type": output.data_type().as_str_name(),
        "dims": output.dims,
        "label_filename": output.label_filename,
        "is_shape_tensor": output.is_shape_tensor,
    })
}

fn group_json(group: &proto::ModelInstanceGroup) -> Value {
    json!({
        "name": group.name,
        "kind": group.kind().as_str_name(),
        "count": group.count,
        "gpus": group.gpus,
        "secondary_devices": [],
        "profile": [],
        "passive": false,
        "host_policy": "",
    })
}

fn parameters_json(config: &proto::ModelConfig) -> Value {
    let pairs = config.parameters.iter();
    pairs.map(|(key, value)| (key.clone(), json!({"string_value": value.string_value}))).collect()
}
