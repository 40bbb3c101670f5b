"""Rules of the code, each a function from the sources (path -> text) to findings, "path: what is wrong"."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import combinations

from base import packages, prose
from base.packages import PACKAGES, ROOT, ancestors, below, imports, module, nodes, package

from kimi_w4a8_eagle3.base.toml import tomllib

Sources = Mapping[str, str]
Rule = Callable[[Sources], Iterator[str]]
LONGEST_FILE, LONGEST_FUNCTION = 400, 70  # lines
UNTYPED, UNTYPED_WITH_OTHERS = 7, 12  # annotations of a file that are a plain Any; with a library that has no types
NO_TYPES = {"sglang", "flydsl", "triton"}
OPTION = re.compile(r"--?[a-z][\w-]*=?")
LOADS = re.compile(r"(importlib\.|builtins\.)?(import_module|__import__)")
SENTENCE = re.compile(r"[A-Za-z]{2,}[,:]? [A-Za-z]{2,}|[a-z]{2,}: $(?<!^data: )")
SHOWN = re.compile(r"debug|print|render|export_text|format_exc")
READERS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "split", "partition", "rpartition", "count", "find",
}  # fmt: skip
READERS |= {"index", "search", "match", "fullmatch", "findall", "finditer", "compile", "fnmatch", "fnmatchcase"}
NAMED = {"namedtuple", "NamedTuple", "TypedDict", "NewType", "Enum", "make_dataclass", "create_model", "type"}
ALIAS = re.compile("[A-Z][a-z]")  # a class's name; a constant has capitals alone
OPENING = re.compile(
    r"(?i:(What|Who|Whom|Whose|Whether|Which|Where|When|How|Why|Of|That|As|If|Is|Are|Can)\b|[^.`]*\w\?( |$))"
)
HEAVY = re.compile(r"(torch|torchvision|transformers|safetensors\.torch)\b")


def python(sources: Sources, *, tests: bool = False) -> Iterator[tuple[str, str]]:
    return ((path, text) for path, text in sources.items() if path.endswith(".py") and (tests or package(path).most))


def each_file(
    of_file: Callable[[str, str], Iterator[str]], *, only: Collection[str] = PACKAGES, tests: bool = False
) -> Rule:
    """Make a rule of one for a single file, whose findings are kept for each text."""
    known = cache(lambda path, text: tuple(of_file(path, text)))

    def rule(sources: Sources) -> Iterator[str]:
        for path, text in python(sources, tests=tests):
            if path.split("/")[0] in only:
                yield from (f"{path}: {finding}" for finding in known(path, text))

    return rule


def import_allowed(path: str, text: str) -> Iterator[str]:
    """A package imports only what its row allows, and names what it imports."""
    own, row = path.split("/")[0], package(path)
    for target in sorted({found.target for found in imports(path, text)}):
        top = re.split("[.:]", target)[0]
        folders = {"sglang": row.sglang, "flydsl": row.flydsl}.get(top, ("",))
        if (top in PACKAGES and top != own and top not in row.imports) or not below(path).startswith(folders):
            yield f"imports {target}"
        elif top.startswith("?") and not below(path).startswith(row.sglang):
            yield "imports a module by a computed name"


def layer(sources: Sources) -> Iterator[str]:
    """Imports go down the layers of pyproject.toml, also those that import-linter does not see."""
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]:
        rank = {name: row for row, names in enumerate(contract["layers"]) for name in re.findall(r"\w+", names)}
        for path, text in python(sources):
            container, _, name = module(path).partition(".")
            own = name.split(".")[0]
            for found in imports(path, text) if container in contract.get("containers", ()) and own else ():
                top, _, other = found.target.partition(".")
                other = other.split(".")[0]
                if top == container and other != own and other in rank and rank.get(own, 99) > rank[other]:
                    yield f"{path}: imports {found.target} from above"


def graph(sources: Sources, *, at_import: bool = False) -> dict[str, set[str]]:
    """By module, the modules of ours that it imports, with the packages that are imported before them."""
    known = {module(path) for path, _ in python(sources)}
    links = {}
    for path, text in python(sources):
        name = module(path)
        targets = {found.target for found in imports(path, text) if found.at_import or not at_import}
        found = {target if target in known else target.rpartition(".")[0] for target in targets} & known
        links[name] = (found | {above for target in found for above in ancestors(target)}) - ancestors(name) - {name}
        links[name] |= found & ancestors(name)
    return links


def circle(sources: Sources) -> Iterator[str]:
    """No modules import each other in a circle, packages included."""
    try:
        list(TopologicalSorter(graph(sources)).static_order())
    except CycleError as error:
        yield " imports ".join(error.args[1])


def light(sources: Sources) -> Iterator[str]:
    """A module outside of the folders of torch is imported without torch."""
    links = graph(sources, at_import=True)
    heavy = {module(path) for path, text in python(sources) if any(map(HEAVY.match, early(path, text)))}
    while more := {name for name, found in links.items() if name not in heavy and found & heavy}:
        heavy |= more
    for path, _ in python(sources):
        if module(path) in heavy and not below(path).startswith(package(path).torch):
            yield f"{path}: imports torch when it is imported"


def early(path: str, text: str) -> set[str]:
    return {found.target for found in imports(path, text) if found.at_import}


def class_name(sources: Sources) -> Iterator[str]:
    """A public class name stands for one class in all packages."""
    defined = defaultdict(list)
    for path, text in python(sources):
        for name in classes(text):
            defined[name].append(path)
    for name, paths in defined.items():
        yield from (f"{path}: class {name} is in {paths[0]}, too" for path in paths[1:])


@cache
def classes(text: str) -> tuple[str, ...]:
    names = []
    for node in nodes(text):
        match node:
            case ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(
                targets=[ast.Name(name)], value=ast.Call(func=ast.Name(maker) | ast.Attribute(attr=maker))
            ) | ast.AnnAssign(ast.Name(name), value=ast.Call(func=ast.Name(maker) | ast.Attribute(attr=maker))):
                names += [name] if maker in NAMED else []
    return tuple(name for name in names if not name.startswith("_"))


def type_alias(sources: Sources) -> Iterator[str]:
    """A type alias has one place; in what is shipped, its name stands for nothing else."""
    shipped = [(path, text) for path, text in python(sources) if path.split("/")[0] in packages.SHIPPED]
    defined = {(name, ""): path for path, text in shipped for name in classes(text)}
    for path, text in python(sources, tests=True):
        for node in nodes(text)[0].body:
            match node:
                case ast.Assign(targets=[ast.Name(name)], value=ast.Subscript() | ast.BinOp() as value) | ast.AnnAssign(
                    ast.Name(name), value=ast.Subscript() | ast.BinOp() as value
                ) if ALIAS.match(name):
                    for key in [ast.unparse(value)] + [""] * (path.split("/")[0] in packages.SHIPPED):
                        if (other := defined.setdefault((name, key), path)) != path:
                            yield f"{path}: the name {name} is in {other}, too"


def module_name(sources: Sources) -> Iterator[str]:
    """A module's name is its own, also among the tests; a verb may have that of a module that it calls."""
    by_name = defaultdict(list)
    for path, text in python(sources, tests=True):
        folder, _, stem = module(path).rpartition(".")
        if path.startswith("tests/") == stem.startswith("test_") and not path.endswith(("__init__.py", "__main__.py")):
            by_name[stem].append((path, folder.split(".")[-1], text))
    for stem, found in by_name.items():
        if stem in sys.stdlib_module_names:
            yield from (f"{path}: a module of Python has the same name" for path, *_ in found)
        for (path, folder, text), (other, beside, its) in combinations(found, 2):
            used = {part for target, _ in imports(path, text) | imports(other, its) for part in target.split(".")}
            verb = "commands" in (folder, beside) and stem in used
            shipped = {path.split("/")[0], other.split("/")[0]} <= {*packages.SHIPPED, "tests"}
            if shipped and not verb and not {folder, beside} <= packages.BACKENDS:
                yield f"{path}: {other} has the same name"


