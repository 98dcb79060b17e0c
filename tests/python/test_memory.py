"""Requests and models that need more memory than there is: an error reply from a live server whose
memory stays within its limit, under a limit of the address space."""

from __future__ import annotations

import gzip
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
from onnx import TensorProto, helper, numpy_helper

from support import Server, infer_url, serve  # first: it finds the scripts

from attack_bodies import binary_tensors, make_hostile_models, png, put
from attack_bodies import onnx_model as model

LIMIT_MIB = 512
# What the process may map: stacks and arenas of its threads are mapped, and hardly used.
ADDRESS_SPACE = 6 << 30


def make_memory_models(folder: Path) -> None:
    make_hostile_models(folder, 64)
    gather = [helper.make_node("Gather", ["table", "index"], ["y"])]
    table = numpy_helper.from_array(np.arange(4, dtype=np.float32), "table")
    put(folder, "gather", model(gather, [("index", TensorProto.INT64, ["n"])], ["y"], [table]))


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("memory")
    make_memory_models(folder / "models")
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Inherited by the server.
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, before[1]))
    try:
        flags = ["--memory-limit-mib", str(LIMIT_MIB), "--data-dir", str(folder / "data")]
        # What folds without end is ended sooner than by default. Checks have the lowest priority:
        # one of two seconds may take half a minute beside other tests.
        flags += ["--model-check-secs", "60"]
        running = serve(folder / "models", folder / "server.log", *flags, "--device", "cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    yield running
    assert b"memory allocation of" not in (folder / "server.log").read_bytes()
    running.stop()


def json_tensor(name: str, shape: list[int], data: list, kind: str = "FP32") -> dict:
    return {"name": name, "shape": shape, "datatype": kind, "data": data}


def binary(model: str, server: Server, tensors: list[tuple[str, np.ndarray]]) -> requests.Response:
    body, headers = binary_tensors(tensors)
    return requests.post(infer_url(server, model), data=body, headers=headers, timeout=60)


def assert_alive(server: Server) -> None:
    inputs = [json_tensor("index", [2], [1, 3], "INT64")]
    reply = requests.post(infer_url(server, "gather"), json={"inputs": inputs}, timeout=30)
    assert reply.status_code == 200, reply.text
    assert reply.json()["outputs"][0]["data"] == [1.0, 3.0]


def test_outputs_that_cannot_be_allocated(small_server: Server) -> None:
    side = np.ones(1 << 17, np.float32)
    outer = [("a", side.reshape(-1, 1)), ("b", side.reshape(1, -1))]
    reply = binary("outer", small_server, outer)
    assert reply.status_code == 413, reply.text
    tokens = np.zeros((1, 200_000, 64), np.float32)
    reply = binary("attention", small_server, [("x", tokens)])
    assert reply.status_code == 413, reply.text
    # A size that only the values of an input tell.
    for shape in ([1 << 40], [1 << 31], [1 << 20, 1 << 20]):
        request = [("x", np.ones(1, np.float32)), ("shape", np.array(shape, np.int64))]
        reply = binary("expand", small_server, request)
        assert reply.status_code == 413, reply.text
    assert_alive(small_server)


def test_a_few_large_requests_at_once(small_server: Server) -> None:
    """Each fits alone; together they get 200 or 503, and nothing else."""
    side = np.ones(4_000, np.float32)
    outer = [("a", side.reshape(-1, 1)), ("b", side.reshape(1, -1))]
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(binary, "outer", small_server, outer) for _ in range(24)]
        replies = [future.result() for future in asked]
    codes = {reply.status_code for reply in replies}
    assert codes <= {200, 503} and 200 in codes, codes
    assert all(r.headers.get("Retry-After") for r in replies if r.status_code == 503)
    assert_alive(small_server)


def test_json_bombs(small_server: Server) -> None:
    head, tail = b'{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":[', b'""]}]}'
    for element in (b'"",', b"0,", b"[[]],"):
        body = gzip.compress(head + element * (60 << 20 >> 2) + tail, 1)
        assert len(body) < 2 << 20
        post = lambda: requests.post(
            infer_url(small_server, "gather"),
            data=body,
            headers={"Content-Encoding": "gzip"},
            timeout=120,
        )
        with ThreadPoolExecutor(4) as pool:
            codes = {f.result().status_code for f in [pool.submit(post) for _ in range(4)]}
        # 400: an element of the wrong type was found before the memory was exceeded.
        assert codes <= {400, 413, 503}, codes
        assert_alive(small_server)


def test_kernel_input_errors_are_the_clients(small_server: Server) -> None:
    inputs = [json_tensor("index", [1], [7], "INT64")]
    reply = requests.post(infer_url(small_server, "gather"), json={"inputs": inputs}, timeout=30)
    assert reply.status_code == 400, reply.text
    assert "7 is outside of 0..4" in reply.json()["error"]


