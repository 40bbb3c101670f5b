"""What the scale demo calls a success, and what it shows; the demo itself runs real replicas (`make scale-demo`)."""

import pytest
from rich.console import Console
from support.scripted_server import scripted_server, whole

from proof import scale_demo as scale_demo
from proof.load.load import Summary
from proof.load.served import Leftovers
from proof.scale_demo import Phase, Result

NOTHING = Leftovers((), (), (), ())


def result(rolling=None, wrong=0, left=NOTHING):
    names = ("before", "replica killed", "whole again", "rolling restart", "after")
    outcomes = {"replica killed": {"ok": 9, "cut": 2}, "rolling restart": rolling or {"ok": 30}}
    phases = [
        (Phase(name, 10.0 * i, 10.0 * (i + 1)), Summary(9, outcomes.get(name, {"ok": 9}), 200.0, 50.0, 8.0))
        for i, name in enumerate(names)
    ]
    return Result(phases, 0.5, 30.0, 60.0, {"replica-0": 0.4, "replica-1": 0.6}, wrong, left)


def test_errors_of_a_killed_replica_are_no_failure():
    assert result().good


@pytest.mark.parametrize(
    "bad",
    [
        result(wrong=1),
        result(rolling={"ok": 30, "cut": 1}),
        result(rolling={"ok": 30, "refused": 1}),
        result(left=Leftovers(("7 python",), (), (), ())),
    ],
    ids=["wrong", "cut-in-rolling-restart", "refused-in-rolling-restart", "left-behind"],
)
def test_what_must_not_happen_fails_it(bad):
    assert not bad.good


def test_the_table_has_every_outcome_that_came(tmp_path):
    console = Console(record=True, width=160)
    console.print(scale_demo._table(result()))
    console.print(scale_demo._verdict(result(), tmp_path))
    text = console.export_text()
    row = next(line for line in text.splitlines() if "requests cut" in line)
    assert [cell.strip() for cell in row.split("│")][2:7] == ["0", "2", "0", "0", "0"]
    assert "requests refused" not in text
    assert "noticed after 0.5 s, replaced after 30 s" in text and "replica-1 60%" in text


def test_shares_are_counted_by_address():
    exposition = "".join(
        f'smg_worker_cb_outcomes_total{{outcome="{outcome}",worker="http://127.0.0.1:{port}"}} {count}\n'
        for outcome, port, count in (("success", 1, 20), ("failure", 1, 10), ("success", 2, 70), ("success", 3, 5))
    )
    replicas = [{"name": str(i), "base_url": f"http://127.0.0.1:{i + 1}"} for i in range(2)]

    class Fleet:
        def status(self):
            return {"replicas": replicas}

    with scripted_server(lambda *_: whole(exposition.encode())) as server:
        fleet = Fleet()
        fleet.ops_url = server.base_url
        assert scale_demo._share(fleet) == {"replica-0": 0.3, "replica-1": 0.7}
