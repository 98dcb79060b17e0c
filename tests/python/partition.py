"""Cuts a backend off the network instead of killing it. test_partition.py runs this script in a
network namespace:

    unshare --net python partition.py FOLDER              (as root)
    unshare --map-root-user --net python partition.py FOLDER

The backend runs in a second namespace behind a pair of virtual Ethernet devices. The test takes one
of them down: connections are neither refused nor reset, packets just stop. Nothing outside the
namespaces changes, and everything ends with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cluster import SHORT_LEASE_MS, Cluster, Load
from support import ASSETS

HERE, THERE = "10.77.0.1", "10.77.0.2"
MODELS = [f"m{number}" for number in range(4)]
BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}
# The longest recovery on an idle machine: leases expire up to a second late.
RECOVERY_SECONDS = SHORT_LEASE_MS / 1000 + 4
# The test turns output lines with this prefix into warnings.
WARNING = "warning: "


def ip(*words: str, inside: tuple[str, ...] = ()) -> None:
    subprocess.run([*inside, "ip", *words], check=True)


def far_namespace() -> tuple[subprocess.Popen[bytes], tuple[str, ...]]:
    """A process that keeps a second namespace, connected to this one, and the command prefix that
    runs a program in it."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"])
    mine = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{holder.pid}/ns/net") == mine:
        time.sleep(0.01)
    inside = ("nsenter", "--target", str(holder.pid), "--net")
    ip("link", "set", "lo", "up")
    ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(holder.pid))
    ip("address", "add", f"{HERE}/24", "dev", "near")
    ip("link", "set", "near", "up")
    ip("address", "add", f"{THERE}/24", "dev", "far", inside=inside)
    ip("link", "set", "far", "up", inside=inside)
    ip("link", "set", "lo", "up", inside=inside)
    return holder, inside


def holds(status: dict, backend: str) -> bool:
    return any(backend in model["backends"] for model in status["models"])


def is_complete(status: dict) -> bool:
    return status["plan"]["backends"] == 3 and all(
        len(model["backends"]) >= 2 for model in status["models"]
    )


def run(folder: Path) -> str:
    holder, inside = far_namespace()
    models = folder / "models"
    models.mkdir()
    for name in MODELS:
        shutil.copy(ASSETS / "digits.onnx", models / f"{name}.onnx")
    cluster = Cluster(folder, models, host=HERE, lease_ms=SHORT_LEASE_MS)
    load = None
    try:
        cluster.scheduler("s1")
        cluster.backend("b1")
        cluster.backend("b2")
        # The other namespace has its own loopback: frontends reach this backend over the pair only.
        cluster.backend("far", "--host", THERE, "--insecure", inside=inside)
        cluster.frontend("f1")
        cluster.frontend("f2")
        cluster.wait_ready()
        cluster.wait_status(lambda status: is_complete(status) and holds(status, "far"))
        load = Load(cluster, MODELS, BODY, clients=6, pause=0.005).start()
        load.wait_more(100)
        cut = load.now()
        # Taking the far end down leaves this side unchanged, but no packet arrives.
        ip("link", "set", "far", "down", inside=inside)
        missed = cluster.wait_status(
            lambda status: not holds(status, "far") and len(status["models"]) == 4
        )
        load.wait_more(100)
        whole = load.now()
        ip("link", "set", "far", "up", inside=inside)
        back = cluster.wait_status(lambda status: is_complete(status) and holds(status, "far"))
        load.wait_more(100)
        load.stop()
        return evaluate(cluster, load, [(cut, missed), (whole, back)])
    except BaseException:
        print(cluster.logs())
        raise
    finally:
        if load is not None:
            load.stop()
        cluster.stop()
        holder.kill()


def evaluate(cluster: Cluster, load: Load, faults: list[tuple[float, float]]) -> str:
    slowest = max(reply.took for reply in load.replies)
    report = (
        f"{len(load.replies)} replies, {dict(load.codes())}, slowest {slowest:.2f} s; "
        f"missed after {faults[0][1]:.1f} s, back after {faults[1][1]:.1f} s; "
        f"refused {load.refused()[:10]}"
    )
    load.check(report)
    for anomaly in load.anomalies(faults, RECOVERY_SECONDS):
        print(f"{WARNING}{anomaly}")
    for name, process in cluster.processes.items():
        assert "panicked" not in process.text(), f"{name}\n{process.text()[-2000:]}"
    return report


if __name__ == "__main__":
    print(run(Path(sys.argv[1])))
