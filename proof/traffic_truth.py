"""The simulation of traffic against the truth: the built-in model on CPU engines answers ten traces.

    python -m kimi_w4a8_eagle3.sglang_plugin.run_module proof.traffic_truth [ENGINE...] [--answers FOLDER]

Each engine answers ten traces several times, and the simulation answers the same. Between them it answers others that
fit the coefficients of `LinearStepTime`, the accept length and the times of requests outside of the scheduler. SGLang's
own clocks in every answer say when its prefill began and ended. Prompts are token ids, so hits are comparable token by
token. Times need an idle machine: a trace is sent again while other processes take more than --others of a core. The
program also prints by how much the engine differs from itself, because no simulation can be closer than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import psutil

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.predict.layouts import EngineSettings
from kimi_w4a8_lab.predict.traffic import Traffic
from kimi_w4a8_lab.speed.trace import Segment, Trace, TraceSession, Turn

from .linear_step_time import CHUNK, Answered, Fitted, fit
from .load.served import ServedFleet

POOL, MAX_RUNNING, USERS = 16384, 8, 3
ADMIN_KEY = "only-for-this-proof"
FIGURES = ("hit rate", "TTFT p50", "TTFT p95", "TPOT p50")
FIT = 1000  # first seed of the traces that fit; one comes before every other trace that is compared
GOAL, TRIES = 0.10, 3
_VOCABULARY = range(20, 500)  # ordinary tokens of the built-in model


@dataclass(frozen=True)
class EngineUnderTest:
    """One row of the comparison: engines of a recipe, behind a router if there are several."""

    name: str
    recipe: str
    cache: bool = True
    replicas: int = 1

    @property
    def settings(self) -> tuple[str, ...]:
        # On a CPU, SGLang has no overlap schedule with EAGLE3. Without EAGLE3 it has the loop, but a step blocks the
        # loop, so every result would come one step late. On a GPU it does not.
        return (
            f"max-total-tokens={POOL}",
            f"chunked-prefill-size={CHUNK}",
            f"max-running-requests={MAX_RUNNING}",
            f"disable-radix-cache={str(not self.cache).lower()}",
            "disable-overlap-schedule=true",
        )

    @contextmanager
    def running(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the address for clients, and those of the engines."""
        with TemporaryDirectory(prefix="kimi-truth-") as name:
            if self.replicas == 1:
                target = Target(recipe=self.recipe, settings=self.settings)
                with target.running(Path(name) / "log", lambda line: None) as server:
                    yield server.base_url, [server.base_url]
                return
            settings = (*self.settings, f"env.KIMI_ADMIN_KEY={ADMIN_KEY}")  # opens /flush_cache behind a router
            words = [word for setting in settings for word in ("--set", setting)]
            with ServedFleet(Path(name), self.replicas, words, self.recipe) as fleet:
                fleet.wait_whole()
                yield fleet.base_url, [fleet.replica_url(number) for number in range(self.replicas)]


ENGINES = (
    EngineUnderTest("eagle3", "tiny"),
    EngineUnderTest("eagle3-no-cache", "tiny", cache=False),
    EngineUnderTest("plain", "tiny:plain"),
    EngineUnderTest("plain-no-cache", "tiny:plain", cache=False),
    EngineUnderTest("two-eagle3", "tiny", replicas=2),
    EngineUnderTest("two-plain", "tiny:plain", replicas=2),
)


@dataclass
class TokenIdClient:
    """Client of one address that sends token ids and keeps the text behind every content."""

    http: httpx.AsyncClient
    texts: dict[str, list[int]] = field(default_factory=dict)

    async def ask(self, turn: Turn) -> Answered:
        ids = [one for segment in turn.prompt for one in self.text(segment)]
        sampling = {"max_new_tokens": turn.output_tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        sent, first, last = time.time(), 0.0, {}
        async with self.http.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first, last = first or time.time(), json.loads(line[6:])
        if "meta_info" not in last:
            raise KimiError(f"the engine refused a request: {last}", where=f"{len(ids)} tokens")
        end, meta = time.time(), last["meta_info"]
        if turn.answer:
            self.texts[turn.answer] = last["output_ids"]
        tokens = meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]
        verifies = meta.get("spec_verify_ct") or tokens[2] - 1
        began, prefilled = meta["forward_entry_time"], meta["prefill_finished_time"]
        return Answered(*tokens, verifies, sent, meta["api_server_dispatch_finish_ts"], began, prefilled, first, end)

    def text(self, segment: Segment) -> list[int]:
        """Return the tokens of a content; an answer's are those that the engine gave."""
        if segment.content not in self.texts:
            self.texts[segment.content] = random.Random(segment.content).choices(_VOCABULARY, k=segment.tokens)
        return self.texts[segment.content]

    async def replay(self, trace: Trace) -> list[Answered]:
        """Send the sessions, as many at once as the trace has users."""
        waiting, found = list(trace.sessions), list[Answered]()

        async def user() -> None:
            while waiting:
                for turn in waiting.pop(0).turns:
                    await asyncio.sleep(turn.think_s)
                    found.append(await self.ask(turn))

        await asyncio.gather(*(user() for _ in range(trace.users or 1)))
        return found


