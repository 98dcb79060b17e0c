"""The v2 protocol over HTTP, with the unmodified tritonclient where it supports it."""

from __future__ import annotations

import statistics
import struct
import time

import numpy as np
import pytest
import requests
import tritonclient.http as client_api

from support import Server, fp32_body, infer_url

Client = client_api.InferenceServerClient

VALUES = {
    "identity_fp32": ("FP32", np.array([[1.5], [-2.25], [0.0]], np.float32)),
    "identity_int64": ("INT64", np.array([[2**62], [-1]], np.int64)),
    "identity_bytes": ("BYTES", np.array([["grün".encode()], [b""], [b"\x00\xff"]], object)),
}
# JSON cannot represent bytes that are not text.
TEXT = np.array([["grün"], [""]], object)


def tensor(
    name: str, datatype: str, value: np.ndarray, binary: bool = True
) -> client_api.InferInput:
    result = client_api.InferInput(name, list(value.shape), datatype)
    result.set_data_from_numpy(value, binary_data=binary)
    return result


def test_health_is_reported(http: Client) -> None:
    assert http.is_server_live()
    assert http.is_server_ready()
    assert http.is_model_ready("identity_fp32")
    assert http.is_model_ready("identity_fp32", "1")
    assert not http.is_model_ready("no_such_model")


def test_health_bodies_are_empty(server: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/identity_fp32/ready"):
        reply = requests.get(server.url + path, timeout=60)
        assert (reply.status_code, reply.content) == (200, b"")


def test_server_metadata_is_complete(http: Client) -> None:
    metadata = http.get_server_metadata()
    assert metadata["name"]
    assert metadata["version"]
    wanted = {
        "binary_tensor_data",
        "model_repository",
        "model_configuration",
        "statistics",
        "parameters",
    }
    assert wanted <= set(metadata["extensions"])


def test_model_metadata_lists_tensors(http: Client) -> None:
    metadata = http.get_model_metadata("add_sub")
    assert metadata["name"] == "add_sub"
    assert metadata["versions"] == ["1"]
    assert metadata["platform"]
    wanted = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in (0, 1)]
    assert sorted(metadata["inputs"], key=lambda t: t["name"]) == wanted
    wanted = [{"name": f"OUTPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in (0, 1)]
    assert sorted(metadata["outputs"], key=lambda t: t["name"]) == wanted
    assert http.get_model_metadata("add_sub", "1") == metadata


@pytest.mark.parametrize(
    ("model", "datatype"),
    [
        ("identity_fp32", "TYPE_FP32"),
        ("identity_int64", "TYPE_INT64"),
        ("identity_bytes", "TYPE_STRING"),
    ],
)
def test_model_config_lists_tensors(http: Client, model: str, datatype: str) -> None:
    config = http.get_model_config(model)
    assert config["name"] == model
    assert config["max_batch_size"] >= 0
    (given,) = config["input"]
    assert (given["name"], given["data_type"]) == ("INPUT0", datatype)
    # The dimensions include the batch only if there is no batch size.
    assert [int(d) for d in given["dims"]] == ([1] if config["max_batch_size"] else [-1, 1])
    assert [t["name"] for t in config["output"]] == ["OUTPUT0"]


@pytest.mark.parametrize("binary_out", [True, False], ids=["binary-out", "json-out"])
@pytest.mark.parametrize("binary_in", [True, False], ids=["binary-in", "json-in"])
@pytest.mark.parametrize("model", list(VALUES))
def test_infer_returns_the_input(
    http: Client, model: str, binary_in: bool, binary_out: bool
) -> None:
    datatype, value = VALUES[model]
    if datatype == "BYTES" and not (binary_in and binary_out):
        value = TEXT
    wanted = client_api.InferRequestedOutput("OUTPUT0", binary_data=binary_out)
    result = http.infer(model, [tensor("INPUT0", datatype, value, binary_in)], outputs=[wanted])
    got = result.as_numpy("OUTPUT0")
    assert got.shape == value.shape
    if datatype == "BYTES":
        as_bytes = [
            [v.encode() if isinstance(v, str) else v for v in row] for row in value.tolist()
        ]
        got_bytes = [[v.encode() if isinstance(v, str) else v for v in row] for row in got.tolist()]
        assert got_bytes == as_bytes
    else:
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
    reply = result.get_response()
    assert reply["model_name"] == model
    assert reply["model_version"] == "1"
    assert reply["outputs"][0]["datatype"] == datatype


def add_sub_inputs(batch: int = 2) -> tuple[list[client_api.InferInput], np.ndarray, np.ndarray]:
    a = np.arange(batch * 16, dtype=np.int32).reshape(batch, 16)
    b = np.full((batch, 16), 3, np.int32)
    return [tensor("INPUT0", "INT32", a), tensor("INPUT1", "INT32", b)], a, b


def test_all_outputs_are_returned_by_default(http: Client) -> None:
    inputs, a, b = add_sub_inputs()
    result = http.infer("add_sub", inputs)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


def test_only_requested_outputs_are_returned(http: Client) -> None:
    inputs, a, b = add_sub_inputs()
    result = http.infer("add_sub", inputs, outputs=[client_api.InferRequestedOutput("OUTPUT1")])
    assert [o["name"] for o in result.get_response()["outputs"]] == ["OUTPUT1"]
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


def test_inputs_may_have_any_order(http: Client) -> None:
    inputs, a, b = add_sub_inputs()
    result = http.infer("add_sub", inputs[::-1])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


def test_id_version_priority_and_timeout_are_accepted(http: Client) -> None:
    value = np.array([[4.0]], np.float32)
    result = http.infer(
        "identity_fp32",
        [tensor("INPUT0", "FP32", value)],
        model_version="1",
        request_id="request-7",
        priority=1,
        timeout=60_000_000,
    )
    assert result.get_response()["id"] == "request-7"
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), value)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_bodies_are_accepted(http: Client, algorithm: str) -> None:
    inputs, a, b = add_sub_inputs(64)
    result = http.infer(
        "add_sub",
        inputs,
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)


