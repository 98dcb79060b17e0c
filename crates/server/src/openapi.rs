//! The description of REST in the OpenAPI format, and the page that shows it.
//!
//! The router records its routes, and a test compares them with [`operations`], so that a route
//! without a description is an error.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use axum::body::{Body, Bytes};
use http::header::{CACHE_CONTROL, HeaderValue};
use http::{Response, StatusCode};
use serde_json::{Map, Value, json};

use crate::auth::routes;
use crate::rest::response;

use operations::{Operation, RequestBody, Success};

mod operations;

const LICENSE: &str = env!("CARGO_PKG_LICENSE");

/// Parameters and schemas by name.
const COMPONENTS: &str = include_str!("openapi/components.json");

const ABOUT: &str = "The Open Inference Protocol v2, extensions of Triton and routes of Atoll's \
    own. The admin port has all routes but inference and the console. `/v2/systemsharedmemory`, \
    `/v2/cudasharedmemory`, `/v2/trace/setting` and `/v2/logging` reply 501. Tokens are needed \
    where the server was started with them; each operation names the scopes of which one is \
    enough, and `admin` is always enough.";

/// The description as it is sent.
pub(crate) async fn document() -> Response<Body> {
    static TEXT: OnceLock<Bytes> = OnceLock::new();
    let text = TEXT.get_or_init(|| description().to_string().into());
    let mut reply = response::json_bytes(StatusCode::OK, Vec::new());
    *reply.body_mut() = Body::from(text.clone());
    reply.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    reply
}

fn description() -> Value {
    let mut components: Value =
        serde_json::from_str(COMPONENTS).expect("a test reads the components");
    components["securitySchemes"] = json!({
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token of `atoll token create`, or a JSON Web Token",
        },
    });
    let operations = operations::all();
    let mut tags: Vec<&str> = operations.iter().map(|operation| operation.tag).collect();
    tags.dedup();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Atoll",
            "version": env!("CARGO_PKG_VERSION"),
            "description": ABOUT,
            "license": { "name": LICENSE, "identifier": LICENSE },
        },
        "servers": [{ "url": "/" }],
        "tags": tags.iter().map(|tag| json!({ "name": tag })).collect::<Vec<_>>(),
        "paths": paths(&operations),
        "components": components,
    })
}

fn paths(operations: &[Operation]) -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for operation in operations {
        let method = operation.method.as_str().to_ascii_lowercase();
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[method] = operation_json(operation);
        if operation.path == "/metrics" {
            path["servers"] = json!([{
                "url": "http://{host}:{port}",
                "description": "The admin port",
                "variables": {
                    "host": { "default": "localhost" },
                    "port": { "default": "8002" },
                },
            }]);
        }
    }
    Value::Object(paths)
}

/// The names in braces of a path.
fn path_parameters(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}

fn operation_json(operation: &Operation) -> Value {
    let named = path_parameters(operation.path).chain(operation.parameters.iter().copied());
    let parameters: Vec<Value> =
        named.map(|name| json!({ "$ref": format!("#/components/parameters/{name}") })).collect();
    let mut value = json!({
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "security": security(operation),
        "responses": responses(operation),
    });
    if !parameters.is_empty() {
        value["parameters"] = Value::Array(parameters);
    }
    if let Some(body) = body(operation.body) {
        value["requestBody"] = body;
    }
    value
}

/// One entry for each scope that is enough, and an empty one: a server without tokens needs none.
fn security(operation: &Operation) -> Value {
    let scopes = routes::rest(&operation.method, operation.path).scopes;
    if scopes.is_empty() {
        return json!([]);
    }
    let named = scopes.names().map(|name| json!({ "token": [name] }));
    named.chain([json!({})]).collect()
}

fn schema(name: &str) -> Value {
    json!({ "schema": { "$ref": format!("#/components/schemas/{name}") } })
}

fn body(body: RequestBody) -> Option<Value> {
    let (required, content) = match body {
        RequestBody::Absent => return None,
        RequestBody::OptionalJson(name) => (false, json!({ "application/json": schema(name) })),
        RequestBody::Json(name) => (true, json!({ "application/json": schema(name) })),
        RequestBody::Form(name) => (true, json!({ "multipart/form-data": schema(name) })),
        RequestBody::Inference => (
            true,
            json!({ "application/json": schema("InferRequest"), "application/octet-stream": {} }),
        ),
        RequestBody::QueryInference => (
            true,
            json!({
                "application/json": schema("InferRequest"),
                "application/octet-stream": {},
                "image/*": {},
            }),
        ),
        RequestBody::Query => (
            true,
            json!({
                "application/json": { "schema": { "type": "object" } },
                "application/toml": { "schema": { "type": "string" } },
            }),
        ),
    };
    Some(json!({ "required": required, "content": content }))
}

