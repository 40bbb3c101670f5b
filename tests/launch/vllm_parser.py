"""Run as a script: parses argument lists given as JSON on stdin with vLLM's own parsers, on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from typing import Any

from kimi_w4a8_laptop import torchvision_ops

torchvision_ops.declare_missing()

from vllm import platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

platforms._current_platform = CpuPlatform()

from vllm.benchmarks.serve import add_cli_args  # noqa: E402
from vllm.entrypoints.openai.cli_args import make_arg_parser  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


class Parser(FlexibleArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> None:
        raise ValueError(message)


def parse(words: list[str]) -> dict[str, Any]:
    """words: a whole command, `vllm serve ...` or `vllm bench serve ...`."""
    bench = words[1] == "bench"
    parser = Parser()
    if bench:
        add_cli_args(parser)
    else:
        parser = make_arg_parser(parser)
    try:
        namespace, unknown = parser.parse_known_args(words[3 if bench else 2 :])
    except ValueError as error:
        return {"error": str(error)}
    return {"unknown": unknown, "values": {name: repr(value) for name, value in vars(namespace).items()}}


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    print("\n" + json.dumps({name: parse(words) for name, words in commands.items()}))
