"""Two real servers of the built-in model behind the real smg: killed, renewed one by one, and found in Kubernetes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from support.supervisor import ForkedEngine
from support.waiting import until

from proof.load.behind_smg import CONTROL_KEY, Smg, behind_smg, renew_one_by_one
from proof.load.load import ClientLoad, forbidden
from proof.load.load_questions import Question, known_questions
from proof.load.load_request import ClientOutcome
from proof.load.served import ServedEngine

pytestmark = [pytest.mark.server, pytest.mark.slow]
Both = tuple[Smg, list[ServedEngine]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with behind_smg(tmp_path_factory.mktemp("smg"), engine=ForkedEngine) as found:
        yield found


@pytest.fixture(scope="module")
def questions(both: Both) -> list[Question]:
    return known_questions(both[1][0].base_url, 6)


def test_kill_9_of_an_engine_is_seen_by_its_own_clients_alone(both: Both, questions: list[Question]) -> None:
    front, (first, second) = both
    with ClientLoad(front.base_url, questions, 6, hang_s=280.0) as load:
        until(lambda: len(load.records) > 8)
        at = time.time()
        first.engine().kill()
        down = first.wait_event(lambda event: event.event == "down", at, 280.0)
        answered = len(load.records)
        until(lambda: len(load.records) > answered + 8)  # the other one goes on
        first.wait_ready(since=down.time)
        front.wait_healthy(lambda found: found == {first.base_url, second.base_url})
        answered = len(load.records)
        until(lambda: len(load.records) > answered + 8)
    assert not forbidden(load.records)
    seen = Counter(record.outcome for record in load.records if record.outcome is not ClientOutcome.OK)
    running = sum(record.began - 1 < at < record.ended for record in load.records)
    assert set(seen) <= {ClientOutcome.CUT} and seen.total() <= running, seen
    asked = {server.base_url: 0.0 for server in (first, second)}
    for url in asked:
        text = httpx.get(f"{url}/metrics", follow_redirects=True, timeout=60).text
        lines = (line for line in text.splitlines() if line.startswith("sglang:num_requests_total"))
        asked[url] = sum(float(line.rpartition(" ")[2]) for line in lines)
    assert min(asked.values()) > 0  # the new engine, which counts from zero, has had requests


def test_renewing_both_one_by_one_loses_no_request(both: Both, questions: list[Question]) -> None:
    front, servers = both
    with ClientLoad(front.base_url, questions, 4, hang_s=280.0) as load:
        until(lambda: len(load.records) > 4)
        renew_one_by_one(front, servers)
        answered = len(load.records)
        until(lambda: len(load.records) > answered + 4)
    assert {record.outcome for record in load.records} == {ClientOutcome.OK}
    assert [server.status()["restarts"]["renewed"] for server in servers] == [1, 1]


def test_strangers_change_nothing_and_mistakes_close_nothing(both: Both) -> None:
    front, servers = both
    before = front.healthy()
    for path, body in (("/workers", {"url": "http://127.0.0.1:9"}), ("/flush_cache", {})):
        for headers in ({}, {"Authorization": f"Bearer {CONTROL_KEY}x"}):
            answer = httpx.post(front.base_url + path, json=body, headers=headers, timeout=60)
            assert answer.status_code in (401, 403, 404), (path, answer.status_code)
    for _ in range(30):  # the circuit breaker of sglang-router 0.3.2 counted these
        answer = httpx.post(f"{front.base_url}/v1/completions", json={"model": "kimi-k2.5-tiny"}, timeout=60)
        assert answer.status_code == 400
    body = {"model": "kimi-k2.5-tiny", "prompt": "Tom has", "max_tokens": 2}
    assert httpx.post(f"{front.base_url}/v1/completions", json=body, timeout=60).status_code == 200
    assert front.healthy() == before == {server.base_url for server in servers}
