"""Places go to the client that used least, and memory is never held to the last byte by one client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_w4a8_eagle3.door import bodies, shares
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.bodies import BodyReader
from kimi_w4a8_eagle3.door.shares import Places, Shares, current_client


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present second, in a list."""
    now = [1024.0]
    monkeypatch.setattr(shares, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run(clock: list[float], main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` in a loop whose clock jumps to the next timer, on a busy machine, too."""
    loop = asyncio.SelectorEventLoop()
    select, loop.time = loop._selector.select, lambda: clock[0]
    loop._selector.select = lambda timeout: (clock.append(clock.pop() + (timeout or 0.0)), select(0))[1]
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def test_a_place_goes_to_the_key_and_then_to_the_connection_that_used_least(clock: list[float]) -> None:
    def served(used: dict[str, float], clients: Any, number: int = 1, leaves: int = -1, kept: int = 0) -> str:
        """Return the connections in the order in which they get a place, for a second, while the others wait."""
        common, order = Shares(1), list[str]()
        for account, seconds in used.items():
            common.charge((account,), seconds)
        places = Places(number, common, kept)

        async def one(accounts: tuple[str, ...]) -> None:
            current_client.set(accounts)
            async with places.place():
                order.append(accounts[-1])
                clock[0] += 1.0

        async def main() -> None:
            tasks = [asyncio.create_task(one(accounts)) for accounts in clients]
            await asyncio.sleep(0)
            if leaves >= 0:
                tasks[leaves].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(main())
        return "".join(order)

    waiting = [("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("b", "5")]
    assert served({}, waiting) == "14253"
    assert served({"b": 60.0, "2": 30.0}, waiting) == "13245"
    assert served({}, [("1",), ("1",), ("1",), ("2",)]) == "1211"
    assert served({}, [("1",), ("2",), ("3",)], leaves=1) == "13"
    assert served({}, [("1",), ("2",), ("3",)], leaves=0)[-2:] == "23"  # the first one had its place already
    assert served({}, [("1",), ("2",), ("3",)], number=2) == "123"
    # the second place is for those who have used less than a second
    assert served({"1": 9.0, "2": 9.0}, [("1",), ("2",), ("3",)], number=2, kept=1) == "132"
    assert served({"1": 9.0, "2": 9.0}, [("1",), ("2",), ("3",)], number=2) == "123"


def test_who_waits_too_long_is_refused_and_what_was_used_is_forgotten(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_QUEUE_S", 0.01)
    common = Shares(1)
    places = Places(1, common)

    async def main() -> None:
        async with places.place():
            with pytest.raises(Refusal, match="busy; try again") as refusal:
                async with places.place():
                    raise AssertionError
            assert refusal.value.status == 503
        async with places.place():
            pass

    asyncio.run(main())
    common.charge(("a", "b"), 8.0)
    clock[0] += 20.0
    common.charge(("a",), 1.0)
    assert [common.used(account) for account in "abc"] == [3.0, 2.0, 0.0]
    for account in ["b", "c", "b", *map(str, range(4095))]:
        common.charge((account,), 1.0)
    assert list(common._used)[:2] == ["b", "0"] and len(common._used) == 4096


async def hold(common: Shares, accounts: str, after_s: float, for_s: float, *sizes: int) -> float | None:
    """Return when this client got the last of these sizes, which it then holds; None if it was refused."""
    current_client.set(tuple(accounts.split()))
    await asyncio.sleep(after_s)
    with suppress(Refusal), common.holding() as take:
        for size in sizes:
            await take(size)
        got = asyncio.get_running_loop().time() - 1024.0
        await asyncio.sleep(for_s)
        return got
    return None


def test_a_client_never_holds_more_memory_than_it_leaves_free(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[Any] = []
    monkeypatch.setattr(shares.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=trimmed.append))
    unit = 2**14  # memory is given back to the system after 1,024 of them
    common = Shares(1000 * unit)
    asked = {"key 1": (300, 200), "key 2": (1,), "other 3": (501,), "other 4": (250,), "third 5": (125,)}

    async def main() -> list[float | None]:
        wanted = {name: [size * unit for size in sizes] for name, sizes in asked.items()}
        tasks = [asyncio.create_task(hold(common, name, 0.0, 5.0, *sizes)) for name, sizes in wanted.items()]
        await asyncio.sleep(4.0)
        assert (common._total, common._held["key"], len(common.waiting)) == (875 * unit, 500 * unit, 2)
        found = [await task for task in tasks]
        assert clock == [1034.0] and common._released == 876 * unit
        found += [await hold(common, "key 1", 0.0, 0.0, size * unit) for size in (148, 1)]
        await asyncio.sleep(4.9)
        assert not common._held and common._total == 0 and common._released == 1025 * unit
        await asyncio.sleep(0.2)
        assert common._released == 0
        while not trimmed:
            await asyncio.sleep(0.1)
        return found

    assert run(clock, main()) == [0.0, 5.0, None, 0.0, 0.0, 10.0, 10.0]
    assert trimmed == [0]


def test_memory_goes_to_the_request_that_waits_longest_and_fits(clock: list[float]) -> None:
    common = Shares(1000)
    asked = [("a", 0.0, 2.0, 400), ("b", 0.5, 2.0, 350), ("c", 0.75, 2.0, 350), ("small", 1.0, 0.5, 300)]
    asked += [("late", 2.0, 2.0, 350), ("leaves", 1.5, 2.0, 350)]

    async def main() -> list[float | None]:
        tasks = [asyncio.create_task(hold(common, *request)) for request in asked]
        await tasks[2]
        assert common._held["leaves"] == 350 and tasks.pop().cancel()  # in the moment in which its turn comes
        return [await task for task in tasks]

    assert run(clock, main()) == [0.0, 2.0, 4.0, 1.0, 6.0] and common._total == 0


async def read(common: Shares, client: str, pieces: int, size: int = 1, pause_s: float = 0.0) -> int:
    """Read a body of so many pieces, hold it for 5 ms, and return the bytes held by all then, or the error's status."""
    current_client.set(tuple(client.split()))
    left = [b"x" * size] * pieces

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause_s if left else 60)
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    try:
        with common.holding() as take:
            claimed = b"%d" % (size * pieces or 32)
            body = await BodyReader(32, common.waiting).read({b"content-length": claimed}, receive, take)
            assert body == b"x" * size * pieces
            held = common._total
            await asyncio.sleep(0.005)
            return held
    except Refusal as refusal:
        return refusal.status


@pytest.mark.parametrize(("key", "together"), [("", 17), ("key ", 9)])  # as many at once as leave as much free
def test_bodies_that_do_not_fit_together_wait_for_each_other(key: str, together: int) -> None:
    """24 bodies of 28 MB that grew together took all memory, and all got 503. These are a thousandth of it."""
    common = Shares(shares.BODIES * 32)

    async def main() -> list[int]:
        return await asyncio.gather(*(read(common, f"{key}{number}", 28) for number in range(24)))

    held = asyncio.run(main())
    assert max(held) == 28 * together and not [size for size in held if size % 28]


@pytest.mark.parametrize(("honest", "silent"), [([], set()), ([32], {408})], ids=["alone", "waited for"])
def test_claimed_memory_that_no_body_fills_goes_to_a_body_that_waits(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, honest: list[int], silent: set[int]
) -> None:
    """15 connections that claimed the largest body and sent nothing held all memory for 30 s: others got 503."""
    monkeypatch.setattr(bodies, "time", shares.time)
    common = Shares(shares.BODIES * 32)

    async def main() -> tuple[set[int], int, list[int]]:
        silence = [asyncio.create_task(read(common, str(number), 0)) for number in range(15)]
        slow = asyncio.create_task(read(common, "15", 2, 8, 1.5))  # takes what is left, and is in time
        await asyncio.sleep(1.0)
        waited = await asyncio.gather(*(read(common, "16", size // 8, 8) for size in honest))
        assert not honest or 1026.5 <= clock[0] < 1027.0  # the first look after 2 s
        await asyncio.wait(silence, timeout=5.0)
        return {task.result() for task in silence if task.done()}, await slow % 16, waited

    found, slow, waited = run(clock, main())
    assert (found, slow, len(waited)) == (silent, 0, len(honest)) and 503 not in waited
