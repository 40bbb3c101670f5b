"""Proof that a started engine has its door: the plugin may not have been loaded, and SGLang then starts without."""

from __future__ import annotations

import httpx

from .errors import KimiError


def require_door(base_url: str, *, key_expected: bool, closed_expected: bool) -> None:
    """Raise KimiError when the engine at `base_url` answers what its door should refuse.

    key_expected: clients need a key. closed_expected: /openapi.json, which changes nothing, is for the operator.
    KimiError, too, when the engine does not answer at all.
    """
    for expected, path, status in ((key_expected, "/v1/models", 401), (closed_expected, "/openapi.json", 403)):
        if expected and (found := _status(base_url + path)) != status:
            raise KimiError(
                f"the engine has no door: it answered {found} to a request without a key",
                where=base_url + path,
                expected=f"HTTP {status}",
                remedy="is this package installed beside this SGLang, and its plugin in SGLANG_PLUGINS if that is set?",
            )


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=30.0).status_code
    except httpx.HTTPError as error:
        raise KimiError(f"the engine does not answer: {error}", where=url, remedy="read the end of its log") from error
