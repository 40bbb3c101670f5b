"""The costliest mask of a grammar is found, in both releases of xgrammar, with as many tokens as a large model has."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from support.extent import extent
from support.sglang_program import BOTH, found
from support.structured_schemas import draw

PROGRAM = """
import json, xgrammar
from kimi_w4a8_eagle3.gateway import mask_walk
from support.vocabulary import SIZE, vocabulary
info = xgrammar.TokenizerInfo([*vocabulary(), b"</s>"], xgrammar.VocabType.RAW, stop_token_ids=[SIZE])
compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
mask_walk._WALK_S = 60.0  # so that a slow machine, too, walks until it finds nothing new
place = xgrammar.GrammarMatcher(compiler.compile_regex(".*a.{20}"))
assert place.accept_string("a" * 30)
mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
unit_ms = min(mask_walk._mask_ms(place, mask, float("inf")) for _ in range(5))
def units(text):
    if text[0] != "{":
        grammar = compiler.compile_regex(text)
    else:  # with free white space, which the plugin does not serve: it has states in which a mask is slow
        grammar = compiler.compile_grammar(xgrammar.Grammar.from_json_schema(text))
    return round(mask_walk.costliest_mask(grammar, %r * unit_ms)[0] / unit_ms, 3)
print(json.dumps([units(text) for text in json.load(open(%r))]))
"""
# Milliseconds depend on the machine, so the unit is a mask of 21 states of `.*a.{20}`. The ordinary grammars take at
# most 0.08 of it, and the costly ones at least 0.88 when the walk goes on to its end.
LIMIT = 0.28
TEXT = {"type": "string"}


def fields(number: int, **given: Any) -> dict[str, Any]:
    names = {f"field_{index}": TEXT for index in range(number)}
    return {"type": "object", "properties": {**names, **given}, "required": [*names, *given]}


def arrays(number: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "array", "items": {"const": index}} for index in range(number)]}


ORDINARY: dict[str, str | dict[str, Any]] = {
    "address": r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    "date": r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})?)?",
    "id": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "list": r"(yes|no|maybe)(, (yes|no|maybe))*",
    "text": r"[\s\S]*",
    "many fields": fields(200),
    "any object": {"type": "object"},
    "recursive": {"type": "object", "properties": {"next": {"$ref": "#"}, "name": TEXT}},
    **{f"drawn {seed}": draw(Random(seed)) for seed in (0, 2, 3, 7)},
}
COSTLY: dict[str, str | dict[str, Any]] = {
    "states at once": r".*a.{60}",
    "ambiguous repeats": r"(([^a]*)+)*",
    "counted words": r"([a-z]{1,3})+",
    "repeats in repeats": r"([a-z.]+)+",  # slower with each character, in the same states
    "1,200 arrays": {"type": "array", "items": arrays(1200)},
    "arrays after 20 fields": fields(20, last={"type": "array", "items": arrays(1200)}),
}


@pytest.mark.slow
@BOTH
def test_costly_grammars_are_told_from_ordinary_ones(newest: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    costly = dict(extent([*COSTLY.items()][:: 1 + newest], [*COSTLY.items()]))
    cases = costly if newest else {**ORDINARY, **costly}  # the walk ends at a costly mask, and takes 2 s elsewhere
    path = tmp_path_factory.mktemp("trial") / "cases.json"
    path.write_text(json.dumps([case if isinstance(case, str) else json.dumps(case) for case in cases.values()]))
    program = PROGRAM % (LIMIT, str(path))
    units = dict(zip(cases, found(program, newest), strict=True))
    print(units)
    assert {name for name, value in units.items() if value > LIMIT} == costly.keys(), units
