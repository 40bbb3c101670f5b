"""The progress watchdog against a real HTTP server on loopback, and stacks of real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from support.loopback import answering

from kimi_w4a8_eagle3.engine.watchdog import Progress, Watchdog, _catches, ask_for_stacks

METRICS = """\
# HELP sglang:realtime_tokens_total tokens
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{{mode="decode",tp_rank="0"}} {decode}
sglang:realtime_tokens_total{{mode="prefill_compute",tp_rank="0"}} 100.0
# HELP sglang:num_running_reqs running
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{tp_rank="0"}} 2.0
# HELP sglang:num_queue_reqs queued
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{tp_rank="0"}} 1.0
"""


@dataclass
class Engine:
    """State of the server on loopback: `decode` tokens so far, and its answer to a health check."""

    decode: float = 0.0
    generating: bool = False  # each scrape finds more tokens
    healthy: bool = True
    refusing: bool = False  # a limit of its clients is reached
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.asked.append(path)
        if self.refusing:
            return 429, b""
        if path == "/metrics":
            self.decode += 5 if self.generating else 0
            return 200, METRICS.format(decode=self.decode).encode()
        return {"/health_generate": 200 if self.healthy else 503, "/health": 200}.get(path, 404), b""


@pytest.fixture
def engine() -> Iterator[Engine]:
    state = Engine()
    with answering(state.answer) as state.url:
        yield state


@pytest.fixture
def stalled() -> threading.Event:
    return threading.Event()


def test_progress_is_a_counter_that_moved() -> None:
    progress = Progress(timeout_s=10, now=0)
    assert progress.advanced(5, now=1)
    assert not progress.advanced(5, now=9)
    assert not progress.stalled(now=10.9)
    assert progress.stalled(now=11)
    assert progress.advanced(6, now=12) and not progress.stalled(now=21)
    assert progress.advanced(0, now=22)  # restarted
    assert not progress.advanced(None, now=25)
    progress.last = 31  # the engine answered a health check
    assert not progress.stalled(now=40) and progress.stalled(now=41)


def test_a_deadlock_is_found_although_health_answers(
    engine: Engine, caplog: pytest.LogCaptureFixture, stalled: threading.Event
) -> None:
    engine.healthy = False
    nobody = 2**22 + 1  # beyond Linux's largest pid
    with Watchdog(engine.url, 0.6, stalled.set, pid=nobody, poll_s=0.05):
        assert stalled.wait(60)  # also if no process prints its stacks
    assert "100 tokens so far, 2 requests running, 1 queued" in caplog.text
    assert "0 processes print their stacks" in caplog.text and not _catches(nobody, signal.SIGUSR1)


def test_a_busy_engine_is_left_alone_and_not_probed(engine: Engine, stalled: threading.Event) -> None:
    engine.generating, engine.healthy = True, False
    with Watchdog(engine.url, 2.0, stalled.set, poll_s=0.05):
        assert not stalled.wait(3.0)
    assert "/health_generate" not in engine.asked


def test_an_idle_engine_that_answers_a_health_check_is_left_alone(engine: Engine, stalled: threading.Event) -> None:
    started = time.monotonic()
    with Watchdog(engine.url, 1.0, stalled.set, poll_s=0.05):
        assert not stalled.wait(2.0)
    assert 1 <= engine.asked.count("/health_generate") <= (time.monotonic() - started) / 0.5


@pytest.mark.parametrize("generating", [True, False], ids=["tokens", "health-checks"])
def test_progress_is_reported_and_a_stall_is_not(engine: Engine, generating: bool, stalled: threading.Event) -> None:
    engine.generating = generating
    told: list[float] = []
    more = threading.Event()

    def progressed(at: float) -> None:
        told.append(at)
        if len(told) >= 3:
            more.set()

    with Watchdog(engine.url, 0.6, stalled.set, poll_s=0.05, on_progress=progressed):
        assert more.wait(30)
        engine.generating = engine.healthy = False
        assert stalled.wait(60)
    assert told == sorted(told) and told[-1] <= time.monotonic() - 0.6


@pytest.mark.parametrize("listens", [False, True], ids=["gone", "silent"])
def test_an_engine_whose_http_server_is_gone_or_silent_is_stalled(listens: bool, stalled: threading.Event) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if listens else 9
        with Watchdog(f"http://127.0.0.1:{port}", 0.4, stalled.set, poll_s=0.05):
            assert stalled.wait(60)  # a second for each of two requests; SGLang's own 30 would be too late here


def test_a_refusal_is_no_stall_and_hides_none_for_good(engine: Engine, stalled: threading.Event) -> None:
    engine.refusing, engine.healthy = True, False
    with Watchdog(engine.url, 0.4, stalled.set, poll_s=0.05):
        assert not stalled.wait(1.5)
        engine.refusing = False
        assert stalled.wait(60)


@pytest.mark.parametrize("has_handler", [True, False])
def test_processes_print_their_stacks_and_those_without_a_handler_survive(has_handler: bool) -> None:
    """A process, its child and its grandchild; only the first one's stack is read."""
    register = "import faulthandler, signal, sys; faulthandler.register(signal.SIGUSR1, file=sys.stdout)\n"
    wait = """
import os, time
def waits():
    if not os.fork():
        said = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not os.fork():
            os.write(said, b"up\\n")
    time.sleep(60)
waits()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", has_handler * register + wait], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        assert ask_for_stacks(child.pid) == 3 * has_handler
        if has_handler:  # a busy machine may need a while to print them
            assert any(b"in waits" in line for line in child.stdout)
        else:
            time.sleep(0.2)
        assert child.poll() is None
        os.killpg(child.pid, signal.SIGKILL)
        assert has_handler or child.stdout.read() == b""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
