"""JSON bodies: parsed, counted and bounded before anything of them is computed."""

from __future__ import annotations

from typing import Any

import orjson

from .errors import CONTEXT_EXCEEDED, Refusal

MAX_DEPTH = 48  # nested arrays and objects: pydantic, templates and xgrammar recurse into them
MAX_ENTRIES = 4096  # of one array other than token ids, or names of one object
MAX_FIELDS = 256  # names at the top of a body
MAX_VALUES = 2**19  # commas and opening brackets of a body: reading so many takes 50 ms
CHARACTERS_PER_TOKEN = 16  # no tokenizer needs more on average, so a longer text is refused before it is tokenized


def parse(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; raise Refusal for anything else, and for one of too many parts."""
    if raw.count(b",") + raw.count(b"{") + raw.count(b"[") > MAX_VALUES:
        raise Refusal(f"the body has more than {MAX_VALUES} values: send fewer or larger parts", status=413)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object")
    if len(body) > MAX_FIELDS:
        raise Refusal(f"the body has {len(body)} fields, and {MAX_FIELDS} are allowed")
    return body


def characters(value: Any) -> int:
    """Return the length of all strings and names, at any depth; raise Refusal where it is too deep or too wide."""
    total, level, depth = 0, [[value]], -1  # the list around it is no level
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise Refusal(f"the body, or JSON text in it, nests more than {MAX_DEPTH} arrays and objects")
        inner: list[Any] = []
        for container in level:
            if len(container) > MAX_ENTRIES and not is_tokens(container):
                raise Refusal(f"an array or object has {len(container)} entries; at most {MAX_ENTRIES} are read")
            values = container
            if isinstance(container, dict):
                total += sum(map(len, container))
                values = container.values()
            for one in values:
                if type(one) is str:
                    total += len(one)
                elif type(one) in (dict, list):
                    inner.append(one)
        level = inner
    return total


def is_tokens(value: Any) -> bool:
    """Return True for a list of numbers."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def require_room(text: int, context: int) -> None:
    """Raise Refusal for more characters of text than `context` tokens can have."""
    if text > context * CHARACTERS_PER_TOKEN:
        why = f"prompt is too long: the text and field names of this request exceed {context} tokens"
        raise Refusal(why, code=CONTEXT_EXCEEDED)
