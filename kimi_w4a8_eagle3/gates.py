"""Environment variables that steer a kernel (gates.toml), typed: default, allowed values, reader, effect.

`read_gates` checks an environment against the table. A misspelt name and a value out of range are errors here, because
the programs that read these variables ignore both silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .base.errors import KimiError
from .base.nearest import nearest
from .base.toml import tomllib
from .base.variable import Variable

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
OUR_BACKENDS = ("flydsl", "triton", "reference")  # in order of preference


@dataclass(frozen=True)
class Gate(Variable):
    """A variable that steers a kernel.

    always: our backends' fixed value. backends: the MoE backends of this package that honour it; None when it does not
    concern them.
    """

    reader: str = ""
    effect: str = ""
    default: Any = None
    backends: tuple[str, ...] | None = None
    always: Any = None


# Tiles with a FlyDSL kernel of ours: stage 1 as (m, n, k), stage 2 in every combination that fits the shape.
STAGE1_TILES = (
    *((m, n, k) for m in (16, 32) for n in (32, 64) for k in (128, 256)),
    (64, 64, 128),
    (64, 128, 128),
    (128, 64, 128),
)
PREFILL_ROWS = 64  # blocks with at least so many rows take prefill's kernels
STAGE2_TILES = {"M": (16, 32, 64, 128), "N": (128, 256, 512, 1024), "K": (128, 256, 512)}
_TILE_READER = "the article's AITER, this package"
_TILES = {1: dict(zip("MNK", zip(*STAGE1_TILES, strict=True), strict=True)), 2: STAGE2_TILES}


def tile_gate(stage: int, axis: str) -> str:
    """Return the variable that fixes an axis, M, N or K, of a stage's tiles."""
    return f"AITER_FLYDSL_STAGE{stage}_TILE_{axis}"


def _tile(stage: int, axis: str, effect: str, aiter: tuple[int, ...] = ()) -> Gate:
    """Return the gate of a tile axis. aiter: tiles that only AITER has kernels for; our backend refuses them."""
    allowed = tuple(sorted({*_TILES[stage][axis], *aiter}))
    return Gate(tile_gate(stage, axis), "int", allowed, reader=_TILE_READER, effect=effect, backends=("flydsl",))


def _from_file() -> Iterator[Gate]:
    """Yield the gates of gates.toml."""
    for reader, gates in _FILE["readers"].items():
        for name, given in gates.items():
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
            yield Gate(name, reader=reader, **{"kind": "bool", **values})


TABLE: tuple[Gate, ...] = (
    *_from_file(),
    _tile(1, "M", "rows of a stage-1 tile (default: the sorting block)", aiter=(48,)),
    _tile(1, "N", "output channels of a stage-1 tile", aiter=(256,)),
    _tile(1, "K", "reduction step of stage 1 (default: 256 for decode, 128 for prefill)"),
    _tile(2, "M", "rows of a stage-2 tile (default: the sorting block)", aiter=(48,)),
    _tile(2, "N", "output channels of a stage-2 tile", aiter=(64,)),
    _tile(2, "K", "reduction step of stage 2; 256 suits EAGLE3's four tokens a request", aiter=(64,)),
)
BY_NAME: dict[str, Gate] = {gate.name: gate for gate in TABLE}


@dataclass(frozen=True)
class Gates:
    """The gates of one environment, checked and typed: `get` for a backend's, fields for this package's own."""

    moe_backend: str
    check_model_name: bool
    load_check: bool
    page_guard: str
    page_guard_int_max: int
    given: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, /) -> Any:
        """Return the typed value of the gate `name`, or None when the environment does not set it."""
        return self.given.get(name)


def read_gates(environ: Mapping[str, str]) -> Gates:
    """Check `environ` (usually os.environ) and type its gates.

    Raises KimiError for a misspelt gate, with the nearest name, or for a value that is not allowed.
    """
    given = {name: BY_NAME[name].parse(value) for name, value in environ.items() if _is_gate(name)}

    def value(name: str) -> Any:
        return given.get(name, BY_NAME[name].default)

    return Gates(
        moe_backend=value("KIMI_MOE_BACKEND"),
        check_model_name=value("KIMI_CHECK_MODEL_NAME"),
        load_check=value("KIMI_LOAD_CHECK"),
        page_guard=value("KIMI_PAGE_GUARD"),
        page_guard_int_max=value("KIMI_PAGE_GUARD_INT_MAX"),
        given=given,
    )


def ignored_gates(gates: Gates, backend: str) -> list[str]:
    """Return one sentence for each gate whose value has no effect on the MoE backend `backend` of this package."""
    sentences = []
    for name, value in gates.given.items():
        gate = BY_NAME[name]
        usual = gate.default if gate.always is None else gate.always
        if gate.backends is None or backend in gate.backends or value == usual:
            continue
        readers = f"read by {gate.reader}"
        sentences.append(f"{name}={value} has no effect on the MoE backend {backend!r} of this package ({readers})")
    return sentences


def _is_gate(name: str) -> bool:
    """Return True for a name in the table; raise KimiError for one that only looks like a gate."""
    if name in BY_NAME:
        return True
    foreign = name.startswith(tuple(_FILE["foreign_prefixes"])) or name in _FILE["foreign_names"]
    if foreign or not name.startswith(tuple(_FILE["prefixes"])):
        return False
    hint = nearest(name, BY_NAME)
    ours = [known for known in BY_NAME if known.startswith("KIMI_")]
    if name.startswith("KIMI_") and not difflib.get_close_matches(name, ours, cutoff=0.8):
        return False  # other programs use this prefix too, for example KIMI_API_KEY
    raise KimiError(
        f"unknown kernel gate {name}{hint}",
        where="environment",
        expected="a name that `kimi-w4a8 gates` lists",
        remedy=f"unset {name}, or correct it",
    )
