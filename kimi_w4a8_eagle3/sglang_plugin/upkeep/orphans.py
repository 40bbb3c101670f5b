"""End the processes of an engine with the engine's main process, and the main process with its supervisor.

SGLang asks the kernel for a SIGKILL at the parent's death only after about ten seconds of imports. A detokenizer
whose parent is killed in that time never gets the signal and waits forever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

from ...engine.given_folder import given_folder
from ..hooks import Feature

FEATURE = Feature(
    "engines that end with their supervisor", remove_when="SGLang's drain ends when its scheduler is gone"
)
_PR_SET_PDEATHSIG = 1
_LOOK_S, _GRACE_S = 1.0, 30.0


def end_with_parent(spawning: bool = False) -> None:
    """End this process when its parent ends, or now if the parent is gone; do nothing in a main process.

    spawning: this is a child that still imports the main module, so `parent_process` does not name its parent yet.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or (parent is None and not spawning):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


@FEATURE.before("sglang.srt.entrypoints.http_server._setup_and_run_http_server")
def end_with_supervisor(*_: object, **__: object) -> None:
    """End this engine at most 30 s after the supervisor that started it; do nothing without a supervisor.

    At the supervisor's death the kernel sends SIGTERM and SGLang drains. But a request that waits for a scheduler that
    has ended never finishes. This starts a thread, so it runs when the engine has started its child processes.
    """
    if given_folder() is not None:
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()


def _end_after(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_LOOK_S)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
