"""The Role of the manifests has what the scheduler needs, and nothing else; a change that lost a
race is made again."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

import documents
from api_server import ADMIN_TOKEN, MERGE, ApiServer
from cluster import Process
from nodes import COST
from support import BINARY, wait_for

MARKED = "marked-1"
ADVICE = "bind the scheduler's service account to a role"


def rules() -> list[dict]:
    role = documents.find(documents.load(documents.MANIFESTS), "Role", "atoll-scheduler")
    return role["rules"]


def verbs() -> list[tuple[int, str]]:
    return [(index, verb) for index, rule in enumerate(rules()) for verb in rule["verbs"]]


class Workload:
    """A Deployment of one replica in a namespace of its own, with a pod whose mark is to be
    cleared: the scheduler has to read the scale, list pods, change a pod and change the scale."""

    def __init__(self, api: ApiServer, namespace: str, role: list[dict], folder: Path) -> None:
        self.api, self.namespace, self.folder = api, namespace, folder
        api.namespace(namespace)
        found = documents.adapted(api.store, [])
        kinds = ("ServiceAccount", "Role", "RoleBinding")
        found = [d for d in found if d["kind"] in kinds] + [
            documents.find(found, "Deployment", "atoll-backend")
        ]
        for document in found:
            document["metadata"]["namespace"] = namespace
            for subject in document.get("subjects", []):
                subject["namespace"] = namespace
        documents.find(found, "Role", "atoll-scheduler")["rules"] = role
        deployment = found[-1]
        deployment["spec"]["replicas"] = 1
        template = deployment["spec"]["template"]
        metadata = {"name": MARKED, "labels": template["metadata"]["labels"]}
        metadata |= {"namespace": namespace, "annotations": {COST: "-1000"}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        api.kubectl("apply", "--server-side", "-f", "-", documents=[*found, pod])

    def scheduler(self, server: str = "") -> Process:
        """A scheduler that scales to two at once, with a token of its service account."""
        token = self.api.token(self.namespace, "atoll-scheduler")
        path = self.folder / f"{self.namespace}.kubeconfig"
        self.api.kubeconfig(path, token, self.namespace, server)
        command = [str(BINARY), "cluster", "scheduler", "--store", self.api.store]
        command += ["--cluster", self.namespace, "--name", self.namespace]
        command += ["--kubernetes-scale", "deployment/atoll-backend"]
        command += ["--replicas-min", "2", "--replicas-max", "4", "--scale-cooldown-secs", "1"]
        environment = {"KUBECONFIG": str(path), "PATH": os.environ["PATH"]}
        process = Process(["env", "-i", *(f"{k}={v}" for k, v in environment.items()), *command],
                          self.folder / f"{self.namespace}.log")
        return process.start()

    def path(self, *words: str) -> str:
        return "/".join(["/apis/apps/v1/namespaces", self.namespace, *words])

    def replicas(self) -> int:
        reply = self.api.call("GET", self.path("deployments", "atoll-backend", "scale"))
        return reply["spec"].get("replicas", 0)

    def is_marked(self) -> bool:
        pod = self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/pods/{MARKED}")
        return COST in pod["metadata"].get("annotations", {})

    def is_done(self) -> bool:
        return self.replicas() == 2 and not self.is_marked()


@pytest.fixture
def running() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()


def test_the_role_suffices(api: ApiServer, tmp_path: Path, running: list[Process]) -> None:
    workload = Workload(api, "role-whole", rules(), tmp_path)
    running.append(workload.scheduler())
    assert wait_for(workload.is_done), running[0].text()
    assert "scaling failed" not in running[0].text()
    # Nothing beyond: neither the workload itself nor another one, nor pods' creation or deletion.
    user = f"--as=system:serviceaccount:{workload.namespace}:atoll-scheduler"
    allowed = lambda *words: api.kubectl(  # noqa: E731
        "auth", "can-i", *words, "-n", workload.namespace, user, check=False
    ).splitlines()[-1]
    assert allowed("patch", "deployments/atoll-backend", "--subresource=scale") == "yes"
    refused = [("patch", "deployments/atoll-frontend", "--subresource=scale")]
    refused += [("patch", "deployments/atoll-backend"), ("delete", "pods"), ("create", "pods")]
    refused += [("update", "deployments/atoll-backend", "--subresource=scale")]
    refused += [("get", "secrets"), ("get", "pods"), ("watch", "pods")]
    for words in refused:
        assert allowed(*words) == "no", words


@pytest.mark.parametrize(("index", "verb"), verbs(), ids=lambda value: str(value))
def test_without_any_one_verb_scaling_fails(
    api: ApiServer, tmp_path: Path, running: list[Process], index: int, verb: str
) -> None:
    role = copy.deepcopy(rules())
    role[index]["verbs"].remove(verb)
    workload = Workload(api, f"role-{index}-{verb}", role, tmp_path)
    running.append(workload.scheduler())
    assert wait_for(lambda: "scaling failed" in running[0].text()), running[0].text()
    (line,) = [line for line in running[0].text().splitlines() if "scaling failed" in line]
    assert ADVICE in line and f'cannot {verb} resource' in line.replace("\\", ""), line
    assert not workload.is_done()
    # With the verb again it scales, without a restart.
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{workload.namespace}/roles/"
    api.call("PATCH", f"{path}atoll-scheduler", {"rules": rules()}, MERGE)
    assert wait_for(workload.is_done, 90), running[0].text()
    assert wait_for(lambda: "scaling recovered" in running[0].text()), running[0].text()


def test_a_change_that_lost_a_race_is_made_again(
    api: ApiServer, tmp_path: Path, running: list[Process]
) -> None:
    workload = Workload(api, "race", rules(), tmp_path)
    with interfering_proxy(workload) as (server, codes):
        running.append(workload.scheduler(server))
        assert wait_for(workload.is_done, 90), running[0].text()
        assert wait_for(lambda: "scaling recovered" in running[0].text()), running[0].text()
    assert codes == [409, 200]
    text = running[0].text()
    assert "changed concurrently" in text and "the object has been modified" in text, text


@contextmanager
def interfering_proxy(workload: Workload) -> Iterator[tuple[str, list[int]]]:
    """Passes calls on to the API server. Before the first change of the scale it changes the
    Deployment itself, as another client would between the scheduler's read and write."""
    api, codes = workload.api, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.forward("GET", None)

        def do_PATCH(self) -> None:  # noqa: N802
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not codes and "/scale" in self.path:
                note = {"metadata": {"annotations": {"changed": "meanwhile"}}}
                path = workload.path("deployments", "atoll-backend")
                requests.patch(api.url + path, json.dumps(note), headers={
                    "Content-Type": MERGE, "Authorization": f"Bearer {ADMIN_TOKEN}"
                }, verify=str(api.authority.path), timeout=30).raise_for_status()
            self.forward("PATCH", body)

        def forward(self, method: str, body: bytes | None) -> None:
            headers = {name: self.headers[name] for name in
                       ("Accept", "Authorization", "Content-Type") if name in self.headers}
            reply = requests.request(method, api.url + self.path, data=body, headers=headers,
                                     verify=str(api.authority.path), timeout=30)
            if method == "PATCH" and "/scale" in self.path:
                codes.append(reply.status_code)
            self.send_response(reply.status_code)
            self.send_header("Content-Type", reply.headers["Content-Type"])
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", codes
    server.shutdown()
    server.server_close()
