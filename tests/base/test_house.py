"""The repository keeps its sums of lines, its short files, its light imports, and the paths that pages name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT, known_paths, listed, tracked

from kimi_w4a8_eagle3 import __version__
from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST, SGLANG_PINNED
from proof import docs_site

# Lines of Python (of launch/ also shell) that a package may have; a reserve of 3 % comes on top. The aim of the two
# large ones and of the tests is less: 18,000 and 9,500, and 28,000.
SUMS = {
    "kimi_w4a8_eagle3": 23_500,
    "kimi_w4a8_lab": 11_300,
    "kimi_w4a8_laptop": 4_500,
    "launch": 1_000,
    "proof": 10_230,
    "tests": 33_000,
}
RESERVE = 1.03
LONGEST_FILE, LONGEST_FUNCTION = 400, 70
SGLANG = re.compile(r"^\s*(?:from|import) sglang\b", re.MULTILINE)
OF_SGLANG = ("kimi_w4a8_eagle3/sglang_plugin/", "kimi_w4a8_lab/with_sglang/", "kimi_w4a8_laptop/", "proof/", "tests/")
OF_TORCH = re.compile(
    r"kimi_w4a8_eagle3/(moe|quark|sampling|sglang_plugin)/|kimi_w4a8_lab/(draft|kernels|quantize|with_sglang)/"
)
SERVES, MEASURES = "kimi_w4a8_eagle3/", "kimi_w4a8_lab/"
SOURCES = {
    name: (ROOT / name).read_text()
    for name in tracked()
    if name.split("/")[0] in SUMS and (name.endswith(".py") or (name.startswith("launch/") and name.endswith(".sh")))
}
PYTHON = {name: text for name, text in SOURCES.items() if name.endswith(".py")}
OF_OTHERS = {"pool_configurator.py", "cuda_graph_hook.py"}  # SGLang's
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")})


@pytest.mark.parametrize("package", SUMS)
def test_a_package_keeps_its_sum_of_lines(package: str) -> None:
    found = sum(len(text.splitlines()) for name, text in SOURCES.items() if name.startswith(f"{package}/"))
    assert found <= SUMS[package] * RESERVE


def test_files_and_functions_are_short() -> None:
    long = [name for name, text in SOURCES.items() if len(text.splitlines()) > LONGEST_FILE]
    for name, text in PYTHON.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                long += [f"{name}: {node.name}"] * (node.end_lineno - node.lineno >= LONGEST_FUNCTION)
    assert long == []


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by name alone, and refuses a second one where the whole suite runs."""
    names = [Path(name).name for name in PYTHON if name.startswith("tests/")]
    assert [name for name in set(names) - {"conftest.py"} if names.count(name) > 1] == []


def test_few_folders_import_sglang() -> None:
    assert [name for name, text in PYTHON.items() if SGLANG.search(text) and not name.startswith(OF_SGLANG)] == []


def test_verbs_start_without_torch_and_sglang() -> None:
    """Each module outside of the folders of torch is imported in one process; torch takes seconds to import."""
    light = [name for name in PYTHON if name.startswith((SERVES, MEASURES)) and not OF_TORCH.match(name)]
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in light]
    program = (
        "import sys\n"
        f"for name in {[name for name in modules if not name.endswith('__main__')]}:\n"
        "    __import__(name)\n"
        "    assert not {'torch', 'sglang', 'transformers'} & sys.modules.keys(), name\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_folder_is_on_the_map() -> None:
    page = (ROOT / "docs/map.md").read_text()
    folders = {name.partition("/")[2].rpartition("/")[0] for name in PYTHON if name.startswith((SERVES, MEASURES))}
    assert [folder for folder in folders if folder and f"`{folder}/`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    """Links, with their headings; files and folders by their path or its end; modules by their name; tests."""
    text = page.read_text()
    links = {link for link in re.findall(r"\]\((?!\w+:)([^)\s]+)", text) if not leads_somewhere(page, link)}
    tops = {name.split("/")[0] for name in tracked() if "/" in name}
    tops |= {path.name for path in (ROOT / "kimi_w4a8_eagle3").iterdir()}
    starts = "|".join(re.escape(top) for top in sorted(tops))
    paths = set(re.findall(rf"(?<![\w./:<$-])((?:{starts})/[\w./@-]*\w)(?![\w*<{{}}-]|/[*<{{]|…)", text))
    paths |= set(re.findall(r"`([\w-]+\.(?:py|sh))\b", text)) - OF_OTHERS
    dotted = re.findall(r"\b((?:proof|kimi_w4a8_eagle3)(?:\.[a-z]\w*)+)", text)
    slashed = {name: name.replace(".", "/") for name in dotted}
    places = {name: {path, path + ".py", path.rpartition("/")[0] + ".py"} for name, path in slashed.items()}
    modules = {name for name, paths_of_it in places.items() if not paths_of_it & known_paths()}
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    absent = {name for path, name in tests if f"def {name}(" not in (ROOT / path).read_text()}
    assert links | modules | absent | {path for path in paths if path not in known_paths()} == set()


def leads_somewhere(page: Path, link: str) -> bool:
    """Return True if the file exists and, for a page, the heading, by GitHub's anchors."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not anchor or not target.exists():
        return target.exists()
    text = re.sub(r"^```.*?^```", "", target.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_navigation_of_the_docs_has_each_page_once() -> None:
    """`make docs` refuses a page outside the navigation, but no test runs it."""
    listed_pages = re.findall(r"- ([\w/-]+\.md)$", (ROOT / ".ci" / "mkdocs.yml").read_text(), re.MULTILINE)
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert sorted(listed_pages) == sorted(written | {docs_site.CLI_PAGE, docs_site.README_PAGE})


def test_the_places_of_the_pinned_sglang_agree() -> None:
    """compose.yaml is compared with the Dockerfile in tests/launch."""
    assert f"newest=(sglang=={SGLANG_NEWEST} " in (ROOT / "requirements/install.sh").read_text()
    pinned = f"sglang=={SGLANG_PINNED}"
    assert pinned in (ROOT / "requirements/constraints.txt").read_text().splitlines()
    assert f"ARG BASE_IMAGE=lmsysorg/sglang-rocm:v{SGLANG_PINNED}-" in (ROOT / "Dockerfile").read_text()
    assert f"[![SGLang: {SGLANG_PINNED} to {SGLANG_NEWEST}]" in (ROOT / "README.md").read_text()


def test_the_changelog_begins_with_the_version() -> None:
    newest = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == __version__


def test_a_log_beside_the_files_is_not_read(tmp_path: Path) -> None:
    """`make demo >demo.log` writes a file that git does not track."""
    (tmp_path / "tracked.py").touch()
    for command in (["init", "--quiet"], ["add", "tracked.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "demo.log").touch()
    assert listed(tmp_path) == ("tracked.py",)


def test_a_run_leaves_nothing_outside_of_the_checkout(tmp_path: Path) -> None:
    """Its folder of temporary files is removed, and caches lie in the checkout, those of Matplotlib among them."""
    places = {name: str(tmp_path / name) for name in ("HOME", "TMPDIR", "XDG_CONFIG_HOME")}
    for place in places.values():
        Path(place).mkdir()
    ours = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "MPLCONFIGDIR")}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/base/test_files.py"]
    done = subprocess.run(words, cwd=ROOT, env=ours | places, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert [path for place in places.values() for path in Path(place).iterdir()] == []
    assert Path(os.environ["XDG_CACHE_HOME"]).is_relative_to(ROOT)
