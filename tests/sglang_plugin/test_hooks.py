"""A release without a name that the plugin hooks or uses is refused, or served with a metric that says what is missing.

Each name of the table is taken away from SGLang, one after the other, in a process of its own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sglang_program import BOTH, found

import kimi_w4a8_eagle3.sglang_plugin
from kimi_w4a8_eagle3.sglang_plugin import hooks

RENAMED = """
import contextlib, functools, inspect, io, json, os, pkgutil, sys
from types import SimpleNamespace
import sglang.srt.plugins as plugins
from prometheus_client import REGISTRY
from sglang.srt.plugins.hook_registry import HookRegistry

OURS = "kimi_w4a8_eagle3.sglang_plugin."
plugins.entry_points = functools.cache(plugins.entry_points)  # a fifth of the time of each fork

def take_away(name):
    owner, _, attribute = name.removesuffix(".__init__").rpartition(".")  # a class without __init__ would have object's
    owner = pkgutil.resolve_name(owner)
    for place in owner.__mro__ if isinstance(owner, type) else [owner]:
        if attribute in vars(place):
            delattr(place, attribute)

def change(name):
    owner, _, attribute = name.rpartition(".")
    setattr(pkgutil.resolve_name(owner), attribute, lambda *, more: None)

def load(name=None, spoil=take_away):
    for module in [module for module in sys.modules if module.startswith(OURS)]:
        if not module.startswith(OURS + "cpu"):
            del sys.modules[module]
            vars(sys.modules[OURS[:-1]]).pop(module.removeprefix(OURS), None)
    HookRegistry.reset()
    HookRegistry.apply_hooks = inspect.unwrap(HookRegistry.apply_hooks)
    plugins._plugins_loaded = False
    if name is not None:
        spoil(name)
    plugins.load_plugins()

def features():
    from kimi_w4a8_eagle3.sglang_plugin import metrics_hook
    from kimi_w4a8_eagle3.sglang_plugin.hooks import Feature
    modules = [module for name, module in sys.modules.items() if name.startswith(OURS)]
    return {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Feature)}

def missing():
    from kimi_w4a8_eagle3.sglang_plugin import metrics_hook
    metrics_hook.emit_constants(None, SimpleNamespace(labels={"model_name": "m"}), max_total_num_tokens=1)
    (metric,) = [metric for metric in REGISTRY.collect() if metric.name == "kimi_missing_feature_info"]
    return [sample.labels["feature"] for sample in metric.samples]

def outcome(name, spoil):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            load(name, spoil)
        except SystemExit as end:
            return str(end)
    return missing()

def in_fork(name, spoil=take_away):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writer, json.dumps(outcome(name, spoil)).encode()[:60000])
        finally:
            os._exit(0)
    os.close(writer)
    os.wait()
    with open(reader) as answer:
        return json.load(answer)

load()
table = {}
for one in features().values():
    for name in one.names:
        table.setdefault(name, []).append(one.name)
from kimi_w4a8_eagle3.sglang_plugin import hooks
print(json.dumps({
    "signatures": {name: hooks.signature_of(name) for name in table},
    "table": table,
    "without": {name: in_fork(name) for name in table},
    "complete": in_fork(None),
    "changed": in_fork("sglang.srt.speculative.eagle_utils.eagle_sample", change),
    "features": {one.name: [one.optional, one.remove_when] for one in features().values()},
}))
"""
# Private names of other libraries, of Python, and of SGLang's load generator, which no engine runs.
ELSEWHERE = {
    "_token_filter_fn",
    "_exit",
    "_set_running_loop",
    "_upper_bounds",
    "_option_string_actions",
    "_extract_cache_from_sglext",
}
COLLECTING = {"KIMI_COLLECT": "folder"}  # a feature that the operator switches on
REGISTRY = {"_patched"}  # the plugin ends the process when it cannot read it
HEADS = ("| feature | without it | remove when |", "| name in `sglang.srt` | feature |")
NEWER = {"_get_block_fp8_config"}  # an override; a release without it does not call it


@BOTH
def test_a_release_that_lacks_a_name_is_refused_or_named(newest: bool) -> None:
    facts = found(RENAMED, newest, **COLLECTING)
    assert len(facts["table"]) >= 60 and facts["complete"] == []
    for name, features in facts["table"].items():
        outcome = facts["without"][name]
        if all(facts["features"][feature][0] for feature in features):
            assert outcome == features, name
        else:
            assert isinstance(outcome, str) and outcome.startswith("kimi-w4a8: "), (name, outcome)
            assert name.removesuffix(".__init__").rpartition(".")[2] in outcome, (name, outcome)


def test_the_table_has_the_signatures_of_both_releases_and_no_others() -> None:
    """After a failure run `python -m proof.hook_signatures`, and read what changed before you save it."""
    both = [found(RENAMED, newest, **COLLECTING)["signatures"] for newest in (False, True)]
    assert hooks.known_signatures() == {
        name: sorted({one[name] for one in both if name in one}) for name in both[0].keys() | both[1].keys()
    }


def known(left: int, right: str = "x") -> tuple[int, int, int]: ...


async def waits(left: int, right: str = "x") -> tuple[int, int, int]: ...


def added(left: int, more: int, right: str = "x") -> tuple[int, int, int]: ...


def renamed(first: int, right: str = "x") -> tuple[int, int, int]: ...


def defaulted(left: int, right: str = "y") -> tuple[int, int, int]: ...


def named(left: int, *, right: str = "x") -> tuple[int, int, int]: ...


@BOTH
def test_a_release_that_changed_a_signature_is_refused(newest: bool) -> None:
    name = "sglang.srt.speculative.eagle_utils.eagle_sample"
    outcome = found(RENAMED, newest, **COLLECTING)["changed"]
    assert outcome.startswith("kimi-w4a8: ") and f"{name}(*, more) (known: " in outcome


@pytest.mark.parametrize("changed", [waits, added, renamed, defaulted, named])
def test_another_signature_is_an_unknown_release(
    changed: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{__name__}.known"
    monkeypatch.setattr(hooks, "known_signatures", lambda: {target: ["(left, right='x')"]})
    assert hooks._unknown(target) is None
    monkeypatch.setattr(sys.modules[__name__], "known", changed)
    assert hooks._unknown(target) == f"{target}{hooks.signature_of(target)} (known: (left, right='x'))"


@BOTH
def test_every_private_name_is_in_the_table(newest: bool) -> None:
    known = (
        {name.rpartition(".")[2] for name in found(RENAMED, newest, **COLLECTING)["table"]}
        | ELSEWHERE
        | REGISTRY
        | NEWER
    )
    for file in Path(kimi_w4a8_eagle3.sglang_plugin.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not _is_self(node.value)}
        private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
        assert private <= known, file.name


def test_the_page_has_every_row_of_the_tables() -> None:
    facts = found(RENAMED, **COLLECTING)
    page = (Path(__file__).parents[2] / "docs/hooks.md").read_text().splitlines()
    absence = {True: "`kimi_missing_feature_info`", False: "no start"}
    features = {f"| {one} | {absence[optional]} | {remove} |" for one, (optional, remove) in facts["features"].items()}
    names = {f"| `{name.removeprefix('sglang.srt.')}` | {', '.join(of)} |" for name, of in facts["table"].items()}
    assert sorted(features | names) == sorted(line for line in page if line.startswith("| ") and line not in HEADS)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
