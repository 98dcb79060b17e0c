"""The part of a Kubernetes API server that scaling uses: the scale of a Deployment, or of several,
and their pods."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cluster import Process

COST = "controller.kubernetes.io/pod-deletion-cost"


class KubernetesApi:
    """Holds replicas and pods, and records writes. The test itself removes pods."""

    def __init__(self, replicas: int, pods: list[str]) -> None:
        self.replicas, self.version = replicas, 100
        self.pods: dict[str, dict[str, str]] = {name: {} for name in pods}
        self.writes: list[tuple[str, dict]] = []
        self.lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                address = urlsplit(self.path)
                self.send(*api.get(address.path, address.query))

            def do_PATCH(self) -> None:  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(*api.patch(urlsplit(self.path).path, body))

            def send(self, status: int, document: dict) -> None:
                content = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def kubeconfig(self, path: Path) -> Path:
        cluster = {"server": f"http://127.0.0.1:{self.server.server_address[1]}"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [
                {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "sea"}}
            ],
        }
        path.write_text(json.dumps(document))
        return path

    def get(self, path: str, query: str) -> tuple[int, dict]:
        with self.lock:
            if path == "/apis/apps/v1/namespaces/sea/deployments/reef/scale":
                return 200, self.scale()
            if path == "/api/v1/namespaces/sea/pods":
                items = [self.pod(name) for name in self.pods]
                return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        return 404, self.failure(404, "NotFound", path)

    def patch(self, path: str, body: dict) -> tuple[int, dict]:
        name = path.rsplit("/", 1)[-1]
        with self.lock:
            self.writes.append((path, body))
            if name == "scale":
                if body["metadata"]["resourceVersion"] != str(self.version):
                    return 409, self.failure(409, "Conflict", "the object has been modified")
                self.replicas, self.version = body["spec"]["replicas"], self.version + 1
                return 200, self.scale()
            if name in self.pods:
                changes = body["metadata"]["annotations"]
                kept = {**self.pods[name], **changes}
                self.pods[name] = {key: value for key, value in kept.items() if value is not None}
                meta = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
                return 200, {**meta, "metadata": self.pod(name)["metadata"]}
        return 404, self.failure(404, "NotFound", path)

    def scale(self) -> dict:
        metadata = {"name": "reef", "namespace": "sea", "resourceVersion": str(self.version)}
        status = {"replicas": len(self.pods), "selector": "app=reef"}
        kind = {"kind": "Scale", "apiVersion": "autoscaling/v1"}
        return {**kind, "metadata": metadata, "spec": {"replicas": self.replicas}, "status": status}

    def pod(self, name: str) -> dict:
        metadata = {
            "name": name,
            "namespace": "sea",
            "annotations": self.pods[name],
            "labels": {"app": "reef"},
        }
        ready = {"type": "Ready", "status": "True"}
        return {"metadata": metadata, "status": {"phase": "Running", "conditions": [ready]}}

    @staticmethod
    def failure(code: int, reason: str, message: str) -> dict:
        common = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**common, "message": message, "reason": reason, "code": code}

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass
class Pool:
    """A Deployment. Pods beyond its quota do not come."""

    quota: int
    replicas: int = 0
    version: int = 100
    made: int = 0
    pods: dict[str, dict[str, str]] = field(default_factory=dict)
    ending: dict[str, Process] = field(default_factory=dict)
    running: dict[str, Process] = field(default_factory=dict)


class KubernetesPools(KubernetesApi):
    """Several Deployments with a controller that runs their pods as processes of this machine:
    those that are marked go first."""

    def __init__(self, quotas: dict[str, int], start: Callable[[str, str], Process]) -> None:
        """`start(pool, pod)` starts a pod's process."""
        self.pools = {name: Pool(quota) for name, quota in quotas.items()}
        self.start_pod = start
        self.log: list[tuple[str, int]] = []
        self.stopping = threading.Event()
        super().__init__(0, [])
        self.controller = threading.Thread(target=self.control, daemon=True)
        self.controller.start()

    def pool_of(self, path: str) -> Pool | None:
        words = path.split("/")
        known = path.endswith("/scale") and words[:7][-1] == "deployments" and len(words) == 9
        return self.pools.get(words[-2]) if known else None

    def get(self, path: str, query: str) -> tuple[int, dict]:
        with self.lock:
            pool = self.pool_of(path)
            if pool is not None:
                return 200, self.scale_of(path.split("/")[-2], pool)
            if path == "/api/v1/namespaces/sea/pods":
                (selector,) = parse_qs(query)["labelSelector"]
                pool = self.pools[selector.removeprefix("app=")]
                items = [self.pod_of(pool, name) for name in [*pool.running, *pool.ending]]
                return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        return 404, self.failure(404, "NotFound", path)

    def patch(self, path: str, body: dict) -> tuple[int, dict]:
        with self.lock:
            self.writes.append((path, body))
            pool = self.pool_of(path)
            if pool is not None:
                if body["metadata"]["resourceVersion"] != str(pool.version):
                    return 409, self.failure(409, "Conflict", "the object has been modified")
                pool.replicas, pool.version = body["spec"]["replicas"], pool.version + 1
                self.log.append((path.split("/")[-2], pool.replicas))
                return 200, self.scale_of(path.split("/")[-2], pool)
            name = path.rsplit("/", 1)[-1]
            for pool in self.pools.values():
                if name in pool.running:
                    kept = {**pool.pods[name], **body["metadata"]["annotations"]}
                    pool.pods[name] = {k: value for k, value in kept.items() if value is not None}
                    meta = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
                    return 200, {**meta, "metadata": self.pod_of(pool, name)["metadata"]}
        return 404, self.failure(404, "NotFound", path)

    def scale_of(self, name: str, pool: Pool) -> dict:
        metadata = {"name": name, "namespace": "sea", "resourceVersion": str(pool.version)}
        status = {"replicas": len(pool.running), "selector": f"app={name}"}
        spec = {"replicas": pool.replicas} if pool.replicas else {}
        kind = {"kind": "Scale", "apiVersion": "autoscaling/v1"}
        return {**kind, "metadata": metadata, "spec": spec, "status": status}

    def pod_of(self, pool: Pool, name: str) -> dict:
        metadata = {"name": name, "namespace": "sea", "annotations": pool.pods[name]}
        if name in pool.ending:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        process = pool.running.get(name)
        truth = "True" if process is not None and " ready " in process.text() else "False"
        conditions = [{"type": "Ready", "status": truth}]
        return {"metadata": metadata, "status": {"phase": "Running", "conditions": conditions}}

    def control(self) -> None:
        while not self.stopping.wait(0.2):
            with self.lock:
                for name, pool in self.pools.items():
                    self.reconcile(name, pool)

    def reconcile(self, name: str, pool: Pool) -> None:
        while len(pool.running) < min(pool.replicas, pool.quota):
            pod = f"{name}-{pool.made}"
            pool.made += 1
            pool.pods[pod] = {}
            pool.running[pod] = self.start_pod(name, pod)
        while len(pool.running) > pool.replicas:
            pod = min(pool.running, key=lambda pod: int(pool.pods[pod].get(COST, "0")))
            pool.ending[pod] = pool.running.pop(pod)
            pool.ending[pod].process.send_signal(signal.SIGTERM)
        for pod in [pod for pod, own in pool.ending.items() if own.process.poll() is not None]:
            del pool.ending[pod]

    def stop(self) -> None:
        self.stopping.set()
        self.controller.join()
        super().stop()
