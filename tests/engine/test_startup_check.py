"""Drafts that are never accepted or never made are an error; any acceptance passes."""

import pytest
from support.scripted_server import scripted_server, whole

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.engine.startup_check import require_acceptance


def require(histogram: list[int]) -> Acceptance:
    """Ask a server whose every answer has this histogram of accepted drafts."""
    details = {"spec_tokens_details": {"spec_correct_drafts_histogram": histogram}}
    answer = {"message": {"content": "text"}, "finish_reason": "stop"}
    body = {"data": [{"id": "m"}], "choices": [answer], "sglext": details}
    with scripted_server(lambda *_: whole(body)) as server, EngineClient(server.base_url) as client:
        return require_acceptance(client, 4, "some/draft")


def test_no_verify_step_is_no_speculation() -> None:
    with pytest.raises(KimiError, match="does not speculate"):
        require([])


def test_not_one_accepted_draft_is_an_error() -> None:
    with pytest.raises(KimiError, match=r"accept length 1\.00: .* in 20 verify steps"):
        require([5, 0, 0, 0])


def test_any_accepted_draft_will_do() -> None:
    assert require([9, 1, 0, 0]).length == pytest.approx(1.1)
