"""Code objects: what the manifest says of them, what is refused or compiled again; serving needs no compiler."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernel_objects import SMALL, silent, small_kernels
from support.kernel_objects import small_objects as small_objects

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.flydsl import backend as flydsl_backend
from kimi_w4a8_eagle3.moe.flydsl import objects as flydsl_objects
from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
from kimi_w4a8_eagle3.moe.flydsl.configs import KernelConfig
from kimi_w4a8_eagle3.moe.flydsl.kernels import warm as flydsl_warm
from kimi_w4a8_eagle3.moe.flydsl.kernels.code_object import read_metadata
from kimi_w4a8_eagle3.moe.flydsl.kernels.launcher import launcher_of
from kimi_w4a8_eagle3.moe.flydsl.objects import MANIFEST, CodeObjects, KernelManifest, read_manifest

pytestmark = pytest.mark.kernels


@pytest.fixture
def folder(small_objects: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(small_objects, tmp_path / "kernels"))


@pytest.mark.slow
def test_the_manifest_is_read_back_and_names_every_file(small_objects: Path) -> None:
    manifest = read_manifest(small_objects)
    assert KernelManifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert set(manifest.kernels) == {repr(config) for config in small_kernels()}
    assert {path.name for path in small_objects.glob("*.co")} == {found.file for found in manifest.kernels.values()}
    assert set(manifest.compilers) == {"flydsl", "linker"}
    assert CodeObjects(small_objects).check_all() == len(small_kernels())


@pytest.mark.parametrize("config", small_kernels(), ids=lambda config: type(config).__name__)
def test_the_argument_layout_is_the_builders_signature(config: KernelConfig, small_objects: Path) -> None:
    """The manifest's comes from the code object; the builder's follows the C rules of its parameters' types."""
    found = read_manifest(small_objects).kernels[repr(config)]
    parameters = inspect.signature(launcher_of(config).func).parameters.values()
    sizes = [{"Int64": 8, "Int32": 4}[parameter.annotation.__name__] for parameter in parameters]
    assert (found.block, found.spills) == ((256, 1, 1), 0)
    assert found.kernarg_bytes == sum(sizes)
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]  # counts come last: no holes
    assert found.arguments == tuple(zip(offsets, sizes, strict=True))
    kernel = read_metadata((small_objects / found.file).read_bytes())["amdhsa.kernels"][0]
    assert (kernel[".name"], kernel[".kernarg_segment_size"]) == (found.symbol, found.kernarg_bytes)


def test_arguments_are_packed_where_the_layout_says(small_objects: Path) -> None:
    found = read_manifest(small_objects).kernels[repr(small_kernels()[0])]
    packed = flydsl_objects._packing(found).pack(*range(1 << 40, (1 << 40) + 6), 12, 13)
    assert packed == struct.pack("<6Q2i", *range(1 << 40, (1 << 40) + 6), 12, 13)
    with pytest.raises(struct.error):  # an address where a count belongs, and one too few
        flydsl_objects._packing(found).pack(*range(6), 1 << 40, 13)
    with pytest.raises(struct.error):
        flydsl_objects._packing(found).pack(*range(7))


STAGE1 = repr(next(iter(small_kernels()[1:])))


def entry(folder: Path) -> Path:
    return folder / read_manifest(folder).kernels[STAGE1].file


