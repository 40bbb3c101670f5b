"""The simulation of traffic against the truth: the built-in model on a CPU engine answers ten traces.

    python -m kimi_w4a8_eagle3.sglang_plugin.run_module proof.traffic_truth [--runs N]

Each engine, with EAGLE3 and without, with prefix cache and without, first answers requests that fit the six
coefficients of `LinearStepTime` and the accept length. Then it answers conversations that did not fit them, and the
simulation answers the same. Prompts are token ids, so hits are comparable token by token. Times need an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.bench.trace import Segment, Trace, TraceSession, Turn
from kimi_w4a8_eagle3.fleet.target import Target
from kimi_w4a8_eagle3.predict.step_time import LinearStepTime
from kimi_w4a8_eagle3.predict.traffic import EngineSettings, Traffic

POOL, CHUNK, MAX_RUNNING, USERS = 16384, 1024, 8, 3
SETTINGS = (f"max-total-tokens={POOL}", f"chunked-prefill-size={CHUNK}", f"max-running-requests={MAX_RUNNING}")
FIGURES = ("hit rate", "TTFT p50", "TTFT p95", "TPOT p50")
_VOCABULARY = range(20, 500)  # ordinary tokens of the built-in model


@dataclass(frozen=True)
class Answered:
    """One measured request: seconds to the first token and for each later one, and tokens."""

    prompt: int
    cached: int
    output: int
    verifies: int
    ttft_s: float
    tpot_s: float


@dataclass
class Client:
    """Client of one engine that sends token ids and keeps the text behind every content."""

    http: httpx.AsyncClient
    texts: dict[str, list[int]] = field(default_factory=dict)

    async def ask(self, turn: Turn) -> Answered:
        ids = [one for segment in turn.prompt for one in self.text(segment)]
        sampling = {"max_new_tokens": turn.output_tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        began, first, last = time.perf_counter(), 0.0, {}
        async with self.http.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first, last = first or time.perf_counter(), json.loads(line[6:])
        if "meta_info" not in last:
            raise KimiError(f"the engine refused a request: {last}", where=f"{len(ids)} tokens")
        end, meta = time.perf_counter(), last["meta_info"]
        if turn.answer:
            self.texts[turn.answer] = last["output_ids"]
        output = meta["completion_tokens"]
        verifies = meta.get("spec_verify_ct") or output - 1
        later = (end - first) / max(output - 1, 1)
        return Answered(meta["prompt_tokens"], meta["cached_tokens"], output, verifies, first - began, later)

    def text(self, segment: Segment) -> list[int]:
        """Return the tokens of a content; an answer's are those that the engine gave."""
        if segment.content not in self.texts:
            self.texts[segment.content] = random.Random(segment.content).choices(_VOCABULARY, k=segment.tokens)
        return self.texts[segment.content]

    async def session(self, session: TraceSession) -> list[Answered]:
        found = []
        for turn in session.turns:
            await asyncio.sleep(turn.think_s)
            found.append(await self.ask(turn))
        return found

    async def replay(self, trace: Trace) -> list[Answered]:
        """Send the sessions, `USERS` at once."""
        waiting, found = list(trace.sessions), list[Answered]()

        async def user() -> None:
            while waiting:
                found.extend(await self.session(waiting.pop(0)))

        await asyncio.gather(*(user() for _ in range(USERS)))
        return found


def conversations(seed: int) -> Trace:
    """Return six conversations of three turns behind one system prompt."""
    draw, sessions = random.Random(seed), []
    for user in range(6):
        prompt: tuple[Segment, ...] = (Segment(f"system {seed}", 96),)
        turns = []
        for at in range(3):
            name = f"{seed}.{user}.{at}"
            prompt = (*prompt, Segment(f"question {name}", draw.randint(20, 400)))
            output = draw.randint(16, 64)
            turns.append(Turn(prompt, output, draw.uniform(0, 0.3), f"answer {name}"))
            prompt = (*prompt, Segment(f"answer {name}", output))
        sessions.append(TraceSession(f"{seed}.{user}", tuple(turns)))
    return Trace(f"seed {seed}", "run", tuple(sessions), USERS)


