"""The door reads a picture's format and size from its header and never decodes its pixels."""

from __future__ import annotations

import pytest
from PIL import ImageFile
from support.pictures import claiming, moving, noise, picture

from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.pictures import MAX_PIXELS, check_pictures

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
    """Pillow decodes in `load`."""

    def load(self: ImageFile.ImageFile) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pictures_pass(form: str) -> None:
    url = picture(noise(30, 20, form))
    assert len(url) - check_pictures([("messages", url)] * 2) / 2 == len("data:image/png;base64")


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_broken_pictures_are_refused(source: str) -> None:
    with pytest.raises(Refusal, match="messages holds a picture that is broken or not one of PNG") as refused:
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
