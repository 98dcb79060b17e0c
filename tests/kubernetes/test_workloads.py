"""Atoll's manifests run under a real API server: its scheduler scales the backends with load, and
pods are deleted and replaced, without a failed request."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

import documents
from api_server import ApiError, ApiServer
from cluster import Load, Reply
from nodes import POLICY, Nodes, is_ending, ready_since
from support import BINARY, CACHE, LOST, PATIENCE_SECONDS, fp32_body, wait_for

LOG = Path(os.environ.get("ATOLL_KUBERNETES_LOG", CACHE / "kubernetes" / "scaling.json"))
NAMESPACE = "atoll"
MODEL = "work"
# The load is small, because two cores run everything; with this headroom it needs three backends.
PLANNING = ["--headroom=10", "--epoch-ms=5000", "--spacing-ms=2000"]
SCALING = ["--scale-down-after-secs=8", "--scale-cooldown-secs=2"]
ONE_TO_THREE = ["--copies=1", "--replicas-min=1", "--replicas-max=3", *PLANNING, *SCALING]
THREE = ["--copies=2", "--replicas-min=3", "--replicas-max=3", *PLANNING, *SCALING]
# Pauses of the two clients between requests: 2 and about 30 requests a second.
LIGHT, HEAVY = 1.0, 0.05
LIMIT_SECONDS = 150
# A pod that changed longer ago has nothing to do with a refusal.
QUIET_SECONDS = 5


def work() -> bytes:
    """A model of about 10 ms on one core."""
    from modelzoo import tiny

    return tiny.chain(side=256, steps=14).model.SerializeToString()


class Atoll:
    """The manifests, applied and running."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.api, self.folder = api, folder
        api.namespace(NAMESPACE)
        self.nodes = Nodes(api, NAMESPACE, folder)
        self.apply(ONE_TO_THREE)

    def apply(self, scheduler: list[str]) -> None:
        found = documents.adapted(self.api.store, scheduler)
        self.api.kubectl("apply", "--server-side", "-f", "-", documents=found)

    def pods(self, component: str) -> list[dict]:
        label = f"app.kubernetes.io/component={component}"
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={label}"
        return self.api.call("GET", path)["items"]

    def ready(self, component: str) -> list[str]:
        found = [pod for pod in self.pods(component) if ready_since(pod) and not is_ending(pod)]
        return [pod["metadata"]["name"] for pod in found]

    def replicas(self, name: str = "atoll-backend") -> int:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}/scale"
        return self.api.call("GET", path)["spec"].get("replicas", 0)

    def wait(self, condition, what: str) -> float:
        began = time.monotonic()
        ended = lambda: condition() or self.nodes.has_crash_loop()  # noqa: E731
        assert wait_for(ended, LIMIT_SECONDS) and not self.nodes.has_crash_loop(), (
            f"never: {what}\n{self.report()}"
        )
        return round(time.monotonic() - began, 2)

    def settled(self, count: int) -> bool:
        """Whether there are this many backends, all ready, and none that still ends."""
        return self.replicas() == count == len(self.ready("backend")) == len(self.pods("backend"))

    def evict(self, pod: str) -> int:
        """Evicts a pod, as a drain of its node does; returns the status of the API server."""
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        try:
            return self.api.call("POST", path, body, raw=True).status_code
        except ApiError as error:
            return error.code

    def evictions_allowed(self) -> int:
        path = f"{POLICY}/namespaces/{NAMESPACE}/poddisruptionbudgets/atoll-backend"
        return self.api.call("GET", path)["status"]["disruptionsAllowed"]

    def url(self) -> str:
        (address,) = self.nodes.addresses_of("frontend")
        return f"http://{address}:8000"

    def load(self) -> Load:
        frontends = {"f": SimpleNamespace(url=self.url())}
        body = fp32_body(1.0)
        return Load(SimpleNamespace(frontends=frontends), [MODEL], body, 2, LIGHT).start()

    def leader(self) -> str:
        """The scheduler pod that leads, by its own log."""
        lines = {}
        for name in self.ready("scheduler"):
            text = (self.folder / name / "log").read_text()
            lines[name] = max((line for line in text.splitlines() if "leadership" in line),
                              default="")
        return next((name for name, line in lines.items() if "acquired" in line), "")

    def report(self) -> str:
        events = "\n".join(json.dumps(event) for event in self.nodes.log[-60:])
        logs = "".join(self.nodes.text(name)[-5000:] for name in
                       ("atoll-scheduler", "atoll-frontend", "atoll-backend"))
        return f"{events}\n{self.nodes.errors[-5:]}\n{logs}"


