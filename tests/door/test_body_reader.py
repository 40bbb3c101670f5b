"""The exact limits of a body: its size and the size that it claims."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.bodies import BodyReader

TAKEN = list[int]()


def read(reader: BodyReader, pending: list[bytes], claimed: bytes = b"0") -> bytes | None:
    async def receive() -> dict[str, Any]:
        if not pending:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": pending.pop(0)} | ({"more_body": True} if pending else {})

    async def take(size: int) -> None:
        TAKEN.append(size)

    TAKEN.clear()
    return asyncio.run(reader.read({b"content-length": claimed}, receive, take))


def status(reader: BodyReader, pending: list[bytes], claimed: bytes = b"0") -> int:
    with pytest.raises(Refusal) as refusal:
        read(reader, pending, claimed)
    return refusal.value.status


def test_a_body_of_the_largest_size_is_read_and_a_byte_more_is_not() -> None:
    reader = BodyReader(100, [1])
    assert read(reader, [b"x" * 60, b"x" * 40]) == b"x" * 100 and TAKEN == [0, 60, 40]
    assert read(reader, [b"x" * 100], claimed=b"200") == b"x" * 100 and TAKEN == [100]
    assert read(reader, [b"x" * 60, b"x" * 39, b"x"], claimed=b"60") == b"x" * 100 and TAKEN == [60, 39, 1]
    assert status(reader, [b"x" * 101]) == 413
    assert status(reader, [b"x" * 101], claimed=b"101") == 413 and TAKEN == []


@pytest.mark.parametrize(("chunks", "left"), [([150, 50], 0), ([200, 4], 0), ([201, 4], 1)])
def test_a_body_up_to_twice_the_size_is_read_to_its_end_because_most_clients_send_it_first(
    chunks: list[int], left: int
) -> None:
    pending = [b"x" * size for size in chunks]
    assert status(BodyReader(100, [1]), pending) == 413 and len(pending) == left


def test_what_a_body_claims_is_refused_before_it_is_read() -> None:
    for claimed in (b"201", b"9" * 5000):
        assert status(BodyReader(100, [1]), [], claimed) == 413  # there is nothing to read
    assert read(BodyReader(100, [1]), [b"x"], b"many") == b"x" and TAKEN == [0, 1]


def test_a_body_that_does_not_arrive_is_refused_at_the_deadline() -> None:
    assert status(BodyReader(100, [], deadline_s=0.01), [], b"100") == 408
