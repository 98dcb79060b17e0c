"""The registry keeps what it was given and nothing else; hostile models harm only themselves."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import requests
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cluster import Cluster
from support import ASSETS, BINARY, LOST, PATIENCE_SECONDS, Server, free_ports, wait_for

DIGITS = (ASSETS / "digits.onnx").read_bytes()
BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}


def command(*flags: str | Path) -> tuple[list[int], list[str]]:
    ports = free_ports(3)
    given = [str(BINARY), "serve", "--host", "127.0.0.1"]
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        given += [flag, str(port)]
    return ports, given + [str(flag) for flag in flags]


def start(folder: Path, *flags: str | Path) -> Server:
    """A server with a registry in `folder`/data."""
    ports, given = command("--data-dir", folder / "data", *flags)
    return Server(ports, given, folder / "server.log").start()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def begin(*flags: str | Path) -> Server:
        running.append(start(tmp_path, *flags))
        return running[-1]

    yield begin
    for server in running:
        server.stop()


def register(server: Server, name: str, model: bytes, **form: str) -> requests.Response:
    files = {"name": (None, name), "model": ("model.onnx", model)}
    files |= {key: (None, value) for key, value in form.items()}
    return requests.post(f"{server.url}/register", files=files, timeout=PATIENCE_SECONDS)


def infer(server: Server, name: str) -> requests.Response:
    url = f"{server.url}/v2/models/{name}/infer"
    return requests.post(url, json=BODY, timeout=PATIENCE_SECONDS)


def atoll(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    given = [str(BINARY), *map(str, arguments)]
    return subprocess.run(given, capture_output=True, text=True, timeout=60, check=False)


def onnx_model(nodes: list, shape: list[int], weights: list | None = None) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], initializer=weights or [])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


def huge_input() -> bytes:
    """Its only input is declared with 4 TiB, which a measurement would make."""
    return onnx_model([helper.make_node("Relu", ["x"], ["y"])], [1 << 40])


def huge_output() -> bytes:
    """One run takes 160 GB: an outer product."""
    weight = numpy_helper.from_array(np.ones((1, 200_000), np.float32), "w")
    return onnx_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [200_000, 1], [weight])


def endless() -> bytes:
    """Takes hours to fold or to run."""
    shape = numpy_helper.from_array(np.array([4096, 4096], np.int64), "shape")
    fill = numpy_helper.from_array(np.array([0.001], np.float32), "fill")
    nodes = [helper.make_node("ConstantOfShape", ["shape"], ["w0"], value=fill)]
    for step in range(400):
        nodes.append(helper.make_node("MatMul", [f"w{step}", "w0"], [f"w{step + 1}"]))
    nodes.append(helper.make_node("MatMul", ["x", "w400"], ["y"]))
    return onnx_model(nodes, [1, 4096], [shape])


def test_a_data_folder_over_a_repository_is_refused(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "digits.onnx").write_bytes(DIGITS)
    (models / "notes.txt").write_text("mine")
    for repository, data in ((models, tmp_path), (tmp_path, models), (models, models)):
        done = atoll("serve", "--model-repository", repository, "--data-dir", data)
        assert done.returncode == 2, done
        assert "overlap" in done.stderr, done.stderr
        assert sorted(path.name for path in models.iterdir()) == ["digits.onnx", "notes.txt"]


@pytest.mark.parametrize("damage", ["lost", "empty", "garbage"])
def test_a_damaged_database_costs_no_model(
    servers: Callable[..., Server], tmp_path: Path, damage: str
) -> None:
    server = servers()
    assert register(server, "kept", DIGITS).status_code == 200
    server.stop()
    database = tmp_path / "data" / "registry.redb"
    if damage == "lost":
        database.unlink()
    else:
        database.write_bytes(b"" if damage == "empty" else b"garbage" * 1000)
    files = sorted((tmp_path / "data").rglob("*.onnx"))
    assert len(files) == 1
    for _ in range(2):
        done = atoll("serve", "--data-dir", tmp_path / "data", "--http-port", "0")
        assert done.returncode == 1, done
        assert "atoll registry repair" in done.stderr, done.stderr
        assert sorted((tmp_path / "data").rglob("*.onnx")) == files
    done = atoll("registry", "repair", "--data-dir", tmp_path / "data")
    assert done.returncode == 0 and "restored kept:1" in done.stdout, done
    assert atoll("registry", "check", "--data-dir", tmp_path / "data").returncode == 0
    assert infer(servers(), "kept").status_code == 200


@pytest.mark.parametrize("kind", [huge_input, huge_output])
@pytest.mark.parametrize("check", ["registered", "off"])
def test_a_model_that_is_too_large_harms_only_itself(
    servers: Callable[..., Server], kind: Callable[[], bytes], check: str
) -> None:
    if check == "off" and kind is huge_output:
        pytest.skip("that is what the check is for")
    flags = ("--model-check", check, "--model-check-memory", "1GiB")
    server = servers(*flags)
    assert register(server, "good", DIGITS).status_code == 200
    reply = register(server, "large", kind(), slo_ms="10")
    assert reply.status_code in (200, 400, 413), reply.text
    # It is measured in the background.
    time.sleep(2)
    server.assert_alive()
    assert infer(server, "good").status_code == 200
    server.stop()
    server = servers(*flags)
    time.sleep(2)
    server.assert_alive()
    assert infer(server, "good").status_code == 200


def checks_of(server: Server) -> list[int]:
    """The processes that check models for `server`."""
    assert server.process is not None
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    return [int(pid) for path in children for pid in path.read_text().split()]


def test_an_endless_check_is_confined_and_ended(servers: Callable[..., Server]) -> None:
    server = servers("--model-check-secs", "5")
    replies: list[requests.Response] = []
    client = threading.Thread(
        target=lambda: replies.append(register(server, "endless", endless()))
    )
    started = time.monotonic()
    client.start()
    assert wait_for(lambda: bool(checks_of(server)))
    time.sleep(1)
    [pid] = checks_of(server)
    status = Path(f"/proc/{pid}/status").read_text()
    assert "Seccomp:\t2" in status and "NoNewPrivs:\t1" in status, status
    limits = Path(f"/proc/{pid}/limits").read_text()
    for limit in ("Max core file size", "Max file size"):
        [line] = [line for line in limits.splitlines() if line.startswith(limit)]
        assert line.split()[-3:-1] == ["0", "0"], line
    [space] = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert "unlimited" not in space
    assert Path(f"/proc/{pid}/environ").read_bytes().count(b"=") <= 1
    # Others are served meanwhile.
    assert register(server, "good", DIGITS).status_code == 200
    client.join()
    assert replies[0].status_code == 400 and "--model-check-secs" in replies[0].text
    assert time.monotonic() - started < 30
    assert not checks_of(server)
    server.assert_alive()


def test_a_check_ends_with_its_client_and_with_the_server(servers: Callable[..., Server]) -> None:
    server = servers("--model-check-secs", "600")
    files = {"name": (None, "endless"), "model": ("model.onnx", endless())}
    with pytest.raises(requests.Timeout):
        requests.post(f"{server.url}/register", files=files, timeout=2)
    assert wait_for(lambda: not checks_of(server))
    client = threading.Thread(target=lambda: register(server, "endless", endless()))
    client.start()
    assert wait_for(lambda: bool(checks_of(server)))
    [pid] = checks_of(server)
    server.terminate()
    assert server.wait(20) == 0
    client.join()
    assert not Path(f"/proc/{pid}").exists()
    # A server that is killed takes its checks along, too.
    server = servers("--model-check-secs", "600")
    client = threading.Thread(target=lambda: try_to_register(server, endless()))
    client.start()
    assert wait_for(lambda: bool(checks_of(server)))
    [pid] = checks_of(server)
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    client.join()
    assert wait_for(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def try_to_register(server: Server, model: bytes) -> None:
    try:
        register(server, "endless", model)
    except requests.ConnectionError:
        pass


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_clients_change_nothing_where_models_are_fixed(
    servers: Callable[..., Server], mode: str
) -> None:
    server = servers("--model-control-mode", mode)
    reply = register(server, "mine", DIGITS)
    assert reply.status_code == 503 and "--model-control-mode" in reply.text
    url = f"{server.url}/v2/atoll/models/mine"
    assert requests.delete(url, timeout=60).status_code == 503
    assert requests.post(f"{url}/rollback", timeout=60).status_code == 503
    assert requests.get(f"{server.url}/v2/models/mine", timeout=60).status_code == 404


def begin(folder: Path, *flags: str | Path) -> tuple[Server, subprocess.Popen[bytes]]:
    """Starts a server without waiting until it is ready."""
    ports, given = command("--data-dir", folder / "data", *flags)
    server = Server(ports, given, folder / "server.log")
    with (folder / "server.log").open("ab") as output:
        server.process = subprocess.Popen(given, stdout=output, stderr=output)
    return server, server.process


@pytest.fixture
def slow_repository(tmp_path: Path) -> Path:
    """A repository with a model that never finishes loading."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "endless.onnx").write_bytes(endless())
    (folder / "afirst.onnx").write_bytes(DIGITS)
    return folder


