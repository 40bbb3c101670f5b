"""The words of the model in a scripted session, as an SGLang plugin of the proof's server.

KIMI_PROOF_WORDS names a JSON file: {"steps": [{"text": "", "calls": [[name, {}]]}]}. A request gets the step that
follows the calls in its prompt. No engine is asked, so a session takes seconds. Everything before and after is real:
gateway, template, tokenizer, parsers, endpoints. A request without a tool of the session gets "Done.".
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

VARIABLE = "KIMI_PROOF_WORDS"
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
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nkimi_proof_words = {__name__}:register\n")
    return folder


async def generate_request(
    original: Callable[..., AsyncIterator[Any]], manager: Any, request: Any, http: Any = None
) -> AsyncIterator[Any]:
    """Answer with the step's words."""
    script = json.loads(Path(os.environ[VARIABLE]).read_text() or "{}")
    if not script.get("steps"):
        async for answer in original(manager, request, http):
            yield answer
        return
    prompt = request.text or manager.tokenizer.decode(request.input_ids)
    words = spoken(script["steps"], prompt)
    request.normalize_batch_and_arguments()
    counts = {"prompt_tokens": len(manager.tokenizer.encode(prompt)), "cached_tokens": 0, "weight_version": "default"}
    ends = [*range(_PIECE, len(words), _PIECE), len(words)] if request.stream else [len(words)]
    for begin, end in pairwise([0, *ends]):  # what is new, as `--incremental-streaming-output` sends it
        reason = {"type": "stop", "matched": None} if end == len(words) else None
        tokens = manager.tokenizer.encode(words[begin:end])
        said = len(manager.tokenizer.encode(words[:end]))
        meta = {"id": request.rid, "finish_reason": reason, "completion_tokens": said, **counts}
        yield {"text": words[begin:end], "output_ids": tokens, "meta_info": meta, "index": 0}


def spoken(steps: list[Mapping[str, Any]], prompt: str) -> str:
    """Return what the model writes after `prompt`: a call, or an answer after each call's result."""
    head, _, tail = prompt.rpartition(_ANSWER)
    calls_before = head.count("<|tool_call_begin|>")
    step: Mapping[str, Any] = {"text": "Done."}
    if any(f'"{name}"' in head for one in steps for name, _ in one.get("calls", ())):
        answered = sum(not one.get("calls") and str(one["text"]) in head for one in steps)
        step = steps[min(calls_before + answered, len(steps) - 1)]
    thought = "" if "</think>" in tail else "I do it.</think>"
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{calls_before + number}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(step.get("calls", ()))
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return thought + step.get("text", "") + section
