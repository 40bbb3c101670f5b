"""Which request comes at which place: a function of seed and index alone, so that any one of them can be sent again.

First the corpus, then eight groups in a fixed turn, in which every place of a client's body gets most of the turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any
from urllib.parse import quote

from . import state, wires
from .corpus import corpus
from .requests import JSON, OUTSIDER, Case, Request, json_request
from .values import Place, Shapes, form

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
# Besides those: nobody is kept out. Everything else that the document names must be refused to an outsider.
_ANYBODY = (
    *("/", "/health", "/health_generate", "/ready", "/ping", "/metrics", "/v1/loads", "/model_info", "/get_model_info"),
    *("/server_info", "/get_server_info", "/v1/models", "/v1/models/{model}"),
    *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
)
_UNDOCUMENTED = ("/docs", "/redoc", "/openapi.json")
_SAMPLING = ("max_new_tokens", "min_new_tokens", "sampling_seed", "stream_interval", "custom_params")

_TURN = (
    ("fields", 22),
    ("nested fields", 6),
    ("samples", 5),
    ("routes", 3),
    ("headers", 2),
    ("broken bodies", 1),
    ("state and cost", 1),
)
_SLOTS = tuple((group, number) for group, share in _TURN for number in range(share))


class Plan:
    """The requests of a seed. closed: paths of TEMPLATES that clients may not use here. keyed: clients need a key."""

    def __init__(
        self,
        openapi: Mapping[str, Any],
        model: str,
        seed: int,
        forbidden_url: str,
        port: int,
        closed: frozenset[str],
        keyed: bool = False,
    ) -> None:
        self._seed = seed
        self._model = model
        self._paths: Mapping[str, Mapping[str, Any]] = openapi["paths"]
        self._shapes = Shapes(openapi, forbidden_url)
        self._open = [path for path in TEMPLATES if path not in closed]
        self.corpus = corpus(model, port, keyed)
        places = [(path, place) for path in self._open for place in self._places(path)]
        Random(seed).shuffle(places)
        self.fields = [each for each in places if "/" not in each[1].label]
        self.nested = [each for each in places if "/" in each[1].label]
        self._operations = [
            (method, path, operation)
            for path, item in self._paths.items()
            for method, operation in item.items()
            if path not in self._open
        ] + [("get", path, {}) for path in _UNDOCUMENTED]

    def case(self, index: int) -> Case:
        """What is sent at this place."""
        if index < len(self.corpus):
            return self.corpus[index]
        turn, slot = divmod(index - len(self.corpus), len(_SLOTS))
        group, number = _SLOTS[slot]
        random = Random(f"{self._seed}:{index}")
        visit = turn * dict(_TURN)[group] + number
        if group == "fields":
            return self._changed(group, self.fields, visit, random)
        if group == "nested fields":
            return self._changed(group, self.nested, visit, random)
        if group == "samples":
            return self._sample(random)
        if group == "routes":
            return self._route(visit, random)
        if group == "headers":
            return wires.header_case(visit, random, self._model)
        if group == "broken bodies":
            path = random.choice(self._open)
            return wires.broken_body(random, path, json.dumps(self.template(path)).encode())
        return (state.state_case if visit % 2 else state.cost_case)(visit // 2, random, self._model)

    def template(self, path: str) -> dict[str, Any]:
        """A body that is answered."""
        return {**({} if path in _NAMELESS else {"model": self._model}), **TEMPLATES[path]}

    def _places(self, path: str) -> list[Place]:
        places = self._shapes.places(self._shapes.body(self._paths.get(path, {}).get("post", {})))
        if path != "/generate":
            return places
        shared = {
            place.field for place in self._shapes.places(self._shapes.body(self._paths["/v1/completions"]["post"]))
        }
        names = sorted({*shared, *_SAMPLING})
        return places + [
            Place("sampling_params", f"sampling_params/{name}", partial(_sampling, name)) for name in names
        ]

    def _changed(self, group: str, places: list[tuple[str, Place]], visit: int, random: Random) -> Case:
        """A template with one value at one place; the place's number shifts which kind comes first."""
        turn, number = divmod(visit, len(places))
        path, place = places[number]
        body = self.template(path) | {place.field: place.wrap(form(turn + number, random))}
        if place.field == "input_ids":
            body.pop("text", None)  # the door reads one of them
        if random.random() < 0.2:
            body["stream"] = True
        return Case(group, f"{path} {place.label}", (json_request("POST", path, body),))

    def _sample(self, random: Random) -> Case:
        """A template with a few fields drawn from their schema, some parts of them wrong."""
        path = random.choice(self._open)
        schema = self._shapes.body(self._paths[path]["post"])
        body = self._shapes.sample(schema, random, wrong=random.choice((0.0, 0.05, 0.2)))
        names = random.sample(sorted(body), min(len(body), random.randint(1, 4))) if isinstance(body, dict) else []
        changed = self.template(path) | {name: body[name] for name in names}
        leave = random.random() * 0.2 if random.random() < 0.2 else None
        return Case("samples", path, (json_request("POST", path, changed, leave),))

    def _route(self, visit: int, random: Random) -> Case:
        """An operation that is not a template's, as documented or not, from somebody who may not do it."""
        method, path, operation = self._operations[visit % len(self._operations)]
        closed = path not in _ANYBODY
        body = self._shapes.sample(self._shapes.body(operation), random, wrong=0.1)
        query, filled = "", path
        for parameter in operation.get("parameters", ()):
            value = quote(json.dumps(form(random.randrange(8), random))[:500], safe="")
            if parameter["in"] == "path":
                filled = filled.replace("{" + parameter["name"] + "}", value)
            else:
                query += f"{'&' if query else '?'}{parameter['name']}={value}"
        if random.random() < 0.2:
            method = random.choice(("get", "post", "put", "delete", "patch"))
        content = b"" if method == "get" else json.dumps(body).encode()
        key = random.random() < 0.5
        request = Request(method.upper(), filled + query, content, JSON + OUTSIDER, key=key)
        return Case("routes", f"{method.upper()} {path}", (request,), refused=closed)


def _sampling(name: str, value: Any) -> dict[str, Any]:
    return {"max_new_tokens": 2, name: value}


def probe(path: str, model: str) -> Request:
    """The template's request: is this path open to clients?"""
    body = TEMPLATES[path] if path in _NAMELESS else {"model": model, **TEMPLATES[path]}
    return json_request("POST", path, body)
