"""Run a module (argv) whose admission workers give up on a grammar after two seconds of CPU time."""

from __future__ import annotations

import sys

from kimi_w4a8_eagle3.door import trial
from kimi_w4a8_eagle3.sglang_plugin.run_module import run

trial.CPU_S, trial._STEP_S = 2.0, 0.5
run(sys.argv[1], sys.argv[2:])
