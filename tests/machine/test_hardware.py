"""The machine is read from a sysfs tree: GPUs in HIP's order, their memory and NUMA node."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.machine.hardware import GIB, Machine, gpu_by_name


def add_node(
    sysfs: Path, number: int, *, simds: int, bus: int = 0, numa: str | None = None, hbm: int = 0, target: int = 90402
) -> None:
    node = sysfs / f"class/kfd/kfd/topology/nodes/{number}"
    (node / "mem_banks/0").mkdir(parents=True)
    target = target if simds else 0
    node.joinpath("properties").write_text(
        f"cpu_cores_count 0\nsimd_count {simds}\ngfx_target_version {target}\nlocation_id {bus << 8}\ndomain 0\n"
    )
    (node / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {hbm}\nflags 0\n")
    if simds:
        pci = sysfs / f"bus/pci/devices/0000:{bus:02x}:00.0"
        pci.mkdir(parents=True)
        if numa is not None:
            (pci / "numa_node").write_text(f"{numa}\n")


def mi325x_tree(sysfs: Path, numa: list[str | None]) -> None:
    add_node(sysfs, 0, simds=0)
    add_node(sysfs, 1, simds=0)
    for index, node in enumerate(numa):
        add_node(sysfs, index + 2, simds=1216, bus=0x05 + 0x10 * index, numa=node, hbm=255 * GIB)


def test_devices_come_in_node_order_with_their_facts(tmp_path: Path) -> None:
    mi325x_tree(tmp_path, ["0"] * 4 + ["1"] * 6)
    machine = Machine.detect(tmp_path)
    assert [device.pci for device in machine.devices][:2] == ["0000:05:00.0", "0000:15:00.0"]
    assert machine.devices[9].pci == "0000:95:00.0"  # node 11 after node 9: numeric order, not alphabetic
    assert machine.devices[0].arch == "gfx942" and machine.devices[0].compute_units == 304
    assert machine.gpu is not None and machine.gpu.name == "mi325x"
    assert machine.numa_nodes == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("unknown", ["-1", None])
def test_an_unknown_numa_node_is_not_guessed(tmp_path: Path, unknown: str | None) -> None:
    mi325x_tree(tmp_path, ["0", unknown])
    assert Machine.detect(tmp_path).numa_nodes is None
    assert Machine().numa_nodes is None


def test_a_machine_without_the_driver_has_no_devices(tmp_path: Path) -> None:
    assert Machine.detect(tmp_path).devices == ()
    assert Machine().gpu is None


@pytest.mark.parametrize(
    ("simds", "target", "hbm", "name"),
    [
        (320, 90402, 191, "mi308x"),
        (1216, 90402, 191, "mi300x"),
        (1216, 90402, 255, "mi325x"),
        (1024, 90500, 287, "mi350x"),  # an MI355X has the same units and memory, and more power
    ],
)
def test_every_known_gpu_is_recognised(tmp_path: Path, simds: int, target: int, hbm: int, name: str) -> None:
    add_node(tmp_path, 1, simds=simds, bus=1, hbm=hbm * GIB, target=target)
    found = Machine.detect(tmp_path).gpu
    assert found == gpu_by_name(name) and found.arch == Machine.detect(tmp_path).devices[0].arch
    add_node(tmp_path, 2, simds=64, bus=2, hbm=hbm * GIB, target=target)
    assert Machine.detect(tmp_path).gpu is None  # mixed


def test_mi350x_and_mi355x_have_what_the_data_sheet_says() -> None:
    for name in ("mi350x", "MI355X"):
        gpu = gpu_by_name(name)
        assert (gpu.arch, gpu.compute_units, gpu.hbm_gib, gpu.hbm_tb_s) == ("gfx950", 256, 288, 8.0)


def test_an_unknown_gpu_name_is_refused_with_the_nearest() -> None:
    assert gpu_by_name("MI325X").arch == "gfx942"
    with pytest.raises(KimiError, match="did you mean 'mi325x'"):
        gpu_by_name("mi325")
