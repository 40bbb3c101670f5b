"""`kimi bench` on a real server of the built-in model: the benchmark's figures against the server's own."""

from pathlib import Path

import pytest

from kimi_w4a8_eagle3.bench.runs import read_run
from kimi_w4a8_eagle3.bench.session import Side, Texts, bench
from kimi_w4a8_eagle3.bench.workloads import load_workload, with_changes
from kimi_w4a8_eagle3.server import EngineServer

pytestmark = pytest.mark.server


def test_a_running_server_is_measured_with_exact_acceptance(eagle3: EngineServer, tmp_path: Path) -> None:
    workload = with_changes(load_workload("tiny-maths"), num_prompts=8)
    texts, side = Texts(), Side.parse("tiny")
    folder = bench(workload, texts, tmp_path, lambda _: None, base_url=eagle3.base_url, side=side)
    run = read_run(folder)
    [found] = run.usable
    assert run.result.status == "complete" and run.refused == []
    assert found.acceptance is not None
    # Every verify step commits its accepted drafts and one token of the target's own; requests may end inside a step.
    committed = found.acceptance.length * found.acceptance.steps
    assert committed == pytest.approx(found.load.total_output_tokens - found.load.completed)
    assert 2.5 < found.acceptance.length <= 4.0
    assert list(found.acceptance.per_position) == sorted(found.acceptance.per_position, reverse=True)
    assert found.text is not None and found.text.warning is None
    assert found.server is not None and found.server.decode_s is not None and found.server.decode_s > 0