def late_import(_: str, text: str) -> Iterator[str]:
    """An import inside of a function says why, in its line or the one above; the next imports share its reason."""
    functions = [node for node in nodes(text) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {
        node.lineno: node
        for f in functions
        for node in ast.walk(f)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Call) and LOADS.fullmatch(ast.unparse(node.func)))
    }
    lines, ends = text.splitlines(), {node.end_lineno for node in inner.values()}
    for line, node in inner.items():
        if line - 1 not in ends and "  # " not in lines[line - 1] and not lines[line - 2].strip().startswith("# "):
            yield f"no reason for {ast.unparse(node)} inside of a function"


def on_the_map(sources: Sources) -> Iterator[str]:
    """Every folder of code is on the map."""
    page = (ROOT / "docs/map.md").read_text()
    for folder in {path.rpartition("/")[0] for path, _ in python(sources)}:
        if folder.startswith((packages.SERVING, packages.LAB)) and below(folder) and f"`{below(folder)}/`" not in page:
            yield f"{folder}: is not in docs/map.md"


def file_length(sources: Sources) -> Iterator[str]:
    """A file of code has at most 400 lines."""
    for path, text in sources.items():
        if len(text.splitlines()) > LONGEST_FILE:
            yield f"{path}: longer than {LONGEST_FILE} lines"


