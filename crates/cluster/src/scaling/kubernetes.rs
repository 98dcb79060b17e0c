//! A Deployment or StatefulSet of backends, through the Kubernetes API.
//!
//! Read and changed is its `scale`, and nothing else of it; a change carries the version that was read, so that of two who
//! want to change it one is told to look again. Which pods of a Deployment go is said by the annotation that Kubernetes has
//! for this; of a StatefulSet the last ones go, always.

use std::str::FromStr;

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::autoscaling::v1::Scale as ScaleObject;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, Config, Error, ResourceExt};
use serde_json::json;

use super::scaler::Removal;
use super::target::{Replica, Scale, Target, TargetError, TargetFuture};

/// Kubernetes removes pods with a lower cost first.
/// <https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost>
const COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The cost of those that are to go; others have none, which is 0.
const COST_FIRST: &str = "-1000";
/// Pods that one answer lists, and the most answers that are read.
const PAGE: u32 = 500;
const PAGES_MOST: usize = 64;

/// What kind of thing has replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Pods without an order.
    Deployment,
    /// Pods with numbers.
    StatefulSet,
}

/// The thing with replicas by its name on the command line: `deployment/NAME` or `statefulset/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadName {
    /// Its kind.
    pub workload: Workload,
    /// Its name.
    pub name: String,
}

impl FromStr for WorkloadName {
    type Err = String;

    fn from_str(text: &str) -> Result<WorkloadName, String> {
        let (kind, name) = text.split_once('/').unwrap_or(("", text));
        let workload = match kind {
            "deployment" | "deployments" | "deploy" => Workload::Deployment,
            "statefulset" | "statefulsets" | "sts" => Workload::StatefulSet,
            _ => return Err(format!("'{text}' is neither deployment/NAME nor statefulset/NAME")),
        };
        let plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
        match !name.is_empty() && name.len() <= 253 && name.bytes().all(plain) {
            true => Ok(WorkloadName { workload, name: name.to_string() }),
            false => {
                Err(format!("'{name}' is no name of a {kind}: it is made of a-z, 0-9, - and ."))
            }
        }
    }
}

/// One of them.
pub struct KubernetesTarget {
    client: Client,
    namespace: String,
    workload: WorkloadName,
}

impl KubernetesTarget {
    /// As the pod's service account says, or else the user's kubeconfig. Without a namespace it is the one these name.
    pub async fn connect(
        workload: WorkloadName,
        namespace: Option<String>,
    ) -> Result<KubernetesTarget, String> {
        let config = match Config::incluster() {
            Ok(config) => config,
            Err(inside) => Config::infer().await.map_err(|error| {
                format!(
                    "no way to the Kubernetes API: no service account is mounted ({inside}) and no kubeconfig helps ({error}); set automountServiceAccountToken, or KUBECONFIG"
                )
            })?,
        };
        KubernetesTarget::open(config, workload, namespace)
    }

    /// Through this configuration.
    pub fn open(
        mut config: Config,
        workload: WorkloadName,
        namespace: Option<String>,
    ) -> Result<KubernetesTarget, String> {
        crate::tls::choose();
        // Whoever drives this pauses between attempts, and knows what has changed meanwhile.
        config.default_retry = false;
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config)
            .map_err(|error| format!("no client for the Kubernetes API: {error}"))?;
        Ok(KubernetesTarget { client, namespace, workload })
    }

    async fn read_scale(&self) -> Result<ScaleObject, Error> {
        let (client, name) = (self.client.clone(), &self.workload.name);
        match self.workload.workload {
            Workload::Deployment => {
                Api::<Deployment>::namespaced(client, &self.namespace).get_scale(name).await
            }
            Workload::StatefulSet => {
                Api::<StatefulSet>::namespaced(client, &self.namespace).get_scale(name).await
            }
        }
    }

    async fn pods(&self, selector: &str) -> Result<Vec<Pod>, TargetError> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut pods = Vec::new();
        let mut params = ListParams::default().labels(selector).limit(PAGE);
        for _ in 0..PAGES_MOST {
            let page = api.list(&params).await.map_err(failure)?;
            pods.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(pods),
            }
        }
        Err(TargetError::Refused(format!("'{selector}' selects more pods than are read")))
    }
}

impl Target for KubernetesTarget {
    fn name(&self) -> String {
        let kind = match self.workload.workload {
            Workload::Deployment => "deployment",
            Workload::StatefulSet => "statefulset",
        };
        format!("{kind}/{}", self.workload.name)
    }

    fn removal(&self) -> Removal {
        match self.workload.workload {
            Workload::Deployment => Removal::Marked,
            Workload::StatefulSet => Removal::Ordinal,
        }
    }

