"""Hooks reach every module that holds what is hooked, and what was left out is there once it is asked for.

The rest: tests/e2e/test_fork_server.py.
"""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.sglang_program import BOTH, found, run

from kimi_w4a8_laptop.forked_engine import Holders

LEFT_OUT = """
import importlib, json, sys
import torch
from sglang.srt.model_executor import model_runner
from sglang.srt.models.registry import ModelRegistry
from transformers import masking_utils

ASKED = "scipy", "sklearn", "mistral_common", "chardet", "torch._dynamo", "torch._inductor", "sglang.srt.models.mixtral"
loaded = [name for name in ASKED if name in sys.modules]
compiled = [torch.compile(print), torch.compile(model=print), torch.compile(dynamic=True)(print)]
kimi = ModelRegistry.resolve_model_cls("KimiK25ForConditionalGeneration")[0].__module__
early = "sglang.srt.models.mixtral" in sys.modules
other = ModelRegistry.resolve_model_cls(["MixtralForCausalLM"])[0].__module__
with masking_utils.TransformGetItemToIndex() as mode:
    mode = type(mode).__module__
print(json.dumps({
    "loaded": loaded,
    "same": all(function is print for function in compiled),
    "models": [kimi, early, other, ModelRegistry.resolve_model_cls(["NoSuch"])[1]],
    "real": [
        model_runner.model_parallel.apply_torch_tp.__module__,
        sys.modules["torchvision.ops.roi_align"].is_compile_supported("cpu"),
        mode,
        torch._dynamo.__file__ is not None,
        importlib.import_module("scipy").__name__,
    ],
}))
"""


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    def make(name: str, **held: object) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(held)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


def test_every_module_but_the_source_gets_the_wrapped_function(module) -> None:
    first, second = (lambda: None), (lambda: None)
    source, other = module("source", own=first), module("other", renamed=first, again=first)
    holders = Holders()
    assert holders.replace(first, second, source) == 2
    assert source.own is first and other.renamed is other.again is second
    later = module("later", first=first)  # imported while hooks are applied
    assert holders.replace(first, second, source) == 1 and later.first is second
    assert holders.replace(first, second, source) == 0  # no module holds it any more


@BOTH
def test_what_no_engine_of_ours_uses_is_left_out_and_there_when_asked_for(newest: bool) -> None:
    facts = found(LEFT_OUT, newest)
    assert facts["loaded"] == [] and facts["same"]
    models = "sglang.srt.models"
    assert facts["models"] == [f"{models}.kimi_k25", False, f"{models}.mixtral", "TransformersForCausalLM"]
    leaf = "torch._dynamo._trace_wrapped_higher_order_op"
    assert facts["real"] == ["sglang.srt.layers.model_parallel", True, leaf, True, "scipy"]


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [
        ("import sys; sys.exit('no model')", 1, "no model"),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import atexit, sys; atexit.register(print, 'at exit', file=sys.stderr)", 0, "at exit"),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), 1 / 0)).start()",
            0,
            "ZeroDivision",
        ),
    ],
    ids=["message", "exception", "code", "atexit", "thread"],
)
def test_an_engine_ends_as_a_new_process_would(program: str, code: int, printed: str) -> None:
    done = run(program)
    assert done.returncode == code and printed in done.stderr
    assert "nanobind" not in done.stderr  # Triton's objects are frozen, not leaked


def test_temporary_files_of_a_test_program_end_with_it() -> None:
    """SGLang names its sockets by such files, and never removes them."""
    named = run("import tempfile; print(tempfile.NamedTemporaryFile(delete=False).name)").stdout.strip()
    assert named and not Path(named).exists()
