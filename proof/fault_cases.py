"""The faults of proof/faults.py: each breaks a real server under load and says what clients saw and what was left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.process import free_port
from proof.fault_stage import (
    AFTER_S,
    BEFORE_S,
    ONLY_OK,
    STALL_S,
    VISIBLE,
    WHOLE_S,
    FaultCase,
    FaultRow,
    FaultStage,
    kimi_command,
    under_load,
)
from proof.load.load import ClientLoad, forbidden, median_ms, write_records
from proof.load.load_request import ClientOutcome, LoadClient, Manner, Record
from proof.load.served import ServedEngine

WHILE_DOWN = VISIBLE | {ClientOutcome.UNREACHABLE}  # an engine that starts again accepts no connection


def kill_scheduler(stage: FaultStage) -> FaultRow:
    """The process that computes is gone; its engine notices."""
    return under_load(stage, stage.server.scheduler().kill, WHILE_DOWN, "kill-scheduler")


def kill_engine(stage: FaultStage) -> FaultRow:
    """The engine is gone at once, its scheduler with it."""
    return under_load(stage, stage.server.engine().kill, WHILE_DOWN, "kill-engine")


def _stopped(process: Callable[[ServedEngine], psutil.Process], name: str, stage: FaultStage) -> FaultRow:
    row = under_load(stage, process(stage.server).suspend, WHILE_DOWN, name)
    row.expect(row.detected_s is not None and row.detected_s < 4 * STALL_S, "the watchdog came late")
    return row


# The engine answers but computes nothing: only tokens tell.
stop_scheduler = partial(_stopped, ServedEngine.scheduler, "stop-scheduler")
# The engine accepts connections and says nothing.
stop_engine = partial(_stopped, ServedEngine.engine, "stop-engine")


def _leave(manner: Manner, stage: FaultStage) -> FaultRow:
    """Time how long an engine goes on for a client that has gone."""
    row, tokens = FaultRow(), 3000
    stage.wait_idle()
    aborted = stage.aborted()

    async def ask() -> Record:
        async with LoadClient(stage.server.base_url, leave_after=15) as client:
            return await client.ask(stage.endless(tokens), manner)

    record = asyncio.run(ask())
    gone, ended = time.monotonic(), 0.0
    while ended == 0 and time.monotonic() - gone < 60:
        ended = stage.aborted() - aborted
    row.detected_s = time.monotonic() - gone
    row.clients = f"1 {record.outcome.value}"
    row.remark = f"the engine stopped {row.detected_s:.1f} s after the client had gone; {ended:.0f} request aborted"
    row.expect(record.outcome is ClientOutcome.LEFT, f"the client saw {record.outcome.value} {record.detail}")
    row.expect(ended == 1 and stage.wait_idle() < 30, f"{ended:.0f} requests were aborted")
    return row


# A closed stream is noticed at the next piece.
leave_stream = partial(_leave, Manner.LEAVES_STREAM)
# Nothing is written to a client that waits; the engine looks now and then.
leave_plain = partial(_leave, Manner.LEAVES_PLAIN)


def slow_client(stage: FaultStage) -> FaultRow:
    """Two clients that read one piece a second; the others' speed, and how long the engine holds the slow ones' KV."""
    row, slow_ones = FaultRow(), 2

    def measure(seconds: float) -> tuple[float, list[Record]]:
        with stage.load(2) as load:
            time.sleep(seconds)
        return median_ms(record.tpot_s for record in load.records), load.records

    question = stage.endless(1200)
    before, records = measure(10)
    with ClientLoad(stage.server.base_url, [question], slow_ones, mix={Manner.STREAM: 1}, total=slow_ones) as quick:
        quick.wait(600)
    usual = max(record.ended - record.began for record in quick.records)
    slow = ClientLoad(stage.server.base_url, [question], slow_ones, mix={Manner.SLOW: 1}, hang_s=600.0)
    with slow:
        asked = time.monotonic()
        while stage.running() < slow_ones:
            time.sleep(0.1)
        stage.wait_idle(600.0)
        released = time.monotonic() - asked
        beside, more = measure(10)
        still_reading = slow_ones - len(slow.records)
        slow.drop()
    row.judge([*records, *more], ONLY_OK)
    row.clients += f"; the {slow_ones} slow ones still reading"
    row.remark = (
        f"the {question.max_tokens:,} tokens of each slow one were finished, and their KV free, after {released:.0f} s "
        f"({usual:.0f} s with fast readers); TPOT of the others: {before:.0f} ms without the slow ones, "
        f"{beside:.0f} ms beside them"
    )
    row.expect(still_reading == slow_ones, "the slow clients were not slow")
    row.expect(released < 4 * usual + 5, "a slow client held its KV")
    return row


def two_hundred(stage: FaultStage) -> FaultRow:
    """Far more requests than the engine runs at a time: the rest waits its turn."""
    row = FaultRow()
    with stage.load(200, total=200) as load:
        began = time.time()
        row.expect(load.wait(900), "not all were answered in 15 minutes")
    records = load.records
    write_records(stage.folder / "two-hundred.jsonl", records)
    row.judge(records, ONLY_OK)
    ttft_ms = median_ms(record.ttft_s for record in records)
    row.remark = f"all answered within {max(r.ended for r in records) - began:.0f} s, TTFT median {ttft_ms:.0f} ms"
    return row


def bad_clients(stage: FaultStage) -> FaultRow:
    """Bad requests and clients that leave, beside ordinary ones."""
    row = FaultRow()
    mix = {Manner.BAD: 3, Manner.LEAVES_STREAM: 1, Manner.LEAVES_PLAIN: 1}
    with (
        stage.load(2) as good,
        ClientLoad(stage.server.base_url, [*stage.questions, stage.endless(2000)], 2, mix=mix) as bad,
    ):
        time.sleep(15)
    row.judge(good.records, ONLY_OK)
    answers = Counter(record.outcome for record in bad.records if record.manner is Manner.BAD)
    statuses = Counter(record.status for record in bad.records if record.manner is Manner.BAD)
    row.clients += f"; bad requests: {', '.join(f'{n} HTTP {status}' for status, n in statuses.most_common())}"
    row.expect(set(answers) == {ClientOutcome.REFUSED}, f"bad requests: {answers}")
    for record in forbidden(bad.records):
        row.problems.append(f"{record.manner.value}: {record.outcome.value} {record.detail}")
    return row


def terminate(stage: FaultStage) -> FaultRow:
    """SIGTERM to `kimi-w4a8 serve`: what runs is answered, what comes later is refused."""
    row, server = FaultRow(), stage.server
    with stage.load(8) as load:
        time.sleep(BEFORE_S)
        at = time.time()
        code = server.stop(signal.SIGTERM)
        row.whole_s = None
        seconds = time.time() - at
    write_records(stage.folder / "terminate.jsonl", load.records)
    row.judge(load.records, WHILE_DOWN)
    running = [record for record in load.records if record.began < at <= record.ended]
    lost = [record for record in running if record.outcome is not ClientOutcome.OK]
    row.clients = f"{len(running) - len(lost)} of {len(running)} requests that ran at SIGTERM ok; all: {row.clients}"
    row.remark = f"ended after {seconds:.1f} s with exit code {code}"
    row.expect(bool(running) and not lost, f"lost: {[(r.outcome.value, r.detail) for r in lost]}")
    row.expect(code == 128 + signal.SIGTERM, f"exit code {code}")
    return row.leaves(server.leftovers())


def kill_supervisor(stage: FaultStage) -> FaultRow:
    """kill -9 of `kimi-w4a8 serve`: only the kernel and the next start can clean up."""
    row, server = FaultRow(), stage.server
    with stage.load() as load:
        time.sleep(BEFORE_S)
        server.look()
        server.process.kill()
        server.process.wait()
        time.sleep(AFTER_S)
    row.judge(load.records, WHILE_DOWN)
    _nothing_outlives(server, row)
    return row


def kill_start(stage: FaultStage) -> FaultRow:
    """The same as soon as an engine has children, which have not loaded anything yet."""
    row, server = FaultRow(clients="no clients yet"), stage.server
    end = time.monotonic() + WHOLE_S
    while not _has_children(server):
        if time.monotonic() > end:
            raise KimiError("the engine had no children in time", where=str(server.folder))
        time.sleep(0.1)
    server.process.kill()
    server.process.wait()
    _nothing_outlives(server, row)
    return row


def _has_children(server: ServedEngine) -> bool:
    with suppress(KimiError, httpx.HTTPError, psutil.NoSuchProcess):
        return bool(server.engine().children())
    return False


def _nothing_outlives(server: ServedEngine, row: FaultRow) -> None:
    """After a kill -9 of `kimi-w4a8 serve`: no process and no port; what else is left goes with the next start."""
    left = server.leftovers(20.0)
    row.expect(not left.processes and not left.ports, f"left behind: {left}")
    clean_up = "from kimi_w4a8_eagle3.engine.leftovers import remove_orphans; remove_orphans()"
    env = {**os.environ, "TMPDIR": str(server.temporary)}
    subprocess.run([sys.executable, "-c", clean_up], env=env, check=True, timeout=60)
    after = server.leftovers(1.0)
    row.left = "no process, no port; temporary files until the next start removes them" if left else "nothing"
    row.expect(not after, f"left behind after the next start: {after}")


def disk_full(stage: FaultStage) -> FaultRow:
    """The disk of the run folder is full: answers go on, an engine that dies meanwhile comes back."""
    row, server = FaultRow(), stage.server
    filler = server.folder / "filler"
    with stage.load() as load:
        time.sleep(BEFORE_S)
        _fill(filler)
        full = time.time()
        time.sleep(10)
        row.expect(server.process.poll() is None, "`kimi-w4a8 serve` ended")
        row.expect(_free_bytes(server.folder) < 4096, "the disk was not full")
        quiet = Counter(record.outcome for record in load.records if record.began > full)
        row.expect(set(quiet) == {ClientOutcome.OK}, f"while nothing but the disk failed: {quiet}")
        died = time.time()
        server.engine().kill()
        time.sleep(AFTER_S)
        while not server.status()["ready"] and time.time() - died < WHOLE_S:
            time.sleep(0.5)
        row.whole_s = time.time() - died
        filler.unlink()
        time.sleep(AFTER_S)
    row.judge(load.records, WHILE_DOWN)
    row.expect(server.status()["ready"], "the engine did not come back")
    row.remark = f"{quiet[ClientOutcome.OK]} answers on the full disk; then kill -9 of an engine: it came back"
    row.expect(server.stop(signal.SIGTERM) == 128 + signal.SIGTERM, "no clean end")
    return row.leaves(server.leftovers())


def port_taken(stage: FaultStage | None, folder: Path) -> FaultRow:
    """The API port, then the ops port, belongs to another process: one message, exit code 1, nothing started."""
    row, seen = FaultRow(), []
    for which in ("API", "ops"):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            api, ops = (port, free_port()) if which == "API" else (free_port(), port)
            place = folder / f"port-taken-{which}"
            place.mkdir(parents=True)
            words = ["serve", "--recipe", "tiny", "--set", f"port={api}", "--ops-port", str(ops)]
            began = time.monotonic()
            ended = subprocess.run(kimi_command(words), cwd=place, capture_output=True, text=True, timeout=240)
        message = next((line for line in ended.stderr.splitlines() if "cannot be used" in line), "")
        seen.append(f"{which} port: exit code {ended.returncode} after {time.monotonic() - began:.0f} s")
        row.expect(ended.returncode == 1, f"exit code {ended.returncode} with the {which} port taken")
        row.expect(str(port) in message, f"no message about the {which} port: {ended.stderr[-300:]}")
        row.expect("Traceback" not in ended.stderr, "a traceback")
        row.expect(not list(place.rglob("*.log")), "an engine was started")
    row.clients = "no clients"
    row.remark = "; ".join(seen) + "; one message that names the port"
    return row


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


CASES = (
    FaultCase("kill-scheduler", "kill -9 of an engine's scheduler", kill_scheduler),
    FaultCase("kill-engine", "kill -9 of an engine's main process", kill_engine),
    FaultCase("stop-scheduler", f"SIGSTOP of a scheduler (watchdog at {STALL_S} s)", stop_scheduler),
    FaultCase("stop-engine", f"SIGSTOP of an engine's main process (watchdog at {STALL_S} s)", stop_engine),
    FaultCase("leave-stream", "a client disconnects while its answer streams", leave_stream),
    FaultCase("leave-plain", "a client disconnects while it waits for its whole answer", leave_plain),
    FaultCase("slow-client", "two clients read one piece a second", slow_client),
    FaultCase("two-hundred", "200 requests at once", two_hundred),
    FaultCase("bad-clients", "bad requests and leaving clients beside ordinary ones", bad_clients),
    FaultCase("terminate", "SIGTERM in the middle of load", terminate, own=True),
    FaultCase("kill-supervisor", "kill -9 of `kimi-w4a8 serve` itself", kill_supervisor, own=True),
    FaultCase("kill-start", "kill -9 of `kimi-w4a8 serve` while its engine starts", kill_start, own=True),
    FaultCase("disk-full", "the disk of the run folder is full", disk_full, own=True),
    FaultCase("port-taken", "the API port or the ops port is taken", lambda stage: FaultRow(), own=True),
)
