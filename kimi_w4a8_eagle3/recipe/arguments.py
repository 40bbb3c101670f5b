"""Conversion of engine arguments between a recipe's table and command-line words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def number(args: Mapping[str, ArgValue], name: str, default: float, most: float | None = None) -> float:
    """Return the engine argument `name` as a positive number; raise KimiError for anything else."""
    value = args.get(name, default)
    try:
        found = float(str(value))
    except ValueError:
        found = 0.0
    if found <= 0 or (most is not None and found > most):
        expected = "a positive number" + ("" if most is None else f" up to {most:g}")
        raise UsageError(f"--{name} {value} is not a valid value", where="engine arguments", expected=expected)
    return found


def attention_tp(args: Mapping[str, ArgValue]) -> int:
    """Return the ranks over which attention is split: `tp-size`, divided by `dp-size` with DP attention."""
    tp, dp = int(number(args, "tp-size", 1)), int(number(args, "dp-size", 1))
    if args.get("enable-dp-attention") is not True:
        return tp
    if tp % dp:
        raise KimiError(
            f"TP {tp} cannot be divided into {dp} groups", where="--dp-size", expected="a divisor of --tp-size"
        )
    return tp // dp


def allows_code(name: str) -> bool:
    """Return True if an engine's parser takes `name` for the option: argparse accepts unique beginnings of it."""
    return len(name) > 1 and TRUST.startswith(name)
