"""A wheel carries the recipes and model cards, and finds them without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = (
    "kimi_w4a8_eagle3",
    "launch",
    "bench",
    "eval",
    "patches",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "LICENSE",
    "README.md",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the wheel was unpacked; built from a copy so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        path = REPOSITORY / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
            shutil.copytree(path, source / name, ignore=ignored)
        elif path.exists():
            shutil.copy(path, source / name)
    (source / "README.md").touch()
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    wheels = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", code, str(wheels)], cwd=source, check=True, capture_output=True, timeout=120)
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(target)
    return target


def test_the_wheel_holds_recipes_and_cards(installed: Path) -> None:
    data = installed / "kimi_w4a8_eagle3/_operator/launch"
    expected = sorted(path.name for path in (REPOSITORY / "launch/recipes").glob("*.toml"))
    assert sorted(path.name for path in (data / "recipes").iterdir()) == expected
    assert (data / "models/kimi-k2.5-w4a8.json").is_file()


def test_an_installation_reads_its_own_copies(installed: Path, tmp_path: Path) -> None:
    for place in (tmp_path, installed):  # somebody else's folder, in the working directory and in site-packages
        (place / "launch/recipes").mkdir(parents=True, exist_ok=True)
    code = (
        "from kimi_w4a8_eagle3 import resources, recipes;"
        "print(resources.operator_dir('launch/recipes'), *recipes.recipe_names())"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    folder, *names = done.stdout.split()
    assert Path(folder) == installed / "kimi_w4a8_eagle3/_operator/launch/recipes"
    assert "eagle3-opt" in names
