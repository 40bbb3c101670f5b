"""One measurement: the load generator against one server, with the client's and the server's figures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.client import EngineClient, Generation
from kimi_w4a8_eagle3.engine.metrics import Acceptance, acceptance_from_histograms

from ..base.counters import Counters, acceptance_from_counters, counted, still
from ..base.other_programs import watched
from ..base.request_progress import request_progress
from ..base.server_under_test import Server
from . import repetition
from .generator import LoadDetails, LoadResult, drive, generator_program, read_last
from .repetition import TextRepetition
from .workloads import CHAT_BACKEND, Point, Workload

_PROBES = 4
_WARMUP_COUNTED_S = 30.0
_COLD = 0.02  # share of chat-template markers in short prompts


class TurnFigures(BaseModel):
    """One turn of all conversations: mean prompt length, and its part from the prefix cache."""

    model_config = ConfigDict(extra="forbid")

    prompt_tokens: float
    cached_tokens: float
    ttft_median_ms: float
    ttft_p99_ms: float


class Measurement(BaseModel):
    """Result of one generator run. Only a run without `problems` may be compared with others.

    acceptance: per position from `probes` requests repeated after the load, the rest from the server's counters over
    exactly the measured requests.
    """

    model_config = ConfigDict(extra="forbid")

    side: str
    model: str = ""
    workload: Workload
    concurrency: int
    num_prompts: int
    seed: int
    repetition_index: int = 0
    started: str
    raw: str = Field(description="the generator's JSONL beside result.json, with per-request details")
    command: list[str]
    load: LoadResult
    acceptance: Acceptance | None = None
    probes: int = 0
    text: TextRepetition | None = None
    cached: float | None = Field(default=None, description="share of the prompt tokens found in the prefix cache")
    turns: list[TurnFigures] = []
    others: float | None = Field(default=None, description="share of the cores that other programs used")
    notes: list[str] = []
    problems: list[str] = []

    @property
    def at(self) -> tuple[str, str, int, int, int]:
        """Place in the run: side, workload, concurrency, seed, repetition."""
        return self.side, self.workload.name, self.concurrency, self.seed, self.repetition_index

    @property
    def usable(self) -> bool:
        return not self.problems


def measure(server: Server, point: Point, dataset: Path, folder: Path, repetition_index: int = 0) -> Measurement:
    """Run the generator once, writing to `folder`. Raises KimiError if it fails; failed requests are `problems`."""
    side = re.sub(r"[^\w.-]+", "-", server.name)  # an address has slashes
    raw = folder / f"{point.label}-{side}-r{repetition_index}.jsonl"
    for left in folder.glob(f"{raw.stem}.*"):  # of a measurement that a resumed run repeats; the generator appends
        left.unlink()
    arguments = ["--model", server.model, "--tokenizer", server.facts.tokenizer, *point.arguments(dataset)]
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    before: list[Counters] = []
    warmups = point.warmups * point.workload.turns
    idle, share = still(server.engine), watched()

    def open_window(answered: int) -> None:
        before.append(counted(server.engine, idle.requests + answered, _WARMUP_COUNTED_S))

    with request_progress("requests", point.requests, table_console()) as shown:

        def show(requests: int, tokens: int) -> None:
            shown(requests, f"{tokens:,} tokens")

        drive(
            server.engine.url, arguments, raw, warmups, open_window, show, server.engine.key, server.facts.incremental
        )
    load, details = read_last(raw, LoadResult), read_last(raw, LoadDetails)
    if not before:
        raise KimiError("the load generator never began to measure", where=str(raw.with_suffix(".log")))
    after = counted(server.engine, idle.requests + warmups + point.requests, 5.0)
    added = replace(after.since(before[0]), requests=after.requests - idle.requests - warmups)
    notes, problems = _judge(point, load, details, added)
    if before[0].requests < idle.requests + warmups:
        notes.append(
            f"the server had counted {before[0].requests - idle.requests:.0f} of {warmups} warm-up requests "
            f"{_WARMUP_COUNTED_S:.0f} s after their end: the accept length and the cached share contain the others"
        )
    return Measurement(
        side=server.name,
        model=server.model,
        workload=point.workload,
        concurrency=point.concurrency,
        num_prompts=point.num_prompts,
        seed=point.seed,
        repetition_index=repetition_index,
        started=started,
        raw=raw.name,
        command=generator_program(server.engine.url, arguments, raw).argv,
        load=load,
        acceptance=acceptance_from_counters(added, server.facts.num_draft_tokens or 1)
        if server.facts.num_draft_tokens
        else None,
        cached=added.cached_tokens / added.prompt_tokens if added.prompt_tokens else None,
        turns=turns_of(details, point.turn_numbers),
        others=share() if server.launch else None,  # a server that ran before is an other program here
        notes=notes,
        problems=problems,
    )


def examine_text(server: Server, point: Point, folder: Path, found: Measurement) -> Measurement:
    """Add the repetition of the text, and the acceptance per position from a few repeated requests.

    Conversations are skipped, because their prompts contain answers.
    """
    if point.workload.dataset == "agent":
        return found
    prompts = _prompts(point, folder / found.raw)
    outputs = read_last(folder / found.raw, LoadDetails).generated_texts
    answers = _probe(server, point, prompts) if server.facts.num_draft_tokens else []
    acceptance = found.acceptance
    histograms = [answer.accepted_histogram for answer in answers]
    if acceptance and (detail := acceptance_from_histograms(histograms, server.facts.num_draft_tokens or 1)):
        acceptance = replace(acceptance, per_position=detail.per_position)
    return found.model_copy(
        update={"text": repetition.measure(prompts, outputs), "acceptance": acceptance, "probes": len(answers)}
    )


def turns_of(details: LoadDetails, numbers: Sequence[int]) -> list[TurnFigures]:
    """Return the answered requests of conversations by turn (`numbers`); none for single requests."""
    if max(numbers) == 0 or len(details.cached_tokens) != len(numbers):
        return []
    found, ttfts = [], np.asarray(details.ttfts) * 1000
    for number in range(max(numbers) + 1):
        at = [row for row, turn in enumerate(numbers) if turn == number and not details.errors[row]]
        if at:
            found.append(
                TurnFigures(
                    prompt_tokens=float(np.mean([details.input_lens[row] for row in at])),
                    cached_tokens=float(np.mean([details.cached_tokens[row] for row in at])),
                    ttft_median_ms=float(np.median(ttfts[at])),
                    ttft_p99_ms=float(np.percentile(ttfts[at], 99)),
                )
            )
    return found


def _judge(point: Point, load: LoadResult, details: LoadDetails, counted: Counters) -> tuple[list[str], list[str]]:
    """Return notes for the reader, and problems that forbid a comparison."""
    notes, work, failed = [], point.workload, point.requests - load.completed
    exact = work.ignore_eos and work.range_ratio == 1.0
    wrong = sum(length != work.output_len for length in details.output_lens) if exact else 0
    problem = ""
    if failed:
        problem = f"{failed} of {point.requests} requests failed{_reason(details)}"
    elif wrong:
        problem = f"{wrong} outputs are not {work.output_len} tokens long, as requested"
    elif counted.requests != load.completed:
        problem = (
            f"the server finished {counted.requests:.0f} requests during the run, {load.completed} were answered: "
            "another client used it"
        )
    elif load.total_input_tokens and abs(counted.prompt_tokens / load.total_input_tokens - 1) > 0.02:
        notes.append(
            f"the server counted {counted.prompt_tokens:,.0f} prompt tokens, the generator planned "
            f"{load.total_input_tokens:,}: decoding and encoding a text again can change its length"
        )
    cached = counted.cached_tokens / max(counted.prompt_tokens, 1)
    if work.dataset != "agent" and cached > _COLD:
        notes.append(
            f"{cached:.1%} of the prompt tokens came from the prefix cache, filled by warm-up and earlier runs; TTFT "
            "and throughput are not those of new prompts (--set disable-radix-cache=true)"
        )
    if counted.retracted:
        notes.append(f"the KV pool was full: {counted.retracted:.0f} requests were retracted and computed again")
    return notes, [problem] if problem else []


def _reason(details: LoadDetails) -> str:
    first = next((error for error in details.errors if error), "").strip()
    return f": {first.splitlines()[-1]}" if first else ""


def _prompts(point: Point, raw: Path) -> list[str]:
    """Return the texts that the generator sent after the warm-up."""
    lines = raw.with_suffix(".prompts").read_text().splitlines()
    return [str(json.loads(line)["prompt"]) for line in lines[point.warmups :]]


def _probe(server: Server, point: Point, prompts: Sequence[str]) -> list[Generation]:
    """Send a few prompts again, one at a time, for the accept histograms that the generator does not keep."""
    work = point.workload
    extra: dict[str, Any] = {"ignore_eos": True} if work.ignore_eos else {}
    with EngineClient(*server.engine) as client:
        ask = client.chat if work.backend == CHAT_BACKEND else client.generate
        return [ask(prompt, work.output_len, **extra) for prompt in prompts[:_PROBES]]
