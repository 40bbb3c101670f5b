"""The types for names from outside hold what they promise, whatever the text."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_w4a8_eagle3.fetch.model import Listing, RemoteFile
from kimi_w4a8_eagle3.fetch.names import Commit, Digest, Name, RepoName, RepoPath, Revision

SAME = settings(derandomize=True, deadline=None)  # the same texts in every run, however busy the machine
HEX = set("0123456789abcdef")
# Texts near what is allowed: pieces of paths, tricks and anything else.
PIECES = st.sampled_from(
    ["a", "b.json", "..", ".", "", "/", "\\", "\0", "\n", "C:", "~", "\u202e", "\ud800", "é" * 130]
)
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=8).map("/".join) | st.text(max_size=60)


def held(kind: type[Name], value: object) -> Name | None:
    try:
        return kind(value)
    except ValueError:
        return None


@SAME
@given(st.text(max_size=70) | st.text("0123456789abcdefABCDEF\n", min_size=38, max_size=66))
@example("c" * 40 + "\n")
@example("٣" * 40)  # digits, but not ours
@example("A" * 40)
@example("A" * 64)
def test_a_commit_and_a_digest_are_hexadecimal_digits_and_nothing_else(text):
    assert (held(Commit, text) is not None) == (len(text) == 40 and set(text) <= HEX)
    assert (held(Digest, text) is not None) == (len(text) in (40, 64) and set(text) <= HEX)


@SAME
@given(TEXTS)
@example("a/../../b")
@example("/etc/passwd")
@example("a\0b")
@example("a/")
@example("x" * 241)
@example("/".join("a" * 33))
def test_a_path_stays_below_wherever_it_is_joined(text):
    for kind in (RepoPath, Revision):
        path = held(kind, text)
        if path is None:
            continue
        assert os.path.normpath(f"/base/{path}") == f"/base/{path}"
        assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in path) and "\\" not in path
        assert all(len(os.fsencode(part)) <= 240 for part in path.split("/")) and len(os.fsencode(path)) <= 1024


@pytest.mark.parametrize(
    "path", ["config.json", "tokenizer/vocab file.txt", "a..b/...c", "日本/é.bin", ".gitattributes"]
)
def test_paths_of_real_repositories_are_accepted(path):
    assert RepoPath(path) == path


@pytest.mark.parametrize(
    "path",
    [
        *["", ".", "a//b", "C:x", "-\x1b[2J"],
        *["/".join("a" * 33), "x" * 241, "/".join(["x" * 200] * 6)],
    ],
)
def test_tricks_are_refused(path):
    with pytest.raises(ValueError, match="is not a path inside a repository"):
        RepoPath(path)


@pytest.mark.parametrize("name", ["../..", "a/b/c", "a/..", "a--b", "o/m;rm", "", "o/" + "m" * 97])
def test_what_is_no_repository_name(name):
    assert held(RepoName, name) is None and held(RepoName, "org/model.v1-x") is not None


@pytest.mark.parametrize("value", [None, 3, ["a"], b"a" * 40, True])
def test_only_texts_are_names(value):
    assert [held(kind, value) for kind in (Commit, Digest, RepoPath, Revision, RepoName)] == [None] * 5


@pytest.mark.parametrize(
    ("size", "digest", "lfs"),
    [
        (-1, "a" * 40, False),
        (True, "a" * 40, False),
        (1.5, "a" * 40, False),
        (1 << 60, "a" * 40, False),
        (1, "a" * 64, False),
    ],
)
def test_a_file_with_facts_that_cannot_be(size, digest, lfs):
    with pytest.raises(ValueError):
        RemoteFile(RepoPath("a"), size, Digest(digest), lfs)


@SAME
@given(st.lists(st.sampled_from(["a", "b", "a/b", "a/b/c", "ab", "b/c"]), max_size=6))
def test_no_two_files_of_a_listing_claim_one_place(paths):
    files = tuple(RemoteFile(RepoPath(path), 1, Digest("a" * 40), False) for path in paths)
    clash = any(x == y or y.startswith(x + "/") for i, x in enumerate(paths) for j, y in enumerate(paths) if i != j)
    try:
        Listing(RepoName("o/m"), Revision("main"), Commit("c" * 40), files)
    except ValueError:
        assert clash
    else:
        assert not clash
