"""Real clients against a real server, in the recorded and in the newest version: the table of docs/perf/answers.md.

    python -m proof.agents [--only NAME] [--here]

The server has the model's words without its engine (words.py), so a session takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_laptop import tiny

from . import words
from .clients import PRODUCTS
from .matrix import NODE, MatrixRow, install_npm, installed, pinned, rows_of, table

_PAGE = Path(__file__).parents[2] / "docs/perf/answers.md"
_BEGIN, _END = "<!-- matrix: begin (python -m proof.agents) -->\n", "<!-- matrix: end -->"


def main(
    only: list[str] = typer.Option([], help="These clients, as the table names them; the page stays."),
    here: bool = typer.Option(False, help="Take the Python packages of this environment, and install nothing."),
) -> None:
    """Run the clients, print their table and write it into the page; exit 1 when one did not reach every turn."""
    rows: list[MatrixRow] = []
    with tempfile.TemporaryDirectory() as name, _server(Path(name)) as (server, script):
        node = Path(name) / "node22"
        if not here:
            install_npm(node, [NODE], node)
        for product in (one for one in PRODUCTS if not only or one["name"] in only):
            for packages in [[]] if here else [pinned(product), product["packages"]]:
                try:
                    with installed(product["folder"], packages, node) as clients:
                        found = rows_of(product, clients, server.base_url, script)
                except subprocess.SubprocessError as error:
                    lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
                    found = [MatrixRow(product["name"], packages[0], why=[lines[-1]])]
                rows += [row for row in found if row not in rows]
                for row in found:
                    print(row.client, row.version, row.result, *row.why, sep="\n  ", flush=True)
    if not only:
        page, after = _PAGE.read_text().split(_BEGIN)
        ran = f"Run on {time.strftime('%Y-%m-%d', time.gmtime())}:\n\n{table(rows)}"
        _PAGE.write_text(page + _BEGIN + ran + after[after.index(_END) :])
    print(table(rows))
    raise typer.Exit(0 if all(row.good for row in rows) else 1)


@contextmanager
def _server(folder: Path) -> Iterator[tuple[FrontedEngine, Path]]:
    """Serve the built-in model, which reads pictures, with the plugin of its words and a context for agents."""
    target, script = folder / "target", folder / "words.json"
    target.mkdir()
    for file in tiny.target_path().iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "language_model_only": False}))
    sizes = ("context-length=131072", "max-total-tokens=140000")  # the first is that of the recipe `agent`
    launch = render(load_recipe("tiny"), [f"port={free_port()}", *sizes, f"model.repo={target}"])
    script.write_text("{}")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path.cwd()), str(words.installed(folder)))))
    more = {words.VARIABLE: str(script), "PYTHONPATH": path, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with replace(launch, env={**launch.env, **more}).server(folder / "server.log") as server:
        server.wait_ready(600.0)
        yield server, script


if __name__ == "__main__":
    run(lambda: typer.run(main))
