"""The code keeps the rules of rules.py, and each rule notices what is planted against it."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase

import pytest
from base import packages, rules
from base.packages import PACKAGES, SERVING, SOURCES

# By rule, findings that stand for now, with the reason and the end of the exception.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "import": {"*/cli.py: imports a module by *": "the verbs of packages that are found by an entry point"},
    "module-name": {
        "*/evaluation.py: */evaluation.py has *": "remove when the page of an evaluation has its own name",
        "*/http.py: a module of Python *": "imported by its folder; remove when renamed",
        "*/statistics.py: a module of Python *": "imported by its folder; remove when renamed",
        "*/trace.py: a module of Python *": "imported by its folder; remove when renamed",
    },
    "file-length": {"*/virtual/device.cpp: *": "remove when the device's memory and launches are apart"},
    "function-length": {"launch/grafana/rows.py: glance is *": "a table of panels"},
    "any-in-file": {"proof/sum_kernels.py: *": "FlyDSL's values have no types; remove when they have"},
    "display-text": {
        "*/run_dir.py: line.startswith('model name')": "/proc/cpuinfo has no other form",
        "*/host.py: re.compile('sglang[[].:]|sglang serve*": "command lines of other processes, not text for people",
        "*/answers.py: re.compile('prompt is too long*": "SGLang passes on only the text of an error",
        "*/trial.py: *_debug_print_internal_state()*": "remove when xgrammar returns its parser's states",
        "*/tile_search.py: 'out of memory' in *": "Triton has no error type of its own; remove when it does",
        "*/grammar_cache.py: getattr(value, 'error_message', None) == _TIMED_OUT": "SGLang passes on only the text",
        "*/run_dir.py: reason == WANTED": "our own word for an end that is no failure",
        "*/failing_requests.py: text in str(error)": "HIP errors; remove when SGLang needs torch 2.8",
    },
    "command-words": {"*/host.py: '-m' in words[[]:4]": "command lines of other processes"},
}

# What is planted: rule, file, and the code that is appended to it, or becomes a new file.
BASE, NEW, INIT = f"{SERVING}/base/errors.py", f"{SERVING}/recipe/new.py", f"{SERVING}/engine/__init__.py"
SCHEMA, PLUGIN, CLI = f"{SERVING}/recipe/schema.py", f"{SERVING}/sglang_plugin/hooks.py", f"{SERVING}/cli.py"
LAPTOP, FLYDSL = f"{packages.LAPTOP}/new.py", f"{SERVING}/moe/flydsl/new.py"
LINE = "X = 1\n"
PLANTS = [
    ("import", NEW, "import sglang"),
    ("import", NEW, "import sglang.srt.utils as u"),
    ("import", NEW, "from sglang.srt import utils"),
    ("import", NEW, "def late():\n    import sglang"),
    ("import", NEW, "import importlib\nimportlib.import_module('sglang')"),
    ("import", NEW, "from importlib import import_module\nimport_module('sglang.srt.utils')"),
    ("import", NEW, "from importlib import import_module as load\nload('sglang')"),
    ("import", NEW, "import importlib\nload = importlib.import_module\nload('sglang')"),
    ("import", NEW, "__import__('sglang')"),
    ("import", NEW, "import builtins\nbuiltins.__import__('sglang')"),
    ("import", NEW, "import runpy\nrunpy.run_module('sglang.launch_server')"),
    ("import", NEW, "import pkgutil\npkgutil.resolve_name('sglang:Engine')"),
    ("import", NEW, "from importlib import import_module\n_S = 'sglang'\nimport_module(_S)"),
    ("import", NEW, "from importlib import import_module\n_S = 'sglang'\nimport_module(f'{_S}.srt')"),
    ("import", NEW, "from importlib import import_module\nimport_module('sg' + 'lang')"),
    ("import", NEW, "from importlib import import_module\ndef load(name):\n    return import_module(name)"),
    ("import", NEW, "exec('import sglang')"),
    ("import", NEW, "import importlib\ngetattr(importlib, 'import_module')('sglang')"),
    ("import", NEW, "import importlib\nimportlib.import_module(name='sglang')"),
    ("import", NEW, "from importlib import import_module\nmodules = map(import_module, ['sglang'])"),
    ("import", NEW, "from importlib import import_module\ndef f(n):\n    import_module(f'..{n}', __package__)"),
    ("import", NEW, "import sys\nutils = sys.modules['sglang.srt.utils']"),
    ("import", NEW, "import sys\nutils = sys.modules.get('sglang')"),
    ("import", NEW, "from importlib import util\nx = util.module_from_spec(util.find_spec('sglang'))"),
    ("import", NEW, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sglang"),
    ("import", INIT, "import sglang"),
    ("import", CLI, "import sglang"),
    ("import", PLUGIN, "import flydsl"),
    ("import", f"{SERVING}/moe/triton/new.py", "from flydsl import x"),
    ("import", NEW, f"import {packages.LAPTOP}"),
    ("import", NEW, f"from importlib import import_module\nimport_module('{packages.LAPTOP}.exact')"),
    ("import", NEW, "from proof import sums"),
    ("import", INIT, "from tests.support import repository"),
    ("import", NEW, f"import {packages.LAB}"),
    ("import", INIT, f"__import__('{packages.LAB}.speed')"),
    ("import", f"{packages.LAB}/speed/new.py", "import sglang"),
    ("import", f"{packages.LAB}/__init__.py", f"from {packages.LAPTOP} import exact"),
    ("layer", f"{packages.LAB}/base/new.py", "from ..report import page"),
    ("layer", BASE, "from ..recipe import launch"),
    ("layer", BASE, f"from importlib import import_module\nimport_module('{SERVING}.recipe.launch')"),
    ("layer", BASE, "from importlib import import_module\nimport_module('..recipe.launch', __package__)"),
    ("layer", f"{SERVING}/base/__init__.py", "from ..engine import process"),
    ("layer", f"{SERVING}/recipe/__init__.py", "__import__('kimi_w4a8_eagle3.commands.serve')"),
    ("layer", BASE, "import sys\nx = sys.modules['kimi_w4a8_eagle3.recipe.launch']"),
    ("circle", BASE, "from .installed import require"),
    ("circle", BASE, "from importlib import import_module\nimport_module('.installed', __package__)"),
    ("circle", BASE, "def late():\n    from .installed import require"),
    ("circle", PLUGIN, "from . import register"),
    ("circle", INIT, "from ..recipe.launch import Launch"),
    ("circle", f"{SERVING}/__init__.py", "from .cli import main"),
    ("light", SCHEMA, "import torch"),
    ("light", SCHEMA, "from torch import nn"),
    ("light", SCHEMA, "import importlib\ntorch = importlib.import_module('torch')"),
    ("light", SCHEMA, "try:\n    import torch\nexcept ImportError:\n    torch = None"),
    ("light", SCHEMA, "class A:\n    import torch"),
    ("light", SCHEMA, "from ..moe import op"),
    ("light", BASE, "import torch.nn.functional as F"),
    ("light", f"{SERVING}/gates.py", "import torch"),
    ("light", CLI, "import torch"),
    ("light", CLI, "import transformers"),
    ("light", CLI, "from safetensors.torch import load_file"),
    ("light", f"{SERVING}/engine/__init__.py", "from torch import Tensor"),
    ("light", f"{SERVING}/doctor/new.py", "import torch"),
    ("class-name", NEW, "class KimiError: ..."),
    ("class-name", INIT, "class KimiError: ..."),
    ("class-name", LAPTOP, "class KimiError: ..."),
    ("class-name", "proof/new.py", "class KimiError: ..."),
    ("class-name", NEW, "def make():\n    class KimiError: ..."),
    ("class-name", NEW, "from collections import namedtuple\nKimiError = namedtuple('KimiError', 'a')"),
    ("class-name", NEW, "import typing\nKimiError = typing.TypedDict('KimiError', {})"),
    ("class-name", NEW, "from typing import NamedTuple\nKimiError: type = NamedTuple('KimiError', [])"),
    ("class-name", NEW, "KimiError = type('KimiError', (), {})"),
    ("type-alias", NEW, "KimiError = str | int"),
    ("type-alias", "tests/new.py", "ShowAnswers: TypeAlias = Callable[[int, str], object]"),
    ("type-alias", "proof/new.py", "Extent = int | tuple[int, int]"),
    ("module-name", f"{SERVING}/engine/schema.py", ""),
    ("module-name", f"{packages.LAB}/base/files.py", ""),
    ("module-name", "tests/commands/test_house.py", ""),
    ("module-name", f"{SERVING}/engine/json.py", ""),
    ("late-import", NEW, "def f():\n    import json"),
    ("late-import", f"{packages.LAB}/base/new.py", "def f():\n    x = 1\n    from json import loads"),
    ("late-import", NEW, "def f():\n    return __import__('json')"),
    ("late-import", NEW, "def f():\n    x = importlib.import_module('json')"),
    ("map", f"{SERVING}/new/new.py", ""),
    ("map", f"{packages.LAB}/speed/new/new.py", ""),
    ("file-length", NEW, LINE * 401),
    ("file-length", f"{SERVING}/report/new.html.jinja", "<p>\n" * 401),
    ("file-length", CLI, LINE * 400),
    ("file-length", "launch/new.sh", "true\n" * 401),
    ("file-length", f"{packages.LAPTOP}/new.cpp", "int x;\n" * 401),
    ("function-length", NEW, "def long():\n" + "    x = 1\n" * 120),
    ("function-length", NEW, "async def long():\n" + "    x = 1\n" * 70),
    ("function-length", INIT, "class A:\n    def long(self):\n" + "        x = 1\n" * 70),
    ("function-length", NEW, "if __name__ == '__main__':\n" + "    x = 1\n" * 70),
    ("function-length", "proof/new.py", "def long():\n" + "    x = 1\n" * 120),
    ("function-length", "tests/base/new.py", "def test_long():\n" + "    x = 1\n" * 120),
    ("any-in-file", NEW, "def f(" + ", ".join(f"a{i}: Any" for i in range(8)) + "): ..."),
    ("any-in-file", NEW, "def f() -> Any: ...\n" * 8),
    ("any-in-file", FLYDSL, "import flydsl\n" + "x: Any = 1\n" * 13),
    ("any-in-file", NEW, "x: 'Any' = 1\n" * 8),
    ("any-in-file", NEW, "x: typing.Any = 1\n" * 8),
    ("any-in-file", NEW, "x: Any | None = 1\n" * 8),
    ("any-in-file", NEW, "from typing import Any as A\n" + "x: A = 1\n" * 8),
    *(("any-in-package", f"{name}/new.py", "x: Any = 1\n" * PACKAGES[name].untyped) for name in PACKAGES),
    ("display-text", NEW, "ok = text == 'the server is ready'"),
    ("display-text", NEW, "ok = 'out of memory' in text"),
    ("display-text", NEW, "ok = text in ('not found', 'gone')"),
    ("display-text", NEW, "ok = text.startswith('cannot read')"),
    ("display-text", NEW, "import re\nok = re.search('GPU not found', text)"),
    ("display-text", NEW, "name = text.partition('refused: ')[2]"),
    ("display-text", NEW, "match text:\n    case 'no such file': ..."),
    ("display-text", NEW, "try: ...\nexcept OSError as error:\n    ok = 'busy' in str(error)"),
    ("display-text", NEW, "try: ...\nexcept OSError as error:\n    ok = error.args[0] == 'busy'"),
    ("display-text", NEW, "try: ...\nexcept OSError as error:\n    ok = f'{error}'.endswith('busy')"),
    ("display-text", NEW, "try: ...\nexcept OSError as error:\n    text = str(error)\n    ok = 'busy' in text"),
    ("display-text", NEW, "try: ...\nexcept OSError as error:\n    ok = error.strerror == 'x'"),
    ("display-text", NEW, "try: ...\nexcept OSError as error:\n    if (text := str(error)) and 'busy' in text: ..."),
    ("display-text", NEW, "ok = text.count('not found')"),
    ("display-text", NEW, "ok = {'not found': 1}[text]"),
    ("display-text", NEW, "ok = {'not found': 1}.get(text)"),
    ("display-text", NEW, "ok = fnmatch.fnmatch(text, '* not found')"),
    ("display-text", NEW, "MESSAGE = 'not found'\nok = text == MESSAGE"),
    ("display-text", NEW, "import traceback\nok = 'torch' in traceback.format_exc()"),
    ("display-text", NEW, "ok = console.export_text().split('|')"),
    ("display-text", PLUGIN, "ok = grammar._debug_print().find('x')"),
    ("display-text", LAPTOP, "ok = 'has ended' in line"),
    ("command-words", NEW, "ok = '--tp-size' in words"),
    ("command-words", NEW, "port = words[words.index('--port') + 1]"),
    ("command-words", NEW, "PORT = '--port'\nok = PORT in words"),
    ("command-words", NEW, "port = [w for w in words if w.startswith('--port=')]"),
    ("command-words", NEW, "for word in words:\n    if word == '--port': ..."),
    ("command-words", NEW, "ok = argv.count('--port')"),
    ("command-words", NEW, "port = dict(zip(argv, argv[1:]))['--port']"),
    ("command-words", NEW, "port = dict(zip(argv, argv[1:])).get('--port')"),
    ("command-words", NEW, "ok = {'--port', '--host'} & set(argv)"),
    ("command-words", NEW, "ok = any(word in ('--port', '-p') for word in argv)"),
    ("command-words", NEW, "match argv:\n    case ['--port', port]: ..."),
    ("prose", NEW, '"""See `no_such_function`."""'),
    ("prose", NEW, '"""In `moe/nothing_here.py`."""'),
    ("prose", NEW, '"""`launch.no_such_attr`"""'),
    ("prose", NEW, '"""`kimi-w4a8 nosuchverb x`"""'),
    ("prose", NEW, '"""In moe/nothing_here.py it is said."""'),
    ("prose", NEW, '"""In nothing_here.py."""'),
    ("prose", NEW, "# With --planted-option it says so."),
    ("prose", NEW, '"""With `--planted-option 3`."""'),
    ("prose", NEW, '"""kimi_w4a8_eagle3.recipe.nothing_here does it."""'),
    ("prose", NEW, '"""See tests/nothing_here."""'),
    ("prose", NEW, '"""With KIMI_NO_SUCH_VARIABLE=1."""'),
    ("prose", LAPTOP, "# nothing_here.toml says so"),
    ("prose", "proof/new.py", "# nothing_here.sh says so"),
    ("english", NEW, '"""What it does."""'),
    ("english", NEW, 'def f():\n    """Whether it is so."""'),
    ("english", NEW, 'def f():\n    """Is it so."""'),
    ("english", NEW, 'def f():\n    """Room for it, is there any?"""'),
    ("english", NEW, "def f(each): ..."),
    ("english", NEW, "import json as each"),
    ("english", NEW, "for each in []: ..."),
    ("english", NEW, "x = [each for each in []]"),
    ("english", LAPTOP, "x = {each: n for n, each in []}"),
    *(("budget", f"{SERVING}/{name}", "reserve") for name in ("gates.py", "cli.py", "new.py", "new.html.jinja")),
    *(("budget", f"{SERVING}/{name}", "reserve") for name in ("base/__init__.py", "ops/live.html", "new/run.sh")),
    *(("budget", f"{SERVING}/ops/{name}", "reserve") for name in ("new.js", "new.css")),
    *(("budget", f"{name}/new.py", "reserve") for name in PACKAGES),
    ("engine-imports", PLUGIN, "engine"),
    ("engine-imports", f"{SERVING}/__init__.py", "engine"),
    ("engine-imports", f"{SERVING}/moe/op.py", "engine"),
]


def found(rule: str, sources: rules.Sources) -> set[str]:
    return set(rules.RULES[rule](sources))


def excepted(rule: str, finding: str) -> list[str]:
    return [pattern for pattern in EXCEPTIONS.get(rule, {}) if fnmatchcase(finding, pattern)]


@pytest.mark.parametrize("rule", rules.RULES)
def test_the_code_keeps(rule: str) -> None:
    if rule == "budget":
        print(table())
    assert [finding for finding in sorted(found(rule, SOURCES)) if not excepted(rule, finding)] == []


def test_every_exception_is_needed() -> None:
    used = {(rule, pattern) for rule in EXCEPTIONS for one in found(rule, SOURCES) for pattern in excepted(rule, one)}
    assert {(rule, pattern) for rule, patterns in EXCEPTIONS.items() for pattern in patterns} == used


@pytest.mark.parametrize("package", [name for name in PACKAGES if PACKAGES[name].today])
def test_a_sum_over_the_plan_is_needed(package: str) -> None:
    assert rules.sums(SOURCES)[package] > PACKAGES[package].plan, "remove `today`: the plan is reached"


@pytest.mark.parametrize(("rule", "path", "planted"), PLANTS, ids=lambda value: value[:40] if value else None)
def test_a_planted_violation_is_noticed(rule: str, path: str, planted: str) -> None:
    before = SOURCES.get(path, "")
    if planted == "reserve":
        whole = packages.SHARED.get(path.split("/")[0], path.split("/")[0])
        planted = LINE * (PACKAGES[whole].most - rules.sums(SOURCES)[whole] + 1)
    elif planted == "engine":
        planted = LINE * (packages.ENGINE_LINES[1] - rules.engine_lines(SOURCES) + 1)
    new = found(rule, {**SOURCES, path: f"{before}\n{planted}\n"}) - found(rule, SOURCES)
    assert [finding for finding in new if not excepted(rule, finding)]


def table() -> str:
    """Return the sums of the packages, with their plans, and of the folders."""
    rows = [("", "plan", "most", ""), (rules.engine_lines(SOURCES), *packages.ENGINE_LINES, "imports of an engine")]
    folders = Counter("/".join(path.split("/")[:-1][:2]) for path, text in SOURCES.items() for _ in text.splitlines())
    for package, total in rules.sums(SOURCES).items():
        rows.append((total, PACKAGES[package].plan, PACKAGES[package].most, package))
        parts = {package, *(part for part, whole in packages.SHARED.items() if whole == package)}
        rows += [(size, "", "", f"    {name}") for name, size in sorted(folders.items()) if name.split("/")[0] in parts]
    return "\n".join(f"{lines:>7} {plan:>7} {most:>7}  {name}" for lines, plan, most, name in rows)
