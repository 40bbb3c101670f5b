"""Settings of the whole suite: deterministic property tests, one thread for small tensors."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from hypothesis import HealthCheck, settings

# Speed is measured in benchmarks: a slow machine must not fail a property.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