def change(folder: Path, **fields: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def alter(folder: Path) -> None:
    image = bytearray(entry(folder).read_bytes())
    image[len(image) // 2] ^= 1
    entry(folder).write_bytes(image)


def forget(folder: Path) -> None:
    kernels = json.loads((folder / MANIFEST).read_text())["kernels"]
    del kernels[STAGE1]
    change(folder, kernels=kernels)


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "altered byte": (alter, r"moe_stage1_0-\w+.co, the code object of Stage1Config\(.*altered or removed"),
    "removed file": (lambda folder: entry(folder).unlink(), r"the code object of Stage1Config\(.*altered or removed"),
    "not in the manifest": (forget, r"there is no code object of Stage1Config\(hidden=1024"),
    "foreign GPU": (lambda folder: change(folder, arch="gfx950"), "for gfx950, not gfx942"),
    "other sources": (lambda folder: change(folder, sources="0" * 64), "other kernel sources than this package's"),
    "broken manifest": (lambda folder: change(folder, kernels=[]), "manifest.json cannot be read"),
    "a path in the manifest": (lambda folder: change(folder, kernels={"a": {"file": "../a.co"}}), "cannot be read"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "there are no code objects"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_foreign_code_objects_are_refused(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flydsl_backend, "gpu_arch", lambda device: "gfx942")
    kernels = small_kernels()
    monkeypatch.setattr(FlydslBackend, "wanted", lambda self, shape: kernels)  # with one of the sorts
    gates, gpu = {flydsl_objects.GATE: str(folder)}, torch.device("cuda")
    assert FlydslBackend(gates).unsupported(SMALL, gpu) is None
    spoil, message = SPOILED[case]
    spoil(folder)
    flydsl_objects.code_objects.cache_clear()
    with pytest.raises(KimiError, match=message) as error:
        FlydslBackend(gates).unsupported(SMALL, gpu)
    assert f"kimi-w4a8 warm --objects {folder}" in error.value.remedy


def test_without_code_objects_the_next_backend_may_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flydsl_backend, "gpu_arch", lambda device: "gfx942")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = FlydslBackend().unsupported(SMALL, torch.device("cuda"))
    assert reason is not None and "no code objects in" in reason and "kimi-w4a8 warm" in reason


def test_only_missing_kernels_are_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, (compiled, also) = read_manifest(folder), small_kernels()[:2]
    alter(folder)
    whole, count = flydsl_warm.warm([compiled, also], folder, 1, silent)
    assert count == 1 and whole == read_manifest(folder)
    assert whole.kernels[STAGE1] == before.kernels[STAGE1]  # the same machine code
    CodeObjects(folder).check(whole.kernels)

    def no_compiler() -> None:
        raise AssertionError

    monkeypatch.setattr(flydsl_warm, "compilers", no_compiler)
    assert flydsl_warm.warm(small_kernels(), folder, 1, silent) == (whole, 0)


def test_an_interrupted_warm_keeps_what_is_finished_and_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(configs: list[Any], jobs: int, watch: Any) -> Any:
        for config in configs[:1]:
            found = before.kernels[repr(config)]
            yield repr(config), (folder / found.file).read_bytes(), found
        raise KeyboardInterrupt

    before = read_manifest(folder)
    change(folder, sources="0" * 64)  # of an earlier package
    monkeypatch.setattr(flydsl_warm, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flydsl_warm.warm(small_kernels(), folder, 1, silent)
    after = read_manifest(folder)
    assert after.sources == before.sources and list(after.kernels) == [repr(small_kernels()[0])]
    missing = len(small_kernels()) - 1
    with pytest.raises(KimiError, match=f"{missing} kernels are missing: `warm` was interrupted"):
        CodeObjects(folder).check_all()


def test_the_hash_of_the_sources_is_of_all_that_a_kernel_is_made_of() -> None:
    """The launcher's modules and what they import of both folders; a change of another module leaves objects valid."""
    backend = Path(flydsl_objects.__file__).parent
    found, todo = set[Path](), {backend / "kernels" / "launcher.py"}
    while todo:
        found.add(path := todo.pop())
        for dots, module, taken in re.findall(r"^from (\.\.?)(\w*) import (.*)", path.read_text(), re.M):
            file = path.parents[len(dots) - 1] / f"{module or taken.split(' as ')[0]}.py"
            todo |= {file} - found if file.is_file() and file.is_relative_to(backend) else set()
    assert {path.stem for path in set(backend.rglob("*.py")) - found} == set(flydsl_objects._HOST)


def test_a_second_writer_is_refused(folder: Path) -> None:
    alter(folder)
    with flydsl_warm._alone(folder), pytest.raises(KimiError, match="another `kimi-w4a8 warm`"):
        flydsl_warm.warm(small_kernels(), folder, 1, silent)


def test_serving_imports_no_compiler(small_objects: Path) -> None:
    program = f"""
import sys
sys.modules["flydsl"] = sys.modules["triton"] = None  # an import of either fails
from pathlib import Path
from kimi_w4a8_eagle3.moe.dispatch import load_backend
from kimi_w4a8_eagle3.moe.contract import MoeShape
backend = load_backend("flydsl", {{"{flydsl_objects.GATE}": {str(small_objects)!r}}})
backend.objects.check(backend.objects.manifest.kernels)
assert backend.shape_problem(MoeShape(384, 7168, 256, 8)) is None
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ}, timeout=120)
