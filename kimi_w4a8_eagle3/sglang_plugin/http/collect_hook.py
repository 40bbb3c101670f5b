"""Store the token ids of finished requests where the operator has consented (base/collection.py).

The tokenizer's process has the ids already, and a thread of it writes them, so that schedulers do nothing for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.collection import NO_KEY, PROBE, VARIABLE, Collector, key_name, tokenizer_name
from ...base.errors import or_end
from ...door.settings import read_door
from ...door.trial import grammars_of
from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput, TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
FEATURE = Feature("collected requests", remove_when="never: SGLang stores no token ids for training")


@FEATURE.after(f"{_MANAGER}.__init__")
def open_folder(_: None, manager: TokenizerManager, *__: object, **___: object) -> None:
    """Open the folder before anything is served; an engine without consent, or with other tokens, does not start.

    Headers do not name a request's owner, which is the one client key that the door accepts: a client can send more.
    """
    with or_end("the folder of collected requests cannot be used"):
        key = read_door(os.environ).api_key
        collector = Collector(Path(os.environ[VARIABLE]), NO_KEY if key is None else key_name(key))
        ids = manager.tokenizer.encode(PROBE)
        collector.require_tokenizer(tokenizer_name(ids, manager.model_config.vocab_size))
        manager.kimi_collector = collector


@FEATURE.after(f"{_MANAGER}._create_tokenized_object")
def keep_prompt(
    tokenized: TokenizedGenerateReqInput, manager: TokenizerManager, obj: Any, *_: object, **__: object
) -> None:
    """Choose requests, and keep their prompts' ids. Pictures are no ids, so requests with one are left out."""
    single = getattr(obj, "is_single", False) and getattr(tokenized, "mm_inputs", None) is None
    if single and manager.kimi_collector.wants():
        obj.kimi_prompt = tokenized.input_ids


@FEATURE.before(f"{_MANAGER}._handle_batch_output")
def collect(manager: TokenizerManager, output: BatchStrOutput) -> None:
    """Hand finished answers to the collector; aborted ones are left out."""
    for at, reason in enumerate(getattr(output, "finished_reasons", None) or ()):
        state = manager.rid_to_state.get(output.rids[at]) if reason and reason["type"] in ("stop", "length") else None
        prompt = getattr(state.obj, "kimi_prompt", None) if state is not None else None
        if state is not None and prompt is not None and output.output_ids is not None:
            answer = [*state.output_ids, *output.output_ids[at]]
            structured = bool(grammars_of(state.obj.sampling_params))
            manager.kimi_collector.put(output.rids[at], prompt, answer, structured)
