"""Pictures in a body: their kind and size, from the header alone, before the engine decodes one.

Only `data:` URLs are read. What a server fetches itself, nobody has seen before it is decoded, and whoever asks for it
chooses whom the server talks to.
"""

from __future__ import annotations

import io
from typing import Any

import pybase64
from PIL import Image

from .answers import Refusal

MAX_PIXELS = 2**26  # of all pictures of one request: SGLang decodes them together, at three bytes a pixel and more
_MAX_PICTURES = 256
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def check_pictures(sources: list[tuple[str, Any]]) -> int:
    """The characters of all pictures, given as (field, source); raises Refusal when the engine must not decode one."""
    for name, source in sources:
        if not (isinstance(source, str) and source.startswith("data:")):
            raise Refusal(
                "the server fetches no media, neither from the network nor from files; send a data: URL", param=name
            )
    if len(sources) > _MAX_PICTURES:
        name = sources[0][0]
        raise Refusal(f"{name} holds {len(sources)} pictures; at most {_MAX_PICTURES} are read", param=name)
    pixels = 0
    for name, source in sources:
        pixels += _pixels(source, name)
        if pixels > MAX_PIXELS:
            raise Refusal(f"the pictures under {name} have more than {MAX_PIXELS} pixels in all", param=name)
    return sum(len(source) - source.index(",") for _, source in sources)


def _pixels(source: str, name: str) -> int:
    """How many pixels the picture in a data: URL says that it has."""
    try:
        data = pybase64.b64decode(source.partition(",")[2], validate=True)  # as SGLang does, whatever type is declared
        with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            # A photograph with a preview beside it is MPO to Pillow, and none that moves.
            moves = picture.format != "MPO" and getattr(picture, "is_animated", False)
            width, height = picture.size
    except Image.DecompressionBombError:
        return MAX_PIXELS + 1
    except Exception:  # Pillow's readers raise whatever a broken header leads to
        raise Refusal(f"{name} holds a picture that is broken, or none of {', '.join(_FORMATS)}", param=name) from None
    if moves:
        raise Refusal(f"{name} holds a picture that moves; send one frame of it", param=name)
    return width * height
