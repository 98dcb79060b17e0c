"""Bad requests over HTTP get the right status code and a JSON error; the server keeps running."""

from __future__ import annotations

import json
import socket
import struct

import pytest
import requests

from support import Server, fp32_body, infer_url


def assert_error(server: Server, reply: requests.Response, *codes: int) -> None:
    assert reply.status_code in codes, f"{reply.status_code}: {reply.text[:300]}"
    assert isinstance(reply.json()["error"], str)
    assert reply.json()["error"]
    server.assert_alive()


def one_input(**change: object) -> dict[str, object]:
    body = fp32_body(1.0)
    body["inputs"][0].update(change)
    return body


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/no_such_model"),
        ("GET", "/v2/models/no_such_model/config"),
        ("GET", "/v2/models/no_such_model/stats"),
        ("GET", "/v2/models/identity_fp32/versions/9"),
        ("POST", "/v2/models/no_such_model/infer"),
        ("POST", "/v2/models/identity_fp32/versions/9/infer"),
        ("GET", "/v2/no_such_route"),
        ("GET", "/no_such_route"),
    ],
)
def test_unknown_paths_are_not_found(server: Server, method: str, path: str) -> None:
    body = fp32_body(1.0) if method == "POST" else None
    assert_error(server, requests.request(method, server.url + path, json=body, timeout=60), 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/identity_fp32/infer"),
        ("DELETE", "/v2/models/identity_fp32"),
        ("POST", "/v2/health/ready"),
        ("PUT", "/v2"),
        ("GET", "/v2/repository/index"),
        ("GET", "/classify"),
        ("GET", "/register"),
    ],
)
def test_wrong_methods_are_refused(server: Server, method: str, path: str) -> None:
    assert_error(server, requests.request(method, server.url + path, timeout=60), 405)


