"""The build of a wheel, which copies the operator's folders into it. pyproject.toml names the class."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

# Folders that `kimi_w4a8_eagle3.base.installed.operator_dir` looks up by name.
OPERATOR_FOLDERS = ["launch", "patches", "eval", "bench"]
# What proves those folders, and what builds an image from a checkout, serves nobody in a site-packages.
CHECKOUT_ONLY = ["__pycache__", "*.tmp", "*.py", "check*.sh", "check.sh", "tests", "*Dockerfile*"]


class BuildWithOperatorFolders(build_py):
    """build_py, and then the top-level folders under `kimi_w4a8_eagle3/_operator/`."""

    def run(self) -> None:
        """Build; an editable install reads the checkout itself and needs no copy."""
        super().run()
        if self.editable_mode:
            return
        for name in OPERATOR_FOLDERS:
            target = Path(self.build_lib) / "kimi_w4a8_eagle3" / "_operator" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(name, target, ignore=shutil.ignore_patterns(*CHECKOUT_ONLY))

    def get_source_files(self) -> list[str]:
        """Return what a source distribution holds: the folders and this file, too."""
        folders = [str(path) for name in OPERATOR_FOLDERS for path in sorted(Path(name).rglob("*")) if path.is_file()]
        return [*super().get_source_files(), *folders, "requirements/wheel.py"]
