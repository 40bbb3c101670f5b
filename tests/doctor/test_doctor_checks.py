"""The verdicts on good and bad machines."""

from __future__ import annotations

import dataclasses

import pytest
from support import smi_texts
from support.machines import GIB, PACKAGES, TOOLS, Recorded, bare, gpu_files, mi325x, patch, remove, write

from kimi_w4a8_eagle3.doctor.needs import Needs
from kimi_w4a8_eagle3.doctor.probe import Process
from kimi_w4a8_eagle3.doctor.result import Report, Result
from kimi_w4a8_eagle3.doctor.runner import examine
from kimi_w4a8_eagle3.doctor.software import SGLANG_OLDER, SGLANG_PINNED
from kimi_w4a8_eagle3.fetch.manifest import Manifest
from kimi_w4a8_eagle3.fetch.model import Listing, RemoteFile
from kimi_w4a8_eagle3.fetch.store import CacheStore
from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.patching.patcher import Status
from kimi_w4a8_eagle3.recipe.launch import load_recipe

EAGLE3 = Needs.of(load_recipe("eagle3-opt"))
TINY = Needs.of(load_recipe("tiny"))


def check(machine: Recorded, name: str, needs: Needs = EAGLE3) -> Result:
    return next(result for result in examine(machine, needs).results if result.name == name)


def problems(report: Report) -> dict[str, str]:
    return {r.name: r.verdict.value for r in report.results if r.verdict.value in ("warn", "fail")}


def fetch_pretended(machine: Recorded, needs: Needs = EAGLE3) -> None:
    """Every checkpoint of the recipe is in the cache: a manifest and one file each."""
    for checkpoint in needs.checkpoints:
        store = CacheStore(machine.cache(), checkpoint.repo)
        file = RemoteFile("w", 4, "f" * 64, True)
        listing = Listing(checkpoint.repo, checkpoint.revision, "c" * 40, (file,))
        write(store.root, {"refs/" + checkpoint.revision: "c" * 40})
        Manifest(listing, {"w"}).save(store.tree, store.manifest_path(listing.commit))
        write(store.root / "blobs", {file.digest: "abc"})  # with the newline, four bytes