def conversations(seed: int, users: int = USERS) -> Trace:
    """Return twelve conversations of three turns behind one system prompt."""
    draw, sessions = random.Random(seed), []
    for user in range(12):
        prompt: tuple[Segment, ...] = (Segment(f"system {seed}", 96),)
        turns = []
        for at in range(3):
            name = f"{seed}.{user}.{at}"
            prompt = (*prompt, Segment(f"question {name}", draw.randint(20, 400)))
            output = draw.randint(16, 64)
            turns.append(Turn(prompt, output, draw.uniform(0, 0.3), f"answer {name}"))
            prompt = (*prompt, Segment(f"answer {name}", output))
        sessions.append(TraceSession(f"{seed}.{user}", tuple(turns)))
    return Trace(f"seed {seed}", "run", tuple(sessions), users)


Row = tuple[int, int, float, float]  # prompt and cached tokens, TTFT and TPOT in seconds


def figures(found: Sequence[Row]) -> list[float]:
    """Return `FIGURES`; times in ms."""
    prompts, cached, ttft, tpot = np.array(found).T
    return [float(cached.sum() / prompts.sum()), *np.percentile(ttft, (50, 95)) * 1000, float(np.median(tpot)) * 1000]


def measured(one: Answered) -> Row:
    return one.prompt, one.cached, one.first - one.sent, one.tpot_s


def simulated(trace: Trace, fitted: Fitted, engine: EngineUnderTest, seed: int) -> list[Row]:
    """Simulate a trace on the same engines; seed: of the times outside of the scheduler."""
    settings = EngineSettings(
        engines=engine.replicas,
        pool=POOL,
        chunk=CHUNK,
        max_running=MAX_RUNNING,
        grain=1,
        accept_length=fitted.accept,
        prefix_cache=engine.cache,
        eagle=engine.recipe == "tiny",
        outside_s=fitted.outside_s,
        seed=seed,
    )
    found = Traffic(trace, settings, fitted.steps, trace.users, 1e6, lockstep=True).run()
    return [(one.turn.prompt_tokens, one.cached, one.ttft_s, one.tpot_s) for one in found]


