"""The verdicts on good and bad machines; those on GPUs are in test_doctor_gpus.py."""

from __future__ import annotations

import dataclasses

import pytest
from support import machines
from support.machines import (
    EAGLE3,
    GIB,
    PACKAGES,
    TINY,
    bare,
    cached,
    check,
    fetch_pretended,
    mi325x,
    problems,
    remove,
    write,
)

from kimi_w4a8_eagle3.doctor.needs import Needs
from kimi_w4a8_eagle3.doctor.probe import Probe, RunningProcess
from kimi_w4a8_eagle3.doctor.runner import examine
from kimi_w4a8_eagle3.doctor.software import SGLANG_NEWEST, SGLANG_PINNED
from kimi_w4a8_eagle3.machine.aiter_patches import PatchState, State
from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.recipe.launch import load_recipe, with_settings


def test_a_good_machine_passes_without_a_word(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    report = examine(machine, EAGLE3)
    assert problems(report) == {} and not report.failed
    assert report.numa_nodes == [0, 0, 0, 0, 1, 1, 1, 1]
    found = {result.name: result.found for result in report.results}
    assert found["gpus"] == "8 x MI325X" and found["arch"] == "8 x gfx942"
    assert found["numa"] == "--numa-node 0 0 0 0 1 1 1 1"
    assert found["hbm"] == "255.7 of 256.0 GiB free on the fullest GPU"
    assert found["rocm"] == "7.2.0-43" and found["driver"] == "amdgpu 6.16.6"
    assert [result.name for result in report.results if result.remedy] == []


def test_a_bare_machine_gets_the_missing_parts_and_their_remedies(tmp_path):
    report = examine(bare(tmp_path, hub_answers=False), EAGLE3)
    assert report.failed
    gpus = next(result for result in report.results if result.name == "gpus")
    assert gpus.found == "no AMD GPU in this machine, 8 x gfx942 needed" and "--recipe tiny" in gpus.remedy
    failed = {name for name, verdict in problems(report).items() if verdict == "fail"}
    assert failed == {"gpus", "rocm", "torch", "aiter", "model", "draft"}


def test_a_bare_machine_is_ready_for_the_tiny_recipe(tmp_path):
    report = examine(bare(tmp_path, hub_answers=False), TINY)
    assert not report.failed and problems(report) == {}


def test_every_problem_has_a_remedy(tmp_path):
    missing = {"packages": {}, "build": None, "entry_points": (), "kernels_refused": "there are none"}
    machine = bare(tmp_path, hub_answers=False, taken="port 9527 is used", **missing)
    report = examine(machine, EAGLE3)
    assert len(problems(report)) >= 12
    assert all(result.remedy for result in report.results if result.severity.value in ("warn", "fail"))


@pytest.mark.parametrize(("free", "verdict"), [(64 << 20, "fail"), (2 * GIB, "warn"), (64 * GIB, "ok")])
def test_shared_memory(tmp_path, free, verdict):
    """64 MiB is what docker gives unless told."""
    result = check(mi325x(tmp_path, spaces={"dev/shm": free}), "shm")
    assert result.severity.value == verdict
    assert verdict == "ok" or "--ipc=host" in result.remedy


def test_docker_shared_memory_is_enough_for_tiny(tmp_path):
    assert check(bare(tmp_path, spaces={"dev/shm": 64 << 20}), "shm", TINY).severity.value == "ok"
    assert check(bare(tmp_path, spaces={"dev/shm": 1 << 20}), "shm", TINY).severity.value == "fail"


def test_no_access_to_the_devices_names_the_groups(tmp_path):
    machine = mi325x(tmp_path, closed=frozenset({"dev/kfd", "dev/dri/renderD128"}))
    result = check(machine, "devices")
    assert result.severity.value == "fail" and "usermod -aG render,video" in result.remedy
    assert "--group-add render --group-add video" in result.remedy


def test_too_few_render_nodes(tmp_path):
    machine = mi325x(tmp_path)
    remove(tmp_path, "dev/dri/renderD135")
    assert check(machine, "devices").found == "7 render nodes in /dev/dri, 8 needed"


def test_limits(tmp_path):
    machine = mi325x(tmp_path, limits={"memlock": 64 << 20, "nofile": 1024})
    assert "memlock=-1" in check(machine, "memlock").remedy
    assert check(machine, "nofile").found == "1024, 65536 needed"
    assert check(machine, "nofile", TINY).severity.value == "ok"


@pytest.mark.parametrize(("text", "faults"), [("6.4.3-1", {"fault rocm-old": "warn"}), ("7.0.0", {}), ("nightly", {})])
def test_rocm_versions(tmp_path, text, faults):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    write(tmp_path, {"opt/rocm/.info/version": text})
    assert problems(examine(machine, EAGLE3)) == faults


def test_an_inbox_driver_has_no_version_of_its_own(tmp_path):
    machine = mi325x(tmp_path)
    remove(tmp_path, "sys/module/amdgpu/version")
    write(tmp_path, {"proc/sys/kernel/osrelease": "6.17.0"})
    assert check(machine, "driver").found == "amdgpu of kernel 6.17.0 (in-tree driver)"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (SGLANG_PINNED, {}),
        (f"{SGLANG_PINNED}.post1", {}),
        (f"{SGLANG_PINNED}.dev20260920+gc610c40399", {"fault sglang-untried": "warn"}),
        (SGLANG_NEWEST, {}),
        ("0.5.10rc0", {"fault sglang-before-0-5-16": "fail"}),
        ("0.5.17", {"fault sglang-0-5-16": "fail"}),
        ("0.6.0", {"fault sglang-untried": "warn"}),
        (None, {"sglang": "fail"}),
    ],
)
def test_a_release_of_sglang_gets_one_message(tmp_path, version, expected):
    packages = {k: v for k, v in PACKAGES.items() if k != "sglang"} | ({"sglang": version} if version else {})
    machine = mi325x(tmp_path, packages=packages)
    fetch_pretended(machine)
    assert problems(examine(machine, EAGLE3)) == expected


