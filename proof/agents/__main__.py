"""Sessions of real agents against a real server: recorded for the tests, or written by the engine itself.

    python -m proof.agents                               # recorded and newest versions; writes docs/perf/clients.md
    python -m proof.agents record --clients FOLDER       # writes tests/support/agents/
    python -m proof.agents live --clients FOLDER         # codex, claude-code and opencode, with and without EAGLE3

Without a command and in `record` the server has the model's words without its engine, so all sessions take minutes.
`live` lets the engine write the words, which a grammar forces; everything else is as in service. docs/perf/clients.md
says how to install clients.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.engine.process import EngineServer, free_port
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_laptop import tiny

from . import words
from .clean import cleaned
from .clients import CLIENTS, PRODUCTS, TASK
from .matrix import NODE, MatrixRow, install_npm, installed, pinned, rows_of, session, table
from .mcp_tools import tool_lists

CORPUS = Path(__file__).parents[2] / "tests" / "support" / "agents"
_LIVE = ("codex", "claude-code", "opencode")
_CONTEXT = 131072  # of the recipe `agent`
_READY_S = 600.0
_PAGE = Path(__file__).parents[2] / "docs/perf/clients.md"
_BEGIN, _END = "<!-- matrix: begin (python -m proof.agents) -->\n", "<!-- matrix: end -->"
app = typer.Typer(pretty_exceptions_enable=False, invoke_without_command=True)


@app.callback(invoke_without_command=True)
def matrix(
    context: typer.Context,
    only: list[str] = typer.Option([], help="These clients, as the table names them; the page stays."),
    here: bool = typer.Option(False, help="Take the Python packages of this environment, and install nothing."),
) -> None:
    """Run the clients of docs/perf/clients.md in the recorded and in the newest version, and write their table."""
    if context.invoked_subcommand:
        return
    versions = json.loads((CORPUS / "versions.json").read_text())
    rows: list[MatrixRow] = []
    with (
        tempfile.TemporaryDirectory() as name,
        _server(Path(name), "tiny", _CONTEXT, pictures=True) as (server, script),
    ):
        node = Path(name) / "node22"
        if not here:
            install_npm(node, [NODE], node)
        for product in PRODUCTS if not only else [one for one in PRODUCTS if one["name"] in only]:
            for packages in [[]] if here else [pinned(product, versions), product["packages"]]:
                try:
                    with installed(product["folder"], packages, node) as clients:
                        found = rows_of(product, clients, server.base_url, script)
                except subprocess.SubprocessError as error:
                    lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
                    found = [MatrixRow(product["name"], packages[0], why=[lines[-1]])]
                rows += [row for row in found if row not in rows]
                for row in found:
                    print(row.line(), *row.why, sep="\n  ", flush=True)
    if not only:
        page, after = _PAGE.read_text().split(_BEGIN)
        ran = f"Run on {time.strftime('%Y-%m-%d', time.gmtime())}:\n\n{table(rows)}"
        _PAGE.write_text(page + _BEGIN + ran + after[after.index(_END) :])
    print(table(rows))
    raise typer.Exit(0 if all(row.good for row in rows) else 1)


@app.command()
def record(
    clients: Path = typer.Option(..., help="Folder with the installed clients."),
    only: list[str] = typer.Option([], help="Record these sessions and no MCP tools; the others stay."),
    tools: bool = typer.Option(True, help="List the tools of MCP servers, too."),
) -> None:
    """Record the sessions of all clients, clean them, and write the corpus of the tests."""
    CORPUS.mkdir(exist_ok=True)
    rows = [row for row in read("requests") if only and row["session"] not in only]
    versions = json.loads((CORPUS / "versions.json").read_text()) if only else {}
    with (
        tempfile.TemporaryDirectory() as name,
        _server(Path(name), "tiny", _CONTEXT, door="off", pictures=True) as (server, script),
    ):
        for session in only or CLIENTS:
            try:
                requests, versions[session] = _session(session, clients, server.base_url, script, 240.0, engine=False)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                print(f"{session}: not recorded: {error}", flush=True)
                continue
            rows += [{"session": session, **request} for request in requests]
            print(f"{session}: {len(requests)} requests, {versions[session]}", flush=True)
    write("requests", rows)
    (CORPUS / "versions.json").write_text(json.dumps(dict(sorted(versions.items())), indent=1) + "\n")
    if tools and not only:
        write("mcp_tools", [_listed(*found, clients) for found in tool_lists(clients)])


@app.command()
def live(
    clients: Path = typer.Option(..., help="Folder with the installed clients."),
    only: list[str] = typer.Option(list(_LIVE), help="These clients."),
    limit: float = typer.Option(3600.0, help="Seconds for one session."),
) -> None:
    """Let the engine write the words of a task of three calls, with EAGLE3 and without; exit 1 when one differs."""
    said: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for recipe in ("tiny", "tiny:plain"):
            with _server(Path(name), recipe, _CONTEXT) as (server, script):
                for session in only:
                    began = time.monotonic()
                    requests, version = _session(session, clients, server.base_url, script, limit, engine=True)
                    said.setdefault(session, {})[recipe] = _answers(requests)
                    done = f"{len(requests)} requests in {time.monotonic() - began:.0f} s"
                    print(f"{session} {version}, {recipe}: {done}", flush=True)
    differ = [session for session, by_recipe in said.items() if by_recipe["tiny"] != by_recipe["tiny:plain"]]
    print(f"different answers: {', '.join(differ)}" if differ else "the same answers with EAGLE3 as without")
    raise typer.Exit(1 if differ else 0)


def read(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of the corpus."""
    file = CORPUS / f"{name}.jsonl.xz"
    return [json.loads(line) for line in lzma.open(file, "rt")] if file.exists() else []


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a file of the corpus."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (CORPUS / f"{name}.jsonl.xz").write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


