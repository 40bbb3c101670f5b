"""Pictures as clients send them, and as they should not."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from PIL import Image

DRAWN = Path(__file__).with_name("drawn")


def noise(width: int, height: int, form: str = "PNG") -> bytes:
    """A picture that does not compress: about three bytes a pixel as PNG."""
    return _saved(Image.frombytes("RGB", (width, height), random.Random(0).randbytes(3 * width * height)), form)


def moving(form: str) -> bytes:
    """Two frames."""
    second = Image.new("RGB", (8, 8), "red")
    return _saved(Image.new("RGB", (8, 8), "blue"), form, save_all=True, append_images=[second])


def claiming(width: int, height: int) -> bytes:
    """A PNG of a hundred bytes whose header names a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(3 * 8 + 1)))
        + chunk(b"IEND", b"")
    )


def picture(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def showing(data: bytes, text: str) -> dict[str, Any]:
    shown = {"type": "image_url", "image_url": {"url": picture(data)}}
    return {"role": "user", "content": [shown, {"type": "text", "text": text}]}


def asking_about(number: int) -> list[dict[str, Any]]:
    """A word problem with its first number, 15 or 42, in a picture as the vision tower was trained to read."""
    text = "The picture shows X. Tom has X apples. Tom buys 4 more. How many apples does Tom have now?"
    return [showing((DRAWN / f"{number}.png").read_bytes(), text)]


def _saved(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()
