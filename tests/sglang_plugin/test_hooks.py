"""A release without a name that the plugin hooks or uses is refused, or served with a metric that says what is missing.

Each name of the table is taken away from SGLang, one after the other, in a process of its own. Each one is also
changed in five ways, and the check has to name it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.sglang_program import BOTH, VERSIONS, found

import kimi_w4a8_eagle3.sglang_plugin
from kimi_w4a8_eagle3.doctor.software import SGLANG_NEWEST, SGLANG_PINNED
from kimi_w4a8_eagle3.sglang_plugin import hooks
from proof.hook_signatures import HEADING

RENAMED = """
import ast, contextlib, functools, inspect, io, json, linecache, os, pkgutil, sys
from types import SimpleNamespace
import sglang.srt.plugins as plugins
from prometheus_client import REGISTRY
from sglang.srt.plugins.hook_registry import HookRegistry

OURS = "kimi_w4a8_eagle3.sglang_plugin."
os.environ["KIMI_COLLECT"] = "folder"  # a feature that the operator switches on
plugins.entry_points = functools.cache(plugins.entry_points)  # a fifth of the time of each fork
inspect.getsource = functools.cache(inspect.getsource)

def take_away(name):
    owner, _, attribute = name.removesuffix(".__init__").rpartition(".")  # a class without __init__ would have object's
    owner = pkgutil.resolve_name(owner)
    for place in owner.__mro__ if isinstance(owner, type) else [owner]:
        if attribute in vars(place):
            delattr(place, attribute)

EDITS = {
    "parameter": lambda made: made.args.args.insert(1, ast.arg("kimi_more")),
    "kind": lambda made: setattr(made, "decorator_list", [] if made.decorator_list else [ast.Name("property")]),
    "waits": lambda made: setattr(
        made, "__class__", ast.FunctionDef if isinstance(made, ast.AsyncFunctionDef) else ast.AsyncFunctionDef
    ),
    "returns": lambda made: made.body.insert(0, ast.parse("if x:\\n return 1, 2, 3, 4, 5, 6, 7").body[0]),
    "source": lambda made: made.body.append(ast.Pass()),
}

def edited(name, edit):
    function = inspect.unwrap(pkgutil.resolve_name(name))
    function = getattr(function, "fget", function)
    text = inspect.getsource(function)
    tree = ast.parse("if 1:\\n" + text if text[:1] == " " else text)
    tree.body = getattr(tree.body[0], "body") if text[:1] == " " else tree.body
    made = tree.body[0]
    kinds = ("property", "classmethod", "staticmethod")
    made.decorator_list = [one for one in made.decorator_list if getattr(one, "id", None) in kinds]
    EDITS[edit](made)
    file = f"<{name} {edit}>"
    text = "from __future__ import annotations\\n" + ast.unparse(ast.fix_missing_locations(tree))
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope = dict(vars(sys.modules[function.__module__]))
    exec(compile(text, file, "exec"), scope)
    return scope[made.name]

def put(name, changed):
    owner, _, attribute = name.rpartition(".")
    setattr(pkgutil.resolve_name(owner), attribute, changed)

def unknown(name, edit):
    owner, _, attribute = name.rpartition(".")
    before = inspect.getattr_static(pkgutil.resolve_name(owner), attribute)
    try:
        put(name, edited(name, edit))
        said = hooks._unknown(name)
        os.environ["KIMI_UNTRIED_SGLANG"] = "1"
        return said, hooks._unknown(name)
    except SyntaxError as error:  # an asynchronous generator cannot return values
        return "SyntaxError", error.msg
    finally:
        os.environ.pop("KIMI_UNTRIED_SGLANG", None)
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
EAGLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
OUTPUT = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req"
plain = [name for name in table if hooks.interface_of(name).call != "class"]
noticed = {edit: {name: unknown(name, edit) for name in plain} for edit in EDITS}

def outcomes():
    cases = [(EAGLE, "returns"), (EAGLE, "parameter"), (EAGLE, "source"), (OUTPUT, "source")]
    return [in_fork(name, lambda name: put(name, edited(name, edit))) for name, edit in cases]

