"""Rules of the repository beside those of the code (rules.py): paths that pages name, and the pins of SGLang."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.repository import ROOT, known_paths, listed, tracked

from kimi_w4a8_eagle3.doctor.software import SGLANG_NEWEST, SGLANG_PINNED
from proof import docs_site, mutants

PACKAGE = ROOT / "kimi_w4a8_eagle3"
# Where the pinned SGLang stands: the first is read by what installs it, the others cannot read and are compared with it
# (compose.yaml with the Dockerfile, in tests/launch).
PINS = {
    "requirements/constraints.txt",
    "kimi_w4a8_eagle3/doctor/software.py",
    "Dockerfile",
    "launch/compose.yaml",
    "launch/known-faults.toml",  # tests/recipe/test_known_faults.py
    "docs/figures.toml",  # tests/proof/test_figures_of_pages.py
}
OF_OTHERS = {"pool_configurator.py"}  # SGLang's
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")})


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    """Links, with their headings; files and folders by their path or its end; modules by their name; tests."""
    text = page.read_text()
    links = {link for link in re.findall(r"\]\((?!\w+:)([^)\s]+)", text) if not leads_somewhere(page, link)}
    tops = {name.split("/")[0] for name in tracked() if "/" in name} | {path.name for path in PACKAGE.iterdir()}
    starts = "|".join(re.escape(top) for top in sorted(tops))
    paths = set(re.findall(rf"(?<![\w./:<$-])((?:{starts})/[\w./-]*\w)(?![\w*<{{}}-]|/[*<{{]|…)", text))
    paths |= set(re.findall(r"`([\w-]+\.(?:py|sh))\b", text)) - OF_OTHERS
    dotted = re.findall(r"\b((?:proof|kimi_w4a8_eagle3)(?:\.[a-z]\w*)+)", text)
    slashed = {name: name.replace(".", "/") for name in dotted}
    places = {name: {path, path + ".py", path.rpartition("/")[0] + ".py"} for name, path in slashed.items()}
    modules = {name for name, paths_of_it in places.items() if not paths_of_it & known_paths()}
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    absent = {name for path, name in tests if f"def {name}(" not in (ROOT / path).read_text()}
    assert links | modules | absent | {path for path in paths if path not in known_paths()} == set()


def test_the_navigation_of_the_docs_has_each_page_once() -> None:
    """`make docs` refuses a page outside the navigation, but no test runs it."""
    listed_pages = re.findall(r": ([\w/-]+\.md)$", (ROOT / ".ci" / "mkdocs.yml").read_text(), re.MULTILINE)
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert sorted(listed_pages) == sorted(written | {docs_site.CLI_PAGE})


def leads_somewhere(page: Path, link: str) -> bool:
    """Return True if the file exists and, for a page, the heading, by GitHub's anchors."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not anchor or not target.exists():
        return target.exists()
    text = re.sub(r"^```.*?^```", "", target.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_places_of_the_pinned_sglang_agree() -> None:
    assert f"newest=(sglang=={SGLANG_NEWEST} " in (ROOT / "requirements/install.sh").read_text()
    pinned = f"sglang=={SGLANG_PINNED}"
    assert pinned in (ROOT / "requirements/constraints.txt").read_text().splitlines()
    assert f"ARG BASE_IMAGE=lmsysorg/sglang-rocm:v{SGLANG_PINNED}-" in (ROOT / "Dockerfile").read_text()


def test_no_other_code_names_the_pinned_sglang() -> None:
    """Comments and docstrings may name it, because a finding in a release stays true of that release."""
    named = {name for name in tracked() if not name.endswith((".md", ".json")) and SGLANG_PINNED in code(ROOT / name)}
    assert named == PINS


def test_a_log_beside_the_files_is_not_read(tmp_path: Path) -> None:
    """`make demo >demo.log` names the pinned SGLang in a file that git does not track."""
    (tmp_path / "tracked.py").touch()
    for command in (["init", "--quiet"], ["add", "tracked.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "demo.log").write_text(SGLANG_PINNED)
    assert listed(tmp_path) == ("tracked.py",)


def test_a_run_leaves_nothing_outside_of_the_checkout(tmp_path: Path) -> None:
    """Its folder of temporary files is removed, and caches lie in the checkout, those of Matplotlib among them."""
    places = {name: str(tmp_path / name) for name in ("HOME", "TMPDIR", "XDG_CONFIG_HOME")}
    for place in places.values():
        Path(place).mkdir()
    ours = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "MPLCONFIGDIR")}
    modules = ["tests/base/test_files.py", "tests/speed/test_screens.py"]  # the second imports Matplotlib
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *modules, "-k", "test_files"]
    done = subprocess.run(words, cwd=ROOT, env=ours | places, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert [path for place in places.values() for path in Path(place).iterdir()] == []
    assert Path(os.environ["XDG_CACHE_HOME"]).is_relative_to(ROOT)


def code(path: Path) -> str:
    """A file that names it, without its comments; of a Python file its texts, without the docstrings."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return ""
    if SGLANG_PINNED not in text:
        return ""
    if path.suffix != ".py":
        return re.sub(r"^\s*#.*| # .*", "", text, flags=re.MULTILINE)
    docstrings = {id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return "\n".join(node.value for node in texts if isinstance(node.value, str))


def test_what_make_mutants_changes_and_runs_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for module, tests in mutants.TESTS.items():
        assert mutants.file_of(module).exists()
        assert [name for name in tests if not Path("tests", name).exists()] == []
