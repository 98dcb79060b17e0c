//! A loaded model: its inputs and outputs, and the validation of requests.

use std::sync::Arc;

use api::error::ApiResult;
use api::{ApiError, Inputs, ModelMetadata, NamedTensor, RequestedOutput, TensorMetadata, proto};
use bytes::Bytes;
use model::config::ModelConfig;
use model::{DataType, Dim, LaunchPlan, Tensor, ValueId, ValueInfo};
use runtime::device_group::router::GroupModelId;
use runtime::{DeviceGroup, PlacedProgram};
use tokio::sync::oneshot;

use compiler::prefix::{Fingerprint, SuffixInput};

use super::classification;
use super::counters::Counters;
use super::prefix_batching::{LazyFingerprint, PrefixModel};
use crate::auth::usage::Usage;

/// Batch size advertised for models without a limit.
const ANY_BATCH: usize = 128;
/// Platform reported in model metadata.
const PLATFORM: &str = "onnx";

/// A loaded model. Requests share it; when the last reference is dropped, the device group removes
/// the model.
pub struct ServedModel {
    /// Its name.
    pub name: Arc<str>,
    /// Its version.
    pub version: u64,
    /// Its version as text.
    pub version_text: Arc<str>,
    /// Its settings.
    pub config: ModelConfig,
    /// Its counters.
    pub counters: Arc<Counters>,
    /// How much of the limits in its settings is used.
    pub(crate) usage: Arc<Usage>,
    /// Its key in the device group; that of the suffix if it takes part in prefix batching.
    pub key: GroupModelId,
    /// The prefix, if it takes part in prefix batching.
    pub split: Option<PrefixSplit>,
    fingerprint: LazyFingerprint,
    plan: Arc<LaunchPlan>,
    output_names: Vec<Arc<str>>,
    batched: bool,
    /// Name of the batching policy.
    batching: &'static str,
    in_service: Arc<InService>,
}

/// Removes the model from the device group when the last reference is dropped.
struct InService {
    device_group: Arc<DeviceGroup>,
    key: GroupModelId,
    _released: oneshot::Sender<()>,
}

/// A prefix that runs as a model of its own.
#[derive(Clone)]
pub struct PrefixSplit {
    /// Where.
    pub prefix: Arc<PrefixModel>,
    /// Where the inputs of the suffix come from.
    pub sources: Vec<SuffixInput>,
}

impl Drop for InService {
    fn drop(&mut self) {
        self.device_group.remove_model(self.key);
    }
}

impl ServedModel {
    /// Starts serving a program. The receiver fires once the last reference is dropped.
    pub fn start(
        device_group: Arc<DeviceGroup>,
        name: &str,
        version: u64,
        placed: PlacedProgram,
        config: ModelConfig,
    ) -> (Arc<ServedModel>, oneshot::Receiver<()>) {
        let plan = placed.program.plan().clone();
        let key = device_group.add_model(placed, &config);
        let batching =
            if device_group.is_batched(key) { config.batching.policy.as_str() } else { "none" };
        tracing::info!(model = name, policy = batching, "batching policy selected");
        let (released, receiver) = oneshot::channel();
        let output_names = plan.outputs.iter().map(|id| Arc::from(&*plan.value(*id).name));
        let served = ServedModel {
            name: name.into(),
            version,
            version_text: version.to_string().into(),
            output_names: output_names.collect(),
            batched: is_batched(&plan),
            batching,
            config,
            counters: Arc::default(),
            usage: Arc::default(),
            key,
            split: None,
            fingerprint: LazyFingerprint::new(),
            plan,
            in_service: Arc::new(InService { device_group, key, _released: released }),
        };
        (Arc::new(served), receiver)
    }

