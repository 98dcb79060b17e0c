"""The TLS of all three ports as a scanner sees it, unmodified clients over it, and certificates
that change under load."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from secure import MODEL, VALUES, Authority, SecureServer, over_grpc, start, tensor, token
from support import fp32_body, infer_url, wait_for

TLS12, TLS13 = 0x0303, 0x0304
# Forward secrecy and authenticated encryption, by the numbers of IANA.
GOOD_TLS12 = {0xC02B, 0xC02C, 0xC02F, 0xC030, 0xCCA8, 0xCCA9}
GOOD_TLS13 = {0x1301, 0x1302, 0x1303}
SIGNALING = {0x00FF, 0x5600}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ca")


@pytest.fixture(scope="module")
def secure(
    authority: Authority, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureServer]:
    folder = tmp_path_factory.mktemp("tls")
    repository = folder / "models" / MODEL / "1"
    repository.mkdir(parents=True)
    shutil.copy(models / f"{MODEL}.onnx", repository / "model.onnx")
    certificate, key = authority.sign("server")
    flags = ["--tls-cert", certificate, "--tls-key", key]
    running = start(folder / "models", folder / "log", *flags, ca=str(authority.path))
    yield running
    running.stop()


def ports(server: SecureServer) -> list[int]:
    return [server.http_port, server.grpc_port, server.metrics_port]


def block(length_bytes: int, data: bytes) -> bytes:
    return len(data).to_bytes(length_bytes, "big") + data


def client_hello(version: int, ciphers: list[int], highest: int) -> bytes:
    """A hello that offers `ciphers` up to version `highest`. Written by hand, because libraries
    refuse to offer what servers must refuse."""
    numbers = lambda values: b"".join(value.to_bytes(2, "big") for value in values)
    extensions = [
        (0, block(2, b"\0" + block(2, b"localhost"))),
        (10, block(2, numbers([29, 23, 24]))),
        (11, block(1, b"\0")),
        (13, block(2, numbers([0x0403, 0x0804, 0x0401, 0x0503, 0x0201, 0x0203]))),
        (16, block(2, block(1, b"h2"))),
    ]
    if highest >= TLS13:
        key = os.urandom(32)
        extensions.append((43, block(1, numbers([TLS13, TLS12]))))
        extensions.append((51, block(2, numbers([29]) + block(2, key))))
    packed = b"".join(kind.to_bytes(2, "big") + block(2, data) for kind, data in extensions)
    body = version.to_bytes(2, "big") + os.urandom(32) + block(1, b"")
    body += block(2, numbers(ciphers)) + block(1, b"\0") + block(2, packed)
    hello = b"\x01" + block(3, body)
    return b"\x16" + min(version, 0x0301).to_bytes(2, "big") + block(2, hello)


def negotiate(port: int, hello: bytes) -> tuple[int, int] | None:
    """Version and cipher that the server selects; None for an alert or a closed connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stream:
        stream.sendall(hello)
        data = b""
        while len(data) < 80:
            try:
                more = stream.recv(4096)
            except ConnectionError:
                more = b""
            if not more:
                break
            data += more
            if data[0] != 0x16:
                break
    if not data or data[0] != 0x16 or data[5] != 2:
        assert not data or data[0] == 0x15, data[:20]
        return None
    version, session = struct.unpack_from(">H", data, 9)[0], data[43]
    cipher = struct.unpack_from(">H", data, 44 + session)[0]
    # A ServerHello of TLS 1.3 has the older number, and the newer one in an extension.
    return (TLS13 if cipher in GOOD_TLS13 else version), cipher


