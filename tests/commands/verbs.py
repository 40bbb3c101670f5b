"""Call every command of `kimi-w4a8` where only some extras are installed: `python verbs.py EXTRAS CALLS`.

EXTRAS are separated by commas. Every package of site-packages that `pip install '.[EXTRAS]'` does not bring is hidden
from imports, find_spec and metadata. CALLS is a JSON list of word lists. Prints JSON: the paths of all commands, and
[words, exit code, output, new files] of `--help` for each of them and of every call. Each runs in a fork, so nothing is
imported twice, in the folder where the calls may write.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "kimi-w4a8-eagle3"
SITE = Path(sysconfig.get_path("purelib"))
# Imported before the forks, where it is installed: each costs a fork that needs it about two seconds.
ONCE = ("matplotlib.pyplot", "torch", "datasets", "lm_eval.evaluator", "lm_eval.tasks")
Called = tuple[list[str], int, str, list[str]]


def installed(extras: frozenset[str]) -> dict[str, metadata.Distribution]:
    """Return the distributions that pip would install, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    asked: dict[str, frozenset[str]] = {}
    todo = [(PACKAGE, extras)]
    while todo:
        name, wanted = todo.pop()
        if name in asked and wanted <= asked[name]:
            continue
        asked[name] = wanted | asked.get(name, frozenset())
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # this environment lacks it, too
            continue
        for line in found[name].requires or []:
            one = Requirement(line)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*asked[name], "")):
                todo.append((canonicalize_name(one.name), frozenset(one.extras)))
    return found


def modules(distribution: metadata.Distribution) -> set[str]:
    """Return the names of its top-level modules."""
    declared = distribution.read_text("top_level.txt")
    if declared:
        return set(declared.split())
    return {file.parts[0].partition(".")[0] for file in distribution.files or []}


def hide_others(extras: frozenset[str]) -> None:
    """Hide every package of site-packages that these extras do not bring, from here on."""
    kept = installed(extras)
    names = set().union(*map(modules, kept.values()))

    class Remaining:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path, target)
            if spec is None or path is not None or spec.name in names:
                return spec
            places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
            return None if any(Path(place).is_relative_to(SITE) for place in places) else spec

        @staticmethod
        def find_distributions(context: Any) -> Any:
            found = PathFinder.find_distributions(context)
            return (one for one in found if canonicalize_name(one.name) in kept)

        invalidate_caches = PathFinder.invalidate_caches

    sys.meta_path[sys.meta_path.index(PathFinder)] = Remaining  # type: ignore[call-overload]


def paths() -> Iterator[list[str]]:
    """Yield the words of every command and sub-command."""
    from kimi_w4a8_eagle3.cli import load, tables  # what is hidden is hidden first

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
    from kimi_w4a8_eagle3.cli import main  # as above

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
    hide_others(frozenset(filter(None, sys.argv[1].split(","))))
    found = list(paths())
    for name in ONCE:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a fork that collected garbage would look at all modules, and copy their pages
    helps = [call([*path, "--help"]) for path in found]
    print(json.dumps({"paths": found, "helps": helps, "calls": [call(words) for words in json.loads(sys.argv[2])]}))
