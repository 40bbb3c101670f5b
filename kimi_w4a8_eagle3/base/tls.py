"""Which certificates a client trusts."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def trusted() -> ssl.SSLContext:
    """httpx's default, read once a process: it takes 30 ms of a core, also for clients that speak plain HTTP."""
    return httpx.create_ssl_context()
