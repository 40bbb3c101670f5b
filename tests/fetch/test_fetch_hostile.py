"""A Hub that attacks: names that lead elsewhere, answers that do not end, tokens that are asked for, sizes that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.fetch_helpers import NAME, SHARDS, TOKEN, kimi, quiet
from support.hub_server import Fault, HubServer, serve

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fetch.audit import Limits
from kimi_w4a8_eagle3.fetch.download import fetch
from kimi_w4a8_eagle3.fetch.hub import Hub

SHARD = SHARDS[0]
SMALL = Limits(attempts=2, first_pause=0.01, longest_pause=0.02, page=100_000, pages=3, silence=0.2, least=1000)


def limited(hub: HubServer, token: str | None = None) -> Hub:
    return Hub(hub.endpoint, token, SMALL)


def change(changed: str, /, **facts: Any) -> Callable[[dict[str, Any]], None]:
    """Let the listing tell other facts about one file."""

    def listed(entry: dict[str, Any]) -> None:
        if entry["path"] == changed:
            entry.update(facts)

    return listed


@pytest.mark.parametrize(
    "sha", ["../../outside/x", "{outside}/x", "c" * 39, "C" * 40, "c" * 40 + "\n", "", None, 4, ["c"]]
)
def test_a_commit_that_is_none(sha, hub, bring, outside, tmp_path):
    hub.about["sha"] = sha.replace("{outside}", str(outside)) if isinstance(sha, str) else sha
    with pytest.raises(KimiError, match="malformed answer"):
        bring()
    assert not (tmp_path / "cache").exists()


def test_another_commit_than_the_pinned_one_is_refused(hub, repo, bring, store):
    hub.about["sha"] = "d" * 40
    with pytest.raises(KimiError, match=f"commit {'d' * 40} for the commit {repo.commit}"):
        bring(revision=repo.commit)
    assert not store.root.exists()


@pytest.mark.parametrize(
    "oid", ["{outside}/bashrc", "../../../outside/bashrc", "a" * 63, "A" * 64, "a" * 64 + "\n", 7, None]
)
@pytest.mark.parametrize("size", [12, 5])
def test_a_digest_that_is_none(oid, size, hub, bring, store, outside):
    """The first writes and renames there, with the size of the file that lies there it is linked in unseen."""
    oid = oid.replace("{outside}", str(outside)) if isinstance(oid, str) else oid
    hub.listed = change(SHARD, size=size, lfs={"oid": oid, "size": size, "pointerSize": 134})
    with pytest.raises(KimiError, match="malformed answer"):
        bring()
    assert not store.root.exists()


@pytest.mark.parametrize("facts", [{"digest": "../../../outside/bashrc"}, {"path": "../../../../outside/bashrc"}])
def test_a_manifest_that_leads_outside_renames_nothing(facts, hub, repo, tmp_path, outside):
    """As a hijacked Hub left it before its names were parsed, or as it came with a cache from elsewhere."""
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    path = tmp_path / "hub/models--org--model/kimi-manifests" / f"{repo.commit}.json"
    manifest = json.loads(path.read_text())
    manifest["files"][0].update(facts)
    path.write_text(json.dumps(manifest))
    for command in (["--verify"], ["--offline"], []):
        done = kimi(hub, tmp_path, "fetch", NAME, *command)
        assert done.returncode == 1 and "damaged manifest" in done.stderr


@pytest.mark.parametrize(
    "path",
    [
        *["../outside/bashrc", "a/../../outside/bashrc", "{outside}/bashrc", "a\\b", "a\0b"],
        *["a//b", ".", "", "x" * 250, "a/" * 600 + "a", "C:/x", "a\x1b]0;x\x07", 7, None, ["a"]],
    ],
)
def test_a_path_that_is_none(path, hub, bring, outside, tmp_path):
    hub.listed = change(SHARD, path=path.replace("{outside}", str(outside)) if isinstance(path, str) else path)
    with pytest.raises(KimiError, match="malformed answer") as error:
        bring()
    assert not (tmp_path / "cache").exists()
    assert all(letter.isprintable() or letter == "\n" for letter in str(error.value))


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"size": -1}, "is not a file size"),
        ({"size": True}, "is not a file size"),
        ({"size": 1.5}, "is not a file size"),
        ({"size": "12"}, "is not a file size"),
        ({"size": 1 << 70}, "is not a file size"),
        ({"size": None}, "is not a file size"),
        ({"path": SHARDS[1]}, "twice"),
        ({"path": "tokenizer"}, "is a file and the folder of"),
        ({"path": f"{SHARDS[1]}/x"}, "is a file and the folder of"),
        ({"lfs": {"oid": "a" * 40, "size": 12, "pointerSize": 134}}, "does not go with lfs"),
        ({"lfs": {"oid": "a" * 64}}, "KeyError"),
        ({"xetHash": "../../outside/bashrc"}, "is not a digest"),
        ({"xetHash": 7}, "int instead of a digest"),
        ({"lfs": ["oid"]}, "TypeError"),
        ({"type": None}, None),
    ],
)
def test_facts_that_cannot_be(facts, what, hub, bring, store):
    hub.listed = change(SHARD, **facts)
    if what is None:  # not a file: nothing of ours
        assert not (bring().folder / SHARD).exists()
        return
    with pytest.raises(KimiError, match=what):
        bring()
    assert not store.root.exists()


def test_one_digest_with_two_sizes(hub, repo, bring):
    facts = {"oid": repo.digest(SHARDS[1]), "size": 1, "pointerSize": 134}
    hub.listed = change(SHARD, size=1, lfs=facts)
    with pytest.raises(KimiError, match="digest of a file of another size"):
        bring()


def test_more_files_than_any_checkpoint(hub, bring, store):
    hub.listed = lambda entry: [{"type": "file", "path": f"f{i}", "size": 0, "oid": "a" * 40} for i in range(3000)]
    with pytest.raises(KimiError, match="more than 20000 files"):
        bring()
    assert hub.pages == 21
    assert not store.root.exists()


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (Fault(status=200, body=b"[" * 200_000), "RecursionError|longer than"),
        (Fault(status=200, body=b"[" * 90_000), "RecursionError"),
        (Fault(status=200, body=b'{"sha": ' + b"9" * 90_000 + b"}"), "ValueError"),
        (Fault(status=200, body=b"[]"), "TypeError"),
        (Fault(status=200, body=b"\xff\xfe"), "Error"),
        (Fault(status=200, body=b"{}", headers={"content-encoding": "gzip"}), "compressed"),
        (Fault(status=200, flood=True), "longer than 100.0 kB"),
    ],
    ids=["too long", "deep", "large number", "list", "no text", "compressed", "endless"],
)
def test_an_answer_that_is_none(fault, what, hub):
    hub.faults["api"] = [fault]
    with pytest.raises(KimiError, match=what) as error:
        limited(hub).listing(NAME, "main")
    assert "malformed answer" in error.value.what


@pytest.mark.parametrize("status", [404, 500, 302])
def test_the_body_of_an_error_or_a_redirect_is_not_read(status, hub):
    hub.faults["api"] = [Fault(status=status, flood=True, headers={"location": f"{hub.endpoint}/x"}, times=None)]
    with pytest.raises(KimiError):
        limited(hub).listing(NAME, "main")
    assert all(request.sent < 64 << 20 for request in hub.log)  # what the sockets' buffers take


def test_redirects_end(hub):
    hub.faults["api"] = [Fault(status=302, headers={"location": f"{hub.endpoint}/api/models/{NAME}"}, times=None)]
    with pytest.raises(KimiError, match="allowed redirects"):
        limited(hub).listing(NAME, "main")
    assert len(hub.log) == 6


@pytest.mark.parametrize(
    "location", ["http://xn--/", "http://127.0.0.1:99999/", "http://[::1", "file:///etc/passwd", "\xff"]
)
@pytest.mark.parametrize("path", ["api", SHARD])
def test_a_redirect_to_what_is_no_address(location, path, hub, store):
    hub.faults[path] = [Fault(status=302, headers={"location": location}, times=None)]
    with pytest.raises(KimiError):
        fetch(limited(hub), store, NAME, "main", quiet)


def test_the_token_does_not_follow_the_next_page_to_another_host(hub, repo, bring):
    repo.token = TOKEN
    hub.next_page = lambda page: f"{hub.storage}/a/b/c"
    with pytest.raises(KimiError, match=r"next page of the listing is at another host: '127\.0\.0\.2'"):
        bring(token=TOKEN)
    assert not [request for request in hub.log if request.origin == "storage"]


@pytest.mark.parametrize("status", [302, 307])
def test_the_token_does_not_follow_a_redirect_to_another_host(status, hub, repo):
    repo.token = TOKEN
    hub.faults["api"] = [Fault(status=status, headers={"location": f"{hub.storage}/a/b/c"})]
    with pytest.raises(KimiError):
        limited(hub, TOKEN).listing(NAME, "main")
    assert [(request.origin, request.authorized) for request in hub.log] == [("hub", True), ("storage", False)]


def test_the_token_does_not_go_to_another_port_of_the_host(hub, repo):
    repo.token = TOKEN
    with serve({NAME: repo}) as other:
        hub.faults["api"] = [
            Fault(status=302, headers={"location": f"{other.endpoint}/api/models/{NAME}/revision/main"})
        ]
        with pytest.raises(KimiError):
            limited(hub, TOKEN).listing(NAME, "main")
        assert [request.authorized for request in other.log] == [False]


def test_a_page_that_is_its_own_next_one(hub, bring):
    hub.next_page = lambda page: f"{hub.endpoint}/api/models/{NAME}/tree/{'c0ffee' + '0' * 34}?recursive=true"
    with pytest.raises(KimiError, match="does not end after 1 pages"):
        bring()


def test_pages_without_end(hub):
    hub.listed = lambda entry: [{"type": "directory", "path": "d", "oid": "0" * 40}]
    hub.next_page = lambda page: f"{hub.endpoint}/api/models/{NAME}/tree/{'c0ffee' + '0' * 34}?page={page}"
    with pytest.raises(KimiError, match="does not end after 3 pages"):
        limited(hub).listing(NAME, "main")


@pytest.mark.parametrize("address", ["http://[::1", "http://xn--/", "file:///etc/passwd", "//127.0.0.2/x", "x"])
def test_an_address_of_a_next_page_that_is_none(address, hub):
    hub.next_page = lambda page: address
    with pytest.raises(KimiError, match="malformed answer"):
        limited(hub).listing(NAME, "main")


@pytest.mark.parametrize("asked", ["99999999", "9" * 400])
@pytest.mark.parametrize("path", ["api", SHARD])
def test_a_wait_of_years(asked, path, hub, bring):
    hub.faults[path] = [Fault(status=429, headers={"retry-after": asked}, times=None)]
    with pytest.raises(KimiError, match=r"asks to wait for (99999999|inf) s"):
        bring()


def test_the_waits_of_a_listing_end_together(hub):
    hub.faults["api"] = [Fault(status=429, headers={"retry-after": "5"}, times=None)]
    holder = Hub(hub.endpoint, None, Limits(listing=4))
    with pytest.raises(KimiError, match="asks to wait for 5 s"):
        holder.listing(NAME, "main")


def test_an_answer_that_drips(hub):
    hub.faults["api"] = [Fault(status=200, body=b" " * 100_000, drip=0.01, times=None)]
    with pytest.raises(KimiError, match=r"fewer than 1\.0 kB in 0 s"):
        limited(hub).listing(NAME, "main")


def test_a_file_that_drips(hub, store):
    hub.faults[SHARD] = [Fault(drip=0.01, times=None)]
    with pytest.raises(KimiError, match=r"no progress in repeated attempts: ReadTimeout: fewer than 1\.0 kB"):
        fetch(limited(hub), store, NAME, "main", quiet)


def test_a_header_that_drips(hub, store):
    hub.faults["api"] = [Fault(status=200, header=True, drip=0.01, times=None)]
    with pytest.raises(KimiError, match="cannot reach the Hub"):
        limited(hub).listing(NAME, "main")
    hub.faults["api"] = []
    hub.faults[SHARD] = [Fault(status=200, header=True, drip=0.01, times=None)]
    with pytest.raises(KimiError, match="no progress in repeated attempts"):
        fetch(limited(hub), store, NAME, "main", quiet)


def test_a_byte_for_each_attempt_is_no_progress(hub, bring):
    hub.faults[SHARD] = [Fault(cut=1, times=None)]
    with pytest.raises(KimiError, match="no progress in repeated attempts"):
        bring()
    assert len(hub.gets(SHARD)) == 6  # huggingface_hub's own count


@pytest.mark.parametrize("unannounced", [True, False])
def test_a_body_that_is_longer_than_the_listing_says(unannounced, hub, repo, bring, store):
    digest = repo.digest(SHARD)
    hub.listed = change(SHARD, size=1000)
    hub.faults[SHARD] = [Fault(unannounced=unannounced, times=None)]
    with pytest.raises(KimiError, match="damaged twice: more than 1000 bytes"):
        bring()
    assert not (store.root / "blobs" / digest).exists() and not store.incoming.exists()


def test_a_body_without_end_takes_no_space(hub, bring, tmp_path):
    hub.faults[SHARD] = [Fault(status=200, flood=True, times=None)]
    with pytest.raises(KimiError, match="damaged twice: more than 300000 bytes"):
        bring()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 10**6
