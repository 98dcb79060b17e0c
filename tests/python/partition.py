"""A backend is cut off from the rest by the network, not killed. Run by test_partition.py in a network namespace of its own:

    unshare --net python partition.py FOLDER              (as root)
    unshare --map-root-user --net python partition.py FOLDER

The backend lives in a second namespace behind a pair of virtual devices. One of them goes down: nothing is refused or reset,
packets only stop, which is what a partition is. Nothing outside the namespaces is touched, and all of it ends with them.
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
# What recovery takes at most where there is time to spare: leases end up to a second late.
RECOVERY_SECONDS = SHORT_LEASE_MS / 1000 + 4
# How a line begins that is to be a warning of the test.
DOUBT = "doubtful: "


def ip(*words: str, inside: tuple[str, ...] = ()) -> None:
    subprocess.run([*inside, "ip", *words], check=True)


def far_namespace() -> tuple[subprocess.Popen[bytes], tuple[str, ...]]:
    """A process that holds a second namespace, connected with this one, and the command to run something in it."""
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


def everybody(status: dict) -> bool:
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
        # In the other namespace this side's loopback does not exist: frontends reach it only over the pair.
        cluster.backend("far", "--host", THERE, inside=inside)
        cluster.frontend("f1")
        cluster.frontend("f2")
        cluster.wait_ready()
        cluster.wait_status(lambda status: everybody(status) and holds(status, "far"))
        load = Load(cluster, MODELS, BODY, clients=6, pause=0.005).start()
        load.wait_more(100)
        cut = load.now()
        # The far end: on this side everything stays as it was, but nothing comes through.
        ip("link", "set", "far", "down", inside=inside)
        missed = cluster.wait_status(
            lambda status: not holds(status, "far") and len(status["models"]) == 4
        )
        load.wait_more(100)
        whole = load.now()
        ip("link", "set", "far", "up", inside=inside)
        back = cluster.wait_status(lambda status: everybody(status) and holds(status, "far"))
        load.wait_more(100)
        load.stop()
        return judge(cluster, load, [(cut, missed), (whole, back)])
    except BaseException:
        print(cluster.logs())
        raise
    finally:
        if load is not None:
            load.stop()
        cluster.stop()
        holder.kill()


def judge(cluster: Cluster, load: Load, faults: list[tuple[float, float]]) -> str:
    slowest = max(answer.took for answer in load.answers)
    report = (
        f"{len(load.answers)} answers, {dict(load.codes())}, slowest {slowest:.2f} s; missed after {faults[0][1]:.1f} s, "
        f"back after {faults[1][1]:.1f} s; refused {load.refused()[:10]}"
    )
    load.check(report)
    for doubt in load.doubts(faults, RECOVERY_SECONDS):
        print(f"{DOUBT}{doubt}")
    for name, part in cluster.parts.items():
        assert "panicked" not in part.text(), f"{name}\n{part.text()[-2000:]}"
    return report


if __name__ == "__main__":
    print(run(Path(sys.argv[1])))
