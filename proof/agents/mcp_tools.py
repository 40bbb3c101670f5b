"""List the tools of MCP servers that npm and PyPI install, as agents send them to a model."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.toml import tomllib

SERVERS = Path(__file__).with_name("mcp_servers.toml")
_ANSWER_S = 90.0
_HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "kimi-w4a8-proof", "version": "1"},
}


def tool_lists(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]], str]]:
    """Yield each server's name, its tools and why there are none; `folder` has the programs."""
    for name, server in tomllib.loads(SERVERS.read_text())["servers"].items():
        try:
            yield name, _tools(server, folder), ""
        except (OSError, ValueError, TimeoutError) as error:
            yield name, [], f"{type(error).__name__}: {error}"[:200]


def _tools(server: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    words = [word.replace("FOLDER", str(folder)) for word in server["command"]]
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **server.get("env", {})}
    with subprocess.Popen(
        words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder
    ) as process:
        try:
            _ask(process, 0, "initialize", _HELLO)
            _write(process, {"jsonrpc": "2.0", "method": "notifications/initialized"})
            tools: list[dict[str, Any]] = []
            page: dict[str, Any] = {}
            for number in range(1, 20):
                answer = _ask(process, number, "tools/list", page)
                tools += answer["tools"]
                if not answer.get("nextCursor"):
                    break
                page = {"cursor": answer["nextCursor"]}
            return tools
        finally:
            process.kill()


def _write(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def _ask(process: subprocess.Popen[bytes], number: int, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    _write(process, {"jsonrpc": "2.0", "id": number, "method": method, "params": params})
    assert process.stdout is not None
    end, rest = time.monotonic() + _ANSWER_S, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 2**20)
            if not chunk:
                raise ValueError(f"it ended with {process.wait(5)}")
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line) if line.startswith(b"{") else {}
                if message.get("id") == number and "method" not in message:
                    if "result" not in message:
                        raise ValueError(str(message.get("error"))[:200])
                    return dict(message["result"])
    raise TimeoutError(method)
