"""Pictures of numbers: four places side by side, digits at the right, in fonts that come with Pillow and matplotlib."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from .dialogues import PICTURE_TOKENS

CELL = 28  # pixels of a place, each way, in a picture that is read without being scaled
FONTS = (
    "", "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "cmr10", "cmb10", "cmtt10",
)  # fmt: skip
UNSEEN_FONTS = ("DejaVuSerif", "cmss10", "DejaVuSansMono-BoldOblique")  # never trained on
MOST = 10**PICTURE_TOKENS - 1
_CONTRAST = 90  # of 255, between ink and paper


def ink(number: int, rng: random.Random, fonts: tuple[str, ...] = FONTS, scale: int = 1) -> Image.Image:
    """The number's shape, one byte a pixel; one font, one size, each digit a little off the middle of its place."""
    font = _font(rng.choice(fonts), rng.randint(17, 26) * scale)
    shape = Image.new("L", (PICTURE_TOKENS * CELL * scale, CELL * scale))
    draw = ImageDraw.Draw(shape)
    for place, digit in enumerate(f"{number:>{PICTURE_TOKENS}}"):
        x, y = (place + 0.5) * CELL + rng.uniform(-3, 3), 0.5 * CELL + rng.uniform(-2, 2)
        draw.text((x * scale, y * scale), digit, 255, font, anchor="mm")
    return shape


def colours(rng: random.Random) -> tuple[list[int], list[int]]:
    """Dark ink and light paper."""
    while True:
        one, other = ([rng.randrange(256) for _ in range(3)] for _ in range(2))
        if sum(other) - sum(one) > 3 * _CONTRAST:
            return one, other


def picture(number: int, rng: random.Random, fonts: tuple[str, ...] = FONTS, scale: int = 1) -> Image.Image:
    """The number in colour."""
    shape = ink(number, rng, fonts, scale)
    one, other = colours(rng)
    return Image.composite(Image.new("RGB", shape.size, tuple(one)), Image.new("RGB", shape.size, tuple(other)), shape)


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if not name:
        return ImageFont.load_default(size)
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)
