//! gRPC: the same service over protobuf, with health and reflection.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use api::codec::response::copied_bytes;
use api::grpc::{decode_infer, encode_infer};
use api::proto::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use api::trace::TRACEPARENT;
use api::{ApiError, ErrorKind, ModelRef, RequestContext, TraceContext, proto};
use futures_util::{FutureExt, Stream};
use http::HeaderMap;
use model::Reservation;
use tonic::codec::CompressionEncoding;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::server::HealthReporter;
use tower::Service as _;
use tracing::Instrument;

mod fast_infer;

use self::fast_infer::FastInfer;
use crate::auth::Caller;
use crate::auth::routes::{self, Need};
use crate::connection::RequestBody;
use crate::listener::Respond;
use crate::rest::response::ResponseBody;
use crate::rest::{canary_choice, check_load_parameters, infer_span};
use crate::server::{AppState, ServerError};
use crate::telemetry::{RequestName, traced};

/// Maximum message of calls other than inferences, after decompression.
const MAX_CONTROL_BYTES: usize = 1 << 20;

type Service = GrpcInferenceServiceServer<Handler>;
type RpcResult<T> = Result<Response<T>, Status>;

/// Paths of `grpc.health.v1`.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// What `grpc.health.v1` replies.
pub(crate) struct GrpcHealth {
    app: Arc<AppState>,
    reporter: HealthReporter,
    /// The status that was set last; locked while it changes, so that none is set too late.
    ready: tokio::sync::Mutex<Option<bool>>,
}

impl GrpcHealth {
    /// Sets the status to the server's readiness.
    pub(crate) async fn update(&self) {
        let mut last = self.ready.lock().await;
        let ready = self.app.ready();
        if last.replace(ready) == Some(ready) {
            return;
        }
        let status = match ready {
            true => tonic_health::ServingStatus::Serving,
            false => tonic_health::ServingStatus::NotServing,
        };
        self.reporter.set_service_status("", status).await;
        self.reporter.set_service_status(<Service as NamedService>::NAME, status).await;
    }
}

/// The handler of gRPC requests; its health has to be updated while clients watch it.
pub(crate) async fn handler(app: Arc<AppState>) -> Result<GrpcHandler, ServerError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let broken = |error: tonic_reflection::server::Error| ServerError::Grpc(error.to_string());
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let service = GrpcInferenceServiceServer::new(Handler { app: app.clone() })
        .max_decoding_message_size(MAX_CONTROL_BYTES)
        .max_encoding_message_size(usize::MAX)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate);
    let routes = Routes::new(FastInfer { app: app.clone(), others: service })
        .add_service(health)
        .add_service(reflection().build_v1().map_err(broken)?)
        .add_service(reflection().build_v1alpha().map_err(broken)?)
        .prepare();
    let health = GrpcHealth { app: app.clone(), reporter, ready: tokio::sync::Mutex::new(None) };
    // The services are known from the first request on.
    health.update().await;
    Ok(GrpcHandler { app, routes, health: Arc::new(health) })
}

/// Handles gRPC requests.
#[derive(Clone)]
pub(crate) struct GrpcHandler {
    app: Arc<AppState>,
    routes: Routes,
    pub(crate) health: Arc<GrpcHealth>,
}

impl Respond for GrpcHandler {
    const GRPC: bool = true;

    fn app(&self) -> &Arc<AppState> {
        &self.app
    }

    fn need(&self, _: &http::Method, path: &str) -> Need {
        routes::grpc(path)
    }

    fn error(&self, error: ApiError) -> http::Response<ResponseBody> {
        Status::from(error).into_http::<tonic::body::Body>().map(ResponseBody::Grpc)
    }

    async fn respond(
        &self,
        mut request: http::Request<RequestBody>,
        caller: Arc<Caller>,
    ) -> http::Response<ResponseBody> {
        let timeout = timeout_of(request.headers());
        request.extensions_mut().insert(caller);
        if request.uri().path().starts_with(HEALTH) {
            // A reply is never older than what REST says at the same time.
            self.health.update().await;
        }
        let call = self.routes.clone().call(request);
        let result = match timeout {
            None => call.await,
            Some(timeout) => match tokio::time::timeout(timeout, call).await {
                Ok(result) => result,
                Err(_) => {
                    let late = "the client's timeout has passed";
                    return self.error(ApiError::new(ErrorKind::DeadlineExceeded, late));
                }
            },
        };
        match result {
            Ok(response) => response.map(ResponseBody::Grpc),
            Err(never) => match never {},
        }
    }
}

