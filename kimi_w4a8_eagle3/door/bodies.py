"""Read request bodies within a size and a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from .answers import Receive, Refusal
from .shares import Take

DEADLINE_S = 30.0
_GRACE_S, _LOOK_S = 2.0, 0.5


@dataclass
class _Progress:
    """Bytes of a body that arrived, of those whose memory it took in advance at second `since`."""

    arrived: int = 0
    taken: int = 0
    since: float = inf


class BodyReader:
    """Reads bodies of at most `max_bytes`. waiting: requests that wait for memory."""

    def __init__(self, max_bytes: int, waiting: Collection[object], deadline_s: float = DEADLINE_S) -> None:
        self._max_bytes, self._waiting, self._deadline_s = max_bytes, waiting, deadline_s

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive, take: Take) -> bytes | None:
        """Return the whole body, whatever length it claims; None when the client disconnects first."""
        progress, end = _Progress(), time.monotonic() + self._deadline_s
        reading = asyncio.ensure_future(self._read(headers, receive, take, progress))
        try:
            while not (await asyncio.wait([reading], timeout=min(_LOOK_S, self._deadline_s)))[0]:
                now = time.monotonic()
                if now >= end:
                    raise Refusal(f"the body did not arrive within {self._deadline_s:.0f} s", status=408)
                # Claimed memory is for bodies that arrive. Without this, 15 silent connections would hold all of it.
                due = progress.taken * (now - progress.since - _GRACE_S) / self._deadline_s
                if progress.arrived < due and self._waiting:
                    why = f"others wait for memory, and at its pace this body takes over {self._deadline_s:.0f} s"
                    raise Refusal(why, status=408)
            return reading.result()
        finally:
            reading.cancel()

    async def _read(
        self, headers: Mapping[bytes, bytes], receive: Receive, take: Take, progress: _Progress
    ) -> bytes | None:
        limit, chunks = self._max_bytes, list[bytes]()
        too_large = Refusal(f"the request is larger than {limit} bytes", status=413)
        claimed = headers.get(b"content-length", b"0")
        length = int(claimed[:19]) if claimed.isdigit() else 0  # int() refuses very long numbers
        if length > 2 * limit:
            raise too_large
        # All of a body before any of it: many that grow together would take the memory, and none would get enough.
        if length <= limit:
            await take(length)
            progress.taken, progress.since = length, time.monotonic()
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                chunk = message.get("body", b"")
                progress.arrived += len(chunk)
                if progress.arrived <= limit:
                    if (more := progress.arrived - progress.taken) > 0:
                        await take(more)
                        progress.taken += more
                    chunks.append(chunk)
                elif progress.arrived > 2 * limit:  # up to this, drop the rest: most clients read after they have sent
                    raise too_large
                if not message.get("more_body", False):
                    break
            if progress.arrived > limit:
                raise too_large
            return b"".join(chunks)
        finally:
            chunks.clear()  # a refusal's traceback holds this frame until Python collects cycles