def test_only_modern_versions_and_ciphers_are_negotiated(secure: SecureServer) -> None:
    all_ciphers = [*range(0x0001, 0x0100), *range(0xC001, 0xC0FF), *range(0xCC13, 0xCCAF)]
    weak = [cipher for cipher in all_ciphers if cipher not in GOOD_TLS12 | SIGNALING]
    everything = [*GOOD_TLS13, *GOOD_TLS12, *weak]
    for port in ports(secure):
        # SSL 3 to TLS 1.1 with everything that there ever was.
        for version in (0x0300, 0x0301, 0x0302):
            assert negotiate(port, client_hello(version, everything, version)) is None, version
        # TLS 1.2 with weak ciphers only.
        assert negotiate(port, client_hello(TLS12, weak, TLS12)) is None
        accepted = set()
        for cipher in GOOD_TLS12:
            found = negotiate(port, client_hello(TLS12, [cipher], TLS12))
            accepted |= {found} - {None}
        # The key is ECDSA, so that half of them remain.
        assert accepted == {(TLS12, cipher) for cipher in (0xC02B, 0xC02C, 0xCCA9)}
        for cipher in GOOD_TLS13:
            assert negotiate(port, client_hello(TLS12, [cipher], TLS13)) == (TLS13, cipher)
        # The server prefers the newer version and a good cipher, whatever the client's order is.
        version, cipher = negotiate(port, client_hello(TLS12, everything[::-1], TLS13))
        assert (version, cipher in GOOD_TLS13) == (TLS13, True)
    secure_alive(secure)


def secure_alive(server: SecureServer) -> None:
    assert server.process is not None and server.process.poll() is None
    assert requests.get(f"{server.url}/v2/health/live", verify=server.ca).status_code == 200


def context(server: SecureServer, *protocols: str) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=server.ca)
    if protocols:
        made.set_alpn_protocols(list(protocols))
    return made


def handshake(port: int, made: ssl.SSLContext, session: object = None) -> ssl.SSLSocket:
    stream = socket.create_connection(("127.0.0.1", port), timeout=20)
    return made.wrap_socket(stream, server_hostname="localhost", session=session)


def test_application_protocols(secure: SecureServer) -> None:
    rest, rpc, admin = ports(secure)
    for port, offered, selected in (
        (rest, ["h2", "http/1.1"], "h2"),
        (rest, ["http/1.1"], "http/1.1"),
        (rest, [], None),
        (rpc, ["h2"], "h2"),
        (rpc, ["http/1.1", "h2"], "h2"),
        (admin, ["http/1.1"], "http/1.1"),
    ):
        with handshake(port, context(secure, *offered)) as stream:
            assert stream.selected_alpn_protocol() == selected, (port, offered)
    # Cross-protocol attacks: a name that is not spoken here ends the handshake.
    for port, offered in ((rest, ["ftp"]), (rpc, ["http/1.1"]), (admin, ["smtp"])):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            handshake(port, context(secure, *offered)).close()


def test_sessions_are_resumed_and_carry_no_early_data(secure: SecureServer) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        made = context(secure, "http/1.1")
        made.minimum_version = made.maximum_version = version
        with handshake(secure.http_port, made) as stream:
            stream.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert stream.recv(4096).startswith(b"HTTP/1.1 200")
            # TLS 1.3 sends what resumes it after the handshake, so it has been read by now.
            session = stream.session
        with handshake(secure.http_port, made, session) as stream:
            assert stream.session_reused, version
            assert stream.compression() is None
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{secure.http_port}", "-tls1_3"]
    # The reply comes after the sessions that could carry early data.
    request = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    command += ["-ign_eof"]
    shown = subprocess.run(command, input=request, capture_output=True, timeout=60, check=False)
    early = [line for line in shown.stdout.decode().splitlines() if "Max Early Data" in line]
    assert early, shown.stdout.decode()[-2000:]
    assert all(line.split(":")[1].strip() == "0" for line in early), early


