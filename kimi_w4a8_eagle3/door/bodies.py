"""Read request bodies within a size, a time, and a memory that all unfinished bodies share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from .answers import Receive, Refusal

DEADLINE_S = 30.0
SHARE = 8  # whole bodies that fit into the memory for unfinished ones


class BodyReader:
    """Reads bodies of at most `max_bytes`; all that are unfinished together hold at most eight times as much."""

    def __init__(self, max_bytes: int, deadline_s: float = DEADLINE_S) -> None:
        self._max_bytes, self._deadline_s = max_bytes, deadline_s
        self._held = 0

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the whole body, whatever length it claims; None when the client disconnects first."""
        chunks: list[bytes] = []
        try:
            return await asyncio.wait_for(self._read(headers, receive, chunks), self._deadline_s)
        except asyncio.TimeoutError:
            why = f"the body did not arrive within {self._deadline_s:.0f} s"
            raise Refusal(why, status=408) from None
        finally:
            self._held -= sum(map(len, chunks))

    async def _read(self, headers: Mapping[bytes, bytes], receive: Receive, chunks: list[bytes]) -> bytes | None:
        limit = self._max_bytes
        too_large = Refusal(f"the request is larger than {limit} bytes", status=413)
        claimed = headers.get(b"content-length", b"0")
        if claimed.isdigit() and (len(claimed) > 18 or int(claimed) > 2 * limit):  # int() refuses very long numbers
            raise too_large
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= limit:
                if self._held + len(chunk) > SHARE * limit:
                    raise Refusal("unfinished bodies of other requests hold all memory for them; try again", status=503)
                self._held += len(chunk)
                chunks.append(chunk)
            elif size > 2 * limit:  # below this, read and drop the rest: most clients read only after they have sent
                raise too_large
            if not message.get("more_body", False):
                break
        if size > limit:
            raise too_large
        return b"".join(chunks)
