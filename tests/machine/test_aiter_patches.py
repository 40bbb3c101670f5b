"""The patches on real files of AITER, and what the guard says of the page offsets of patched and other trees."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.installed import operator_dir
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.machine.aiter_patches import State, apply_patches, patch_states
from kimi_w4a8_eagle3.machine.aiter_regime import Regime, header_regime

AITER = Path(os.environ.get("AITER_SITE", f"{sys.prefix}/compat/amd-aiter"))  # requirements/install.sh puts it there
CK = "3rdparty/composable_kernel"
CHOICE = f"{CK}/example/ck_tile/01_fmha/fmha_fwd.hpp"
PIPELINE = f"{CK}/include/ck_tile/ops/fmha/pipeline/block_fmha_batch_prefill_pipeline_qr_ks_vs_async.hpp"
MODULE = "aiter/jit/mha_batch_prefill_bf16_nlogits_nbias_mask_nlse_ndropout_nqscale_nsink.so"  # AITER's name at c16d44b
pytestmark = [
    pytest.mark.skipif(not (AITER / "aiter").is_dir(), reason="no amd-aiter: requirements/install.sh has it"),
    pytest.mark.skipif(shutil.which("git") is None, reason="no git"),
]
# Our own function of the form of ROCm/rocm-libraries#6653; the line that decides is the one that the patch removes.
REMOVED = re.findall(r"^-( .*)$", (operator_dir("patches") / "ck-tile-page-offset-64bit.patch").read_text(), re.M)
FUNCTION = f"""
inline ck_tile::BlockAttentionKVCacheLoadModeEnum
fmha_batch_prefill_select_kv_load_mode(ck_tile::index_t page_block_size, ck_tile::index_t kN0, int pages, int stride)
{{
    const auto kv_pool_bytes = static_cast<ck_tile::long_index_t>(pages) * stride * 2;
{REMOVED[0]}
               ? ck_tile::BlockAttentionKVCacheLoadModeEnum::GLOBAL_LOAD_LDS
               : ck_tile::BlockAttentionKVCacheLoadModeEnum::BUFFER_LOAD;
}}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of AITER: the wheel's files, with what the image's newer AITER has in the lines that are patched."""
    root = tmp_path / "checkout"
    for name in ("aiter/ops/mha.py", CHOICE, PIPELINE):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(AITER / (f"aiter_meta/{name}" if name.startswith(CK) else name), root / name)
    (root / "aiter/__init__.py").touch()
    mha = (root / "aiter/ops/mha.py").read_text()
    (root / "aiter/ops/mha.py").write_text(mha.replace("Optional[int] = 1", "int | None = 1"))
    (root / CHOICE).write_text((root / CHOICE).read_text() + FUNCTION)
    (root / PIPELINE).write_text((root / PIPELINE).read_text() + "// GLOBAL_LOAD_LDS\n")
    return root


def states(root: Path) -> dict[str, State]:
    return {patch.name: patch.state for patch in patch_states(root)}


def both(state: State) -> dict[str, State]:
    return {"aiter-fmha-rtz": state, "ck-tile-page-offset-64bit": state}


def test_they_change_their_lines_and_no_other(tree: Path) -> None:
    mha, header = (tree / "aiter/ops/mha.py").read_text(), (tree / CHOICE).read_text()
    assert states(tree) == both(State.NOT_APPLIED)
    apply_patches(tree)
    assert states(tree) == both(State.APPLIED)
    assert (tree / "aiter/ops/mha.py").read_text() == re.sub(
        r"(how_v3_bf16_cvt(: int \| None)? ?= ?)1,", r"\g<1>2,", mha
    )
    lines = (tree / CHOICE).read_text().splitlines()
    at = lines.index("    return page_block_size < kN0")
    assert lines[at - 1] == "    (void)kv_pool_bytes;"
    assert lines[: at - 3] + REMOVED + lines[at + 1 :] == header.splitlines()  # with two lines of comment
    once = (tree / CHOICE).stat().st_mtime_ns
    apply_patches(tree)
    assert (tree / CHOICE).stat().st_mtime_ns == once  # nothing was written again


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_small_pages_take_the_64_bit_path(tree: Path, tmp_path: Path) -> None:
    """A small pool of small pages changes its path, and large pages do not."""
    types = """#include <cstdint>\n#include <cstdio>\n#include <initializer_list>
    namespace ck_tile { using index_t = int; using long_index_t = long long;
    enum class BlockAttentionKVCacheLoadModeEnum { BUFFER_LOAD, GLOBAL_LOAD_LDS }; }\n"""
    main = """int main() { for(int page : {1, 128}) for(int pages : {1000, 3000000})
        std::printf("%d", static_cast<int>(fmha_batch_prefill_select_kv_load_mode(page, 128, pages, 1024))); }"""

    def chosen() -> str:
        function = (tree / CHOICE).read_text().rpartition("inline ck_tile::BlockAttention")
        (tmp_path / "probe.cpp").write_text(types + "".join(function[1:]) + main)
        command = ["g++", "-std=c++17", "-Wall", "-Werror", "-O0", "-o", tmp_path / "probe", tmp_path / "probe.cpp"]
        subprocess.run(command, check=True)
        return subprocess.run([tmp_path / "probe"], check=True, capture_output=True, text=True).stdout

    assert chosen() == "0100"
    apply_patches(tree)
    assert chosen() == "1100"


def test_a_tree_that_they_do_not_fit_is_left_alone_and_keeps_the_limit(tmp_path: Path) -> None:
    """The wheel is older than both patches: its ck_tile has 32-bit page offsets only."""
    root = tmp_path / "site"
    for name in ("aiter/ops/mha.py", f"aiter_meta/{CHOICE}", f"aiter_meta/{PIPELINE}"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(AITER / name, root / name)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    apply_patches(root)
    assert states(root) == both(State.DOES_NOT_FIT)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert header_regime(root) is Regime.SILENT


def test_one_patched_place_of_nine_is_not_applied(tree: Path) -> None:
    mha = tree / "aiter/ops/mha.py"
    mha.write_text(mha.read_text().replace("how_v3_bf16_cvt: int | None = 1", "how_v3_bf16_cvt: int | None = 2", 1))
    assert states(tree)["aiter-fmha-rtz"] is State.DOES_NOT_FIT


def test_a_module_compiled_before_the_patch_is_reported_and_deleted(tree: Path) -> None:
    apply_patches(tree)
    (tree / MODULE).parent.mkdir()
    (tree / MODULE).write_bytes(b"")
    (build := tree / "aiter/jit/build" / Path(MODULE).stem).mkdir(parents=True)
    for path in (tree / MODULE, build):
        os.utime(path, (1e9, 1e9))
    assert states(tree)["ck-tile-page-offset-64bit"] is State.STALE_BUILD
    apply_patches(tree)
    assert not (tree / MODULE).exists() and not build.exists()
    (tree / MODULE).write_bytes(b"compiled after the patch")
    apply_patches(tree)
    assert states(tree) == both(State.APPLIED) and (tree / MODULE).exists()


@pytest.mark.parametrize(
    ("change", "regime"),
    [
        (("", ""), Regime.FIXED64),
        (("int pages", "const void* k_ptr, int pages"), Regime.FIXED64),  # as of ROCm/rocm-libraries#9214
        (("kN0", "tile"), Regime.UNKNOWN),
        (("GLOBAL_LOAD_LDS", "SOMETHING"), Regime.UNKNOWN),
        ((FUNCTION, FUNCTION + FUNCTION), Regime.UNKNOWN),
        ((FUNCTION, "// fmha_batch_prefill_select_kv_load_mode lives elsewhere"), Regime.UNKNOWN),
        ((FUNCTION, ""), Regime.SILENT),
    ],
)
def test_the_headers_decide(tree: Path, change: tuple[str, str], regime: Regime) -> None:
    (tree / CHOICE).write_text((tree / CHOICE).read_text().replace(*change))
    assert header_regime(tree) is regime


def test_a_wide_choice_without_the_load_path_is_not_trusted(tree: Path) -> None:
    apply_patches(tree)
    assert header_regime(tree) is Regime.FIXED64
    (tree / PIPELINE).write_text("#pragma once\n")
    assert header_regime(tree) is Regime.UNKNOWN


def test_the_command_line(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_w4a8_eagle3.machine.aiter_patches.find_root", lambda package: tree)
    assert CliRunner().invoke(app, ["patch", "--check"]).exit_code == 1
    done = CliRunner().invoke(app, ["patch"])
    assert done.exit_code == 0 and done.output.count(" applied ") == 2
    shown = CliRunner().invoke(app, ["patch", "--check", "--json"])
    assert shown.exit_code == 0 and [row["state"] for row in json.loads(shown.output)] == ["applied"] * 2


def test_without_git_or_aiter_nothing_is_claimed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_w4a8_eagle3.machine.aiter_patches.find_root", lambda package: None)
    assert {patch.state for patch in apply_patches()} == {State.NOT_INSTALLED}
    monkeypatch.setenv("PATH", "")
    assert [patch.detail for patch in patch_states(tree)] == ["git is not installed"] * 2
    assert states(tree) == both(State.DOES_NOT_FIT)
