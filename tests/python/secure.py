"""Certificates, and servers with TLS and tokens, for the tests of security."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
from pathlib import Path

import numpy as np
import requests
import tritonclient.grpc as triton_grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support import BINARY, Server, free_ports

MODEL = "identity_fp32"
VALUES = np.array([[1.5], [-2.25]], np.float32)


class Authority:
    """A certificate authority that writes what it signs as PEM files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject)
        builder = builder.public_key(self.key.public_key()).serial_number(1)
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self.certificate = builder.sign(self.key, hashes.SHA256())
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, days: int = 1) -> tuple[str, str]:
        """A certificate for localhost with its key, valid for so many days from now on."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = x509.CertificateBuilder().subject_name(subject)
        builder = builder.issuer_name(self.certificate.subject).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=10))
        builder = builder.not_valid_after(now + datetime.timedelta(days=days))
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        certificate = builder.sign(self.key, hashes.SHA256())
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(paths[0]), str(paths[1])


class SecureServer(Server):
    """A server over TLS; its health is read from the admin port."""

    ca: str

    @property
    def url(self) -> str:
        return f"https://localhost:{self.http_port}"

    @property
    def admin(self) -> str:
        return f"https://localhost:{self.metrics_port}"

    def is_ready(self) -> bool:
        try:
            reply = requests.get(f"{self.admin}/v2/health/ready", timeout=2, verify=self.ca)
            return reply.status_code == 200
        except requests.RequestException:
            return False


def start(folder: Path, log: Path, *flags: str, ca: str = "") -> Server:
    ports = free_ports(3)
    command = [str(BINARY), "serve", "--model-repository", str(folder)]
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        command += [flag, str(port)]
    server = (SecureServer if ca else Server)(ports, [*command, *flags], log)
    if isinstance(server, SecureServer):
        server.ca = ca
    return server.start()


def tensor(api) -> object:
    result = api.InferInput("INPUT0", list(VALUES.shape), "FP32")
    result.set_data_from_numpy(VALUES)
    return result


def over_grpc(server: Server, ca: str, pair: tuple[str, str] | None = None) -> None:
    """One inference with tritonclient over TLS."""
    flags = {"ssl": True, "root_certificates": ca}
    if pair:
        flags |= {"certificate_chain": pair[0], "private_key": pair[1]}
    client = triton_grpc.InferenceServerClient(f"localhost:{server.grpc_port}", **flags)
    reply = client.infer(MODEL, [tensor(triton_grpc)], client_timeout=20)
    assert (reply.as_numpy("OUTPUT0") == VALUES).all()
    client.close()


def token(folder: Path, *flags: str) -> str:
    command = [str(BINARY), "token", "create", "--data-dir", str(folder), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
