"""Workers of the door: what they refuse, what kills them, and that neither disturbs another request."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from resource import RLIMIT_CORE, getrlimit
from typing import Any

import psutil
import pytest
from support.waiting import until

from kimi_w4a8_eagle3.door import admission, shares
from kimi_w4a8_eagle3.door.admission import Admission, WorkerJob
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.shares import Shares

COSTLY = "this costs more than a worker may use"


def work(value: Any) -> None:
    """Do what `value` says."""
    match value:
        case {"refuse": why}:
            raise Refusal(why)
        case {"spin": _}:
            while True:
                pass
        case {"sleep": seconds}:
            time.sleep(seconds)
        case {"allocate": size}:
            assert not admission._data_bytes() % 1024 and bytes(size)  # pages never touched: memory, and no time
        case {"abort": _}:
            os.abort()
        case {"divide": _}:
            1 / 0  # noqa: B018
        case {"note": path}:
            with Path(path).open("a", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(60)
        case {"once": path}:
            with Path(path).open("a", encoding="ascii") as file:
                file.write("x")
        case {"nice": expected}:
            while os.nice(0) < expected:  # so it needs more than the time of a first try
                pass
            assert (os.nice(0), signal.getsignal(signal.SIGINT)) == (expected, signal.SIG_IGN)
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the engine's handler would be the worker's"
            assert signal.getitimer(signal.ITIMER_PROF)[0] and gc.get_freeze_count() and not any(getrlimit(RLIMIT_CORE))
        case {"descriptors": expected}:
            links = (Path(f"/proc/self/fd/{number}") for number in range(3, 1000))
            targets = [str(link.readlink()) for link in links if link.is_symlink()]
            # A library may make pipes of its own after a fork.
            assert len([target for target in targets if not target.startswith("pipe:")]) == expected


def jobs(cpu_s: float = 5.0) -> Admission:
    return Admission({"work": WorkerJob(lambda: gc.unfreeze() or work, cpu_s, COSTLY)}, Shares(1))  # as in an engine


def verdicts(door: Admission, *values: Any) -> list[str]:
    """Return the refusals of values that are checked at the same time; "" for one that is admitted."""

    async def one(value: Any) -> str:
        try:
            await door.require("work", value, "field")
        except Refusal as refusal:
            assert (refusal.param, refusal.status) == ("field", 503 if "busy" in refusal.message else 400)
            return refusal.message
        return ""

    return running(door, lambda: asyncio.gather(*map(one, values)))


def running(door: Admission, scenario: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return await scenario()

    try:
        return asyncio.run(main())
    finally:
        os.kill(door.pid, signal.SIGKILL)


def test_a_worker_accepts_or_refuses_with_its_reason() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # as an engine has one
    try:
        door = jobs()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert verdicts(door, {"x": "y" * 2**21}, {"refuse": "too wide"}, {"nice": 10}) == ["", "too wide", ""]


@pytest.mark.parametrize(("used_s", "niceness"), [(0.9, 5), (1.1, 19)])
def test_workers_of_clients_that_used_much_go_last(
    used_s: float, niceness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "QUICK_S", 5.0)  # one try, however slow this machine is
    (door := jobs())._shares.charge(shares.current_client.get(), used_s)
    assert verdicts(door, {"nice": niceness}) == [""]


def test_no_worker_becomes_a_zombie() -> None:
    door = jobs()

    async def scenario() -> None:
        for number in range(3):
            await door.require("work", number, "field")
        until(lambda: not psutil.Process(door.pid).children())

    running(door, scenario)


def test_a_job_that_raises_is_refused_by_its_error() -> None:
    assert verdicts(jobs(), {"divide": 0}) == ["this request cannot be checked (ZeroDivisionError)"]


@pytest.mark.parametrize("value", [{"spin": 0}, {"sleep": 60}, {"allocate": 3 * 2**30}, {"abort": 0}])
def test_a_job_over_its_budget_is_refused_and_another_one_is_done_beside_it(value: dict[str, int]) -> None:
    cpu_s = 5.0 if "allocate" in value else 0.3
    assert verdicts(jobs(cpu_s), value, {"refuse": "too wide"}, {}) == [COSTLY, "too wide", ""]


def test_a_job_that_waits_may_take_longer_than_its_cpu_time() -> None:
    assert verdicts(jobs(cpu_s=2.0), {"sleep": 1.6}) == [""]


def test_a_verdict_is_remembered_and_a_kill_is_not(tmp_path: Path) -> None:
    door, once = jobs(cpu_s=0.3), {"once": str(tmp_path / "once")}

    async def scenario() -> None:
        for _ in range(3):
            await asyncio.gather(*(door.require("work", once, "field") for _ in range(4)))
        for _ in range(2):
            with pytest.raises(Refusal):
                await door.require("work", {"spin": 0}, "field")
        assert len(door._verdicts) == 1

    running(door, scenario)
    assert (tmp_path / "once").read_text() == "x"


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def noted(path: Path, number: int = 1) -> list[int]:
    await asyncio.to_thread(until, lambda: len(pids(path)) >= number)
    return pids(path)


def test_a_killed_worker_is_its_own_requests_loss(tmp_path: Path) -> None:
    door, note = jobs(), tmp_path / "note"

    async def scenario() -> None:
        lost = asyncio.ensure_future(door.require("work", {"note": str(note)}, "field"))
        for tries in (1, 2):  # in a quick place, and in a long one
            os.kill((await noted(note, tries))[-1], signal.SIGKILL)
        await door.require("work", {"other": 1}, "field")
        with pytest.raises(Refusal, match=COSTLY):
            await lost

    running(door, scenario)


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGSTOP])
def test_a_zygote_that_is_killed_or_stopped_is_replaced_and_each_request_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: signal.Signals
) -> None:
    monkeypatch.setattr(admission, "_GRACE_S", 0.0)
    door = jobs(cpu_s=1.0)

    async def scenario() -> None:
        await door.require("work", 0, "field")
        first, connection = door.pid, door._zygote
        os.kill(first, ends)
        if ends == signal.SIGKILL:
            psutil.Process(first).wait(60)
        await asyncio.gather(*(door.require("work", number, "field") for number in range(1, 5)))
        assert door.pid != first and connection.fileno() == -1
        assert len(caplog.records) == 1  # a request must not kill what another one has started
        with pytest.raises(Refusal, match="too wide"):
            await door.require("work", {"refuse": "too wide"}, "field")

    running(door, scenario)


def test_old_verdicts_are_forgotten_and_never_a_pending_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MAX_VERDICTS", 2)
    values = [{"refuse": f"number {number}"} for number in range(12)]
    door = jobs()
    assert verdicts(door, *values) == [value["refuse"] for value in values]
    assert len(door._verdicts) in (2, 3)  # the last one was pending


def test_a_client_that_leaves_makes_no_room_for_another_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "cores", lambda: 1)
    monkeypatch.setattr(admission, "QUICK_S", 5.0)
    monkeypatch.setattr(shares, "_QUEUE_S", 0.2)
    door, note = jobs(), tmp_path / "note"

    async def scenario() -> None:
        for number in range(2):
            leaving = asyncio.ensure_future(door.require("work", {"note": str(note), "": number}, "field"))
            await noted(note, number + 1)
            leaving.cancel()
        with pytest.raises(Refusal, match="busy; try again") as refused:
            await door.require("work", 3, "field")
        assert refused.value.status == 503
        for worker in pids(note):
            os.kill(worker, signal.SIGKILL)
        monkeypatch.setattr(shares, "_QUEUE_S", 60.0)
        await door.require("work", 3, "field")

    running(door, scenario)


def test_costly_jobs_of_eight_clients_leave_places_to_an_ordinary_one(tmp_path: Path) -> None:
    """Eight costly expressions used to hold both workers for 20 s of CPU time each, and 0 of 6 others got through."""
    door, seen = jobs(cpu_s=60.0), list[str]()

    async def one(number: int, value: Any) -> None:
        shares.current_client.set((f"connection {number}",))
        with suppress(Refusal):
            await door.require("work", value, "field")
        seen.append(str(value))

    async def scenario() -> None:
        hostile = [asyncio.create_task(one(number, {"spin": number})) for number in range(8)]
        await asyncio.sleep(0)
        await asyncio.gather(*(one(8, {"honest": number}) for number in range(3)))
        for task in hostile:
            task.cancel()

    running(door, scenario)
    assert sorted(seen) == [str({"honest": number}) for number in range(3)]


def test_a_worker_holds_its_own_connection_and_nothing_of_the_engine() -> None:
    with (Path(os.devnull)).open("rb") as held:
        assert held.fileno() > 2
        high = fcntl.fcntl(held, fcntl.F_DUPFD, held.fileno() + 3)  # next to the zygote's socket
        try:
            assert verdicts(jobs(), {"descriptors": 1}) == [""]
        finally:
            os.close(high)


def test_the_zygote_ends_with_the_engine() -> None:
    door = jobs()
    assert not door._zygote.getblocking(), "an engine waits for a zygote that reads no more"
    door._zygote.close()
    assert psutil.Process(door.pid).wait(60) is not None


def test_few_workers_run_at_a_time_and_half_of_the_cores_are_left_to_others() -> None:
    assert [admission.at_a_time(cores) for cores in (1, 2, 4, 32, 48, 192)] == [2, 2, 2, 2, 3, 8]
    assert [admission.threads_of(cores) for cores in (1, 2, 4, 16, 32, 192)] == [1, 1, 1, 2, 4, 8]
