"""Signs of life in a stream whose first token is late, and the end of a request whose client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kimi_w4a8_eagle3.door.access import CHAT, MESSAGES, RESPONSES
from kimi_w4a8_eagle3.door.alive import WaitingClient, current

SCOPE = {"type": "http", "path": CHAT}
PINGS = {CHAT: b": ping\n\n", RESPONSES: b": ping\n\n", MESSAGES: b'event: ping\ndata: {"type": "ping"}\n\n'}
EVENT = b"data: {}\n\n"
Sent = list[dict[str, Any]]
Engine = Callable[[Callable[[int], Awaitable[None]], Any], Awaitable[None]]


def served(stream: str | None, engine: Engine, leaving: Callable[[], object] | None = None) -> Sent:
    """Return what a client gets; with `leaving` it leaves at once. engine: gets a wait for messages, and `send`."""
    sent: Sent = []

    async def session() -> None:
        came, left = asyncio.Condition(), asyncio.Event()

        async def send(message: Any) -> None:
            async with came:
                sent.append(message)
                came.notify_all()

        async def until(number: int) -> None:
            async with came:
                await came.wait_for(lambda: len(sent) >= number)

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["body"] == b"{}"
            if leaving is not None:
                client.at_leaving(leaving)
                left.set()
                assert (await receive())["type"] == "http.disconnect"
            await engine(until, send)

        client = WaitingClient(stream, b"{}", send, silence_s=0.01)
        await asyncio.wait_for(client.serve(app, SCOPE, receive, lambda send: send), 60)

    asyncio.run(session())
    return sent


def accept() -> None:
    client = current.get()
    assert client is not None
    client.accept()


def start(status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": []}


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


@pytest.mark.parametrize("stream", PINGS)
def test_headers_and_signs_come_before_the_first_token_and_between_two(stream: str) -> None:
    async def engine(until: Any, send: Any) -> None:
        accept()
        await until(3)
        await send(start())
        await send(body(EVENT))
        await until(6)
        await send(body(EVENT, more=False))

    sent = served(stream, engine)
    assert sent[0]["status"] == 200 and dict(sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert [part["body"] for part in sent[1:3]] == [PINGS[stream]] * 2
    data = [part["body"] for part in sent[1:] if part["body"] != PINGS[stream]]
    assert data == [EVENT, EVENT] and PINGS[stream] in [part["body"] for part in sent[4:-1]]
    assert sum(part["type"] == "http.response.start" for part in sent) == 1 and not sent[-1]["more_body"]


def test_no_sign_comes_before_the_checks_without_a_stream_inside_an_event_or_before_a_fast_refusal() -> None:
    async def refused(until: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        accept()
        await send(start(400))
        await send(body(b"{}", more=False))

    async def accepted(until: Any, send: Any) -> None:
        accept()
        await asyncio.sleep(0.05)
        await send(start())
        await send(body(b"data: {"))
        await asyncio.sleep(0.05)
        await send(body(b"}\n\n", more=False))

    assert served(CHAT, refused) == [start(400), body(b"{}", more=False)]
    assert served(None, accepted) == [start(), body(b"data: {"), body(b"}\n\n", more=False)]
    parts = [part["body"] for part in served(CHAT, accepted)[1:]]
    assert parts[-2:] == [b"data: {", b"}\n\n"] and set(parts[:-2]) == {PINGS[CHAT]}


@pytest.mark.parametrize(
    ("stream", "event"),
    [(CHAT, b'data: {"error": 1}\n\ndata: [DONE]\n\n'), (MESSAGES, b'event: error\ndata: {"error": 1}\n\n')],
)
def test_a_refusal_after_the_headers_is_an_event(stream: str, event: bytes) -> None:
    async def engine(until: Any, send: Any) -> None:
        accept()
        await until(2)
        await send(start(503))
        await send(body(b'{"error": 1}', more=False))

    sent = served(stream, engine)
    assert sent[0]["status"] == 200 and sent[-1] == body(event, more=False)


@pytest.mark.parametrize("stream", [CHAT, None])
def test_the_request_of_a_client_that_leaves_ends_at_once(stream: str | None) -> None:
    left: list[str] = []

    async def engine(until: Any, send: Any) -> None:
        assert left == ["left"]

    served(stream, engine, leaving=lambda: left.append("left"))
