"""No process of an engine outlives the engine's main process, whenever that one dies.

SGLang asks the kernel for a SIGKILL at the parent's death only after about ten seconds of imports. A detokenizer
whose parent was killed in that time never gets it, and waits for ever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


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
