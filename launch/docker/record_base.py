"""Write base.json: what the base image is, before anything is added to it. Standard library only.

    BASE_IMAGE=NAME:TAG[@sha256:DIGEST] python3 record_base.py FILE

A base without SGLang or with a malformed digest ends the build. A base without a digest is recorded as such.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = {"aiter": ("amd-aiter", "aiter"), "sglang": ("sglang",), "torch": ("torch",), "triton": ("triton",)}
SHELL = {"BASE_IMAGE", "HOME", "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "TERM", "_"}  # not of the image
PROXY = re.compile(r"(https?|ftp|no|all)_proxy", re.IGNORECASE)


def version_of(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def commit_of(name: str, version: str, workspace: Path) -> str | None:
    """The commit in the version (`0.5.20.dev1+g1234567`), in NAME_COMMIT, or of the checkout in the workspace."""
    if match := re.search(r"\+(?:.*\.)?g([0-9a-f]{7,40})\b", version):
        return match[1]
    if re.fullmatch(r"[0-9a-f]{7,40}", stated := os.environ.get(f"{name.upper()}_COMMIT", "")):
        return stated
    if (workspace / name / ".git").exists() and shutil.which("git"):
        command = ["git", "-c", "safe.directory=*", "-C", str(workspace / name), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


def record(reference: str, workspace: Path = Path("/sgl-workspace"), root: Path = Path("/")) -> dict[str, object]:
    name, _, digest = reference.partition("@")
    if digest and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        sys.exit(f"record_base.py: {digest} is no digest; launch/pin-base.sh looks it up")
    versions = {key: version for key, names in PACKAGES.items() if (version := version_of(names))}
    if "sglang" not in versions:
        sys.exit(f"record_base.py: {name} has no SGLang: BASE_IMAGE must be an SGLang ROCm image")
    rocm = root / "opt/rocm/.info/version"
    if rocm.is_file():
        versions["rocm"] = rocm.read_text().strip().partition("-")[0]
    found = {key: commit_of(key, versions[key], workspace) for key in ("aiter", "sglang") if key in versions}
    numactl = shutil.which("numactl")
    said = subprocess.run([numactl, "--version"], capture_output=True, text=True, check=False) if numactl else None
    return {
        "reference": name,
        "digest": digest or None,
        "versions": versions,
        "commits": {key: commit for key, commit in found.items() if commit},
        "env": {key: value for key, value in sorted(os.environ.items()) if key not in SHELL and not PROXY.match(key)},
        "numactl": (said.stdout.strip() or "installed") if said else None,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: BASE_IMAGE=NAME:TAG[@sha256:DIGEST] record_base.py FILE")
    base = record(os.environ["BASE_IMAGE"])
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(base, indent=2) + "\n")
    print(f"base: {base['reference']} {base['versions']} {base['commits']}")
    if base["digest"] is None:
        print("warning: the base has no digest, so its tag can move: launch/pin-base.sh pins it")