/// The client's time limit; an invalid one is ignored.
fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Inferences never reach tonic's handler.
const ELSEWHERE: &str = "inferences are handled by FastInfer";

pub(crate) struct Handler {
    app: Arc<AppState>,
}

/// A reply, and the reservation of what was copied for it.
type Reply = (proto::ModelInferResponse, Reservation);

/// Handles one inference. A panic becomes an error response, not a broken stream.
async fn infer(
    app: &AppState,
    caller: &Caller,
    message: proto::ModelInferRequest,
    context: RequestContext,
) -> Result<Reply, ApiError> {
    let reply = AssertUnwindSafe(try_infer(app, caller, message, context)).catch_unwind().await;
    reply.unwrap_or_else(|_| Err(ApiError::internal("the server failed on this request")))
}

async fn try_infer(
    app: &AppState,
    caller: &Caller,
    message: proto::ModelInferRequest,
    context: RequestContext,
) -> Result<Reply, ApiError> {
    let _guard = app.requests.admit()?;
    let mut message = message;
    let name = std::mem::take(&mut message.model_name);
    let version = std::mem::take(&mut message.model_version);
    let model = ModelRef::parse(&name, &version)?;
    caller.check_model(model.name)?;
    let request_name = RequestName { name: "infer", model: model.name, protocol: "grpc" };
    let work = |passed| async move {
        let mut request = decode_infer(message)?;
        caller.limit(&mut request.options)?;
        let span = infer_span(model.name, &request.id, &context);
        let work = app.limited(app.service.infer(model, request, passed));
        let response = work.instrument(span).await?;
        let timing = response.timing;
        let strings = response.outputs.iter().map(|output| copied_bytes(&output.tensor));
        // Of the message that is made here; its frame is another copy, which is counted where it is
        // made.
        let memory = app.bodies.memory.reserve(strings.fold(0, usize::saturating_add))?;
        Ok(((encode_infer(response)?, memory), timing))
    };
    traced(app.telemetry.as_ref(), context, request_name, work).await
}

fn context_of(headers: &HeaderMap) -> RequestContext {
    let header = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok());
    let trace = header.and_then(TraceContext::parse);
    RequestContext { trace, canary: canary_choice(headers), ..RequestContext::default() }
}

fn with_trace(headers: &mut HeaderMap, context: RequestContext) {
    if let Some(trace) = context.trace
        && let Ok(value) = trace.to_string().parse()
    {
        headers.insert(TRACEPARENT, value);
    }
}

/// Who sent a request; the listener adds it to every one.
fn caller_of(extensions: &http::Extensions) -> Result<Arc<Caller>, ApiError> {
    let caller = extensions.get::<Arc<Caller>>().cloned();
    caller.ok_or_else(|| ApiError::internal("the request has no caller"))
}

fn stream_response(
    id: String,
    result: Result<proto::ModelInferResponse, ApiError>,
) -> proto::ModelStreamInferResponse {
    match result {
        Ok(mut response) => {
            use proto::infer_parameter::ParameterChoice;
            let parameter_choice = Some(ParameterChoice::BoolParam(true));
            let last = proto::InferParameter { parameter_choice };
            response.parameters.insert("triton_final_response".to_string(), last);
            proto::ModelStreamInferResponse { infer_response: Some(response), ..Default::default() }
        }
        // Errors carry the id too, so that a client can match them to requests.
        Err(error) => proto::ModelStreamInferResponse {
            error_message: error.line().into_owned(),
            infer_response: Some(proto::ModelInferResponse { id, ..Default::default() }),
        },
    }
}

fn no_shared_memory<T>() -> RpcResult<T> {
    Err(ApiError::unsupported("shared memory is not supported").into())
}

