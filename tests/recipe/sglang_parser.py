"""Run as a script: parses the argument lists given as JSON on stdin with SGLang's own parser, prints the results."""

from __future__ import annotations

import argparse
import json
import sys

from kimi_w4a8_eagle3.sglang_plugin import cpu

cpu.install()

from sglang.srt.server_args import ServerArgs  # noqa: E402


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> None:
        raise ValueError(message)


def parse(arguments: list[str]) -> dict[str, object]:
    parser = Parser(allow_abbrev=True)
    ServerArgs.add_cli_args(parser)
    try:
        namespace, unknown = parser.parse_known_args(arguments)
    except ValueError as error:
        return {"error": str(error)}
    return {"unknown": unknown, "values": {name: repr(value) for name, value in vars(namespace).items()}}


if __name__ == "__main__":
    json.dump({name: parse(words) for name, words in json.load(sys.stdin).items()}, sys.stdout)
