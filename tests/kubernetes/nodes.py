"""What a cluster has beside the API server, as small as the tests allow: the controllers of
Deployments, StatefulSets and disruption budgets, and a node whose kubelet runs pods as processes of
this machine.

A pod runs the arguments and variables of its container, as the API server has them. Its address is
one of the loopback network, so that every pod has the ports of its manifest. There are no images,
no cgroups and no network policies; probes come every half second, whatever their period is.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import requests

from api_server import MERGE, ApiError, ApiServer
from support import BINARY

COST = "controller.kubernetes.io/pod-deletion-cost"
HASH = "pod-template-hash"
NODE = "node-1"
POLICY = "/apis/policy/v1beta1"
PERIOD_SECONDS = 0.25
PROBE_SECONDS = 0.5
# Where the kubelet mounts the token of a pod's account.
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
# Mounts the account in a name space of its own, then becomes the program.
MOUNT = f'mount -t tmpfs tmpfs /run && mkdir -p {ACCOUNT} && cp "$0"/* {ACCOUNT} && exec "$@"'


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(stamp: str) -> float:
    at = datetime.datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    return (datetime.datetime.now(datetime.UTC) - at).total_seconds()


def is_ending(pod: dict) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def ready_since(pod: dict) -> str | None:
    """When the pod became ready, if it is."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            return condition["lastTransitionTime"]
    return None


def is_available(pod: dict, seconds: int) -> bool:
    since = ready_since(pod)
    return since is not None and seconds_since(since) >= seconds


