"""The signatures of SGLang's functions that the plugin hooks or uses, from the pinned release and the newest.

python -m proof.hook_signatures           compare them with the plugin's table, and show what differs
python -m proof.hook_signatures --save    write the table; read the difference before you commit it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kimi_w4a8_eagle3.doctor.software import SGLANG_NEWEST
from kimi_w4a8_eagle3.recipe.launch import load_recipe
from kimi_w4a8_eagle3.sglang_plugin import hooks

TABLE = Path(hooks.__file__).with_name("known_signatures.json")
NEWEST = Path(sys.prefix) / "compat" / f"sglang-{SGLANG_NEWEST}"
_HERE = "--of-this-release"


def of_this_release() -> dict[str, str | None]:
    """Return the signature of each name, in a process of `run_module`."""
    from sglang.srt.plugins import load_plugins  # its process alone needs SGLang

    hooks.known_signatures = dict  # type: ignore[assignment]  # whatever the table says, it is what is asked for
    load_plugins()
    modules = [module for name, module in sys.modules.items() if name.startswith("kimi_w4a8_eagle3.sglang_plugin.")]
    features = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, hooks.Feature)}
    return {name: hooks.signature_of(name) for feature in features.values() for name in feature.names}


def of_both() -> dict[str, list[str]]:
    """Return the different signatures of each name over both releases."""
    found: dict[str, set[str]] = {}
    for path in ([], [str(NEWEST)]):
        words = [sys.executable, "-m", "kimi_w4a8_eagle3.sglang_plugin.run_module", "proof.hook_signatures", _HERE]
        variables = {name: str(value) for name, value in load_recipe("tiny").env.items()}
        environ = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([*path, str(Path.cwd())])}
        said = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
        for name, signature in json.loads(said.splitlines()[-1]).items():
            found.setdefault(name, set()).add(signature)
    return {name: sorted(found[name]) for name in sorted(found)}


def differences(now: Mapping[str, Sequence[str]], known: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each name whose signatures differ from the table."""
    names = sorted(now.keys() | known.keys())
    return [f"{name}: {known.get(name)} -> {now.get(name)}" for name in names if now.get(name) != known.get(name)]


def main(arguments: Sequence[str]) -> int:
    """Run the command line; 1 means that the table differs."""
    if _HERE in arguments:
        print(json.dumps(of_this_release()))
        return 0
    now, known = of_both(), json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if "--save" in arguments:
        TABLE.write_text(json.dumps(now, indent=1) + "\n")
    print("\n".join(differences(now, known)) or f"{len(now)} names as in {TABLE.name}")
    return int(now != known and "--save" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
