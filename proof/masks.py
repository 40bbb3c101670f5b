"""Measure what the masks of grammars cost, with 163,840 tokens: `python -m proof.masks`.

Prints the table in docs/request-limits.md for the installed xgrammar. Set PYTHONPATH to another release for its column.
"""

from __future__ import annotations

import json
import os
import signal
import time
from importlib.metadata import version

import xgrammar

from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.door.trial import CPU_S, costliest_mask
from proof.vocabulary import SIZE, vocabulary


def _schema(**properties: object) -> str:
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


def _optional(number: int) -> str:
    names = {f"p{index}": {"type": "string"} for index in range(number)}
    return json.dumps({"type": "object", "properties": names})


def _arrays(number: int) -> str:
    choices = [{"type": "array", "items": {"const": index}} for index in range(number)]
    return json.dumps({"type": "array", "items": {"anyOf": choices}})


GRAMMARS = {
    "a string, an integer": _schema(a={"type": "string"}, b={"type": "integer"}),
    "an email address in a schema": _schema(a={"type": "string", "format": "email"}),
    "`maxLength` 32": _schema(a={"type": "string", "maxLength": 32}),
    "100 optional properties": _optional(100),
    "600 optional properties": _optional(600),
    "an array of any of 1,200 arrays": _arrays(1200),
    "`.*a.{60}`": r".*a.{60}",
    "`([a-z]{1,3})+`": r"([a-z]{1,3})+",
    "`(([^a]*)+)*`": r"(([^a]*)+)*",
}


def main() -> None:
    """Compile each grammar and walk through it in a process of its own, as a worker of the door does."""
    info = xgrammar.TokenizerInfo([*vocabulary(), b"</s>"], xgrammar.VocabType.RAW, stop_token_ids=[SIZE])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    limit_ms = DoorSettings().max_mask_ms
    print(f"| grammar, xgrammar {version('xgrammar')} | compiled in | slowest mask | admitted |\n|---|---|---|---|")
    for name, text in GRAMMARS.items():
        if not os.fork():
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            start = time.process_time()
            schema = (
                text[0] == "{"
            )  # without free white space, as the plugin serves it (sglang_plugin/upkeep/grammar_cache.py)
            compiled = compiler.compile_json_schema(text, any_whitespace=False) if schema else None
            grammar = compiled or compiler.compile_regex(text)
            seconds = time.process_time() - start
            ms, _ = costliest_mask(grammar, limit_ms)
            admitted = "yes" if ms <= limit_ms else "no"
            print(f"| {name} | {seconds:.2f} s | {ms:.1f} ms | {admitted} |", flush=True)
            os._exit(0)
        if os.wait()[1]:
            print(f"| {name} | more than {CPU_S:.0f} s | | no |", flush=True)


if __name__ == "__main__":
    main()