def test_renegotiation_is_refused(secure: SecureServer) -> None:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{secure.http_port}", "-tls1_2"]
    command += ["-CAfile", secure.ca, "-alpn", "http/1.1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdin and process.stdout
    time.sleep(0.5)
    process.stdin.write(b"R\n")
    process.stdin.flush()
    time.sleep(0.5)
    # If it had worked, the connection would still serve this request.
    request = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    try:
        process.stdin.write(request)
        process.stdin.close()
    except BrokenPipeError:
        pass
    text = process.stdout.read().decode(errors="replace")
    process.wait(timeout=60)
    assert "RENEGOTIATING" in text, text
    assert "no renegotiation" in text or "HTTP/1.1 200" not in text, text
    assert "Secure Renegotiation IS supported" in text, text
    secure_alive(secure)


def test_garbage_before_and_inside_the_handshake(secure: SecureServer) -> None:
    whole = client_hello(TLS12, [*GOOD_TLS13], TLS13)
    garbage = [os.urandom(400), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 70_000]
    garbage += [whole[:length] for length in range(1, len(whole), 13)]
    garbage += [whole[:at] + b"\xff" + whole[at + 1 :] for at in range(0, len(whole), 7)]
    for port in ports(secure):
        for data in garbage:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as stream:
                try:
                    stream.sendall(data)
                    stream.shutdown(socket.SHUT_WR)
                    while stream.recv(65536):
                        pass
                except TimeoutError:
                    raise
                except OSError:
                    # The server closed it first.
                    pass
    secure_alive(secure)


@pytest.mark.skipif(shutil.which("testssl") is None, reason="testssl.sh is not installed")
@pytest.mark.skipif("ATOLL_TESTSSL" not in os.environ, reason="takes minutes: ATOLL_TESTSSL=1")
def test_testssl_finds_nothing(secure: SecureServer, tmp_path: Path) -> None:
    for port in ports(secure):
        report = tmp_path / f"{port}.json"
        command = ["testssl", "--quiet", "--warnings", "off", "--color", "0", "--ip", "127.0.0.1"]
        command += ["--add-ca", secure.ca, "--jsonfile", str(report), "-p", "-s", "-f", "-U"]
        subprocess.run([*command, f"localhost:{port}"], capture_output=True, check=False)
        findings = json.loads(report.read_text())
        assert len(findings) > 20
        bad = [one for one in findings if one["severity"] in ("MEDIUM", "HIGH", "CRITICAL")]
        assert not bad, bad


def test_unmodified_clients_with_certificates_and_tokens(
    repository: Path, authority: Authority, tmp_path: Path
) -> None:
    clients = Authority(tmp_path, "clients")
    certificate, key = authority.sign("server")
    data, audit = tmp_path / "data", tmp_path / "audit.jsonl"
    secret = token(data, "--scope", "infer")
    expired = token(data, "--scope", "infer", "--expires", "0s")
    metrics = token(data, "--scope", "metrics")
    ca = str(authority.path)
    flags = ["--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", str(clients.path)]
    flags += ["--data-dir", str(data), "--audit-log", str(audit)]
    server = start(repository, tmp_path / "log", *flags, ca=ca)
    pair = clients.sign("camera")
    try:
        bearer = {"authorization": f"Bearer {secret}"}
        url, body = infer_url(server, MODEL), fp32_body(1.5)
        # curl
        curl = ["curl", "-sS", "--fail", "--http2", "--cacert", ca, "--cert", pair[0]]
        curl += ["--key", pair[1], "-H", f"Authorization: Bearer {secret}"]
        sent = subprocess.run(
            [*curl, "-d", json.dumps(body), url], check=True, capture_output=True, text=True
        )
        assert json.loads(sent.stdout)["outputs"][0]["data"] == [1.5]
        # tritonclient over HTTP
        options = {"ca_certs": ca, "certfile": pair[0], "keyfile": pair[1]}
        http = triton_http.InferenceServerClient(
            f"localhost:{server.http_port}", ssl=True, ssl_options=options
        )
        reply = http.infer(MODEL, [tensor(triton_http)], headers=dict(bearer))
        assert (reply.as_numpy("OUTPUT0") == VALUES).all()
        # tritonclient over gRPC
        rpc = triton_grpc.InferenceServerClient(
            f"localhost:{server.grpc_port}",
            ssl=True,
            root_certificates=ca,
            certificate_chain=pair[0],
            private_key=pair[1],
        )
        reply = rpc.infer(MODEL, [tensor(triton_grpc)], headers=dict(bearer))
        assert (reply.as_numpy("OUTPUT0") == VALUES).all()
        # grpc itself, with the standard's health service
        credentials = grpc.ssl_channel_credentials(
            Path(ca).read_bytes(), Path(pair[1]).read_bytes(), Path(pair[0]).read_bytes()
        )
        with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        # Each wrong way is refused, with its reason.
        wrong = {
            "no_token": {},
            "wrong_token": {"authorization": f"Bearer {secret[:-3]}xyz"},
            "expired_token": {"authorization": f"Bearer {expired}"},
            "scope": {"authorization": f"Bearer {metrics}"},
        }
        for reason, headers in wrong.items():
            with pytest.raises(InferenceServerException) as refused:
                rpc.infer(MODEL, [tensor(triton_grpc)], headers=headers)
            expected = "PERMISSION_DENIED" if reason == "scope" else "UNAUTHENTICATED"
            assert expected in str(refused.value.status()), reason
            sent = requests.post(url, json=body, headers=headers, verify=ca, cert=pair)
            assert sent.status_code == (403 if reason == "scope" else 401), reason
        for bad in (None, clients.sign("late", days=-1), authority.sign("foreign")):
            with pytest.raises(requests.RequestException):
                requests.post(url, json=body, headers=bearer, verify=ca, cert=bad, timeout=10)
            with pytest.raises(InferenceServerException):
                over_grpc(server, ca, bad)
        page = requests.get(
            f"{server.admin}/metrics",
            verify=ca,
            cert=pair,
            headers={"authorization": f"Bearer {metrics}"},
        ).text
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        for reason, least in ({reason: 2 for reason in wrong} | {"certificate": 6}).items():
            sample = next(line for line in page.splitlines() if f'reason="{reason}"' in line)
            assert int(sample.split()[-1]) >= least, (reason, sample)
            logged = [line for line in lines if line.get("reason") == reason]
            assert len(logged) >= least and all(line["peer"] for line in logged), reason
    finally:
        server.stop()


class Load:
    """Clients that send requests until they are stopped, and record what fails."""

    def __init__(self, server: SecureServer, ca: str) -> None:
        self.server, self.ca = server, ca
        self.sent, self.failures = 0, []
        self.stopped, self.lock = threading.Event(), threading.Lock()
        work = [self.fresh, self.fresh, self.kept, self.kept, self.rpc, self.rpc_fresh]
        self.threads = [threading.Thread(target=self.run, args=(send,)) for send in work]
        for thread in self.threads:
            thread.start()

    def run(self, send) -> None:
        client = None
        while not self.stopped.is_set():
            try:
                client = send(client)
                with self.lock:
                    self.sent += 1
            except Exception as error:  # noqa: BLE001
                with self.lock:
                    self.failures.append(f"{send.__name__}: {error!r}")
                client = None
            time.sleep(0.005)

    def fresh(self, _: object) -> None:
        body = fp32_body(1.5)
        reply = requests.post(infer_url(self.server, MODEL), json=body, verify=self.ca, timeout=60)
        assert reply.status_code == 200, reply.text

    def kept(self, session: requests.Session | None) -> requests.Session:
        if session is None:
            session = requests.Session()
            # Variables of the environment would name other authorities.
            session.trust_env, session.verify = False, self.ca
        reply = session.post(infer_url(self.server, MODEL), json=fp32_body(1.5), timeout=60)
        assert reply.status_code == 200, reply.text
        return session

    def rpc(self, client: object) -> object:
        if client is None:
            client = triton_grpc.InferenceServerClient(
                f"localhost:{self.server.grpc_port}", ssl=True, root_certificates=self.ca
            )
        client.infer(MODEL, [tensor(triton_grpc)], client_timeout=60)
        return client

    def rpc_fresh(self, _: object) -> None:
        over_grpc(self.server, self.ca)

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(timeout=120)


def test_certificates_rotate_under_load_without_a_failure(
    repository: Path, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    both = tmp_path / "both.pem"
    both.write_bytes(old.path.read_bytes() + new.path.read_bytes())
    certificate, key = old.sign("server")
    flags = ["--tls-cert", certificate, "--tls-key", key]
    server = start(repository, tmp_path / "log", *flags, ca=str(both))

    def serial(port: int) -> int:
        pem = ssl.get_server_certificate(("localhost", port))
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    load = Load(server, str(both))
    try:
        for number in range(4):
            before, sent = [serial(port) for port in ports(server)], load.sent
            # The second half comes from another authority.
            (old if number < 2 else new).sign("next")
            # One file after the other: in between they do not match.
            os.replace(tmp_path / "next.crt", certificate)
            time.sleep(1.5)
            os.replace(tmp_path / "next.key", key)

            def rotated() -> bool:
                return all(serial(p) != b for p, b in zip(ports(server), before, strict=True))

            assert wait_for(rotated), "the certificate is not read again"
            assert wait_for(lambda: load.sent > sent + 20)  # noqa: B023
    finally:
        load.stop()
        server.stop()
    assert not load.failures, load.failures[:5]
    assert load.sent > 100
