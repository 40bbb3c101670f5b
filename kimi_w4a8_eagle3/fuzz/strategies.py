"""What is sent: bodies that follow the server's OpenAPI document, bodies that break it, and bodies that mean harm."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from ..door.fields import ENDPOINTS
from .requests import JSON, FuzzRequest, affordable, json_request

MESSAGE = {"role": "user", "content": "Tom has 3 apples."}
TEMPLATES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [MESSAGE], "max_tokens": 8},
    "/v1/completions": {"prompt": "Tom has", "max_tokens": 8},
    "/generate": {"text": "Tom has", "sampling_params": {"max_new_tokens": 8}},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": [MESSAGE]},
    "/v1/responses": {"input": "Tom has", "max_output_tokens": 8},
    "/v1/tokenize": {"prompt": "Tom has"},
    "/v1/detokenize": {"tokens": [1, 2, 3]},
}

_INTEGERS = (0, -1, 1, 2, 3, 127, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30)
_FLOATS = (0.0, -0.0, 1e-300, 1e39, 1.7e308, -1e308, 0.5, 1.0000001, 2.5)
_NUMBERS = st.sampled_from((*_INTEGERS, *_FLOATS))
_UNICODE = ("", " ", "\x00", "\ud800", "a\udfffb", "\uffff", "﷽" * 50, "e" + "\u0301" * 500, "A" * 20000, "0" * 5000)
_TOKENS = ("<|im_end|>", "<|im_user|>", "[BOS]", "<|media_pad|>", "<|tool_calls_section_begin|>")
_PATTERNS = ("(", "(a+)+$", "[", "a{1000000}", "(?P<x>a)(?P=x)", "\\", "^$")
_GRAMMARS = ("{", "{}", '{"$ref": "#"}', '{"type": "nope"}', "root ::= root", "{{ 7*7 }}", "{% raw %}", "nan")
_PLACES = ("../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "data:image/png;base64,AAAA", "data:,")
_NASTY_TEXTS = st.sampled_from((*_UNICODE, *_TOKENS, *_PATTERNS, *_GRAMMARS, *_PLACES))
_TEXTS = st.one_of(_NASTY_TEXTS, st.text(max_size=40))
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, st.integers(), _TEXTS)
_SCHEMAS: tuple[Any, ...] = (
    True,
    {},
    {"$ref": "#"},
    {"$ref": "http://127.0.0.1:1/x"},
    {"type": "nope"},
    {"enum": []},
    {"not": {}},
    {"const": None},
    {"anyOf": []},
    {"allOf": [{}]},
    {"type": "string", "pattern": "(a"},
    {"type": "string", "minLength": 10**6},
    {"type": "integer", "minimum": 10**30},
    {"type": "array", "minItems": 10**6},
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=8,
)


def contract_requests(openapi: Mapping[str, Any]) -> Iterator[st.SearchStrategy[FuzzRequest]]:
    """For each operation of the document, requests that follow it, and requests that do not."""
    for result in schemathesis.openapi.from_dict(dict(openapi)).get_all_operations():
        operation: Any = result.ok() if hasattr(result, "ok") else None
        if operation is None:
            continue
        for mode in GenerationMode:
            yield operation.as_strategy(generation_mode=mode).map(_from_case)


def only(openapi: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """The document with these paths alone."""
    return {**openapi, "paths": {path: item for path, item in openapi["paths"].items() if path in paths}}


def without_closed_fields(openapi: Mapping[str, Any]) -> dict[str, Any]:
    """The document without the fields that the door refuses: what follows it reaches SGLang."""
    document: dict[str, Any] = copy.deepcopy(dict(openapi))
    for path, fields in ENDPOINTS.items():
        for method in document["paths"].get(path, {}).values():
            schema = _body_schema(document, method)
            for name in set(schema.get("properties", ())) - fields.open:
                del schema["properties"][name]
    return document


def field_names(openapi: Mapping[str, Any], path: str) -> list[str]:
    """The members that the document names for a POST's body; empty where it describes none."""
    return sorted(_body_schema(openapi, openapi["paths"].get(path, {}).get("post", {})).get("properties", ()))