/// What an unload with the parameter `atoll_delete` deletes from the registry: one version, with
/// `atoll_version`, or all. `None` for an unload as Triton has it.
fn deleted_version(
    request: &proto::RepositoryModelUnloadRequest,
) -> Result<Option<Option<u64>>, ApiError> {
    use proto::model_repository_parameter::ParameterChoice;
    let (mut delete, mut version) = (false, None);
    for (name, value) in &request.parameters {
        match (name.as_str(), &value.parameter_choice) {
            ("atoll_delete", Some(ParameterChoice::BoolParam(value))) => delete = *value,
            ("atoll_version", Some(ParameterChoice::Int64Param(value))) if *value > 0 => {
                version = u64::try_from(*value).ok();
            }
            (name, _) if name.starts_with("atoll_") => {
                return Err(ApiError::invalid(format!(
                    "wrong parameter '{}'; known are atoll_delete, a bool, and with it \
                     atoll_version, an integer from 1",
                    name.escape_debug()
                )));
            }
            _ => {}
        }
    }
    match (delete, version) {
        (false, Some(_)) => Err(ApiError::invalid("atoll_version is only for atoll_delete")),
        (false, None) => Ok(None),
        (true, version) => Ok(Some(version)),
    }
}

#[tonic::async_trait]
impl GrpcInferenceService for Handler {
    type ModelStreamInferStream =
        Pin<Box<dyn Stream<Item = Result<proto::ModelStreamInferResponse, Status>> + Send>>;

