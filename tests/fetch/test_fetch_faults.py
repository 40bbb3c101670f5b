"""Broken and silent connections, kills, damaged bytes, refusals, a full disk, a Hub that is not there."""

from __future__ import annotations

import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, SHARDS, TOKEN, kimi, kimi_process
from support.hub_server import SIGNATURE, Fault, Repo
from support.waiting import until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fetch.download import Repository
from kimi_w4a8_eagle3.fetch.hub import scrub

SHARD = SHARDS[0]


def blob(wanted: Repository, repo: Repo, path: str) -> Path:
    return wanted.folder / "blobs" / repo.digest(path)


def test_a_cut_connection_continues_where_it_broke(hub, repo, bring, wanted):
    repo.files[SHARD] = bytes(11 << 20)  # huggingface_hub writes blocks of 10 MiB
    hub.faults[SHARD] = [Fault(cut=21 << 19)]
    bring()
    assert [request.range for request in hub.gets(SHARD)] == [None, f"bytes={10 << 20}-"]
    assert blob(wanted, repo, SHARD).read_bytes() == repo.files[SHARD]


def test_a_killed_process_keeps_complete_files_and_starts_the_others_again(hub, repo, wanted, tmp_path):
    hub.faults[SHARD] = [Fault(cut=123_456, hold=True)]
    process = kimi_process(hub, tmp_path, "fetch", NAME)
    until(lambda: all(blob(wanted, repo, path).exists() for path in SHARDS[1:]) and hub.gets(SHARD))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command resumes" in output
    missing = kimi(hub, tmp_path, "fetch", NAME, "--offline")
    assert missing.returncode == 1 and f"missing  {SHARD} (300.0 kB)" in missing.stdout
    assert list(wanted.folder.glob("blobs/*.incomplete")) and not blob(wanted, repo, SHARD).exists()

    done = kimi(hub, tmp_path, "fetch", NAME)
    assert done.returncode == 0, done.stderr
    assert [len(hub.gets(path)) for path in SHARDS] == [2, 1, 1]  # complete files were not asked for again
    assert not list(wanted.folder.glob("blobs/*.incomplete"))


def test_a_partial_file_that_another_process_writes_is_left_alone(hub, bring, wanted):
    from huggingface_hub.utils import WeakFileLock

    partial = wanted.folder / "blobs" / f"{'e' * 64}.12345678.incomplete"
    lock = wanted.cache / ".locks" / wanted.folder.name / f"{'e' * 64}.lock"
    for path in (partial, lock):
        path.parent.mkdir(parents=True)
    partial.write_bytes(b"on its way")
    with WeakFileLock(lock):
        bring()
    assert partial.exists()


def test_a_xet_storage_that_falls_silent_is_given_up_for_plain_http(hub, repo, bring, wanted, said):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub.xet_storage = f"http://127.0.0.1:{silent.getsockname()[1]}"
        repo.xet = {SHARD: "a" * 64}
        bring(silence_s=3.0)
        silent.setblocking(False)
        assert silent.accept()  # hf_xet asked it
    assert any("no byte arrived for 0.05 minutes; trying again by plain HTTP" in line for line in said)
    assert blob(wanted, repo, SHARD).read_bytes() == repo.files[SHARD] and len(hub.gets(SHARD)) == 1


@pytest.mark.parametrize("address", ["http://192.0.2.1:9", "local:///tmp/outside", ""])
def test_a_xet_storage_that_is_not_https_gets_no_token(address, hub, repo, bring, said):
    hub.xet_storage, repo.xet = address, {SHARD: "a" * 64}
    bring(silence_s=60.0)
    assert any("the transfer failed" in line for line in said) and len(hub.gets(SHARD)) == 1


