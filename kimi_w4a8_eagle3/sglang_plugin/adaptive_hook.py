"""Adaptive draft steps that SGLang cannot run are refused with its own reason; it would serve fixed ones and warn."""

from __future__ import annotations

from typing import Any

from ..base.errors import KimiError, or_end

TARGET = "sglang.srt.speculative.adaptive_spec_params.adaptive_unsupported_reason"


def refuse(reason: str | None, *_: Any, **__: Any) -> None:
    """AFTER hook of the question whether the server's arguments allow adaptive steps; `reason` says why not."""
    if reason is not None:
        with or_end("adaptive speculation"):
            raise KimiError(
                f"SGLang cannot choose draft steps by batch size: {reason}",
                where="--speculative-adaptive",
                remedy="serve with options.speculation = 'fixed', or without that argument",
            )