def is_loading(folder: Path) -> bool:
    marks = folder / "data" / "registry" / "loading"
    return marks.is_dir() and any(path.name == "endless@1.load" for path in marks.iterdir())


def test_sigterm_ends_a_server_that_loads(tmp_path: Path, slow_repository: Path) -> None:
    _, process = begin(tmp_path, "--model-repository", slow_repository)
    try:
        assert wait_for(lambda: is_loading(tmp_path))
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert time.monotonic() - started < 20
    finally:
        process.kill()
    # It was told to end: no model is to blame.
    assert not is_loading(tmp_path)


@pytest.mark.parametrize("check", ["registered", "off"])
def test_a_model_that_was_loading_when_the_server_died_is_quarantined(
    tmp_path: Path, slow_repository: Path, servers: Callable[..., Server], check: str
) -> None:
    _, process = begin(tmp_path, "--model-repository", slow_repository)
    assert wait_for(lambda: is_loading(tmp_path))
    process.kill()
    process.wait()
    flags = ("--model-check", check, "--model-check-secs", "3")
    server = servers("--model-repository", slow_repository, *flags)
    log = server.log_text()
    assert "the last process ended while it was busy with this model" in log, log[-3000:]
    assert infer(server, "afirst").status_code == 200
    index = requests.post(f"{server.url}/v2/repository/index", timeout=60).json()
    [entry] = [entry for entry in index if entry["name"] == "endless"]
    assert "quarantined" in entry["reason"], entry
    listed = atoll("registry", "quarantine", "--data-dir", tmp_path / "data", "--json")
    [found] = json.loads(listed.stdout)
    assert found["model"]["name"] == "endless", found
    done = atoll("registry", "release", "endless:1", "--data-dir", tmp_path / "data")
    assert done.returncode == 0, done
    listed = atoll("registry", "quarantine", "--data-dir", tmp_path / "data")
    assert listed.stdout == ""