def test_an_output_is_sent_once(small_server: Server) -> None:
    inputs = [json_tensor("index", [1], [1], "INT64")]
    request = {"inputs": inputs, "outputs": [{"name": "y"}] * 1024}
    reply = requests.post(infer_url(small_server, "gather"), json=request, timeout=30)
    assert reply.status_code == 400 and "twice" in reply.json()["error"]


def test_png_bombs(small_server: Server) -> None:
    image = png(9_000)
    assert len(image) < 1 << 20

    def post() -> int:
        form = {"image": ("a.png", image)}
        url = f"{small_server.url}/classify"
        return requests.post(url, data={"name": "outer"}, files=form, timeout=120).status_code

    with ThreadPoolExecutor(6) as pool:
        codes = {future.result() for future in [pool.submit(post) for _ in range(12)]}
    assert 500 not in codes, codes
    assert_alive(small_server)


def register(server: Server, name: str, data: bytes) -> requests.Response:
    form = {"model": ("m.onnx", data)}
    return requests.post(f"{server.url}/register", data={"name": name}, files=form, timeout=120)


def test_folding_bombs(small_server: Server) -> None:
    nodes, sums = [], ["x"]
    for index in range(250):
        nodes.append(helper.make_node("ConstantOfShape", ["big"], [f"c{index}"]))
        nodes.append(helper.make_node("Exp", [f"c{index}"], [f"e{index}"]))
        nodes.append(helper.make_node("ReduceMax", [f"e{index}"], [f"m{index}"]))
        sums.append(f"m{index}")
    nodes.append(helper.make_node("Sum", sums, ["y"]))
    big = numpy_helper.from_array(np.array([12 << 20], np.int64), "big")
    data = model(nodes, [("x", TensorProto.FLOAT, [1])], ["y"], [big])
    assert len(data) < 32 << 10
    assert register(small_server, "folding", data).status_code in (200, 400, 413, 503)
    assert_alive(small_server)


def nested_functions(depth: int, width: int, leaves: int, label: str) -> bytes:
    """Functions that call each other `width` times."""
    opset = [helper.make_opsetid("own", 1), helper.make_opsetid("", 17)]
    functions = []
    for level in range(depth):
        last = level + 1 == depth
        op, domain, count = ("Identity", "", leaves) if last else (f"f{level + 1}", "own", width)
        body = [
            helper.make_node(op, ["x"], [f"v{i}"], domain=domain, name=f"{label}{i}")
            for i in range(count)
        ]
        functions.append(helper.make_function("own", f"f{level}", ["x"], ["y"], body, opset))
    call = helper.make_node("f0", ["x"], ["z"], domain="own", name=label)
    out = helper.make_node("Identity", ["x"], ["y"])
    tensor = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])
    graph = helper.make_graph([call, out], "functions", [tensor("x")], [tensor("y")])
    made = helper.make_model(graph, functions=functions, opset_imports=opset)
    made.ir_version = 8
    return made.SerializeToString()


@pytest.mark.parametrize(
    ("depth", "width", "leaves", "label"),
    [(16, 12, 0, ""), (12, 6, 2, "n" * 20_000)],
    ids=["empty functions", "long labels"],
)
def test_function_bombs(
    small_server: Server, depth: int, width: int, leaves: int, label: str
) -> None:
    data = nested_functions(depth, width, leaves, label)
    assert len(data) < 3 << 20
    reply = register(small_server, "functions", data)
    assert reply.status_code == 400, reply.text
    assert "are allowed" in reply.text
    assert_alive(small_server)


def test_log_lines_are_single_lines(small_server: Server, tmp_path: Path) -> None:
    name = "a\n2026-01-01T00:00:00Z ERROR forged\x1b[2J" + "n" * (8 << 20)
    nodes = [helper.make_node("NoSuchOperator", ["x"], ["y"], name=name)]
    data = model(nodes, [("x", TensorProto.FLOAT, [1])], ["y"])
    assert register(small_server, "names", data).status_code in (400, 501)
    for line in small_server.log.read_text().splitlines():
        assert len(line) < 20_000 and "\x1b" not in line
        assert not line.startswith("2026-01-01T00:00:00Z ERROR forged")


def test_memory_stays_below_the_limit(small_server: Server) -> None:
    stop = threading.Event()
    peaks: list[int] = []

    def watch() -> None:
        status = Path(f"/proc/{small_server.process.pid}/status")
        while not stop.wait(0.02):
            for line in status.read_text().splitlines():
                if line.startswith("VmRSS"):
                    peaks.append(int(line.split()[1]) << 10)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        test_a_few_large_requests_at_once(small_server)
        test_json_bombs(small_server)
    finally:
        stop.set()
        watcher.join()
    # The budget, and what nobody counts: code, stacks, the allocator's free memory.
    assert max(peaks) < (LIMIT_MIB + 256) << 20, max(peaks) >> 20
