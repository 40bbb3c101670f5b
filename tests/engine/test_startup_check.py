"""Drafts that are never accepted or never made are an error; any acceptance passes."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.scripted_server import scripted_server, whole

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine import startup_check
from kimi_w4a8_eagle3.engine.client import EngineClient, Generation
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.engine.startup_check import PROMPTS, ask, fault_of, require_acceptance, require_answers


def require(histogram: list[int]) -> Acceptance:
    """Ask a server whose every answer has this histogram of accepted drafts."""
    details = {"spec_tokens_details": {"spec_correct_drafts_histogram": histogram}}
    answer = {"message": {"content": "text"}, "finish_reason": "stop"}
    body = {"data": [{"id": "m"}], "choices": [answer], "sglext": details}
    with scripted_server(lambda *_: whole(body)) as server, EngineClient(server.base_url) as client:
        return require_acceptance(ask(client, 1), 4, "some/draft")


def test_any_accepted_draft_will_do_and_none_is_an_error() -> None:
    with pytest.raises(KimiError, match="does not speculate"):
        require([])
    with pytest.raises(KimiError, match=r"accept length 1\.00: not one draft token was accepted in 20 verify steps"):
        require([5, 0, 0, 0])
    assert require([9, 1, 0, 0]).length == pytest.approx(1.1)


def accepting(*histograms: tuple[int, ...]) -> list[Generation]:
    return [Generation("", (1,), "stop", histogram) for histogram in histograms]


def test_an_accept_length_that_fell_is_an_error() -> None:
    """sglang#16274: 2.35 became 1.48 with DP attention, and 2.35 still passes."""
    assert require_acceptance(accepting((20, 25, 25, 30)), 4, "d", least=1.8).length == pytest.approx(2.65)
    with pytest.raises(KimiError, match=r"accept length 1\.48: it must be above 1\.8"):
        require_acceptance(accepting((70, 15, 12, 3)), 4, "d", least=1.8)


def test_every_group_of_dp_attention_is_asked_and_one_that_accepts_nothing_is_found() -> None:
    class Client:
        def chat_all(self, prompts: list[str], *_: object, concurrency: int) -> list[Generation]:
            assert len(prompts) == concurrency and set(prompts) == set(PROMPTS)
            return accepting(*[(2, 2, 2, 14)] * (concurrency - 1), (20, 0, 0, 0))

    answers = ask(Client(), groups=8)  # type: ignore[arg-type]
    assert len(answers) == 8 and require_acceptance(answers, 4, "d").length > 3
    assert require_acceptance(answers[:-1], 4, "d", groups=7).length == pytest.approx(3.4)
    with pytest.raises(KimiError, match="one group of ranks"):
        require_acceptance(answers, 4, "d", groups=2)


def generation(*ids: int) -> Generation:
    return Generation("", ids, "stop", ())


NUMBERS, OTHERS = generation(1, 2, 3, 4, 5), generation(6, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([NUMBERS, OTHERS, NUMBERS, OTHERS], None),
        ([NUMBERS, OTHERS, OTHERS, NUMBERS], None),  # rounding changed two of four
        ([NUMBERS, OTHERS, NUMBERS, NUMBERS, OTHERS, NUMBERS, OTHERS, NUMBERS], "do not begin like the recorded ones"),
        ([generation()] * 4, "empty or repeat one token"),
        ([generation(0, 0, 0, 0, 0)] * 4, "empty or repeat one token"),
        ([generation(0, 0, 0, 0)] * 2 + [NUMBERS, OTHERS], None),
    ],
    ids=["same", "half", "three-of-eight", "empty", "one-token", "half-broken"],
)
def test_answers_are_compared_with_those_of_the_start(answers: list[Generation], fault: str | None) -> None:
    found = fault_of(answers, tuple(answer.token_ids[:4] for answer in [NUMBERS, OTHERS] * (len(answers) // 2)))
    assert found is None if fault is None else fault in str(found)


@pytest.mark.parametrize(
    ("content", "nan", "fault"), [("", 0, "are empty"), ("text", 3, "3 rows of logits were NaN"), ("a b c d", "?", "")]
)
def test_a_model_that_computes_nonsense_is_not_served(content: str, nan: int | str, fault: str) -> None:
    body = {"data": [{"id": "m"}], "choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
    metrics = f"# TYPE kimi_nan_logits_total counter\nkimi_nan_logits_total {nan}\n".encode()
    with (
        scripted_server(lambda _, asked: whole(body if asked else metrics)) as server,
        EngineClient(server.base_url) as client,
    ):
        client._served = "m"  # so that /metrics is the only request without a body
        with pytest.raises(KimiError, match=fault) if fault else nullcontext():
            require_answers(client, 1)
        asked = [json.loads(body) for body in server.bodies if body]
    assert [request["max_tokens"] for request in asked] == [8] * 5 + [48] * 4
    contents = [request["messages"][0]["content"] for request in asked]
    assert contents[:5] == [PROMPTS[0]] * 5 and set(contents[5:]) == set(PROMPTS)  # the four arrive in any order
    _, sampled, seeded, penalised, grammar = asked[:5]
    assert sampled["temperature"] == seeded["temperature"] == grammar["temperature"] == 1.0 and 0 < seeded["top_p"] < 1
    assert 0 < penalised["frequency_penalty"] < 1 < penalised["repetition_penalty"] <= 2
    assert not grammar["chat_template_kwargs"]["thinking"]


@pytest.mark.parametrize(
    ("moved", "tokens", "fault"),
    [
        (0.04, (1, 2, 3, 4, 5), None),
        (0.06, (1, 2, 3, 4, 5), "known answers differ by 0.06 on average, more than 0.05"),
        (float("nan"), (1, 2, 3, 4, 5), "known answers differ by nan"),
        (0.0, (1, 2, 3, 9, 5), "do not begin like the recorded ones"),
    ],
)
def test_a_known_checkpoint_answers_as_recorded(
    tmp_path: Path, moved: float, tokens: tuple[int, ...], fault: str | None
) -> None:
    class Client:
        base_url, moved = "http://engine", 0.0

        def score(self, prompts: list[list[int]]) -> list[list[float]]:
            # those of the prompt, 7 and 8, do not count
            return [[-9.0 if token > 6 else -1.0 - self.moved for token in prompt[1:]] for prompt in prompts]

    client, file = Client(), tmp_path / "answers.json"
    answers = [Generation("", (1, 2, 3, 4, 5), "stop", (), (7, 8)) for _ in PROMPTS]
    file.write_text(json.dumps(startup_check.recorded(client, answers)))  # type: ignore[arg-type]
    client.moved = moved
    found = [Generation("", tokens, "stop", (), (7, 8)) for _ in range(8)]
    if fault is None:
        startup_check.require_recorded(client, found, file)  # type: ignore[arg-type]
        found[0] = Generation("", tokens, "stop", (), (7, 9))
        fault = "its tokenizer or chat template gives other tokens"
    with pytest.raises(KimiError, match=fault):
        startup_check.require_recorded(client, found, file)  # type: ignore[arg-type]
