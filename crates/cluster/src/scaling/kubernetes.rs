//! A Deployment or StatefulSet of backends, scaled through the Kubernetes API.
//!
//! Only its `scale` sub-resource is read and changed. A change carries the version that was read,
//! so that of two concurrent writers one gets a conflict and reads again. The annotation for
//! deletion cost decides which pods of a Deployment are removed first; a StatefulSet always removes
//! the pods with the highest ordinals.

mod client;
mod config;
mod yaml;

use std::str::FromStr;

use serde_json::json;

use self::client::{KubernetesClient, Pod, PodCondition};
pub use self::config::ClientConfig;
use super::scaler::Removal;
use super::target::{Replica, Scale, ScaleError, ScaleFuture, ScaleTarget};

/// Annotation by which Kubernetes removes pods with a lower cost first.
/// <https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost>
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Cost of pods that are to be removed first; other pods have no annotation, which means 0.
const COST_FIRST: &str = "-1000";

/// Kind of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadKind {
    /// Its pods are interchangeable.
    Deployment,
    /// Its pods have ordinals.
    StatefulSet,
}

impl WorkloadKind {
    fn singular(self) -> &'static str {
        match self {
            WorkloadKind::Deployment => "deployment",
            WorkloadKind::StatefulSet => "statefulset",
        }
    }

    /// The name of its resource in the API.
    fn resource(self) -> &'static str {
        match self {
            WorkloadKind::Deployment => "deployments",
            WorkloadKind::StatefulSet => "statefulsets",
        }
    }
}

/// A workload as named on the command line: `deployment/NAME` or `statefulset/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadName {
    /// Its kind.
    pub kind: WorkloadKind,
    /// Its name.
    pub name: String,
}

impl FromStr for WorkloadName {
    type Err = String;

    fn from_str(text: &str) -> Result<WorkloadName, String> {
        let (prefix, name) = text.split_once('/').unwrap_or(("", text));
        let kind = match prefix {
            "deployment" | "deployments" | "deploy" => WorkloadKind::Deployment,
            "statefulset" | "statefulsets" | "sts" => WorkloadKind::StatefulSet,
            _ => return Err(format!("'{text}' is neither deployment/NAME nor statefulset/NAME")),
        };
        let plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
        match !name.is_empty() && name.len() <= 253 && name.bytes().all(plain) {
            true => Ok(WorkloadName { kind, name: name.to_string() }),
            false => Err(format!(
                "'{name}' is not the name of a {}: use a-z, 0-9, '-' and '.'",
                kind.singular()
            )),
        }
    }
}

/// A workload whose replicas the scheduler scales.
pub struct KubernetesTarget {
    client: KubernetesClient,
    workload: WorkloadName,
}

impl KubernetesTarget {
    /// Uses the pod's service account, or else the user's kubeconfig. Without a namespace it uses
    /// the one that these name.
    pub fn connect(
        workload: WorkloadName,
        namespace: Option<String>,
    ) -> Result<KubernetesTarget, String> {
        KubernetesTarget::open(ClientConfig::infer()?, workload, namespace)
    }

    /// Uses this configuration.
    pub fn open(
        config: ClientConfig,
        workload: WorkloadName,
        namespace: Option<String>,
    ) -> Result<KubernetesTarget, String> {
        Ok(KubernetesTarget { client: KubernetesClient::new(config, namespace)?, workload })
    }
}

impl ScaleTarget for KubernetesTarget {
    fn name(&self) -> String {
        format!("{}/{}", self.workload.kind.singular(), self.workload.name)
    }

    fn removal(&self) -> Removal {
        match self.workload.kind {
            WorkloadKind::Deployment => Removal::Marked,
            WorkloadKind::StatefulSet => Removal::Ordinal,
        }
    }

    fn read(&self) -> ScaleFuture<'_, Scale> {
        Box::pin(async move {
            let WorkloadName { kind, name } = &self.workload;
            let scale = self.client.scale(kind.resource(), name).await?;
            let lacks = |what: &str| ScaleError::Refused(format!("its scale has no {what}"));
            let version = scale.metadata.resource_version.ok_or_else(|| lacks("version"))?;
            let selector = scale.status.and_then(|status| status.selector);
            let selector = selector.filter(|selector| !selector.is_empty());
            let pods = self.client.pods(&selector.ok_or_else(|| lacks("selector"))?).await?;
            // The API omits the field when it is zero.
            let replicas = scale.spec.and_then(|spec| spec.replicas).unwrap_or(0);
            Ok(Scale {
                replicas: u32::try_from(replicas).unwrap_or(0),
                version,
                members: pods.iter().filter(|pod| !has_ended(pod)).map(replica).collect(),
            })
        })
    }

    fn write<'a>(&'a self, version: &'a str, replicas: u32) -> ScaleFuture<'a, ()> {
        Box::pin(async move {
            let WorkloadName { kind, name } = &self.workload;
            let patch = json!({
                "metadata": { "resourceVersion": version },
                "spec": { "replicas": replicas },
            });
            self.client.patch_scale(kind.resource(), name, &patch).await
        })
    }

    fn mark<'a>(&'a self, replica: &'a str, first: bool) -> ScaleFuture<'a, ()> {
        Box::pin(async move {
            if self.removal() == Removal::Ordinal {
                return Ok(());
            }
            let cost = first.then_some(COST_FIRST);
            let patch = json!({ "metadata": { "annotations": { DELETION_COST: cost } } });
            match self.client.patch_pod(replica, &patch).await {
                // The pod has been removed already.
                Err(ScaleError::NotFound(_)) => Ok(()),
                result => result,
            }
        })
    }
}

/// Whether nothing runs in the pod any more, so that it does not count as a replica.
fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn replica(pod: &Pod) -> Replica {
    let name = pod.metadata.name.clone();
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref());
    let ready = |condition: &PodCondition| condition.kind == "Ready" && condition.status == "True";
    let annotations = pod.metadata.annotations.as_ref();
    let cost = annotations.and_then(|annotations| annotations.get(DELETION_COST));
    let cost = cost.and_then(|cost| cost.parse::<i64>().ok());
    Replica {
        ordinal: name.rsplit('-').next().and_then(|end| end.parse().ok()).unwrap_or(0),
        ready: conditions.unwrap_or_default().iter().any(ready),
        ending: pod.metadata.deletion_timestamp.is_some(),
        marked: cost.is_some_and(|cost| cost < 0),
        unscheduled: conditions.unwrap_or_default().iter().find_map(unscheduled),
        name,
    }
}

/// Characters of the scheduler's message that are kept.
const MESSAGE_MAX: usize = 300;

/// Why a pod has no node, from a condition of it.
fn unscheduled(condition: &PodCondition) -> Option<String> {
    let is_it = condition.kind == "PodScheduled" && condition.status == "False";
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let message = condition.message.as_deref().or(condition.reason.as_deref());
    let message = message.unwrap_or("it is not scheduled");
    is_it.then(|| message.chars().take(MESSAGE_MAX).map(plain).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_workload_names() {
        let read = |text: &str| text.parse::<WorkloadName>();
        let name = |kind| WorkloadName { kind, name: "atoll-backend".to_string() };
        assert_eq!(read("deployment/atoll-backend"), Ok(name(WorkloadKind::Deployment)));
        assert_eq!(read("sts/atoll-backend"), Ok(name(WorkloadKind::StatefulSet)));
        for bad in ["atoll-backend", "job/x", "deployment/", "deployment/a b", "deployment/../x"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