def test_the_token_goes_to_no_other_host_that_the_hub_names(hub, repo, bring, said, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.xet_route, repo.xet = f"{hub.storage}/org/model/xet-read-token", {SHARD: "a" * 64}
    bring(silence_s=60.0)
    assert not [request for request in hub.log if request.origin == "storage" and request.authorized]
    assert any("the transfer failed" in line for line in said) and len(hub.gets(SHARD)) == 1


def test_damaged_bytes_are_fetched_once_more(hub, repo, bring, wanted, said):
    hub.faults[SHARD] = [Fault(damage=True)]
    bring()
    assert blob(wanted, repo, SHARD).read_bytes() == repo.files[SHARD]
    assert [len(hub.gets(path)) for path in SHARDS] == [2, 1, 1]
    assert any(f"arrived damaged and were deleted: {SHARD}" in line for line in said)


def test_bytes_that_stay_damaged_are_deleted_and_named(hub, repo, bring, wanted):
    hub.faults[SHARD] = [Fault(damage=True, times=None)]
    with pytest.raises(KimiError, match=f"arrived damaged and were deleted: {SHARD}"):
        bring()
    here = wanted.here()
    assert not blob(wanted, repo, SHARD).exists() and SHARD in here.missing and not here.verified
    assert blob(wanted, repo, SHARDS[1]).exists()  # the others are kept


REFUSALS = {
    "no token": ({"token": TOKEN}, "main", None, "no org/model at main, or it is private: HTTP 401", "set HF_TOKEN"),
    "wrong token": ({"token": "hf_other"}, "main", TOKEN, "org/model at main was refused: HTTP 401", "HF_TOKEN"),
    "gated": ({"gated": True}, "main", None, "org/model at main is restricted: HTTP 403", "terms on its page"),
    "revision": ({}, "v9", None, "no such revision: org/model at v9: HTTP 404", "a branch, a tag or a commit"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_access(name, hub, repo, wanted, monkeypatch):
    changes, revision, token, expected, remedy = REFUSALS[name]
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for attribute, value in changes.items():
        setattr(repo, attribute, value)
    with pytest.raises(KimiError) as error:
        replace(wanted, revision=revision).fetch(print)
    assert error.value.what == expected and remedy in error.value.remedy


def test_a_login_page_in_the_hubs_place(hub, bring):
    hub.faults["api"] = [Fault(status=200, body=b"<html>")]
    with pytest.raises(KimiError, match="unusable answer for org/model at main: ") as error:
        bring()
    assert "login page" in error.value.remedy


def test_unreachable_host(tmp_path):
    done = kimi("http://127.0.0.1:9", tmp_path, "fetch", NAME)
    assert done.returncode == 1
    assert "cannot reach the Hub for org/model at main: " in done.stderr and "--offline" in done.stderr
    assert "Traceback" not in done.stderr


def test_neither_token_nor_signature_is_shown_on_a_failure(hub, repo, tmp_path):
    repo.token = TOKEN
    hub.faults[SHARD] = [Fault(status=401, times=None)]
    process = kimi_process(hub, tmp_path, "fetch", NAME, HF_TOKEN=TOKEN)
    output = "".join(process.communicate(timeout=60))
    assert process.returncode == 1 and "HTTP 401" in output and "the transfer failed" in output
    assert TOKEN not in output and SIGNATURE not in output


def test_scrubbing_hides_tokens_credentials_and_signatures(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    text = f"Bearer {TOKEN} at https://me:secret@hub.example/x, https://cdn.example/y?X-Signature={SIGNATURE}&e=1, end"
    assert scrub(text) == "Bearer *** at https://***@hub.example/x, https://cdn.example/y?... end"


def test_a_place_that_cannot_be_written_is_said_plainly(hub, tmp_path):
    (tmp_path / "hub").write_text("")
    process = kimi_process(hub, tmp_path, "fetch", NAME)
    output = "".join(process.communicate(timeout=60))
    assert process.returncode == 1 and "cannot store org/model at main: [Errno " in output
    assert "Traceback" not in output
