"""Check that a started engine has its door: if the plugin was not loaded, SGLang starts without one."""

from __future__ import annotations

import httpx

from ..base.errors import KimiError
from ..base.http import trusted

_QUESTIONS: tuple[tuple[str, dict[str, str], tuple[int, ...]], ...] = (
    # An engine without a door answers a web page here, whatever keys the operator gave it.
    ("/openapi.json", {"Origin": "http://door.invalid"}, (401, 403)),
    ("/v1/models", {}, (401,)),
)


def require_door(base_url: str, *, key_expected: bool) -> None:
    """Raise KimiError when the engine at `base_url` answers a request that its door should refuse, or not at all.

    key_expected: clients need a key.
    """
    for path, headers, refusals in _QUESTIONS if key_expected else _QUESTIONS[:1]:
        if (found := _status(base_url + path, headers)) not in refusals:
            raise KimiError(
                f"the engine has no door: it answered {found} to a request without a key",
                where=base_url + path,
                expected=f"HTTP {refusals[0]}",
                remedy="install this package beside this SGLang; if SGLANG_PLUGINS is set, add this plugin to it",
            )


def _status(url: str, headers: dict[str, str]) -> int:
    try:
        return httpx.get(url, headers=headers, timeout=30.0, verify=trusted()).status_code
    except httpx.HTTPError as error:
        raise KimiError(f"the engine does not answer: {error}", where=url, remedy="read the end of its log") from error
