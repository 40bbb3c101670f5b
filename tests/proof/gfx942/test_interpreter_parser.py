"""Reading compiler output: descriptors, metadata, labels, operands, kernel arguments, initial registers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from proof.gfx942 import Gfx942Device, MachineError, Memory, parse_kernel, parse_kernels

# The shape of LLVM's output: comments, debug directives, preload prologue, a second kernel.
TEXT = Path(__file__).with_name("parsed.s").read_text()


def test_descriptor_and_metadata():
    first, second = parse_kernels(TEXT)
    assert (first.vgprs, first.agprs, first.lds_bytes, first.workgroup) == (8, 4, 1024, (32, 2, 1))
    assert [a.name for a in first.args][:3] == ["out", "scale", "half"] and first.kernarg_bytes == 64
    assert first.metadata["vgpr_spill_count"] == 3
    assert first.instructions[first.labels[".LBB0_0"]].opcode == "s_load_dwordx4"
    assert first.instructions[-1].opcode == "s_endpgm" and len(first.instructions) == 16
    assert second.vgprs == 8 and second.args == []


def test_launch_with_preloaded_and_value_arguments():
    """Thread and workgroup numbers and values arrive where the descriptor and the metadata say."""
    memory = Memory()
    out = memory.empty((6, 64), np.float32, "out")
    Gfx942Device(memory).launch(parse_kernel(TEXT, "first"), (3, 2, 1), (32, 2, 1), [out, 1.5, 0.25, 3])
    assert (memory.read(out) == 1.75).all()


def test_launch_checks_the_workgroup_size():
    with pytest.raises(MachineError, match="workgroups of"):
        Gfx942Device(Memory()).launch(parse_kernel(TEXT, "first"), (1, 1, 1), (64, 1, 1), [0, 0, 0, 0])
