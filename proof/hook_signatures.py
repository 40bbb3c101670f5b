"""The interfaces of SGLang's functions that the plugin hooks or uses, from the pinned release and the newest.

python -m proof.hook_signatures           compare them with the plugin's table, and show what differs
python -m proof.hook_signatures --save    write the table, and the page's list of differences between the releases

Read the difference before you commit it. More folders (`pip install --no-deps --target VERSION sglang==VERSION`) are
listed on the page as well, and are not in the plugin's table, because no test runs on them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kimi_w4a8_eagle3.doctor.software import SGLANG_NEWEST, SGLANG_PINNED
from kimi_w4a8_eagle3.recipe.launch import load_recipe
from kimi_w4a8_eagle3.sglang_plugin import hooks

TABLE = Path(hooks.__file__).with_name("known_signatures.json")
PAGE = Path(__file__).parents[1] / "docs/hooks.md"
HEADING = "## What the releases changed\n"
NEWEST = Path(sys.prefix) / "compat" / f"sglang-{SGLANG_NEWEST}"
_HERE = "--of-this-release"
Table = Mapping[str, Mapping[str, Sequence[str]]]  # by name, then by release: call and source


def of_this_release() -> dict[str, hooks.Interface | None]:
    """Return the interface of each name, in a process of `run_module`."""
    from sglang.srt.plugins import load_plugins  # its process alone needs SGLang

    hooks.known_interfaces = dict  # type: ignore[assignment]  # whatever the table says, it is what is asked for
    load_plugins()
    modules = [module for name, module in sys.modules.items() if name.startswith("kimi_w4a8_eagle3.sglang_plugin.")]
    features = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, hooks.Feature)}
    return {name: hooks.interface_of(name) for feature in features.values() for name in feature.names}


def of_releases(folders: Mapping[str, Path | None]) -> dict[str, dict[str, list[str]]]:
    """Return the interfaces of each name by release. folders: of the releases; None is the installed one."""
    found: dict[str, dict[str, list[str]]] = {}
    for release, folder in folders.items():
        words = [sys.executable, "-m", "kimi_w4a8_eagle3.sglang_plugin.run_module", "proof.hook_signatures", _HERE]
        variables = {name: str(value) for name, value in load_recipe("tiny").env.items()}
        path = [str(folder), str(NEWEST)] if folder else []  # the newest release's dependencies serve another one, too
        environ = {
            **os.environ,
            **variables,
            "KIMI_COLLECT": "folder",
            "PYTHONPATH": os.pathsep.join([*path, str(Path.cwd())]),
        }
        said = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
        for name, interface in json.loads(said.splitlines()[-1]).items():
            if interface is not None:
                found.setdefault(name, {})[release] = interface
    return {name: found[name] for name in sorted(found)}


def differences(now: Table, known: Table) -> list[str]:
    """Return a line for each name whose interfaces differ from the table."""
    names = sorted(now.keys() | known.keys())
    return [f"{name}: {known.get(name)} -> {now.get(name)}" for name in names if now.get(name) != known.get(name)]


def section(table: Table) -> str:
    """Return the page's section on the names that differ between the releases of the table."""
    found = {release for of in table.values() for release in of}
    releases = sorted(found, key=lambda release: [int(part) for part in release.split(".")])
    pairs = list(pairwise(releases))
    rows = []
    for name, of in sorted(table.items()):
        cells = [_change(of.get(before), of.get(after)) for before, after in pairs]
        if any(cell != "same" for cell in cells):
            rows.append(f"| `{name.removeprefix('sglang.srt.')}` | {' | '.join(cells)} |")
    heads = [f"{before} to {after}" for before, after in pairs]
    return (
        f"{HEADING}`python -m proof.hook_signatures --save` writes this list. No test runs on the releases between\n"
        f"the first and the last. `source` means other lines. `with` and `without` name parameters, kinds and return\n"
        f"values. {len(table) - len(rows)} of {len(table)} names are the same in SGLang {', '.join(releases)}.\n\n"
        f"| name in `sglang.srt` | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}\n" + "\n".join(rows) + "\n"
    )


def _change(before: Sequence[str] | None, after: Sequence[str] | None) -> str:
    if before is None or after is None:
        return "removed" if after is None else "added"
    if before[0] == after[0]:
        return "same" if before[1] == after[1] else "source"
    old, new = ([word for word in re.split(r", | ?\(|\) -> ", call) if word] for call in (before[0], after[0]))
    words = [f"without `{word}`" for word in old if word not in new] + [
        f"with `{word}`" for word in new if word not in old
    ]
    return ", ".join(words) or "another order"


def main(arguments: Sequence[str]) -> int:
    """Run the command line; 1 means that the table differs."""
    if _HERE in arguments:
        print(json.dumps(of_this_release()))
        return 0
    save, more = "--save" in arguments, [Path(word) for word in arguments if word != "--save"]
    tested: dict[str, Path | None] = {SGLANG_PINNED: None, SGLANG_NEWEST: NEWEST}
    now, known = of_releases(tested), json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if save:
        TABLE.write_text(json.dumps(now, indent=1) + "\n")
        others = of_releases({folder.name: folder for folder in more})
        merged = {name: {**of, **others.get(name, {})} for name, of in now.items()}
        PAGE.write_text(PAGE.read_text().partition(HEADING)[0].rstrip() + "\n\n" + section(merged))
    print("\n".join(differences(now, known)) or f"{len(now)} names as in {TABLE.name}")
    return int(now != known and not save)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
