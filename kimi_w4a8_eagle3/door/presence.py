"""Proof that a started engine has its door: the plugin may not have been loaded, and SGLang then starts without."""

from __future__ import annotations

import httpx

from ..base.errors import KimiError
from ..base.tls import trusted

_QUESTIONS: tuple[tuple[str, dict[str, str], tuple[int, ...]], ...] = (
    # What a web page may never do: answered by an engine without a door, whatever keys the operator gave it.
    ("/openapi.json", {"Origin": "http://door.invalid"}, (401, 403)),
    ("/v1/models", {}, (401,)),
)


def require_door(base_url: str, *, key_expected: bool) -> None:
    """Raise KimiError when the engine at `base_url` answers what its door should refuse.

    key_expected: clients need a key. KimiError, too, when the engine does not answer at all.
    """
    for path, headers, refusals in _QUESTIONS if key_expected else _QUESTIONS[:1]:
        if (found := _status(base_url + path, headers)) not in refusals:
            raise KimiError(
                f"the engine has no door: it answered {found} to a request without a key",
                where=base_url + path,
                expected=f"HTTP {refusals[0]}",
                remedy="is this package installed beside this SGLang, and its plugin in SGLANG_PLUGINS if that is set?",
            )


def _status(url: str, headers: dict[str, str]) -> int:
    try:
        return httpx.get(url, headers=headers, timeout=30.0, verify=trusted()).status_code
    except httpx.HTTPError as error:
        raise KimiError(f"the engine does not answer: {error}", where=url, remedy="read the end of its log") from error
