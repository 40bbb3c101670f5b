"""A trial decodes pictures as the engine will, and refuses what costs more than its pixels explain."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from contextlib import nullcontext
from typing import Any

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine, renderer
from support.pictures import claiming, moving, noise, picture, showing

from kimi_w4a8_eagle3.gateway import pictures, trials
from kimi_w4a8_eagle3.gateway.errors import Refusal
from kimi_w4a8_eagle3.gateway.parts import picture as sent
from kimi_w4a8_eagle3.gateway.pictures import MAX_PIXELS, check_pictures
from kimi_w4a8_laptop import tiny

SIDE = int(MAX_PIXELS**0.5)
BROKEN = {
    "no base64": "data:image/png;base64,%%%%",
    "nothing": "data:,",
    "text": "data:text/plain,hello",
    "another kind": picture(noise(8, 8, "TIFF")),
    "a cut header": picture(noise(8, 8)[:20]),
    "cut pixels": picture(noise(8, 8)[:-40]),
    "no size": picture(claiming(0, 5)),
    "a character that base64 lacks": picture(noise(8, 8)) + "%",
}


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pictures_pass(form: str) -> None:
    url = picture(noise(30, 20, form))
    assert check_pictures([url] * 2) == [(30, 20)] * 2


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_broken_pictures_are_refused(source: str) -> None:
    with pytest.raises(Refusal, match="one of the pictures is broken, or is not one of PNG, JPEG, WEBP, GIF"):
        check_pictures([picture(noise(8, 8)), source])


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF"])
def test_animated_pictures_are_refused(form: str) -> None:
    with pytest.raises(Refusal, match="one of the pictures is animated"):
        check_pictures([picture(noise(8, 8)), picture(moving(form))])


@pytest.mark.parametrize(
    "sizes",
    [[(SIDE, SIDE + 1)], [(2**31 - 1, 2**31 - 1)], [(SIDE, SIDE), (1, 1)]],
    ids=["one", "a bomb to Pillow", "together"],
)
def test_too_many_pixels(sizes: list[tuple[int, int]]) -> None:
    with pytest.raises(Refusal, match="more than 67108864"):
        check_pictures([picture(claiming(*size)) for size in sizes])


def test_as_many_pixels_as_are_read() -> None:
    with pytest.raises(Refusal, match="broken"):  # the header passes
        check_pictures([picture(claiming(SIDE, SIDE // 2))] * 2)


def test_too_many_pictures() -> None:
    with pytest.raises(Refusal, match="holds 257 pictures"):
        check_pictures([picture(claiming(1, 1))] * 257)


@pytest.mark.parametrize(
    "source", ["https://example.org/x.png", "file:///etc/passwd", "/etc/passwd", "iVBORw0KGgo=", "data:", {}]
)
def test_nothing_is_fetched(source: object) -> None:
    with pytest.raises(Refusal, match="fetches no media"):
        sent(source)


@pytest.mark.parametrize("times", [1.0, 1.01])
def test_pictures_may_take_the_usual_time_of_all_their_pixels(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([5.0, 5.0 + 2.0 * times])
    monkeypatch.setattr(pictures, "_USUAL_S", 1.0)
    monkeypatch.setattr(pictures, "_PIXEL_S", 2.0**-7)
    monkeypatch.setattr(pictures.time, "process_time", lambda: next(clock))
    with pytest.raises(Refusal, match=r"take 2.0 s to decode, and 2.0 s are usual") if times > 1 else nullcontext():
        check_pictures([picture(noise(8, 8))] * 2)


WIDE = noise(112, 28)  # four tokens of the built-in model
COUNT, MESSAGES, CHAT = "/v1/messages/count_tokens", "/v1/messages", "/v1/chat/completions"


def turn(*data: bytes) -> dict[str, Any]:
    shown = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(one)}}
             for one in data]  # fmt: skip
    return {"role": "user", "content": [*shown, {"type": "text", "text": "?"}]}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_picture_counts_as_the_tokens_that_the_engine_puts_in_its_place() -> None:
    def ask(path: str, **more: Any) -> tuple[Any, list[Any]]:
        body = {"model": MODEL, "messages": [turn(WIDE, noise(8, 8))], **more}
        answer = App(engine := ScriptedEngine(), context=200).ask(path, body)
        return answer.json(), engine.seen

    found, seen = ask(COUNT)
    tokens = found["input_tokens"]
    _, [body] = ask(MESSAGES, max_tokens=200 - tokens)
    assert seen == [] and len(body["input_ids"]) == tokens - 3
    assert "exceed context limit" in ask(MESSAGES, max_tokens=201 - tokens)[0]["error"]["message"]
    shown = {"model": MODEL, "messages": [showing(WIDE, "?")]}
    App(engine := ScriptedEngine(), context=200).ask(CHAT, shown)
    assert engine.seen[0]["sampling_params"]["max_new_tokens"] == 200 - len(engine.seen[0]["input_ids"]) - 3


def test_a_model_without_eyes_refuses_a_picture_and_reads_past_a_past_one() -> None:
    app = App(ScriptedEngine(), sees=False)
    answer = app.ask(CHAT, {"model": MODEL, "messages": [showing(WIDE, "?")]})
    assert answer.status_code == 400 and "reads no pictures" in answer.json()["error"]["message"]
    said = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert app.ask(CHAT, {"model": MODEL, "messages": [showing(WIDE, "?"), *said]}).status_code == 200
    assert "[image: this server cannot read it]" in renderer().decode(app.engine.seen[0]["input_ids"])
    assert "image_data" not in app.engine.seen[0]


def png(*parts: tuple[bytes, bytes]) -> bytes:
    """Return a PNG with these chunks between its header and its pixels."""
    whole = noise(8, 8)
    made = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return whole[:33] + b"".join(made) + whole[33:]


def jpeg(segments: int, size: int) -> bytes:
    whole = noise(8, 8, "JPEG")
    return whole[:2] + (b"\xff\xe1" + struct.pack(">H", size + 8) + b"Exif\0\0" + bytes(size)) * segments + whole[2:]


TEXT = (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20 - 1)))
COSTLY = {
    "Exif segments of a JPEG": [jpeg(500_000, 4)],
    "chunks of a PNG": [png(*[(b"tEXt", b"a\0b")] * 200_000)],
    "texts that inflate, in all pictures": [png(*[TEXT] * 63)] * 16,
}


@pytest.mark.slow
@pytest.mark.parametrize("costly", COSTLY.values(), ids=COSTLY)
def test_what_takes_longer_than_its_pixels_is_refused_and_another_client_does_not_wait(
    costly: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow takes 65 s for the first and 14 s for 48 of the last."""
    monkeypatch.setattr(trials, "TRIAL_S", 20.0)

    async def both() -> str:
        tried = trials.Trials(tiny.target_path(), trusted=False, vocabulary=640, max_mask_ms=1e9)
        try:
            hostile = asyncio.ensure_future(tried.pictures([picture(one) for one in costly]))
            await tried.pictures([picture(noise(8, 8))])
            with pytest.raises(Refusal) as refused:
                await hostile
        finally:
            tried.close()
        assert (refused.value.status, refused.value.param) == (400, "messages")
        return refused.value.message

    message = asyncio.run(both())
    assert "save them again without metadata" in message or "cannot be decoded" in message
