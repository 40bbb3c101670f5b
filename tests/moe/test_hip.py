"""HIP's module API: a small kernel launched on tensors, what HIP refuses, devices, threads, a process without HIP."""

from __future__ import annotations

import ctypes
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.hip import Function, Hip, loaded_library
from proof.gfx942 import OutOfBounds, parse_kernel

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels
from support.hip_standin import InterpretedGpu, code_object, load_library  # noqa: E402

ADD = Path(__file__).with_name("add.s").read_text()
BLOCK = (64, 1, 1)
STREAM = 0x7F00_1234_5678


@pytest.fixture
def gpu() -> InterpretedGpu:
    gpu = InterpretedGpu()
    gpu.knows(ADD, parse_kernel(ADD))
    load_library()
    return gpu


def add(device: int = 0) -> Function:
    return Hip.of_process().load(code_object(ADD), "add", device)


def test_a_launch_reaches_the_kernel_as_it_was_made(gpu: InterpretedGpu) -> None:
    assert Hip.of_process().library == loaded_library() is not None
    with gpu:
        words = torch.arange(130, dtype=torch.int32)
        arguments = struct.pack("<Qi", words.data_ptr(), -5)
        add().launch((2, 1, 1), BLOCK, 96, STREAM, arguments)
    assert words.tolist() == [*range(-5, 123), 128, 129]
    (launch,) = gpu.launches
    assert (launch.grid, launch.block, launch.lds_bytes, launch.stream) == ((2, 1, 1), BLOCK, 96, STREAM)
    assert launch.arguments == arguments


def test_a_fault_of_a_kernel_is_named(gpu: InterpretedGpu) -> None:
    with gpu:
        words = torch.zeros(64, dtype=torch.int32)
        with pytest.raises(KimiError, match=r"hipErrorLaunchFailure \(719\)\n.*launching add, grid \(2, 1, 1\)"):
            add().launch((2, 1, 1), BLOCK, 0, STREAM, struct.pack("<Qi", words.data_ptr(), 1))
    assert isinstance(gpu.error, OutOfBounds) and "int32 [64] + 256 (of 256 bytes)" in str(gpu.error)


def test_errors_of_hip(gpu: InterpretedGpu) -> None:
    hip, image = Hip.of_process(), code_object(ADD)
    older = bytearray(image)
    older[48] = 0x3F  # e_flags: gfx90a
    with gpu:
        for broken, error in ((b"\x7fELP" + image[4:], "hipErrorInvalidImage"), (older, "hipErrorNoBinaryForGpu")):
            with pytest.raises(KimiError, match=rf"HIP error {error} \(\d+\)\n.*loading a code object on GPU 0"):
                hip.load(bytes(broken), "add", 0)
        with pytest.raises(KimiError, match=r"hipErrorNotFound.*\n.*finding the kernel ad in"):
            hip.load(image, "ad", 0)
        with pytest.raises(KimiError, match=r"hipErrorInvalidDevice.*\n.*switching to GPU 7"):
            hip.load(image, "add", 7)
        with pytest.raises(KimiError, match=r"hipErrorInvalidValue.*\n.*launching add, grid \(0, 1, 1\)"):
            add().launch((0, 1, 1), BLOCK, 0, STREAM, bytes(12))
    assert not gpu.launches and gpu.error is None


def test_an_image_lives_as_long_as_its_kernel(gpu: InterpretedGpu) -> None:
    """HIP reads it again later."""
    image = bytes(bytearray(code_object(ADD)))
    holders = sys.getrefcount(image)
    kernel = Hip.of_process().load(image, "add", 0)
    assert sys.getrefcount(image) > holders and kernel.name == "add"


def test_the_thread_keeps_its_device(gpu: InterpretedGpu) -> None:
    """The stand-in refuses `function`, and the default stream, while another device than the module's is current."""
    hip, current = Hip.of_process(), ctypes.c_int()
    with gpu:
        words = torch.arange(64, dtype=torch.int32)
        add(device=1).launch((1, 1, 1), BLOCK, 0, 0, struct.pack("<Qi", words.data_ptr(), 1))
    assert words[0] == 1
    assert hip.calls.hipGetDevice(current) == current.value == 0


def test_threads_launch_one_kernel_with_their_own_arguments(gpu: InterpretedGpu) -> None:
    kernel = add()
    with gpu:
        words = torch.zeros(1, 64, dtype=torch.int32)
        arguments = [struct.pack("<Qi", words.data_ptr(), n) for n in range(60)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda given: kernel.launch((1, 1, 1), BLOCK, 0, STREAM, given), arguments))
    assert sorted(launch.arguments for launch in gpu.launches) == sorted(arguments)


@pytest.mark.parametrize("library", ["/nowhere/libamdhip64.so.7", "libc.so.6"])
def test_a_process_without_hip_gets_an_error(library: str) -> None:
    with pytest.raises(KimiError, match=r"no HIP runtime.*\n.*\n.*a ROCm build of torch"):
        Hip(library)
