"""A value of another type anywhere in a body is refused, or read as nothing: the gateway never fails on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from support import recorded
from support.gateway_app import MODEL, App, ScriptedEngine

from kimi_w4a8_eagle3.gateway.endpoints import ENDPOINTS
from kimi_w4a8_eagle3.gateway.errors import Refusal
from proof.conformance.cases import cases
from proof.conformance.forms import ABSENT

WRONG = (None, [], {}, "", "x", -1, 1.5, True, [1], ["x"], [[]], [{}], {"type": []})


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of conformance and of recorded agents to endpoints that read a body, the smallest first."""
    asked = [(request.path, request.body) for case in cases(key=False) for request in case.requests]
    asked += [(row["path"], short(row["body"])) for row in recorded.rows("requests")]
    for path, body in sorted(asked, key=lambda one: len(repr(one))):
        if path in ENDPOINTS and isinstance(body, dict):
            yield path, {name: value for name, value in body.items() if value is not ABSENT}


def short(value: Any) -> Any:
    """Return a body with little text, and of each long list the first and the last entries."""
    if isinstance(value, dict):
        return {name: short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [short(one) for one in (value if len(value) < 7 else value[:3] + value[-3:])]
    return value[:40] if isinstance(value, str) else value


def places(value: Any, shape: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield each place below a value as (shape, container, key). A shape has no indices and no names of properties."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        named = isinstance(key, str) and shape[-1:] != ("properties",)
        inner = (*shape, str(key) if named else "*")
        yield inner, value, key
        yield from places(value[key], inner)


def test_no_wrong_type_makes_the_gateway_fail() -> None:
    service, seen, failed = App(ScriptedEngine()).service, set[tuple[str, tuple[str, ...]]](), list[str]()
    for path, body in bodies():
        for shape, container, key in [*places(body)]:
            if (path, shape) in seen:
                continue
            seen.add((path, shape))
            right = container[key]
            for wrong in WRONG:
                container[key] = wrong
                try:
                    service.read(ENDPOINTS[path], orjson.dumps({"model": MODEL, **body}))
                except Refusal:
                    pass
                except Exception as error:
                    failed.append(f"{path} {'.'.join(shape)} = {wrong!r}: {error!r}")
            container[key] = right
    assert failed == []
    assert len(seen) > 400
