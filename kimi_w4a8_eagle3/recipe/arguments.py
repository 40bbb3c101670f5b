"""Engine arguments between a recipe's table and a command line: typed words in, words out, one place for spellings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import UsageError
from ..base.toml import tomllib
from .schema import ArgValue

Args = dict[str, ArgValue]

# Other spellings that an engine's parser accepts for the arguments that this package reads or replaces.
ALIASES: dict[str, dict[str, str]] = {
    "sglang": {
        "model": "model-path",
        "tp": "tp-size",
        "tensor-parallel-size": "tp-size",
        "speculative-draft-model": "speculative-draft-model-path",
    },
    "vllm": {"tp": "tensor-parallel-size", "tp-size": "tensor-parallel-size"},
}
SHORT = {"-tp": "--tensor-parallel-size"}  # vLLM's parser knows it


def parse_setting(text: str, engine: str = "sglang") -> tuple[str, Any]:
    """`port=8000` -> ("args.port", 8000); `options.speculation=adaptive` -> ("options.speculation", "adaptive")."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"cannot read the setting {text!r}", where="--set", expected="KEY=VALUE")
    key = key.strip() if "." in key else f"args.{canonical(key.strip(), engine)}"
    return key, _parse_value(value.strip())


def parse_arguments(words: Sequence[str], engine: str = "sglang") -> Args:
    """Engine arguments as typed (`--port 8000 --flag --list 1 2 --x=3`) -> {"port": "8000", "flag": True, ...}."""
    args: Args = {}
    name: str | None = None
    values: list[str] = []
    for word in [*(SHORT.get(word, word) for word in words), "--"]:
        if not word.startswith("--"):
            if name is None:
                raise UsageError(f"unexpected {word!r}", where="after --", expected="engine arguments: --name value")
            values.append(word)
            continue
        if name is not None:
            args[canonical(name, engine)] = values if len(values) > 1 else values[0] if values else True
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
    return args


def command_words(args: Mapping[str, ArgValue]) -> list[str]:
    """{"port": 8000, "flag": True, "off": False, "list": [1, 2]} -> --port 8000 --flag --list 1 2; a table is JSON."""
    words: list[str] = []
    for name, value in args.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif isinstance(value, dict):
            words.append(json.dumps(value, separators=(",", ":")))
        elif value is not True:
            words.append(str(value))
    return words


def canonical(name: str, engine: str = "sglang") -> str:
    """The spelling of an argument that recipes use: dashes, and one name where an engine knows several."""
    name = name.replace("_", "-")
    return ALIASES[engine].get(name, name)


def show(name: str, value: Any) -> str:
    """An argument as a person reads it in a note: `--port 8000`, `no --flag`, or a dotted recipe key."""
    if "." in name:
        return f"{name}={value}"
    return " ".join(command_words({name: value})) or f"no --{name}"


def argument_groups(words: Sequence[str]) -> list[str]:
    """Words grouped so that each argument stands on its own line with its values."""
    groups: list[str] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append(word)
        else:
            groups[-1] += f" {word}"
    return groups


def _parse_value(text: str) -> Any:
    """Text as it was typed (a revision of digits stays text), except true, false and [lists]."""
    if text in ("true", "false"):
        return text == "true"
    if not text.startswith("["):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
