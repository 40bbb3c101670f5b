"""`plan`'s pool beside the one that SGLang's own code makes of the same memory, on both releases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.sglang_program import RELEASES, VERSIONS, run

from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.machine.hardware import gpu_by_name
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.recipe.memory_plan import MemoryPlan, ModelCard, make_plan
from kimi_w4a8_lab.predict.layouts import DP_ATTENTION
from kimi_w4a8_laptop.tiny import DRAFT, TARGET, WEIGHTS

READ = ("attention-backend", "dp-size", "context-length", "kv-cache-dtype", "mem-fraction-static", "max-total-tokens")
CASES = [
    (recipe, gpu, tp, *more)
    for recipe in ("agent", "eagle3", "eagle3-opt", "w4a8")
    for gpu in ("mi300x", "mi325x")
    for tp in (4, 8)
    for more in ([], ["context-length=8192"])
] + [("agent", "mi325x", 8, *DP_ATTENTION, "dp-size=8")]


def planned(recipe: str, gpu: str, tp: int, *more: str) -> MemoryPlan:
    resolved = resolve(load_recipe(recipe), [f"tp-size={tp}", *more])
    return make_plan(resolved.recipe, resolved.args, gpu_by_name(gpu), Regime.UNKNOWN)


def words(plan: MemoryPlan, *more: str) -> list[str]:
    """The part of the launch's command line that SGLang's sizing reads."""
    args = resolve(load_recipe(plan.recipe), more).args
    args = {**args, "mem-fraction-static": plan.verdict.fraction, "max-total-tokens": plan.verdict.max_total_tokens}
    speculative = [name for name in args if name.startswith("speculative-") and "path" not in name]
    return [word for name in (*READ, *speculative) if name in args for word in (f"--{name}", str(args[name]))]


def checkpoint(folder: Path, built_in: str, card: str) -> Path:
    """The built-in model's folder with the large model's sizes in config.json, and no weights."""
    shutil.copytree(WEIGHTS / built_in, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config, large = json.loads((folder / "config.json").read_text()), ModelCard.packaged(card).config
    config.pop("language_model_only", None)
    text = config.get("text_config", config)
    text |= {**large.get("text_config", large), "max_position_embeddings": 262144}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=RELEASES, ids=VERSIONS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    folder = tmp_path_factory.mktemp("models")
    target = checkpoint(folder / "target", TARGET, "kimi-k2.5-w4a8")
    draft = checkpoint(folder / "draft", DRAFT, "kimi-k2.5-eagle3")
    cases = []
    for recipe, gpu, tp, *more in CASES:
        plan = planned(recipe, gpu, tp, *more)
        path = ["--speculative-draft-model-path", str(draft)] if plan.draft_kv else []
        cases.append([plan.gpu.hbm_bytes, plan.budget.weight_bytes, [*words(plan, *more), *path]])
    program = Path(__file__).with_name("sglang_sizing.py").read_text()
    done = run(program, request.param, str(target), str(draft), json.dumps(cases), KIMI_PAGE_GUARD="off")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_plan_equals_sglangs_pool(made: list[int]) -> None:
    plans = [planned(*case).tokens for case in CASES]
    assert plans == pytest.approx(made, rel=0.001)
