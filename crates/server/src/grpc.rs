//! gRPC: the same service over protobuf, with health and reflection.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use api::grpc::{decode_infer, encode_infer};
use api::proto::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use api::trace::TRACEPARENT;
use api::{ApiError, ModelRef, RequestContext, TraceContext, proto};
use futures_util::{FutureExt, Stream};
use http::HeaderMap;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::codec::CompressionEncoding;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::server::HealthReporter;
use tracing::Instrument;

mod fast_infer;

use self::fast_infer::FastInfer;
use crate::listener;
use crate::rest::{check_load_parameters, infer_span};
use crate::server::{AppState, ServerError};

/// Flow-control window of a connection, large enough for many requests at once.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Maximum frame size: an image in one frame is not copied after it is read from the socket.
const FRAME_BYTES: u32 = 1 << 20;

/// Maximum message of calls other than inferences, after decompression.
const MAX_CONTROL_BYTES: usize = 1 << 20;

type Service = GrpcInferenceServiceServer<Handler>;
type RpcResult<T> = Result<Response<T>, Status>;

/// State of `grpc.health.v1`.
pub(crate) struct GrpcHealth(HealthReporter);

impl GrpcHealth {
    pub(crate) async fn not_serving(&self) {
        self.0.set_service_status("", tonic_health::ServingStatus::NotServing).await;
        self.0.set_not_serving::<Service>().await;
    }
}

/// Prepares the server on `socket`; the returned future runs it until `stop` turns true.
pub(crate) async fn serve(
    socket: TcpListener,
    app: Arc<AppState>,
    mut stop: watch::Receiver<bool>,
) -> Result<(GrpcHealth, impl Future<Output = ()> + Send), ServerError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<Service>().await;
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
    let router = tonic::transport::Server::builder()
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES)
        .add_service(FastInfer { app, others: service })
        .add_service(health)
        .add_service(reflection().build_v1().map_err(broken)?)
        .add_service(reflection().build_v1alpha().map_err(broken)?);
    let incoming = TcpIncoming::from(socket).with_nodelay(Some(true));
    let task = async move {
        let stopped = async move { listener::stopped(&mut stop).await };
        if let Err(error) = router.serve_with_incoming_shutdown(incoming, stopped).await {
            tracing::error!(%error, "gRPC server failed");
        }
    };
    Ok((GrpcHealth(reporter), task))
}

/// Inferences never reach tonic's handler.
const ELSEWHERE: &str = "inferences are handled by FastInfer";

pub(crate) struct Handler {
    app: Arc<AppState>,
}

/// Handles one inference. A panic becomes an error response, not a broken stream.
async fn infer(
    app: &AppState,
    message: proto::ModelInferRequest,
    context: RequestContext,
) -> Result<proto::ModelInferResponse, ApiError> {
    let reply = AssertUnwindSafe(try_infer(app, message, context)).catch_unwind().await;
    reply.unwrap_or_else(|_| Err(ApiError::internal("the server failed on this request")))
}

async fn try_infer(
    app: &AppState,
    message: proto::ModelInferRequest,
    context: RequestContext,
) -> Result<proto::ModelInferResponse, ApiError> {
    let _guard = app.requests.admit()?;
    let mut message = message;
    let name = std::mem::take(&mut message.model_name);
    let version = std::mem::take(&mut message.model_version);
    let model = ModelRef::parse(&name, &version)?;
    let request = decode_infer(message)?;
    let span = infer_span(model.name, &request.id, &context);
    let response = app.service.infer(model, request, context).instrument(span).await?;
    Ok(encode_infer(response))
}

fn context_of(headers: &HeaderMap) -> RequestContext {
    let header = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok());
    RequestContext { trace: header.and_then(TraceContext::parse) }
}

fn with_trace(headers: &mut HeaderMap, context: RequestContext) {
    if let Some(trace) = context.trace
        && let Ok(value) = trace.to_string().parse()
    {
        headers.insert(TRACEPARENT, value);
    }
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
            error_message: error.message.into_owned(),
            infer_response: Some(proto::ModelInferResponse { id, ..Default::default() }),
        },
    }
}

fn no_shared_memory<T>() -> RpcResult<T> {
    Err(ApiError::unsupported("shared memory is not supported").into())
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
        let request = request.into_inner();
        let model = ModelRef::parse(&request.name, &request.version)?;
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
        let request = request.into_inner();
        let model = ModelRef::parse(&request.name, &request.version)?;
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
        let request = request.into_inner();
        let model = ModelRef::parse(&request.name, &request.version)?;
        let config = self.app.service.model_config(model).await?;
        Ok(Response::new(proto::ModelConfigResponse { config: Some(config) }))
    }

    async fn model_statistics(
        &self,
        request: Request<proto::ModelStatisticsRequest>,
    ) -> RpcResult<proto::ModelStatisticsResponse> {
        let request = request.into_inner();
        let model = match request.name.as_str() {
            "" => None,
            name => Some(ModelRef::parse(name, &request.version)?),
        };
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
        let request = request.into_inner();
        check_load_parameters(request.parameters.keys().map(String::as_str))?;
        let _guard = self.app.requests.admit()?;
        self.app.service.load(&request.model_name).await?;
        Ok(Response::new(proto::RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        request: Request<proto::RepositoryModelUnloadRequest>,
    ) -> RpcResult<proto::RepositoryModelUnloadResponse> {
        self.app.service.unload(&request.into_inner().model_name).await?;
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
