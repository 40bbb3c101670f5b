"""Exhaustive and drawn tests have a short form in `make test`; `make kernels` and `make fuzz` run their long one."""

import os
from typing import TypeVar

Cases = TypeVar("Cases")
LONG = "KIMI_LONG_TESTS" in os.environ


def extent(short: Cases, long: Cases) -> Cases:
    return long if LONG else short
