"""Who may do what, over the whole binary: TLS, certificates, tokens, hosts, origins, limits."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import grpc
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from cryptography import x509
from tritonclient.utils import InferenceServerException

from cluster import Cluster
from secure import MODEL, VALUES, Authority, over_grpc, start, tensor, token
from support import ASSETS, BINARY, Server, fp32_body, free_ports, infer_url, wait_for



def test_clients_speak_tls(repository: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.sign("server")
    ca = str(authority.path)
    flags = ["--tls-cert", certificate, "--tls-key", key]
    server = start(repository, tmp_path / "log", *flags, ca=ca)
    try:
        body = fp32_body(1.5)
        assert requests.post(infer_url(server, MODEL), json=body, verify=ca).status_code == 200
        curl = ["curl", "-sS", "--fail", "--cacert", ca, f"{server.url}/v2/health/ready"]
        subprocess.run(curl, check=True)
        client = triton_http.InferenceServerClient(
            f"localhost:{server.http_port}", ssl=True, ssl_options={"ca_certs": ca}
        )
        reply = client.infer(MODEL, [tensor(triton_http)])
        assert (reply.as_numpy("OUTPUT0") == VALUES).all()
        over_grpc(server, ca)
        with pytest.raises(requests.exceptions.SSLError):
            requests.get(f"{server.url}/v2", verify=True)
        with pytest.raises(requests.RequestException):
            requests.get(f"http://localhost:{server.http_port}/v2", timeout=5)
        # Versions before TLS 1.2 are refused.
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        with socket.create_connection(("127.0.0.1", server.http_port)) as stream:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(stream, server_hostname="localhost")
    finally:
        server.stop()


def test_a_rotated_certificate_fails_no_request(repository: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.sign("server")
    ca = str(authority.path)
    flags = ["--tls-cert", certificate, "--tls-key", key]
    server = start(repository, tmp_path / "log", *flags, ca=ca)
    try:

        def serial() -> int:
            pem = ssl.get_server_certificate(("localhost", server.http_port))
            return x509.load_pem_x509_certificate(pem.encode()).serial_number

        first, deadline = serial(), time.monotonic() + 20
        session = requests.Session()
        # Variables of the environment would name other authorities.
        session.trust_env, session.verify = False, ca
        authority.sign("server")
        while serial() == first:
            assert time.monotonic() < deadline, "the certificate is not read again"
            reply = session.post(infer_url(server, MODEL), json=fp32_body(1.5))
            assert reply.status_code == 200
            assert requests.get(f"{server.url}/v2", verify=ca).status_code == 200
        assert session.post(infer_url(server, MODEL), json=fp32_body(1.5)).status_code == 200
    finally:
        server.stop()


def test_client_certificates_are_checked(repository: Path, tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path, "ca"), Authority(tmp_path, "clients")
    certificate, key = authority.sign("server")
    ca = str(authority.path)
    flags = ["--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", str(clients.path)]
    server = start(repository, tmp_path / "log", *flags, ca=ca)
    try:
        good, expired = clients.sign("good"), clients.sign("expired", days=-1)
        foreign = authority.sign("foreign")
        reply = requests.get(f"{server.url}/v2", verify=ca, cert=good)
        assert reply.status_code == 200
        over_grpc(server, ca, good)
        for pair in (None, expired, foreign):
            with pytest.raises(requests.RequestException):
                requests.get(f"{server.url}/v2", verify=ca, cert=pair, timeout=10)
            with pytest.raises(InferenceServerException):
                over_grpc(server, ca, pair)
        page = requests.get(f"{server.admin}/metrics", verify=ca, cert=good).text
        line = next(x for x in page.splitlines() if 'reason="certificate"' in x)
        assert int(line.split()[-1]) >= 6
        assert requests.get(f"{server.admin}/metrics", verify=ca).status_code == 401
    finally:
        server.stop()


def test_tokens_decide_who_may_do_what(repository: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    infer = token(data, "--scope", "infer", "--models", "identity_*", "--name", "camera")
    expired = token(data, "--scope", "admin", "--expires", "0s")
    admin = token(data, "--scope", "admin")
    audit = tmp_path / "audit.jsonl"
    flags = ["--audit-log", str(audit), "--data-dir", str(data)]
    server = start(repository, tmp_path / "log", *flags)
    try:

        def post(path: str, key: str | None, **extra: object) -> requests.Response:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            headers["x-request-id"] = "test-7"
            return requests.post(f"{server.url}{path}", headers=headers, **extra)

        path = f"/v2/models/{MODEL}/infer"
        body = {"json": fp32_body(1.5)}
        assert post(path, infer, **body).status_code == 200
        assert post(path, None, **body).status_code == 401
        assert post(path, expired, **body).status_code == 401
        assert post(path, infer[:-2] + "xx", **body).status_code == 401
        assert post("/v2/models/add_sub/infer", infer, **body).status_code == 403
        urgent = {"json": fp32_body(1.5, parameters={"priority": 1})}
        assert post(path, infer, **urgent).status_code == 403
        load = f"/v2/repository/models/{MODEL}/load"
        assert post(load, infer).status_code == 403
        assert post(load, admin).status_code == 200
        assert post("/register", infer).status_code == 403
        client = triton_grpc.InferenceServerClient(server.grpc)
        for headers, code in (
            ({}, "UNAUTHENTICATED"),
            ({"authorization": "Bearer atoll_a_b"}, "UNAUTHENTICATED"),
        ):
            with pytest.raises(InferenceServerException) as refused:
                client.infer(MODEL, [tensor(triton_grpc)], headers=headers)
            assert code in str(refused.value.status())
        headers = {"authorization": f"Bearer {infer}"}
        client.infer(MODEL, [tensor(triton_grpc)], headers=headers)
        with pytest.raises(InferenceServerException) as refused:
            client.unload_model(MODEL, headers=headers)
        assert "PERMISSION_DENIED" in str(refused.value.status())
        # Revoked without a restart.
        identifier = infer.split("_")[1]
        revoke = [str(BINARY), "token", "revoke", identifier, "--data-dir", str(data)]
        subprocess.run(revoke, check=True)
        assert wait_for(lambda: post(path, infer, **body).status_code == 401)
        listed = [str(BINARY), "token", "list", "--json", "--data-dir", str(data)]
        shown = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
        states = {item["id"]: item["state"] for item in json.loads(shown)}
        assert states[identifier] == "revoked"
        assert sorted(states.values()) == ["expired", "revoked", "valid"]
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        reasons = {line.get("reason") for line in lines if line["event"] == "refusal"}
        assert reasons >= {"no_token", "wrong_token", "expired_token", "scope", "model", "class"}
        assert any(line.get("change") == "load" and line["status"] == 200 for line in lines)
        assert {line.get("request_id") for line in lines} >= {"test-7"}
        written = audit.read_text() + server.log_text() + shown
        for key in (infer, expired, admin):
            assert key.split("_", 2)[2] not in written, "a secret was written"
        server.assert_alive()
    finally:
        server.stop()


def test_other_hosts_and_origins_are_refused(repository: Path, tmp_path: Path) -> None:
    server = start(repository, tmp_path / "log")
    try:
        for headers, status in (
            ({"host": "evil.example"}, 403),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"host": "localhost"}, 200),
        ):
            reply = requests.get(f"{server.url}/v2", headers=headers)
            assert reply.status_code == status, headers
    finally:
        server.stop()


def test_other_addresses_need_tls_or_consent(repository: Path, tmp_path: Path) -> None:
    command = [str(BINARY), "serve", "--model-repository", str(repository), "--host", "0.0.0.0"]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command += ["--data-dir", str(tmp_path / "data")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "--insecure" in refused.stderr
    server = start(repository, tmp_path / "log", "--host", "0.0.0.0", "--insecure")
    try:
        body = fp32_body(1.5, parameters={"atoll_class": "rt"})
        reply = requests.post(infer_url(server, MODEL), json=body)
        assert reply.status_code == 403, "strangers choose real time"
        assert requests.post(infer_url(server, MODEL), json=fp32_body(1.5)).status_code == 200
    finally:
        server.stop()


def test_held_connections_block_nothing(repository: Path, tmp_path: Path) -> None:
    flags = ["--max-connections", "200", "--head-timeout-secs", "2"]
    server = start(repository, tmp_path / "log", *flags)
    held = []
    try:
        for _ in range(500):
            held.append(socket.create_connection(("127.0.0.1", server.http_port)))
        live = f"{server.url}/v2/health/live"
        assert requests.get(live, timeout=10).status_code == 200
        assert requests.post(infer_url(server, MODEL), json=fp32_body(1.5)).status_code == 200
        closed = lambda reason: server.metric("atoll_connections_closed_total", reason=reason)
        silent = lambda: closed("head_timeout")
        # On a slow machine the first ones time out before they are displaced.
        assert closed("displaced") >= 100 and closed("displaced") + silent() >= 300
        assert wait_for(lambda: silent() >= 100)
        # A body that never ends does not make the exit fail.
        stalled = socket.create_connection(("127.0.0.1", server.http_port))
        head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n"
        stalled.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        assert wait_for(lambda: server.metric("atoll_requests_in_flight") == 1)
        server.terminate()
        assert server.wait(45) == 0, server.log_tail()
    finally:
        for stream in held:
            stream.close()
        server.stop()


def test_a_self_signed_certificate_serves(repository: Path, tmp_path: Path) -> None:
    ports = free_ports(3)
    command = [str(BINARY), "serve", "--model-repository", str(repository), "--tls-self-signed"]
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        command += [flag, str(port)]
    server = Server(ports, command, tmp_path / "log")
    pem = tmp_path / "self.pem"

    def ready() -> bool:
        try:
            pem.write_text(ssl.get_server_certificate(("127.0.0.1", ports[0])))
            url = f"https://localhost:{ports[0]}/v2/health/ready"
            return requests.get(url, verify=str(pem), timeout=2).status_code == 200
        except (OSError, requests.RequestException):
            return False

    server.is_ready = ready  # type: ignore[method-assign]
    server.start()
    try:
        credentials = grpc.ssl_channel_credentials(pem.read_bytes())
        with grpc.secure_channel(f"localhost:{ports[1]}", credentials) as channel:
            grpc.channel_ready_future(channel).result(timeout=20)
    finally:
        server.stop()


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_frontends_reach_backends_over_mutual_tls(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(ASSETS / "digits.onnx", models / "digits.onnx")
    authority, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    ca = str(authority.path)
    backend, frontend, stranger = (
        authority.sign("backend"),
        authority.sign("frontend"),
        other.sign("stranger"),
    )
    cluster = Cluster(tmp_path, models)
    try:
        cluster.scheduler("scheduler")
        own = ["--tls-cert", backend[0], "--tls-key", backend[1], "--tls-client-ca", ca]
        cluster.backend("backend", *own)
        good = ["--backend-ca", ca, "--backend-cert", frontend[0], "--backend-key", frontend[1]]
        served = cluster.frontend("frontend", *good, "--backend-tls-name", "localhost")
        wrong = ["--backend-ca", ca, "--backend-cert", stranger[0], "--backend-key", stranger[1]]
        refused = cluster.frontend("refused", *wrong)
        plain = cluster.frontend("plain")
        cluster.wait_ready()
        picture = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}

        def post(server: Server) -> int:
            body = {"inputs": [picture]}
            return requests.post(infer_url(server, "digits"), json=body).status_code

        assert wait_for(lambda: post(served) == 200), cluster.logs()
        assert post(refused) == 503
        assert post(plain) == 503
    finally:
        cluster.stop()
