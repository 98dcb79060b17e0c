//! Models and images by form upload: `/register` and `/classify`.

use std::sync::Arc;

use api::canary::{parse_percent, parse_time_ms};
use api::error::ApiResult;
use api::fallible::with_room;
use api::{
    ApiError, CanaryOptions, ClassifyRequest, ErrorKind, InferOptions, RegisterRequest,
    check_model_name,
};
use axum::extract::multipart::{Field, MultipartError, MultipartRejection};
use axum::extract::{Extension, Multipart, State};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use model::Reservation;
use model::config::{Class, ModelConfig, Preprocessing, SettingsChange};

use super::body;
use super::infer_api::context;
use super::response::{self, HandlerResult};
use crate::auth::Caller;
use crate::server::AppState;
use crate::telemetry::{RequestName, traced};

/// Maximum number of classes in a response.
const MAX_CLASSES: usize = 1000;
/// Bytes that a field reserves first.
const MIN_STEP: usize = 64 << 10;
/// Bytes of a label beside its text: its handle, and an allocation.
const LABEL_BYTES: usize = size_of::<String>() + 32;
/// Longest JSON of a form's settings.
const MAX_SETTINGS_BYTES: usize = 16 << 10;
/// Maximum number of labels of a model.
const MAX_LABELS: usize = 1 << 20;

type Form = Result<Multipart, MultipartRejection>;

pub(super) async fn register(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Arc<Caller>>,
    form: Form,
) -> HandlerResult {
    let _guard = app.requests.admit()?;
    let mut memory = app.bodies.memory.empty();
    let request = read_registration(form_of(form)?, &mut memory).await?;
    caller.check_model(&request.name)?;
    caller.check_class(request.class)?;
    if let Some(settings) = &request.settings {
        let (class, priority) = settings.class_and_priority().map_err(ApiError::invalid)?;
        caller.limit(&mut InferOptions { class, priority, ..InferOptions::default() })?;
        let defaults = ModelConfig::default();
        settings.apply(&defaults, &defaults).map_err(ApiError::invalid)?;
    }
    let registered = app.service.register(request).await?;
    let body = serde_json::to_vec(&registered)
        .map_err(|error| ApiError::internal(format!("cannot write the response: {error}")))?;
    Ok(response::json_bytes(StatusCode::OK, body))
}

pub(super) async fn classify(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Arc<Caller>>,
    headers: HeaderMap,
    form: Form,
) -> HandlerResult {
    let _guard = app.requests.admit()?;
    let mut memory = app.bodies.memory.empty();
    let request = read_image(form_of(form)?, &mut memory).await?;
    caller.check_model(&request.model)?;
    let own = context(&headers);
    let model = request.model.clone();
    let name = RequestName { name: "classify", model: &model, protocol: "rest" };
    let served = &app;
    let work = |context| async move {
        Ok((served.limited(served.service.classify(request, context)).await?, None))
    };
    response::json(&traced(app.telemetry.as_ref(), own, name, work).await?)
}

fn form_of(form: Form) -> ApiResult<Multipart> {
    form.map_err(|error| ApiError::invalid(format!("a multipart form is expected: {error}")))
}

fn form_error(error: MultipartError) -> ApiError {
    let late = body::ended_early(&error);
    if late.kind != ErrorKind::Cancelled {
        return late;
    }
    let kind = match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ErrorKind::TooLarge,
        _ => ErrorKind::InvalidArgument,
    };
    ApiError::new(kind, format!("cannot read the form: {}", error.body_text()))
}

/// The bytes of a field. Memory for them is reserved as they arrive.
async fn bytes_of(field: Field<'_>, memory: &mut Reservation) -> ApiResult<Bytes> {
    collect(field, memory).await.map(Bytes::from)
}

async fn collect(mut field: Field<'_>, memory: &mut Reservation) -> ApiResult<Vec<u8>> {
    let mut all: Vec<u8> = Vec::new();
    while let Some(chunk) = field.chunk().await.map_err(form_error)? {
        if all.capacity() - all.len() < chunk.len() {
            let more = all.len().max(chunk.len()).max(MIN_STEP);
            memory.grow(more)?;
            let refused = |_| ApiError::from(memory.memory().refusal(more, 0));
            all.try_reserve_exact(more).map_err(refused)?;
        }
        all.extend_from_slice(&chunk);
    }
    Ok(all)
}

