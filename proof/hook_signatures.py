"""Calls of the functions of SGLang that the plugin hooks or uses, in both tested releases.

python -m proof.hook_signatures           compare them with the plugin's table, and show what differs
python -m proof.hook_signatures --save    write the table
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST
from kimi_w4a8_eagle3.recipe.schema import load_recipe
from kimi_w4a8_eagle3.sglang_plugin import hooks

TABLE = Path(hooks.__file__).with_name("known_signatures.json")
NEWEST = Path(sys.prefix) / "compat" / f"sglang-{SGLANG_NEWEST}"
_HERE = "--of-this-release"


def of_this_release() -> dict[str, str | None]:
    """Return the call of each name, in a process of `run_module`."""
    from sglang.srt.plugins import load_plugins  # its process alone needs SGLang

    hooks._unknown = lambda name: None  # whatever the table says, it is what is asked for
    load_plugins()
    modules = [module for name, module in sys.modules.items() if name.startswith("kimi_w4a8_eagle3.sglang_plugin.")]
    features = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, hooks.Feature)}
    return {name: hooks.call_of(name) for feature in features.values() for name in feature.names}


def of_both_releases() -> dict[str, list[str]]:
    """Return the calls of each name in the installed release and in the newest one."""
    found: dict[str, list[str]] = {}
    words = [sys.executable, "-m", "kimi_w4a8_eagle3.sglang_plugin.run_module", "proof.hook_signatures", _HERE]
    variables = {**os.environ, **load_recipe("tiny").environment, "KIMI_COLLECT": "folder"}
    for folders in ([], [str(NEWEST)]):
        environ = {**variables, "PYTHONPATH": os.pathsep.join([*folders, str(Path.cwd())])}
        said = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
        for name, call in json.loads(said.splitlines()[-1]).items():
            if call is not None and call not in found.setdefault(name, []):
                found[name].append(call)
    return dict(sorted(found.items()))


def main(arguments: Sequence[str]) -> int:
    """Run the command line; 1 means that the table differs."""
    if _HERE in arguments:
        print(json.dumps(of_this_release()))
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
