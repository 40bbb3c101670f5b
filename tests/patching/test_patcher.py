from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patch_trees import MHA, snapshot

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.patching import ledger, patcher
from kimi_w4a8_eagle3.patching.page_offset import page_offset_regime
from kimi_w4a8_eagle3.patching.patcher import Status
from kimi_w4a8_eagle3.patching.patches import Patch, load_manifest, select

PATCHES = {patch.id: patch for patch in load_manifest()}
ROUNDING = PATCHES["aiter-fmha-rtz"]
WIDE = PATCHES["ck-tile-page-offset-64bit"]
FILE = ROUNDING.file[0]
PLACES = [(f"aiter/ops/{name}.py",) for name in ("one", "two", "three")]
THREE = ROUNDING.model_copy(update={"file": tuple(FILE.model_copy(update={"any_of": place}) for place in PLACES)})
CK = "3rdparty/composable_kernel"


@pytest.mark.parametrize("patch", [ROUNDING, WIDE], ids=lambda patch: patch.id)
def test_apply_twice_verify_and_revert_byte_for_byte(patch: Patch, aiter_tree: Path) -> None:
    target = aiter_tree / next(name for name in patch.file[0].any_of if (aiter_tree / name).is_file())
    target.chmod(0o640)
    before = snapshot(aiter_tree)
    assert patcher.inspect(patch, aiter_tree).status is Status.NOT_APPLIED
    assert patcher.apply(patch, aiter_tree).status is Status.APPLIED
    once = snapshot(aiter_tree)
    assert once[str(target.relative_to(aiter_tree))][:2] != before[str(target.relative_to(aiter_tree))][:2]
    assert target.stat().st_mode & 0o777 == 0o640
    assert patcher.apply(patch, aiter_tree).status is Status.APPLIED
    assert snapshot(aiter_tree) == once  # nothing was written again
    assert patcher.revert(patch, aiter_tree) == [target]
    assert snapshot(aiter_tree) == before
    assert patcher.revert(patch, aiter_tree) == []


