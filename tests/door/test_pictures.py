"""The door reads a picture's format, size and parts from its bytes, without Pillow."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image, ImageFile
from support.pictures import claiming, moving, noise, picture

from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.pictures import MAX_PIXELS, _header, check_pictures

SIDE = int(MAX_PIXELS**0.5)
BROKEN = {
    "no base64": "data:image/png;base64,%%%%",
    "nothing": "data:",
    "text": "data:text/plain,hello",
    "another kind": picture(noise(8, 8, "TIFF")),
    "a cut header": picture(noise(8, 8)[:20]),
    "no size": picture(claiming(0, 5)),
}


@pytest.fixture(autouse=True)
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow reads all parts of a header in `open` and decodes in `load`."""

    def fail(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    monkeypatch.setattr(Image, "open", fail)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pictures_pass(form: str) -> None:
    url = picture(noise(30, 20, form))
    assert len(url) - check_pictures([("messages", url)] * 2) / 2 == len("data:image/png;base64")


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_broken_pictures_are_refused(source: str) -> None:
    with pytest.raises(Refusal, match="messages holds a picture that is broken, has too many") as refused:
        check_pictures([("messages", picture(noise(8, 8))), ("messages", source)])
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF"])
def test_animated_pictures_are_refused(form: str) -> None:
    with pytest.raises(Refusal, match="image_data holds an animated picture") as refused:
        check_pictures([("image_data", picture(moving(form)))])
    assert refused.value.param == "image_data"


@pytest.mark.parametrize(
    "sizes",
    [[(SIDE, SIDE + 1)], [(2**31 - 1, 2**31 - 1)], [(SIDE, SIDE), (1, 1)]],
    ids=["one", "a bomb to Pillow", "together"],
)
def test_too_many_pixels(sizes: list[tuple[int, int]]) -> None:
    with pytest.raises(Refusal, match="more than 67108864 pixels in all") as refused:
        check_pictures([("input", picture(claiming(*size))) for size in sizes])
    assert refused.value.param == "input"


def test_as_many_pixels_as_are_read() -> None:
    check_pictures([("input", picture(claiming(SIDE, SIDE // 2)))] * 2)


def test_too_many_pictures() -> None:
    with pytest.raises(Refusal, match="holds 257 pictures"):
        check_pictures([("input", picture(claiming(1, 1)))] * 257)


@pytest.mark.parametrize(
    "source", ["https://example.org/x.png", "file:///etc/passwd", "/etc/passwd", "iVBORw0KGgo=", {}]
)
def test_nothing_is_fetched(source: object) -> None:
    with pytest.raises(Refusal, match="fetches no media") as refused:
        check_pictures([("messages", picture(noise(8, 8))), ("messages", source)])
    assert refused.value.param == "messages"


def png(*parts: tuple[bytes, bytes]) -> bytes:
    """Return a PNG with these chunks between its header and its pixels."""
    whole = claiming(8, 8)
    made = [struct.pack(">I", len(data)) + kind + data + bytes(4) for kind, data in parts]
    return whole[:33] + b"".join(made) + whole[33:]


def jpeg(segments: int, size: int) -> bytes:
    whole = noise(8, 8, "JPEG")
    return whole[:2] + (b"\xff\xe1" + struct.pack(">H", size + 8) + b"Exif\0\0" + bytes(size)) * segments + whole[2:]


def gif(blocks: int) -> bytes:
    whole = noise(8, 8, "GIF")
    return whole[:-1] + b"\x21\xfe" + b"\x01a" * blocks + b"\0;"


TEXT = (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20)))
MANY_PARTS = {
    "Exif segments of a JPEG": jpeg(500_000, 4),
    "chunks of a PNG": png(*[(b"tEXt", b"a\0b")] * 500_000),
    "blocks of a GIF": gif(4_000_000),
}


@pytest.mark.parametrize("data", MANY_PARTS.values(), ids=MANY_PARTS)
def test_many_small_parts_are_refused_after_a_few(data: bytes) -> None:
    """Pillow took 65 s for the first. The work here is counted in parts, so it is at most a step per 128 bytes."""
    with pytest.raises(Refusal, match="has too many parts"):
        check_pictures([("messages", picture(data))])


def test_texts_that_inflate_are_counted_over_all_pictures() -> None:
    check_pictures([("messages", picture(png(*[TEXT] * 32)))] * 2)
    with pytest.raises(Refusal, match="more than 64 compressed texts"):
        check_pictures([("messages", picture(png(*[TEXT] * 13)))] * 5)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("lossless", [False, True])
def test_sizes_are_those_that_pillow_finds(form: str, lossless: bool) -> None:
    made = io.BytesIO()
    Image.new("RGBA" if lossless and form == "WEBP" else "RGB", (137, 91), "red").save(
        made, form, progressive=lossless, lossless=lossless, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0" if lossless else b""
    )
    header = _header(made.getvalue())
    assert (header.width, header.height) == (137, 91)


def test_a_frame_beyond_the_canvas_counts() -> None:
    data = bytearray(noise(8, 8, "GIF"))
    at = data.index(b"\x2c\0\0\0\0\x08\0\x08\0")
    data[at + 1 : at + 3] = struct.pack("<H", 60_000)
    assert _header(bytes(data)).width == 60_008
