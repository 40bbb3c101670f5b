"""An error of more than one request is not kept to one request, and a status gets its form back."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_w4a8_eagle3.sglang_plugin.upkeep import failing_outputs


@pytest.mark.parametrize("error", [ValueError("outside of the loop"), OSError("of the machine")])
def test_an_error_without_a_request_is_raised_once(error: Exception) -> None:
    calls = []

    async def original(*_: object) -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        asyncio.run(failing_outputs.handle_batch_output(original, Any, Any))
    assert calls == [1]


def test_outputs_without_an_error_are_handled_once_with_no_more_thinking_than_answer() -> None:
    calls = []

    async def original(*given: Any) -> None:
        calls.append(given[1].reasoning_tokens)

    batch: Any = SimpleNamespace(reasoning_tokens=[13, 5, 0], completion_tokens=[12, 12, 3])
    for given in (batch, SimpleNamespace(reasoning_tokens=None)):
        asyncio.run(failing_outputs.handle_batch_output(original, Any, given))
    assert calls == [[12, 5, 0], None]


@pytest.mark.parametrize(
    ("sent", "named"), [(500, HTTPStatus.INTERNAL_SERVER_ERROR), (799, 799), (None, None), ("400", "400")]
)
def test_the_status_of_an_abort_becomes_an_http_status(sent: object, named: object) -> None:
    reason = {"type": "abort", "status_code": sent}
    failing_outputs.name_status(None, {"meta_info": {"finish_reason": reason}})
    assert reason["status_code"] == named and type(reason["status_code"]) is type(named)
