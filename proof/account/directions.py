"""`python -m proof.account.directions`: the model's order of two layouts beside a published one.

Infera published one engine of eight MI355X (TP 8), and four GPUs that prefill for eight that decode (TP 2 x DP 4), for
sessions of an agent with Kimi-K2.6 in MXFP4 and vLLM: https://github.com/AMD-AGI/Infera/tree/5890f7f60750b17f598a1226a37c5be1fecf8045/examples/kimi_agentic_bench.
The machine model knows MI325X, W4A8 and BF16 KV, so only ratios and orders are compared. Nothing was measured here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import calibrate
from kimi_w4a8_lab.predict.step_time import KimiStepTime

SESSIONS = (4, 8, 16, 32, 64, 96)
# Tokens a second of a user, and goodput in relation to TP 8 with 16 sessions (plot_results.py).
PUBLISHED_SPEED = {"one": (48.3, 43.0, 34.5, 25.2, 14.3, 11.9), "split": (53.6, 51.1, 45.3, 37.0, 32.2, 30.6)}
PUBLISHED_RATE = {"one": (0.35, 0.62, 1.00, 1.46, 1.58, 1.57), "split": (0.37, 0.67, 1.22, 1.92, 2.51, 2.51)}
GPUS = {"one": 8, "split": 12}
FIRST, TURN, OUTPUT, TURNS = 30000, 2048, 900, 30
STEPS = 20  # decode steps of one event


@dataclass(frozen=True)
class DirectionFigures:
    """Tokens a second of a user, and input and output tokens a second of all GPUs."""

    speed: float
    rate: float


def simulate(name: str, sessions: int) -> DirectionFigures:
    """Simulate all turns of the sessions. A turn's earlier tokens are in the cache, and a verify step has one token."""
    fit, split = calibrate(Cluster()), name == "split"
    first = KimiStepTime(fit, Cluster(tp=4 if split else 8), steps=0)
    decode = KimiStepTime(fit, Cluster(tp=8, groups=4 if split else 1), steps=0)
    context, turns, left = [FIRST] * sessions, [TURNS] * sessions, [0] * sessions
    began, speeds = [0.0] * sessions, list[float]()
    ready, running = list[tuple[float, int]](), list[int]()  # heap of turns that can be decoded or, on one engine, sent
    now = busy = tokens = 0.0  # busy: until when the engine that only prefills is

    def prefill_s(session: int) -> float:
        return first.prefill([[(TURN, context[session] - TURN)]])

    def send(session: int) -> None:
        nonlocal busy
        busy = max(busy, now) + prefill_s(session)
        heapq.heappush(ready, (busy if split else now, session))

    for session in range(sessions):
        send(session)
    while ready or running:
        if not running:
            now = max(now, ready[0][0])
        while ready and ready[0][0] <= now:
            _, session = heapq.heappop(ready)
            now += 0.0 if split else prefill_s(session)  # while one engine prefills, it does not decode
            running.append(session)
            left[session], began[session] = OUTPUT, now
        steps = min(STEPS, *(left[session] for session in running))
        contexts = sorted(context[session] for session in running)
        shares = [contexts[at :: decode.cluster.groups] for at in range(decode.cluster.groups)]
        now += steps * decode.decode([(len(share), sum(share)) for share in shares if share])
        for session in list(running):
            left[session] -= steps
            context[session] += steps
            if not left[session]:
                running.remove(session)
                speeds.append(OUTPUT / (now - began[session]))
                tokens += context[session]
                context[session] += TURN
                turns[session] -= 1
                if turns[session]:
                    send(session)
    speed = float(np.median(speeds)) if split else sessions * TURNS * OUTPUT / now / sessions
    return DirectionFigures(speed, tokens / now)  # the speeds are defined as in the publication


def most(speeds: Sequence[float], limit: float) -> int:
    """Return the most sessions with at least `limit` tokens a second for each user; 0 if there are none."""
    return max((count for count, speed in zip(SESSIONS, speeds, strict=True) if speed >= limit), default=0)


def main() -> None:
    """Print the published and the modelled figures of both layouts."""
    found = {name: [simulate(name, count) for count in SESSIONS] for name in GPUS}
    base = found["one"][SESSIONS.index(16)].rate
    table = Table("layout", "sessions", "tok/s of a user, published", "model", "rate, published", "model")
    for name in GPUS:
        for at, count in enumerate(SESSIONS):
            speed, rate = f"{found[name][at].speed:.1f}", f"{found[name][at].rate / base:.2f}"
            published = PUBLISHED_SPEED[name][at], PUBLISHED_RATE[name][at]
            table.add_row(name, str(count), f"{published[0]:.1f}", speed, f"{published[1]:.2f}", rate)
    table_console().print(table)
    for limit in (30, 50):
        for what, speeds in (
            ("published", PUBLISHED_SPEED),
            ("model", {name: [one.speed for one in figures] for name, figures in found.items()}),
        ):
            print(f"{limit} tok/s, {what}: " + ", ".join(f"{name} {most(speeds[name], limit)}" for name in GPUS))


if __name__ == "__main__":
    main()
