"""The table of docs/eval.md: which checks find each planted fault of a server.

    PYTHONPATH=tests python -m support.fault_table [FAULT ...]

A quarter of an hour. The test of a fault asks the check that is meant for it; this asks all of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_eagle3.engine.startup_check import FLOOR, measure
from kimi_w4a8_eagle3.eval import accuracy, exact, smoke, tasks
from kimi_w4a8_eagle3.eval.choice import Choice
from kimi_w4a8_eagle3.eval.harness import Protocol
from kimi_w4a8_eagle3.eval.prompts import prompts
from kimi_w4a8_eagle3.eval.tokens import Probe, Tokens

from .moe_faults import FAULTS
from .tiny_servers import started, tiny_launch, with_faults

SERVED = (
    "every draft accepted",
    "bonus token from the draft",
    "KV of a rejected token kept",
    "position off by one after a partial acceptance",
    "wrong page in a radix node",
    "stop string cut late",
    "hidden state of the wrong token",
)
PROBLEMS = 50
SILENT = Console(quiet=True)


def main(faults: list[str]) -> None:
    """Print a row for a server without a fault and one for each fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, named = tiny_launch(speculate=False), folder / "fault"
        named.touch()
        with contextmanager(started)(plain, folder) as server:
            asked, answers = requests(server)
        launch = tiny_launch(settings=("disable-radix-cache=false", f"env.KIMI_PLANTED={named}"))
        print("| fault | lossless --exact | smoke | canary | lm-eval |\n|---|---|---|---|---|")
        with contextmanager(with_faults)(launch, "support.wrong_answers", folder) as server:
            for fault in ("", *faults):
                named.write_text("")
                httpx.post(f"{server.base_url}/flush_cache").raise_for_status()
                named.write_text(fault)
                found = (same(server, asked, answers), gate(server, folder), canary(server), lm_eval(server, folder))
                print(f"| {' | '.join((fault or 'none', *found))} |", flush=True)


def requests(server: EngineServer) -> tuple[list[exact.Request], list[Tokens]]:
    """Two prompts of each kind, each with 48 tokens and again with a stop string of its own answer."""
    with Probe(server.base_url) as probe:
        greedy = {"temperature": 0.0, "max_new_tokens": 48}
        asked = [exact.Request("chat", probe.chat_ids(p.text, "kimi-k2.5-tiny"), greedy) for p in prompts(12)]
        texts = [exact.ask(probe, request).text for request in asked]
        stops = [text[len(text) // 2 :][:3] for text in texts]
        asked += [
            exact.Request("stop", request.ids, greedy | {"stop": stop})
            for request, stop in zip(asked, stops, strict=True)
        ]
        return asked, [exact.ask(probe, request) for request in asked]


def same(server: EngineServer, asked: list[exact.Request], answers: list[Tokens]) -> str:
    """Asked twice: what was answered first is in the prefix cache then."""
    with Probe(server.base_url) as probe:
        found = [answer for _ in range(2) for answer in probe.all(lambda request: exact.ask(probe, request), asked, 8)]
    differ = exact.differences(asked * 2, answers * 2, found, "EAGLE3", 8)
    return f"{len(differ)} of {len(found)} differ"


def gate(server: EngineServer, folder: Path) -> str:
    _, _, checks = smoke.run(Choice(base_url=server.base_url), smoke.Floors(problems=30), SILENT, folder)
    failed = "; ".join(f"{check.name}: {check.found}" for check in checks if not check.passed)
    return failed or f"passes, {checks[-1].name} {checks[-1].found}"


def canary(server: EngineServer) -> str:
    with EngineClient(server.base_url) as client:
        found = measure(client, 4)
    assert found is not None
    return f"{found.length:.2f}, {'found' if found.length <= FLOOR else 'passes'}"


def lm_eval(server: EngineServer, folder: Path) -> str:
    protocol = Protocol(tasks.TINY_MATH, True, 0, tasks.TINY_MATH.max_tokens, limit=PROBLEMS, concurrency=32)
    run = accuracy.run(Choice(base_url=server.base_url), protocol, accuracy.Options(runs=folder), SILENT)
    verdict = json.loads((run / accuracy.RESULT).read_text())["verdict"]
    return f"{verdict['accuracies'][0]['correct']} of {PROBLEMS} right, {verdict['state']}"


if __name__ == "__main__":
    main(sys.argv[1:] or [*SERVED, *FAULTS])
