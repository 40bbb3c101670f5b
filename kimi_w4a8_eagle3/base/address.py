"""Base URLs for clients."""

from __future__ import annotations


def http_url(host: str, port: int) -> str:
    """Return the base URL of a host and port; a wildcard host is reached over loopback, from this machine."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
