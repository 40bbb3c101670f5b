"""Watch an engine for progress in tokens, not for an open port: deadlocked ranks still answer /health.

Progress is a token counter that moved (`/metrics`) or, if none did, a health check that generates a token
(`/health_generate`): an idle server answers, a deadlocked one does not. After `timeout_s` without either, all engine
processes print their stacks and `on_stall` is called once. It asks with the supervisor's key, so that no limit of the
clients applies; a refusal says nothing about the engine and is never a stall.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import httpx
import psutil

from ..base.errors import KimiError
from ..base.http import bearer, trusted
from .metrics import read_once

logger = logging.getLogger(__name__)

# SGLang counts some on every decode step and prefill batch, others per finished request; any that moves is progress.
TOKEN_COUNTERS = ("sglang:realtime_tokens_total", "sglang:generation_tokens_total", "sglang:prompt_tokens_total")
PROBE_TIMEOUT_S = 30.0  # SGLang itself ends a health check after 20 s


class Progress:
    """Time of the engine's last progress. Pure: the caller passes counts and the time in seconds."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self.timeout_s = timeout_s
        self.last = now
        self._tokens: float | None = None

    def advanced(self, tokens: float | None, now: float) -> bool:
        """Take the tokens so far (None: the server did not answer); return True when they moved since the last time.

        A counter that fell was reset by a restart, which is progress too.
        """
        if tokens is None or tokens == self._tokens:
            return False
        self._tokens, self.last = tokens, now
        return True

    def stalled(self, now: float) -> bool:
        """Return True when nothing moved for the timeout."""
        return now - self.last >= self.timeout_s


class Watchdog:
    """A thread that polls the server at `base_url` and calls `on_stall` once when it stops making progress.

    on_progress: called with the time.monotonic() of every poll that saw progress. pid: that process and its children
    print their stacks first. key: the supervisor's (`given_folder`). Used as a context manager; start it after the
    server has answered for the first time.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float,
        on_stall: Callable[[], object],
        pid: int | None = None,
        poll_s: float | None = None,
        on_progress: Callable[[float], object] = lambda at: None,
        key: str | None = None,
    ) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._on_progress = on_progress
        self._pid, self._key = pid, key
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
        progress, load = Progress(self._timeout_s, time.monotonic()), "/metrics did not answer"
        probe_after = self._timeout_s / 2  # an idle server generates a probe token at most this often
        timeout_s = min(PROBE_TIMEOUT_S, max(self._timeout_s, 1.0))
        while not self._end.wait(self._poll_s):
            tokens, health = None, 0
            with suppress(KimiError):
                reading = read_once(self._base_url, self._key, timeout_s)  # its series are of all ranks and modes
                tokens = sum(reading.total(name) or 0.0 for name in TOKEN_COUNTERS)
                running, queued = (reading.total(f"sglang:num_{kind}_reqs") or 0.0 for kind in ("running", "queue"))
                load = f"{tokens:.0f} tokens so far, {running:.0f} requests running, {queued:.0f} queued"
            advanced = progress.advanced(tokens, time.monotonic())
            due = time.monotonic() - progress.last >= probe_after
            if not advanced and due and (health := self._health(timeout_s)) == HTTPStatus.OK:
                advanced, progress.last = True, time.monotonic()
            if advanced:
                self._on_progress(progress.last)
            elif progress.stalled(time.monotonic()) and health != HTTPStatus.TOO_MANY_REQUESTS:
                self._report(load)
                return

    def _health(self, timeout_s: float) -> int:
        """Let the engine generate a token; return the status of its answer, 0 if there is none."""
        url = f"{self._base_url}/health_generate"
        with suppress(httpx.HTTPError):
            return httpx.get(url, headers=bearer(self._key), timeout=timeout_s, verify=trusted()).status_code
        return 0

    def _report(self, load: str) -> None:
        if self._end.is_set():  # a stopping engine looks like a stall
            return
        logger.error("%s: no progress for %.0f s; %s", time.strftime("%Y-%m-%d %H:%M:%S"), self._timeout_s, load)
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


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return True if the process handles the signal itself, by the mask SigCgt in Linux's /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(mask >> (number - 1) & 1)
