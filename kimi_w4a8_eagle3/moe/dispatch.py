"""Choose the W4A8 MoE backend: flydsl on gfx942 with its code objects, else triton on a GPU, else reference.

`requested` (`--moe-backend` of `tune-moe`) overrides the gate KIMI_MOE_BACKEND, which overrides the automatic choice. A
backend that was requested and cannot run raises an error with the reason; there is no silent fallback.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..base.errors import KimiError
from ..gates import OUR_BACKENDS as BACKENDS
from .contract import GateReader, MoeBackend, MoeShape, gpu_arch
from .flydsl.objects import ARCH as FLYDSL_ARCH

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

AUTO = "auto"
GATE = "KIMI_MOE_BACKEND"

_logged: set[str] = set()
_selected: set[str] = set()


def select_backend(
    shape: MoeShape, device: torch.device, gates: GateReader, requested: str = AUTO, in_parts: bool = False
) -> MoeBackend:
    """Return the backend that runs `shape` on `device`, and log the choice once with the reasons.

    in_parts: the weights have several parts, which flydsl does not compute.
    requested: `auto` or a name from BACKENDS. Raises KimiError when the name is unknown, or when the backend that
        `requested` or the gate names cannot run here.
    """
    asked, asked_by = _override(gates, requested)
    rejected: list[str] = []
    for name in [asked] if asked else BACKENDS:
        backend, reason = None, "rows span more octaves than its sums hold"
        if name != "flydsl" or not in_parts:
            backend, reason = _try_backend(name, shape, device, gates)
        if backend is not None:
            why = f"requested by {asked_by}" if asked else "; ".join(rejected) or "preferred"
            # FlyDSL supports this GPU, but something is missing.
            slower = bool(rejected) and gpu_arch(device) == FLYDSL_ARCH
            _record(backend, shape, device, why, slower)
            return backend
        rejected.append(f"not {name}: {reason}")
    raise KimiError(  # only for a requested backend: the reference always runs
        f"the MoE backend {asked!r} cannot run: {reason}",
        where=asked_by,
        expected=f"a backend that runs {shape} on {device}",
        remedy=f"install what is missing, or set {AUTO!r}",
    )


def selected_backends() -> frozenset[str]:
    """Return the names of the backends that this process has selected so far."""
    return frozenset(_selected)


def load_backend(name: str, gates: GateReader) -> MoeBackend:
    """Import and construct one backend; raise ImportError when its package is absent."""
    # Imported here because Triton is optional, and a process loads only the backend that it runs.
    if name == "flydsl":
        from .flydsl.backend import FlydslBackend  # start-up: torch

        return FlydslBackend(gates)
    if name == "triton":
        from .triton.backend import TritonBackend  # optional: triton

        return TritonBackend()
    from .reference import ReferenceBackend  # start-up: torch

    return ReferenceBackend()


def _override(gates: GateReader, requested: str) -> tuple[str | None, str]:
    """Return (requested backend or None, the option or gate that requested it)."""
    gate = str(gates.get(GATE) or AUTO)
    for value, asked_by in ((requested, "--moe-backend"), (gate, GATE)):
        if value not in (AUTO, *BACKENDS):
            raise KimiError(
                f"there is no MoE backend {value!r}", where=asked_by, expected=" | ".join((AUTO, *BACKENDS))
            )
    if requested != AUTO:
        return requested, "--moe-backend"
    return (gate, GATE) if gate != AUTO else (None, "")


def _try_backend(name: str, shape: MoeShape, device: torch.device, gates: GateReader) -> tuple[MoeBackend | None, str]:
    """Return (backend, "") when it can run, else (None, reason)."""
    if name == "triton" and not find_spec("triton"):
        return None, "the package triton is not installed"
    try:
        backend = load_backend(name, gates)
    except ImportError as error:
        return None, f"it does not import ({error})"
    reason = backend.unsupported(shape, device)
    return (backend, "") if reason is None else (None, reason)


def _record(backend: MoeBackend, shape: MoeShape, device: torch.device, why: str, slower: bool) -> None:
    """Remember the choice and log it once a shape, as a warning when a faster backend exists for this machine."""
    _selected.add(backend.name)
    describe = getattr(backend, "describe", None)
    tiles = f" | {describe(shape, device)}" if describe else ""
    message = (
        f"MoE backend {backend.name} on {device} for E={shape.num_experts} H={shape.hidden} I={shape.inter} "
        f"top-{shape.top_k} ({why}){tiles}"
    )
    if message not in _logged:
        _logged.add(message)
        logger.log(logging.WARNING if slower else logging.INFO, message)
