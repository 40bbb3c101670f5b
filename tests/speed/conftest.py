"""Runs of the real load generator against the null server, made once for all tests here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import sglang_program

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.speed.bench import Plan, Texts, bench
from kimi_w4a8_lab.speed.measure import Measurement
from kimi_w4a8_lab.speed.runs import Run, read_run
from kimi_w4a8_lab.speed.workloads import load_workload, with_changes


@pytest.fixture(scope="session")
def null_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`kimi-w4a8 bench tiny-con2` with fewer prompts against a server with a key, whose acceptance is known.

    The server counts the warm-up after SGLang's program would have begun to measure, which is one second later.
    """
    from support.null_server import KEY, NUM_PROMPTS, null_server  # starlette, which an extra brings

    sglang_program.run("# the generator is forked from the fork server that was used last: now the pinned release's")
    workload = with_changes(load_workload("tiny-con2"), num_prompts=NUM_PROMPTS)
    with null_server(api_key=KEY, late_s=1.5) as url:
        plan = Plan([Target(url, api_key=KEY)], [workload])
        return read_run(bench(plan, Texts(), tmp_path_factory.mktemp("runs"), lambda _: None))


@pytest.fixture(scope="session")
def failed_run(null_run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, KimiError]:
    """The same against a server that refuses every third request (the warm-up is the first)."""
    from support.null_server import NUM_PROMPTS, null_server

    runs = tmp_path_factory.mktemp("runs")
    workload = with_changes(load_workload("tiny-con2"), num_prompts=NUM_PROMPTS)
    with null_server(fail_every=3) as url, pytest.raises(KimiError) as caught:
        bench(Plan([Target(url)], [workload]), Texts(), runs, lambda _: None)
    return read_run(next(runs.iterdir())), caught.value


@pytest.fixture
def copies(null_run: Run, tmp_path: Path) -> Callable[..., Run]:
    """Builds run directories out of the measured one: `copies(side="w4a8", scale=0.5, count=3)`."""

    def build(name: str, side: str, scale: float = 1.0, count: int = 1, **changes: object) -> Run:
        folder = tmp_path / name
        shutil.copytree(null_run.folder, folder)
        source = null_run.result.measurements[0]
        line = json.loads((folder / source.raw).read_text().splitlines()[-1])
        measurements: list[Measurement] = []
        for index in range(count):
            raw = f"copy-{index}.jsonl"
            wobble = scale * (1 + 0.01 * index)
            scaled = {key: value * wobble for key, value in line.items() if key.endswith("_ms") and value}
            scaled |= {"ttfts": [t * wobble for t in line["ttfts"]]}
            scaled |= {"itls": [[gap * wobble for gap in gaps] for gaps in line["itls"]]}
            scaled |= {"output_throughput": line["output_throughput"] / wobble}
            content = {**line, **scaled}
            (folder / raw).write_text(json.dumps(content) + "\n")
            load = source.load.model_copy(update={k: content[k] for k in type(source.load).model_fields})
            update = {"side": side, "raw": raw, "load": load, "repetition_index": index, **changes}
            measurements.append(source.model_copy(update=update))
        result = null_run.result.model_copy(update={"measurements": measurements, "sides": [side]})
        (folder / "result.json").write_text(result.model_dump_json())
        return read_run(folder)

    return build
