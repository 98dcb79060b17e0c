"""The part of a Kubernetes API server that scaling uses: the scale of one Deployment and its
pods."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

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
                self.send(*api.get(urlsplit(self.path).path))

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

    def get(self, path: str) -> tuple[int, dict]:
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
