"""Walks the commands of `kimi-w4a8` and calls each: `python verbs.py CALLS`, in the folder where the calls may write.

CALLS is a JSON list of word lists. Prints JSON: the paths of all commands, and [words, exit code, output, new files]
of `--help` for each of them and of every call. Each runs in a fork, so nothing is imported twice.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.cli import load, main, tables

# Imported before the forks, where it is installed: each costs a fork that needs it about two seconds.
ONCE = ("matplotlib.pyplot", "torch", "datasets", "lm_eval.evaluator", "lm_eval.tasks")
Called = tuple[list[str], int, str, list[str]]


def paths() -> Iterator[list[str]]:
    """Yield the words of every command and sub-command."""
    for name in chain(*tables().values()):
        command: Any = load(name)
        yield [name]
        yield from ([name, inner] for inner in getattr(command, "commands", ()))


def call(words: list[str]) -> Called:
    """Run `kimi-w4a8 WORDS` as its own process would."""
    before = set(Path().rglob("*"))
    with tempfile.TemporaryFile("w+") as output:
        if (child := os.fork()) == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv = ["kimi-w4a8", *words]
            run()
        _, status = os.waitpid(child, 0)
        output.seek(0)
        said = output.read()
    return words, os.waitstatus_to_exitcode(status), said, sorted(map(str, set(Path().rglob("*")) - before))


def run() -> None:
    """End this process as the program would: with its exit code, or a traceback."""
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    found = list(paths())
    for name in ONCE:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a fork that collected garbage would look at all modules, and copy their pages
    helps = [call([*path, "--help"]) for path in found]
    print(json.dumps({"paths": found, "helps": helps, "calls": [call(words) for words in json.loads(sys.argv[1])]}))
