"""The verdicts on GPUs: how many, which, whose memory, near which processor."""

from __future__ import annotations

import dataclasses

import pytest
from support import machines
from support.machines import EAGLE3, GIB, check, gpu_files, mi325x, remove, write

from kimi_w4a8_eagle3.doctor.runner import examine


def test_six_of_eight_gpus(tmp_path):
    machine = mi325x(tmp_path)
    for node in (8, 9):
        remove(tmp_path, f"sys/class/kfd/kfd/topology/nodes/{node}")
    result = check(machine, "gpus")
    assert result.severity.value == "fail"
    assert result.found == "6 x MI325X, 8 needed; 2 more are on the PCI bus but not offered to this process"


@pytest.mark.parametrize(("value", "verdict"), [("0,1,2,3", "fail"), ("0,1,2,3,4,5,6,7", "ok")])
def test_gpus_hidden_by_the_environment(tmp_path, value, verdict):
    result = check(mi325x(tmp_path, variables={"HIP_VISIBLE_DEVICES": value}), "gpus")
    assert result.severity.value == verdict
    assert verdict == "ok" or result.remedy == "unset HIP_VISIBLE_DEVICES"


def test_gpus_without_a_driver(tmp_path):
    machine = mi325x(tmp_path)
    for path in ("sys/class/kfd", "sys/module/amdgpu", "dev/kfd", "dev/dri"):
        remove(tmp_path, path)
    assert "8 AMD GPUs on the PCI bus, but no amdgpu driver" in check(machine, "gpus").found
    assert "modprobe amdgpu" in check(machine, "driver").remedy
    assert "--device /dev/kfd" in check(machine, "devices").remedy


def test_the_wrong_architecture(tmp_path):
    machine = mi325x(tmp_path)
    write(tmp_path, gpu_files(3, machines.PCI[3], arch=90010))
    result = check(machine, "arch")
    assert result.severity.value == "fail" and result.found == "7 x gfx942, 1 x gfx90a; the recipe is for gfx942"


def test_gpus_split_into_parts(tmp_path):
    machine = mi325x(tmp_path)
    for index, pci in enumerate(machines.PCI):
        write(tmp_path, gpu_files(index, pci, current_compute_partition="CPX", current_memory_partition="NPS4"))
    result = check(machine, "partition")
    assert (result.severity.value, result.found) == ("fail", "8 x CPX/NPS4")
    assert "--compute-partition SPX" in result.remedy


def test_memory_that_another_process_holds(tmp_path):
    machine = mi325x(tmp_path)
    write(tmp_path, gpu_files(5, machines.PCI[5], used_mib=100 * 1024))
    result = check(machine, "hbm")
    assert (result.severity.value, result.found) == ("fail", "in use: GPU 5 100.0 GiB")


def test_gpus_that_are_too_small(tmp_path):
    needs = dataclasses.replace(EAGLE3, hbm=288 * GIB)
    result = check(mi325x(tmp_path), "hbm", needs)
    assert result.severity.value == "fail" and "288 GiB per GPU needed" in result.found


def test_numa_is_derived_not_assumed(tmp_path):
    machine = mi325x(tmp_path)
    for index, pci in enumerate(machines.PCI):
        write(tmp_path, gpu_files(index, pci, numa_node=str(1 - index // 4)))
    assert check(machine, "numa").found == "--numa-node 1 1 1 1 0 0 0 0"
    assert examine(machine, EAGLE3).as_json()["numa_node"] == [1, 1, 1, 1, 0, 0, 0, 0]
    fixed = check(machine, "numa", dataclasses.replace(EAGLE3, numa=[0, 0, 0, 0, 1, 1, 1, 1]))
    assert fixed.severity.value == "warn" and "but the recipe has 0 0 0 0 1 1 1 1" in fixed.found


def test_numa_is_a_question_where_the_firmware_does_not_say(tmp_path):
    machine = mi325x(tmp_path)
    for index, pci in enumerate(machines.PCI):
        write(tmp_path, gpu_files(index, pci, numa_node="-1"))
    result = check(machine, "numa")
    assert result.severity.value == "warn" and "args.numa-node" in result.remedy


def test_numactl_is_wanted_where_sglang_binds_with_it(tmp_path):
    machine = mi325x(tmp_path, programs=frozenset())
    assert "numactl is missing" in check(machine, "numa").found
    free = dataclasses.replace(EAGLE3, environment={})
    assert check(machine, "numa", free).severity.value == "ok"


def test_numa_balancing(tmp_path):
    machine = mi325x(tmp_path)
    write(tmp_path, {"proc/sys/kernel/numa_balancing": "1"})
    result = check(machine, "numa_balancing")
    assert result.severity.value == "warn" and "sysctl kernel.numa_balancing=0" in result.remedy


def test_an_mi355x_is_named_and_is_not_the_recipes_gpu(tmp_path):
    machine = mi325x(tmp_path)
    for index, pci in enumerate(machines.PCI):
        files = gpu_files(index, pci, arch=90500)
        for path, text in files.items():
            files[path] = text.replace("simd_count 1216", "simd_count 1024").replace(
                str(machines.TOTAL_MIB << 20), str(288 << 30)
            )
        write(tmp_path, files)
    assert check(machine, "gpus").found.startswith("8 x MI35")
    arch = check(machine, "arch")
    assert arch.severity.value == "fail" and arch.found.startswith("8 x gfx950")
