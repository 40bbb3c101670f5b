"""The clients of docs/perf/clients.md in recorded and newest versions: three turns of a user, with a call each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .clients import CLIENTS, AgentClient, SessionPlace, Step
from .proxy import recording

QUESTIONS = ("Take the first step.", "Take the next step.", "Take the last step.")
ANSWERS = ("That was the first of three.", "That was the second of three.", "That was all of it.")
_APIS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages"}
_RESULTS = re.compile(r'"(?:role|type)": "(?:tool|function_call_output|tool_result)"')
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_LIMIT_S = 240.0  # for a turn
NODE = "node@22"  # newer clients need it
_HEAD = ("client", "version", "API", "turns", "tool calls", "refusals", "second turn")


@dataclass
class MatrixRow:
    """One version of a client on one API. api: empty where it sent nothing, with the reason in `why`."""

    client: str
    version: str
    api: str = ""
    turns: int = 0
    of: int = 0
    calls: int = 0
    refused: int = 0
    second: bool = True
    why: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.turns == self.of == self.calls and not self.refused

    def line(self) -> str:
        counts = (f"{self.turns} of {self.of}", f"{self.calls} of {self.of}", str(self.refused))
        reached = (self.api, *counts, "answered" if self.second else "broken")
        cells = reached if self.api else (f"not run: {self.why[0]}", *["-"] * 4)
        return f"| {' | '.join((self.client, self.version, *cells))} |"


def table(rows: Iterable[MatrixRow]) -> str:
    """Return the rows as a table of Markdown."""
    return "\n".join([f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|", *(row.line() for row in rows), ""])


def pinned(product: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Return what the recorded version is installed from."""
    sign, session = "@" if product["folder"] == "npm" else "==", product["sessions"][0]
    found = product.get("recorded") or _VERSION.findall(versions[session])[:1]
    pins = [f"{package}{sign}{version}" for package, version in zip(product["packages"], found, strict=False)]
    return [*pins, *product["packages"][len(pins) :]]


@contextmanager
def installed(folder: str, packages: Sequence[str], node: Path) -> Iterator[Path]:
    """Install the packages in a new place, or take this environment if there are none.

    Raises CalledProcessError where they are not to be had.
    """
    with tempfile.TemporaryDirectory(prefix="kimi-client-") as name:
        place = Path(name)
        (place / "node22").symlink_to(node)
        if not packages:
            (place / folder).symlink_to(sys.prefix)
        elif folder == "npm":
            install_npm(place / "npm", packages, node)
        else:
            uv, home = str(Path(sys.executable).with_name("uv")), str(place / folder)
            _run([uv, "venv", "-q", *(["--python", "3.13"] if folder == "kimi" else []), home])
            _run([uv, "pip", "install", "-q", "-p", home, *packages])
        yield place


def install_npm(folder: Path, packages: Sequence[str], node: Path) -> Path:
    """Install packages of npm with this Node.js, and return the folder."""
    environ = {**os.environ, "PATH": f"{node / 'node_modules/node/bin'}:{os.environ['PATH']}"}
    _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages], environ)
    return folder


def _run(words: list[str], environ: Mapping[str, str] | None = None) -> None:
    subprocess.run(words, env=environ, capture_output=True, text=True, timeout=600, check=True)


@dataclass
class RecordedSession:
    """A running session. requests: what was sent so far; refused: what the server said where it refused."""

    place: SessionPlace
    file: Path

    def requests(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        return [row for row in rows if row["body"]]

    def refused(self) -> list[str]:
        file = self.file.with_suffix(".refused")
        return file.read_text().splitlines() if file.exists() else []


@contextmanager
def session(clients: Path, base_url: str) -> Iterator[RecordedSession]:
    """Make a home and a project, with a recorder in front of the server."""
    with tempfile.TemporaryDirectory() as name, recording(base_url) as (url, recorder):
        folder = Path(name)
        (folder / "home").mkdir()
        (folder / "project").mkdir()
        recorder.file = folder / "requests.jsonl"
        yield RecordedSession(SessionPlace(clients, folder / "home", folder / "project", url), recorder.file)


def rows_of(product: Mapping[str, Any], clients: Path, base_url: str, script: Path) -> list[MatrixRow]:
    """Run all sessions of an installed client; returns a row for each API that it used."""
    rows: dict[str, MatrixRow] = {}
    for name in product["sessions"]:
        client = CLIENTS[name]
        with session(clients, base_url) as running:
            script.write_text(json.dumps({"steps": _steps(client, running.place)}))
            said = list(_turns(client, running.place))
            version = (_VERSION.findall(client.version(running.place)) or ["unknown"])[0]
            asked = [row for row in running.requests() if row["path"] in _APIS and row["body"].get("tools")]
            refused = running.refused()
        if not asked:
            words = " ".join(" ".join(said).split()).replace("|", "/").partition(". ")[0]
            return [MatrixRow(product["name"], version, why=[f"it sent no request, and said: {words[-200:]}"])]
        api, last = _APIS[asked[-1]["path"]], asked[-1]["body"]
        row = rows.setdefault(api, MatrixRow(product["name"], version, api))
        served = [answer in text for answer, text in zip(ANSWERS, said, strict=False)]
        row.turns += sum(served)
        row.of += len(QUESTIONS)
        row.calls += len(_RESULTS.findall(json.dumps(last.get("messages") or last["input"])))
        row.refused += len(refused)
        row.second &= served[1:2] == [True]
        row.why += [f"{name}: {line[:600]}" for line in refused]
        row.why += [f"{name}: {text[-1500:]}" for good, text in zip(served, said, strict=False) if not good]
    return list(rows.values())


def _steps(client: AgentClient, place: SessionPlace) -> list[Step]:
    """Return a call and an answer for each turn."""
    calls = [step for step in client.steps(place) if step.get("calls")]
    answers = [{"think": "It is done.", "text": answer} for answer in ANSWERS]
    return [step for turn in zip(calls, answers, strict=True) for step in turn]


def _turns(client: AgentClient, place: SessionPlace) -> Iterator[str]:
    """Yield what the client says in each turn, until one fails."""
    for number, question in enumerate(QUESTIONS):
        command, environ = client.start(place, question, number > 0)
        command += QUESTIONS if client.whole else ()
        done = subprocess.run(
            command, env=environ, cwd=place.work, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        if client.whole and done.returncode == 0:
            yield from map(str, json.loads(done.stdout.splitlines()[-1]))
            return
        answered = ANSWERS[number] in done.stdout
        yield done.stdout + ("" if answered else done.stderr)
        if not answered:
            return
