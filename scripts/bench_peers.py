#!/usr/bin/env python3
"""Measure server overhead: a one-float identity model on atoll, Triton and mosec, on loopback.

One client (wrk, one thread) sends the same JSON body to every server, at each concurrency, in
interleaved rounds, so that noise affects all servers alike. Prints medians over the rounds. All
servers run all the time, and one at a time is under load.

Triton 2.51 comes from PyPI's nvidia-pytriton (python backend), mosec from PyPI; both are installed
into .venv-peers on first use. wrk is Debian's package.

    python scripts/bench_peers.py                      # all three
    python scripts/bench_peers.py --servers triton,mosec --rounds 3 --seconds 2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VENV = REPOSITORY / ".venv-peers"
# The python backend of Triton 2.51 misreads arrays of numpy 2; onnx is for scripts/models.py.
PACKAGES = ["mosec==0.9.8", "numpy==1.26.4", "onnx==1.17.0"]
# Running the bundled server does not need the requirements of pytriton.
PACKAGES_ALONE = ["nvidia-pytriton==0.7.0"]
START_SECONDS = 60
BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.5]}]}
)

TRITON_CONFIG = """\
name: "identity_fp32"
backend: "python"
max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
TRITON_MODEL = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", tensor.as_numpy())]
            )
            for request in requests
            for tensor in [pb_utils.get_input_tensor_by_name(request, "INPUT0")]
        ]
"""
MOSEC_SERVER = """\
from mosec import Server, Worker


class Identity(Worker):
    def forward(self, data):
        tensor = data["inputs"][0]
        return {"outputs": [{**tensor, "name": "OUTPUT0"}]}


if __name__ == "__main__":
    server = Server()
    server.append_worker(Identity, num=1)
    server.run()
"""
WRK_SCRIPT = """\
wrk.method = "POST"
wrk.body = [[%s]]
wrk.headers["Content-Type"] = "application/json"

done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\n@@{"requests":%%d,"duration_us":%%d,"errors":%%d,"p50_us":%%d,"p99_us":%%d}\\n',
    summary.requests, summary.duration, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


@dataclass
class Round:
    """One measurement of one server at one concurrency."""

    server: str
    concurrency: int
    requests_per_second: float
    p50_us: float
    p99_us: float
    errors: int