async def fit(client: Client) -> tuple[LinearStepTime, float]:
    """Return step times and the accept length of requests that no trace has."""
    prefills, decodes, outputs, verifies = [], [], 0, 0
    for again in range(3):
        for new in (32, 128, 512, 1024):
            base = Segment(f"fit {again} {new}", 512)
            await client.ask(Turn((base,), 2))
            for prompt in ((Segment(f"cold {again} {new}", new),), (base, Segment(f"warm {again} {new}", new))):
                found = await client.ask(Turn(prompt, 2))
                past = found.cached
                tokens = found.prompt - past
                if tokens <= CHUNK:
                    prefills.append((1.0, tokens, tokens * (past + tokens / 2), found.ttft_s))
    for count in (1, 2, 3):
        for length in (64, 256, 768):
            turns = [Turn((Segment(f"decode {count} {length} {at}", length),), 48) for at in range(count)]
            for one in await asyncio.gather(*map(client.ask, turns)):
                step = one.tpot_s * (one.output - 1) / one.verifies
                decodes.append((1.0, count, count * (length + 24), step))
                outputs, verifies = outputs + one.output - 1, verifies + one.verifies
    coefficients = [_least(np.array(rows)) for rows in (prefills, decodes)]
    return LinearStepTime(*coefficients[0], *coefficients[1]), outputs / verifies


def _least(rows: np.ndarray) -> list[float]:
    """Return coefficients, none below zero, that fit the last column by relative error."""
    from scipy.optimize import nnls

    return [float(value) for value in nnls(rows[:, :-1] / rows[:, -1:], np.ones(len(rows)))[0]]


def simulated(trace: Trace, time_: LinearStepTime, accept: float, cache: bool, eagle: bool) -> list[Answered]:
    """Simulate a trace on the same engine."""
    settings = EngineSettings(1, 1, POOL, CHUNK, MAX_RUNNING, 1, accept, cache, eagle)
    found = Traffic(trace, settings, time_, USERS, 1e6, spread=False).run()
    return [
        Answered(one.turn.prompt_tokens, one.cached, one.turn.output_tokens, 0, one.ttft_s, one.tpot_s) for one in found
    ]


def figures(found: Sequence[Answered]) -> list[float]:
    """Return `FIGURES`; times in ms."""
    ttft, tpot = ([getattr(one, name) * 1000 for one in found] for name in ("ttft_s", "tpot_s"))
    hits = sum(one.cached for one in found) / sum(one.prompt for one in found)
    return [hits, *map(float, np.percentile(ttft, (50, 95))), float(np.median(tpot))]


async def _measure(base_url: str, traces: Sequence[Trace]) -> tuple[LinearStepTime, float, list[list[Answered]]]:
    async with httpx.AsyncClient(base_url=base_url, timeout=300) as http:
        client = Client(http)
        steps, accept = await fit(client)
        answered = []
        for trace in traces:
            (await http.post("/flush_cache")).raise_for_status()
            answered.append(await client.replay(trace))
        return steps, accept, answered


def main(runs: int) -> int:
    """Measure and simulate every engine; return 1 if a figure is further off than 10 % in the mean."""
    traces, worst = [conversations(seed) for seed in range(runs)], 0.0
    for recipe in ("tiny", "tiny:plain"):
        for cache in (True, False):
            target = Target(recipe=recipe, settings=(*SETTINGS, f"disable-radix-cache={str(not cache).lower()}"))
            with TemporaryDirectory() as name, target.running(Path(name) / "log", print) as server:
                steps, accept, measured = asyncio.run(_measure(server.base_url, traces))
            print(f"{recipe}, prefix cache {'on' if cache else 'off'}: accept length {accept:.2f}, {steps}")
            errors = []
            for trace, found in zip(traces, measured, strict=True):
                true, model = figures(found), figures(simulated(trace, steps, accept, cache, recipe == "tiny"))
                errors.append(
                    [0.0 if a == b else abs(b / a - 1) if a else 1.0 for a, b in zip(true, model, strict=True)]
                )
                shown = (f"{what} {a:.3g} {b:.3g}" for what, a, b in zip(FIGURES, true, model, strict=True))
                print(f"  {trace.name}, measured and simulated: {', '.join(shown)}", flush=True)
            mean = np.mean(errors, axis=0)
            print(
                "  mean error: " + ", ".join(f"{what} {error:.1%}" for what, error in zip(FIGURES, mean, strict=True))
            )
            worst = max(worst, float(mean.max()))
    return int(worst > 0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="held-out traces")
    sys.exit(main(parser.parse_args().runs))