    /// The same model under prefix batching: `placed` is its suffix. Keeps its counters.
    pub fn start_split(
        whole: &ServedModel,
        placed: PlacedProgram,
        split: PrefixSplit,
    ) -> (Arc<ServedModel>, oneshot::Receiver<()>) {
        let device_group = whole.in_service.device_group.clone();
        let key = device_group.add_model(placed, &whole.config);
        let (released, receiver) = oneshot::channel();
        let served = ServedModel {
            name: whole.name.clone(),
            version: whole.version,
            version_text: whole.version_text.clone(),
            output_names: whole.output_names.clone(),
            batched: whole.batched,
            batching: whole.batching,
            config: whole.config.clone(),
            counters: whole.counters.clone(),
            usage: whole.usage.clone(),
            key,
            split: Some(split),
            fingerprint: whole.fingerprint.clone(),
            plan: whole.plan.clone(),
            in_service: Arc::new(InService { device_group, key, _released: released }),
        };
        (Arc::new(served), receiver)
    }

    /// The same model with other settings, which the device group gets too. Requests in flight keep
    /// the instance that they found.
    pub fn with_settings(&self, config: ModelConfig) -> Arc<ServedModel> {
        let group = &self.in_service.device_group;
        group.set_settings(self.key, &config);
        let batching = match self.split {
            // The prefix is batched.
            Some(_) => self.batching,
            None if group.is_batched(self.key) => config.batching.policy.as_str(),
            None => "none",
        };
        Arc::new(ServedModel {
            name: self.name.clone(),
            version: self.version,
            version_text: self.version_text.clone(),
            output_names: self.output_names.clone(),
            batched: self.batched,
            batching,
            config,
            counters: self.counters.clone(),
            usage: self.usage.clone(),
            key: self.key,
            split: self.split.clone(),
            fingerprint: self.fingerprint.clone(),
            plan: self.plan.clone(),
            in_service: self.in_service.clone(),
        })
    }

    /// Whether it takes part in prefix batching.
    pub fn is_split(&self) -> bool {
        self.split.is_some()
    }

    /// Fingerprint to compare its plan with others. Expensive on first use.
    pub fn fingerprint(&self) -> Arc<Fingerprint> {
        self.fingerprint.get_or_init(|| Arc::new(Fingerprint::of(&self.plan))).clone()
    }

    /// Its launch plan.
    pub fn plan(&self) -> &LaunchPlan {
        &self.plan
    }

    /// The inputs in the plan's order, and the batch size.
    pub fn match_inputs(&self, inputs: Inputs) -> ApiResult<(Vec<Tensor>, usize)> {
        let tensors = match inputs {
            Inputs::Named(inputs) => self.order_inputs(inputs)?,
            Inputs::Raw(bytes) => vec![self.raw_input(bytes)?],
        };
        device::check_inputs(&self.plan, &tensors)
            .map_err(|error| ApiError::invalid(error.to_string()))?;
        let batch = self.batch_of(&tensors);
        let max = self.config.max_batch_size;
        if max > 0 && self.batched && batch > max {
            return Err(ApiError::invalid(format!(
                "the batch of {batch} exceeds the limit of {max} of model '{}'",
                self.name
            )));
        }
        Ok((tensors, batch))
    }

    fn batch_of(&self, tensors: &[Tensor]) -> usize {
        match (self.batched, tensors.first().and_then(|tensor| tensor.shape().first())) {
            (true, Some(&batch)) => batch,
            _ => 1,
        }
    }

    fn order_inputs(&self, inputs: Vec<NamedTensor>) -> ApiResult<Vec<Tensor>> {
        let mut given: Vec<Option<NamedTensor>> = inputs.into_iter().map(Some).collect();
        let mut ordered = Vec::with_capacity(self.plan.inputs.len());
        for id in &self.plan.inputs {
            let info = self.plan.value(*id);
            let same = |slot: &&mut Option<NamedTensor>| {
                slot.as_ref().is_some_and(|input| *input.name == *info.name)
            };
            match given.iter_mut().find(same).and_then(Option::take) {
                Some(input) => ordered.push(input.tensor),
                None => return Err(self.missing_input(info, &given)),
            }
        }
        match given.into_iter().flatten().next() {
            None => Ok(ordered),
            Some(extra) => Err(ApiError::invalid(format!(
                "unexpected input '{}'; model '{}' takes {}",
                extra.name,
                self.name,
                describe_all(&self.plan, &self.plan.inputs)
            ))),
        }
    }

