"""The tables of docs/perf/answers.md: which checks find each planted fault of a server.

    PYTHONPATH=tests python -m support.fault_table [--gpu [--full]] [FAULT ...]

A quarter of an hour each. The test of a fault asks the check that is meant for it; this asks all of them. With --gpu it
asks those that need no equal bits, while both servers round every MoE output at random, as a GPU's kernels do; with
--full in the size that `kimi-w4a8 eval lossless` has by default, which takes eight minutes a fault.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_eagle3.engine.startup_check import FLOOR, acceptance_of, ask
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.layer_check import require_layer
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_lab.accuracy import accuracy, lossless, smoke, tasks
from kimi_w4a8_lab.accuracy.evaluation import RunOptions
from kimi_w4a8_lab.accuracy.prompts import prompts
from kimi_w4a8_lab.accuracy.tasks import Protocol
from kimi_w4a8_lab.accuracy.tokens import TokenClient, Tokens
from kimi_w4a8_lab.base.experiment import RESULT
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.kernels.agreement import agreements
from kimi_w4a8_lab.kernels.tile_search import random_layer
from kimi_w4a8_laptop import exact

from .moe_faults import FAULTS
from .tiny_servers import started, tiny_launch, with_faults

SERVED = (
    "every draft accepted",
    "draft accepted within 0.2 nat",
    "draft accepted within 1.0 nat",
    "bonus token from the draft",
    "KV of a rejected token kept",
    "position off by one after a partial acceptance",
    "wrong page in a radix node",
    "stop string cut late",
    "hidden state of the wrong token",
    "one draw for all requests",
    "noise of the position before",
    "penalties of the step before",
    "draft accepted without equality",
)
PROBLEMS = 50
FULL = lossless.LosslessPlan(samples=0)
PLAN = FULL if "--full" in sys.argv else replace(FULL, prompts=12, max_tokens=48)
SHAPE = MoeShape(num_experts=16, hidden=512, inter=128, top_k=4)
ROUNDING = " and rounding"  # support.wrong_answers: a fault with it, or alone
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


def on_gpus(faults: list[str]) -> None:
    """Print the same for the checks that a GPU can run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = [folder / "plain", folder / "eagle3"]
        for side in sides:
            side.mkdir()
            (side / "fault").write_text("")
        plain, drafts = (f"env.KIMI_PLANTED={side / 'fault'}" for side in sides)
        launches = tiny_launch(False, (plain,)), tiny_launch(settings=("disable-radix-cache=false", drafts))
        print("| fault | lossless | kernels | load check |\n|---|---|---|---|")
        with (
            contextmanager(with_faults)(launches[0], "support.wrong_answers", sides[0]) as reference,
            contextmanager(with_faults)(launches[1], "support.wrong_answers", sides[1]) as server,
        ):
            (sides[0] / "fault").write_text(ROUNDING)
            for fault in ("", *faults):
                (sides[1] / "fault").write_text("")
                httpx.post(f"{server.base_url}/flush_cache").raise_for_status()
                (sides[1] / "fault").write_text(fault + ROUNDING)
                # a fault of a kernel is in both servers
                compared = "-" if fault in FAULTS else against_prefill(reference, server, folder)
                found = compared, kernels(fault), load_check(fault)
                print(f"| {' | '.join((fault or 'none', *found))} |", flush=True)


def against_prefill(reference: EngineServer, server: EngineServer, folder: Path) -> str:
    choices = (Target(base_url=engine.base_url) for engine in (reference, server))
    _, report = lossless.run(*choices, replace(PLAN, runs=folder), SILENT)
    match = report.prefill
    apart = "; ".join(f"{m.further} to {m.nearer}, {m.beyond} beyond, p {m.p:.1g}" for m in match.measures)
    bugs = sum(divergence.gap is None for divergence in report.divergences)
    parted = f"{len(report.divergences)} parted, {bugs} of them bugs"
    drawn = "; ".join(map(str, report.matches[1:]))
    late = next((reason for reason in report.reasons if "stop string" in reason), "")
    return f"{report.state}: {match.not_best} of {match.tokens} not the best; {apart}; {parted}; {late}; {drawn}"


class Planted(ReferenceBackend):
    """A backend with one of the faults of a kernel."""

    def __init__(self, fault: str) -> None:
        self.fault = FAULTS.get(fault)

    def forward(self, *call: Any) -> torch.Tensor:
        return self.fault(super().forward, *call) if self.fault else super().forward(*call)


def kernels(fault: str) -> str:
    """The stage of `kimi-w4a8 accept`."""
    try:
        list(agreements(Planted(fault), SHAPE, [8, 160], torch.device("cpu")))
    except KimiError as error:
        return error.what.partition(", ")[2][:60]
    return "passes"


def load_check(fault: str) -> str:
    """Result of the check of a layer while it loads."""
    weights, backend = random_layer(SHAPE, torch.device("cpu")), Planted(fault)
    try:
        require_layer("layer", backend, backend.prepare(weights), weights)
    except KimiError as error:
        return error.what.rpartition(": ")[2]
    return "passes"


def requests(server: EngineServer) -> tuple[list[exact.ExactRequest], list[Tokens]]:
    """Two prompts of each kind, each with 48 tokens and again with a stop string of its own answer."""
    with TokenClient(server.base_url) as probe:
        greedy = {"temperature": 0.0, "max_new_tokens": 48}
        asked = [exact.ExactRequest("chat", probe.chat_ids(p.text, "kimi-k2.5-tiny"), greedy) for p in prompts(12)]
        texts = [exact.ask(probe, request).text for request in asked]
        stops = [text[len(text) // 2 :][:3] for text in texts]
        asked += [
            exact.ExactRequest("stop", request.ids, greedy | {"stop": stop})
            for request, stop in zip(asked, stops, strict=True)
        ]
        return asked, [exact.ask(probe, request) for request in asked]


def same(server: EngineServer, asked: list[exact.ExactRequest], answers: list[Tokens]) -> str:
    """Asked twice: what was answered first is in the prefix cache then."""
    with TokenClient(server.base_url) as probe:
        found = [answer for _ in range(2) for answer in probe.all(lambda request: exact.ask(probe, request), asked, 8)]
    differ = exact.differences(asked * 2, answers * 2, found, "EAGLE3", 8)
    return f"{len(differ)} of {len(found)} differ"


def gate(server: EngineServer, folder: Path) -> str:
    _, _, checks = smoke.run(Target(base_url=server.base_url), smoke.Floors(problems=30), SILENT, folder)
    failed = "; ".join(f"{check.name}: {check.found}" for check in checks if not check.passed)
    return failed or f"passes, {checks[-1].name} {checks[-1].found}"


def canary(server: EngineServer) -> str:
    with EngineClient(server.base_url) as client:
        found = acceptance_of(ask(client, 1), 4)
    assert found is not None
    return f"{found.length:.2f}, {'found' if found.length <= FLOOR else 'passes'}"


def lm_eval(server: EngineServer, folder: Path) -> str:
    protocol = Protocol(tasks.TINY_MATH, True, 0, tasks.TINY_MATH.max_tokens, limit=PROBLEMS, concurrency=32)
    run = accuracy.run(Target(base_url=server.base_url), protocol, RunOptions(runs=folder), SILENT)
    verdict = json.loads((run / RESULT).read_text())["verdict"]
    return f"{verdict['accuracies'][0]['correct']} of {PROBLEMS} right, {verdict['state']}"


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if not word.startswith("--")] or [*SERVED, *FAULTS]
    on_gpus(named) if "--gpu" in sys.argv else main(named)