def function_length(_: str, text: str) -> Iterator[str]:
    """A function has at most 70 lines, and so has a block of a module's own statements."""
    blocks = [node for node in ast.iter_child_nodes(nodes(text)[0]) if isinstance(node, (ast.If, ast.With, ast.For))]
    for node in [*blocks, *(node for node in nodes(text) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))]:
        if node.end_lineno - node.lineno >= LONGEST_FUNCTION:
            yield f"{getattr(node, 'name', 'a block')} is longer than {LONGEST_FUNCTION} lines"


@cache
def untyped(text: str) -> int:
    """Return the number of annotations that are a plain Any, by whatever name, alone or beside None."""
    found, names = 0, {"Any"}
    for node in nodes(text):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.name == "Any" and alias.asname}
    for node in nodes(text):
        hint = getattr(node, "annotation", getattr(node, "returns", None))
        words = (
            set(re.findall(r"[\w.\[]+", ast.unparse(hint))) - {"None", "typing.Optional[", "Optional["}
            if hint
            else set()
        )
        found += bool(words) and words <= {*names, "typing.Any"}
    return found


def any_in_file(path: str, text: str) -> Iterator[str]:
    """A file has few annotations that are a plain Any."""
    others = {found.target.split(".")[0] for found in imports(path, text)} & NO_TYPES
    if untyped(text) > (UNTYPED_WITH_OTHERS if others else UNTYPED):
        yield "more plain Any than a file may have"


def any_in_package(sources: Sources) -> Iterator[str]:
    """A package keeps its number of annotations that are a plain Any."""
    for name, row in PACKAGES.items():
        found = sum(untyped(text) for path, text in python(sources, tests=True) if path.startswith(f"{name}/"))
        if found > row.untyped:
            yield f"{name}: {found} plain Any, more than {row.untyped}"


def display_text(_: str, text: str) -> Iterator[str]:
    """Text for people is neither compared nor parsed: no sentences, no messages of exceptions."""
    errors = {node.name for node in nodes(text) if isinstance(node, ast.ExceptHandler)}
    shown = {
        target.id
        for node in nodes(text)
        if isinstance(node, (ast.Assign, ast.NamedExpr))
        for target in getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
        and (
            any(message(inner, errors) for inner in ast.walk(node.value))
            or (sentence(node.value) and target.id.isupper())
        )
    }
    for node in nodes(text):
        match node:
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                continue
            case ast.Compare(left=left, comparators=others):
                parts = [left, *others]
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[_, *_] as arguments) if name in READERS:
                parts = [value, *arguments]
            case ast.Subscript(ast.Dict(keys=parts)) | ast.Call(func=ast.Attribute(ast.Dict(keys=parts), "get")):
                pass
            case ast.MatchValue(value=value):
                parts = [value]
            case _:
                continue
        inner = [found for part in filter(None, parts) for found in ast.walk(part)]
        if any(sentence(text) for part in parts for text in getattr(part, "elts", [part])) or any(
            message(found, errors) or getattr(found, "id", "") in shown for found in inner
        ):
            yield ast.unparse(node)


def sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(SENTENCE.search(node.value))


