"""Two pools of backends under a real API server, from zero to three, to one and back to zero: the
scheduler starts them when requests wait and removes them when none come, and no request fails."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

import documents
from api_server import ApiServer
from cluster import Load
from nodes import Nodes
from support import CACHE, fp32_body, wait_for
from test_workloads import HEAVY, LIGHT, MODEL, PLANNING, work

LOG = Path(os.environ.get("ATOLL_KUBERNETES_ZERO_LOG", CACHE / "kubernetes" / "zero.txt"))
NAMESPACE = "zero"
# Three replicas need both pools.
POOLS = {"one": "min=0,max=2,price=1", "two": "min=0,max=3,price=2.5"}
TIMES = ["--copies=1", *PLANNING, "--scale-down-after-secs=8", "--scale-cooldown-secs=2"]
TIMES += ["--scale-to-zero-after-secs=5"]
LIMIT_SECONDS = 240
USER = "system:serviceaccount:zero:atoll-scheduler"


class Pools:
    """The manifests with two pools, applied and running."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.api = api
        api.namespace(NAMESPACE)
        self.nodes = Nodes(api, NAMESPACE, folder)
        found = documents.pools(api.store, NAMESPACE, POOLS, TIMES)
        api.kubectl("apply", "--server-side", "-f", "-", documents=found)

    def replicas(self, kind: str) -> int:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/atoll-backend-{kind}/scale"
        return self.api.call("GET", path)["spec"].get("replicas", 0)

    def total(self) -> int:
        return sum(self.replicas(kind) for kind in POOLS)

    def backends(self) -> int:
        """Pods of backends, also those that end."""
        label = "labelSelector=app.kubernetes.io/component=backend"
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?{label}"
        return len(self.api.call("GET", path)["items"])

    def settled(self, count: int) -> bool:
        ready = len(self.nodes.addresses_of("backend"))
        return self.total() == count == ready == self.backends()

    def wait(self, condition, what: str) -> float:
        began = time.monotonic()
        ended = lambda: condition() or self.nodes.has_crash_loop()  # noqa: E731
        assert wait_for(ended, LIMIT_SECONDS) and not self.nodes.has_crash_loop(), (
            f"never: {what}\n{self.report()}"
        )
        return round(time.monotonic() - began, 2)

    def url(self) -> str:
        """The service's: of a frontend that is ready."""
        (address,) = self.nodes.addresses_of("frontend")
        return f"http://{address}:8000"

    def metric(self, name: str) -> float:
        (address,) = self.nodes.addresses_of("frontend")
        text = requests.get(f"http://{address}:8002/metrics", timeout=30).text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))

    def report(self) -> str:
        events = "\n".join(json.dumps(event) for event in self.nodes.log[-60:])
        logs = "".join(self.nodes.text(name)[-5000:] for name in
                       ("atoll-scheduler", "atoll-frontend", "atoll-backend"))
        return f"{events}\n{self.nodes.errors[-5:]}\n{logs}"


@pytest.fixture
def pools(api: ApiServer, tmp_path: Path) -> Iterator[Pools]:
    running = Pools(api, tmp_path)
    try:
        yield running
    finally:
        running.nodes.stop()


