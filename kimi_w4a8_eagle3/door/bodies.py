"""Read request bodies within a size and a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from .answers import Receive, Refusal
from .shares import Take

DEADLINE_S = 30.0


class BodyReader:
    """Reads bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int, deadline_s: float = DEADLINE_S) -> None:
        self._max_bytes, self._deadline_s = max_bytes, deadline_s

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive, take: Take) -> bytes | None:
        """Return the whole body, whatever length it claims; None when the client disconnects first."""
        try:
            return await asyncio.wait_for(self._read(headers, receive, take), self._deadline_s)
        except asyncio.TimeoutError:
            why = f"the body did not arrive within {self._deadline_s:.0f} s"
            raise Refusal(why, status=408) from None

    async def _read(self, headers: Mapping[bytes, bytes], receive: Receive, take: Take) -> bytes | None:
        limit, chunks = self._max_bytes, list[bytes]()
        too_large = Refusal(f"the request is larger than {limit} bytes", status=413)
        claimed = headers.get(b"content-length", b"0")
        if claimed.isdigit() and (len(claimed) > 18 or int(claimed) > 2 * limit):  # int() refuses very long numbers
            raise too_large
        taken, size = 0, 0
        # All of a body before any of it: many that grow together would take the memory, and none would get enough.
        if claimed.isdigit() and int(claimed) <= limit:
            taken = int(claimed)
            await take(taken)
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                chunk = message.get("body", b"")
                size += len(chunk)
                if size <= limit:
                    if size > taken:
                        await take(size - taken)
                        taken = size
                    chunks.append(chunk)
                elif (
                    size > 2 * limit
                ):  # below this, read and drop the rest: most clients read only after they have sent
                    raise too_large
                if not message.get("more_body", False):
                    break
            if size > limit:
                raise too_large
            return b"".join(chunks)
        finally:
            chunks.clear()  # a refusal's traceback holds this frame until Python collects cycles
