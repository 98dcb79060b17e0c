"""A real kube-apiserver with Debian's etcd, RBAC on, and clients for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import requests
import yaml

from cluster import Process
from secure import Authority
from support import REPOSITORY, free_ports, wait_for

SCRIPT = REPOSITORY / "scripts" / "kubernetes" / "apiserver.sh"
ADMIN_TOKEN = "admin-of-the-test"
ISSUER = "https://kubernetes.default.svc"
MERGE = "application/merge-patch+json"
# The server's own log of changes of scales, and of pods that are made and removed.
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Request",
            "verbs": ["patch", "update"],
            "resources": [{"group": "apps", "resources": ["deployments/scale"]}],
        },
        {"level": "Metadata", "verbs": ["create", "delete"],
         "resources": [{"group": "", "resources": ["pods"]}]},
        {"level": "None"},
    ],
}


def programs() -> Path:
    """The folder with kube-apiserver and kubectl; without them they are built, which takes long."""
    done = subprocess.run([str(SCRIPT)], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


class ApiError(RuntimeError):
    """The API server refused a call."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"HTTP {code}: {text[:500]}")
        self.code = code


class ApiServer:
    """etcd and kube-apiserver; etcd is also the store of Atoll's cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = programs()
        self.authority = Authority(folder, "kubernetes-ca")
        client, peer, self.port = free_ports(3)
        self.store = f"etcd://127.0.0.1:{client}"
        self.url = f"https://127.0.0.1:{self.port}"
        self.etcd = Process(self.etcd_command(client, peer), folder / "etcd.log").start()
        self.server = Process(self.server_command(client), folder / "kube-apiserver.log").start()
        # The certificate is checked against our own authority, whatever the environment says.
        self.session = requests.Session()
        self.session.trust_env = False
        if not wait_for(lambda: self.is_ready() or self.server.process.poll() is not None, 120) or (
            not self.is_ready()
        ):
            self.stop()
            raise AssertionError(f"kube-apiserver is not ready:\n{self.server.text()[-3000:]}")
        self.kubeconfig(folder / "admin.kubeconfig", ADMIN_TOKEN, "default")

    def etcd_command(self, client: int, peer: int) -> list[str]:
        urls = [f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"]
        command = ["etcd", "--name", "e", "--data-dir", str(self.folder / "etcd")]
        command += ["--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]]
        command += ["--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]]
        return [*command, "--initial-cluster", f"e={urls[1]}", "--unsafe-no-fsync"]

    def server_command(self, etcd_port: int) -> list[str]:
        certificate, key = self.authority.sign("kube-apiserver")
        account, account_key = self.authority.sign("service-accounts")
        tokens = self.folder / "tokens.csv"
        tokens.write_text(f'{ADMIN_TOKEN},admin,1,"system:masters"\n')
        policy = self.folder / "audit.yaml"
        policy.write_text(yaml.safe_dump(AUDIT))
        flags = {
            "etcd-servers": f"http://127.0.0.1:{etcd_port}",
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": self.port,
            "cert-dir": self.folder,
            "tls-cert-file": certificate,
            "tls-private-key-file": key,
            "client-ca-file": self.authority.path,
            "authorization-mode": "RBAC",
            "anonymous-auth": "false",
            "token-auth-file": tokens,
            "service-account-key-file": account,
            "service-account-signing-key-file": account_key,
            "service-account-issuer": ISSUER,
            "api-audiences": ISSUER,
            "service-cluster-ip-range": "10.96.0.0/16",
            # Tokens of pods come from the TokenRequest API, as in every later release.
            "feature-gates": "BoundServiceAccountTokenVolume=true",
            "audit-policy-file": policy,
            "audit-log-path": self.folder / "audit.log",
            # Connections of the test end with it.
            "shutdown-delay-duration": "0s",
        }
        program = str(self.bin / "kube-apiserver")
        return [program, *(f"--{name}={value}" for name, value in flags.items())]

    def is_ready(self) -> bool:
        try:
            return self.call("GET", "/readyz", raw=True).text == "ok"
        except (requests.RequestException, ApiError):
            return False

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        kind: str = "application/json",
        raw: bool = False,
    ):
        """One call as administrator: the decoded reply, or ApiError."""
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": kind}
        content = None if body is None else json.dumps(body)
        reply = self.session.request(
            method,
            self.url + path,
            data=content,
            headers=headers,
            verify=str(self.authority.path),
            timeout=30,
        )
        if reply.status_code >= 400:
            raise ApiError(reply.status_code, reply.text)
        return reply if raw else reply.json()

    def kubeconfig(self, path: Path, token: str, namespace: str, server: str = "") -> Path:
        cluster = {"server": server or self.url, "certificate-authority": str(self.authority.path)}
        if server.startswith("http://"):
            del cluster["certificate-authority"]
        context = {"cluster": "c", "user": "u", "namespace": namespace}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": context}],
        }
        path.write_text(json.dumps(document))
        return path

    def kubectl(self, *words: str, documents: list[dict] | None = None, check: bool = True) -> str:
        """Runs kubectl as administrator; `documents` go to its standard input."""
        text = None if documents is None else yaml.safe_dump_all(documents)
        config = f"--kubeconfig={self.folder / 'admin.kubeconfig'}"
        command = [str(self.bin / "kubectl"), config, *words]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=180, env=environment
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def token(self, namespace: str, account: str) -> str:
        """A token of a service account, from the TokenRequest API."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        spec = {"audiences": [ISSUER], "expirationSeconds": 3600}
        return self.call("POST", path, {**request, "spec": spec})["status"]["token"]

    def namespace(self, name: str) -> None:
        """A namespace with what its controller adds to every one: an account for pods."""
        metadata = {"name": name}
        self.kubectl(
            "apply",
            "-f",
            "-",
            documents=[
                {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
                {
                    "apiVersion": "v1",
                    "kind": "ServiceAccount",
                    "metadata": {"name": "default", "namespace": name},
                },
            ],
        )

    def audit(self, namespace: str) -> list[dict]:
        """What the server itself logged of a namespace."""
        lines = (self.folder / "audit.log").read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["objectRef"].get("namespace") == namespace]

    def stop(self) -> None:
        self.server.kill()
        self.etcd.kill()
