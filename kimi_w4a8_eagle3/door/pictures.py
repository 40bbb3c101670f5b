"""Check the pictures of a request in a worker of the door (gateway/pictures.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..gateway.pictures import check_pictures
from .admission import WorkerJob

_CPU_S = 10.0  # until a worker is killed


def picture_job() -> WorkerJob:
    """Return the job that checks pictures, given as their sources."""
    why = f"the pictures cannot be decoded within {_CPU_S:.0f} s of CPU time and 1 GiB: send fewer or smaller ones"
    return WorkerJob(_prepare, _CPU_S, why)


def _prepare() -> Callable[[Any], Any]:
    from PIL import Image  # only the zygote needs it

    Image.init()
    return check_pictures
