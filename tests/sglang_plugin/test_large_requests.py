"""Large requests begin in a thread, wait and end in the event loop, and schemas of tools are checked once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from kimi_w4a8_eagle3.door.alive import WaitingClient
from kimi_w4a8_eagle3.door.large import large_request
from kimi_w4a8_eagle3.door.shares import Places, Shares, current_client
from kimi_w4a8_eagle3.sglang_plugin.http import large_requests
from kimi_w4a8_eagle3.sglang_plugin.http.door import generate_request
from kimi_w4a8_eagle3.sglang_plugin.http.large_requests import (
    begin,
    check_schema,
    in_event_loop,
    tokenize,
)


def places() -> Places:
    return Places(1, Shares(1))


def in_loop() -> bool:
    return threading.current_thread() is threading.main_thread()


async def numbers() -> AsyncIterator[tuple[int, bool]]:
    for number in range(2):
        yield number, in_loop()
        await asyncio.sleep(0)


async def endpoint(fail: str = "") -> list[Any]:
    where: list[Any] = [in_loop(), asyncio.get_running_loop() is not None]
    if fail == "before":
        raise ValueError("before")
    async for answer in in_event_loop(numbers()):
        where.append(answer)
    if fail == "after":
        raise ValueError("after")
    # what an endpoint calls inside of its own request stays where it is
    return [*where, await begin(in_the_loop)]


async def in_the_loop() -> bool:
    return in_loop()


def run(large: bool, fail: str = "") -> Any:
    async def request() -> Any:
        large_request.set(places() if large else None)
        return await begin(endpoint, fail)

    return asyncio.run(request())


def test_a_large_request_begins_in_a_thread_and_its_answers_come_in_the_event_loop() -> None:
    assert run(large=True) == [False, True, (0, True), (1, True), False]
    assert run(large=False) == [True, True, (0, True), (1, True), True]


@pytest.mark.parametrize("pictures", [True, False])
def test_tokens_are_checked_in_a_thread_and_pictures_are_loaded_from_the_event_loop(pictures: bool) -> None:
    async def request() -> tuple[object, list[bool]]:
        client, signs = WaitingClient(None, b"", AsyncMock()), list[bool]()
        client._accepted.set = lambda: signs.append(in_loop())  # type: ignore[method-assign]

        async def check(*_: object) -> bool:
            client.accept()
            return in_loop()

        large_request.set(places())
        found = await tokenize(check, None, SimpleNamespace(contains_mm_input=lambda: pictures))
        await asyncio.sleep(0)
        return found, signs

    assert asyncio.run(request()) == (pictures, [True])  # an event of asyncio is set in its loop


@pytest.mark.parametrize("fail", ["before", "after"])
def test_errors_reach_the_caller(fail: str) -> None:
    with pytest.raises(ValueError, match=fail):
        run(large=True, fail=fail)


def test_a_cancelled_request_ends_where_it_waits() -> None:
    ended: list[str] = []
    began = threading.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            await asyncio.sleep(0)
            raise
        finally:
            ended.append("closed")

    async def main() -> None:
        large_request.set(places())
        task = asyncio.ensure_future(begin(waits))
        while not began.is_set():
            await asyncio.sleep(0.01)
        await asyncio.wait([task], timeout=0.2)  # so that it waits
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == ["cancelled", "closed"]


def test_clients_take_turns_in_the_thread() -> None:
    began: list[str] = []

    async def converts(client: str) -> None:
        began.append(client)
        time.sleep(0.02)

    async def request(client: str, common: Places) -> None:
        large_request.set(common)
        current_client.set((client,))
        await begin(converts, client)

    async def main() -> None:
        common = places()
        await asyncio.gather(*(request(client, common) for client in "aaaab"))

    asyncio.run(main())
    assert "".join(began) == "abaaa"


def test_a_valid_schema_is_checked_once_and_another_one_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_requests, "_valid", {})
    monkeypatch.setattr(large_requests, "_MAX_SCHEMAS", 2)
    checked: list[Any] = []

    def original(validator: object, schema: Any, **named: object) -> None:
        checked.append(schema)
        if schema == "bad":
            raise ValueError

    for schema in (1, 1, 2, 3, 3, 1, {"a", "b"}, {"a", "b"}):
        check_schema(original, None, schema)
    for _ in range(2):
        with pytest.raises(ValueError):
            check_schema(original, None, "bad")
    assert checked == [1, 2, 3, 1, {"a", "b"}, {"a", "b"}, "bad", "bad"]


def test_an_engine_without_a_server_gives_its_grammars_to_sglang() -> None:
    """`sglang.Engine` has no door whose processes could try them first."""

    async def answers() -> list[Any]:
        request = SimpleNamespace(sampling_params={"json_schema": "{}"})
        return [answer async for answer in generate_request(lambda *_: numbers(), SimpleNamespace(), request)]

    assert asyncio.run(answers()) == [(0, True), (1, True)]
