"""Checks of the Kimi Vendor Verifier (MoonshotAI/Kimi-Vendor-Verifier): parameters, tool schemas, prompt counts.

Each probe is one request with a rule for its answer. Only what a server can guarantee is judged. Moonshot's own API
rejects every sampling value but its own, while an open server accepts others, so that group is reported and not
judged. A grammar makes every finished call fit its schema, but it cannot make the model finish: JSON allows unlimited
blanks and digits. Calls cut at the token limit are therefore counted, and a group fails when most calls were cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding, checked
from kimi_w4a8_eagle3.base.installed import operator_dir
from kimi_w4a8_eagle3.base.next_step import pip_install

from ..base.data_file import require_trusted_tokenizer
from .recorder import Answer, JsonBody
from .tool_scores import message_of, wrong

_MODES = ({"thinking": True}, {"thinking": False})
_ACCEPTED: tuple[JsonBody, ...] = (
    {}, {"temperature": 1.0}, {"temperature": 0.6}, {"top_p": 0.95}, {"presence_penalty": 0}, {"frequency_penalty": 0},
    {"n": 1},
)  # fmt: skip
_REFUSED: tuple[JsonBody, ...] = (
    {"temperature": -0.1}, {"top_p": 1.5}, {"presence_penalty": 3}, {"frequency_penalty": -3}, {"n": 0},
    {"max_tokens": -1},
)  # fmt: skip
_FIXED: tuple[JsonBody, ...] = (
    {"temperature": 1.1}, {"temperature": 2.0}, {"top_p": 0.8}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5},
    {"n": 2},
)  # fmt: skip
_SHORT = 16  # answer tokens where only the status matters
_TOOL = "submit"
_ASK = (
    f"Call the tool {_TOOL} once, with the smallest arguments that its schema allows: every required property, nothing "
    "else. Do not answer in words."
)


@dataclass(frozen=True)
class VendorCheck:
    """One request of a group. wrong: returns the error of an answer, or "". ends: the answer should end by itself."""

    group: str
    body: JsonBody
    wrong: Callable[[Answer], str]
    judged: bool = True
    ends: bool = False

    @property
    def name(self) -> str:
        """Request body without model and messages, to name a failed probe."""
        return json.dumps({k: v for k, v in self.body.items() if k not in ("messages", "model")}, ensure_ascii=False)


def probes(model: str, max_tokens: int, extra: JsonBody) -> list[VendorCheck]:
    """Return all probes for a server of `model`.

    max_tokens limits a tool call. extra is added to each body where a probe does not set the field itself.
    """
    common = {"model": model, **extra}
    return [*_parameters(common), *_schemas(common, max_tokens)]


def _parameters(common: JsonBody) -> Iterator[VendorCheck]:
    message = {"role": "user", "content": "Say OK."}
    short: JsonBody = {**common, "messages": [message], "max_tokens": _SHORT}
    for mode in _MODES:
        for parameter in _ACCEPTED:
            body = {**short, "chat_template_kwargs": mode, **parameter}
            yield VendorCheck("parameters in range accepted", body, lambda answer: answer.error or "")
    for parameter in _REFUSED:
        yield VendorCheck("parameters out of range refused", {**short, **parameter}, _not_refused)
    for parameter in _FIXED:
        yield VendorCheck("values other than Moonshot's refused", {**short, **parameter}, _not_refused, judged=False)


def _not_refused(answer: Answer) -> str:
    return "" if 400 <= (answer.status or 0) < 500 else answer.error or "accepted"


def _schemas(common: JsonBody, max_tokens: int) -> Iterator[VendorCheck]:
    for line in (operator_dir("eval") / "tool_schemas.jsonl").read_bytes().splitlines():
        function = {"name": _TOOL, "description": "Takes the result.", "parameters": json.loads(line), "strict": True}
        tools = [{"type": "function", "function": function}]
        body: JsonBody = {**common, "messages": [{"role": "user", "content": _ASK}], "tools": tools}
        body |= {"tool_choice": "required", "max_tokens": max_tokens}

        def judge(answer: Answer, tools: Sequence[Mapping[str, Any]] = tools) -> str:
            return answer.error or _called(answer, tools)

        yield VendorCheck("tool-call schemas, whole", body, judge, ends=True)
        yield VendorCheck("tool-call schemas, streamed", as_stream(body), judge, ends=True)


def _called(answer: Answer, tools: Sequence[Mapping[str, Any]]) -> str:
    calls = message_of(answer).get("tool_calls") or []
    if not calls:
        return f"no tool call, finish_reason {answer.finish_reason}"
    return next(filter(None, (wrong(call, tools) for call in calls)), "")


def as_stream(body: JsonBody) -> JsonBody:
    """Return the same request, streamed, with usage at the end."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def check_probes(asked: Sequence[tuple[VendorCheck, Answer]]) -> list[Finding]:
    """Return one check for each group; it names the first failure."""
    return [
        _check_group(group, [(probe, answer) for probe, answer in asked if probe.group == group])
        for group in dict.fromkeys(probe.group for probe, _ in asked)
    ]


def _check_group(group: str, asked: Sequence[tuple[VendorCheck, Answer]]) -> Finding:
    whole = [(probe, answer) for probe, answer in asked if not (probe.ends and answer.finish_reason == "length")]
    failed = [f"{probe.name}: {why}" for probe, answer in whole if (why := probe.wrong(answer))]
    cut, judged = len(asked) - len(whole), asked[0][0].judged
    found = f"{len(whole) - len(failed)} of {len(whole)}"
    found += f", and {cut} cut at the token limit" if cut else ""
    found += f"; {failed[0]}" if failed and judged else ""
    wanted = "all, and half of them not cut" if asked[0][0].ends else "all"
    passed = not failed and 2 * cut <= len(asked)
    return checked(group, found, wanted if judged else "reported, not judged", passed or not judged)


def check_counts(asked: Sequence[tuple[JsonBody, Answer]], count: Callable[[JsonBody], int] | None) -> Finding:
    """Compare `usage.prompt_tokens` with the count of the checkpoint's own chat template and tokenizer."""
    name = "prompt token counts"
    if count is None:
        return checked(name, "not counted", "a tokenizer (--tokenizer DIR)", True)
    answered = [(body, answer) for body, answer in asked if answer.error is None]
    counts = [(count(body), (answer.response.get("usage") or {}).get("prompt_tokens")) for body, answer in answered]
    different = [f"{theirs} instead of {ours}" for ours, theirs in counts if ours != theirs]
    first = f"; the first difference: {different[0]}" if different else ""
    return checked(name, f"{len(counts) - len(different)} of {len(counts)}{first}", "all", not different)


def counter(tokenizer: str) -> Callable[[JsonBody], int]:
    """Return a function that counts a request's prompt tokens with `tokenizer`, a folder or repository.

    Raises KimiError when transformers or the tokenizer is missing, or when its code has not been trusted.
    """
    try:
        from transformers import AutoTokenizer  # optional: it comes with SGLang; seconds to import
    except ImportError as error:
        what = f"prompt tokens cannot be counted: {error}"
        raise KimiError(what, "--tokenizer", remedy=pip_install("transformers")) from error
    require_trusted_tokenizer(tokenizer)
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=True, local_files_only=True)
    except (OSError, ValueError) as error:
        what = f"the tokenizer cannot be loaded: {str(error).splitlines()[0].rstrip(' :')}"
        raise KimiError(what, tokenizer, "a checkpoint's folder", "name one with --tokenizer") from error

    def count(body: JsonBody) -> int:
        return len(
            loaded.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        )

    return count
