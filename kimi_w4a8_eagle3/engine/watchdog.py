"""Watch an engine for progress in tokens, not for an open port: deadlocked ranks still answer /health.

Progress is a token counter that moved (`/metrics`) or, if none did, a health check that generates a token
(`/health_generate`): an idle server answers, a deadlocked one does not. After `timeout_s` without either, all engine
processes print their stacks and `on_stall` is called once.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from ..base.http import trusted
from ..base.prometheus import Reading

logger = logging.getLogger(__name__)

# SGLang counts some on every decode step and prefill batch, others per finished request; any that moves is progress.
TOKEN_COUNTERS = ("sglang:realtime_tokens_total", "sglang:generation_tokens_total", "sglang:prompt_tokens_total")
RUNNING, QUEUED = ("sglang:num_running_reqs",), ("sglang:num_queue_reqs",)
PROBE_TIMEOUT_S = 30.0  # SGLang itself ends a health check after 20 s


@dataclass(frozen=True)
class Sample:
    """One reading of /metrics: tokens processed so far, requests running and queued."""

    tokens: float
    running: float
    queued: float

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Sum the series of all ranks and modes; a metric that is absent counts as zero."""
        reading = Reading.parse(text)
        return cls(*(sum(reading.total(name) or 0.0 for name in names) for names in (TOKEN_COUNTERS, RUNNING, QUEUED)))


class Progress:
    """Time of the engine's last progress. Pure: the caller passes samples and the time in seconds."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self.timeout_s = timeout_s
        self.last = now
        self.sample: Sample | None = None

    def advanced(self, sample: Sample | None, now: float) -> bool:
        """Take a sample (None: the server did not answer); return True when tokens moved since the last one.

        A counter that fell was reset by a restart, which is progress too.
        """
        if sample is None:
            return False
        moved = self.sample is None or sample.tokens != self.sample.tokens
        self.sample = sample
        if moved:
            self.last = now
        return moved

    def stalled(self, now: float) -> bool:
        """Return True when nothing moved for the timeout."""
        return now - self.last >= self.timeout_s


class Watchdog:
    """A thread that polls the server at `base_url` and calls `on_stall` once when it stops making progress.

    on_progress: called with the time.monotonic() of every poll that saw progress.
    pid: that process and its children print their stacks first. Used as a context manager; start it after the server
    has answered for the first time.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float,
        on_stall: Callable[[], object],
        pid: int | None = None,
        poll_s: float | None = None,
        on_progress: Callable[[float], object] = lambda at: None,
    ) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._on_progress = on_progress
        self._pid = pid
        self._poll_s = min(10.0, timeout_s / 10) if poll_s is None else poll_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=5.0)  # it may be inside its last request

    def _run(self) -> None:
        progress = Progress(self._timeout_s, time.monotonic())
        probe_after = self._timeout_s / 2  # an idle server generates a probe token at most this often
        timeout_s = min(PROBE_TIMEOUT_S, max(self._timeout_s, 1.0))
        with httpx.Client(base_url=self._base_url, timeout=timeout_s, verify=trusted()) as client:
            while not self._end.wait(self._poll_s):
                advanced = progress.advanced(_read_metrics(client), time.monotonic())
                due = time.monotonic() - progress.last >= probe_after
                if not advanced and due and _answers_health_check(client):
                    advanced, progress.last = True, time.monotonic()
                if advanced:
                    self._on_progress(progress.last)
                elif progress.stalled(time.monotonic()):
                    self._report(progress)
                    return

    def _report(self, progress: Progress) -> None:
        if self._end.is_set():  # a stopping engine looks like a stall
            return
        logger.error("%s", _describe(progress))
        if self._pid is not None:
            logger.error("%d processes print their stacks into the engine's log", ask_for_stacks(self._pid))
        self._on_stall()


def ask_for_stacks(pid: int) -> int:
    """Make `pid` and its descendants print their Python stacks into their log; return how many were signalled.

    The plugin registers faulthandler for SIGUSR1. A process without a handler would end, so it gets no signal.
    """
    asked = 0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            if _catches(process.pid, signal.SIGUSR1):
                process.send_signal(signal.SIGUSR1)
                asked += 1
    return asked


def _read_metrics(client: httpx.Client) -> Sample | None:
    try:
        response = client.get("/metrics")
        response.raise_for_status()
        return Sample.parse(response.text)
    except (httpx.HTTPError, ValueError):
        return None


def _answers_health_check(client: httpx.Client) -> bool:
    try:
        return client.get("/health_generate").status_code == 200
    except httpx.HTTPError:
        return False


def _describe(progress: Progress) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    sample = progress.sample
    if sample is None:
        return f"{at}: no progress for {progress.timeout_s:.0f} s; /metrics did not answer"
    return (
        f"{at}: no progress for {progress.timeout_s:.0f} s; {sample.tokens:.0f} tokens so far, "
        f"{sample.running:.0f} requests running, {sample.queued:.0f} queued"
    )


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return True if the process handles the signal itself, by the mask SigCgt in Linux's /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(mask >> (number - 1) & 1)
