"""Strategies for the requests that are sent: hypothesis draws them, shrinks them and keeps those that found a fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from .requests import JSON, OUTSIDER, Case, HttpRequest, json_request
from .state import cost_case, state_case
from .values import SIMPLE, Bodies, Schema
from .wires import broken_body, header_case

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

# Of forty requests. Shrinking prefers the first.
_SHARES = {"fields": 28, "samples": 5, "routes": 3, "headers": 2, "broken bodies": 1, "state": 1, "cost": 1}
_GROUPS = st.sampled_from([group for group, share in _SHARES.items() for _ in range(share)])


class Cases:
    """Requests to an engine with this OpenAPI document. closed: paths of TEMPLATES that clients may not use here."""

    def __init__(
        self, openapi: Mapping[str, Any], model: str, forbidden_url: str, closed: frozenset[str] = frozenset()
    ) -> None:
        self._model = model
        self._bodies = Bodies(openapi, forbidden_url)
        operations = openapi["paths"]
        schemas = {
            path: self._bodies.body(operations.get(path, {}).get("post", {})).get("properties", {})
            for path in TEMPLATES
            if path not in closed
        }
        self.fields: list[tuple[str, str, Schema]] = [
            (path, name, schema) for path, properties in schemas.items() for name, schema in properties.items()
        ]
        if "/generate" in schemas:  # its document says no more than "object"
            shared = {name: {} for name in _SAMPLING} | schemas.get("/v1/completions", {})
            self.fields += [("/generate", f"sampling_params/{name}", schema) for name, schema in shared.items()]
        self._schemas = schemas
        self._operations = [
            (method, path, operation)
            for path, item in operations.items()
            for method, operation in item.items()
            if path not in schemas
        ] + [("get", path, {}) for path in _UNDOCUMENTED]

    def strategy(self) -> st.SearchStrategy[Case]:
        """Return a strategy of every group, most of it changed fields."""
        return st.composite(lambda draw: self._draw(draw, draw(_GROUPS)))()

    def _draw(self, draw: st.DrawFn, group: str) -> Case:
        if group == "broken bodies":
            path = draw(st.sampled_from(list(self._schemas)))
            return broken_body(draw, path, json.dumps(template(path, self._model)).encode())
        others = {"headers": header_case, "state": state_case, "cost": cost_case}
        if group in others:
            return others[group](draw, self._model)
        return {"fields": self._changed, "samples": self._sample, "routes": self._route}[group](draw)

    def _changed(self, draw: st.DrawFn) -> Case:
        """Draw a template with one other field: any value, or one of its schema with wrong parts."""
        path, label, schema = draw(st.sampled_from(self.fields))
        name = label.rpartition("/")[2]
        valid = draw(st.integers(0, 3)) == 3
        value = self._bodies.draw(draw, schema, wrong=8, name=name) if valid else draw(SIMPLE)
        field = {"sampling_params": {"max_new_tokens": 2, name: value}} if "/" in label else {name: value}
        body = template(path, self._model) | field
        if name == "input_ids":
            body.pop("text", None)  # the door reads one of them
        if draw(st.integers(0, 4)) == 4:
            body["stream"] = True
        return Case("fields", f"{path} {label}", (json_request("POST", path, body),))

    def _sample(self, draw: st.DrawFn) -> Case:
        """Draw a template with a few fields of their schemas, partly wrong, from a client that may leave."""
        path = draw(st.sampled_from([path for path, properties in self._schemas.items() if properties]))
        names = draw(st.lists(st.sampled_from(sorted(self._schemas[path])), min_size=1, max_size=4, unique=True))
        wrong = draw(st.sampled_from((0, 20, 5)))
        drawn = {name: self._bodies.draw(draw, self._schemas[path][name], wrong, name) for name in names}
        leave = draw(st.sampled_from((None, None, None, None, 0.01, 0.05, 0.2)))
        return Case("samples", path, (json_request("POST", path, template(path, self._model) | drawn, leave),))

    def _route(self, draw: st.DrawFn) -> Case:
        """Draw an operation that is not a template's, as documented or not, from a client that may not do it."""
        method, path, operation = draw(st.sampled_from(self._operations))
        body = self._bodies.draw(draw, self._bodies.body(operation), wrong=10)
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


def template(path: str, model: str) -> dict[str, Any]:
    """Return a body that is answered."""
    return {**({} if path in _NAMELESS else {"model": model}), **TEMPLATES[path]}
