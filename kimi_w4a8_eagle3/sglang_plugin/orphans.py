"""No process of an engine outlives the engine's main process, whenever that one dies, nor that one its supervisor.

SGLang asks the kernel for a SIGKILL at the parent's death only after about ten seconds of imports. A detokenizer
whose parent was killed in that time never gets it, and waits for ever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

from ..engine.leftovers import given_folder

_PR_SET_PDEATHSIG = 1
_LOOK_S, _GRACE_S = 1.0, 30.0


def end_with_parent(spawning: bool = False) -> None:
    """End this process when its parent does, or now where the parent is gone already; nothing in a main process.

    spawning: this is a child that still imports the main module; who its parent is, Python does not say yet.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or (parent is None and not spawning):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_supervisor(*_: Any, **__: Any) -> None:
    """See to it that this engine ends within 30 s of the supervisor that gave it its folder; nothing without one.

    The kernel sends SIGTERM then, and SGLang drains: but once its scheduler has ended, a request that waits for the
    scheduler's answer is never finished. Call it when the engine has its children, because it starts a thread.
    """
    if given_folder() is not None:
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()


def _end_after(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_LOOK_S)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
