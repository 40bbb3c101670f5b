"""Fingerprints tell checkpoints apart, identities tell replicas apart."""

import json
import shutil
import struct
from types import SimpleNamespace

import httpx
import pytest
from support.small_engines import ARCHITECTURE, SmallEngine

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fleet.checks import checked, checked_weights, fingerprint, renewed, weights_digest
from kimi_w4a8_eagle3.fleet.identity import Identity, ask_identity
from kimi_w4a8_eagle3.fleet.serve import Fleet
from kimi_w4a8_eagle3.ops.replica_state import Phase
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_laptop import tiny


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    header = json.dumps({"w": {"dtype": "U8", "shape": [100000], "data_offsets": [0, 100000]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(100000))
    return folder


def test_a_copy_has_the_same_fingerprint(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(checkpoint)


def test_a_config_a_layout_or_a_block_of_weights_changes_it(checkpoint):
    seen = {fingerprint(checkpoint)}
    (checkpoint / "config.json").write_text('{"a": 2}')
    seen.add(fingerprint(checkpoint))
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-50_000:] = b"\1" * 50_000
    weights.write_bytes(content)
    seen.add(fingerprint(checkpoint))
    weights.rename(checkpoint / "model-00001-of-00001.safetensors")
    seen.add(fingerprint(checkpoint))
    assert len(seen) == 4


def test_the_draft_is_part_of_it():
    target, draft = tiny.target_path(), tiny.draft_path()
    assert len({fingerprint(target), fingerprint(draft), fingerprint(target, draft)}) == 3


def test_an_engine_reports_its_identity():
    with SmallEngine("one", model="kimi", weights="abc") as engine:
        assert ask_identity(engine.url, httpx.Client()) == Identity("kimi", "abc", ARCHITECTURE)


def test_another_program_is_not_an_engine():
    with SmallEngine("one") as engine, pytest.raises(KimiError, match="not an SGLang server"):
        ask_identity(f"{engine.url}/v1/models?", httpx.Client())


def test_the_engine_is_started_with_its_fingerprint():
    launch = render(load_recipe("tiny"))
    weights = fingerprint(tiny.target_path(), tiny.draft_path())
    assert checked(launch).argv[-2:] == ["--weight-version", weights]
    named = launch.with_args(weight_version="abc")
    assert checked(named).args == named.args  # an operator's own version stays


def test_an_error_of_the_engine_is_no_identity():
    """Its body may read like one."""
    info = {"served_model_name": "m", "weight_version": "1", "architectures": ["A"]}
    answers = httpx.MockTransport(lambda request: httpx.Response(503, json=info))
    with httpx.Client(transport=answers) as http, pytest.raises(httpx.HTTPStatusError):
        ask_identity("http://engine", http)


@pytest.mark.parametrize(("part", "built_in"), [("model", tiny.target_path), ("draft", tiny.draft_path)])
def test_a_pinned_checkpoint_is_served_and_no_other(tmp_path, part, built_in):
    assert load_recipe("tiny").model.sha256 == weights_digest(tiny.target_path())
    folder = shutil.copytree(built_in(), tmp_path / part)
    pinned = [f"{part}.sha256={weights_digest(built_in())}", f"{part}.repo={folder}"]
    assert checked_weights(render(load_recipe("tiny"), pinned), preflight=False)
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(KimiError, match=f"the {part} is another one"):
        checked_weights(render(load_recipe("tiny"), pinned), preflight=False)
    assert checked_weights(
        render(load_recipe("tiny"), pinned[1:]), preflight=False
    )  # of another folder nothing is known


def test_a_rolling_restart_serves_the_draft_that_is_there_now_or_restarts_nothing(tmp_path):
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "draft"
    for folder in (first, second):
        shutil.copytree(tiny.draft_path(), folder)
    (second / "note.json").write_text("{}")
    link.symlink_to(first)
    launch = checked(render(load_recipe("tiny"), [f"draft.repo={link}"]))
    said, ended = [], []
    replicas = [
        SimpleNamespace(
            launch=launch, label=str(at), was_ready=True, end=lambda at=at: ended.append(at),
            state=SimpleNamespace(
                ready=True, base_url=str(at), phase=Phase.READY, enter=lambda *_: None, restarts={"rolling": 0}
            ),
        )
        for at in range(2)
    ]  # fmt: skip
    fleet = Fleet("tiny", replicas, lambda *given: said.append(given[2]), None, renewed)
    link.unlink()
    link.symlink_to(second)
    (second / "config.json").write_text("{")
    fleet.rolling_restart()
    assert ended == [] and said[-1].startswith("given up: ") and replicas[0].launch is launch
    shutil.copy(first / "config.json", second)
    fleet.rolling_restart()
    versions = {replica.launch.args["weight-version"] for replica in replicas}
    assert ended == [0, 1] and said[-1] == "done" and versions == {fingerprint(tiny.target_path(), second)}
    assert launch.args["weight-version"] not in versions
