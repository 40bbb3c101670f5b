"""Reading rendered Kubernetes manifests: objects by kind, their pods, the command lines that these run."""

from __future__ import annotations

import re
import shlex
from typing import Any

SIZES = {"Gi": 1 << 30, "Mi": 1 << 20}
Manifest = dict[str, Any]


def of_kind(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in objects if manifest["kind"] == kind}


def workloads(objects: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in objects if manifest["kind"] in ("StatefulSet", "Deployment", "Job")]


def pod_of(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def served(workload: Manifest) -> Manifest:
    return pod_of(workload)["spec"]["containers"][0]


def selected(objects: list[Manifest], labels: dict[str, str]) -> list[Manifest]:
    found = [(workload, pod_of(workload)["metadata"]["labels"]) for workload in workloads(objects)]
    return [workload for workload, own in found if labels.items() <= own.items()]


def replicas(objects: list[Manifest]) -> Manifest:
    return of_kind(objects, "StatefulSet")["kimi"]


def environment(objects: list[Manifest], container: Manifest) -> dict[str, str]:
    """The container's variables; those of secrets are left out."""
    found = {}
    for variable in container.get("env", []):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        elif reference := variable["valueFrom"].get("configMapKeyRef"):
            found[variable["name"]] = of_kind(objects, "ConfigMap")[reference["name"]]["data"][reference["key"]]
    return found


def command_lines(objects: list[Manifest], container: Manifest) -> list[list[str]]:
    """Every command line of ours in a container, as its process gets it: the arguments, or those in a shell script."""
    values = environment(objects, container)
    args = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], arg) for arg in container["args"]]
    if container.get("command", [""])[0] != "/bin/sh":
        return [args]
    script = re.sub(r"\$(\w+)", lambda found: values[found[1]], args[-1])
    return [shlex.split(part)[1:] for part in re.findall(r"kimi-w4a8 [^|;&]*", script)]


def option(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def size(text: str) -> int:
    return int(text[:-2]) * SIZES[text[-2:]]


def writable(container: Manifest) -> set[str]:
    return {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