def test_an_accepted_fault_does_not_fail(tmp_path):
    needs = Needs.of(with_settings(load_recipe("eagle3"), {"options.accept_faults": ["sglang-0-5-16"]}))
    machine = mi325x(tmp_path, packages=PACKAGES | {"sglang": "0.5.16"})
    fetch_pretended(machine)
    assert problems(examine(machine, needs)) == {}


@pytest.mark.parametrize(
    ("build", "verdict"), [("hip 7.2.1", "ok"), ("cuda 12.8", "fail"), ("cpu", "fail"), (None, "fail")]
)
def test_torch_builds(tmp_path, build, verdict):
    assert check(mi325x(tmp_path, build=build), "torch").severity.value == verdict


def test_kernel_packages(tmp_path):
    machine = mi325x(tmp_path, regime=Regime.ABORT)
    assert check(machine, "aiter").found == "0.1.14; page offsets: abort"
    assert check(machine, "kernels").found == "228 code objects in /opt/kimi/kernels"
    none = mi325x(tmp_path, packages={"sglang": SGLANG_PINNED, "torch": "2.11"}, kernels_refused="one was altered")
    assert check(none, "aiter").severity.value == check(none, "kernels").severity.value == "fail"
    assert check(none, "kernels").found == "one was altered" and "kimi-w4a8 warm" in check(none, "kernels").remedy


def test_a_router_of_another_release(tmp_path, monkeypatch):
    """Check the router that is installed here, and one that lost an option."""
    from sglang_router import router_args  # optional: sglang-router

    assert Probe().router_lacks() == []
    names = [option.name for option in dataclasses.fields(router_args.RouterArgs) if option.name != "history_backend"]
    monkeypatch.setattr(router_args, "RouterArgs", dataclasses.make_dataclass("RouterArgs", names))
    assert Probe().router_lacks() == ["history_backend"]
    less = check(mi325x(tmp_path, lacks=["history_backend"]), "router")
    assert less.severity.value == "fail" and "does not know history_backend" in less.found
    assert check(mi325x(tmp_path, lacks=[]), "router").severity.value == "ok"
    assert check(mi325x(tmp_path, lacks=None), "router").severity.value == "skip"


def test_a_missing_plugin_is_a_failure(tmp_path):
    assert check(mi325x(tmp_path, entry_points=()), "plugin").severity.value == "fail"


@pytest.mark.parametrize(
    ("state", "verdict", "remedy"),
    [
        (State.APPLIED, "ok", ""),
        (State.NOT_INSTALLED, "skip", ""),
        (State.NOT_APPLIED, "warn", "kimi-w4a8 patch"),
        (State.STALE_BUILD, "fail", "kimi-w4a8 patch"),
        (State.DOES_NOT_FIT, "warn", "the AITER of the image"),
    ],
)
def test_patches(tmp_path, state, verdict, remedy):
    result = check(mi325x(tmp_path, patch_states=(PatchState("p", state, "detail"),)), "patch p")
    assert result.severity.value == verdict and remedy in result.remedy


