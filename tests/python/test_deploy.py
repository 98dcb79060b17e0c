"""The Dockerfile, the Kubernetes manifests and the chart as Helm renders it: documents match the
published schemas, flags and variables match the binary, and all agree on the image."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from support import BINARY, REPOSITORY

MANIFESTS = REPOSITORY / "deploy" / "kubernetes" / "atoll.yaml"
CHART = REPOSITORY / "deploy" / "chart" / "atoll"
DOCKERFILE = REPOSITORY / "Dockerfile"
VERSIONS = ["1.27", "1.32"]


class StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, of which the plain loader keeps the last."""


def no_duplicates(loader: StrictLoader, node: yaml.MappingNode, deep: bool = False) -> dict:
    keys = [loader.construct_object(key, deep=deep) for key, _ in node.value]
    duplicates = [key for key, count in Counter(keys).items() if count > 1]
    assert not duplicates, f"duplicate {duplicates} at {node.start_mark}"
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, no_duplicates)


POOLS = "backend.pools=" + json.dumps(
    [
        {"name": "l4", "kind": "l4", "price": 0.8, "replicas": 0, "nodeSelector": {"gpu": "l4"}},
        {
            "name": "a100",
            "kind": "a100",
            "price": 3.2,
            "replicas": 1,
            "replicasMax": 8,
            "gpu": 2,
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    ]
)
# The manifests, and the chart with values that cover all its branches.
S3 = (
    "models.store=s3://bucket/atoll,models.secret=aws,models.env.AWS_ENDPOINT_URL=http://minio:9000"
)
SOURCES = {
    "manifests": None,
    "chart": (),
    "chart-hpa": ("--set", "scaling=hpa"),
    "chart-none": ("--set", "scaling=none"),
    "chart-tls": ("--set", "tls.secret=atoll-tls,tokens.secret=clients,tokens.key=clients.json"),
    "chart-seccomp": (
        "--set",
        "seccomp.type=Localhost,seccomp.localhostProfile=profiles/atoll.json",
        "--set",
        "network.clients[0].podSelector.matchLabels.app=web,network.monitoring=null",
    ),
    "chart-s3": (
        "--set",
        S3,
        "--set",
        "backend.gpu=2,backend.args={--best-effort-share=10}",
        "--is-upgrade",
    ),
    "chart-pools": ("--set-json", POOLS),
}
every_source = pytest.mark.parametrize("source", SOURCES)


def helm(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "helm"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@cache
def documents(source: str) -> list[dict]:
    if SOURCES[source] is None:
        text = MANIFESTS.read_text()
    else:
        reply = helm("template", "reef", str(CHART), "--namespace", "sea", *SOURCES[source])
        assert reply.returncode == 0, reply.stderr
        text = reply.stdout
    return [document for document in yaml.load_all(text, StrictLoader) if document]  # noqa: S506


def of_kind(source: str, kind: str) -> list[dict]:
    return [document for document in documents(source) if document["kind"] == kind]


def pod_specs(source: str) -> list[dict]:
    return [deployment["spec"]["template"]["spec"] for deployment in of_kind(source, "Deployment")]


def containers(source: str) -> list[dict]:
    return [container for spec in pod_specs(source) for container in spec["containers"]]


@cache
def help_of(role: str) -> str:
    return subprocess.run(
        [str(BINARY), "cluster", role, "--help"], capture_output=True, text=True, check=True
    ).stdout


@every_source
@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_matches_the_schemas_of_kubernetes(source: str, version: str) -> None:
    assert len(documents(source)) >= 8
    for document in documents(source):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_are_strict() -> None:
    broken = yaml.safe_load(yaml.safe_dump(of_kind("manifests", "Deployment")[0]))
    broken["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_the_chart_passes_helm_lint_and_refuses_unknown_values() -> None:
    reply = helm("lint", "--strict", str(CHART))
    assert reply.returncode == 0, reply.stdout
    reply = helm("template", "reef", str(CHART), "--set", "scaling=both")
    assert reply.returncode != 0
    assert "atoll, hpa, none" in reply.stderr


@every_source
def test_containers_use_existing_flags_and_variables(source: str) -> None:
    assert {container["args"][1] for container in containers(source)} == {
        "scheduler",
        "frontend",
        "backend",
    }
    for container in containers(source):
        command, role, *rest = container["args"]
        text = help_of(role)
        assert command == "cluster"
        for flag in (word.split("=")[0] for word in rest if word.startswith("--")):
            assert re.search(rf"{flag}\b", text), f"{role} has no {flag}"
        names = [entry["name"] for entry in container["env"]]
        maps = [
            entry["configMapRef"]
            for entry in container.get("envFrom", [])
            if "configMapRef" in entry
        ]
        names += [name for reference in maps for name in config(source, reference["name"])]
        for name in names:
            # Variables of all commands are in the help of one of them only.
            known = f"[env: {name}" in text or f"[env: {name}" in help_of("frontend")
            assert known or (name.startswith("AWS_") and name in text), f"{role} reads no {name}"


@every_source
def test_pods_that_listen_use_tls_or_say_that_they_do_not(source: str) -> None:
    for container in containers(source):
        flags = {word.split("=")[0] for word in container["args"]}
        if "--host" in flags:
            assert ("--tls-cert" in flags) != ("--insecure" in flags), container["name"]


def config(source: str, name: str) -> dict:
    (found,) = [
        document
        for document in of_kind(source, "ConfigMap")
        if document["metadata"]["name"] == name
    ]
    return found["data"]


@every_source
def test_references_between_documents_resolve(source: str) -> None:
    deployments = {
        d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"]
        for d in of_kind(source, "Deployment")
    }

    def selects(labels: dict[str, str]) -> bool:
        return any(labels.items() <= own.items() for own in deployments.values())

    for deployment in of_kind(source, "Deployment"):
        own = deployments[deployment["metadata"]["name"]]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= own.items()
    for service in of_kind(source, "Service"):
        assert selects(service["spec"]["selector"])
        ports = {
            port["name"] for container in containers(source) for port in container.get("ports", [])
        }
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    for budget in of_kind(source, "PodDisruptionBudget"):
        assert selects(budget["spec"]["selector"]["matchLabels"])
    for scaler in of_kind(source, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] in deployments
    claims = {claim["metadata"]["name"] for claim in of_kind(source, "PersistentVolumeClaim")} or {
        "atoll-models"
    }
    for spec in pod_specs(source):
        mounted = {
            mount["name"]
            for container in spec["containers"]
            for mount in container.get("volumeMounts", [])
        }
        assert mounted == {volume["name"] for volume in spec.get("volumes", [])}
        for volume in spec.get("volumes", []):
            if "emptyDir" not in volume and "secret" not in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def dockerfile(instruction: str) -> list[str]:
    """The arguments of all lines of the Dockerfile with an instruction."""
    lines = DOCKERFILE.read_text().splitlines()
    return [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{instruction} ")]


@every_source
def test_pods_run_the_image_of_the_dockerfile(source: str) -> None:
    (tag,) = re.findall(r"docker build -t (\S+) \.", DOCKERFILE.read_text())
    (user,) = dockerfile("USER")
    (exposed,) = dockerfile("EXPOSE")
    (volume,) = dockerfile("VOLUME")
    (entry,) = dockerfile("ENTRYPOINT")
    for spec in pod_specs(source):
        context = spec["securityContext"]
        assert context["runAsNonRoot"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    for container in containers(source):
        assert container["image"] == f"{tag}:latest"
        assert "command" not in container, "the entry point of the image is the binary"
        probe = container["readinessProbe"].get("exec", {"command": ["atoll"]})
        assert probe["command"][0] == Path(json.loads(entry)[0]).name
        assert container["securityContext"]["readOnlyRootFilesystem"]
        ports = [str(port["containerPort"]) for port in container.get("ports", [])]
        assert ports in ([], ["8002"], exposed.split())
        if container["name"] == "backend":
            assert volume in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_image_is_built_from_what_the_build_needs() -> None:
    """Every file that the Dockerfile copies or compiles is in the build context."""
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    context = {line[1:] for line in ignored if line.startswith("!")}
    assert all((REPOSITORY / name).exists() for name in context)
    assert {"Cargo.toml", "Cargo.lock", "assets", "crates", "xtask"} <= context
    copied = [line.split()[0] for line in dockerfile("COPY") if not line.startswith("--")]
    assert set(copied) - {"."} <= context


@every_source
def test_containers_request_gpus_and_have_probes(source: str) -> None:
    for container in containers(source):
        assert "readinessProbe" in container
        if container["name"] == "backend":
            # A string, as server-side apply wants every quantity.
            pool = "--device-kind=a100" in container["args"]
            gpus = "2" if source == "chart-s3" or pool else "1"
            assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus


@every_source
def test_exactly_one_component_sets_the_number_of_backends(source: str) -> None:
    """The scheduler, an autoscaler or the manifest. Only the scheduler that scales gets
    permissions, and no manifest resets a number that is scaled."""
    backends = of_component(source, "backend")
    assert len(backends) == (2 if source == "chart-pools" else 1)
    (scheduler,) = [
        d for d in of_kind(source, "Deployment") if d["metadata"]["name"].endswith("-scheduler")
    ]
    names = {backend["metadata"]["name"] for backend in backends}
    spec = scheduler["spec"]["template"]["spec"]
    scaled = [
        argument.split("=", 1)[1].split(",")
        for argument in spec["containers"][0]["args"]
        if argument.startswith("--kubernetes-scale=")
    ]
    by_atoll = bool(scaled)
    by_hpa = any(
        s["spec"]["scaleTargetRef"]["name"] in names
        for s in of_kind(source, "HorizontalPodAutoscaler")
    )
    (fixed,) = {"replicas" in backend["spec"] for backend in backends}
    assert [by_atoll, by_hpa, fixed].count(True) == 1
    assert fixed == (source == "chart-none") and by_hpa == (source == "chart-hpa")
    roles = of_kind(source, "Role")
    assert bool(roles) == by_atoll
    if by_atoll:
        assert {workload for workload, *_ in scaled} == {f"deployment/{name}" for name in names}
        allowed = permissions(source, spec["serviceAccountName"])
        scale = {("apps", "deployments/scale", name) for name in names}
        assert allowed == {(*of, verb) for of in scale for verb in ("get", "patch")} | {
            ("", "pods", "*", verb) for verb in POD_VERBS
        }


def of_component(source: str, component: str) -> list[dict]:
    label = "app.kubernetes.io/component"
    deployments = of_kind(source, "Deployment")
    return [d for d in deployments if d["metadata"]["labels"][label] == component]


def test_pools_are_deployments_of_their_own_kind_and_machines() -> None:
    (scheduler,) = of_component("chart-pools", "scheduler")
    words = scheduler["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [word for word in words if word.startswith("--kubernetes-scale=")] == [
        "--kubernetes-scale=deployment/reef-backend-l4,kind=l4,min=0,price=0.8",
        "--kubernetes-scale=deployment/reef-backend-a100,kind=a100,min=1,max=8,price=3.2",
    ]
    pods = {}
    for backend in of_component("chart-pools", "backend"):
        selector = backend["spec"]["selector"]["matchLabels"]
        pods[selector["atoll/pool"]] = backend["spec"]["template"]["spec"]
    assert set(pods) == {"l4", "a100"}, "each selects its own pods only"
    assert pods["l4"]["nodeSelector"] == {"gpu": "l4"} and "nodeSelector" not in pods["a100"]
    assert pods["a100"]["tolerations"] and "tolerations" not in pods["l4"]
    for kind, spec in pods.items():
        assert f"--device-kind={kind}" in spec["containers"][0]["args"]
    for scaling in ("hpa", "none"):
        reply = helm(
            "template", "reef", str(CHART), "--set", f"scaling={scaling}", "--set-json", POOLS
        )
        assert reply.returncode != 0 and "backend.pools needs scaling: atoll" in reply.stderr


# What the scheduler does with pods; tests/kubernetes shows that it needs each of them.
POD_VERBS = ("list", "patch")


def permissions(source: str, account: str) -> set[tuple[str, str, str, str]]:
    """Permissions of a service account: group, resource, name and verb."""
    assert account in {a["metadata"]["name"] for a in of_kind(source, "ServiceAccount")}
    bound = [
        b
        for b in of_kind(source, "RoleBinding")
        if account in {subject["name"] for subject in b["subjects"]}
    ]
    names = {binding["roleRef"]["name"] for binding in bound}
    rules = [
        rule
        for role in of_kind(source, "Role")
        if role["metadata"]["name"] in names
        for rule in role["rules"]
    ]
    return {
        (group, resource, name, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ["*"])
        for verb in rule["verbs"]
    }


def test_replayed_replies_match_the_schemas_of_kubernetes() -> None:
    # Pods have more fields in the newer release.
    version = VERSIONS[-1]
    paths = sorted((REPOSITORY / "crates" / "cluster" / "tests" / "kubernetes").glob("*.json"))
    kinds = Counter()
    for path in paths:
        reply = json.loads(path.read_text())
        kinds[reply["kind"]] += 1
        if reply["kind"] == "PodList":
            for pod in reply["items"]:
                kubernetes_validate.validate(
                    {"apiVersion": "v1", "kind": "Pod", **pod}, version, strict=True
                )
        elif reply["kind"] == "Scale":
            kubernetes_validate.validate(reply, version, strict=True)
        elif reply["kind"] == "Status":
            assert (
                reply["status"] == "Failure"
                and reply["reason"]
                and reply["message"]
                and reply["code"] >= 400
            )
    assert kinds["Scale"] >= 3 and kinds["PodList"] >= 3 and kinds["Status"] >= 4


def policy_of(source: str, role: str) -> dict:
    """The only NetworkPolicy that selects the pods of a role."""
    found = []
    for deployment in of_component(source, role):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        selecting = [
            policy["spec"]
            for policy in of_kind(source, "NetworkPolicy")
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        assert len(selecting) == 1
        found += [spec for spec in selecting if spec not in found]
    (only,) = found
    return only


@every_source
def test_only_listed_connections_are_allowed(source: str) -> None:
    for role in ("scheduler", "frontend", "backend"):
        policy = policy_of(source, role)
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        reached = [port["port"] for rule in policy["egress"] for port in rule["ports"]]
        assert {53, 2379} <= set(reached)
        assert all(rule.get("ports") for rule in [*policy["ingress"], *policy["egress"]])
    # Only monitoring reaches a scheduler, and nobody in the plain manifests.
    ingress = policy_of(source, "scheduler")["ingress"]
    assert [[port["port"] for port in rule["ports"]] for rule in ingress] == (
        [] if source in ("manifests", "chart-seccomp") else [[8002]]
    )
    assert all(rule["from"] for rule in ingress)
    # Only frontends reach what runs models.
    for rule in policy_of(source, "backend")["ingress"]:
        ports = {port["port"] for port in rule["ports"]}
        if ports != {8002}:
            assert ports == {8000, 8001}
            (peer,) = rule["from"]
            labels = peer["podSelector"]["matchLabels"]
            assert labels["app.kubernetes.io/component"] == "frontend"
    clients = policy_of(source, "frontend")["ingress"][0]
    assert ("from" in clients) == (source == "chart-seccomp")
    # Metrics are not for clients.
    assert 8002 not in {port["port"] for port in clients["ports"]}


def test_the_policies_can_be_left_out() -> None:
    reply = helm("template", "reef", str(CHART), "--set", "network.enabled=false")
    assert reply.returncode == 0 and "NetworkPolicy" not in reply.stdout


@every_source
def test_pods_have_few_rights_and_a_limit_of_memory(source: str) -> None:
    for spec in pod_specs(source):
        profile = spec["securityContext"]["seccompProfile"]["type"]
        assert profile == ("Localhost" if source == "chart-seccomp" else "RuntimeDefault")
        scales = any("--kubernetes-scale" in word for c in spec["containers"] for word in c["args"])
        assert spec.get("automountServiceAccountToken", True) == scales
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            # The budget of host memory is a share of it.
            assert container["resources"]["limits"]["memory"]
    budgets = [b["metadata"]["name"] for b in of_kind(source, "PodDisruptionBudget")]
    words = {word for name in budgets for word in name.split("-")}
    assert words >= {"frontend", "backend"}


def test_secrets_are_mounted_where_their_flags_look() -> None:
    for role in ("scheduler", "frontend", "backend"):
        (deployment,) = of_component("chart-tls", role)
        spec = deployment["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        secrets = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in spec["volumes"]
            if "secret" in volume
        }
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        wanted = {"tls": "atoll-tls"} | ({"tokens": "clients"} if role == "frontend" else {})
        assert secrets == wanted
        assert all(mounts[name]["readOnly"] and "subPath" not in mounts[name] for name in secrets)
        flags = dict(word.split("=", 1) for word in container["args"] if "=" in word)
        assert flags["--tls-cert"].startswith(mounts["tls"]["mountPath"] + "/")
        assert flags.get("--tokens") == ("/tokens/clients.json" if role == "frontend" else None)


@every_source
def test_probes_ask_for_ports_that_there_are(source: str) -> None:
    for container in containers(source):
        ports = {port["name"] for port in container.get("ports", [])}
        tls = any(word.startswith("--tls-cert") for word in container["args"])
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container.get(kind, {}).get("httpGet")
            if probe:
                assert probe["port"] in ports
                assert probe.get("scheme", "HTTP") == ("HTTPS" if tls else "HTTP")
        if source != "manifests":
            assert "livenessProbe" in container, container["name"]


SECCOMP = REPOSITORY / "deploy" / "seccomp" / "atoll.json"


def test_the_seccomp_profile_allows_what_the_check_of_models_needs_and_no_more() -> None:
    profile = json.loads(SECCOMP.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW"
        for name in rule["names"]
    }
    text = (REPOSITORY / "crates" / "assembly" / "src" / "sandbox.rs").read_text()
    sandbox = set(re.findall(r"libc::SYS_(\w+)", text.split("#[cfg(test)]")[0]))
    assert len(sandbox) > 35 and not sandbox - allowed - {"clone3"}
    assert {"seccomp", "prctl", "landlock_restrict_self", "setrlimit", "prlimit64"} <= allowed
    other = "ptrace mount umount2 bpf userfaultfd perf_event_open keyctl init_module unshare setns"
    other += " process_vm_readv process_vm_writev io_uring_setup open_by_handle_at kexec_load"
    other += " chroot"
    assert not allowed & set(other.split())
    # Namespaces are flags of clone.
    (clone,) = [rule for rule in profile["syscalls"] if rule["names"] == ["clone"]]
    assert clone["args"][0]["value"] & 0x10000000 and clone["args"][0]["valueTwo"] == 0
    assert "deploy/seccomp/atoll.json" in (CHART / "values.yaml").read_text()
