"""Cost of hostile and of large requests to the other clients of the built-in model's server.

    python -m proof.admission lag             # how long each large request keeps the event loop busy
    python -m proof.admission hostile         # the TTFT of a healthy client, alone and beside hostile ones

Figures are worth something on an idle machine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import typer

from kimi_w4a8_eagle3.engine.process import EngineServer, die_with_parent, free_port
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_lab.accuracy.vendor_checks import JsonBody

_LINE = "The quick brown fox, jumped over 13 lazy dogs; and then (slowly) it went home.\n"
_TEXT = {"type": "text", "text": "x"}
_SIX = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(6)}}
_TOOLS = [{"type": "function", "function": {"name": f"f{index}", "parameters": _SIX}} for index in range(1018)]
_CHAT, MODEL = "/v1/chat/completions", "kimi-k2.5-tiny"
app = typer.Typer(add_completion=False, help=__doc__)


def _says(content: Any = "Tom has 3 apples and buys 4. How many?", messages: int = 1) -> JsonBody:
    return {"messages": [{"role": "user", "content": content}] * messages, "max_tokens": 1}


LARGE: dict[str, tuple[str, JsonBody]] = {
    "260,000 token ids": ("/v1/completions", {"prompt": [5] * 260_000, "max_tokens": 1}),
    "1 MB of text": (_CHAT, _says(_LINE * 13_000)),
    "4 MB of text": (_CHAT, _says(_LINE * 51_000)),
    "4 MB of text, counted": ("/v1/messages/count_tokens", _says(_LINE * 51_000)),
    "4 MB of text, tokenized": ("/v1/tokenize", {"prompt": _LINE * 51_000}),
    "512 prompts of 8 kB": ("/v1/completions", {"prompt": [_LINE * 100] * 512, "max_tokens": 1}),
    "10,000 messages": (_CHAT, _says("x" * 200, 10_000)),
    "16 messages of 4,000 parts": (_CHAT, _says([_TEXT] * 4000, 16)),
    "1,018 tools of 6 properties": (_CHAT, _says("x") | {"tools": _TOOLS}),
}


@contextmanager
def _server() -> Iterator[EngineServer]:
    """Serve the built-in model with Kimi's context."""
    launch = render(load_recipe("tiny"), [f"port={free_port()}", "context-length=262144"])
    environ = {**launch.env, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with (
        TemporaryDirectory() as folder,
        EngineServer(launch.argv, environ, launch.host, launch.port, Path(folder, "server.log")) as server,
    ):
        server.wait_ready(900)
        yield server


def _poll(url: str, pipe: Connection) -> None:
    """Ask without a pause for what the event loop alone answers, and send the longest time when asked to."""
    longest = 0.0
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
        while True:
            start = time.perf_counter()
            http.get("/v1/models")
            longest = max(longest, time.perf_counter() - start)
            if pipe.poll(0.002):
                pipe.recv()
                pipe.send(longest)
                longest = 0.0


@app.command()
def lag() -> None:
    """Send large requests, one after the other, and print how long another client waited meanwhile."""
    with _server() as server:
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=_poll, args=(server.base_url, theirs), daemon=True).start()
        print("| request | sent | status | answered in | another client waited |\n|---|---|---|---|---|")
        headers = {"content-type": "application/json"}
        # Leave a request after 40 s: a CPU prefills long prompts slowly.
        with httpx.Client(base_url=server.base_url, timeout=40, trust_env=False, headers=headers) as http:
            for name, (path, body) in {"a small chat": (_CHAT, _says("x")), **LARGE}.items():
                raw = json.dumps({"model": MODEL, **body}, ensure_ascii=False).encode()
                ours.send(True)
                ours.recv()
                start, status = time.perf_counter(), "left"
                with suppress(httpx.ReadTimeout):
                    status = str(http.post(path, content=raw).status_code)
                seconds = time.perf_counter() - start
                time.sleep(0.05)
                ours.send(True)
                waited_ms = ours.recv() * 1000
                print(f"| {name} | {len(raw):,} | {status} | {seconds:.2f} s | {waited_ms:.0f} ms |", flush=True)


async def _healthy(url: str, number: int) -> list[float]:
    """Return the seconds to the first line of streamed chats, one after the other."""
    body, seconds = {"model": MODEL, **_says(), "stream": True}, []
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        for _ in range(number):
            start = time.perf_counter()
            async with http.stream("POST", _CHAT, json=body) as answer:
                await anext(line async for line in answer.raise_for_status().aiter_lines() if line[:1] in "d{")
                seconds.append(time.perf_counter() - start)
            await asyncio.sleep(0.02)
    return seconds


def _attack(url: str, seed: int) -> None:
    """Send large requests and costly patterns without an end, and do not read the answers."""
    cases = [case for name, case in LARGE.items() if "text" not in name]
    patterns = [{"regex": ".*a.{60}"}, {"regex": "(([^a]*)+)*"}, {"regex": "[a-z]{1,400}" * 8}]
    die_with_parent()
    os.setsid()  # Linux shares cores among sessions first, and a niceness counts in one session: autogroups of sched(7)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    os.nice(19)  # where cores are few, what this client computes is not the engine's doing
    draw, number = random.Random(seed), 0
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        while True:
            path, body = draw.choice(cases)
            if (number := number + 1) % 2:
                path, body = "/v1/completions", {"prompt": f"{number}", "max_tokens": 4, **draw.choice(patterns)}
            with suppress(httpx.HTTPError):
                http.post(path, json={"model": MODEL, **body})


@app.command()
def hostile(
    number: int = typer.Option(300, min=10, help="Requests of the healthy client, alone and beside the others."),
    clients: int = typer.Option(1, min=1, help="Hostile clients."),
) -> None:
    """Print the 99th percentile of a healthy client's TTFT, alone and beside hostile clients."""
    with _server() as server:
        asyncio.run(_healthy(server.base_url, 8))
        alone = asyncio.run(_healthy(server.base_url, number))
        attackers = [multiprocessing.Process(target=_attack, args=(server.base_url, seed)) for seed in range(clients)]
        for attacker in attackers:
            attacker.start()
        try:
            beside = asyncio.run(_healthy(server.base_url, number))
        finally:
            for attacker in attackers:
                attacker.kill()
        for name, percent in (("median", 50), ("p99", 99)):
            one, other = (statistics.quantiles(times, n=100)[percent - 1] * 1000 for times in (alone, beside))
            print(
                f"{name} TTFT: {one:.0f} ms alone, {other:.0f} ms beside {clients} hostile clients ({other / one:.2f}x)"
            )


if __name__ == "__main__":
    app()
