"""Cost of the CPU's batch-invariant operators in a decode step, for docs/perf/answers.md.

    PYTHONPATH=tests python -m support.batch_invariance_cost

Two servers without drafts, one of them with torch's own operators, take turns. Counted is the scheduler's processor
time, which other programs on the machine change less than they change the time that passes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil

from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_eagle3.sglang_plugin.run_module import run
from kimi_w4a8_lab.accuracy.tokens import TokenClient
from kimi_w4a8_laptop.cpu import batch_invariant

TOKENS, ROUNDS, CONCURRENCIES = 96, 6, (1, 8, 40)


def main() -> None:
    """Print the processor time of a decode step with and without the operators, and the ratio."""
    from .tiny_servers import started, tiny_launch, with_faults  # not in the engine, which runs this module too

    launches = [tiny_launch(speculate=False) for _ in range(2)]
    with (
        tempfile.TemporaryDirectory() as ours,
        tempfile.TemporaryDirectory() as torchs,
        contextmanager(started)(launches[0], Path(ours)) as with_them,
        contextmanager(with_faults)(launches[1], "support.batch_invariance_cost", Path(torchs)) as without,
    ):
        for concurrency in CONCURRENCIES:
            pairs = [(step_ms(with_them, concurrency), step_ms(without, concurrency)) for _ in range(ROUNDS)]
            own, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
            rounds = ", ".join(f"{one / other:.2f}" for one, other in pairs)
            print(f"concurrency {concurrency}: {own:.1f} ms of {plain:.1f}, {own / plain:.2f} ({rounds})", flush=True)


def step_ms(server: EngineServer, concurrency: int) -> float:
    """Processor time of the scheduler for one step of so many requests, their short prefill included."""
    with TokenClient(server.base_url) as probe:
        before = scheduler_seconds(server)
        probe.all(lambda name: probe.generate(f"{name}", TOKENS, ignore_eos=True), range(concurrency), concurrency)
        return (scheduler_seconds(server) - before) / TOKENS * 1000


def scheduler_seconds(server: EngineServer) -> float:
    family = psutil.Process(server.pid).children(recursive=True)
    (times,) = [process.cpu_times() for process in family if process.name().startswith("sglang::sch")]
    return times.user + times.system


if __name__ == "__main__" and not sys.argv[1:]:
    main()
else:
    batch_invariant.register = lambda: None
    if __name__ == "__main__":
        run(sys.argv[1:])
