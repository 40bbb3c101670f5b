"""Names in docstrings and comments: identifiers, modules, files, options, and commands of `kimi-w4a8`."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache

from support.repository import ROOT, known_paths, tracked

# Names of installed libraries, of a formula, and of a pattern; files and options of SGLang, AITER and InferenceX.
OF_OTHERS = {"cpu_has_amx_support", "xet_get", "stall", "exported_NAME", "_forward_isolation"}
FILES_OF_OTHERS = {"server_args.py", "mha.py", "aiter/mla.py", "attention_hook.py", "pool_configurator.py"}
FILES_OF_OTHERS |= {"plot_results.py", "tests/params"}
OPTIONS_OF_OTHERS = {"--skip-tokenizer-init", "--enable-strict-thinking", "--load-format", "--grammar-backend"}
OPTIONS_OF_OTHERS |= {"--speculative-adaptive-config"}
OWN = ("tests/base/prose.py", "tests/base/test_code_rules.py")  # name what does not exist
TEXTS = (tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))  # since Python 3.12
WORD = re.compile(r"[A-Za-z_]\w*")
STARTS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
ENDS = "py|sh|toml|json|jinja|html|yaml|yml|md|txt|patch"
FILE = re.compile(rf"[\w./-]+\.(?:{ENDS})")
BARE_FILE = re.compile(rf"(?<![\w./<*{{$-])((?:[\w-]+/)*[\w-]+\.(?:{ENDS}))\b(?![\w*/])")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*\w")
VARIABLE = re.compile(r"\bKIMI_[A-Z0-9_]*[A-Z0-9]\b(?![*_<{])")
FOLDER = re.compile(r"(?<![\w./<])((?:tests|proof|launch|docs|kimi_w4a8_[a-z0-9]+)(?:/\w+)+)(?![\w/*<{-]|\.\w)")
DOTTED = re.compile(r"\b((?:kimi_w4a8_\w+|proof|laptop)(?:\.[a-z_]\w*)+)")


@cache
def parts(text: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return each docstring and comment of a Python file, and the words, options and files of its code."""
    prose: list[str] = []
    found: set[str] = set()
    first = True  # of a statement
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (first and token.type == tokenize.STRING):
            prose.append(token.string)
        elif token.type in TEXTS:
            found |= words_of(token.string)
        first = token.type in STARTS or (first and token.type in (tokenize.COMMENT, tokenize.NL))
    return tuple(prose), frozenset(found)


def words_of(text: str) -> set[str]:
    options, files = OPTION.findall(text) if "--" in text else (), BARE_FILE.findall(text) if "." in text else ()
    return {*WORD.findall(text), *options, *files}


@cache
def words() -> frozenset[str]:
    """Words in the code without its prose; words of all other files but pages; names of files."""
    found = {part.removesuffix(".py") for name in tracked() for part in name.split("/")}
    found |= OF_OTHERS | FILES_OF_OTHERS | OPTIONS_OF_OTHERS
    for name in set(tracked()) - set(OWN):
        path = ROOT / name
        if name.startswith("tests/") and name.endswith(".py"):
            found |= words_of(re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.DOTALL))
        elif name.endswith(".py"):
            found |= parts(path.read_text())[1]
        elif path.suffix in (".toml", ".sh", ".json", ".yml", ".yaml", "") and path.stat().st_size < 400_000:
            found |= words_of(path.read_text(errors="replace"))
    return frozenset(found)


def unknown(text: str) -> list[str]:
    """Return what a docstring or comment names that is not there: code in backticks, files, modules and options."""
    missing = []
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        if re.fullmatch(r"[A-Za-z_][\w.]*(?:\(\))?", span) and not FILE.fullmatch(span):
            missing += [part for part in re.findall(r"\w+", span) if part not in words()]
        elif command := re.match(r"kimi-w4a8 ([a-z]\w*)", span):
            missing += [span] if command[1].replace("-", "_") not in words() else []
    missing += [file for file in BARE_FILE.findall(text) if file not in known_paths() and file not in words()]
    for option in OPTION.findall(text):  # typer makes options of the names of parameters
        name = option[2:].replace("-", "_")
        missing += [] if {option, name, name.removeprefix("no_")} & words() else [option]
    missing += [name for name in VARIABLE.findall(text) if name not in words()]
    missing += [folder for folder in FOLDER.findall(text) if folder not in known_paths() | FILES_OF_OTHERS]
    return missing + [name for name in DOTTED.findall(text) if not set(name.split(".")) <= words()]
