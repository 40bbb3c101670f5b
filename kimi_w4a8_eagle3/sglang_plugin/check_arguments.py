"""Check an engine's argument words with SGLang's own parser, for a launch that no packaged recipe is.

Run it behind `run_module`: without that, SGLang cannot be imported on a machine that has no GPU. On a bad argument it
exits with 2, and the last line of stderr says what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from sglang.srt.server_args import ServerArgs

from kimi_w4a8_eagle3.base.nearest import nearest


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(message, file=sys.stderr)
        sys.exit(2)


def check(words: list[str]) -> None:
    """Exit with 2 when SGLang would refuse `words`."""
    parser = _Parser()
    ServerArgs.add_cli_args(parser)
    for word in parser.parse_known_args(words)[1][:1]:
        if word.startswith("--"):
            parser.error(f"there is no argument {word}{nearest(word, parser._option_string_actions)}")
        parser.error(f"no argument takes the value {word!r}")


if __name__ == "__main__":
    check(sys.argv[1:])
