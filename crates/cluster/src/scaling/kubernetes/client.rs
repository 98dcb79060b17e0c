//! A client for the few calls of the Kubernetes API that scaling needs.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Certificate, Client, Identity, Method, Response, StatusCode, Url, redirect};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::config::{BearerToken, ClientConfig};
use crate::scaling::target::ScaleError;

/// Pods per page of a list, and the maximum number of pages.
const PAGE_SIZE: u32 = 500;
const PAGES_MAX: usize = 64;
/// Time limits of a connection and of a call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Owner of the fields that patches change.
const FIELD_MANAGER: &str = "atoll";
const JSON: &str = "application/json";
const MERGE_PATCH: &str = "application/merge-patch+json";
/// Asks for an object's metadata instead of all of it.
const ONLY_METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
/// Characters of a reply that is not from Kubernetes which an error message shows.
const EXCERPT_MAX: usize = 200;

/// The `scale` sub-resource of a workload (`autoscaling/v1`).
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ScaleObject {
    pub(super) metadata: ScaleMetadata,
    pub(super) spec: Option<ScaleSpec>,
    pub(super) status: Option<ScaleStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ScaleMetadata {
    pub(super) resource_version: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ScaleSpec {
    pub(super) replicas: Option<i32>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ScaleStatus {
    pub(super) selector: Option<String>,
}

/// A pod, as far as scaling reads it.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: PodMetadata,
    pub(super) status: Option<PodStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodMetadata {
    pub(super) name: String,
    pub(super) annotations: Option<BTreeMap<String, String>>,
    pub(super) deletion_timestamp: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct PodStatus {
    pub(super) phase: Option<String>,
    pub(super) conditions: Option<Vec<PodCondition>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct PodCondition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) reason: Option<String>,
    pub(super) message: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PodList {
    metadata: ListMetadata,
    items: Option<Vec<Pod>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListMetadata {
    #[serde(rename = "continue")]
    next: Option<String>,
}

/// The body of a failure (`meta/v1 Status`).
#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusObject {
    message: Option<String>,
    reason: Option<String>,
}

/// Calls within one namespace.
pub(super) struct KubernetesClient {
    http: Client,
    server: Url,
    token: BearerToken,
    namespace: String,
}

impl KubernetesClient {
    pub(super) fn new(
        config: ClientConfig,
        namespace: Option<String>,
    ) -> Result<KubernetesClient, String> {
        crate::tls::choose();
        let fail = |what: &str, error: reqwest::Error| format!("{what}: {}", with_causes(&error));
        // The caller retries after a pause, with what has changed by then.
        let mut builder = Client::builder()
            .user_agent(concat!("atoll/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(CALL_TIMEOUT)
            .redirect(redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy();
        if let Some(pem) = &config.roots {
            let roots = Certificate::from_pem_bundle(pem);
            let roots = roots.map_err(|error| fail("certificate authority", error))?;
            if roots.is_empty() {
                return Err("certificate authority: there is no certificate in it".to_string());
            }
            builder = builder.tls_certs_only(roots);
        }
        if let Some(pem) = &config.identity {
            let identity = Identity::from_pem(pem);
            builder = builder.identity(identity.map_err(|e| fail("client certificate", e))?);
        }
        if config.insecure {
            builder = builder.tls_danger_accept_invalid_certs(true);
        }
        Ok(KubernetesClient {
            http: builder.build().map_err(|error| fail("Kubernetes client", error))?,
            server: config.server,
            token: config.token,
            namespace: namespace.unwrap_or(config.namespace),
        })
    }

    /// The scale of a workload; `resource` is its plural, such as `deployments`.
    pub(super) async fn scale(
        &self,
        resource: &str,
        name: &str,
    ) -> Result<ScaleObject, ScaleError> {
        let url = self.scale_url(resource, name);
        decode(self.call(Method::GET, url, JSON, None).await?).await
    }

    /// Changes the scale of a workload by a merge patch.
    pub(super) async fn patch_scale(
        &self,
        resource: &str,
        name: &str,
        patch: &Value,
    ) -> Result<(), ScaleError> {
        let url = with_field_manager(self.scale_url(resource, name));
        self.call(Method::PATCH, url, JSON, Some(patch)).await.map(|_| ())
    }

    /// The pods that `selector` selects.
    pub(super) async fn pods(&self, selector: &str) -> Result<Vec<Pod>, ScaleError> {
        let mut pods = Vec::new();
        let mut next: Option<String> = None;
        for _ in 0..PAGES_MAX {
            let mut url = self.url(&["api", "v1"], &["pods"]);
            url.query_pairs_mut()
                .append_pair("labelSelector", selector)
                .append_pair("limit", &PAGE_SIZE.to_string());
            if let Some(token) = &next {
                url.query_pairs_mut().append_pair("continue", token);
            }
            let page: PodList = decode(self.call(Method::GET, url, JSON, None).await?).await?;
            pods.extend(page.items.unwrap_or_default());
            next = page.metadata.next.filter(|token| !token.is_empty());
            if next.is_none() {
                return Ok(pods);
            }
        }
        let limit = PAGES_MAX * PAGE_SIZE as usize;
        Err(ScaleError::Refused(format!("'{selector}' selects more than {limit} pods")))
    }

    /// Changes the metadata of a pod by a merge patch.
    pub(super) async fn patch_pod(&self, name: &str, patch: &Value) -> Result<(), ScaleError> {
        let url = with_field_manager(self.url(&["api", "v1"], &["pods", name]));
        self.call(Method::PATCH, url, ONLY_METADATA, Some(patch)).await.map(|_| ())
    }

    fn scale_url(&self, resource: &str, name: &str) -> Url {
        self.url(&["apis", "apps", "v1"], &[resource, name, "scale"])
    }

    /// A path of an API group within the namespace.
    fn url(&self, group: &[&str], path: &[&str]) -> Url {
        let mut url = self.server.clone();
        // An http address always has path segments.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(group).push("namespaces").push(&self.namespace);
            segments.extend(path);
        }
        url
    }

    async fn call(
        &self,
        method: Method,
        url: Url,
        accept: &'static str,
        patch: Option<&Value>,
    ) -> Result<Response, ScaleError> {
        let mut request = self.http.request(method, url).header(ACCEPT, accept);
        if let Some(value) = self.authorization().await? {
            request = request.header(AUTHORIZATION, value);
        }
        if let Some(patch) = patch {
            request = request.header(CONTENT_TYPE, MERGE_PATCH).body(patch.to_string());
        }
        let response = request.send().await.map_err(|error| unreachable(&error))?;
        match response.status().is_success() {
            true => Ok(response),
            false => Err(failure(response).await),
        }
    }

    async fn authorization(&self) -> Result<Option<HeaderValue>, ScaleError> {
        let token = match &self.token {
            BearerToken::None => return Ok(None),
            BearerToken::Fixed(token) => token.clone(),
            BearerToken::File(path) => tokio::fs::read_to_string(path).await.map_err(|error| {
                ScaleError::Unreachable(format!("token {}: {error}", path.display()))
            })?,
        };
        let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
            .map_err(|_| ScaleError::Forbidden("the token is not a header value".to_string()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

fn with_field_manager(mut url: Url) -> Url {
    url.query_pairs_mut().append_pair("fieldManager", FIELD_MANAGER);
    url
}

async fn decode<T: DeserializeOwned>(response: Response) -> Result<T, ScaleError> {
    let body = response.bytes().await.map_err(|error| unreachable(&error))?;
    serde_json::from_slice(&body)
        .map_err(|error| ScaleError::Refused(format!("unexpected reply: {error}")))
}

fn unreachable(error: &reqwest::Error) -> ScaleError {
    ScaleError::Unreachable(with_causes(error))
}

async fn failure(response: Response) -> ScaleError {
    let code = response.status();
    let body = response.bytes().await.unwrap_or_default();
    let message = failure_message(code, &body);
    match code.as_u16() {
        401 | 403 => ScaleError::Forbidden(message),
        404 => ScaleError::NotFound(message),
        409 => ScaleError::Conflict(message),
        429 | 500..=599 => ScaleError::Unreachable(message),
        _ => ScaleError::Refused(message),
    }
}

fn failure_message(code: StatusCode, body: &[u8]) -> String {
    let status = match serde_json::from_slice::<StatusObject>(body) {
        Ok(status) => status,
        // A proxy replied, not the API server.
        Err(_) => {
            let text = String::from_utf8_lossy(body);
            let excerpt: String = text.trim().chars().take(EXCERPT_MAX).collect();
            StatusObject { message: Some(excerpt), reason: None }
        }
    };
    let code = match status.reason.filter(|reason| !reason.is_empty()) {
        Some(reason) => format!("HTTP {} {reason}", code.as_u16()),
        None => format!("HTTP {}", code.as_u16()),
    };
    match status.message.filter(|message| !message.is_empty()) {
        Some(message) => format!("{message} ({code})"),
        None => code,
    }
}

/// An error with its causes, which say more than the error itself.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let next = inner.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_carry_message_reason_and_code() {
        let message = |code: u16, body: &str| {
            failure_message(StatusCode::from_u16(code).unwrap(), body.as_bytes())
        };
        let body = r#"{"kind": "Status", "message": "no pods", "reason": "NotFound", "code": 404}"#;
        assert_eq!(message(404, body), "no pods (HTTP 404 NotFound)");
        assert_eq!(message(503, " upstream error\n"), "upstream error (HTTP 503)");
        assert_eq!(message(500, "{}"), "HTTP 500");
    }
}
