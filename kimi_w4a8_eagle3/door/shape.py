"""Size of a parsed body, whichever fields hold its text, and the media that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from .answers import Refusal
from .fields import names

MAX_DEPTH = 48  # nested arrays and objects: SGLang, pydantic and xgrammar recurse into them
_NO_REFERENCES = (
    "this server stores no items, so an item_reference has none: send the items themselves. The AI SDK sends them with "
    "providerOptions: {openai: {store: false}}"
)
MAX_LIST = 4096  # entries of one array other than token ids, or names of one object

_TEXT_PARTS = names(
    """
    text input_text output_text refusal thinking reasoning tool_use tool_result tool_reference
    search_result summary_text reasoning_text function_call function_call_output custom_tool_call
    custom_tool_call_output message
    """
)
_MEDIA_PARTS = names("image_url image input_image")
READ = _TEXT_PARTS | _MEDIA_PARTS | {"item_reference"}  # types of parts and items; the last is refused
_CONTENTS = ("content", "output")  # of a message or a tool's result; they hold parts
_MEDIA_KEYS = names("url image_url video_url audio_url file_url image video audio data file file_id")


def parse(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object in `raw`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object")
    return body


@dataclass
class Text:
    """characters: the length of all strings and names, at any depth."""

    characters: int = 0

    @classmethod
    def of(cls, value: Any) -> Text:
        """Count `value` level by level, without recursion; raise Refusal when it is too deep or too wide."""
        text, level, depth = cls(), [[value]], -1  # the list around it is no level
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise Refusal(f"the body, or JSON text in it, nests more than {MAX_DEPTH} arrays and objects")
            level = [inner for container in level for inner in text._add(container)]
        return text

    def _add(self, container: Any) -> list[Any]:
        """Count the container's own strings and names; return the containers inside."""
        if len(container) > MAX_LIST:
            raise Refusal(f"an array or object has {len(container)} entries; at most {MAX_LIST} are read")
        values: Any = container
        if isinstance(container, dict):
            self.characters += sum(map(len, container))
            values = container.values()
        kinds = set(map(type, values))
        if str in kinds:
            self.characters += sum(len(value) for value in values if type(value) is str)
        return [value for value in values if type(value) in (dict, list)] if kinds & {dict, list} else []


def texts(value: Any) -> Iterator[str]:
    """Yield all strings in `value`, at any depth."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict | list):
            waiting.extend(inner.values() if isinstance(inner, dict) else inner)


def media_sources(body: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield the sources of all media in the messages under `name`; raise Refusal for an unsupported part."""
    value = body.get(name)
    for part in _parts(value if isinstance(value, list) else []):
        kind = part.get("type")
        if kind == "item_reference":
            raise Refusal(_NO_REFERENCES, param=name)
        if not isinstance(kind, str) or kind not in READ:
            raise Refusal(f"content of type {kind!r:.40} is not supported", param=name)
        if kind in _MEDIA_PARTS:
            yield from _sources(part)


def _parts(messages: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages' contents, also inside tool results; a message itself is not a part."""
    waiting = list(messages)
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            raise Refusal("messages and their parts must be objects")
        if "role" not in part or "type" in part:
            yield part
        for name in _CONTENTS:
            if isinstance(part.get(name), list):
                waiting.extend(part[name])
            elif isinstance(part.get(name), dict):
                waiting.append(part[name])


def _sources(part: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the sources of a part's media in every form: {"image_url": {"url": ...}}, {"source": {...}}, ...

    Each value that an endpoint may read as an address is yielded once. Parts inside a content are parts of their own.
    """
    waiting: list[Mapping[str, Any]] = [part]
    while waiting:
        fields = waiting.pop()
        for name, value in fields.items():
            if isinstance(value, Mapping):
                if name not in _CONTENTS:
                    waiting.append(value)
            elif name == "data" and fields.get("type") == "base64" and isinstance(value, str):
                yield f"data:{fields.get('media_type')};base64,{value}"  # as SGLang writes it
            elif name in _MEDIA_KEYS:
                yield value
