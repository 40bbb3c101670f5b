"""Cost of the door, of collecting, and of large requests to the other clients of an engine.

    python -m proof.admission lag             # how long each large request keeps the event loop busy
    python -m proof.admission pairs           # plain chats with the door and without it; --of collecting: with that
    python -m proof.admission connections     # the engine's memory while 1,000 connections misbehave, and afterwards
    python -m proof.admission hostile         # the TTFT of a healthy client, alone and beside a hostile one

Each command starts the built-in model. Figures are worth something on an idle machine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import httpx
import psutil
import typer

from kimi_w4a8_eagle3.base.collection import VARIABLE, Consent
from kimi_w4a8_eagle3.engine.process import EngineServer, die_with_parent, free_port
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_lab.accuracy.vendor_checks import JsonBody
from kimi_w4a8_lab.draft.collected import summarized
from proof.fuzz.resources import NO_KERNEL_CACHE

CONTEXT = 262_144  # Kimi's
_LINE = "The quick brown fox, jumped over 13 lazy dogs; and then (slowly) it went home.\n"
_TEXT = {"type": "text", "text": "x"}
_CHAT = "/v1/chat/completions"
_WALL = "wall clock"
MODEL = "kimi-k2.5-tiny"
_LONG = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # the built-in model has 65,536
app = typer.Typer(add_completion=False, help=__doc__)


def _user(content: str | list[dict[str, str]]) -> JsonBody:
    return {"role": "user", "content": content}


def _says(
    content: str | list[dict[str, str]] = "Tom has 3 apples and buys 4. How many?", messages: int = 1
) -> JsonBody:
    return {"messages": [_user(content)] * messages, "max_tokens": 1}


def _tools(number: int, properties: int) -> JsonBody:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(properties)}}
    functions = ({"name": f"f{index}", "parameters": schema} for index in range(number))
    return {**_says("x"), "tools": [{"type": "function", "function": function} for function in functions]}


_COUNTED = "200 kB of text, counted"
LARGE: dict[str, tuple[str, JsonBody]] = {
    "260,000 token ids": ("/v1/completions", {"prompt": [5] * 260_000, "max_tokens": 1}),
    "1 MB of text": (_CHAT, _says(_LINE * 13_000)),
    "4 MB of text": (_CHAT, _says(_LINE * 51_000)),
    "4 MB of text, /v1/messages": ("/v1/messages", _says(_LINE * 51_000)),
    "4 MB of text, /v1/responses": ("/v1/responses", {"input": _LINE * 51_000, "max_output_tokens": 1}),
    "4 MB of text, /v1/completions": ("/v1/completions", {"prompt": _LINE * 51_000, "max_tokens": 1}),
    "4 MB of text, counted": ("/v1/messages/count_tokens", {"messages": [_user(_LINE * 51_000)]}),
    _COUNTED: ("/v1/messages/count_tokens", {"messages": [_user(_LINE * 2600)]}),
    "4 MB of text, tokenized": ("/v1/tokenize", {"prompt": _LINE * 51_000}),
    "1 MB of text, tokenized": ("/v1/tokenize", {"prompt": _LINE * 13_000}),
    "512 prompts of 8 kB": ("/v1/completions", {"prompt": [_LINE * 100] * 512, "max_tokens": 1}),
    "30 MB of emoji": (_CHAT, _says("😀" * 7_500_000)),
    "4,096 messages": (_CHAT, _says("x" * 200, 4096)),
    "10,000 messages": (_CHAT, _says("x" * 200, 10_000)),
    "4,096 messages of 7 parts": (_CHAT, _says([_TEXT] * 7, 4096)),
    "16 messages of 4,000 parts": (_CHAT, _says([_TEXT] * 4000, 16)),
    "815 tools of 6 properties": (_CHAT, _tools(815, 6)),
    "1,018 tools of 6 properties": (_CHAT, _tools(1018, 6)),
    "1,018 tools of 6 properties, once more": (_CHAT, _tools(1018, 6)),
}


@contextmanager
def _engine(*settings: str, **environ: str) -> Iterator[EngineServer]:
    launch = render(load_recipe("tiny"), [f"port={free_port()}", *settings])
    with TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with EngineServer(launch.argv, {**launch.env, **environ}, launch.host, launch.port, log) as server:
            server.wait_ready(900)
            yield server


def _poll(url: str, pipe: Connection) -> None:
    """Ask without a pause for what the event loop alone answers, and tell the longest time when asked to."""
    longest = 0.0
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
        while True:
            start = time.perf_counter()
            http.get("/v1/models")
            longest = max(longest, time.perf_counter() - start)
            if pipe.poll(0.002):
                if not pipe.recv():
                    return
                pipe.send(longest)
                longest = 0.0


@app.command()
def lag(
    only: str = typer.Option("", help="Send the cases whose names contain this."),
    leave_s: float = typer.Option(40.0, help="Leave a request after this long: a CPU prefills long prompts slowly."),
) -> None:
    """Send large requests, one after the other, and print how long another client waited meanwhile."""
    with _engine(f"context-length={CONTEXT}", **_LONG) as server:
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=_poll, args=(server.base_url, theirs), daemon=True).start()
        print("| request | sent | status | answered in | another client waited |\n|---|---|---|---|---|")
        cases = {"nothing": ("", {}), "a small chat": (_CHAT, _says("x")), **LARGE}
        json_type = {"content-type": "application/json"}
        with httpx.Client(base_url=server.base_url, timeout=leave_s, trust_env=False, headers=json_type) as http:
            for name, (path, body) in cases.items():
                if only not in name:
                    continue
                raw = json.dumps({"model": MODEL, **body}, ensure_ascii=False).encode()
                ours.send(True)
                ours.recv()
                start = time.perf_counter()
                answer = None
                with suppress(httpx.ReadTimeout):
                    answer = http.post(path, content=raw) if path else None
                time.sleep(0 if path else 2)
                seconds = time.perf_counter() - start
                time.sleep(0.05)
                ours.send(True)
                status, waited_ms = "left" if answer is None else answer.status_code, ours.recv() * 1000
                print(f"| {name} | {len(raw):,} | {status} | {seconds:.2f} s | {waited_ms:.0f} ms |", flush=True)
                if answer is not None and answer.status_code != 200:
                    print("  ", answer.text[:200])
        ours.send(False)


@app.command()
def pairs(
    of: Literal["door", "collecting", "nothing"] = typer.Option("door", help="Part that the second engine lacks."),
    requests: int = typer.Option(400, min=2, help="Pairs of single requests."),
    rounds: int = typer.Option(12, min=2, help="Pairs of rounds at full concurrency."),
    concurrency: int = typer.Option(40, min=1, help="Clients of a round."),
    tokens: int = typer.Option(8, min=1, help="Most tokens of an answer."),
) -> None:
    """Start an engine with a part and one without it; send plain chats to both in turn and compare."""
    body = {"model": MODEL, **_says(), "max_tokens": tokens, "temperature": 0}
    total = 5 * concurrency
    with TemporaryDirectory() as folder:
        Consent(share=1.0).write(Path(folder))
        collecting = {VARIABLE: folder} if of == "collecting" else {}
        with _engine(**collecting) as one, _engine(**{"KIMI_DOOR": "off"} if of == "door" else {}) as other:
            single = asyncio.run(_in_turn([one, other], body, requests, 1, 1))
            crowd = asyncio.run(_in_turn([one, other], body, rounds, concurrency, total))
        for _, count, _ in summarized(Path(folder)):
            print(f"{count} requests were stored; {1 + requests + (1 + rounds) * total} were sent, and 2 at the start")
    print(f"latency: {_shown([(a[_WALL] - b[_WALL]) * 1000 for a, b in single])} ms more with {of}")
    for process in sorted(crowd[0][1].keys() - {_WALL}):
        more = [(a[process] - b[process]) / total * 1000 for a, b in crowd]
        without = statistics.fmean(b[process] for _, b in crowd) / total * 1000
        print(f"CPU time of {process}, a request: {without:.2f} ms, {_shown(more, statistics.fmean)} more with {of}")
    print(f"throughput: {_shown([(1 - b[_WALL] / a[_WALL]) * 100 for a, b in crowd])} % less with {of}")


async def _in_turn(
    servers: Sequence[EngineServer], body: JsonBody, pairs: int, clients: int, total: int
) -> list[list[dict[str, float]]]:
    """Return the seconds, and CPU seconds by process, of each engine by pair; the order changes from pair to pair."""
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=httpx.Limits(max_connections=clients)) as http:

        async def one(server: EngineServer) -> dict[str, float]:
            spent = partial(_by_name, server.pid, lambda process: sum(process.cpu_times()[:2]))  # not its children's
            waiting, before, began = iter(range(total)), spent(), time.perf_counter()

            async def client() -> None:
                for _ in waiting:
                    (await http.post(server.base_url + _CHAT, json=body)).raise_for_status()

            await asyncio.gather(*(client() for _ in range(clients)))
            wall = time.perf_counter() - began
            await asyncio.sleep(0.6 if total > 1 else 0)  # collected requests are written by then
            return {_WALL: wall, **{name: used - before.get(name, 0.0) for name, used in spent().items()}}

        await asyncio.gather(*map(one, servers))  # connections and caches
        found = []
        for number in range(pairs):
            spent = [await one(server) for server in servers[:: 1 if number % 2 else -1]]
            found.append(spent[:: 1 if number % 2 else -1])
        return found


def _shown(values: Sequence[float], middle: Callable[[Sequence[float]], float] = statistics.median) -> str:
    """Return the median or another middle of values with its 95% bounds, by bootstrap."""
    draw = random.Random(1)
    drawn = sorted(middle(draw.choices(values, k=len(values))) for _ in range(2000))
    return f"{middle(values):+.3f} (95%: {drawn[50]:+.3f} to {drawn[1949]:+.3f})"


def _by_name(pid: int, figure: Callable[[psutil.Process], float]) -> dict[str, float]:
    """Return a figure of an engine's processes, by their names."""
    found = defaultdict[str, float](float)
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess, IndexError):  # a process that ended, or ends, has no command
            name = "HTTP server" if process.pid == pid else process.cmdline()[0].rpartition("/")[2]
            found[name] += figure(process)
    return found


