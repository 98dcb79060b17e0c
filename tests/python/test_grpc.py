"""The v2 protocol over gRPC with the unmodified tritonclient, and health and reflection."""

from __future__ import annotations

import queue

import grpc as grpc_core
import numpy as np
import pytest
import tritonclient.grpc as client_api
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from support import Server

Client = client_api.InferenceServerClient

VALUES = {
    "identity_fp32": ("FP32", np.array([[1.5], [-2.25]], np.float32)),
    "identity_int64": ("INT64", np.array([[2**62], [-1]], np.int64)),
    "identity_bytes": ("BYTES", np.array([["grün".encode()], [b""], [b"\x00\xff"]], object)),
}


def tensor(name: str, datatype: str, value: np.ndarray) -> client_api.InferInput:
    result = client_api.InferInput(name, list(value.shape), datatype)
    result.set_data_from_numpy(value)
    return result


def code(error: InferenceServerException) -> str:
    return str(error.status()).removeprefix("StatusCode.")


def test_health_is_reported(grpc: Client) -> None:
    assert grpc.is_server_live()
    assert grpc.is_server_ready()
    assert grpc.is_model_ready("identity_fp32")
    assert grpc.is_model_ready("identity_fp32", "1")
    assert not grpc.is_model_ready("no_such_model")


def test_server_metadata_is_complete(grpc: Client) -> None:
    metadata = grpc.get_server_metadata()
    assert metadata.name
    assert metadata.version
    assert "model_repository" in metadata.extensions


def test_model_metadata_lists_tensors(grpc: Client) -> None:
    metadata = grpc.get_model_metadata("add_sub", as_json=True)
    assert metadata["name"] == "add_sub"
    assert metadata["versions"] == ["1"]
    inputs = sorted((t["name"], t["datatype"], t["shape"]) for t in metadata["inputs"])
    assert inputs == [("INPUT0", "INT32", ["-1", "16"]), ("INPUT1", "INT32", ["-1", "16"])]
    outputs = sorted((t["name"], t["datatype"], t["shape"]) for t in metadata["outputs"])
    assert outputs == [("OUTPUT0", "INT32", ["-1", "16"]), ("OUTPUT1", "INT32", ["-1", "16"])]


def test_model_config_lists_tensors(grpc: Client) -> None:
    config = grpc.get_model_config("identity_bytes").config
    assert config.name == "identity_bytes"
    assert config.input[0].name == "INPUT0"
    assert config.input[0].data_type == 13  # TYPE_STRING
    assert list(config.input[0].dims) == ([1] if config.max_batch_size else [-1, 1])


@pytest.mark.parametrize("model", list(VALUES))
def test_infer_returns_the_input(grpc: Client, model: str) -> None:
    datatype, value = VALUES[model]
    result = grpc.infer(
        model,
        [tensor("INPUT0", datatype, value)],
        outputs=[client_api.InferRequestedOutput("OUTPUT0")],
    )
    got = result.as_numpy("OUTPUT0")
    assert got.shape == value.shape
    assert got.tolist() == value.tolist()
    reply = result.get_response()
    assert (reply.model_name, reply.model_version) == (model, "1")
    assert reply.outputs[0].datatype == datatype


def test_two_inputs_give_two_outputs(grpc: Client) -> None:
    a = np.arange(32, dtype=np.int32).reshape(2, 16)
    b = np.full((2, 16), 3, np.int32)
    result = grpc.infer("add_sub", [tensor("INPUT0", "INT32", a), tensor("INPUT1", "INT32", b)])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


def test_id_version_priority_and_timeout_are_accepted(grpc: Client) -> None:
    result = grpc.infer(
        "identity_fp32",
        [tensor("INPUT0", *VALUES["identity_fp32"])],
        model_version="1",
        request_id="request-7",
        priority=1,
        timeout=60_000_000,
    )
    assert result.get_response().id == "request-7"


def test_typed_contents_are_accepted(server: Server) -> None:
    """Clients other than Triton's send values in the typed fields instead of raw bytes."""
    fields = {
        "identity_fp32": ("FP32", "fp32_contents", [1.5, -2.0], "<f4"),
        "identity_int64": ("INT64", "int64_contents", [7, -(2**40)], "<i8"),
    }
    with grpc_core.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        for model, (datatype, field, values, dtype) in fields.items():
            request = service_pb2.ModelInferRequest(model_name=model)
            given = request.inputs.add(name="INPUT0", datatype=datatype, shape=[2, 1])
            getattr(given.contents, field).extend(values)
            reply = infer(request, timeout=60)
            if reply.raw_output_contents:
                got = np.frombuffer(reply.raw_output_contents[0], dtype).tolist()
            else:
                got = list(getattr(reply.outputs[0].contents, field))
            assert got == values