def _listed(server: str, tools: list[dict[str, Any]], why: str, clients: Path) -> dict[str, Any]:
    print(f"{server}: {len(tools)} tools {why}", flush=True)
    kept = [{key: tool.get(key) for key in ("name", "description", "inputSchema")} for tool in tools]
    return {"server": server, "tools": cleaned(kept, [(clients, "/home/user/clients")])}


@contextmanager
def _server(
    folder: Path, recipe: str, context: int, door: str = "auto", pictures: bool = False
) -> Iterator[tuple[EngineServer, Path]]:
    """Serve the built-in model with the plugin of its words and a context that agents need."""
    settings = [
        f"port={free_port()}",
        f"context-length={context}",
        "max-total-tokens=140000",
        "disable-radix-cache=false",
        "watchdog-timeout=3600",  # a busy CPU computes the first prompt for longer than the default of 300 s
    ]
    if pictures:
        settings.append(f"model.repo={_with_pictures(folder / 'target')}")
    launch = render(load_recipe(recipe), settings)
    script = folder / "words.json"
    script.write_text("{}")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path.cwd()), str(words.installed(folder)))))
    more = {words.VARIABLE: str(script), "PYTHONPATH": path, "KIMI_DOOR": door}
    environ = {**launch.env, **more, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    log = folder / f"{recipe.replace(':', '-')}.log"
    with replace(launch, env=environ).server(log) as server:
        server.wait_ready(_READY_S)
        yield server, script


def _with_pictures(folder: Path) -> Path:
    """Return a copy of the built-in model that reads pictures (docs/tiny.md)."""
    folder.mkdir(exist_ok=True)
    for file in tiny.target_path().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "language_model_only": False}))
    return folder


def _session(
    name: str, clients: Path, base_url: str, script: Path, limit: float, engine: bool
) -> tuple[list[dict[str, Any]], str]:
    """Run one client to its end; returns its requests and its version. Raises RuntimeError if the task is not done."""
    client = CLIENTS[name]
    with session(clients, base_url) as running:
        place = running.place
        script.write_text(json.dumps({"engine": engine, "steps": client.steps(place)}))
        command, environ = client.start(place, TASK, False)
        said = {"input": client.settings.get("stdin", ""), "capture_output": True, "text": True}
        done = subprocess.run(command, env=environ, cwd=place.work, timeout=limit, check=False, **said)
        script.write_text("{}")
        refused = "\n".join(running.refused())[:1000]
        if done.returncode or refused or client.proves not in done.stdout:
            why = refused or done.stderr[-1000:]
            raise RuntimeError(f"{name} ended with {done.returncode}: {done.stdout[-500:]}\n{why}")
        places = [(place.work, "/home/user/project"), (place.home, "/home/user"), (clients, "/home/user/clients")]
        kept = [{"path": row["path"], "body": cleaned(row["body"], places)} for row in running.requests()]
        return kept, client.version(place).splitlines()[-1]


def _answers(requests: list[dict[str, Any]]) -> list[Any]:
    """Return what the model said before the last request, as the client sent it back, without ids."""
    last = requests[-1]["body"]
    kept = ("type", "content", "reasoning_content", "summary", "name", "arguments")
    said = []
    for item in last.get("messages") or last["input"]:
        if item.get("role", item.get("type")) in ("assistant", "reasoning", "function_call"):
            calls = [call["function"] for call in item.get("tool_calls", ())]
            said.append((_without_ids({key: item[key] for key in kept if key in item}), calls))
    return said


def _without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ids(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_ids(inner) for key, inner in value.items() if key not in ("id", "signature")}


if __name__ == "__main__":
    sys.argv[0] = "proof.agents"
    run(app)
