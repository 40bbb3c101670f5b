"""Check the pictures of a request in a process of its own, which opens and decodes them as the engine will.

Only `data:` URLs are accepted. Media that the server fetches could not be checked before they are decoded, and a client
could make the server connect to any address.

The engine opens pictures in a thread that shares the interpreter with its event loop. Many small parts in a header take
Pillow minutes, so pictures that take longer than their pixels explain are refused.
"""

from __future__ import annotations

import io
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pybase64

from .errors import Refusal

MAX_PIXELS = 2**26  # of all pictures of one request: SGLang decodes them together, at three or more bytes per pixel
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_BROKEN = f"one of the pictures is broken, or is not one of {', '.join(_FORMATS)}"
MAX_PICTURES = 256
# A picture may take this long, and more for its pixels: PNG and WebP take 25 to 60 ns for one.
_USUAL_S, _PIXEL_S = 0.2, 1e-7


@dataclass(frozen=True)
class Pads:
    """Tokens that the engine puts in place of a picture, by the checkpoint's own numbers.

    It scales a picture down until its patches fit, and pads it to whole tokens (SGLang's processor of Kimi-K2.5).
    """

    patch_size: int
    merge_kernel_size: int
    in_patch_limit: int
    patch_limit_on_one_side: int
    fixed_output_tokens: int | None = None

    @classmethod
    def of(cls, checkpoint: Path) -> Pads | None:
        """Return the numbers of a checkpoint, or None for one that reads no pictures."""
        file = checkpoint / "preprocessor_config.json"
        if json.loads((checkpoint / "config.json").read_text()).get("language_model_only") or not file.is_file():
            return None
        given = json.loads(file.read_text()).get("media_proc_cfg") or {}
        return cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of a picture of so many pixels."""
        if self.fixed_output_tokens is not None:
            return self.fixed_output_tokens
        longest = self.patch_limit_on_one_side * self.patch_size
        patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        scale = min(1.0, math.sqrt(self.in_patch_limit / patches), longest / width, longest / height)
        side = self.patch_size * self.merge_kernel_size
        return math.prod(-(-min(max(1, int(size * scale)), longest) // side) for size in (width, height))


def check_pictures(sources: list[str]) -> list[tuple[int, int]]:
    """Decode all pictures and return their sizes; raise Refusal for one that the engine should not decode."""
    if len(sources) > MAX_PICTURES:
        raise Refusal(f"messages holds {len(sources)} pictures; at most {MAX_PICTURES} are read", param="messages")
    start = time.process_time()
    pictures = [_opened(source) for source in sources]
    pixels = sum(picture.width * picture.height for picture in pictures)
    if pixels > MAX_PIXELS:
        raise Refusal(f"the pictures have {pixels} pixels in all, more than {MAX_PIXELS}; send smaller ones")
    if any(getattr(picture, "is_animated", False) for picture in pictures):
        raise Refusal("one of the pictures is animated; send a single frame")
    for picture in pictures:
        try:
            picture.load()
        except Exception:
            raise Refusal(_BROKEN) from None
    seconds, usual_s = time.process_time() - start, _USUAL_S + pixels * _PIXEL_S
    if seconds > usual_s:
        raise Refusal(
            f"the pictures take {seconds:.1f} s to decode, and {usual_s:.1f} s are usual for their pixels; save them "
            "again without metadata"
        )
    return [picture.size for picture in pictures]


def _opened(source: str) -> Any:
    from PIL import Image  # as above

    Image.MAX_IMAGE_PIXELS = None  # ours is MAX_PIXELS
    try:
        data = pybase64.b64decode(source.partition(",")[2], validate=True)  # as SGLang does, whatever the media type
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception:  # Pillow's readers raise all kinds for broken bytes
        raise Refusal(_BROKEN) from None
