"""A release without a name that the plugin hooks or uses is refused, or served with a metric that says what is missing.

Each name of the table is taken away from SGLang, one after the other, in a process of its own.
"""

from __future__ import annotations

import ast
from pathlib import Path

from support.sglang_program import BOTH, found

import kimi_w4a8_eagle3.sglang_plugin

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

def load(name=None):
    for module in [module for module in sys.modules if module.startswith(OURS)]:
        if not module.startswith(OURS + "cpu"):
            del sys.modules[module]
            vars(sys.modules[OURS[:-1]]).pop(module.removeprefix(OURS), None)
    HookRegistry.reset()
    HookRegistry.apply_hooks = inspect.unwrap(HookRegistry.apply_hooks)
    plugins._plugins_loaded = False
    if name is not None:
        take_away(name)
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

def outcome(name):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            load(name)
        except SystemExit as end:
            return str(end)
    return missing()

def in_fork(name):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writer, json.dumps(outcome(name)).encode()[:60000])
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
print(json.dumps({
    "table": table,
    "without": {name: in_fork(name) for name in table},
    "complete": in_fork(None),
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
REGISTRY = {"_patched"}  # the plugin ends the process when it cannot read it
HEADS = ("| feature | without it | remove when |", "| name in `sglang.srt` | feature |")
NEWER = {"_get_block_fp8_config"}  # an override; a release without it does not call it


@BOTH
def test_a_release_that_lacks_a_name_is_refused_or_named(newest: bool) -> None:
    facts = found(RENAMED, newest)
    assert len(facts["table"]) >= 60 and facts["complete"] == []
    for name, features in facts["table"].items():
        outcome = facts["without"][name]
        if all(facts["features"][feature][0] for feature in features):
            assert outcome == features, name
        else:
            assert isinstance(outcome, str) and outcome.startswith("kimi-w4a8: "), (name, outcome)
            assert name.removesuffix(".__init__").rpartition(".")[2] in outcome, (name, outcome)


@BOTH
def test_every_private_name_is_in_the_table(newest: bool) -> None:
    known = {name.rpartition(".")[2] for name in found(RENAMED, newest)["table"]} | ELSEWHERE | REGISTRY | NEWER
    for file in Path(kimi_w4a8_eagle3.sglang_plugin.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not _is_self(node.value)}
        private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
        assert private <= known, file.name


def test_the_page_has_every_row_of_the_tables() -> None:
    facts = found(RENAMED)
    page = (Path(__file__).parents[2] / "docs/hooks.md").read_text().splitlines()
    absence = {True: "`kimi_missing_feature_info`", False: "no start"}
    features = {f"| {one} | {absence[optional]} | {remove} |" for one, (optional, remove) in facts["features"].items()}
    names = {f"| `{name.removeprefix('sglang.srt.')}` | {', '.join(of)} |" for name, of in facts["table"].items()}
    assert sorted(features | names) == sorted(line for line in page if line.startswith("| ") and line not in HEADS)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
