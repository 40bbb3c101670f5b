"""`kimi-w4a8 bench replay`: recorded agent sessions as a workload of SGLang's load generator.

An `agentic-trace` file is sent by SGLang's own loader: new messages of each turn, with the server's answers between
them. It has no lengths of answers, times, tools or other APIs, so sessions of the other formats are sent by
`speed/sent_turns.py` in the generator's process. The file for it has the shape of an `agentic-trace`. A turn's only
message holds what `Recorded` describes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError

from .sent_turns import ROLE, Recorded
from .trace import Segment, Trace, TraceSession, Turn
from .workloads import Workload


@dataclass(frozen=True)
class Replay:
    """A trace to replay, after `selected`. speed: factor by which its waiting times are shorter."""

    trace: Trace
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise UsageError(f"a speed of {self.speed}", "--speed", "above 0; 2 halves the waiting times")

    @property
    def by_sglang(self) -> bool:
        return self.trace.format == "agentic-trace"

    def sessions(self) -> list[tuple[TraceSession, int | None]]:
        """Return all sessions with the index of their parent, parents first."""
        found: list[tuple[TraceSession, int | None]] = []

        def add(session: TraceSession, parent: int | None) -> None:
            index = len(found)
            found.append((session, parent))
            for subagent in session.subagents:
                add(subagent, index)

        for session in sorted(self.trace.sessions, key=lambda session: session.start_s or 0.0):
            add(session, None)
        return found

    def workload(self, users: Sequence[int]) -> Workload:
        """Return the workload. users: sessions at once; by default those of the recording, or all of a timed trace."""
        lengths = [len(session.turns) for session, _ in self.sessions()]
        roots = len(self.trace.sessions)
        default = self.trace.users or (roots if self.trace.timed else min(8, roots))
        turns = list(self.trace.turns())
        known = [turn.prompt_tokens + turn.output_tokens for turn in turns if turn.prompt]
        return Workload(
            name=f"replay-{Path(self.trace.name).name.split('.')[0]}",
            summary=f"{len(lengths)} sessions with {len(turns)} requests of {self.trace.name} ({self.trace.format})",
            dataset="agentic-trace" if self.by_sglang else "recorded",
            text="file",
            output_len=max(4, *(turn.output_tokens for turn in turns)),
            longest=max(known, default=None),
            concurrency=list(users) or [default],
            sessions=lengths,
            num_prompts=len(lengths),
            warmups=0,
            ignore_eos=False,
            compares=_COMPARES.get(self.trace.format, "replays of the same trace"),
        )

    def prepare(self, workload: Workload, folder: Path) -> Path:
        """Write (or find) the file that the generator loads."""
        if self.by_sglang:
            return Path(self.trace.name).resolve()
        path = folder / "sessions.json"
        content = [list(self._turns(index, *found)) for index, found in enumerate(self.sessions())]
        path.write_text(json.dumps({"conversations": content}))
        return path.resolve()

    def _turns(self, index: int, session: TraceSession, parent: int | None) -> Iterator[dict[str, Any]]:
        before: tuple[Segment, ...] = ()
        for number, turn in enumerate(session.turns):
            kept = _shared(before, turn.prompt)
            recorded = Recorded(
                session=index,
                turn=number,
                last=number == len(session.turns) - 1,
                output_tokens=turn.output_tokens,
                parent=parent,
                start_s=(session.start_s or 0.0) / self.speed if number == 0 else 0.0,
                wait_s=turn.think_s / self.speed,
                kept=kept,
                new=[(segment.content, segment.tokens) for segment in turn.prompt[kept:]],
                path=turn.request.path if turn.request else "",
                body=turn.request.body if turn.request else {},
            )
            before = turn.prompt
            yield {"messages": [{"role": ROLE, "content": asdict(recorded)}]}


_COMPARES = {
    "AgentX": "InferenceX's AgentX results only if the server simulates its fixed accept length",
    "agentic-trace": "SGLang's `bench_serving` on the same file: the same loader and client",
}


def selected(trace: Trace, sessions: int | None, context_len: int | None) -> Trace:
    """Return the first `sessions` of a trace, each cut at the first request that needs more than `context_len` tokens.

    Raises KimiError if nothing is left.
    """
    kept = trace.sessions
    if context_len is not None:
        kept = tuple(short for session in kept if (short := _cut(session, context_len)).turns)
    kept = kept[:sessions]
    if not kept:
        raise KimiError(
            "no session of the trace fits",
            where=trace.name,
            expected=f"a first request of at most {context_len:,} tokens with its answer",
            remedy="give a larger --context-len, or another trace",
        )
    return Trace(trace.name, trace.format, kept, trace.users)


def _cut(session: TraceSession, context_len: int) -> TraceSession:
    turns: list[Turn] = []
    for turn in session.turns:
        if turn.prompt_tokens + turn.output_tokens > context_len:
            break
        turns.append(turn)
    subagents = tuple(short for one in session.subagents if (short := _cut(one, context_len)).turns)
    return TraceSession(session.name, tuple(turns), session.start_s, subagents)


def _shared(before: Sequence[Segment], after: Sequence[Segment]) -> int:
    count = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        count += 1
    return count
