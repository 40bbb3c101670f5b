"""A scheduler that loops leaves signs of life; one that stops is silent until it loops again."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.waiting import until

from kimi_w4a8_eagle3.engine.given_folder import LOOP, file_of
from kimi_w4a8_eagle3.engine.leftovers import Belongings
from kimi_w4a8_eagle3.engine.signs import Pulse

ROUNDS = """
import time
from kimi_w4a8_eagle3.sglang_plugin.upkeep.pulse_hook import beat
print("round", flush=True)
while True:
    beat(None, [])
    time.sleep(0.01)
"""


@pytest.fixture
def folder():
    belongings = Belongings()
    yield belongings.folder
    belongings.remove()


def test_the_longest_silence_of_all_ranks_counts_and_ends_with_a_sign(folder):
    files = [file_of(folder, pid) for pid in (10, 11)]
    pulse = Pulse(folder)
    assert pulse.silence(100.0) == 0.0  # still loading, or an engine without signs
    for path in files:
        path.touch()
    assert pulse.silence(101.0) == 0.0
    os.utime(files[0], ns=(1, 1))  # also a clock that was set back is a sign
    assert pulse.silence(107.0) == 6.0
    os.utime(files[1], ns=(2, 2))
    assert pulse.silence(109.0) == 2.0


def test_the_event_loop_has_a_sign_of_its_own(folder):
    file_of(folder, 10).touch()
    schedulers, loop = Pulse(folder), Pulse(folder, LOOP)
    assert (schedulers.silence(100.0), loop.silence(100.0)) == (0.0, 0.0)
    assert (schedulers.silence(104.0), loop.silence(104.0)) == (4.0, 0.0)
    file_of(folder, 10, LOOP).touch()
    assert loop.silence(105.0) == 0.0
    assert loop.silence(109.0) == 4.0


def test_a_stopped_scheduler_is_silent_until_it_continues(folder):
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", ROUNDS], env=environment, stdout=subprocess.PIPE) as scheduler:
        scheduler.stdout.readline()
        pulse, began = Pulse(folder), time.monotonic()
        until(lambda: file_of(folder, scheduler.pid).exists())
        pulse.silence(time.monotonic())
        scheduler.send_signal(signal.SIGSTOP)
        until(lambda: pulse.silence(time.monotonic()) >= 2)
        scheduler.send_signal(signal.SIGCONT)
        until(lambda: pulse.silence(time.monotonic()) < 1)
        assert pulse.silence(time.monotonic()) < time.monotonic() - began
        scheduler.kill()


def test_an_engine_started_by_hand_leaves_no_signs(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", ROUNDS], env=environment, stdout=subprocess.PIPE) as scheduler:
        scheduler.stdout.readline()
        time.sleep(0.3)
        scheduler.kill()
    assert not list(tmp_path.iterdir())
