"""Signal handling of a supervisor: SIGTERM drains, SIGINT ends at once, SIGHUP renews."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(SystemExit):
    """SIGTERM or SIGINT reached this process. Not an `Exception`, because event loops catch those and continue."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = self.exit_code = 128 + number
        self.number = number


@contextmanager
def signals_raise(drain: bool = False, on_hangup: Callable[[], None] | None = None) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into Terminated in the main thread, so that every `with` block cleans up.

    A second signal does not interrupt the clean-up. With `drain`, the first SIGTERM begins to drain, and a second
    signal of either kind ends the drain. on_hangup: called on SIGHUP.
    """
    draining = False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal draining
        begins_drain = drain and not draining and number == signal.SIGTERM
        if not begins_drain:
            for ignored in (signal.SIGTERM, signal.SIGINT):
                signal.signal(ignored, signal.SIG_IGN)
        draining = begins_drain
        raise Terminated(number)

    def hangup(_number: int, _: FrameType | None) -> None:
        if on_hangup is not None:
            on_hangup()

    handlers = {signal.SIGTERM: end, signal.SIGINT: end} | ({signal.SIGHUP: hangup} if on_hangup else {})
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
