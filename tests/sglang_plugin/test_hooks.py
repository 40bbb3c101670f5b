"""A release without a name that the plugin hooks or uses is refused, or served with a metric that says what is missing.

Each name of the table is taken away from SGLang, one after the other, in a process of its own. Each one is also
changed in three ways, and the check has to name it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.sglang_program import BOTH, VERSIONS, found

import kimi_w4a8_eagle3.sglang_plugin
from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST
from kimi_w4a8_eagle3.sglang_plugin import hooks
from proof import hook_signatures

RENAMED = """
import contextlib, functools, inspect, io, json, os, pkgutil, sys
from types import FunctionType, SimpleNamespace
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

def more(function):
    found = inspect.signature(function)
    parameters = list(found.parameters.values())
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters.insert(at, inspect.Parameter("kimi_more", inspect.Parameter.KEYWORD_ONLY, default=None))
    function.__signature__ = found.replace(parameters=parameters)
    return function

def waits(function):
    function.__signature__ = inspect.signature(function)
    waiting = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    flags = function.__code__.co_flags
    function.__code__ = function.__code__.replace(co_flags=flags & ~waiting or 0 if flags & waiting else flags | 0x80)
    return function

EDITS = {"more": more, "waits": waits, "kind": property}

def edited(name, edit):
    function = inspect.unwrap(pkgutil.resolve_name(name))
    function = getattr(function, "__func__", function)
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__,
                          function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    kind = type(inspect.getattr_static(pkgutil.resolve_name(name.rpartition(".")[0]), name.rpartition(".")[2]))
    made = EDITS[edit](copied)
    return kind(made) if kind in (classmethod, staticmethod) and edit != "kind" else made

def put(name, changed):
    owner, _, attribute = name.rpartition(".")
    setattr(pkgutil.resolve_name(owner), attribute, changed)

def unknown(name, edit):
    owner, _, attribute = name.rpartition(".")
    before = inspect.getattr_static(pkgutil.resolve_name(owner), attribute)
    try:
        put(name, edited(name, edit))
        return hooks._unknown(name)
    finally:
        put(name, before)

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
    from kimi_w4a8_eagle3.sglang_plugin.upkeep import metrics_hook
    from kimi_w4a8_eagle3.sglang_plugin.hooks import Feature
    modules = [module for name, module in sys.modules.items() if name.startswith(OURS)]
    return {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Feature)}

def missing():
    from kimi_w4a8_eagle3.sglang_plugin.upkeep import metrics_hook
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
from proof import hook_signatures
EAGLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
OUTPUT = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req"
plain = [name for name in table if hooks.call_of(name) != "class"]
print(json.dumps({
    "calls": {name: hooks.call_of(name) for name in table},
    "table": table,
    "without": {name: in_fork(name) for name in table},
    "complete": in_fork(None),
    "noticed": {edit: {name: unknown(name, edit) for name in plain} for edit in EDITS},
    "changed": [in_fork(name, lambda name: put(name, edited(name, "more"))) for name in (EAGLE, OUTPUT)],
    "features": {one.name: [one.optional, one.remove_when] for one in features().values()},
    "rows": hook_signatures.rows_of_this_release(),  # last: it turns the check of the calls off
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
REGISTRY = {"_patched"}  # the plugin ends the process when it cannot read it
NEWER = {"_get_block_fp8_config"}  # an override; a release without it does not call it


@BOTH
def test_a_release_that_lacks_a_name_is_refused_or_named(newest: bool) -> None:
    facts = found(RENAMED, newest)
    assert len(facts["table"]) >= 50 and facts["complete"] == []
    for name, features in facts["table"].items():
        outcome = facts["without"][name]
        if all(facts["features"][feature][0] for feature in features):
            assert outcome == features, name
        else:
            assert isinstance(outcome, str) and outcome.startswith("kimi-w4a8: "), (name, outcome)
            assert name.removesuffix(".__init__").rpartition(".")[2] in outcome, (name, outcome)


@pytest.mark.slow
def test_the_table_has_the_calls_of_both_releases_and_no_others() -> None:
    """After a failure run `python -m proof.hook_signatures`, and read what changed before you save it."""
    both = [found(RENAMED, release == SGLANG_NEWEST)["calls"] for release in VERSIONS]
    names = both[0].keys() | both[1].keys()
    assert hooks.known_calls() == {name: list(dict.fromkeys(of[name] for of in both if name in of)) for name in names}


@BOTH
def test_every_change_of_every_call_is_noticed(newest: bool) -> None:
    """Another parameter, sync for async, another kind: in all names, and the message has both calls."""
    noticed = found(RENAMED, newest)["noticed"]
    assert list(noticed) == ["more", "waits", "kind"]
    for edit, names in noticed.items():
        assert len(names) >= 50
        for name, said in names.items():
            assert said is not None and f"(known: {' or '.join(hooks.known_calls()[name])})" in said, (edit, name)


@BOTH
def test_a_release_with_a_changed_function_is_refused_or_served_without_the_feature(newest: bool) -> None:
    required, optional = found(RENAMED, newest)["changed"]
    assert "speculative.eagle_utils.eagle_sample is " in required and "kimi_more=...)" in required
    assert "exact sampling" in required and "install one that `kimi-w4a8 doctor` names" in required
    assert optional == ["outputs that fail alone"]


@BOTH
def test_every_private_name_is_in_the_table(newest: bool) -> None:
    known = {name.rpartition(".")[2] for name in found(RENAMED, newest)["table"]} | ELSEWHERE | REGISTRY | NEWER
    for file in Path(kimi_w4a8_eagle3.sglang_plugin.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text())
        own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not _is_self(node.value)}
        private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
        assert private <= known, file.name


def test_the_page_has_a_row_for_every_feature() -> None:
    table = hook_signatures.PAGE.read_text().partition("\n## Features")[2].partition("|---")[2].splitlines()[1:]
    assert len(table) == len(found(RENAMED)["features"]) and table == found(RENAMED)["rows"]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
