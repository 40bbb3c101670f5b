"""The words of the model in a scripted session, as an SGLang plugin of the proof's server.

KIMI_PROOF_WORDS names a JSON file: {"engine": false, "steps": [{"think": "", "text": "", "calls": [[name, {}]]}]}.
A request gets the step that follows the calls in its prompt. With "engine" a grammar forces the engine to write it.
Otherwise no engine is asked, which records sessions in seconds. Everything before and after is real: door, template,
tokenizer, parsers, endpoints. A request without a tool of the session gets "Done.".
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "KIMI_PROOF_WORDS"
ENTRY_POINT = "kimi_proof_words"
_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
_ANSWER = "<|im_assistant|>assistant<|im_middle|>"
_PIECE = 7  # characters of a streamed piece


def register() -> None:
    """Entry point of the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # SGLang's import order

    if os.environ.get(VARIABLE):
        HookRegistry.register(_TARGET, generate_request, HookType.AROUND)


def installed(folder: Path) -> Path:
    """Write the metadata of a distribution that has this plugin; the folder belongs on PYTHONPATH."""
    metadata = folder / "kimi_proof-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kimi-proof\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{ENTRY_POINT} = {__name__}:register\n")
    return folder


async def generate_request(
    original: Callable[..., AsyncIterator[Any]], manager: Any, request: Any, http: Any = None
) -> AsyncIterator[Any]:
    """Answer with the step's words, or make the engine write them."""
    script = json.loads(Path(os.environ[VARIABLE]).read_text() or "{}")
    if not script.get("steps"):
        async for answer in original(manager, request, http):
            yield answer
        return
    prompt = request.text or manager.tokenizer.decode(request.input_ids)
    words = spoken(script["steps"], prompt)
    if script.get("engine"):
        request.require_reasoning = False
        request.sampling_params = {
            **request.sampling_params,
            "ebnf": f"root ::= {json.dumps(words, ensure_ascii=False)}",
        }
        async for answer in original(manager, request, http):
            yield answer
        return
    request.normalize_batch_and_arguments()
    counts = {"prompt_tokens": len(manager.tokenizer.encode(prompt)), "cached_tokens": 0, "weight_version": "default"}
    ends = [*range(_PIECE, len(words), _PIECE), len(words)] if request.stream else [len(words)]
    for end in ends:
        reason = {"type": "stop", "matched": None} if end == len(words) else None
        tokens = manager.tokenizer.encode(words[:end]) if reason else [0] * end
        meta = {"id": request.rid, "finish_reason": reason, "completion_tokens": len(tokens), **counts}
        yield {"text": words[:end], "output_ids": tokens, "meta_info": meta, "index": 0}


def spoken(steps: list[Mapping[str, Any]], prompt: str) -> str:
    """Return what the model writes after `prompt`."""
    head, _, tail = prompt.rpartition(_ANSWER)
    number = _number(steps, head)
    tools = {name for step in steps for name, _ in step.get("calls", ())}
    step: Mapping[str, Any] = {"text": "Done."}
    if not tools or any(f'"{tool}"' in head for tool in tools):
        step = steps[min(number, len(steps) - 1)]
    thought = "" if "</think>" in tail else step.get("think", "I do it.") + "</think>"
    first = head.count("<|tool_call_begin|>")
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{first + number}<|tool_call_argument_begin|>"
        f"{arguments if isinstance(arguments, str) else json.dumps(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(step.get("calls", ()))
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return thought + step.get("text", "") + section


def _number(steps: list[Mapping[str, Any]], head: str) -> int:
    """Return the number of the step that follows `head`: one call a step, or one answer if the session has no tools."""
    if not any(step.get("calls") for step in steps):
        return head.count(_ANSWER)
    answered = sum(not step.get("calls") and str(step.get("text")) in head for step in steps)
    return head.count("<|tool_call_begin|>") + answered
