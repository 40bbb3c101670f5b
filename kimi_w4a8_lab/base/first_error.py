"""One sentence for a pydantic error."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from kimi_w4a8_eagle3.base.nearest import nearest


def first_error(error: ValidationError, valid: Sequence[str] = ()) -> str:
    """Describe the first error, or that of a kind or an unknown field, which has others behind it.

    valid: names of fields, of which the nearest one is suggested for an unknown one.
    """
    errors, unknown = error.errors(), "extra_forbidden"
    first = next((found for found in errors if found["loc"] == ("kind",) or found["type"] == unknown), errors[0])
    place = ".".join(map(str, first["loc"]))
    if first["type"] == unknown:
        return f"unknown field {place!r}{nearest(str(first['loc'][-1]), valid)}"
    return f"{place}: {first['msg']}".removeprefix(": ")
