"""Collected requests: only with consent, within the limits, each key by itself, and gone when they are erased."""

from __future__ import annotations

import json
import stat
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import until

from kimi_w4a8_eagle3.base.collection import NO_KEY, REQUESTS, Collector, Consent, key_name, read_consent, write_request
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.draft.collected import Collected, divided, erase, import_ids, limited, read_collected

DAY_MS = 86_400_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "collected"
    made.mkdir(mode=0o700)
    Consent(share=1.0).write(made)
    return made


def names(folder: Path, key: str = NO_KEY) -> list[str]:
    """Request ids of the stored files of a key, oldest first."""
    found = sorted(path.name for path in (folder / REQUESTS / key).glob("[!.]*"))
    return [name.partition("-")[2] for name in found]


def test_a_request_is_stored_as_ids_for_its_owner_alone(folder: Path) -> None:
    collector = Collector(folder)
    collector.put(NO_KEY, "chatcmpl-1", [5, 6, 7], [8, 9])
    collector.put(NO_KEY, "../../etc/passwd", [5], [1, 2], structured=True)
    until(lambda: len(names(folder)) == 2)
    for path in [folder / REQUESTS / NO_KEY, *(folder / REQUESTS / NO_KEY).iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert "etc" not in str(names(folder))
    plain, structured = sorted(read_collected(folder, 100), key=lambda one: one.kind)
    assert (plain.tokens, plain.replies, plain.kind) == ((5, 6, 7, 8, 9), ((3, 5),), NO_KEY)
    assert plain.guessed() == [False] * 4 + [True] and structured.kind == f"{NO_KEY}-structured"


def test_each_key_has_its_own_room_and_old_requests_go(folder: Path) -> None:
    Consent(share=1.0, most_bytes=4000, most_of_key=0.5).write(folder)
    (folder / REQUESTS / "b").mkdir(parents=True)
    (folder / REQUESTS / "b" / f"{int(time.time() * 1000) - 31 * DAY_MS:013d}-old").write_bytes(b"\0" * 400)
    collector = Collector(folder)
    for number in range(20):
        collector.put("a", f"a{number}", range(50), range(50))  # 404 bytes each
    for number in range(3):
        collector.put("b", f"b{number}", range(50), range(50))
    collector.put("c", "huge", range(2000), [1])
    collector.put("b", "last", [1], [2])
    until(lambda: "last" in names(folder, "b"))
    assert names(folder, "a") == ["a16", "a17", "a18", "a19"]  # its newest, in half of the room
    assert names(folder, "b") == ["b0", "b1", "b2", "last"] and names(folder, "c") == []


def test_consent_is_read_again_and_a_spoilt_file_stops_collecting(folder: Path) -> None:
    collector = Collector(folder)
    assert collector.wants(NO_KEY)
    for terms, wanted in (("{}", False), (json.dumps({"keys": [key_name("secret-key")]}), True), ("{cut", False)):
        (folder / "collect.json").write_text(terms)
        collector._read_at = 0.0
        assert collector.wants(key_name("secret-key")) is wanted and not collector.wants(NO_KEY)
    assert "secret" not in key_name("secret-key")


def test_without_consent_or_with_other_readers_nothing_starts(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(KimiError, match="was not switched on"):
        Collector(tmp_path)
    folder.chmod(0o755)
    with pytest.raises(KimiError, match="other users"):
        Collector(folder)


def test_ids_of_another_tokenizer_are_refused(folder: Path) -> None:
    Collector(folder).require_tokenizer("one")
    assert read_consent(folder).tokenizer == "one"
    with pytest.raises(KimiError, match="another tokenizer"):
        Collector(folder).require_tokenizer("other")


def test_a_request_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    (taken := folder / "taken").mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(OSError, match="directory"):
        write_request(taken, b"1234")
    assert sorted(folder.iterdir()) == before


def test_a_full_queue_and_a_full_disk_cost_the_request_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector, calls = Collector(folder), []

    def full(*_: object) -> None:
        calls.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(collector, "_store", full)
    for number in range(3):
        collector.put(NO_KEY, str(number), [1], [2])
    until(lambda: len(calls) == 3)  # the thread goes on after an error
    collector._queue.maxsize = 1
    for number in range(9):
        collector.put(NO_KEY, str(number), [1], [2])  # returns at once


@pytest.mark.parametrize(
    ("keyed", "headers", "key"),
    [
        (False, {"authorization": "Bearer anything"}, NO_KEY),  # without a key a client could name any
        (True, {"authorization": "Bearer client-key"}, key_name("client-key")),
        (True, {"x-api-key": "client-key"}, key_name("client-key")),
    ],
)
def test_the_hook_takes_the_key_that_the_door_has_checked(keyed: bool, headers: dict[str, str], key: str) -> None:
    from kimi_w4a8_eagle3.sglang_plugin import collect_hook

    asked: list[Any] = []
    collector = SimpleNamespace(wants=lambda name: asked.append(name) or True, put=lambda *given: asked.append(given))
    obj = SimpleNamespace(is_single=True, sampling_params={"json_schema": "{}"})
    state = SimpleNamespace(obj=obj, output_ids=[4, 5])
    manager: Any = SimpleNamespace(kimi_collector=collector, kimi_keyed=keyed, rid_to_state={"r": state})
    collect_hook.choose(None, manager, obj, SimpleNamespace(headers=headers))
    collect_hook.keep_prompt(SimpleNamespace(input_ids=[1, 2], mm_inputs=object()), manager, obj)
    assert not hasattr(obj, "kimi_prompt")  # a picture is no ids
    collect_hook.keep_prompt(SimpleNamespace(input_ids=[1, 2], mm_inputs=None), manager, obj)
    for reason in (None, {"type": "abort"}, {"type": "stop"}):
        output: Any = SimpleNamespace(rids=["r"], finished_reasons=[reason], output_ids=[[6]])
        collect_hook.collect(manager, output)
    assert asked == [key, (key, "r", [1, 2], [4, 5, 6], True)]


def stored(folder: Path, rows: list[tuple[list[int], list[int]]], kind: str = "chat") -> None:
    source = folder.parent / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    assert import_ids(source, folder, kind) == len(rows)


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
    for share, most in ((0.5, 60), (0.25, 10), (1.0, 600)):
        kept = limited(made, share)
        found = Counter(one.key for one in kept)
        assert found == {hostile: most, honest: min(40, most), "imported": 20} and most <= share * len(kept)
    alone = [one for one in made if one.key == hostile]
    assert limited(alone, 0.5) == alone  # without others there is no share
    assert limited([*made[-20:], *alone], 0.5) == [*made[-20:], *alone[-20:]]  # the newest
    everybody = [replace(one, kind=NO_KEY) for one in alone]
    assert limited([*everybody, made[-1]], 0.5) == [*everybody, made[-1]]


def test_requests_are_erased_by_id_key_and_with_their_states(folder: Path) -> None:
    stored(folder, [([1, 2], [3]), ([4, 5], [6])])
    stored(folder, [([7], [8])], "other")
    (folder / "states").mkdir()
    for one in read_collected(folder, 100):
        (folder / "states" / f"{one.name}.safetensors").touch()
    assert erase(folder, lambda kind, name: name == "import1") == 1
    assert erase(folder, lambda kind, name: kind == "other") == 1
    left = read_collected(folder, 100)
    assert [one.tokens for one in left] == [(1, 2, 3)]
    assert [path.stem for path in (folder / "states").iterdir()] == [left[0].name]


@pytest.mark.parametrize("kind", [NO_KEY, key_name("client"), "../up", ""])
def test_an_import_takes_no_name_of_a_client(folder: Path, kind: str) -> None:
    (source := folder.parent / "rows.jsonl").write_text('{"prompt": [1], "answer": [2]}')
    with pytest.raises(KimiError, match="no name of a kind"):
        import_ids(source, folder, kind)


@pytest.mark.parametrize("line", ['{"prompt": [1], "answer": []}', '{"prompt": [-1], "answer": [2]}', "text", "{}"])
def test_a_wrong_import_stores_nothing(folder: Path, line: str) -> None:
    source = folder.parent / "rows.jsonl"
    source.write_text('{"prompt": [1], "answer": [2]}\n' + line)
    with pytest.raises(KimiError, match=r"line 2"):
        import_ids(source, folder, "chat")
    with pytest.raises(KimiError, match="nothing was collected"):
        read_collected(folder, 100)


def test_a_cut_file_is_named(folder: Path) -> None:
    stored(folder, [([1, 2], [3])])
    (path,) = (folder / REQUESTS / "chat").iterdir()
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(KimiError, match="is cut") as caught:
        read_collected(folder, 100)
    assert caught.value.where == str(path)