fn responses(operation: &Operation) -> Value {
    let success = match operation.success {
        Success::Empty => json!({ "description": "Done" }),
        Success::Json(name) => {
            json!({ "description": "Done", "content": { "application/json": schema(name) } })
        }
        Success::Inference => json!({
            "description": "The outputs",
            "content": {
                "application/json": schema("InferResponse"),
                "application/octet-stream": {},
            },
        }),
        Success::Media(kind) => json!({ "description": "Done", "content": { kind: {} } }),
    };
    let mut responses = Map::from_iter([("200".to_string(), success)]);
    for status in error_statuses(operation) {
        let mut value = json!({ "description": error_text(status) });
        if status != 503 || !operation.empty_unavailable {
            value["content"] = json!({ "application/json": schema("Error") });
        }
        responses.insert(status.to_string(), value);
    }
    Value::Object(responses)
}

/// The errors an operation names, and those of its permissions, its path and its body.
fn error_statuses(operation: &Operation) -> BTreeSet<u16> {
    let mut statuses: BTreeSet<u16> = operation.errors.iter().copied().collect();
    // The check of host and origin is for all routes.
    statuses.insert(403);
    if !routes::rest(&operation.method, operation.path).scopes.is_empty() {
        statuses.extend([401, 429]);
    }
    if path_parameters(operation.path).next().is_some() {
        statuses.extend([400, 404]);
    }
    if operation.body != RequestBody::Absent {
        statuses.extend([400, 408, 413, 499]);
    }
    statuses
}

fn error_text(status: u16) -> &'static str {
    match status {
        400 => "The request contradicts the protocol or the model",
        401 => "No valid credentials",
        403 => "Not allowed: scope, model, class, priority, host, origin, or read-only",
        404 => "No such model, version or file",
        408 => "The body did not arrive in time",
        413 => "The body, or the memory that the request needs, exceeds the limit",
        429 => "More requests than allowed; `Retry-After` says when to try again",
        499 => "The client gave the request up",
        501 => "Understood, but not supported by this server",
        502 => "The reply of a backend exceeds the memory of the frontend",
        503 => "Not now: queue full, model not ready, or draining",
        504 => "The deadline passed before the reply",
        _ => "An error",
    }
}

#[cfg(test)]
pub(crate) fn described() -> BTreeSet<(String, &'static str)> {
    let name = |operation: Operation| (operation.method.to_string(), operation.path);
    operations::all().into_iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_string));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere_and_nothing_is_unused() {
        let document = description();
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        for reference in &found {
            let pointer = reference.strip_prefix('#').expect("a local reference");
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        for kind in ["parameters", "schemas"] {
            for name in document["components"][kind].as_object().expect("components").keys() {
                let reference = format!("#/components/{kind}/{name}");
                assert!(found.contains(&reference), "{reference} is unused");
            }
        }
    }

    #[test]
    fn operations_have_names_of_their_own_and_known_errors() {
        let operations = operations::all();
        let names: BTreeSet<&str> = operations.iter().map(|operation| operation.id).collect();
        assert_eq!(names.len(), operations.len());
        assert_eq!(described().len(), operations.len());
        for operation in &operations {
            for status in error_statuses(operation) {
                assert_ne!(error_text(status), "An error", "{status} of {}", operation.path);
            }
        }
    }

    #[test]
    fn scopes_are_those_that_are_checked() {
        let document = description();
        let security =
            |path: &str, method: &str| document["paths"][path][method]["security"].clone();
        assert_eq!(security("/v2/health/live", "get"), json!([]));
        assert_eq!(
            security("/v2/models/{model}/infer", "post"),
            json!([{ "token": ["infer"] }, {}])
        );
        assert_eq!(
            security("/v2/atoll/live", "get"),
            json!([{ "token": ["metrics"] }, { "token": ["register"] }, {}])
        );
        assert!(document["paths"]["/openapi.json"]["get"]["responses"]["401"].is_null());
    }
}
