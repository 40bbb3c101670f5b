"""Renders kustomizations with the kustomize of this machine: the program itself, or the one inside kubectl."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

_FIRST_WITH_RESOURCES = (1, 21)  # kubectl; before it carried kustomize 2.0.3


def renderer() -> str | None:
    """The program that can render, or None."""
    return shutil.which("kustomize") or shutil.which("kubectl")


def render(folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization; `scratch` is an empty folder."""
    program = renderer()
    assert program is not None
    if Path(program).name == "kustomize":
        command = [program, "build", str(folder)]
    else:
        if _kubectl_version(program) < _FIRST_WITH_RESOURCES:
            folder = _in_old_words(folder, scratch)
        command = [program, "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def _kubectl_version(program: str) -> tuple[int, int]:
    answer = subprocess.run(
        [program, "version", "--client", "--output=json"], capture_output=True, text=True, timeout=60
    )
    version = json.loads(answer.stdout)["clientVersion"]
    return int(version["major"]), int(version["minor"].rstrip("+"))


def _in_old_words(folder: Path, scratch: Path) -> Path:
    """A copy in which two fields have the names that kustomize 2.0.3 (Debian 12's kubectl) knows.

    They mean the same there: folders among `resources` are `bases`, and `patches` without a target are
    `patchesStrategicMerge`. The rendering is kustomize's own.
    """
    root = next(parent for parent in folder.parents if parent.name == "k8s")
    copy = scratch / "k8s"
    shutil.copytree(root, copy)
    for path in copy.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        entries = content.pop("resources")
        content["bases"] = [entry for entry in entries if (path.parent / entry).is_dir()]
        content["resources"] = [entry for entry in entries if entry not in content["bases"]]
        content["patchesStrategicMerge"] = [patch["path"] for patch in content.pop("patches", [])]
        path.write_text(yaml.safe_dump(content))
    return copy / folder.relative_to(root)
