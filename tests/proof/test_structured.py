"""Each planted fault in an answer of a schema is found, and none in a right one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.structured_ask import difference
from support.structured_cases import FORMS, StructuredAnswer, StructuredCase, cases, fault

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}
NAMED = {"type": "function", "function": {"name": "f"}}


def case(form: str) -> StructuredCase:
    schemas = {"": SCHEMA} if form == "response_format" else {"f": SCHEMA, "g": OTHER}
    return StructuredCase(0, form, False, {"tool_choice": NAMED if form == "named" else form}, schemas)


def says(content: str, finish_reason: str = "stop") -> StructuredAnswer:
    return StructuredAnswer(200, "", {"content": content}, finish_reason, (5, 6, 7))


def calls(*made: tuple[str, Any], finish_reason: str = "tool_calls") -> StructuredAnswer:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in made]
    return StructuredAnswer(
        200, "", {"content": None, "tool_calls": [{"function": function} for function in functions]}, finish_reason
    )


GOOD = {
    "response_format": says('{"a": 1}'),
    "required": calls(("f", {"a": 1}), ("g", {"b": None})),
    "named": calls(("f", {"a": 1})),
    "auto": says("no call"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_right_answer_has_no_fault(form: str) -> None:
    assert fault(case(form), GOOD[form]) is None


@pytest.mark.parametrize(
    ("form", "answer", "why"),
    [
        ("response_format", says('{"a": "x"}'), "is not of type 'integer'"),
        ("response_format", says('{"a": 1'), "Expecting"),
        ("response_format", says(""), "Expecting value"),
        ("response_format", StructuredAnswer(500, "oh"), "HTTP 500: oh"),
        ("required", says("no call"), "no call"),
        ("required", calls(("f", {})), "'a' is a required property"),
        ("required", calls(("h", {})), "h is called"),
        ("required", calls(("f", {"a": 1}), finish_reason="stop"), "finish_reason stop"),
        ("named", calls(("g", {"b": None})), "g is called"),
        ("named", calls(("f", {"a": 1}), ("f", {"a": 2})), "2 calls"),
        ("auto", calls(("g", {"a": 1})), "'b' is a required property"),
        ("auto", says("x<|tool_call_begin|>"), "in the content"),
    ],
)
def test_a_wrong_answer_is_named(form: str, answer: StructuredAnswer, why: str) -> None:
    assert why in (fault(case(form), answer) or "")


def test_an_answer_that_the_limit_cut_need_not_be_whole() -> None:
    assert fault(case("response_format"), says('{"a": ', "length")) is None
    assert fault(case("auto"), says("<think>", "length"))
    assert fault(case("response_format"), says('{"a": "<think>"', "length")) is None


def test_another_token_and_another_reading_of_the_same_tokens_are_found() -> None:
    good = GOOD["response_format"]

    def found(other: StructuredAnswer) -> str | None:
        return difference(case("response_format"), good, other)

    assert found(good) is None
    assert found(replace(good, ids=(5, 8, 7))) == "token 1 is (8,), not (6,)"
    assert found(replace(good, ids=(5, 6))) == "token 2 is (), not (7,)"
    assert "read differently" in (found(replace(good, message={"content": '{"a": 2}'})) or "")


def test_cases_are_a_function_of_the_seed_and_cover_every_form() -> None:
    made = cases(16, 3, "m")
    assert made == cases(16, 3, "m") != cases(16, 4, "m")
    assert {(case.form, case.thinking) for case in made} == {(form, on) for form in FORMS for on in (False, True)}
