"""The commands of ROCm that SGLang runs to read the GPUs' memory."""

from __future__ import annotations

import os

from . import library

_GPU = """  Name: gfx942
    Pool 1
      Segment: GLOBAL; FLAGS: COARSE GRAINED
      Size: 268419072(0xfffc000) KB
"""


def install(gpus: int) -> None:
    """Put a `rocminfo` of so many GPUs in front of PATH, for this process and its children."""
    tool = library.folder() / "rocm" / "rocminfo"
    tool.parent.mkdir(parents=True, exist_ok=True)
    if not tool.exists():
        written = tool.with_name(f"rocminfo.{os.getpid()}")
        written.write_text(f"#!/bin/sh\ncat <<'END'\n{_GPU * gpus}END\n")
        written.chmod(0o755)
        written.replace(tool)
    os.environ["PATH"] = os.pathsep.join((str(tool.parent), os.environ.get("PATH", os.defpath)))
