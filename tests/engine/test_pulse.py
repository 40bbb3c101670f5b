"""A scheduler that loops leaves signs of life; one that stops is silent until it loops again."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.waiting import until

from kimi_w4a8_eagle3.engine.given_folder import file_of
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
