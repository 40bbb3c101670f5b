"""Broken connections, kills, damaged bytes, refusals, rate limits, a full disk, a Hub that is not there."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.fetch_helpers import NAME, SHARDS, TOKEN, kimi, kimi_process, quiet
from support.hub_server import SIGNATURE, Fault, Repo
from support.waiting import until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fetch.download import Repository, fetch
from kimi_w4a8_eagle3.fetch.hub import list_files, scrub
from kimi_w4a8_eagle3.fetch.progress import ByteProgress

SHARD = SHARDS[0]


def blob(wanted: Repository, repo: Repo, path: str) -> Path:
    return wanted.folder / "blobs" / repo.digest(path)


def test_a_cut_connection_continues_where_it_broke(hub, repo, bring, wanted):
    hub.faults[SHARD] = [Fault(cut=100_000), Fault(cut=50_000)]
    bring()
    assert [request.range for request in hub.gets(SHARD)] == [None, "bytes=100000-", "bytes=150000-"]
    assert hub.sent(SHARD) == len(repo.files[SHARD])  # no byte came twice
    assert blob(wanted, repo, SHARD).read_bytes() == repo.files[SHARD]


def test_a_killed_process_keeps_complete_files_and_starts_the_others_again(hub, repo, wanted, tmp_path):
    hub.faults[SHARD] = [Fault(cut=123_456, hold=True)]
    process = kimi_process(hub, tmp_path, "fetch", NAME)
    try:
        until(lambda: all(blob(wanted, repo, path).exists() for path in SHARDS[1:]))
        until(lambda: hub.gets(SHARD))
    finally:
        process.kill()
        process.communicate()
    missing = kimi(hub, tmp_path, "fetch", NAME, "--offline")
    assert missing.returncode == 1 and f"missing  {SHARD} (300.0 kB)" in missing.stdout
    assert list(wanted.folder.glob("blobs/*.incomplete")) and not blob(wanted, repo, SHARD).exists()

    done = kimi(hub, tmp_path, "fetch", NAME)
    assert done.returncode == 0, done.stderr
    assert [request.range for request in hub.gets(SHARD)] == [None, None]
    assert all(len(hub.gets(path)) == 1 for path in SHARDS[1:])  # complete files were not asked again
    assert blob(wanted, repo, SHARD).read_bytes() == repo.files[SHARD]
    assert not list(wanted.folder.glob("blobs/*.incomplete"))


def test_a_partial_file_that_another_process_writes_is_left_alone(hub, repo, bring, wanted):
    from huggingface_hub.utils import WeakFileLock

    partial, lock = blob(wanted, repo, SHARD), wanted.cache / ".locks" / wanted.folder.name
    partial = partial.with_name(f"{'e' * 64}.12345678.incomplete")
    for folder in (partial.parent, lock):
        folder.mkdir(parents=True)
    partial.write_bytes(b"on its way")
    with WeakFileLock(lock / f"{'e' * 64}.lock"):
        bring()
        assert partial.exists()
    bring()
    assert not partial.exists()


def test_ctrl_c_says_how_to_go_on(hub, repo, wanted, tmp_path):
    hub.faults[SHARD] = [Fault(cut=100_000, hold=True)]
    process = kimi_process(hub, tmp_path, "fetch", NAME)
    until(lambda: hub.gets(SHARD))
    process.send_signal(signal.SIGINT)
    hub.closing.set()  # the silent connection ends; without it the read timeout would
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command resumes" in output
    assert not blob(wanted, repo, SHARD).exists()  # the transfer was not finished first


def test_a_server_without_ranges_sends_all_again_and_the_file_is_right(hub, repo, bring, wanted):
    hub.faults[SHARD] = [Fault(cut=100_000), Fault(ignore_range=True)]
    bring()
    assert [request.range for request in hub.gets(SHARD)] == [None, "bytes=100000-"]
    assert blob(wanted, repo, SHARD).read_bytes() == repo.files[SHARD]


def test_damaged_bytes_are_fetched_once_more(hub, repo, bring, wanted):
    hub.faults[SHARD] = [Fault(damage=True)]
    bring()
    assert blob(wanted, repo, SHARD).read_bytes() == repo.files[SHARD]
    assert [len(hub.gets(path)) for path in SHARDS] == [2, 1, 1]


def test_bytes_that_stay_damaged_are_deleted_and_named(hub, repo, bring, wanted):
    hub.faults[SHARD] = [Fault(damage=True, times=None)]
    with pytest.raises(KimiError) as error:
        bring()
    assert SHARD in error.value.what and "damaged twice" in error.value.what
    assert not blob(wanted, repo, SHARD).exists() and SHARD in wanted.here().missing
    assert not wanted.here().verified
    assert blob(wanted, repo, SHARDS[1]).exists()  # the others are kept


def test_every_byte_that_arrives_is_counted(hub, repo, wanted):
    hub.faults[SHARD] = [Fault(cut=100_000), Fault(ignore_range=True)]
    counted: dict[str, int] = {}

    class Counting(ByteProgress):
        def __init__(self, label: str, total: int) -> None:
            super().__init__(Console(quiet=True), label, total)
            self.label = label

        def advance(self, count: int) -> None:
            counted[self.label] = counted.get(self.label, 0) + count

    fetch(wanted, Counting)
    assert counted[f"{NAME} ({len(repo.files)} files)"] == sum(map(len, repo.files.values()))


def test_a_passing_refusal_of_the_storage_is_tried_again(hub, repo, bring):
    hub.faults[SHARD] = [Fault(status=429, headers={"retry-after": "0"}, times=2), Fault(status=503), Fault(status=403)]
    bring()
    assert [request.status for request in hub.gets(SHARD)] == [429, 429, 503, 403, 200]


NOW = {"retry-after": "0"}
# By fault: what it is of, the message, and its remedy.
REFUSALS = {
    "rate limit": ("api", Fault(status=429, headers=NOW, times=None), "limits the request rate of org/model at main "
                   "(HTTP 429)", "a token raises the limit"),
    "no progress": (SHARD, Fault(status=500, times=None), "the Hub answers HTTP 500", "complete files are kept"),
    "login page": ("api", Fault(status=200, body=b"<html>"), "malformed answer", "a proxy or a login page"),
    "vanished file": ("config.json", Fault(status=404, times=None), "the Hub has no org/model at main (HTTP 404)",
                      "check spelling"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_hub_refuses_has_a_remedy(name, hub, bring, wanted):
    of, fault, message, remedy = REFUSALS[name]
    hub.faults[of] = [Fault(cut=5000), fault] if of == SHARD else [fault]
    with pytest.raises(KimiError) as error:
        bring()
    assert message in error.value.what and remedy in error.value.remedy
    assert not list(wanted.folder.glob("blobs/*.incomplete"))


@pytest.mark.parametrize(
    ("changes", "revision", "token", "expected"),
    [
        ({"token": TOKEN}, "main", None, "HTTP 401): no token is set"),
        ({"token": "hf_other"}, "main", TOKEN, "HTTP 401): the token was refused"),
        ({"gated": True}, "main", None, "HTTP 403"),
        ({}, "v9", None, "no org/model at v9 (HTTP 404)"),
    ],
    ids=["no token", "wrong token", "gated", "unknown revision"],
)
def test_refused_access(changes, revision, token, expected, hub, repo, wanted, monkeypatch):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for name, value in changes.items():
        setattr(repo, name, value)
    with pytest.raises(KimiError) as error:
        fetch(replace(wanted, revision=revision), quiet)
    assert expected in error.value.what and "HF_TOKEN" in error.value.remedy
    assert not wanted.folder.exists()


def test_an_unknown_repository(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(KimiError, match=r"no org/no-such-model at main \(HTTP 404\)"):
        list_files("org/no-such-model", "main")


def test_a_hub_that_goes_away_during_the_transfer_is_unreachable(hub, repo, bring):
    hub.faults[SHARD] = [Fault(cut=5000, then=lambda: (hub._hub.server_close(), hub._storage.server_close()))]
    with pytest.raises(KimiError, match="cannot reach the Hub"):
        bring(jobs=1)


def test_unreachable_host(tmp_path):
    done = kimi("http://127.0.0.1:9", tmp_path, "fetch", NAME)
    assert done.returncode == 1
    assert "cannot reach the Hub" in done.stderr and "Traceback" not in done.stderr
    assert "--offline" in done.stderr


@pytest.mark.parametrize("endpoint", ["http://user:{token}@127.0.0.1:9", "http://127.0.0.1:9"])
def test_the_token_is_never_shown_when_the_hub_is_away(tmp_path, endpoint):
    process = kimi_process(endpoint.format(token=TOKEN), tmp_path, "fetch", NAME, HF_TOKEN=TOKEN, HF_DEBUG="1")
    output = "".join(process.communicate(timeout=60))
    assert process.returncode == 1 and "cannot reach the Hub" in output
    assert TOKEN not in output


def test_neither_token_nor_signature_is_shown_on_a_failure(hub, repo, tmp_path):
    repo.token = TOKEN
    hub.faults[SHARD] = [Fault(status=401, times=None)]
    done = kimi(hub, tmp_path, "fetch", NAME, HF_TOKEN=TOKEN)
    assert done.returncode == 1 and "the token was refused" in done.stderr
    assert TOKEN not in done.stdout + done.stderr and SIGNATURE not in done.stdout + done.stderr


def test_scrubbing_hides_tokens_credentials_and_signatures(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    text = f"Bearer {TOKEN} at https://me:secret@hub.example/x, https://cdn.example/y?X-Signature={SIGNATURE}&e=1, end"
    assert scrub(text) == "Bearer *** at https://***@hub.example/x, https://cdn.example/y?... end"
    assert scrub("HTTP \x1b[2J\x9b2J\u202e") == "HTTP ?[2J?2J?"  # nor does a Hub write on the terminal


def test_a_full_disk_is_said_and_the_next_fetch_goes_on(hub, repo, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(small)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    wanted = Repository(NAME, "main", small)
    try:
        # After the space check, while the file is on its way.
        hub.faults[SHARD] = [Fault(cut=40_000, then=lambda: fill(small / "filler"))]
        with pytest.raises(KimiError, match="the disk is full") as error:
            fetch(wanted, quiet, jobs=1)
        assert str(small) in error.value.where
        (small / "filler").unlink()
        fetch(wanted, quiet, jobs=1)
        assert blob(wanted, repo, SHARD).read_bytes() == repo.files[SHARD]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_place_that_cannot_be_written_is_said_plainly(hub, tmp_path):
    (tmp_path / "hub").write_text("")
    done = kimi(hub, tmp_path, "fetch", NAME)
    assert done.returncode == 1 and "cannot write: Not a directory" in done.stderr and "Traceback" not in done.stderr


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass
