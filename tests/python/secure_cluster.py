"""A cluster whose every connection is secured: mutual TLS to an etcd with users, mutual TLS between
frontends and backends, and TLS for clients."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import requests

from cluster import WAIT_SECONDS, Cluster
from secure import Authority
from support import Server, wait_for

PASSWORD = "right"


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class SecureFrontend(Server):
    """A frontend over TLS."""

    @property
    def url(self) -> str:
        return f"https://localhost:{self.http_port}"

    def metrics(self) -> str:
        reply = requests.get(f"https://localhost:{self.metrics_port}/metrics", timeout=WAIT_SECONDS)
        assert reply.status_code == 200
        return reply.text


class SecureCluster(Cluster):
    """Roles and commands find the store's credentials in the environment, this process the
    authority of all certificates."""

    def __init__(self, folder: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        authority = Authority(folder, "ca")
        self.ca = str(authority.path)
        self.pairs = {name: authority.sign(name) for name in ("etcd", "client", "serving")}
        (folder / "password").write_text(PASSWORD)
        (certificate, key), (own, own_key) = self.pairs["etcd"], self.pairs["client"]
        environment = {
            "REQUESTS_CA_BUNDLE": self.ca,
            "ATOLL_ETCD_CA": self.ca,
            "ATOLL_ETCD_CERT": own,
            "ATOLL_ETCD_KEY": own_key,
            "ATOLL_ETCD_USER": "atoll",
            "ATOLL_ETCD_PASSWORD_FILE": str(folder / "password"),
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        flags = ("--cert-file", certificate, "--key-file", key, "--client-cert-auth")
        super().__init__(
            folder, models, etcd_flags=(*flags, "--trusted-ca-file", self.ca), scheme="https"
        )
        self.add_users()

    def add_users(self) -> None:
        """A user `atoll` who may read and write the keys of clusters; nobody else may."""
        url = self.store.replace("etcd://", "https://")

        def call(path: str, **body: object) -> bool:
            try:
                # The same URL for a call that was answered too late does no harm.
                reply = requests.post(
                    f"{url}/v3/auth/{path}", json=body, cert=self.pairs["client"], timeout=10
                )
            except requests.ConnectionError:
                return False
            assert reply.status_code == 200, (path, reply.text)
            return True

        assert wait_for(lambda: call("user/add", name="root", password="other")), self.logs()
        call("role/add", name="root")
        call("user/grant", user="root", role="root")
        call("user/add", name="atoll", password=PASSWORD)
        call("role/add", name="keys")
        keys = {"key": coded("/atoll/"), "range_end": coded("/atoll0")}
        call("role/grant", name="keys", perm={"permType": "READWRITE", **keys})
        call("user/grant", user="atoll", role="keys")
        call("enable")

    def serving(self) -> list[str]:
        certificate, key = self.pairs["serving"]
        return ["--tls-cert", certificate, "--tls-key", key]

    def mutual(self) -> list[str]:
        """Flags of backends, which serve nobody without a certificate."""
        return [*self.serving(), "--tls-client-ca", self.ca]

    def backend(self, name: str, *flags: str, inside: tuple[str, ...] = ()) -> None:
        super().backend(name, *self.mutual(), *flags, inside=inside)

    def frontend(self, name: str, *flags: str) -> Server:
        own, own_key = self.pairs["client"]
        to_backends = ["--backend-ca", self.ca, "--backend-cert", own, "--backend-key", own_key]
        to_backends += ["--backend-tls-name", "localhost"]
        server = super().frontend(name, *self.serving(), *to_backends, *flags)
        ports = [server.http_port, server.grpc_port, server.metrics_port]
        self.frontends[name] = SecureFrontend(ports)
        return self.frontends[name]
