"""How a client reaches what listens on a host and a port."""

from __future__ import annotations


def http_url(host: str, port: int) -> str:
    """The base URL; a wildcard host is reached over loopback, from this machine."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