class Container:
    """The process of a pod."""

    def __init__(self, pod: dict, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.command: list[str] = []
        self.environment: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts, self.ready, self.reported = -1, False, None
        self.killed_at: float | None = None
        self.name, self.uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self.probed_at, self.changed_at = 0.0, now()

    def start(self) -> None:
        self.restarts += 1
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.environment, cwd=self.folder
            )

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Nodes:
    """Controllers and kubelet of one namespace, in a thread."""

    def __init__(self, api: ApiServer, namespace: str, folder: Path) -> None:
        self.api, self.namespace, self.folder = api, namespace, folder
        self.containers: dict[str, Container] = {}
        self.log: list[dict] = []
        self.began = time.monotonic()
        self.stopping = threading.Event()
        self.errors: list[str] = []
        second = random.randint(2, 254)
        self.addresses = (
            f"127.{second}.{number // 250}.{number % 250 + 2}" for number in itertools.count()
        )
        self.create_node()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def create_node(self) -> None:
        metadata = {"name": NODE, "annotations": {"kwok.x-k8s.io/node": "fake"}}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        try:
            self.api.call("POST", "/api/v1/nodes", node)
        except ApiError as error:
            if error.code != 409:
                raise

    def run(self) -> None:
        while not self.stopping.wait(PERIOD_SECONDS):
            try:
                self.reconcile()
            except (ApiError, requests.RequestException) as error:
                # A conflict, or an API server that the test stopped: the next round sees it.
                self.errors.append(str(error))

    def reconcile(self) -> None:
        pods = self.list("/api/v1", "pods")
        for kind, control in (("deployments", self.deployment), ("statefulsets", self.stateful)):
            for workload in self.list("/apis/apps/v1", kind):
                uid = workload["metadata"]["uid"]
                own = [pod for pod in pods if self.owner(pod) == uid]
                control(workload, own)
        for budget in self.list(POLICY, "poddisruptionbudgets"):
            self.budget(budget, pods)
        for pod in pods:
            self.keep(pod)
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid in [uid for uid in self.containers if uid not in present]:
            self.end(self.containers.pop(uid))

    def path(self, group: str, *words: str) -> str:
        return "/".join([group, "namespaces", self.namespace, *words])

    def list(self, group: str, resource: str) -> list[dict]:
        return self.api.call("GET", self.path(group, resource))["items"]

    @staticmethod
    def owner(pod: dict) -> str | None:
        owners = pod["metadata"].get("ownerReferences", [])
        return owners[0]["uid"] if owners else None

    def note(self, event: str, **values: object) -> None:
        self.log.append({"at_s": round(time.monotonic() - self.began, 3), "event": event, **values})

    def clear_log(self) -> None:
        self.log, self.began = [], time.monotonic()

    # Controllers.

    def deployment(self, workload: dict, pods: list[dict]) -> None:
        spec = workload["spec"]
        wanted = spec["replicas"]
        digest = template_hash(spec)
        live = [pod for pod in pods if not is_ending(pod)]
        new = [pod for pod in live if pod["metadata"]["labels"].get(HASH) == digest]
        old = [pod for pod in live if pod["metadata"]["labels"].get(HASH) != digest]
        available = [pod for pod in live if is_available(pod, spec.get("minReadySeconds", 0))]
        rolling = spec["strategy"].get("rollingUpdate", {})
        surge = share(rolling.get("maxSurge", "25%"), wanted, math.ceil)
        missing = share(rolling.get("maxUnavailable", "25%"), wanted, math.floor)
        if surge == 0 and missing == 0:
            missing = 1
        for _ in range(min(wanted - len(new), wanted + surge - len(live)) if old else
                       wanted - len(new)):
            self.create(workload, digest, None)
        surplus = removal_order(new)[: max(0, len(new) - wanted)]
        if old:
            broken = [pod for pod in old if pod not in available]
            spare = len(available) - (wanted - missing)
            surplus += broken
            surplus += [pod for pod in removal_order(old) if pod in available][: max(0, spare)]
        for pod in surplus:
            self.delete(pod)
        status = {
            "observedGeneration": workload["metadata"]["generation"],
            "replicas": len(live),
            "updatedReplicas": len(new),
            "readyReplicas": sum(ready_since(pod) is not None for pod in live),
            "availableReplicas": len(available),
            "unavailableReplicas": max(0, wanted - len(available)),
        }
        self.report(workload, "deployments", status)

    def stateful(self, workload: dict, pods: list[dict]) -> None:
        spec = workload["spec"]
        wanted = spec["replicas"]
        names = {pod["metadata"]["name"]: pod for pod in pods}
        ordinal = lambda name: int(name.rsplit("-", 1)[1])  # noqa: E731
        for number in range(wanted):
            name = f"{workload['metadata']['name']}-{number}"
            if name not in names:
                self.create(workload, template_hash(spec), name)
                break
            if spec.get("podManagementPolicy") != "Parallel" and ready_since(names[name]) is None:
                break
        surplus = [name for name in names if ordinal(name) >= wanted]
        if surplus and not any(is_ending(pod) for pod in pods):
            self.delete(names[max(surplus, key=ordinal)])
        ready = sum(ready_since(pod) is not None for pod in pods)
        generation = workload["metadata"]["generation"]
        status = {"observedGeneration": generation, "replicas": len(pods), "readyReplicas": ready}
        self.report(workload, "statefulsets", status)

    def budget(self, budget: dict, pods: list[dict]) -> None:
        """Says how many pods may be evicted now; the API server refuses others."""
        labels = budget["spec"]["selector"]["matchLabels"]
        own = [pod for pod in pods if labels.items() <= pod["metadata"].get("labels", {}).items()]
        healthy = sum(ready_since(pod) is not None and not is_ending(pod) for pod in own)
        # Replicas that the workload wants, not pods that happen to exist.
        workloads = self.list("/apis/apps/v1", "deployments")
        expected = sum(
            workload["spec"]["replicas"]
            for workload in workloads
            if labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
        )
        spec = budget["spec"]
        least = spec.get("minAvailable", expected - spec.get("maxUnavailable", 0))
        status = {
            "observedGeneration": budget["metadata"]["generation"],
            "disruptionsAllowed": max(0, healthy - least),
            "currentHealthy": healthy,
            "desiredHealthy": least,
            "expectedPods": expected,
        }
        if any(budget.get("status", {}).get(key) != value for key, value in status.items()):
            name = budget["metadata"]["name"]
            path = self.path(POLICY, "poddisruptionbudgets", name, "status")
            self.api.call("PATCH", path, {"status": status}, MERGE)

    def report(self, workload: dict, resource: str, status: dict) -> None:
        before = workload.get("status", {})
        if any(before.get(key, 0) != value for key, value in status.items()):
            path = self.path("/apis/apps/v1", resource, workload["metadata"]["name"], "status")
            self.api.call("PATCH", path, {"status": status}, MERGE)
            if before.get("replicas", 0) != status["replicas"]:
                name = f"{resource[:-1]}/{workload['metadata']['name']}"
                counts = {"wanted": workload["spec"]["replicas"], "pods": status["replicas"]}
                self.note("replicas", workload=name, **counts)

    def create(self, workload: dict, digest: str, name: str | None) -> None:
        template = workload["spec"]["template"]
        metadata = {key: template["metadata"].get(key, {}) for key in ("labels", "annotations")}
        metadata["labels"] = {**metadata["labels"], HASH: digest}
        kind = workload.get("kind") or ("StatefulSet" if name else "Deployment")
        owner = {"apiVersion": "apps/v1", "kind": kind, "controller": True}
        owner |= {key: workload["metadata"][key] for key in ("name", "uid")}
        metadata["ownerReferences"] = [owner]
        letters = "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
        metadata["name"] = name or f"{workload['metadata']['name']}-{digest}-{letters}"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        self.api.call("POST", self.path("/api/v1", "pods"), pod)
        self.note("pod created", pod=metadata["name"])
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"apiVersion": "v1", "kind": "Binding", "target": target}
        binding["metadata"] = {"name": metadata["name"]}
        path = self.path("/api/v1", "pods", metadata["name"], "binding")
        self.api.call("POST", path, binding)

    def delete(self, pod: dict) -> None:
        cost = pod["metadata"].get("annotations", {}).get(COST)
        self.note("pod deleted", pod=pod["metadata"]["name"], cost=cost)
        # The grace period is the pod's own.
        self.api.call("DELETE", self.path("/api/v1", "pods", pod["metadata"]["name"]))

    # The kubelet.

    def keep(self, pod: dict) -> None:
        if pod["spec"].get("nodeName") != NODE:
            return
        uid = pod["metadata"]["uid"]
        container = self.containers.get(uid)
        if container is None and not is_ending(pod):
            container = self.containers[uid] = self.make(pod)
        if is_ending(pod):
            self.finish(pod, container)
            return
        if not container.is_alive():
            if container.restarts >= 0:
                self.note("container restarted", pod=container.name)
            container.start()
        if time.monotonic() - container.probed_at >= PROBE_SECONDS:
            self.probe(pod, container)

    def make(self, pod: dict) -> Container:
        spec = pod["spec"]["containers"][0]
        folder = self.folder / pod["metadata"]["name"]
        folder.mkdir()
        container = Container(pod, next(self.addresses), folder)
        mounts = self.mounts(pod, folder)

        def local(text: str) -> str:
            for mount, target in mounts.items():
                text = text.replace(mount, str(target))
            return text

        environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
        for source in spec.get("envFrom", []):
            path = self.path("/api/v1", "configmaps", source["configMapRef"]["name"])
            environment |= self.api.call("GET", path)["data"]
        for entry in spec.get("env", []):
            field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            fields = {"metadata.name": container.name, "status.podIP": container.address}
            environment[entry["name"]] = fields[field] if field else local(entry.get("value", ""))
        arguments = [local(word) for word in spec["args"]]
        # A pod has its own network; here it has an address.
        arguments = [word.replace("--host=0.0.0.0", f"--host={container.address}")
                     for word in arguments]
        container.command = [str(BINARY), *arguments]
        account = self.account(pod, folder)
        if account is not None:
            environment["KUBERNETES_SERVICE_HOST"] = "127.0.0.1"
            environment["KUBERNETES_SERVICE_PORT"] = str(self.api.port)
            user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
            enter = ["unshare", *user, "--mount", "sh", "-c", MOUNT, str(account)]
            container.command = [*enter, *container.command]
        container.environment = environment
        self.note("pod started", pod=container.name, address=container.address)
        return container

    def mounts(self, pod: dict, folder: Path) -> dict[str, Path]:
        """Folders of this machine by the paths at which the container has them."""
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        found = {}
        for mount in pod["spec"]["containers"][0].get("volumeMounts", []):
            claim = volumes[mount["name"]].get("persistentVolumeClaim")
            if "projected" in volumes[mount["name"]]:
                continue
            target = self.folder / claim["claimName"] if claim else folder / mount["name"]
            target.mkdir(exist_ok=True)
            found[mount["mountPath"]] = target
        return found

    def account(self, pod: dict, folder: Path) -> Path | None:
        """The folder of the pod's account, where admission gave the pod a volume for it."""
        volumes = pod["spec"].get("volumes", [])
        if not any("serviceAccountToken" in source for volume in volumes
                   for source in volume.get("projected", {}).get("sources", [])):
            return None
        target = folder / "account"
        target.mkdir()
        token = self.api.token(self.namespace, pod["spec"]["serviceAccountName"])
        (target / "token").write_text(token)
        (target / "namespace").write_text(self.namespace)
        (target / "ca.crt").write_bytes(self.api.authority.path.read_bytes())
        return target

    def probe(self, pod: dict, container: Container) -> None:
        container.probed_at = time.monotonic()
        spec = pod["spec"]["containers"][0]
        ready = self.passes(spec["readinessProbe"], spec, container)
        if ready == container.reported:
            return
        if ready != container.ready:
            container.ready, container.changed_at = ready, now()
        truth = "True" if ready else "False"
        kinds = {"Ready": truth, "ContainersReady": truth, "Initialized": "True"}
        conditions = [
            {"type": kind, "status": value, "lastTransitionTime": container.changed_at}
            for kind, value in {**kinds, "PodScheduled": "True"}.items()
        ]
        status = {"phase": "Running", "podIP": container.address, "hostIP": "127.0.0.1"}
        status |= {"conditions": conditions, "podIPs": [{"ip": container.address}]}
        path = self.path("/api/v1", "pods", container.name, "status")
        self.api.call("PATCH", path, {"status": status}, MERGE)
        container.reported = ready
        self.note("pod ready" if ready else "pod not ready", pod=container.name)

    def passes(self, probe: dict, spec: dict, container: Container) -> bool:
        if "exec" in probe:
            command = [str(BINARY), *probe["exec"]["command"][1:]]
            limit = 5 * probe.get("timeoutSeconds", 1)
            try:
                return subprocess.run(
                    command, env=container.environment, capture_output=True, timeout=limit
                ).returncode == 0
            except subprocess.TimeoutExpired:
                return False
        port = probe["httpGet"]["port"]
        ports = {port["name"]: port["containerPort"] for port in spec["ports"]}
        url = f"http://{container.address}:{ports.get(port, port)}{probe['httpGet']['path']}"
        try:
            return requests.get(url, timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def finish(self, pod: dict, container: Container | None) -> None:
        """SIGTERM, the grace period, SIGKILL; then the pod is gone."""
        if container is not None and container.is_alive():
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 30)
            if container.killed_at is None:
                container.killed_at = time.monotonic()
                container.process.send_signal(signal.SIGTERM)
                self.note("pod stopping", pod=container.name)
            elif time.monotonic() - container.killed_at > grace:
                self.note("pod killed", pod=container.name)
                container.process.kill()
            return
        if container is not None:
            took = time.monotonic() - (container.killed_at or time.monotonic())
            self.note("pod stopped", pod=container.name, seconds=round(took, 3))
            del self.containers[container.uid]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self.api.call("DELETE", self.path("/api/v1", "pods", pod["metadata"]["name"]), options)

    def has_crash_loop(self) -> bool:
        return any(container.restarts > 3 for container in list(self.containers.values()))

    def end(self, container: Container) -> None:
        if container.is_alive():
            container.process.kill()
            container.process.wait()

    def text(self, prefix: str) -> str:
        """The logs of all pods whose names begin so, also of those that are gone."""
        logs = sorted(self.folder.glob(f"{prefix}*/log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"--- {path.parent.name}\n{path.read_text('utf-8', 'replace')}"
                         for path in logs)

    def addresses_of(self, component: str) -> list[str]:
        """Addresses of the ready pods of a component: the endpoints of a service."""
        pods = self.list("/api/v1", "pods")
        label = "app.kubernetes.io/component"
        return [
            pod["status"]["podIP"]
            for pod in pods
            if pod["metadata"].get("labels", {}).get(label) == component
            and not is_ending(pod)
            and ready_since(pod) is not None
        ]

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join()
        for container in self.containers.values():
            if container.is_alive():
                container.process.terminate()
        for container in self.containers.values():
            if container.process is not None:
                try:
                    container.process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    self.end(container)


def template_hash(spec: dict) -> str:
    text = json.dumps(spec["template"], sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:10]


def share(value: int | str, whole: int, rounded) -> int:
    if isinstance(value, str):
        return int(rounded(whole * int(value.rstrip("%")) / 100))
    return value


def removal_order(pods: list[dict]) -> list[dict]:
    """The order in which a ReplicaSet removes pods: those that are not ready, then those of lower
    cost, then the newest."""

    def rank(pod: dict) -> tuple:
        cost = int(pod["metadata"].get("annotations", {}).get(COST, "0"))
        age = seconds_since(pod["metadata"]["creationTimestamp"])
        return (ready_since(pod) is not None, cost, age, pod["metadata"]["name"])

    return sorted(pods, key=rank)
