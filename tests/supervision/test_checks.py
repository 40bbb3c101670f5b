"""Fingerprints tell checkpoints apart, and a pinned checkpoint is served alone."""

import json
import shutil
import struct

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_eagle3.supervision.checks import checked, checked_weights, fingerprint, weights_digest
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


def test_the_engine_is_started_with_its_fingerprint():
    launch = render(load_recipe("tiny"))
    weights = fingerprint(tiny.target_path(), tiny.draft_path())
    assert checked(launch).argv[-2:] == ["--weight-version", weights]
    named = launch.with_args(weight_version="abc")
    assert checked(named).args == named.args  # an operator's own version stays


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
