"""Addresses of replicas: a fixed list, or a DNS name whose addresses change (a headless service in Kubernetes)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from ..base.errors import UsageError
from ..base.http import http_url

Discover = Callable[[], frozenset[str]]


def static(urls: Sequence[str]) -> Discover:
    """Return the replicas at these base URLs. Raises UsageError for one that is not `http://HOST:PORT`."""
    found = frozenset(_checked(url) for url in urls)
    if len(found) < len(urls):
        raise UsageError("a replica is listed twice", where="--worker", expected="one URL for each replica")
    return lambda: found


def dns(address: str) -> Discover:
    """Return the replicas at all addresses of `NAME:PORT`, resolved again at each call.

    A headless service lists only ready pods, so a pod that drains disappears. A name without addresses means no
    replica. If the name server does not answer, the last result stays.
    """
    name, _, port = address.rpartition(":")
    try:
        name.encode("idna")  # as getaddrinfo does
        valid = bool(name) and port.isdigit() and 0 < int(port) < 65536
    except UnicodeError:
        valid = False
    if not valid:
        raise UsageError(f"cannot read {address!r}", where="--workers-dns", expected="NAME:PORT")
    last: frozenset[str] = frozenset()

    def discover() -> frozenset[str]:
        nonlocal last
        try:
            found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
                last = frozenset()
            return last
        hosts = {str(entry[4][0]) for entry in found}
        four = {host for host in hosts if ":" not in host}  # a pod with IPv4 and IPv6 addresses is one replica
        last = frozenset(http_url(host, int(port)) for host in four or hosts)
        return last

    return discover


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url.rstrip("/"))
        named = parts.scheme == "http" and parts.hostname and parts.hostname.encode("idna")
        usable = named and parts.port and not parts.path and not parts.query
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"cannot read the replica {url!r}", where="--worker", expected="http://HOST:PORT")
    return url.rstrip("/")