async fn text_of(field: Field<'_>, memory: &mut Reservation) -> ApiResult<String> {
    let bytes = collect(field, memory).await?;
    String::from_utf8(bytes).map_err(|_| ApiError::invalid("a field is not text"))
}

async fn read_registration(
    mut form: Multipart,
    memory: &mut Reservation,
) -> ApiResult<RegisterRequest> {
    let (mut name, mut onnx, mut class, mut slo_ms) = (None, None, None, None);
    let (mut labels, mut preprocessing, mut settings) = (Vec::new(), None, None);
    let mut canary = CanaryFields::default();
    while let Some(field) = form.next_field().await.map_err(form_error)? {
        match field.name().unwrap_or_default() {
            "name" => name = Some(text_of(field, memory).await?),
            "model" => onnx = Some(bytes_of(field, memory).await?),
            "labels" => labels = read_labels(&text_of(field, memory).await?, memory)?,
            "preprocessing" => preprocessing = read_preprocessing(&text_of(field, memory).await?)?,
            "class" => class = read_class(&text_of(field, memory).await?)?,
            "slo_ms" => slo_ms = read_slo(&text_of(field, memory).await?)?,
            "settings" => settings = read_settings(&text_of(field, memory).await?)?,
            "canary" | "promote_after" | "max_errors" | "max_slowdown" => {
                let name = field.name().unwrap_or_default().to_string();
                canary.read(&name, &text_of(field, memory).await?)?;
            }
            other => {
                let known = "name, model, labels, preprocessing, class, slo_ms, settings, \
                             canary, promote_after, max_errors, max_slowdown";
                return Err(unknown_field(other, known));
            }
        }
    }
    let name = name.ok_or_else(|| ApiError::invalid("the form has no field 'name'"))?;
    check_model_name(&name)?;
    let onnx = onnx.ok_or_else(|| ApiError::invalid("the form has no field 'model'"))?;
    if onnx.is_empty() {
        return Err(ApiError::invalid("the field 'model' is empty; it must be an ONNX file"));
    }
    let canary = canary.options()?;
    Ok(RegisterRequest { name, onnx, labels, preprocessing, class, slo_ms, settings, canary })
}

/// The fields of a form that make a version a canary.
#[derive(Default)]
struct CanaryFields {
    share_percent: Option<f64>,
    promote_after_ms: Option<u64>,
    max_errors_percent: Option<f64>,
    max_slowdown_percent: Option<f64>,
}

impl CanaryFields {
    fn read(&mut self, name: &str, text: &str) -> ApiResult<()> {
        let wrong = |why: String| ApiError::invalid(format!("the field '{name}': {why}"));
        match name {
            "canary" => self.share_percent = Some(parse_percent(text).map_err(wrong)?),
            "promote_after" => self.promote_after_ms = Some(parse_time_ms(text).map_err(wrong)?),
            "max_errors" => self.max_errors_percent = Some(parse_percent(text).map_err(wrong)?),
            _ => self.max_slowdown_percent = Some(parse_percent(text).map_err(wrong)?),
        }
        Ok(())
    }

    fn options(self) -> ApiResult<Option<CanaryOptions>> {
        let CanaryFields { share_percent, promote_after_ms, max_errors_percent, .. } = self;
        let rules = (promote_after_ms, max_errors_percent, self.max_slowdown_percent);
        let Some(share_percent) = share_percent else {
            return match rules {
                (None, None, None) => Ok(None),
                _ => Err(ApiError::invalid(
                    "promote_after, max_errors and max_slowdown are for a field 'canary'",
                )),
            };
        };
        let default = CanaryOptions::with_share(share_percent);
        let options = CanaryOptions {
            promote_after_ms,
            max_errors_percent: max_errors_percent.unwrap_or(default.max_errors_percent),
            max_slowdown_percent: self.max_slowdown_percent.unwrap_or(default.max_slowdown_percent),
            ..default
        };
        options.check()?;
        Ok(Some(options))
    }
}