def test_async_requests_get_replies(grpc: Client) -> None:
    replies: queue.Queue[object] = queue.Queue()
    given = [tensor("INPUT0", *VALUES["identity_fp32"])]
    for _ in range(8):
        grpc.async_infer("identity_fp32", given, lambda result, error: replies.put(error or result))
    kinds = [type(replies.get(timeout=60)).__name__ for _ in range(8)]
    assert kinds == ["InferResult"] * 8


def test_statistics_count_requests(grpc: Client) -> None:
    def count() -> int:
        (stats,) = grpc.get_inference_statistics("identity_int64").model_stats
        assert (stats.name, stats.version) == ("identity_int64", "1")
        return stats.inference_stats.success.count

    before = count()
    grpc.infer("identity_int64", [tensor("INPUT0", *VALUES["identity_int64"])])
    assert count() == before + 1


def test_repository_index_lists_models(grpc: Client) -> None:
    index = {model.name: model for model in grpc.get_model_repository_index().models}
    assert {"identity_fp32", "add_sub"} <= set(index)
    assert (index["add_sub"].version, index["add_sub"].state) == ("1", "READY")


@pytest.mark.parametrize(
    ("model", "version", "given", "wanted"),
    [
        ("no_such_model", "", ("INPUT0", "FP32", np.zeros((1, 1), np.float32)), "NOT_FOUND"),
        ("identity_fp32", "9", ("INPUT0", "FP32", np.zeros((1, 1), np.float32)), "NOT_FOUND"),
        ("identity_fp32", "", ("INPUT0", "INT32", np.zeros((1, 1), np.int32)), "INVALID_ARGUMENT"),
        ("identity_fp32", "", ("INPUT0", "FP32", np.zeros((1, 2), np.float32)), "INVALID_ARGUMENT"),
        ("identity_fp32", "", ("INPUT0", "FP32", np.zeros((1,), np.float32)), "INVALID_ARGUMENT"),
        ("identity_fp32", "", ("WRONG", "FP32", np.zeros((1, 1), np.float32)), "INVALID_ARGUMENT"),
    ],
    ids=["model", "version", "datatype", "shape", "rank", "name"],
)
def test_errors_have_the_right_code(
    server: Server, grpc: Client, model: str, version: str, given: tuple, wanted: str
) -> None:
    with pytest.raises(InferenceServerException) as raised:
        grpc.infer(model, [tensor(*given)], model_version=version)
    assert code(raised.value) == wanted
    assert raised.value.message()
    server.assert_alive()


def test_every_call_refuses_an_unknown_model(grpc: Client) -> None:
    for call in (grpc.get_model_metadata, grpc.get_model_config, grpc.get_inference_statistics):
        with pytest.raises(InferenceServerException) as raised:
            call("no_such_model")
        assert code(raised.value) == "NOT_FOUND", call.__name__


def raw_infer(server: Server, request: service_pb2.ModelInferRequest) -> None:
    with grpc_core.insecure_channel(server.grpc) as channel:
        channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )(request, timeout=60)


@pytest.mark.parametrize(
    "raw",
    [[], [b"\x00" * 3], [b"\x00" * 8], [b"\x00" * 4] * 2],
    ids=["none", "short", "long", "two"],
)
def test_raw_contents_of_the_wrong_size_are_refused(server: Server, raw: list[bytes]) -> None:
    request = service_pb2.ModelInferRequest(model_name="identity_fp32", raw_input_contents=raw)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    with pytest.raises(grpc_core.RpcError) as raised:
        raw_infer(server, request)
    assert raised.value.code() == grpc_core.StatusCode.INVALID_ARGUMENT
    server.assert_alive()


def test_hostile_shapes_are_refused(server: Server) -> None:
    for shape in ([-1, 1], [2**62, 4], [1 << 40, 1]):
        request = service_pb2.ModelInferRequest(
            model_name="identity_fp32", raw_input_contents=[b"\x00" * 4]
        )
        request.inputs.add(name="INPUT0", datatype="FP32", shape=shape)
        with pytest.raises(grpc_core.RpcError) as raised:
            raw_infer(server, request)
        assert raised.value.code() == grpc_core.StatusCode.INVALID_ARGUMENT, shape
    server.assert_alive()


def test_the_health_service_reports_serving(server: Server) -> None:
    with grpc_core.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc_core.RpcError) as raised:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=60)
        assert raised.value.code() == grpc_core.StatusCode.NOT_FOUND


def test_reflection_lists_services_and_methods(server: Server) -> None:
    with grpc_core.insecure_channel(server.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= services
        described = database.FindFileContainingSymbol("inference.GRPCInferenceService")
        methods = {
            m.name for s in described.service if s.name == "GRPCInferenceService" for m in s.method
        }
    wanted = {"ServerLive", "ServerReady", "ServerMetadata"}
    wanted |= {"ModelReady", "ModelMetadata", "ModelInfer", "ModelConfig", "ModelStatistics"}
    wanted |= {"RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"}
    assert wanted <= methods
