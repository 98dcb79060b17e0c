"""The image's root file system, made without a container engine: the binary serves in it as the
image runs it, without rights and without a writable root."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import requests

from support import BINARY, REPOSITORY, SCRIPTS, Server, fp32_body, free_ports, infer_url

SCRIPT = SCRIPTS / "image_root.sh"
MODEL = "identity_fp32"
# Unpacked, without NVRTC; the Dockerfile says about 70.
MAX_MIB = 80


def may_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("dpkg-deb") is None:
        return False
    return subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"]).returncode == 0


needs_root = pytest.mark.skipif(not may_make_namespaces(), reason="needs root and Debian")


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def server_inside(launcher: int) -> int:
    """The process of the binary below the script."""
    for path in Path("/proc").glob("[0-9]*/exe"):
        try:
            if path.readlink().name == "atoll" and is_below(int(path.parent.name), launcher):
                return int(path.parent.name)
        except OSError:
            continue
    raise AssertionError("the server does not run")


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = int(status_of(pid)["PPid"])
    return pid == ancestor


@needs_root
def test_the_binary_serves_in_the_image(models: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = subprocess.run(
        [str(SCRIPT), "make", str(root), str(BINARY)], capture_output=True, text=True, check=False
    )
    if "apt-get" in made.stderr or made.returncode == 100:
        pytest.skip("Debian's packages cannot be downloaded")
    assert made.returncode == 0, made.stderr
    assert int(re.match(r"(\d+) MiB", made.stdout).group(1)) < MAX_MIB, made.stdout
    # Nothing but the binary can be executed.
    programs = [p for p in root.rglob("*") if p.is_file() and os.access(p, os.X_OK)]
    tools = [p for p in programs if ".so" not in p.name and p.name != "atoll"]
    assert not tools, tools
    target = root / "models" / MODEL / "1"
    target.mkdir(parents=True)
    shutil.copy(models / f"{MODEL}.onnx", target / "model.onnx")
    ports = free_ports(3)
    command = [str(SCRIPT), "run", str(root), "serve", "--model-repository", "/models"]
    command += ["--data-dir", "/data"]
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        command += [flag, str(port)]
    server = Server(ports, command, tmp_path / "log").start()
    try:
        assert requests.post(infer_url(server, MODEL), json=fp32_body(2.5)).status_code == 200
        # A registration writes to its volume, and its check makes a sandbox of its own.
        form = {"model": ("m.onnx", (models / "add_sub.onnx").read_bytes())}
        sent = requests.post(f"{server.url}/register", data={"name": "given"}, files=form)
        assert sent.status_code == 200, sent.text
        assert list((root / "data").rglob("*")), "nothing is stored"
        pid = server_inside(server.process.pid)
        status = status_of(pid)
        assert status["Uid"].split() == ["65532"] * 4
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
        (top,) = [line.split() for line in mounts if line.split()[1] == "/"]
        assert "ro" in top[3].split(","), top
        # An orderly end, as a container's stop is.
        os.kill(pid, 15)
        assert server.wait() == 0, server.log_tail()
    finally:
        server.stop()


def test_the_binary_needs_only_what_the_base_image_has() -> None:
    shown = subprocess.run(["ldd", str(BINARY)], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[0].split("/")[-1] for line in shown.splitlines()}
    base = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "linux-vdso.so.1"}
    assert {name for name in needed if not name.startswith("ld-linux")} <= base, needed


def test_the_bill_of_materials_matches_the_lock_file(tmp_path: Path) -> None:
    """Made by cargo xtask sbom: every component is a package of Cargo.lock with its hash."""
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    file = tmp_path / "atoll.cdx.json"
    made = subprocess.run(
        ["cargo", "run", "--quiet", "--release", "--package", "xtask", "--", "sbom", str(file)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    bill = json.loads(file.read_text())
    lock = (REPOSITORY / "Cargo.lock").read_text()
    packages = {}
    for block in lock.split("[[package]]")[1:]:
        fields = dict(re.findall(r'^(\w+) = "(.*)"$', block, re.MULTILINE))
        packages[fields["name"], fields["version"]] = fields.get("checksum")
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert len(bill["components"]) > 100
    for component in bill["components"]:
        checksum = packages[component["name"], component["version"]]
        hashes = [one["content"] for one in component.get("hashes", [])]
        assert hashes == ([checksum] if checksum else []), component["name"]