def test_async_requests_get_replies(http: Client) -> None:
    pending = [http.async_infer("add_sub", add_sub_inputs(n)[0]) for n in range(1, 9)]
    for n, request in enumerate(pending, 1):
        assert request.get_result().as_numpy("OUTPUT0").shape == (n, 16)


def test_plain_json_is_accepted(server: Server) -> None:
    """Nested data, no outputs, no id: what people send with curl."""
    body = {
        "inputs": [{"name": "INPUT0", "shape": [2, 1], "datatype": "FP32", "data": [[1], [2.5]]}]
    }
    reply = requests.post(infer_url(server, "identity_fp32"), json=body, timeout=60)
    assert reply.status_code == 200
    assert reply.headers["Content-Type"].startswith("application/json")
    (output,) = reply.json()["outputs"]
    assert output == {"name": "OUTPUT0", "datatype": "FP32", "shape": [2, 1], "data": [1.0, 2.5]}


def test_binary_data_output_applies_to_all_outputs(server: Server) -> None:
    body = fp32_body(1.0, 2.0, parameters={"binary_data_output": True})
    reply = requests.post(infer_url(server, "identity_fp32"), json=body, timeout=60)
    assert reply.status_code == 200
    head = int(reply.headers["Inference-Header-Content-Length"])
    assert struct.unpack("<2f", reply.content[head:]) == (1.0, 2.0)


def test_a_raw_body_is_the_only_input(server: Server) -> None:
    """A header length of 0 means that the whole body is the only input."""
    reply = requests.post(
        infer_url(server, "identity_fp32"),
        data=struct.pack("<f", 6.5),
        headers={
            "Inference-Header-Content-Length": "0",
            "Content-Type": "application/octet-stream",
        },
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    head = int(reply.headers.get("Inference-Header-Content-Length", len(reply.content)))
    if head == len(reply.content):
        assert reply.json()["outputs"][0]["data"] == [6.5]
    else:
        assert struct.unpack("<f", reply.content[head:]) == (6.5,)


def test_statistics_count_requests(http: Client) -> None:
    def read() -> dict:
        (stats,) = http.get_inference_statistics("identity_int64")["model_stats"]
        return stats

    before = read()
    for _ in range(3):
        http.infer("identity_int64", [tensor("INPUT0", *VALUES["identity_int64"])])
    after = read()
    assert (after["name"], after["version"]) == ("identity_int64", "1")
    assert (
        after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"]
        == 3
    )
    # Rows or requests, depending on the server; not executions.
    assert after["inference_count"] - before["inference_count"] in (3, 6)
    assert after["execution_count"] > before["execution_count"]
    names = {
        "success",
        "fail",
        "queue",
        "compute_input",
        "compute_infer",
        "compute_output",
        "cache_hit",
        "cache_miss",
    }
    assert names <= set(after["inference_stats"])
    assert all(set(after["inference_stats"][name]) == {"count", "ns"} for name in names)
    every = {stats["name"] for stats in http.get_inference_statistics()["model_stats"]}
    assert {"identity_fp32", "add_sub"} <= every


def test_a_reply_is_one_write(http: Client) -> None:
    """A reply split over two writes waits for the delayed acknowledgement of the client, 40 ms."""
    value = [tensor("INPUT0", "FP32", np.array([[1.0]], np.float32))]

    def median_seconds() -> float:
        times = []
        for _ in range(60):
            started = time.perf_counter()
            http.infer("identity_fp32", value)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    # A busy machine makes some of the attempts slow, but not all.
    assert any(median_seconds() < 0.02 for _ in range(10))
