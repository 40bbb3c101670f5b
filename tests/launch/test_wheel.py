"""A wheel carries the recipes and model cards, and finds them without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import kimi_w4a8_eagle3

REPOSITORY = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def copied(dockerfile: str) -> list[str]:
    """Return the files that a Dockerfile copies before it builds our wheel, without those of its .dockerignore."""
    text = (REPOSITORY / dockerfile).read_text()
    builds = re.search(r"^RUN .*pip (wheel|install) .*( \.$|'\.\[)", text, re.MULTILINE)
    assert builds is not None
    before = text[: builds.start()]
    ignore = REPOSITORY / f"{dockerfile}.dockerignore"
    lines = (ignore if ignore.is_file() else REPOSITORY / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    names = [name for line in re.findall(r"^COPY ([^-].*)$", before, re.MULTILINE) for name in line.split()[:-1]]
    return [name for name in names if name in sent]


def build(source: Path, what: str, target: Path) -> Path:
    """One of setuptools' own build steps, as pip calls it."""
    target.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(target)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return target / done.stdout.split()[-1]


def sources(folder: Path, names: Iterable[str]) -> Path:
    """A copy of parts of the checkout."""
    for name in names:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from exactly what the Dockerfile copies."""
    source = sources(tmp_path_factory.mktemp("source"), copied("Dockerfile"))
    return build(source, "build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the wheel was unpacked."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(target)
    return target


def test_the_wheel_holds_recipes_cards_its_version_and_types_and_nothing_that_only_proves(
    wheel: Path, installed: Path
) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert not [name for name in names if name.startswith(("proof/", "tests/")) or "/prometheus/tests/" in name]
    assert not [name for name in names if "laptop" in name and name != "kimi_w4a8_eagle3/base/installed.py"]
    assert not [name for name in names if name.endswith(".safetensors")]
    assert not [name for name in names if "/_operator/" in name and name.endswith((".py", "Dockerfile"))]
    (metadata,) = installed.glob("*.dist-info/METADATA")
    assert f"\nVersion: {kimi_w4a8_eagle3.__version__}\n" in metadata.read_text()
    package = installed / "kimi_w4a8_eagle3"
    expected = sorted(path.name for path in (REPOSITORY / "launch/recipes").glob("*.toml"))
    assert sorted(path.name for path in (package / "_operator/launch/recipes").iterdir()) == expected
    assert (package / "_operator/launch/models/kimi-k2.5-w4a8.json").is_file() and (package / "py.typed").is_file()


def test_an_installation_reads_its_own_copies(installed: Path, tmp_path: Path) -> None:
    for place in (tmp_path, installed):  # a folder of another package, in the working directory and in site-packages
        (place / "launch/recipes").mkdir(parents=True, exist_ok=True)
    code = (
        "from kimi_w4a8_eagle3.base.installed import operator_dir;"
        "from kimi_w4a8_eagle3.recipe.launch import recipe_names;"
        "print(operator_dir('launch/recipes'), *recipe_names())"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    folder, *names = done.stdout.split()
    assert Path(folder) == installed / "kimi_w4a8_eagle3/_operator/launch/recipes"
    assert "eagle3-opt" in names
