"""Small trees of our own with the structure of the files that the patches edit."""

from __future__ import annotations

from pathlib import Path

import pytest

MHA = '''\
"""Attention."""


def varlen(q, how_v3_bf16_cvt: int, out=None):  # no default: left alone
    return q


def forward(q, scale=1, how_v3_bf16_cvt: int | None = 1, out=None):
    # a comment with how_v3_bf16_cvt = 1 in it
    return varlen(q, how_v3_bf16_cvt=1)


class Function:
    @staticmethod
    async def run(ctx, *, how_v3_bf16_cvt=1 , other=1):
        return (lambda how_v3_bf16_cvt=1: how_v3_bf16_cvt)()
'''

SELECTOR = """\
#pragma once
namespace ck_tile { using index_t = int; using long_index_t = long long;
enum class BlockAttentionKVCacheLoadModeEnum { BUFFER_LOAD, GLOBAL_LOAD_LDS }; }

inline ck_tile::BlockAttentionKVCacheLoadModeEnum
fmha_batch_prefill_select_kv_load_mode(ck_tile::index_t page_block_size, ck_tile::index_t kN0, int pages, int stride)
{
    const bool large = static_cast<ck_tile::long_index_t>(pages) * stride * 2 > 0x7fffffffLL; // "{" in a comment
    return page_block_size < kN0 && large ? ck_tile::BlockAttentionKVCacheLoadModeEnum::GLOBAL_LOAD_LDS
                                          : ck_tile::BlockAttentionKVCacheLoadModeEnum::BUFFER_LOAD;
}
"""

OLD_FORWARD = """\
#pragma once
struct fmha_batch_prefill_args { int num_total_pages; };
"""

PIPELINE_64 = "#pragma once\n// static constexpr bool kUseGlobalLoad = mode == GLOBAL_LOAD_LDS;\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, mode and modification time of every file."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def aiter_tree(tmp_path: Path) -> Path:
    """A checkout of aiter with a ck_tile that has the 64-bit load path."""
    ck = "3rdparty/composable_kernel"
    return write(
        tmp_path / "aiter_checkout",
        {
            "aiter/__init__.py": "",
            "aiter/ops/mha.py": MHA,
            f"{ck}/example/ck_tile/01_fmha/fmha_fwd.hpp": SELECTOR,
            f"{ck}/include/ck_tile/ops/fmha/pipeline/block_fmha_batch_prefill_pipeline_qr_ks_vs_async.hpp": PIPELINE_64,
        },
    )


@pytest.fixture
def old_aiter_tree(aiter_tree: Path) -> Path:
    """The same with a ck_tile that has 32-bit page offsets only."""
    forward = aiter_tree / "3rdparty/composable_kernel/example/ck_tile/01_fmha/fmha_fwd.hpp"
    forward.write_text(OLD_FORWARD)
    return aiter_tree


@pytest.fixture
def three_files(aiter_tree: Path) -> Path:
    """The tree of a patch with three files."""
    return write(aiter_tree, {f"aiter/ops/{name}.py": MHA for name in ("one", "two", "three")})