@pytest.fixture(scope="module")
def atoll(api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atoll]:
    running = Atoll(api, tmp_path_factory.mktemp("nodes"))
    try:
        running.wait(lambda: len(running.ready("scheduler")) == 2, "schedulers are ready")
        running.wait(lambda: running.settled(1), "one backend")
        # Without models; so the first one can be registered through the service.
        running.wait(lambda: len(running.ready("frontend")) == 1, "the frontend is ready")
        register(running)
        yield running
    finally:
        running.nodes.stop()


def register(atoll: Atoll) -> None:
    form = {"name": (None, MODEL), "model": ("model.onnx", work())}

    def is_registered() -> bool:
        try:
            url = f"{atoll.url()}/register"
            return requests.post(url, files=form, timeout=PATIENCE_SECONDS).status_code == 200
        except requests.ConnectionError:
            return False

    atoll.wait(is_registered, "the model is registered")


def finish(atoll: Atoll, load: Load, clock: Clock, name: str, steps: list[dict]) -> None:
    """Ends the load, writes the log and asserts that no request failed by what the test did."""
    load.stop()
    took = sorted(reply.took for reply in load.replies)
    failed = [reply for reply in load.refused() if not is_unrelated(atoll, reply)]
    unrelated = [reply for reply in load.refused() if reply not in failed]
    entry = {
        "requests": len(took),
        "failed": len(failed) + len(load.lost) + len(load.mixed_up),
        "refused_while_no_pod_changed": len(unrelated),
        "refusals": [{**reply._asdict(), "pause_s": clock.longest(reply)} for reply in
                     load.refused()],
        "median_ms": round(took[len(took) // 2] * 1000, 1),
        "max_ms": round(took[-1] * 1000, 1),
        "steps": steps,
        "events": atoll.nodes.log,
    }
    LOG.parent.mkdir(parents=True, exist_ok=True)
    written = json.loads(LOG.read_text()) if LOG.exists() else {}
    LOG.write_text(json.dumps({**written, name: entry}, indent=1) + "\n")
    if unrelated:
        warnings.warn(f"refused while no pod changed: {entry['refusals']}", stacklevel=1)
    assert load.lost == [] and load.mixed_up == [], atoll.report()
    assert failed == [], f"{failed[:5]}\n{atoll.report()}"


def is_unrelated(atoll: Atoll, reply: Reply) -> bool:
    """Whether a backend counted as lost although no pod, of any role, had changed for seconds.
    Nothing that the test did explains that; a machine that is too busy may. Such refusals are
    warnings and stay in the log, with the longest pause of the test's own clock meanwhile."""
    first, last = reply.at - QUIET_SECONDS, reply.at + reply.took
    changed = any(first <= event["at_s"] <= last for event in atoll.nodes.log)
    return LOST in reply.error and not changed


class Clock:
    """Notes when this process itself did not run: pauses of a thread that only sleeps."""

    def __init__(self, load: Load) -> None:
        self.load, self.pauses = load, []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while not self.load.stopping.is_set():
            before = self.load.now()
            time.sleep(0.02)
            self.pauses.append((before, self.load.now() - before))

    def longest(self, reply: Reply) -> float:
        during = [took for at, took in self.pauses if reply.at - 1 <= at <= reply.at + reply.took]
        return round(max(during, default=0.0), 3)


def test_scales_with_load_without_a_failed_request(atoll: Atoll) -> None:
    load, steps = atoll.load(), []
    clock = Clock(load)
    atoll.nodes.clear_log()
    try:
        for pause, count in ((HEAVY, 3), (LIGHT, 1)):
            load.pause = pause
            asked = atoll.wait(lambda: atoll.replicas() == count, f"{count} replicas")  # noqa: B023
            settled = atoll.wait(lambda: atoll.settled(count), f"{count} backends")  # noqa: B023
            step = {"replicas": count, "asked_after_s": asked, "requests": len(load.replies)}
            steps.append({**step, "settled_after_s": round(asked + settled, 2)})
            load.wait_more(20 if pause == HEAVY else 4)
    finally:
        finish(atoll, load, clock, "one to three to one", steps)
    # What was removed had been marked by the scheduler, so that it was an emptied one.
    removed = [event for event in atoll.nodes.log if event["event"] == "pod deleted"]
    assert len(removed) == 2 and all(event["cost"] == "-1000" for event in removed), removed


def test_pods_are_deleted_and_replaced_without_a_failed_request(atoll: Atoll) -> None:
    kubectl = lambda *words: atoll.api.kubectl("-n", NAMESPACE, *words)  # noqa: E731
    both = lambda: len(holders(atoll)) >= 2  # noqa: E731
    # Two copies of the model, on three backends.
    atoll.apply(THREE)
    kubectl("rollout", "status", "deployment/atoll-scheduler", "--timeout=180s")
    atoll.wait(lambda: atoll.settled(3) and both(), "three backends and two copies")
    load, steps = atoll.load(), []
    clock = Clock(load)
    load.pause = 0.1
    atoll.nodes.clear_log()

    def step(what: str, seconds: float) -> None:
        steps.append({"what": what, "seconds": seconds, "requests": len(load.replies)})
        load.wait_more(10)

    def roll_out(name: str, count: int) -> None:
        began = time.monotonic()
        names = lambda: {pod["metadata"]["name"] for pod in atoll.pods(name)}  # noqa: E731
        before = names()
        kubectl("rollout", "restart", f"deployment/atoll-{name}")
        kubectl("rollout", "status", f"deployment/atoll-{name}", "--timeout=180s")
        replaced = lambda: not before & names() and len(names()) == count  # noqa: E731
        atoll.wait(replaced, f"a rollout of {name}")
        step(f"roll out {name}", round(time.monotonic() - began, 2))

    try:
        load.wait_more(10)
        victim = holders(atoll)[0]
        kubectl("delete", "pod", victim, "--wait=false")
        gone = lambda: victim not in holders(atoll) and both()  # noqa: E731
        step("delete backend", atoll.wait(lambda: gone() and atoll.settled(3), "a new backend"))
        # The budget of the manifests allows one at a time; the API server refuses the second.
        first, second = atoll.ready("backend")[:2]
        atoll.wait(lambda: atoll.evictions_allowed() == 1, "an eviction is allowed")
        assert (atoll.evict(first), atoll.evict(second)) == (201, 429)
        gone = lambda: first not in holders(atoll) and both()  # noqa: E731
        step("evict backend", atoll.wait(lambda: gone() and atoll.settled(3), "a new backend"))
        leader = atoll.leader()
        kubectl("delete", "pod", leader, "--wait=false")
        led = lambda: atoll.leader() not in ("", leader)  # noqa: E731
        step("delete leader", atoll.wait(led, "a new leader"))
        roll_out("scheduler", 2)
        roll_out("backend", 3)
        atoll.wait(lambda: atoll.settled(3) and both(), "two copies")
    finally:
        finish(atoll, load, clock, "pods deleted and replaced", steps)


def test_a_stateful_set_loses_its_highest_ordinal(api: ApiServer, tmp_path: Path) -> None:
    namespace = "stateful"
    api.namespace(namespace)
    found = documents.stateful(api.store, namespace)
    set_of = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/atoll-backend/scale"
    nodes = Nodes(api, namespace, tmp_path)
    names = lambda: sorted(container.name for container in nodes.containers.values())  # noqa: E731
    backends = lambda: [name for name in names() if "backend" in name]  # noqa: E731
    try:
        api.kubectl("apply", "--server-side", "-f", "-", documents=found)
        both = ["atoll-backend-0", "atoll-backend-1"]
        report = lambda: f"{names()}\n{nodes.log}\n{nodes.errors}\n{nodes.text('')}"  # noqa: E731
        assert wait_for(lambda: backends() == both, LIMIT_SECONDS), report()
        # The scheduler may have one replica at most, so it drains the second and removes it.
        reduced = lambda: api.call("GET", set_of)["spec"].get("replicas") == 1  # noqa: E731
        assert wait_for(reduced, LIMIT_SECONDS), report()
        assert wait_for(lambda: backends() == both[:1], LIMIT_SECONDS), report()
    finally:
        nodes.stop()


def holders(atoll: Atoll) -> list[str]:
    """Ready backends that serve the model, by the status of the cluster."""
    command = [str(BINARY), "cluster", "status", "--store", atoll.api.store, "--json"]
    reply = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_SECONDS)
    models = json.loads(reply.stdout)["models"] if reply.stdout else []
    names = [name for model in models if model["name"] == MODEL for name in model["backends"]]
    return sorted(set(names) & set(atoll.ready("backend")))
