"""Several devices in one server, and profiling of models when they are loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpc_api
import tritonclient.http as http_api

from support import ASSETS, Server, serve

LIMIT_SECONDS = 60
CLIENTS = 8
# Enough rows that one request keeps a device busy.
ROWS = 400


@pytest.fixture(scope="module")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("devices")
    repository = folder / "models"
    for name, source, settings in (
        ("busy", ASSETS / "digits.onnx", "batching = { policy = 'none' }\n"),
        ("digits", ASSETS / "digits.onnx", "slo_ms = 600000\nbatching = { policy = 'elastic' }\n"),
        ("tight", models / "slow.onnx", "slo_ms = 1\nbatching = { policy = 'elastic' }\n"),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.onnx").write_bytes(source.read_bytes())
        (repository / name / "atoll.toml").write_text(settings)
    running = serve(repository, folder / "server.log", "--device", "cpu,cpu")
    yield running
    running.assert_alive()
    running.stop()


def wait_until(done: object, what: str) -> None:
    assert callable(done)
    end = time.monotonic() + LIMIT_SECONDS
    while not done():
        assert time.monotonic() < end, f"{what} took too long"
        time.sleep(0.02)


def test_models_have_different_homes(pair: Server) -> None:
    homes = {
        line.split('device="')[1].split('"')[0]
        for line in pair.metrics().splitlines()
        if line.startswith("atoll_model_resident_bytes{")
    }
    assert homes == {"cpu#0", "cpu#1"}


def test_a_model_under_load_gets_a_second_replica(pair: Server) -> None:
    client = http_api.InferenceServerClient(pair.http)
    # The gRPC client may be used by several threads.
    shared = grpc_api.InferenceServerClient(pair.grpc)
    metadata = client.get_model_metadata("busy")
    shape = [ROWS, *metadata["inputs"][0]["shape"][1:]]
    values = np.random.default_rng(1).random(shape, np.float32)
    given = grpc_api.InferInput(metadata["inputs"][0]["name"], shape, "FP32")
    given.set_data_from_numpy(values)
    output = metadata["outputs"][0]["name"]
    want = shared.infer("busy", [given]).as_numpy(output)
    sent = 1

    def infer(_: int) -> None:
        got = shared.infer("busy", [given]).as_numpy(output)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    end = time.monotonic() + LIMIT_SECONDS
    with ThreadPoolExecutor(CLIENTS) as pool:
        while len(used_devices(pair, "busy")) < 2:
            assert time.monotonic() < end, pair.log_tail()
            list(pool.map(infer, range(CLIENTS * 4)))
            sent += CLIENTS * 4
    (stats,) = client.get_inference_statistics("busy")["model_stats"]
    assert stats["inference_count"] == sent * ROWS
    assert pair.metric("atoll_replica_changes_total", change="made") >= 1
    client.unload_model("busy")
    assert not client.is_model_ready("busy")
    assert pair.metric("atoll_model_resident_bytes", model="busy") == 0
    client.load_model("busy")
    infer(0)
    client.close()
    shared.close()


def used_devices(server: Server, model: str) -> set[str]:
    """Devices that have run requests of a model."""
    lines = [
        line
        for line in server.metrics().splitlines()
        if line.startswith("atoll_replica_requests_total{")
    ]
    used = [line for line in lines if f'model="{model}"' in line and not line.endswith(" 0")]
    return {line.split('device="')[1].split('"')[0] for line in used}


def parameters(server: Server, model: str) -> dict[str, str]:
    config = requests.get(f"{server.url}/v2/models/{model}/config", timeout=60).json()
    return {key: value["string_value"] for key, value in config["parameters"].items()}


def test_batch_size_follows_profile_and_slo(pair: Server) -> None:
    for model, batch_max in (("digits", "16"), ("tight", "1")):
        wait_until(
            lambda model=model: "atoll_profile_us" in parameters(pair, model), f"measuring {model}"
        )
        known = parameters(pair, model)
        assert known["atoll_batch_max"] == batch_max, known


def test_a_registered_model_serves_while_it_is_profiled(pair: Server) -> None:
    onnx = (ASSETS / "digits.onnx").read_bytes()
    form = {"name": (None, "fresh"), "model": onnx, "slo_ms": (None, "600000")}
    assert requests.post(f"{pair.url}/register", files=form, timeout=60).status_code in (200, 201)
    client = http_api.InferenceServerClient(pair.http)
    (tensor,) = client.get_model_metadata("fresh")["inputs"]
    shape = [max(1, size) for size in tensor["shape"]]
    given = http_api.InferInput(tensor["name"], shape, tensor["datatype"])
    given.set_data_from_numpy(np.zeros(shape, np.float32))
    output = client.get_model_metadata("fresh")["outputs"][0]["name"]
    assert client.infer("fresh", [given]).as_numpy(output) is not None
    wait_until(lambda: "atoll_profile_us" in parameters(pair, "fresh"), "measuring")
    (stats,) = client.get_inference_statistics("fresh")["model_stats"]
    assert stats["inference_count"] == 1, "profiling runs must not count as requests"
    client.close()


def test_missing_devices_are_refused(tmp_path: Path) -> None:
    for device, word in (("cuda:0,cuda:0", "cuda:0/2"), ("cpu,gpu", "there is no device 'gpu'")):
        with pytest.raises(AssertionError, match="atoll exited with 2") as raised:
            serve(ASSETS, tmp_path / "server.log", "--device", device)
        assert word in str(raised.value)
