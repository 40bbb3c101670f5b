"""amd-smi in the shapes of several releases, and in shapes that nobody promised."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import smi_texts

from kimi_w4a8_eagle3.doctor.smi import Smi, SmiGpu, parse_amd_smi

TOTAL, USED = smi_texts.TOTAL_MIB << 20, smi_texts.USED_MIB << 20


def expected(pci: str, numa: int) -> SmiGpu:
    return SmiGpu(pci, "AMD Instinct MI325X", "gfx942", TOTAL, USED, numa)


@pytest.mark.parametrize("shape", [smi_texts.newer, smi_texts.older], ids=["ROCm 7", "ROCm 6 with a warning"])
def test_amd_smi(shape):
    smi = parse_amd_smi(shape(smi_texts.amd_static()), shape(smi_texts.amd_memory()), shape(smi_texts.amd_version()))
    assert smi == Smi(tuple(expected(pci, i // 4) for i, pci in enumerate(smi_texts.PCI)), "6.16.6", "7.2.0")


def test_amd_smi_of_rocm_6_0_leaves_unknown_what_it_does_not_say():
    smi = parse_amd_smi(smi_texts.oldest_static(), "", "")
    assert smi is not None
    assert set(smi.gpus) == {SmiGpu(pci, "AMD Instinct MI325X", None, TOTAL, None, None) for pci in smi_texts.PCI}
    assert (smi.driver, smi.rocm) == (None, None)


def test_an_id_as_market_name_gives_way_to_the_boards_name():
    entry = smi_texts.amd_static()[0] | {"board": {"product_name": "AMD Instinct MI325X OAM"}}
    entry["asic"]["market_name"] = "0x74a5"
    smi = parse_amd_smi(json.dumps([entry]), "N/A", "")
    assert smi is not None and smi.gpus[0].name == "AMD Instinct MI325X OAM"


def test_node_minus_one_means_that_nobody_knows():
    smi = parse_amd_smi(smi_texts.newer(smi_texts.amd_static(numa=[-1] * 8)), "", "")
    assert smi is not None and {gpu.numa for gpu in smi.gpus} == {None}


def test_arch_with_feature_flags():
    smi = parse_amd_smi(smi_texts.newer(smi_texts.amd_static(arch="gfx942:sramecc+:xnack-")), "", "")
    assert smi is not None and smi.gpus[0].arch == "gfx942"


def test_nothing_to_read():
    assert parse_amd_smi("Unable to detect any GPU devices", "", "") is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("N/A"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["gpu_data", "gpu", "asic", "bus", "vram", "numa", "node", "size", "value", "mem_usage"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(derandomize=True, max_examples=300)
@given(json_values)
def test_any_json_is_survived(value):
    text = json.dumps(value)
    parse_amd_smi(text, text, text)


@settings(derandomize=True)
@given(st.text(max_size=200))
def test_any_text_is_survived(text):
    parse_amd_smi(text, text, text)