@dataclass
class Target:
    """A running server and the URL of its inference endpoint."""

    name: str
    url: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def infer(url: str) -> bytes:
    request = urllib.request.Request(url, BODY.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as reply:
        return reply.read()


def wait_until_serving(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until an inference returns the right value; being ready is not enough."""
    deadline = time.monotonic() + START_SECONDS
    last = ""
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            reply = json.loads(infer(url))
            if reply["outputs"][0]["data"] == [1.5]:
                return
            last = f"replied {reply}"
        except (OSError, ValueError, KeyError) as error:
            last = str(error)
        time.sleep(0.1)
    raise SystemExit(f"{name} did not start: {last}\n{log.read_text(errors='replace')[-2000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and its children; a server that already exited is no error."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def running(
    name: str, command: list[str], url: str, folder: Path, env: dict[str, str]
) -> Iterator[Target]:
    """Runs a server in its own process group, which ends with the context."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            cwd=folder,
            start_new_session=True,
        )
    try:
        wait_until_serving(name, url, process, log)
        yield Target(name, url)
    finally:
        stop(process)


def atoll(folder: Path, binary: Path) -> AbstractContextManager[Target]:
    models = folder / "atoll-models"
    subprocess.run(
        [
            venv_python(),
            str(REPOSITORY / "scripts/models.py"),
            "--only",
            "identity_fp32",
            "--out",
            str(models),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    http, grpc, metrics = free_port(), free_port(), free_port()
    command = [str(binary), "serve", "--model-repository", str(models), "--host", "127.0.0.1"]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    return running(
        "atoll", command, f"http://127.0.0.1:{http}/v2/models/identity_fp32/infer", folder, {}
    )


def triton(folder: Path) -> AbstractContextManager[Target]:
    site = site_packages()
    server = site / "pytriton" / "tritonserver"
    model = folder / "triton-models" / "identity_fp32"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(TRITON_CONFIG)
    (model / "1" / "model.py").write_text(TRITON_MODEL)
    # The backend expects its stub beside itself; the wheel has one folder per Python version.
    backends = folder / "triton-backends"
    shutil.copytree(server / "backends" / "python", backends / "python", dirs_exist_ok=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(
        server / "python_backend_stubs" / version, backends / "python", dirs_exist_ok=True
    )
    http, grpc, metrics = free_port(), free_port(), free_port()
    command = [str(server / "bin" / "tritonserver"), f"--model-repository={model.parent}"]
    command += [
        f"--backend-directory={backends}",
        "--allow-gpu-metrics=false",
        "--http-address=127.0.0.1",
    ]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    env = {
        "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"),
        "PYTHONPATH": str(site),
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
    }
    return running(
        "triton", command, f"http://127.0.0.1:{http}/v2/models/identity_fp32/infer", folder, env
    )


def mosec(folder: Path) -> AbstractContextManager[Target]:
    script = folder / "mosec_identity.py"
    script.write_text(MOSEC_SERVER)
    port = free_port()
    command = [venv_python(), str(script), "--address", "127.0.0.1", "--port", str(port)]
    return running("mosec", command, f"http://127.0.0.1:{port}/inference", folder, {})


def venv_python() -> str:
    return str(VENV / "bin" / "python")


def site_packages() -> Path:
    return next((VENV / "lib").glob("python*/site-packages"))


def prepare_venv() -> None:
    """Installs the peers once; a stamp written last makes a failed installation repeat."""
    stamp = VENV / "installed"
    wanted = "\n".join(PACKAGES + PACKAGES_ALONE)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print("installing the peers into .venv-peers", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [venv_python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", *PACKAGES_ALONE], check=True)
    stamp.write_text(wanted)


def require_wrk() -> str:
    """Finds wrk, or installs the Debian package."""
    if shutil.which("wrk") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "wrk"], check=True, stdout=subprocess.DEVNULL
        )
    found = shutil.which("wrk")
    if found is None:
        raise SystemExit("wrk is missing; run: apt-get install wrk")
    return found


def measure(wrk: str, script: Path, target: Target, concurrency: int, seconds: int) -> Round:
    command = [
        wrk,
        "-t1",
        f"-c{concurrency}",
        f"-d{seconds}s",
        "--timeout",
        "10s",
        "-s",
        str(script),
        target.url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [line[2:] for line in done.stdout.splitlines() if line.startswith("@@")]
    if not found:
        raise SystemExit(f"wrk said nothing of {target.name}: {done.stdout}{done.stderr}")
    result = json.loads(found[-1])
    return Round(
        target.name,
        concurrency,
        result["requests"] / (result["duration_us"] / 1e6),
        result["p50_us"],
        result["p99_us"],
        result["errors"],
    )


def summarize(rounds: list[Round], server: str, concurrency: int) -> dict[str, object]:
    mine = [r for r in rounds if (r.server, r.concurrency) == (server, concurrency)]
    return {
        "server": server,
        "concurrency": concurrency,
        "requests_per_second": round(statistics.median(r.requests_per_second for r in mine)),
        "p50_us": statistics.median(r.p50_us for r in mine),
        "p99_us": statistics.median(r.p99_us for r in mine),
        "errors": sum(r.errors for r in mine),
        "rounds": len(mine),
    }


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| server | concurrency | requests/s | p50 us | p99 us | errors |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            "| {server} | {concurrency} | {requests_per_second} "
            "| {p50_us:.0f} | {p99_us:.0f} | {errors} |".format(**row)
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("ATOLL_BIN", str(REPOSITORY / "target" / "release" / "atoll"))
    parser.add_argument(
        "--atoll",
        type=Path,
        default=Path(default),
        help="the binary (default: $ATOLL_BIN or target/release/atoll)",
    )
    parser.add_argument(
        "--servers", default="atoll,triton,mosec", help="which to run (default: all three)"
    )
    parser.add_argument(
        "--concurrency", default="1,32", help="open connections, comma-separated (default: 1,32)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument(
        "--seconds", type=int, default=4, help="length of one measurement (default: 4)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and rounds as JSON")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 unless atoll answers more requests/s than every other",
    )
    return parser.parse_args()


def atoll_wins(rows: list[dict[str, object]]) -> bool:
    ours = {r["concurrency"]: r["requests_per_second"] for r in rows if r["server"] == "atoll"}
    return bool(ours) and all(
        r["requests_per_second"] < ours[r["concurrency"]] for r in rows if r["server"] != "atoll"
    )


def main() -> int:
    args = parse_args()
    starters = {"atoll": lambda f: atoll(f, args.atoll.resolve()), "triton": triton, "mosec": mosec}
    servers = args.servers.split(",")
    unknown = [s for s in servers if s not in starters]
    if unknown:
        raise SystemExit(f"unknown server {', '.join(unknown)}; known: {', '.join(starters)}")
    if "atoll" in servers and not args.atoll.exists():
        raise SystemExit(f"{args.atoll} is missing; build it with: cargo build --release")
    concurrencies = [int(c) for c in args.concurrency.split(",")]
    wrk = require_wrk()
    prepare_venv()

    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="atoll-peers-") as name, ExitStack() as stack:
        folder = Path(name)
        script = folder / "post.lua"
        script.write_text(WRK_SCRIPT % BODY)
        targets = [stack.enter_context(starters[server](folder)) for server in servers]
        for target in targets:
            measure(wrk, script, target, max(concurrencies), 1)  # warm up, not counted
        for number in range(args.rounds):
            for concurrency in concurrencies:
                for target in targets:
                    rounds.append(measure(wrk, script, target, concurrency, args.seconds))
            print(f"round {number + 1}/{args.rounds} done", file=sys.stderr)

    rows = [
        summarize(rounds, server, concurrency)
        for concurrency in concurrencies
        for server in servers
    ]
    print(table(rows))
    if args.json:
        args.json.write_text(
            json.dumps({"rows": rows, "rounds": [asdict(r) for r in rounds]}, indent=2) + "\n"
        )
    return 1 if args.check and not atoll_wins(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