def test_a_good_machine_passes_without_a_word(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    report = examine(machine, EAGLE3)
    assert problems(report) == {} and not report.failed
    assert report.numa_nodes == [0, 0, 0, 0, 1, 1, 1, 1]
    found = {result.name: result.found for result in report.results}
    assert found["gpus"] == "8 x AMD Instinct MI325X" and found["arch"] == "8 x gfx942"
    assert found["numa"] == "--numa-node 0 0 0 0 1 1 1 1"
    assert found["hbm"] == "255.7 of 256.0 GiB free on the fullest GPU"
    assert found["rocm"] == "7.2.0-43" and found["driver"] == "amdgpu 6.16.6"
    assert not any(result.remedy for result in report.results)


def test_the_good_machine_needs_no_tools(tmp_path):
    """A slim container has neither amd-smi nor rocm-smi: the kernel says it all."""
    machine = mi325x(tmp_path, commands={})
    fetch_pretended(machine)
    assert problems(examine(machine, EAGLE3)) == {}


@pytest.mark.parametrize(
    "commands",
    [
        {k: v for k, v in TOOLS.items() if k.startswith("amd")},
        {"rocm-smi --json": smi_texts.rocm_json(lower=True)},
        {"rocm-smi --json": "WARNING: No JSON data to report", "rocm-smi --csv": smi_texts.rocm_csv()},
        {
            "amd-smi static": smi_texts.older(smi_texts.amd_static()),
            "amd-smi metric": smi_texts.older(smi_texts.amd_memory()),
        },
    ],
    ids=["amd-smi", "rocm-smi json", "rocm-smi csv", "amd-smi old"],
)
def test_tools_alone_tell_gpus_arch_and_memory(tmp_path, commands):
    """The kernel's KFD tree is hidden (some sandboxes), the tools still answer."""
    machine = mi325x(tmp_path, commands={"amd-smi version": "", **commands})
    remove(tmp_path, "sys/class/kfd")
    assert check(machine, "gpus").found == "8 x AMD Instinct MI325X"
    assert check(machine, "arch").verdict.value == "ok"
    assert check(machine, "hbm").found == "255.7 of 256.0 GiB free on the fullest GPU"
    # They number GPUs otherwise than HIP does: no list is better than a wrong one.
    assert check(machine, "numa").verdict.value == "warn"


def test_a_bare_machine_is_told_what_is_missing_and_what_to_try(tmp_path):
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
    machine = bare(tmp_path, hub_answers=False, taken="port 9527 is used", packages={}, build=None, entry_points=())
    report = examine(machine, EAGLE3)
    assert len(problems(report)) >= 12
    assert all(result.remedy for result in report.results if result.verdict.value in ("warn", "fail"))


def test_six_of_eight_gpus(tmp_path):
    machine = mi325x(tmp_path, commands={})
    for node in (8, 9):
        remove(tmp_path, f"sys/class/kfd/kfd/topology/nodes/{node}")
    result = check(machine, "gpus")
    assert result.verdict.value == "fail"
    assert result.found == "6 x MI325X, 8 needed; 2 more are on the PCI bus but not offered to this process"


@pytest.mark.parametrize(("value", "verdict"), [("0,1,2,3", "fail"), ("0,1,2,3,4,5,6,7", "ok")])
def test_gpus_hidden_by_the_environment(tmp_path, value, verdict):
    result = check(mi325x(tmp_path, variables={"HIP_VISIBLE_DEVICES": value}), "gpus")
    assert result.verdict.value == verdict
    assert verdict == "ok" or result.remedy == "unset HIP_VISIBLE_DEVICES"


def test_tools_that_disagree_with_the_kernel(tmp_path):
    commands = TOOLS | {"amd-smi static": smi_texts.newer(smi_texts.amd_static()[:7])}
    result = check(mi325x(tmp_path, commands=commands), "gpus")
    assert result.verdict.value == "warn" and "amd-smi sees 7" in result.found


def test_gpus_without_a_driver(tmp_path):
    machine = mi325x(tmp_path, commands={})
    for path in ("sys/class/kfd", "sys/module/amdgpu", "dev/kfd", "dev/dri"):
        remove(tmp_path, path)
    assert "8 AMD GPUs on the PCI bus, but no amdgpu driver" in check(machine, "gpus").found
    assert "modprobe amdgpu" in check(machine, "driver").remedy
    assert "--device /dev/kfd" in check(machine, "devices").remedy


def test_the_wrong_architecture(tmp_path):
    machine = mi325x(tmp_path)
    write(tmp_path, gpu_files(3, smi_texts.PCI[3], arch=90010))
    result = check(machine, "arch")
    assert result.verdict.value == "fail" and result.found == "7 x gfx942, 1 x gfx90a; the recipe is for gfx942"


def test_gpus_split_into_parts(tmp_path):
    machine = mi325x(tmp_path)
    for index, pci in enumerate(smi_texts.PCI):
        write(tmp_path, gpu_files(index, pci, current_compute_partition="CPX", current_memory_partition="NPS4"))
    result = check(machine, "partition")
    assert (result.verdict.value, result.found) == ("fail", "8 x CPX/NPS4")
    assert "--compute-partition SPX" in result.remedy


def test_memory_that_somebody_holds(tmp_path):
    machine = mi325x(tmp_path)
    write(tmp_path, gpu_files(5, smi_texts.PCI[5], used_mib=100 * 1024))
    result = check(machine, "hbm")
    assert (result.verdict.value, result.found) == ("fail", "in use: GPU 5 100.0 GiB")


def test_gpus_that_are_too_small(tmp_path):
    needs = dataclasses.replace(EAGLE3, hbm=288 * GIB)
    result = check(mi325x(tmp_path), "hbm", needs)
    assert result.verdict.value == "fail" and "288 GiB a GPU needed" in result.found


def test_numa_is_derived_not_assumed(tmp_path):
    machine = mi325x(tmp_path, commands={})
    for index, pci in enumerate(smi_texts.PCI):
        write(tmp_path, gpu_files(index, pci, numa_node=str(1 - index // 4)))
    assert check(machine, "numa").found == "--numa-node 1 1 1 1 0 0 0 0"
    assert examine(machine, EAGLE3).as_json()["numa_node"] == [1, 1, 1, 1, 0, 0, 0, 0]
    fixed = check(machine, "numa", dataclasses.replace(EAGLE3, numa=[0, 0, 0, 0, 1, 1, 1, 1]))
    assert fixed.verdict.value == "warn" and "but the recipe has 0 0 0 0 1 1 1 1" in fixed.found


def test_numa_from_the_tools_by_address_when_sysfs_does_not_say(tmp_path):
    machine = mi325x(tmp_path)
    for index, pci in enumerate(smi_texts.PCI):
        write(tmp_path, gpu_files(index, pci, numa_node="-1"))
    assert check(machine, "numa").found == "--numa-node 0 0 0 0 1 1 1 1"
    rocm_only = dataclasses.replace(machine, commands={"rocm-smi --json": smi_texts.rocm_json()})
    assert check(rocm_only, "numa").found == "--numa-node 0 0 0 0 1 1 1 1"
    silent = dataclasses.replace(machine, commands={})
    assert check(silent, "numa").verdict.value == "warn" and "args.numa-node" in check(silent, "numa").remedy


def test_numa_contradiction_between_kernel_and_tool(tmp_path):
    commands = TOOLS | {"rocm-smi --json": smi_texts.rocm_json(numa=[1, 0, 0, 0, 1, 1, 1, 1])}
    result = check(mi325x(tmp_path, commands=commands), "numa")
    assert result.verdict.value == "warn" and "rocm-smi says otherwise" in result.found


def test_numactl_is_wanted_where_sglang_binds_with_it(tmp_path):
    machine = mi325x(tmp_path, programs=frozenset())
    assert "numactl is missing" in check(machine, "numa").found
    free = dataclasses.replace(EAGLE3, environment={})
    assert check(machine, "numa", free).verdict.value == "ok"


def test_numa_balancing(tmp_path):
    machine = mi325x(tmp_path)
    write(tmp_path, {"proc/sys/kernel/numa_balancing": "1"})
    result = check(machine, "numa_balancing")
    assert result.verdict.value == "warn" and "sysctl kernel.numa_balancing=0" in result.remedy


@pytest.mark.parametrize(("free", "verdict"), [(64 << 20, "fail"), (2 * GIB, "warn"), (64 * GIB, "ok")])
def test_shared_memory(tmp_path, free, verdict):
    """64 MiB is what docker gives unless told."""
    result = check(mi325x(tmp_path, spaces={"dev/shm": free}), "shm")
    assert result.verdict.value == verdict
    assert verdict == "ok" or "--ipc=host" in result.remedy


def test_docker_shared_memory_is_enough_for_tiny(tmp_path):
    assert check(bare(tmp_path, spaces={"dev/shm": 64 << 20}), "shm", TINY).verdict.value == "ok"
    assert check(bare(tmp_path, spaces={"dev/shm": 1 << 20}), "shm", TINY).verdict.value == "fail"


def test_no_access_to_the_devices_names_the_groups(tmp_path):
    machine = mi325x(tmp_path, closed=frozenset({"dev/kfd", "dev/dri/renderD128"}))
    result = check(machine, "devices")
    assert result.verdict.value == "fail" and "usermod -aG render,video" in result.remedy
    assert "--group-add render --group-add video" in result.remedy


def test_too_few_render_nodes(tmp_path):
    machine = mi325x(tmp_path)
    remove(tmp_path, "dev/dri/renderD135")
    assert check(machine, "devices").found == "7 render nodes in /dev/dri, 8 needed"


def test_limits(tmp_path):
    machine = mi325x(tmp_path, limits={"memlock": 64 << 20, "nofile": 1024})
    assert "memlock=-1" in check(machine, "memlock").remedy
    assert check(machine, "nofile").found == "1024, 65536 wanted"
    assert check(machine, "nofile", TINY).verdict.value == "ok"


@pytest.mark.parametrize(("text", "verdict"), [("6.4.3-1", "warn"), ("7.0.0", "ok"), ("nightly", "warn")])
def test_rocm_versions(tmp_path, text, verdict):
    machine = mi325x(tmp_path)
    write(tmp_path, {"opt/rocm/.info/version": text})
    assert check(machine, "rocm").verdict.value == verdict


def test_an_inbox_driver_has_no_version_of_its_own(tmp_path):
    machine = mi325x(tmp_path, commands={})
    remove(tmp_path, "sys/module/amdgpu/version")
    write(tmp_path, {"proc/sys/kernel/osrelease": "6.17.0"})
    assert check(machine, "driver").found == "amdgpu of kernel 6.17.0 (no version of its own)"


@pytest.mark.parametrize(
    ("version", "verdict", "text"),
    [
        (SGLANG_PINNED, "ok", SGLANG_PINNED),
        (f"{SGLANG_PINNED}.post1", "ok", f"{SGLANG_PINNED}.post1"),
        (SGLANG_OLDER, "ok", "supported"),
        ("0.5.10rc0", "warn", "never tried"),
        ("0.5.10", "warn", "never tried"),
        ("0.6.0", "warn", "never tried"),
        (None, "fail", "not installed"),
    ],
)
def test_sglang_versions(tmp_path, version, verdict, text):
    packages = {k: v for k, v in PACKAGES.items() if k != "sglang"} | ({"sglang": version} if version else {})
    result = check(mi325x(tmp_path, packages=packages), "sglang")
    assert result.verdict.value == verdict and text in result.found


@pytest.mark.parametrize(
    ("build", "verdict"), [("hip 7.2.1", "ok"), ("cuda 12.8", "fail"), ("cpu", "fail"), (None, "fail")]
)
def test_torch_builds(tmp_path, build, verdict):
    assert check(mi325x(tmp_path, build=build), "torch").verdict.value == verdict


def test_kernel_packages(tmp_path):
    machine = mi325x(tmp_path, packages=PACKAGES | {"flydsl": "0.5.0"}, regime=Regime.ABORT)
    assert check(machine, "aiter").found == "0.1.14; page offsets: abort"
    assert check(machine, "flydsl").verdict.value == "warn" and "flydsl==0.4.2" in check(machine, "flydsl").remedy
    none = mi325x(tmp_path, packages={"sglang": SGLANG_PINNED, "torch": "2.11"})
    assert check(none, "aiter").verdict.value == "fail" and "Triton" in check(none, "flydsl").found


def test_a_missing_plugin_is_a_failure(tmp_path):
    assert check(mi325x(tmp_path, entry_points=()), "plugin").verdict.value == "fail"


@pytest.mark.parametrize(
    ("status", "verdict", "remedy"),
    [
        (Status.APPLIED, "ok", ""),
        (Status.NOT_NEEDED, "ok", ""),
        (Status.NOT_INSTALLED, "skip", ""),
        (Status.NOT_APPLIED, "warn", "kimi patch apply --id p"),
        (Status.STALE_BUILD, "fail", "kimi warm"),
        (Status.MODIFIED, "warn", "docs/patches.md"),
        (Status.UNKNOWN, "warn", "docs/patches.md"),
    ],
)
def test_patches(tmp_path, status, verdict, remedy):
    result = check(mi325x(tmp_path, patch_reports=(patch("p", status),)), "patch p")
    assert result.verdict.value == verdict and remedy in result.remedy


def test_checkpoints_that_the_hub_has(tmp_path):
    machine = mi325x(tmp_path)
    result = check(machine, "model")
    assert result.verdict.value == "warn"
    assert result.found == "amd/Kimi-K2.5-W4A8 at main: 497.0 GB of 497.0 GB missing; the Hub has it"
    assert result.remedy == "kimi fetch --recipe eagle3-opt"


def test_checkpoints_and_no_hub(tmp_path):
    silent = mi325x(tmp_path, hub_answers=False)
    assert check(silent, "draft").verdict.value == "fail"
    assert silent.asked == ["amd/Kimi-K2.5-W4A8"]  # a Hub that does not answer is asked once
    offline = check(mi325x(tmp_path, is_offline=True), "draft")
    assert offline.verdict.value == "fail" and "HF_HUB_OFFLINE" in offline.found


def test_a_checkpoint_that_is_half_here(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    store = CacheStore(machine.cache(), "amd/Kimi-K2.5-W4A8")
    files = (RemoteFile("w", 4, "f" * 64, True), RemoteFile("x", 3000, "e" * 64, True))
    Manifest(Listing(store.repo, "main", "c" * 40, files)).save(store.tree, store.manifest_path("c" * 40))
    (store.root / "blobs" / f"{'e' * 64}.incomplete").write_bytes(bytes(1000))
    assert "2.0 kB of 3.0 kB missing" in check(machine, "model").found
    assert "2.0 kB to fetch" in check(machine, "disk").found


def test_disk_too_small_for_what_is_missing(tmp_path):
    result = check(mi325x(tmp_path, spaces={"cache": 300 * 10**9}), "disk")
    assert result.verdict.value == "fail" and "300.0 GB free" in result.found and "503.0 GB to fetch" in result.found


def test_a_full_disk_does_not_matter_when_all_is_here(tmp_path):
    machine = mi325x(tmp_path, spaces={"cache": 5 * 10**9})
    fetch_pretended(machine)
    assert check(machine, "disk").verdict.value == "ok"


def test_a_port_in_use(tmp_path):
    result = check(mi325x(tmp_path, taken="port 9527 is used by process 7"), "port")
    assert (result.verdict.value, result.found) == ("fail", "port 9527 is used by process 7")


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
    result = check(mi325x(tmp_path, running=(Process(4711, command),)), "processes")
    assert (result.verdict.value == "warn") == is_engine
    assert not is_engine or "kill 4711" in result.remedy


def test_a_check_that_breaks_does_not_hide_the_others(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    write(tmp_path, {f"sys/bus/pci/devices/{smi_texts.PCI[0]}/numa_node": "not a number"})
    report = examine(machine, EAGLE3)
    broken = [result for result in report.results if "the check itself failed: ValueError" in result.found]
    assert broken and report.failed and report.numa_nodes is None
    assert any(result.name == "port" and result.verdict.value == "ok" for result in report.results)


def mi355x(root):
    """Eight MI355X with a vLLM image's packages."""
    machine = mi325x(root, commands={}, packages={"vllm": "0.19.0+rocm722", "torch": "2.11.0+git1234"})
    for index, pci in enumerate(smi_texts.PCI):
        files = gpu_files(index, pci, arch=90500)
        for path, text in files.items():
            files[path] = text.replace("simd_count 1216", "simd_count 1024").replace(
                str(smi_texts.TOTAL_MIB << 20), str(288 << 30)
            )
        write(root, files)
    return machine


def test_an_mi355x_with_vllm_is_ready_for_its_recipe(tmp_path):
    machine, needs = mi355x(tmp_path), Needs.of(load_recipe("mi355x-kimi-mxfp4-eagle3-fp8"))
    fetch_pretended(machine, needs)
    report = examine(machine, needs)
    assert problems(report) == {}
    found = {result.name: result.found for result in report.results}
    assert found["arch"] == "8 x gfx950" and found["gpus"].startswith("8 x MI35")
    assert found["vllm"].startswith("0.19.0+rocm722")
    skipped = {result.name for result in report.results if result.verdict.value == "skip"}
    assert {"sglang", "plugin", "aiter", "flydsl", "patches"} <= skipped


def test_without_vllm_the_image_is_named(tmp_path):
    needs = Needs.of(load_recipe("mi355x-minimax-m2.5"))
    result = check(mi325x(tmp_path), "vllm", needs)
    assert result.verdict.value == "fail" and "--recipe mi355x-minimax-m2.5 --dry-run --docker" in result.remedy
    assert check(mi325x(tmp_path), "arch", needs).verdict.value == "fail"  # a gfx942 machine
    assert check(mi325x(tmp_path), "vllm").verdict.value == "skip"


def test_needs_follow_the_recipe(tmp_path):
    assert (EAGLE3.gpus, EAGLE3.arch, EAGLE3.port, EAGLE3.numa) == (8, ("gfx942",), 9527, None)
    assert [checkpoint.repo for checkpoint in EAGLE3.checkpoints] == [
        "amd/Kimi-K2.5-W4A8",
        "lightseekorg/kimi-k2.5-eagle3",
    ]
    assert not TINY.on_gpu
