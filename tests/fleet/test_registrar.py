"""The registrar registers matching replicas with a real router and refuses all others."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.small_engines import SmallEngine
from support.waiting import until

from kimi_w4a8_eagle3.base.run_dir import EVENTS
from kimi_w4a8_eagle3.fleet.registrar import Registrar


@pytest.fixture
def wanted():
    return set()


@pytest.fixture
def registrar(router, events, wanted):
    with Registrar(router, lambda: frozenset(wanted), events) as registrar:
        yield registrar
        wanted.clear()
        until(lambda: not registrar.registered())


def registered(registrar: Registrar, *engines: SmallEngine) -> None:
    """Wait until exactly these are registered."""
    until(lambda: registrar.registered() == {engine.url for engine in engines})


def ask(base_url: str) -> httpx.Response:
    body = {"model": "kimi", "messages": [{"role": "user", "content": "?"}]}
    return httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=280)


def reasons(tmp_path, event: str) -> list[str]:
    lines = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    return [line["reason"] for line in lines if line["event"] == event]


def answers(router, count: int) -> set[str]:
    return {ask(router.base_url).json()["choices"][0]["message"]["content"] for _ in range(count)}


def test_replicas_of_one_identity_share_the_requests(router, registrar, wanted):
    with SmallEngine("one") as one, SmallEngine("two") as two:
        wanted |= {one.url, two.url}
        registered(registrar, one, two)
        assert answers(router, 4) == {"one", "two"}


@pytest.mark.parametrize(
    ("different", "named"),
    [
        ({"weights": "bbbb"}, "weights 'bbbb' instead of 'aaaa'"),
        ({"model": "other"}, "model 'other' instead of 'kimi'"),
    ],
    ids=["weights", "model"],
)
def test_a_replica_of_another_identity_is_refused_and_gets_nothing(
    router, registrar, wanted, tmp_path, different, named
):
    with SmallEngine("one") as one, SmallEngine("stranger", **different) as stranger:
        wanted.add(one.url)
        registered(registrar, one)
        wanted.add(stranger.url)
        until(lambda: bool(reasons(tmp_path, "refused")))
        assert answers(router, 4) == {"one"}
        assert registrar.registered() == {one.url}
        assert reasons(tmp_path, "refused") == [f"{stranger.url}: {named}"]


def test_an_error_of_discovery_does_not_end_the_updates(router, events):
    found = [lambda: frozenset(), lambda: 1 / 0]
    registrar = Registrar(router, lambda: found.pop()(), events)
    registrar.reconcile()
    registrar.reconcile()
    assert found == []


def test_the_expected_model_refuses_even_the_first(router, events, tmp_path):
    with SmallEngine("stranger", model="other") as stranger:
        registrar = Registrar(router, lambda: frozenset({stranger.url}), events, model="kimi")
        registrar.reconcile()
        registrar.reconcile()
        assert not registrar.registered()
        assert reasons(tmp_path, "refused") == [f"{stranger.url}: it serves 'other', this router is for 'kimi'"]


def test_a_replica_that_comes_back_with_other_weights_is_taken_out(router, registrar, wanted, monkeypatch):
    monkeypatch.setattr("kimi_w4a8_eagle3.fleet.registrar._RECHECK_S", 0.2)
    with SmallEngine("one") as one, SmallEngine("two") as two:
        wanted |= {one.url, two.url}
        registered(registrar, one, two)
        two.weights = "bbbb"
        registered(registrar, one)


def test_other_weights_are_taken_once_the_old_ones_are_gone(router, registrar, wanted):
    with SmallEngine("new", weights="bbbb") as new:
        with SmallEngine("old") as old:
            wanted.add(old.url)
            registered(registrar, old)
            wanted.clear()
            registered(registrar)
        wanted.add(new.url)
        registered(registrar, new)
        assert answers(router, 2) == {"new"}


def test_a_replica_that_is_gone_is_taken_out_at_once(router, registrar, wanted, monkeypatch):
    monkeypatch.setattr("kimi_w4a8_eagle3.fleet.registrar._RECHECK_S", 0.2)
    with SmallEngine("one") as one:
        with SmallEngine("two") as two:
            wanted |= {one.url, two.url}
            registered(registrar, one, two)
        registered(registrar, one)
        assert answers(router, 4) == {"one"}


def test_removal_lets_a_running_answer_finish(router, registrar, wanted):
    with SmallEngine("slow") as slow:
        wanted.add(slow.url)
        registered(registrar, slow)
        slow.held = True
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, router.base_url)
            until(lambda: slow.asked > 0)
            wanted.clear()
            registered(registrar)
            assert slow.answered == 0
            slow.held = False
            assert running.result().status_code == 200


def test_one_clients_mistakes_close_nothing(router, registrar, wanted):
    """The router's own circuit breaker counts 4xx answers of a replica; it must stay off."""
    with SmallEngine("one") as one:
        wanted.add(one.url)
        registered(registrar, one)
        for _ in range(30):
            response = httpx.post(f"{router.base_url}/v1/completions", json={"model": "kimi", "prompt": "?"})
            assert response.status_code == 404  # the small engine has no such endpoint
        assert ask(router.base_url).status_code == 200


def test_what_the_router_says_without_a_key_is_little_and_nothing_is_kept(router, registrar, wanted):
    """sglang-router 0.3.2 has no option that closes these: docs/scale.md."""
    with SmallEngine("one") as one, httpx.Client(base_url=router.base_url) as anybody:
        wanted.add(one.url)
        registered(registrar, one)
        assert {model["id"] for model in anybody.get("/v1/models").json()["data"]} == {"kimi"}
        made = anybody.post("/v1/conversations", json={"metadata": {"a": "b"}}).json()["id"]
        assert anybody.get(f"/v1/conversations/{made}").status_code == 404


def test_clients_cannot_change_the_list(router, registrar, wanted):
    with SmallEngine("one") as one, SmallEngine("evil") as evil:
        wanted.add(one.url)
        registered(registrar, one)
        headers = {"Authorization": "Bearer guess"}
        for extra in ({}, {"headers": headers}):
            assert httpx.get(f"{router.base_url}/workers", **extra).status_code == 401
            assert httpx.post(f"{router.base_url}/workers", json={"url": evil.url}, **extra).status_code == 401
            assert httpx.post(f"{router.base_url}/flush_cache", **extra).status_code == 401
        assert answers(router, 3) == {"one"}
