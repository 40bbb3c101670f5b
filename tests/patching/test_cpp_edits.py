from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from patch_trees import KERNEL, OLD_FORWARD, SELECTOR

from kimi_w4a8_eagle3.patching.cpp import functions, texts
from kimi_w4a8_eagle3.patching.cpp_edits import CheckedPageOffset, SmallPagesLoadGlobally
from kimi_w4a8_eagle3.patching.edit_state import State

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def test_definitions_are_told_from_calls_and_declarations() -> None:
    source = """
    int f(int a);               // f() { in a comment
    const char* s = "f() {";
    #define BODY f() {
    int g() { return f(1) + [](int x) { return x; }(2); }
    int f(int a) noexcept { /* } */ char c = '}'; return a + R"x(} f(){)x"[0]; }
    """
    found = functions(source, {"f"})
    assert len(found) == 1
    assert found[0].parameters == ("int", "a")
    assert found[0].body[:2] == ("char", "c")
    assert found[0].body[-1] == ";"


def test_unbalanced_brackets_are_an_error() -> None:
    with pytest.raises(ValueError, match="no match"):
        functions("int f() { ( }", {"f"})


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


@needs_compiler
def test_an_offset_beyond_int32_throws(tmp_path: Path) -> None:
    """Compiled and run at the limit, for each stride in each maker: (2097153 - 1) * 1024 is one more than fits."""
    edited = CheckedPageOffset().apply(KERNEL.encode()).decode()
    strides = [", ".join("1024" if i == j else "0" for j in range(4)) for i in range(4)]
    calls = [
        f"probe([](int pages) {{ Kernel<int, false>::{maker}pages, {stride}); }});"
        for maker in ("MakeKargs<>(nullptr, ", "MakeKargsImpl(")
        for stride in strides
    ]
    main = f"""
    #include <cstdio>
    template <typename F> void probe(F make) {{
        for(int pages : {{2097152, 2097153, 2147483647}})
            try {{ make(pages); std::printf("ok "); }}
            catch(const std::runtime_error&) {{ std::printf("throws "); }}
    }}
    int main() {{ {" ".join(calls)} }}
    """
    assert run_cpp(tmp_path, edited, main) == "ok throws throws " * 8


@needs_compiler
def test_large_pages_are_exempt_where_pages_have_a_size(tmp_path: Path) -> None:
    kernel = KERNEL.replace(
        "struct Kargs {", "static constexpr int kPageBlockSize = FmhaPipeline::kPage;\n    struct Kargs {"
    )
    edited = CheckedPageOffset().apply(kernel.encode())
    assert CheckedPageOffset().inspect(edited)[0] is State.APPLIED
    main = """
    #include <cstdio>
    template <int P> struct Pipeline { static constexpr int kPage = P, kN0 = 128; };
    template <int P> void probe() {
        try { Kernel<Pipeline<P>, false>::MakeKargsImpl(9000000, 0, 0, 1024, 0); std::printf("ok "); }
        catch(const std::runtime_error&) { std::printf("throws "); }
    }
    int main() { probe<1>(); probe<64>(); probe<128>(); }
    """
    assert run_cpp(tmp_path, edited.decode(), main) == "throws throws ok "


def test_the_rest_of_the_header_is_untouched() -> None:
    for newline in ("\n", "\r\n"):
        source = KERNEL.replace("\n", newline)
        edited = CheckedPageOffset().apply(source.encode()).decode()
        added = ("Added by", "for(const", "if(static", "throw std", "KV pool", "--max-total", "<stdexcept>")
        lines = edited.split(newline)
        assert all("\r" not in line for line in lines)
        assert newline.join(line for line in lines if not any(mark in line for mark in added)) == source


@pytest.mark.parametrize(
    ("edit", "source", "state"),
    [
        (SmallPagesLoadGlobally(), OLD_FORWARD, State.PREDATES),
        (SmallPagesLoadGlobally(), SELECTOR + SELECTOR, State.UNKNOWN),
        (SmallPagesLoadGlobally(), SELECTOR.replace("kN0", "tile"), State.UNKNOWN),
        (SmallPagesLoadGlobally(), SELECTOR.replace("GLOBAL_LOAD_LDS", "SOMETHING"), State.UNKNOWN),
        (SmallPagesLoadGlobally(), SELECTOR.replace("int pages", "const void* k_ptr, int pages"), State.UPSTREAM),
        (SmallPagesLoadGlobally(), SELECTOR.rstrip().rstrip("}"), State.UNKNOWN),
        (SmallPagesLoadGlobally(), "// fmha_batch_prefill_select_kv_load_mode lives elsewhere", State.UNKNOWN),
        (CheckedPageOffset(), "struct Kernel {};", State.UNKNOWN),
        (CheckedPageOffset(), KERNEL.replace("batch_stride_v", "stride_w"), State.UNKNOWN),
        (
            CheckedPageOffset(),
            KERNEL.replace("return ", "assert((num_total_pages - 1) * batch_stride_k <= 7); return "),
            State.UPSTREAM,
        ),
    ],
)
def test_other_forms_of_the_headers(
    edit: SmallPagesLoadGlobally | CheckedPageOffset, source: str, state: State
) -> None:
    assert edit.inspect(source.encode())[0] is state


def run_cpp(folder: Path, header: str, main: str) -> str:
    (folder / "header.hpp").write_text(header)
    source = folder / "probe.cpp"
    source.write_text('#include <initializer_list>\n#include "header.hpp"\n' + main)
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", "-O0", "-o", folder / "probe", source], check=True)
    return subprocess.run([folder / "probe"], check=True, capture_output=True, text=True).stdout
