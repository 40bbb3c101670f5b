"""A program that writes down what it was started with, in the file of its first argument, and ends or waits.

`python -m ... support.portrait FILE end CODE` or `... FILE wait`.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path

_CRASH = 1 << (signal.SIGSEGV - 1)  # caught by a library that SGLang imports


def portrait() -> dict[str, object]:
    """Everything that a process inherits or is given."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = {
        int(link.name): str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    }
    return {
        "arguments": sys.argv[1:],
        "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "parent": os.getppid(),
        "leads a session": os.getsid(0) == os.getpid(),
        "folder": str(Path.cwd()),
        "temporary": tempfile.gettempdir(),
        "standard streams": [descriptors[number] for number in (0, 1, 2)],
        "signals": [status["SigBlk"], status["SigIgn"], int(status["SigCgt"], 16) & ~_CRASH],
        "umask": status["Umask"],
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "threads": status["Threads"],
        "main process": multiprocessing.parent_process() is None,
        "main thread": threading.current_thread() is threading.main_thread(),
        "sockets": sum(target.startswith("socket:") for target in descriptors.values()),
    }


if __name__ == "__main__":
    file, how, *code = sys.argv[1:]
    unfinished = Path(file + ".tmp")
    found = {"portrait": portrait(), "environ": dict(os.environ)}
    if torch := sys.modules.get("torch"):
        found["onednn_bf16"] = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    unfinished.write_text(json.dumps(found))
    print("written to", file, flush=True)
    unfinished.rename(file)
    if how == "wait":
        signal.pause()
    sys.exit(int(code[0]))
