//! A service that accepts everything a handler lets through.

use std::pin::Pin;
use std::time::Duration;

use api::error::ApiResult;
use api::*;

/// Echoes inputs as outputs.
pub(super) struct Echo;

fn known(model: ModelRef<'_>) -> ApiResult<()> {
    match model.name {
        "identity" => Ok(()),
        name => Err(ApiError::not_found(format!("there is no model '{name}'"))),
    }
}

fn now<'a, T: Send + 'a>(result: ApiResult<T>) -> ServiceFuture<'a, T> {
    Box::pin(std::future::ready(result))
}

fn echo(model: ModelRef<'_>, request: InferRequest) -> ApiResult<InferResponse> {
    known(model)?;
    let Inputs::Named(outputs) = request.inputs else {
        return Err(ApiError::invalid("raw bodies are not echoed"));
    };
    Ok(InferResponse {
        model_name: model.name.into(),
        model_version: "1".into(),
        id: request.id,
        outputs,
        timing: None,
    })
}

impl InferenceService for Echo {
    fn server_metadata(&self) -> ServerMetadata {
        ServerMetadata { name: "echo".into(), version: "0".into(), extensions: Vec::new() }
    }

    fn ready(&self) -> bool {
        true
    }

    fn model_ready<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, bool> {
        now(known(model).map(|()| true))
    }

    fn model_metadata<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, ModelMetadata> {
        let metadata = |()| ModelMetadata {
            name: model.name.into(),
            versions: vec!["1".into()],
            platform: "echo".into(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        now(known(model).map(metadata))
    }

    fn model_config<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, proto::ModelConfig> {
        now(known(model).map(|()| proto::ModelConfig::default()))
    }

    fn infer<'a>(
        &'a self,
        model: ModelRef<'a>,
        request: InferRequest,
        _: RequestContext,
    ) -> ServiceFuture<'a, InferResponse> {
        now(echo(model, request))
    }

    fn statistics<'a>(
        &'a self,
        model: Option<ModelRef<'a>>,
    ) -> ServiceFuture<'a, Vec<ModelStatistics>> {
        now(model.map_or(Ok(()), known).map(|()| Vec::new()))
    }

    fn index(&self, _: bool) -> ServiceFuture<'_, Vec<IndexEntry>> {
        now(Ok(Vec::new()))
    }

    fn load<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()> {
        now(known(ModelRef { name: model, version: None }))
    }

    fn unload<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()> {
        self.load(model)
    }

    fn register(&self, request: RegisterRequest) -> ServiceFuture<'_, Registered> {
        let version = request.labels.len().to_string();
        now(Ok(Registered { name: request.name, version, state: ModelState::Ready }))
    }

    fn classify(
        &self,
        request: ClassifyRequest,
        _: RequestContext,
    ) -> ServiceFuture<'_, Classification> {
        let version = request.k.to_string();
        now(Ok(Classification { model: request.model, version, predictions: Vec::new() }))
    }

    fn query_infer<'a>(
        &'a self,
        query: &'a str,
        request: InferRequest,
        _: RequestContext,
    ) -> ServiceFuture<'a, InferResponse> {
        now(echo(ModelRef { name: query, version: None }, request))
    }

    fn put_query<'a>(&'a self, _: &'a str, text: &'a str) -> ServiceFuture<'a, QueryMetadata> {
        let read = cluster::query::spec::QuerySpec::read(text).and_then(|spec| spec.check());
        now(match read {
            Err(why) => Err(ApiError::invalid(why.to_string())),
            Ok(_) => Err(ApiError::unsupported("queries are not stored")),
        })
    }

    fn write_metrics(&self, _: &mut String) {}

    fn drain(&self, _: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(std::future::ready(true))
    }
}