    fn missing_input(&self, info: &ValueInfo, unused: &[Option<NamedTensor>]) -> ApiError {
        let names: Vec<String> =
            unused.iter().flatten().map(|input| format!("'{}'", input.name)).collect();
        let present = match names.is_empty() {
            true => String::new(),
            false => format!("; the request has {}", names.join(", ")),
        };
        ApiError::invalid(format!(
            "input {} of model '{}' is missing{present}",
            describe(info),
            self.name
        ))
    }

    /// A tensor from a body without a header.
    fn raw_input(&self, bytes: Bytes) -> ApiResult<Tensor> {
        let [id] = self.plan.inputs[..] else {
            return Err(ApiError::invalid(format!(
                "a raw body needs a model with one input, '{}' has {}",
                self.name,
                self.plan.inputs.len()
            )));
        };
        let info = self.plan.value(id);
        if info.dtype == DataType::String {
            let rank = info.shape.as_ref().map_or(1, Vec::len);
            return Ok(Tensor::from_strings(vec![1; rank], vec![bytes])?);
        }
        let shape = raw_shape(info, bytes.len())?;
        Ok(Tensor::from_raw(info.dtype, shape, bytes)?)
    }

    /// Selects the requested outputs.
    pub fn select_outputs(
        &self,
        requested: &[RequestedOutput],
        outputs: Vec<Tensor>,
        batch: usize,
    ) -> ApiResult<Vec<NamedTensor>> {
        if requested.is_empty() {
            let named = self.output_names.iter().zip(outputs);
            return Ok(named
                .map(|(name, tensor)| NamedTensor { name: name.clone(), tensor })
                .collect());
        }
        let mut selected = Vec::with_capacity(requested.len());
        for output in requested {
            let index = self.output_index(&output.name)?;
            let tensor =
                outputs.get(index).ok_or_else(|| ApiError::internal("an output is lost"))?;
            let tensor = match output.classes {
                0 => tensor.clone(),
                k => {
                    let rows = self.batched.then_some(batch);
                    classification::tensor(tensor, &self.config.labels, k, rows)?
                }
            };
            selected.push(NamedTensor { name: self.output_names[index].clone(), tensor });
        }
        Ok(selected)
    }

    /// Checks that every requested output exists and is requested once.
    pub fn check_outputs(&self, requested: &[RequestedOutput]) -> ApiResult<()> {
        let mut seen = vec![false; self.output_names.len()];
        requested.iter().try_for_each(|output| {
            let index = self.output_index(&output.name)?;
            match std::mem::replace(&mut seen[index], true) {
                false => Ok(()),
                // Each copy would be encoded again: a short request for a very long reply.
                true => {
                    let name = &output.name;
                    Err(ApiError::invalid(format!("output '{name}' is requested twice")))
                }
            }
        })
    }

    fn output_index(&self, name: &str) -> ApiResult<usize> {
        self.output_names.iter().position(|output| **output == *name).ok_or_else(|| {
            ApiError::invalid(format!(
                "model '{}' has no output '{name}'; it has {}",
                self.name,
                describe_all(&self.plan, &self.plan.outputs)
            ))
        })
    }

    /// Model metadata of the protocol.
    pub fn metadata(&self) -> ModelMetadata {
        let tensor = |id: &ValueId| {
            let info = self.plan.value(*id);
            TensorMetadata {
                name: info.name.clone(),
                datatype: info.dtype.wire_name().to_string(),
                shape: wire_dims(info),
            }
        };
        ModelMetadata {
            name: self.name.to_string(),
            versions: vec![self.version_text.to_string()],
            platform: PLATFORM.to_string(),
            inputs: self.plan.inputs.iter().map(tensor).collect(),
            outputs: self.plan.outputs.iter().map(tensor).collect(),
        }
    }

