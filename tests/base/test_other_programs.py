"""The share of the cores that other programs use is counted without this process and what it started."""

from types import SimpleNamespace

import psutil
import pytest

from kimi_w4a8_lab.base import other_programs
from kimi_w4a8_lab.base.other_programs import busy, watched


def times(user: float, waited: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(user=user, system=0.0, children_user=waited, children_system=0.0)


def test_other_programs_are_counted_without_ours_and_without_ours_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = type(psutil.cpu_times())
    idle = dict.fromkeys(cores._fields, 0.0)
    found = iter([cores(**idle), cores(**{**idle, "user": 60.0, "idle": 40.0})])
    # Ours: 10 s here, a child that had used 5 s and ends with 20 s, which are then among those that were waited for.
    trees = iter([(times(0.0), [times(5.0)]), (times(10.0, 20.0), [])])

    def here() -> SimpleNamespace:
        own, children = next(trees)
        nodes = [SimpleNamespace(cpu_times=lambda one=one: one) for one in (own, *children)]
        return SimpleNamespace(cpu_times=nodes[0].cpu_times, children=lambda recursive: nodes[1:])

    monkeypatch.setattr(other_programs.psutil, "cpu_times", lambda: next(found))
    monkeypatch.setattr(other_programs.psutil, "Process", here)
    assert watched()() == pytest.approx((60 - (30 - 5)) / 100)


def test_a_busy_machine_is_said_and_an_idle_one_is_not() -> None:
    assert busy(0.14) == "" and busy(0.4).startswith("Other programs used 40% of this machine's cores")