_memory = partial(_by_name, figure=lambda process: process.memory_full_info().pss / 2**20)  # what forks share, once


def _head(length: int) -> bytes:
    lines = (f"POST {_CHAT} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


async def _misbehave(kind: int, port: int) -> None:
    """Do one of six things that no client should: at its end the connection is reset."""
    chat = json.dumps({"model": MODEL, **_says("Tom has 3 apples."), "stream": True, "max_tokens": 200}).encode()
    with suppress(OSError, asyncio.IncompleteReadError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            if kind == 1:  # half a header
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nX: " + b"x" * 30_000)
            elif kind == 2:  # 30 MB of a body that does not end
                writer.write(_head(2**25) + b" " * 30_000_000)
            elif kind == 3:  # a byte of the body every tenth of a second
                writer.write(_head(len(chat)))
                for byte in chat:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.1)
            elif kind == 4:  # a stream that is not read
                writer.write(_head(len(chat)) + chat)
            elif kind == 5:  # twenty requests at once, and gone
                writer.write((_head(len(chat)) + chat) * 20)
            await asyncio.wait_for(writer.drain(), 60)
            await asyncio.sleep(60 if kind != 5 else 1)
        finally:
            writer.transport.abort()


@app.command()
def connections(
    number: int = typer.Option(1000, min=6, help="Connections at a time."),
    rounds: int = typer.Option(2, min=1, help="Crowds, one after the other: what a leak holds grows with each."),
) -> None:
    """Open connections that misbehave in six ways, and print the memory of the engine's processes."""
    with _engine(NO_KERNEL_CACHE) as server:
        asyncio.run(_plain(server.base_url, 8))
        _tell("at the start", _memory(server.pid))

        async def crowd() -> float:
            most, tasks = 0.0, [asyncio.create_task(_misbehave(kind % 6, server.port)) for kind in range(number)]
            while not all(task.done() for task in tasks):
                most = max(most, sum((await asyncio.to_thread(_memory, server.pid)).values()))
                await asyncio.sleep(0.5)
            return most

        for crowds in range(1, rounds + 1):
            most = asyncio.run(crowd())
            time.sleep(15)
            asyncio.run(_plain(server.base_url, 8))
            _tell(f"after crowd {crowds}, with {most:.0f} MiB at most", _memory(server.pid))


def _tell(when: str, held: dict[str, float]) -> None:
    parts = ", ".join(f"{name} {size:.0f}" for name, size in held.items())
    print(f"{when}: {sum(held.values()):.0f} MiB ({parts})", flush=True)


async def _plain(url: str, number: int, grammar: str = "", case: str = "") -> list[float]:
    """Return the seconds to the first line of chats, each with a new grammar of this name, or of a case of `LARGE`."""
    path, sent = LARGE[case] if case else (_CHAT, {**_says(), "stream": True})
    body, seconds = {"model": MODEL, **sent}, []
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        for index in range(number):
            schema = {"type": "object", "properties": {f"{grammar}{index}": {"type": "integer"}}}
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            start = time.perf_counter()
            asked = body | {"response_format": wanted} if grammar else body
            async with http.stream("POST", path, json=asked) as answer:
                await anext(line async for line in answer.raise_for_status().aiter_lines() if line[:1] in "d{")
                seconds.append(time.perf_counter() - start)
            await asyncio.sleep(2 if case else 0.02)  # as an agent does between its turns
    return seconds


def _attack(url: str, seed: int) -> None:
    """Send what the corpus and `LARGE` hold, without an end, and do not read the answers."""
    cases = [case for name, case in LARGE.items() if "text" not in name]
    grammars = [{"regex": ".*a.{60}"}, {"regex": "(([^a]*)+)*"}, {"regex": "[a-z]{1,400}" * 8}]
    die_with_parent()
    os.setsid()  # Linux shares cores among sessions first, and a niceness counts in one session: autogroups of sched(7)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    os.nice(19)  # where cores are few, what this client computes is not the engine's doing
    draw = random.Random(seed)
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        for number in range(10**9):
            path, body = draw.choice(cases)
            if number % 2:
                path, body = "/v1/completions", {"prompt": f"{number}", "max_tokens": 4, **draw.choice(grammars)}
            with suppress(httpx.HTTPError):
                http.post(path, json={"model": MODEL, **body})


@app.command()
def hostile(
    number: int = typer.Option(300, min=10, help="Requests of the healthy client, alone and beside the other."),
    clients: int = typer.Option(1, min=1, help="Hostile clients."),
) -> None:
    """Print the 99th percentile of a healthy client's TTFT, alone and beside hostile clients."""
    with _engine(f"context-length={CONTEXT}", **_LONG) as server:
        asyncio.run(_plain(server.base_url, 8))
        idle = asyncio.run(_plain(server.base_url, number))
        asyncio.run(_plain(server.base_url, 1, "first"))
        counted = [asyncio.run(_plain(server.base_url, 10, case=_COUNTED))]
        attackers = [multiprocessing.Process(target=_attack, args=(server.base_url, seed)) for seed in range(clients)]
        for attacker in attackers:
            attacker.start()
        try:
            beside = asyncio.run(_plain(server.base_url, number))
            new = asyncio.run(_plain(server.base_url, 20, "beside"))
            counted.append(asyncio.run(_plain(server.base_url, 10, case=_COUNTED)))
        finally:
            for attacker in attackers:
                attacker.kill()
        print(f"20 new grammars beside {clients} hostile clients: the slowest after {max(new):.2f} s; 2 s allowed")
        print("{}: the slowest of 10 after {:.2f} s alone, {:.2f} s beside".format(_COUNTED, *map(max, counted)))
        for name, percent in (("median", 50), ("p99", 99)):
            alone_ms, beside_ms = (statistics.quantiles(one, n=100)[percent - 1] * 1000 for one in (idle, beside))
            times = beside_ms / alone_ms
            print(f"{name} TTFT: {alone_ms:.0f} ms alone, {beside_ms:.0f} ms beside ({times:.2f}x; 2x allowed for p99)")


if __name__ == "__main__":
    app()
