"""Checks of the pictures in a body: their format and size, from the header alone, before the engine decodes them.

Only `data:` URLs are accepted. Media that the server fetches could not be checked before they are decoded, and a client
could make the server connect to any address.
"""

from __future__ import annotations

import io
from typing import Any

import pybase64
from PIL import Image

from .answers import Refusal

MAX_PIXELS = 2**26  # of all pictures of one request: SGLang decodes them together, at three or more bytes per pixel
_MAX_PICTURES = 256
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def check_pictures(sources: list[tuple[str, Any]]) -> int:
    """Return the characters of all pictures, given as (field, source); raise Refusal for one not to be decoded."""
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
    """Return the number of pixels that the header of a data: URL's picture claims."""
    try:
        data = pybase64.b64decode(source.partition(",")[2], validate=True)  # as SGLang does, whatever the media type
        with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            # Pillow calls a photograph with a preview MPO, and animated.
            moves = picture.format != "MPO" and getattr(picture, "is_animated", False)
            width, height = picture.size
    except Image.DecompressionBombError:
        return MAX_PIXELS + 1
    except Exception:  # a broken header makes Pillow's readers raise many kinds of errors
        why = f"{name} holds a picture that is broken or not one of {', '.join(_FORMATS)}"
        raise Refusal(why, param=name) from None
    if moves:
        raise Refusal(f"{name} holds an animated picture; send a single frame", param=name)
    return width * height
