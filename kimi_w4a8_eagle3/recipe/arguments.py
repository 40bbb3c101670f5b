"""Engine arguments: their words on a command line, and the numbers that this package computes with.

SGLang's own parser decides which arguments and values there are (`require_parsed`). Its import takes seconds, so it is
asked only about what no packaged recipe has.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any

from ..base.errors import KimiError, UsageError
from ..base.program import Program
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
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)(?!.*[^.]{64})([\w-]+\.)*[\w-]*[A-Za-z_-][\w-]*\.?", re.ASCII
)  # 10.0.0 is no name


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `port=8000` to ("args.port", 8000) and `options.speculation=off` to ("options.speculation", "off")."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"cannot read the setting {text!r}", where="--set", expected="KEY=VALUE")
    key = key.strip() if "." in key else f"args.{canonical(key.strip())}"
    if key.startswith("args.") and not value.strip():
        raise UsageError(f"--{key.removeprefix('args.')} has no value", where="--set", expected="KEY=VALUE")
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


def number(args: Mapping[str, ArgValue], name: str, default: int, most: int = sys.maxsize) -> int:
    """Return the engine argument `name` as a whole number from 1 to `most`; raise UsageError for anything else."""
    text = str(args.get(name, default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        expected = "a whole number from 1" + (f" to {most}" if most < sys.maxsize else "")
        raise UsageError(f"--{name} {text} is not a valid value", "engine arguments", expected)
    return int(text)


def check_host(host: ArgValue, option: str = "--host") -> None:
    """Raise UsageError for what is neither an address nor the name of a host, without asking a name server."""
    with suppress(ValueError):
        ip_address(str(host))
        return
    if not isinstance(host, str) or not _HOST_NAME.fullmatch(host):
        raise UsageError(
            f"{option} {host} is not a valid value", "engine arguments", "an address or the name of a host"
        )


def fraction(args: Mapping[str, ArgValue], name: str, default: float) -> float:
    """Return the engine argument `name` as a number between 0 and 1; raise UsageError for anything else."""
    value = args.get(name, default)
    with suppress(ValueError):
        if 0 < float(str(value)) < 1:
            return float(str(value))
    raise UsageError(f"--{name} {value} is not a valid value", "engine arguments", "a number between 0 and 1")


def attention_tp(args: Mapping[str, ArgValue]) -> int:
    """Return the ranks over which attention is split: `tp-size`, divided by `dp-size` with DP attention."""
    tp, dp = number(args, "tp-size", 1), number(args, "dp-size", 1)
    if args.get("enable-dp-attention") is not True:
        return tp
    if tp % dp:
        raise KimiError(f"TP {tp} cannot be divided into {dp} groups", "--dp-size", "a divisor of --tp-size")
    return tp // dp


def allows_code(name: str) -> bool:
    """Return True if an engine's parser takes `name` for the option: argparse accepts unique beginnings of it."""
    return len(name) > 1 and TRUST.startswith(name)


def require_parsed(args: Args) -> None:
    """Raise UsageError for an argument or a value that the installed SGLang refuses, which would fail much later."""
    if find_spec("sglang") is None:
        return
    final = {name: value for name, value in args.items() if value != "auto"}  # "auto" is this package's own value
    program = Program("kimi_w4a8_eagle3.sglang_plugin.check_arguments", tuple(command_words(final)))
    variables = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # halves the time
    done = subprocess.run(program.argv, env=variables, capture_output=True, text=True)
    if done.returncode == 2:
        raise UsageError(done.stderr.strip().splitlines()[-1], where="the installed SGLang's arguments")


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
