"""A Hub that attacks: names that lead elsewhere, a token that is asked for, a storage that is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.fetch_helpers import NAME, SHARDS, TOKEN
from support.hub_server import Fault, HubServer, serve

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.fetch import names
from kimi_w4a8_eagle3.fetch.download import Repository
from kimi_w4a8_eagle3.fetch.hub import list_files

SHARD = SHARDS[0]
Lie = Callable[[HubServer], object]
SAME = settings(derandomize=True, deadline=None)  # the same texts in every run, however busy the machine
HEX = set("0123456789abcdef")
# Texts near what is allowed: pieces of paths, tricks and anything else.
PIECES = st.sampled_from(
    ["a", "b.json", "..", ".", "", "/", "\\", "\0", "\n", "C:", "~", "\u202e", "\ud800", "é" * 130]
)
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=8).map("/".join) | st.text(max_size=60)


def accepts(parse: Callable[[object], str], value: object) -> bool:
    try:
        return parse(value) == value
    except ValueError:
        return False


@SAME
@given(st.text(max_size=70) | st.text("0123456789abcdefABCDEF\n", min_size=38, max_size=66))
@example("c" * 40 + "\n")
@example("٣" * 40)  # digits, but not ours
@example("A" * 40)
@example("A" * 64)
def test_a_commit_and_a_digest_are_hexadecimal_digits_and_nothing_else(text):
    assert accepts(names.commit, text) == (len(text) == 40 and set(text) <= HEX)
    assert accepts(names.digest, text) == (len(text) in (40, 64) and set(text) <= HEX)


@SAME
@given(TEXTS)
@example("a/../../b")
@example("/etc/passwd")
@example("a\0b")
@example("a/")
@example("x" * 241)
def test_a_path_stays_below_wherever_it_is_joined(text):
    if accepts(names.repository_path, text):
        assert os.path.normpath(f"/base/{text}") == f"/base/{text}"
        assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text) and "\\" not in text
        assert all(len(os.fsencode(part)) <= 240 for part in text.split("/")) and len(os.fsencode(text)) <= 1024


@pytest.mark.parametrize(
    "path", ["config.json", "tokenizer/vocab file.txt", "a..b/...c", "日本/é.bin", ".gitattributes"]
)
def test_paths_of_real_repositories_are_accepted(path):
    assert accepts(names.repository_path, path)


@pytest.mark.parametrize("value", [None, 3, ["a"], b"a" * 40, True])
def test_only_texts_are_names(value):
    assert not any(accepts(parse, value) for parse in (names.commit, names.digest, names.repository_path))


@pytest.mark.parametrize(
    ("repo", "revision"),
    [*[(repo, "main") for repo in ("../..", "a/b/c", "a/..", "a--b", "o/m;rm", "")], (NAME, "../x"), (NAME, "a\0")],
)
def test_an_invalid_repository_or_revision_is_refused(repo, revision, tmp_path):
    with pytest.raises(UsageError):
        Repository.named(repo, revision, tmp_path)


def about(**facts: Any) -> Lie:
    """Let the answer about the repository tell this."""
    return lambda hub: hub.about.update(facts)


def sibling(**facts: Any) -> Lie:
    return about(siblings=[{"rfilename": "a", "size": 1, "blobId": "a" * 40} | facts])


def listed(**facts: Any) -> Lie:
    """Let the listing, which huggingface_hub reads after that answer, tell other facts about one file."""

    def change(entry: dict[str, Any]) -> None:
        if entry["path"] == SHARD:
            entry.update(facts)

    return lambda hub: setattr(hub, "listed", change)


def header(**names: str) -> Lie:
    """huggingface_hub writes to blobs/<etag> and links it into snapshots/<commit>."""
    return lambda hub: setattr(hub, "resolved", {name.replace("_", "-"): value for name, value in names.items()})


def answer(body: bytes) -> Lie:
    return lambda hub: hub.faults.update(api=[Fault(status=200, body=body)])


COMMITS = ("../../outside", "/etc/x", "c" * 39, "C" * 40, "c" * 40 + "\n", "", None, 4, ["c"])
PATHS = ("../x", "a/../../x", "/etc/x", "a\\b", "a\0b", "a//b", "x" * 250, "a\x1b]0;x", 7, None)
DIGESTS = ("../../../outside", "/etc/x", "a" * 63, "A" * 64, "a" * 64 + "\n", 7)
LIES: list[Lie] = [
    *(about(sha=sha) for sha in COMMITS),
    *(lie for path in PATHS for lie in (sibling(rfilename=path), listed(path=path))),
    *(lie for oid in DIGESTS for lie in (listed(oid=oid), listed(xetHash=oid), listed(lfs={"oid": oid, "size": 5}))),
    *(sibling(size=size) for size in (None, "x", [1])),
    *(header(x_linked_etag=f'"{etag}"') for etag in ("../../../outside", "/etc/x", "a/b", "..")),
    header(x_repo_commit="../../outside"),
    *(answer(body) for body in (b"[" * 200_000, b'{"sha": ' + b"9" * 90_000 + b"}", b"[]", b"\xff\xfe", b"7")),
]


@pytest.mark.parametrize("lie", LIES)
def test_what_a_hub_must_not_say_is_refused_and_leaves_nothing(lie, hub, bring, wanted, tmp_path):
    lie(hub)
    with pytest.raises(KimiError, match="malformed answer") as error:
        bring()
    assert all(letter.isprintable() or letter == "\n" for letter in str(error.value))
    assert not list(wanted.folder.glob("blobs/*")) and not list(tmp_path.rglob("outside*"))
    assert not list(tmp_path.rglob("x"))


def test_a_commit_of_a_file_that_is_not_the_listings(hub, bring, wanted):
    hub.resolved = {"x-repo-commit": "d" * 40}
    with pytest.raises(KimiError, match="damaged twice"):
        bring()
    assert SHARD in wanted.here().missing


def test_the_token_does_not_follow_the_next_page_to_another_host(hub, repo, bring, monkeypatch):
    repo.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.next_page = lambda page: f"{hub.storage}/a/b/c"
    with pytest.raises(KimiError, match=r"next page of the listing is at another host: '127\.0\.0\.2'"):
        bring()
    assert not [request for request in hub.log if request.origin == "storage"]


def test_the_token_does_not_follow_a_redirect_to_another_host_or_port(hub, repo, monkeypatch):
    repo.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve({NAME: repo}) as other:
        for address in (f"{hub.storage}/a/b/c", f"{other.endpoint}/api/models/{NAME}/revision/main"):
            hub.faults["api"] = [Fault(status=302, headers={"location": address})]
            with pytest.raises(KimiError):
                list_files(NAME, "main")
        assert [request.authorized for request in other.log] == [False]
    assert [(request.origin, request.authorized) for request in hub.log if request.origin == "storage"] == [
        ("storage", False)
    ]
