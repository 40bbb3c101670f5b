"""Values that the engine arguments of the packaged recipes can have: type, range and choices.

SGLang's parser has no ranges, its import takes seconds, and its choices include backends that this package cannot serve
with. A test compares the table with the parsers of both releases. Arguments that are not in it are checked by the
installed SGLang's parser (`sglang_plugin/check_arguments.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..base.errors import UsageError
from .arguments import Args, show
from .schema import ArgValue


class ValidValues(Protocol):
    """A set of valid values."""

    @property
    def expected(self) -> str: ...
    def __contains__(self, value: Any) -> bool: ...


@dataclass(frozen=True)
class NumberValue:
    """A number from `least` to `most`. auto: "auto" is valid, too, because this package computes the value."""

    kind: Callable[[str], float] = int
    least: float = 1
    most: float = math.inf
    auto: bool = False

    def __contains__(self, value: Any) -> bool:
        if value == "auto":
            return self.auto
        if isinstance(value, bool | list):
            return False
        try:
            return self.least <= self.kind(str(value)) <= self.most and math.isfinite(float(value))
        except ValueError:
            return False

    @property
    def expected(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} " + (f">= {self.least:g}" if self.most == math.inf else f"from {self.least:g} to {self.most:g}")


@dataclass(frozen=True)
class FlagValue:
    expected: str = "true or false"

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class ChoiceValue:
    names: tuple[str, ...]

    def __contains__(self, value: Any) -> bool:
        return value in self.names

    @property
    def expected(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True)
class TextValue:
    pattern: str = r".*\S.*"
    expected: str = "a text"

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class NumaValue:
    """One node for each GPU of the machine; `check_values` compares their number."""

    expected: str = "auto, or the NUMA node of each GPU, such as [0, 0, 0, 0, 1, 1, 1, 1]"

    def __contains__(self, value: Any) -> bool:
        nodes = value if isinstance(value, list) else [value]
        return value == "auto" or (nodes != [] and all(node in NumberValue(least=0) for node in nodes))


FLAG, TEXT, COUNT = FlagValue(), TextValue(), NumberValue()
VALUES: dict[str, ValidValues] = {
    "attention-backend": ChoiceValue(("aiter", "triton", "wave", "torch_native", "flex_attention", "intel_amx")),
    "base-gpu-id": NumberValue(least=0),
    "chunked-prefill-size": NumberValue(least=-1),  # -1: whole prompts
    "context-length": COUNT,
    "cuda-graph-max-bs-decode": COUNT,
    "device": ChoiceValue(("cuda", "cpu")),
    "disable-custom-all-reduce": FLAG,
    "disable-radix-cache": FLAG,
    "disable-shared-experts-fusion": FLAG,
    "dp-size": COUNT,
    "enable-cache-report": FLAG,
    "enable-dp-attention": FLAG,
    "enable-metrics": FLAG,
    "enable-torch-compile": FLAG,
    "host": TextValue(r"[^\s/]+", "an address, such as 127.0.0.1 or 0.0.0.0"),
    "load-balance-method": ChoiceValue(("auto", "round_robin", "total_requests", "total_tokens")),
    "max-queued-requests": COUNT,
    "max-running-requests": COUNT,
    "max-total-tokens": COUNT,
    "mem-fraction-static": NumberValue(float, least=0.01, most=0.99, auto=True),
    "model-path": TEXT,
    "numa-node": NumaValue(),
    "port": NumberValue(most=65535),
    "reasoning-parser": ChoiceValue(("kimi_k2",)),
    "revision": TEXT,
    "served-model-name": TEXT,
    "sleep-on-idle": FLAG,
    "speculative-algorithm": ChoiceValue(("EAGLE3", "EAGLE")),
    "speculative-draft-model-path": TEXT,
    "speculative-eagle-topk": COUNT,
    "speculative-num-draft-tokens": COUNT,
    "speculative-num-steps": NumberValue(least=0),
    "tool-call-parser": ChoiceValue(("kimi_k2",)),
    "tp-size": COUNT,
    "trust-remote-code": FLAG,
    "watchdog-timeout": NumberValue(float),
}


def check_values(args: Mapping[str, ArgValue]) -> None:
    """Raise UsageError for the first value that its argument cannot have; `false` leaves an argument out."""
    for name, value in args.items():
        if value is False:
            continue
        if value == "":
            raise UsageError(f"--{name} has no value", where="engine arguments", expected=_expected(name))
        if name in VALUES and value not in VALUES[name]:
            found = " ".join(map(str, value)) if isinstance(value, list) else value
            raise UsageError(
                f"--{name} {found} is not a valid value", where="engine arguments", expected=_expected(name)
            )


def check_numa_nodes(args: Args, gpus: int) -> None:
    """Raise UsageError for a NUMA list that is too short: SGLang looks each GPU up in it by the GPU's number."""
    nodes = args.get("numa-node")
    count = len(nodes) if isinstance(nodes, list) else 1
    if nodes is None or nodes == "auto" or nodes is False or count >= gpus:
        return
    raise UsageError(
        f"{show('numa-node', nodes)} has {count} of {gpus} GPUs",
        where="engine arguments",
        expected="one NUMA node for each GPU of the machine that an engine uses, or auto",
    )


def _expected(name: str) -> str:
    return VALUES[name].expected if name in VALUES else "a value"
