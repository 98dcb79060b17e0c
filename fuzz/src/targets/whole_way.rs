//! The whole way of a model: registered, loaded, run on a request, deleted.
//!
//! The parts are those of `atoll serve --model-check off`: a registry on disk, the CPU device, a
//! node. A model is not sent to a process of its own first, because it must not harm even without.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use api::codec::{self, OutputEncoding};
use api::error::ApiResult;
use api::{
    InferRequest, InferenceService, Inputs, ModelMetadata, ModelRef, NamedTensor, RegisterRequest,
    RequestContext, TensorMetadata, client, grpc, proto,
};
use assembly::DiskLoader;
use assembly::device_group::device_group_on;
use base::{Nanos, Random};
use bytes::Bytes;
use cpu::{CpuDevice, CpuOptions};
use model::config::Class;
use model::store::Store;
use model::{DataType, HostMemory, Tensor};
use prost::Message;
use server::LocalNode;

use super::server::runtime;

/// The budget of host memory.
const BUDGET: usize = 128 << 20;

/// Most memory that one model may take: the budget, and what importing may take beside it.
pub(super) const MEMORY: usize = 512 << 20;

/// Time limit of one request.
const DEADLINE: Duration = Duration::from_millis(500);

/// Most processor time of one model: it is compiled, which the server's time limit for checks
/// bounds, and run until its deadline, which is exceeded by at most a second.
pub(super) const TIME: Duration = Duration::from_secs(5);

/// Elements of an input that requests send at most.
const ELEMENTS_MAX: usize = 1 << 14;

/// A node on the CPU with a registry.
pub struct ModelHarness {
    runtime: tokio::runtime::Runtime,
    node: LocalNode,
    folder: tempfile::TempDir,
}

/// A folder in memory where there is one: a registration waits for the disk.
fn temporary_folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder")
}

impl ModelHarness {
    /// A node without models, on one thread.
    pub fn start() -> ModelHarness {
        HostMemory::process().set_limit(BUDGET);
        let folder = temporary_folder();
        let options = CpuOptions { threads: 1, queues: 1, ..CpuOptions::default() };
        let device = Arc::new(CpuDevice::new(options));
        let group = device_group_on(device, Default::default()).expect("a node");
        let registry = Store::open(folder.path()).map_err(|error| error.to_string());
        let loader = DiskLoader::new(group.clone(), Vec::new(), registry);
        let node = LocalNode::new(group, Arc::new(loader));
        node.set_started();
        ModelHarness { runtime: runtime(), node, folder }
    }

    /// The service, and the folder that it needs.
    pub fn into_service(self) -> (LocalNode, tempfile::TempDir) {
        (self.node, self.folder)
    }

    /// Registers a model, runs it on a request and deletes it.
    fn take(&mut self, flags: u8, onnx: &[u8]) {
        let request = RegisterRequest {
            name: "m".to_string(),
            onnx: Bytes::copy_from_slice(onnx),
            labels: Vec::new(),
            preprocessing: None,
            class: Some(if flags & 1 == 0 { Class::RealTime } else { Class::BestEffort }),
            slo_ms: None,
            settings: None,
            canary: None,
        };
        let node = &self.node;
        self.runtime.block_on(async {
            if node.register(request).await.is_err() {
                return;
            }
            let model = ModelRef { name: "m", version: None };
            let metadata = node.model_metadata(model).await.expect("the model is ready");
            for size in [1, usize::from(flags >> 4 & 3)] {
                if let Some(request) = request_for(&metadata, size, flags) {
                    let _ = infer(node, model, request, flags).await;
                }
            }
            node.delete_model(model).await.expect("a registered model can be deleted");
        });
    }
}

static HARNESS: LazyLock<Mutex<ModelHarness>> = LazyLock::new(|| Mutex::new(ModelHarness::start()));

/// How the model is used, and the model.
pub(super) fn run(data: &[u8]) {
    let Some((&flags, onnx)) = data.split_first() else { return };
    HARNESS.lock().unwrap_or_else(PoisonError::into_inner).take(flags, onnx);
}

/// An input as the model wants it, with sizes it leaves open set to `size`.
fn input(metadata: &TensorMetadata, size: usize, random: &mut Random) -> Option<NamedTensor> {
    let shape = metadata.shape.iter();
    let shape: Vec<usize> = shape.map(|&dim| usize::try_from(dim).unwrap_or(size)).collect();
    let count = model::tensor::element_count(&shape).ok().filter(|count| *count <= ELEMENTS_MAX)?;
    let dtype = DataType::from_wire_name(&metadata.datatype)?;
    let tensor = match dtype {
        DataType::String => Tensor::from_strings(shape, vec![Bytes::from_static(b"a"); count]),
        DataType::F32 => {
            let values = (0..count).map(|_| random.symmetric_f32()).collect();
            Tensor::from_vec::<f32>(shape, values)
        }
        dtype => {
            // Small numbers, so that indices are often in range.
            let size = dtype.size_bytes()?;
            let bytes = (0..count * size).map(|at| match at % size {
                0 => random.below(3) as u8,
                _ => 0,
            });
            Tensor::from_raw(dtype, shape, bytes.collect::<Vec<u8>>().into())
        }
    };
    Some(NamedTensor { name: metadata.name.as_str().into(), tensor: tensor.ok()? })
}

fn request_for(metadata: &ModelMetadata, size: usize, flags: u8) -> Option<InferRequest> {
    let mut random = Random::new(u64::from(flags));
    let inputs = metadata.inputs.iter().map(|one| input(one, size, &mut random));
    let mut request = InferRequest {
        id: String::new(),
        options: Default::default(),
        inputs: Inputs::Named(inputs.collect::<Option<Vec<_>>>()?),
        outputs: Vec::new(),
    };
    request.options.timeout = Some(Nanos::from_millis(DEADLINE.as_millis() as u64));
    Some(request)
}

/// Sends a request through the codec of one of the protocols, and its response back.
async fn infer(
    node: &LocalNode,
    model: ModelRef<'_>,
    request: InferRequest,
    flags: u8,
) -> ApiResult<()> {
    let message = client::encode_request(model.name, model.version, request)?;
    let message = proto::ModelInferRequest::decode(Bytes::from(message.encode_to_vec()))
        .expect("an encoded message can be decoded");
    let request = grpc::decode_infer(message)?;
    let response = node.infer(model, request, RequestContext::default()).await?;
    let encoding = OutputEncoding { binary: flags & 2 == 0, exceptions: Vec::new() };
    let _ = codec::encode(&response, &encoding);
    client::decode_response(grpc::encode_infer(response)?).map(|_| ())
}
