"""Engine arguments: their words on a command line, and the values that those of the packaged recipes can have.

SGLang's parser has no ranges, its import takes seconds, and its choices include backends that this package cannot serve
with. A test compares the values with the parsers of both releases. Other arguments are checked by the installed
SGLang's parser (`sglang_plugin/check_arguments.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import KimiError, UsageError
from ..base.toml import tomllib
from .schema import ArgValue

Args = dict[str, ArgValue]
TRUST = "trust-remote-code"

# Other spellings that SGLang accepts for arguments that this package reads or replaces.
ALIASES = {
    "model": "model-path",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "speculative-draft-model": "speculative-draft-model-path",
}


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `port=8000` to ("args.port", 8000) and `options.speculation=off` to ("options.speculation", "off")."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"cannot read the setting {text!r}", where="--set", expected="KEY=VALUE")
    key = key.strip() if "." in key else f"args.{canonical(key.strip())}"
    return key, _parse_value(value.strip())


def parse_arguments(words: Sequence[str]) -> Args:
    """Parse engine arguments: `--port 8000 --flag --list 1 2 --x=3` becomes {"port": "8000", "flag": True, ...}."""
    args: Args = {}
    name: str | None = None
    values: list[str] = []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            if name is None:
                raise UsageError(f"unexpected {word!r}", where="after --", expected="engine arguments: --name value")
            values.append(word)
            continue
        if name is not None:
            args[canonical(name)] = values if len(values) > 1 else values[0] if values else True
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
    return args


def command_words(args: Mapping[str, ArgValue]) -> list[str]:
    """{"port": 8000, "flag": True, "off": False, "list": [1, 2]} becomes --port 8000 --flag --list 1 2."""
    words: list[str] = []
    for name, value in args.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def canonical(name: str) -> str:
    """Return the spelling that recipes use: with dashes, and one name where SGLang accepts several."""
    name = name.replace("_", "-")
    return ALIASES.get(name, name)


def show(name: str, value: Any) -> str:
    """Format an argument for a note: `--port 8000`, `no --flag`, or a dotted recipe key."""
    if "." in name:
        return f"{name}={value}"
    return " ".join(command_words({name: value})) or f"no --{name}"


def argument_groups(words: Sequence[str]) -> list[str]:
    """Group the words so that each argument and its values take one line."""
    groups: list[str] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append(word)
        else:
            groups[-1] += f" {word}"
    return groups


def _parse_value(text: str) -> Any:
    """Parse true, false and [lists]; other text stays text, such as a revision made of digits."""
    if text in ("true", "false"):
        return text == "true"
    if not text.startswith("["):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def number(args: Mapping[str, ArgValue], name: str, default: float) -> float:
    """Return the engine argument `name` as a positive number; raise KimiError for anything else."""
    value = args.get(name, default)
    try:
        found = float(str(value))
    except ValueError:
        found = 0.0
    if found <= 0:
        raise UsageError(f"--{name} {value} is not a valid value", "engine arguments", "a positive number")
    return found


def attention_tp(args: Mapping[str, ArgValue]) -> int:
    """Return the ranks over which attention is split: `tp-size`, divided by `dp-size` with DP attention."""
    tp, dp = int(number(args, "tp-size", 1)), int(number(args, "dp-size", 1))
    if args.get("enable-dp-attention") is not True:
        return tp
    if tp % dp:
        raise KimiError(f"TP {tp} cannot be divided into {dp} groups", "--dp-size", "a divisor of --tp-size")
    return tp // dp


def allows_code(name: str) -> bool:
    """Return True if an engine's parser takes `name` for the option: argparse accepts unique beginnings of it."""
    return len(name) > 1 and TRUST.startswith(name)


@dataclass(frozen=True)
class Values:
    """The values that an argument can have, and these in words. choices: all of them, where they are names."""

    expected: str
    accepts: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def _number(kind: Callable[[str], float] = int, least: float = 1, most: float = math.inf, auto: bool = False) -> Values:
    """Return the numbers from `least` to `most`. auto: "auto" is valid, too: this package computes the value."""

    def accepts(value: Any) -> bool:
        if value == "auto" or isinstance(value, bool | list):
            return auto and value == "auto"
        try:
            return least <= kind(str(value)) <= most and math.isfinite(float(str(value)))
        except ValueError:
            return False

    bounds = f">= {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    return Values(f"{'a whole number' if kind is int else 'a number'} {bounds}", accepts)


def _choice(*names: str) -> Values:
    return Values(", ".join(names), lambda value: value in names, names)


def _text(pattern: str = r".*\S.*", expected: str = "a text") -> Values:
    return Values(expected, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def _is_numa(value: Any) -> bool:
    """True for one node for each GPU of the machine; `check_numa_nodes` compares their number."""
    nodes = value if isinstance(value, list) else [value]
    return value == "auto" or (nodes != [] and all(map(_number(least=0).accepts, nodes)))


_NUMA = Values("auto, or the NUMA node of each GPU, such as [0, 0, 0, 0, 1, 1, 1, 1]", _is_numa)
FLAG = Values("true or false", lambda value: isinstance(value, bool))
TEXT, COUNT = _text(), _number()
VALUES: dict[str, Values] = {
    "attention-backend": _choice("aiter", "triton", "wave", "torch_native", "flex_attention", "intel_amx"),
    "base-gpu-id": _number(least=0),
    "chunked-prefill-size": _number(least=-1),  # -1: whole prompts
    "context-length": COUNT,
    "cuda-graph-max-bs-decode": COUNT,
    "device": _choice("cuda", "cpu"),
    "disable-custom-all-reduce": FLAG,
    "disable-radix-cache": FLAG,
    "disable-shared-experts-fusion": FLAG,
    "dp-size": COUNT,
    "enable-cache-report": FLAG,
    "enable-dp-attention": FLAG,
    "enable-metrics": FLAG,
    "enable-torch-compile": FLAG,
    "host": _text(r"[^\s/]+", "an address, such as 127.0.0.1 or 0.0.0.0"),
    "load-balance-method": _choice("auto", "round_robin", "total_requests", "total_tokens"),
    "max-queued-requests": COUNT,
    "max-running-requests": COUNT,
    "max-total-tokens": COUNT,
    "mem-fraction-static": _number(float, least=0.01, most=0.99, auto=True),
    "model-path": TEXT,
    "nnodes": COUNT,
    "numa-node": _NUMA,
    "port": _number(most=65535),
    "reasoning-parser": _choice("kimi_k2"),
    "revision": TEXT,
    "served-model-name": TEXT,
    "sleep-on-idle": FLAG,
    "speculative-algorithm": _choice("EAGLE3", "EAGLE"),
    "speculative-draft-model-path": TEXT,
    "speculative-eagle-topk": COUNT,
    "speculative-num-draft-tokens": COUNT,
    "speculative-num-steps": _number(least=0),
    "tool-call-parser": _choice("kimi_k2"),
    "tp-size": _number(most=64),  # attention heads
    "trust-remote-code": FLAG,
    "watchdog-timeout": _number(float),
}


def check_values(args: Mapping[str, ArgValue]) -> None:
    """Raise UsageError for the first value that its argument cannot have; `false` leaves an argument out."""
    for name, value in args.items():
        if value is False:
            continue
        accepted = name not in VALUES or VALUES[name].accepts(value)
        if value == "" or (value is True and not accepted):
            raise UsageError(f"--{name} has no value", where="engine arguments", expected=_expected(name))
        if not accepted:
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