def message(node: ast.AST, errors: set[str | None]) -> bool:
    """Return True for the text of a caught exception: str(error), repr(error), error.args, f"{error}"."""
    match node:
        case ast.Call(func=ast.Name("str" | "repr"), args=[ast.Name(name)]):
            return name in errors
        case ast.Attribute(value=ast.Name(name), attr="args" | "message" | "msg" | "strerror" | "what"):
            return name in errors
        case ast.FormattedValue(value=ast.Name(name)):
            return name in errors
        case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)):
            return bool(SHOWN.search(name))
    return False


def command_words(_: str, text: str) -> Iterator[str]:
    """Words of a command line are made once and not searched for options."""
    constants = {
        node.targets[0].id
        for node in nodes(text)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and option(node.value)
    }
    for node in nodes(text):
        match node:
            case ast.Compare(left=left, comparators=others):
                parts = [left, *others]
            case ast.Call(func=ast.Attribute(attr=name), args=arguments) if name in {*READERS, "get"}:
                parts = arguments
            case ast.Subscript(slice=part) | ast.MatchValue(value=part):
                parts = [part]
            case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
                parts = [left, right]
            case _:
                continue
        words = [word for part in parts for word in getattr(part, "elts", [part])]
        if any(option(word) or getattr(word, "id", "") in constants for word in words):
            yield ast.unparse(node)


def option(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and bool(OPTION.fullmatch(str(node.value)))


def prose_names(path: str, text: str) -> Iterator[str]:
    """Docstrings and comments name only what exists."""
    for found in prose.parts(text)[0] if not path.startswith("tests/") else ():
        yield from (f"{missing} does not exist" for missing in prose.unknown(found))


def english(_: str, text: str) -> Iterator[str]:
    """Docstrings open with a verb or a noun, and a loop variable has the name of what it holds."""
    for node in nodes(text):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if OPENING.match(first):
                yield f'a docstring opens with "{first}"'
        match node:
            case ast.Name(id="each", ctx=ast.Store()) | ast.arg(arg="each") | ast.alias(asname="each"):
                yield "a variable is called each"


def budget(sources: Sources) -> Iterator[str]:
    """A package keeps its sum of lines."""
    for name, found in sums(sources).items():
        if found > PACKAGES[name].most:
            yield f"{name}: {found} lines, more than {PACKAGES[name].most}; `python -m pytest -s tests/base` shows all"


def sums(sources: Sources) -> dict[str, int]:
    found = dict.fromkeys(PACKAGES, 0)
    for path, text in sources.items():
        found[path.split("/")[0]] += 0 if path.endswith(packages.NATIVE) else len(text.splitlines())
    for part, whole in packages.SHARED.items():
        found[whole] += found.pop(part)
    return found


def engine_imports(sources: Sources) -> Iterator[str]:
    """One engine process imports at most so many lines of ours, imports inside of functions included."""
    if (found := engine_lines(sources)) > packages.ENGINE_LINES[1]:
        yield f"an engine imports {found} lines, more than {packages.ENGINE_LINES[1]}"


def engine_lines(sources: Sources) -> int:
    links = graph(sources)
    waiting, reached = {module(f"{packages.SERVING}/{start}") for start in packages.ENGINE}, set[str]()
    while waiting:
        reached |= waiting
        waiting = {found for name in waiting for found in links[name] | ancestors(name)} - reached
    return sum(len(text.splitlines()) for path, text in python(sources) if module(path) in reached)


RULES: dict[str, Rule] = {
    "import": each_file(import_allowed),
    "layer": layer,
    "circle": circle,
    "light": light,
    "class-name": class_name,
    "type-alias": type_alias,
    "module-name": module_name,
    "late-import": each_file(late_import, only=packages.SHIPPED),
    "map": on_the_map,
    "file-length": file_length,
    "function-length": each_file(function_length, tests=True),
    "any-in-file": each_file(any_in_file),
    "any-in-package": any_in_package,
    "display-text": each_file(display_text, only=packages.SHIPPED),
    "command-words": each_file(command_words, only=packages.SHIPPED),
    "prose": each_file(prose_names),
    "english": each_file(english, tests=True),
    "budget": budget,
    "engine-imports": engine_imports,
}
