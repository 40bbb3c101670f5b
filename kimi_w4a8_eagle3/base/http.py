"""Base URLs of servers, and the certificates that a client of them trusts."""

from __future__ import annotations

import ssl
from functools import cache
from ipaddress import ip_address
from typing import NamedTuple

import httpx


class Address(NamedTuple):
    """Where a server answers, and the key that it wants."""

    url: str
    key: str | None = None


def http_url(host: str, port: int) -> str:
    """Return the base URL of a host and port; a wildcard host is reached over loopback, from this machine."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True when a server bound to `host` is reachable from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the header that carries a key; empty without a key."""
    return {} if not api_key else {"Authorization": f"Bearer {api_key}"}


@cache
def trusted() -> ssl.SSLContext:
    """Return httpx's default, read once per process, because reading takes 30 ms of a core even for plain HTTP."""
    return httpx.create_ssl_context()
