"""Schemas that xgrammar does not enforce are refused, with the place in the schema; all others pass."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib import metadata, util
from random import Random
from typing import Any

import pytest

from kimi_w4a8_eagle3.door import enforceable, schemas
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.enforceable import require_enforceable
from kimi_w4a8_eagle3.door.schemas import check_schema, check_text, check_tools
from proof.structured.schemas import NOT_HELD, draw


def wanted(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def tool(schema: Any, strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}


@pytest.mark.parametrize("schema", NOT_HELD.values(), ids=NOT_HELD)
def test_unenforceable_schemas_are_refused_in_every_field(schema: dict[str, Any]) -> None:
    nested = {"type": "object", "properties": {"x": {"type": "array", "items": schema}}}
    with pytest.raises(Refusal, match=r"response_format: the schema at #/properties/x/items.* cannot be enforced"):
        check_schema(wanted(nested), "response_format")
    with pytest.raises(Refusal, match=r"tools\[1\]: the schema at #"):
        check_tools([[tool({}, True), tool(schema, True)]])
    check_schema(wanted(schema, strict=False), "response_format")
    check_tools([None, [tool(schema, False)]])


@pytest.mark.parametrize("key", ["enum", "anyOf", "oneOf"])
def test_no_value_at_all_is_refused(key: str) -> None:
    """xgrammar 0.2.1 lets the model answer nothing, with status 200."""
    with pytest.raises(Refusal, match=f"{key} is empty"):
        check_schema(wanted({"type": "object", "properties": {"a": {key: []}}}), "response_format")


def test_every_drawn_schema_passes() -> None:
    for seed in range(300):
        require_enforceable(draw(Random(seed)), "x")


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
def test_a_minimum_below_zero_needs_a_maximum(low: str) -> None:
    """xgrammar 0.2.1 takes `-` alone for a number that has only a minimum below zero, and no negative number."""
    with pytest.raises(Refusal, match="at #/properties/a cannot be enforced: a minimum below zero needs a maximum"):
        require_enforceable({"type": "object", "properties": {"a": {"type": ["number", "null"], low: -0.5}}}, "x")
    for schema in ({low: -5, "maximum": 5}, {low: -5, "exclusiveMaximum": 5}, {low: 0}, {"maximum": -1}):
        require_enforceable({"type": "integer", **schema}, "x")


@pytest.mark.parametrize("schema", [{"type": "integer", "minimum": -5}, {"type": "integer", "multipleOf": 5}])
def test_what_a_newer_xgrammar_holds_is_refused_with_the_old_one_only(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for old in (True, False):
        monkeypatch.setattr(enforceable, "_OLD", old)
        with pytest.raises(Refusal) if old else nullcontext():
            require_enforceable(schema, "x")


def test_names_that_may_be_any_text_are_no_constraint() -> None:
    described = {"type": "string", "title": "Name", "description": "A name"}
    for free in ({"type": "string"}, {"type": "string", "description": "A name"}, described):
        require_enforceable({"type": "object", "propertyNames": free}, "x")
    for constraint in ({"type": "string", "pattern": "^a"}, {"type": "integer"}, {"enum": ["a"]}, False, {}):
        with pytest.raises(Refusal, match="propertyNames would be ignored"):
            require_enforceable({"type": "object", "propertyNames": constraint}, "x")


@pytest.mark.parametrize("old", ["0.2.1", "0.1.33", "0.2.6.post1"])
@pytest.mark.parametrize("new", ["0.2.7", "0.2.7.dev1", "0.3.0", "1.0"])
def test_the_installed_xgrammar_decides_what_is_held(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (old, new):
        monkeypatch.setattr(metadata, "version", {"xgrammar": version}.__getitem__)
        spec = util.spec_from_file_location(enforceable.__name__, enforceable.__file__)
        assert spec and spec.loader
        spec.loader.exec_module(read_again := util.module_from_spec(spec))
        assert read_again._OLD is (version == old)


@pytest.mark.parametrize("one", [{"pattern": "a"}, {"format": "date"}, {"minLength": 1, "maxLength": 2}])
def test_a_text_has_one_kind_of_constraint_and_its_type(one: dict[str, Any]) -> None:
    require_enforceable({"type": "string", **one}, "x")
    with pytest.raises(Refusal, match=f"{max(one)} without a type would be ignored"):
        require_enforceable(one, "x")
    for other in ({"pattern": "b"}, {"format": "time"}, {"maxLength": 3}):
        if not one.keys() & other.keys():
            with pytest.raises(Refusal, match="pattern, format and a length cannot be enforced together"):
                require_enforceable({"type": "string", **one, **other}, "x")


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf", "prefixItems"])
def test_schemas_in_lists_are_read(key: str) -> None:
    inner = [{"type": "string", "minLength": 1}] * (key != "allOf") + [{"type": "object", "if": {}}]
    with pytest.raises(Refusal, match=f"the schema at #/{key}/{len(inner) - 1} cannot be enforced: if would be"):
        require_enforceable({key: inner}, "x")
    require_enforceable({key: inner[:1]} if len(inner) > 1 else {key: [{"type": "object"}]}, "x")


@pytest.mark.parametrize("key", ["pattern", "minimum", "properties", "items", "anyOf"])
def test_assertions_beside_a_reference_are_refused(key: str) -> None:
    with pytest.raises(Refusal, match=f"{key} beside \\$ref would be ignored"):
        require_enforceable({"$ref": "#/$defs/x", key: {}}, "x")


def test_a_schema_that_is_only_itself_fits_no_value() -> None:
    with pytest.raises(Refusal, match="refers only to itself"):
        require_enforceable({"$ref": "#"}, "x")


def test_what_stands_beside_known_values_is_no_constraint() -> None:
    for known in ({"enum": ["a"]}, {"const": "a"}):
        require_enforceable({**known, "pattern": "a", "minLength": 1}, "x")


def test_parts_of_structural_tags_that_hold_grammars_are_closed() -> None:
    for kind in ("grammar", "ebnf", "lark", "repeat", "plus", "star"):
        tag = {"type": "structural_tag", "format": {"elements": [{"type": "const_string"}, {"type": kind}]}}
        with pytest.raises(Refusal, match=f"holds a {kind}, which is not for clients"):
            check_schema(tag, "response_format")
        with pytest.raises(Refusal, match=f"holds a {kind}, which is not for clients"):
            check_text(json.dumps(tag), "structural_tag")


def test_the_objects_of_all_tools_are_counted_together() -> None:
    half = {"properties": {f"p{number}": {} for number in range(schemas._MAX_TOOL_OBJECTS // 2 - 4)}}
    lists = [[tool(half, False)], [tool(half, False)]]  # a tool, its function, its schema and the properties' object
    check_tools(lists)
    with pytest.raises(Refusal, match="tools hold more than 8192 objects"):
        check_tools([*lists, [{}]])


def test_values_and_names_are_no_keywords() -> None:
    require_enforceable({"type": "object", "properties": {"not": {"type": "null"}, "if": {"enum": [{"not": 1}]}}}, "x")
    require_enforceable({"const": {"uniqueItems": True}, "default": {"multipleOf": 1}, "description": "allOf"}, "x")


@pytest.mark.parametrize("schema", [{"required": 5}, {"required": [[]]}, {"allOf": {}}, {"properties": 1}, 5, None])
def test_a_broken_schema_is_left_to_the_compiler(schema: Any) -> None:
    require_enforceable(schema, "x")


def test_a_schema_in_a_text_is_read_too() -> None:
    with pytest.raises(Refusal, match="multipleOf would be ignored"):
        check_text('{"type": "integer", "multipleOf": 2}', "json_schema")


def test_required_names_beside_a_list_of_properties_are_counted_once() -> None:
    """A list is no description, and looking every name up in it would take the square of its length."""
    many = [f"name{number}" for number in range(4000)]
    with pytest.raises(Refusal, match="required names 'name0'"):
        check_schema(wanted({"type": "object", "required": many, "properties": many}), "response_format")


def test_a_schema_sent_as_text_nests_no_deeper_than_a_body() -> None:
    deep = '{"type": "array", "items": ' * 60 + "{}" + "}" * 60
    with pytest.raises(Refusal, match="nests more than 48"):
        check_text(deep, "json_schema")