fn unknown_field(name: &str, known: &str) -> ApiError {
    let name: String = name.chars().take(64).collect();
    ApiError::invalid(format!("unknown field '{name}'; known are {known}"))
}

/// One label per line. An empty line takes a byte of the text and many bytes of labels, so these
/// are counted and reserved first.
fn read_labels(text: &str, memory: &mut Reservation) -> ApiResult<Vec<String>> {
    let count = text.lines().take(MAX_LABELS + 1).count();
    if count > MAX_LABELS {
        return Err(ApiError::invalid(format!("more than {MAX_LABELS} labels")));
    }
    memory.grow(count * LABEL_BYTES + text.len())?;
    let mut labels = with_room(count)?;
    labels.extend(text.lines().map(|line| line.trim_end().to_string()));
    Ok(labels)
}

fn read_preprocessing(text: &str) -> ApiResult<Option<Preprocessing>> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let preprocessing: Preprocessing = serde_json::from_str(text)
        .map_err(|error| ApiError::invalid(format!("the field 'preprocessing': {error}")))?;
    crate::node::image::check(&preprocessing)?;
    Ok(Some(preprocessing))
}

fn read_slo(text: &str) -> ApiResult<Option<u64>> {
    match text.trim() {
        "" => Ok(None),
        text => text.parse().ok().filter(|millis| *millis > 0).map(Some).ok_or_else(|| {
            ApiError::invalid("the field 'slo_ms' must be a whole number of milliseconds")
        }),
    }
}

fn read_settings(text: &str) -> ApiResult<Option<SettingsChange>> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let settings =
        (text.len() <= MAX_SETTINGS_BYTES).then(|| SettingsChange::parse(text.as_bytes()));
    let settings = settings.unwrap_or_else(|| Err("the text is too long".to_string()));
    let wrong = |why: String| ApiError::invalid(format!("the field 'settings': {why}"));
    settings.map(Some).map_err(wrong)
}

fn read_class(text: &str) -> ApiResult<Option<Class>> {
    match text.trim() {
        "" => Ok(None),
        name => Class::parse(name)
            .map(Some)
            .ok_or_else(|| ApiError::invalid("the field 'class' must be rt or be")),
    }
}

async fn read_image(mut form: Multipart, memory: &mut Reservation) -> ApiResult<ClassifyRequest> {
    let (mut model, mut image, mut k) = (None, None, 5);
    while let Some(field) = form.next_field().await.map_err(form_error)? {
        match field.name().unwrap_or_default() {
            "name" => model = Some(text_of(field, memory).await?),
            "image" => image = Some(bytes_of(field, memory).await?),
            "k" => k = read_k(&text_of(field, memory).await?)?,
            other => return Err(unknown_field(other, "name, image, k")),
        }
    }
    Ok(ClassifyRequest {
        model: model.ok_or_else(|| ApiError::invalid("the form has no field 'name'"))?,
        image: image.ok_or_else(|| ApiError::invalid("the form has no field 'image'"))?,
        k,
    })
}

fn read_k(text: &str) -> ApiResult<usize> {
    match text.trim().parse() {
        Ok(k) if (1..=MAX_CLASSES).contains(&k) => Ok(k),
        _ => Err(ApiError::invalid(format!("the field 'k' must be a number in 1..{MAX_CLASSES}"))),
    }
}

#[cfg(test)]
mod tests {
    use model::HostMemory;

    use super::*;

    #[test]
    fn labels_are_reserved_before_they_are_made() {
        let mut memory = HostMemory::leaked(1 << 20).empty();
        assert_eq!(read_labels("cat \ndog", &mut memory).unwrap(), ["cat", "dog"]);
        // A byte each, which would become 24 and more.
        let error = read_labels(&"\n".repeat(500_000), &mut memory).unwrap_err();
        assert_eq!(error.kind, ErrorKind::TooLarge, "{error}");
        let error = read_labels(&"\n".repeat(MAX_LABELS + 1), &mut memory).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidArgument, "{error}");
    }
}
