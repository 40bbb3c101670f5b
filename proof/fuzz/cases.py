"""Strategies for hostile requests: fields of the server's own document, closed routes, headers and broken bodies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from .requests import CHAT, JSON, KEY, OUTSIDER, Case, HttpRequest, Wire, json_request, question, wire_request

Schema = Mapping[str, Any]
MESSAGE = {"role": "user", "content": "Tom has 3 apples."}
# What clients use, with the least that is answered.
TEMPLATES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [MESSAGE], "max_tokens": 2},
    "/v1/completions": {"prompt": "Tom has", "max_tokens": 2},
    "/generate": {"text": "Tom has", "sampling_params": {"max_new_tokens": 2}},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [MESSAGE]},
    "/v1/responses": {"input": "Tom has", "max_output_tokens": 2},
    "/v1/tokenize": {"prompt": "Tom has"},
    "/v1/detokenize": {"tokens": [1, 2, 3]},
}
_NAMELESS = frozenset({"/generate", "/v1/detokenize"})  # bodies without a model
# Open to outsiders besides those. Everything else that the document names must be refused to an outsider.
_OPEN = (
    *("/", "/health", "/health_generate", "/ready", "/ping", "/metrics", "/v1/loads", "/model_info", "/get_model_info"),
    *("/server_info", "/get_server_info", "/v1/models", "/v1/models/{model}"),
    *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
)
_UNDOCUMENTED = ("/docs", "/redoc", "/openapi.json")
_SAMPLING = ("max_new_tokens", "min_new_tokens", "sampling_seed", "stream_interval", "custom_params")

_TEXTS = (
    *("", " ", "x", "\x00", "\ud800", "a\udfffb", "﷽" * 50, "e" + "\u0301" * 500, "A" * 200_000, "0" * 5000),
    *("<|im_end|>", "<|im_user|>", "[BOS]", "<|media_pad|>", "<|tool_calls_section_begin|>"),
    *("(", "(a+)+$", "[", "a{1000000}", "(?P<x>a)(?P=x)", "\\", "^$"),
    *("{", "{}", '{"$ref": "#"}', '{"type": "nope"}', "root ::= root", "{{ 7*7 }}", "{% raw %}"),
    *("../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "data:image/png;base64,AAAA", "data:,"),
)
# Texts that pydantic reads as numbers and truths.
_COERCED = ("5", "5000", "1000000000", "-1", "5000.0", "1e9", " 7 ", "1_000", "true", "off", "null", "NaN", "-Infinity")
_INTEGERS = (0, 1, 5, -1, 129, 5000, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30)
_FLOATS = (0.5, 0.0, 5000.0, -0.0, 1e-300, 1e39, 1.7e308, -1e308, 1.0000001, float("nan"), float("inf"))
_LISTS: tuple[Any, ...] = (
    *([], [None], [[]], [{}], [5], [5000], [-1], ["5"], ["5000"], ["x"], [1, "x"], [[1]], [True], [0.5], [2**63]),
    json.loads("[1," + "[" * 400 + "]" * 400 + "]"),
    [{"type": []}],
    [["x", {"type": {}}]],
)
_OBJECTS: tuple[Any, ...] = (
    *({}, {"a": 5}, {"": None}, {"type": {}}, {"type": []}, {"1": 1e39}, {"-1": 1}, {"x": "y"}, {"name": None}),
    json.loads('{"a":' * 60 + "1" + "}" * 60),
)
KINDS: tuple[tuple[Any, ...], ...] = (
    *((None,), (True, False), _COERCED, _INTEGERS, _FLOATS, _LISTS, _OBJECTS, _TEXTS),
)
SIMPLE = st.one_of(*map(st.sampled_from, KINDS))
ANYTHING = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([text for text in _TEXTS if len(text) < 1000]), inner, max_size=3)
    ),
    max_leaves=6,
)
# For fields of which OpenAPI says no more than "object": a JSON schema.
_SCHEMAS: tuple[Any, ...] = (
    *(True, {}, {"$ref": "#"}, {"$ref": "http://127.0.0.1:1/x"}, {"type": "nope"}, {"enum": []}, {"not": {}}),
    *({"const": None}, {"anyOf": []}, {"allOf": [{}]}, {"type": "string", "pattern": "(a"}),
    *({"type": "string", "minLength": 10**6}, {"type": "integer", "minimum": 10**30}, {"type": []}),
    *({"type": "array", "minItems": 10**6}, {"type": "object", "properties": {"a": {"type": "integer"}}}),
)
_SCHEMA_NAMES = frozenset({"schema", "parameters", "input_schema", "json_schema"})

# Headers from which SGLang, or something in front of it, takes a meaning.
_HEADERS = {
    "Host": ("x", "", "127.0.0.1:1", "a b", "[::1", "x\ty", "é"),
    "Origin": ("https://fuzz.example", "null", "", "file://"),
    "Content-Type": ("text/plain", "application/json; charset=utf-16", "multipart/form-data", "", "x/y;" * 500),
    "Content-Encoding": ("gzip", "br", "identity", "deflate, gzip"),
    "Content-Length": ("0", "-1", "5", "99999999999999999999", "+3", "x"),
    "Accept": ("text/event-stream", "", "*/*;q=x"),
    "Expect": ("100-continue", "200-ok"),
    "Upgrade": ("websocket", "h2c", "TLS/1.0"),
    "Authorization": ("Bearer", "Bearer ", "Basic YTpi", "Bearer é", "Bearer x y", "bearer\tx", "x" * 9000),
    "X-Api-Key": ("", "x", "é"),
    "X-Body-Compressed": ("zstd", "gzip"),
    **{f"X-Override-{name}": ("5", "-1", "x", "", "é", "9" * 5000) for name in (
        "Rid", "Priority", "Bootstrap-Host", "Bootstrap-Port", "Bootstrap-Room", "Conversation-Id", "Routed-Dp-Rank",
        "Disagg-Prefill-Dp-Rank",
    )},
    "X-Data-Parallel-Rank": ("7", "-1", "x", "9" * 5000),
    "X-Smg-Routing-Key": ("x", "x" * 5000),
    **dict.fromkeys(("X-Sglext-Return-Input-Ids", "X-Sglext-Return-Output-Ids", "X-Sglext-Ids-Framed"), ("1",)),
    "X-Http-Method-Override": ("DELETE",),
    **dict.fromkeys(
        ("Forwarded", "X-Forwarded-Proto", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Real-IP"),
        ("127.0.0.1", "127.0.0.1:80", "::1", "10.0.0.1, 127.0.0.1", "for=127.0.0.1;proto=https;host=x", "\x7f", ""),
    ),
}  # fmt: skip
_CODINGS = ("chunked", "identity", "chunked, chunked", "xchunked", " chunked", "chunked\t", "gzip, chunked", "chunKed")
_DETOURS = (
    *("//flush_cache", "/flush_cache/", "/FLUSH_CACHE", "/%66lush_cache", "/v1/../flush_cache", "/flush_cache?x=1"),
    *("/v1/models/../../flush_cache", "/v1/models/%2e%2e/%2e%2e/flush_cache", "/flush_cache;x", "/flush_cache%00"),
    *("http://127.0.0.1/flush_cache", "/health/../flush_cache", "/v1/responses/..%2f..%2fflush_cache", "*"),
)
_GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n" * 5000,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"G\x00T / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(20_000)) + b"\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n folded\r\n\r\n",
)


class Cases:
    """Requests to a server with this OpenAPI document. forbidden_url: an address that nothing may ever ask.

    closed: paths of TEMPLATES that clients may not use here.
    """

    def __init__(
        self, openapi: Mapping[str, Any], model: str, forbidden_url: str, closed: frozenset[str] = frozenset()
    ) -> None:
        self._model, operations = model, openapi["paths"]
        self._types: Mapping[str, Schema] = openapi.get("components", {}).get("schemas", {})
        self._addresses = (forbidden_url, "file:///etc/passwd", "/etc/passwd", "data:image/png;base64,AAAA")
        self._fields = {
            path: self._body(operations.get(path, {}).get("post", {})).get("properties", {})
            for path in TEMPLATES
            if path not in closed
        }
        self.fields: list[tuple[str, str, Schema]] = [
            (path, name, schema) for path, properties in self._fields.items() for name, schema in properties.items()
        ]
        if "/generate" in self._fields:  # its document says no more than "object"
            shared = {name: {} for name in _SAMPLING} | self._fields.get("/v1/completions", {})
            self.fields += [("/generate", f"sampling_params/{name}", schema) for name, schema in shared.items()]
        self._operations = [
            (method, path, operation)
            for path, item in operations.items()
            for method, operation in item.items()
            if path not in self._fields
        ] + [("get", path, {}) for path in _UNDOCUMENTED]

    def strategy(self) -> st.SearchStrategy[Case]:
        """Return a strategy of every group, most of it changed fields. Shrinking prefers those."""
        kinds = (self._changed, self._changed, self._changed, self._sample, self._route, self._header, self._broken)
        return st.composite(lambda draw: draw(st.sampled_from(kinds))(draw))()

    def _changed(self, draw: st.DrawFn) -> Case:
        """Draw a template with one other field: any value, or one of its schema with wrong parts."""
        path, label, schema = draw(st.sampled_from(self.fields))
        name = label.rpartition("/")[2]
        valid = draw(st.integers(0, 3)) == 3
        value = self._value(draw, schema, wrong=8, name=name) if valid else draw(SIMPLE)
        field = {"sampling_params": {"max_new_tokens": 2, name: value}} if "/" in label else {name: value}
        body = template(path, self._model) | field
        if name == "input_ids":
            body.pop("text", None)  # the door reads one of them
        if draw(st.integers(0, 4)) == 4:
            body["stream"] = True
        return Case("fields", f"{path} {label}", (json_request("POST", path, body),))

    def _sample(self, draw: st.DrawFn) -> Case:
        """Draw a template with a few fields of their schemas, partly wrong, from a client that may leave."""
        path = draw(st.sampled_from([path for path, properties in self._fields.items() if properties]))
        names = draw(st.lists(st.sampled_from(sorted(self._fields[path])), min_size=1, max_size=4, unique=True))
        wrong = draw(st.sampled_from((0, 20, 5)))
        drawn = {name: self._value(draw, self._fields[path][name], wrong, name) for name in names}
        leave = draw(st.sampled_from((None, None, None, None, 0.01, 0.05, 0.2)))
        return Case("samples", path, (json_request("POST", path, template(path, self._model) | drawn, leave),))

    def _route(self, draw: st.DrawFn) -> Case:
        """Draw an operation that is not a template's, as documented or not, from a client that may not do it."""
        method, path, operation = draw(st.sampled_from(self._operations))
        body = self._value(draw, self._body(operation), wrong=10)
        query, filled = "", path
        for parameter in operation.get("parameters", ()):
            value = quote(json.dumps(draw(SIMPLE))[:500], safe="")
            if parameter["in"] == "path":
                filled = filled.replace("{" + parameter["name"] + "}", value)
            else:
                query += f"{'&' if query else '?'}{parameter['name']}={value}"
        method = draw(st.sampled_from((method,) * 16 + ("get", "post", "put", "delete", "patch"))).upper()
        content = b"" if method == "GET" else json.dumps(body).encode()
        request = HttpRequest(method, filled + query, content, JSON + OUTSIDER, key=draw(st.booleans()))
        return Case("routes", f"{method} {path}", (request,), refused=path not in _OPEN)

    def _header(self, draw: st.DrawFn) -> Case:
        """Draw other or more headers around a small request, two ends of a body, a detour, or no HTTP at all."""
        base = [("Host", "x"), ("Content-Type", "application/json"), ("Authorization", f"Bearer {KEY}")]
        chat = json.dumps(question(self._model, max_tokens=1)).encode()
        path, body, closed = draw(st.sampled_from(((CHAT, chat, False), ("/flush_cache", b"", True))))
        kind = draw(st.sampled_from(("more", "other", "two ends", "detour", "garbage")))
        if kind == "detour":
            return Case(
                "headers", kind, (wire_request("POST", draw(st.sampled_from(_DETOURS)), [*base, *OUTSIDER]),), True
            )
        if kind == "garbage":
            return Case("headers", kind, (Wire((draw(st.sampled_from(_GARBAGE)),)),))
        if kind == "two ends":
            return Case("headers", kind, (_two_ends(draw, base, chat),))
        changed = {name: draw(st.sampled_from(_HEADERS[name])) for name in draw(_SOME_HEADERS)}
        kept = [header for header in base if kind == "more" or header[0] not in changed]
        headers = [*kept, *changed.items(), *(OUTSIDER if closed else ())]
        wire = wire_request("POST", path, headers, body, patience_s=1.0)
        return Case("headers", f"{', '.join(changed)} {path}", (wire,), closed)

    def _broken(self, draw: st.DrawFn) -> Case:
        """Draw a body that is no JSON, not only JSON, or JSON in another guise."""
        path = draw(st.sampled_from(list(self._fields)))
        whole = json.dumps(template(path, self._model)).encode()
        at = draw(st.integers(0, len(whole)))
        bodies = (
            *(whole[:at], whole[:at] + b"\xff" + whole[at:], whole[:at] + b"\\ud800" + whole[at:], whole * 2, b""),
            *(b"[" * 50_000, b"[" * 900 + b"]" * 900, b'{"a":' * 900 + b"1" + b"}" * 900, b"0", b'"x"', b"[1]", b"{}"),
            *(b"\xef\xbb\xbf" + whole, whole.decode().encode("utf-16"), b'{"temperature": NaN, ' + whole[1:], b"null"),
            *(b'{"max_tokens": 1' + b"0" * 5000 + b", " + whole[1:], whole[:-1] + b', "model": 5, "model": []}'),
            b'{"n": 1e400, ' + whole[1:],
        )
        kind = draw(st.sampled_from(("application/json", "text/plain", "multipart/form-data", "", "x/y")))
        coding = draw(st.sampled_from(((), (("content-encoding", "gzip"),), (("x-body-compressed", "zstd"),))))
        headers = (("content-type", kind), *coding)
        return Case("broken bodies", path, (HttpRequest("POST", path, draw(st.sampled_from(bodies)), headers),))

    def _body(self, operation: Mapping[str, Any]) -> Schema:
        """Return the schema of an operation's JSON body, empty where it describes none."""
        content = operation.get("requestBody", {}).get("content", {})
        return self._resolved(content.get("application/json", {}).get("schema", {}))

    def _value(self, draw: st.DrawFn, schema: Schema, wrong: int, name: str = "", depth: int = 6) -> Any:
        """Draw a value of the schema. One of `wrong` parts (0: none) may have any value at all."""
        schema = self._resolved(schema)
        if depth == 0 or (wrong and draw(st.integers(0, wrong - 1)) == wrong - 1):
            return draw(ANYTHING)
        if name in _SCHEMA_NAMES and "properties" not in schema:
            return draw(st.sampled_from(_SCHEMAS))
        if alternatives := [one for kind in ("anyOf", "oneOf", "allOf") for one in schema.get(kind, ())]:
            return self._value(draw, draw(st.sampled_from(alternatives)), wrong, name, depth - 1)
        if "enum" in schema or "const" in schema:
            return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
        kind = schema.get("type")
        if kind == "array":
            items = range(draw(st.sampled_from((1, 0, 2))))
            return [self._value(draw, schema.get("items", {}), wrong, name, depth - 1) for _ in items]
        if kind == "object":
            members = schema.get("properties", {})
            kept = [one for one in members if one in schema.get("required", ()) or draw(st.integers(0, 3)) == 3]
            return {member: self._value(draw, members[member], wrong, member, depth - 1) for member in kept}
        if kind == "string":
            return draw(st.sampled_from(self._addresses if "url" in name or name == "data" else _TEXTS))
        simple = {"integer": _INTEGERS, "number": _FLOATS, "boolean": (True, False), "null": (None,)}
        return draw(st.sampled_from(simple[kind])) if kind in simple else draw(ANYTHING)

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._types[schema["$ref"].rpartition("/")[2]]
        return schema


_SOME_HEADERS = st.lists(st.sampled_from(sorted(_HEADERS)), min_size=1, max_size=3, unique=True)


def _two_ends(draw: st.DrawFn, base: list[tuple[str, str]], body: bytes) -> Wire:
    """Tell in two ways where the body ends, with another request behind one of the ends."""
    hidden = b"POST /flush_cache HTTP/1.1\r\nHost: x\r\nOrigin: https://fuzz.example\r\nContent-Length: 0\r\n\r\n"
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    frames = (chunk + hidden, hidden + chunk, b"zz\r\n" + chunk, b"ffffffffffffffff\r\n" + body, chunk)
    framed = draw(st.sampled_from(frames))
    headers = [*base, ("Transfer-Encoding", draw(st.sampled_from(_CODINGS)))]
    length = draw(st.sampled_from((None, 0, 4, len(body), len(framed), 10**20)))
    if length is not None:
        headers.append(("Content-Length", str(length)))
    wire = wire_request("POST", CHAT, headers, length=False)
    return Wire((wire.pieces[0] + framed,), patience_s=1.0)


def template(path: str, model: str) -> dict[str, Any]:
    """Return a body that is answered."""
    return {**({} if path in _NAMELESS else {"model": model}), **TEMPLATES[path]}
