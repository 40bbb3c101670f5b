"""Run by `support.run_program`: parses the argument lists of a JSON file with SGLang's own parser, prints them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sglang.srt.server_args import ServerArgs


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
    commands = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: parse(words) for name, words in commands.items()}))