def test_checkpoints_that_the_hub_has(tmp_path):
    machine = mi325x(tmp_path)
    result = check(machine, "model")
    assert result.severity.value == "warn"
    assert result.found == "amd/Kimi-K2.5-W4A8 at main: 534.0 GB of 534.0 GB missing; the Hub has it"
    assert result.remedy == "kimi-w4a8 fetch --recipe eagle3-opt"


def test_checkpoints_and_no_hub(tmp_path):
    silent = mi325x(tmp_path, hub_answers=False)
    assert check(silent, "draft").severity.value == "fail"
    assert silent.asked == ["amd/Kimi-K2.5-W4A8"]  # a Hub that does not answer is asked once
    offline = check(mi325x(tmp_path, is_offline=True), "draft")
    assert offline.severity.value == "fail" and "HF_HUB_OFFLINE" in offline.found


def test_a_checkpoint_that_is_half_here(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    cached(machine, "amd/Kimi-K2.5-W4A8", "main", {"w": 4, "x": 3000})
    assert "3.0 kB of 3.0 kB missing" in check(machine, "model").found
    assert "3.0 kB to fetch" in check(machine, "disk").found


def test_a_cache_without_a_list_of_the_files_needs_no_space_for_its_files(tmp_path):
    machine = mi325x(tmp_path)
    folder = cached(machine, "amd/Kimi-K2.5-W4A8", "main", {"w": 4})
    (folder.parents[1] / "trees" / f"{folder.name}.json").unlink()
    with (folder / "w").open("wb") as weights:
        weights.truncate(534 * 10**9)
    assert check(machine, "model").severity.value == "warn"
    assert "6.0 GB to fetch" in check(machine, "disk").found


def test_a_disk_too_small_for_the_missing_files(tmp_path):
    result = check(mi325x(tmp_path, spaces={"cache": 300 * 10**9}), "disk")
    assert result.severity.value == "fail" and "540.0 GB needed, 300.0 GB free in" in result.found


def test_a_full_disk_does_not_matter_when_all_is_here(tmp_path):
    machine = mi325x(tmp_path, spaces={"cache": 5 * 10**9})
    fetch_pretended(machine)
    assert check(machine, "disk").severity.value == "ok"


def test_a_port_in_use(tmp_path):
    result = check(mi325x(tmp_path, taken="port 9527 is used by process 7"), "port")
    assert (result.severity.value, result.found) == ("fail", "port 9527 is used by process 7")


@pytest.mark.parametrize(
    ("command", "is_engine"),
    [
        ("/usr/bin/python3 -m sglang.launch_server --model-path x", True),
        ("sglang::scheduler_TP3", True),
        ("VLLM::Worker_TP0", True),
        ("python -m vllm.entrypoints.openai.api_server", True),
        ("vim sglang/srt/server_args.py", False),
        ("grep -r sglang.launch_server .", False),
        ("bash", False),
    ],
)
def test_stray_engines(tmp_path, command, is_engine):
    result = check(mi325x(tmp_path, running=(RunningProcess(4711, command),)), "processes")
    assert (result.severity.value == "warn") == is_engine
    assert not is_engine or "kill 4711" in result.remedy


def test_a_check_that_breaks_does_not_hide_the_others(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    write(tmp_path, {f"sys/bus/pci/devices/{machines.PCI[0]}/numa_node": "not a number"})
    report = examine(machine, EAGLE3)
    broken = [result for result in report.results if "the check itself failed: ValueError" in result.found]
    assert broken and report.failed and report.numa_nodes is None
    assert any(result.name == "port" and result.severity.value == "ok" for result in report.results)


def test_needs_follow_the_recipe(tmp_path):
    assert (EAGLE3.gpus, EAGLE3.arch, EAGLE3.port, EAGLE3.numa) == (8, ("gfx942",), 9527, None)
    assert [checkpoint.repo for checkpoint in EAGLE3.checkpoints] == [
        "amd/Kimi-K2.5-W4A8",
        "lightseekorg/kimi-k2.5-eagle3",
    ]
    assert not TINY.on_gpu
