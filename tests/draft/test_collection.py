"""Collected requests: only with consent, within the limits, each key by itself, and gone when they are erased."""

from __future__ import annotations

import json
import stat
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.waiting import until
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base import collection
from kimi_w4a8_eagle3.base.collection import NO_KEY, REQUESTS, Collector, Consent, key_name, read_consent
from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_lab.draft import collected
from kimi_w4a8_lab.draft.collected import Collected, divided, erase, limited, read_collected, read_ids, read_requests

BLOCK, DAY_MS = 4096, 86_400_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(collection, "_EVERY_S", 0.01)
    (made := tmp_path / "collected").mkdir(mode=0o700)
    Consent(share=1.0).write(made)
    return made


def names(folder: Path, key: str = NO_KEY) -> list[str]:
    """Ids of the stored requests of a key."""
    return [one.id for file in (folder / REQUESTS / key).glob("*") for one in read_requests(file)]


def settle(*collectors: Collector) -> None:
    """Wait until the threads have stored or left out what they got; they read the consent in each round."""
    for collector in 2 * collectors:
        until(lambda one=collector, before=collector.consent: one.consent is not before)


def test_a_request_is_stored_as_ids_for_its_owner_alone(folder: Path) -> None:
    collector = Collector(folder, NO_KEY)
    collector.put("chatcmpl-1", [5, 6, 7], [8, 9])
    collector.put("../../etc/passwd", [5], [1, 2], structured=True)
    settle(collector)
    for path in [folder / REQUESTS / NO_KEY, *(folder / REQUESTS / NO_KEY).iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    plain, structured = sorted(read_collected(folder, 100), key=lambda one: one.kind)
    assert (plain.tokens, plain.replies, plain.kind) == ((5, 6, 7, 8, 9), ((3, 5),), NO_KEY)
    assert plain.guessed == [False] * 4 + [True] and structured.kind == f"{NO_KEY}-structured"
    assert (erase(folder, [structured.kind], ()), names(folder)) == (1, ["chatcmpl-1"])


def test_each_key_has_its_own_room_and_old_requests_go(folder: Path) -> None:
    Consent(share=1.0, most_bytes=16 * BLOCK, most_of_key=0.5).write(folder)
    (folder / REQUESTS / "b").mkdir(parents=True)
    (folder / REQUESTS / "b" / f"{int(time.time() * 1000) - 31 * DAY_MS:013d}-old").write_bytes(b"\0" * 400)
    for key, count in (("a", 20), ("b", 6)):
        collector = Collector(folder, key)
        for number in range(count):
            collector.put(f"{key}{number}", range(500), range(490))  # a block of the disk each
        collector.put("huge", range(50_000), [1])
        settle(collector)
    assert sorted(names(folder, "a")) == [f"a{number}" for number in range(12, 20)]  # its newest, in half of the room
    assert sorted(names(folder, "b")) == [f"b{number}" for number in range(6)]


def test_a_wall_clock_that_jumps_a_month_deletes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector, now = Collector(folder, NO_KEY), time.time()
    collector.put("before", [1], [2])
    settle(collector)
    monkeypatch.setattr(time, "time", lambda: now + 31 * DAY_MS / 1000)
    collector.put("after", [3], [4])
    settle(collector)
    assert sorted(names(folder)) == ["after", "before"]


def test_no_crowd_of_keys_and_no_small_requests_fill_the_disk(folder: Path) -> None:
    Consent(share=1.0, most_bytes=8 * BLOCK, most_of_key=0.5).write(folder)
    for key in "abc":
        collector = Collector(folder, key)
        for number in range(7):
            collector.put(str(number), [number], [1])
            settle(collector)
        assert len(names(folder, key)) == (0 if key == "c" else 4)
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]
    assert "6" in names(folder, "b") and sum(path.stat().st_blocks * 512 for path in files) <= 8 * BLOCK


def test_consent_is_read_again_and_a_spoilt_file_stops_collecting(folder: Path) -> None:
    client, other = Collector(folder, key_name("secret-key")), Collector(folder, NO_KEY)
    assert client.wants() and other.wants()
    for terms, wanted in (("{}", False), (json.dumps({"keys": [client.key]}), True), ("{cut", False)):
        (folder / "collect.json").write_text(terms)
        settle(client, other)
        assert client.wants() is wanted and not other.wants()
    assert "secret" not in client.key


def test_without_consent_or_with_other_readers_nothing_starts(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(KimiError, match="was not switched on"):
        Collector(tmp_path, NO_KEY)
    folder.chmod(0o755)
    with pytest.raises(KimiError, match="other users"):
        Collector(folder, NO_KEY)


def test_ids_of_another_tokenizer_are_refused(folder: Path) -> None:
    Collector(folder, NO_KEY).require_tokenizer("one")
    assert read_consent(folder).tokenizer == "one"
    with pytest.raises(KimiError, match="another tokenizer"):
        Collector(folder, NO_KEY).require_tokenizer("other")


def test_a_disk_that_refuses_costs_the_request_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    collector, place = Collector(folder, NO_KEY), folder / REQUESTS
    place.write_text("no folder")
    for number in range(3):
        collector.put(str(number), [1], [2])
        settle(collector)
    assert caplog.text.count("were not collected") == 1
    place.unlink()
    collector.put("next", [1], [2])  # the thread goes on after an error
    settle(collector)
    assert names(folder) == ["next"]


def test_what_a_slow_disk_leaves_waiting_is_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "_EVERY_S", 600.0)
    collector = Collector(folder, NO_KEY)
    for number in range(2000):
        collector.put(str(number), [1], [2])  # returns at once
    assert len(collector._waiting) <= 512


