"""Certificates that a client trusts."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def trusted() -> ssl.SSLContext:
    """Return httpx's default, read once per process, because reading takes 30 ms of a core even for plain HTTP."""
    return httpx.create_ssl_context()
