"""Calls of the functions of SGLang that the plugin hooks or uses, in both tested releases.

python -m proof.hook_signatures           compare them with the plugin's table, and show what differs
python -m proof.hook_signatures --save    write the table
python -m proof.hook_signatures --page    write the rows of docs/hooks.md
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST
from kimi_w4a8_eagle3.recipe.schema import load_recipe
from kimi_w4a8_eagle3.sglang_plugin import hooks

TABLE = Path(hooks.__file__).with_name("known_signatures.json")
NEWEST = Path(sys.prefix) / "compat" / f"sglang-{SGLANG_NEWEST}"
PAGE = Path(__file__).parents[1] / "docs/hooks.md"
_HERE, _ROWS = "--of-this-release", "--rows-of-this-release"


def _features() -> list[tuple[str, hooks.Feature]]:
    """Return the plugin's features with their modules, in a process of `run_module`."""
    from sglang.srt.plugins import load_plugins  # its process alone needs SGLang

    hooks._unknown = lambda name: None  # whatever the table says, it is what is asked for
    load_plugins()
    modules = {name: vars(sys.modules[name]) for name in sys.modules if name.startswith(f"{hooks.__package__}.")}
    return [(name, one) for name in modules for one in modules[name].values() if isinstance(one, hooks.Feature)]


def of_this_release() -> dict[str, str | None]:
    """Return the call of each name."""
    return {name: hooks.call_of(name) for _, feature in _features() for name in feature.names}


def rows_of_this_release() -> list[str]:
    """Return the rows of the page's table."""
    absent = {True: "`kimi_missing_feature_info`", False: "no start"}
    rows = []
    for module, one in _features():
        file = module.removeprefix(f"{hooks.__package__}.").replace(".", "/")
        names = " ".join(f"`{name.removeprefix('sglang.srt.')}`" for name in one.names)
        rows.append(f"| {one.name} | `{file}.py` | {absent[one.optional]} | {one.remove_when} | {names} |")
    return sorted(rows, key=lambda row: row.removeprefix("| the ").removeprefix("| ").lower())


def _asked(folders: Sequence[str], what: str) -> Any:
    """Return what a process with these folders first on its path says."""
    words = [sys.executable, "-m", "kimi_w4a8_eagle3.sglang_plugin.run_module", "proof.hook_signatures", what]
    environ = {**os.environ, **load_recipe("tiny").environment}
    environ["PYTHONPATH"] = os.pathsep.join([*folders, str(Path.cwd())])
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def of_the_page() -> list[str]:
    """Return the rows of the table of docs/hooks.md."""
    return _asked([], _ROWS)


def write_page() -> None:
    """Replace the rows of the table of docs/hooks.md."""
    rows = "".join(f"{row}\n" for row in of_the_page())
    head, mark, table = PAGE.read_text().partition("\n## Features")
    PAGE.write_text(head + mark + re.sub(r"(\|.*\n\|---.*\n)(?:\|.*\n)+", lambda found: found[1] + rows, table))


def of_both_releases() -> dict[str, list[str]]:
    """Return the calls of each name in the installed release and in the newest one."""
    found: dict[str, list[str]] = {}
    for folders in ([], [str(NEWEST)]):
        for name, call in _asked(folders, _HERE).items():
            if call is not None and call not in found.setdefault(name, []):
                found[name].append(call)
    return dict(sorted(found.items()))


def main(arguments: Sequence[str]) -> int:
    """Run the command line; 1 means that the table differs."""
    if _HERE in arguments:
        print(json.dumps(of_this_release()))
        return 0
    if _ROWS in arguments:
        print(json.dumps(rows_of_this_release()))
        return 0
    if "--page" in arguments:
        write_page()
        return 0
    now, known = of_both_releases(), json.loads(TABLE.read_text())
    if "--save" in arguments:
        lines = [f" {json.dumps(name)}: {json.dumps(calls)}" for name, calls in now.items()]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    names = [name for name in sorted(now.keys() | known.keys()) if now.get(name) != known.get(name)]
    print("\n".join(f"{name}: {known.get(name)} -> {now.get(name)}" for name in names) or f"{len(now)} names as known")
    return int(bool(names) and "--save" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
