"""Repository index, load and unload over both protocols, in explicit mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpc_api
import tritonclient.http as http_api
from tritonclient.utils import InferenceServerException

from support import Server, fp32_body, infer_url, make_repository, serve


@pytest.fixture(scope="module")
def folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(models, tmp_path_factory.mktemp("explicit") / "models")


@pytest.fixture(scope="module")
def explicit(folder: Path) -> Iterator[Server]:
    """A server that loads only identity_fp32 at the start."""
    flags = ["--model-control-mode", "explicit", "--load-model", "identity_fp32"]
    server = serve(folder, folder.parent / "server.log", *flags)
    yield server
    server.stop()


def test_the_index_lists_all_models(server: Server) -> None:
    reply = requests.post(f"{server.url}/v2/repository/index", json={}, timeout=60)
    assert reply.status_code == 200
    index = {entry["name"]: entry for entry in reply.json()}
    assert {"identity_fp32", "identity_int64", "identity_bytes", "add_sub"} <= set(index)
    assert index["identity_fp32"]["state"] == "READY"
    assert index["identity_fp32"]["version"] == "1"


def test_explicit_mode_loads_only_named_models(explicit: Server) -> None:
    client = http_api.InferenceServerClient(explicit.http)
    states = {
        entry["name"]: entry.get("state", "") for entry in client.get_model_repository_index()
    }
    assert states["identity_fp32"] == "READY"
    assert states.get("add_sub", "") != "READY"
    ready = requests.post(
        f"{explicit.url}/v2/repository/index", json={"ready": True}, timeout=60
    ).json()
    assert "add_sub" not in {entry["name"] for entry in ready}


def check_load_and_unload(
    client: http_api.InferenceServerClient | grpc_api.InferenceServerClient, model: str
) -> None:
    assert not client.is_model_ready(model)
    client.load_model(model)
    assert client.is_model_ready(model)
    client.load_model(model)  # a second load has no effect
    client.unload_model(model)
    assert not client.is_model_ready(model)
    client.load_model(model)
    assert client.is_model_ready(model)
    client.unload_model(model)


def test_http_loads_and_unloads(explicit: Server) -> None:
    check_load_and_unload(http_api.InferenceServerClient(explicit.http), "add_sub")


def test_grpc_loads_and_unloads(explicit: Server) -> None:
    check_load_and_unload(grpc_api.InferenceServerClient(explicit.grpc), "identity_int64")


def test_infer_needs_a_loaded_model(explicit: Server) -> None:
    client = http_api.InferenceServerClient(explicit.http)
    given = http_api.InferInput("INPUT0", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[b"x"]], object))
    with pytest.raises(InferenceServerException) as raised:
        client.infer("identity_bytes", [given])
    assert raised.value.status() in ("404", "400", "503")
    client.load_model("identity_bytes")
    assert client.infer("identity_bytes", [given]).as_numpy("OUTPUT0").tolist() == [[b"x"]]
    client.unload_model("identity_bytes")
    with pytest.raises(InferenceServerException):
        client.infer("identity_bytes", [given])


def test_unload_affects_no_other_model(explicit: Server) -> None:
    client = http_api.InferenceServerClient(explicit.http)
    client.load_model("add_sub")
    client.unload_model("add_sub")
    reply = requests.post(infer_url(explicit, "identity_fp32"), json=fp32_body(1.0), timeout=60)
    assert reply.status_code == 200


def test_loading_a_missing_model_is_refused(explicit: Server) -> None:
    with pytest.raises(InferenceServerException) as raised:
        http_api.InferenceServerClient(explicit.http).load_model("no_such_model")
    assert raised.value.status() in ("400", "404")
    with pytest.raises(InferenceServerException):
        grpc_api.InferenceServerClient(explicit.grpc).load_model("no_such_model")
    for name in ("..%2F..%2Fetc", "%2e%2e", "a%2Fb"):
        reply = requests.post(
            f"{explicit.url}/v2/repository/models/{name}/load", json={}, timeout=60
        )
        assert reply.status_code in (400, 404), name
    explicit.assert_alive()


def test_loading_a_broken_model_is_refused(explicit: Server, folder: Path) -> None:
    """A broken file fails its own load and nothing else."""
    broken = folder / "broken.onnx"
    broken.write_bytes(b"this is no model")
    try:
        with pytest.raises(InferenceServerException) as raised:
            http_api.InferenceServerClient(explicit.http).load_model("broken")
        assert raised.value.message()
    finally:
        broken.unlink()
    explicit.assert_alive()
