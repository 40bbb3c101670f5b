from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from patch_trees import OLD_FORWARD, SELECTOR

from kimi_w4a8_eagle3.patching.cpp import functions, texts
from kimi_w4a8_eagle3.patching.cpp_edits import SmallPagesLoadGlobally
from kimi_w4a8_eagle3.patching.edit_state import State

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def test_definitions_are_distinguished_from_calls_and_declarations() -> None:
    source = """
    int f(int a);               // f() { in a comment
    const char* s = "f() {";
    #define BODY f() {
    int g() { return f(1) + [](int x) { return x; }(2); }
    int f(int a) noexcept { /* } */ char c = '}'; return a + R"x(} f(){)x"[0]; }
    """
    found = functions(source, "f")
    assert len(found) == 1
    assert found[0].parameters == ("int", "a")
    assert found[0].body[:2] == ("char", "c")
    assert found[0].body[-1] == ";"


def test_unbalanced_brackets_are_an_error() -> None:
    with pytest.raises(ValueError, match="no match"):
        functions("int f() { ( }", "f")


def test_layout_and_comments_do_not_count() -> None:
    assert texts("a  +\n b // c\n") == texts("/* x */ a + b")


@needs_compiler
def test_small_pages_take_the_64_bit_path(tmp_path: Path) -> None:
    """Compiled and run: a small pool of small pages changes its path, large pages do not."""
    edit = SmallPagesLoadGlobally()
    assert edit.inspect(SELECTOR.encode())[0] is State.ORIGINAL
    main = """
    #include <cstdio>
    int main() {
        for(int page : {1, 128}) for(int pages : {1000, 3000000})
            std::printf("%d", static_cast<int>(fmha_batch_prefill_select_kv_load_mode(page, 128, pages, 1024)));
    }
    """
    assert run_cpp(tmp_path, SELECTOR, main) == "0100"
    edited = edit.apply(SELECTOR.encode()).decode()
    assert edit.inspect(edited.encode())[0] is State.APPLIED
    assert run_cpp(tmp_path, edited, main) == "1100"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_rest_of_the_header_is_untouched(newline: str) -> None:
    source = SELECTOR.replace("\n", newline)
    edited = SmallPagesLoadGlobally().apply(source.encode()).decode()
    added = ("Added by", "K/V tile takes", "if(page_block_size < kN0)", "return ck_tile::BlockAttention")
    lines = edited.split(newline)
    assert all("\r" not in line for line in lines)
    kept = [line for line in lines if not line.strip().startswith(tuple(f"// {a}" for a in added) + added)]
    assert newline.join(kept) == source


@pytest.mark.parametrize(
    ("source", "state"),
    [
        (OLD_FORWARD, State.PREDATES),
        (SELECTOR + SELECTOR, State.UNKNOWN),
        (SELECTOR.replace("kN0", "tile"), State.UNKNOWN),
        (SELECTOR.replace("GLOBAL_LOAD_LDS", "SOMETHING"), State.UNKNOWN),
        (SELECTOR.replace("int pages", "const void* k_ptr, int pages"), State.UPSTREAM),
        (SELECTOR.rstrip().rstrip("}"), State.UNKNOWN),
        ("// fmha_batch_prefill_select_kv_load_mode lives elsewhere", State.UNKNOWN),
    ],
)
def test_other_forms_of_the_header(source: str, state: State) -> None:
    assert SmallPagesLoadGlobally().inspect(source.encode())[0] is state


def run_cpp(folder: Path, header: str, main: str) -> str:
    (folder / "header.hpp").write_text(header)
    source = folder / "probe.cpp"
    source.write_text('#include <initializer_list>\n#include "header.hpp"\n' + main)
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", "-O0", "-o", folder / "probe", source], check=True)
    return subprocess.run([folder / "probe"], check=True, capture_output=True, text=True).stdout
