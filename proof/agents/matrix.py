"""Three turns of a user with a client, a call in each, and what a recorder in front of the server saw."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..load.asgi import served_app
from .clients import AgentClient, settings_of

QUESTIONS = ("Take the first step.", "Take the next step.", "Take the last step.")
ANSWERS = ("That was the first of three.", "That was the second of three.", "That was all of it.")
NODE = "node@22"  # newer clients need it
_APIS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages"}
_RESULTS = re.compile(r'"(?:role|type)": "(?:tool|function_call_output|tool_result)"')
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
_LIMIT_S = 240.0  # for a turn
_HEAD = ("client", "version", "turns answered with their call, by API")


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
    why: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.turns == self.of == self.calls and not self.refused

    @property
    def result(self) -> str:
        """Turns that were answered, and what was wrong with the others."""
        if not self.api:
            return f"not run: {self.why[0]}"
        broken = "" if self.good else f" ({self.calls} calls, {self.refused} refusals)"
        return f"{self.api} {self.turns} of {self.of}{broken}"


def table(rows: Iterable[MatrixRow]) -> str:
    """Return the rows as a table of Markdown, a line for each version of a client."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cells.setdefault((row.client, row.version), []).append(row.result)
    lines = [f"| {client} | {version} | {', '.join(sorted(found))} |" for (client, version), found in cells.items()]
    return "\n".join([f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|", *lines, ""])


def pinned(product: Mapping[str, Any]) -> list[str]:
    """Return the packages with the versions of the recorded sessions."""
    sign = "@" if product["folder"] == "npm" else "=="
    pins = zip(product["packages"], product["recorded"], strict=False)
    found = [f"{package}{sign}{version}" for package, version in pins]
    return [*found, *product["packages"][len(found) :]]


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


def install_npm(folder: Path, packages: Sequence[str], node: Path) -> None:
    """Install packages of npm with this Node.js."""
    environ = {**os.environ, "PATH": f"{node / 'node_modules/node/bin'}:{os.environ['PATH']}"}
    _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages], environ)


def _run(words: list[str], environ: Mapping[str, str] | None = None) -> None:
    subprocess.run(words, env=environ, capture_output=True, text=True, timeout=600, check=True)


class Recorder:
    """Passes requests on to a server. asked: path and body of each with JSON; refused: what the server said then."""

    def __init__(self, base_url: str) -> None:
        self.asked, self.refused = list[tuple[str, Any]](), list[str]()
        self._client = httpx.AsyncClient(base_url=base_url, timeout=3600.0)
        methods = ["GET", "POST", "HEAD", "PUT", "DELETE"]
        self.app = Starlette(routes=[Route("/{path:path}", self._pass, methods=methods)])

    async def _pass(self, request: Request) -> Response:
        path, body = request.url.path, await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        sent = self._client.build_request(
            request.method, path, params=request.query_params, content=body, headers=headers
        )
        answer = await self._client.send(sent, stream=True)
        if body[:1] == b"{":
            self.asked.append((path, json.loads(body)))

        async def streamed() -> AsyncIterator[bytes]:
            pieces = b""
            async for piece in answer.aiter_bytes():
                pieces += piece if answer.status_code >= 400 else b""
                yield piece
            if answer.status_code >= 400:
                self.refused.append(f"{path} {pieces.decode(errors='replace')}")

        kept = {name: value for name, value in answer.headers.items() if name not in _HOP}
        return StreamingResponse(streamed(), answer.status_code, kept)


def rows_of(product: Mapping[str, Any], clients: Path, base_url: str, script: Path) -> list[MatrixRow]:
    """Run all sessions of an installed client; return a row for each API that it used."""
    rows: dict[str, MatrixRow] = {}
    package = product["packages"][0].partition("[")[0]
    for name in product["sessions"]:
        recorder = Recorder(base_url)
        with tempfile.TemporaryDirectory() as scratch, served_app(recorder.app) as url:
            home, work = Path(scratch, "home"), Path(scratch, "project")
            home.mkdir()
            work.mkdir()
            client = AgentClient(name, package, settings_of(name), clients, home, work, url)
            steps = [({"calls": [call]}, {"text": text}) for call, text in zip(client.calls(), ANSWERS, strict=True)]
            script.write_text(json.dumps({"steps": [step for turn in steps for step in turn]}))
            said = list(_turns(client))
            version = (_VERSION.findall(client.version()) or ["unknown"])[0]
        asked = [(path, body) for path, body in recorder.asked if path in _APIS and body.get("tools")]
        if not asked:
            words = " ".join(" ".join(said).split()).replace("|", "/").partition(". ")[0]
            return [MatrixRow(product["name"], version, why=[f"it sent no request, and said: {words[-200:]}"])]
        path, last = asked[-1]
        row = rows.setdefault(_APIS[path], MatrixRow(product["name"], version, _APIS[path]))
        served = [answer in text for answer, text in zip(ANSWERS, said, strict=False)]
        row.turns += sum(served)
        row.of += len(QUESTIONS)
        row.calls += len(_RESULTS.findall(json.dumps(last.get("messages") or last["input"])))
        row.refused += len(recorder.refused)
        row.why += [f"{name}: {line[:600]}" for line in recorder.refused]
        row.why += [f"{name}: {text[-1500:]}" for good, text in zip(served, said, strict=False) if not good]
    return list(rows.values())


def _turns(client: AgentClient) -> Iterator[str]:
    """Yield what the client says in each turn, until one fails."""
    for number, question in enumerate(QUESTIONS):
        command, environ = client.start(question, number > 0)
        command += QUESTIONS if client.whole else ()
        done = subprocess.run(
            command, env=environ, cwd=client.work, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        if client.whole and done.returncode == 0:
            yield from map(str, json.loads(done.stdout.splitlines()[-1]))
            return
        answered = ANSWERS[number] in done.stdout
        yield done.stdout + ("" if answered else done.stderr)
        if not answered:
            return