    /// The configuration as Triton's clients read it: dimensions omit the batch.
    pub fn wire_config(&self) -> proto::ModelConfig {
        let max_batch_size = match (self.batched, self.config.max_batch_size) {
            (false, _) => 0,
            (true, 0) => ANY_BATCH,
            (true, max) => max,
        };
        let skip = usize::from(self.batched);
        let dims = |info: &ValueInfo| wire_dims(info).split_off(skip);
        let input = |id: &ValueId| {
            let info = self.plan.value(*id);
            proto::ModelInput {
                name: info.name.clone(),
                data_type: wire_type(info.dtype) as i32,
                dims: dims(info),
                ..Default::default()
            }
        };
        let output = |id: &ValueId| {
            let info = self.plan.value(*id);
            proto::ModelOutput {
                name: info.name.clone(),
                data_type: wire_type(info.dtype) as i32,
                dims: dims(info),
                ..Default::default()
            }
        };
        proto::ModelConfig {
            name: self.name.to_string(),
            platform: PLATFORM.to_string(),
            backend: "atoll".to_string(),
            version_policy: Some(latest_policy()),
            max_batch_size: i32::try_from(max_batch_size).unwrap_or(i32::MAX),
            input: self.plan.inputs.iter().map(input).collect(),
            output: self.plan.outputs.iter().map(output).collect(),
            scheduling_choice: self.wire_batching(),
            instance_group: self.instance_groups(),
            default_model_filename: "model.onnx".to_string(),
            parameters: self.wire_parameters(),
            model_transaction_policy: Some(proto::ModelTransactionPolicy { decoupled: false }),
            response_cache: Some(proto::ModelResponseCache { enable: false }),
            ..Default::default()
        }
    }

    fn wire_batching(&self) -> Option<proto::model_config::SchedulingChoice> {
        let delay = match self.batching {
            "none" => return None,
            "window" => self.config.batching.max_wait_us,
            _ => 0,
        };
        Some(proto::model_config::SchedulingChoice::DynamicBatching(proto::ModelDynamicBatching {
            max_queue_delay_microseconds: delay,
            ..Default::default()
        }))
    }

    /// One instance per device with a replica; GPUs and the CPU are separate groups.
    fn instance_groups(&self) -> Vec<proto::ModelInstanceGroup> {
        use proto::model_instance_group::Kind;
        let replicas = self.in_service.device_group.replicas(self.key);
        let names = replicas
            .iter()
            .map(|(view, _)| self.in_service.device_group.names()[view.device].as_str());
        let gpus: Vec<i32> = names.filter_map(gpu_number).collect();
        let on_cpu = replicas.len() - gpus.len();
        let group = |count: usize, gpus: Vec<i32>, kind: Kind| proto::ModelInstanceGroup {
            name: self.name.to_string(),
            count: i32::try_from(count).unwrap_or(i32::MAX),
            gpus,
            kind: kind as i32,
        };
        let gpus = (!gpus.is_empty()).then(|| group(1, gpus, Kind::Gpu));
        let cpu = (on_cpu > 0).then(|| group(on_cpu, Vec::new(), Kind::Cpu));
        gpus.into_iter().chain(cpu).collect()
    }

    fn wire_parameters(&self) -> std::collections::BTreeMap<String, proto::ModelParameter> {
        let value = |string_value: String| proto::ModelParameter { string_value };
        let profile = super::profile_text(&self.in_service.device_group.profile_of(self.key));
        let prefix = self.split.as_ref().map(|split| split.prefix.name.clone());
        let known = [
            ("atoll_prefix", Some(prefix.unwrap_or_default())),
            ("atoll_batching", Some(self.batching.to_string())),
            (
                "atoll_batch_max",
                self.in_service.device_group.max_batch(self.key).map(|max| max.to_string()),
            ),
            ("atoll_class", Some(self.config.class.as_str().to_string())),
            ("atoll_priority", Some(self.config.priority.to_string())),
            ("atoll_pinned", Some(self.config.pinned.to_string())),
            ("atoll_queue_capacity", Some(self.config.queue_capacity.to_string())),
            ("atoll_slo_ms", self.config.slo_ms.map(|millis| millis.to_string())),
            ("atoll_profile_us", Some(profile).filter(|text| !text.is_empty())),
        ];
        known.into_iter().filter_map(|(key, text)| Some((key.to_string(), value(text?)))).collect()
    }
}

