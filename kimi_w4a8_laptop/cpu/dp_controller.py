"""SGLang's process between the HTTP server and the groups of DP attention asks for requests in a loop without a pause.

An idle engine kept one core busy with it, and on a CPU the schedulers need that core.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sglang.srt.managers.io_struct import sock_recv

TARGET = "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop"
_WAIT_MS = 1000  # between two signs of life for its watchdog


def event_loop(controller: Any) -> NoReturn:
    """REPLACE hook: hand each request on as before, and wait for the next one."""
    while True:
        controller.soft_watchdog.feed()
        if controller.recv_from_tokenizer.poll(_WAIT_MS):
            controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))
