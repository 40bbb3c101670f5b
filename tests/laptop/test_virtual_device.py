"""The virtual gfx942 device: 25 planted faults, each noticed by name, and what must work beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_w4a8_laptop import virtual
from kimi_w4a8_laptop.virtual import library

pytestmark = pytest.mark.slow  # `make virtual-mi325x` runs them, too

PROGRAM = Path(__file__).parents[1] / "support" / "virtual_device_program.py"
CAPTURE = "operation not permitted when stream is capturing: "
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
# The message that names each fault of the program.
NOTICED = {
    "a draw in int32": "sgl_kernel.verify_tree_greedy: target_predict is torch.int32, expected torch.int64",
    "a transposed tensor": "candidates is strides (1, 2)",
    "strides of a wider tensor": "candidates is strides (8, 2)",
    "a missing argument": "retrive_index is missing",
    "a batch of another size": "target_predict is shape [2, 4]",
    "a host tensor in an operator": "target_predict is cpu, expected cuda",
    "another GPU in an operator": "target_predict is cuda:1",
    "host and device in one sum": f"{TWO_DEVICES}cpu",
    "two GPUs in one sum": f"{TWO_DEVICES}cuda:1",
    "numpy of a device tensor": "can't convert cuda:0 device type tensor to numpy",
    "item in a capture": f"{CAPTURE}synchronization in aten::_local_scalar_dense",
    "tolist in a capture": f"{CAPTURE}synchronization in to host",
    "cpu in a capture": f"{CAPTURE}synchronization in to host",
    "a boolean mask in a capture": f"{CAPTURE}synchronization in aten::nonzero",
    "nonzero in a capture": f"{CAPTURE}synchronization in aten::nonzero",
    "a pageable copy in a capture": f"{CAPTURE}pageable copy in to device",
    "indices of the host in a capture": f"{CAPTURE}pageable copy in to device",
    "synchronize in a capture": f"{CAPTURE}synchronize of device",
    "a forgotten wait": "race: aten::sum reads aten::add",
    "an event recorded too early": "race: aten::sum reads aten::mul",
    "a buffer overwritten while it is read": "race: aten::fill_ overwrites what is read by aten::sum",
    "a name that AITER lacks": "aiter.fused_moe_of_another_release has no stand-in",
    "greedy_sample into int64": "aiter.ops.sample.greedy_sample: out is torch.int64",
    "page indices in int64": "aiter.paged_attention_ragged: kv_page_indices is torch.int64",
    "a window that no stand-in computes": "aiter.flash_attn_varlen_func: the stand-in does not compute with window",
}


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    if library.compiler() is None:
        pytest.skip("the virtual device is compiled with g++, which is not installed")
    environment = {**os.environ, **virtual.ENVIRONMENT}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("fault", NOTICED)
def test_the_fault_is_noticed_by_name(fault: str, said: dict[str, Any]) -> None:
    assert NOTICED[fault] in said["faults"].pop(fault)


def test_tensors_say_cuda_and_the_draw_takes_its_triton_kernel(said: dict[str, Any]) -> None:
    healthy = said["healthy"]
    assert healthy["devices"] == ["cuda:0", "True", "cuda:3"]
    assert healthy["attended into out"] and healthy["summed over ranks"] == [[1.0, 1.0, 1.0], [0.0, 3.0], [6.0, 9.0]]
    assert healthy["draw"] == [True, "torch.int64", ["triton draw_kernel"]]


def test_a_wait_orders_streams_and_a_graph_replays_on_new_input(said: dict[str, Any]) -> None:
    assert said["healthy"]["after a wait"] == "not noticed"
    assert said["healthy"]["replayed"] == 5.0 * 3 * 3


def test_a_number_divides_as_on_a_gpu_and_rows_are_quantized_as_on_a_cpu(said: dict[str, Any]) -> None:
    """A GPU multiplies by the number's reciprocal. That changed elements of a8, and no layer passed its check."""
    assert said["healthy"]["divided"] == [True, False, True]  # as a product, as a quotient, by a tensor as a quotient
    assert said["healthy"]["quantized"]


def test_launches_allocations_and_copies_are_counted(said: dict[str, Any]) -> None:
    assert said["healthy"]["counted"] == {
        "launch": {"aten::add": 1, "aten::copy_": 3},
        "allocation": {"aten::copy_": 1},
        "synchronization": {"to host": 1},
        "pageable copy": {"to device": 1},
        "host copy": {"to device": 1},
    }