BAD_BODIES = {
    "nothing": b"",
    "cut": b'{"inputs":[',
    "no-object": b"[]",
    "no-inputs": b"{}",
    "inputs-no-list": b'{"inputs":{}}',
    "input-no-object": b'{"inputs":[3]}',
    "empty-inputs": b'{"inputs":[]}',
    "no-text": b"\xff\xfe\x00",
    "deep": b'{"inputs":' + b"[" * 100_000,
    "datatype": one_input(datatype="INT32", data=[1]),
    "datatype-unknown": one_input(datatype="FP99"),
    "datatype-missing": {"inputs": [{"name": "INPUT0", "shape": [1, 1], "data": [1.0]}]},
    "name": one_input(name="WRONG"),
    "shape-columns": one_input(shape=[1, 2], data=[1.0, 2.0]),
    "shape-rank": one_input(shape=[1]),
    "shape-negative": one_input(shape=[-1, 1]),
    "shape-huge": one_input(shape=[2**62, 4]),
    "shape-larger-than-memory": one_input(shape=[2**40, 1]),
    "shape-text": one_input(shape="1,1"),
    "data-missing": {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32"}]},
    "data-short": one_input(shape=[2, 1]),
    "data-long": one_input(data=[1.0, 2.0]),
    "data-text": one_input(data=["one"]),
    "data-null": one_input(data=[None]),
    "extra-input": {
        "inputs": [
            *fp32_body(1.0)["inputs"],
            {"name": "X", "shape": [1], "datatype": "FP32", "data": [1]},
        ]
    },
    "output-unknown": fp32_body(1.0, outputs=[{"name": "WRONG"}]),
}


@pytest.mark.parametrize("kind", list(BAD_BODIES))
def test_bad_bodies_are_refused(server: Server, kind: str) -> None:
    body = BAD_BODIES[kind]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    assert_error(
        server,
        requests.post(infer_url(server, "identity_fp32"), data=data, headers=headers, timeout=60),
        400,
    )


def test_a_missing_input_is_refused(server: Server) -> None:
    tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
    assert_error(
        server,
        requests.post(infer_url(server, "add_sub"), json={"inputs": [tensor]}, timeout=60),
        400,
    )


def post_binary(
    server: Server, model: str, datatype: str, size: object, tail: bytes, **options: object
) -> requests.Response:
    """Sends a binary request whose sizes may contradict each other."""
    tensor = {
        "name": "INPUT0",
        "shape": [1, 1],
        "datatype": datatype,
        "parameters": {"binary_data_size": size},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    length = options.get("header_length", len(head))
    headers = {
        "Inference-Header-Content-Length": str(length),
        "Content-Type": "application/octet-stream",
    }
    return requests.post(infer_url(server, model), data=head + tail, headers=headers, timeout=60)


def test_binary_request_is_well_formed(server: Server) -> None:
    """`post_binary` with correct sizes succeeds, so the tests below fail for their own reason."""
    reply = post_binary(server, "identity_fp32", "FP32", 4, struct.pack("<f", 2.0))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("size", "tail"),
    [
        (8, b"\x00" * 4),
        (2**63, b"\x00" * 4),
        (2**31, b"\x00" * 4),
        (2, b"\x00" * 4),
        (0, b""),
        (-4, b"\x00" * 4),
        ("4", b"\x00" * 4),
        (4.5, b"\x00" * 4),
        (8, b"\x00" * 8),
        (4, b""),
    ],
    ids=[
        "past-the-end",
        "2^63",
        "2GB",
        "less",
        "zero",
        "negative",
        "text",
        "fraction",
        "more-than-shape",
        "no-data",
    ],
)
def test_a_wrong_binary_size_is_refused(server: Server, size: object, tail: bytes) -> None:
    assert_error(server, post_binary(server, "identity_fp32", "FP32", size, tail), 400)


@pytest.mark.parametrize("length", [10**6, -1, "many", 5, 2**70])
def test_a_wrong_header_length_is_refused(server: Server, length: object) -> None:
    reply = post_binary(server, "identity_fp32", "FP32", 4, b"\x00" * 4, header_length=length)
    assert_error(server, reply, 400)


@pytest.mark.parametrize(
    "element",
    [
        struct.pack("<I", 100) + b"abc",
        struct.pack("<I", 0xFFFFFFFF),
        b"\x01\x00",
        struct.pack("<I", 1) + b"ab",
    ],
    ids=["past-the-end", "4GB", "half-a-length", "rest"],
)
def test_a_wrong_string_length_is_refused(server: Server, element: bytes) -> None:
    assert_error(server, post_binary(server, "identity_bytes", "BYTES", len(element), element), 400)


def test_bad_compression_is_refused(server: Server) -> None:
    for encoding, data in (
        ("gzip", b"no gzip at all"),
        ("deflate", b"\xff" * 20),
        ("quantum", b"{}"),
    ):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        reply = requests.post(
            infer_url(server, "identity_fp32"), data=data, headers=headers, timeout=60
        )
        assert_error(server, reply, 400, 415)


def exchange(server: Server, head: bytes, body: bytes = b"", seconds: float = 60) -> bytes:
    """Sends raw bytes and reads until the server replies or closes the connection."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=seconds) as link:
        link.sendall(head + body)
        try:
            return link.recv(65536)
        except ConnectionResetError:
            return b""


def test_a_huge_content_length_is_refused(server: Server) -> None:
    """A body of ten terabytes is refused at once, without allocating memory for it."""
    path = "/v2/models/identity_fp32/infer"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {10**13}\r\n\r\n"
    reply = exchange(server, head.encode(), b"{")
    assert reply.split(b" ")[1] in (b"400", b"413"), reply[:200]
    server.assert_alive()


def test_bytes_that_are_not_http_do_no_harm(server: Server) -> None:
    exchange(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n")
    server.assert_alive()


def test_an_incomplete_body_does_no_harm(server: Server) -> None:
    head = "POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as link:
        link.sendall(head.encode() + b'{"inputs"')
    server.assert_alive()