/// Number of the GPU that a device is, or is a part of.
fn gpu_number(device: &str) -> Option<i32> {
    let number = device.strip_prefix("cuda:")?;
    number.split(['/', '#']).next()?.parse().ok()
}

fn latest_policy() -> proto::ModelVersionPolicy {
    use proto::model_version_policy::{Latest, PolicyChoice};
    proto::ModelVersionPolicy {
        policy_choice: Some(PolicyChoice::Latest(Latest { num_versions: 1 })),
    }
}

/// Whether the first dimension of every input and output is the batch, according to the model's
/// dimension names.
fn is_batched(plan: &LaunchPlan) -> bool {
    let first = |id: &ValueId| plan.value(*id).shape.as_ref().and_then(|dims| dims.first());
    let Some(Some(Dim::Symbol(batch))) = plan.inputs.first().map(first) else { return false };
    let same = |dim: Option<&Dim>| matches!(dim, Some(Dim::Symbol(name)) if name == batch);
    plan.inputs.iter().all(|id| same(first(id)))
        && plan.outputs.iter().all(|id| same(first(id)) || first(id) == Some(&Dim::Unknown))
}

fn describe(info: &ValueInfo) -> String {
    let dims = match &info.shape {
        Some(dims) => dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        None => "any".to_string(),
    };
    format!("'{}' ({}[{dims}])", info.name, info.dtype)
}

fn describe_all(plan: &LaunchPlan, ids: &[ValueId]) -> String {
    ids.iter().map(|id| describe(plan.value(*id))).collect::<Vec<_>>().join(", ")
}

fn wire_dims(info: &ValueInfo) -> Vec<i64> {
    let dims = info.shape.as_deref().unwrap_or(&[Dim::Unknown]);
    dims.iter()
        .map(|dim| match dim {
            Dim::Fixed(size) => i64::try_from(*size).unwrap_or(i64::MAX),
            _ => -1,
        })
        .collect()
}

fn wire_type(dtype: DataType) -> proto::DataType {
    match dtype {
        DataType::Bool => proto::DataType::TypeBool,
        DataType::U8 => proto::DataType::TypeUint8,
        DataType::U16 => proto::DataType::TypeUint16,
        DataType::U32 => proto::DataType::TypeUint32,
        DataType::U64 => proto::DataType::TypeUint64,
        DataType::I8 => proto::DataType::TypeInt8,
        DataType::I16 => proto::DataType::TypeInt16,
        DataType::I32 => proto::DataType::TypeInt32,
        DataType::I64 => proto::DataType::TypeInt64,
        DataType::F16 => proto::DataType::TypeFp16,
        DataType::BF16 => proto::DataType::TypeBf16,
        DataType::F32 => proto::DataType::TypeFp32,
        DataType::F64 => proto::DataType::TypeFp64,
        DataType::String => proto::DataType::TypeString,
    }
}

/// The shape of a raw body: the model's, with its one unknown dimension computed from the length.
fn raw_shape(info: &ValueInfo, bytes: usize) -> ApiResult<Vec<usize>> {
    let refuse = |why: &str| {
        ApiError::invalid(format!("a raw body of {bytes} bytes is no {}: {why}", describe(info)))
    };
    let dims = info.shape.as_ref().ok_or_else(|| refuse("the model does not fix the rank"))?;
    let size = info.dtype.size_bytes().unwrap_or(1);
    let known: usize = dims
        .iter()
        .map(|dim| if let Dim::Fixed(size) = dim { *size } else { 1 })
        .try_fold(size, usize::checked_mul)
        .ok_or_else(|| refuse("the model's shape is too large"))?;
    let unknown = dims.iter().filter(|dim| !matches!(dim, Dim::Fixed(_))).count();
    let inferred = match unknown {
        0 => 1,
        1 if known > 0 && bytes.is_multiple_of(known) => bytes / known,
        1 => return Err(refuse("the length is no multiple of one element of the batch")),
        _ => return Err(refuse("more than one dimension is unknown")),
    };
    Ok(dims.iter().map(|dim| if let Dim::Fixed(size) = dim { *size } else { inferred }).collect())
}