def test_all_files_of_a_patch_or_none(three_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(three_files)
    write, calls = ledger.write_atomic, []

    def disk_full(path: Path, data: bytes, like: Path | None = None) -> None:
        calls.append(path)
        if len(calls) == 4:  # two writes a file: in the middle of the second of three
            raise OSError(28, "No space left on device", str(path))
        write(path, data, like)

    monkeypatch.setattr(ledger, "write_atomic", disk_full)
    with pytest.raises(KimiError, match="nothing is changed"):
        patcher.apply(THREE, three_files)
    assert snapshot(three_files) == before


def test_a_crash_before_the_file_changed_can_be_repeated_and_reverted(
    aiter_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(aiter_tree)
    mha = aiter_tree / "aiter/ops/mha.py"
    write = ledger.write_atomic

    def killed(path: Path, data: bytes, like: Path | None = None) -> None:
        if path == mha:
            raise KeyboardInterrupt
        write(path, data, like)

    for finish in (patcher.apply, None):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(ledger, "write_atomic", killed)
            patcher.apply(ROUNDING, aiter_tree)
        assert mha.read_bytes() == MHA.encode()
        if finish:
            assert finish(ROUNDING, aiter_tree).status is Status.APPLIED
        patcher.revert(ROUNDING, aiter_tree)
        assert snapshot(aiter_tree) == before


def test_a_file_that_is_not_recognised_is_refused(aiter_tree: Path) -> None:
    mha = aiter_tree / "aiter/ops/mha.py"
    mha.write_text("def forward(q): return q\n")
    before = snapshot(aiter_tree)
    with pytest.raises(KimiError, match="not recognised"):
        patcher.apply(ROUNDING, aiter_tree)
    assert snapshot(aiter_tree) == before


def test_a_later_change_of_the_file_is_kept(aiter_tree: Path) -> None:
    mha = aiter_tree / "aiter/ops/mha.py"
    patcher.apply(ROUNDING, aiter_tree)
    mha.write_bytes(mha.read_bytes() + b"\n# local change\n")
    before = snapshot(aiter_tree)
    assert patcher.inspect(ROUNDING, aiter_tree).status is Status.MODIFIED
    for operation in (patcher.apply, patcher.revert):
        with pytest.raises(KimiError, match="changed after it was patched"):
            operation(ROUNDING, aiter_tree)
    assert snapshot(aiter_tree) == before


def test_a_damaged_backup_is_not_restored(aiter_tree: Path) -> None:
    mha = aiter_tree / "aiter/ops/mha.py"
    patcher.apply(ROUNDING, aiter_tree)
    patched = mha.read_bytes()
    ledger.backup_path(mha).write_bytes(b"something else")
    with pytest.raises(KimiError, match="backup"):
        patcher.revert(ROUNDING, aiter_tree)
    assert mha.read_bytes() == patched


def test_revert_restores_none_when_one_file_was_changed(three_files: Path) -> None:
    patcher.apply(THREE, three_files)
    second = three_files / "aiter/ops/two.py"
    second.write_bytes(second.read_bytes() + b"# mine\n")
    before = snapshot(three_files)
    with pytest.raises(KimiError, match="changed after"):
        patcher.revert(THREE, three_files)
    assert snapshot(three_files) == before


def test_a_symbolic_link_stays_one(aiter_tree: Path, tmp_path: Path) -> None:
    link = aiter_tree / "aiter/ops/mha.py"
    real = tmp_path / "real_mha.py"
    link.rename(real)
    link.symlink_to(real)
    patcher.apply(ROUNDING, aiter_tree)
    assert link.is_symlink()
    assert b"= 2" in real.read_bytes()


def test_a_module_compiled_before_the_patch_is_reported(aiter_tree: Path) -> None:
    name = "mha_batch_prefill_bf16_nlogits_nbias_mask_nlse_ndropout_nqscale_nsink"  # as AITER calls it at c16d44b
    module = aiter_tree / f"aiter/jit/{name}.so"
    module.parent.mkdir()
    module.write_bytes(b"")
    os.utime(module, (1e9, 1e9))
    assert patcher.inspect(WIDE, aiter_tree).status is Status.NOT_APPLIED
    report = patcher.apply(WIDE, aiter_tree)
    assert report.status is Status.STALE_BUILD
    assert str(module) in report.detail
    (build := aiter_tree / f"aiter/jit/build/{name}").mkdir(parents=True)
    os.utime(build, (1e9, 1e9))
    assert patcher.remove_stale(WIDE, aiter_tree) == [build, module]
    assert not module.exists()
    assert patcher.inspect(WIDE, aiter_tree).status is Status.APPLIED
    module.write_bytes(b"compiled after the patch")
    assert patcher.remove_stale(WIDE, aiter_tree) == []


def test_page_offset_regimes(aiter_tree: Path, tmp_path: Path) -> None:
    assert page_offset_regime(aiter_tree) == "fixed"
    patcher.apply(WIDE, aiter_tree)
    assert page_offset_regime(aiter_tree) == "fixed"
    patcher.revert(WIDE, aiter_tree)

    forward = aiter_tree / CK / "example/ck_tile/01_fmha/fmha_fwd.hpp"
    forward.write_text("#pragma once\n")
    assert page_offset_regime(aiter_tree) == "silent"
    forward.write_text("// fmha_batch_prefill_select_kv_load_mode\n")
    assert page_offset_regime(aiter_tree) is None
    assert page_offset_regime(tmp_path) is None


def test_a_64_bit_choice_without_the_load_path_is_not_trusted(aiter_tree: Path) -> None:
    pipeline = next((aiter_tree / CK).rglob("block_fmha_batch_prefill_pipeline_*.hpp"))
    pipeline.write_text("#pragma once\n")
    assert page_offset_regime(aiter_tree) is None


def test_an_absent_package(tmp_path: Path) -> None:
    report = patcher.apply(ROUNDING, tmp_path)
    assert report.status is Status.NOT_INSTALLED
    assert list(tmp_path.iterdir()) == []


def kimi(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kimi_w4a8_eagle3.cli", "patch", *map(str, arguments)], capture_output=True, text=True
    )


def test_the_command_line(old_aiter_tree: Path) -> None:
    root = ("--root", old_aiter_tree)
    assert kimi("verify", *root).returncode == 1
    applied = kimi("apply", *root, "--json")
    assert applied.returncode == 0, applied.stderr
    assert {report["id"]: report["status"] for report in json.loads(applied.stdout)} == {
        "aiter-fmha-rtz": "applied",
        "ck-tile-page-offset-64bit": "not applicable",
    }
    assert kimi("verify", *root).returncode == 0
    assert kimi("revert", *root).returncode == 0
    assert not list(old_aiter_tree.rglob("*.kimi-*"))


def test_one_bad_file_stops_every_patch(aiter_tree: Path) -> None:
    forward = aiter_tree / CK / "example/ck_tile/01_fmha/fmha_fwd.hpp"
    forward.write_text(forward.read_text().replace("kN0", "tile"))
    before = snapshot(aiter_tree)
    result = kimi("apply", "--root", aiter_tree)
    assert result.returncode == 1
    assert "ck-tile-page-offset-64bit is refused" in result.stderr
    assert "Traceback" not in result.stderr
    assert snapshot(aiter_tree) == before


def test_a_misspelt_id_names_the_nearest() -> None:
    with pytest.raises(KimiError, match="did you mean 'aiter-fmha-rtz'"):
        select(load_manifest(), ["aiter-fmha-rzt"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("purpose =", "porpoise ="), "Extra inputs|Field required"),
        (('edit = "parameter-default"', 'edit = "parameter-defualt"'), "did you mean 'parameter-default'"),
        (("old = 1, ", ""), "options of edit"),
        (('id = "ck-tile-page-offset-64bit"', 'id = "aiter-fmha-rtz"'), "id used twice"),
        (('"example/ck_tile/01_fmha/fmha_fwd.hpp"', '"aiter/ops/mha.py"'), "file used twice"),
        (("[[patch]]", "[[patch"), "cannot be read"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    from kimi_w4a8_eagle3.base.resources import operator_dir

    text = (operator_dir("patches") / "manifest.toml").read_text()
    assert change[0] in text
    wrong = tmp_path / "manifest.toml"
    wrong.write_text(text.replace(*change, 1) if change[0] != "[[patch]]" else text.replace(*change))
    with pytest.raises(KimiError, match=message):
        load_manifest(wrong)


def test_the_installed_aiter_is_recognised() -> None:
    """Runs where AITER is installed (a ROCm image); looks, does not write."""
    report = patcher.inspect(ROUNDING)
    if report.status is Status.NOT_INSTALLED:
        pytest.skip("no aiter here")
    assert report.status in (Status.APPLIED, Status.NOT_APPLIED), report.detail
    assert page_offset_regime() is not None
