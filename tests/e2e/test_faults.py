"""One fleet of two real engines behind the real router, broken in the ways that take seconds (proof/faults.py: all).

Its clients need a key, so that every test here proves that keys pass the router and outlive a restart.
"""

import asyncio
import contextlib
import re
import signal
import time
from collections import Counter

import httpx
import pytest
from support import supervisor
from support.browser import BROWSER, BUILD, DARK, browse
from support.waiting import until

from kimi_w4a8_eagle3.engine.metrics import read_once
from kimi_w4a8_eagle3.engine.process import free_port
from proof.fault_stage import other_kimi
from proof.load.engine_loads import RUNNING, engine_loads
from proof.load.load import ClientLoad, forbidden
from proof.load.load_questions import endless_question, known_questions
from proof.load.load_request import ClientOutcome, LoadClient, Manner

pytestmark = [pytest.mark.server, pytest.mark.slow]
KEY = "a-key-for-this-fleet"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    key = folder / "key"
    key.write_text(f"{KEY}\n")
    key.chmod(0o600)
    native = "env.KIMI_DOOR_NATIVE=open"  # the benchmark sends ready-made prompts to /generate
    arguments = ["--api-key-file", str(key), "--set", native]
    with supervisor.ForkedFleet(folder, arguments=arguments) as served:
        served.wait_whole()
        yield served


@pytest.fixture(scope="module")
def questions(fleet):
    return known_questions(fleet.base_url, 2, KEY)


def ask(fleet, question, manner=Manner.STREAM):
    async def once():
        async with LoadClient(fleet.base_url, KEY, hang_s=280.0) as client:
            return await client.ask(question, manner)

    return asyncio.run(once())


def ready(fleet) -> list[str]:
    """Addresses of the engines that are ready."""
    return [entry["base_url"] for entry in fleet.status()["replicas"] if entry["ready"]]


def aborted(fleet) -> float:
    return sum(
        read_once(url, timeout_s=280.0).total("sglang:num_aborted_requests_total") or 0.0 for url in ready(fleet)
    )


def running(fleet) -> list[int]:
    return [engine_loads(url, timeout_s=280.0)[RUNNING] for url in ready(fleet)]


@pytest.mark.parametrize("sent", [{}, {"Authorization": f"Bearer {KEY}x"}], ids=["none", "wrong"])
def test_the_router_refuses_requests_without_the_key(fleet, questions, sent):
    body = {"model": questions[0].model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    answer = httpx.post(f"{fleet.base_url}/v1/chat/completions", json=body, headers=sent, timeout=280.0)
    assert answer.status_code == 401
    assert len(ready(fleet)) == 2  # and no replica is taken out for it


def test_a_killed_router_comes_back_with_both_replicas(fleet, questions):
    at = time.time()
    fleet.router().kill()
    fleet.wait_whole(280.0, since=at)
    assert ask(fleet, questions[0]).outcome is ClientOutcome.OK


def test_a_client_that_leaves_ends_its_request(fleet, questions):
    before = aborted(fleet)
    record = ask(fleet, endless_question(questions[0].model, 3000), Manner.LEAVES_STREAM)
    assert record.outcome is ClientOutcome.LEFT
    until(lambda: aborted(fleet) == before + 1 and running(fleet) == [0, 0])


def live_page(fleet, folder, *options) -> str:
    """The text of the ops port's page after it refreshed itself; empty without a browser."""
    if BROWSER is None:
        return ""
    done = browse(folder, *options, "--virtual-time-budget=5000", "--dump-dom", fleet.ops_url)
    assert "Reading the server" not in done.stdout.partition("<script>")[0], done.stderr
    return re.sub(r"<[^>]+>", " ", done.stdout.partition("<script>")[0])


def test_kill_9_of_an_engine_is_seen_by_its_clients_alone_and_the_other_replica_goes_on(fleet, questions, tmp_path):
    streams = [endless_question(questions[0].model, 600)]  # they run on while one of them is looked for and killed
    four = {"concurrency": 4, "mix": {Manner.STREAM: 1}, "total": 4, "hang_s": 280.0, "api_key": KEY}
    with ClientLoad(fleet.base_url, streams, **four) if BROWSER else contextlib.nullcontext():
        until(lambda: BROWSER is None or min(running(fleet)) >= 1)
        whole = live_page(fleet, tmp_path, "--window-size=1400,900", f"--screenshot={BUILD / 'live.png'}")
    with ClientLoad(fleet.base_url, streams, **four) as load:  # a browser may need longer than the streams
        until(lambda: min(running(fleet)) >= 1)
        time.sleep(0.5)  # their first piece has been sent
        at = time.time()
        fleet.engine(0).kill()
        down = fleet.wait_event(lambda e: (e.source, e.event) == ("replica-0", "down"), at, 280.0)
        fleet.wait_event(lambda e: e.event == "restarting", down.time, 280.0)
        killed = live_page(fleet, tmp_path, DARK, "--window-size=500,900", f"--screenshot={BUILD / 'live-dark.png'}")
        assert ask(fleet, questions[1]).outcome is ClientOutcome.OK
        assert load.wait(300)
    if BROWSER is not None:
        assert "2 of 2 replicas ready" in whole
        assert re.search(r"\b0\s+down\b", killed)
    seen = Counter(record.outcome for record in load.records)
    assert not forbidden(load.records)
    assert (
        seen[ClientOutcome.CUT] >= 1
        and seen[ClientOutcome.OK] >= 1
        and set(seen) == {ClientOutcome.CUT, ClientOutcome.OK}
    )


def test_another_model_is_refused_at_registration(fleet, tmp_path):
    port = free_port()
    words = ["route", "--recipe", "tiny", "--set", "served-model-name=other", "--port", str(port)]
    words += ["--ops-port", str(free_port()), "--worker", fleet.replica_url(1)]
    with other_kimi(tmp_path, words, "route.out") as output:
        until(lambda: "refused" in output())
        body = {"model": "other", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=280.0)
        assert answer.status_code == 503
        assert "serves 'kimi-k2.5-tiny', this router is for 'other'" in output()


def test_sigterm_answers_what_runs_and_leaves_nothing(fleet, questions):
    """The last test of the fleet; replica 0 may still be starting."""
    question = endless_question(questions[0].model, 600)  # so that all three are seen to run
    with ClientLoad(fleet.base_url, [question], 3, total=3, hang_s=280.0, api_key=KEY) as load:
        until(lambda: sum(running(fleet)) == 3)
        code = fleet.stop(signal.SIGTERM)
        assert load.wait(300)
    assert [record.outcome for record in load.records] == [ClientOutcome.OK] * 3
    assert code == 128 + signal.SIGTERM
    left = fleet.leftovers()
    assert not left, str(left)
    assert not [path for path in fleet.run.rglob("*") if path.is_file() and KEY in path.read_text(errors="replace")]