def test_an_innocent_model_survives_a_kill(
    tmp_path: Path, slow_repository: Path, servers: Callable[..., Server]
) -> None:
    # As if the server was killed while it loaded a good model.
    server = servers("--model-repository", slow_repository / "afirst.onnx")
    server.stop()
    [entry] = [slow_repository / "afirst.onnx"]
    status = entry.stat()
    model = {"name": "afirst", "version": 1, "content": f"{status.st_size}:{status.st_mtime_ns}"}
    marks = tmp_path / "data" / "registry" / "loading"
    marks.mkdir(parents=True, exist_ok=True)
    mark = {"model": model, "running": True, "deaths": 0}
    (marks / "afirst@1.load").write_text(json.dumps(mark))
    server = servers("--model-repository", slow_repository / "afirst.onnx")
    assert "busy with this model" in server.log_text()
    assert infer(server, "afirst").status_code == 200
    assert not any(marks.iterdir())


def stored_files(folder: Path) -> list[Path]:
    """All files but the marks of models that are being loaded or measured."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if path.parent.name != "loading")


def test_a_full_disk_leaves_nothing_and_the_registry_works(tmp_path: Path) -> None:
    ports, given = command("--data-dir", tmp_path / "data")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))

    server = Server(ports, given, tmp_path / "server.log")
    with (tmp_path / "server.log").open("ab") as output:
        server.process = subprocess.Popen(given, stdout=output, stderr=output, preexec_fn=limit)
    try:
        assert wait_for(server.is_ready)
        assert register(server, "small", DIGITS).status_code == 200
        before = stored_files(tmp_path / "data")
        weight = np.random.default_rng(1).random((1, 4 << 20), np.float32)
        large = onnx_model(
            [helper.make_node("Add", ["x", "w"], ["y"])],
            [1, 1],
            [numpy_helper.from_array(weight, "w")],
        )
        for _ in range(3):
            reply = register(server, "large", large)
            assert reply.status_code == 413, reply.text
            assert stored_files(tmp_path / "data") == before
        assert register(server, "again", DIGITS).status_code == 200
        assert infer(server, "again").status_code == 200
        assert requests.get(f"{server.url}/v2/models/large", timeout=60).status_code in (404, 503)
    finally:
        server.stop()
    check = atoll("registry", "check", "--data-dir", tmp_path / "data")
    assert check.returncode == 0, check


def test_versions_are_deleted_and_rolled_back(servers: Callable[..., Server]) -> None:
    server = servers("--registry-keep", "3")
    for version in range(1, 5):
        reply = register(server, "m", DIGITS)
        assert reply.json()["version"] == str(version)
    url = f"{server.url}/v2/atoll/models/m"

    def served() -> str:
        return infer(server, "m").json()["model_version"]

    assert served() == "4"
    assert requests.post(f"{url}/rollback", timeout=60).json()["version"] == "3"
    assert served() == "3"
    assert requests.post(f"{url}/versions/1/rollback", timeout=60).status_code == 404
    assert requests.post(f"{url}/versions/4/rollback", timeout=60).status_code == 200
    assert requests.delete(f"{url}/versions/4", timeout=60).status_code == 200
    assert served() == "3"
    server.stop()
    server = servers("--registry-keep", "3")
    url = f"{server.url}/v2/atoll/models/m"
    assert served() == "3"
    assert requests.delete(url, timeout=60).json() == {"name": "m", "deleted_versions": 2}
    assert infer(server, "m").status_code == 404
    assert requests.delete(url, timeout=60).status_code == 404
    assert register(server, "m", DIGITS).status_code == 200


def test_quotas_are_kept(servers: Callable[..., Server]) -> None:
    server = servers("--registry-max-models", "1", "--registry-max-size", "1MiB")
    assert register(server, "one", DIGITS).status_code == 200
    reply = register(server, "two", DIGITS)
    assert reply.status_code == 413 and "--registry-max-models" in reply.text
    assert register(server, "one", DIGITS).status_code == 200


def test_an_export_is_imported_elsewhere(servers: Callable[..., Server], tmp_path: Path) -> None:
    server = servers()
    assert register(server, "m", DIGITS, labels="\n".join("0123456789")).status_code == 200
    in_use = atoll("registry", "check", "--data-dir", tmp_path / "data")
    assert in_use.returncode == 1 and "in use" in in_use.stderr, in_use
    server.stop()
    done = atoll("registry", "export", tmp_path / "out", "--data-dir", tmp_path / "data")
    assert done.returncode == 0, done
    shutil.rmtree(tmp_path / "data")
    done = atoll("registry", "import", tmp_path / "out", "--data-dir", tmp_path / "data")
    assert done.returncode == 0 and "added m:1" in done.stdout, done
    assert infer(servers(), "m").status_code == 200


def test_kills_during_registrations_lose_nothing(tmp_path: Path) -> None:
    accepted: list[str] = []
    chance = random.Random(7)
    for run in range(6):
        server = start(tmp_path, "--model-check", "off")
        for name in accepted:
            reply = infer(server, name)
            # A kill may meet a model while it is measured: it is kept, but in quarantine.
            assert reply.status_code == 200 or "it is quarantined" in reply.text, (name, reply.text)

        def keep_registering(server: Server, run: int) -> None:
            for number in range(50):
                try:
                    name = f"m{run}_{number % 5}"
                    if register(server, name, DIGITS).status_code == 200:
                        accepted.append(name)
                except requests.RequestException:
                    return

        client = threading.Thread(target=keep_registering, args=(server, run))
        client.start()
        time.sleep(chance.uniform(0.02, 0.4))
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        client.join()
    assert accepted
    # A registration that got no answer may have been kept or not, but never by half.
    check = atoll("registry", "check", "--data-dir", tmp_path / "data")
    held = [line.split()[0] for line in check.stdout.splitlines() if "is quarantined" in line]
    for name in held:
        atoll("registry", "release", name, "--data-dir", tmp_path / "data")
    check = atoll("registry", "check", "--data-dir", tmp_path / "data")
    assert check.returncode == 0, check
    server = start(tmp_path)
    try:
        assert all(infer(server, name).status_code == 200 for name in accepted)
    finally:
        server.stop()


def test_a_broken_registration_in_a_cluster_replaces_nothing(tmp_path: Path) -> None:
    ports, given = command("--cluster", "--data-dir", tmp_path / "store")
    server = Server(ports, given, tmp_path / "server.log")
    with (tmp_path / "server.log").open("ab") as output:
        server.process = subprocess.Popen(given, stdout=output, stderr=output)
    try:
        assert wait_for(lambda: live(server))
        assert register(server, "m", DIGITS).status_code == 200
        assert infer(server, "m").status_code == 200
        for garbage in (b"garbage", endless()[:1000], DIGITS[:-100]):
            reply = register(server, "m", garbage)
            assert reply.status_code in (400, 501), reply.text
            assert infer(server, "m").status_code == 200
            index = requests.post(f"{server.url}/v2/repository/index", timeout=60).json()
            assert [(row["version"], row["state"]) for row in index] == [("1", "READY")], index
        assert register(server, "m", DIGITS).json()["version"] == "2"
        assert wait_for(lambda: infer(server, "m").status_code == 200)
        url = f"{server.url}/v2/atoll/models/m"
        assert requests.delete(url, timeout=60).status_code == 200
        assert infer(server, "m").status_code == 404
    finally:
        server.stop()


@contextmanager
def two_backends(folder: Path) -> Iterator[tuple[Cluster, Server]]:
    """A cluster that serves model `other`, and its frontend."""
    models = folder / "models"
    models.mkdir()
    shutil.copy(ASSETS / "digits.onnx", models / "other.onnx")
    cluster = Cluster(folder, models)
    try:
        cluster.scheduler("s1")
        for name in ("b1", "b2"):
            cluster.backend(name, *cluster.model_store)
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        yield cluster, frontend
    finally:
        cluster.stop()


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_registrations_in_a_cluster_disturb_no_request(tmp_path: Path) -> None:
    with two_backends(tmp_path) as (_, frontend):
        assert register(frontend, "m", DIGITS).status_code == 200
        failures: list[str] = []
        done = threading.Event()

        def load() -> None:
            while not done.is_set():
                reply = infer(frontend, "m")
                if reply.status_code != 200:
                    failures.append(reply.text)

        clients = [threading.Thread(target=load) for _ in range(2)]
        for client in clients:
            client.start()
        for version in (2, 3):
            reply = register(frontend, "m", b"garbage")
            assert reply.status_code == 400, reply.text
            reply = register(frontend, "m", DIGITS)
            assert reply.json().get("version") == str(version), reply.text
        time.sleep(1)
        done.set()
        for client in clients:
            client.join()
        # A stall of this machine looks like a lost backend; a registration must not.
        assert not [text for text in failures if LOST not in text], failures


def scaled(factor: float) -> bytes:
    """y = factor * x: a reply shows which version computed it."""
    weight = numpy_helper.from_array(np.array([factor], np.float32), "w")
    return onnx_model([helper.make_node("Mul", ["x", "w"], ["y"])], [1], [weight])


def factor_in_force(server: Server, name: str = "m") -> float | None:
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    url = f"{server.url}/v2/models/{name}/infer"
    reply = requests.post(url, json={"inputs": [tensor]}, timeout=60)
    return reply.json()["outputs"][0]["data"][0] if reply.status_code == 200 else None


def seen(server: Server) -> set[float | None]:
    """What several requests get; more than one value while backends change."""
    return {factor_in_force(server) for _ in range(8)}


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_versions_are_rolled_back_and_deleted_in_a_cluster(tmp_path: Path) -> None:
    with two_backends(tmp_path) as (cluster, frontend):
        for factor in (1.5, 2.5, 3.5):
            assert register(frontend, "m", scaled(factor)).status_code == 200
        rollback = f"{frontend.url}/v2/atoll/models/m/rollback"
        for expected, factor in (("2", 2.5), ("1", 1.5)):
            reply = requests.post(rollback, timeout=120)
            assert reply.json().get("version") == expected, reply.text
            # Every backend follows.
            assert wait_for(lambda: seen(frontend) == {factor})  # noqa: B023
        assert requests.post(rollback, timeout=120).status_code == 404
        # Forward again, by number; a restarted backend does not undo it.
        reply = requests.post(f"{frontend.url}/v2/atoll/models/m/versions/2/rollback", timeout=120)
        assert reply.json().get("version") == "2", reply.text
        cluster.processes["b1"].kill(signal.SIGTERM)
        cluster.processes["b1"].start()
        assert wait_for(lambda: seen(frontend) == {2.5})
        # The one in force is deleted: the newest of the others takes its place.
        url = f"{frontend.url}/v2/atoll/models/m"
        assert requests.delete(f"{url}/versions/2", timeout=120).status_code == 200
        assert wait_for(lambda: factor_in_force(frontend) == 3.5)
        assert requests.delete(url, timeout=120).json()["deleted_versions"] == 2
        assert factor_in_force(frontend) is None


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_the_command_rolls_a_model_of_a_cluster_back(tmp_path: Path) -> None:
    with two_backends(tmp_path) as (_, frontend):

        def rollback(*words: str) -> subprocess.CompletedProcess[str]:
            given = [str(BINARY), "cluster", "rollback", *words, "--url", frontend.url]
            return subprocess.run(given, capture_output=True, text=True, check=False, timeout=300)

        for factor in (1.5, 2.5, 3.5):
            assert register(frontend, "m", scaled(factor)).status_code == 200
        for words, version, factor in (
            (("m",), 2, 2.5),
            (("m",), 1, 1.5),
            (("m", "--to", "3"), 3, 3.5),
            (("m", "--to", "1"), 1, 1.5),
        ):
            done = rollback(*words)
            assert done.returncode == 0, done
            assert done.stdout == f"m version {version} is in force\n", done
            # Every backend follows.
            assert wait_for(lambda: seen(frontend) == {factor})  # noqa: B023
        # What cannot be done says why, and changes nothing.
        for words, code, why in (
            (("m",), 1, "no version of 'm' before 1"),
            (("m", "--to", "9"), 1, "9"),
            (("absent",), 1, "absent"),
            (("../m",), 2, "not the name of a model"),
        ):
            done = rollback(*words)
            assert done.returncode == code and why in done.stderr, done
        assert seen(frontend) == {1.5}


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_a_model_that_ends_a_backend_is_quarantined_there(
    tmp_path: Path, slow_repository: Path
) -> None:
    cluster = Cluster(tmp_path, slow_repository)
    marks = tmp_path / "data" / "backends" / "b1" / "registry" / "loading"

    def is_loading_there() -> bool:
        # The whole name: a mark that is still being written has another, and does not count.
        return marks.is_dir() and any(path.name == "endless@1.load" for path in marks.iterdir())

    try:
        cluster.scheduler("s1")
        cluster.backend("b1", "--model-check-secs", "3")
        assert wait_for(is_loading_there), cluster.logs()
        cluster.processes["b1"].kill()
        cluster.processes["b1"].start()
        log = lambda: cluster.processes["b1"].text()
        assert wait_for(lambda: "the last process ended while it was busy" in log()), log()
        folder = tmp_path / "data" / "backends" / "b1"

        def listed() -> list:
            reply = atoll("registry", "quarantine", "--data-dir", folder, "--json")
            return json.loads(reply.stdout or "[]")

        assert wait_for(lambda: [q["model"]["name"] for q in listed()] == ["endless"]), log()
        # It serves the others, and says why not this one.
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        assert wait_for(lambda: infer(frontend, "afirst").status_code == 200), cluster.logs()
        index = requests.post(f"{frontend.url}/v2/repository/index", timeout=60).json()
        [entry] = [entry for entry in index if entry["name"] == "endless"]
        assert "quarantined" in entry["reason"], entry
        assert atoll("registry", "release", "endless:1", "--data-dir", folder).returncode == 0
        assert listed() == []
    finally:
        cluster.stop()


def test_a_load_ends_with_its_client_or_an_unload(tmp_path: Path, slow_repository: Path) -> None:
    flags = ("--model-repository", slow_repository, "--model-control-mode", "explicit")
    server, process = begin(tmp_path, *flags)
    try:
        assert wait_for(lambda: live(server))
        load = f"{server.url}/v2/repository/models/endless/load"
        with pytest.raises(requests.Timeout):
            requests.post(load, timeout=2)
        # The mark goes with the load, whose threads have a low priority.
        assert wait_for(lambda: not is_loading(tmp_path), 180)
        replies: list[requests.Response] = []
        client = threading.Thread(target=lambda: replies.append(requests.post(load, timeout=120)))
        client.start()
        assert wait_for(lambda: is_loading(tmp_path))
        unload = f"{server.url}/v2/repository/models/endless/unload"
        assert requests.post(unload, timeout=60).status_code == 200
        client.join()
        assert "cancelled" in replies[0].text, replies[0].text
        assert not is_loading(tmp_path)
        # Others can still be loaded.
        assert requests.post(load.replace("endless", "afirst"), timeout=60).status_code == 200
    finally:
        process.kill()
        process.wait()


def test_models_are_deleted_over_grpc(servers: Callable[..., Server]) -> None:
    server = servers()
    for factor in (1.5, 2.5, 3.5):
        assert register(server, "m", scaled(factor)).status_code == 200
    channel = grpc.insecure_channel(server.grpc)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def unload(**parameters: object) -> None:
        request = service_pb2.RepositoryModelUnloadRequest(model_name="m")
        for name, value in parameters.items():
            kind = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(request.parameters[name], kind, value)
        stub.RepositoryModelUnload(request, timeout=60)

    unload(atoll_delete=True, atoll_version=3)
    assert factor_in_force(server) == 2.5
    # Triton's own parameter, and no deletion: the versions stay.
    unload(unload_dependents=True)
    assert factor_in_force(server) is None
    load = f"{server.url}/v2/repository/models/m/load"
    assert requests.post(load, timeout=60).status_code == 200
    for wrong in ({"atoll_version": 1}, {"atoll_delete": 1}, {"atoll_remove": True}):
        with pytest.raises(grpc.RpcError) as refused:
            unload(**wrong)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, wrong
    assert factor_in_force(server) == 2.5
    unload(atoll_delete=True)
    assert requests.post(load, timeout=60).status_code == 404
    with pytest.raises(grpc.RpcError) as refused:
        unload(atoll_delete=True)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def live(server: Server) -> bool:
    try:
        return requests.get(f"{server.url}/v2/health/live", timeout=2).status_code == 200
    except requests.RequestException:
        return False


def test_the_hidden_command_alone_is_harmless() -> None:
    done = subprocess.run(
        [str(BINARY), "model-check"], input=b"nonsense\n", capture_output=True, timeout=60
    )
    assert done.returncode == 1 and b"failed" in done.stdout, done
    order = {"memory": 2 << 30, "cpu_seconds": 30, "size": len(DIGITS), "config": {}}
    done = subprocess.run(
        [str(BINARY), "model-check"],
        input=json.dumps(order).encode() + b"\n" + DIGITS,
        capture_output=True,
        timeout=60,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    assert done.returncode == 0 and b'"passed"' in done.stdout, done
