"""The conformance command against the gateway, whose engine obeys limits, grammars and stops as a real one does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway_app import MODEL, App, ScriptedEngine, check_body, renderer

from kimi_w4a8_eagle3.base.errors import KimiError
from proof.conformance.__main__ import _first_model, failures
from proof.conformance.cases import cases

SAID = "It is 47."
CALL = "<|tool_calls_section_begin|><|tool_call_begin|>{}0<|tool_call_argument_begin|>{}<|tool_call_end|>"


class Obedient(ScriptedEngine):
    """Thinks of a sum, then says it, or the shortest text that its grammar wants."""

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        check_body(body)
        params = body["sampling_params"]
        text = ("33 + 14 = 47</think>" if body.get("require_reasoning") else "") + written(params)
        stopped = [text.index(stop) for stop in params.get("stop", ()) if stop in text]
        ids = renderer().encode(text[: min(stopped)] if stopped else text, special=True)
        drawn = ids[: params["max_new_tokens"]]
        self.finish = {"type": "stop" if len(drawn) == len(ids) else "length"}
        step = 3 if body["stream"] else len(drawn)
        for at in range(0, len(drawn), step):
            part = self._part(body, "", renderer().decode(drawn[at : at + step]), at + step >= len(drawn))
            part["meta_info"]["completion_tokens"] = min(at + step, len(drawn))
            yield part


def written(params: dict[str, Any]) -> str:
    if "json_schema" in params:
        return sample(json.loads(params["json_schema"]))
    tag = json.loads(params.get("structural_tag", "{}")).get("format", {})
    if not tag or tag["type"] == "triggered_tags":
        return SAID
    call = tag["elements"][1]["tags"][0]
    return CALL.format(call["begin"].removeprefix("<|tool_call_begin|>"), sample(call["content"]["elements"][2])) + (
        "<|tool_calls_section_end|>"
    )


def sample(schema: dict[str, Any]) -> str:
    properties = schema.get("json_schema", schema).get("properties", {})
    return json.dumps({name: one["enum"][0] if "enum" in one else True for name, one in properties.items()})


@pytest.mark.parametrize("key", ["", "key-of-ann-123"])
def test_every_expectation_is_met(key: str, tmp_path: Path) -> None:
    (file := tmp_path / "keys").touch(0o600)
    file.write_text("ann key-of-ann-123\n")

    async def ask() -> list[str]:
        chosen = [case for case in cases(bool(key)) if not key or case.kind == "keys"]
        assert key or sum(len(case.requests) for case in chosen) >= 250
        async with App(Obedient(), keys=file if key else None).client() as http:
            failed = await failures(http, MODEL, chosen, concurrency=1)
        return [f"{case.kind}, {case.api}, {case.name}: {why}" for case, why in failed.items()]

    assert asyncio.run(ask()) == []


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"data": []}', b"[1]"])
def test_a_server_without_a_list_of_models_gets_one_message(answer: bytes) -> None:
    reply = httpx.MockTransport(lambda request: httpx.Response(404, content=answer))
    with pytest.raises(KimiError, match="lists no model: status 404"):
        asyncio.run(_first_model(httpx.AsyncClient(base_url="http://nowhere", transport=reply)))
