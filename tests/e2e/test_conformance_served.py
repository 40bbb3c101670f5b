"""A real server meets every expectation of the conformance command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kimi_w4a8_eagle3.engine.fronted import FrontedEngine

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_every_expectation_is_met_with_drafts_and_a_real_engine(eagle3: FrontedEngine) -> None:
    words = [sys.executable, "-m", "proof.conformance", eagle3.base_url]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=590)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