def stored(folder: Path, rows: list[tuple[list[int], list[int]]], kind: str = "chat") -> None:
    source = folder.parent / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    assert collected.store_ids(read_ids(source, kind), folder, kind) == len(rows)


def test_turns_of_a_conversation_are_one_and_the_newest_are_held_out(folder: Path) -> None:
    stored(folder, [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7]), ([1, 9], [9])])
    stored(folder, [([7, number], [8]) for number in range(30)], "tools")
    found = read_collected(folder, 100)
    assert sum(len(one.replies) == 2 for one in found) == 1 and len(found) == 32
    train, choosing, held_out = divided(found)
    for part, numbers in ((held_out, (27, 28, 29)), (choosing, (24, 25, 26))):
        assert [one.tokens for one in part if one.kind == "tools"] == [(7, n, 8) for n in numbers]
    assert len(train) == 24 and [sum(one.kind == "chat" for one in part) for part in (held_out, choosing)] == [1, 1]


def test_a_client_is_no_more_than_its_share_of_the_training_set() -> None:
    hostile, honest = key_name("hostile"), key_name("honest")
    counts = {hostile: 300, f"{hostile}-structured": 300, honest: 40, "imported": 20}
    made = [Collected(kind, (5,) * 10, ((1, 10),), at) for kind, count in counts.items() for at in range(count)]
    made.sort(key=lambda one: one.at)
    for share, most in ((0.5, 60), (0.25, 10), (1.0, 600)):
        kept = limited(made, share, 10**9)
        found = Counter(one.key for one in kept)
        assert found == {hostile: most, honest: min(40, most), "imported": 20} and most <= share * len(kept)
    alone, imports = ([one for one in made if one.key == key] for key in (hostile, "imported"))
    assert limited(alone, 0.5, 10**9) == alone  # without others there is no share
    assert limited([*imports, *alone], 0.5, 10**9) == [*imports, *alone[-20:]]  # the newest
    assert limited([*imports, *alone], 0.5, 24) == [*imports[-12:], *alone[-12:]]  # though the newest are of one key
    assert len(limited([*(replace(one, kind=NO_KEY) for one in alone), imports[0]], 0.5, 10**9)) == 601


def test_requests_are_erased_by_id_key_and_with_their_states(folder: Path) -> None:
    stored(folder, [([1, 2], [3]), ([4, 5], [6])])
    stored(folder, [([7], [8])], "other")
    (folder / "states").mkdir()
    for one in read_collected(folder, 100):
        (folder / "states" / f"{one.name}.safetensors").touch()
    assert (erase(folder, (), ["import1"]), erase(folder, ["other"], ())) == (1, 1)
    left = read_collected(folder, 100)
    assert [one.tokens for one in left] == [(1, 2, 3)]
    assert [path.stem for path in (folder / "states").iterdir()] == [left[0].name]


@pytest.mark.parametrize("words", [["erase", "--kind", "x"], ["collect", "--off"], ["states", "-r", "tiny"]])
def test_a_mistyped_folder_is_refused_and_not_created(folder: Path, words: list[str]) -> None:
    verb, *options = words
    for wrong in (folder.with_name("colected"), folder.parent):
        before = sorted(folder.parent.rglob("*"))
        done = CliRunner().invoke(app, ["draft", verb, str(wrong), *options])
        assert isinstance(done.exception, UsageError) and done.exception.where == str(wrong)
        assert done.exception.what == "no collection is in this folder" and "--share" not in str(done.exception)
        assert sorted(folder.parent.rglob("*")) == before and read_consent(folder).share == 1.0
    right = CliRunner().invoke(app, ["draft", verb, str(folder), *options])
    assert right.exit_code == 0 or "nothing was collected yet" in str(right.exception)
    assert read_consent(folder).share == (0.0 if verb == "collect" else 1.0)


@pytest.mark.parametrize("kind", [NO_KEY, key_name("client"), "../up", ""])
def test_an_import_takes_no_name_of_a_client(folder: Path, kind: str) -> None:
    (source := folder.parent / "rows.jsonl").write_text('{"prompt": [1], "answer": [2]}')
    with pytest.raises(KimiError, match="no name of a kind"):
        read_ids(source, kind)


@pytest.mark.parametrize("line", ['{"prompt": [1], "answer": []}', '{"prompt": [-1], "answer": [2]}', "text", "{}"])
def test_a_wrong_import_names_its_line(folder: Path, line: str) -> None:
    source = folder.parent / "rows.jsonl"
    source.write_text('{"prompt": [1], "answer": [2]}\n' + line)
    with pytest.raises(KimiError, match=r"line 2"):
        read_ids(source, "chat")


def test_a_cut_file_is_named(folder: Path) -> None:
    stored(folder, [([1, 2], [3])])
    (path,) = (folder / REQUESTS / "chat").iterdir()
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(KimiError, match="is cut") as caught:
        read_collected(folder, 100)
    assert caught.value.where == str(path)