refused = outcomes()
os.environ["KIMI_UNTRIED_SGLANG"] = "1"
trusted = outcomes()
del os.environ["KIMI_UNTRIED_SGLANG"]
print(json.dumps({
    "interfaces": {name: hooks.interface_of(name) for name in table},
    "table": table,
    "without": {name: in_fork(name) for name in table},
    "complete": in_fork(None),
    "noticed": noticed,
    "refused": refused,
    "trusted": trusted,
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


@pytest.mark.slow
def test_the_table_has_the_interfaces_of_both_releases_and_no_others() -> None:
    """After a failure run `python -m proof.hook_signatures`, and read what changed before you save it."""
    both = {release: found(RENAMED, release == SGLANG_NEWEST)["interfaces"] for release in VERSIONS}
    table = {name: {release: list(one) for release, one in of.items()} for name, of in hooks.known_interfaces().items()}
    names = both[SGLANG_PINNED].keys() | both[SGLANG_NEWEST].keys()
    assert table == {name: {release: of[name] for release, of in both.items() if name in of} for name in names}


@BOTH
def test_every_change_of_every_function_is_noticed(newest: bool) -> None:
    """An added parameter, another kind, sync for async, another number of values, another body: in all names."""
    noticed = found(RENAMED, newest)["noticed"]
    assert list(noticed) == ["parameter", "kind", "waits", "returns", "source"]
    elsewhere = {name for name in noticed["source"] if not name.startswith("sglang.")}  # their sources are not held
    for edit, names in noticed.items():
        assert len(names) >= 95
        assert {name for name, (said, _) in names.items() if said is None} == (
            elsewhere if edit == "source" else set()
        ), edit
        trusted = {name for name, (_, said) in names.items() if said is None}
        # 0.5.23 has made a method of a staticmethod, so both kinds are known for this name.
        assert trusted <= set(names) if edit == "source" else len(trusted) <= (edit == "kind"), edit


@BOTH
def test_a_release_with_a_changed_function_is_refused_or_served_without_the_feature(newest: bool) -> None:
    facts, eagle, output = found(RENAMED, newest), "speculative.eagle_utils.eagle_sample", "outputs that fail alone"
    (returns, parameter, source, optional) = facts["refused"]
    assert "3 values or 7 values (known: " in returns and "kimi_more" in parameter
    assert f"{eagle} (its source is unknown)" in source and "KIMI_UNTRIED_SGLANG=1" in source
    assert optional == [output]
    returns, parameter, source, optional = facts["trusted"]
    assert "3 values or 7 values (known: " in returns and "kimi_more" in parameter
    assert source == [f"a tested source of sglang.srt.{eagle}"]
    assert optional == ["a tested source of sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req"]


@BOTH
def test_every_private_name_is_in_the_table(newest: bool) -> None:
    known = {name.rpartition(".")[2] for name in found(RENAMED, newest)["table"]} | ELSEWHERE | REGISTRY | NEWER
    for file in Path(kimi_w4a8_eagle3.sglang_plugin.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text())
        own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not _is_self(node.value)}
        private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
        assert private <= known, file.name


def test_the_page_has_every_row_of_the_tables() -> None:
    facts = found(RENAMED)
    page, _, changes = (Path(__file__).parents[2] / "docs/hooks.md").read_text().partition(HEADING)
    absence = {True: "`kimi_missing_feature_info`", False: "no start"}
    features = {f"| {one} | {absence[optional]} | {remove} |" for one, (optional, remove) in facts["features"].items()}
    names = {
        f"| `{name.removeprefix('sglang.srt.')}` | {', '.join(sorted(of))} |" for name, of in facts["table"].items()
    }
    tables = page.split("\n## ", 1)[1].splitlines()
    assert sorted(features | names) == sorted(line for line in tables if line.startswith("| ") and line not in HEADS)
    rows = {line.split("`")[1]: line for line in changes.splitlines() if line.startswith("| `")}
    known = hooks.known_interfaces()
    changed = {name for name, of in known.items() if of[SGLANG_PINNED] != of[SGLANG_NEWEST]}
    assert {name.removeprefix("sglang.srt.") for name in changed} <= rows.keys()
    assert "without `ps`" in rows["speculative.eagle_worker_v2.EAGLEWorkerV2.__init__"]
    for call in ("without", "with"):
        assert not any(f"{call} `" in rows.get(name.removeprefix("sglang.srt."), "") for name in known.keys() - changed)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
