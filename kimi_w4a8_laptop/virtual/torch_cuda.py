"""torch.cuda, torch.accelerator and torch.distributed's NCCL on the virtual device, as on MI325X with ROCm 7.2."""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from ctypes import c_int64
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from . import kernel_launch, library

DEVICES = 8
DeviceLike = str | int | torch.device | None
_GIB = 1 << 30
_ALL_STREAMS = -1000  # of vg_synchronize
_PROPERTIES = SimpleNamespace(
    name="AMD Instinct MI325X",
    gcnArchName="gfx942:sramecc+:xnack-",
    multi_processor_count=304,
    total_memory=256 * _GIB,
    major=9,
    minor=4,
    warp_size=64,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=65536,
    is_integrated=False,
    L2_cache_size=4 << 20,
    uuid="0",
    pci_bus_id=0,
)


def index_of(device: DeviceLike = None) -> int:
    """Return the number of a device given as torch.cuda takes it."""
    if device is None:
        return library.load().vg_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return library.load().vg_device() if index is None else index


class Stream:
    """A stream of one device; `number` is its vector clock in device.cpp."""

    def __init__(self, device: DeviceLike = None, priority: int = 0, *, number: int | None = None, **_: object) -> None:
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)
        self.priority = priority
        self.number = library.load().vg_new_stream() if number is None else number
        if self.number < 0:
            raise RuntimeError("the virtual device has no stream left")

    @property
    def cuda_stream(self) -> int:
        return 0 if self.number < DEVICES else self.number

    stream_id = cuda_stream

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: DeviceEvent) -> None:
        event.wait(self)

    def record_event(self, event: DeviceEvent | None = None) -> DeviceEvent:
        event = event or DeviceEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _synchronize(-1 - self.number, "stream")

    def query(self) -> bool:
        library.load().vg_query(c_int64(-1 - self.number))
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def __enter__(self) -> Stream:
        self._outer = getattr(self, "_outer", [])
        self._outer.append((library.load().vg_device(), current_stream(self.device_index)))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        device, stream = self._outer.pop()
        set_stream(stream)
        library.load().vg_set_device(device)


class DeviceEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self._number, self._time = 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self._number = library.load().vg_record(stream.number, self._number)
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        if self._number:
            library.load().vg_wait((stream or current_stream()).number, self._number)

    def query(self) -> bool:
        if library.load().vg_capturing():
            raise RuntimeError("operation not permitted when stream is capturing: query of event")
        if self._number:
            library.load().vg_query(c_int64(self._number))
        return True

    def synchronize(self) -> None:
        if self._number:
            _synchronize(self._number, "event")

    def elapsed_time(self, end: DeviceEvent) -> float:
        return (end._time - self._time) * 1e3


def _synchronize(event: int, name: str) -> None:
    if not library.load().vg_synchronize(c_int64(event), name.encode()):
        raise RuntimeError(f"operation not permitted when stream is capturing: synchronize of {name}")


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all streams."""
    _synchronize(_ALL_STREAMS, "device")


@functools.cache
def default_stream(device: DeviceLike = None) -> Stream:
    return Stream(device, number=index_of(device))


@torch.compiler.disable(reason="compiled code")  # compiled frames begin with this call
def current_stream(device: DeviceLike = None) -> Stream:
    index = index_of(device)
    return Stream(index, number=library.load().vg_stream(index))


def set_stream(stream: Stream) -> None:
    library.load().vg_set_device(stream.device_index)
    library.load().vg_set_stream(stream.device_index, stream.number)


_graphs = itertools.count(1)


class DeviceGraph:
    """torch.cuda.CUDAGraph: the launches of a capture, which a replay runs again on the same memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.number, self._begun = next(_graphs), False

    def capture_begin(self, *_: object, **__: object) -> None:
        if current_stream().cuda_stream == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if library.load().vg_capturing():
            raise RuntimeError("operation not permitted when stream is capturing: a capture begins in another")
        self._begun = True
        library.load().vg_capture_begin(c_int64(self.number))

    def capture_end(self) -> None:
        library.load().vg_capture_end()

    def replay(self) -> None:
        if not self._begun:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        try:
            torch.ops.virtual_gpu.replay(self.number)
        except RuntimeError:
            if kernel_launch.failed:
                raise kernel_launch.failed.pop() from None
            raise

    def reset(self) -> None:
        self._begun = False
        library.load().vg_forget(c_int64(self.number))

    def pool(self) -> tuple[int, int]:
        return (0, self.number)

    def __del__(self) -> None:
        self.reset()


def _exchange_device(device: int) -> int:
    """Make a device the current one unless its number is negative; return the one before."""
    before = index_of()
    if device >= 0:
        library.load().vg_set_device(device)
    return before


def _nothing(*_: object, **__: object) -> None:
    pass


def _constant(value: object) -> Callable[..., object]:
    return lambda *_, **__: value


def install() -> None:
    """Load the device and give torch the API of a ROCm build."""
    torch.version.hip, torch.version.cuda = "7.2.26015", None
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    nothing = ("init", "_lazy_init", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
    yes = ("is_available", "is_initialized", "is_bf16_supported", "can_device_access_peer")
    own: dict[str, Any] = {
        **dict.fromkeys(memory, _constant(0)),
        **dict.fromkeys(nothing, _nothing),
        **dict.fromkeys(yes, _constant(True)),
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": functools.partial(_exchange_device),  # Dynamo wants another object
        **dict.fromkeys(
            ("manual_seed", "manual_seed_all"), lambda seed: torch.default_generator.manual_seed(seed) and None
        ),
        "device_count": _constant(DEVICES),
        "current_device": index_of,
        "set_device": lambda device: library.load().vg_set_device(index_of(device)),
        "synchronize": synchronize,
        "get_device_properties": _constant(_PROPERTIES),
        "get_device_capability": _constant((9, 4)),
        "get_device_name": _constant(_PROPERTIES.name),
        "get_arch_list": _constant(["gfx942"]),
        "mem_get_info": _constant((250 * _GIB, 256 * _GIB)),
        "memory_stats": _constant(defaultdict(int)),
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "Stream": Stream,
        "Event": DeviceEvent,
        "CUDAGraph": DeviceGraph,
        "graph_pool_handle": _constant((0, 0)),
        "is_current_stream_capturing": lambda: library.load().vg_capturing(),
    }
    for name, value in own.items():
        setattr(torch.cuda, name, value)
    library.load()
    for name in ("synchronize", "empty_cache", "device_count", "current_stream", *memory):
        setattr(torch.accelerator, name, functools.partial(own[name]))  # Dynamo wants another object than torch.cuda's
    module = torch.get_device_module
    vars(torch)["get_device_module"] = functools.cache(  # Dynamo looks for a cached function
        lambda device=None: torch.cuda if device is None or "cuda" in str(device) else module(device)
    )
    torch._C._host_emptyCache = _nothing  # called before a capture
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]
    _gloo_for_nccl()


def _gloo_for_nccl() -> None:
    def renamed(create: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            named = {name: _gloo(value) for name, value in named.items() if name not in ("device_id", "pg_options")}
            return create(*map(_gloo, given), **named)

        return call

    for name in ("init_process_group", "new_group"):
        function = renamed(getattr(dist, name))
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)


def _gloo(value: object) -> object:
    return value.replace("nccl", "gloo") if isinstance(value, str) else value
