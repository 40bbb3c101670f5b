"""Users of a fleet whose nodes fail and are restarted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kimi_w4a8_eagle3.predict.fleet import FleetPlan, FleetRates, FleetRun, NodeCurve, capacity
from kimi_w4a8_eagle3.report.traffic_plan import fleet_lines

USERS = range(21)
# A node answers all requests of ten users in time, and 1% of them late for every user more.
LATE = [max(0, users - 10) * 0.01 for users in USERS]
CURVE = NodeCurve(
    rate=[users * 0.1 for users in USERS],
    slow=[users * 0.1 * late for users, late in zip(USERS, LATE, strict=True)],
    in_flight=[users * 0.5 for users in USERS],
    session_s=600.0,
    cold=0.5,
)
CALM = FleetRates(0.0, 0.0, 600.0)


def test_without_failures_a_fleet_serves_what_its_nodes_serve() -> None:
    found = capacity(CURVE, CALM, 10, 0.999)
    assert found is not None and 100 <= found.users <= 101 and found.cold == found.lost == 0


def test_a_node_that_fails_loses_its_requests_and_moves_its_users() -> None:
    found = FleetRun(CURVE, FleetRates(100.0, 0.0, 600.0), 10, 80).run(1000.0)
    failures = found.lost / CURVE.in_flight[8]
    assert failures == pytest.approx(1000, rel=0.1)  # 10 nodes, 1,000 hours, 0.1 an hour
    assert found.cold == pytest.approx(failures * 8 * CURVE.cold, rel=0.1)
    assert found.requests == pytest.approx(80 * 0.1 * 3600 * 1000)


def test_an_update_moves_every_user_and_loses_no_request() -> None:
    found = FleetRun(CURVE, FleetRates(0.0, 7 * 24.0, 60.0), 4, 8).run(10.0)
    assert found.lost == 0 and found.cold >= 4 * 2 * CURVE.cold


def test_the_users_of_a_single_node_wait_until_it_is_back() -> None:
    rates = FleetRates(50.0, 0.0, 3600.0)
    found = FleetRun(CURVE, rates, 1, 5).run(2000.0)
    assert 1 - found.good == pytest.approx(0.05, rel=0.3)
    assert capacity(CURVE, rates, 1, 0.999) is None


def test_failures_take_capacity() -> None:
    calm, broken = (capacity(CURVE, rates, 4, 0.99) for rates in (CALM, FleetRates(20.0, 0.0, 3600.0)))
    assert calm is not None and broken is not None and broken.users < calm.users


def test_the_sentences_name_the_capacity_or_the_nearest() -> None:
    found = capacity(CURVE, CALM, 10, 0.999)
    plan = FleetPlan(10, "agent", CALM, found, found, found, found, 0.97, 5000)
    assert "10 nodes of recipe agent serve 10" in fleet_lines(plan)[0] and len(fleet_lines(plan)) == 2
    assert "--minutes" in fleet_lines(replace(plan, simulated=200))[1]
    nearest = fleet_lines(replace(plan, users=None))[0]
    assert "do not reach 99.9%" in nearest and "97.00%" in nearest
