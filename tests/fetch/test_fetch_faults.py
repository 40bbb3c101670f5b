"""Broken connections, kills, damaged bytes, refusals, rate limits, a full disk, a Hub that is not there."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from support.fetch_helpers import NAME, SHARDS, TOKEN, client, kimi, kimi_process, quiet
from support.hub_server import SIGNATURE, Fault, Repo, serve

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fetch.audit import Limits
from kimi_w4a8_eagle3.fetch.cache import Store
from kimi_w4a8_eagle3.fetch.download import fetch
from kimi_w4a8_eagle3.fetch.hub import Hub
from kimi_w4a8_eagle3.fetch.progress import ByteProgress

SHARD = SHARDS[0]


def blob(store: Store, repo: Repo, path: str) -> Path:
    return blob_of(store.root, repo, path)


def blob_of(root: Path, repo: Repo, path: str) -> Path:
    return root / "blobs" / repo.digest(path)


def test_a_cut_connection_continues_where_it_broke(hub, repo, bring, store):
    hub.faults[SHARD] = [Fault(cut=100_000), Fault(cut=50_000)]
    bring()
    assert [request.range for request in hub.gets(SHARD)] == [None, "bytes=100000-", "bytes=150000-"]
    assert hub.sent(SHARD) == len(repo.files[SHARD])  # no byte came twice
    assert blob(store, repo, SHARD).read_bytes() == repo.files[SHARD]


def test_a_killed_process_keeps_complete_files_and_starts_the_others_again(hub, repo, tmp_path):
    hub.faults[SHARD] = [Fault(cut=123_456, hold=True)]
    root = tmp_path / "hub/models--org--model"
    process = kimi_process(hub, tmp_path, "fetch", NAME)
    try:
        wait_until(lambda: all((root / "blobs" / repo.digest(path)).exists() for path in SHARDS[1:]))
        wait_until(lambda: hub.gets(SHARD))
    finally:
        process.kill()
        process.communicate()
    missing = kimi(hub, tmp_path, "fetch", NAME, "--offline")
    assert missing.returncode == 1 and f"missing  {SHARD} (300.0 kB)" in missing.stdout
    assert (root / ".kimi-incoming" / repo.digest(SHARD)).exists() and not blob_of(root, repo, SHARD).exists()

    done = kimi(hub, tmp_path, "fetch", NAME)
    assert done.returncode == 0, done.stderr
    assert [request.range for request in hub.gets(SHARD)] == [None, None]
    assert all(len(hub.gets(path)) == 1 for path in SHARDS[1:])  # complete files were not asked again
    assert (root / "snapshots" / repo.commit / SHARD).read_bytes() == repo.files[SHARD]
    assert not (root / ".kimi-incoming").exists()


def test_ctrl_c_says_how_to_go_on(hub, repo, tmp_path):
    hub.faults[SHARD] = [Fault(cut=100_000, hold=True)]
    process = kimi_process(hub, tmp_path, "fetch", NAME)
    wait_until(lambda: hub.gets(SHARD))
    process.send_signal(signal.SIGINT)
    hub.closing.set()  # the silent connection ends; without it the read timeout would
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command resumes" in output


def test_a_server_without_ranges_sends_all_again_and_the_file_is_right(hub, repo, bring, store):
    hub.faults[SHARD] = [Fault(cut=100_000), Fault(ignore_range=True)]
    bring()
    assert [request.range for request in hub.gets(SHARD)] == [None, "bytes=100000-"]
    assert blob(store, repo, SHARD).read_bytes() == repo.files[SHARD]


def test_damaged_bytes_are_fetched_once_more(hub, repo, bring, store):
    hub.faults[SHARD] = [Fault(damage=True)]
    bring()
    assert blob(store, repo, SHARD).read_bytes() == repo.files[SHARD]
    assert [request.range for request in hub.gets(SHARD)] == [None, None]


def test_bytes_that_come_twice_count_once_in_the_progress(hub, repo, store):
    hub.faults[SHARD] = [Fault(damage=True)]
    counted = []

    class Counting(ByteProgress):
        def advance(self, count: int) -> None:
            counted.append(count)

    fetch(client(hub), store, NAME, "main", lambda label, total: Counting(Console(quiet=True), label, total))
    assert sum(counted) == sum(map(len, repo.files.values())) and min(counted) == -len(repo.files[SHARD])


def test_bytes_that_stay_damaged_are_deleted_and_named(hub, repo, bring, store):
    hub.faults[SHARD] = [Fault(damage=True, times=None)]
    with pytest.raises(KimiError) as error:
        bring()
    assert SHARD in error.value.what and "damaged twice" in error.value.what
    assert repo.digest(SHARD) in error.value.what
    assert not blob(store, repo, SHARD).exists() and not store.incoming.exists()
    assert blob(store, repo, SHARDS[1]).exists()  # the others are kept


def test_rate_limit_is_waited_out(hub, repo, bring):
    hub.faults["api"] = [Fault(status=429, headers={"retry-after": "0"}, times=2)]
    hub.faults[SHARD] = [Fault(status=429, headers={"retry-after": "0"}, times=2), Fault(status=503)]
    bring()
    assert [request.status for request in hub.gets(SHARD)] == [429, 429, 503, 200]


def test_a_rate_limit_that_stays_is_an_error_with_advice(hub, bring):
    hub.faults["api"] = [Fault(status=429, headers={"retry-after": "0"}, times=None)]
    with pytest.raises(KimiError, match="limiting the request rate"):
        bring()


def test_what_the_server_asks_for_goes_before_our_own_schedule():
    limits = Limits(first_pause=1, longest_pause=5)
    ours = 1
    assert limits.pause(1, {"retry-after": "17"}) == 17
    assert limits.pause(1, {"ratelimit": '"api";r=0;t=55'}) == 55
    assert limits.pause(1, {"ratelimit": '"api";r=12;t=55'}) == ours  # requests remain: not the reason
    assert limits.pause(1, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) == ours
    assert limits.pause(1, {"ratelimit": "r=0;" + "x" * 200 + ";t=55"}) == ours  # no header is that long
    assert [limits.pause(failures, {}) for failures in (1, 2, 3, 4, 5)] == [1, 2, 4, 5, 5]


def test_a_file_without_progress_gives_up(hub, bring, store):
    hub.faults[SHARD] = [Fault(cut=5000), Fault(status=500, times=None)]
    with pytest.raises(KimiError, match=r"no progress in repeated attempts: HTTP 500") as error:
        bring()
    assert "complete files are kept" in error.value.remedy and not store.incoming.exists()


@pytest.mark.parametrize(
    ("repo", "token", "expected"),
    [
        (Repo({"a": b"x"}, token=TOKEN), None, "HTTP 401): no token is set"),
        (Repo({"a": b"x"}, token="hf_other"), TOKEN, "HTTP 401): the token was refused"),
        (Repo({"a": b"x"}, gated=True), TOKEN, "HTTP 403"),
    ],
    ids=["no token", "wrong token", "gated"],
)
def test_refused_access(repo, token, expected, store, bring):
    with pytest.raises(KimiError) as error:
        bring(token=token)
    assert expected in error.value.what and "HF_TOKEN" in error.value.remedy
    assert not (store.root / "blobs").exists()


def test_unknown_revision_and_unknown_repository(bring, hub, store):
    with pytest.raises(KimiError, match=r"no org/model at revision v9 \(HTTP 404\)"):
        bring(revision="v9")
    with pytest.raises(KimiError, match=r"\(HTTP 404\)"):
        client(hub, TOKEN).listing("org/no-such-model", "main")
    with pytest.raises(KimiError, match="not a repository name"):
        client(hub).listing("org/model/extra", "main")


def test_a_login_page_in_the_hubs_place_is_said_plainly(hub, bring):
    hub.faults["api"] = [Fault(status=200)]  # 200 with a body that is no JSON
    with pytest.raises(KimiError, match="malformed answer"):
        bring()


def test_a_file_that_vanishes_between_listing_and_download(hub, repo, bring):
    hub.faults["config.json"] = [Fault(status=404)]
    with pytest.raises(KimiError, match=r"config.json of org/model \(HTTP 404\)"):
        bring()


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
    hub.faults[SHARD] = [Fault(damage=True, times=None)]
    hub.faults[SHARDS[1]] = [Fault(status=401, times=None)]
    done = kimi(hub, tmp_path, "fetch", NAME, HF_TOKEN=TOKEN)
    assert done.returncode == 1 and "the token was refused" in done.stderr
    assert TOKEN not in done.stdout + done.stderr and SIGNATURE not in done.stdout + done.stderr


def test_scrubbing_hides_tokens_credentials_and_signatures():
    hub = Hub("https://hub.example", TOKEN)
    text = f"Bearer {TOKEN} at https://me:secret@hub.example/x, https://cdn.example/y?X-Signature={SIGNATURE}&e=1, end"
    assert hub.scrub(text) == "Bearer *** at https://***@hub.example/x, https://cdn.example/y?... end"
    assert hub.scrub("HTTP \x1b[2J\x9b2J\u202e") == "HTTP ?[2J?2J?"  # nor does a Hub write on the terminal


def test_the_token_is_in_no_repr_and_in_no_traceback(hub, monkeypatch):
    import traceback

    holder = Hub(hub.endpoint, TOKEN, Limits(attempts=1))
    assert TOKEN not in repr(holder) and TOKEN not in repr(holder.limits)
    monkeypatch.setattr(httpx.Client, "send", lambda *arguments, **options: 1 / 0)  # an error that no code expects
    try:
        holder.listing(NAME, "main")
    except ZeroDivisionError:
        assert TOKEN not in traceback.format_exc()


def test_a_full_disk_is_said_and_the_next_fetch_goes_on(repo, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        store = Store(small, NAME)
        with serve({NAME: repo}) as hub:
            filler, arriving = small / "filler", store.incoming / repo.digest(SHARD)

            def another_program_fills_the_disk() -> None:
                wait_until(arriving.exists)
                fill(filler)

            # After the space check, while the file is on its way.
            hub.faults[SHARD] = [Fault(cut=40_000, then=another_program_fills_the_disk)]
            with pytest.raises(KimiError, match="the disk is full") as error:
                fetch(client(hub), store, NAME, "main", quiet, jobs=1)
            assert str(small) in error.value.where
            filler.unlink()
            fetch(client(hub), store, NAME, "main", quiet, jobs=1)
        assert blob(store, repo, SHARD).read_bytes() == repo.files[SHARD]
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


def wait_until(condition: object, seconds: float = 280) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