def _body_schema(openapi: Mapping[str, Any], method: Mapping[str, Any]) -> Any:
    try:
        schema = method["requestBody"]["content"]["application/json"]["schema"]
        while "$ref" in schema:
            schema = openapi["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    except KeyError:
        return {}
    return schema


def hostile_requests(openapi: Mapping[str, Any], model: str, forbidden_url: str) -> st.SearchStrategy[FuzzRequest]:
    """Valid requests with a few fields replaced, broken bodies, broken HTTP, and media at `forbidden_url`."""
    fields = {path: field_names(openapi, path) or list(template) for path, template in TEMPLATES.items()}
    sampling = [*field_names(openapi, "/v1/completions"), "max_new_tokens", "min_new_tokens", "sampling_seed"]
    values = st.one_of(_VALUES, _structured(forbidden_url))

    @st.composite
    def changed(draw: st.DrawFn) -> FuzzRequest:
        path = draw(st.sampled_from(sorted(TEMPLATES)))
        body = {"model": model, **json.loads(json.dumps(TEMPLATES[path]))}
        if path == "/generate":
            del body["model"]
        for _ in range(draw(st.integers(1, 3))):
            if path == "/generate" and draw(st.booleans()):
                body["sampling_params"] = {
                    **TEMPLATES[path]["sampling_params"],
                    draw(st.sampled_from(sampling)): draw(values),
                }
            else:
                body[draw(st.sampled_from(fields[path]))] = draw(values)
        if draw(st.booleans()):
            body["stream"] = True
        return json_request("POST", path, body, leave=draw(st.integers(0, 4)) == 0)

    media = _media_requests(model, forbidden_url)
    return st.one_of(changed(), changed(), changed(), media, _broken_bodies(model), _broken_http())


def _media_requests(model: str, forbidden_url: str) -> st.SearchStrategy[FuzzRequest]:
    """Every place where an address of an image, a video or a sound may stand."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": forbidden_url}},
        {"type": "image_url", "image_url": forbidden_url},
        {"type": "video_url", "video_url": {"url": forbidden_url}},
        {"type": "audio_url", "audio_url": {"url": forbidden_url}},
        {"type": "input_audio", "input_audio": {"data": forbidden_url, "format": "wav"}},
        {"type": "input_image", "image_url": forbidden_url},
        {"type": "input_file", "file_url": forbidden_url},
        {"type": "image", "source": {"type": "url", "url": forbidden_url}},
        {"type": "text", "text": "x", "image_url": {"url": forbidden_url}},
    ]
    bodies: list[tuple[str, dict[str, Any]]] = []
    for part in parts:
        message = {"role": "user", "content": [part]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [part]}]}
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/tokenize"):
            bodies += [(path, {"messages": [message]}), (path, {"messages": [result]})]
        bodies.append(("/v1/responses", {"input": [message]}))
    bodies += [
        ("/generate", {"text": "x", name: value})
        for name in ("image_data", "video_data", "audio_data")
        for value in (forbidden_url, [forbidden_url], [[forbidden_url]])
    ]
    bodies.append(("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_url": forbidden_url}]}))
    named = [(path, body if path == "/generate" else {"model": model, **body}) for path, body in bodies]
    return st.sampled_from(named).map(lambda each: json_request("POST", *each))


def _structured(forbidden_url: str) -> st.SearchStrategy[Any]:
    """Values of the shapes that SGLang looks into: messages with media, grammars, tools, lists of token ids."""
    media = st.sampled_from([forbidden_url, "file:///etc/passwd", "/etc/passwd", "data:image/png;base64,AAAA", 5, None])
    part = st.one_of(
        st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": media})}),
        st.fixed_dictionaries({"type": st.sampled_from(["image_url", "input_image"]), "image_url": media}),
        st.fixed_dictionaries({"type": st.just("video_url"), "video_url": st.fixed_dictionaries({"url": media})}),
        st.fixed_dictionaries(
            {"type": st.just("image"), "source": st.fixed_dictionaries({"type": _TEXTS, "url": media})}
        ),
        st.fixed_dictionaries({"type": st.just("text"), "text": _SCALARS}),
        st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": _TEXTS, "content": _VALUES}),
    )
    role = st.sampled_from(["user", "assistant", "system", "tool", "developer", "nobody"])
    message = st.fixed_dictionaries({"role": role, "content": st.one_of(_TEXTS, st.none(), st.lists(part, max_size=3))})
    schema = st.recursive(
        st.sampled_from(_SCHEMAS),
        lambda inner: st.one_of(
            st.fixed_dictionaries(
                {"type": st.just("object"), "properties": st.dictionaries(_TEXTS, inner, max_size=3)}
            ),
            st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
            st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        ),
        max_leaves=5,
    )
    named = st.fixed_dictionaries({"name": _TEXTS, "schema": schema})
    grammar = st.one_of(
        st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": named}),
        st.fixed_dictionaries({"type": st.sampled_from(["json_object", "structural_tag", "text", "x"])}),
        st.fixed_dictionaries({"type": st.just("structural_tag"), "format": _VALUES}),
        schema.map(json.dumps),
    )
    tool = st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": _TEXTS, "parameters": schema})}
    )
    ids = st.lists(st.one_of(st.integers(-2, 3000), st.sampled_from([2**31, 2**63, 10**9])), max_size=5)
    bias = st.dictionaries(st.sampled_from(["1", "-1", "99999999", "x", "1.5"]), _NUMBERS, max_size=3)
    return st.one_of(
        st.lists(message, max_size=3), grammar, st.lists(tool, max_size=2), ids, st.lists(ids, max_size=3), bias, media
    )


@st.composite
def _broken_bodies(draw: st.DrawFn, model: str) -> FuzzRequest:
    path = draw(st.sampled_from(sorted(TEMPLATES)))
    whole = json.dumps({"model": model, **TEMPLATES[path]}).encode()
    where = draw(st.integers(0, len(whole)))
    body = draw(
        st.sampled_from(
            [
                whole[:where],
                whole[:where] + b"\xff" + whole[where:],
                whole[:where] + b"\\ud800" + whole[where:],
                whole * 2,
                b"[" * 50_000,
                b"[" * 900 + b"]" * 900,
                b'{"a":' * 900 + b"1" + b"}" * 900,
                b"",
                b"null",
                b"\xef\xbb\xbf" + whole,
                whole.decode().encode("utf-16"),
                b'{"temperature": NaN, ' + whole[1:],
                b'{"max_tokens": 1' + b"0" * 5000 + b", " + whole[1:],
            ]
        )
    )
    kind = draw(
        st.sampled_from(["application/json", "application/json", "text/plain", "multipart/form-data", "", "x/y"])
    )
    headers = {
        "content-type": kind,
        **draw(st.sampled_from([{}, {"content-encoding": "gzip"}, {"x-body-compressed": "zstd"}])),
    }
    return FuzzRequest("POST", path, body, headers)


@st.composite
def _broken_http(draw: st.DrawFn) -> FuzzRequest:
    path = draw(
        st.sampled_from(["/v1/chat/completions", "/generate", "/v1/models", "/%00", "//generate", "/../generate"])
    )
    body = b'{"messages": []}'
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    raw = draw(
        st.sampled_from(
            [
                head + b"Content-Length: -1\r\n\r\n" + body,
                head + b"Content-Length: 5\r\n\r\n" + body,
                head + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
                head + b"Content-Length: 3\r\nContent-Length: 16\r\n\r\n" + body,
                head + b"Content-Length: 16\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + body,
                head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
                head + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + body,
                head + b"Authorization: Bearer \xff\xfe\r\nContent-Length: 16\r\n\r\n" + body,
                head + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
                b"GET " + path.encode() + b"?" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            ]
        )
    )
    return FuzzRequest("POST", path, raw=raw)


def _from_case(case: Any) -> FuzzRequest:
    if isinstance(case.body, bytes):
        body = case.body
    elif type(case.body).__name__ == "NotSet":
        body = b""
    else:
        body = json.dumps(affordable(case.path, case.body), default=str).encode()
    headers = dict(JSON) if case.media_type in (None, "application/json") else {"content-type": str(case.media_type)}
    return FuzzRequest(case.method, case.formatted_path, body, headers)
