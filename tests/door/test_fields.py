"""The rule for fields that the endpoint does not read: which are dropped, and how the operator learns of them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import prometheus_client
import pytest
from prometheus_client import REGISTRY

from kimi_w4a8_eagle3.door import fields
from kimi_w4a8_eagle3.door.access import CHAT, MESSAGES, RESPONSES
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.fields import Fields


def counted(name: str) -> float:
    return REGISTRY.get_sample_value("kimi_door_dropped_fields_total", {"field": name}) or 0.0


def test_a_dropped_field_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields, before = Fields(frozenset(), stop_regex=False), counted("client_metadata")
    for _ in range(3):
        assert fields.kept({"input": "x", "client_metadata": {"a": 1}}, RESPONSES) == {"input": "x"}
    assert counted("client_metadata") == before + 3
    assert [record.getMessage() for record in caplog.records] == [
        "door: dropped client_metadata of /v1/responses, which no endpoint reads"
    ]


def test_names_that_clients_choose_fill_neither_log_nor_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields, before = Fields(frozenset(), stop_regex=False), counted("other")
    for number in range(200):
        fields.kept({f"x{number}": 1, "a\nline": 1, "long" * 100: 1}, CHAT)
    assert len(caplog.records) <= 65 and "\n" not in caplog.text.replace("\n", "", len(caplog.records))
    assert counted("other") == before + 400 + 200 - 63


@pytest.mark.parametrize(
    ("name", "where"),
    [("guided_json", CHAT), ("max_new_tokens", CHAT), ("response_format", MESSAGES), ("priority", MESSAGES)],
)
def test_a_field_that_would_change_the_answer_is_refused(name: str, where: str) -> None:
    fields = Fields(frozenset({"priority"}), stop_regex=False)
    assert fields.kept({name: 0}, where) == {}
    with pytest.raises(Refusal, match=name):
        fields.kept({name: 1}, where)


def test_threads_that_drop_their_first_fields_at_once_share_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()

    def made(*named: str) -> prometheus_client.Counter:
        time.sleep(0.02)
        return counter(*named, registry=registry)

    counter = prometheus_client.Counter
    monkeypatch.setattr(prometheus_client, "Counter", made)
    monkeypatch.setattr(fields, "_counter", cache(fields._counter.__wrapped__))
    names = Fields(frozenset(), stop_regex=False)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: names.drop(name, CHAT), ("one", "two")))
    assert registry.get_sample_value("kimi_door_dropped_fields_total", {"field": "two"}) == 1.0
