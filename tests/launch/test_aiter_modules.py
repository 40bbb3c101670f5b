"""AITER's own files with a stand-in for its compiler: what the image compiled is found, what it lacks is added."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from standin_rocm import import_little, write_rocm
from support.repository import ROOT

AITER = Path(os.environ.get("AITER_SITE", f"{sys.prefix}/compat/amd-aiter"))  # requirements/install.sh puts it there
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (AITER / "aiter").is_dir(), reason="no amd-aiter: install.sh")]

SERVE = """
import os, sys
from kimi_w4a8_eagle3.engine.aiter_jit import jit_environment
os.environ |= jit_environment(os.environ)
import torch
from aiter.ops.mha import mha_batch_prefill_func
ends, pages = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
for dtype in (torch.bfloat16, torch.float16):  # what the image has compiled, and what it lacks
    rows = torch.zeros(2, 8, 128, dtype=dtype), *(torch.zeros(2, 1, 128, dtype=dtype) for _ in range(2))
    try:
        mha_batch_prefill_func(*rows, ends, ends, pages, 2, 2, causal=True)
    except RuntimeError as error:
        assert "must be on a GPU" in str(error), error
print(*(module.__file__ for name, module in sys.modules.items() if "mha_batch_prefill_" in name), sep="\\n")
"""


class Image:
    """A site-packages with AITER, and a ROCm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jit = folder, folder / "site/aiter/jit"
        # AITER merges `model_configs` into files in /tmp, which belong to the user who was first.
        left_out = shutil.ignore_patterns("*.so", "__pycache__", "model_configs")
        shutil.copytree(AITER / "aiter", folder / "site/aiter", ignore=left_out)
        shutil.copytree(AITER / "aiter_meta/csrc", folder / "site/aiter_meta/csrc")
        import_little(folder / "site/aiter")
        (folder / "site/pybind11").symlink_to(AITER / "pybind11")
        (folder / "home").mkdir()
        write_rocm(folder / "rocm")
        (folder / "gpu").mkdir()  # only the machine that serves has one
        (folder / "gpu/rocminfo").write_text("#!/bin/sh\necho '  Name: gfx942'\n")
        (folder / "gpu/rocminfo").chmod(0o755)

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        rocm = self.folder / "rocm"
        return subprocess.run(
            command,
            cwd=self.folder,
            env={
                "PATH": f"{rocm}/bin:{sys.prefix}/bin:{os.environ['PATH']}",  # ninja lies beside Python
                "HOME": f"{self.folder}/home",
                "PYTHONPATH": f"{self.folder}/site:{ROOT}",
                "ROCM_HOME": str(rocm),
                "CXX": f"{rocm}/bin/hipcc",
                "LINKED": f"{self.folder}/linked",
                "PYTHON_INCLUDE": sysconfig.get_path("include"),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=280,
        )

    def linked(self) -> list[str]:
        """The modules that were compiled since this was asked last."""
        log = self.folder / "linked"
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return names


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """With the modules that the Dockerfile's step compiles, as root, on a machine without a GPU."""
    image = Image(tmp_path_factory.mktemp("image"))
    built = image.run(sys.executable, ROOT / "launch/docker/build_aiter.py", "gfx942")
    assert built.returncode == 0, built.stderr[-2000:]
    return image


def test_the_image_gets_what_the_recipes_call(image: Image) -> None:
    masked, unmasked, pictures = image.linked()
    assert masked.startswith("mha_batch_prefill_bf16") and "_mask_" in masked
    assert unmasked == masked.replace("_mask_", "_nmask_")
    assert pictures.startswith("mha_varlen_fwd_bf16") and "_nmask_" in pictures
    assert {path.stem for path in image.jit.glob("*.so")} == {masked, unmasked, pictures}
    assert not list((image.jit / "build").glob("mha*"))


def test_an_engine_that_cannot_write_to_aiter_finds_and_adds_modules(image: Image) -> None:
    image.linked()
    user: list[str] = []
    if os.geteuid() == 0:  # whose rights hold against any mode
        user = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    search = f"{image.folder}/gpu:{image.folder}/rocm/bin:{sys.prefix}/bin:{os.environ['PATH']}"
    places = [image.folder / "site", *(image.folder / "site").rglob("*")]
    for path in places:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    try:
        first, second = (image.run(*user, sys.executable, "-c", SERVE, PATH=search) for _ in range(2))
    finally:
        for path in places:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o200)
    assert first.returncode == 0, first.stderr[-2000:]
    (folder,) = (image.folder / "home/.aiter").glob("jit-*")
    there, added = map(Path, first.stdout.split())
    assert there.parent == folder and there.resolve().parent == image.jit and "_bf16_" in there.name
    assert added.parent == folder and not added.is_symlink() and "_fp16_" in added.name
    assert image.linked() == [added.stem]  # once: the second start finds it
    assert second.stdout == first.stdout
