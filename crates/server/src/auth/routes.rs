//! What each route needs.

use http::Method;

use super::grant::{Scope, Scopes};

/// Header of a request's id.
pub(crate) const REQUEST_ID: &str = "x-request-id";

const OPEN: Scopes = Scopes::of(&[]);
const INFER: Scopes = Scopes::of(&[Scope::Infer]);
const REGISTER: Scopes = Scopes::of(&[Scope::Register]);
pub(crate) const ADMIN: Scopes = Scopes::of(&[Scope::Admin]);
/// Any valid credential.
const ANY: Scopes = Scopes::of(&[Scope::Infer, Scope::Metrics, Scope::Register]);
/// What concerns all models.
pub(crate) const OVERVIEW: Scopes = Scopes::of(&[Scope::Metrics, Scope::Register]);

/// What a route needs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// One of these; empty for routes that are open to all.
    pub(crate) scopes: Scopes,
    /// The model or query in the path.
    pub(crate) model: Option<String>,
    /// The change that a request makes, if it does.
    pub(crate) change: Option<&'static str>,
}

impl Need {
    fn of(scopes: Scopes) -> Need {
        Need { scopes, model: None, change: None }
    }

    fn model(self, name: &str) -> Need {
        Need { model: Some(decode(name)), ..self }
    }

    fn change(self, change: &'static str) -> Need {
        Need { change: Some(change), ..self }
    }
}

/// What a request over REST needs, also on the admin port.
pub(crate) fn rest(method: &Method, path: &str) -> Need {
    let reads = method == Method::GET || method == Method::HEAD;
    let path = path.strip_prefix('/').unwrap_or(path);
    let parts: Vec<&str> = path.splitn(6, '/').collect();
    match parts.as_slice() {
        ["v2", "health", "live" | "ready"] => Need::of(OPEN),
        // The console itself has no data; it sends the credentials that the user enters. The
        // description of the routes is the same on all servers.
        [""] | ["console", _] | ["docs"] | ["openapi.json"] if reads => Need::of(OPEN),
        ["metrics"] => Need::of(OVERVIEW),
        ["v2", "models", "stats"] | ["v2", "atoll", "status"] => Need::of(OVERVIEW),
        ["v2", "atoll", "live" | "trace" | "cluster", ..] if reads => Need::of(OVERVIEW),
        // It changes nothing, and takes time.
        ["v2", "atoll", "plan"] => Need::of(OVERVIEW),
        ["v2", "models", name, rest @ ..] => match rest.last() {
            Some(&"infer") => Need::of(INFER).model(name),
            _ => Need::of(ANY).model(name),
        },
        ["v2", "repository", "index"] => Need::of(OVERVIEW),
        ["v2", "repository", "models", name, "load"] => Need::of(ADMIN).model(name).change("load"),
        ["v2", "repository", "models", name, ..] => Need::of(ADMIN).model(name).change("unload"),
        ["register"] | ["v2", "atoll", "register"] => Need::of(REGISTER).change("register"),
        ["classify"] | ["v2", "atoll", "classify"] => Need::of(INFER),
        ["v2", "atoll", "queries", name, "infer"] => Need::of(INFER).model(name),
        ["v2", "atoll", "queries", name] if reads => Need::of(ANY).model(name),
        ["v2", "atoll", "queries", name, ..] => Need::of(ADMIN).model(name).change("query"),
        // It changes nothing, and takes time of the device.
        ["v2", "atoll", "models", name, "steps"] => Need::of(OVERVIEW).model(name),
        ["v2", "atoll", "models", name, ..] if reads => Need::of(OVERVIEW).model(name),
        ["v2", "atoll", "models", name] if method == Method::PATCH => {
            Need::of(REGISTER).model(name).change("settings")
        }
        ["v2", "atoll", "models", name, ..] => Need::of(REGISTER).model(name).change("registry"),
        _ if reads => Need::of(ANY),
        // What is not known here may change something.
        _ => Need::of(ADMIN).change("other"),
    }
}

/// Whether a response goes on until its client or the server ends it.
pub(crate) fn is_endless(path: &str) -> bool {
    matches!(
        path.rsplit_once('/'),
        Some((_, "ModelStreamInfer" | "ServerReflectionInfo"))
            | Some(("/grpc.health.v1.Health", "Watch"))
            | Some(("/v2/atoll", "live"))
    )
}