    fn read(&self) -> TargetFuture<'_, Scale> {
        Box::pin(async move {
            let scale = self.read_scale().await.map_err(failure)?;
            let lacks = |what: &str| TargetError::Refused(format!("its scale has no {what}"));
            let version = scale.metadata.resource_version.ok_or_else(|| lacks("version"))?;
            let selector = scale.status.and_then(|status| status.selector);
            let selector = selector.filter(|selector| !selector.is_empty());
            let pods = self.pods(&selector.ok_or_else(|| lacks("selector"))?).await?;
            // Zero replicas are written as none.
            let replicas = scale.spec.and_then(|spec| spec.replicas).unwrap_or(0);
            Ok(Scale {
                replicas: u32::try_from(replicas).unwrap_or(0),
                version,
                members: pods.iter().filter(|pod| !is_over(pod)).map(replica).collect(),
            })
        })
    }

    fn write<'a>(&'a self, version: &'a str, replicas: u32) -> TargetFuture<'a, ()> {
        Box::pin(async move {
            let patch = Patch::Merge(json!({
                "metadata": { "resourceVersion": version },
                "spec": { "replicas": replicas },
            }));
            let params = manager();
            let (client, name) = (self.client.clone(), &self.workload.name);
            let done = match self.workload.workload {
                Workload::Deployment => {
                    let api = Api::<Deployment>::namespaced(client, &self.namespace);
                    api.patch_scale(name, &params, &patch).await
                }
                Workload::StatefulSet => {
                    let api = Api::<StatefulSet>::namespaced(client, &self.namespace);
                    api.patch_scale(name, &params, &patch).await
                }
            };
            done.map(|_| ()).map_err(failure)
        })
    }

    fn mark<'a>(&'a self, replica: &'a str, first: bool) -> TargetFuture<'a, ()> {
        Box::pin(async move {
            if self.removal() == Removal::Ordinal {
                return Ok(());
            }
            let cost = first.then_some(COST_FIRST);
            let patch = Patch::Merge(json!({ "metadata": { "annotations": { COST: cost } } }));
            let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
            match api.patch_metadata(replica, &manager(), &patch).await {
                Ok(_) => Ok(()),
                // It went by itself.
                Err(Error::Api(status)) if status.code == 404 => Ok(()),
                Err(error) => Err(failure(error)),
            }
        })
    }
}

fn manager() -> PatchParams {
    PatchParams { field_manager: Some("atoll".to_string()), ..PatchParams::default() }
}

/// Whether nothing runs in it any more, so that it is no replica of anybody's.
fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn replica(pod: &Pod) -> Replica {
    let name = pod.name_any();
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref());
    let ready = |condition: &k8s_openapi::api::core::v1::PodCondition| {
        condition.type_ == "Ready" && condition.status == "True"
    };
    let cost = pod.annotations().get(COST).and_then(|cost| cost.parse::<i64>().ok());
    Replica {
        ordinal: name.rsplit('-').next().and_then(|end| end.parse().ok()).unwrap_or(0),
        ready: conditions.unwrap_or_default().iter().any(ready),
        ending: pod.metadata.deletion_timestamp.is_some(),
        marked: cost.is_some_and(|cost| cost < 0),
        name,
    }
}

fn failure(error: Error) -> TargetError {
    let status = match error {
        Error::Api(status) => status,
        error @ (Error::HyperError(_) | Error::Service(_) | Error::Auth(_)) => {
            return TargetError::Unreachable(chain(&error));
        }
        error => return TargetError::Refused(chain(&error)),
    };
    let message = match status.message.is_empty() {
        true => format!("HTTP {}", status.code),
        false => status.message,
    };
    match status.code {
        401 | 403 => TargetError::Forbidden(message),
        404 => TargetError::NotFound(message),
        409 => TargetError::Conflict(message),
        429 | 500..=599 => TargetError::Unreachable(message),
        _ => TargetError::Refused(message),
    }
}

/// An error with its causes, which is where it gets interesting.
fn chain(error: &dyn std::error::Error) -> String {
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
    fn names_say_what_they_name() {
        let read = |text: &str| text.parse::<WorkloadName>();
        let name = |workload| WorkloadName { workload, name: "atoll-backend".to_string() };
        assert_eq!(read("deployment/atoll-backend"), Ok(name(Workload::Deployment)));
        assert_eq!(read("sts/atoll-backend"), Ok(name(Workload::StatefulSet)));
        for bad in ["atoll-backend", "job/x", "deployment/", "deployment/a b", "deployment/../x"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