    async fn server_live(
        &self,
        _: Request<proto::ServerLiveRequest>,
    ) -> RpcResult<proto::ServerLiveResponse> {
        Ok(Response::new(proto::ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _: Request<proto::ServerReadyRequest>,
    ) -> RpcResult<proto::ServerReadyResponse> {
        Ok(Response::new(proto::ServerReadyResponse { ready: self.app.ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<proto::ModelReadyRequest>,
    ) -> RpcResult<proto::ModelReadyResponse> {
        let caller = caller_of(request.extensions())?;
        let request = request.into_inner();
        let model = ModelRef::parse(&request.name, &request.version)?;
        caller.check_model(model.name)?;
        let ready = match self.app.service.model_ready(model).await {
            Ok(ready) => ready && !self.app.requests.is_closed(),
            Err(error) if error.kind == api::ErrorKind::NotFound => false,
            Err(error) => return Err(error.into()),
        };
        Ok(Response::new(proto::ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        _: Request<proto::ServerMetadataRequest>,
    ) -> RpcResult<proto::ServerMetadataResponse> {
        Ok(Response::new(self.app.service.server_metadata().into()))
    }

    async fn model_metadata(
        &self,
        request: Request<proto::ModelMetadataRequest>,
    ) -> RpcResult<proto::ModelMetadataResponse> {
        let caller = caller_of(request.extensions())?;
        let request = request.into_inner();
        let model = ModelRef::parse(&request.name, &request.version)?;
        caller.check_model(model.name)?;
        Ok(Response::new(self.app.service.model_metadata(model).await?.into()))
    }

    async fn model_infer(
        &self,
        _: Request<proto::ModelInferRequest>,
    ) -> RpcResult<proto::ModelInferResponse> {
        Err(Status::internal(ELSEWHERE))
    }

    async fn model_stream_infer(
        &self,
        _: Request<Streaming<proto::ModelInferRequest>>,
    ) -> RpcResult<Self::ModelStreamInferStream> {
        Err(Status::internal(ELSEWHERE))
    }

    async fn model_config(
        &self,
        request: Request<proto::ModelConfigRequest>,
    ) -> RpcResult<proto::ModelConfigResponse> {
        let caller = caller_of(request.extensions())?;
        let request = request.into_inner();
        let model = ModelRef::parse(&request.name, &request.version)?;
        caller.check_model(model.name)?;
        let config = self.app.service.model_config(model).await?;
        Ok(Response::new(proto::ModelConfigResponse { config: Some(config) }))
    }

    async fn model_statistics(
        &self,
        request: Request<proto::ModelStatisticsRequest>,
    ) -> RpcResult<proto::ModelStatisticsResponse> {
        let caller = caller_of(request.extensions())?;
        let request = request.into_inner();
        let model = match request.name.as_str() {
            "" => None,
            name => Some(ModelRef::parse(name, &request.version)?),
        };
        match model {
            None => caller.check_scope(routes::OVERVIEW)?,
            Some(model) => caller.check_model(model.name)?,
        }
        let stats = self.app.service.statistics(model).await?;
        let model_stats = stats.into_iter().map(Into::into).collect();
        Ok(Response::new(proto::ModelStatisticsResponse { model_stats }))
    }

    async fn repository_index(
        &self,
        request: Request<proto::RepositoryIndexRequest>,
    ) -> RpcResult<proto::RepositoryIndexResponse> {
        let models = self.app.service.index(request.into_inner().ready).await?;
        let models = models.into_iter().map(Into::into).collect();
        Ok(Response::new(proto::RepositoryIndexResponse { models }))
    }

    async fn repository_model_load(
        &self,
        request: Request<proto::RepositoryModelLoadRequest>,
    ) -> RpcResult<proto::RepositoryModelLoadResponse> {
        let caller = caller_of(request.extensions())?;
        let request = request.into_inner();
        caller.check_model(&request.model_name)?;
        check_load_parameters(request.parameters.keys().map(String::as_str))?;
        let _guard = self.app.requests.admit()?;
        self.app.service.load(&request.model_name).await?;
        Ok(Response::new(proto::RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        request: Request<proto::RepositoryModelUnloadRequest>,
    ) -> RpcResult<proto::RepositoryModelUnloadResponse> {
        let caller = caller_of(request.extensions())?;
        let request = request.into_inner();
        let model = &request.model_name;
        caller.check_model(model)?;
        if let Some(version) = deleted_version(&request)? {
            let _guard = self.app.requests.admit()?;
            self.app.service.delete_model(ModelRef { name: model, version }).await?;
            return Ok(Response::new(proto::RepositoryModelUnloadResponse {}));
        }
        // Only deleting is for those who register.
        caller.check_scope(routes::ADMIN)?;
        self.app.service.unload(model).await?;
        Ok(Response::new(proto::RepositoryModelUnloadResponse {}))
    }

    async fn system_shared_memory_status(
        &self,
        _: Request<proto::SystemSharedMemoryStatusRequest>,
    ) -> RpcResult<proto::SystemSharedMemoryStatusResponse> {
        no_shared_memory()
    }

    async fn system_shared_memory_register(
        &self,
        _: Request<proto::SystemSharedMemoryRegisterRequest>,
    ) -> RpcResult<proto::SystemSharedMemoryRegisterResponse> {
        no_shared_memory()
    }

    async fn system_shared_memory_unregister(
        &self,
        _: Request<proto::SystemSharedMemoryUnregisterRequest>,
    ) -> RpcResult<proto::SystemSharedMemoryUnregisterResponse> {
        no_shared_memory()
    }

    async fn cuda_shared_memory_status(
        &self,
        _: Request<proto::CudaSharedMemoryStatusRequest>,
    ) -> RpcResult<proto::CudaSharedMemoryStatusResponse> {
        no_shared_memory()
    }

    async fn cuda_shared_memory_register(
        &self,
        _: Request<proto::CudaSharedMemoryRegisterRequest>,
    ) -> RpcResult<proto::CudaSharedMemoryRegisterResponse> {
        no_shared_memory()
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<proto::CudaSharedMemoryUnregisterRequest>,
    ) -> RpcResult<proto::CudaSharedMemoryUnregisterResponse> {
        no_shared_memory()
    }

    async fn trace_setting(
        &self,
        _: Request<proto::TraceSettingRequest>,
    ) -> RpcResult<proto::TraceSettingResponse> {
        Err(ApiError::unsupported("trace settings cannot be changed at run time").into())
    }

    async fn log_settings(
        &self,
        _: Request<proto::LogSettingsRequest>,
    ) -> RpcResult<proto::LogSettingsResponse> {
        Err(ApiError::unsupported("log settings cannot be changed at run time").into())
    }
}
