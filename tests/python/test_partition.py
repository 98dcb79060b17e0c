"""A network partition under load. Needs permission to create network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from partition import WARNING

SCRIPT = Path(__file__).with_name("partition.py")


def namespaces() -> tuple[list[str], str]:
    """The command that creates a network namespace, or none and the reason why."""
    # Not on the PATH of ordinary users.
    os.environ["PATH"] += ":/sbin:/usr/sbin"
    missing = [tool for tool in ("unshare", "nsenter", "ip", "etcd") if shutil.which(tool) is None]
    if missing:
        return [], f"{', '.join(missing)} missing (Debian: util-linux, iproute2, etcd-server)"
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *user, "--net"]
    # A sandbox may allow the namespace and forbid devices in it.
    attempt = "ip link set lo up && ip link add near type veth peer name far"
    tried = subprocess.run(
        [*command, "sh", "-c", attempt], capture_output=True, text=True, check=False
    )
    return (
        (command, "")
        if tried.returncode == 0
        else ([], f"not allowed here: {tried.stderr.strip()}")
    )


def test_no_request_is_lost_when_a_backend_is_cut_off(tmp_path: Path) -> None:
    command, why = namespaces()
    if not command:
        warnings.warn(f"NOT TESTED: a partition made with network namespaces: {why}", stacklevel=1)
        pytest.skip(f"no network namespaces: {why}")
    script = [*command, sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    print(done.stdout)
    for line in done.stdout.splitlines():
        if line.startswith(WARNING):
            warnings.warn(f"{line}:\n{done.stdout}", stacklevel=1)