/// What a gRPC call needs; the model is in its message.
pub(crate) fn grpc(path: &str) -> Need {
    let (service, call) =
        path.strip_prefix('/').unwrap_or(path).split_once('/').unwrap_or_default();
    if service == "grpc.health.v1.Health" {
        return Need::of(OPEN);
    }
    match call {
        "ServerLive" | "ServerReady" => Need::of(OPEN),
        "ModelInfer" | "ModelStreamInfer" => Need::of(INFER),
        "RepositoryIndex" => Need::of(OVERVIEW),
        "RepositoryModelLoad" => Need::of(ADMIN).change("load"),
        // With the parameter atoll_delete it deletes a registered model; else it needs more.
        "RepositoryModelUnload" => Need::of(REGISTER).change("unload"),
        "ServerMetadata"
        | "ModelReady"
        | "ModelMetadata"
        | "ModelConfig"
        | "ModelStatistics"
        | "ServerReflectionInfo" => Need::of(ANY),
        _ => Need::of(ADMIN).change("other"),
    }
}

/// A path segment without percent-encoding, as the router decodes it.
pub(crate) fn decode(segment: &str) -> String {
    let (bytes, mut decoded) = (segment.as_bytes(), Vec::with_capacity(segment.len()));
    let hex = |at: usize| bytes.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    let mut at = 0;
    while at < bytes.len() {
        match (bytes[at], hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_needs_more_than_infer() {
        for (method, path) in [
            ("POST", "/register"),
            ("POST", "/v2/atoll/register"),
            ("POST", "/v2/repository/models/m/load"),
            ("POST", "/v2/repository/models/m/unload"),
            ("PUT", "/v2/atoll/queries/q"),
            ("DELETE", "/v2/atoll/queries/q"),
            ("DELETE", "/v2/atoll/models/m"),
            ("PATCH", "/v2/atoll/models/m"),
            ("POST", "/v2/atoll/models/m/rollback"),
            ("POST", "/v2/atoll/models/m/canary"),
            ("POST", "/v2/atoll/models/m/versions/2/canary"),
            ("POST", "/v2/atoll/models/m/canary/promote"),
            ("POST", "/v2/atoll/models/m/canary/abort"),
            ("POST", "/v2/logging"),
            ("POST", "/unknown"),
        ] {
            let need = rest(&method.parse().unwrap(), path);
            assert!(need.change.is_some() && !INFER.allows(need.scopes), "{path}: {need:?}");
        }
        for call in ["RepositoryModelLoad", "RepositoryModelUnload", "LogSettings", "New"] {
            let need = grpc(&format!("/inference.GRPCInferenceService/{call}"));
            assert!(need.change.is_some() && !INFER.allows(need.scopes), "{call}");
        }
    }

    #[test]
    fn only_health_and_the_console_are_open() {
        let get = |path: &str| rest(&Method::GET, path);
        assert!(get("/v2/health/live").scopes.is_empty());
        assert!(get("/v2/health/ready").scopes.is_empty());
        assert!(get("/").scopes.is_empty() && get("/console/app.js").scopes.is_empty());
        assert!(get("/docs").scopes.is_empty() && get("/openapi.json").scopes.is_empty());
        assert!(!rest(&Method::POST, "/").scopes.is_empty());
        assert!(!rest(&Method::POST, "/console/app.js").scopes.is_empty());
        for path in [
            "/v2",
            "/v2/",
            "/metrics",
            "/v2/models/m",
            "/x",
            "//",
            "/console/a/b",
            "/v2/atoll/status",
            "/v2/atoll/live",
            "/v2/atoll/trace",
            "/v2/atoll/trace/devices/0/requests/1",
            "/v2/atoll/cluster",
        ] {
            assert!(!get(path).scopes.is_empty(), "{path}");
        }
        assert!(grpc("/grpc.health.v1.Health/Check").scopes.is_empty());
        assert!(!grpc("/x.Health/ServerLiveX").scopes.is_empty());
        assert!(!grpc("").scopes.is_empty());
    }

    #[test]
    fn models_of_paths_are_decoded() {
        let post = |path: &str| rest(&Method::POST, path).model;
        assert_eq!(post("/v2/models/a%62c/infer").as_deref(), Some("abc"));
        assert_eq!(post("/v2/models/m/versions/1/infer").as_deref(), Some("m"));
        assert_eq!(post("/v2/repository/models/m%2/load").as_deref(), Some("m%2"));
        assert_eq!(rest(&Method::POST, "/v2/models/m/versions/1/infer").scopes, INFER);
    }
}