@asynccontextmanager
async def clients(urls: Sequence[str]) -> AsyncIterator[list[TokenIdClient]]:
    """Yield a client for each address."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    opened = [httpx.AsyncClient(base_url=url, headers=headers, timeout=300) for url in urls]
    try:
        yield [TokenIdClient(http) for http in opened]
    finally:
        await asyncio.gather(*(http.aclose() for http in opened))


def _others_s() -> float:
    """Return the CPU seconds of all processes that are not of this proof."""
    whole = psutil.cpu_times()
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    own = 0.0
    for process in family:
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += used.user + used.system
    return float(whole.user + whole.nice + whole.system) - own


async def _answers(
    asked: Sequence[TokenIdClient], flushed: Sequence[TokenIdClient], traces: Sequence[Trace], most: float
) -> tuple[list[list[Answered]], float]:
    """Replay a trace with every client, again while others are busy; return the answers and the cores of others."""
    for _ in range(TRIES):
        for client in flushed:
            while (answer := await client.http.post("/flush_cache")).status_code == HTTPStatus.BAD_REQUEST:
                await asyncio.sleep(0.05)  # until the last request has left
            answer.raise_for_status()
        began, before = time.monotonic(), _others_s()
        found = await asyncio.gather(*(client.replay(trace) for client, trace in zip(asked, traces, strict=True)))
        others = (_others_s() - before) / (time.monotonic() - began)
        if others <= most:
            break
    return found, others


@dataclass
class Recording:
    """Answers of one engine. trained: of the traces that fit, by replica. held_out: by trace and repeat."""

    trained: list[list[Answered]]
    held_out: list[list[list[Answered]]]

    @classmethod
    def read(cls, path: Path) -> Recording:
        content = json.loads(path.read_text())
        trained = [[Answered(**row) for row in rows] for rows in content["trained"]]
        return cls(trained, [[[Answered(**row) for row in one] for one in two] for two in content["held_out"]])


async def _record(
    engine: EngineUnderTest, url: str, replicas: list[str], runs: int, repeats: int, most: float
) -> Recording:
    async with clients([url, *replicas]) as (client, *singles):
        found = Recording([[] for _ in singles], [[] for _ in range(runs)])
        for number in range(repeats * runs):
            repeat, seed = divmod(number, runs)
            if seed % 2 == 0:  # every engine is as busy as in a comparison, with its share of the users
                first = FIT + 1000 * repeat + 10 * seed
                traces = [conversations(first + at) for at in range(len(singles))]
                for kept, answers in zip(
                    found.trained, (await _answers(singles, singles, traces, most))[0], strict=True
                ):
                    kept += answers
            trace = conversations(seed, USERS * engine.replicas)
            (answers,), others = await _answers([client], singles, [trace], most)
            found.held_out[seed].append(answers)
            print(f"{engine.name}: {trace.name}, repeat {repeat}, others {others:.0%}", file=sys.stderr, flush=True)
    return found


def _compare(engine: EngineUnderTest, found: Recording) -> np.ndarray:
    """Print the figures of a recording and of its simulation; return the mean errors of the traces."""
    fitted = fit(found.trained)
    print(f"{engine.name}: accept length {fitted.accept:.2f}, outside {np.median(fitted.outside_s) * 1000:.1f} ms")
    print(f"  {fitted.steps}", flush=True)
    errors, changes = [], []
    every: list[list[list[Row]]] = []
    for seed, repeats in enumerate(found.held_out):
        trace = conversations(seed, USERS * engine.replicas)
        true = [[measured(one) for one in answers] for answers in repeats]
        model = [simulated(trace, fitted, engine, at) for at in range(len(repeats))]
        every.append([*true, _all(model)])
        pairs = list(zip(figures(_all(true)), figures(_all(model)), strict=True))
        errors.append([_error(*pair) for pair in pairs])
        changes.append(_change(true))
        shown = (f"{name} {a:.3g} {b:.3g}" for name, (a, b) in zip(FIGURES, pairs, strict=True))
        print(f"  {trace.name}, measured and simulated: {', '.join(shown)}", flush=True)
    columns = [_all(column) for column in zip(*every, strict=True)]
    whole = [_error(*pair) for pair in zip(figures(_all(columns[:-1])), figures(columns[-1]), strict=True)]
    rows = {
        "mean error of the traces": np.mean(errors, axis=0),
        "mean difference of two measurements of a trace": np.mean(changes, axis=0),
        "error of all requests together": whole,
        "difference of two measurements of all requests": _change(columns[:-1]),
    }
    for what, sizes in rows.items():
        print(f"  {what}: " + ", ".join(f"{name} {one:.1%}" for name, one in zip(FIGURES, sizes, strict=True)))
    return np.mean(errors, axis=0)


def _all(repeats: Iterable[list[Row]]) -> list[Row]:
    return [row for rows in repeats for row in rows]


def _change(repeats: Sequence[Sequence[Row]]) -> list[float]:
    """Return by how much the second measurement differs from the first, or zeros if there is none."""
    if len(repeats) == 1:
        return [0.0] * len(FIGURES)
    return [_error(*pair) for pair in zip(*map(figures, repeats[:2]), strict=True)]


def _error(true: float, model: float) -> float:
    return abs(model / true - 1) if true else model


def main(names: Sequence[str], runs: int, repeats: int, most: float, folder: Path | None) -> int:
    """Measure and simulate the engines; return 1 if a figure is further off than 10% in the mean."""
    worst = 0.0
    for engine in ENGINES:
        if names and engine.name not in names:
            continue
        kept = folder / f"{engine.name}.json" if folder else None
        if kept and kept.is_file():
            found = Recording.read(kept)
        else:
            with engine.running() as (url, replicas):
                found = asyncio.run(_record(engine, url, replicas, runs, repeats, most))
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(asdict(found)))
        worst = max(worst, float(_compare(engine, found).max()))
    return int(worst > GOAL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", choices=[[], *(one.name for one in ENGINES)], help="default: all")
    parser.add_argument("--runs", type=int, default=10, help="held-out traces")
    parser.add_argument("--repeats", type=int, default=2, help="measurements of a held-out trace")
    parser.add_argument("--others", type=float, default=0.03, help="most cores that other processes may take")
    parser.add_argument("--answers", type=Path, help="folder to keep the answers in, and to read those that it has")
    options = parser.parse_args()
    sys.exit(main(options.engines, options.runs, options.repeats, options.others, options.answers))