def test_two_pools_go_from_zero_to_three_to_one_and_back(pools: Pools) -> None:
    frontend = lambda: len(pools.nodes.addresses_of("frontend")) == 1  # noqa: E731
    pools.wait(frontend, "a frontend without models is ready")
    # A Deployment without replicas starts with one; nobody needs them.
    pools.wait(lambda: pools.settled(0), "zero at first")
    # Through the service: a backend is started to check the model.
    form = {"name": (None, MODEL), "model": ("model.onnx", work())}
    reply = requests.post(f"{pools.url()}/register", files=form, timeout=LIMIT_SECONDS)
    assert reply.status_code == 200, f"{reply.text}\n{pools.report()}"
    pools.wait(lambda: pools.settled(0), "zero after the registration")
    assert frontend(), "frontends stay ready"
    began_events = len(pools.api.audit(NAMESPACE))
    pools.nodes.clear_log()
    began = time.time()
    frontends = {"f": SimpleNamespace(url=pools.url())}
    load = Load(SimpleNamespace(frontends=frontends), [MODEL], fp32_body(1.0), 2, HEAVY).start()
    steps = []
    try:
        for pause, count in ((HEAVY, 3), (LIGHT, 1)):
            load.pause = pause
            asked = pools.wait(lambda: pools.total() == count, f"{count} replicas")  # noqa: B023
            settled = pools.wait(lambda: pools.settled(count), f"{count} backends")  # noqa: B023
            steps.append((count, asked, round(asked + settled, 2), len(load.replies)))
            load.wait_more(20 if pause == HEAVY else 4)
    finally:
        load.stop()
    asked = pools.wait(lambda: pools.total() == 0, "no replicas")
    settled = pools.wait(lambda: pools.settled(0), "no backends")
    steps.append((0, asked, round(asked + settled, 2), len(load.replies)))
    assert frontend(), "frontends stay ready"
    write_log(pools, load, steps, began, began_events)
    assert load.lost == [] and load.mixed_up == [], pools.report()
    assert load.refused() == [], f"{load.refused()[:5]}\n{pools.report()}"
    changes = scale_changes(pools, began_events)
    totals = [sum(after.values()) for _, _, after in changes]
    assert max(totals) == 3 and totals[-1] == 0 and 1 in totals[totals.index(3):], changes
    assert all(user == USER for _, user, _ in changes), changes
    # Both pools took part, the dearer one went first, and what was removed had been emptied.
    assert any(after["two"] > 0 for _, _, after in changes), changes
    assert all(after["two"] == 0 for _, _, after in changes if sum(after.values()) == 1), changes
    removed = [event for event in pools.nodes.log if event["event"] == "pod deleted"]
    assert len(removed) == 3 and all(event["cost"] == "-1000" for event in removed), removed


def scale_changes(pools: Pools, first: int) -> list[tuple[str, str, dict[str, int]]]:
    """Changes of the scales as the API server logged them: when, who, and the replicas after."""
    replicas, found = dict.fromkeys(POOLS, 0), []
    for event in pools.api.audit(NAMESPACE)[first:]:
        reference = event["objectRef"]
        if reference.get("subresource") != "scale" or event["responseStatus"]["code"] != 200:
            continue
        kind = reference["name"].removeprefix("atoll-backend-")
        replicas[kind] = event["requestObject"]["spec"]["replicas"]
        found.append((event["stageTimestamp"], event["user"]["username"], dict(replicas)))
    return found


def write_log(pools: Pools, load: Load, steps: list, began: float, first: int) -> None:
    took = sorted(reply.took for reply in load.replies)
    lines = [f"{len(took)} requests, {len(load.refused())} refused, {len(load.lost)} lost"]
    lines += [f"the first reply came {load.replies[0].took:.2f} s after its request"]
    seconds = pools.metric("atoll_cluster_cold_start_seconds_sum")
    count = int(pools.metric("atoll_cluster_cold_start_seconds_count"))
    # A registration waits for a backend itself, and is no cold start of a request.
    lines += [f"the frontend measured {count} cold start(s) of {seconds:.2f} s in all"]
    lines += [f"median {took[len(took) // 2] * 1000:.1f} ms, longest {took[-1]:.2f} s", ""]
    for count, asked, settled, replies in steps:
        lines.append(f"{count} replicas: requested after {asked} s, all of them there (or gone) "
                     f"after {settled} s, {replies} replies until then")
    lines += ["", "Changes in the audit log of kube-apiserver (verb, object, replicas, status):"]
    for event in pools.api.audit(NAMESPACE)[first:]:
        reference = event["objectRef"]
        name = "/".join(filter(None, (reference["resource"], reference.get("name"),
                                      reference.get("subresource"))))
        spec = (event.get("requestObject") or {}).get("spec", {})
        wanted = f" replicas={spec['replicas']}" if "replicas" in spec else ""
        lines.append(f"{event['stageTimestamp']} {event['user']['username']} {event['verb']} "
                     f"{name}{wanted} {event['responseStatus']['code']}")
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text("\n".join(lines) + "\n")
    print(f"{time.time() - began:.0f} s; log: {LOG}")
