"""A network partition under load, in namespaces of its own: as root, or as a user who may make them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from partition import DOUBT

SCRIPT = Path(__file__).with_name("partition.py")


def namespaces() -> tuple[list[str], str]:
    """The command that makes a network namespace, and why there is none where that is so."""
    # Where a plain user's shell does not look.
    os.environ["PATH"] += ":/sbin:/usr/sbin"
    missing = [tool for tool in ("unshare", "nsenter", "ip", "etcd") if shutil.which(tool) is None]
    if missing:
        return [], f"{', '.join(missing)} missing (Debian: util-linux, iproute2, etcd-server)"
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *user, "--net"]
    # Making one is not enough: a sandbox may forbid devices in it.
    attempt = "ip link set lo up && ip link add near type veth peer name far"
    tried = subprocess.run(
        [*command, "sh", "-c", attempt], capture_output=True, text=True, check=False
    )
    return (
        (command, "")
        if tried.returncode == 0
        else ([], f"not allowed here: {tried.stderr.strip()}")
    )


def test_a_backend_that_is_cut_off_costs_no_request(tmp_path: Path) -> None:
    command, why = namespaces()
    if not command:
        warnings.warn(f"NOT TESTED: a partition made with network namespaces: {why}", stacklevel=1)
        pytest.skip(f"no network namespaces: {why}")
    script = [*command, sys.executable, str(SCRIPT), str(tmp_path)]
    answer = subprocess.run(script, capture_output=True, text=True, check=False, timeout=1200)
    assert answer.returncode == 0, f"{answer.stdout[-6000:]}\n{answer.stderr[-3000:]}"
    print(answer.stdout)
    for line in answer.stdout.splitlines():
        if line.startswith(DOUBT):
            warnings.warn(f"{line}:\n{answer.stdout}", stacklevel=1)
