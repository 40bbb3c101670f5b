"""Launches of kernels that are Python here: one launch on the device, computed on the same memory as CPU tensors."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from cProfile import Profile
from ctypes import CFUNCTYPE, c_bool, c_int64
from typing import Any

import torch

from . import library

_calls: dict[int, Callable[[], object]] = {}
_numbers = itertools.count(1)
failed: list[Exception] = []  # of a kernel in a replay, until the replay raises it
not_counting: list[Profile] = []  # profiles of the engine, which the kernels are no part of


def host(value: object) -> object:
    """Return a CPU tensor over the memory of a CUDA tensor; tuples and lists are walked."""
    if isinstance(value, torch.Tensor):
        return torch.ops.virtual_gpu.host(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
        return type(value)(map(host, value))
    return value


def launch(
    name: str, kernel: Callable[..., object], *given: object, touched: Touched | None = None, **named: object
) -> Any:
    """Run `kernel` on the memory of its CUDA tensors, now and at each replay of the graph that is being captured.

    touched: what it reads and writes; by default it reads its tensors, and writes its result.
    """
    device = library.load()
    tensors = [value for value in (*given, *named.values()) if isinstance(value, torch.Tensor)]
    number = next((tensor.get_device() for tensor in tensors if tensor.is_cuda), device.vg_device())
    touched = touched or Touched(tensors)
    on_host, named_on_host = [host(value) for value in given], {key: host(value) for key, value in named.items()}

    def run() -> object:
        torch.ops.virtual_gpu.begin(name, number)
        touched.note(name, number)
        for profile in not_counting:
            profile.disable()
        result = kernel(*on_host, **named_on_host)
        for profile in not_counting:
            profile.enable()
        touched.note_found(name, number)
        return result

    result = run()
    given_as = {
        id(on): value for on, value in zip((*on_host, *named_on_host.values()), (*given, *named.values()), strict=True)
    }
    adopted = _adopted(result, number, given_as)
    parts = adopted if isinstance(adopted, tuple) else (adopted,)
    new = Touched((), [part for part in parts if isinstance(part, torch.Tensor)])
    new.note(name, number)

    def again() -> None:  # holds no tensor of the device: a graph has addresses alone
        _write(result, run())
        new.note(name, number)

    if device.vg_capturing():
        identity = next(_numbers)
        _calls[identity] = again
        device.vg_record_call(c_int64(identity))
    return adopted


def require_device(name: str, given: Iterable[object]) -> None:
    """Raise RuntimeError unless all tensors of a kernel are on one GPU."""
    devices = {str(tensor.device) for tensor in given if isinstance(tensor, torch.Tensor)}
    if len(devices) > 1 or any(not device.startswith("cuda") for device in devices):
        raise RuntimeError(f"{name}: its tensors are on {', '.join(sorted(devices))}, expected one GPU")


class Touched:
    """Memory that a launch reads and writes: that of tensors, and what it finds while it runs."""

    def __init__(
        self,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor] = (),
        scattered: bool = False,
        found: Callable[[], tuple[list[int], list[int]]] = lambda: ([], []),
    ) -> None:
        self.reads, self.writes, self._scattered, self._found = _ranges(reads), _ranges(writes), scattered, found

    def note(self, name: str, device: int) -> None:
        self._note(self.reads, self.writes, name, device)

    def note_found(self, name: str, device: int) -> None:
        self._note(*self._found(), name, device)

    def _note(self, reads: list[int], writes: list[int], name: str, device: int) -> None:
        for ranges, write in ((reads, False), (writes, True)):
            if ranges:
                torch.ops.virtual_gpu.touch(ranges, write, self._scattered, name, device)


def _ranges(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the first address of each device tensor and the one after its last, in turn."""
    out = []
    for tensor in tensors:
        if tensor.is_cuda and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            out += [tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()]
    return out


def _adopted(value: object, device: int, given_as: dict[int, object]) -> object:
    """Return the CPU tensors of a result as tensors of the device: an argument as it was given, or a new one."""
    if isinstance(value, torch.Tensor):
        return given_as[id(value)] if id(value) in given_as else torch.ops.virtual_gpu.adopt(value, device)
    return tuple(_adopted(part, device, given_as) for part in value) if isinstance(value, tuple) else value


def _write(first: object, again: object) -> None:
    """Write the result of a replay to the memory of the captured one."""
    if isinstance(first, torch.Tensor) and isinstance(again, torch.Tensor):
        first.copy_(again)
    elif isinstance(first, tuple) and isinstance(again, tuple):
        for old, new in zip(first, again, strict=True):
            _write(old, new)


@CFUNCTYPE(c_bool, c_int64)
def _replayed(identity: int) -> bool:
    try:
        _calls[identity]()
    except Exception as error:
        traceback.print_exc()
        failed.append(error)
        return False
    return True


def install() -> None:
    """Let the device call kernels that are Python here when it replays a graph."""
    library.load().vg_callback(_replayed)
