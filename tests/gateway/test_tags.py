"""Changes of structural tags reach every part of a tag, and nothing inside a schema."""

from __future__ import annotations

from kimi_w4a8_eagle3.gateway.tags import compact, one_call

SCHEMA = {"type": "object", "properties": {"a": {"type": "json_schema"}, "b": {"const": {"type": "triggered_tags"}}}}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
CALLS = {"type": "tags_with_separator", "tags": [{"type": "tag", "content": CONTENT}]}
TAG = {"type": "structural_tag", "format": {"type": "triggered_tags", "tags": [{"type": "tag", "content": CALLS}]}}


def test_every_list_of_calls_ends_after_the_first() -> None:
    lists = one_call(TAG)["format"]
    assert lists["stop_after_first"] and lists["tags"][0]["content"]["stop_after_first"]
    assert lists["tags"][0]["content"]["tags"][0]["content"] == CONTENT


def test_every_schema_becomes_a_grammar_but_those_of_other_notations() -> None:
    asked = []
    made = compact(TAG, lambda schema: asked.append(schema) or "root ::= [a]")
    assert asked == [SCHEMA]
    assert made["format"]["tags"][0]["content"]["tags"][0]["content"] == {"type": "grammar", "grammar": "root ::= [a]"}
    escaped = compact(TAG, lambda _: r'"gr\xf6\xdfe \u6578e \U0001f989a \\xdf \"" [\0-\x1f\n]')
    grammar = escaped["format"]["tags"][0]["content"]["tags"][0]["content"]["grammar"]
    assert grammar == '"größe 數e 🦉a \\\\xdf \\"" [\\0-\x1f\\n]'
    notation = {"format": {**CONTENT, "style": "qwen_xml"}}
    assert compact(notation, str) == notation
